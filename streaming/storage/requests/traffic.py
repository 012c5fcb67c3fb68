"""Learn from recent answers of a bucket (or host), for the next requests to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from streaming.storage.base.adapter import ThrottledError
from streaming.storage.base.options import StorageOptions
from streaming.storage.requests.adaptive_timeout import Patience
from streaming.storage.requests.node_slowdown import NodeSlowdown
from streaming.storage.requests.retry import TokenBucket
from streaming.storage.requests.threads import RequestThreads
from streaming.storage.requests.throttle import Gate

_RETRIES_SAVED = 40
_RETRIES_PER_S = 2.0
_UNKNOWN_S = 2.0
"""Limit for the silences of the first answers, while there are no measurements."""
HEDGE_QUANTILE = 0.95
"""Quantile of recent silences, before and within answers; a silence of twice its value is too long."""
HEDGE_LEAST_S = 0.05
"""Shorter silences never count as too long: a few round trips to a store in the same region (``bench_faults.py``)."""
HEDGE_SHARE = 0.05
"""Second requests as a share of all requests; a few can be saved up."""
_HEDGES_SAVED = 8
_HEDGES_PER_S = 0.1


class Traffic:
    """Requests to one bucket. Thread-safe.

    Attributes:
        retries: Limit on retries.
    """

    def __init__(
        self, name: str, options: StorageOptions, threads: RequestThreads, count: Callable[[str, int], None]
    ) -> None:
        policy = options.retry
        self.retries = TokenBucket(share=policy.retry_share, burst=_RETRIES_SAVED, per_s=_RETRIES_PER_S)
        self.threads = threads
        self.patience = Patience(
            quantile=HEDGE_QUANTILE,
            least_s=HEDGE_LEAST_S,
            unknown_s=min(_UNKNOWN_S, policy.read_timeout_s / 4),
        )
        self._gate = Gate(NodeSlowdown(f"{options.endpoint_url or ''}|{name}"))
        self._hedges = TokenBucket(share=HEDGE_SHARE, burst=_HEDGES_SAVED, per_s=_HEDGES_PER_S)
        self._count = count

    @contextmanager
    def request(self, until_s: float) -> Iterator[None]:
        """Wait for admission of a request, then record how it ends.

        Raises:
            ThrottledError: The request was not admitted before ``until_s`` (monotonic).
        """
        share = self._gate.enter(until_s)
        try:
            yield
        except ThrottledError:
            self._count("throttled", 1)
            self._gate.refused(share)
            raise
        else:
            self._hedges.earn()
            self._gate.answered()
        finally:
            self._gate.leave()

    def begin(self, until_s: float) -> bool:
        """See :class:`~streaming.storage.requests.transfer.Hedging`."""
        if time.monotonic() >= until_s or not self._gate.try_enter():
            return False
        if not self._hedges.take():
            self._gate.leave()
            return False
        self._count("hedges", 1)
        return True

    def end(self, *, won: bool) -> None:
        """See :class:`~streaming.storage.requests.transfer.Hedging`."""
        self._gate.leave()
        if won:
            self._count("hedges_won", 1)
