"""Record, as columns, the place in the arena of every field of every resident sample: the row table."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from streaming.build.batches.rows import FieldRange
from streaming.errors import DataError
from streaming.run.engine.memory.arena import Extents
from streaming.shards.fetch.layout import UnitLayout
from streaming.types import Int64Array


class RowTable:
    """Columns over all resident samples; a row number is a sample's index in them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._extents = Extents(0)
        self._keys: npt.NDArray[np.object_] = np.empty(0, np.object_)
        self._fields: dict[str, tuple[Int64Array, Int64Array]] = {}
        self._damage: dict[int, DataError] = {}

    def add(self, layout: UnitLayout, base: int) -> int:
        """Enter a chunk whose bytes start at ``base`` in the arena. Return the row of its first sample."""
        num_samples = len(layout.keys)
        with self._lock:
            # The rows are complete before anyone knows their number; fields that the chunk lacks have size -1.
            while (first := self._extents.take(num_samples)) is None:
                self._grow(num_samples)
            rows = slice(first, first + num_samples)
            self._keys[rows] = layout.keys
            for name in layout.fields:
                if name not in self._fields:
                    self._fields[name] = self._column()
            columns = {name: column for column, name in enumerate(layout.fields)}
            for name, (starts, sizes) in self._fields.items():
                column = columns.get(name)
                if column is None:
                    sizes[rows] = -1
                    continue
                there = layout.starts[:, column]
                np.add(there, base, out=starts[rows])
                sizes[rows] = layout.sizes[:, column]
                if there.min(initial=0) < 0:
                    starts[rows][there < -1] = there[there < -1]  # distant fields are not in memory
                    sizes[rows][there == -1] = -1
            self._damage.update((first + number, error) for number, error in layout.damage.items())
        return first

    def remove(self, first: int, num_samples: int) -> None:
        """Free the rows of a chunk."""
        with self._lock:
            # Freed rows have no damage: the next chunk that gets them begins without any.
            self._extents.give(first, num_samples)
            for row in [row for row in self._damage if first <= row < first + num_samples]:
                del self._damage[row]

    def damage(self, rows: Int64Array) -> dict[int, DataError]:
        """Return the damaged rows among the given ones, by index into ``rows``, with the error of each."""
        with self._lock:
            # The caller holds the chunks of these rows, so none of them is removed meanwhile.
            if not self._damage:
                return {}
            known = self._damage
            return {place: known[row] for place, row in enumerate(rows.tolist()) if row in known}

    def select(self, rows: Int64Array, fields: tuple[str, ...] | None) -> tuple[list[str], dict[str, FieldRange]]:
        """Return the keys of some rows and the locations of their fields: the given ones, or all that any row has.

        The result does not depend on other rows: a given field is present even if no row has it.
        """
        with self._lock:
            # add() may enlarge, and replace, columns; the copies come from one state of them.
            found: list[str] = self._keys[rows].tolist()
            ranges: dict[str, FieldRange] = {}
            for name in sorted(self._fields) if fields is None else fields:
                column = self._fields.get(name)
                if column is None:
                    ranges[name] = FieldRange(starts=np.zeros_like(rows), sizes=np.full_like(rows, -1))
                    continue
                sizes = column[1][rows]
                if fields is not None or sizes.max(initial=-1) >= 0:
                    ranges[name] = FieldRange(starts=column[0][rows], sizes=sizes)
        return found, ranges

    def _column(self) -> tuple[Int64Array, Int64Array]:
        capacity = self._extents.capacity
        return np.zeros(capacity, np.int64), np.full(capacity, -1, np.int64)

    def _grow(self, num_samples: int) -> None:
        """Make room for ``num_samples`` more contiguous rows, at least doubling."""
        old = self._extents.capacity
        self._extents.grow(max(4096, 2 * old, old + num_samples))
        self._keys = np.concatenate([self._keys, np.full(self._extents.capacity - old, "", np.object_)])
        for name, (starts, sizes) in self._fields.items():
            grown = self._column()
            grown[0][:old], grown[1][:old] = starts, sizes
            self._fields[name] = grown
