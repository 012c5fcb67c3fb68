"""Run requests on threads, so that callers can stop waiting for a request before it ends."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from streaming.common.monitor import Monitor

Job = Callable[[], Callable[[], None]]


class RequestThreads:
    """Threads that exist while there is something to read.

    Use it as a context around the time in which requests may be made; many threads may enter it at once. The life of a
    thread:

    1. ``run`` starts it with a job, unless an idle thread can take the job.
    2. At the end of a job it becomes idle while the context has users, then announces the job's outcome, and waits for
       another job.
    3. When the last user leaves, idle threads are dismissed and joined. A thread that still waits for an answer ends by
       itself afterwards.

    The lock ``_changed`` guards ``_jobs``, ``_idle`` and ``_users``.
    """

    def __init__(self) -> None:
        self._changed = Monitor()
        self._jobs: deque[Job] = deque()
        self._idle: set[threading.Thread] = set()
        self._users = 0

    def __enter__(self) -> Self:
        with self._changed:
            # Threads may be idle only while there are users.
            self._users += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            # Without users, no thread is idle: dismissed threads end, and a job goes to a new thread.
            self._users -= 1
            if self._users:
                return
            dismissed, self._idle = self._idle, set()
            self._changed.notify_all()
        for thread in dismissed:
            thread.join()

    def run(self, job: Job) -> None:
        """Run ``job``, which must not raise, on a thread immediately; if no thread can be started, in this one.

        The function that ``job`` returns is called once the thread counts as idle, so that the notified caller may
        leave.
        """
        with self._changed:
            # At most as many jobs wait as threads are idle, so each begins immediately.
            if len(self._idle) > len(self._jobs):
                self._jobs.append(job)
                self._changed.notify()
                return
        try:
            threading.Thread(target=self._work, args=([job],), name="shardstream-request", daemon=True).start()
        except RuntimeError:
            job()()

    def _work(self, jobs: list[Job]) -> None:
        me = threading.current_thread()
        while True:
            announce = jobs.pop()()
            with self._changed:
                # The thread is idle before it announces the outcome, so that the notified caller finds it free.
                if self._users:
                    self._idle.add(me)
            announce()
            del announce
            with self._changed:
                # One thread takes a job, and is then not idle; a dismissed thread ends.
                while not self._jobs and me in self._idle:
                    self._changed.wait()
                if me not in self._idle:
                    return
                self._idle.discard(me)
                jobs.append(self._jobs.popleft())
