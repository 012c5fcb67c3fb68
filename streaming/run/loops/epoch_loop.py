"""Loop over a set with an index: place, run order, sizes and stages of one rank, and a world that may change.

Life cycle of a run::

    start -> segment, segment, … -> closed

- ``EpochLoop`` makes the machinery (arena, builders, workers) at the first run, and keeps it across runs, worlds and
  batch sizes. ``close`` and an interrupt discard it; the next run makes it again.
- ``_start`` begins a run at a place. A segment (``_segment``) is a stretch of batches of equal size: one plan.
- Before the first segment of a run, its plans for all later batch sizes must fit into memory (``PlanReader.accept``).
- A segment reads this rank's share (``_read``) through the stages that exchange rows or share them with replicas.
- Only ``set_weights`` and ``remesh`` change a run in progress: the first plans the batches again that were not
  delivered, the second ends the run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from infra import DeviceMesh
from streaming.build.batches.portion import Portion
from streaming.common.counters import Metrics
from streaming.common.job.agreement import Facts
from streaming.common.monitor import Monitor
from streaming.common.platforms import num_cores
from streaming.errors import ConfigError
from streaming.order.plan.demand import ChunkMemory
from streaming.order.plan.ledger import NO_OTHER_SEED
from streaming.order.plan.order import ENDLESS
from streaming.order.plan.plan import Plan
from streaming.order.plan.settings import Shape
from streaming.order.plan.sizes import Sizes
from streaming.order.plan.state import LoaderState
from streaming.run.engine.builders import Crew, is_surely_trivial
from streaming.run.engine.memory.arena import keep_freed_memory
from streaming.run.engine.memory.chunk_store import ChunkStore
from streaming.run.engine.memory.mapped import FileMaps, NoMaps
from streaming.run.engine.pipeline import Settings
from streaming.run.engine.reading import PlanReader
from streaming.run.engine.source import Source
from streaming.run.engine.threads.pace import WorkerPace
from streaming.run.epochs.iterator import Loop
from streaming.run.epochs.position import Place
from streaming.run.epochs.run import Run, Stage, staged
from streaming.run.loops.base import BaseLoop, LoopConfig, open_crew
from streaming.run.loops.course import RunOrder, course_of, ranks_together
from streaming.run.loops.runs import Begin, NotedRun, SegmentedRun, what_changes
from streaming.run.replicas.exchange import RowExchange
from streaming.run.replicas.options import CountedRun
from streaming.storage import redact
from streaming.types import override

_log = logging.getLogger(__name__)

_MOST_AHEAD = 16
"""Batches by which a rank may have read ahead of training when its weights change: a ``DevicePrefetcher`` holds three,
and a rank that reads for its replicas is up to eight ahead of the slowest of them."""
FETCH_THREADS = 64
"""Number of parallel ranged GETs (for files: one per core). Eight saturate a nearby server (docs/design/0002); with a
distant one, the chunks of the first batch should take a single round trip."""


def open_exchange(config: LoopConfig, metrics: Metrics) -> tuple[LoopConfig, tuple[Stage, ...]]:
    """Return the options for building batches, and the exchange of rows with other ranks, if there is one.

    Rows are exchanged whole. This rank's portion is taken from the result, and page-locked after that. A stage without
    payload has nothing to exchange: its number of rows is that of the plan.
    """
    recipe = config.recipe
    exchanged = recipe.items.exchanged
    if exchanged is None or recipe.portion.is_count:
        return config, ()
    keeps_all = config.replicas.portion(config.mesh).is_whole
    peers = RowExchange(config.mesh, exchanged, recipe.cut, metrics, keeps_all=keeps_all)
    return replace(config, recipe=replace(recipe, portion=Portion(), finish=None)), (peers,)


class EpochLoop(BaseLoop[ChunkStore]):
    """Run the plan and engine of one rank, over a set with an index.

    Attributes:
        course: The run order: which samples are drawn when.
        samples_per_epoch: Number of samples of an epoch, over all ranks; used for every batch.
    """

    def __init__(self, dataset: Source, config: LoopConfig) -> None:
        self.course = course_of(dataset, config.shape)
        if not self.course.num_samples:
            raise ConfigError(
                f"no samples in {redact(dataset.urls[0])} and {len(dataset.urls) - 1} other shards. "
                f"Check the URLs, and look at what is there with `shard_tools info`"
            )
        if not config.shape.sizes.is_constant and config.replicas.broadcast(config.mesh) is not None:
            raise ConfigError(
                'replicate: "broadcast" needs batches of one size; give global_batch_size an integer, or use '
                'replicate="read" (with cache_dir= a node fetches once)'
            )
        order = dataset.order_settings(config.shape.sizes.size_for_lanes)
        if is_surely_trivial(config.recipe, dataset.fields):
            if config.recipe.worker_init_fn is not None:
                _log.warning(
                    "worker_init_fn is not called: batches are only cut out of memory, so no worker process starts"
                )
            recipe = replace(config.recipe, worker_init_fn=None)
            config = replace(config, num_workers=0, recipe=recipe)  # processes would have nothing to do
        super().__init__(dataset, order, config, partial(_sample_in_shard, dataset))
        dataset.rows.keep_at_most(config.memory.packs_bytes)
        self.samples_per_epoch = self.shape.epoch_size or self.course.samples_per_pass
        self._is_resumed = False
        self._sizes = self.shape.sizes
        self._row_facts = config.recipe.items.facts()
        self._loaded_at: Place | None = None
        self._begun_at: Place | None = None
        self.shape.check_enough(self.samples_per_epoch)
        self.position.is_endless = self.samples_per_epoch >= ENDLESS
        self._shared = self._stages
        self._open(self.config)

    def _open(self, config: LoopConfig) -> None:
        """Open all that depends on world and source, over the machinery: this rank's reader, and the stages.

        Args:
            config: The options, before those that an exchange of packs needs.
        """
        self._before_exchange = config
        self.config, exchange = open_exchange(config, self.metrics)
        self._stages = (*exchange, *self._shared)
        config, source = self.config, self.course.source
        rooms = ChunkMemory(source, config.memory, is_shared=config.num_workers > 0)
        self._reader = PlanReader(
            source, rooms, config.mesh.data_rank, self._machinery,
            make=partial(_open_store, source, config, rooms, self.metrics, self._pace),
            settings=partial(_settings, config, source), metrics=self.metrics, report=self._account.bad.report,
        )  # fmt: skip
        self.page_lock(self._locker)

    def row_of(self, place: Place) -> int:
        """See ``Loop``: over all epochs of the run."""
        return place.epoch * self.samples_per_epoch + place.samples_seen

    def set_seed(self, seed: int) -> None:
        """See ``Loop``.

        Raises:
            ConfigError: The order has no end.
        """
        if self.course.samples_per_pass >= ENDLESS:
            raise ConfigError(NO_OTHER_SEED)
        super().set_seed(seed)

    @override
    def seen(self) -> dict[str, dict[str, float]]:
        return self.course.seen(self.order, self.row_of(self.position.place))

    @override
    def now_read(self, dataset: Any) -> Any:
        return self.course.now_read(dataset)

    @override
    def outlook(self, place: Place) -> str:
        row, items = self.row_of(place), self.config.recipe.items
        return "; ".join(filter(None, [what_changes(items.changes, row), self.course.what_follows(row)]))

    @override
    def set_weights(self, weights: Any, *, at: int | None, timeout_s: float) -> int:
        say = self.course.saying(weights, at)
        ranks, can_agree = ranks_together(self.config.mesh, timeout_s)
        with self.course.held(self.position.handed_out) as held:
            told = ranks.exchange(lambda: say(self._row_behind(held.place)))
            found: list[tuple[RunOrder, Begin | None]] = []

            def prepare() -> Facts:
                course = self.course.reweighed(told, self.order, can_agree=can_agree)
                found.append((course, held.prepared(partial(self._replanned, held.place, course))))
                return {}

            ranks.exchange(prepare)
            ((self.course, begin),) = found
            # Invariant: all ranks can make the change, and do so: with the same ledger, from the same row on.
            start = self.course.tell_change(told, self.row_of(self.position.place), self.order)
            held.replace(begin)
        return start

    def _row_behind(self, come_to: Place) -> int:
        """Return a row that no rank has delivered, given the place that this rank has reached.

        It follows from the samples that training has received, which are the same on all ranks at the same step, and
        leaves room for the batches that a rank may have read ahead. A wrapper that holds back more than this counts by
        itself.
        """
        place = self.position.place
        for _ in range(_MOST_AHEAD if self.row_of(place) else 0):
            place = self.after_batch(place.onward, None)
        return max(map(self.row_of, (place, come_to, self.position.handed_out)))

    def _replanned(self, place: Place, course: RunOrder) -> Begin:
        """Return a function that begins to read the batches after a place by another run order.

        Raises:
            MemoryLimitError: The units needed at once do not fit.
        """
        plan = self._plan(place, course)
        self._reader.accept([plan], resumed=self._is_resumed)
        begin = self._reader.prepared(plan)
        return lambda: (begin(), plan)

    def succeed(self, other: Loop) -> None:
        """See ``Loop``: also with the weights that ``set_weights`` gave to the other loop.

        Raises:
            StateError: Batches of one source have another size here.
        """
        super().succeed(other)
        if isinstance(other, EpochLoop):
            self._follow(self.course.succeeding(other.course, other.state(), self.row_of(self.position.place)))

    def batches_left(self, samples_seen: int) -> int:
        """See ``Loop``; with a schedule of batch sizes, the number in the current epoch."""
        return self.left_behind(Place(epoch=self.position.epoch, samples_seen=samples_seen))

    @override
    def left_behind(self, place: Place) -> int:
        left = self.samples_per_epoch - place.samples_seen
        return self.shape.sizes.batches(self.row_of(place), left, self.shape.last_batch)

    @override
    def state_at(self, place: Place) -> LoaderState:
        return LoaderState(
            epoch=place.epoch,
            samples_seen=place.samples_seen,
            order=self.order,
            next_seed=self.position.next_seed,
            epoch_size=self.shape.epoch_size,
            has_begun=place.has_begun,
            batch_sizes=self._sizes,
            within=self.within_step(place),
            **self._row_facts,
            **self.course.facts(),
        )

    def load(self, state: LoaderState, what: str = "load_state_dict()") -> None:
        """Continue from ``state``, on behalf of the method ``what``, with the order settings of the state.

        Raises:
            StateError: It belongs to another dataset, epoch size or kind of order.
        """
        self.go_to(self._taken_over(state), state.next_seed, what)

    def _taken_over(self, state: LoaderState, shape: Shape | None = None) -> Place:
        """Adopt everything in a state but its place, and return the place. If this raises, nothing has changed.

        Args:
            state: The state.
            shape: Shape of the batches that follow; default: as before.

        Raises:
            StateError: It belongs to another dataset, epoch size or kind of order.
        """
        place = Place.of(state)
        if place.is_end:  # of a mixture, perhaps with another number of samples
            place = self.settled(place)
        course = self.course.restored(state, self.row_of(place))
        state.check_fits(epoch_size=self.shape.epoch_size, shuffle=self.order.shuffle)
        self._follow(course)
        self._loaded_at, self.order, self._is_resumed = place.onward, state.order, True
        self._sizes = _sizes_behind(state.batch_sizes, self.shape.sizes, self.row_of(place))
        self._row_facts = self.config.recipe.items.facts(state, self.row_of(place))
        return self.resumed(place, state, shape)

    def _follow(self, course: RunOrder) -> None:
        """Draw by another run order from the next run on."""
        is_cut = course.source is not self.course.source
        self.course = course
        if is_cut:  # the same samples, in the fetch units of the loaded run
            self.stop()  # the current run holds other units
            self._drop_machinery()
            self._open(self._before_exchange)

    def remesh(self, mesh: DeviceMesh, at: LoaderState | int, what: str) -> int:
        """Continue from ``at`` in the mesh ``mesh``, keeping worker processes, memory and chunks that are still needed.

        Args:
            mesh: The new mesh. This rank's replica rank is the same.
            at: A state, or a number of global batches of the run.
            what: The call, for the error of the current iterator, which ends.

        Returns:
            The number of samples of delivered batches that come again, over all ranks.

        Raises:
            ConfigError, StateError: It is not possible. Nothing has changed then.
        """
        if self.config.replicas.broadcast(self.config.mesh) is not None:
            raise ConfigError(
                'remesh: with replicate="broadcast" the ranks of a data share stay connected by their rank numbers '
                'in the old world. Use replicate="read" (with cache_dir= a node fetches once), or make a new loader '
                "with the new device_mesh and call load_state_dict(state)"
            )
        Sizes.chosen(None, self.shape.sizes.option, mesh.data_world_size)
        shape = replace(self.shape, num_ranks=mesh.data_world_size)
        self.config.recipe.items.check_shape(shape, self.config.recipe.collate_fn)
        shape.check_enough(self.samples_per_epoch)
        came_to = self.row_of(self.position.place)
        state = at if isinstance(at, LoaderState) else self._state_at(at)
        place = self._taken_over(state, shape)
        self._reader.hold()
        self.go_to(place, state.next_seed, what)
        for stage in self._stages:
            stage.drop()
        self.shape = shape
        self._account.open(mesh)
        self._open(replace(self._before_exchange, shape=shape, mesh=mesh))
        return max(came_to - self.row_of(self.position.place), 0)

    def _state_at(self, num_batches: int) -> LoaderState:
        """Return the state after ``num_batches`` global batches of the run, counted in whole epochs.

        Raises:
            ConfigError: The number alone does not determine the state.
        """
        size, steps = self.shape.global_batch_size, self.shape.steps(self.samples_per_epoch)
        epoch, first = steps.epoch_at(num_batches)
        number = num_batches - first
        seeded, loaded, now = self._seeded_at, self._loaded_at, self.state_at(self.position.place)
        waits, why = now.next_seed is not None, ""
        if not self.shape.sizes.is_constant:
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
        now = replace(now, within=None)
        return replace(now, epoch=epoch, samples_seen=number * size, has_begun=begun)

    def _plan(self, place: Place, course: RunOrder) -> Plan:
        return Plan.behind(
            self.shape, course.source.chunk_samples, self.order, epoch=place.epoch, start=place.samples_seen,
            orders=course.orders(self.order),
        )  # fmt: skip

    def _plans_to_come(self, plan: Plan) -> Iterator[Plan]:
        """Yield a plan, and a plan of the same samples for each size of later batches.

        Yield none if an endless run resumes: its start, at which it was accepted, cannot be planned again.
        """
        if self._is_resumed and plan.orders.is_endless:
            return
        yield plan
        size, rows = plan.global_batch_size, [row for row, _ in self.shape.sizes.steps if row > plan.first_row]
        for row in rows:
            shape = self.shape.at(row)
            if shape.global_batch_size != size:
                yield Plan.of(
                    shape, plan.chunk_samples, self.order, epoch=plan.epoch, start=plan.start, orders=plan.orders
                )

    def _start(self, place: Place) -> Run:
        if self._machinery.is_broken:
            self._drop_machinery()
        self._begun_at = place
        is_first = self.config.mesh.rank == 0
        if is_first:
            self.course.warn_if_coarse(self.order.lanes)
        run: Run = SegmentedRun(self._segment, place, tells=is_first)
        changes = self.config.recipe.items.changes
        return NotedRun(run, self.row_of(place), self.shape.sizes, changes) if is_first and changes else run

    def _segment(self, place: Place) -> tuple[Run, Plan]:
        """Start producing the batches after a place that have the same size as the first of them."""
        plan = self._plan(place, self.course)
        if self.config.recipe.portion.is_count:
            return CountedRun(plan, self.config.mesh.data_rank, self.config.recipe.items), plan
        return staged(self._stages, partial(self._read, plan, place), place), plan

    def _read(self, plan: Plan, place: Place) -> Run:
        """Start reading this rank's share.

        Raises:
            MemoryLimitError: The run begins here, and needs more at once than there is room for.
        """
        if not self._reader.is_accepted:
            self._reader.accept(self._plans_to_come(plan), resumed=self._is_resumed)
        begin = self._reader.prepared(plan)
        if place == self._begun_at:  # otherwise an epoch continues with batches of another size
            # An epoch without an end counts as one pass over the data.
            num_samples = self.course.num_samples if self.is_endless else self.samples_per_epoch
            row = place.samples_seen if self.is_endless else place.epoch * self.samples_per_epoch
            self._account.begin(num_samples, place.epoch, self.course.allowed_bad(row, num_samples))
        return self.course.replannable(begin(), plan)


def _sizes_behind(was: Sizes | None, own: Sizes, row: int) -> Sizes:
    """Return the batch sizes of a run that had a state's sizes before a row. Log once if other sizes follow."""
    if was is None:
        return own
    if not was.goes_on_as(own, row):
        _log.info(
            "the size of batches changes at row %d: the state had %s; this loader has %s. The samples and their "
            "order stay the same; they come in other batches from that row on, so the number of steps left is "
            "another one",
            row, was, own,
        )  # fmt: skip
    return was.followed_by(own, row)


def _sample_in_shard(dataset: Source, number: int) -> int:
    """Return the number within its shard of a sample of the dataset."""
    ends = np.cumsum(dataset.chunk_samples)
    chunk = int(np.searchsorted(ends, number, side="right"))
    offset = np.array([number - ends[chunk] + dataset.chunk_samples[chunk]])
    wanted = dataset.chunk(chunk)
    return wanted.first_sample + wanted.lead + int(dataset.samples_of(np.array([chunk]), offset)[0])


def _open_store(
    source: Source, config: LoopConfig, rooms: ChunkMemory, metrics: Metrics, pace: WorkerPace
) -> tuple[Crew, ChunkStore]:
    """Return the builders of batches and the chunk store, for all runs."""
    keep_freed_memory()  # not for streamed sets: their window frees such memory in random order
    crew = open_crew(config, rooms.most_bytes, metrics, pace)
    in_place = None if rooms.in_place is None else source.in_place
    return crew, ChunkStore(
        fetch=source.fetch_unit,
        apart=None if in_place is None else in_place.apart,
        arena=crew.arena,
        num_threads=min(FETCH_THREADS, num_cores() if source.is_local else FETCH_THREADS),
        metrics=metrics,
        changed=Monitor(),
        maps=NoMaps() if in_place is None else FileMaps(crew.arena, in_place.reads_whole),
    )


def _settings(config: LoopConfig, source: Source, crew: Crew) -> Settings:
    """Return the settings of a pipeline with these builders."""
    return Settings(
        recipe=config.recipe,
        builder=crew.builder,
        fields=source.fields,
        num_builders=config.num_builders,
        depth=config.depth,
        batch_bytes=config.memory.batches_bytes,
    )
