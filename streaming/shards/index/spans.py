"""Sum spans, runs of records, so that a part of a chunk can be read and still be checked.

THE rule, shared by the writer and the indexer: a span closes after the record with which it holds 64 KiB, and where its
chunk closes. Span checksums need no second pass over the bytes: while a chunk is summed, the CRC32C so far is recorded
at the end of each span, and :func:`separate` computes the spans' own checksums from the records, for a whole shard at
once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from streaming.types import SPAN_BYTES, Int64Array

UInt32s = NDArray[np.uint32]

_MAX_RECORDS = SPAN_BYTES // 512  # in one span: a record takes at least a block of 512 bytes
_POLYNOMIAL = 0x82F63B78  # CRC32C, bits reversed


class SpanCutter:
    """Cut a shard's records into spans as they arrive, beside a ``ChunkCutter``. One per shard; not thread-safe."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """Number of bytes in the open span."""

    def add(self, record_bytes: int, *, chunk_closes: bool) -> bool:
        """Add one record. Return whether the span closes after it."""
        self.num_bytes += record_bytes
        if not chunk_closes and self.num_bytes < SPAN_BYTES:
            return False
        self.num_bytes = 0
        return True

    def extend(self, record_starts: Int64Array, chunk_cuts: Iterable[int]) -> list[int]:
        """Add the records ``[record_starts[i], record_starts[i + 1])``: ``add`` for many.

        Args:
            record_starts: int64 ``[n + 1]``, increasing.
            chunk_cuts: The result of ``ChunkCutter.extend`` for them.

        Returns:
            Increasing: contains ``i`` if a span closes after record ``i - 1``. Includes every chunk cut.
        """
        starts = np.ascontiguousarray(record_starts).data
        last = len(starts) - 1
        cuts: list[int] = []
        at, begin = 0, starts[0] - self.num_bytes
        for stop, chunk_closes in [*((cut, True) for cut in chunk_cuts), (last, False)]:
            while at < stop:
                cut = bisect_left(starts, begin + SPAN_BYTES, at + 1, min(stop, at + _MAX_RECORDS))
                if cut == stop and not chunk_closes and starts[stop] - begin < SPAN_BYTES:
                    break
                cuts.append(cut)
                at, begin = cut, starts[cut]
        self.num_bytes = starts[last] - begin
        return cuts


def spans_of(
    record_starts: Int64Array, chunk_bounds: ArrayLike, span_starts: ArrayLike, running: ArrayLike
) -> tuple[Int64Array, UInt32s]:
    """Return ``span_starts`` and ``span_crc32c`` of a sample table from the CRC32C at the end of each of ``S`` spans.

    Args:
        record_starts: int64 ``[n + 1]``.
        chunk_bounds: ``[C + 1]``: the first sample of each chunk, and ``n``.
        span_starts: ``[S + 1]``: the first sample of each span, and ``n``.
        running: ``[S]``: CRC32C of the chunk's bytes up to the end of each span.
    """
    starts = np.asarray(span_starts, np.int64)
    firsts = np.isin(starts[:-1], np.asarray(chunk_bounds, np.int64))
    return starts, separate(np.asarray(running, np.uint32), np.diff(record_starts[starts]), firsts)


def separate(running: UInt32s, sizes: Int64Array, chunk_firsts: NDArray[np.bool_]) -> UInt32s:
    """Return the CRC32C of each of ``S`` spans, from the CRC32C of the chunk's bytes up to the end of each.

    Args:
        running: uint32 ``[S]``.
        sizes: int64 ``[S]``, bytes of each span.
        chunk_firsts: bool ``[S]``, whether a span is the first of its chunk.
    """
    if not running.size:
        return running
    before = np.where(chunk_firsts, np.uint32(0), np.concatenate((running[:1], running[:-1])))
    return running ^ followed_by_zeros(before.astype(np.uint32), sizes)


def joined_crc32c(crcs: UInt32s, sizes: Int64Array, begins: Int64Array) -> UInt32s:
    """Return the CRC32C of each of ``U`` runs of consecutive pieces, from those of the ``S`` pieces.

    Args:
        crcs: uint32 ``[S]``.
        sizes: int64 ``[S]``, bytes of each piece.
        begins: int64 ``[U]``, the first piece of each run, increasing from 0; a run ends where the next one begins.
    """
    ends = np.cumsum(sizes)
    runs = np.repeat(np.append(ends[begins[1:] - 1], ends[-1:]), np.diff(np.append(begins, len(crcs))))
    found: UInt32s = np.bitwise_xor.reduceat(followed_by_zeros(crcs, runs - ends), begins)
    return found


def followed_by_zeros(crcs: UInt32s, num_bytes: Int64Array) -> UInt32s:
    """Return the part of a prefix's CRC32C in that of the whole when ``num_bytes`` bytes follow."""
    bit = 0
    while (num_bytes >> bit).any():
        chosen = (num_bytes >> bit & 1).astype(np.bool_)
        if chosen.any():
            crcs = np.where(chosen, _apply(_operator(bit), crcs), crcs)
        bit += 1
    return crcs


def _apply(operator: UInt32s, values: UInt32s) -> UInt32s:
    """Apply a linear map of 32 bits, given by its values for each single byte, uint32 ``[4, 256]``."""
    parts = [operator[place][values >> np.uint32(8 * place) & np.uint32(255)] for place in range(4)]
    found: UInt32s = parts[0] ^ parts[1] ^ parts[2] ^ parts[3]
    return found


@cache
def _operator(bit: int) -> UInt32s:
    """Return the effect of ``2 ** bit`` zero bytes on a CRC32C, as a linear map."""
    if bit:
        half = _operator(bit - 1)
        return _apply(half, half)
    values = np.arange(256, dtype=np.uint32) << (np.arange(4, dtype=np.uint32) * np.uint32(8))[:, None]
    for _ in range(8):
        values = values >> np.uint32(1) ^ (values & np.uint32(1)) * np.uint32(_POLYNOMIAL)
    return values
