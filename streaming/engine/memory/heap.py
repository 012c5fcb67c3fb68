"""What the C library does with memory that batches were in."""

from __future__ import annotations

from functools import cache

import numpy as np

_HIGHEST_BYTES = (32 << 20) - (64 << 10)
"""glibc follows the sizes of freed blocks up to 32 MiB, its own header included."""


@cache
def keep_freed_memory() -> None:
    """Let glibc keep up to 64 MB of freed memory for the next batch, in place of giving it back after each.

    At first it does so with what is larger than 128 KiB, and gets every batch's memory from the system again: page by
    page, cleared (bytes of 68 KB: 3 GB/s against 9, benchmarks/bench_cut.py). The bound follows the largest
    block that was ever freed, so that one of 32 MB, which nobody touches, raises it for good; in any program that frees
    a tensor of that size it is there already.
    """
    np.empty(_HIGHEST_BYTES, np.uint8)
