"""Decide when to try again, and for how long.

Delays are exponential with full jitter (uniform between zero and a growing bound), which spreads the clients of a
throttled store best: Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from streaming.storage.base.adapter import TransientError, UnreachableError
from streaming.storage.base.checked import WrongBytesError
from streaming.storage.base.options import GROWTH, RetryPolicy

_T = TypeVar("_T")
MOST_WRONG = 10
"""Maximum number of repeated requests for wrong bytes, even if the policy allows more; equal to its default. If one
answer in ten is damaged in transit, eleven in a row have a probability of 10^-11; so the bytes are damaged in the
store."""


class TokenBucket:
    """Limit extra requests (retries, hedges) to a share of the ordinary ones. Thread-safe.

    During any time t with n ordinary requests, there are at most ``burst + share * n + per_s * t`` extra requests.

    ``_lock`` guards ``_tokens`` and ``_at_s``.

    Args:
        share: Extra requests that each ordinary one allows.
        burst: Extra requests that can be saved up; initially all of them.
        per_s: Extra requests that each second allows.
        clock: Monotonic clock, in seconds.
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
        """Record an ordinary request."""
        with self._lock:
            # At most a burst is saved up.
            self._tokens = min(self._burst, self._tokens + self._share)

    def take(self) -> bool:
        """Count an extra request if one may be made now; return whether it may."""
        with self._lock:
            # A token is taken once, and only if a whole one is left.
            self._refill()
            if self._tokens < 1:
                return False
            self._tokens -= 1
            return True

    def reserve(self) -> float:
        """Count an extra request unconditionally; return the seconds until it may be made."""
        with self._lock:
            # The number is below zero by the tokens that requests wait for: each waits for its own.
            self._refill()
            self._tokens -= 1
            return max(0.0, -self._tokens / self._per_s)

    def give_back(self) -> None:
        """Take back an extra request that was counted but not made."""
        with self._lock:
            # Undoes exactly one take() or reserve().
            self._tokens += 1

    def _refill(self) -> None:
        now_s = self._clock()
        self._tokens = min(self._burst, self._tokens + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s


def retrying(
    policy: RetryPolicy,
    attempt: Callable[[], _T],
    *,
    progress: Callable[[], int] = lambda: 0,
    on_retry: Callable[[], None] = lambda: None,
    allowance: TokenBucket | None = None,
    hopeless: Callable[[], bool] = lambda: False,
) -> _T:
    """Return the result of ``attempt``, called again after a :class:`TransientError` as ``policy`` allows.

    Args:
        policy: The limits.
        attempt: Makes one attempt, and keeps its progress.
        progress: Returns a number that grows when an attempt makes progress, which resets the count of attempts.
        on_retry: Called before each further attempt.
        allowance: Limits the retries of all calls together; retries after progress are free.
        hopeless: Returns whether there is now a better alternative than a retry.

    Raises:
        TransientError: The last one, with the number of attempts as a note, when the policy's limits are reached.
    """
    began_s = time.monotonic()
    unreachable_since_s: float | None = None
    failures = total = 0
    done = progress()
    while True:
        try:
            return attempt()
        except TransientError as error:
            now_s = time.monotonic()
            total += 1
            stuck = progress() == done
            failures = failures + 1 if stuck else 1
            done = progress()
            most_s = min(policy.max_backoff_s, policy.first_backoff_s * float(GROWTH) ** min(failures - 1, 99))
            delay_s = random.uniform(0, most_s)  # noqa: S311
            end_s = began_s + policy.deadline_s
            if isinstance(error, UnreachableError):
                unreachable_since_s = now_s if unreachable_since_s is None else unreachable_since_s
                end_s = min(end_s, unreachable_since_s + policy.unreachable_s)
            else:
                unreachable_since_s = None
            wait_s = allowance.reserve() if allowance is not None and stuck else 0.0
            if failures > policy.max_retries or now_s >= end_s or now_s + wait_s > end_s or hopeless():
                error.add_note(f"gave up after {total} attempts in {now_s - began_s:.1f} s")
                if wait_s:
                    error.add_note(
                        f"most requests fail, so retries had to wait for each other: this one {wait_s:.1f} s"
                    )
                if allowance is not None and stuck:
                    allowance.give_back()
                raise
            delay_s = max(min(delay_s, end_s - now_s), wait_s)  # the last attempt is at the very end
        on_retry()
        time.sleep(delay_s)


def until_right(
    policy: RetryPolicy, attempt: Callable[[], _T], *, pauses: bool, on_retry: Callable[[], None] = lambda: None
) -> _T:
    """Return the result of ``attempt``, called again after a :class:`WrongBytesError` as often as after a failure.

    It is called again at most :data:`MOST_WRONG` times. The store has answered in full, so it is not busy: pauses do
    not grow, and these retries do not count toward the limit for all calls. Requests that fail within an attempt are
    retried there.

    Args:
        policy: The limits.
        attempt: Reads all of the bytes and compares them.
        pauses: Whether to pause, because a later answer may be better. A disk needs no pauses.
        on_retry: Called before each further attempt.

    Raises:
        WrongBytesError: The last one, when the policy's limits are reached.
    """
    end_s, most, wrong = time.monotonic() + policy.deadline_s, min(policy.max_retries, MOST_WRONG), 0
    while True:
        try:
            return attempt()
        except WrongBytesError:
            wrong += 1
            if wrong > most or time.monotonic() >= end_s:
                raise
        on_retry()
        if pauses:
            time.sleep(random.uniform(0, policy.first_backoff_s))  # noqa: S311
