"""Share the common part of both loops over a ``StreamingDataset``: order, accounting of bad samples, builders."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from infra import DeviceMesh
from streaming.build.batches.bad_samples import BadSamples
from streaming.build.batches.build import Recipe
from streaming.build.batches.draw_watch import own_generators
from streaming.common.counters import Metrics
from streaming.common.forks import in_children
from streaming.common.job.store import ProcessGroup
from streaming.common.job.tally import Tally, open_tally
from streaming.common.platforms import num_cores
from streaming.order.plan.memory import Budget
from streaming.order.plan.order import OrderSettings
from streaming.order.plan.settings import Shape
from streaming.order.plan.state import LoaderState, WithinStep
from streaming.run.engine.builders import Crew, num_lanes
from streaming.run.engine.reading import Contents, Machinery
from streaming.run.engine.source import ShardSet
from streaming.run.engine.status import request_line
from streaming.run.engine.threads.pace import WorkerPace
from streaming.run.engine.workers.portable import Redefinitions
from streaming.run.engine.workers.ring import PageLocker
from streaming.run.engine.workers.surroundings import Surroundings, ordinary_tensors
from streaming.run.epochs.iterator import Loop
from streaming.run.epochs.position import Place
from streaming.run.epochs.run import Run, RunOver, Stage
from streaming.run.replicas.broadcast import Sharing
from streaming.run.replicas.options import Replicas
from streaming.types import override

_Contents = TypeVar("_Contents", bound=Contents)
_log = logging.getLogger(__name__)
_OWN_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """The validated options of a loop.

    Attributes:
        shape: Shape of the batches.
        mesh: The mesh, including this process's place in it.
        memory: The rank's ``memory_limit``, divided.
        num_workers: Number of processes that build batches; 0: threads of this process build.
        num_threads: Number of threads that build batches if there are no processes; 0: the thread that requests a batch
            builds it. With processes, 0 leaves all batches to them, also while they start.
        depth: Number of batches built ahead.
        recipe: Decode, transform, collate.
        replicas: Which ranks of a data share read, and what each gets.
    """

    shape: Shape
    mesh: DeviceMesh
    memory: Budget
    num_workers: int
    num_threads: int
    depth: int
    recipe: Recipe
    replicas: Replicas = Replicas()  # noqa: RUF009  frozen

    @property
    def num_builders(self) -> int:
        """Number of background threads that build batches, or send them to worker processes."""
        return num_lanes(self.recipe, self.num_workers, self.num_threads)


def open_crew(config: LoopConfig, arena_bytes: int, metrics: Metrics, pace: WorkerPace) -> Crew:
    """Return the builders of a loop's batches, over an arena of ``arena_bytes``."""
    return Crew(
        config.num_workers,
        config.recipe,
        arena_bytes=arena_bytes,
        depth=config.depth,
        batch_bytes=config.memory.batches_bytes,
        metrics=metrics,
        num_threads=config.num_threads,
        tells=config.mesh.rank == 0,
        pace=pace,
    )


def open_sharing(config: LoopConfig, metrics: Metrics) -> tuple[LoopConfig, tuple[Stage, ...]]:
    """Return the options of the reading side, and the stage by which one rank of a data share reads for the others.

    Batches are page-locked after their portions are taken, and so not where they are built. The thread that requests
    batches reads in two cases: where ranks exchange rows, since all such ranks are then at the same batch when their
    loops end; and where users' functions run in this process, since these may draw from the training's random
    generators.
    """
    broadcast = config.replicas.broadcast(config.mesh)
    if broadcast is None:
        return config, ()
    pin, recipe = config.recipe.finish, replace(config.recipe, finish=None)
    sharing = Sharing.of_replicas(
        config.replicas, broadcast, config.mesh, pin=pin, metrics=metrics,
        reads_inline=config.recipe.items.exchanged is not None
        or bool(not config.num_workers and recipe.functions_of_user),
        batch_bytes=config.memory.batches_bytes, is_cut=config.shape.micro_batch_size is not None,
    )  # fmt: skip
    return replace(config, recipe=recipe), (sharing,)


def tell_of_own_generators(recipe: Recipe) -> None:
    """Log, if functions hold generators, that these are seeded again: their numbers do not follow their own seeds."""
    found = list(own_generators(recipe.functions_of_user))
    if found:
        _log.info(
            "transform, decode or collate_fn holds or names random generators of its own (%s%s). Those that it draws "
            "from are seeded before each sample by the loader's seed, the epoch and the sample's position, so that "
            "they give the same on any number of ranks and workers, and no two samples the same. Their own seeds have "
            "no effect: use StreamingDataset(seed=) or loader.seed(). Without worker processes, one batch is built at "
            "a time",
            ", ".join(found[:_OWN_SHOWN]), f" and {len(found) - _OWN_SHOWN} more" if len(found) > _OWN_SHOWN else "",
        )  # fmt: skip


def tell_of_copied_views(recipe: Recipe, why: str) -> None:
    """Log, if users requested views, that they get copies, and why; "": they get views."""
    if why and recipe.lends:
        _log.warning('decode "view": %s, so views show copies, which cost what bytes do', why)


class Accounting:
    """Account for the bad samples of a loop: its own and, through a tally, those that all known ranks find.

    Args:
        dataset: The dataset.
        mesh: The mesh, including this process's place in it.
        metrics: Counts bad samples.
        sample_in_shard: See ``BadSamples``.

    Attributes:
        bad: The bad samples found here.
    """

    def __init__(
        self, dataset: ShardSet, mesh: DeviceMesh, metrics: Metrics, sample_in_shard: Callable[[int], int] | None
    ) -> None:
        self._dataset, self._mesh = dataset, mesh
        self.bad = BadSamples(
            dataset.max_bad_samples,
            metrics,
            sample_in_shard=sample_in_shard,
            files=dataset.bad_files,
            rank=mesh.rank,
            fate=dataset.items.fate(dataset.on_error),
        )
        self._tally: Tally | None = None
        self._counted_in: ProcessGroup | None = None
        self._left: ProcessGroup | None = None  # the group of an earlier world, whose ranks may all be gone

    def open(self, mesh: DeviceMesh) -> None:
        """Count in another world. Some ranks of the earlier world's process group may be gone, so that is not used."""
        self._mesh, self._tally, self._left = mesh, None, self._counted_in

    def begin(
        self, num_rows: int, epoch: int, allowed: Callable[[float], Mapping[str, int] | None] = lambda _: None
    ) -> None:
        """Begin accounting for an epoch of ``num_rows``, together with other known ranks.

        A rank that does not know the others' bad samples allows itself its own part of the limits that are shares of
        the epoch, and calls ``allowed`` with that part.
        """
        mesh, dataset = self._mesh, self._dataset
        if self._tally is None and not (self._left is not None and self._left.is_current):
            self._counted_in = ProcessGroup()
            subject = "\n".join(["bad samples", *dataset.urls])
            self._tally = open_tally(subject, mesh.rank, mesh.ranks, adds=mesh.replica_rank == 0)
        part = 1 / mesh.data_world_size if self._tally is None else 1.0
        self.bad.start_epoch(dataset.expected_samples(num_rows) * part, epoch, self._tally, allowed(part))


class BaseLoop(Loop, Generic[_Contents]):
    """Run one epoch after another. Used by one thread, except ``metrics`` and ``close``.

    Attributes:
        order: Order settings of the current epoch.
    """

    def __init__(
        self, dataset: ShardSet, order: OrderSettings, config: LoopConfig,
        sample_in_shard: Callable[[int], int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(config.shape)
        self.config, self._stages = open_sharing(config, self.metrics)
        self._read_set = dataset
        self.order = order
        self._machinery: Machinery[_Contents] = Machinery(self.metrics)
        self._pace = WorkerPace(
            self.metrics, self.config.num_workers, self.config.num_threads, num_cores(),
            acts=not self.config.recipe.functions_of_user,
        )  # fmt: skip
        self._locker: PageLocker | None = None
        self._seeded_at: Place | None = None
        self._account = Accounting(dataset, config.mesh, self.metrics, sample_in_shard)
        self._earlier = dataset.counters()
        in_children(self, BaseLoop._leave_behind)
        self._redefinitions = Redefinitions(config.recipe.functions_of_user)
        if config.mesh.rank == 0:
            tell_of_own_generators(config.recipe)
        tell_of_copied_views(config.recipe, self._copies_views())

    def _copies_views(self) -> str:
        """Return why no views of the memory of chunks are delivered; "" if they are."""
        if self.config.num_workers:
            return (
                "with worker processes batches are built in, or for, other processes (num_workers=0 builds them here)"
            )
        return "one rank reads for others and sends them its batches" if self._stages else ""

    @abstractmethod
    def _start(self, place: Place) -> Run:
        """Start producing the epoch's batches from ``place`` on, in ``order``."""

    @override
    def start(self, place: Place, seed: int | None) -> Run:
        if seed is not None:
            self.order, self._seeded_at = replace(self.order, seed=seed), place
        self._follow_changes()
        self._machinery.surroundings = Surroundings.taken(of_threads=not self.config.num_workers)
        return _Accounted(self._start(place), self._account.bad, self.shape.rows_of(self.config.mesh.data_rank))

    def _follow_changes(self) -> None:
        """Send worker processes the current state of the user's functions; report functions that were redefined."""
        for name in self._redefinitions.new():
            _log.warning(
                "%s was redefined in __main__ after it was given to this loader, which keeps calling the earlier "
                "one. Make the dataset and the loader again to use the new one", name,
            )  # fmt: skip
        if self._machinery.renew() and self.config.mesh.rank == 0:
            _log.info(
                "globals or objects that transform, decode or collate_fn refers to have changed: worker processes "
                "restart with them"
            )

    @override
    def rows_of_step(self, place: Place) -> int | None:
        return None if self.config.recipe.skips else super().rows_of_step(place)

    def within_step(self, place: Place, shape: Shape | None = None) -> WithinStep | None:
        """Return the entry of a state for a place in its step, in batches of a shape (default: the loop's)."""
        shape = shape or self.shape
        if shape.micro_batch_size is None or not place.micro_batches:
            return None if shape.micro_batch_size is None else WithinStep()
        row, left = self.row_of(place), self.samples_per_epoch - place.samples_seen
        size = min(shape.sizes.at(row), left)
        num_rows = shape.at(row).most_rows * shape.num_ranks if shape.last_batch == "pad" else size
        parts = shape.num_parts(size, row)
        return WithinStep(min(place.micro_batches, parts - 1), parts, num_rows, shape.num_ranks)

    def resumed(self, place: Place, state: LoaderState, shape: Shape | None = None) -> Place:
        """Return the place of a state in its step, if batches of a shape cut the step as it was cut; else its start."""
        was = state.within
        if was is None or not was.done or place.is_end:
            return place
        inside = replace(place, micro_batches=was.done)
        if self.within_step(inside, shape) == was:
            return inside
        _log.warning(
            "the state was saved after %d of the %d micro-batches of a step of %d rows on %d ranks, and this loader "
            "cuts the step in another way: the whole step comes again, from its first micro-batch",
            was.done, was.parts, was.num_rows, was.num_ranks,
        )  # fmt: skip
        return place

    def report(self) -> dict[str, Any]:
        """Return all metrics, and the bad samples of this epoch by name."""
        return {**self.numbers(), "bad": self._account.bad.listing()}

    @override
    def numbers(self) -> dict[str, float]:
        shared = {name: value - self._earlier.get(name, 0) for name, value in self._read_set.counters().items()}
        gauges = self._machinery.gauges()
        gauges["requests_in_flight"] = len(self._read_set.in_flight())
        own = self.metrics.snapshot()
        for name in ("consumer_thread_s", "unhidden_s"):
            gauges[f"{name}_per_batch"] = own.get(name, 0.0) / max(1.0, own.get("batches", 0))
        return {**own, **shared, **gauges}

    def describe(self) -> str:
        """Describe what the loop is waiting for right now."""
        running = self.running
        if running is None:
            return "not running"
        return "\n".join([running.describe(), *map(request_line, self._read_set.in_flight())])

    def page_lock(self, locker: PageLocker | None) -> None:
        """Page-lock batches from now on, in the stage that makes them; None turns this off."""
        self._locker = locker
        for stage in reversed(self._stages):
            locker = stage.page_lock(locker)
        self._machinery.page_lock(locker)

    def close(self) -> None:
        """Stop threads and processes, and free memory. The loop can be used again, and then starts new ones."""
        super().close()
        self._drop_machinery()

    def clean_up(self) -> None:
        """See ``Loop``: after an interrupt the machinery is discarded; the next run makes a new one."""
        self._drop_machinery()

    def _leave_behind(self) -> None:
        """Forget, in a forked child, the threads, processes and shared memory of the parent.

        A loop begun here makes its own.
        """
        self.running = None

    def _drop_machinery(self) -> None:
        """Release everything that outlives a run."""
        for stage in self._stages:
            stage.drop()
        self._machinery.drop()


class _Accounted(RunOver):
    """Deliver the batches of a run. After each, check whether all ranks have found too many bad samples.

    Sum up at the end.
    """

    def __init__(self, run: Run, bad: BadSamples, rank_batch_size: int) -> None:
        super().__init__(run)
        self._bad, self._rank_batch_size = bad, rank_batch_size
        self._num_batches = 0

    def __next__(self) -> Any:
        """Return the next batch."""
        with ordinary_tensors():
            batch = next(self._run)
        self._bad.check()
        self._num_batches += 1
        return batch

    def close(self) -> None:
        """Stop producing, and log the summary."""
        super().close()
        self._bad.finish(self._num_batches * self._rank_batch_size)
