"""Write indexed shards into new ones: split, merged, shuffled, sorted, or without some samples."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field

import click

from shard_tools.change.sets.bad_list import BadList, load_bad_list
from shard_tools.change.sets.late import Takes
from shard_tools.change.sets.open_set import OpenSet, open_set
from shard_tools.change.sets.rewrite.field_changes import ChangedSource, FieldChanges
from shard_tools.change.sets.rewrite.meaning import Retold
from shard_tools.change.sets.rewrite.selection import Deduplicated, Taken, deduplicated, select, sorted_order
from shard_tools.change.sets.rewrite.shard_source import ShardSource
from shard_tools.make.convert.base.records import ShardOptions, permutation
from shard_tools.make.convert.journal import whole_journal
from shard_tools.make.convert.pack import Destination, pack, refuse_overlap, warn_of_nesting
from shard_tools.running.engine import DEFAULT_MEMORY
from shard_tools.running.printing import show_earlier
from shard_tools.running.progress import NoProgress, Progress
from shard_tools.running.report import Report
from streaming.common.arguments import counted, format_bytes, parse_bytes
from streaming.errors import ConfigError, DataError, DuplicateKeyError, IndexFormatError
from streaming.sets.filters.late_columns import LateColumn
from streaming.sets.filters.select import late_names
from streaming.shards.index.columns import KEY
from streaming.shards.index.where import unknown_column
from streaming.shards.schema.joined import Classes
from streaming.storage import Storage, redact
from streaming.types import DuplicateKeys, Int64Array

_PLACE = re.compile(r"\{[^}]*\}?")
_DUPLICATES_CURE = (
    "Give --dedupe for one sample a key (fields are joined, the first of each stays), or --key-prefix with {shard} or "
    "{number} in it to keep them all"
)
_SEQUENTIAL_WINDOW_BYTES = 64 << 20  # eight requests of 8 MiB, one per thread


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardOptions(ShardOptions):
    """Options of the new shards, in addition to ``ShardOptions``.

    Attributes:
        sort: Column, also a late one, or ``__key__``, to sort by.
        descending: Sort in descending order.
        where: Condition on columns, as ``StreamingDataset`` takes it.
        view: Name of a saved view whose samples are kept.
        exclude: A file of keys, one per line, whose samples are left out.
        columns: Late columns to include in the new sample tables, in addition to the old tables' columns.
        fields: Keep only these fields; None: all.
        changes: Rename, leave out and add fields.
        drop_missing: Leave out samples that lack one of these fields.
        dedupe: Merge samples with the same key; if a field occurs twice, keep the first.
        key_prefix: Prefix of every key; ``{shard}`` in it is the shard's name without its suffix, ``{number}`` the
        sample's number in the source.
        drop: Files that list samples to leave out.
        index_url: Location of the source's index, if not beside its shards.
        memory_bytes: Memory for samples in transit when the order changes.
        allow_unfinished: Accept an unfinished source, and take the samples that are there.
        classes: ``"union"``: match the classes of several sets by name, and renumber them.
    """

    sort: str | None = None
    descending: bool = False
    where: str | None = None
    view: str | None = None
    exclude: str | None = None
    columns: tuple[str, ...] = ()
    drop_missing: tuple[str, ...] = ()
    fields: tuple[str, ...] | None = None
    changes: FieldChanges = field(default_factory=FieldChanges)
    dedupe: bool = False
    key_prefix: str = ""
    drop: tuple[str, ...] = ()
    index_url: str | None = None
    memory_bytes: int = parse_bytes(DEFAULT_MEMORY)
    allow_unfinished: bool = False
    classes: Classes = None

    def __post_init__(self) -> None:
        if self.sort is not None and self.shuffle_seed is not None:
            raise ConfigError("--sort and --shuffle cannot be combined; give one of them")
        if self.descending and self.sort is None:
            raise ConfigError("--descending needs --sort; name a column")
        if self.fields is not None and not self.fields:
            raise ConfigError("--fields: name at least one field")
        if self.drop_missing and self.dedupe:
            raise ConfigError(
                "--drop-missing and --dedupe cannot be combined: a sample may be joined from parts that lack a field; "
                "reshard with --dedupe first"
            )
        unknown = set(_PLACE.findall(self.key_prefix)) - {"{shard}", "{number}"}
        if unknown:
            raise ConfigError(
                f"--key-prefix: {min(unknown)} is not known; it is text with {{shard}} or {{number}} in it, or neither"
            )

    def identity(self) -> dict[str, object]:
        """Return the facts that determine the bytes of the result, except the selection of samples."""
        more = {"dedupe": True} if self.dedupe else {}
        return {
            **more,
            **({"key_prefix": self.key_prefix} if self.key_prefix else {}),
            **self.changes.identity(),
            **ShardOptions.identity(self),
            **({"columns": sorted(self.columns)} if self.columns else {}),
            "sort": self.sort,
            "descending": self.descending,
            "where": self.where,
            "fields": None if self.fields is None else sorted(self.fields),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardReport(Report):
    """The result of resharding.

    Attributes:
        target: Location of the new shards.
        num_source: Number of samples of the source.
        num_dropped: Samples left out because they are in the list.
        num_filtered: Samples left out because they do not match the condition or the view.
        num_lacking: Samples left out because they lack a field.
        num_duplicates: Samples left out by ``dedupe``, because earlier samples of the same key have all their fields.
        num_joined: Samples merged by ``dedupe`` into the first one of their key.
        num_not_found: Records of the list that match no sample of the source.
        num_unreadable: Lines of the list that are not records.
        num_samples: Samples written, by this run and earlier ones.
        num_resumed_samples: Samples that an earlier run had written.
        was_complete: Whether an earlier run had written everything, so that this one wrote nothing.
        num_shards: Number of new shards.
        num_bytes: Total size of the new shards.
        seconds: Wall time of this run.
    """

    target: str
    num_source: int
    num_dropped: int
    num_filtered: int
    num_lacking: int
    num_duplicates: int
    num_joined: int
    num_not_found: int
    num_unreadable: int
    num_samples: int
    num_resumed_samples: int
    was_complete: bool
    num_shards: int
    num_bytes: int
    seconds: float


def reshard(
    source: str | Sequence[str],
    target: str,
    *,
    options: ReshardOptions | None = None,
    storage_options: Mapping[str, object] | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> ReshardReport:
    """Write the samples of ``source`` into shards ``000000.tar``, … in ``target``, with their index.

    The bytes of every field are copied unchanged, and so are the columns of the sample tables. Every byte read is
    checked against the index. Deterministic and resumable, like :func:`shard_tools.make.convert.convert`.

    Args:
        source: Shards, as for ``StreamingDataset``; several sources are read in this order.
        target: Folder or prefix for the new shards, or a pattern such as ``"out/train-{:06d}.tar"``.
        options: Options of the new shards.
        storage_options: Options of both stores.
        executor: Executor on which to read and write, such as a cluster with access to both stores: many shards in
        parallel, with the same bytes. The samples of each shard are determined on this machine, from the index.
        progress: Receives the samples and bytes written.

    Raises:
        TargetNotEmptyError: The target holds shards of other work.
        ConfigError: Options do not fit the source.
        DataError: A sample is damaged and not in the list, or no sample is left.
        IndexMissingError: There is no index, and the set is too large to scan for this.
        StorageError: A store failed.
    """
    started = time.monotonic()
    options = options or ReshardOptions()
    storage = Storage(storage_options)
    place = Destination.of(target)
    sources = [source] if isinstance(source, str) else list(source)
    for one in sources:
        refuse_overlap(one, place)
        warn_of_nesting(one, place)
    source = " ".join(sources)
    drop = load_bad_list(options.drop, storage)
    shards = _opened(sources, place, options, storage)
    taken = {*options.columns, *(column for _, column in options.changes.add)}
    takes = Takes(columns=taken)
    retold = Retold.of(shards, storage, classes=options.classes, fields=options.fields, takes=takes)
    late = shards.late_columns(storage, {*taken, *filter(None, [options.sort])})
    selection = _selected(shards, options, drop, list(late.values()), storage)
    _check(selection, options, source, {*late, *late_names(storage, shards.as_opened)})
    known = _known_fields(shards, options, storage)
    _check_unlike(retold, shards, options, storage, foreseen=executor is not None)
    samples, dedupe = _reader(selection, options, storage, shards.chunks.fingerprint, known, retold)
    reader = ChangedSource(samples, options.changes) if options.changes else samples
    versions = {name: column.version for name, column in sorted(late.items())}
    columns = tuple(dict.fromkeys((*selection.columns, *options.columns)))
    try:
        packed = pack(
            reader, place, options, command=("reshard", source),
            identity=options.identity() | ({"late": versions} if versions else {}) | retold.identity(),
            columns=columns, storage_options=storage_options, schema=retold.schema(columns, options.changes),
            executor=executor, progress=progress or NoProgress(),
        )  # fmt: skip
    except DuplicateKeyError as error:
        error.add_note(f"To rewrite the shards written so far give --overwrite. {_DUPLICATES_CURE}")
        raise
    return ReshardReport(
        target=place.directory,
        num_source=selection.num_source,
        num_dropped=selection.num_dropped,
        num_filtered=selection.num_filtered,
        num_lacking=selection.num_lacking,
        num_duplicates=0 if dedupe is None else dedupe.num_duplicates,
        num_joined=0 if dedupe is None else dedupe.num_joined,
        num_not_found=len(selection.not_found),
        num_unreadable=drop.num_unreadable,
        num_samples=packed.num_samples,
        num_resumed_samples=packed.num_resumed_samples,
        was_complete=packed.was_complete,
        num_shards=packed.num_shards,
        num_bytes=packed.num_bytes,
        seconds=time.monotonic() - started,
    )


def _opened(sources: Sequence[str], place: Destination, options: ReshardOptions, storage: Storage) -> OpenSet:
    twice: DuplicateKeys = "keep" if options.dedupe or options.key_prefix else "error"
    return open_set(
        sources, storage, options.index_url, exclude=place.directory, duplicate_keys=twice,
        allow_unfinished=options.allow_unfinished, meets=False,
    )  # fmt: skip


def _selected(
    shards: OpenSet, options: ReshardOptions, drop: BadList, late: Sequence[LateColumn], storage: Storage
) -> Taken:
    return select(
        shards,
        storage,
        kept=shards.kept(storage, where=options.where, view=options.view, exclude=options.exclude),
        late=late,
        drop=drop,
        needed=options.drop_missing,
        fields=None if options.dedupe else options.fields,  # one part of a sample may have a field that another lacks
        with_keys=options.dedupe or options.sort == KEY,
        progress=NoProgress(),
    )


def _known_fields(shards: OpenSet, options: ReshardOptions, storage: Storage) -> dict[str, bool] | None:
    """Return the fields of the new samples, if a conversion wrote the source."""
    journal = None
    with suppress(IndexFormatError):  # `verify` of the source reports it
        for home in shards.homes[:1] if len(shards.homes) == 1 else ():
            journal = whole_journal(home, storage, shards.chunks.total_samples)
    if journal is None or journal.fields is None:
        return None
    kept = {name: always for name, always in journal.fields.items() if options.fields is None or name in options.fields}
    return {name: always or name in options.drop_missing for name, always in kept.items()}


def _reader(
    selection: Taken,
    options: ReshardOptions,
    storage: Storage,
    fingerprint: str,
    known_fields: Mapping[str, bool] | None,
    retold: Retold,
) -> tuple[ShardSource, Deduplicated | None]:
    """Return a source of the samples in the new order; an unchanged order needs no large window."""
    order = _order(selection, options)
    dedupe = deduplicated(selection, order) if options.dedupe else None
    in_order = order is None and (dedupe is None or not dedupe.num_joined)
    reader = ShardSource(
        selection,
        order if dedupe is None else dedupe.order,
        storage,
        firsts=None if dedupe is None else dedupe.firsts,
        key_prefix=options.key_prefix,
        fingerprint=fingerprint,
        known_fields=known_fields,
        fields=options.fields,
        window_bytes=_SEQUENTIAL_WINDOW_BYTES if in_order else max(1, options.memory_bytes // 2),
        num_threads=options.workers,
        changes=retold.of_shard if retold.by_home else None,
    )
    return reader, dedupe


def _check_unlike(
    retold: Retold, shards: OpenSet, options: ReshardOptions, storage: Storage, *, foreseen: bool
) -> None:  # fmt: skip
    """Refuse options that would use the stored numbers if these are rewritten.

    Args:
        retold: The common schema and the changes of each set.
        shards: The sets.
        options: The options.
        storage: The store.
        foreseen: Whether the sizes of fields must be known before samples are read.

    Raises:
        ConfigError: There is such an option.
    """
    retold.check_selected(shards, storage, where=options.where, view=options.view)
    if options.sort in retold.meaning.unlike:
        raise ConfigError(f"--sort {options.sort}: its numbers are rewritten; to sort, reshard the result once more")
    if foreseen and not retold.are_foreseen:
        raise ConfigError(
            "--engine: numbers of classes within json change its size, which other processes must know before it is "
            "read; use --engine local"
        )


def _check(selection: Taken, options: ReshardOptions, source: str, late: Collection[str]) -> None:
    for option, fields in (("--fields", options.fields or ()), ("--drop-missing", options.drop_missing)):
        for name in sorted({*fields} - {*selection.fields}):
            there = ", ".join(selection.fields)
            raise ConfigError(f"{option}: no sample of {redact(source)} has a field {name!r}; there are: {there}")
    columns = {*selection.columns, *late, KEY}
    kept = [name for name in selection.fields if options.fields is None or name in options.fields]
    options.changes.check(kept, sorted(columns - {KEY}))
    for option, asked in (("--sort", {options.sort or KEY}), ("--columns", {*options.columns})):
        for name in sorted(asked - columns):
            raise unknown_column(name, columns, option)
    if selection.num_bare:
        raise ConfigError(
            f"--fields: {counted(selection.num_bare, 'sample')} without any of the fields "
            f"{', '.join(options.fields or ())}, first {selection.first_bare!r}; --drop-missing leaves samples "
            "out that lack a field"
        )
    if not selection.num_samples:
        raise DataError(
            f"{redact(source)}: no sample is left: {selection.num_source} in all, {selection.num_dropped} on the list "
            f"of --drop, {selection.num_filtered} that --where, --view or --exclude leaves out, "
            f"{selection.num_lacking} that lack a field of --drop-missing"
        )


def _order(selection: Taken, options: ReshardOptions) -> Int64Array | None:
    if options.shuffle_seed is not None:
        return permutation(selection.num_samples, options.shuffle_seed)
    if options.sort is not None:
        return sorted_order(selection, options.sort, descending=options.descending)
    return None


def show_reshard(report: ReshardReport) -> None:
    """Print the result of resharding."""
    show_earlier(report.num_resumed_samples, was_complete=report.was_complete)
    if report.num_not_found or report.num_unreadable:
        click.echo(
            f"list of --drop: without a sample in the source: {counted(report.num_not_found, 'record')}, cut off or "
            f"no record: {counted(report.num_unreadable, 'line')}",
            err=True,
        )
    lacking = f", {report.num_lacking:,} without a field of --drop-missing" if report.num_lacking else ""
    joined = ""
    if report.num_joined or report.num_duplicates:
        joined = (
            f", {report.num_joined:,} joined to another of their key, "
            f"{report.num_duplicates:,} left out: all their fields came before (contents were not compared)"
        )
    click.echo(
        f"{counted(report.num_source, 'sample')} in the source, {report.num_dropped:,} dropped, "
        f"{report.num_filtered:,} filtered out{lacking}{joined}\n"
        f"{report.target}: {counted(report.num_samples, 'sample')} in {counted(report.num_shards, 'shard')}, "
        f"{format_bytes(report.num_bytes)}, in {report.seconds:.1f} s"
    )
