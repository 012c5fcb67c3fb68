"""Measure a store by ranged reads of different sizes, at different concurrency."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np

from shard_tools.running.report import Report
from streaming.common.threads import on_threads
from streaming.storage import Storage

SMALL_BYTES = 16 << 10
"""Size of a read so small that it costs only its round trip."""
MOST_AT_ONCE = 64
"""Most requests that a loader has in flight."""
_STEP = 4
_ROUNDS = 3
_LEAST_GAIN = 1.15
"""Gain below which the sweep stops, per step of four times as many requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe(Report):
    """Measurements of reads of one size at one concurrency.

    Attributes:
        size_bytes: Bytes per read.
        at_once: Number of reads in flight.
        num_reads: Completed reads.
        bytes_per_s: Median over the rounds.
        spread: Difference between the fastest and the slowest round, as a share of the median.
        read_s: Median duration of a read.
        retries: Requests repeated after failures.
    """

    size_bytes: int
    at_once: int
    num_reads: int
    bytes_per_s: float
    spread: float
    read_s: float
    retries: int


class UnreadRanges:
    """Draw ranges of shards in random order, without repetition until every byte was used. Thread-safe."""

    def __init__(self, urls: Sequence[str], sizes: Sequence[int], seed: int = 0) -> None:
        self._urls, self._sizes = urls, sizes
        self._random = np.random.default_rng(seed)
        self._lock = threading.Lock()  # guards _random, _left, _current, _place
        self._left = self._shuffled()
        self._place = 0

    def _shuffled(self) -> Iterator[int]:
        return iter(self._random.permutation(np.flatnonzero(self._sizes)).tolist())

    def take(self, size_bytes: int) -> tuple[str, int, int]:
        """Return a shard with the start and end of a range of ``size_bytes``; the range is shorter at a shard's end."""
        with self._lock:
            # _place is the first unused byte of _current.
            if self._place == 0:
                found = next(self._left, None)
                if found is None:
                    self._left = self._shuffled()
                    found = next(self._left)
                self._current = found
            start, size = self._place, self._sizes[self._current]
            stop = min(size, start + size_bytes)
            self._place = 0 if stop == size else stop
            return self._urls[self._current], start, stop


@dataclass(slots=True)
class ByteBudget:
    """Count the bytes that may still be read. Thread-safe through its lock."""

    left_bytes: int
    lock: threading.Lock

    def take(self, num_bytes: int) -> bool:
        """Take ``num_bytes`` from the budget and return True, or return False if it has fewer left."""
        with self.lock:
            # left_bytes is never negative: bytes are taken before they are read.
            if num_bytes > self.left_bytes:
                return False
            self.left_bytes -= num_bytes
            return True


def measure(storage: Storage, ranges: UnreadRanges, *, chunk_bytes: int, seconds: float, max_bytes: int) -> list[Probe]:
    """Measure reads: small ones for the latency, then chunks at growing concurrency while the rate rises.

    Args:
        storage: Store of the shards; its retries are counted.
        ranges: Ranges to read.
        chunk_bytes: Bytes that a loader reads per request.
        seconds: Total time.
        max_bytes: Total bytes. A small budget makes the reads smaller than chunks.
    """
    steps = [1, *(at_once for at_once in (4, 16, 64) if at_once <= MOST_AT_ONCE)]
    share_s, share_bytes = seconds / (len(steps) + 3), max_bytes // (len(steps) + 3)
    size = min(chunk_bytes, max(SMALL_BYTES, share_bytes // (2 * MOST_AT_ONCE)))
    probes = [probe(storage, ranges, SMALL_BYTES, 1, share_s, share_bytes)]
    best: Probe | None = None
    for at_once in steps:
        found = probe(storage, ranges, size, at_once, share_s, share_bytes)
        probes.append(found)
        is_better = best is None or found.bytes_per_s > _LEAST_GAIN * best.bytes_per_s
        best = found if best is None or found.bytes_per_s > best.bytes_per_s else best
        if not is_better:
            break
    if best is not None:
        probes.append(probe(storage, ranges, SMALL_BYTES, best.at_once, share_s, share_bytes))
        probes.append(probe(storage, ranges, _STEP * size, best.at_once, share_s, share_bytes))
    return probes


def probe(
    storage: Storage, ranges: UnreadRanges, size_bytes: int, at_once: int, seconds: float, max_bytes: int
) -> Probe:
    """Measure reads of one size at one concurrency, in three rounds, with at least one read per round and thread."""
    times: list[float] = []
    rates: list[float] = []
    sizes: list[int] = []
    before = storage.metrics.get("retries")
    for _ in range(_ROUNDS):
        budget = ByteBudget(max_bytes // _ROUNDS, threading.Lock())
        began_s = time.perf_counter()
        until_s = began_s + seconds / _ROUNDS
        reads = partial(_reads, storage, ranges, size_bytes, until_s, budget)
        found = [entry for one in on_threads(reads, range(at_once), at_once, name="bench") for entry in one]
        seconds_taken = time.perf_counter() - began_s
        times += [taken_s for taken_s, _ in found]
        sizes += [num_bytes for _, num_bytes in found]
        rates.append(sum(num_bytes for _, num_bytes in found) / max(seconds_taken, 1e-9))
    return Probe(
        size_bytes=int(median(sizes)),
        at_once=at_once,
        num_reads=len(times),
        bytes_per_s=median(rates),
        spread=(max(rates) - min(rates)) / max(median(rates), 1e-9),
        read_s=median(times),
        retries=int(storage.metrics.get("retries") - before),
    )


def _reads(
    storage: Storage, ranges: UnreadRanges, size_bytes: int, until_s: float, budget: ByteBudget, number: int
) -> list[tuple[float, int]]:
    """Read ranges in turn; return seconds and bytes of each. The first thread reads at least one."""
    found: list[tuple[float, int]] = []
    buffer = memoryview(bytearray(size_bytes))
    while (not number and not found) or (time.perf_counter() < until_s and budget.take(size_bytes)):
        url, start, stop = ranges.take(size_bytes)
        began_s = time.perf_counter()
        storage.read_into(url, start, buffer[: stop - start])
        found.append((time.perf_counter() - began_s, stop - start))
    return found
