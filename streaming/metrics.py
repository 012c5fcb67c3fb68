"""Count and time what one loader does: the numbers that explain what it waits for."""

from __future__ import annotations

import threading
import time

from streaming.forks import in_children, renew_lock


class Metrics:
    """Named numbers that threads add to. Thread-safe; one addition takes about a quarter of a microsecond.

    Names end in their unit: ``_bytes``, ``_s`` (seconds), or none for a count.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}
        in_children(self, renew_lock)

    def add(self, name: str, amount: float = 1) -> None:
        """Add ``amount`` to the number called ``name``."""
        with self._lock:
            # No addition is lost.
            self._values[name] = self._values.get(name, 0) + amount

    def peak(self, name: str, value: float) -> None:
        """Raise the number called ``name`` to ``value`` if that is larger."""
        with self._lock:
            # The largest value so far, whoever came first.
            self._values[name] = max(self._values.get(name, 0), value)

    def timed(self, name: str) -> _Timed:
        """Return a context manager that adds the seconds spent inside to the number called ``name``."""
        return _Timed(self, name)

    def get(self, name: str) -> float:
        """Return the number called ``name``; 0 if nothing has been added yet."""
        with self._lock:
            # A value that was really there, not half of an addition.
            return self._values.get(name, 0)

    def snapshot(self) -> dict[str, float]:
        """Return the current values of all numbers."""
        with self._lock:
            # All numbers are of one moment.
            return dict(self._values)


class _Timed:
    """See :meth:`Metrics.timed`. A class, because a generator takes three times as long."""

    __slots__ = ("_metrics", "_name", "_start_s")

    def __init__(self, metrics: Metrics, name: str) -> None:
        self._metrics = metrics
        self._name = name

    def __enter__(self) -> None:
        self._start_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._metrics.add(self._name, time.perf_counter() - self._start_s)
