"""Cutting 256 records that lie anywhere in an arena: each where it lies, or all gathered first; by their size.

Then 64 images of 68 KB, where the C library gives freed memory back to the system, and where it keeps it.

Run: ``python benchmarks/bench_cut.py``. Behind ``_GATHER_BYTES`` of ``streaming.build.batches.columns`` and
``streaming.run.engine.memory.arena``.
"""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Callable

import common
import numpy as np

from streaming.build.batches.columns import cut_in_place, gathered_bytes
from streaming.build.batches.rows import FieldRange
from streaming.run.engine.memory.arena import keep_freed_memory

ARENA_BYTES, PITCH_BYTES, ROWS, BATCH = 256 << 20, 8 << 10, 25_600, 256
IMAGES, IMAGE_BATCH, IMAGE_BYTES = 3_840, 64, 68_000


def microseconds(cut: Callable[[int, int], object], rows: int = ROWS, batch: int = BATCH) -> float:
    """Median time for a batch; the one before is freed meanwhile, as in a loop."""
    times = []
    values = None
    for low in range(0, rows, batch):
        start_s = time.perf_counter()
        values = cut(low, low + batch)
        times.append(time.perf_counter() - start_s)
    del values
    return statistics.median(times) * 1e6


def main() -> None:
    arena = mmap.mmap(-1, ARENA_BYTES)
    np.frombuffer(arena, np.uint8)[:] = 1
    images = FieldRange(starts=np.arange(IMAGES, dtype=np.int64) * IMAGE_BYTES, sizes=np.full(IMAGES, IMAGE_BYTES))
    given_back = microseconds(cut_in_place(arena, images), IMAGES, IMAGE_BATCH)
    view = memoryview(arena)
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
    keep_freed_memory()
    kept = microseconds(cut_in_place(arena, images), IMAGES, IMAGE_BATCH)
    kilobytes = IMAGE_BATCH * IMAGE_BYTES / 1e3
    rates = f"{kilobytes / given_back:.1f} GB/s, with freed memory kept {kilobytes / kept:.1f}"
    print(f"images of {IMAGE_BYTES} bytes: {rates}")


if __name__ == "__main__":
    main()
