"""Cache recently used values, each computed once even if many threads request it: ``LruCache``."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from streaming.common.forks import in_children

_KEY = TypeVar("_KEY", bound=Hashable)
_VALUE = TypeVar("_VALUE")


class LruCache(Generic[_KEY, _VALUE]):
    """Cache values up to a limit of bytes, evicting the least recently used.

    Thread-safe. A forked child gets its own locks, and keeps the values made before the fork. A copy in another process
    begins empty.

    ``_lock`` guards ``_kept``, ``_kept_bytes``, ``_limit_bytes`` and ``_making``.

    Args:
        limit_bytes: Limit for all values together; the latest value is kept regardless of its size.
        size_of: Returns the bytes of a value; must be picklable if the cache must be.

    Example:
        ``LruCache(1 << 20, len).of("a", read)`` reads once, and again only after 1 MiB of other values.
    """

    def __init__(self, limit_bytes: int, size_of: Callable[[_VALUE], int]) -> None:
        self._limit_bytes, self._size_of = limit_bytes, size_of
        self._kept: OrderedDict[_KEY, _VALUE] = OrderedDict()
        self._kept_bytes = 0
        self._renew_locks()
        in_children(self, LruCache._renew_locks)

    def _renew_locks(self) -> None:
        self._lock = threading.Lock()
        self._making: dict[_KEY, threading.Lock] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return LruCache, (self._limit_bytes, self._size_of)

    def keep_at_most(self, num_bytes: int) -> None:
        """Change the limit of bytes."""
        with self._lock:
            # The cached values take at most the limit.
            self._limit_bytes = num_bytes
            self._shrink()

    def _shrink(self) -> None:
        while self._kept_bytes > self._limit_bytes and len(self._kept) > 1:
            self._kept_bytes -= self._size_of(self._kept.popitem(last=False)[1])

    def __contains__(self, key: _KEY) -> bool:
        """Return whether the value is currently cached."""
        with self._lock:
            # True only at this moment: another thread may evict the value.
            return key in self._kept

    def of(self, key: _KEY, make: Callable[[], _VALUE]) -> _VALUE:
        """Return the value of ``key``: the cached one, or the result of ``make``; concurrent callers wait for it.

        Raises:
            Exception: Whatever ``make`` raised; the next caller calls it again.
        """
        with self._lock:
            # Either the value is returned, or all callers that miss it share one lock to make it.
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            making = self._making.setdefault(key, threading.Lock())
        with making:
            with self._lock:
                # The previous holder of the lock may have made it.
                if key in self._kept:
                    return self._kept[key]
            made = make()
            with self._lock:
                # Invariant: before the lock is released, no thread is making the value, all threads find it cached, and
                # the limit holds.
                self._kept[key] = made
                self._kept_bytes += self._size_of(made)
                self._shrink()
                self._making.pop(key, None)
        return made
