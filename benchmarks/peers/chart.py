"""Draws the results as SVG: ``chart.py RESULTS.json CHART.svg``, in the environment that has matplotlib.

A panel per set and place, a bar per contestant and number of workers, on a logarithmic axis.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import matplotlib as mpl
from environments import OURS, PEERS
from report import Case, Figures, Outcome, number, outcome
from sets import SETS

mpl.use("svg")
from matplotlib import pyplot as plt
from matplotlib.ticker import NullFormatter

OUR_SHADES = ("#9ecae1", "#4292c6", "#08519c")
PEER_SHADES = ("#d9d9d9", "#969696", "#525252")


def panel(axes: Any, title: str, found: dict[tuple[str, int], Outcome], workers: list[int]) -> None:
    """One set at one place, the fastest contestant on top."""
    rates = {at: one.per_second for at, one in found.items() if isinstance(one, Figures)}
    best = {peer: max(value for (name, _), value in rates.items() if name == peer) for peer, _ in rates}
    peers = sorted(best, key=lambda peer: best[peer])
    height = 0.8 / len(workers)
    for row, peer in enumerate(peers):
        for place, count in enumerate(workers):
            if (peer, count) not in rates:
                continue
            y = row + height * ((len(workers) - 1) / 2 - place)
            shade = (OUR_SHADES if peer == OURS else PEER_SHADES)[place % 3]
            axes.barh(y, rates[peer, count], height, color=shade)
            axes.text(rates[peer, count], y, f" {number(rates[peer, count])}", va="center", fontsize=6)
    axes.set_yticks(range(len(peers)), [PEERS[peer].title for peer in peers], fontsize=7)
    axes.set_xscale("log")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.15)
    axes.set_title(title, fontsize=8)
    axes.tick_params(axis="x", labelsize=6)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    with open(sys.argv[1]) as file:
        results = json.load(file)
    outcomes = {
        case: outcome(runs, results["sizes"][case.set])
        for key, runs in results["runs"].items()
        if runs and (case := Case.of(key)).peer in PEERS
    }
    places = [
        (where, name) for where in ("disk", "s3") for name in SETS
        if any((case.where, case.set) == (where, name) and isinstance(one, Figures) for case, one in outcomes.items())
    ]  # fmt: skip
    workers = sorted({case.workers for case in outcomes})
    mpl.rcParams["svg.hashsalt"] = "peers"
    figure, grid = plt.subplots(-(-len(places) // 2), 2, figsize=(11, 3.4 * -(-len(places) // 2)), squeeze=False)
    for axes, (where, name) in zip(grid.flat, places, strict=False):
        found = {(case.peer, case.workers): one for case, one in outcomes.items()
                 if (case.where, case.set) == (where, name)}  # fmt: skip
        panel(axes, SETS[name].title + (", from S3" if where == "s3" else ""), found, workers)
    for axes in list(grid.flat)[len(places) :]:
        axes.set_visible(False)
    figure.suptitle(
        f"Samples (of packs: tokens) per second, shuffled; light to dark: {', '.join(map(str, workers))} workers\n"
        f"{results['machine']}", fontsize=8,
    )  # fmt: skip
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    figure.savefig(sys.argv[2], metadata={"Date": None})


if __name__ == "__main__":
    main()
