"""Padding, and how unequal the ranks of a step are: batches by measured length, against random and grouped ones.

Pure NumPy on one core, no data. A sample is a text (log-normal, median 300 tokens) with 0 to 4 images of 576 tokens, as
sets of visual instructions are mixed; its length after the transform is text and images. A table in Markdown::

    python benchmarks/bench_lengths.py [--samples 400000] [--ranks 32] [--rows 16]

*Padded*: share of the positions of all batches, rows times longest, that hold padding. *Max/mean*: of a step's batches,
one per rank, the positions of the largest over their mean; the mean of all steps: ranks wait for the largest.

- *random*: ``rows`` samples at a time, as they come;
- *grouped*: torch's samplers of that name in Transformers (``group_by_length``): 50 steps' worth of random samples are
  sorted, and every rank takes its share of each step;
- *sorted once*: all samples sorted, cut into batches of ``rows``, which are shuffled;
- *ours*: ``Packed(…, padded=True, field=None)``: as many samples as fit into the positions that *grouped* has on
  average, by the column of ``column add --compute length --after …``; *by text alone*: by the length before the
  transform, as a column of tokens would say. *Over*: share of batches that are larger than their budget.
"""

from __future__ import annotations

from collections.abc import Sequence

import common
import numpy as np

from streaming.order.packing.fit import other_company, pack
from streaming.order.packing.rules import PackRules

GROUP = 8192  # samples of a group: a few MB of text with images
MEGABATCH = 50
Batches = tuple[np.ndarray, np.ndarray]
"""Positions of each batch, and tokens in it, in the order in which ranks take them."""


def drawn(num: int) -> tuple[np.ndarray, np.ndarray]:
    """Text tokens, and tokens of texts and images."""
    random = np.random.default_rng(1)
    text = np.minimum(np.exp(random.normal(np.log(300), 1.0, num)), 8192).astype(np.int64) + 1
    images = random.choice(5, num, p=[0.15, 0.6, 0.12, 0.08, 0.05])
    return text, text + 576 * images


def in_batches(lengths: np.ndarray, rows: int) -> Batches:
    """Return batches of ``rows`` samples each, in order."""
    cut = lengths[: len(lengths) // rows * rows].reshape(-1, rows)
    return cut.max(axis=1) * rows, cut.sum(axis=1)


def grouped(lengths: np.ndarray, rows: int, ranks: int) -> Batches:
    random = np.random.default_rng(2)
    order, step = random.permutation(len(lengths)), rows * ranks
    positions, tokens = [], []
    for begin in range(0, len(order) - step + 1, step * MEGABATCH):
        one = np.sort(lengths[order[begin : begin + step * MEGABATCH]])[::-1]
        one = one[: len(one) // step * step].reshape(-1, rows, ranks).swapaxes(1, 2)  # [steps, ranks, rows]
        positions.append(one.max(axis=2).ravel() * rows)
        tokens.append(one.sum(axis=2).ravel())
    return np.concatenate(positions), np.concatenate(tokens)


def packed(lengths: np.ndarray, known: np.ndarray, budget: int) -> Batches:
    """Batches within a budget by the lengths that are known."""
    rules = PackRules(length=budget, padded=True, overlong="drop")
    positions, tokens = [], []
    for number, begin in enumerate(range(0, len(lengths), GROUP)):
        packs = other_company(pack(known[begin : begin + GROUP], rules), seed=1, epoch=0, group=number)
        true = lengths[begin : begin + GROUP][packs.documents]
        positions.append(np.maximum.reduceat(true, packs.splits[:-1]) * np.diff(packs.splits))
        tokens.append(np.add.reduceat(true, packs.splits[:-1]))
    order = np.random.default_rng(3).permutation(sum(map(len, positions)))
    return np.concatenate(positions)[order], np.concatenate(tokens)[order]


def row(name: str, batches: Batches, ranks: int, budget: int | None = None) -> Sequence[str]:
    positions, tokens = batches
    steps = positions[: len(positions) // ranks * ranks].reshape(-1, ranks)
    uneven = (steps.max(axis=1) / steps.mean(axis=1)).mean()
    over = "" if budget is None else f"{(positions > budget).mean():.1%}"
    return name, f"{1 - tokens.sum() / positions.sum():.1%}", f"{uneven:.2f}", f"{positions.max():,}", over


def main() -> None:
    given = common.arguments(__doc__ or "", samples=400_000, ranks=32, rows=16)
    text, lengths = drawn(given.samples)
    order = np.sort(lengths).reshape(-1, given.rows) if not len(lengths) % given.rows else None
    random = np.random.default_rng(2)
    like = grouped(lengths, given.rows, given.ranks)
    budget = int(like[0].mean())
    rows = [
        row("random", in_batches(random.permutation(lengths), given.rows), given.ranks),
        row("grouped", like, given.ranks),
    ]
    if order is not None:
        shuffled = random.permutation(order)
        rows.append(row("sorted once", in_batches(shuffled.ravel(), given.rows), given.ranks))
    rows += [
        row("ours", packed(lengths, lengths, budget), given.ranks, budget),
        row(
            "ours, by text alone",
            packed(lengths, text, int(budget * text.mean() / lengths.mean())),
            given.ranks,
            budget,
        ),
    ]
    print(f"{given.samples:,} samples, {given.ranks} ranks, {given.rows} rows; budget {budget:,} positions\n")
    print("| batches | padded | max/mean per step | largest | over |\n|---|---|---|---|---|")
    for one in rows:
        print("|", " | ".join(one), "|")


if __name__ == "__main__":
    main()
