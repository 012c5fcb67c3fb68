"""The largest worlds, by arithmetic: what one of 4,096 ranks pays to open, seek, plan and save 10^10 samples.

Two layouts of the same samples, as an index without data: one set of 100,000 shards, and a mixture of 1,000 sources of
100 shards each. Every step runs in a new process, as in a rank that starts::

    python benchmarks/bench_worlds.py [--shards 100000] [--sources 1000] [--samples 10000000000] [--ranks 4096]
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import numpy as np

from infra import DeviceMesh
from shard_tools.look.plan.report import PlanOptions, plan_opened
from streaming import DataLoader, Mixture, StreamingDataset
from streaming.order.plan.plan import Plan
from streaming.shards.index.chunk_table import ChunkTable, ShardInfo

CHUNK_SAMPLES, SAMPLE_BYTES = 10_000, 1 << 10
BATCH = 256
STEPS = 64  # of a block, as the loop plans them


def table_of(num_shards: int, num_chunks: int, crc: int) -> ChunkTable:
    """A chunk table of shards with as many chunks each; some samples are left out of every chunk, by turns."""
    counts = CHUNK_SAMPLES - np.arange(num_chunks) * 7919 % 16
    each = num_chunks // num_shards
    shard, sizes = np.arange(num_chunks) // each, counts * SAMPLE_BYTES
    edges = np.arange(0, num_chunks, each)
    of_shard, bytes_of = np.add.reduceat(counts, edges), np.add.reduceat(sizes, edges)
    ends = np.cumsum(sizes) - (np.cumsum(bytes_of) - bytes_of)[shard]
    return ChunkTable(
        shards=tuple(
            ShardInfo(name=f"{one:06d}.tar", size_bytes=int(size) + 1024, num_samples=int(num))
            for one, (size, num) in enumerate(zip(bytes_of, of_shard, strict=True))
        ),
        shard=shard, first_sample=np.cumsum(counts) - counts - (np.cumsum(of_shard) - of_shard)[shard],
        num_samples=counts, byte_start=ends - sizes, byte_end=ends, crc32c=np.arange(num_chunks) + crc,
    )  # fmt: skip


def make(folder: str, shards: int, sources: int, chunks: int) -> None:
    """Write the indexes, and shards that are holes, for the listing."""

    def write(where: Path, num_shards: int, num_chunks: int, crc: int) -> None:
        (where / "_shardstream").mkdir(parents=True)
        table = table_of(num_shards, num_chunks, crc)
        (where / "_shardstream/chunks.parquet").write_bytes(table.to_parquet())
        for shard in table.shards:
            with open(where / shard.name, "wb") as file:
                file.truncate(shard.size_bytes)

    write(Path(folder, "one"), shards, chunks, 0)
    for source in range(sources):
        write(Path(folder, "many", f"{source:04d}"), shards // sources, chunks // sources, source * chunks)


def opened(folder: str, layout: str) -> Any:
    if layout == "one":
        return StreamingDataset(os.path.join(folder, "one"))
    names = sorted(os.listdir(os.path.join(folder, "many")))
    sources = {name: StreamingDataset(os.path.join(folder, "many", name)) for name in names}
    return Mixture(sources, weights={name: 1.0 + place % 7 for place, name in enumerate(names)})


def rank_of(folder: str, layout: str, ranks: int) -> None:
    """Do once what a rank does at its start, and print what each step took."""
    marks: list[tuple[str, float, float, str]] = []

    def step(what: str, work: Callable[[], Any], told: Callable[[Any], str] = lambda _: "") -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        found = work()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        marks.append((what, wall, cpu, told(found)))
        return found

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    dataset = step("open", lambda: opened(folder, layout))
    mesh = DeviceMesh.from_sizes(dp_size=ranks, rank=ranks // 2, world_size=ranks)
    loader = step("loader", lambda: DataLoader(dataset, BATCH, device_mesh=mesh))
    state = step("state at its beginning", loader.state_dict, lambda found: f"{len(json.dumps(found)):,} bytes of JSON")
    size = BATCH * ranks
    epoch, batches = divmod(1_000_000, len(loader)) if layout == "one" else (0, 1_000_000)
    moved = {**state, "epoch": epoch, "samples_seen": batches * size}
    step("load a state of step 1,000,000", lambda: loader.load_state_dict(moved))
    options = PlanOptions(mesh=mesh, global_batch_size=size)
    planned = options.ordered(dataset.source)
    order = planned.order_settings(size)

    def plan_at(start: int) -> Plan:
        if layout == "one":
            return Plan(planned.chunk_samples, order, global_batch_size=size, dp_world_size=ranks, start=start)
        orders = planned.orders(order, planned.begun(size, order))
        shape = options.shape
        return next(iter(Plan.of_epoch(shape, planned.chunk_samples, order, epoch=0, orders=orders, start=start)))

    def block(plan: Plan, first: int) -> int:
        return len(plan.rank_batches(first, first + STEPS, ranks // 2).offsets)

    plan = step("plan, and its first 64 steps", lambda: (one := plan_at(0), block(one, 0))[0])
    first = min(1000, plan.num_batches - 2 * STEPS)
    step("64 steps more", lambda: block(plan, STEPS))
    step(f"seek to step {first:,}, and 64 steps", lambda: block(plan, first))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for what, wall, cpu, more in marks:
        print(f"{layout:5} {what:34} {wall:8.3f} s {cpu:8.3f} s CPU  {more}")
    print(f"{layout:5} peak memory beyond imports         {(peak - before) / 1024:,.0f} MiB", flush=True)


def cluster_of(folder: str, layout: str, ranks: int) -> None:
    """Print what the store has to serve, of all ranks together."""
    dataset = opened(folder, layout)
    mesh = DeviceMesh.from_sizes(dp_size=ranks, rank=0, world_size=ranks)
    found = plan_opened(dataset.source, options=PlanOptions(mesh=mesh, global_batch_size=BATCH * ranks))
    live, requests = found.spread("live_bytes"), found.total("num_requests")
    print(
        f"{layout:5} {ranks:,} ranks: {found.amplification:.3f} bytes read per byte, "
        f"{found.total('start_requests'):,} requests and {found.total('start_bytes') / 2**30:,.0f} GiB before the "
        f"first batches, {requests / max(1, found.num_batches):,.0f} requests a step, "
        f"at most {live.most / 2**20:,.0f} MiB of chunks in a rank"
    )
    for warning in found.warnings:
        print(f"{layout:5} warning: {warning}")


def main() -> None:
    args = common.arguments(__doc__ or "", shards=100_000, sources=1000, samples=10**10, ranks=4096)
    chunks = args.samples // CHUNK_SAMPLES
    name = f"worlds-{args.shards}-{args.sources}-{chunks}"
    folder = common.made_once(args.data, name, lambda target: make(target, args.shards, args.sources, chunks))
    print(common.machine())
    index = {one: sum(path.stat().st_size for path in Path(folder, one).rglob("*.parquet")) for one in ("one", "many")}
    for layout in ("one", "many"):
        print(f"{layout:5} index {index[layout] / 2**20:,.1f} MiB")
        for work in (rank_of, cluster_of):
            process = multiprocessing.get_context("spawn").Process(target=work, args=(folder, layout, args.ranks))
            process.start()
            process.join()
            if process.exitcode:
                raise SystemExit(f"{work.__name__} of {layout!r} ended with {process.exitcode}")


if __name__ == "__main__":
    main()
