"""One rank's batches of one epoch, in order: what is fetched when, what is built when, and who waits for what.

Life cycle of a batch k::

    planned -> its units asked for -> all of them in the arena -> being built -> built -> handed out

Units are asked for strictly in the order of their first use. So batch k can be built as soon as every unit with a
``first_batch`` of at most k is there: one number, the *frontier*, says how far that is. A unit is given back once all
batches up to its ``last_batch`` are built.

Nobody but the arena limits how far the reader runs ahead. Whoever changes a state under the lock (a fetch that ends, a
batch that is built or handed out) also starts what has become possible; there is no thread that only coordinates.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from streaming.batches.build import BadSample, BadSampleReport, BatchBuilder, Recipe
from streaming.batches.draws import epoch_key
from streaming.engine.builders import Builder
from streaming.engine.depth import Depth
from streaming.engine.grace import GRACE_S, LOOK_UP_S, GivenUpError, leave_to_parent, still_alive, tell_of
from streaming.engine.groups import Group, Groups
from streaming.engine.memory.chunk_store import ChunkStore, Unit
from streaming.engine.memory.row_table import Rows
from streaming.engine.source import Source
from streaming.engine.standing import Standing, standing_lines, thread_lines
from streaming.engine.substitutes import Substitutes
from streaming.engine.units import BLOCK_SAMPLES, Block, Need, Units
from streaming.errors import DataError, DecodeError, MemoryLimitError, TooManyBadSamplesError
from streaming.metrics import Metrics
from streaming.plan.plan import Plan
from streaming.units import format_bytes

Ints = npt.NDArray[np.int64]

_BLOCKS_AHEAD = 16
"""Blocks planned beyond the batch handed out last: bounds the plan's own memory at about 16 MB."""
_LOCK_S = 2.0
"""How long a report waits for the lock, which nobody keeps for more than milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a pipeline runs; none of it changes what is delivered.

    Attributes:
        recipe: Decode, transform, collate.
        builder: Who does it.
        fields: Fields to read; None: all.
        num_builders: Background threads that build batches, or have them built.
        depth: Batches that may be built but not handed out.
        batch_bytes: Bound on these, in bytes; one is always allowed.
    """

    recipe: Recipe
    builder: Builder
    fields: tuple[str, ...] | None
    num_builders: int
    depth: int
    batch_bytes: int


class Pipeline:
    """Iterator over ``(batch, global batch number)``; used once, then closed.

    ``__next__`` is for one consumer thread. ``close`` may be called from any thread, at any time, more than once.

    Args:
        plan: The plan.
        dp_rank: Whose share.
        units: What is fetched in one piece.
        source: The data set.
        store: The arena's contents; may outlive the pipeline.
        settings: How to run.
        metrics: Where waits are counted.
        report: Told of every bad sample; may raise to stop the run.
    """

    def __init__(
        self, *, plan: Plan, dp_rank: int, units: Units, source: Source, store: ChunkStore, settings: Settings,
        metrics: Metrics, report: BadSampleReport,
    ) -> None:  # fmt: skip
        self._plan = plan
        self._dp_rank = dp_rank
        self._draw_key = epoch_key(plan.settings.seed, plan.epoch)
        self._units = units
        self._source = source
        self._store = store
        self._settings = settings
        self._metrics = metrics
        self._tell = report
        self._changed = store.changed
        self._blocks: deque[Block] = deque()
        rows_per_batch = max(1, -(-plan.global_batch_size // plan.dp_world_size))
        self._block_batches = max(1, BLOCK_SAMPLES // rows_per_batch)
        self._planned = 0
        self._needs = units.needs()
        self._next_need: Need | None = next(self._needs, None)
        self._coming: deque[tuple[Need, Unit, int]] = deque()
        self._first_rows = np.full(len(plan.chunk_samples) + 1, -1, np.int64)
        self._chunk_starts = np.concatenate([[0], np.cumsum(plan.chunk_samples)])
        self._damage: dict[int, DataError] = {}
        self._releases: dict[int, list[Unit]] = defaultdict(list)
        self._started = 0
        self._handed_out = 0
        self._handed_out_s = 0.0
        self._built: set[int] = set()
        self._num_built = 0
        self._results: dict[int, tuple[Any, BaseException | None]] = {}
        self._groups = Groups(settings.recipe, store.limit_bytes, padded=plan.last_batch == "pad")
        self._group: Group | None = None
        self._depth = Depth(settings.depth, settings.batch_bytes, settings.num_builders)
        self._closed = False
        self._consumer: threading.Thread | None = None
        self._builders = [
            threading.Thread(target=self._build_loop, name=f"shardstream-build-{i}", daemon=True)
            for i in range(settings.num_builders)
        ]
        leave_to_parent(self)
        for thread in self._builders:
            thread.start()

    def __iter__(self) -> Iterator[Any]:
        """Itself."""
        return self

    def __next__(self) -> Any:
        """The next batch.

        Raises:
            StopIteration: After the last one, and after ``close``.
            BaseException: Whatever kept the batch from being built, once; the pipeline is closed then.
        """
        batch = self._handed_out
        if batch:
            self._metrics.add("consumer_s", time.perf_counter() - self._handed_out_s)
        if batch >= self._plan.num_batches:
            raise StopIteration
        self._consumer = threading.current_thread()  # first this, then a look at _closed: close does it the other way
        try:
            value = None if self._closed else self._take_or_close(batch)
        finally:
            self._consumer = None
            if self._closed:
                with self._changed:
                    self._changed.notify_all()
        if self._closed:
            raise StopIteration
        if self._group is not None:
            self._handed_out = batch + 1
        else:
            with self._changed:
                self._handed_out = batch + 1
                self._advance()
                if self._builders:
                    self._changed.notify_all()
        self._handed_out_s = time.perf_counter()
        return value

    def close(self) -> None:
        """Stop building, give back every unit; batches under way have ``GRACE_S`` to end.

        Then worker processes are killed. A thread that is still in a user's function is left behind: it keeps its
        units, the store is marked as abandoned, and a warning names the function.
        """
        if self._closed or not self._begin_to_close():
            return
        if busy := still_alive(self._builders):
            self._settings.builder.give_up()
            busy = still_alive(busy, 0 if self._settings.builder.is_local else GRACE_S)
        with self._changed:
            own = threading.current_thread()
            self._changed.wait_for(lambda: self._consumer in (None, own), 0 if busy else GRACE_S)
            consumer = self._consumer
            if consumer not in (None, own):
                busy.append(consumer)
            self._group = None
            self._results.clear()
        if busy:
            tell_of(busy)
            return
        with self._changed:
            self._store.abandoned = own in self._builders
            released = [one for some in self._releases.values() for one in some]
            for unit in [unit for _, unit, _ in self._coming] + released:
                self._store.release(unit)
            self._coming.clear()
            self._releases.clear()
            self._blocks.clear()

    def _begin_to_close(self) -> bool:
        """Whether nobody has. Ask ``_closed`` first: the interpreter may have ended a thread that holds the lock."""
        with self._changed:
            if self._closed:
                return False
            self._closed = True
            self._store.abandoned = True  # until it is known better, should this be interrupted
            self._changed.notify_all()
            return True

    def describe(self) -> str:
        """What the next batch waits for, and what every stage is at, for people; from any thread."""
        if not self._changed.acquire(timeout=_LOCK_S):
            return "\n".join(["a thread keeps the engine's lock", *thread_lines("shardstream-")])
        try:
            lines = standing_lines(
                Standing(
                    batch=self._handed_out, num_batches=self._plan.num_batches, frontier=self._frontier(),
                    num_started=self._started, num_built=self._num_built, num_waiting=len(self._results),
                    pending=tuple(unit for _, unit, _ in self._coming if not unit.ready),
                    arena_used_bytes=self._store.arena.used_bytes, arena_limit_bytes=self._store.limit_bytes,
                    closed=self._closed,
                )
            )  # fmt: skip
        finally:
            self._changed.release()
        return "\n".join([*lines, *self._settings.builder.describe()])

    # --- under the lock ---

    def _frontier(self) -> int:
        """Batches below this number have all their units in the arena."""
        if self._coming:
            return self._coming[0][0].first_batch
        return self._plan.num_batches if self._next_need is None else self._next_need.first_batch

    def _advance(self) -> None:
        """Start every fetch that has room, note every unit that has come; one that failed stops the frontier."""
        if self._closed:
            return
        while (need := self._next_need) is not None:
            wanted = self._units.wanted(need.unit)
            unit = self._store.admit(wanted)
            if unit is None:
                break
            self._coming.append((need, unit, wanted.lead))
            self._next_need = next(self._needs, None)
        while self._coming and self._coming[0][1].ready:
            self._store.settle(self._coming[0][1])
            if self._coming[0][1].failure is not None:
                break
            self._arrived(*self._coming.popleft())
        limit = self._handed_out + _BLOCKS_AHEAD * self._block_batches
        while self._planned < min(self._plan.num_batches, self._frontier(), limit):
            self._plan_block()

    def _arrived(self, need: Need, unit: Unit, lead: int) -> None:
        if need.unit >= len(self._first_rows):
            grown = np.full(2 * need.unit + 1, -1, np.int64)
            grown[: len(self._first_rows)] = self._first_rows
            self._first_rows = grown
        self._first_rows[need.unit] = -1 if unit.first_row < 0 else unit.first_row + lead
        if unit.damage is not None:
            self._damage[need.unit] = unit.damage
        if need.last_batch < self._num_built:
            self._store.release(unit)
        else:
            self._releases[need.last_batch].append(unit)

    def _plan_block(self) -> None:
        first = self._planned
        self._planned = min(first + self._block_batches, self._plan.num_batches)
        self._blocks.append(self._units.block(first, self._planned))

    def _finish(self, batch: int) -> None:
        """Batch is built: give back the units of which it was the last to need."""
        if self._closed:
            return
        self._built.add(batch)
        while self._num_built in self._built:
            self._built.discard(self._num_built)
            for unit in self._releases.pop(self._num_built, ()):
                self._store.release(unit)
            self._num_built += 1
        while self._blocks and self._blocks[0].last <= self._num_built:
            self._blocks.popleft()

    def _obstacle(self) -> BaseException | None:
        """What will keep the frontier where it is for ever, if anything does."""
        if self._coming:
            return self._coming[0][1].failure
        need = self._next_need
        if need is None or need.first_batch > self._num_built or self._store.pending():
            return None
        arena, wanted = self._store.arena, self._units.wanted(need.unit)
        return MemoryLimitError(
            f"batch {need.first_batch} needs {wanted.shown_url} bytes {wanted.byte_start}-{wanted.byte_end} "
            f"({format_bytes(wanted.num_bytes)}) together with what it already holds "
            f"({format_bytes(arena.used_bytes)}), which is more than the {format_bytes(self._store.limit_bytes)} that "
            f"chunks may have. Raise memory_limit, or lower lanes or window in ShuffleConfig"
        )

    def _block_of(self, batch: int) -> Block:
        for block in self._blocks:
            if block.first <= batch < block.last:
                return block
        raise AssertionError(f"batch {batch} is not planned")

    # --- taking and building ---

    def _take_or_close(self, batch: int) -> Any:
        try:
            return self._take(batch)
        except StopIteration as error:  # of a user's function: left alone, it would end the epoch in silence
            self.close()
            raise RuntimeError(f"batch {batch}: a decoder, transform or collate_fn raised StopIteration") from error
        except Exception:
            if self._closed:  # by another thread: nobody wants that batch any more, nor its errors
                return None
            self.close()
            raise
        except BaseException:
            self.close()
            raise

    def _take(self, batch: int) -> Any:
        """The batch, built by a builder or, if none has begun with it, right here."""
        if self._group is not None:
            return self._cut(self._group, batch)
        with self._changed:
            while True:
                if self._closed:
                    return None
                self._advance()
                if batch in self._results:
                    value, error = self._results.pop(batch)
                    if error is not None:
                        raise error
                    return value
                if self._settings.builder.is_local and batch == self._started and batch < self._frontier():
                    self._group = group = self._open_group(batch)
                    self._started = batch + 1 if group is None else group.last
                    break
                self._wait(batch)
        if group is not None:
            return self._cut(group, batch)
        with self._metrics.timed("build_in_consumer_s"):
            value = self._build(batch)
        with self._changed:
            self._finish(batch)
        return value

    def _cut(self, group: Group, batch: int) -> Any:
        """The batch, out of its group; after the last one the group is given back."""
        with self._metrics.timed("build_in_consumer_s"):
            try:
                value = group.batch(batch, self._settings.recipe)
            except DecodeError:  # row by row it will be found out which
                value = self._build(batch)
        if batch + 1 == group.last:
            with self._changed:
                self._group = None
                for one in range(group.first, group.last):
                    self._finish(one)
        return value

    def _open_group(self, first: int) -> Group | None:
        if not self._settings.builder.holds_gil:
            return None
        return self._groups.open(self._block_of(first), first, self._frontier(), self._intact_rows)

    def _intact_rows(self, block: Block, span: slice) -> Rows | None:
        first_rows = self._first_rows[block.units[span]]
        if (first_rows < 0).any():
            return None
        numbers = first_rows + block.within[span]
        rows = self._rows(numbers, block.rows.chunk_ids[span], block.rows.offsets[span], {})
        return None if rows.damage else rows

    def _wait(self, batch: int) -> None:
        """Wait for a change, and say what the consumer waited for."""
        waits_for_fetch = batch >= self._frontier()
        obstacle = self._obstacle() if waits_for_fetch else None
        if obstacle is not None:
            raise obstacle
        if self._can_start():
            self._changed.notify_all()
        started_s = time.perf_counter()
        self._changed.wait(LOOK_UP_S)
        waited_s = time.perf_counter() - started_s
        self._metrics.add("wait_for_fetch_s" if waits_for_fetch else "wait_for_build_s", waited_s)
        if batch == 0:
            self._metrics.add("first_batch_wait_s", waited_s)

    def _build_loop(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not self._can_start():
                    self._changed.wait()
                    if not self._settings.builder.holds_gil:
                        self._advance()  # of what has been fetched nobody else may know: the consumer is in its step
                if self._closed:
                    return
                batch = self._started
                self._started += 1
            error: BaseException | None = None
            value: Any = None
            try:
                with self._metrics.timed("build_s"):
                    value = self._build(batch)
            except BaseException as caught:  # noqa: BLE001  a thread border: the consumer gets it
                error = caught
            self._deliver(batch, value, error)
            value = error = None  # a thread that waits must not keep a batch

    def _deliver(self, batch: int, value: Any, error: BaseException | None) -> None:
        with self._changed:
            if self._closed:
                return
            self._results[batch] = (value, error)
            self._depth.saw(value, is_local=self._settings.builder.is_local)
            self._finish(batch)
            self._advance()
            self._changed.notify_all()

    def _can_start(self) -> bool:
        """Whether a builder may begin with a batch: never with what is the consumer's to build."""
        if self._settings.builder.in_consumer:
            return False
        return self._started < min(self._frontier(), self._planned, self._handed_out + self._depth.now)

    def _build(self, batch: int) -> Any:
        with self._changed:
            block = self._block_of(batch)
            low, high = block.rows.row_splits[batch - block.first : batch - block.first + 2].tolist()
            span = slice(low, high)
            first_rows = self._first_rows[block.units[span]]
            lost = np.flatnonzero(first_rows < 0).tolist()
            damage = {row: self._damage[int(block.units[low + row])] for row in lost}
        with self._stand_ins() as stand_ins:
            if low == high:
                prototype = next(stand_ins.any(), None)
                if prototype is None:
                    raise TooManyBadSamplesError("no chunk of the data set can be read; see `shard_tools verify`")
                return BatchBuilder(self._settings.recipe, lambda _: iter(()), self._report).empty(prototype)
            chunk_ids, offsets, passes = (
                column[span] for column in (block.rows.chunk_ids, block.rows.offsets, block.rows.passes)
            )

            def substitutes(row: int) -> Iterator[Rows]:
                return stand_ins.of(int(chunk_ids[row]), int(offsets[row]), int(passes[row]))

            rows = self._rows(first_rows + block.within[span], chunk_ids, offsets, damage)
            valid = block.rows.valid[span] if self._plan.last_batch == "pad" else None
            positions = block.rows.positions[span] - self._plan.epoch * self._plan.num_samples
            rows = replace(rows, positions=positions)
            return self._settings.builder.build(
                rows, valid, substitutes, self._report, seed=self._draw_key, batch=batch
            )  # fmt: skip

    def _stand_ins(self) -> Substitutes:
        return Substitutes(self._plan, self._chunk_starts, self._source, self._store, self._settings.fields)

    def _report(self, bad: BadSample) -> None:
        """Tell of a bad sample, by its key and place where they can be known.

        Raises:
            GivenUpError: The run is over, nobody will get the batch.
        """
        if self._closed:
            raise GivenUpError
        if bad.number >= 0 and not bad.dropped:
            chunk = int(np.searchsorted(self._chunk_starts, bad.number, side="right")) - 1
            place = self._source.locate(chunk, bad.number - int(self._chunk_starts[chunk]))
            if place is not None:
                bad = replace(bad, key=place.key, byte_start=place.record_start, byte_end=place.record_end)
        self._tell(bad)

    def _rows(self, row_numbers: Ints, chunk_ids: Ints, offsets: Ints, lost: dict[int, DataError]) -> Rows:
        """The rows of a batch; of those ``lost`` nothing is in the arena, and nothing stands in the row table."""
        numbers = self._chunk_starts[chunk_ids] + offsets
        arena = self._store.arena
        if lost:
            row_numbers = row_numbers.copy()
            good = [row for row in range(len(row_numbers)) if row not in lost]
            row_numbers[list(lost)] = row_numbers[good[0]] if good else 0
            if not good:
                keys = [""] * len(row_numbers)
                return Rows(memory=b"", view=memoryview(b""), keys=keys, urls=self._source.urls_of(chunk_ids),
                            fields={}, damage=lost, numbers=numbers)  # fmt: skip
        keys, fields = self._store.rows.select(row_numbers, self._settings.fields)
        for row in lost:
            keys[row] = ""
        damage = self._store.rows.damage(row_numbers) | lost
        urls = self._source.urls_of(chunk_ids)
        return Rows(memory=arena.memory, view=arena.view, keys=keys, urls=urls, fields=fields, damage=damage,
                    numbers=numbers)  # fmt: skip
