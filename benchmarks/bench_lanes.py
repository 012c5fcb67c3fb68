"""Many lanes, and small sources: what an endless mixture costs at its start, and how far its shares stray.

Run: ``python benchmarks/bench_lanes.py [--lanes 1024] [--seeds 12] [--data FOLDER]``. Both parts read chunks of four
samples from disk, in this process, with ``quotas="chunks"``. The first takes three sources of 1,250 samples together
in global batches of one sample a lane, and prints the seconds of CPU that opening with the first five batches,
``set_weights`` and ``seen()`` take, with 128 lanes, 256, 512 and so on up to ``--lanes``. The second counts, by
arithmetic, the samples drawn from one of two sources of 512 samples at nine rows under each seed, against its share.
"""

from __future__ import annotations

import math
import os
import time

import common
import numpy as np

from shard_tools import ShardWriter
from streaming import DataLoader, Mixture, ShuffleConfig, StreamingDataset
from streaming.mixing.forecast import drawn_before

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
        orders, chunk = mix.orders(mix.order_settings(lanes)), float(mix.leaves["left"].chunk_samples.mean())
        found += [drawn_before(orders, row)["left"] - share * row for row in range(lanes * 3, lanes * 60, lanes * 7)]
    return math.sqrt(np.mean(np.square(found))), float(np.abs(found).max()), chunk * math.sqrt(lanes) / 2


def main() -> None:
    args = common.arguments(__doc__ or "", lanes=1024, seeds=12)
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
