"""Lock and wait such that an exception from a signal handler never leaves a lock taken, or a waiter forgotten.

Ctrl-C, the alarm of a test framework, a notebook's "interrupt": each raises wherever the main thread happens to be.
``with`` over a ``threading.Condition`` runs two Python functions; between their lines the exception finds the lock
taken with nobody to release it, and the next thread to acquire it waits forever. Python does not check for signals
between a lock's own ``__enter__`` and the body, nor between the body and its ``__exit__``, if these two are C.
"""

from __future__ import annotations

import threading
import time
from _thread import RLock
from collections.abc import Callable


class Monitor(RLock):  # type: ignore[misc]  # final for type checkers alone; a member could not lend it these two methods
    """Guard a state by ``with``, wait for its changes, and announce them; reentrant.

    Like ``threading.Condition``, except for what an interrupted thread leaves behind. All methods require the lock.

    Example:
        >>> changed = Monitor()
        >>> with changed:
        ...     changed.wait_for(lambda: True)
        True
    """

    _release_save: Callable[[], tuple[int, int]]
    _acquire_restore: Callable[[tuple[int, int]], None]

    def __init__(self) -> None:
        self._waiting: list[tuple[threading.Lock, Callable[[], object] | None]] = []
        """A lock of each thread that waits, taken until it is told, and its ``when``."""

    def wait(self, timeout_s: float | None = None, *, when: Callable[[], object] | None = None) -> bool:
        """Wait until notified, or until the time-out, which returns False. The lock is not held meanwhile.

        With ``when``, only a notification that finds it true wakes this thread: the notifier, which has the lock, can
        tell for next to nothing, where a thread that wakes in vain costs a tenth of a millisecond.
        """
        told, limit_s = threading.Lock(), -1 if timeout_s is None else max(0.0, timeout_s)
        told.acquire()
        entry = told, when
        held = 1, threading.get_ident()
        try:
            self._waiting.append(entry)
            # Signals are checked after each call: from here to the end of the wait the lock is not held, and after the
            # first call of what follows it is. Invariant after both: a thread that does not wait is not listed.
            try:
                held = self._release_save()
                in_time = told.acquire(timeout=limit_s)
            finally:
                self._acquire_restore(held)
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)
        return in_time or not told.locked()

    def wait_for(self, is_so: Callable[[], object], timeout_s: float | None = None) -> bool:
        """Wait until ``is_so()``, or until the time-out; return whether it is so."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not (found := is_so()):
            left_s = None if deadline_s is None else deadline_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
        return bool(found)

    def notify(self, count: int = 1) -> None:
        """Notify this many waiters whose ``when`` is true, those that have waited longest first."""
        # A notified thread removes itself from the list once it has the lock: if interrupted, a repeat loses nobody.
        for told in [told for told, when in self._waiting if told.locked() and (when is None or when())][:count]:
            told.release()

    def notify_all(self) -> None:
        """Notify all waiters."""
        self.notify(len(self._waiting))
