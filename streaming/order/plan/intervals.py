"""Represent the intervals of batches in which a rank needs chunks, and merge such intervals."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from streaming.common.arrays import IntColumns, sums
from streaming.types import Int64Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkIntervals(IntColumns):
    """Intervals, in batches of one rank, in which chunks are needed; sorted by ``first_batches``.

    A chunk across a lane border is needed late in one lane and early in the next: it has two rows, and is fetched twice
    instead of being held for long. Rows of one chunk in one pass neither overlap nor touch.

    Attributes:
        chunk_ids: int64 [n], chunk id in the dataset.
        passes: int64 [n], pass of the stream.
        first_batches: int64 [n]: no batch before this uses the chunk (since the previous row).
        last_batches: int64 [n]: no batch after this uses the chunk (until the next row).
    """

    chunk_ids: Int64Array
    passes: Int64Array
    first_batches: Int64Array
    last_batches: Int64Array

    @classmethod
    def merged(cls, ids: Int64Array, first: Int64Array, last: Int64Array, pass_number: int) -> Self:
        """Make the intervals of one pass, given in any order; merge overlapping or adjacent ones of a chunk."""
        ids, first, last = _merged(ids, first, last)
        by_time = np.argsort(first, kind="stable")
        passes = np.full(len(ids), pass_number, np.int64)
        return cls(chunk_ids=ids[by_time], passes=passes, first_batches=first[by_time], last_batches=last[by_time])

    def begun(self, chunk_ids: Int64Array, first_uses: Int64Array, num_batches: int) -> Self:
        """Return the intervals; those that begin in the first batches now begin at the first use of their chunk.

        Args:
            chunk_ids: int64 [m], sorted: the chunks that these batches use.
            first_uses: int64 [m], the first batch that uses each.
            num_batches: Number of batches examined; no other chunk is used in them.
        """
        places = np.searchsorted(chunk_ids, self.chunk_ids)
        is_used = np.append(chunk_ids, -1)[places] == self.chunk_ids
        uses = np.where(is_used, np.append(first_uses, num_batches)[places], num_batches)
        first = np.maximum(self.first_batches, uses)
        there = np.flatnonzero(first <= self.last_batches)
        by_time = there[np.argsort(first[there], kind="stable")]
        return replace(self, first_batches=first).taken(by_time)

    def live_bytes(self, chunk_bytes: Int64Array) -> int:
        """Return the maximum bytes needed at the same time, given the bytes of each chunk, int64 [C]."""
        changes = chunk_bytes[self.chunk_ids]
        # [2 n]: each interval takes its bytes in its first batch, and frees them after its last. In a batch, bytes are
        # freed before others are taken.
        times = np.concatenate([self.last_batches + 1, self.first_batches])
        changes = np.concatenate([-changes, changes])[np.argsort(times, kind="stable")]
        return int(changes.cumsum().max(initial=0))


def _merged(ids: Int64Array, first: Int64Array, last: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Merge overlapping or adjacent intervals of each chunk; int64 [n] each, in any order."""
    # The cost of counting depends on the largest id, that of sorting on the number of ids, which is small on one of
    # many ranks.
    if len(ids) and int(ids.max()) < 16 * len(ids):
        shared = np.bincount(ids)[ids] > 1
    else:
        _, inverse, counts = np.unique(ids, return_inverse=True, return_counts=True)
        shared = counts[inverse] > 1
    if not shared.any():  # otherwise, sort only the few chunks with several intervals
        return ids, first, last
    rest = ids[~shared], first[~shared], last[~shared]
    by_chunk = np.lexsort((first[shared], ids[shared]))
    ids, first, last = ids[shared][by_chunk], first[shared][by_chunk], last[shared][by_chunk]
    # Shift the times of each chunk beyond those of the previous chunk, so that one running maximum serves all.
    shift = sums(np.diff(ids) != 0) * (int(last.max()) + 3)
    reached = np.maximum.accumulate(last + shift)
    edges = np.flatnonzero(np.concatenate([[True], first[1:] + shift[1:] > reached[:-1] + 1]))
    joined = ids[edges], first[edges], np.maximum.reduceat(last, edges)
    ids, first, last = (np.concatenate(both) for both in zip(rest, joined, strict=True))
    return ids, first, last
