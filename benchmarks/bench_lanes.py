"""Many lanes, many and small sources: what an endless mixture costs at its start, and how far its shares stray.

Run: ``python benchmarks/bench_lanes.py [--lanes 1024] [--seeds 12] [--classes 1000] [--data FOLDER]``. Two parts read
chunks of four samples from disk, in this process, with ``quotas="chunks"``. The first takes three sources of 1,250
samples together in global batches of one sample a lane, and prints the seconds of CPU that opening with the first five
batches, ``set_weights`` and ``seen()`` take, with 128 lanes, 256, 512 and so on up to ``--lanes``. The second counts by
arithmetic, the samples drawn from one of two sources of 512 samples at nine rows under each seed, against its share.

With ``--classes`` only this is measured: the seconds of CPU that ``Balanced`` over as many classes of three samples
takes to be made, to its first batch of 64, and per thousand rows planned (32,768 of them, one rank); and the same of a
mixture of as many sources of 64 chunks of a hundred samples, which exist as a plan only. Twice, since the first one of
a process also loads code.
"""

from __future__ import annotations

import math
import os
import resource
import time
from typing import Any

import common
import numpy as np

from shard_tools import ShardWriter
from streaming import Balanced, DataLoader, Mixture, ShuffleConfig, StreamingDataset
from streaming.order.mixing.forecast import drawn_before
from streaming.order.mixing.lanes import MixedLanes
from streaming.order.mixing.passes import Sources, Weights
from streaming.order.plan.order import OrderSettings
from streaming.order.plan.plan import Plan

SOURCES = {"web": 800, "code": 300, "math": 150}
EQUAL = {"left": 512, "right": 512}


def make(folder: str) -> None:
    for name, count in (SOURCES | EQUAL).items():
        pattern = os.path.join(folder, name, "{:06d}.tar")
        with ShardWriter(pattern, max_samples=4) as writer:  # a chunk lies in one shard
            for number in range(count):
                writer.write({"__key__": f"{number:06d}", "cls": number})


def mixture(folder: str, lanes: int, weights: dict[str, float], seed: int = 0) -> Mixture:
    sources = {name: StreamingDataset(os.path.join(folder, name)) for name in weights}
    return Mixture(sources, weights=weights, seed=seed, shuffle=ShuffleConfig(lanes=lanes))


def starts(folder: str, lanes: int) -> list[float]:
    """Seconds of CPU of five batches, of ``set_weights`` and of ``seen()``."""
    times = [time.process_time()]
    with DataLoader(mixture(folder, lanes, dict.fromkeys(SOURCES, 1.0)), lanes, num_threads=0) as loader:
        for _ in zip(range(5), loader, strict=False):
            pass
        times.append(time.process_time())
        loader.set_weights({"web": 1, "code": 1, "math": 0})
        times.append(time.process_time())
        loader.seen()
        times.append(time.process_time())
    return np.diff(times).tolist()


def strayed(folder: str, lanes: int, share: float, num_seeds: int) -> tuple[float, float, float]:
    """Root mean square and maximum of the samples by which a source strays; and half the root of ``lanes`` chunks."""
    found, chunk = [], 0.0
    for seed in range(num_seeds):
        mix = mixture(folder, lanes, {"left": share, "right": 1 - share}, seed)
        orders, chunk = (
            mix.source.orders(mix.source.order_settings(lanes)),
            float(mix.source.leaves["left"].chunk_samples.mean()),
        )
        found += [drawn_before(orders, row)["left"] - share * row for row in range(lanes * 3, lanes * 60, lanes * 7)]
    return math.sqrt(np.mean(np.square(found))), float(np.abs(found).max()), chunk * math.sqrt(lanes) / 2


def classes(folder: str, count: int) -> str:
    """Seconds of CPU of a set balanced over this many classes, and the peak of memory."""

    def make_classes(folder: str) -> None:
        order = np.random.default_rng(0).permutation(count * 3)
        with ShardWriter(os.path.join(folder, "{:06d}.tar"), max_samples=1000, columns=["cls"]) as writer:
            for number, cls in enumerate((order % count).tolist()):
                writer.write({"__key__": f"{number:07d}", "cls": cls})

    data = common.made_once(folder, f"classes-{count}", make_classes)
    times = [time.process_time()]
    balanced = Balanced(StreamingDataset(data), by="cls")
    times.append(time.process_time())
    with DataLoader(balanced, 64, num_threads=0) as loader:
        next(iter(loader))
        times.append(time.process_time())
    orders = balanced.source.orders(balanced.source.order_settings(64))
    return (
        f"to make {times[1] - times[0]:.2f} s of CPU, to the first batch {times[2] - times[1]:.2f}; {planned(orders)}"
    )


def many(count: int) -> str:
    """Seconds of CPU of the plan of a mixture of this many sources of 64 chunks each."""
    settings = OrderSettings(seed=1, lanes=64, window=200)
    tables = {f"{number:06d}": np.full(64, 100) for number in range(count)}
    began = time.process_time()
    orders = MixedLanes(Sources(tables, settings), [Weights(start=0, weights=dict.fromkeys(tables, 1.0))])
    made = time.process_time() - began
    return f"to make {made:.2f} s of CPU; {planned(orders)}"


def planned(orders: Any) -> str:
    """Seconds of CPU to look at the memory of a plan and to plan its first rows."""
    began = time.process_time()
    plan = Plan(orders.chunk_samples, orders.settings, global_batch_size=64, dp_world_size=1, orders=orders)
    plan.live_bytes(np.full(len(orders.chunk_samples), 1 << 20), 0)
    looked = time.process_time()
    for first in range(0, 512, 64):
        plan.rank_batches(first, first + 64, 0)
    rows = time.process_time() - looked
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return f"memory check {looked - began:.2f}, a thousand rows {rows / 32.768 * 1000:.1f} ms; peak {peak:,} MiB"


def main() -> None:
    args = common.arguments(__doc__ or "", lanes=1024, seeds=12, classes=0)
    if args.classes:
        for _ in range(2 if args.classes < 5000 else 1):
            print(f"{args.classes:,} classes: {classes(args.data, args.classes)}", flush=True)
            print(f"{args.classes:,} sources: {many(args.classes)}", flush=True)
        return
    folder = common.made_once(args.data, "lanes-4", make)
    print(common.machine())
    lanes = 128
    while lanes <= args.lanes:
        five, weights, seen = starts(folder, lanes)
        print(f"{lanes:,} lanes: five batches {five:.2f} s of CPU, set_weights {weights:.2f}, seen {seen:.2f}")
        lanes *= 2
    for share in (0.5, 0.2, 0.1):
        for lanes in (8, 32):
            spread, most, formula = strayed(folder, lanes, share, args.seeds)
            print(f"share {share}, {lanes} lanes: strays {spread:.1f} (at most {most:.1f}), formula {formula:.1f}")


if __name__ == "__main__":
    main()
