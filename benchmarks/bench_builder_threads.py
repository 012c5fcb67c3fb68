"""Raw small records with 0, 1 and 2 builder threads: the first batch, and the rate after it.

Needs the data of ``bench_small_records.py``, or any shards: ``bench_builder_threads.py URL [ROUNDS]``.
"""

from __future__ import annotations

import sys
import time

from streaming import DataLoader, StreamingDataset


def turn(url: str, num_threads: int) -> str:
    began_s = time.perf_counter()
    with DataLoader(StreamingDataset(url, decode=None), 256, num_threads=num_threads) as loader:
        batches = iter(loader)
        next(batches)
        first_s = time.perf_counter() - began_s
        num_samples = sum(len(batch["__key__"]) for batch in batches)
        rest_s = time.perf_counter() - began_s - first_s
    return f"{num_threads} threads: first batch {first_s:.3f} s, then {num_samples / rest_s:,.0f} samples/s"


if __name__ == "__main__":
    for _ in range(int(sys.argv[2]) if len(sys.argv) > 2 else 3):
        for number in (0, 1, 2):
            print(turn(sys.argv[1], number))
