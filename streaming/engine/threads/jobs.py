"""Run jobs on a few daemon threads, the engine's only ones, and end threads that run users' functions.

They get a moment to end by themselves; then they are left behind, and told of. No thread can be ended from outside. One
that is left behind is a daemon, so the interpreter's end does not wait for it; what it reads from is not freed under
it, and what it makes is thrown away.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from streaming.engine.threads.stacks import where_is
from streaming.forks import in_children

GRACE_S = 1.0
"""For batches under way to end: most take milliseconds, and a process that is killed costs a fork and warm caches.
Short beside what a person, or a cluster that stops a job, waits for."""

LOOK_UP_S = 1.0
"""The longest wait in one piece of a thread that may be the main one. Python runs signal handlers between two steps of
its own: a Ctrl-C that comes when it has decided to wait, but does not wait yet, is seen when that wait ends."""

Job = Callable[[], None]
_log = logging.getLogger(__name__)


class JobThreads:
    """``num_threads`` daemon threads that run jobs in the order given.

    A job delivers its own result and its own exception: one that lets an exception out ends up in
    ``threading.excepthook`` and costs nothing but itself. ``stop`` lets running jobs end and drops the rest. Who is
    forgotten, as by an interrupt while it is made, ends its threads, too.
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
        """Run ``job`` on one of the threads. Dropped in silence after ``stop``."""
        if not self._stopped:
            self._jobs.put(job)

    def stop(self, timeout_s: float) -> None:
        """Drop waiting jobs, let running ones end, and wait for the threads, at most ``timeout_s`` for all together.

        From any thread, more than once.
        """
        with self._lock:
            if not self._stopped:
                self._stopped = True  # jobs go first, so that a thread ends after the one it is at
                _dismiss(self._jobs, len(self._threads))
        still_alive(self._threads, timeout_s)


def _dismiss(jobs: SimpleQueue[Job | None], num_threads: int) -> None:
    with suppress(Empty):
        while True:  # a thread may take the last one at any moment: nobody waits for it
            jobs.get_nowait()
    for _ in range(num_threads):
        jobs.put(None)


def _run(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        try:
            job()
        except BaseException:  # noqa: BLE001  a thread border: the hook reports it, the thread goes on
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
        del job


class GivenUpError(Exception):
    """Nobody wants the batch any more. Whoever ended the run gets no error."""


def still_alive(threads: Iterable[threading.Thread], grace_s: float = GRACE_S) -> list[threading.Thread]:
    """Wait for threads but the calling one; return those that have not ended within ``grace_s``, all together."""
    deadline_s = time.monotonic() + grace_s
    others = [thread for thread in threads if thread is not threading.current_thread() and thread.is_alive()]
    for thread in others:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    return [thread for thread in others if thread.is_alive()]


def leave_to_parent(run: Any) -> None:
    """Have forked children take ``run`` for closed: its threads are the parent's, there is nobody to wait for."""
    in_children(run, _take_for_closed)


def tell_of(left: Iterable[threading.Thread]) -> None:
    """Warn once, and name each thread left behind, and the function that it is in."""
    places = [
        f"thread {thread.name} in {where_is(thread.ident) or 'a function that has just returned'}" for thread in left
    ]
    _log.warning(
        "a run was ended, but a function that it called has not returned: %s. A thread cannot be stopped from outside: "
        "it stays, with the memory that it reads from, until that function returns; its batch is thrown away. Give the "
        "function a time limit, or use num_workers: processes can be killed",
        "; ".join(places),
    )


def _take_for_closed(run: Any) -> None:
    run._closed = True
