"""How evenly the samples of a small source come: least and most often any of them came after some passes over it.

Run: ``python benchmarks/bench_passes.py [--samples 900] [--chunks 1] [--data FOLDER]``. Each source is mixed endlessly
with 12,000 samples in 120 chunks, with a share of 0.3, by ``quotas="chunks"``, ``quotas="exact"`` and
``batches="one_source"``. Each cell gives, after 1, 2, 4 and 10 passes, how often the sample that came least often and
the one that came most often were delivered, counted at the end of the first row of all lanes (for batches of one
source: of the first batch of 64) by which so many passes were drawn; ``+`` marks cells in which these are more than one
apart from the passes drawn by then, ``++`` more than two. The last part has five sources beside each other with unlike
weights, in which shares are dealt by a deeper tree. Only orders are evaluated; nothing is read.
"""

from __future__ import annotations

import math
import os
from itertools import product
from typing import Any

import common
import numpy as np

from shard_tools import ShardWriter
from streaming import Mixture, ShuffleConfig, StreamingDataset
from streaming.order.mixing.granularity import ByBatches

SAMPLES, CHUNKS, LANES, PASSES = (1, 120, 900, 3000), (1, 4, 16, 60), (1, 4, 16, 64), (1, 2, 4, 10)
SHARE, BATCH, LARGE = 0.3, 64, (12_000, 120)
KINDS: dict[str, dict[str, Any]] = {
    "chunks": {"quotas": "chunks"}, "exact": {"quotas": "exact"}, "one_source": {"batches": "one_source"},
}  # fmt: skip


def opened(data: str, num_samples: int, num_chunks: int) -> StreamingDataset:
    def make(folder: str) -> None:
        pattern = os.path.join(folder, "{:06d}.tar")
        with ShardWriter(pattern, max_samples=-(-num_samples // num_chunks)) as writer:  # a shard of one chunk
            for number in range(num_samples):
                writer.write({"__key__": f"{number:06d}", "cls": number})

    return StreamingDataset(common.made_once(data, f"passes-{num_samples}-{num_chunks}", make))


def counts(mix: Mixture, name: str, share: float) -> list[tuple[float, int, int]]:
    """After each number of passes over a source: passes drawn by then, least and most often that a sample came."""
    orders: Any = mix.source.orders(mix.source.order_settings(BATCH), mix.source.begun(BATCH))
    lanes, size = orders.settings.lanes, len(mix.source.leaves[name])
    begin = int(np.searchsorted(mix.names, name))
    sizes = [len(mix.source.leaves[one].chunk_samples) for one in mix.names]
    first, stop = sum(sizes[:begin]), sum(sizes[: begin + 1])
    starts = np.cumsum(orders.chunk_samples) - orders.chunk_samples
    step = BATCH // lanes if mix.source.deal == ByBatches() else 1
    places = -(-int(size * max(PASSES) / share / lanes * 1.2 + 40_000 // lanes) // step) * step
    drawn = np.full((places, lanes), -1)  # the sample of the source at each position, if it is one of its own
    for lane in range(lanes):
        ids, offsets = orders.lane_samples(lane, 0, places)
        mine = (ids >= first) & (ids < stop)
        drawn[mine, lane] = (starts[ids] - starts[first] + offsets)[mine]
    behind = np.cumsum((drawn >= 0).sum(axis=1))[step - 1 :: step]
    found = []
    for times in PASSES:
        rows = (int(np.searchsorted(behind, times * size)) + 1) * step
        assert rows <= places, (name, times)
        some = drawn[:rows]
        often = np.bincount(some[some >= 0], minlength=size)
        found.append((float(often.sum() / size), int(often.min()), int(often.max())))
    return found


def cell(mix: Mixture, name: str, share: float) -> str:
    shown, apart = [], 0.0
    for passes, least, most in counts(mix, name, share):
        shown.append(f"{least}-{most}" if size_of(mix, name) > 1 else f"{least}/{passes:.0f}")
        apart = max(apart, most - math.ceil(passes), math.floor(passes) - least)
    return " ".join(shown) + (" ++" if apart > 2 else " +" if apart > 1 else "")


def size_of(mix: Mixture, name: str) -> int:
    return len(mix.source.leaves[name])


def table(data: str, samples: tuple[int, ...], chunks: tuple[int, ...]) -> None:
    large = opened(data, *LARGE)
    print(f"| samples | chunks | shares by | {' | '.join(f'{lanes} lanes' for lanes in LANES)} |")
    print("|---" * (3 + len(LANES)) + "|")
    for num_samples, num_chunks, kind in product(samples, chunks, KINDS):
        if num_chunks > num_samples:
            continue
        cells = []
        for lanes in LANES:
            few = opened(data, num_samples, num_chunks)
            mix = Mixture({"few": few, "large": large}, weights={"few": SHARE, "large": 1 - SHARE},
                          shuffle=ShuffleConfig(lanes=lanes), **KINDS[kind])  # fmt: skip
            cells.append(cell(mix, "few", SHARE))
        print(f"| {num_samples:,} | {num_chunks} | {kind} | {' | '.join(cells)} |", flush=True)


def beside_others(data: str) -> None:
    weights = {"few": 0.1, "large": 0.31, "one": 0.07, "some": 0.29, "third": 0.23}
    print("\nFive sources: the one of so many samples in a chunk, with a share of 0.1; 64 lanes")
    for num_samples, kind in product((1, 3, 20, 120, 900), KINDS):
        sources = {"few": opened(data, num_samples, 1), "large": opened(data, *LARGE), "one": opened(data, 1, 1),
                   "some": opened(data, 900, 4), "third": opened(data, 3000, 60)}  # fmt: skip
        mix = Mixture(sources, weights=weights, shuffle=ShuffleConfig(lanes=64), **KINDS[kind])
        print(f"{num_samples:,} samples, {kind}: {cell(mix, 'few', weights['few'])}", flush=True)


def main() -> None:
    args = common.arguments(__doc__ or "", samples=0, chunks=0)
    print(common.machine(), flush=True)
    table(args.data, (args.samples,) if args.samples else SAMPLES, (args.chunks,) if args.chunks else CHUNKS)
    if not args.samples and not args.chunks:
        beside_others(args.data)


if __name__ == "__main__":
    main()
