"""Cost of planning at size: a billion samples in a million chunks.

Prints the time to plan, the time to seek, the time per row in blocks of batches, and the memory of it all; and what the
keys of one step cost (``shard_tools plan --who``) and the place of a key (``--when``).
NumPy on one core, no data; of the keys, sample files that are one, linked::

    python benchmarks/bench_plan.py [--chunks 1000000] [--chunk-samples 1000] [--batch 256] [--ranks 8]
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
from bench_where import CHUNK_ROWS, SHARD_ROWS, write_index

from shard_tools.look.plan.keys import keys_at, places_by_order
from streaming import StreamingDataset
from streaming.order.plan.order import OrderSettings, default_lanes, default_window
from streaming.order.plan.plan import Plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--chunk-samples", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=256, help="samples per rank")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=40, help="blocks of 64 batches to time")
    args = parser.parse_args()

    global_batch_size = args.batch * args.ranks
    # Sizes vary by a quarter around the mean, as chunks cut at a number of bytes do.
    spread = np.arange(args.chunks, dtype=np.int64) * 7919 % (args.chunk_samples // 2 + 1)
    chunk_samples = args.chunk_samples - args.chunk_samples // 4 + spread
    num_samples = int(chunk_samples.sum())
    settings = OrderSettings(
        seed=1,
        lanes=default_lanes(global_batch_size),
        window=default_window(num_samples, args.chunks),
    )
    chunk_bytes = np.full(args.chunks, 8 << 20)
    before_bytes = _peak_bytes()

    def plan(start: int = 0) -> Plan:
        return Plan(
            chunk_samples,
            settings,
            global_batch_size=global_batch_size,
            dp_world_size=args.ranks,
            start=start,
        )

    began = time.perf_counter()
    whole = plan()
    whole.order(0)
    planned_s = time.perf_counter() - began

    began = time.perf_counter()
    live = whole.live_bytes(chunk_bytes, 0)
    live_s = time.perf_counter() - began

    seeks = []
    for batch in np.linspace(0, whole.num_batches - 1, 11, dtype=np.int64).tolist():
        began = time.perf_counter()
        whole.rank_batches(batch, batch + 1, args.ranks // 2)
        seeks.append(time.perf_counter() - began)

    num_rows, began = 0, time.perf_counter()
    for first in range(1000, 1000 + 64 * args.blocks, 64):
        num_rows += len(whole.rank_batches(first, first + 64, 0).offsets)
    rows_s = time.perf_counter() - began

    grown = _peak_bytes() - before_bytes
    keys_s, keys_cpu_s, place_s, place_cpu_s = keys_of_a_step()
    print(f"samples          {num_samples:,} in {args.chunks:,} chunks")
    print(f"lanes, window    {settings.lanes}, {settings.window}; {args.ranks} ranks of {args.batch}")
    print(f"plan one epoch   {planned_s:.3f} s")
    print(f"live_bytes       {live_s:.3f} s  (rank 0: {live / 2**20:,.0f} MiB live of 8 MiB chunks)")
    print(f"seek, one batch  {np.median(seeks) * 1e3:.1f} ms median, {max(seeks) * 1e3:.1f} ms worst")
    print(f"rank_batches     {rows_s / num_rows * 1e9:.0f} ns per row in blocks of 64 batches")
    print(f"keys of a step   {keys_s:.2f} s ({keys_cpu_s:.2f} s of CPU): 512 rows of 512 shards of {SHARD_ROWS:,} keys")
    print(f"place of a key   {place_s:.2f} s ({place_cpu_s:.2f} s of CPU), by the order of the keys")
    print(f"peak memory      {grown / 2**20:.0f} MiB beyond the input: {grown / args.chunks:.0f} B per chunk")


def keys_of_a_step(num_shards: int = 512) -> list[float]:
    """Seconds, and those of CPU, to find the keys of a sample of each of so many shards; and a sample by its key."""
    draw = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        write_index(Path(folder), num_shards, linked=True)
        for shard in range(num_shards):
            (Path(folder) / f"{shard:06d}.tar").touch()  # the listing finds them; nobody looks inside
        dataset = StreamingDataset(folder)
        rows = np.arange(num_shards) * SHARD_ROWS + draw.integers(0, SHARD_ROWS, num_shards)
        times = [(time.perf_counter(), time.process_time())]
        keys_at(dataset.source, rows // CHUNK_ROWS, rows % CHUNK_ROWS)
        times.append((time.perf_counter(), time.process_time()))
        places_by_order(dataset.source, f"{SHARD_ROWS - 1:09d}")
        times.append((time.perf_counter(), time.process_time()))
        return np.diff(times, axis=0).ravel().tolist()


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
