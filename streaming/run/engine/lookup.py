"""Find the samples of planned rows in memory, for one rank and one plan: ``Lookup``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from streaming.build.batches.build import BadSample, Recipe
from streaming.build.batches.rows import PlannedRows, Rows
from streaming.errors import DataError
from streaming.order.plan.plan import Plan
from streaming.run.engine.memory.chunk_store import ChunkStore, Unit
from streaming.run.engine.source import Source
from streaming.run.engine.substitutes import Substitutes
from streaming.run.engine.units import Block
from streaming.types import Int64Array


class Lookup:
    """Track which units have arrived, and where their samples lie. A ``Stock``.

    Args:
        plan: The plan.
        source: The dataset.
        store: Contents of the arena.
        recipe: How rows become batches.
        fields: Fields to read; None: all.
    """

    def __init__(
        self, plan: Plan, source: Source, store: ChunkStore, recipe: Recipe, fields: tuple[str, ...] | None
    ) -> None:
        self.source: Any = source
        self.seed = plan.settings.seed
        self._plan, self._source, self._store, self._recipe, self._fields = plan, source, store, recipe, fields
        self._read_distant = source.read_distant
        self._epoch_start = plan.epoch * plan.num_samples
        self._first_rows = np.full(len(plan.chunk_samples) + 1, -1, np.int64)
        self._damage: dict[int, DataError] = {}
        self._first_numbers = recipe.items.first_numbers(plan.chunk_samples)

    # --- under the engine's lock ---

    def arrived(self, number: int, unit: Unit, lead: int) -> None:
        """Record that a unit is in memory, or damaged."""
        if number >= len(self._first_rows):
            grown = np.full(2 * number + 1, -1, np.int64)
            grown[: len(self._first_rows)] = self._first_rows
            self._first_rows = grown
        self._first_rows[number] = -1 if unit.first_row < 0 else unit.first_row + lead
        if unit.damage is not None:
            self._damage[number] = unit.damage

    def chosen(self, block: Block, span: Int64Array | slice) -> tuple[PlannedRows, dict[int, DataError]]:
        """Return some rows of a block whose units have all arrived, and the error of each row whose unit is damaged."""
        rows, units = self.planned(block, span), block.units[span]
        lost = {row: self._damage[int(units[row])] for row in np.flatnonzero(rows.first_rows < 0).tolist()}
        return rows, lost

    def planned(self, block: Block, span: Int64Array | slice) -> PlannedRows:
        """Return some rows of a block."""
        of = block.rows
        return PlannedRows(
            chunk_ids=of.chunk_ids[span], offsets=of.offsets[span], passes=of.passes[span],
            positions=of.positions[span] - self._epoch_start, first_rows=self._first_rows[block.units[span]],
            within=block.within[span],
        )  # fmt: skip

    def rows_at_once(self, block: Block, span: slice) -> Rows | None:
        """Return the samples of a group of batches; None: they have to be built one by one."""
        kind, rows = self._recipe.items.grouped, self.planned(block, span)
        return None if kind is None or (rows.first_rows < 0).any() else kind.rows_at_once(self, rows)

    # --- in any thread ---

    def rows(self, row_numbers: Int64Array, chunk_ids: Int64Array, lost: Mapping[int, DataError]) -> Rows:
        """See ``Stock``."""
        sources = self._source.source_of(chunk_ids) if self._source.names else None
        arena = self._store.arena
        if lost:
            row_numbers = row_numbers.copy()
            good = [row for row in range(len(row_numbers)) if row not in lost]
            row_numbers[list(lost)] = row_numbers[good[0]] if good else 0
            if not good:
                keys = [""] * len(row_numbers)
                return Rows(memory=b"", view=memoryview(b""), keys=keys, urls=self._source.urls_of(chunk_ids),
                            fields={}, damage=lost, sources=sources)  # fmt: skip
        keys, fields = self._store.rows.select(row_numbers, self._fields)
        for row in lost:
            keys[row] = ""
        damage = {**self._store.rows.damage(row_numbers), **lost}
        urls = self._source.urls_of(chunk_ids)
        rows = Rows(memory=arena.memory, view=arena.view, keys=keys, urls=urls, fields=fields, damage=damage,
                    sources=sources, lend=self._store.lender.lend)  # fmt: skip
        if self._read_distant is not None:
            rows = replace(rows, chunk_ids=chunk_ids, read_distant=self._read_distant)
        return self._recipe.narrowed(rows)

    def begins(self, of: PlannedRows) -> Int64Array:
        """See ``Stock``."""
        plan = self._plan
        batches: Int64Array = (of.positions + self._epoch_start - plan.first_row) // plan.global_batch_size
        return plan.first_row + batches * plan.global_batch_size

    def numbers(self, of: PlannedRows) -> Int64Array | None:
        """See ``Stock``."""
        return None if self._first_numbers is None else self._first_numbers[of.chunk_ids] + of.offsets

    def stand_ins(self) -> Substitutes:
        """Return the samples that may replace lost ones of a batch; the caller closes it."""
        return Substitutes(
            self._plan, self._first_numbers, self._source, self._store, self._fields, self._recipe.narrowed,
            self._read_distant,
        )  # fmt: skip

    def located(self, bad: BadSample) -> BadSample:
        """Return a bad sample with its key and location, if known."""
        if self._first_numbers is None or bad.number < 0 or bad.dropped:
            return bad
        chunk = int(np.searchsorted(self._first_numbers, bad.number, side="right")) - 1
        offset = np.array([bad.number - self._first_numbers[chunk]])
        place = self._source.locate(chunk, int(self._source.samples_of(np.array([chunk]), offset)[0]))
        if place is None:
            return bad
        return replace(bad, key=place.key, byte_start=place.record_start, byte_end=place.record_end)
