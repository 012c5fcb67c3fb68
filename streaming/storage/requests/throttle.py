"""Send fewer concurrent requests to a busy store: each refusal reduces their number, each answer raises it a little.

This follows AIMD: Chiu and Jain, "Analysis of the Increase and Decrease Algorithms for Congestion Avoidance", 1989. For
the design and the effect of the constants, see docs/design/0008-failing-stores.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from streaming.common.monitor import Monitor
from streaming.storage.base.adapter import ThrottledError

RECOVERY_S = 32.0
"""Time of recovery from no concurrent requests to all of them, even without answers. It is less than a minute, so that
older state can be ignored."""
LEAST_SHARE = 1 / 64
CUT = 1 / 16
"""Fraction of the share that one refusal takes away. Even with few requests, it removes one."""
GIVEN_BACK = 1 / 800
"""Fraction of all requests that one answer gives back. Fifty answers make up for a refusal: 2 % of refusals change
nothing in the long run (S3 answers a few requests per thousand with 503 on a good day), and a store with half of the
needed capacity refuses 4 %."""
_RIVALS_SHARE = 1 / 2
"""From this share on, a second request is always admitted: a stalled one is no load, and 4 % of refusals are few."""
_LOOK_S = 0.1
"""Maximum delay until a process sees a refusal of another process."""


@dataclass(frozen=True, slots=True)
class Slowdown:
    """The share of the requests that was allowed at ``at_s`` (monotonic clock); it grows from there."""

    share: float = 1.0
    at_s: float = 0.0

    def share_at(self, now_s: float) -> float:
        """Return the allowed share of the usual concurrent requests, in (0, 1]."""
        return min(1.0, self.share + max(0.0, now_s - self.at_s) / RECOVERY_S)

    def after(self, now_s: float, given_back: float, sent_at: float | None = None) -> Slowdown:
        """Return the state after answers gave back a share and, if given, a request sent at ``sent_at`` was refused.

        A refusal never lowers the share below half of the share at which its request was sent. So all refusals of one
        round trip together at most halve it, and no round trip has to be measured.
        """
        share = min(1.0, self.share_at(now_s) + given_back)
        if sent_at is not None:
            share = max(share * (1 - CUT), min(share, sent_at / 2), LEAST_SHARE)
        return Slowdown(share, max(now_s, self.at_s))


class SlowdownState:
    """Storage of a :class:`Slowdown`: for this process; in subclasses, for several processes. Used under a lock."""

    def __init__(self) -> None:
        self._state = Slowdown()

    def read(self) -> Slowdown:
        """Return the state; the default one if there is none."""
        return self._state

    def change(self, how: Callable[[Slowdown], Slowdown]) -> Slowdown:
        """Replace the state with ``how(state)``; return the new state."""
        self._state = how(self._state)
        return self._state


class Gate:
    """Admits requests to one bucket. Thread-safe; costs almost nothing while the store accepts everything.

    The usual number of concurrent requests is learned: it is the largest number that was wanted at once.

    The lock ``_changed`` guards all other fields that change: ``_state``, ``_given_back``, ``_looked_s``,
    ``_under_way``, ``_waiting`` and ``_most``.

    Args:
        shared: Storage of the slowdown; default: this process.
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, shared: SlowdownState | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._shared = shared or SlowdownState()
        self._clock = clock
        self._changed = Monitor()
        self._state = Slowdown()
        self._given_back = 0.0
        self._looked_s = float("-inf")
        self._under_way = self._waiting = self._most = 0

    @property
    def limit(self) -> int:
        """Number of concurrent requests allowed now; at least 1."""
        with self._changed:
            # The limit follows from the share of this moment.
            return self._limit(self._share())

    def enter(self, until_s: float) -> float:
        """Wait until one more request may be sent; return the share of the usual requests allowed at that time.

        Raises:
            ThrottledError: The request was not admitted before ``until_s`` (monotonic).
        """
        with self._changed:
            # _under_way counts the admitted requests that have not left; at each admission, it was below the limit.
            self._waiting += 1
            try:
                self._most = max(self._most, self._under_way + self._waiting)
                while self._under_way >= (limit := self._limit(share := self._share())):
                    now_s = self._clock()
                    if now_s >= until_s:
                        raise ThrottledError(
                            f"no request was sent: the store is busy, only {limit} may be under way at once, and none "
                            "of them ended in time; use fewer ranks, or spread the data over more prefixes"
                        )
                    grows_s = ((limit + 1) / self._most - share) * RECOVERY_S
                    self._changed.wait(max(0.01, min(grows_s, until_s - now_s)))
            finally:
                self._waiting -= 1
            self._under_way += 1
            return share

    def try_enter(self) -> bool:
        """Admit a second request for a stalled one, if that is allowed now; return whether it was admitted."""
        with self._changed:
            # The request is counted only if it is admitted.
            share = self._share()
            if self._under_way >= self._limit(share) and share < _RIVALS_SHARE:
                return False
            self._under_way += 1
            return True

    def leave(self) -> None:
        """Record that a request has ended."""
        with self._changed:
            self._under_way -= 1
            self._changed.notify(2)  # one for its place, and one that its answer may have made room for

    def answered(self) -> None:
        """Record that a request was not refused."""
        with self._changed:
            # The share grows, up to 1.
            if self._share() < 1:
                self._given_back += GIVEN_BACK

    def refused(self, sent_at: float) -> None:
        """Record that a busy store refused a request; ``sent_at`` is the share that :meth:`enter` returned for it."""
        with self._changed:
            # All refusals of one round trip together at most halve the share.
            self._change(sent_at)

    def _limit(self, share: float) -> int:
        return max(1, self._most if share >= 1 else int(self._most * share))

    def _share(self) -> float:
        now_s = self._clock()
        if now_s - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            if self._given_back:
                self._change()
            else:
                self._state = self._shared.read()
        return min(1.0, self._state.share_at(now_s) + self._given_back)

    def _change(self, sent_at: float | None = None) -> None:
        """Record the share given back, and a refusal if ``sent_at`` is given."""
        now_s, given_back = self._clock(), self._given_back
        self._given_back = 0.0
        self._state = self._shared.change(lambda state: state.after(now_s, given_back, sent_at))
