"""Tell what a run draws of each source of a mixture: by the shares of its ledger, or exactly, from its orders."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from streaming.arguments import some_names
from streaming.mixing.endless import Endless
from streaming.mixing.passes import MixedPasses
from streaming.plan.ledger import Ledger


def drawn_before(orders: MixedPasses | Endless, row: int) -> dict[str, int]:
    """Count the samples of each source among the first ``row`` of a run, by arithmetic.

    Args:
        orders: Of the mixture.
        row: Samples of the run, over all ranks and epochs.
    """
    names, lanes = orders.sources.every_name, orders.settings.lanes
    number, rest = divmod(row, orders.samples_per_pass)
    order = orders.of_pass(number)
    counts = np.zeros(len(names), np.int64)
    if isinstance(orders, MixedPasses):
        counts += number * np.array([orders.quotas[name] for name in names])
    for lane in range(lanes):
        counts += order.drawn(lane, rest // lanes + (lane < rest % lanes))
    return dict(zip(names, counts.tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class Passes:
    """Count the passes over one source, of which later ones are larger where the source grew.

    Attributes:
        sizes: First pass, and samples of each pass from it on; by pass, the first one 0.
    """

    sizes: tuple[tuple[int, int], ...]

    def draws(self, number: int) -> int:
        """Count the samples of all passes before pass ``number``."""
        stops = [*(first for first, _ in self.sizes[1:]), number]
        return sum(
            max(min(stop, number) - first, 0) * size for (first, size), stop in zip(self.sizes, stops, strict=True)
        )

    def read(self, count: float) -> float:
        """Tell how many passes the first ``count`` samples are."""
        first, size = next(era for era in reversed(self.sizes) if self.draws(era[0]) <= count)
        return first + (count - self.draws(first)) / size


@dataclass(frozen=True, slots=True)
class _Segment:
    """Rows ``[start, stop)`` with the same weights; ``total`` is their sum."""

    start: int
    stop: float
    weights: Mapping[str, float]
    total: float


class Forecast:
    """Say when what is due of each source, by its share: what comes strays from it by a chunk or so of a lane.

    Args:
        ledger: Of the run.
        passes: Over each source that there is, by name.
    """

    def __init__(self, ledger: Ledger, passes: Mapping[str, Passes]) -> None:
        quotas = ledger.last.quotas
        steps = ledger.segments() if quotas is None else [(0, quotas)]
        stops = [*(row for row, _ in steps[1:]), math.inf]
        self.passes = dict(passes)
        self._segments = [
            _Segment(row, stop, weights, sum(weights.values()))
            for (row, weights), stop in zip(steps, stops, strict=True)
        ]

    def drawn(self, row: int, num_samples: int) -> dict[str, float]:
        """Count the samples of each source that rows ``[row, row + num_samples)`` come to."""
        found: dict[str, float] = dict.fromkeys(self.passes, 0.0)
        for one in self._segments:
            length = max(min(one.stop, row + num_samples) - max(one.start, row), 0)
            for name in found if length else ():
                found[name] += length * one.weights.get(name, 0.0) / one.total
        return found

    def pass_rows(self, row: int, most: int = 1) -> dict[str, list[tuple[int, int]]]:
        """Tell at which rows behind ``row`` each source begins its next passes, at most so many, and their numbers.

        A pass that never comes is left out.
        """
        drawn = self.drawn(0, row)
        found: dict[str, list[tuple[int, int]]] = {}
        for name, passes in self.passes.items():
            first = int(passes.read(drawn[name])) + 1
            rows = [(self._row_of(row, name, passes.draws(number) - drawn[name]), number)
                    for number in range(first, first + most)]  # fmt: skip
            found[name] = [(at, number) for at, number in rows if at is not None]
        return found

    def joins(self, row: int) -> list[tuple[int, str]]:
        """Tell at which row behind ``row`` shards that a source got in mid-run are first read; by row."""
        drawn, found = self.drawn(0, row), []
        for name, passes in self.passes.items():
            missing = passes.draws(passes.sizes[-1][0]) - drawn[name]
            at = self._row_of(row, name, missing) if missing > 0 else None
            if at is not None:
                found.append((at, name))
        return sorted(found)

    def openings(self, row: int) -> list[tuple[int, str]]:
        """Tell at which row behind ``row`` sources without a weight get one, and all that do so there; by row."""
        found = []
        for before, one in pairwise(self._segments):
            opened = [name for name in self.passes if one.weights[name] and not before.weights[name]]
            if opened and one.start > row:
                found.append((one.start, some_names(opened)))
        return found

    def _row_of(self, row: int, name: str, missing: float) -> int | None:
        """Return the row behind ``row`` up to which so many more samples of a source are drawn; None: never."""
        for one in self._segments:
            begin, weight = max(one.start, row), one.weights.get(name, 0)
            if one.stop <= begin or not weight:
                continue
            needed = missing * one.total / weight
            if needed <= one.stop - begin:
                return begin + math.ceil(needed)
            missing -= (one.stop - begin) * weight / one.total
        return None
