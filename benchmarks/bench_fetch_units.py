"""Fetch units smaller than a chunk, ``Mixture(quotas="exact", fetch_bytes=…)``, against whole chunks; from S3.

Run: ``python benchmarks/bench_fetch_units.py [--data FOLDER] [--sources 200] [--batches 200] [--megabytes 32]``. Two
tables:

1. One pass over a source, in 8 lanes: requests, and bytes read for each byte that the pass delivers.
2. Many sources with Zipf's weights (1, 1/2, 1/3, …), in 8 lanes, batches of 64: the memory that chunks need, as the
   check at the start has it; where that is at most 2 GiB, also what a run took, in requests and bytes for a batch, the
   most that its chunks took, seconds of this process's CPU for 1,000 samples, and for making the mixture.

All sources read the same shards, each on its own. The S3 server is a process of its own.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import common

from streaming import DataLoader, Mixture, ShuffleConfig, StreamingDataset
from streaming.errors import MemoryLimitError

BATCH_SIZE, LANES = 64, ShuffleConfig(lanes=8)
UNITS = (None, "1MiB", "256KiB", "64KiB")
TOTALS = (None, "200MiB", "50MiB", "20MiB")
MOST_BYTES = 2 << 30
_FACTORS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def samples(size: int, megabytes: int) -> Iterator[dict[str, object]]:
    for number in range(megabytes * 10**6 // size):
        yield {"__key__": f"{number:07d}", "bin": os.urandom(size)}


def make(size: int, megabytes: int, target: str) -> None:
    common.write_shards(target, samples(size, megabytes), per_shard=10**6)


def live_bytes(mixture: Mixture) -> int:
    """The memory of chunks that the message names which refuses a mixture."""
    with DataLoader(mixture, BATCH_SIZE, memory_limit="1MiB", num_workers=0) as loader:
        try:
            next(iter(loader))
        except MemoryLimitError as error:
            found = re.search(r"needs up to ([\d.]+) ([KMG]iB) of chunks", str(error))
            if found is None:
                raise
            return int(float(found[1]) * _FACTORS[found[2]])
    return 0


def one_pass(url: str, options: Any, size: int) -> None:
    for unit in UNITS:
        dataset = StreamingDataset(url, decode="raw", storage_options=options)
        fetch_bytes = None if unit is None else {"one": unit}
        mixture = Mixture({"one": dataset}, quotas="exact", shuffle=LANES, fetch_bytes=fetch_bytes)
        delivered = int(dataset.source.chunk_bytes.sum())
        need = live_bytes(mixture)
        limit = max(2 * need, 8 << 20)
        with DataLoader(mixture, BATCH_SIZE, last_batch="pad", memory_limit=limit, num_workers=0) as loader:
            count = sum(len(batch["__key__"]) for batch in loader)
            told = loader.metrics()
        assert count >= len(dataset)
        print(
            f"{size:>7,} {unit or 'whole chunks':>13} {len(mixture.source.chunk_samples):>7,} "
            f"{told['fetched_chunks']:>9,.0f} "
            f"{told['fetched_bytes'] / delivered:>10.3f} {need / 2**20:>9.1f}"
        )


def many(url: str, options: Any, num_sources: int, num_batches: int) -> None:
    names = [f"{number:03d}" for number in range(num_sources)]
    weights = {name: 1 / (number + 1) for number, name in enumerate(names)}
    for total in TOTALS:
        sources = {name: StreamingDataset(url, decode="raw", storage_options=options) for name in names}
        began_s = time.process_time()
        mixture = Mixture(sources, weights=weights, quotas="exact", shuffle=LANES, fetch_bytes=total)
        made_s = time.process_time() - began_s
        need = live_bytes(mixture)
        print(f"{total or 'whole chunks':>13} {made_s:>8.2f} {need / 2**20:>11,.0f}", end=" ", flush=True)
        if need > MOST_BYTES:
            print("-")
            continue
        with DataLoader(mixture, BATCH_SIZE, memory_limit=int(need * 1.6), num_workers=0) as loader:
            began_s = time.process_time()
            for number, _ in enumerate(loader, 1):
                if number == num_batches:
                    break
            took_s = time.process_time() - began_s
            told = loader.metrics()
        print(
            f"{told['arena_peak_bytes'] / 2**20:>10,.0f} {told['fetched_chunks']:>9,.0f} "
            f"{told['fetched_bytes'] / 2**20:>9,.0f} {1000 * took_s / num_batches / BATCH_SIZE:>9.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", default=os.path.join(tempfile.gettempdir(), "shardstream-bench"))
    parser.add_argument("--sources", type=int, default=200)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--megabytes", type=int, default=32)
    args = parser.parse_args()
    print(common.machine())
    print(f"\none pass, {args.megabytes} MB\n sample          units  number  requests  read/byte  live MiB")
    for size in (1_000, 16_000, 100_000):
        folder = common.made_once(args.data, f"units-{size}-{args.megabytes}", partial(make, size, args.megabytes))
        with common.s3_copy(folder) as (url, options):
            one_pass(url, options, size)
            if size == 16_000:
                print(f"\n{args.sources} sources, {args.batches} batches of {BATCH_SIZE}")
                print("  fetch_bytes   made s    need MiB   peak MiB  requests  read MiB  CPU s/1k")
                many(url, options, args.sources, args.batches)
                print()


if __name__ == "__main__":
    main()
