"""What a loader keeps of the training thread when there was time to prepare. Standard library only.

A step sleeps, long enough for a batch to be made, and then asks: what ``next`` takes now, no later overlap can hide. So
does what letting go of the batch before takes, which a loop does when it binds its variable anew.
"""

from __future__ import annotations

import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from processes import cpu_s

WARM_BATCHES = 6
"""Taken as fast as they come: they show how long one takes, and pools, rings and workers are there afterwards."""
UNCOUNTED_STEPS = 2
"""Steps until what was begun at full speed has come to rest."""
PAUSE_FACTOR, LEAST_PAUSE_S, MOST_PAUSE_S = 4.0, 0.05, 1.5
"""A step takes so many times what a batch takes at full speed, between these bounds."""


@dataclass(frozen=True, slots=True)
class Spent:
    """What the calling thread used."""

    wall_ms: float
    cpu_ms: float
    minor_faults: int


class Stopwatch:
    """Reads the clocks of the calling thread."""

    def __init__(self) -> None:
        self._faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        self._cpu_s, self._wall_s = time.thread_time(), time.perf_counter()

    def stop(self) -> Spent:
        """What was spent since it was made."""
        wall_s, thread_s = time.perf_counter() - self._wall_s, time.thread_time() - self._cpu_s
        return Spent(1e3 * wall_s, 1e3 * thread_s, resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - self._faults)


def memory_bytes() -> int:
    """What this process has in memory without mapped files, which are page cache."""
    with open("/proc/self/status") as file:
        found = dict(line.split(":", 1) for line in file)
    return sum(int(found[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))


def probe(
    batches: Iterator[Any], steps: int, *, pause_s: float = 0.0, read: Callable[[Any], object] | None = None
) -> dict[str, Any]:
    """Ask for ``steps`` batches, each after a pause, and say what the thread spent; Linux.

    Args:
        batches: A loader's iterator.
        steps: How many count.
        pause_s: Length of a step; 0: four times what a batch takes at full speed.
        read: Reads a batch, for the time that the first look at all of it takes: pages that nobody has touched yet cost
            the step what the loader saved.

    Raises:
        ValueError: The batches end before.
    """
    try:
        pause_s = pause_s or _pause_s(batches)
        batch = next(batches)
        asked, let_go, reads_ms, peak, begun_s = [], [], [], 0, 0.0
        for step in range(UNCOUNTED_STEPS + steps):
            if step == UNCOUNTED_STEPS:
                begun_s = cpu_s(os.getpid())
            time.sleep(pause_s)
            watch = Stopwatch()
            following = next(batches)
            took = watch.stop()
            watch = Stopwatch()
            batch = following
            freed = watch.stop()
            del following
            peak = max(peak, memory_bytes())
            if step >= UNCOUNTED_STEPS:
                asked.append(took)
                let_go.append(freed)
            if read is not None:
                watch = Stopwatch()
                read(batch)
                reads_ms.append(watch.stop().wall_ms)
    except StopIteration:
        raise ValueError(f"the batches ended: {WARM_BATCHES + UNCOUNTED_STEPS + steps + 1} are needed") from None
    return {
        "steps": steps, "pause_ms": 1e3 * pause_s, "next": summed_up(asked), "let_go": summed_up(let_go),
        "unhidden_ms": statistics.median(one.wall_ms + two.wall_ms for one, two in zip(asked, let_go, strict=True)),
        "read_ms": statistics.median(reads_ms) if reads_ms else None, "peak_bytes": peak,
        "cpu_ms": 1e3 * (cpu_s(os.getpid()) - begun_s) / steps,
    }  # fmt: skip


def _pause_s(batches: Iterator[Any]) -> float:
    """Take batches at full speed; the length of a step in which another could be made."""
    next(batches)
    taken_s = []
    for _ in range(WARM_BATCHES - 1):
        start_s = time.perf_counter()
        next(batches)
        taken_s.append(time.perf_counter() - start_s)
    return min(max(PAUSE_FACTOR * statistics.fmean(taken_s), LEAST_PAUSE_S), MOST_PAUSE_S)


def summed_up(found: list[Spent]) -> dict[str, float]:
    """Median and 95th percentile of the milliseconds, and faults of a step on average."""
    numbers: dict[str, float] = {"faults": statistics.fmean(one.minor_faults for one in found)}
    for name in ("wall_ms", "cpu_ms"):
        values = sorted(getattr(one, name) for one in found)
        numbers[name] = statistics.median(values)
        numbers[f"{name}_p95"] = values[min(len(values) - 1, int(0.95 * len(values)))]
    return numbers
