"""Read one rank's batches of one epoch: when units are fetched, when batches are built, and who waits for what.

Life cycle of a batch k::

    planned -> its units requested -> all of them in the arena -> being built -> built -> handed out

Units are requested strictly in the order of their first use. So batch k can be built as soon as every unit with a
``first_batch`` of at most k is there: a single number, the *frontier*, expresses this. A unit is released once all
batches up to its ``last_batch`` are built.

Nobody but the arena limits how far the reader runs ahead. Whoever changes a state under the lock (a fetch that ends, a
batch that is built or handed out) also starts what has become possible; there is no thread that only coordinates.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from streaming.arguments import format_bytes
from streaming.arrays import sums
from streaming.batches.build import BadSample, BadSampleReport, BatchBuilder, Recipe
from streaming.batches.columns import as_planned
from streaming.batches.draws import epoch_key
from streaming.batches.rows import Rows
from streaming.engine.builders import Builder
from streaming.engine.delivery import Delivery
from streaming.engine.groups import BatchGroups, Group
from streaming.engine.memory.chunk_store import ChunkStore, Unit
from streaming.engine.source import Source
from streaming.engine.standing import Standing, standing_lines
from streaming.engine.substitutes import Substitutes
from streaming.engine.units import BLOCK_SAMPLES, Block, Need, Units
from streaming.errors import DataError, DecodeError, MemoryLimitError
from streaming.metrics import Metrics
from streaming.packing.balance import BalanceRules, order_local
from streaming.packing.layout import PackRows
from streaming.plan.plan import Plan
from streaming.types import Int64Array

_BLOCKS_AHEAD = 16
"""Blocks planned beyond the last batch handed out; bounds the plan's own memory to about 16 MB."""
_BLOCK_PASSES = 4
"""Maximum number of passes in a block: for a small set, each pass costs as much as a thousand rows."""
_MOST_OF_PACK = 2**24
"""Maximum number of samples in a pack: their random numbers derive from the pack's position times this, plus their
index.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a pipeline; none of them changes what is delivered.

    Attributes:
        recipe: Decode, transform, collate.
        builder: Builds batches.
        fields: Fields to read; None: all.
        num_builders: Background threads that build batches, or wait for worker processes to do so.
        depth: Upper bound on batches that are built but not handed out.
        batch_bytes: Upper bound on their bytes; one batch is always allowed.
        balance: How packs of a packed set are balanced; None: not at all.
    """

    recipe: Recipe
    builder: Builder
    fields: tuple[str, ...] | None
    num_builders: int
    depth: int
    batch_bytes: int
    balance: BalanceRules | None = None


class Pipeline(Delivery):
    """Deliver the batches of a plan; see ``Delivery``. A batch holds only this rank's rows of the global batch.

    Args:
        plan: The plan.
        dp_rank: Data-parallel rank whose share to read.
        units: The pieces in which data is fetched.
        source: The dataset.
        store: Contents of the arena; may outlive the pipeline.
        settings: Settings.
        metrics: Where to count waits.
        report: Called for every bad sample; may raise to stop the run.
    """

    def __init__(
        self, *, plan: Plan, dp_rank: int, units: Units, source: Source, store: ChunkStore, settings: Settings,
        metrics: Metrics, report: BadSampleReport,
    ) -> None:  # fmt: skip
        super().__init__(
            settings.builder, store, first=0, num_batches=plan.num_batches, num_builders=settings.num_builders,
            depth=settings.depth, batch_bytes=settings.batch_bytes, metrics=metrics, report=report,
            changed=store.changed,
        )  # fmt: skip
        self._plan = plan
        self._dp_rank = dp_rank
        self._draw_key = epoch_key(plan.settings.seed, plan.epoch)
        self._units = units
        self._source = source
        self._store = store
        self._settings = settings
        self._blocks: deque[Block] = deque()
        rows_per_batch = max(1, -(-plan.global_batch_size // plan.dp_world_size))
        few_passes = _BLOCK_PASSES * int(plan.chunk_samples.sum()) // plan.global_batch_size
        self._block_batches = max(1, min(BLOCK_SAMPLES // rows_per_batch, few_passes, plan.stretch_batches))
        self._planned = 0
        self._needs = units.needs()
        self._next_need: Need | None = next(self._needs, None)
        self._coming: deque[tuple[Need, Unit, int]] = deque()
        self._first_rows = np.full(len(plan.chunk_samples) + 1, -1, np.int64)
        self._chunk_starts = sums(plan.chunk_samples)
        self._damage: dict[int, DataError] = {}
        self._releases: dict[int, list[Unit]] = defaultdict(list)
        self._built: set[int] = set()
        self._num_built = 0
        self._groups = BatchGroups(settings.recipe, store.limit_bytes, padded=plan.last_batch == "pad")
        self._group: Group | None = None
        self._start()

    # --- under the lock ---

    def _num_ready(self) -> int:
        """Return the number below which batches have all their units in the arena and their rows planned."""
        return min(self._frontier(), self._planned)

    def _give_back(self) -> None:
        """Release every unit that was requested."""
        released = [one for some in self._releases.values() for one in some]
        for unit in [unit for _, unit, _ in self._coming] + released:
            self._store.release(unit)
        self._coming.clear()
        self._releases.clear()
        self._blocks.clear()
        self._group = None

    def _standing(self) -> list[str]:
        return standing_lines(
            Standing(
                batch=self._handed_out, num_batches=self._plan.num_batches, frontier=self._frontier(),
                num_started=self._started, num_built=self._num_built, num_waiting=len(self._results),
                pending=tuple(unit for _, unit, _ in self._coming if not unit.ready),
                arena_used_bytes=self._store.arena.used_bytes, arena_limit_bytes=self._store.limit_bytes,
                closed=self._closed,
            )
        )  # fmt: skip

    def _frontier(self) -> int:
        """Return the number below which batches have all their units in the arena."""
        if self._coming:
            return self._coming[0][0].first_batch
        return self._plan.num_batches if self._next_need is None else self._next_need.first_batch

    def _advance(self) -> None:
        """Start every fetch that has room, and register every unit that has arrived.

        A failed one stops the frontier.
        """
        if self._store.failure is not None:
            raise self._store.failure
        soon = self._handed_out + self._block_batches
        while (need := self._next_need) is not None:
            wanted = self._units.wanted(need.unit)
            if need.first_batch >= soon and self._store.holds(wanted):
                break  # nothing to fetch: an epoch of many passes over a small set is planned as it is read
            unit = self._store.admit(wanted)
            if unit is None:
                break
            self._coming.append((need, unit, wanted.lead))
            if self._source.is_packed:
                self._pack_ahead(need)
            self._next_need = next(self._needs, None)
        while self._coming and self._coming[0][1].ready:
            self._store.settle(self._coming[0][1])
            if self._coming[0][1].failure is not None:
                break
            self._arrived(*self._coming.popleft())
        limit = self._handed_out + _BLOCKS_AHEAD * self._block_batches
        while self._planned < min(self._plan.num_batches, self._frontier(), limit):
            self._plan_block()

    def _can_advance(self) -> bool:
        """See ``Delivery``; while something is left to fetch, there may be room for it."""
        if self._next_need is not None or self._store.failure is not None:
            return True
        return bool(self._coming) and self._coming[0][1].ready

    def _pack_ahead(self, need: Need) -> None:
        """Compute the packs of a group while its bytes are being fetched."""
        group, offset, number = (np.array([value]) for value in (need.unit, 0, need.pass_number))
        self._store.beside(partial(self._source.packs, group, offset, number, self._plan.settings.seed))

    def _arrived(self, need: Need, unit: Unit, lead: int) -> None:
        if need.unit >= len(self._first_rows):
            grown = np.full(2 * need.unit + 1, -1, np.int64)
            grown[: len(self._first_rows)] = self._first_rows
            self._first_rows = grown
        self._first_rows[need.unit] = -1 if unit.first_row < 0 else unit.first_row + lead
        if unit.damage is not None:
            self._damage[need.unit] = unit.damage
        # Invariant: no batch from first_batch on is built before this, so the last one will release the unit.
        self._releases[need.last_batch].append(unit)

    def _plan_block(self) -> None:
        first = self._planned
        self._planned = min(first + self._block_batches, self._plan.num_batches)
        self._blocks.append(self._units.block(first, self._planned))

    def _finish(self, batch: int) -> None:
        """Release, after a batch is built, the units that it was the last to need."""
        self._built.add(batch)
        while self._num_built in self._built:
            self._built.discard(self._num_built)
            for unit in self._releases.pop(self._num_built, ()):
                self._store.release(unit)
            self._num_built += 1
        while self._blocks and self._blocks[0].last <= self._num_built:
            self._blocks.popleft()

    def _obstacle(self) -> BaseException | None:
        """Return the error that stops the frontier for good, if there is one."""
        if self._coming:
            return self._coming[0][1].failure
        need = self._next_need
        if need is None or need.first_batch > self._num_built or self._store.pending():
            return None
        arena, wanted = self._store.arena, self._units.wanted(need.unit)
        other = "lower lanes or window in ShuffleConfig" if self._plan.settings.shuffle else "use a smaller batch"
        return MemoryLimitError(
            f"batch {need.first_batch} needs {wanted.shown_url} bytes {wanted.byte_start}-{wanted.byte_end} "
            f"({format_bytes(wanted.num_bytes)}) in addition to what it already holds "
            f"({format_bytes(arena.used_bytes)}), more than the {format_bytes(self._store.limit_bytes)} that chunks "
            f"may take. Raise memory_limit, or {other}"
        )

    def _block_of(self, batch: int) -> Block:
        for block in self._blocks:
            if block.first <= batch < block.last:
                return block
        raise AssertionError(f"batch {batch} is not planned")

    # --- taking and building ---

    def _take(self, number: int) -> Any:
        """See ``Delivery``; a batch of the open group takes no lock."""
        return super()._take(number) if self._group is None else self._cut(self._group, number)

    def _begin(self, number: int) -> None:
        self._group = group = self._open_group(number)
        self._quiet = group is not None
        self._started = number + 1 if group is None else group.last

    def _build_here(self, number: int) -> Any:
        return super()._build_here(number) if self._group is None else self._cut(self._group, number)

    def _cut(self, group: Group, batch: int) -> Any:
        """Return the batch from its group; after its last batch the group is released."""
        with self._metrics.timed("build_in_consumer_s"):
            if group.allocate is not self._builder.allocate:  # page-locking was switched on or off
                self._group = group = self._groups.moved(group, self._builder.allocate)
            try:
                value = group.batch(batch, self._settings.recipe)
            except DecodeError:  # building row by row will find out which
                value = self._build(batch)
        if batch + 1 == group.last:
            with self._changed:  # all batches of the group are built: their units may be released
                self._group, self._quiet = None, False
                if not self._closed:
                    for one in range(group.first, group.last):
                        self._finish(one)
        return value

    def _open_group(self, first: int) -> Group | None:
        packs = self._settings.recipe.packs
        in_groups = not self._source.is_packed  # not for packs of whole samples, whose samples are rows
        if packs is not None:
            in_groups = not packs.padded and self._settings.balance is None
        if not self._builder.holds_gil or not in_groups:
            return None
        allocate = self._builder.allocate
        return self._groups.open(self._block_of(first), first, self._frontier(), self._intact_rows, allocate)

    def _intact_rows(self, block: Block, span: slice) -> Rows | None:
        of, packs = block.rows, self._settings.recipe.packs
        first_rows = self._first_rows[block.units[span]]
        if (first_rows < 0).any():
            return None
        if packs is None:
            rows = self._rows(first_rows + block.within[span], of.chunk_ids[span], {})
            return None if rows.damage else rows
        # Never pack, or wait for a column of lengths, under the engine's lock; a batch that is built alone does not
        # hold it.
        if not self._source.has_packs(of.chunk_ids[span], of.passes[span], self._plan.settings.seed):
            return None
        rows = self._rows_of_packs(first_rows, of.chunk_ids[span], of.offsets[span], of.passes[span], {})
        return rows if rows.packs is not None and as_planned(rows, rows.packs, packs) else None

    def _build(self, batch: int) -> Any:
        with self._changed:
            # The block of a batch stays until that batch is released.
            block = self._block_of(batch)
            low, high = block.rows.row_splits[batch - block.first : batch - block.first + 2].tolist()
        span = np.arange(low, high) if low == high else self._in_order(block, np.arange(low, high))
        with self._changed:
            # A unit is in memory (its first row is known) or damaged, since the batch is ready.
            first_rows = self._first_rows[block.units[span]]
            lost = np.flatnonzero(first_rows < 0).tolist()
            damage = {row: self._damage[int(block.units[span[row]])] for row in lost}
        with self._stand_ins() as stand_ins:
            if low == high:
                return BatchBuilder(self._settings.recipe, lambda _: iter(()), self._report).empty(stand_ins.any())
            chunk_ids, offsets, passes = (
                column[span] for column in (block.rows.chunk_ids, block.rows.offsets, block.rows.passes)
            )

            positions = block.rows.positions[span] - self._plan.epoch * self._plan.num_samples
            if self._source.is_packed:
                rows = self._rows_of_packs(first_rows, chunk_ids, offsets, passes, damage)
                whole = self._settings.recipe.packs is None
                if whole and rows.packs is not None:  # whole samples draw random numbers, each its own
                    positions = positions[rows.packs.packs] * _MOST_OF_PACK + rows.packs.places
            else:
                rows = self._rows(first_rows + block.within[span], chunk_ids, damage)
                rows = replace(rows, numbers=self._chunk_starts[chunk_ids] + offsets)
            rows = replace(rows, positions=positions)

            def substitutes(row: int) -> Iterator[Rows]:
                at = row if rows.packs is None else int(rows.packs.packs[row])
                return stand_ins.of(int(chunk_ids[at]), int(offsets[at]), int(passes[at]))

            valid = block.rows.valid[span] if self._plan.last_batch == "pad" else None
            return self._builder.build(rows, valid, substitutes, self._report, seed=self._draw_key, batch=batch)

    def _stand_ins(self) -> Substitutes:
        settings, starts = self._settings, None if self._source.is_packed else self._chunk_starts
        return Substitutes(self._plan, starts, self._source, self._store, settings.fields, settings.recipe.narrowed)

    def _report(self, bad: BadSample) -> None:
        """Report a bad sample, by its key and location if they are known."""
        if bad.number >= 0 and not bad.dropped:
            chunk = int(np.searchsorted(self._chunk_starts, bad.number, side="right")) - 1
            offset = np.array([bad.number - self._chunk_starts[chunk]])
            place = self._source.locate(chunk, int(self._source.samples_of(np.array([chunk]), offset)[0]))
            if place is not None:
                bad = replace(bad, key=place.key, byte_start=place.record_start, byte_end=place.record_end)
        super()._report(bad)

    def _in_order(self, block: Block, span: Int64Array) -> Int64Array:
        """Return the rows of a batch, int64 [B]; with ``balance="local"`` from the most to the least expensive pack."""
        balance, shape, of = self._settings.balance, self._settings.recipe.packs, block.rows
        if balance is None or shape is None or balance.how != "local":
            return span
        packs = self._packs(of.chunk_ids[span], of.offsets[span], of.passes[span])
        return span[order_local(packs.costs_by(balance, shape.length))]

    def _packs(self, chunk_ids: Int64Array, offsets: Int64Array, passes: Int64Array) -> PackRows:
        """Return the packs at these offsets; if they are to be exchanged, with their costs."""
        packs = self._source.packs(chunk_ids, offsets, passes, self._plan.settings.seed)
        balance, shape = self._settings.balance, self._settings.recipe.packs
        if balance is None or shape is None or balance.how != "exchange":
            return packs
        return replace(packs, costs=packs.costs_by(balance, shape.length))

    def _rows_of_packs(
        self, first_rows: Int64Array, chunk_ids: Int64Array, offsets: Int64Array, passes: Int64Array,
        lost: dict[int, DataError],
    ) -> Rows:  # fmt: skip
        """Return the pieces that packs consist of, as rows; of the packs in ``lost`` no document is in the arena."""
        packs = self._packs(chunk_ids, offsets, passes)
        of = packs.packs
        damage = {piece: lost[pack] for piece, pack in enumerate(of.tolist()) if pack in lost} if lost else {}
        rows = self._rows(first_rows[of] + packs.samples, chunk_ids[of], damage)
        for piece in rows.damage:  # by name if the sample table has it
            place = self._source.locate(int(chunk_ids[of[piece]]), int(packs.samples[piece]))
            rows.keys[piece] = rows.keys[piece] if place is None else place.key
        return replace(rows, packs=packs)

    def _rows(self, row_numbers: Int64Array, chunk_ids: Int64Array, lost: dict[int, DataError]) -> Rows:
        """Return the rows of a batch.

        Rows in ``lost`` have nothing in the arena, and no entry in the row table.
        """
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
        keys, fields = self._store.rows.select(row_numbers, self._settings.fields)
        for row in lost:
            keys[row] = ""
        damage = self._store.rows.damage(row_numbers) | lost
        urls = self._source.urls_of(chunk_ids)
        rows = Rows(memory=arena.memory, view=arena.view, keys=keys, urls=urls, fields=fields, damage=damage,
                    sources=sources)  # fmt: skip
        return self._settings.recipe.narrowed(rows)
