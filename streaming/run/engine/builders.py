"""Build batches, run after run, in threads of this process or in worker processes with their ring."""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from streaming.build.batches.build import BadSampleReport, BatchBuilder, Recipe
from streaming.build.batches.draw_watch import DrawWatch
from streaming.build.batches.draws import ALL_GENERATORS, BatchDraws
from streaming.build.batches.jagged import Allocate
from streaming.build.batches.rows import Rows
from streaming.build.decode import ArrayDecoder, decodes_images, gives_bytes, integer, raw, text, view
from streaming.common.counters import Metrics
from streaming.common.platforms import num_cores
from streaming.run.engine.memory.arena import Arena
from streaming.run.engine.memory.batch_memory import BatchMemory
from streaming.run.engine.threads.lanes import Lanes
from streaming.run.engine.threads.pace import WorkerPace
from streaming.run.engine.threads.stacks import where_is
from streaming.run.engine.workers.in_progress import BatchWork
from streaming.run.engine.workers.pool import WorkerPool
from streaming.run.engine.workers.ring import BatchRing, PageLocker
from streaming.run.engine.workers.surroundings import Surroundings

Substitutes = Callable[[int], Iterator[Rows]]
Attempt = Callable[[frozenset[str], BadSampleReport], Any]
Mask = npt.NDArray[np.bool_] | None
_log = logging.getLogger(__name__)

_PARALLEL_SHARE = 0.9
"""Fraction of a batch's bytes that must be decoded without the GIL, so that threads do not wait for each other."""
_QUICK_BYTES = 1 << 20
"""Size up to which copying a batch takes less time than waking a thread to do it."""
START_AFTER_S = 5.0
"""Time for which threads build alone if they are as fast as processes and the fork server has yet to start: its imports
take 1.3 s of CPU time (two cores, 2026-11), too much for a pass of three seconds."""


class Builder(Protocol):
    """Build batches. Thread-safe."""

    allocate: Allocate
    """Allocator for the tensors of batches that this process begins from now on."""

    def check_files(self) -> None:
        """Check, before a run opens any file, that this process may open those of the run's worker processes.

        Raises:
            ConfigError: It may not.
        """

    def begin(self, changed: Callable[[], None]) -> None:
        """Prepare for a run. ``changed`` is called, in any thread, when ``in_consumer`` turns False between batches."""

    @property
    def is_local(self) -> bool:
        """Whether the calling thread does the work, so that the consumer may equally do it itself."""

    @property
    def builds_here(self) -> bool:
        """Whether threads of this process build some or all batches, so that their memory is needed here."""

    @property
    def is_quick(self) -> bool:
        """Whether a consumer in a hurry should build the batch itself, because a handover would cost more."""

    @property
    def in_consumer(self) -> bool:
        """Whether only the consumer may build, while it waits for the batch."""

    @property
    def most_at_once(self) -> int:
        """Number of threads that may build at the same time; more would wait for each other."""

    def surround(self, surroundings: Surroundings) -> None:
        """Build with these settings of the process from now on. Call between two runs."""

    def build(
        self, rows: Rows, valid: Mask, substitutes: Substitutes, report: BadSampleReport, *,
        seed: int | None = None, batch: int = -1,
    ) -> Any:  # fmt: skip
        """Return the batch of ``rows``.

        Args:
            rows: The rows.
            valid: Mask, or None.
            substitutes: For row i of the batch, single rows to try instead.
            report: Called for every sample that could not be delivered.
            seed: Key of the epoch, from which the random numbers of users' functions are derived; None: no seeding.
            batch: Number of the batch, for reports.
        """

    def page_lock(self, locker: PageLocker | None) -> None:
        """Build batches in page-locked memory from now on; None turns this off."""

    def give_up(self) -> None:
        """Make running calls of ``build`` raise GivenUpError soon, if possible. May be called from any thread."""

    def describe(self) -> list[str]:
        """Describe what is being built where, one line each. May be called from any thread."""


class LocalBuilder:
    """Build batches in the calling thread.

    Args:
        recipe: How to build.
        memory: Memory for large tensors.
        metrics: Counts ``batches_in_turn``.
        in_turn: Only the consumer builds, so every batch can be watched; otherwise only the first one is.
    """

    is_local = builds_here = True
    most_at_once = sys.maxsize

    def __init__(
        self, recipe: Recipe, memory: BatchMemory, metrics: Metrics | None = None, *, in_turn: bool = False,
    ) -> None:  # fmt: skip
        self._recipe = recipe
        self._metrics = metrics or Metrics()
        self._in_turn = in_turn
        self._under_way: dict[int, BatchWork] = {}
        self._memory = memory
        self.allocate: Allocate = memory.allocate
        self.is_quick = False
        self._costs = BuildCosts(recipe)
        self._functions = recipe.functions_of_user
        self._watch = DrawWatch(self._functions)
        self._is_watching = bool(self._functions)  # until it is known that they draw no random numbers
        self._own_turn = threading.Lock()
        self._surroundings: Surroundings | None = None

    def check_files(self) -> None:
        """See ``Builder``: there are no processes."""

    def begin(self, changed: Callable[[], None]) -> None:
        """See ``Builder``."""

    def surround(self, surroundings: Surroundings) -> None:
        """See ``Builder``: threads get those that each has for itself; the others are the process's own."""
        self._surroundings = surroundings

    @property
    def in_consumer(self) -> bool:
        """See ``Builder``."""
        return self._is_watching

    def build(
        self,
        rows: Rows,
        valid: Mask,
        substitutes: Substitutes,
        report: BadSampleReport,
        *,
        seed: int | None = None,
        batch: int = -1,
        watched: bool = True,
    ) -> Any:
        """See ``Builder``; not ``watched``: no function that might draw from generators of the process is called."""
        cost = self._costs.of(rows)
        self.is_quick = cost.is_copy and (cost.makes_objects or bytes_of(rows) <= _QUICK_BYTES)
        thread = threading.get_ident()
        work = self._under_way[thread] = BatchWork(batch, rows.keys, rows.urls)

        def attempt(seeds: frozenset[str], report: BadSampleReport) -> Any:
            draws = BatchDraws(seed or 0, rows.positions, seeds, self._watch.own)
            builder = BatchBuilder(self._recipe, substitutes, report, self.allocate, work.row, draws)
            if cost.is_copy or self._surroundings is None:
                return builder.build(rows, valid)
            with self._surroundings.in_thread():
                return builder.build(rows, valid)

        try:
            if not watched or seed is None or not self._functions:
                return attempt(frozenset(), report)
            if not self._is_watching:
                return self._beside_training(attempt, report)
            with self._watch.kept():
                built = self._watch.build(attempt, report)
        finally:
            del self._under_way[thread]
        self._conclude()
        return built

    def _beside_training(self, attempt: Attempt, report: BadSampleReport) -> Any:
        """Build in any thread, with functions that have drawn nothing so far from the generators of the process."""
        if not self._watch.draws_beside:
            return attempt(frozenset(), report)
        with self._own_turn:  # one thread at a time draws from the functions' own generators
            return self._watch.build(attempt, report, is_alone=False)

    def _conclude(self) -> None:
        """Choose, after a watched batch, who builds: the consumer if functions draw random numbers, else any thread."""
        drawn = sorted(self._watch.found & ALL_GENERATORS)
        if not drawn:
            self._is_watching = self._in_turn
            return
        if not self._metrics.get("batches_in_turn"):
            _log.warning(
                "transform, decode or collate_fn draws from process-wide random generators (%s). It is therefore "
                "called on the thread that asks for batches, one batch at a time, seeded by each sample's "
                "position, so that augmentations neither depend on timing nor disturb the training's own random "
                "numbers. Two faster ways: give it a second argument, transform(sample, rng), and draw from rng only; "
                "or use num_workers=%d processes, where it is seeded in the same way",
                ", ".join(drawn), min(8, num_cores()),
            )  # fmt: skip
        self._metrics.add("batches_in_turn")

    def page_lock(self, locker: PageLocker | None) -> None:
        """See ``Builder``."""
        self.allocate = self._memory.allocate if locker is None else locker.allocate

    def give_up(self) -> None:
        """See ``Builder``. A thread that is inside a user's function cannot be stopped."""

    def describe(self) -> list[str]:
        """See ``Builder``."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return [
            f"thread {names.get(thread, thread)} {work.describe()}; in {where_is(thread)}"
            for thread, work in list(self._under_way.items())
        ]


class WorkerBuilder:
    """Let worker processes build batches, unless sending a batch costs more than building it.

    Bytes, text, integers and fixed-size arrays are copied from the arena faster than any process can deliver them.
    Batches with nothing else are built where they are needed; the first batch decides.

    The first processes take seconds to start. Until one is up, batches that need no user code are built by the calling
    threads, and all others by the consumer, if this process can replace a worker. Where nearly all the work is decoding
    of images, threads are as fast: they begin alone, and continue to build while no process is free (``Lanes``).

    Args:
        recipe: How to build.
        pool: The processes.
        memory: Memory for large tensors of batches that this process builds.
        metrics: Counts ``batches_before_workers`` and ``batches_beside_workers``.
        num_threads: Number of threads that would build without processes; 0: this process builds nothing.
        tells: Whether this process logs on behalf of all ranks of the job.
    """

    def __init__(
        self, recipe: Recipe, pool: WorkerPool, memory: BatchMemory, metrics: Metrics | None = None, *,
        num_threads: int = 1, tells: bool = True,
    ) -> None:  # fmt: skip
        self._recipe = recipe
        self._pool = pool
        self._pace = pool.pace
        self._metrics = metrics or Metrics()
        self._metrics.add_each({"batches_before_workers": 0, "batches_beside_workers": 0})
        self._memory = memory
        self._memory_bytes, self._share_here = memory.limit_bytes, -1.0
        self._local = LocalBuilder(recipe, memory)
        self._helps = num_threads > 0 and recipe.worker_init_fn is None
        self._changed: Callable[[], None] = lambda: None
        self._level = logging.INFO if tells else logging.DEBUG
        self._has_users_code = bool(recipe.functions_of_user)
        self._lanes = Lanes(pool.num_workers, num_threads)
        self._is_trivial = self._stands_in = self._in_parallel = False
        self._costs = BuildCosts(recipe)
        self._begun_s = self._told_before = 0.0
        self._first_s = math.inf
        self.allocate: Allocate = memory.allocate

    def check_files(self) -> None:
        """See ``Builder``."""
        if self._has_users_code:
            self._pool.check_files()

    def begin(self, changed: Callable[[], None]) -> None:
        """See ``Builder``."""
        untold = self._untold_before()
        if untold:
            _log.log(
                self._level, "all %d batches of the previous run were built in this process: no worker process was up",
                untold,
            )  # fmt: skip
        self._begun_s, self._changed = time.monotonic(), changed
        self._first_s = min(self._first_s, self._begun_s)
        if not self._has_users_code:
            return  # the first batch shows whether processes are needed

        def is_up() -> None:
            self._stands_in = False  # for the rest of the run: processes build all later batches
            changed()

        self._stands_in = self._helps
        if self._pool.start_if_up(is_up if self._helps else None) or not self._pool.can_stand_in():
            self._stands_in = False

    def surround(self, surroundings: Surroundings) -> None:
        """See ``Builder``."""
        self._local.surround(surroundings)
        self._pool.surround(surroundings)

    @property
    def is_local(self) -> bool:
        """See ``Builder``."""
        return self._is_trivial or self._stands_in

    @property
    def builds_here(self) -> bool:
        """See ``Builder``."""
        return self.is_local or self._in_parallel

    @property
    def is_quick(self) -> bool:
        """See ``Builder``."""
        return self._is_trivial and self._local.is_quick

    @property
    def in_consumer(self) -> bool:
        """See ``Builder``."""
        return self._stands_in

    @property
    def most_at_once(self) -> int:
        """See ``Builder``: one for each process, until a batch has shown that threads build beside them."""
        return sys.maxsize if self._in_parallel else self._pool.num_workers

    def build(
        self, rows: Rows, valid: Mask, substitutes: Substitutes, report: BadSampleReport, *,
        seed: int | None = None, batch: int = -1,
    ) -> Any:  # fmt: skip
        """See ``Builder``."""
        if self._costs.of(rows).is_copy:
            self._is_trivial = True
            return self._local.build(rows, valid, substitutes, report, seed=seed, batch=batch, watched=False)
        if self._stands_in and seed is not None and not self._pool.is_up():
            if not self._metrics.get("batches_before_workers"):
                _log.log(
                    self._level,
                    "worker processes start, which takes as long as importing what your functions need; until one is "
                    "up, this process builds batches with copies of your functions, so one that ends its process ends "
                    "the training (num_threads=0 rules that out)",
                )
            self._metrics.add("batches_before_workers")
            lap = self._pace.begin()
            built = self._pool.build_here(rows, valid, substitutes, report, seed=seed, batch=batch)
            if not self._pool.can_stand_in():  # its functions have changed this process
                self._stands_in = False
                self._changed()
            self._pace.here(lap, len(rows.keys), in_parallel=False)
            return built
        if self._has_users_code or not self._helps:
            self._tell_of_before()
            self._share_memory(0.0)
            return self._pool.build(rows, valid, substitutes, report, seed=seed, batch=batch)
        in_parallel, threads_first = is_parallel(self._recipe, rows), self._pace.threads_first
        self._in_parallel = self._in_parallel or in_parallel
        num_up = self._num_up(in_parallel=in_parallel)
        with self._lanes.one(num_up, in_parallel=in_parallel, threads_first=threads_first) as here:
            if self._lanes.all_up:
                self._share_memory(self._lanes.share_here(in_parallel=in_parallel, threads_first=threads_first))
            if not here:
                self._tell_of_before()
                return self._pool.build(rows, valid, substitutes, report, seed=seed, batch=batch)
            self._metrics.add("batches_beside_workers" if num_up else "batches_before_workers")
            lap = self._pace.begin()
            built = self._local.build(rows, valid, substitutes, report, seed=seed, batch=batch, watched=False)
            self._pace.here(lap, len(rows.keys), in_parallel=in_parallel)
            return built

    def _num_up(self, *, in_parallel: bool) -> int:
        """Return the number of processes that can take a batch. Start them unless threads are as fast for now."""
        if self._lanes.all_up:
            return self._pool.num_up()
        is_early = time.monotonic() - self._first_s < START_AFTER_S
        if not (in_parallel and is_early) or self._pool.has_started or self._pool.starts_quickly():
            self._pool.start()
        return self._pool.num_up()

    def _share_memory(self, share_here: float) -> None:
        """Divide the memory of batches between local builds and the ring."""
        if share_here != self._share_here:
            self._share_here = share_here
            here_bytes = int(self._memory_bytes * share_here)
            self._memory.limit(here_bytes)
            self._pool.limit_ring(self._memory_bytes - here_bytes)

    def _tell_of_before(self) -> None:
        """Log, when a worker process first gets a batch of a run, the number of batches built without one."""
        self._pool.dismiss_stand_in()
        untold = self._untold_before()
        if untold:
            _log.log(
                self._level, "%d batches were built in this process until worker processes were up, after %.1f s",
                untold, time.monotonic() - self._begun_s,
            )  # fmt: skip

    def _untold_before(self) -> int:
        """Return the number of batches built without a worker process since the last call."""
        count = self._metrics.get("batches_before_workers")
        untold, self._told_before = count - self._told_before, count
        return int(untold)

    def page_lock(self, locker: PageLocker | None) -> None:
        """See ``Builder``: this concerns batches built by threads.

        Worker processes build in slots, which the ring locks.
        """
        self._local.page_lock(locker)
        self.allocate = self._local.allocate

    def give_up(self) -> None:
        """See ``Builder``."""
        self._pool.give_up()

    def describe(self) -> list[str]:
        """See ``Builder``."""
        return [*self._local.describe(), *([] if self._is_trivial else self._pool.describe())]


def is_trivial(recipe: Recipe, fields: Iterable[str]) -> bool:
    """Return whether batches of ``fields`` are only copied from memory, faster than a thread could deliver them."""
    if not recipe.is_plain:
        return False
    decoders = [part.decoders.decoder_for(name) for part in recipe.parts for name in fields]
    return all(decoder in (raw, view, text, integer) or isinstance(decoder, ArrayDecoder) for decoder in decoders)


@dataclass(frozen=True, slots=True)
class BuildCost:
    """Cost of building a batch, as far as its fields show it.

    Attributes:
        is_copy: The batch is only copied from memory.
        makes_objects: The batch holds Python bytes, or views. The thread that frees them makes them fastest: the C
            library keeps freed memory per thread, and making them needs the GIL.
    """

    is_copy: bool
    makes_objects: bool


class BuildCosts:
    """Estimate the cost of batches by their fields: a later batch may have a field to decode that others lack."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._known: dict[tuple[str, ...], BuildCost] = {}

    def of(self, rows: Rows) -> BuildCost:
        """Return the cost of a batch of ``rows``."""
        names = tuple(rows.fields)
        known = self._known.get(names)
        if known is None:
            alone = [name for name in names if name not in self._recipe.jagged]
            decoders = [part.decoders.decoder_for(name) for part in self._recipe.parts for name in alone]
            known = BuildCost(is_trivial(self._recipe, names), any(one in (raw, view) for one in decoders))
            self._known[names] = known
        return known


def bytes_of(rows: Rows) -> int:
    """Return the bytes of the fields of rows, as stored."""
    return sum(int(where.sizes.clip(0).sum()) for where in rows.fields.values())


def is_parallel(recipe: Recipe, rows: Rows) -> bool:
    """Return whether threads build such batches in parallel on all cores: nearly all work is decoding of images."""
    image_bytes = all_bytes = 0
    for name, where in rows.fields.items():
        num_bytes = int(where.sizes.clip(0).sum())
        all_bytes += num_bytes
        image_bytes += num_bytes * all(decodes_images(part.decoders.decoder_for(name)) for part in recipe.parts)
    return not recipe.functions_of_user and image_bytes >= _PARALLEL_SHARE * all_bytes


def is_surely_trivial(recipe: Recipe, fields: Iterable[str] | None) -> bool:
    """Return whether every batch is only copied from memory, whatever fields there are (None: not known yet)."""
    if fields is None:
        return all(gives_bytes(part.decoders) for part in recipe.parts) and is_trivial(recipe, ())
    return is_trivial(recipe, fields)


def num_lanes(recipe: Recipe, num_workers: int, num_threads: int) -> int:
    """Return the number of batches built at once: by threads, by processes, or by both where either can build all."""
    if num_workers and (recipe.functions_of_user or recipe.worker_init_fn is not None):
        return num_workers
    return max(num_workers, num_threads)


class Crew:
    """Own an arena and the builders that use it.

    Args:
        num_workers: Number of worker processes; 0: the caller of the builder builds.
        recipe: Decode, transform, collate.
        arena_bytes: Budget of the arena, which worker processes map.
        depth: Number of batches built ahead.
        batch_bytes: Upper bound on the memory of batches of worker processes.
        metrics: Counts restarts.
        num_threads: Number of threads of this process that build, also beside worker processes or until these are up;
            0: only the consumer builds or, with worker processes, nobody in this process.
        tells: Whether this process logs on behalf of all ranks of the job.
        pace: Compares threads with worker processes; None: no comparison.

    Attributes:
        recipe: Decode, transform, collate.
        arena: Memory that holds the bytes of samples until they are built.
        builder: Builds batches.
        memory: Memory for the large tensors of batches that this process builds.
        ring: Memory that holds the batches of worker processes; None without worker processes.
        abandoned: A finished run has left behind, or may still leave behind, a thread that uses the arena. No other run
            may use it then.
    """

    def __init__(
        self, num_workers: int, recipe: Recipe, *, arena_bytes: int, depth: int, batch_bytes: int, metrics: Metrics,
        num_threads: int = 1, tells: bool = True, pace: WorkerPace | None = None,
    ) -> None:  # fmt: skip
        self._closing = ExitStack()
        self.abandoned = False
        self.recipe = recipe
        self.arena = Arena(arena_bytes, shared=num_workers > 0)
        self.memory = BatchMemory(batch_bytes)
        self._closing.callback(self.memory.close)
        self.ring: BatchRing | None = None
        self._pool: WorkerPool | None = None
        self.builder: Builder = LocalBuilder(recipe, self.memory, metrics, in_turn=not num_threads)
        if not num_workers:
            return
        try:
            self.ring = BatchRing(depth + num_workers + 1, limit_bytes=batch_bytes)
            self._closing.callback(self.ring.close)
            self._pool = WorkerPool(num_workers, recipe, self.arena, ring=self.ring, metrics=metrics, pace=pace)
            self._closing.callback(self._pool.close)
            self.builder = WorkerBuilder(recipe, self._pool, self.memory, metrics, num_threads=num_threads, tells=tells)
        except BaseException:  # the recipe cannot be pickled
            self.close()
            self.arena.close()
            raise

    def renew(self) -> bool:
        """Restart worker processes if objects that the user's functions refer to have changed since the start.

        Call between two runs.

        Returns:
            Whether they have changed.

        Raises:
            ConfigError: The recipe can no longer be sent to a process.
        """
        return self._pool is not None and self._pool.renew()

    def surround(self, surroundings: Surroundings) -> None:
        """Build with these settings of the process from now on. Call between two runs."""
        self.builder.surround(surroundings)

    def page_lock(self, locker: PageLocker | None) -> None:
        """Page-lock batches from now on, wherever they are built; None turns this off."""
        self.builder.page_lock(locker)
        if self.ring is not None:
            self.ring.locker = locker

    def close(self) -> None:
        """Stop the worker processes and free the ring.

        The arena's owner closes it when nothing uses it any more.
        """
        self._closing.close()
