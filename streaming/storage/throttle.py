"""Fewer requests at once while a store says that it is too busy: halve, then recover with time.

After AIMD: Chiu and Jain, "Analysis of the Increase and Decrease Algorithms for Congestion Avoidance", 1989. The
design, and why a single refusal changes nothing: docs/design/0009-failing-stores.md.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from streaming.storage.base import ThrottledError

RECOVERY_S = 32.0
"""From no requests at once to all of them. Shorter than a minute, so that nothing older need be believed."""
LEAST_SHARE = 1 / 64
_MEMORY = 16
"""Answers over which the share of refusals is averaged (exponentially)."""
_MUCH = 0.1
"""From this share of refusals on the store means us: S3 answers some requests per thousand with 503 on a good day."""
_LOOK_S = 0.1
"""How long it takes at most until a process sees that another one was refused."""


@dataclass(frozen=True, slots=True)
class Slowdown:
    """At ``at_s`` (monotonic clock) this share of the requests was allowed; it grows from there."""

    share: float = 1.0
    at_s: float = 0.0

    def share_at(self, now_s: float) -> float:
        """The share of the usual requests at once, in (0, 1]."""
        return min(1.0, self.share + max(0.0, now_s - self.at_s) / RECOVERY_S)

    def halved(self, now_s: float, asked_s: float) -> Slowdown:
        """After a refusal of a request that was sent at ``asked_s``; unchanged if it was sent before the last change.

        So all requests of one round trip count as one.
        """
        if asked_s <= self.at_s:
            return self
        return Slowdown(max(LEAST_SHARE, self.share_at(now_s) / 2), now_s)


class SlowdownState:
    """Where a :class:`Slowdown` is kept: here in this process, in subclasses for several. Used under a lock."""

    def __init__(self) -> None:
        self._state = Slowdown()

    def read(self) -> Slowdown:
        """The state; the default one if there is none."""
        return self._state

    def halve(self, now_s: float, asked_s: float) -> Slowdown:
        """Apply :meth:`Slowdown.halved`; the state after it."""
        self._state = self._state.halved(now_s, asked_s)
        return self._state


class Gate:
    """Admits requests to one bucket. Thread-safe; costs nothing to speak of while the store is content.

    What "all of them" are is learned: the most that wanted to be under way at once.

    Args:
        shared: Where the slowdown is kept; default: in this process.
        clock: Seconds of the monotonic clock.
    """

    def __init__(self, shared: SlowdownState | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._shared = shared or SlowdownState()
        self._clock = clock
        self._changed = threading.Condition()
        self._state = Slowdown()
        self._looked_s = float("-inf")
        self._under_way = self._waiting = self._most = 0
        self._refused = 0.0

    @property
    def limit(self) -> int:
        """Requests allowed at once now; at least 1."""
        with self._changed:
            return self._limit()

    def enter(self, until_s: float) -> None:
        """Wait until one more request may be under way.

        Raises:
            ThrottledError: At ``until_s`` (monotonic) that is still not so.
        """
        with self._changed:
            self._waiting += 1
            try:
                self._most = max(self._most, self._under_way + self._waiting)
                while self._under_way >= (limit := self._limit()):
                    now_s = self._clock()
                    if now_s >= until_s:
                        raise ThrottledError(
                            f"no request was sent: the store is busy, {limit} may be under way at once, and none of "
                            "them ended in time; use fewer ranks, or spread the data over more prefixes"
                        )
                    grows_s = ((limit + 1) / self._most - self._state.share_at(now_s)) * RECOVERY_S
                    self._changed.wait(max(0.01, min(grows_s, until_s - now_s)))
            finally:
                self._waiting -= 1
            self._under_way += 1

    def try_enter(self) -> bool:
        """Whether one more request may be under way at once; if so, it counts."""
        with self._changed:
            if self._under_way >= self._limit() and self._state.share_at(self._clock()) < 1:
                return False
            self._under_way += 1
            return True

    def leave(self) -> None:
        """A request has ended."""
        with self._changed:
            self._under_way -= 1
            self._changed.notify()

    def answered(self) -> None:
        """A request was not refused."""
        with self._changed:
            self._refused -= self._refused / _MEMORY

    def refused(self, asked_s: float) -> None:
        """A request that was sent at ``asked_s`` was refused because the store is too busy."""
        with self._changed:
            self._refused += (1 - self._refused) / _MEMORY
            if self._refused >= _MUCH:
                self._state = self._shared.halve(self._clock(), asked_s)

    def _limit(self) -> int:
        now_s = self._clock()
        if now_s - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            self._state = self._shared.read()
        share = self._state.share_at(now_s)
        return max(1, self._most if share >= 1 else int(self._most * share))
