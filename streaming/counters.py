"""Count and time what one loader does: the numbers that explain what it waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

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

    def add_each(self, amounts: Mapping[str, float]) -> None:
        """Add to several numbers at once, which takes the lock once."""
        with self._lock:
            # No addition is lost, and nobody sees some of these without the others.
            for name, amount in amounts.items():
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What exporters read of a loader at one moment. Making one changes nothing, and is allowed in any thread.

    Attributes:
        rank: Rank of this process.
        data_rank: Its data-parallel rank.
        world_size: Number of ranks.
        epoch: The epoch in progress, or the next one.
        samples_seen: Samples of this epoch that training has received, over all ranks.
        numbers: The numbers of ``loader.metrics()``.
        readers: With ``remote_group``: the numbers of each data rank's reader; those that do not answer are missing.
    """

    rank: int
    data_rank: int
    world_size: int
    epoch: int
    samples_seen: int
    numbers: Mapping[str, float]
    readers: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
