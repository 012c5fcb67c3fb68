"""First-fit allocation of ranges: the bookkeeping behind the arena and the row table."""

from __future__ import annotations

from bisect import bisect_left, insort


class Extents:
    """Free ranges of ``[0, capacity)``, kept sorted and merged. Not thread-safe.

    First fit keeps what is in use near the low end, so that the highest address ever used stays close to the most
    that was ever in use at once.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._free: list[tuple[int, int]] = [(0, capacity)] if capacity else []

    def take(self, size: int) -> int | None:
        """Start of a range of ``size``, or None if no free range is long enough."""
        for i, (start, stop) in enumerate(self._free):
            if stop - start >= size:
                if stop - start == size:
                    del self._free[i]
                else:
                    self._free[i] = (start + size, stop)
                self.used += size
                return start
        return None

    def give(self, start: int, size: int) -> None:
        """Give back a range that ``take`` handed out; neighbouring free ranges are merged."""
        stop = start + size
        i = bisect_left(self._free, (start, stop))
        if i < len(self._free) and self._free[i][0] == stop:
            stop = self._free.pop(i)[1]
        if i > 0 and self._free[i - 1][1] == start:
            start = self._free.pop(i - 1)[0]
        insort(self._free, (start, stop))
        self.used -= size

    def grow(self, capacity: int) -> None:
        """Make the range ``[0, capacity)``; never shrinks."""
        added = capacity - self.capacity
        if added > 0:
            self.used += added
            self.capacity = capacity
            self.give(capacity - added, added)

    def free_ranges(self) -> list[tuple[int, int]]:
        """The free ranges, sorted, merged."""
        return list(self._free)
