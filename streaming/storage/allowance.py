"""How much extra traffic (retries, hedges) may be sent: a share of the ordinary traffic, and a little in any case."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Allowance:
    """A token bucket that ordinary requests fill. Thread-safe.

    Over any time t in which n of them are made, at most ``burst + share * n + per_s * t`` extra ones are.

    Args:
        share: Extra requests that each ordinary one allows.
        burst: Extra requests that can be saved up; it begins full.
        per_s: Extra requests that each second allows.
        clock: Seconds that never go back.
    """

    def __init__(
        self, *, share: float, burst: float, per_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._share = share
        self._burst = burst
        self._per_s = per_s
        self._clock = clock
        self._lock = threading.Lock()
        self._tokens = burst
        self._at_s = clock()

    def earn(self) -> None:
        """An ordinary request was made."""
        with self._lock:
            self._tokens = min(self._burst, self._tokens + self._share)

    def take(self) -> bool:
        """Whether an extra request may be made now; if so, it counts."""
        with self._lock:
            self._refill()
            if self._tokens < 1:
                return False
            self._tokens -= 1
            return True

    def reserve(self) -> float:
        """Count an extra request in any case; in how many seconds it may be made."""
        with self._lock:
            self._refill()
            self._tokens -= 1
            return max(0.0, -self._tokens / self._per_s)

    def give_back(self) -> None:
        """An extra request that counted is not made after all."""
        with self._lock:
            self._tokens += 1

    def _refill(self) -> None:
        now_s = self._clock()
        self._tokens = min(self._burst, self._tokens + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
