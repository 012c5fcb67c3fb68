"""Share batches out between worker processes and threads of this process: who builds the next one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from streaming.forks import in_children, renew_lock


class Lanes:
    """Say, batch by batch, whether the calling thread builds it or a worker process. Thread-safe.

    For batches that need no code of the user. As many threads ask as the loader would have without processes, and at
    least one for each process. A thread asks a process as long as one is free, and builds the batch itself otherwise:
    while processes start, and where there are more threads than processes. So a loader with processes has no fewer
    cores at work than one without.

    Args:
        num_workers: Worker processes.
        num_threads: Threads that would build without them.

    Attributes:
        all_up: Whether all processes have been up.
    """

    def __init__(self, num_workers: int, num_threads: int) -> None:
        self.all_up = False
        self._num_workers, self._num_threads = num_workers, num_threads
        self._num_lanes = max(num_workers, num_threads)
        self._here = self._there = 0
        self._lock = threading.Lock()
        in_children(self, Lanes._leave_behind)

    def share_here(self, *, in_parallel: bool, threads_first: bool) -> float:
        """Return the share of batches that is built here once all processes are up, were all lanes as fast."""
        if not in_parallel:
            return 0.0
        here = self._num_threads if threads_first else self._num_lanes - self._num_workers
        return here / self._num_lanes

    @contextmanager
    def one(self, num_up: int, *, in_parallel: bool, threads_first: bool) -> Iterator[bool]:
        """Give out one batch; the context lasts until it is built.

        Args:
            num_up: Processes that are up; 0: none can be asked.
            in_parallel: Threads build as many such batches at once as there are cores. Otherwise they would wait for
                each other, and for the training, so they build none once a process is up.
            threads_first: A thread is faster than a process, so processes get what is beyond the threads.

        Returns:
            Whether the calling thread builds it.
        """
        with self._lock:
            # Counted as building from here on, in one place.
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
        """Begin anew in a forked child, which has none of the threads that were building."""
        renew_lock(self)
        self._here = self._there = 0
