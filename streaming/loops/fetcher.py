"""Loop over a set with an index: plan and engine of one rank, one arena, shares of sources, a changing world."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from infra import DeviceMesh
from streaming.arguments import resolve_batch_size
from streaming.batches.portion import Portion
from streaming.datasets.face import reading
from streaming.engine.builders import Crew, is_surely_trivial
from streaming.engine.memory.arena import keep_freed_memory
from streaming.engine.memory.chunk_store import ChunkStore
from streaming.engine.memory.mapped import FileMaps
from streaming.engine.pipeline import Pipeline, Settings
from streaming.engine.source import Source
from streaming.engine.units import BatchSlices, Units, WholeChunks
from streaming.engine.workers.ring import PageLocker
from streaming.epochs.iterator import Run
from streaming.epochs.position import Place
from streaming.errors import ConfigError, StateError
from streaming.fetch.read import FetchRange
from streaming.job.agreement import Facts
from streaming.loops.base import BaseLoop, LoopConfig, open_crew
from streaming.loops.options import check_padded
from streaming.loops.runs import RampedRun, ReplannedRun
from streaming.loops.shares import Change, RunShares, ranks_together
from streaming.metrics import Metrics
from streaming.monitor import Monitor
from streaming.plan import memory as budget
from streaming.plan.ledger import NO_OTHER_SEED
from streaming.plan.order import ENDLESS, Orders
from streaming.plan.plan import Plan
from streaming.plan.ramp import Ramp
from streaming.plan.room import Room, Rooms
from streaming.plan.settings import Shape
from streaming.plan.state import LoaderState, why_differs
from streaming.replicas.exchange import PackExchange
from streaming.replicas.options import CountedRun
from streaming.sources.mixed import MixedSource
from streaming.storage import redact

_log = logging.getLogger(__name__)

_MOST_AHEAD = 16
"""Batches by which a rank may have read ahead of training when its weights change: a ``DevicePrefetcher`` holds three,
and a rank that reads for its replicas is up to eight ahead of the last of them."""
FETCH_THREADS = 64
"""Ranged GETs in parallel (for files: one per core). Eight saturate a nearby server (docs/design/0002); with a
distant one, the chunks of the first batch should take a single round trip."""


def open_exchange(config: LoopConfig, metrics: Metrics) -> tuple[LoopConfig, PackExchange | None]:
    """Return the options for building batches, and the exchange of packs with other ranks, or None.

    Packs are exchanged whole; this rank's portion is taken from the result, and page-locked after that. A stage without
    payload has nothing to exchange: its number of packs is that of the plan.
    """
    recipe = config.recipe
    if not config.exchanges or recipe.packs is None or recipe.portion.is_count:
        return config, None
    peers = PackExchange(config.mesh, recipe.packs, recipe.cut, metrics)
    return replace(config, recipe=replace(recipe, portion=Portion(), finish=None)), peers


class EpochLoop(BaseLoop):
    """Run the plan and engine of one rank, over a set with an index."""

    def __init__(self, dataset: Source, config: LoopConfig) -> None:
        self.dataset = dataset
        self._num_samples = int(dataset.chunk_samples.sum())
        self.shares = RunShares(dataset, config.shape) if isinstance(dataset, MixedSource) else None
        if not self._num_samples:
            raise ConfigError(
                f"no samples in {redact(dataset.urls[0])} and {len(dataset.urls) - 1} other shards. "
                f"Check the URLs, and look at what is there with `shard_tools info`"
            )
        if config.shape.ramp is not None and config.replicas.broadcast(config.mesh) is not None:
            raise ConfigError(
                'replicate: "broadcast" needs batches of one size; give global_batch_size an integer, or use '
                'replicate="read" (with cache_dir= a node fetches once)'
            )
        order = dataset.order_settings(config.shape.size_for_lanes)
        if is_surely_trivial(config.recipe, dataset.fields):
            config = replace(config, num_workers=0)  # they would have nothing to do
        super().__init__(dataset, order, config, partial(_sample_in_shard, dataset))
        self.config, self._peers = open_exchange(self.config, self.metrics)
        if config.is_packed:
            dataset.keep_at_most(budget.packs_limit_bytes(config.memory_limit_bytes))
        self._store: ChunkStore | None = None
        self._is_resumed = self._keeps_chunks = False
        self._sizes = self.shape.sizes_by_row
        self._loaded_at: Place | None = None
        self._seeded_at: Place | None = None
        self._num_runs = 0
        self._reading: Callable[[], ReplannedRun | None] = lambda: None
        self.shape.check_enough(self.samples_per_epoch)
        self.position.is_endless = self.samples_per_epoch >= ENDLESS

    @cached_property
    def samples_per_epoch(self) -> int:
        """Samples of an epoch, over all ranks; used for every batch."""
        return self.shape.epoch_size or self._samples_per_pass

    @cached_property
    def _rooms(self) -> Rooms:
        """The memory that chunks take."""
        return Rooms(self.dataset, self.config.memory_limit_bytes, is_mapped=self._is_mapped)

    @property
    def _samples_per_pass(self) -> int:
        return self._num_samples if self.shares is None else self.shares.samples_per_pass

    def row_of(self, place: Place) -> int:
        """Return the number of samples of the run, over all ranks and epochs, that come before a place."""
        return place.epoch * self.samples_per_epoch + place.samples_seen

    def set_seed(self, seed: int) -> None:
        """See ``Loop``.

        Raises:
            ConfigError: The order has no end.
        """
        if self._samples_per_pass >= ENDLESS:
            raise ConfigError(NO_OTHER_SEED)
        super().set_seed(seed)

    def seen(self) -> dict[str, dict[str, float]]:
        """See ``DataLoader.seen``."""
        if self.shares is None:
            return super().seen()
        return self.shares.seen(self.order, self.row_of(self.position.place))

    def now_read(self, dataset: Any) -> Any:
        """See ``Loop``."""
        return dataset if self.shares is None else reading(dataset, self.shares.now_read)

    def set_weights(self, weights: Any, *, at: int | None, timeout_s: float) -> int:
        """See ``DataLoader.set_weights``."""
        shares = self.shares
        if shares is None:
            return super().set_weights(weights, at=at, timeout_s=timeout_s)
        reading = None if self.running is None else self._reading()
        ranks, can_agree = ranks_together(self.config.mesh, timeout_s)
        with nullcontext(self.position.handed_out) if reading is None else reading.held() as come_to:
            told = ranks.exchange(lambda: shares.said(weights, at, self._row_behind(come_to)))
            found: list[tuple[Change, Callable[[], Run] | None]] = []

            def prepare() -> Facts:
                change = shares.changed(told, self.order, can_agree=can_agree)
                is_over = reading is None or reading.is_over
                found.append((change, None if is_over else self._replanned(come_to, change.orders)))
                return {}

            ranks.exchange(prepare)
            ((change, begin),) = found
            # Invariant: all ranks can make the change, and do: the same ledger, from the same row on.
            start = shares.adopt(change, self.row_of(self.position.place))
            if reading is not None and begin is not None:
                self._hold_chunks()
                reading.replace(begin)
        return start

    def _row_behind(self, come_to: Place) -> int:
        """Return a row that no rank has handed out, given the place that this one has come to.

        It follows from what training has received, which is the same on all ranks at the same step, and leaves room for
        what a rank may have read ahead of that. Only a wrapper that holds back more than this counts by itself.
        """
        place = self.position.place
        for _ in range(_MOST_AHEAD if self.row_of(place) else 0):
            place = self.after_batch(place, None)
        return max(map(self.row_of, (place, come_to, self.position.handed_out)))

    def _replanned(self, place: Place, orders: Orders) -> Callable[[], Run]:
        """Return a function that begins to read the batches after a place in other orders.

        Raises:
            MemoryLimitError: What is needed at once does not fit.
        """
        plan = self._plan(place, orders)
        room = self._room_for(plan)

        def begin() -> Run:
            if self._is_broken:  # connections to other ranks outlive this run
                self._store = None
                self._drop_crew()
            self._keeps_chunks &= not room.retain  # there is room for all of them
            return self._read(plan, room)

        return begin

    def _hold_chunks(self) -> None:
        """Keep the chunks that the current run releases, until the next run has chosen those that it needs."""
        if self._store is not None:
            with self._store.changed:
                # From here on, released units stay in memory until keep_first() chooses.
                self._store.retain = True
        self._keeps_chunks = self._store is not None

    def take_weights(self, other: EpochLoop) -> None:
        """Adopt the weights that ``set_weights`` gave to another loop over the same mixture.

        Raises:
            StateError: Batches of one source have another size here.
        """
        if self.shares is not None and other.shares is not None and other.shares.ledger.is_changed:
            self.shares.load(other.state(), self.row_of(self.position.place))

    def batches_left(self, samples_seen: int) -> int:
        """See ``Loop``; with a schedule of batch sizes, the number in the current epoch."""
        return self.left_behind(Place(epoch=self.position.epoch, samples_seen=samples_seen))

    def left_behind(self, place: Place) -> int:
        """See ``Loop``."""
        return self.shape.batches_from(self.row_of(place), self.samples_per_epoch - place.samples_seen)

    def after_batch(self, place: Place, run: Any) -> Place:
        """See ``Loop``."""
        if self.shape.ramp is None:
            return super().after_batch(place, run)
        seen = place.samples_seen + self.shape_at(place).global_batch_size
        after = Place(epoch=place.epoch, samples_seen=seen)
        return after if self.left_behind(after) else Place(epoch=place.epoch + 1, samples_seen=0)

    def shape_at(self, place: Place) -> Shape:
        """Return the shape of the batch after a place."""
        return self.shape.at(self.row_of(place))

    def state(self) -> LoaderState:
        """Return the position; the same on every rank."""
        return LoaderState(
            epoch=self.position.epoch,
            samples_seen=self.position.samples_seen,
            order=self.order,
            next_seed=self.position.next_seed,
            fingerprint=self.dataset.fingerprint,
            num_samples=self._num_samples,
            epoch_size=self.shape.epoch_size,
            ledger=None if self.shares is None else self.shares.ledger,
            has_begun=self.position.place.has_begun,
            batch_sizes=self._sizes,
        )

    def load(self, state: LoaderState, what: str = "load_state_dict()") -> None:
        """Continue from ``state``, on behalf of the method ``what``, with the order settings of the state.

        Raises:
            StateError: It belongs to another dataset, epoch size or kind of order.
        """
        self.go_to(self._taken_over(state), state.next_seed, what)

    def _taken_over(self, state: LoaderState) -> Place:
        """Adopt everything in a state but its place, and return the place. If this raises, nothing has changed.

        Raises:
            StateError: It belongs to another dataset, epoch size or kind of order.
        """
        self._check_state(state)
        place = Place.of(state)
        if self.shares is not None:
            self.shares.load(state, self.row_of(place))
            self._read_of(self.shares.mixture)
        self._loaded_at, self.order, self._is_resumed = place, state.order, True
        self._sizes = self._sizes_behind(state.batch_sizes, self.row_of(place))
        return place

    def _sizes_behind(self, was: Ramp | None, row: int) -> Ramp:
        """Return the batch sizes of a run that had those of a state before a row; log once if others follow."""
        own = self.shape.sizes_by_row
        if was is None:
            return own
        found = was.followed_by(own, row)
        if found != was.followed_by(was, row):
            _log.info(
                "the size of batches changes at row %d: the state had %s; this loader has %s. The samples and their "
                "order stay the same; they come in other batches from that row on, so the number of steps left is "
                "another one",
                row, was, own,
            )  # fmt: skip
        return found

    def _read_of(self, mixture: MixedSource) -> None:
        """Read ``mixture`` from the next run on: the same samples, cut into the fetch units of the loaded run."""
        if mixture is self.dataset:
            return
        self.dataset = self._read_set = mixture
        self.__dict__.pop("_rooms", None)
        self.stop()  # what it holds are other units
        self._drop_machinery()

    def start(self, place: Place, seed: int | None) -> Run:
        """See ``Loop``."""
        if seed is not None:
            self._seeded_at = place
        return super().start(place, seed)

    def page_lock(self, locker: PageLocker | None) -> None:
        """See ``Loop``; if packs are exchanged, this applies to the batches made from them."""
        if self._peers is None:
            super().page_lock(locker)
        elif self.config.replicas.portion(self.config.mesh).is_whole:
            self._peers.allocate = None if locker is None else locker.allocate

    def remesh(self, mesh: DeviceMesh, at: LoaderState | int, what: str) -> int:
        """Continue from ``at`` in the mesh ``mesh``, keeping worker processes, memory and chunks that are still needed.

        Args:
            mesh: The new mesh; this rank's replica rank is the same.
            at: A state, or a number of global batches of the run.
            what: The call, for the error of the current iterator, which ends.

        Returns:
            How many samples of the batches that were handed out come again, over all ranks.

        Raises:
            ConfigError, StateError: It is not possible; nothing has changed then.
        """
        if self._sharing is not None:
            raise ConfigError(
                'remesh: with replicate="broadcast" the ranks of a data share stay connected by their rank numbers '
                'in the old world. Use replicate="read" (with cache_dir= a node fetches once), or make a new loader '
                "with the new device_mesh and call load_state_dict(state)"
            )
        for each in self.shape.sizes:
            resolve_batch_size(None, each, mesh.data_world_size)
        shape = replace(self.shape, num_ranks=mesh.data_world_size)
        check_padded(self.config.recipe, shape)
        shape.check_enough(self.samples_per_epoch)
        came_to = self.row_of(self.position.place)
        state = self._state_at(at) if isinstance(at, int) else at
        place = self._taken_over(state)
        self._hold_chunks()
        self.go_to(place, state.next_seed, what)
        self.become(mesh)
        if self._peers is not None:
            self._peers.become(mesh)
        return max(came_to - self.row_of(self.position.place), 0)

    def _state_at(self, num_batches: int) -> LoaderState:
        """Return the state after ``num_batches`` global batches of the run, counted in whole epochs.

        Raises:
            ConfigError: The number alone does not determine the state.
        """
        size = self.shape.global_batch_size
        epoch, number = divmod(num_batches, self.num_batches)
        seeded, loaded, now = self._seeded_at, self._loaded_at, self.state()
        waits, why = now.next_seed is not None, ""
        if self.shape.ramp is not None:
            why = "batches change in size during this run"
        elif seeded is not None and epoch < seeded.epoch:
            why = f"it lies before epoch {seeded.epoch}, from which seed() set another order"
        elif waits and number and epoch >= now.seeded_from:
            why = "it lies past the start of an epoch for which seed() sets another order"
        elif loaded is not None and loaded.epoch == epoch and loaded.samples_seen % size:
            why = f"batches of epoch {epoch} begin at sample {loaded.samples_seen}, where the loaded state left off"
        if why:
            raise ConfigError(f"remesh: at={num_batches}: {why}. Give the state_dict() saved at that batch")
        begun = waits and not number and epoch < now.seeded_from
        return replace(now, epoch=epoch, samples_seen=number * size, has_begun=begun)

    def _check_state(self, state: LoaderState) -> None:
        """Check that a state belongs to this dataset, epoch size and kind of order.

        Raises:
            StateError: It does not.
        """
        fingerprint = self.dataset.fingerprint
        if state.ledger is not None and self.shares is None:
            raise StateError(
                f"this state belongs to a mixture of {', '.join(state.ledger.sources)}, but this loader reads a single "
                "data set; give it the Mixture"
            )
        if self.shares is None and (state.fingerprint, state.num_samples) != (fingerprint, self._num_samples):
            why = why_differs(state.fingerprint, fingerprint)
            raise StateError(
                f"this state belongs to another selection of samples from these shards. {why}"
                if why
                else f"this state belongs to another data set: {state.num_samples} samples, fingerprint "
                f"{state.fingerprint[:12]}; this one has {self._num_samples} samples, fingerprint "
                f"{fingerprint[:12]}. Open the same shards in the same order, with the index they had"
            )
        state.check_fits(epoch_size=self.shape.epoch_size, shuffle=self.order.shuffle)

    def _drop_machinery(self) -> None:
        if self._peers is not None:
            self._peers.drop()
        self._store = None
        super()._drop_machinery()

    def _plan(self, place: Place, orders: Orders | None = None) -> Plan:
        if orders is None:
            orders = (self.dataset if self.shares is None else self.shares).orders(self.order)
        return Plan.behind(
            self.shape, self.dataset.chunk_samples, self.order, epoch=place.epoch, start=place.samples_seen,
            orders=orders,
        )  # fmt: skip

    def _start(self, place: Place) -> Run:
        if self.shape.ramp is None:
            return self._start_plan(self._plan(place), place)
        self._num_runs = 0
        return RampedRun(self._start_size, place)

    def _start_size(self, place: Place) -> tuple[Run, int, Place]:
        """Start producing the batches after a place that have the same size as the first of them."""
        before, self.shape = self.shape.global_batch_size, self.shape_at(place)
        size = self.shape.global_batch_size
        if self._num_runs and self.config.mesh.rank == 0:
            _log.info("from row %d batches have %d samples; before they had %d", self.row_of(place), size, before)
        plan = self._plan(place)
        behind = Place(epoch=place.epoch, samples_seen=place.samples_seen + plan.num_batches * size)
        run = self._start_plan(plan, place)
        self._num_runs += 1
        return run, plan.num_batches, behind

    def _start_plan(self, plan: Plan, place: Place) -> Run:
        if self._sharing is None and self.config.recipe.portion.is_count:
            return CountedRun(plan, self.config.mesh.data_rank)
        return self._shared(lambda: self._exchanged(plan, place), place)

    def _exchanged(self, plan: Plan, place: Place) -> Run:
        """Start reading this rank's share, and exchange its packs if that is configured."""
        room = self._room_for(plan)
        if not self._num_runs:  # otherwise an epoch continues with batches of another size
            self._account(place)
        running: Run = self._read(plan, room)
        if self.shares is not None and self.shares.mixture.is_endless:
            running = ReplannedRun(running, plan.num_batches, place, lambda place: self.after_batch(place, None))
            self._reading = weakref.ref(running)
        return running if self._peers is None else self._peers.run(running, place)

    def _read(self, plan: Plan, room: Room) -> Pipeline:
        """Start reading this rank's share."""
        dp_rank = self.config.mesh.data_rank
        units: Units = (BatchSlices if room.is_sliced else WholeChunks)(plan, dp_rank, self.dataset)
        crew, store = self._open_store()
        store.limit_bytes, store.retain = room.limit_bytes, room.retain
        store.room = {self.dataset.chunk(number).key: size for number, size in room.pieces.items()}
        if self._keeps_chunks:
            self._keep_chunks(store, [] if room.is_sliced else self._first_units(plan, dp_rank, store.limit_bytes))
        return Pipeline(
            plan=plan,
            dp_rank=dp_rank,
            units=units,
            source=self.dataset,
            store=store,
            settings=Settings(
                recipe=self.config.recipe,
                builder=crew.builder,
                fields=self.dataset.fields,
                num_builders=self.config.num_workers or self.config.num_threads,
                depth=self.config.depth,
                batch_bytes=self.config.batches_limit_bytes,
                balance=self.config.balance,
            ),
            metrics=self.metrics,
            report=self._bad.report,
        )

    def _room_for(self, plan: Plan) -> Room:
        """Decide how much of memory_limit the arena uses.

        Raises:
            MemoryLimitError: What is needed at once does not fit.
        """
        return self._rooms.of(plan, self.config.mesh.data_rank, resumed=self._is_resumed)

    def _keep_chunks(self, store: ChunkStore, wanted: Iterable[FetchRange]) -> None:
        """Keep those chunks released by the run before, of an earlier world or plan, that are wanted now."""
        with store.changed:
            # What is kept and wanted is held again; everything else that was retained is free.
            num_kept = store.keep_first(wanted)
        self._keeps_chunks = False
        _log.info("%d chunks of the old plan are still in memory and are not fetched again", num_kept)

    def _first_units(self, plan: Plan, dp_rank: int, limit_bytes: int) -> list[FetchRange]:
        """Return the chunks that this rank needs first, at least as many as fit.

        For an endless order, look ahead by at most one pass.
        """
        found: list[FetchRange] = []
        limit_bytes = min(
            2 * limit_bytes, int(self._rooms.room_bytes.sum())
        )  # twice: they may need less room than this
        for need in WholeChunks(plan, dp_rank, self.dataset).needs():
            limit_bytes -= int(self._rooms.room_bytes[need.unit])
            if limit_bytes < 0:
                break
            found.append(self.dataset.chunk(need.unit))
        return found

    def _account(self, place: Place) -> None:
        """Begin accounting for bad samples; an epoch without an end counts as one pass over the data."""
        num_samples = self._num_samples if self.is_endless else self.samples_per_epoch
        allowed_of: Callable[[float], Mapping[str, int]] | None = None
        if self.shares is not None and isinstance(self.dataset, MixedSource):
            start = place.epoch * self.samples_per_epoch if not self.is_endless else place.samples_seen
            allowed_of = partial(self.dataset.bad_limits, self.shares.ledger, start, num_samples)
        self._begin_account(num_samples, place.epoch, allowed_of)

    @property
    def _arena_limit_bytes(self) -> int:
        return 0 if self._store is None else self._store.limit_bytes

    def _open_store(self) -> tuple[Crew, ChunkStore]:
        """Return the chunk store and the builders of batches, for all runs."""
        if self._is_broken:
            self._drop_machinery()
        if self._crew is None or self._store is None:
            limit = self.config.memory_limit_bytes
            keep_freed_memory()  # not for streamed sets: their window is in that memory, and frees it in random order
            room = min(budget.chunks_limit_bytes(limit), budget.most_room(int(self._rooms.room_bytes.sum())))
            crew = open_crew(self.config, room, self.metrics)
            self._store = ChunkStore(
                fetch=self.dataset.fetch_unit,
                apart=self.dataset.apart,
                arena=crew.arena,
                num_threads=min(FETCH_THREADS, (os.cpu_count() or 1) if self.dataset.is_local else FETCH_THREADS),
                metrics=self.metrics,
                changed=Monitor(),
                maps=FileMaps(crew.arena, self.dataset.reads_whole) if self._is_mapped else None,
            )
            self._keep(crew, partial(_close_all, crew, self._store))
            return crew, self._store
        return self._crew, self._store

    @property
    def _is_broken(self) -> bool:
        """Whether no other run may use the chunk store: a thread was left behind in it, or has failed."""
        return self._store is not None and (self._store.abandoned or self._store.failure is not None)

    @property
    def _is_mapped(self) -> bool:
        """Whether local shards are memory-mapped, which requires that no other process needs to see the arena."""
        return not self.config.num_workers and self.dataset.can_be_mapped


def _sample_in_shard(dataset: Source, number: int) -> int:
    """Return the number within its shard of a sample of the dataset."""
    ends = np.cumsum(dataset.chunk_samples)
    chunk = int(np.searchsorted(ends, number, side="right"))
    offset = np.array([number - ends[chunk] + dataset.chunk_samples[chunk]])
    wanted = dataset.chunk(chunk)
    return wanted.first_sample + wanted.lead + int(dataset.samples_of(np.array([chunk]), offset)[0])


def _close_all(crew: Crew, store: ChunkStore) -> None:
    crew.close()
    store.close()
