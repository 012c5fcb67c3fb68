"""Watch for batches that do not arrive, and report what every stage is waiting for."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from streaming.common.forks import in_children

STALL_REPORT_S = 60.0
"""Longer than the retries of a request that succeeds, shorter than people wait before they look at a stalled job."""

_log = logging.getLogger(__name__)


class Watchdog:
    """Watch the waits of one thread, and report each that is too long: once, and again whenever it has doubled.

    The watched thread calls ``begin`` and ``end``, which cost almost nothing. The watching thread starts with the first
    ``begin``, sleeps ``after_s`` at a time, and ends with ``stop``.

    Args:
        after_s: Seconds after which a wait is reported; None: never.
        what: The condition to report, such as "no batch".
        describe: Returns the report; called in the watching thread.
    """

    def __init__(self, after_s: float | None, what: str, describe: Callable[[], str]) -> None:
        self._after_s = after_s
        self._what = what
        self._describe = describe
        self._since_s: float | None = None
        self._begin_anew()
        in_children(self, Watchdog._begin_anew)

    def _begin_anew(self) -> None:
        """Reset to the state without a thread: a forked child has none, and the event's lock may have been held."""
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Record that a wait begins."""
        self._since_s = time.monotonic()
        if self._thread is None and self._after_s is not None and not self._stopped.is_set():
            self._thread = threading.Thread(
                target=self._watch, args=(self._after_s,), name="shardstream-watch", daemon=True
            )
            self._thread.start()

    def end(self) -> None:
        """Record that the wait is over."""
        self._since_s = None

    @property
    def waiting_s(self) -> float | None:
        """Seconds that the current wait has lasted; None if there is none."""
        since_s = self._since_s
        return None if since_s is None else time.monotonic() - since_s

    def stop(self) -> None:
        """End the watching thread. At interpreter exit this touches no module that may be gone."""
        self._stopped.set()
        thread = self._thread
        if thread is None:
            return
        if thread is not threading.current_thread() and thread.is_alive():  # an interrupt may precede its start
            thread.join()
        self._thread = None

    def _watch(self, after_s: float) -> None:
        pause_s, due_s, watched_s = after_s, after_s, None
        while not self._stopped.wait(pause_s):
            since_s = self._since_s
            if since_s != watched_s:
                watched_s, due_s = since_s, after_s
            waited_s = 0.0 if since_s is None else time.monotonic() - since_s
            if waited_s >= due_s:
                self._report(waited_s)
                due_s = 2 * waited_s
            pause_s = due_s - waited_s

    def _report(self, waited_s: float) -> None:
        try:
            text = self._describe()
        except Exception:  # noqa: BLE001  thread boundary; a failed report must not end the reports
            _log.exception("%s for %.1f s; describing what it waits for failed", self._what, waited_s)
        else:
            _log.warning("%s for %.1f s\n%s", self._what, waited_s, text)
