"""Lock and wait such that an exception from a signal handler never leaves a lock taken, or a waiter forgotten.

Ctrl-C, the alarm of a test framework and a notebook's "interrupt" raise wherever the main thread happens to be.
``with`` over a ``threading.Condition`` runs two Python functions. If the exception is raised between their lines, the
lock is never released, and the next thread to acquire it waits forever. If a lock's ``__enter__`` and ``__exit__`` are
C functions, Python does not check for signals between them and the body.
"""

from __future__ import annotations

import threading
import time
from _thread import RLock
from collections.abc import Callable


class Monitor(RLock):  # type: ignore[misc]  # final only for type checkers; the two methods must be inherited
    """Guard a state by ``with``, wait for its changes, and announce them; reentrant.

    Like ``threading.Condition``, but consistent after an interrupt. All methods require the lock.

    A waiting thread goes through these steps, and an exception may occur after each:

    1. It lists itself in ``_waiting`` with a taken lock of its own (``woken``).
    2. It releases the monitor, and waits for ``woken``, which a notifier releases.
    3. It acquires the monitor again, whether notified, timed out or interrupted.
    4. It removes itself from ``_waiting``, so that no notification goes to a thread that has stopped waiting.

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
        """For each waiting thread, a lock that is taken until it is notified, and its ``when``."""

    def wait(self, timeout_s: float | None = None, *, when: Callable[[], object] | None = None) -> bool:
        """Wait until notified, and return True; return False after the time-out. The lock is not held meanwhile.

        With ``when``, a notification wakes this thread only if ``when()`` is true. The notifier, which has the lock,
        can check this at almost no cost, while a thread that wakes in vain costs a tenth of a millisecond.
        """
        woken, limit_s = threading.Lock(), -1 if timeout_s is None else max(0.0, timeout_s)
        woken.acquire()
        entry = woken, when
        held = 1, threading.get_ident()
        try:
            self._waiting.append(entry)
            # Signals are checked after each call. The lock is not held from here to the end of the wait; it is held
            # again after the first call in `finally`. Invariant: a thread that has stopped waiting is not listed.
            try:
                held = self._release_save()
                in_time = woken.acquire(timeout=limit_s)
            finally:
                self._acquire_restore(held)
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)
        return in_time or not woken.locked()

    def wait_for(self, is_so: Callable[[], object], timeout_s: float | None = None) -> bool:
        """Wait until ``is_so()`` is true, or until the time-out; return whether it is true."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not (found := is_so()):
            left_s = None if deadline_s is None else deadline_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
        return bool(found)

    def notify(self, count: int = 1) -> None:
        """Notify this many waiters whose ``when`` is true, the longest-waiting first."""
        # A notified thread removes itself once it has the lock. So if this loop is interrupted, a repeat misses no
        # waiter.
        for woken in [woken for woken, when in self._waiting if woken.locked() and (when is None or when())][:count]:
            woken.release()

    def notify_all(self) -> None:
        """Notify all waiters."""
        self.notify(len(self._waiting))
