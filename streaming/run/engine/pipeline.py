"""Read one rank's batches of one epoch: when units are fetched, when batches are built, and what threads wait for.

Life cycle of a batch k::

    planned -> its units requested -> all of them in the arena -> being built -> built -> delivered

- Units are requested strictly in the order of their first use. So batch k can be built as soon as every unit with a
  ``first_batch`` of at most k is in the arena. A single number expresses this: the *frontier*.
- A unit is released once all batches up to its ``last_batch`` are built.
- If held units leave no room for those of the next batch, units are from then on held only while batches use them
  (``ChunksInTurns``), and some are fetched again.
- Only the arena limits how far the reader runs ahead. The thread that changes a state under the lock (a fetch that
  ends, a batch that is built or delivered) also starts everything that has become possible; no thread only coordinates.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from streaming.build.batches.build import BadSample, BadSampleReport, BatchBuilder, Recipe
from streaming.build.batches.draws import epoch_key
from streaming.build.batches.rows import Rows, cut_up
from streaming.common.arguments import format_bytes
from streaming.common.counters import Metrics
from streaming.errors import ChecksumError, DecodeError, MemoryLimitError
from streaming.order.plan.plan import Plan
from streaming.run.engine.builders import Builder
from streaming.run.engine.delivery import Delivery
from streaming.run.engine.groups import BatchGroups, Group
from streaming.run.engine.lookup import Lookup
from streaming.run.engine.memory.chunk_store import ChunkStore, Unit
from streaming.run.engine.source import Source
from streaming.run.engine.status import PipelineStatus, status_lines
from streaming.run.engine.units import BLOCK_SAMPLES, Block, ChunksInTurns, Need, Units
from streaming.shards.fetch.read import UnitKey

_BLOCKS_AHEAD = 16
"""Number of blocks planned beyond the last delivered batch; bounds the plan's own memory to about 16 MB."""
_BLOCK_PASSES = 4
"""Maximum number of passes in a block: for a small set, each pass costs as much as a thousand rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a pipeline. None of them changes the batches.

    Attributes:
        recipe: Decode, transform, collate.
        builder: Builds batches.
        fields: Fields to read; None: all.
        num_builders: Number of background threads that build batches, or wait for worker processes that do.
        depth: Upper bound on batches that are built but not delivered.
        batch_bytes: Upper bound on the bytes of these batches; one batch is always allowed.
    """

    recipe: Recipe
    builder: Builder
    fields: tuple[str, ...] | None
    num_builders: int
    depth: int
    batch_bytes: int


class Pipeline(Delivery):
    """Deliver the batches of a plan; see ``Delivery``. A batch holds only this rank's rows of the global batch.

    Args:
        plan: The plan.
        dp_rank: The data-parallel rank whose share to read.
        units: The pieces in which data is fetched.
        source: The dataset.
        store: Contents of the arena; may outlive the pipeline.
        settings: The settings.
        metrics: Counts waits.
        report: Called for every bad sample; may raise to stop the run.
        in_turns: Called once, when held ``units`` leave no room for those of the next batch. Returns units such that
            those of any one batch fit. None: there are none.
    """

    def __init__(
        self, *, plan: Plan, dp_rank: int, units: Units, source: Source, store: ChunkStore, settings: Settings,
        metrics: Metrics, report: BadSampleReport, in_turns: Callable[[], ChunksInTurns] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            settings.builder, store, first=0, num_batches=plan.num_batches, num_builders=settings.num_builders,
            depth=settings.depth, batch_bytes=settings.batch_bytes, metrics=metrics, report=report,
            changed=store.changed,
        )  # fmt: skip
        self._plan = plan
        self._dp_rank = dp_rank
        self._draw_key = epoch_key(plan.settings.seed, plan.epoch)
        self._units, self._in_turns = units, in_turns
        self._source = source
        self._store = store
        self._store.begin()
        self._settings = settings
        self._blocks: deque[Block] = deque()
        rows_per_batch = max(1, -(-plan.global_batch_size // plan.dp_world_size))
        few_passes = _BLOCK_PASSES * int(plan.chunk_samples.sum()) // plan.global_batch_size
        self._block_batches = max(1, min(BLOCK_SAMPLES // rows_per_batch, few_passes, plan.stretch_batches))
        self._planned = 0
        self._needs = units.needs()
        self._next_need: Need | None = None
        self._look_ahead()
        self._coming: deque[tuple[Need, Unit, int]] = deque()
        self._items = settings.recipe.items
        self._lookup = Lookup(plan, source, store, settings.recipe, settings.fields)
        self._releases: dict[int, list[Unit]] = defaultdict(list)
        self._built: set[int] = set()
        self._num_built = 0
        self._groups = BatchGroups(settings.recipe, store.limit_bytes, padded=plan.last_batch == "pad", cuts=plan.cuts)
        self._group: Group | None = None
        self._told_keys: dict[int, UnitKey] = {}
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

    def _status(self) -> list[str]:
        return status_lines(
            PipelineStatus(
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

        A failed unit stops the frontier.
        """
        if self._store.failure is not None:
            raise self._store.failure
        soon = self._handed_out + self._block_batches
        while (need := self._next_need) is not None:
            wanted = self._units.wanted(need.unit)
            if need.first_batch >= soon and self._store.holds(wanted):
                break  # nothing to fetch: many passes over a small set are planned as they are read
            unit = self._store.admit(wanted, is_awaited=need.first_batch == 0)
            if unit is None:
                break
            self._coming.append((need, unit, wanted.lead))
            if (work := self._items.ahead(self._lookup, need.unit, need.pass_number)) is not None:
                self._store.beside(work)
            self._look_ahead()
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

    def _arrived(self, need: Need, unit: Unit, lead: int) -> None:
        self._lookup.arrived(need.unit, unit, lead)
        # Invariant: no batch from first_batch on is built before this, so the last one will release the unit.
        self._releases[need.last_batch].append(unit)

    def _look_ahead(self) -> None:
        with self._metrics.timed("plan_s"):
            self._next_need = next(self._needs, None)

    def _plan_block(self) -> None:
        first = self._planned
        self._planned = min(first + self._block_batches, self._plan.num_batches)
        with self._metrics.timed("plan_s"):
            self._blocks.append(self._units.block(first, self._planned))

    def _finish(self, batch: int) -> None:
        """Release, after a batch is built, the units that no later batch needs."""
        self._store.go_on()
        self._built.add(batch)
        while self._num_built in self._built:
            self._built.discard(self._num_built)
            for unit in self._releases.pop(self._num_built, ()):
                self._store.release(unit)
            self._num_built += 1
        while self._blocks and self._blocks[0].last <= self._num_built:
            self._blocks.popleft()

    def _obstacle(self) -> BaseException | None:
        """Return the error that stops the frontier for good, if there is one.

        If only units of later batches are in the way, release them.
        """
        if self._coming:
            return self._coming[0][1].failure
        need = self._next_need
        if need is None or need.first_batch > self._num_built or self._store.pending():
            return None
        if self._in_turns is not None:
            self._read_in_turns(self._in_turns)
            return None
        arena, wanted = self._store.arena, self._units.wanted(need.unit)
        other = "lower lanes or window in ShuffleConfig" if self._plan.settings.shuffle else "use a smaller batch"
        return MemoryLimitError(
            f"batch {need.first_batch} needs {wanted.shown_url} bytes {wanted.byte_start}-{wanted.byte_end} "
            f"({format_bytes(wanted.num_bytes)}) in addition to what it already holds "
            f"({format_bytes(arena.used_bytes)}), more than the {format_bytes(self._store.limit_bytes)} that chunks "
            f"may take. Raise memory_limit, or {other}"
        )

    def _read_in_turns(self, make: Callable[[], ChunksInTurns]) -> None:
        """Read, from the next batch on, only the units that each batch needs, and hold none for later batches.

        All begun batches are built, so released units have no user. They stay as long as there is room.
        """
        self._in_turns, first = None, self._num_built
        self._store.retain, self._store.limit_bytes = True, self._store.arena.budget_bytes
        for unit in [unit for some in self._releases.values() for unit in some]:
            self._store.release(unit)
        self._releases.clear()
        self._blocks.clear()
        # Invariant: no unit has a user, no batch from `first` on is planned, and the next need is the first of `first`.
        units = make()
        self._units, self._needs, self._planned = units, units.needs(first), first
        self._look_ahead()

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
        if group is not None:  # built once all its batches are delivered
            self._store.go_on()
        self._started = number + 1 if group is None else group.last

    def _build_here(self, number: int) -> Any:
        return super()._build_here(number) if self._group is None else self._cut(self._group, number)

    def _cut(self, group: Group, batch: int) -> Any:
        """Return the batch from its group; release the group after its last batch."""
        with self._metrics.timed("build_in_consumer_s", self._told, batch):
            if group.allocate is not self._builder.allocate:  # page-locking was switched on or off
                self._group = group = self._groups.moved(group, self._builder.allocate)
            try:
                value = group.batch(batch, self._settings.recipe)
            except (DecodeError, ChecksumError):  # building row by row finds the sample
                value = self._build(batch)
        if batch + 1 == group.last:
            with self._changed:  # all batches of the group are built: their units may be released
                self._group, self._quiet = None, False
                if not self._closed:
                    for one in range(group.first, group.last):
                        self._finish(one)
        return value

    def _open_group(self, first: int) -> Group | None:
        if self._builds_ahead or self._items.grouped is None:
            return None
        allocate, each = self._builder.allocate, self._items.rows_each(self._plan.row_of(first))
        return self._groups.open(
            self._block_of(first), first, self._frontier(), self._lookup.rows_at_once, allocate, each
        )

    def _build(self, batch: int) -> Any:
        with self._changed:
            # The block of a batch stays until that batch is released.
            block = self._block_of(batch)
            low, high = block.rows.row_splits[batch - block.first : batch - block.first + 2].tolist()
        with self._lookup.stand_ins() as stand_ins:
            if low == high:
                recipe, row = self._settings.recipe, self._plan.row_of(batch)

                def nothing(*_: int) -> Any:
                    return BatchBuilder(recipe, lambda _: iter(()), self._report).empty(stand_ins.any(), row)

                return cut_up(self._plan.cuts(batch, 0), 0, nothing)
            span = np.arange(low, high)
            span = span[self._items.order(self._lookup, self._lookup.planned(block, span))]
            with self._changed:
                # A unit is in memory (its first row is known) or damaged, since the batch is ready.
                of, lost = self._lookup.chosen(block, span)
            rows = self._items.rows(self._lookup, of, lost)
            if (cuts := self._plan.cuts(batch, high - low)) is not None:
                rows = replace(rows, cuts=cuts)

            def substitutes(i: int) -> Iterator[Rows]:
                row = self._items.row_of(rows, i)
                return stand_ins.of(int(of.chunk_ids[row]), int(of.offsets[row]), int(of.passes[row]))

            valid = block.rows.valid[span] if self._plan.last_batch == "pad" else None
            return self._builder.build(rows, valid, substitutes, self._report, seed=self._draw_key, batch=batch)

    def _told(self, number: int) -> dict[str, Any]:
        with self._changed:
            # The block of a batch is present until the batch is given back, unless the run has ended meanwhile.
            block = next((one for one in self._blocks if one.first <= number < one.last), None)
            if block is None:
                return {}
            low, high = block.rows.row_splits[number - block.first : number - block.first + 2].tolist()
            units, rows = np.unique(block.units[low:high], return_index=True)
            keys = [self._key_of(unit) for unit in units.tolist()]
        chunks = block.rows.chunk_ids[low:high][rows].tolist()
        return {
            "batch": number, "row": self._plan.row_of(number), "samples": high - low,
            "made_of": dict(zip(keys, chunks, strict=True)),
        }  # fmt: skip

    def _key_of(self, unit: int) -> UnitKey:
        """Return the key of a unit, for traces. It is cached: each batch requests the units of a window again."""
        key = self._told_keys.get(unit)
        if key is None:
            key = self._told_keys[unit] = self._units.wanted(unit).key
        return key

    def _report(self, bad: BadSample) -> None:
        """Report a bad sample, with its key and location if known."""
        super()._report(self._lookup.located(bad))
