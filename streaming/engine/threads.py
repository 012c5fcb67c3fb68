"""A few daemon threads that run jobs: the engine's only source of threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue

from streaming.engine.grace import still_alive

Job = Callable[[], None]


class JobThreads:
    """``num_threads`` daemon threads that run jobs in the order given.

    A job delivers its own result and its own exception: one that lets an exception out ends up in
    ``threading.excepthook`` and costs nothing but itself. ``stop`` lets running jobs end and drops the rest.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._stopped = False
        self._threads = [
            threading.Thread(target=_run, args=(self._jobs,), name=f"{name}-{i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        """Run ``job`` on one of the threads. Dropped in silence after ``stop``."""
        if not self._stopped:
            self._jobs.put(job)

    def stop(self, timeout_s: float) -> None:
        """Drop waiting jobs, let running ones end, and wait for the threads, at most ``timeout_s`` for all together.

        From any thread, more than once.
        """
        with self._lock:
            if not self._stopped:
                self._stopped = True
                while not self._jobs.empty():
                    self._jobs.get()
                for _ in self._threads:
                    self._jobs.put(None)
        still_alive(self._threads, timeout_s)


def _run(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        try:
            job()
        except BaseException:  # noqa: BLE001  a thread border: the hook reports it, the thread goes on
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
        del job
