"""Compare runs of samples that both sets hold in the same order, by joined checksums of spans.

Sets cut into different shards have different spans, but within a run of the same samples some borders coincide. Whole
spans of both sets lie between two such borders. Their checksums determine that of all bytes in between (the CRC32C of
A then B follows from those of A and B, and B's length), so equal runs are found without being read::


    A   |--span--|----span----|--span--|---
    B      ...---|--span--|--span--|span|--...     compared between the first and the last shared |
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shard_tools.change.sets.open_set import READ_THREADS
from shard_tools.look.diff.rows import Mask
from shard_tools.look.diff.sides import IndexedSide
from streaming.common.arrays import sums
from streaming.common.threads import map_threads
from streaming.shards.index.spans import joined_crc32c
from streaming.types import Int64Array

_SAMPLE_BYTES = 128  # per sample of a window, with its spans and temporary arrays


class Partners:
    """Map samples of the first set to the sample of the second with the same key, where only bytes can decide.

    Takes eight bytes per sample of the first set, in a memory-mapped file if that exceeds ``memory_bytes``.
    """

    def __init__(self, num_samples: int, *, memory_bytes: int, folder: str) -> None:
        self._numbers: Int64Array
        if 8 * num_samples <= memory_bytes:
            self._numbers = np.zeros(num_samples, np.int64)
        else:
            path = os.path.join(folder, "partners")
            self._numbers = np.memmap(path, np.int64, "w+", shape=(num_samples,))

    def add(self, a: Int64Array, b: Int64Array) -> None:
        """Record that these samples have the same keys."""
        self._numbers[a] = b + 1  # 0: none

    def between(self, first: int, stop: int) -> tuple[Int64Array, Int64Array]:
        """Return the samples in ``[first, stop)`` of the first set that have a partner, and their partners."""
        numbers = np.asarray(self._numbers[first:stop])
        there = np.flatnonzero(numbers)
        return there + first, numbers[there] - 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Spans:
    """Spans of some shards, in the order of the set: first sample, end sample, bytes, CRC32C."""

    firsts: Int64Array
    stops: Int64Array
    sizes: Int64Array
    crc32c: np.ndarray[tuple[int], np.dtype[np.uint32]]

    def has_border(self, samples: Int64Array) -> Mask:
        """Return a mask of samples at which a span begins or ends."""
        borders = np.union1d(self.firsts, self.stops)
        places = np.minimum(np.searchsorted(borders, samples), max(0, borders.size - 1))
        return np.asarray(borders[places] == samples if borders.size else np.zeros(samples.size, np.bool_))

    def joined(self, begins: Int64Array, ends: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return bytes and CRC32C of sections of samples, each tiled by whole spans."""
        low, high = np.searchsorted(self.firsts, begins), np.searchsorted(self.firsts, ends)
        starts = sums(high - low)
        spans = np.repeat(low - starts[:-1], high - low) + np.arange(starts[-1])
        sizes = self.sizes[spans]
        totals = np.add.reduceat(sizes, starts[:-1])
        return totals, joined_crc32c(self.crc32c[spans], sizes, starts[:-1]).astype(np.int64)


def equal_runs(
    sides: tuple[IndexedSide, IndexedSide], partners: Partners, memory_bytes: int
) -> Iterator[tuple[Int64Array, Int64Array]]:
    """Yield samples of the first set whose bytes equal those of their partners by joined checksums, and the partners.

    Works in windows of shards of the first set that take at most ``memory_bytes``. A run that continues in the next
    window is cut there.
    """
    for first, stop in _windows(sides[0], max(1, memory_bytes // _SAMPLE_BYTES)):
        a, b = partners.between(first, stop)
        if a.size:
            found = _equal_in(sides, a, b)
            if found[0].size:
                yield found


def _windows(side: IndexedSide, most_samples: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of samples of whole shards, at most ``most_samples`` each; a single shard may have more."""
    first = 0
    for before, stop in zip(side.firsts[1:-1].tolist(), side.firsts[2:].tolist(), strict=True):
        if stop - first > most_samples:
            yield first, before
            first = before
    yield first, int(side.firsts[-1])


def _equal_in(sides: tuple[IndexedSide, IndexedSide], a: Int64Array, b: Int64Array) -> tuple[Int64Array, Int64Array]:
    breaks = np.flatnonzero((np.diff(a) != 1) | (np.diff(b) != 1)) + 1
    borders = np.concatenate(([0], breaks, [a.size]))
    lengths = np.diff(borders)
    is_long = lengths > 1  # a single sample was already compared by its own span
    begins, lengths = borders[:-1][is_long], lengths[is_long]
    if not begins.size:
        return a[:0], b[:0]
    # Borders inside a run, and both its ends: the run, and the sample of either set.
    run = np.repeat(np.arange(lengths.size), lengths + 1)
    offsets = np.arange(run.size) - np.repeat(sums(lengths + 1)[:-1], lengths + 1)
    at_a, at_b = a[begins][run] + offsets, b[begins][run] + offsets
    spans_a, spans_b = _spans(sides[0], at_a), _spans(sides[1], at_b)
    common = np.flatnonzero(spans_a.has_border(at_a) & spans_b.has_border(at_b))
    low, high = common[:-1], common[1:]
    inside = run[low] == run[high]
    low, high = low[inside], high[inside]
    if not low.size:
        return a[:0], b[:0]
    size_a, crc_a = spans_a.joined(at_a[low], at_a[high])
    size_b, crc_b = spans_b.joined(at_b[low], at_b[high])
    equal = (size_a == size_b) & (crc_a == crc_b)
    counts = (high - low)[equal]
    places = np.repeat(low[equal] - sums(counts)[:-1], counts) + np.arange(int(counts.sum()))
    return at_a[places], at_b[places]


def _spans(side: IndexedSide, samples: Int64Array) -> _Spans:
    """Return the spans of all shards that hold any of these samples."""
    last = int(side.firsts[-1]) - 1
    shards = np.unique(np.searchsorted(side.firsts, np.minimum(samples, last), side="right") - 1).tolist()
    parts = [
        (
            found.firsts + side.firsts[shard],
            found.byte_starts,
            found.crc32c,
            side.firsts[shard + 1],
            found.chunks.byte_end,
        )
        for shard, found in zip(shards, map_threads(side.spans, shards, READ_THREADS), strict=True)
        if found.firsts.size
    ]
    return _Spans(
        firsts=np.concatenate([firsts for firsts, *_ in parts]),
        stops=np.concatenate([np.append(firsts[1:], stop) for firsts, _, _, stop, _ in parts]),
        sizes=np.concatenate([np.diff(np.append(starts, ends[-1])) for _, starts, _, _, ends in parts]),
        crc32c=np.concatenate([crcs for _, _, crcs, _, _ in parts]),
    )
