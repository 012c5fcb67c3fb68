"""Keep what was asked for last at hand, made once however many threads ask for it: ``Recent``."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from streaming.forks import in_children

_KEY = TypeVar("_KEY", bound=Hashable)
_VALUE = TypeVar("_VALUE")


class Recent(Generic[_KEY, _VALUE]):
    """Keep values up to a bound of bytes; what was asked for longest ago goes first.

    Thread-safe. A forked child gets locks of its own, and keeps what was made before the fork; a copy in another
    process begins empty.

    Args:
        limit_bytes: Of all values together; the latest is kept whatever it takes.
        size_of: Bytes of a value; picklable where this is.

    Example:
        ``Recent(1 << 20, len).of("a", read)`` reads once, and again only after a MiB of others.
    """

    def __init__(self, limit_bytes: int, size_of: Callable[[_VALUE], int]) -> None:
        self._limit_bytes, self._size_of = limit_bytes, size_of
        self._kept: OrderedDict[_KEY, _VALUE] = OrderedDict()
        self._kept_bytes = 0
        self._renew_locks()
        in_children(self, Recent._renew_locks)

    def _renew_locks(self) -> None:
        self._lock = threading.Lock()
        self._making: dict[_KEY, threading.Lock] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Recent, (self._limit_bytes, self._size_of)

    def keep_at_most(self, num_bytes: int) -> None:
        """Bound the values to another number of bytes, from now on."""
        with self._lock:
            self._limit_bytes = num_bytes
            self._shrink()

    def _shrink(self) -> None:
        while self._kept_bytes > self._limit_bytes and len(self._kept) > 1:
            self._kept_bytes -= self._size_of(self._kept.popitem(last=False)[1])

    def __contains__(self, key: _KEY) -> bool:
        """Tell whether the value is kept at this moment."""
        with self._lock:
            return key in self._kept

    def of(self, key: _KEY, make: Callable[[], _VALUE]) -> _VALUE:
        """Return the value of ``key``: the one kept, else what ``make`` returns; others who ask for the key wait.

        Raises:
            Exception: What ``make`` raised; the next that asks calls it again.
        """
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            making = self._making.setdefault(key, threading.Lock())
        with making:
            with self._lock:
                if key in self._kept:
                    return self._kept[key]
            made = make()
            with self._lock:
                # From here on nobody makes it: all find it kept, and the bound holds again before the lock is free.
                self._kept[key] = made
                self._kept_bytes += self._size_of(made)
                self._shrink()
                self._making.pop(key, None)
        return made
