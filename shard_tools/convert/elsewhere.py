"""Convert on an executor, such as a cluster: many shards in parallel, with the same bytes as a single writer's.

Where shards end depends on the sizes of all earlier records, so there are two steps, each distributed over the
executor: ranges of records are measured, and their sizes determine which records each shard holds; then shards are
written, each by its own writer. This reads the source twice. Both steps overlap: a shard is written as soon as its
records are measured. Shards may finish out of order; an interrupted conversion continues after the first gapless run.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

from shard_tools.convert.base.records import Remarks, ShardOptions, Source, later_wrong_names, refuse_known, runs_of
from shard_tools.running.engine import ordered
from shard_tools.running.progress import Progress
from shard_tools.write.keys import WRONG_NAMES, SeenKeys, check_key
from shard_tools.write.writer import UnmarkedWriter, is_full, make_record
from streaming.errors import ConfigError, first_of

_AHEAD = 256  # calls in progress or finished ahead; an executor with fewer workers queues them
_MIN_RANGE, _MAX_RANGE, _RANGES = 64, 100_000, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertWork:
    """What every call needs.

    Attributes:
        reader: The source.
        pattern: Pattern of the shards' URLs.
        options: Size of shards.
        columns: Names and functions of the sample table's columns.
        storage_options: Options of the target's store.
    """

    reader: Source
    pattern: str
    options: ShardOptions
    columns: Mapping[str, Callable[[Mapping[str, object]], object]]
    storage_options: Mapping[str, object] | None

    def writer(self, shard: int) -> UnmarkedWriter:
        """Return a writer that begins with this shard."""
        return UnmarkedWriter(
            self.pattern,
            max_bytes=self.options.max_bytes,
            max_samples=self.options.max_samples,
            storage_options=self.storage_options,
            columns=self.columns,
            overwrite=True,  # whatever is there belongs to this conversion and is unfinished
            start_shard=shard,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shard:
    """The records of a shard: ``num_samples`` from number ``start`` on."""

    number: int
    start: int
    num_samples: int


def write_elsewhere(
    work: ConvertWork,
    executor: Executor,
    progress: Progress,
    *,
    start: int,
    first_shard: int,
    known_keys: Collection[str],
    remarks: Remarks,
) -> int:
    """Write all shards from ``first_shard`` on, which begins with record ``start``; return the number of all records.

    Raises:
        ConfigError: The source cannot be read from its middle.
        DuplicateKeyError: Two records have the same key.
    """
    num_records = work.reader.num_records
    if num_records is None:
        raise ConfigError(
            f"--engine: a source of kind {work.reader.kind!r} can only be read front to back, by one process; "
            "use --engine local, or bring it into Parquet first"
        )
    sizes = _measured(work, executor, range(start, num_records), known_keys)
    shards = _cut(sizes, work, start, first_shard)
    next_shard = first_shard
    for shard, num_bytes, noted in ordered(executor, partial(_write_shard, work), shards, _AHEAD):
        next_shard = shard.number + 1
        remarks.join(noted)
        progress.advance(num_bytes=num_bytes, num=shard.num_samples)
    work.writer(next_shard).close()  # publishes the chunk table of all shards
    return num_records


def _measured(
    work: ConvertWork, executor: Executor, numbers: range, known_keys: Collection[str]
) -> Iterator[tuple[str, int]]:
    """Yield key and size of every record, in order, and check that no key is among ``known_keys``."""
    length = min(_MAX_RANGE, max(_MIN_RANGE, len(numbers) // _RANGES))
    ranges = (numbers[first : first + length] for first in range(0, len(numbers), length))
    for part in ordered(executor, partial(_measure, work), ranges, _AHEAD):
        for key, num_bytes in part:
            refuse_known(key, known_keys)
            yield key, num_bytes


def _measure(work: ConvertWork, numbers: range) -> list[tuple[str, int]]:
    """Measure these records: key, and bytes in a tar."""
    sizes = []
    with contextlib.closing(work.reader.records(numbers.start)) as records:
        for record in itertools.islice(records, len(numbers)):
            try:
                sizes.append((record.key, make_record(record.fields, check_key(record.key)).num_bytes))
            except ConfigError as error:
                raise first_of([error, *later_wrong_names(records)], WRONG_NAMES) from error
    return sizes


def _cut(sizes: Iterator[tuple[str, int]], work: ConvertWork, start: int, number: int) -> Iterator[_Shard]:
    """Yield the shards, by the writer's own rule."""
    seen = SeenKeys()
    shard_bytes = shard_samples = 0
    for key, num_bytes in sizes:
        rolls = shard_samples > 0 and is_full(
            shard_bytes,
            shard_samples,
            num_bytes,
            max_bytes=work.options.max_bytes,
            max_samples=work.options.max_samples,
        )
        if rolls:
            yield _Shard(number=number, start=start, num_samples=shard_samples)
            number, start, shard_bytes, shard_samples = number + 1, start + shard_samples, 0, 0
        new_shard = shard_samples == 0
        seen.check(key, new_shard=new_shard)
        seen.add(key, new_shard=new_shard)
        shard_bytes += num_bytes
        shard_samples += 1
    if shard_samples:
        yield _Shard(number=number, start=start, num_samples=shard_samples)


def _write_shard(work: ConvertWork, shard: _Shard) -> tuple[_Shard, int, Remarks]:
    """Write one shard and its sample table; return the bytes of its fields, and remarks. May be repeated."""
    num_bytes, remarks = 0, Remarks()
    writer = work.writer(shard.number)
    try:
        with contextlib.closing(work.reader.records(shard.start)) as records:
            for run in runs_of(itertools.islice(records, shard.num_samples)):
                writer.write_all([record.sample for record in run])
                for record in run:
                    remarks.add(record)
                    num_bytes += sum(map(len, record.fields.values()))
        writer.close(chunk_table=False)
    except BaseException:
        writer.abort()
        raise
    return shard, num_bytes, remarks
