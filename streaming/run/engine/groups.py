"""Look up batches in groups if they are only copied from memory.

The bookkeeping for such a batch would cost more than the copy. So the rows of all ready batches, up to a bound, are
looked up together. Units are therefore released slightly later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from streaming.build.batches.build import GroupedRows, Mask, Recipe, RowColumns
from streaming.build.batches.jagged import Allocate
from streaming.build.batches.rows import Cuts, Rows, cut_up, has_empty, scaled
from streaming.run.engine.builders import is_trivial
from streaming.run.engine.units import Block

_GROUP_BYTES = 16 << 20
"""Bound on a group: its rows should still be in the CPU caches when they are copied, as with
``GroupedRows.group_rows``."""
_SHARE = 16
"""Part of the arena that a group takes at most, because its units are released only at its end."""

Select = Callable[[Block, slice], Rows | None]
"""Returns the samples of a span of a block; None if they have to be built batch by batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Batches ``[first, last)``; batch ``first + i`` has the rows ``splits[i]`` to ``splits[i + 1]`` of ``columns``.

    Attributes:
        rows: The samples of all batches.
        allocate: Allocator for their tensors; None: fresh memory.
        columns: The rows as columns, from which batches are copied into that memory.
        cuts: Where the rows of each batch are cut into micro-batches.
    """

    first: int
    last: int
    splits: list[int]
    rows: Rows
    allocate: Allocate | None
    columns: RowColumns
    valid: Mask
    cuts: Sequence[Cuts]

    def batch(self, number: int, recipe: Recipe) -> Any:
        """Return one of the batches.

        Raises:
            DecodeError: A value cannot be decoded. Decode row by row to find it.
        """
        low, high = self.splits[number - self.first : number - self.first + 2]

        def make(first: int, stop: int) -> Any:
            first, stop = first + low, stop + low
            valid = None if self.valid is None else self.valid[first:stop]
            return recipe.whole(self.columns.batch(first, stop), recipe.mask_of(stop - first, valid), stop - first)

        return cut_up(self.cuts[number - self.first], high - low, make)


class BatchGroups:
    """Open one group after another, each sized according to the one before. Not thread-safe."""

    def __init__(self, recipe: Recipe, arena_bytes: int, *, padded: bool, cuts: Callable[[int, int], Cuts]) -> None:
        self._recipe = recipe
        self._padded = padded
        self._cuts = cuts
        self._kind = recipe.items.grouped
        self._max_bytes = min(_GROUP_BYTES, arena_bytes // _SHARE)
        self._num_batches = 1  # in the next group; 0: samples differ too much for groups

    def open(
        self, block: Block, first: int, frontier: int, select: Select, allocate: Allocate | None, each: int = 1
    ) -> Group | None:
        """Return the group of the batches from ``first`` on, below ``frontier``; None: build them one by one.

        The content of a batch does not depend on its group. Rows that lack a field or are damaged, and batches without
        rows, do not form groups. Each planned row makes ``each`` rows of a batch, in all batches of a group.
        """
        last = min(first + self._num_batches, block.last, frontier)
        if last == first or self._kind is None:
            return None
        splits = block.rows.row_splits[first - block.first : last - block.first + 1]
        span, counts = slice(int(splits[0]), int(splits[-1])), np.diff(splits)
        cuts = [scaled(self._cuts(first + one, count), each) for one, count in enumerate(counts.tolist())]
        rows = select(block, span) if (counts > 0).all() and not any(map(has_empty, cuts)) else None
        if rows is None:
            self._num_batches = max(1, self._num_batches // 2)
            return None
        # The batch that decided on groups may have lacked a field of these batches that needs decoding.
        if not is_trivial(self._recipe, rows.fields) or any((one.sizes < 0).any() for one in rows.fields.values()):
            self._num_batches = 0
            return None
        num_bytes = sum(int(where.sizes.sum()) for where in rows.fields.values())
        fitting = min(self._kind.group_rows / len(rows.keys), self._max_bytes / max(1, num_bytes))
        self._num_batches = max(1, int((last - first) * fitting))
        return Group(
            first=first,
            last=last,
            splits=((splits - splits[0]) * each).tolist(),
            rows=rows,
            allocate=allocate,
            columns=self._columns(self._kind, rows, allocate),
            valid=block.rows.valid[span].repeat(each) if self._padded else None,
            cuts=cuts,
        )

    def moved(self, group: Group, allocate: Allocate | None) -> Group:
        """Return the same group with another allocator for its batches."""
        assert self._kind is not None, "it was opened"  # noqa: S101
        return replace(group, allocate=allocate, columns=self._columns(self._kind, group.rows, allocate))

    def _columns(self, kind: GroupedRows, rows: Rows, allocate: Allocate | None) -> RowColumns:
        return kind.columns(self._recipe, rows, allocate if self._recipe.portion.is_whole else None)
