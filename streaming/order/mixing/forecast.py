"""Compute how much a run draws from each source of a mixture: approximately by its ledger, or exactly by its orders."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from streaming.common.arguments import some_names
from streaming.order.mixing.endless_order import EndlessOrder
from streaming.order.mixing.passes import MixedPasses
from streaming.order.plan.ledger import Ledger
from streaming.order.plan.order import ENDLESS
from streaming.order.plan.schedule import moderate


def drawn_before(orders: MixedPasses | EndlessOrder, row: int) -> dict[str, int]:
    """Count the samples of each source in the first ``row`` rows of a run, by arithmetic.

    Args:
        orders: Orders of the mixture.
        row: Samples of the run, over all ranks and epochs.
    """
    return dict(zip(orders.sources.every_name, orders.drawn_before(row).tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class Passes:
    """Count the passes over one source; later passes are larger if the source has grown.

    Attributes:
        sizes: Pairs of a first pass and the number of samples of each pass from it on; ascending, the first for pass 0.
    """

    sizes: tuple[tuple[int, int], ...]

    def draws(self, number: int) -> int:
        """Return the number of samples in all passes before pass ``number``."""
        stops = [*(first for first, _ in self.sizes[1:]), number]
        return sum(
            max(min(stop, number) - first, 0) * size for (first, size), stop in zip(self.sizes, stops, strict=True)
        )

    def read(self, count: float) -> float:
        """Return the number of passes that the first ``count`` samples make."""
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
    """Predict when samples of each source are due, by its share; the actual order deviates by about a chunk per lane.

    Args:
        ledger: Ledger of the run.
        passes: Passes over each source, by name.
    """

    def __init__(self, ledger: Ledger, passes: Mapping[str, Passes]) -> None:
        steps = ledger.last.blend.shares(ledger.segments())
        rows, mixes = zip(*steps, strict=True)
        stops = [*rows[1:], math.inf]
        self.passes = dict(passes)
        self._segments = [
            _Segment(row, stop, weights, sum(weights.values()))
            for row, stop, weights in zip(rows, stops, map(moderate, mixes), strict=True)
        ]

    def drawn(self, row: int, num_samples: int) -> dict[str, float]:
        """Return the number of samples of each source in rows ``[row, row + num_samples)``, by its share."""
        found: dict[str, float] = dict.fromkeys(self.passes, 0.0)
        for one in self._segments:
            length = max(min(one.stop, row + num_samples) - max(one.start, row), 0)
            for name in found if length else ():
                found[name] += length * one.weights.get(name, 0.0) / one.total
        return found

    def pass_rows(self, row: int, most: int = 1) -> dict[str, list[tuple[int, int]]]:
        """Return the rows after ``row`` at which sources begin their next ``most`` passes, with pass numbers.

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
        """Return the rows after ``row`` at which shards added during the run are first read, with their sources."""
        drawn, found = self.drawn(0, row), []
        for name, passes in self.passes.items():
            missing = passes.draws(passes.sizes[-1][0]) - drawn[name]
            at = self._row_of(row, name, missing) if missing > 0 else None
            if at is not None:
                found.append((at, name))
        return sorted(found)

    def openings(self, row: int) -> list[tuple[int, str]]:
        """Return the rows after ``row`` at which sources without a weight get one, with these sources, in order."""
        found = []
        for before, one in pairwise(self._segments):
            opened = [name for name in self.passes if one.weights[name] and not before.weights[name]]
            if opened and one.start > row:
                found.append((one.start, some_names(opened)))
        return found

    def _row_of(self, row: int, name: str, missing: float) -> int | None:
        """Return the row after ``row`` by which ``missing`` more samples of a source are drawn; None: never."""
        for one in self._segments:
            begin, weight = max(one.start, row), one.weights.get(name, 0)
            if one.stop <= begin or not weight:
                continue
            needed = missing * one.total / weight
            if needed <= min(one.stop - begin, ENDLESS):
                return begin + math.ceil(needed)
            missing -= (one.stop - begin) * weight / one.total
        return None
