"""Cutting 256 records that lie anywhere in an arena: each where it lies, or all gathered first; by their size.

Run: ``python benchmarks/bench_cut.py``. Behind ``_GATHER_BYTES`` of ``streaming.engine.columns``.
"""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Callable

import common
import numpy as np

from streaming.engine.columns import cut_in_place, gathered_bytes
from streaming.engine.rows import FieldRange

ARENA_BYTES, PITCH_BYTES, ROWS, BATCH = 256 << 20, 8 << 10, 25_600, 256


def microseconds(cut: Callable[[int, int], object]) -> float:
    """Median time for a batch."""
    times = []
    for low in range(0, ROWS, BATCH):
        start_s = time.perf_counter()
        cut(low, low + BATCH)
        times.append(time.perf_counter() - start_s)
    return statistics.median(times) * 1e6


def main() -> None:
    arena = mmap.mmap(-1, ARENA_BYTES)
    view = memoryview(arena)
    np.frombuffer(arena, np.uint8)[:] = 1
    rng = np.random.default_rng(0)
    print(f"{common.machine()}\n{'bytes':>12}  {'in place':>9}  {'gathered':>9}  microseconds a batch")
    for low, high in ((100, 200), (400, 460), (400, 900), (500, 1500), (500, 3500), (2000, 6000)):
        sizes = rng.integers(low, high, ROWS)
        starts = rng.integers(0, ARENA_BYTES // PITCH_BYTES, ROWS) * PITCH_BYTES + 512
        where = FieldRange(starts=starts, sizes=sizes)
        in_place, gathered = cut_in_place(arena, where), gathered_bytes(view, where)
        if in_place(0, BATCH) != gathered(0, BATCH):
            raise ValueError("the two differ")
        print(f"{low:5} to {high:4}  {microseconds(in_place):9.0f}  {microseconds(gathered):9.0f}")


if __name__ == "__main__":
    main()
