"""Who builds the batches of a loop, run after run: threads of this process, or worker processes with their ring."""

from __future__ import annotations

from contextlib import ExitStack

from streaming.batches.build import Recipe
from streaming.engine.builders import Builder, LocalBuilder, WorkerBuilder
from streaming.engine.memory.arena import Arena
from streaming.engine.workers.pool import WorkerPool
from streaming.engine.workers.ring import BatchRing, PageLocker
from streaming.metrics import Metrics


class Crew:
    """An arena and those who build from it.

    Args:
        num_workers: Worker processes; 0: whoever calls the builder builds.
        recipe: What to do.
        arena_bytes: Budget of the arena; worker processes map it.
        depth: Batches built ahead.
        batch_bytes: What batches of worker processes may hold.
        metrics: Where restarts are counted.

    Attributes:
        recipe: What to do.
        arena: Where the bytes of samples lie until they are built.
        builder: Builds batches.
        ring: Where batches of worker processes lie; None without.
        abandoned: A run that has ended left a thread behind, or may yet, which uses the arena: no other run may.
    """

    def __init__(
        self, num_workers: int, recipe: Recipe, *, arena_bytes: int, depth: int, batch_bytes: int, metrics: Metrics,
    ) -> None:  # fmt: skip
        self._closing = ExitStack()
        self.abandoned = False
        self.recipe = recipe
        self.arena = Arena(arena_bytes, shared=num_workers > 0)
        self.ring: BatchRing | None = None
        self.builder: Builder = LocalBuilder(recipe, metrics)
        if not num_workers:
            return
        try:
            self.ring = BatchRing(depth + num_workers + 1, limit_bytes=batch_bytes)
            self._closing.callback(self.ring.close)
            pool = WorkerPool(num_workers, recipe, self.arena, ring=self.ring, metrics=metrics)
            self._closing.callback(pool.close)
            self.builder = WorkerBuilder(recipe, pool)
        except BaseException:  # the recipe cannot be sent
            self.close()
            self.arena.close()
            raise

    def page_lock(self, locker: PageLocker | None) -> None:
        """Have batches page-locked from now on, or not any more, whoever builds them."""
        self.builder.page_lock(locker)
        if self.ring is not None:
            self.ring.locker = locker

    def close(self) -> None:
        """End processes and ring. The arena is closed by whoever fills it, when nobody does any more."""
        self._closing.close()
