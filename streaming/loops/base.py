"""What both loops over a ``StreamingDataset`` share: epochs, a position, and one run at a time."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

from streaming.batches.bad_samples import BadSamples
from streaming.dataset import StreamingDataset
from streaming.engine.crew import Crew
from streaming.engine.standing import request_line
from streaming.engine.workers.ring import PageLocker
from streaming.forks import in_children
from streaming.metrics import Metrics
from streaming.plan.order import OrderSettings, checked_int


class Run(Protocol):
    """The batches of the rest of one epoch, being produced in the background."""

    def __next__(self) -> Any:
        """The next batch."""

    def close(self) -> None:
        """Stop producing."""

    def describe(self) -> str:
        """What it is at, for people."""


class BaseLoop(ABC):
    """Epochs one after the other. Used by one thread, but for ``metrics`` and ``close``.

    Attributes:
        epoch: The epoch in progress, or the next to start.
        samples_seen: Samples of it, over all ranks, that were handed out.
        order: The order settings of that epoch.
        next_seed: Seed from the next epoch on, where it was changed.
        metrics: Where everything is counted.
    """

    def __init__(self, dataset: StreamingDataset, order: OrderSettings, global_batch_size: int, rank: int) -> None:
        self.dataset = dataset
        self.order = order
        self.metrics = Metrics()
        self.epoch = 0
        self.samples_seen = 0
        self.next_seed: int | None = None
        self._global_batch_size = global_batch_size
        self._resume_at = 0
        self._running: Run | None = None
        self._crew: Crew | None = None
        self._locker: PageLocker | None = None
        self._bad = BadSamples(
            dataset.max_bad_samples,
            self.metrics,
            table=dataset.table if dataset.indexed else None,
            file=dataset.bad_samples_file,
            rank=rank,
        )
        in_children(self, BaseLoop._leave_behind)

    @property
    @abstractmethod
    def samples_per_epoch(self) -> int:
        """Samples of an epoch, over all ranks."""

    @abstractmethod
    def _start(self, start: int) -> Run | None:
        """Begin to produce the epoch's batches after its first ``start`` samples; None if there are none."""

    def run(self) -> Iterator[Any]:
        """The rest of the epoch in progress, batch by batch; the position moves on before a batch is handed out.

        A loop that is left early keeps its position for a checkpoint, but a new one starts the epoch anew. One that the
        interpreter's end finds is closed before that ends threads wherever they are, with the locks that they hold.
        """
        self._stop_running()
        start, self._resume_at = self._resume_at, 0
        self.samples_seen = start
        if start == 0 and self.next_seed is not None:
            self.order, self.next_seed = replace(self.order, seed=self.next_seed), None
        running = self._running = self._start(start)
        if running is not None:
            at_exit = weakref.finalize(self, running.close)
            try:
                for batch in self._guarded(running):
                    self.samples_seen = min(self.samples_seen + self._global_batch_size, self.samples_per_epoch)
                    self.metrics.add("batches")
                    yield batch
                if self._running is not running:
                    return
            finally:
                running.close()
                at_exit.detach()
                if self._running is running:
                    self._running = None
        self.epoch += 1
        self.samples_seen = 0

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; where it is the one in progress, a loaded position is kept."""
        if checked_int("epoch", epoch, 0, 2**62) != self.epoch:
            self._go_to(epoch, 0)

    def set_seed(self, seed: int) -> None:
        """A new order from the next epoch that starts."""
        self.next_seed = checked_int("seed", seed, 0, 2**64 - 1)

    def report(self) -> dict[str, Any]:
        """All metrics, and this epoch's bad samples by name."""
        cache = {} if self.dataset.cache is None else self.dataset.cache.metrics.snapshot()
        storage = self.dataset.storage.metrics.snapshot()
        gauges = self._gauges()
        own = self.metrics.snapshot()
        gauges["consumer_thread_s_per_batch"] = own.get("consumer_thread_s", 0.0) / max(1.0, own.get("batches", 0))
        return {**own, **storage, **cache, **gauges, "bad": self._bad.listing()}

    def describe(self) -> str:
        """What the loop waits for at this moment."""
        running = self._running
        if running is None:
            return "not running"
        return "\n".join([running.describe(), *map(request_line, self.dataset.storage.in_flight())])

    def page_lock(self, locker: PageLocker | None) -> None:
        """Have batches of worker processes page-locked from now on, or not any more."""
        self._locker = locker
        if self._crew is not None:
            self._crew.page_lock(locker)

    def close(self) -> None:
        """Stop threads and processes, free memory. The loop may be used again; it starts them anew."""
        self._stop_running()
        self._drop_machinery()

    @property
    def _position(self) -> int:
        return self.samples_seen or self._resume_at

    def _go_to(self, epoch: int, samples_seen: int) -> None:
        self._stop_running()
        self.epoch, self.samples_seen, self._resume_at = epoch, samples_seen, samples_seen

    def _guarded(self, running: Run) -> Iterator[Any]:
        """``running``; an interrupt in the middle of its book-keeping costs the machinery, not the next loop."""
        while True:
            try:
                batch = next(running)
            except StopIteration:
                return
            except Exception:
                raise
            except BaseException:
                self._running = None
                self._drop_machinery()
                raise
            yield batch

    def _stop_running(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.close()

    def _keep(self, crew: Crew, close: Callable[[], object]) -> None:
        """``crew`` serves all runs from now on, until ``close`` ends it together with what needs it."""
        crew.page_lock(self._locker)
        self._crew = crew
        self._end_of_crew = weakref.finalize(self, close)

    def _gauges(self) -> dict[str, float]:
        """What holds at this moment, by name."""
        self._note_ring_peak()
        crew = self._crew
        ring = None if crew is None else crew.ring
        return {
            "arena_bytes": 0 if crew is None else crew.arena.used_bytes,
            "ring_bytes": 0 if ring is None else ring.held_bytes,
            "ring_slots_in_use": 0 if ring is None else ring.num_taken,
        }

    def _leave_behind(self) -> None:
        """In a forked child: threads, processes and shared memory are the parent's; a loop begun here makes its own."""
        if self._crew is not None:
            self._end_of_crew.detach()
        self._running = self._crew = None

    def _note_ring_peak(self) -> None:
        ring = None if self._crew is None else self._crew.ring
        self.metrics.peak("ring_peak_bytes", 0 if ring is None else ring.peak_bytes)

    def _drop_machinery(self) -> None:
        """Give back what outlives a run."""
        self._note_ring_peak()
        crew, self._crew = self._crew, None
        if crew is not None:
            self._end_of_crew()
