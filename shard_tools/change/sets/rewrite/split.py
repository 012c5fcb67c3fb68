"""Divide the samples of a set among several new sets: the command ``split``."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from shard_tools.change.sets.bad_list import load_bad_list
from shard_tools.change.sets.open_set import OpenSet, open_set
from shard_tools.change.sets.rewrite.meaning import Retold
from shard_tools.change.sets.rewrite.selection import select
from shard_tools.change.sets.rewrite.shard_source import ShardSource
from shard_tools.make.convert.base.records import RUN_RECORDS, Record, ShardOptions, runs_of
from shard_tools.make.convert.elsewhere import ShardTarget
from shard_tools.make.convert.journal import Journal, TargetNotEmptyError, load_journal, save_journal
from shard_tools.make.convert.pack import Destination, Lift, refuse_overlap, refuse_writers, warn_of_nesting, write_run
from shard_tools.make.tokens.documents import Share, parse_shares
from shard_tools.make.write.mark import TargetMark, digest_of_work
from shard_tools.make.write.writer import UnmarkedWriter
from shard_tools.running.progress import NoProgress, Progress
from shard_tools.running.report import Report
from streaming.errors import ConfigError, DataError
from streaming.shards.catalog.build import read_chunks
from streaming.shards.index.layout import UNFINISHED_FILE, WRITERS_DIRECTORY
from streaming.shards.index.where import unknown_column
from streaming.shards.schema.joined import Classes
from streaming.storage import Storage, join_url, redact

_WINDOW_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitOptions(ShardOptions):
    """Options of the new sets, in addition to ``ShardOptions``.

    Attributes:
        split: Sets with their shares, such as ``("val=0.5%",)``; the rest goes into ``train``.
        group_field: Column, also a late one; samples of equal value go into the same set. None: split by key.
        classes: ``"union"``: match the classes of several sets by name, and renumber them.
        allow_unfinished: Accept an unfinished source, and take the samples that are there.
    """

    split: tuple[str, ...]
    group_field: str | None = None
    classes: Classes = None
    allow_unfinished: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPart(Report):
    """One of the new sets.

    Attributes:
        name: Its name: ``train``, ``val``, …
        target: Its location.
        num_samples: Number of its samples.
        num_shards: Number of its shards.
        num_bytes: Total size of these shards.
    """

    name: str
    target: str
    num_samples: int
    num_shards: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitReport(Report):
    """The result of splitting.

    Attributes:
        sets: The new sets.
        num_source: Number of samples of the source.
        was_complete: Whether an earlier run had written everything, so that this one wrote nothing.
        seconds: Wall time of this run.
    """

    sets: tuple[SplitPart, ...]
    num_source: int
    was_complete: bool
    seconds: float


@dataclass(slots=True, kw_only=True)
class _Part:
    """One of the new sets.

    Attributes:
        share: Its share of the samples.
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
        cls, share: Share, place: Destination, reader: ShardSource, identity: Mapping[str, object],
        sources: Sequence[str], storage: Storage,
    ) -> _Part:  # fmt: skip
        """Return the set of a share."""
        told = {**identity, "share": [share.name, share.start, share.stop], "pattern": place.name}
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

    @property
    def num_samples(self) -> int:
        """Number of the samples that this run has written."""
        return 0 if self.writer is None else self.writer.num_samples

    def refuse_empty(self) -> None:
        """Refuse a share without samples.

        Raises:
            DataError: No sample is in it.
        """
        if not self.num_samples:
            raise DataError(
                f"{redact(self.place.directory)}: no sample is in its share; give it a larger one, or another group"
            )

    def finish(self) -> None:
        """Complete the set."""
        whole = replace(self.journal, complete=True, num_samples=self.num_samples)
        save_journal(self.place.directory, whole, self.storage)
        self.mark.finish()


def _is_mark(url: str) -> bool:
    return url.endswith(f"/{UNFINISHED_FILE}") or f"/{WRITERS_DIRECTORY}/" in url


def split(
    source: str | Sequence[str],
    target: str,
    *,
    options: SplitOptions,
    storage_options: Mapping[str, object] | None = None,
    progress: Progress | None = None,
) -> SplitReport:
    """Write each sample of ``source`` into one of several sets below ``target``, in one pass over the source.

    The set of a sample depends only on the hash of its key, or of its value in a column, not on a seed or on other
    samples. So samples keep their set when the source grows, and all samples of a group are in one set. Fields and
    columns are copied unchanged, and every byte read is compared with the index. An interrupted run starts over.

    Args:
        source: Indexed shards, as for ``StreamingDataset``; several sources are read in this order.
        target: Folder or prefix; each set gets a folder of its name in it.
        options: The options.
        storage_options: Options of both stores.
        progress: Receives the samples and bytes written.

    Raises:
        TargetNotEmptyError: One of the targets holds other files.
        ConfigError: Options do not fit the source.
        DataError: A sample is damaged or has no value in the group's column, or a set gets no sample.
        IndexMissingError: There is no index, and the set is too large to scan for this.
        StorageError: A store failed.
    """
    begun_s = time.monotonic()
    storage, progress = Storage(storage_options), progress or NoProgress()
    shares = parse_shares(options.split)
    if len(shares) < 2:
        raise ConfigError("--split: name at least one set with its share, such as val=1%")
    sources = [source] if isinstance(source, str) else list(source)
    place = Destination.of(target)
    for one in sources:
        refuse_overlap(one, place)
        warn_of_nesting(one, place)
    shards = open_set(
        sources, storage, None, exclude=place.directory, duplicate_keys="error",
        allow_unfinished=options.allow_unfinished, meets=False,
    )  # fmt: skip
    retold = Retold.of(shards, storage, classes=options.classes, fields=None)
    late = shards.late_columns(storage, [options.group_field] if options.group_field else [])
    taken = select(
        shards, storage, kept=None, late=[*late.values()], drop=load_bad_list((), storage), needed=(), fields=None,
        with_keys=False, progress=NoProgress(),
    )  # fmt: skip
    if options.group_field is not None and options.group_field not in {*taken.columns, *late}:
        raise unknown_column(options.group_field, {*taken.columns, *late}, "--group-field")
    reader = ShardSource(
        taken, None, storage, fingerprint=shards.chunks.fingerprint, fields=None, window_bytes=_WINDOW_BYTES,
        num_threads=options.workers, changes=retold.of_shard if retold.by_home else None,
    )  # fmt: skip
    versions = {name: column.version for name, column in late.items()}
    identity = {**options.identity(), **retold.identity(), "group_field": options.group_field, "late": versions}
    parts = [
        _Part.of(share, Destination.of(join_url(target, share.name)), reader, identity, sources, storage)
        for share in shares
    ]
    complete = [part.looks_complete(overwrite=options.overwrite) for part in parts]
    if all(complete):
        return _report(parts, storage, shards, begun_s, was_complete=True)
    for part in parts:
        part.begin()
    schema = retold.schema(taken.columns)
    with contextlib.ExitStack() as stack:
        for part in parts:
            pattern = ShardTarget(
                pattern=part.place.pattern, options=options, columns={name: Lift(name) for name in taken.columns},
                storage_options=storage_options, schema=schema,
            )  # fmt: skip
            part.writer = stack.enter_context(pattern.writer(0))
        _deal(reader, parts, options.group_field, progress)
    for part in parts:  # before any of them can be read
        part.refuse_empty()
    for part in parts:
        part.finish()
    return _report(parts, storage, shards, begun_s, was_complete=False)


def _deal(reader: ShardSource, parts: Sequence[_Part], group_field: str | None, progress: Progress) -> None:
    """Add each sample to the set of its share.

    Raises:
        DataError: A sample has no value in the group's column.
    """
    progress.start(total_bytes=reader.num_bytes, total=reader.num_records)
    with contextlib.closing(reader.records(0)) as records:
        for run in runs_of(records):
            for record in run:
                value = record.key if group_field is None else record.metadata.get(group_field)
                if value is None:
                    raise DataError(
                        f"{record.where}: sample {record.key!r} has no value in {group_field!r}, so it belongs to no "
                        "group; leave such samples out with reshard --where, or choose another column"
                    )
                place = int.from_bytes(hashlib.blake2b(json.dumps(value).encode(), digest_size=8).digest(), "little")
                next(part for part in parts if part.share.start <= place < part.share.stop).add(record)
            num_bytes = sum(len(one) for record in run for one in record.fields.values())
            progress.advance(num_bytes=num_bytes, num=len(run))
    for part in parts:
        part.flush()


def _report(
    parts: Sequence[_Part], storage: Storage, shards: OpenSet, begun_s: float, *, was_complete: bool
) -> SplitReport:  # fmt: skip
    found = []
    for part in parts:
        table = read_chunks(storage, part.place.directory)
        found.append(
            SplitPart(
                name=part.share.name,
                target=redact(part.place.directory),
                num_samples=table.total_samples,
                num_shards=len(table.shards),
                num_bytes=sum(shard.size_bytes for shard in table.shards),
            )
        )
    return SplitReport(
        sets=tuple(found),
        num_source=shards.chunks.total_samples,
        was_complete=was_complete,
        seconds=time.monotonic() - begun_s,
    )
