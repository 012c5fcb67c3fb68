"""Cut chunks into smaller fetch units: runs of whole spans, which have checksums of their own.

The result is again a chunk table, with more and smaller rows over the same shards, so readers of chunks read units.
Each byte is in one unit, and each unit has a CRC32C, which follows from those of its spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from streaming.common.job.shared_results import Peers, framed, part_of, shared_parts, unframed
from streaming.common.threads import on_threads
from streaming.errors import IndexMissingError, shell_place
from streaming.shards.catalog.open import OpenShards, digest_of, spans_of_shard
from streaming.shards.catalog.random_access import TABLE_REQUESTS
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.sample_table import Spans
from streaming.shards.index.spans import joined_crc32c
from streaming.storage import Storage, redact
from streaming.types import Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A set to cut, and the size of its units.

    Attributes:
        storage: The store of the shards.
        shards: The shards, with their whole chunk table.
        table: That table.
        unit_bytes: Approximate size of a unit in bytes: it ends at the border of spans nearest to that.
    """

    storage: Storage
    shards: OpenShards
    table: ChunkTable
    unit_bytes: int


def cut_tables(cuts: Sequence[Cut], peers: Peers | None = None) -> list[ChunkTable]:
    """Return the table of the units of each set; a set without a chunk larger than a unit keeps its own.

    Reads the sample table of every shard with a larger chunk, for all sets in parallel. With peers, each rank reads a
    part of them.

    Raises:
        IndexMissingError: A shard that has to be cut has no sample table.
        IndexFormatError, IndexMismatchError, StorageError: A sample table cannot be read, or is of another shard.
    """
    jobs = [(at, shard) for at, cut in enumerate(cuts) for shard in _larger(cut.table, cut.unit_bytes)]
    found: dict[tuple[int, int], Int64Array] = {}
    if jobs:
        name = digest_of([[list(cut.shards.urls), cut.shards.index, cut.unit_bytes] for cut in cuts])

        def part(rank: int, world_size: int) -> bytes:
            mine = [jobs[number] for number in part_of(len(jobs), rank, world_size)]
            units = on_threads(
                lambda job: _units_of(cuts[job[0]], job[1]), mine, TABLE_REQUESTS, name="shardstream-units"
            )
            return framed({"counts": [one.shape[1] for one in units]}, *(one.tobytes() for one in units))

        parts = shared_parts(peers, f"units/{name}", part)
        for rank, data in enumerate(parts):
            head, at = unframed(data)
            for number, count in zip(part_of(len(jobs), rank, len(parts)), head["counts"], strict=True):
                found[jobs[number]] = np.frombuffer(data, np.int64, 5 * count, at).reshape(5, count)
                at += 40 * count
    return [_table_of(cut.table, {shard: one for (at, shard), one in found.items() if at == place})
            for place, cut in enumerate(cuts)]  # fmt: skip


def _larger(table: ChunkTable, unit_bytes: int) -> list[int]:
    """Return the shards with a chunk that is larger than a unit."""
    shards: list[int] = np.unique(table.shard[table.chunk_bytes > unit_bytes]).tolist()
    return shards


def _units_of(cut: Cut, shard: int) -> Int64Array:
    """Return the units of one shard, int64 [5, n]: ``first_sample``, ``num_samples``, bytes, and CRC32C."""
    shown = redact(cut.shards.urls[shard])
    spans = spans_of_shard(cut.storage, cut.shards, shard)
    if spans is None:
        raise IndexMissingError(
            f"fetch_bytes: {shown} has no sample table, which says where a chunk can be cut; write it with "
            f"`shard_tools index {shell_place(cut.shards.urls[shard])}`"
        )
    return units_of(spans, cut.unit_bytes)


def units_of(spans: Spans, unit_bytes: int) -> Int64Array:
    """Cut the chunks of a shard into ceil(bytes / unit_bytes) units each, at the span borders nearest to equal parts.

    A unit is larger than ``unit_bytes`` by less than a span, and has at least one span.

    Returns:
        int64 [5, n]: ``first_sample``, ``num_samples``, ``byte_start``, ``byte_end`` and ``crc32c`` of the units.
    """
    table, starts = spans.chunks, spans.byte_starts
    chunk = np.searchsorted(table.byte_start, starts, side="right") - 1
    ends = np.append(starts[1:], table.byte_end[-1])
    size = table.chunk_bytes[chunk]
    parts = -(-size // unit_bytes)
    middle = (starts + ends) // 2 - table.byte_start[chunk]
    number = middle * parts // size  # int64 [spans], unit in the chunk: the part that has the span's middle
    begins = np.flatnonzero(np.concatenate(([True], (np.diff(chunk) != 0) | (np.diff(number) != 0))))
    stops = np.append(begins[1:], len(starts))
    firsts = spans.firsts[begins]
    counts = np.append(spans.firsts, table.shards[0].num_samples)[stops] - firsts
    sums = joined_crc32c(spans.crc32c, ends - starts, begins)
    return np.stack([firsts, counts, starts[begins], ends[stops - 1], sums.astype(np.int64)])


def _table_of(whole: ChunkTable, units: dict[int, Int64Array]) -> ChunkTable:
    """Return a table with the units of some shards instead of their chunks."""
    if not units:
        return whole
    names = ("first_sample", "num_samples", "byte_start", "byte_end", "crc32c")
    parts: list[tuple[int, Int64Array]] = []
    for shard in range(len(whole.shards)):
        low, high = whole.rows_of(shard)
        rows = np.stack([getattr(whole, name)[low:high].astype(np.int64) for name in names])
        parts.append((shard, units.get(shard, rows)))
    columns = np.concatenate([rows for _, rows in parts], axis=1)
    shard_column = np.repeat([shard for shard, _ in parts], [rows.shape[1] for _, rows in parts])
    return ChunkTable(shards=whole.shards, shard=shard_column, **dict(zip(names, columns, strict=True)))
