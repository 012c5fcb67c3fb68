"""Write a source's records through the writer, in one pass that can be interrupted and continued.

The journal in the target identifies the work that the shards there belong to; the index of each finished shard gives
its number of samples. Each record becomes one sample, in a fixed order, so the number of samples in the finished shards
is the number of the record to continue with, and the result is the same bytes as without the interruption.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Self

from shard_tools.convert.base.files import is_local
from shard_tools.convert.base.records import (
    RUN_RECORDS,
    Record,
    Remarks,
    ShardOptions,
    Source,
    Standing,
    later_wrong_names,
    refuse_known,
    runs_of,
)
from shard_tools.convert.base.rows import plain_value
from shard_tools.convert.elsewhere import ShardTarget, write_elsewhere
from shard_tools.convert.journal import NAME, Journal, TargetNotEmptyError, load_journal, save_journal
from shard_tools.running.progress import Progress
from shard_tools.write.above import meet_above, tell_above
from shard_tools.write.keys import WRONG_NAMES, wrong_names
from shard_tools.write.mark import TargetMark, Writers, digest_of_work
from shard_tools.write.writer import UnmarkedWriter
from streaming.arguments import counted
from streaming.catalog.build import read_chunks
from streaming.catalog.urls import is_shard
from streaming.errors import ConfigError, DataError, IndexFormatError, ShardstreamError, first_of
from streaming.index.layout import INDEX_DIRECTORY, UNFINISHED_FILE, WRITERS_DIRECTORY, samples_path
from streaming.index.sample_table import SampleTable
from streaming.schema.value import Schema
from streaming.storage import Storage, join_url, local_path, redact, split_url
from streaming.types import SHARD_SUFFIXES

_SILENT = Schema()
_SHARD_NAME = "{:06d}.tar"
_POSITIONS = 3  # that the journal keeps
_MAPPINGS = (dict, Mapping)  # the usual one first: the other takes longer to tell
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTarget:
    """The content of the target, how many of its samples an earlier run wrote, and what this run remarked on others."""

    num_shards: int
    num_samples: int
    num_bytes: int
    num_resumed_samples: int
    remarks: Mapping[str, int]


def pack(reader: Source, place: Destination, options: ShardOptions, **how: Any) -> PackedTarget:
    """Write all records of ``reader``; continue if an earlier run of the same work was interrupted.

    ``how`` are the other arguments of :class:`PackingRun`, which says what is raised.
    """
    with PackingRun(reader, place, options, **how) as packing:
        return packing.run()


class PackingRun:
    """Write all records of a source into a target, which stays marked as unfinished until everything is there.

    Making one only looks at the target; entering its context begins, so that several targets can be looked at before
    anything is written. If it ends before the first shard, nothing is left.

    Args:
        reader: The records.
        place: Destination of the shards.
        options: The options.
        command: The command, and what the user named as its source: for the mark.
        identity: JSON-serializable; everything that determines the bytes of the result, except the source and the names
            of the shards. Another run continues only if it is equal.
        columns: Metadata of the records to store in the sample table.
        schema: What is known of the meaning of the samples; it is written with the index.
        position: Column of the sample table with the number of each sample's record, if not every record becomes a
            sample; or, if not even that tells, where the source stands, which is noted in the journal after every
            shard. None: sample i is record i.
        restart: How users ask to overwrite, for errors.
        storage_options: Options of the store.
        executor: Where to read and write; None: here, in one pass.
        progress: Receives the samples and bytes written.

    Raises:
        TargetNotEmptyError: The target holds shards of other work.
        ConfigError: The samples contradict a set above the target.
        DataError: A record cannot be read or stored, or there are none.
        StorageError: A store failed.
    """

    def __init__(
        self, reader: Source, place: Destination, options: ShardOptions, *, command: tuple[str, str],
        identity: Mapping[str, object], columns: tuple[str, ...], schema: Schema = _SILENT,
        position: str | Standing | None = None, restart: str = "--overwrite",
        storage_options: Mapping[str, object] | None, executor: Executor | None = None, progress: Progress,
    ) -> None:  # fmt: skip
        self.place, self._progress, self._executor = place, progress, executor
        self._standing, self._restart = None if isinstance(position, str) else position, restart
        self._storage = Storage(storage_options)
        self._journal = Journal(
            source=reader.identity(), options={**identity, "pattern": place.name}, fields=reader.fields
        )
        self._reader = reader
        self._target = ShardTarget(
            pattern=place.pattern, options=options, columns={name: Lift(name) for name in columns},
            storage_options=storage_options, schema=schema,
        )  # fmt: skip
        name, source = command
        self._mark = TargetMark(
            self._storage, [place.directory], command=name, work=digest_of_work("pack"), what=redact(source)
        )
        meet_above(place.directory, schema, self._storage)
        self._there = _contents(place, self._storage)
        if not options.overwrite:
            refuse_writers(self._mark.others(), place.directory, f"or start over with {restart}")
        self._found = self._refuse_others() if self._there and not options.overwrite else None
        earlier = None if self._found is None else _earlier_work(
            place, self._storage, self._found, position=position
        )  # fmt: skip
        self._earlier = earlier or _Earlier()
        self._positions = {} if self._found is None else {**(self._found.positions or {})}

    def _refuse_others(self) -> Journal | None:
        """Return the journal of an earlier run.

        Raises:
            TargetNotEmptyError: The target holds anything else than what such a run has left.
        """
        place, there = self.place, self._there
        shown, cure = redact(place.directory), f"give another target, or delete them with {self._restart}"
        found = load_journal(place.directory, self._storage)
        if found is None:
            raise TargetNotEmptyError(
                f"{shown} holds {counted(len(there), 'file')} of another data set, such as {redact(there[0])}; {cure}"
            )
        if not found.same_work(self._journal):
            # It may still be running, so its place is not taken even if it has written nothing else.
            begun = ", of which no shard is written yet" if there == [join_url(place.directory, NAME)] else ""
            raise TargetNotEmptyError(
                f"{shown} holds another conversion{begun} ({found.differences(self._journal)}); give another target, "
                f"run with the same source and options to continue, or start over with {self._restart}"
            )
        strange = [url for url in there if url.endswith(SHARD_SUFFIXES) and not place.has(url)]
        if strange:
            raise TargetNotEmptyError(
                f"{shown} holds {counted(len(strange), 'shard')} that this command does not write, such as "
                f"{redact(strange[0])}: they would be read with its own; {cure}"
            )
        return found

    def __enter__(self) -> Self:
        """Mark the target, delete what is to be overwritten, and note the work."""
        overwrite = self._target.options.overwrite
        if self._earlier.complete and not self._mark.is_set():
            return self
        self._progress.start(total_bytes=self._reader.num_bytes, total=self._reader.num_records)
        self._mark.begin((lambda _: True) if overwrite else None)
        if overwrite:
            # The journal is deleted last: a run that is interrupted here starts with what is left.
            for url in sorted(self._there, key=lambda url: url.endswith("/convert.json")):
                self._storage.delete(url)
        if self._found is None or (self._found.complete and not self._earlier.complete):
            # In the latter case shards are gone: a run that was overwriting them was interrupted.
            save_journal(self.place.directory, self._journal, self._storage)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Forget a run that failed before its first shard: there is nothing to continue or overwrite."""
        if kind is not None:
            url = join_url(self.place.directory, NAME)
            with contextlib.suppress(ShardstreamError):
                if _contents(self.place, self._storage) == [url]:
                    self._storage.delete(url)
                    self._mark.finish()

    def run(self) -> PackedTarget:
        """Write what is not there yet, then the index and the journal; then the target is whole."""
        reader, earlier, storage, directory = self._reader, self._earlier, self._storage, self.place.directory
        remarks = Remarks()
        self._progress.start(total_bytes=reader.num_bytes, total=reader.num_records)
        self._progress.advance(num_bytes=earlier.num_bytes, num=earlier.num_samples)
        if self._standing is not None and earlier.position is not None:
            self._standing.resume(earlier.position)
        number = 0
        if not earlier.complete:
            here = partial(_write, on_shard=self._note_position, is_noted=self._standing is not None)
            write = here if self._executor is None else partial(write_elsewhere, executor=self._executor)
            number = write(
                reader, self._target, start=earlier.num_records, first_shard=earlier.num_shards,
                known_keys=earlier.keys, remarks=remarks, progress=self._progress,
            )  # fmt: skip
            if number == 0:
                raise DataError(f"the source holds no records: {reader.identity()}; check its path, or --from")
        remarks.log(redact(directory), earlier.num_samples)
        table = read_chunks(storage, directory)
        if self._executor is not None and not earlier.complete and table.total_samples != number:
            raise ConfigError(
                f"{redact(directory)}: {counted(number, 'sample')} written, but {table.total_samples} are there as "
                "seen from here: with --engine ray, all nodes must see the target; use a shared disk or an object store"
            )
        if not earlier.complete:
            self._note_position(len(table.shards), complete=True, num_samples=table.total_samples)
        if self._mark.is_begun:
            self._mark.finish()
        if not earlier.complete:
            tell_above(directory, storage)
        return PackedTarget(
            num_shards=len(table.shards),
            num_samples=table.total_samples,
            num_bytes=sum(shard.size_bytes for shard in table.shards),
            num_resumed_samples=earlier.num_samples,
            remarks=dict(remarks.counts),
        )

    def _note_position(self, num_shards: int, *, complete: bool = False, num_samples: int | None = None) -> None:
        """Note in the journal where the source stands after so many shards, or that all is done."""
        journal = replace(self._journal, complete=complete, num_samples=num_samples)
        if self._standing is not None:
            # One that is stopped may find one shard less than it has written, and writes the last one again.
            self._positions = {**self._positions, str(num_shards): self._standing.position()}
            latest = sorted(self._positions, key=int)[-1 if complete else -_POSITIONS :]
            journal = replace(journal, positions={number: self._positions[number] for number in latest})
        elif not complete:
            return
        save_journal(self.place.directory, journal, self._storage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Destination of shards: a directory, and the pattern of their names (``{:06d}.tar``)."""

    directory: str
    name: str

    @classmethod
    def of(cls, target: str) -> Destination:
        """Return the destination for a user's ``target``: a folder or prefix, or a pattern.

        Raises:
            ConfigError: It is the name of a single shard.
        """
        directory, name = split_url(target)
        if "{" in name:
            return cls(directory=directory or ".", name=name)
        if name.endswith((".tar", ".gz", ".tgz")):
            raise ConfigError(
                f"{redact(target)}: expected a folder or prefix, or a name with a number such as {{:06d}}.tar, as "
                f"the target"
            )
        return cls(directory=target.rstrip("/") or target, name=_SHARD_NAME)

    @property
    def pattern(self) -> str:
        """The pattern for ``ShardWriter``."""
        return join_url(self.directory, self.name)

    def has(self, url: str) -> bool:
        """Tell whether ``url`` is the name of one of the shards."""
        directory, name = split_url(url)
        digits = re.fullmatch(re.sub(r"\\\{.*\\\}", "([0-9]+)", re.escape(self.name)), name)
        return directory == self.directory and digits is not None and self.name.format(int(digits[1])) == name


def refuse_overlap(source: str, place: Destination) -> None:
    """Refuse to write to the place that is read, which could delete it.

    Raises:
        ConfigError: Both are the same place.
    """
    if _whole(source) == _whole(place.directory):
        raise ConfigError(f"{redact(source)}: source and target are the same place; give another target")


def refuse_writers(writers: Writers, directory: str, cure: str = "") -> None:
    """Refuse a target that other commands are writing to; ``cure`` adds what else can be done.

    Raises:
        TargetNotEmptyError: There is such a command.
    """
    for writer in writers.values():
        whose = "a command" if writer is None else f"{writer.command} ({writer.what}), begun {writer.begun},"
        raise TargetNotEmptyError(
            f"{redact(directory)}: {whose} is still writing there, or was interrupted; give another target, run that "
            f"again{', ' + cure if cure else ''}"
        )


def warn_of_nesting(source: str, place: Destination) -> None:
    """Warn if shards are written below what is read, because readers of the source will then get both."""
    if _whole(place.directory).startswith(_whole(source).rstrip("/") + "/"):
        _log.warning(
            "%s lies below %s: from now on whoever reads the latter, training included, reads the shards of both; give "
            "a target beside the source",
            redact(place.directory),
            redact(source),
        )


def _whole(url: str) -> str:
    return os.path.realpath(local_path(url)) if is_local(url) else url.rstrip("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Earlier:
    """What an earlier run of the same conversion left behind."""

    complete: bool = False
    num_shards: int = 0
    num_records: int = 0  # up to the last one that became a sample
    num_samples: int = 0
    num_bytes: int = 0
    keys: frozenset[str] = frozenset()
    position: Mapping[str, Any] | None = None


def _contents(place: Destination, storage: Storage) -> list[str]:
    """Return the shards and the index directly in the target, without marks of writers.

    Raises:
        TargetNotEmptyError: There are shards in folders below it, which would be read with those that are written.
    """
    base = place.directory.rstrip("/") + "/"
    there = []
    for info in storage.list(place.directory):
        name = info.url.removeprefix(base)
        if is_shard(info.url, base) and "/" in name:
            raise TargetNotEmptyError(
                f"{redact(place.directory)} holds shards in folders, such as {redact(info.url)}: who reads it would "
                "read them together with those of this command; give another target"
            )
        is_mark = name == UNFINISHED_FILE or name.startswith(f"{WRITERS_DIRECTORY}/")
        if is_shard(info.url, base) or (name.startswith(f"{INDEX_DIRECTORY}/") and not is_mark):
            there.append(info.url)
    return there


def _earlier_work(
    place: Destination, storage: Storage, journal: Journal, *, position: str | Standing | None
) -> _Earlier:
    """Return the finished shards: numbered from 0 without a gap, each with an intact sample table of its size.

    Everything is done if the journal says so and the shards hold that many samples. Otherwise the last one is left out
    and written again, so that there is always a shard to write, and with it the writer publishes the chunk table, which
    the interrupted run may not have reached.
    """
    sizes = {info.url: info.size_bytes for info in storage.list(place.directory)}
    tables: list[SampleTable] = []
    while (table := _finished_shard(place, len(tables), sizes, storage)) is not None:
        tables.append(table)
    complete = journal.complete and sum(table.num_samples for table in tables) == journal.num_samples
    column = position if isinstance(position, str) else None
    positions = None if column == position else journal.positions or {}
    if not complete:
        tables = tables[:-1]
        while tables and positions is not None and str(len(tables)) not in positions:
            tables.pop()  # shards are gone that were there, and nothing tells where the source stood before them
    num_samples = sum(table.num_samples for table in tables)
    return _Earlier(
        complete=complete,
        num_shards=len(tables),
        num_records=int(tables[-1].columns[column][-1].as_py()) + 1 if column and tables else num_samples,
        num_samples=num_samples,
        num_bytes=sum(table.shard.size_bytes for table in tables),
        keys=frozenset(key for table in tables for key in table.keys),
        position=None if positions is None else positions.get(str(len(tables))),
    )


def _finished_shard(place: Destination, number: int, sizes: Mapping[str, int], storage: Storage) -> SampleTable | None:
    name = place.name.format(number)
    url = join_url(place.directory, samples_path(name))
    size_bytes = sizes.get(join_url(place.directory, name))
    if size_bytes is None or url not in sizes:
        return None
    try:
        table = SampleTable.from_parquet(storage.read(url), redact(url))
    except IndexFormatError as error:
        _log.warning("%s; this shard and those after it are written again", error)
        return None
    return table if table.shard.size_bytes == size_bytes else None


def _write(
    reader: Source, target: ShardTarget, start: int, first_shard: int, known_keys: Collection[str], remarks: Remarks,
    progress: Progress, on_shard: Callable[[int], None], *, is_noted: bool,
) -> int:  # fmt: skip
    """Write all records except existing ones, in order; return the number of all records.

    If where the source stands is noted after every shard (``is_noted``), no record is read before the one before it is
    written.
    """
    number, num_shards = start, 0
    with target.writer(first_shard) as writer, contextlib.closing(reader.records(number)) as records:
        for run in runs_of(records, 1 if is_noted else RUN_RECORDS):
            _write_run(writer, run, records, known_keys)
            for record in run:
                remarks.add(record)
            num_bytes = sum(len(value) for record in run for value in record.fields.values())
            progress.advance(num_bytes=num_bytes, num=len(run))
            number += len(run)
            if writer.num_shards > num_shards:
                num_shards = writer.num_shards
                on_shard(first_shard + num_shards)
    return number


def _write_run(writer: UnmarkedWriter, run: list[Record], later: Iterator[Record], known_keys: Collection[str]) -> None:
    """Write records; names among them and the later ones that cannot be stored are told together."""
    num_new = next((number for number, record in enumerate(run) if record.key in known_keys), len(run))
    before = writer.num_samples
    try:
        writer.write_all([record.sample for record in run[:num_new]])
    except ConfigError as error:
        wrong, *others = run[writer.num_samples - before :]
        if not any(wrong_names([(wrong.key, wrong.fields)])):
            raise  # no name is wrong, so later ones are not looked for
        rest = itertools.chain(others, later)
        raise first_of([error, *later_wrong_names(rest)], WRONG_NAMES) from error
    for record in run[num_new:]:
        refuse_known(record.key, known_keys)


@dataclass(frozen=True, slots=True)
class Lift:
    """Take metadata ``name`` from a sample; a dotted name refers to nested values."""

    name: str

    def __call__(self, sample: Mapping[str, object]) -> object:
        """Return the value."""
        value: Any = sample["__metadata__"]
        if isinstance(value, _MAPPINGS) and self.name in value:
            return plain_value(value[self.name])
        for part in self.name.split("."):
            value = value.get(part) if isinstance(value, _MAPPINGS) else None
        return plain_value(value)
