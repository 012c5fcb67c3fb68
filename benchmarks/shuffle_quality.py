"""How far from a uniform permutation: our order beside WebDataset's and Mosaic's, simulated.

One data set (by default 131,072 samples in 128 shards of 16 chunks, one class per shard: the worst case, sorted
data) is put in order by each method for one epoch; the table tells how well the global batches are mixed::

    python benchmarks/shuffle_quality.py [--samples 131072] [--repeats 3]

Columns; a uniform permutation scores about 1.00 in all but the last:

- displacement: mean |place in the epoch - place in storage|, over its expectation D / 3;
- neighbors: pairs of storage neighbors that share a global batch, over their expectation;
- class spread: variance of the class counts of a batch, over the hypergeometric variance. Above 1, classes flock
  to a batch; below 1, they are spread more evenly than chance would;
- drift: variance over batches of the mean place in storage, over its expectation;
- classes: distinct classes in a batch, over their expectation;
- live: share of the data set that all ranks together must hold at once, in whole chunks (ours), whole shards
  (Mosaic) or samples (WebDataset's reservoirs).

The two others are small simulations of the published algorithms, none of their code. WebDataset: shards in random
order are dealt to streams (ranks x workers), each runs a reservoir of 1000 samples, the loader takes a batch from
one worker after the other. Mosaic py1e on one canonical node: shards in random order, samples shuffled inside
them, then each shifted by a uniform amount, such that a shard spreads over about one shuffle block.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from streaming.order.plan.order import EpochOrder, OrderSettings, default_lanes

Order = npt.NDArray[np.int64]  # storage place of the sample at each global position
RANKS, WORKERS, BATCH = 8, 4, 32
GLOBAL_BATCH = RANKS * BATCH
ODD_BATCHES = (250, 257, 254)  # lanes: the largest divisor up to max(16, an eighth), or what stands for it
CHUNKS_PER_SHARD = 16
Method = Callable[[int, int, int], Order]


def uniform(num_samples: int, _: int, seed: int) -> Order:
    return np.random.default_rng(seed).permutation(num_samples)


def ours(window_chunks: float, batch: int = GLOBAL_BATCH) -> Callable[[int, int, int], Order]:
    def order(num_samples: int, shard: int, seed: int) -> Order:
        chunk = shard // CHUNKS_PER_SHARD
        settings = OrderSettings(seed=seed, lanes=default_lanes(batch), window=round(window_chunks * chunk))
        epoch, found = EpochOrder([chunk] * (num_samples // chunk), settings, 0), np.empty(num_samples, np.int64)
        for lane in range(settings.lanes):
            chunk_ids, offsets = epoch.lane_samples(lane, 0, epoch.lane_size(lane))
            found[lane :: settings.lanes] = chunk * chunk_ids + offsets
        return found

    return order


def webdataset(num_samples: int, shard: int, seed: int, *, size: int = 1000, initial: int = 100) -> Order:
    rng = np.random.default_rng(seed)
    shards = rng.permutation(num_samples // shard)
    streams = [_reservoir(shards[i :: RANKS * WORKERS], shard, rng, size, initial) for i in range(RANKS * WORKERS)]
    # Batch k of rank r is the next batch of its worker k % WORKERS. Streams are cut to whole batches.
    rounds = min(len(stream) for stream in streams) // BATCH
    table = np.array([stream[: rounds * BATCH] for stream in streams]).reshape(WORKERS, RANKS, rounds, BATCH)
    return table.transpose(2, 0, 1, 3).reshape(-1)


def _reservoir(shards: Order, shard: int, rng: np.random.Generator, size: int, initial: int) -> list[int]:
    """Take in one sample, two while the buffer grows; give out a random one for each once it holds a few."""
    source = iter((shards[:, None] * shard + np.arange(shard)).ravel().tolist())
    held: list[int] = []
    out: list[int] = []

    def give() -> None:
        at = int(rng.integers(len(held)))
        held[at], held[-1] = held[-1], held[at]
        out.append(held.pop())

    for sample in source:
        held.append(sample)
        if len(held) < size and (extra := next(source, None)) is not None:
            held.append(extra)
        if len(held) >= initial:
            give()
    while held:
        give()
    return out


def py1e(block: int) -> Callable[[int, int, int], Order]:
    def order(num_samples: int, shard: int, seed: int) -> Order:
        rng = np.random.default_rng(seed)
        num_shards = num_samples // shard
        inside = rng.permuted(np.tile(np.arange(shard), (num_shards, 1)), axis=1)
        samples = rng.permutation(num_shards)[:, None] * shard + inside
        # One row per shard: it may reach half of what its block has beyond the shard, within the epoch.
        begins = np.arange(num_shards)[:, None] * shard
        blocks = rng.uniform(0.75 * block, 1.25 * block, (num_shards, 1))
        reach = np.maximum((blocks - shard) / 2, 0)
        low, high = -np.minimum(reach, begins), np.minimum(reach, num_samples - shard - begins)
        keys = begins + np.arange(shard) + rng.uniform(low, high, (num_shards, shard))
        mixed: Order = samples.ravel()[np.argsort(keys, axis=None)]
        return mixed

    return order


def live_share(order: Order, unit: int, num_samples: int) -> float:
    """Largest share of the data set in units (shards or chunks) that have begun and not ended at one time."""
    position = np.empty(num_samples, dtype=np.int64)
    position.fill(-1)
    position[order] = np.arange(len(order))
    per_unit = position.reshape(-1, unit)
    first = np.where(per_unit < 0, len(order), per_unit).min(axis=1)
    change = np.zeros(len(order) + 2, dtype=np.int64)
    np.add.at(change, first, 1)
    np.add.at(change, per_unit.max(axis=1) + 1, -1)
    return float(change.cumsum().max() * unit / num_samples)


def scores(order: Order, num_samples: int, shard: int, batch: int) -> list[float]:
    used = order[: len(order) // batch * batch]
    batches = used.reshape(-1, batch)
    displacement = np.abs(order - np.arange(len(order))).mean() / (num_samples / 3)
    place = np.full(num_samples, -1)
    place[used] = np.arange(len(used)) // batch
    together = (place[1:] == place[:-1]) & (place[1:] >= 0)
    neighbors = together.mean() * (num_samples - 1) / (batch - 1)
    num_classes = num_samples // shard
    counts = np.array([np.bincount(one // shard, minlength=num_classes) for one in batches])
    finite = (num_samples - batch) / (num_samples - 1)
    share = 1 / num_classes
    spread = ((counts - batch * share) ** 2).mean() / (batch * share * (1 - share) * finite)
    drift = batches.mean(axis=1).var() / (num_samples**2 / 12 / batch * finite)
    classes = (counts > 0).sum(axis=1).mean() / (num_classes * (1 - (1 - share) ** batch))
    return [float(displacement), float(neighbors), float(spread), float(drift), float(classes)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=131_072)
    parser.add_argument("--repeats", type=int, default=3, help="seeds to average over")
    args = parser.parse_args()
    shard = 1024
    chunk = shard // CHUNKS_PER_SHARD
    num_samples = args.samples // (shard * RANKS * WORKERS) * (shard * RANKS * WORKERS)
    if not num_samples:
        parser.error(f"--samples: at least {shard * RANKS * WORKERS}")
    # name, order, unit that is held as a whole (0: the reservoirs hold samples)
    methods: list[tuple[str, Method, int]] = [
        ("uniform permutation", uniform, shard),
        ("ours, window 1 chunk", ours(1), chunk),
        ("ours, window 2 chunks (default)", ours(2), chunk),
        ("ours, window 4 chunks", ours(4), chunk),
        ("ours, window 16 chunks", ours(16), chunk),
        ("webdataset, shards + 1000", webdataset, 0),
        ("py1e, block of 262,144", py1e(2**18), shard),
        ("py1e, block of 16 shards", py1e(16 * shard), shard),
        ("py1e, block of 8 shards", py1e(8 * shard), shard),
    ]
    print(f"{num_samples:,} samples, {num_samples // shard} shards = classes, {num_samples // chunk} chunks")
    print(f"{RANKS} ranks x {BATCH}, mean of {args.repeats} seeds")
    print(f"{'':32}displacement  neighbors  class spread  drift  classes   live")
    odd = [(f"ours, default, batches of {size}", ours(2, size), chunk, size) for size in ODD_BATCHES]
    for name, method, unit, batch in [*((*one, GLOBAL_BATCH) for one in methods), *odd]:
        rows = []
        for seed in range(args.repeats):
            order = method(num_samples, shard, seed)
            reservoirs = min(RANKS * WORKERS * 1000 / num_samples, 1.0)
            held = live_share(order, unit, num_samples) if unit else reservoirs
            rows.append([*scores(order, num_samples, shard, batch), held])
        mean = np.mean(rows, axis=0)
        print(f"{name:32}{mean[0]:12.2f}{mean[1]:12.2f}{mean[2]:14.2f}{mean[3]:7.2f}{mean[4]:9.2f}{mean[5]:7.1%}")


if __name__ == "__main__":
    main()
