"""Read plan after plan with the same machinery: an arena, its contents, and the builders of batches."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Generic, Protocol, TypeVar

from streaming.build.batches.build import BadSampleReport
from streaming.common.counters import Metrics
from streaming.common.forks import in_children
from streaming.order.plan.demand import ChunkMemory, Demand
from streaming.order.plan.plan import Plan
from streaming.run.engine.builders import Crew
from streaming.run.engine.delivery import Delivery
from streaming.run.engine.memory.chunk_store import ChunkStore
from streaming.run.engine.pipeline import Pipeline, Settings
from streaming.run.engine.source import Source
from streaming.run.engine.units import BatchSlices, ChunksInTurns, Units, WholeChunks
from streaming.run.engine.workers.ring import PageLocker
from streaming.run.engine.workers.surroundings import Surroundings
from streaming.shards.fetch.read import FetchRange

_log = logging.getLogger(__name__)


class Contents(Protocol):
    """Contents of an arena.

    Attributes:
        limit_bytes: Upper bound on the bytes of chunks in it, for the current run; 0: there are no chunks.
    """

    limit_bytes: int

    @property
    def is_broken(self) -> bool:
        """Whether no other run may use the arena, because a thread was left behind in it, or has failed."""

    def close(self) -> None:
        """Stop the threads that fill the arena, and free it."""


_Contents = TypeVar("_Contents", bound=Contents)
_Delivery = TypeVar("_Delivery", bound=Delivery)


class Machinery(Generic[_Contents]):
    """Keep the builders of batches, and the contents of their arena, across runs, world sizes and batch sizes.

    They end with the last reference to this object, or with ``drop``; ``open`` then makes new ones. For one thread.

    Attributes:
        crew: The builders; None until ``open``, and after ``drop``.
        contents: Contents of their arena; None until ``open``, and after ``drop``.
        surroundings: Settings under which batches are built, set by the loop that begins a run; None: those of the
            process.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.crew: Crew | None = None
        self.contents: _Contents | None = None
        self.surroundings: Surroundings | None = None
        self._metrics = metrics
        self._locker: PageLocker | None = None
        self._delivery: weakref.ref[Delivery] | None = None
        in_children(self, Machinery.leave_behind)

    def open(self, make: Callable[[], tuple[Crew, _Contents]]) -> tuple[Crew, _Contents]:
        """Return the kept crew and contents; if there are none, or no other run may use them, those from ``make``."""
        if self.is_broken:
            self.drop()
        if self.crew is None or self.contents is None:
            crew, contents = make()
            self._end = weakref.finalize(self, _close_all, crew, contents)
            self.crew, self.contents = crew, contents  # from here on they end with this object, or by an interrupt
            crew.page_lock(self._locker)
        if self.surroundings is not None:
            self.crew.surround(self.surroundings)
        return self.crew, self.contents

    @property
    def is_broken(self) -> bool:
        """Whether no other run may use the kept crew and contents."""
        return self.contents is not None and self.contents.is_broken

    def page_lock(self, locker: PageLocker | None) -> None:
        """Page-lock batches from now on; None turns this off."""
        self._locker = locker
        if self.crew is not None:
            self.crew.page_lock(locker)

    def renew(self) -> bool:
        """Restart worker processes if the user's functions, or objects they refer to, have changed; return whether."""
        return self.crew is not None and not self.crew.abandoned and self.crew.renew()

    def serves(self, delivery: _Delivery) -> _Delivery:
        """Note that ``delivery`` uses this machinery now, and return it."""
        self._delivery = weakref.ref(delivery)
        return delivery

    def gauges(self) -> dict[str, float]:
        """Return the current values of gauges by name. May be called from any thread."""
        self._note_peak()
        crew, delivery = self.crew, None if self._delivery is None else self._delivery()
        ring = None if crew is None else crew.ring
        return {
            "fetched_ahead": 0,
            "built_ahead": 0,
            **({} if delivery is None else delivery.ahead()),
            "arena_limit_bytes": 0 if self.contents is None else self.contents.limit_bytes,
            "arena_bytes": 0 if crew is None else crew.arena.used_bytes,
            "ring_bytes": 0 if ring is None else ring.held_bytes,
            "ring_slots_in_use": 0 if ring is None else ring.num_taken,
        }

    def drop(self) -> None:
        """Release everything."""
        self._note_peak()
        crew, self.crew, self.contents = self.crew, None, None
        if crew is not None:
            self._end()

    def leave_behind(self) -> None:
        """Forget, in a forked child, the threads, processes and shared memory of the parent."""
        if self.crew is not None:
            self._end.detach()
        self.crew = self.contents = self._delivery = None

    def _note_peak(self) -> None:
        ring = None if self.crew is None else self.crew.ring
        self._metrics.peak("ring_peak_bytes", 0 if ring is None else ring.peak_bytes)


def _close_all(crew: Crew, contents: Contents) -> None:
    crew.close()
    contents.close()


class PlanReader:
    """Read one rank's share of plans over a source. Chunks that an earlier reader left in the machinery are used again.

    Args:
        source: The dataset.
        rooms: The memory for its chunks.
        dp_rank: The data-parallel rank.
        machinery: The machinery.
        make: Makes the builders and the chunk store, if there are none yet.
        settings: Returns the settings of a pipeline with these builders.
        metrics: Counts waits.
        report: Called for every bad sample; may raise to stop a run.
    """

    def __init__(
        self, source: Source, rooms: ChunkMemory, dp_rank: int, machinery: Machinery[ChunkStore], *,
        make: Callable[[], tuple[Crew, ChunkStore]], settings: Callable[[Crew], Settings], metrics: Metrics,
        report: BadSampleReport,
    ) -> None:  # fmt: skip
        self.source, self.rooms, self.dp_rank = source, rooms, dp_rank
        self._machinery, self._make, self._settings = machinery, make, settings
        self._metrics, self._report = metrics, report
        self.is_accepted = False

    def accept(self, plans: Iterable[Plan], *, resumed: bool) -> None:
        """Check that a run has the memory that it needs.

        Args:
            plans: Plans of the run: one for each batch size to come.
            resumed: The order comes from a loaded state, which overrides the dataset's lanes and window.

        Raises:
            MemoryLimitError: The units needed at once do not fit. Raised on all ranks.
        """
        with self._metrics.timed("plan_s"):
            for plan in plans:
                self.rooms.check(plan, resumed=resumed)
        self.is_accepted = True

    def prepared(self, plan: Plan) -> Callable[[], Pipeline]:
        """Return a function that begins to read a plan of an accepted run."""
        with self._metrics.timed("plan_s"):
            demand = self.rooms.demand(plan, self.dp_rank)
        return lambda: self._read(plan, demand)

    def hold(self) -> None:
        """Keep the chunks that the current run releases, until the next run has selected those that it needs."""
        store = self._machinery.contents
        if store is not None:
            with store.changed:
                # From here on, released units stay in memory until keep_first() selects.
                store.retain = store.is_held = True

    def _read(self, plan: Plan, demand: Demand) -> Pipeline:
        units: Units = (BatchSlices if demand.is_sliced else WholeChunks)(plan, self.dp_rank, self.source)
        crew, store = self._machinery.open(self._make)
        store.limit_bytes, store.retain = demand.limit_bytes, demand.retains
        settings = self._settings(crew)
        store.lender.limit_bytes = demand.lent_bytes if settings.recipe.lends else 0
        store.room = {self.source.chunk(number).key: size for number, size in demand.pieces.items()}
        if store.is_held:
            with store.changed:
                # Kept units that are needed are held again; all other retained units are free.
                num_kept = store.keep_first([] if demand.is_sliced else self._first_units(plan, demand.limit_bytes))
            _log.info("%d chunks of the old plan are still in memory and are not fetched again", num_kept)
        pipeline = Pipeline(
            plan=plan, dp_rank=self.dp_rank, units=units, source=self.source, store=store,
            settings=settings, metrics=self._metrics, report=self._report,
            in_turns=None if demand.is_sliced else partial(self._in_turns, plan, demand),
        )  # fmt: skip
        return self._machinery.serves(pipeline)

    def _in_turns(self, plan: Plan, demand: Demand) -> ChunksInTurns:
        """Return units in turns for a plan that needs more memory at once than there is, and log it."""
        _log.warning("%s", demand.shortage())
        return ChunksInTurns(
            plan, self.dp_rank, self.source, sizes=demand.sizes, room_bytes=self.rooms.most_bytes,
            slice_room=self.rooms.slice_room,
        )  # fmt: skip

    def _first_units(self, plan: Plan, limit_bytes: int) -> Iterator[FetchRange]:
        """Yield the chunks that this rank needs first, at least until the room is full.

        For an endless order, look ahead by at most one pass.
        """
        room_bytes = self.rooms.room_bytes
        limit_bytes = min(2 * limit_bytes, int(room_bytes.sum()))  # twice: they may need less room than this
        for need in WholeChunks(plan, self.dp_rank, self.source).needs():
            limit_bytes -= int(room_bytes[need.unit])
            if limit_bytes < 0:
                return
            yield self.source.chunk(need.unit)
