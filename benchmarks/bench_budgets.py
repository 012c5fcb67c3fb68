"""How full packs are under several budgets at once, and how evenly a quantity spreads over the ranks of a step.

Pure NumPy on one core, no data. Three tables in Markdown, those of docs/design/0024::

    python benchmarks/bench_budgets.py [--groups 20] [--steps 32]

The mix is like public vision-language sets: text log-normal (median 250 tokens, sigma 0.9); no image in 30 % of the
documents, one in 50 %, 2 to 8 in the others; patches of an image log-normal (median 400, sigma 0.6, 16 to 4,096), four
to a token. Groups have at least 256 packs' worth of the budget that binds.

Fill: T 8,192 tokens, and a limit of patches per pack by which the patches fill *share* times as many packs as the
tokens. *Fewest*: packs that no packing can do with less than, the sum of a budget over its limit, divided by the
packs made. *Greedy*: the balanced greedy knapsack of nanoVLM over the same documents: longest first, into the emptiest
knapsack with room, of as many as the tokens need at least; where none has room, a new one.

Imbalance: patches of a rank in a step, the most over the mean, minus 1; mean of the steps. *As dealt*: packs of the
order's next rows. *Budget*: the same, where patches have a budget. *Exchange*: ``balance="exchange"``,
``cost="patches"``. *Greedy*: packs of the greedy knapsack, shuffled.

Kinds (``alike_across_ranks``): the share of packs that fill no global batch of their kind in an epoch, which come first
in the next one; 16 buckets of sizes whose shares fall by a tenth from one to the next.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

import numpy as np

from streaming.order.packing.balance import exchange
from streaming.order.packing.fit import other_company, pack
from streaming.order.packing.rules import PackRules

LENGTH, PER_TOKEN = 8192, 4
PACKS = 256


def documents(random: np.random.Generator, num: int) -> np.ndarray:
    """Tokens and patches of documents, int64 [num, 2]."""
    text = np.exp(random.normal(np.log(250), 0.9, num)).astype(np.int64) + 1
    images = np.where(random.random(num) < 0.3, 0, np.where(random.random(num) < 0.7, 1, random.integers(2, 9, num)))
    each = np.exp(random.normal(np.log(400), 0.6, (num, 8))).clip(16, 4096).astype(np.int64) // PER_TOKEN * PER_TOKEN
    patches = np.where(np.arange(8) < images[:, None], each, 0).sum(axis=1)
    return np.column_stack([text + patches // PER_TOKEN, patches])


def groups(num_groups: int, limits: list[int]) -> Iterator[np.ndarray]:
    """Groups of documents that fit into a pack, whose binding budget fills 256 packs."""
    random = np.random.default_rng(1)
    held = np.zeros((0, 2), np.int64)
    for _ in range(num_groups):
        while (held.sum(axis=0) / limits).max() < PACKS:
            more = documents(random, 4096)
            held = np.concatenate([held, more[(more <= limits).all(axis=1)]])
        stop = int(np.searchsorted((held.cumsum(axis=0) / limits).max(axis=1), PACKS)) + 1
        yield held[:stop]
        held = held[stop:]


def greedy(taken: np.ndarray, limits: list[int]) -> list[np.ndarray]:
    """Amounts of the knapsacks of nanoVLM's balanced greedy: each into the emptiest by tokens with room for all."""
    least = -(-int(taken[:, 0].sum()) // limits[0])
    loads = [np.zeros(taken.shape[1], np.int64) for _ in range(least)]
    heap = [(0, number) for number in range(least)]
    heapify(heap)
    for one in taken[np.argsort(-taken[:, 0], kind="stable")]:
        tried = []
        while heap:
            tried.append(heappop(heap))
            if (loads[tried[-1][1]] + one <= limits).all():
                break
        else:
            tried.append((0, len(loads)))
            loads.append(np.zeros(taken.shape[1], np.int64))
        number = tried[-1][1]
        loads[number] += one
        tried[-1] = (int(loads[number][0]), number)
        for entry in tried:
            heappush(heap, entry)
    return [load for load in loads if load.any()]


def limits_of(share: float) -> list[int]:
    """The budgets of tokens and patches."""
    sums = documents(np.random.default_rng(0), 200_000).sum(axis=0)
    return [LENGTH, int(share * LENGTH * sums[1] / sums[0])]


def packed(group: np.ndarray, limits: list[int], number: int = 0, *, spread: bool = True) -> np.ndarray:
    """Amounts of the packs of a group, int64 [K, 2]."""
    rules = PackRules(length=limits[0], overlong="drop", budgets=tuple(limits[1:]), spread=spread)
    packs = other_company(pack(group, rules), seed=1, epoch=0, group=number)
    return np.add.reduceat(np.column_stack([packs.lengths, packs.amounts]), packs.splits[:-1])


def fill_table(num_groups: int) -> None:
    names = ("share", "budgets", "tokens", "patches", "fewest", "greedy: tokens", "patches", "fewest", "documents/s")
    print("|", " | ".join(names), "|\n" + "|---" * len(names) + "|")
    for share in (1.0, 1.1, 1.25, 0.8):
        limits = limits_of(share)
        given = list(groups(num_groups, limits))
        began_s = time.process_time()
        ours = [packed(group, limits) for group in given]
        seconds = time.process_time() - began_s
        cells = []
        for made in (ours, [np.stack(greedy(group, limits)) for group in given]):
            count = sum(map(len, made))
            fewest = sum(int(np.ceil(group.sum(axis=0) / limits).max()) for group in given)
            fills = np.concatenate(made).sum(axis=0) / (count * np.array(limits))
            cells += [f"{100 * fill:.1f} %" for fill in (*fills, fewest / count)]
        rate = sum(map(len, given)) / seconds
        shown = " and ".join(f"{limit:,}" for limit in limits)
        print(f"| {share} | {shown} | {' | '.join(cells)} | {rate / 1e6:.2f} M |", flush=True)


def imbalance(loads: np.ndarray) -> float:
    """The most over the mean, minus 1, of the ranks of each step, float [steps, ranks]; the mean of the steps."""
    return float((loads.max(axis=1) / loads.mean(axis=1) - 1).mean())


def imbalance_table(num_steps: int) -> None:
    print("\n| ranks | packs per rank | as dealt | budget | exchange | greedy |\n|---|---|---|---|---|---|")
    tight, wide = limits_of(1.0), [LENGTH, 2**30]
    for ranks in (2, 8, 32, 128):
        for each in (1, 8):
            needed = num_steps * ranks * each
            plain = patches_of(wide, needed)
            steps = plain.reshape(num_steps, ranks, each)
            dealt = np.stack([
                [step.ravel()[packs].sum() for packs in exchange(step.ravel(), [each] * ranks)] for step in steps
            ])  # fmt: skip
            found = (steps.sum(axis=2), patches_of(tight, needed).reshape(steps.shape).sum(axis=2), dealt,
                     patches_of(wide, needed, by_greedy=True).reshape(steps.shape).sum(axis=2))  # fmt: skip
            shown = " | ".join(f"{100 * imbalance(loads):.1f} %" for loads in found)
            print(f"| {ranks} | {each} | {shown} |", flush=True)


def patches_of(limits: list[int], needed: int, *, by_greedy: bool = False) -> np.ndarray:
    """Return the patches of ``needed`` packs, shuffled over groups as an epoch shuffles them."""
    made = []
    for number, group in enumerate(groups(needed // (PACKS - 8) + 2, limits)):
        made.append((np.stack(greedy(group, limits)) if by_greedy else packed(group, limits, number))[:, 1])
    return np.random.default_rng(2).permutation(np.concatenate(made))[:needed]


def kinds_table() -> None:
    print("\n| packs | 16 in a global batch | 64 | 256 |\n|---|---|---|---|")
    shares = 0.9 ** np.arange(16)
    for packs in (10_000, 100_000, 1_000_000):
        counts = (packs * shares / shares.sum()).astype(np.int64)
        rests = [f"{100 * (counts % size).sum() / counts.sum():.2f} %" for size in (16, 64, 256)]
        print(f"| {packs:,} | {' | '.join(rests)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=20, help="groups of each kind")
    parser.add_argument("--steps", type=int, default=32, help="steps of each world")
    args = parser.parse_args()
    fill_table(args.groups)
    imbalance_table(args.steps)
    kinds_table()


if __name__ == "__main__":
    main()
