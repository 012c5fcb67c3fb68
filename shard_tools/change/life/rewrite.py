"""Rewrite shards without some of their samples; the bytes of all others stay the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shard_tools.change.fields.follow import Rewritten, followed
from shard_tools.change.sets.open_set import needed_samples
from shard_tools.make.write.change import SetChange
from shard_tools.running.progress import Progress
from streaming.common.threads import map_threads
from streaming.sets.filters.late_columns import LateColumn, find_columns, read_values
from streaming.shards.catalog.scan import scan_shard
from streaming.shards.fetch.read import FetchRange, fetch_range
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.columns import write_column
from streaming.shards.index.layout import column_path, samples_path
from streaming.shards.index.sample_table import SampleTable
from streaming.shards.schema.value import Schema
from streaming.shards.tar.headers import END_OF_ARCHIVE
from streaming.storage import Storage, join_url

Mask = npt.NDArray[np.bool_]
_WINDOW_BYTES = 8 << 20
"""Bytes of neighboring chunks that are read with one request; a larger chunk is read alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Old:
    """A shard to be replaced: its rows of the chunk table, a mask of the samples that stay, and the new name."""

    rows: ChunkTable
    stays: Mask
    name: str


def without(
    change: SetChange, storage: Storage, leaves: Mapping[str, Mask], *, workers: int, progress: Progress
) -> tuple[ChunkTable, Schema]:  # fmt: skip
    """Rewrite the shards that hold samples to be left out; return chunk table and schema of the set without these.

    The schema names the new versions of late fields.

    Memory: per worker 8 MiB or one larger chunk, and sample tables.

    Args:
        change: The change that writes the shards.
        storage: The store.
        leaves: Masks of the samples to leave out, by the name of their shard.
        workers: Number of shards rewritten in parallel.
        progress: Receives the shards and their bytes.
    """
    table = change.head.table
    tables = table.by_shard()
    olds = [
        _Old(rows=tables[name], stays=~leaves[name], name=change.new_name(name))
        for name in leaves if not leaves[name].all()
    ]  # fmt: skip
    progress.start(total_bytes=sum(one.rows.shards[0].size_bytes for one in olds), total=len(olds))
    names = [name for name, column in change.head.schema.columns.items() if column.is_late]
    late = [*find_columns(storage, [change.head.home], names).values()]
    one_by_one = partial(_written, storage, change.head.home, late, progress)
    new = {one.name: rows for one, rows in zip(olds, map_threads(one_by_one, olds, workers), strict=True)}
    kept = {name: rows for name, rows in tables.items() if name not in leaves}
    rewritten = [Rewritten(old=one.rows, new=new[one.name], stays=one.stays) for one in olds]
    return ChunkTable.merged(kept, new), followed(storage, change.head, rewritten, leaves, workers=workers)


def _written(
    storage: Storage, home: str, late: Sequence[LateColumn], progress: Progress, old: _Old
) -> ChunkTable:  # fmt: skip
    """Write a shard without some of its samples, and its sample table; return its rows of the chunk table."""
    url, target = join_url(home, old.rows.shards[0].name), join_url(home, old.name)
    samples = needed_samples(storage, url, None)
    with storage.open_write(target) as out:
        for piece in _pieces(storage, url, old, samples):
            out.write(piece)
        out.write(END_OF_ARCHIVE)
    found = scan_shard(storage, target, old.name, duplicate_keys="keep")
    stays = pa.array(old.stays)
    found = replace(found, columns={name: column.filter(stays) for name, column in samples.columns.items()})
    for column in late:
        values = read_values(storage, url, None, old.rows, column).filter(stays)
        data = write_column(
            values, name=column.name, shard=found.shard, fingerprint=found.chunks.fingerprint,
            version=column.documents[home].column_version,
        )  # fmt: skip
        storage.put(join_url(home, column_path(column.name, old.name)), data)
    storage.put(join_url(home, samples_path(old.name)), found.to_parquet())
    progress.advance(num_bytes=old.rows.shards[0].size_bytes, num=1)
    return found.chunks


def _pieces(storage: Storage, url: str, old: _Old, samples: SampleTable) -> Iterator[memoryview]:
    """Yield the records that stay, checked against the index."""
    borders = samples.record_starts
    for first_chunk, stop in _runs(old):
        wanted = _range_of(url, old.rows, first_chunk, stop)
        buffer = memoryview(bytearray(wanted.num_bytes))
        fetch_range(storage, wanted, buffer)
        first, start = wanted.first_sample, wanted.byte_start
        stays = old.stays[first : first + wanted.num_samples]
        edges = np.flatnonzero(np.diff(np.concatenate(([False], stays, [False])).astype(np.int8)))
        for low, high in edges.reshape(-1, 2).tolist():
            yield buffer[int(borders[first + low]) - start : int(borders[first + high]) - start]


def _runs(old: _Old) -> Iterator[tuple[int, int]]:
    """Yield runs of neighboring chunks that hold samples that stay, each read with one request."""
    rows, begun = old.rows, -1
    for chunk in range(rows.num_chunks):
        first = int(rows.first_sample[chunk])
        has_any = bool(old.stays[first : first + int(rows.num_samples[chunk])].any())
        if begun >= 0 and (
            not has_any
            or rows.byte_start[chunk] != rows.byte_end[chunk - 1]
            or rows.byte_end[chunk] - rows.byte_start[begun] > _WINDOW_BYTES
        ):
            yield begun, chunk
            begun = -1
        if has_any and begun < 0:
            begun = chunk
    if begun >= 0:
        yield begun, rows.num_chunks


def _range_of(url: str, rows: ChunkTable, first_chunk: int, stop: int) -> FetchRange:
    """Return a run of chunks as one range, with the checksum of each."""
    start = int(rows.byte_start[first_chunk])
    ends, sums = rows.byte_end[first_chunk:stop] - start, rows.crc32c[first_chunk:stop]
    return FetchRange(
        url=url, byte_start=start, byte_end=int(rows.byte_end[stop - 1]),
        first_sample=int(rows.first_sample[first_chunk]),
        num_samples=int(rows.num_samples[first_chunk:stop].sum()), crc32c=None,
        spans=tuple(zip(ends.tolist(), sums.tolist(), strict=True)), shard_bytes=rows.shards[0].size_bytes,
    )  # fmt: skip
