"""Choose the pieces of a range to read for some fields, weighing bytes against requests."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from streaming.shards.fetch.checksums import Sum
from streaming.types import Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class RangePieces:
    """Ranges of a shard that are contiguous in memory.

    Attributes:
        ranges: Half-open, non-empty, in order; they do not touch.
        heads: First byte of each range in the shard.
        places: First byte of each range in memory, and the number of all bytes.
    """

    ranges: tuple[tuple[int, int], ...]
    heads: tuple[int, ...] = field(init=False)
    places: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "heads", tuple(start for start, _ in self.ranges))
        object.__setattr__(self, "places", tuple(accumulate((end - start for start, end in self.ranges), initial=0)))

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all ranges."""
        return self.places[-1]

    def located(self, offsets: Int64Array) -> Int64Array:
        """Return the places in memory of bytes of the shard, int64 of the same shape.

        Meaningless for bytes that were not read.
        """
        if not self.ranges:
            return np.zeros_like(offsets)
        heads = np.array(self.heads, np.int64)
        which = np.maximum(np.searchsorted(heads, offsets, side="right") - 1, 0)
        return offsets - heads[which] + np.array(self.places, np.int64)[which]

    def parts(self, memory: memoryview, ranges: Iterable[tuple[int, int]]) -> list[memoryview]:
        """Return the bytes of ranges. Each range must be inside one of the pieces."""
        found = []
        for start, end in ranges:
            which = bisect_right(self.heads, start) - 1
            at = self.places[which] + start - self.heads[which]
            found.append(memory[at : at + end - start])
        return found


def pieces_of(sums: Iterable[Sum], start: int, end: int, gap_bytes: int) -> RangePieces | None:
    """Return the pieces of ``[start, end)`` to read so that ``sums`` can be checked; None to read it as a whole.

    A gap of less than ``gap_bytes`` is read too, and a range is cut only if that saves as much: a request is assumed to
    cost as much as reading that number of bytes.
    """
    ranges: list[tuple[int, int]] = []
    for low, high in sorted(one for found in sums for one in found.ranges):
        if ranges and low - ranges[-1][1] < gap_bytes:
            ranges[-1] = ranges[-1][0], max(high, ranges[-1][1])
        else:
            ranges.append((low, high))
    pieces = RangePieces(ranges=tuple(ranges))
    return pieces if end - start - pieces.num_bytes >= gap_bytes else None
