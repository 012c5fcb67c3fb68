"""Write a source's records through the writer, in one pass that can be interrupted and continued.

The journal in the target identifies the work that the shards there belong to; the index of each finished shard gives
its number of samples. Each record becomes one sample, in a fixed order, so the number of samples in the finished shards
is the number of the record to continue with, and the result is the same bytes as without the interruption.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial

from shard_tools.convert.elsewhere import ConvertWork, write_elsewhere
from shard_tools.convert.files import is_local
from shard_tools.convert.journal import NAME, Journal, TargetNotEmptyError, load_journal, save_journal
from shard_tools.convert.records import Remarks, ShardOptions, Source, refuse_known
from shard_tools.running.progress import Progress
from streaming.catalog.build import read_chunks
from streaming.errors import ConfigError, DataError, ShardstreamError
from streaming.index.layout import samples_path
from streaming.index.sample_table import SampleTable
from streaming.storage import Storage, join_url, local_path, redact, split_url

_SHARD_NAME = "{:06d}.tar"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTarget:
    """The content of the target, how many of its samples an earlier run wrote, and what this run remarked on others."""

    num_shards: int
    num_samples: int
    num_bytes: int
    num_resumed_samples: int
    remarks: Mapping[str, int]


def pack(
    reader: Source,
    place: Destination,
    options: ShardOptions,
    *,
    identity: Mapping[str, object],
    columns: tuple[str, ...],
    position: str | None = None,
    storage_options: Mapping[str, object] | None,
    executor: Executor | None = None,
    progress: Progress,
) -> PackedTarget:
    """Write all records of ``reader``; continue if an earlier run of the same work was interrupted.

    Args:
        reader: The records.
        place: Destination of the shards.
        options: The options.
        identity: JSON-serializable; everything that determines the bytes of the result, except the source and the names
            of the shards. Another run continues only if it is equal.
        columns: Metadata of the records to store in the sample table.
        position: Column of the sample table with the number of each sample's record, if not every record becomes a
            sample; None: sample i is record i.
        storage_options: Options of the store.
        executor: Where to read and write; None: here, in one pass.
        progress: Receives the samples and bytes written.

    Raises:
        TargetNotEmptyError: The target holds shards of other work.
        DataError: A record cannot be read or stored, or there are none.
        StorageError: A store failed.
    """
    storage = Storage(storage_options)
    journal = Journal(source=reader.identity(), options={**identity, "pattern": place.name}, fields=reader.fields)
    remarks = Remarks()
    earlier = _prepare(place, journal, storage, overwrite=options.overwrite, position=position)
    progress.start(total_bytes=reader.num_bytes, total=reader.num_records)
    progress.advance(num_bytes=earlier.num_bytes, num=earlier.num_samples)
    if not earlier.complete:
        work = ConvertWork(
            reader=reader,
            pattern=place.pattern,
            options=options,
            columns={name: _Lift(name) for name in columns},
            storage_options=storage_options,
        )
        write = _write if executor is None else partial(write_elsewhere, executor=executor)
        try:
            number = write(
                work,
                start=earlier.num_records,
                first_shard=earlier.num_shards,
                known_keys=earlier.keys,
                remarks=remarks,
                progress=progress,
            )
        except BaseException:
            _forget_the_empty(place, storage)
            raise
        if number == 0:
            raise DataError(f"the source holds no records: {reader.identity()}; check its path, or --from")
    remarks.log(redact(place.directory))
    table = read_chunks(storage, place.directory)
    if not earlier.complete:
        save_journal(place.directory, replace(journal, complete=True, num_samples=table.total_samples), storage)
    return PackedTarget(
        num_shards=len(table.shards),
        num_samples=table.total_samples,
        num_bytes=sum(shard.size_bytes for shard in table.shards),
        num_resumed_samples=earlier.num_samples,
        remarks=dict(remarks.counts),
    )


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


def refuse_overlap(source: str, place: Destination) -> None:
    """Refuse to write to the place that is read, which could delete it.

    Raises:
        ConfigError: Both are the same place.
    """
    if _whole(source) == _whole(place.directory):
        raise ConfigError(f"{redact(source)}: source and target are the same place; give another target")


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


def _prepare(
    place: Destination, journal: Journal, storage: Storage, *, overwrite: bool, position: str | None
) -> _Earlier:
    """Prepare the target: empty, or holding the finished shards of this very conversion.

    Raises:
        TargetNotEmptyError: It holds anything else.
    """
    there = [info.url for info in storage.list(place.directory) if _is_ours(info.url, place)]
    if overwrite:
        # The journal is deleted last: a run that is interrupted here starts with what is left.
        for url in sorted(there, key=lambda url: url.endswith("/convert.json")):
            storage.delete(url)
        there = []
    if there:
        found = load_journal(place.directory, storage)
        if found is None:
            raise TargetNotEmptyError(
                f"{redact(place.directory)} holds {len(there)} files of another data set, such as "
                f"{redact(there[0])}; give another target, or delete them with --overwrite"
            )
        if not found.same_work(journal):
            # It may still be running, so its place is not taken even if it has written nothing else.
            begun = ", of which no shard is written yet" if there == [join_url(place.directory, NAME)] else ""
            raise TargetNotEmptyError(
                f"{redact(place.directory)} holds another conversion{begun} ({found.differences(journal)}); give "
                "another target, run with the same source and options to continue, or start over with --overwrite"
            )
        earlier = _earlier_work(place, storage, found, position=position)
        if found.complete and not earlier.complete:  # shards are gone: a run that was overwriting them was interrupted
            save_journal(place.directory, journal, storage)
        return earlier
    save_journal(place.directory, journal, storage)
    return _Earlier()


def _forget_the_empty(place: Destination, storage: Storage) -> None:
    """Delete the journal of a run that ended before its first shard: there is nothing to continue or overwrite."""
    with contextlib.suppress(ShardstreamError):
        there = [info.url for info in storage.list(place.directory) if _is_ours(info.url, place)]
        if there == [url := join_url(place.directory, NAME)]:
            storage.delete(url)


def _is_ours(url: str, place: Destination) -> bool:
    """Tell whether ``url`` is a shard or part of an index directly in the target."""
    base = place.directory.rstrip("/") + "/"
    name = url.removeprefix(base)
    return name.startswith("_shardstream/") or ("/" not in name and name.endswith(".tar"))


def _earlier_work(place: Destination, storage: Storage, journal: Journal, *, position: str | None) -> _Earlier:
    """Return the finished shards: numbered from 0 without a gap, each with a sample table that matches its size.

    Everything is done if the journal says so and the shards hold that many samples. Otherwise the last one is left out
    and written again, so that there is always a shard to write, and with it the writer publishes the chunk table, which
    the interrupted run may not have reached.
    """
    sizes = {info.url: info.size_bytes for info in storage.list(place.directory)}
    tables: list[SampleTable] = []
    while (table := _finished_shard(place, len(tables), sizes, storage)) is not None:
        tables.append(table)
    complete = journal.complete and sum(table.num_samples for table in tables) == journal.num_samples
    if not complete:
        tables = tables[:-1]
    num_samples = sum(table.num_samples for table in tables)
    return _Earlier(
        complete=complete,
        num_shards=len(tables),
        num_records=int(tables[-1].columns[position][-1].as_py()) + 1 if position and tables else num_samples,
        num_samples=num_samples,
        num_bytes=sum(table.shard.size_bytes for table in tables),
        keys=frozenset(key for table in tables for key in table.keys),
    )


def _finished_shard(place: Destination, number: int, sizes: Mapping[str, int], storage: Storage) -> SampleTable | None:
    name = place.name.format(number)
    url = join_url(place.directory, samples_path(name))
    size_bytes = sizes.get(join_url(place.directory, name))
    if size_bytes is None or url not in sizes:
        return None
    table = SampleTable.from_parquet(storage.read(url), redact(url))
    return table if table.shard.size_bytes == size_bytes else None


def _write(
    work: ConvertWork, start: int, first_shard: int, known_keys: Collection[str], remarks: Remarks, progress: Progress
) -> int:
    """Write all records except existing ones, one after the other; return the number of all records."""
    number = start
    with work.writer(first_shard) as writer, contextlib.closing(work.reader.records(number)) as records:
        for record in records:
            refuse_known(record.key, known_keys)
            writer.write(record.sample)
            remarks.add(record)
            progress.advance(num_bytes=sum(map(len, record.fields.values())), num=1)
            number += 1
    return number


@dataclass(frozen=True, slots=True)
class _Lift:
    """Take metadata ``name`` from a sample; a dotted name refers to nested values."""

    name: str

    def __call__(self, sample: Mapping[str, object]) -> object:
        value = sample["__metadata__"]
        whole = isinstance(value, Mapping) and self.name in value
        for part in (self.name,) if whole else self.name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value
