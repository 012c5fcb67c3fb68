"""Run jobs on a few daemon threads, the only ones of the engine, and stop threads that run users' functions.

Such threads get a moment to finish; then they are left behind, and reported. A thread cannot be stopped from outside.
A thread that is left behind is a daemon, so interpreter exit does not wait for it. The memory that it reads is not
freed, and its result is discarded.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from streaming.common.forks import in_children
from streaming.run.engine.threads.stacks import where_is

GRACE_S = 1.0
"""Time for batches in progress to finish: most take milliseconds, and a killed process costs a fork and warm caches.
It is short compared with the patience of a person, or of a cluster that stops a job."""

LOOK_UP_S = 1.0
"""Longest uninterrupted wait of a thread that may be the main one. Python runs signal handlers between bytecodes: a
Ctrl-C that arrives just before a wait begins is handled only when that wait ends."""

Job = Callable[[], None]
_log = logging.getLogger(__name__)


class JobThreads:
    """Run jobs in the order given on ``num_threads`` daemon threads.

    A job delivers its own result and its own exceptions. An exception that escapes goes to ``threading.excepthook`` and
    affects no other job. ``stop`` lets running jobs finish and drops the rest. When the object is garbage-collected,
    for example after an interrupt during construction, its threads end too.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._stopped = False
        self._threads = [
            threading.Thread(target=_run, args=(self._jobs,), name=f"{name}-{i}", daemon=True)
            for i in range(num_threads)
        ]
        weakref.finalize(self, _dismiss, self._jobs, num_threads).atexit = False
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        """Run ``job`` on one of the threads; silently dropped after ``stop``."""
        if not self._stopped:
            self._jobs.put(job)

    def stop(self, timeout_s: float) -> None:
        """Drop waiting jobs, let running ones finish, and wait at most ``timeout_s`` for all threads together.

        May be called from any thread, repeatedly.
        """
        with self._lock:
            if not self._stopped:
                self._stopped = True  # Invariant: no job is left, so each thread ends after its current one
                _dismiss(self._jobs, len(self._threads))
        still_alive(self._threads, timeout_s)


def _dismiss(jobs: SimpleQueue[Job | None], num_threads: int) -> None:
    with suppress(Empty):
        while True:  # a thread may take the last job at any moment, so this must not block
            jobs.get_nowait()
    for _ in range(num_threads):
        jobs.put(None)


def _run(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        try:
            job()
        except BaseException:  # noqa: BLE001  thread boundary: the hook reports it, the thread continues
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
        del job


class GivenUpError(Exception):
    """Signal that the batch is no longer needed. The caller that ended the run gets no error."""


def still_alive(threads: Sequence[threading.Thread], grace_s: float = GRACE_S) -> list[threading.Thread]:
    """Wait up to ``grace_s`` for all threads except the calling one; return those that have not ended.

    Until a thread has ended, it may start those that follow it.
    """
    deadline_s = time.monotonic() + grace_s
    others = [thread for thread in threads if thread is not threading.current_thread()]
    for thread in others:
        if thread.is_alive():
            thread.join(max(0.0, deadline_s - time.monotonic()))
    return [thread for thread in others if thread.is_alive()]


def leave_to_parent(run: Any) -> None:
    """Mark ``run`` as closed in forked children: its threads exist only in the parent."""
    in_children(run, _take_for_closed)


def tell_of(left: Iterable[threading.Thread]) -> None:
    """Warn once, naming each thread left behind and the function that it executes."""
    places = [
        f"thread {thread.name} in {where_is(thread.ident) or 'a function that has just returned'}" for thread in left
    ]
    _log.warning(
        "a run has ended, but a function that it called has not returned: %s. A thread cannot be stopped from outside: "
        "it and the memory that it reads from stay until that function returns; its batch is then discarded. Give the "
        "function a time limit, or use num_workers, since processes can be killed",
        "; ".join(places),
    )


def _take_for_closed(run: Any) -> None:
    run._closed = True
