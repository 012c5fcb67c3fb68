"""Convert on an executor, such as a cluster: many shards in parallel, with the same bytes as a single writer's.

The end of a shard depends on the sizes of all earlier records, so there are two steps. First, records are measured:
in ranges on the executor, which reads the source twice; or locally, from an index with names and sizes. The sizes
determine the records of each shard. Then shards are written on the executor, each by its own writer. Both steps
overlap: a shard is written as soon as its records are measured. Shards may finish out of order; an interrupted
conversion continues after the first run of shards without a gap.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial

from shard_tools.make.convert.base.records import (
    Countable,
    Foreseeable,
    Record,
    Remarks,
    ShardOptions,
    Source,
    later_wrong_names,
    refuse_known,
    runs_of,
)
from shard_tools.make.write.keys import WRONG_NAMES, SeenKeys, check_key
from shard_tools.make.write.writer import UnmarkedWriter, is_full, make_record
from shard_tools.running.engine import ordered
from shard_tools.running.progress import Progress
from streaming.errors import ConfigError, DataError, first_of
from streaming.shards.index.layout import UNFINISHED_FILE
from streaming.shards.schema.value import Schema
from streaming.storage import Storage, join_url, split_url

OnShard = Callable[[int, Remarks, int], None]
"""Called after each shard, in order, with the number of shards so far, the remarks about their records, and the bytes
of this shard."""
_AHEAD = 256  # calls in progress or finished ahead; an executor with fewer workers queues them
_MIN_RANGE, _MAX_RANGE, _RANGES = 64, 100_000, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTarget:
    """The parameters of every writer of shards.

    Attributes:
        pattern: Pattern of the shards' URLs.
        options: Limits of the shards' size.
        columns: Names and functions of the sample table's columns.
        storage_options: Options of the target's store.
        schema: Schema of the samples, as far as it is known before they are written.
    """

    pattern: str
    options: ShardOptions
    columns: Mapping[str, Callable[[Mapping[str, object]], object]]
    storage_options: Mapping[str, object] | None
    schema: Schema

    def writer(self, shard: int, on_shard: Callable[[int, int, int], None] | None = None) -> UnmarkedWriter:
        """Return a writer that begins with this shard, and reports each shard (``UnmarkedWriter.on_shard``)."""
        writer = UnmarkedWriter(
            self.pattern,
            max_bytes=self.options.max_bytes,
            max_samples=self.options.max_samples,
            storage_options=self.storage_options,
            columns=self.columns,
            overwrite=True,  # existing files belong to this conversion and are unfinished
            start_shard=shard,
            schema=self.schema,
        )
        writer.on_shard = on_shard
        return writer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shard:
    """The records of a shard: ``num_samples`` from number ``start`` on, which take ``num_bytes`` in a tar."""

    number: int
    start: int
    num_samples: int
    num_bytes: int


def write_elsewhere(
    reader: Source,
    target: ShardTarget,
    executor: Executor,
    progress: Progress,
    *,
    start: int,
    first_shard: int,
    known_keys: Collection[str],
    remarks: Remarks,
    on_shard: OnShard,
) -> int:
    """Write all shards from ``first_shard`` on, which begins with record ``start``; return the number of all records.

    Raises:
        ConfigError: The source cannot be read from its middle, or a remote call cannot access the target.
        DuplicateKeyError: Two records have the same key.
    """
    num_records = _count(reader, executor, progress)
    place = split_url(target.pattern)[0]
    shared = [(Storage(target.storage_options), join_url(place or ".", UNFINISHED_FILE))]  # exists by now
    if isinstance(reader, Foreseeable):
        sizes = _sizes(reader.outlines(start))
        shards = _cut(_new(sizes, known_keys), target.options, start, first_shard)
        parts = ((shard, reader.part(shard.start, shard.start + shard.num_samples)) for shard in shards)
        written = ordered(executor, partial(_write_part, target), parts, _AHEAD, shared=shared)
    else:
        sizes = _measured(reader, executor, range(start, num_records))
        shards = _cut(_new(sizes, known_keys), target.options, start, first_shard)
        written = ordered(executor, partial(_write_shard, target, reader), shards, _AHEAD, shared=shared)
    next_shard = first_shard
    for shard, num_bytes, noted in written:
        next_shard = shard.number + 1
        remarks.join(noted)
        progress.advance(num_bytes=num_bytes, num=shard.num_samples)
        on_shard(next_shard, remarks, num_bytes)
    target.writer(next_shard).close()  # publishes the chunk table of all shards
    return num_records


def _count(reader: Source, executor: Executor, progress: Progress) -> int:
    """Return the number of records; if it is not known, a first pass counts them."""
    if reader.num_records is None and isinstance(reader, Countable):
        reader.count(executor)
        progress.start(total_bytes=reader.num_bytes, total=reader.num_records)
    if reader.num_records is None:
        raise ConfigError(
            f"--engine: a source of kind {reader.kind!r} can only be read front to back, by one process; "
            "use --engine local, or bring it into Parquet first"
        )
    return reader.num_records


def _new(sizes: Iterable[tuple[str, int]], known_keys: Collection[str]) -> Iterator[tuple[str, int]]:
    """Yield key and size of every record, and check that no key is among ``known_keys``."""
    for key, num_bytes in sizes:
        refuse_known(key, known_keys)
        yield key, num_bytes


def _measured(reader: Source, executor: Executor, numbers: range) -> Iterator[tuple[str, int]]:
    """Yield key and size of every record, in order."""
    length = min(_MAX_RANGE, max(_MIN_RANGE, len(numbers) // _RANGES))
    ranges = (numbers[first : first + length] for first in range(0, len(numbers), length))
    for part in ordered(executor, partial(_measure, reader), ranges, _AHEAD):
        yield from part


def _measure(reader: Source, numbers: range) -> list[tuple[str, int]]:
    """Return the key and the size in a tar, in bytes, of each of these records."""
    with contextlib.closing(reader.records(numbers.start)) as records:
        return [*itertools.islice(_sizes(records), len(numbers))]


def _sizes(records: Iterator[Record]) -> Iterator[tuple[str, int]]:
    """Yield key and size of each record."""
    for record in records:
        try:
            num_bytes = make_record(record.fields, check_key(record.key)).num_bytes
        except ConfigError as error:
            raise first_of([error, *later_wrong_names(records)], WRONG_NAMES) from error
        yield record.key, num_bytes


def _cut(sizes: Iterator[tuple[str, int]], options: ShardOptions, start: int, number: int) -> Iterator[_Shard]:
    """Yield the shards, cut by the writer's own rule."""
    seen = SeenKeys()
    shard_bytes = shard_samples = 0
    for key, num_bytes in sizes:
        rolls = shard_samples > 0 and is_full(
            shard_bytes,
            shard_samples,
            num_bytes,
            max_bytes=options.max_bytes,
            max_samples=options.max_samples,
        )
        if rolls:
            yield _Shard(number=number, start=start, num_samples=shard_samples, num_bytes=shard_bytes)
            number, start, shard_bytes, shard_samples = number + 1, start + shard_samples, 0, 0
        new_shard = shard_samples == 0
        seen.check(key, new_shard=new_shard)
        seen.add(key, new_shard=new_shard)
        shard_bytes += num_bytes
        shard_samples += 1
    if shard_samples:
        yield _Shard(number=number, start=start, num_samples=shard_samples, num_bytes=shard_bytes)


def _write_part(target: ShardTarget, item: tuple[_Shard, Source]) -> tuple[_Shard, int, Remarks]:
    """Call :func:`_write_shard` with a source of this shard's records alone."""
    shard, part = item
    return _write_shard(target, part, replace(shard, start=0))


def _write_shard(target: ShardTarget, reader: Source, shard: _Shard) -> tuple[_Shard, int, Remarks]:
    """Write one shard and its sample table; return the bytes of its fields, and remarks. May be repeated."""
    num_bytes, remarks = 0, Remarks()
    writer = target.writer(shard.number)
    try:
        with contextlib.closing(reader.records(shard.start)) as records:
            for run in runs_of(itertools.islice(records, shard.num_samples)):
                writer.write_all([record.sample for record in run])
                for record in run:
                    remarks.add(record)
                    num_bytes += sum(map(len, record.fields.values()))
        _check(writer, shard)
        writer.close(chunk_table=False)
    except BaseException:
        writer.abort()
        raise
    return shard, num_bytes, remarks


def _check(writer: UnmarkedWriter, shard: _Shard) -> None:
    """Refuse records that differ from the measured ones.

    Raises:
        DataError: Their number or size differs.
    """
    if (writer.num_shards, writer.num_samples, writer.shard_bytes) != (0, shard.num_samples, shard.num_bytes):
        raise DataError(
            f"shard {shard.number}: expected {shard.num_samples} samples of {shard.num_bytes} bytes, got "
            f"{writer.num_samples} of {writer.shard_bytes}: the source is being changed, or its index is not of its "
            "shards (`shard_tools verify` checks that); run this again when it is whole"
        )
