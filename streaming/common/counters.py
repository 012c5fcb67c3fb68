"""Count and time what one loader does: the numbers that explain what it waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, Protocol, TypeAlias

from streaming.common.forks import in_children, renew_lock

Told: TypeAlias = Callable[..., Mapping[str, Any]]
"""Tells facts of one stretch of work. Called only if somebody looks, in the thread that did the work; of a fetch that
is under way, in any thread, without waiting."""


class Begun(Protocol):
    """A stretch of work that somebody watches."""

    def end(self, start_s: float, end_s: float, told: Told | None, args: tuple[Any, ...]) -> None:
        """Note that it is over, in the thread that began it; times are of ``time.perf_counter``."""


class Ask(Protocol):
    """A request of the consumer for a batch that somebody watches: a context that lasts until it has one."""

    def got(self, step: Mapping[str, Any]) -> None:
        """Note which step's batch the consumer gets."""

    def __enter__(self) -> object: ...

    def __exit__(self, *error: object) -> None: ...


class Observer:
    """Watch what the threads of a loader do. This one does nothing. Thread-safe, and never raises.

    Work is named as it is counted. None, as the result, says that nobody wants to know when it ends.
    """

    def begin(self, name: str) -> Begun | None:  # noqa: ARG002  for those who watch
        """Note that this thread begins some work."""
        return None

    def asks(self) -> Ask | None:
        """Note that the consumer asks for a batch."""
        return None

    def seen(self, lane: str, name: str, start_s: float, end_s: float, told: Told, *args: Any) -> None:
        """Note work that was done elsewhere, by a process or a device that ``lane`` names."""


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
    """Add what this thread counts by ``Metrics.count`` from now on to ``account`` as well; None: no more."""
    _here.account = account


class Metrics:
    """Named numbers that threads add to. Thread-safe; one addition takes about a quarter of a microsecond.

    Names end in their unit: ``_bytes``, ``_s`` (seconds), or none for a count.

    Attributes:
        observer: Watches the work that is timed. Whoever replaces it passes on to the one before.
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
        """Add to the number called ``name``, and to the account of what this thread is doing, if there is one."""
        self.add(name, amount)
        account = _here.account
        if account is not None:
            account[name] = account.get(name, 0) + amount

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

    def timed(self, name: str, told: Told | None = None, *args: Any) -> Timed:
        """Return a context manager that adds the seconds spent inside to the number called ``name``.

        ``told(*args)`` has the facts for whoever watches.
        """
        return Timed(self, name, told, args)

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


class Timed:
    """See :meth:`Metrics.timed`. A class, because a generator takes three times as long.

    Attributes:
        metrics: What it adds to.
        name: The number that it adds to.
        begun: Gets its end. Whoever replaces it passes on to the one before.
        start_s: When it began, by ``time.perf_counter``.
        told: Tells its facts; None: there are none.
        args: What ``told`` is called with.
        seconds: The time spent inside, once it is over.
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
        except KeyError:  # a forked child has forgotten those of other threads
            pass
        metrics, name = self.metrics, self.name
        self.seconds = seconds = end_s - self.start_s
        with metrics._lock:
            # No addition is lost. As in `add`, whose call would take longer.
            values = metrics._values
            values[name] = values.get(name, 0) + seconds
        if name in WAITS:
            _here.waited_s += seconds
        begun = self.begun
        if begun is not None:
            begun.end(self.start_s, end_s, self.told, self.args)


_under_way: dict[Timed, int] = {}
"""What is timed at this moment, in the order of beginnings, and in which thread. Each change is one atomic step."""


def under_way() -> list[tuple[Timed, int]]:
    """Return what is timed at this moment, by any loader, and in which thread; outer work before what is inside."""
    return list(_under_way.copy().items())  # a copy is made in one step, whatever other threads begin and end meanwhile


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
