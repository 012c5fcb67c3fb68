"""When to try again, and for how long.

Delays are exponential with full jitter (uniform between nothing and the doubling bound), which spreads the clients of
a throttled store best: Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TypeVar

from streaming.arguments import is_number
from streaming.errors import ConfigError
from streaming.storage.allowance import Allowance
from streaming.storage.base import PassingError, UnreachableError

_T = TypeVar("_T")

GROWTH = 4
"""Each delay is up to so many times the one before: a fault that was alone costs next to nothing, and a store that
goes on failing is left alone as soon as with a longer first delay that doubles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Time-outs and retries of one storage.

    Attributes:
        connect_timeout_s: How long a connection may take to stand.
        read_timeout_s: How long an answer may stand still before it counts as stalled.
        deadline_s: How long one call may take over all its attempts.
        max_retries: Attempts in a row that bring no new byte before the call fails.
        first_backoff_s: Upper bound of the first delay; four times as much with each attempt. 20 ms are about a round
            trip to a store in the same region; with 100 ms an epoch with 1 % of failures waits for them
            (``bench_faults.py``).
        max_backoff_s: Where the growth ends.
        retry_share: Retries that follow no progress, as a share of the calls; beyond it, and some that can be saved up,
            they wait for each other (two a second), so that a store that fails everything is not hammered.
        unreachable_s: How long to go on when there is no connection at all: long enough for a restart behind a load
            balancer, short enough that a wrong endpoint is reported at once.
    """

    connect_timeout_s: float = 5.0
    read_timeout_s: float = 30.0
    deadline_s: float = 300.0
    max_retries: int = 10
    first_backoff_s: float = 0.02
    max_backoff_s: float = 10.0
    unreachable_s: float = 3.0
    retry_share: float = 0.2

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            valid = is_number(value) and value >= 0
            if not valid or (value == 0 and field.name.endswith(("timeout_s", "deadline_s"))):
                raise ConfigError(f"storage option {field.name}: expected a positive number, got {value!r}")


def retrying(
    policy: RetryPolicy,
    attempt: Callable[[], _T],
    *,
    progress: Callable[[], int] = lambda: 0,
    on_retry: Callable[[], None] = lambda: None,
    allowance: Allowance | None = None,
    hopeless: Callable[[], bool] = lambda: False,
) -> _T:
    """The result of ``attempt``, called again after a :class:`PassingError` as ``policy`` allows.

    Args:
        policy: The limits.
        attempt: Does one attempt; keeps what it achieved.
        progress: A number that grows when an attempt achieved something; then the count of attempts starts anew.
        on_retry: Called before each further attempt.
        allowance: Bounds the retries of all calls together; those after progress are free.
        hopeless: Whether there is a better way by now than to try again.

    Raises:
        PassingError: The last one, with the number of attempts as a note, when the policy's limits are reached.
    """
    began_s = time.monotonic()
    unreachable_since_s: float | None = None
    failures = total = 0
    done = progress()
    while True:
        try:
            return attempt()
        except PassingError as error:
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
                    error.add_note(f"most requests fail: retries had to wait for each other, this one {wait_s:.1f} s")
                if allowance is not None and stuck:
                    allowance.give_back()
                raise
            delay_s = max(min(delay_s, end_s - now_s), wait_s)  # the last attempt is at the very end
        on_retry()
        time.sleep(delay_s)
