"""Read the bytes that the index cannot tell apart: whole spans, verified, of the undecided samples only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from shard_tools.look.diff.rows import AT, KEY, SIZE, SUM, Mask, is_exact, rows_of_table
from shard_tools.look.diff.sides import IndexedSide
from streaming.common.threads import map_threads
from streaming.errors import ChecksumError
from streaming.shards.fetch.checksums import sums_of
from streaming.shards.fetch.pieces import RangePieces, pieces_of
from streaming.shards.fetch.read import fill_checked
from streaming.shards.index.chunk_table import numbers
from streaming.shards.index.sample_table import SampleTable
from streaming.storage import Storage
from streaming.types import Int64Array

_RUN_BYTES = 8 << 20  # one request
_GAP_BYTES = 128 << 10  # for files; a store gets another request instead of reading unneeded bytes
_THREADS = 8  # shards at a time


def exact_rows(side: IndexedSide, wanted: Mask) -> Iterator[tuple[pa.Table, int]]:
    """Yield the rows of the wanted samples of an indexed set, shard by shard, with the checksums of all fields.

    Args:
        side: The set.
        wanted: bool ``[n]``, the samples.

    Yields:
        The rows of a shard, and the number of bytes read for them.

    Raises:
        ChecksumError: The bytes are damaged; `shard_tools verify` lists all damage.
    """
    shards = np.unique(np.searchsorted(side.firsts, np.flatnonzero(wanted), side="right") - 1).tolist()

    def read(position: int) -> tuple[pa.Table, int]:
        first, stop = side.firsts[position : position + 2].tolist()
        return _rows(side, position, wanted[first:stop])

    yield from map_threads(read, shards, _THREADS)


def _rows(side: IndexedSide, position: int, wanted: Mask) -> tuple[pa.Table, int]:
    table = side.table(position)
    rows = rows_of_table(table, int(side.firsts[position]), {})
    chosen = np.flatnonzero(wanted)
    found = {name: numbers(rows.column(SUM + name), np.int64).copy() for name in table.fields}
    masks = {name: wanted & ~is_exact(sums) for name, sums in found.items()}
    num_bytes = 0
    for fields, needed in _grouped(masks, wanted.size):
        for run in _runs(table, needed):
            num_bytes += _sum_run(side.storage, side.urls[position], table, run, fields, needed, found)
    arrays = {name: rows.column(name) for name in (KEY, AT)}
    for name, crcs in found.items():
        arrays |= {SIZE + name: rows.column(SIZE + name), SUM + name: pa.array(crcs)}
    return pa.table(arrays).take(pa.array(chosen)), num_bytes


def _grouped(masks: Mapping[str, Mask], num_samples: int) -> Iterator[tuple[tuple[str, ...], Mask]]:
    """Group samples that need the same fields, so that large fields of other samples are not read."""
    kinds = np.zeros(num_samples, np.int64)
    fields: list[tuple[str, ...]] = [()]
    for name, mask in masks.items():
        # One more field splits every group in two; group numbers stay below the number of groups.
        found, kinds = np.unique(2 * kinds + mask, return_inverse=True)
        fields = [(*fields[kind // 2], name) if kind % 2 else fields[kind // 2] for kind in found.tolist()]
    for kind, names in enumerate(fields):
        if names:
            yield names, kinds == kind


def _runs(table: SampleTable, needed: Mask) -> list[tuple[int, int]]:
    """Return runs of adjacent spans that hold needed samples, each about the size of one request."""
    offsets = table.record_starts[table.span_starts]
    spans = np.searchsorted(table.span_starts, np.flatnonzero(needed), side="right") - 1
    runs: list[tuple[int, int]] = []
    for span in np.unique(spans).tolist():
        if runs and runs[-1][1] == span and offsets[span + 1] - offsets[runs[-1][0]] <= _RUN_BYTES:
            runs[-1] = runs[-1][0], span + 1
        else:
            runs.append((span, span + 1))
    return runs


def _sum_run(
    storage: Storage, url: str, table: SampleTable, run: tuple[int, int], fields: Sequence[str], needed: Mask,
    found: Mapping[str, Int64Array],
) -> int:  # fmt: skip
    """Store the CRC32C of fields of the needed samples of a run of spans in ``found``; return the number of bytes read.

    Raises:
        ChecksumError: The bytes are damaged.
    """
    first, stop = table.span_starts[list(run)].tolist()
    start, end = table.record_starts[[first, stop]].tolist()
    checks = sums_of(table, first, stop, fields, needed[first:stop])
    pieces = pieces_of(checks, start, end, _GAP_BYTES) or RangePieces(ranges=((start, end),))
    with memoryview(bytearray(pieces.num_bytes)) as memory:
        try:
            fill_checked(storage, url, pieces, checks, memory)
        except ChecksumError:  # damaged in the store, or in transit
            fill_checked(storage, url, pieces, checks, memory)
        rows = np.flatnonzero(needed[first:stop]) + first
        for name in fields:
            starts, sizes = (values[rows] for values in table.fields[name])
            places = pieces.located(starts)
            sums = [crc32c(memory[at : at + size]) for at, size in zip(places.tolist(), sizes.tolist(), strict=True)]
            found[name][rows] = sums
    return pieces.num_bytes
