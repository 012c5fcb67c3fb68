"""A cluster in one process: who reads what when thousands of data ranks share a billion samples.

For several world sizes: time to plan all ranks, balance, bytes, requests, live memory, and what the store has to serve
before the first batch. No data, no network, one core::

    python benchmarks/bench_scale.py [--chunks 1000000] [--chunk-samples 1000] [--batch 256] [--ranks 8 512 3000 4096]
"""

from __future__ import annotations

import argparse
import resource
import time

import numpy as np

from infra import DeviceMesh
from shard_tools.look.plan.report import PlanOptions, plan_table
from streaming.shards.index.chunk_table import ChunkTable, ShardInfo

CHUNK_BYTES = 8 << 20
CHUNKS_PER_SHARD = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--chunk-samples", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=256, help="samples per data rank")
    parser.add_argument("--lanes", type=int, help="default: the loader's for each global batch size")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 512, 3000, 4096])
    args = parser.parse_args()

    table = made_up(args.chunks, args.chunk_samples)
    print(f"{table.total_samples:,} samples, {table.num_chunks:,} chunks, {table.total_bytes / 2**40:.2f} TiB")
    index_bytes = len(table.to_parquet())
    print(f"index: {index_bytes / 2**20:.1f} MiB, read once by each process that opens the set")
    columns = "ranks   lanes    plan_s  read    requests/rank (min mean max)  GiB/rank (mean max)  live MiB  "
    print(f"{columns}first batch waits for")
    for ranks in args.ranks:
        mesh = DeviceMesh.from_sizes(dp_size=ranks, rank=0, world_size=ranks)
        options = PlanOptions(mesh=mesh, global_batch_size=args.batch * ranks, lanes=args.lanes)
        began = time.perf_counter()
        found = plan_table(table, options=options)
        took_s = time.perf_counter() - began
        requests, read, live = (found.spread(name) for name in ("num_requests", "read_bytes", "live_bytes"))
        print(
            f"{ranks:<7} {found.lanes:<8} {took_s:<7.2f} {found.amplification:.3f}x  "
            f"{requests.least:,.0f} {requests.mean:,.1f} {requests.most:,.0f}".ljust(63)
            + f"{read.mean / 2**30:,.2f} {read.most / 2**30:,.2f}".ljust(21)
            + f"{live.most / 2**20:,.0f}".ljust(10)
            + f"{found.total('start_requests'):,} requests, {found.total('start_bytes') / 2**30:,.0f} GiB in all"
        )
    print(f"peak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:,.0f} MiB")


def made_up(num_chunks: int, chunk_samples: int) -> ChunkTable:
    """Chunks whose sizes vary by a quarter around the mean, as chunks cut at a number of bytes do."""
    num_samples = chunk_samples - chunk_samples // 4 + np.arange(num_chunks) * 7919 % (chunk_samples // 2 + 1)
    sizes = CHUNK_BYTES * num_samples // chunk_samples
    shard = np.arange(num_chunks) // CHUNKS_PER_SHARD
    edges = np.arange(0, num_chunks, CHUNKS_PER_SHARD)
    shard_samples, shard_bytes = np.add.reduceat(num_samples, edges), np.add.reduceat(sizes, edges)
    before_samples, before_bytes = np.cumsum(shard_samples) - shard_samples, np.cumsum(shard_bytes) - shard_bytes
    byte_end = np.cumsum(sizes) - before_bytes[shard]
    return ChunkTable(
        shards=tuple(
            ShardInfo(name=f"{i:06d}.tar", size_bytes=int(size) + 1024, num_samples=int(num))
            for i, (size, num) in enumerate(zip(shard_bytes, shard_samples, strict=True))
        ),
        shard=shard,
        first_sample=np.cumsum(num_samples) - num_samples - before_samples[shard],
        num_samples=num_samples,
        byte_start=byte_end - sizes,
        byte_end=byte_end,
        crc32c=np.zeros(num_chunks),
    )


if __name__ == "__main__":
    main()
