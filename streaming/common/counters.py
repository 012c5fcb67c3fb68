"""Count and time the work of one loader: the numbers that explain its waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, Protocol, TypeAlias

from streaming.common.forks import in_children, renew_lock

Told: TypeAlias = Callable[..., Mapping[str, Any]]
"""Returns facts about one piece of work. It is called only if an observer asks, in the thread that did the work. For a
fetch in progress, it may be called in any thread, and must not wait."""


class Begun(Protocol):
    """A piece of work in progress that is observed."""

    def end(self, start_s: float, end_s: float, told: Told | None, args: tuple[Any, ...]) -> None:
        """Record the end of the work, in the thread that began it; times are from ``time.perf_counter``."""


class Ask(Protocol):
    """An observed request of the consumer for a batch: a context that lasts until the batch arrives."""

    def got(self, step: Mapping[str, Any]) -> None:
        """Record the step whose batch the consumer gets."""

    def __enter__(self) -> object: ...

    def __exit__(self, *error: object) -> None: ...


class Observer:
    """Observe the threads of a loader. This base class does nothing. Thread-safe, and never raises.

    Work has the name of its counter. A result of None means that the end of the work is not observed.
    """

    def begin(self, name: str) -> Begun | None:  # noqa: ARG002  used by subclasses
        """Record that this thread begins some work."""
        return None

    def asks(self) -> Ask | None:
        """Record that the consumer requests a batch."""
        return None

    def seen(self, lane: str, name: str, start_s: float, end_s: float, told: Told, *args: Any) -> None:
        """Record work that was done elsewhere, by the process or device named ``lane``."""


WAITS = frozenset(("wait_for_fetch_s", "wait_for_build_s", "wait_for_batch_s", "exchange_s"))
"""Timers of waits for others: for bytes, builders, readers, and other ranks."""


class _Here(threading.local):
    account: dict[str, float] | None = None
    waited_s = 0.0


_here = _Here()


def waited_here_s() -> float:
    """Return the seconds that this thread has spent in ``WAITS`` so far, over all loaders."""
    return _here.waited_s


def account_here(account: dict[str, float] | None) -> None:
    """From now on, also add this thread's ``Metrics.count`` to ``account``; None: stop."""
    _here.account = account


class Metrics:
    """Named numbers that threads add to. Thread-safe; one addition takes about a quarter of a microsecond.

    Names end in their unit: ``_bytes``, ``_s`` (seconds), or none for a count.

    Attributes:
        observer: Observes timed work. A replacement forwards its calls to the previous observer.
    """

    def __init__(self, observer: Observer | None = None) -> None:
        self.observer = observer or Observer()
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}
        in_children(self, Metrics._renew)

    def _renew(self) -> None:
        renew_lock(self)
        here = get_ident()
        for timed, thread in under_way():
            if timed.metrics is self and thread != here:
                del _under_way[timed]

    def add(self, name: str, amount: float = 1) -> None:
        """Add ``amount`` to the number called ``name``."""
        with self._lock:
            # No addition is lost.
            self._values[name] = self._values.get(name, 0) + amount

    def count(self, name: str, amount: float = 1) -> None:
        """Add to the number called ``name``, and to the account of this thread, if there is one."""
        self.add(name, amount)
        account = _here.account
        if account is not None:
            account[name] = account.get(name, 0) + amount

    def add_each(self, amounts: Mapping[str, float]) -> None:
        """Add to several numbers at once, which takes the lock once."""
        with self._lock:
            # No addition is lost, and readers see all of these additions or none.
            for name, amount in amounts.items():
                self._values[name] = self._values.get(name, 0) + amount

    def peak(self, name: str, value: float) -> None:
        """Raise the number called ``name`` to ``value`` if that is larger."""
        with self._lock:
            # The number stays the largest value so far.
            self._values[name] = max(self._values.get(name, 0), value)

    def timed(self, name: str, told: Told | None = None, *args: Any) -> Timed:
        """Return a context manager that adds the seconds spent inside to the number called ``name``.

        ``told(*args)`` returns facts for observers.
        """
        return Timed(self, name, told, args)

    def get(self, name: str) -> float:
        """Return the number called ``name``; 0 if nothing has been added yet."""
        with self._lock:
            # The value is never half of an addition.
            return self._values.get(name, 0)

    def snapshot(self) -> dict[str, float]:
        """Return the current values of all numbers."""
        with self._lock:
            # All numbers are from one moment.
            return dict(self._values)


class Timed:
    """See :meth:`Metrics.timed`. A class, because a generator takes three times as long.

    Attributes:
        metrics: The numbers to add to.
        name: Name of the number.
        begun: Receives the end of the work. A replacement forwards its calls to the previous one.
        start_s: Start of the work, by ``time.perf_counter``.
        told: Returns facts about the work; None: there are none.
        args: Arguments of ``told``.
        seconds: The time spent inside; set at the end.
    """

    __slots__ = ("args", "begun", "metrics", "name", "seconds", "start_s", "told")

    def __init__(self, metrics: Metrics, name: str, told: Told | None, args: tuple[Any, ...]) -> None:
        self.metrics, self.name, self.told, self.args = metrics, name, told, args

    def __enter__(self) -> None:
        self.begun = self.metrics.observer.begin(self.name)
        self.start_s = time.perf_counter()
        _under_way[self] = get_ident()

    def __exit__(self, *_: object) -> None:
        end_s = time.perf_counter()
        try:  # noqa: SIM105  `suppress` and `pop` take longer
            del _under_way[self]
        except KeyError:  # a forked child has dropped the entries of other threads
            pass
        metrics, name = self.metrics, self.name
        self.seconds = seconds = end_s - self.start_s
        with metrics._lock:
            # No addition is lost. This repeats `add`, because a call would take longer.
            values = metrics._values
            values[name] = values.get(name, 0) + seconds
        if name in WAITS:
            _here.waited_s += seconds
        begun = self.begun
        if begun is not None:
            begun.end(self.start_s, end_s, self.told, self.args)


_under_way: dict[Timed, int] = {}
"""All timed work in progress, in the order of its start, and its thread. Each change is one atomic step."""


def under_way() -> list[tuple[Timed, int]]:
    """Return all timed work in progress, of any loader, and its thread; outer work comes before inner work."""
    return list(_under_way.copy().items())  # copying is one atomic step, even while other threads begin and end work


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The state of a loader at one moment, for exporters. Making one changes nothing, and is allowed in any thread.

    Attributes:
        rank: Rank of this process.
        data_rank: Its data-parallel rank.
        world_size: Number of ranks.
        epoch: The epoch in progress, or the next one.
        samples_seen: Samples of this epoch that training has received, over all ranks.
        numbers: The numbers of ``loader.metrics()``.
        readers: With ``remote_group``: the numbers of each data rank's reader. Readers that do not answer are missing.
    """

    rank: int
    data_rank: int
    world_size: int
    epoch: int
    samples_seen: int
    numbers: Mapping[str, float]
    readers: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
