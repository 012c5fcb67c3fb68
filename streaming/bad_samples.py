"""The account of samples that could not be delivered, and the limit on them."""

from __future__ import annotations

import math
import threading
from dataclasses import asdict
from typing import Any

from streaming.engine.build import BadSample
from streaming.errors import TooManyBadSamplesError
from streaming.metrics import Metrics

_LISTED = 5


class BadSamples:
    """This epoch's bad samples on this rank, each counted once. Thread-safe."""

    def __init__(self, limit: float, metrics: Metrics) -> None:
        self._limit = limit
        self._metrics = metrics
        self._lock = threading.Lock()
        self._allowed = 0
        self._seen: dict[tuple[str, str, int], BadSample] = {}

    def start_epoch(self, num_samples: int) -> None:
        """Begin anew, with an epoch of so many samples; a share of them is rounded up."""
        with self._lock:
            self._seen.clear()
            self._allowed = self._limit if isinstance(self._limit, int) else math.ceil(self._limit * num_samples)

    def report(self, bad: BadSample) -> None:
        """Take note of one sample.

        Raises:
            TooManyBadSamplesError: It was one too many.
        """
        if bad.dropped:
            self._metrics.add("dropped_samples")
            return
        with self._lock:
            name = (bad.url, bad.key, bad.number)
            if name in self._seen:
                return
            self._seen[name] = bad
            self._metrics.add("bad_samples")
            if len(self._seen) <= self._allowed:
                return
            recent = list(self._seen.values())[-_LISTED:]
            listing = "\n".join(f"  {one.url} {one.key or one.number!r} ({one.stage}): {one.reason}" for one in recent)
            raise TooManyBadSamplesError(
                f"{len(self._seen)} bad samples in this epoch on this rank, max_bad_samples={self._limit} allows "
                f"{self._allowed}. The last ones:\n{listing}\n"
                f"Check the shards with `shard_tools verify`, or raise max_bad_samples"
            )

    def listing(self) -> list[dict[str, Any]]:
        """All of them, as plain dicts."""
        with self._lock:
            return [asdict(bad) for bad in self._seen.values()]
