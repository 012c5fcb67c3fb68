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
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Self

from shard_tools.make.convert.base.files import is_local
from shard_tools.make.convert.base.identity import EVERYWHERE, ChangedInputs, SourceIdentity, carried, differing, settle
from shard_tools.make.convert.base.records import (
    RUN_RECORDS,
    LeavesOut,
    Record,
    Remarks,
    ShardOptions,
    Skipped,
    Source,
    Standing,
    later_wrong_names,
    refuse_known,
    runs_of,
)
from shard_tools.make.convert.earlier import EarlierWork, changes_since, earlier_work
from shard_tools.make.convert.elsewhere import OnShard, ShardTarget, write_elsewhere
from shard_tools.make.convert.journal import (
    NAME,
    SOURCES,
    Journal,
    TargetNotEmptyError,
    Waypoint,
    kept,
    load_journal,
    load_sources,
    save_journal,
    sources_of,
)
from shard_tools.make.write.above import meet_above, tell_above
from shard_tools.make.write.keys import WRONG_NAMES, wrong_names
from shard_tools.make.write.mark import TargetMark, Writers, digest_of_work
from shard_tools.make.write.recorder import IndexRecorder
from shard_tools.make.write.writer import UnmarkedWriter, refuse_several
from shard_tools.running.progress import Progress
from shard_tools.running.report import plain
from streaming.common.arguments import counted
from streaming.errors import ConfigError, DataError, IndexFormatError, ShardstreamError, first_of
from streaming.shards.catalog.build import read_chunks, read_schema
from streaming.shards.catalog.urls import is_shard
from streaming.shards.index.layout import (
    INDEX_DIRECTORY,
    SCHEMA_FILE,
    UNFINISHED_FILE,
    VERSIONS_DIRECTORY,
    WRITERS_DIRECTORY,
    samples_directory,
    samples_path,
)
from streaming.shards.schema.value import Schema
from streaming.shards.versions.history import refuse_tags
from streaming.storage import Storage, join_url, local_path, redact, split_url
from streaming.types import SHARD_SUFFIXES

_SILENT = Schema()
_SHARD_NAME = "{:06d}.tar"
_THREADS = 16  # for requesting versions of inputs
# The file of inputs is written after each shard while it is small, later after 64 times its size of shards.
_SMALL_BYTES, _SHARE = 1 << 16, 64
_MAPPINGS = (dict, Mapping)  # the usual type first: the check of the other one is slower
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTarget:
    """The content of the target, and the notes about the source from all runs that wrote it.

    Attributes:
        num_shards: Number of its shards.
        num_samples: Number of their samples.
        num_bytes: Total size of the shards.
        num_resumed_samples: Number of samples that an earlier run had written.
        was_complete: Whether an earlier run had written everything.
        changed: Inputs that changed since an earlier run, so that their samples were made again.
        remarks: Number of samples by remark.
        left_out: Number of records that are left out, by reason.
        skipped: Entries of the source that are not samples.
    """

    num_shards: int
    num_samples: int
    num_bytes: int
    num_resumed_samples: int
    was_complete: bool
    changed: tuple[str, ...]
    remarks: Mapping[str, int]
    left_out: Mapping[str, int]
    skipped: tuple[Skipped, ...]


def pack(reader: Source, place: Destination, options: ShardOptions, **how: Any) -> PackedTarget:
    """Write all records of ``reader``; continue if an earlier run of the same work was interrupted.

    ``how`` are the other arguments of :class:`PackingRun`, which documents the errors.
    """
    with PackingRun(reader, place, options, **how) as packing:
        return packing.run()


class PackingRun:
    """Write all records of a source into a target, which stays marked as unfinished until everything is there.

    Creating a run only checks the target; entering its context begins to write. So several targets can be checked
    before anything is written. A run that ends before the first shard leaves nothing behind.

    Args:
        reader: The records.
        place: Destination of the shards.
        options: The options.
        command: The command, and its source as the user named it: for the mark.
        identity: JSON-serializable facts that determine the bytes of the result, except the source and the names of the
        shards. Another run continues only if they are equal.
        columns: Metadata of the records to store in the sample table.
        schema: Schema of the samples, as far as it is known; written with the index.
        position: Column of the sample table with the number of each sample's record, if not every record becomes a
        sample; or, if numbers do not suffice, the source's position. None: sample i is record i.
        restart: The option or argument that overwrites, for errors.
        storage_options: Options of the store.
        executor: Executor on which to read and write; None: this process, in one pass.
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
        self._reader, self._listed = reader, reader.skipped
        self._origins = reader.origins()
        settle(self._origins.inputs)
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
        if self._there == [join_url(place.directory, SOURCES)]:
            self._there = []  # a run was killed before it wrote its journal: none of its shards are valid
        if options.overwrite:
            refuse_tags(self._storage, place.directory)
        else:
            refuse_writers(self._mark.others(), place.directory, f"or start over with {restart}")
        self._found, self._earlier, self._noted = None, EarlierWork(), list[SourceIdentity]()
        if self._there and not options.overwrite:
            self._noted = load_sources(place.directory, self._storage)
            self._found = self._refuse_others(self._noted)
            self._earlier = earlier_work(
                place.directory, place.name, self._storage, self._found, self._changes(self._found),
                column=position if isinstance(position, str) else None, columns=columns,
            )  # fmt: skip
        stays = self._earlier.num_shards
        journal = self._found or self._journal
        self._positions = {number: one for number, one in journal.positions.items() if 0 < number <= stays}
        self._noted_bytes = self._bytes_since = 0

    def _changes(self, found: Journal) -> ChangedInputs:
        """Return which inputs changed since an earlier run.

        Raises:
            TargetNotEmptyError: All shards may be made from one of them.
        """
        changes = changes_since(found, self._noted, self._origins)
        shown, cure = redact(self.place.directory), f"start over with {self._restart}, or give another target"
        if changes.first == EVERYWHERE and not found.positions:
            return replace(changes, first=0)  # no shard is known to be valid
        if changes.first == EVERYWHERE:
            what = f"every shard there may hold rows of what changed since it was written: {plain(str(changes))}"
            if not changes.names:
                what = f"it does not say what its inputs were like when they were read ({SOURCES})"
            raise TargetNotEmptyError(f"{shown}: {what}; {cure}")
        if changes.names:
            _log.warning(
                "%s: changed since an earlier run: %s (%s). What was made of them, and all that follows, is made again",
                shown, counted(len(changes.names), "input"), plain(str(changes)),
            )  # fmt: skip
        return changes

    def _refuse_others(self, noted: Sequence[SourceIdentity]) -> Journal:
        """Return the journal of an earlier run that noted these inputs.

        Raises:
            TargetNotEmptyError: The target holds files that such a run did not write.
        """
        place, there = self.place, self._there
        shown, cure = redact(place.directory), f"give another target, or delete them with {self._restart}"
        found = load_journal(place.directory, self._storage)
        if found is None:
            raise TargetNotEmptyError(
                f"{shown} holds {counted(len(there), 'file')} of another data set, such as {redact(there[0])}; {cure}"
            )
        if any(f"/{VERSIONS_DIRECTORY}/" in url for url in there):
            raise TargetNotEmptyError(
                f"{shown} holds a set that has versions, since it was changed after it was converted; add what is new "
                f"with --append, or {cure}"
            )
        if not found.same_work(self._journal):
            # It may still be running, so its place is not taken even if it has written nothing else.
            begun = ", of which no shard is written yet" if _is_begun(place, there) else ""
            told = [found.differences(self._journal), *differing(noted, self._origins.inputs)]
            raise TargetNotEmptyError(
                f"{shown} holds another conversion{begun} ({plain('; '.join(told))}); give another target, "
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
        """Mark the target as unfinished, delete the files to be overwritten, and write the journal."""
        overwrite = self._target.options.overwrite
        if self._earlier.complete and not self._mark.is_set():
            return self
        self._progress.start(total_bytes=self._reader.num_bytes, total=self._reader.num_records)
        self._mark.begin((lambda _: True) if overwrite else None)
        if overwrite:
            # Delete the journal last: if the run is interrupted here, the next one starts with the remaining files.
            for url in sorted(self._there, key=lambda url: url.endswith("/convert.json")):
                self._storage.delete(url)
        elif self._earlier.changes.first is not None:
            self._delete_shards()
        if not self._earlier.complete:
            # Only now, since no shard made from older versions is left: the notes must hold for all shards.
            self._note_sources()
            save_journal(self.place.directory, replace(self._journal, positions=self._positions), self._storage)
        return self

    def _delete_shards(self) -> None:
        """Delete the shards that are not kept, the last one first, so that the remaining ones have no gap."""
        stay = {self.place.name.format(number) for number in range(self._earlier.num_shards)}
        tables = {join_url(self.place.directory, samples_path(name)) for name in stay}
        below = join_url(self.place.directory, samples_directory())
        for url in sorted(self._there, reverse=True):
            is_shard_gone = self.place.has(url) and split_url(url)[1] not in stay
            if is_shard_gone or (url.startswith(f"{below}/") and url not in tables):
                self._storage.delete(url)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Remove the traces of a run that failed before its first shard: there is nothing to continue or overwrite."""
        if kind is not None:
            with contextlib.suppress(ShardstreamError):
                there = _contents(self.place, self._storage)
                if _is_begun(self.place, there):
                    for url in reversed(there):  # the journal last
                        self._storage.delete(url)
                    self._mark.finish()

    @property
    def left_out_before(self) -> Mapping[str, int]:
        """Number of records that earlier runs have left out before the record that this one begins with, by reason."""
        return self._earlier.position.left_out

    def run(self) -> PackedTarget:
        """Write the missing shards, then the index and the journal, which complete the target."""
        reader, earlier, storage, directory = self._reader, self._earlier, self._storage, self.place.directory
        at = earlier.position
        remarks = Remarks(counts=Counter(at.remarks), left_out=Counter(at.left_out), through=at.through)
        self._progress.start(total_bytes=reader.num_bytes, total=reader.num_records)
        self._progress.advance(num_bytes=earlier.num_bytes, num=earlier.num_samples)
        if self._standing is not None and at.standing:
            self._standing.resume(at.standing)
        elif at.standing and not earlier.complete:
            raise ConfigError(
                f"{redact(directory)}: an earlier run has left out records; go on as it did, with --on-error skip, or "
                f"start over with {self._restart}"
            )
        number = 0
        if not earlier.complete:
            here = partial(_write, is_noted=self._standing is not None)
            write = here if self._executor is None else partial(write_elsewhere, executor=self._executor)
            number = write(
                reader, self._target, start=earlier.num_records, first_shard=earlier.num_shards,
                known_keys=earlier.keys, remarks=remarks, progress=self._progress, on_shard=self._note_shard,
            )  # fmt: skip
            if number == 0:
                raise DataError(f"the source holds no records: {reader.identity()}; check its path, or --from")
            self._origins.check(_THREADS)
            remarks.left_out.update(reader.left_out_last() if isinstance(reader, LeavesOut) else ())
        else:
            self._renew_schema()
        remarks.log(redact(directory))
        table = read_chunks(storage, directory)
        if self._executor is not None and not earlier.complete and table.total_samples != number:
            raise ConfigError(
                f"{redact(directory)}: {counted(number, 'sample')} written, but {table.total_samples} are there as "
                "seen from here: with --engine ray, all nodes must see the target; use a shared disk or an object store"
            )
        if earlier.complete and not all(map(SourceIdentity.is_surely, self._noted, self._origins.inputs)):
            self._note_sources()  # rewritten with the same content, which need not be read again
        if not earlier.complete:
            self._note_end(len(table.shards), table.total_samples, remarks)
        if self._mark.is_begun:
            self._mark.finish()
        if not earlier.complete:
            tell_above(directory, storage)
        return PackedTarget(
            num_shards=len(table.shards),
            num_samples=table.total_samples,
            num_bytes=sum(shard.size_bytes for shard in table.shards),
            num_resumed_samples=earlier.num_samples,
            was_complete=earlier.complete,
            changed=earlier.changes.names,
            remarks=dict(remarks.counts),
            left_out=dict(remarks.left_out),
            skipped=tuple(self._skipped().values()),
        )

    def _renew_schema(self) -> None:
        """Rewrite the ``schema.json`` of a complete set if it is missing or damaged."""
        url = join_url(self.place.directory, SCHEMA_FILE)
        try:
            read_schema(self._storage, self.place.directory)
            found = "is missing"
        except IndexFormatError:
            found = "is damaged"
        if found == "is missing" and url in self._there:
            return
        _log.warning("%s %s: rewritten from the source and the sample tables", redact(url), found)
        IndexRecorder(
            self._storage, self.place.directory, index=None, columns={}, schema=self._target.schema
        ).renew_schema()

    def _note_shard(self, num_shards: int, remarks: Remarks, num_bytes: int) -> None:
        """Note the source's position after ``num_shards``, the last one of ``num_bytes``."""
        self._bytes_since += num_bytes
        if self._noted_bytes <= max(_SMALL_BYTES, self._bytes_since // _SHARE):
            self._note_sources()
        self._note(num_shards, remarks.through, remarks)

    def _note_end(self, num_shards: int, num_samples: int, remarks: Remarks) -> None:
        """Note that all inputs are done: the last ones may have given no sample."""
        self._note_sources()
        self._journal = replace(self._journal, complete=True, num_samples=num_samples)
        self._note(num_shards, max(self._origins.last, remarks.through), remarks)

    def _note(self, num_shards: int, through: int, remarks: Remarks) -> None:
        standing = self._standing
        self._positions[num_shards] = Waypoint(
            through=through if standing is None else standing.through(),
            remarks=dict(remarks.counts), left_out=dict(remarks.left_out),
            standing={} if standing is None else standing.position(),
        )  # fmt: skip
        self._positions = kept(self._positions)
        journal = replace(self._journal, positions=self._positions, skipped=self._skipped())
        save_journal(self.place.directory, journal, self._storage)

    def _note_sources(self) -> None:
        """Note the inputs, with the checksums of those that were read to their end."""
        inputs = [*carried(self._noted, self._reader.origins().inputs)]
        if inputs:
            data = sources_of(inputs)
            self._storage.put(join_url(self.place.directory, SOURCES), data)
            self._noted, self._noted_bytes, self._bytes_since = inputs, len(data), 0

    def _skipped(self) -> dict[str, Skipped]:
        """Return what reading found that is no sample, this time or before."""
        listed = {one.path for one in self._listed}
        found = {one.path: one for one in self._reader.skipped if one.path not in listed}
        return {**self._earlier.skipped, **found}


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Destination of shards: a directory, and the pattern of their names (``{:06d}.tar``)."""

    directory: str
    name: str

    @classmethod
    def of(cls, target: str) -> Destination:
        """Return the destination for a user's ``target``: a folder or prefix, or a pattern.

        Raises:
            ConfigError: It is the name of a single shard, or a name that readers would expand to several.
        """
        directory, name = split_url(target)
        refuse_several(target, directory)
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
        """Return whether ``url`` is the name of one of the shards."""
        directory, name = split_url(url)
        begin, end = self.name.find("{"), len(self.name) - self.name.rfind("}") - 1
        digits = name[begin : len(name) - end]
        is_number = digits.isascii() and digits.isdecimal()
        return directory == self.directory and is_number and self.name.format(int(digits)) == name


def _is_begun(place: Destination, there: Sequence[str]) -> bool:
    """Return whether the target holds only the journal of a run that wrote no shard."""
    notes = {join_url(place.directory, name) for name in (NAME, SOURCES)}
    return bool(there) and notes.issuperset(there)


def refuse_overlap(source: str, place: Destination, what: str = "source and target") -> None:
    """Refuse to write to the place that is read, or written by another part of the work: writing could delete it.

    Raises:
        ConfigError: Both are the same place; ``what`` says what they are.
    """
    if _whole(source) == _whole(place.directory):
        raise ConfigError(f"{redact(source)}: {what} are the same place; give another target")


def refuse_writers(writers: Writers, directory: str, cure: str = "") -> None:
    """Refuse a target that other commands are writing to; ``cure`` adds another cure.

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
    """Warn if shards are written below the source, because readers of the source will then get both."""
    if lies_below(place.directory, source):
        _log.warning(
            "%s lies below %s: every reader of the latter, training included, will read the shards of both; give "
            "a target beside the source",
            redact(place.directory),
            redact(source),
        )


def lies_below(inner: str, outer: str) -> bool:
    """Return whether a directory is inside another one, whose readers then find what is in it."""
    return _whole(inner).startswith(_whole(outer).rstrip("/") + "/")


def _whole(url: str) -> str:
    return os.path.realpath(local_path(url)) if is_local(url) else url.rstrip("/")


def _contents(place: Destination, storage: Storage) -> list[str]:
    """Return the shards and the index directly in the target, without marks of writers.

    Raises:
        TargetNotEmptyError: There are shards in folders below it, which would be read together with the new ones.
    """
    base = place.directory.rstrip("/") + "/"
    there = []
    for info in storage.list(place.directory):
        name = info.url.removeprefix(base)
        if is_shard(info.url, base) and "/" in name:
            raise TargetNotEmptyError(
                f"{redact(place.directory)} holds shards in folders, such as {redact(info.url)}: readers would "
                "read them together with those of this command; give another target"
            )
        is_mark = name == UNFINISHED_FILE or name.startswith(f"{WRITERS_DIRECTORY}/")
        if is_shard(info.url, base) or (name.startswith(f"{INDEX_DIRECTORY}/") and not is_mark):
            there.append(info.url)
    return there


def _write(
    reader: Source, target: ShardTarget, start: int, first_shard: int, known_keys: Collection[str], remarks: Remarks,
    progress: Progress, on_shard: OnShard, *, is_noted: bool,
) -> int:  # fmt: skip
    """Write all records except existing ones, in order; return the number of all records.

    If the source itself reports its position after every shard (``is_noted``), a record is read only after the previous
    one is written.
    """
    number, through = start, remarks.through
    waiting = deque[tuple[int, Record]]()  # records of the current shard that have something to note

    def finished(num_shards: int, num_samples: int, num_bytes: int) -> None:
        while waiting and waiting[0][0] < num_samples:
            remarks.add(waiting.popleft()[1])
        on_shard(first_shard + num_shards, remarks, num_bytes)

    with target.writer(first_shard, finished) as writer, contextlib.closing(reader.records(number)) as records:
        for run in runs_of(records, 1 if is_noted else RUN_RECORDS):
            for at, record in enumerate(run, number - start):
                if record.origin != through or record.remarks or record.left_out:
                    waiting.append((at, replace(record, fields={}, metadata={})))
                    through = record.origin
            write_run(writer, run, records, known_keys)
            num_bytes = sum(len(value) for record in run for value in record.fields.values())
            progress.advance(num_bytes=num_bytes, num=len(run))
            number += len(run)
    return number


def write_run(writer: UnmarkedWriter, run: list[Record], later: Iterator[Record], known_keys: Collection[str]) -> None:
    """Write records; report all their names, and later ones, that cannot be stored in one error."""
    num_new = next((number for number, record in enumerate(run) if record.key in known_keys), len(run))
    before = writer.num_samples
    try:
        writer.write_all([record.sample for record in run[:num_new]])
    except ConfigError as error:
        wrong, *others = run[writer.num_samples - before :]
        if not any(wrong_names([(wrong.key, wrong.fields)])):
            raise  # no name is invalid, so later records are not checked
        rest = itertools.chain(others, later)
        raise first_of([error, *later_wrong_names(rest)], WRONG_NAMES) from error
    for record in run[num_new:]:
        refuse_known(record.key, known_keys)


@dataclass(frozen=True, slots=True)
class Lift:
    """Return the metadata ``name`` of a sample; a dotted name refers to nested values."""

    name: str

    def __call__(self, sample: Mapping[str, object]) -> object:
        """Return the value."""
        value: Any = sample["__metadata__"]
        if isinstance(value, _MAPPINGS) and self.name in value:
            return value[self.name]
        for part in self.name.split("."):
            value = value.get(part) if isinstance(value, _MAPPINGS) else None
        return value
