"""Assign batches to worker processes or threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from streaming.common.forks import in_children, renew_lock


class Lanes:
    """Decide, for each batch, whether the calling thread or a worker process builds it. Thread-safe.

    For batches without user code. There are as many calling threads as in a loader without processes, and at least one
    per process. A thread gives its batch to a process if one is free, and otherwise builds it itself: while processes
    start, and if there are more threads than processes. So a loader with processes uses at least as many cores as one
    without.

    ``_lock`` guards the counts ``_here`` and ``_there`` of batches in progress.

    Args:
        num_workers: Number of worker processes.
        num_threads: Number of threads that would build without them.

    Attributes:
        all_up: Whether all processes have been up at some time.
    """

    def __init__(self, num_workers: int, num_threads: int) -> None:
        self.all_up = False
        self._num_workers, self._num_threads = num_workers, num_threads
        self._num_lanes = max(num_workers, num_threads)
        self._here = self._there = 0
        self._lock = threading.Lock()
        in_children(self, Lanes._leave_behind)

    def share_here(self, *, in_parallel: bool, threads_first: bool) -> float:
        """Return the share of batches built here once all processes are up, if all lanes are equally fast."""
        if not in_parallel:
            return 0.0
        here = self._num_threads if threads_first else self._num_lanes - self._num_workers
        return here / self._num_lanes

    @contextmanager
    def one(self, num_up: int, *, in_parallel: bool, threads_first: bool) -> Iterator[bool]:
        """Assign one batch. The context lasts until it is built.

        Args:
            num_up: Number of processes that are up; 0: none is available.
            in_parallel: Threads can build such batches in parallel, one per core. Otherwise they would wait for each
                other and for the training, so they build none once a process is up.
            threads_first: A thread is faster than a process, so a process gets a batch only if no thread is free.

        Returns:
            Whether the calling thread builds it.
        """
        with self._lock:
            # From here on one lane counts this batch.
            self.all_up = self.all_up or num_up >= self._num_workers
            if not in_parallel:
                here = num_up == 0
            elif threads_first:
                here = self._here < self._num_threads
            else:
                here = self._there >= num_up
            self._count(here, 1)
        try:
            yield here
        finally:
            with self._lock:
                # Its lane is free for the next batch.
                self._count(here, -1)

    def _count(self, here: bool, change: int) -> None:  # noqa: FBT001
        if here:
            self._here += change
        else:
            self._there += change

    def _leave_behind(self) -> None:
        """Reset the counts in a forked child, where no building thread exists."""
        renew_lock(self)
        self._here = self._there = 0
