"""Measure a store by ranged reads of different sizes, a different number at a time."""

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
"""An answer that costs its round trip and nothing else."""
MOST_AT_ONCE = 64
"""As many requests as a loader has under way at most."""
_STEP = 4
_ROUNDS = 3
_LEAST_GAIN = 1.15
"""A step of four times as many requests that brings less is the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe(Report):
    """Reads of one size, so many at a time.

    Attributes:
        size_bytes: Bytes of a read.
        at_once: Reads under way at any time.
        num_reads: Completed reads.
        bytes_per_s: Median of the rounds.
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
    """UnreadRanges of shards, in a random order, all different until every byte was handed out. Thread-safe."""

    def __init__(self, urls: Sequence[str], sizes: Sequence[int], seed: int = 0) -> None:
        self._urls, self._sizes = urls, sizes
        self._random = np.random.default_rng(seed)
        self._lock = threading.Lock()
        self._left = self._shuffled()
        self._place = 0

    def _shuffled(self) -> Iterator[int]:
        return iter(self._random.permutation(np.flatnonzero(self._sizes)).tolist())

    def take(self, size_bytes: int) -> tuple[str, int, int]:
        """Return a shard, and the start and end of a range of so many bytes, fewer at its end."""
        with self._lock:
            # _place is the first byte of _current that was not handed out.
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
    """Bytes that may still be read. Thread-safe through its lock."""

    left_bytes: int
    lock: threading.Lock

    def take(self, num_bytes: int) -> bool:
        """Take some, if there are as many."""
        with self.lock:
            # left_bytes is never negative: what is read was taken before.
            if num_bytes > self.left_bytes:
                return False
            self.left_bytes -= num_bytes
            return True


def measure(storage: Storage, ranges: UnreadRanges, *, chunk_bytes: int, seconds: float, max_bytes: int) -> list[Probe]:
    """Measure reads: small ones for the latency, then of chunks, more and more at a time while this brings more.

    Args:
        storage: Store of the shards; its retries count.
        ranges: What to read.
        chunk_bytes: What a loader reads at once.
        seconds: Time in all.
        max_bytes: Bytes in all. Few make the reads smaller than chunks.
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
    """Measure reads of one size, so many at a time, in three rounds; at least one read for each round and thread."""
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
    """Read one range after the other; return seconds and bytes of each. The first thread reads one in any case."""
    found: list[tuple[float, int]] = []
    buffer = memoryview(bytearray(size_bytes))
    while (not number and not found) or (time.perf_counter() < until_s and budget.take(size_bytes)):
        url, start, stop = ranges.take(size_bytes)
        began_s = time.perf_counter()
        storage.read_into(url, start, buffer[: stop - start])
        found.append((time.perf_counter() - began_s, stop - start))
    return found
