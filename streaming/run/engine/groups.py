"""Look up batches in groups if they are only copied from memory.

The book-keeping for such a batch would cost more than the copy. So the rows of all ready batches, up to a bound, are
looked up together; units are released only slightly later because of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from streaming.build.batches.build import Mask, Recipe, RowColumns
from streaming.build.batches.jagged import Allocate
from streaming.build.batches.rows import Cuts, Rows, cut_up, has_empty, scaled
from streaming.run.engine.builders import is_trivial
from streaming.run.engine.units import Block

_GROUP_BYTES = 16 << 20
"""Bound on a group: what is looked up should still be in the CPU caches when it is copied, as with
``RowKind.group_rows``."""
_SHARE = 16
"""A group also takes at most this part of the arena, because its units are released only at its end."""

Select = Callable[[Block, slice], Rows | None]
"""Returns the samples of a span of a block; None if they are to be built batch by batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Batches ``[first, last)``; batch ``first + i`` has the rows ``splits[i]`` to ``splits[i + 1]`` of ``columns``.

    Attributes:
        rows: All their samples.
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
            DecodeError: A value cannot be decoded; decode row by row to find which.
        """
        low, high = self.splits[number - self.first : number - self.first + 2]

        def make(first: int, stop: int) -> Any:
            first, stop = first + low, stop + low
            valid = None if self.valid is None else self.valid[first:stop]
            return recipe.whole(self.columns.batch(first, stop), recipe.mask_of(stop - first, valid), stop - first)

        return cut_up(self.cuts[number - self.first], high - low, make)


class BatchGroups:
    """Open one group after another, each sized according to the previous one. Not thread-safe."""

    def __init__(self, recipe: Recipe, arena_bytes: int, *, padded: bool, cuts: Callable[[int, int], Cuts]) -> None:
        self._recipe = recipe
        self._padded = padded
        self._cuts = cuts
        self._max_rows = recipe.items.group_rows
        self._max_bytes = min(_GROUP_BYTES, arena_bytes // _SHARE)
        self._num_batches = 1  # in the next group; 0: the samples are too different for groups

    def open(
        self, block: Block, first: int, frontier: int, select: Select, allocate: Allocate | None, each: int = 1
    ) -> Group | None:
        """Return the group of the batches from ``first`` on, below ``frontier``, or None to build them one by one.

        The content of a batch does not depend on its group: rows that lack a field or are damaged, and batches without
        rows, do not form groups. Each planned row makes ``each`` rows of a batch, in all batches of a group.
        """
        last = min(first + self._num_batches, block.last, frontier)
        if last == first:
            return None
        splits = block.rows.row_splits[first - block.first : last - block.first + 1]
        span, counts = slice(int(splits[0]), int(splits[-1])), np.diff(splits)
        cuts = [scaled(self._cuts(first + one, count), each) for one, count in enumerate(counts.tolist())]
        rows = select(block, span) if (counts > 0).all() and not any(map(has_empty, cuts)) else None
        if rows is None:
            self._num_batches = max(1, self._num_batches // 2)
            return None
        # The batch that decided on groups may have lacked a field that these have, and that is decoded.
        if not is_trivial(self._recipe, rows.fields) or any((one.sizes < 0).any() for one in rows.fields.values()):
            self._num_batches = 0
            return None
        num_bytes = sum(int(where.sizes.sum()) for where in rows.fields.values())
        fitting = min(self._max_rows / len(rows.keys), self._max_bytes / max(1, num_bytes))
        self._num_batches = max(1, int((last - first) * fitting))
        return Group(
            first=first,
            last=last,
            splits=((splits - splits[0]) * each).tolist(),
            rows=rows,
            allocate=allocate,
            columns=self._columns(rows, allocate),
            valid=block.rows.valid[span].repeat(each) if self._padded else None,
            cuts=cuts,
        )

    def moved(self, group: Group, allocate: Allocate | None) -> Group:
        """Return the same group with another allocator for its batches."""
        return replace(group, allocate=allocate, columns=self._columns(group.rows, allocate))

    def _columns(self, rows: Rows, allocate: Allocate | None) -> RowColumns:
        recipe = self._recipe
        return recipe.items.columns(recipe, rows, allocate if recipe.portion.is_whole else None)
