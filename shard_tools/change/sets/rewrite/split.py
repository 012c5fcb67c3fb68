"""Divide the samples of a set among several new sets: the command ``split``.

The index alone decides: which set each sample goes into is known before anything is written, and samples that go into
none are not read.
"""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import combinations

import numpy as np

from shard_tools.change.sets.bad_list import load_bad_list
from shard_tools.change.sets.late import Takes
from shard_tools.change.sets.open_set import OpenSet, open_set
from shard_tools.change.sets.rewrite.meaning import Retold
from shard_tools.change.sets.rewrite.selection import ShardPart, Taken, select
from shard_tools.change.sets.rewrite.shard_source import ShardSource
from shard_tools.make.convert.base.records import RUN_RECORDS, Record, ShardOptions, runs_of
from shard_tools.make.convert.elsewhere import ShardTarget
from shard_tools.make.convert.journal import Journal, TargetNotEmptyError, load_journal, save_journal
from shard_tools.make.convert.pack import Destination, Lift, lies_below, refuse_overlap, refuse_writers, write_run
from shard_tools.make.tokens.documents import Share, dump, laid_out, place_of
from shard_tools.make.write.mark import TargetMark, digest_of_work
from shard_tools.make.write.writer import UnmarkedWriter
from shard_tools.running.progress import NoProgress, Progress
from shard_tools.running.report import Report
from streaming.common.arguments import checked_seed
from streaming.errors import ConfigError, DataError
from streaming.shards.catalog.build import read_chunks
from streaming.shards.index.layout import UNFINISHED_FILE, WRITERS_DIRECTORY
from streaming.shards.index.where import unknown_column
from streaming.shards.schema.joined import Classes
from streaming.shards.versions.history import refuse_tags
from streaming.storage import Storage, redact
from streaming.types import Int64Array

_WINDOW_BYTES = 64 << 20
_TAKES = Takes(
    keep_columns=lambda names: f"to keep their values: shard_tools reshard SOURCE NEW --columns {names}; then split NEW"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitOptions(ShardOptions):
    """Options of the new sets, in addition to ``ShardOptions``.

    Attributes:
        group_field: Column, also a late one; samples of equal value go into the same set. None: split by key.
        seed: Another seed divides the samples in another way.
        classes: ``"union"``: match the classes of several sets by name, and renumber them.
        allow_unfinished: Accept an unfinished source, and take the samples that are there.
    """

    group_field: str | None = None
    seed: int = 0
    classes: Classes = None
    allow_unfinished: bool = False

    def __post_init__(self) -> None:
        checked_seed("--seed", self.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPart(Report):
    """One of the new sets.

    Attributes:
        target: Its location.
        share: Its share of the samples, such as ``"0.5%"``.
        num_samples: Number of its samples.
        num_shards: Number of its shards; 0 in a dry run.
        num_bytes: Total size of these shards; in a dry run, of the samples.
    """

    target: str
    share: str
    num_samples: int
    num_shards: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitReport(Report):
    """The result of splitting.

    Attributes:
        sets: The new sets.
        num_source: Number of samples of the source.
        num_left_out: Number of samples in none of the new sets, since their shares do not add up to 100 %.
        was_complete: Whether an earlier run had written everything, so that this one wrote nothing.
        dry_run: Whether nothing was written.
        seconds: Wall time of this run.
    """

    sets: tuple[SplitPart, ...]
    num_source: int
    num_left_out: int
    was_complete: bool
    dry_run: bool
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Division:
    """The samples of a set, divided.

    Attributes:
        taken: The samples that go into one of the new sets, in the order of the source.
        numbers: int64 ``[n]``, number of the set that each of them goes into.
        counts: Number of samples of each new set.
        sizes: Total bytes of the samples of each new set.
    """

    taken: Taken
    numbers: Int64Array
    counts: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, taken: Taken, shares: Sequence[Share], options: SplitOptions, retold: Retold) -> Division:
        """Divide samples by the hashes of their keys, or of their values in the group's column.

        Raises:
            DataError: A sample has no value in that column, or a set gets no sample.
        """
        stops, of_group = [share.stop for share in shares], dict[bytes, int]()

        def number_of(hashed: bytes) -> int:
            found = of_group.get(hashed)
            if found is None:
                found = bisect_right(stops, place_of(hashed, options.seed))
                if options.group_field is not None:
                    of_group[hashed] = found
            return found

        parts, numbers = list[ShardPart](), [np.empty(0, np.int64)]
        counts, sizes = np.zeros(len(shares), np.int64), np.zeros(len(shares), np.int64)
        for part in taken.parts:
            found = np.array([number_of(one) for one in _hashed(part, options.group_field, retold)], np.int64)
            stays = np.flatnonzero(found < len(shares))
            if stays.size:
                parts.append(part if stays.size == found.size else part.taken(stays))
                numbers.append(found[stays])
                np.add.at(counts, found[stays], 1)
                np.add.at(sizes, found[stays], part.sizes[stays])
        for share, count in zip(shares, counts.tolist(), strict=True):
            if not count:
                raise DataError(
                    f"{redact(share.name)}: none of {taken.num_source:,} samples is in its share; give it a larger "
                    "one, another --seed, or another --group-field"
                )
        return cls(
            taken=replace(taken, parts=tuple(parts)), numbers=np.concatenate(numbers), counts=tuple(counts.tolist()),
            sizes=tuple(sizes.tolist()),
        )  # fmt: skip


def _hashed(part: ShardPart, group_field: str | None, retold: Retold) -> list[bytes]:
    """Return what decides about each sample of a shard: its key, or its value in the group's column.

    Raises:
        DataError: A sample has no value in that column.
    """
    if group_field is None:
        return [] if part.keys is None else part.keys.to_pylist()
    column = part.columns.get(group_field)
    values = [None] * part.rows.size if column is None else column.to_pylist()
    values = retold.of_shard(part.pieces.url).of_columns({group_field: values})[group_field]
    if None in values:
        row = int(part.rows[values.index(None)])
        raise DataError(
            f"{redact(part.pieces.url)}: sample {part.samples().keys[row]!r} has no value in {group_field!r}, so it "
            "belongs to no group; leave such samples out with reshard --where, or choose another column"
        )
    # A whole number is the same group in a column of floats, which another set may have.
    return [dump(int(one) if isinstance(one, float) and one.is_integer() else one) for one in values]


@dataclass(slots=True, kw_only=True)
class _Part:
    """One of the new sets.

    Attributes:
        share: Its share of the samples; its name is the target.
        place: Its location.
        mark: Its mark as unfinished.
        journal: The journal of the work.
        storage: The store.
        writer: Its writer, after ``begin``.
        waiting: Samples to be written together.
    """

    share: Share
    place: Destination
    mark: TargetMark
    journal: Journal
    storage: Storage
    writer: UnmarkedWriter | None = None
    waiting: list[Record] = field(default_factory=list)

    @classmethod
    def of(
        cls, share: Share, reader: ShardSource, identity: Mapping[str, object], sources: Sequence[str], storage: Storage
    ) -> _Part:  # fmt: skip
        """Return the set of a share."""
        place = Destination.of(share.name)
        told = {**identity, "share": [share.start, share.stop], "pattern": place.name}
        mark = TargetMark(
            storage, [place.directory], command="split", work=digest_of_work("split", reader.identity(), told),
            what=" ".join(map(redact, sources)),
        )  # fmt: skip
        journal = Journal(source=reader.identity(), options=told)
        return cls(share=share, place=place, mark=mark, journal=journal, storage=storage)

    def looks_complete(self, *, overwrite: bool) -> bool:
        """Return whether an earlier run has written all of it.

        Raises:
            TargetNotEmptyError: The target holds other files, and ``overwrite`` is False.
        """
        directory = self.place.directory
        there = [info.url for info in self.storage.list(directory)]
        if overwrite:
            refuse_tags(self.storage, directory)
        if not there or overwrite:
            return False
        refuse_writers(self.mark.others(), directory, "or start over with --overwrite")
        if all(map(_is_mark, there)):  # an earlier run was killed right after it had marked the target
            return False
        found = load_journal(directory, self.storage)
        if found is None or not found.same_work(self.journal):
            raise TargetNotEmptyError(
                f"{redact(directory)} holds other files than those of this command; give another target, or start "
                "over with --overwrite"
            )
        return found.complete and not self.mark.is_set()

    def begin(self) -> None:
        """Mark the target as unfinished, delete its contents, and write the journal."""
        there = [info.url for info in self.storage.list(self.place.directory)]
        self.mark.begin(lambda _: True)
        for url in sorted(there, key=lambda url: url.endswith("/convert.json")):
            if not _is_mark(url):
                self.storage.delete(url)
        save_journal(self.place.directory, self.journal, self.storage)

    def add(self, record: Record) -> None:
        """Queue a sample to be written."""
        self.waiting.append(record)
        if len(self.waiting) >= RUN_RECORDS:
            self.flush()

    def flush(self) -> None:
        """Write the queued samples."""
        if self.writer is not None and self.waiting:
            write_run(self.writer, self.waiting, iter(()), ())
            self.waiting = []

    def finish(self) -> None:
        """Complete the set."""
        num_samples = 0 if self.writer is None else self.writer.num_samples
        save_journal(self.place.directory, replace(self.journal, complete=True, num_samples=num_samples), self.storage)
        self.mark.finish()


def _is_mark(url: str) -> bool:
    return url.endswith(f"/{UNFINISHED_FILE}") or f"/{WRITERS_DIRECTORY}/" in url


def split(
    source: str | Sequence[str],
    targets: Mapping[str, Fraction],
    *,
    options: SplitOptions | None = None,
    dry_run: bool = False,
    storage_options: Mapping[str, object] | None = None,
    progress: Progress | None = None,
) -> SplitReport:
    """Write each sample of ``source`` into at most one of several new sets, in one pass over the source.

    The set of a sample depends only on the seed, on the shares, and on the hash of its key, or of its value in a
    column; not on other samples. So samples keep their set when the source grows, and all samples of a group are in
    one set. Fields and columns are copied unchanged, and every byte read is compared with the index. An interrupted
    run starts over.

    Args:
        source: Indexed shards, as for ``StreamingDataset``; several sources are read in this order.
        targets: The share of each new set, by its folder or prefix, or by a pattern such as ``"val/{:06d}.tar"``. If
            they add up to less than 1, the other samples are left out.
        options: The options.
        dry_run: Only report what would be written.
        storage_options: Options of all stores.
        progress: Receives the samples and bytes written.

    Raises:
        TargetNotEmptyError: One of the targets holds other files.
        ConfigError: Options do not fit the source, or shares or places of the targets do not fit each other.
        DataError: A sample is damaged or has no value in the group's column, or a set gets no sample.
        IndexMissingError: There is no index, and the set is too large to scan for this.
        StorageError: A store failed.
    """
    begun_s = time.monotonic()
    options, storage = options or SplitOptions(), Storage(storage_options)
    sources = [source] if isinstance(source, str) else list(source)
    _refuse_places(sources, targets)
    shards = open_set(
        sources, storage, None, duplicate_keys="error", allow_unfinished=options.allow_unfinished, meets=False
    )
    retold = Retold.of(shards, storage, classes=options.classes, fields=None, takes=_TAKES)
    taken, late = _taken(shards, options.group_field, storage)
    shares = laid_out(targets)
    divided = Division.of(taken, shares, options, retold)
    reader = ShardSource(
        divided.taken, None, storage, fingerprint=shards.chunks.fingerprint, fields=None, window_bytes=_WINDOW_BYTES,
        num_threads=options.workers, changes=retold.of_shard if retold.by_home else None,
    )  # fmt: skip
    identity = {**options.identity(), **retold.identity(), "group_field": options.group_field, "late": late,
                "seed": options.seed}  # fmt: skip
    parts = [_Part.of(share, reader, identity, sources, storage) for share in shares]
    complete = [part.looks_complete(overwrite=options.overwrite) for part in parts]  # or refuses, each of them
    was_complete = all(complete)
    if not was_complete and not dry_run:
        _write(parts, reader, divided, options, retold, storage_options, progress or NoProgress())
    sets = _planned(targets, divided) if dry_run else tuple(_written(part, targets[part.share.name]) for part in parts)
    return SplitReport(
        sets=sets, num_source=taken.num_source, num_left_out=taken.num_source - sum(divided.counts),
        was_complete=was_complete, dry_run=dry_run, seconds=time.monotonic() - begun_s,
    )  # fmt: skip


def _refuse_places(sources: Sequence[str], targets: Mapping[str, Fraction]) -> None:
    """Refuse shares that are too large together, and places whose readers would get samples of another place, too.

    Raises:
        ConfigError: The targets are such ones, or there is none.
    """
    if not targets:
        raise ConfigError("split: name at least one target with its share, such as val/=1%")
    if sum(targets.values()) > 1:
        raise ConfigError(
            f"{', '.join(f'{redact(target)}={_percent(share)}' for target, share in targets.items())}: the shares add "
            f"up to {_percent(sum(targets.values(), Fraction()))}, more than 100%; give smaller ones"
        )
    places = [Destination.of(target) for target in targets]
    for one, other in combinations(places, 2):
        refuse_overlap(one.directory, other, "two targets")
        for inner, outer in ((one, other), (other, one)):
            _refuse_nested(inner, outer.directory)
    for source in sources:
        for place in places:
            refuse_overlap(source, place)
            _refuse_nested(place, source)


def _refuse_nested(place: Destination, outer: str) -> None:
    """Refuse a target inside another place.

    Raises:
        ConfigError: It is.
    """
    if lies_below(place.directory, outer):
        raise ConfigError(
            f"{redact(place.directory)} lies below {redact(outer)}, whose readers would read its samples, too; give "
            "targets beside the source and beside each other"
        )


def _taken(shards: OpenSet, group_field: str | None, storage: Storage) -> tuple[Taken, dict[str, str]]:
    """Return all samples of a set, and the version of the late column that groups them, by its name.

    Raises:
        ConfigError: There is no such column.
    """
    late = shards.late_columns(storage, [group_field] if group_field else [])
    taken = select(
        shards, storage, kept=None, late=[*late.values()], drop=load_bad_list((), storage), needed=(), fields=None,
        with_keys=group_field is None, progress=NoProgress(),
    )  # fmt: skip
    if group_field is not None and group_field not in {*taken.columns, *late}:
        raise unknown_column(group_field, {*taken.columns, *late}, "--group-field")
    return taken, {name: column.version for name, column in late.items()}


def _write(
    parts: Sequence[_Part], reader: ShardSource, divided: Division, options: SplitOptions, retold: Retold,
    storage_options: Mapping[str, object] | None, progress: Progress,
) -> None:  # fmt: skip
    """Write all new sets, and complete them once every sample is written."""
    for part in parts:
        part.begin()
    columns = divided.taken.columns
    with contextlib.ExitStack() as stack:
        for part in parts:
            target = ShardTarget(
                pattern=part.place.pattern, options=options, columns={name: Lift(name) for name in columns},
                storage_options=storage_options, schema=retold.schema(columns),
            )  # fmt: skip
            part.writer = stack.enter_context(target.writer(0))
        _deal(reader, parts, divided.numbers, progress)
    for part in parts:
        part.finish()


def _deal(reader: ShardSource, parts: Sequence[_Part], numbers: Int64Array, progress: Progress) -> None:
    """Add each sample to its set."""
    progress.start(total_bytes=reader.num_bytes, total=reader.num_records)
    done = 0
    with contextlib.closing(reader.records(0)) as records:
        for run in runs_of(records):
            for record, number in zip(run, numbers[done : done + len(run)].tolist(), strict=True):
                parts[number].add(record)
            done += len(run)
            num_bytes = sum(len(one) for record in run for one in record.fields.values())
            progress.advance(num_bytes=num_bytes, num=len(run))
    for part in parts:
        part.flush()


def _planned(targets: Mapping[str, Fraction], divided: Division) -> tuple[SplitPart, ...]:
    """Return the reports of the new sets of a dry run."""
    return tuple(
        SplitPart(
            target=redact(Destination.of(target).directory), share=_percent(share), num_samples=count, num_shards=0,
            num_bytes=size,
        )
        for (target, share), count, size in zip(targets.items(), divided.counts, divided.sizes, strict=True)
    )  # fmt: skip


def _written(part: _Part, share: Fraction) -> SplitPart:
    """Return the report of a new set that is there."""
    table = read_chunks(part.storage, part.place.directory)
    return SplitPart(
        target=redact(part.place.directory), share=_percent(share), num_samples=table.total_samples,
        num_shards=len(table.shards), num_bytes=sum(shard.size_bytes for shard in table.shards),
    )  # fmt: skip


def _percent(share: Fraction) -> str:
    return f"{float(100 * share):.10g}%"
