"""Does a curve bend? One rank of 1, 8 and 64 over sets of 10^3, 10^5 and 10^7 records.

The rank reads as many samples in every cell, each in a new process: rates, CPU, memory, the first batch, the state, and
the first batch after a seek. Sets are links to one shard of 1 KiB a record, so that all sizes come from the page cache,
and 10^7 records (10 GB) take 10 MB of disk. An epoch is as long for all (``epoch_size``): small sets come in passes::

    python benchmarks/bench_curves.py [--rounds 3] [--samples 300000] [--batch 64] [--most 10000000]

A curve bends where, from one size or world to the next, a cost of each sample (and the state) grows faster than the
0.1th power, 1.26 times for ten times as much, or a cost of the start grows faster than in proportion.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterable
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import common
import numpy as np

from infra import DeviceMesh
from streaming import DataLoader, StreamingDataset
from streaming.shards.index.chunk_table import ChunkTable, ShardInfo

SIZES, WORLDS = (10**3, 10**5, 10**7), (1, 8, 64)
SHARD_SAMPLES, RECORD_BYTES = 10_000, 100
WARM_UP = 20_000
SMALL = {"peak MiB": 8.0, "first s": 0.05, "first CPU s": 0.05, "seek CPU s": 0.05}
"""Below these, what differs is noise."""
EACH = {"CPU us": "CPU µs a sample", "state B": "bytes of state"}
ONCE = {"peak MiB": "MiB of PSS at most, beyond imports", "first CPU s": "CPU s to the first batch",
        "seek CPU s": "CPU s to the first batch of a resumed loader"}  # fmt: skip
MOST = {**dict.fromkeys(EACH, 0.1), **dict.fromkeys(ONCE, 1.0)}


def make(folder: str) -> None:
    """Write one shard for the smallest set, and one to which all shards of larger sets are links."""
    for name, samples in (("small", SIZES[0]), ("shard", SHARD_SAMPLES)):
        records = ({"__key__": f"{one:06d}", "bin": one.to_bytes(4, "little") * (RECORD_BYTES // 4)}
                   for one in range(samples))  # fmt: skip
        common.write_shards(os.path.join(folder, name), records, per_shard=samples)


def set_of(folder: str, size: int) -> str:
    """The folder of the set of this size, made of links if it is not there yet."""
    if size == SIZES[0]:
        return os.path.join(folder, "small")
    return common.made_once(folder, f"{size}", lambda target: link(Path(folder, "shard"), Path(target), size))


def link(shard: Path, target: Path, size: int) -> None:
    one = ChunkTable.from_parquet((shard / "_shardstream/chunks.parquet").read_bytes(), str(shard))
    copies = size // SHARD_SAMPLES
    shards = [ShardInfo(name=f"{copy:06d}.tar", size_bytes=one.shards[0].size_bytes, num_samples=SHARD_SAMPLES)
              for copy in range(copies)]  # fmt: skip
    for copy in shards:
        os.link(shard / one.shards[0].name, target / copy.name)
    columns = {name: np.tile(getattr(one, name), copies)
               for name in ("first_sample", "num_samples", "byte_start", "byte_end", "crc32c")}  # fmt: skip
    place = np.repeat(np.arange(copies), one.num_chunks)
    (target / "_shardstream").mkdir()
    table = ChunkTable(shards=tuple(shards), shard=place, **columns)
    (target / "_shardstream/chunks.parquet").write_bytes(table.to_parquet())


def pss_bytes() -> int:
    """Memory of this process, each page divided by the number of its users."""
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))


def cell(folder: str, world: int, samples: int, batch: int, done: Connection) -> None:
    """Measure one rank of ``world`` in this process, and send what was found."""
    found: dict[str, float] = {}
    before = pss_bytes()
    mesh = DeviceMesh.from_sizes(dp_size=world, rank=world // 2, world_size=world)
    warm, timed = WARM_UP // batch, samples // batch
    epoch = (warm + timed + 2 * WARM_UP // batch) * batch * world

    def opened() -> DataLoader:
        return DataLoader(StreamingDataset(folder), batch, device_mesh=mesh, epoch_size=epoch)

    wall, cpu = time.perf_counter(), time.process_time()
    loader = opened()
    batches = iter(loader)
    next(batches)
    found["first s"], found["first CPU s"] = time.perf_counter() - wall, time.process_time() - cpu
    peak = pss_bytes()
    for _ in range(warm):
        next(batches)
    fetched = loader.metrics()["fetched_bytes"]
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(timed):
        next(batches)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    found["wall us"], found["CPU us"] = wall / timed / batch * 1e6, cpu / timed / batch * 1e6
    metrics = loader.metrics()
    found["read B"] = (metrics["fetched_bytes"] - fetched) / timed / batch
    found["plan us"] = metrics["plan_s"] / (warm + timed) / batch * 1e6
    found["chunks MiB"] = metrics["arena_peak_bytes"] / 2**20
    found["peak MiB"] = (max(peak, pss_bytes()) - before) / 2**20
    state = loader.state_dict()
    found["state B"] = len(json.dumps(state))
    del batches
    loader.close()
    wall, cpu = time.perf_counter(), time.process_time()
    with opened() as loader:
        loader.load_state_dict(state)
        next(iter(loader))
        found["seek s"], found["seek CPU s"] = time.perf_counter() - wall, time.process_time() - cpu
    done.send(found)


def measured(folder: str, world: int, samples: int, batch: int) -> dict[str, float]:
    context = multiprocessing.get_context("fork")  # of a process that has only imported, and has no threads
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=cell, args=(folder, world, samples, batch, theirs))
    process.start()
    theirs.close()
    try:
        found: dict[str, float] = ours.recv()
    except EOFError:
        raise SystemExit(f"one of {world} ranks over {folder} has failed") from None
    process.join()
    return found


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def bends(found: dict[tuple[int, int], dict[str, float]]) -> Iterable[str]:
    """Say where a measure grows faster than it may, along either axis."""
    sizes, worlds = sorted({size for size, _ in found}), sorted({world for _, world in found})
    steps = [((low, world), (high, world), high / low) for world in worlds for low, high in pairwise(sizes)]
    steps += [((size, low), (size, high), high / low) for size in sizes for low, high in pairwise(worlds)]
    for name, most in MOST.items():
        for low, high, times in steps:
            before, after = (max(found[one][name], SMALL.get(name, 1e-9)) for one in (low, high))
            power = math.log(after / before) / math.log(times)
            if power > most:
                yield (f"{name}: {before:.4g} at {low[0]:,} samples and {low[1]} ranks, {after:.4g} at {high[0]:,} and "
                       f"{high[1]}: power {power:.2f}, over {most}")  # fmt: skip


def bars(name: str, found: dict[tuple[int, int], dict[str, Any]]) -> None:
    most = max(one[name] for one in found.values())
    print(f"\n{({**EACH, **ONCE})[name]}")
    for (size, world), one in found.items():
        print(f"  10^{math.log10(size):.0f} {world:3} ranks {'#' * round(50 * one[name] / most):50} {one[name]:,.3g}")


def main() -> None:
    args = common.arguments(__doc__ or "", samples=300_000, batch=64, most=SIZES[-1])
    folder = common.made_once(args.data, "curves", make)
    print(common.machine())
    sizes = [size for size in SIZES if size <= args.most]
    folders = {size: set_of(folder, size) for size in sizes}
    cells = [(size, world) for size in sizes for world in WORLDS]
    rounds: dict[tuple[int, int], list[dict[str, float]]] = {one: [] for one in cells}
    for _ in range(args.rounds):
        for size, world in cells:
            rounds[size, world].append(measured(folders[size], world, args.samples, args.batch))
    found = {one: medians(each) for one, each in rounds.items()}
    print(f"\n{args.samples:,} samples a rank in batches of {args.batch}; medians of {args.rounds}\n")
    print(f"{'samples':>10} {'ranks':>5} {'samples/s':>10} " + " ".join(f"{name:>11}" for name in found[cells[0]]))
    for (size, world), one in found.items():
        cols = " ".join(f"{value:11,.{3 if value < 10 else 0}f}" for value in one.values())
        print(f"{size:10,} {world:5} {1e6 / one['wall us']:10,.0f} {cols}")
    for name in ("CPU us", "peak MiB", "first CPU s", "seek CPU s"):
        bars(name, found)
    print("\n" + ("\n".join(bends(found)) or "no curve bends"))


if __name__ == "__main__":
    main()
