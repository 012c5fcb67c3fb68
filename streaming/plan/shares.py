"""Deal the positions of a lane to named sources in given shares: exact, seekable, in integers alone.

A balanced binary tree stands over the sources. A node that has been passed ``k`` times in a lane has sent::

    left(k) = (P(k) + phase(node, lane)) >> 32,    P(k) = sum over segments of p(node, segment) * (passages in it)

to its left side and the rest to its right side, where ``p`` is the share of the left side in units of 2**-32. The
function grows by 0 or 1, so it also says where passage ``k`` goes, without its predecessors. Over the lanes the phases
of a node are a permutation of ``(i + 1/2) / lanes``: by Hermite's identity the counts over all lanes are then the
rounded shares of the whole, and no two lanes deal alike.

Sources are known by name: seeds and phases depend on names and never on the order in which sources are listed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from streaming.arguments import checked_int
from streaming.errors import ConfigError
from streaming.plan.permutation import permutations
from streaming.types import Int64Array

MAX_POSITIONS = 2**50
"""Positions of one lane; products of a share and a count then need two 64-bit words at most."""
_UNIT_BITS = 32
_LOW_BITS = 20  # of a count, so that share * (count >> 20) fits into 62 bits
_UNIT = 1 << _UNIT_BITS
_MASK = np.int64(_UNIT - 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """Hold the weights of the sources from one position of every lane on.

    Attributes:
        start: First lane position to which they apply.
        weights: Weight of each source; only their ratios matter. 0 is allowed, but not for all.
    """

    start: int
    weights: Mapping[str, float]


class ShareTree:
    """Say which source each position of a lane draws from, and its how many-th draw that is.

    Immutable after construction but for what it remembers of lanes, which is only ever what it would compute again:
    safe to share between threads.

    Args:
        segments: Weights by lane position, all for the same sources; the first starts at 0.
        lanes: L, the number of lanes.
        seed: Of the phases.

    Raises:
        ConfigError: Segments are empty, not in order, or name different sources; a weight is negative or no number.

    Example:
        >>> tree = ShareTree([Segment(start=0, weights={"web": 3, "code": 1})], lanes=1, seed=0)
        >>> sources, draws = tree.draws(0, 0, 8)
        >>> sorted(tree.names[source] for source in sources)
        ['code', 'code', 'web', 'web', 'web', 'web', 'web', 'web']
    """

    def __init__(self, segments: Sequence[Segment], *, lanes: int, seed: int) -> None:
        self.lanes = checked_int("lanes", lanes, 1, 2**20)
        self.seed = checked_int("seed", seed, 0, 2**64 - 1)
        weights = _checked(segments)
        self.names: tuple[str, ...] = tuple(sorted(weights[0]))
        """The sources; what methods return counts in this order."""
        self._starts: Int64Array = np.array([segment.start for segment in segments], np.int64)
        self._number = {name: number for number, name in enumerate(self.names)}
        self._root = _Node.over(list(self.names), weights, self.lanes, self.seed)
        self._borders: dict[int, dict[int, _Borders]] = {}

    def draws(self, lane: int, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        """Sources and draw numbers of lane positions ``[start, stop)``, int64[n] each.

        A source's draws in one lane are numbered 0, 1, 2, … in the order of the positions.

        Raises:
            ConfigError: There is no such lane, or no such range.
        """
        self._check(lane, start, stop)
        sources = np.empty(stop - start, np.int64)
        numbers = np.empty(stop - start, np.int64)
        borders = self._borders_of(lane)
        pending = [(self._root, start, stop, np.arange(stop - start))]
        while pending:
            node, first, last, places = pending.pop()
            if first == last:
                continue
            if isinstance(node, str):
                sources[places] = self._number[node]
                numbers[places] = np.arange(first, last)
                continue
            sent = borders[id(node)].left(np.arange(first, last + 1))
            goes_left = np.diff(sent) > 0
            low, high = int(sent[0]), int(sent[-1])
            pending.append((node.left, low, high, places[goes_left]))
            pending.append((node.right, first - low, last - high, places[~goes_left]))
        return sources, numbers

    def counts(self, lane: int, position: int) -> Int64Array:
        """Draws of each source among the first ``position`` positions of a lane, int64[number of sources]."""
        self._check(lane, position, position)
        counts = np.zeros(len(self.names), np.int64)
        borders = self._borders_of(lane)
        pending: list[tuple[_Node | str, int]] = [(self._root, position)]
        while pending:
            node, passed = pending.pop()
            if isinstance(node, str):
                counts[self._number[node]] = passed
                continue
            low = int(borders[id(node)].left(np.array([passed]))[0])
            pending += [(node.left, low), (node.right, passed - low)]
        return counts

    def depth(self, name: str) -> int:
        """Nodes above a source: its count strays by less than one for each of them."""
        depth, node = 0, self._root
        while not isinstance(node, str):
            node, depth = (node.left if name in node.left_names else node.right), depth + 1
        return depth

    def _check(self, lane: int, start: int, stop: int) -> None:
        checked_int("lane", lane, 0, self.lanes - 1)
        if not 0 <= start <= stop <= MAX_POSITIONS:
            raise ConfigError(f"lane positions [{start}, {stop}): expected a range within [0, 2**50]")

    def _borders_of(self, lane: int) -> dict[int, _Borders]:
        """What each node has sent where at the segments' starts, in one lane."""
        known = self._borders.get(lane)
        if known is None:
            known = {}
            pending: list[tuple[_Node | str, Int64Array]] = [(self._root, self._starts)]
            while pending:
                node, starts = pending.pop()
                if isinstance(node, str):
                    continue
                borders = known[id(node)] = _Borders(starts, node.shares, int(node.phases[lane]))
                left = borders.left(starts)
                pending += [(node.left, left), (node.right, starts - left)]
            self._borders[lane] = known
        return known


class _Node:
    """Split passages between two sides; a side is a node or the name of a source."""

    def __init__(self, names: list[str], weights: Sequence[Mapping[str, Fraction]], lanes: int, seed: int) -> None:
        cut = _halved([weights[0][name] for name in names])
        self.left_names = frozenset(names[:cut])
        totals = [sum((segment[name] for name in names), Fraction()) for segment in weights]
        lefts = [sum((segment[name] for name in names[:cut]), Fraction()) for segment in weights]
        # Rounded half up; a node that no weight reaches is never passed, whatever its share.
        self.shares: Int64Array = np.array(
            [
                int(left / total * _UNIT + Fraction(1, 2)) if total else _UNIT // 2
                for left, total in zip(lefts, totals, strict=True)
            ],
            np.int64,
        )
        self.phases = _phases(names, lanes, seed)
        self.left = _Node.over(names[:cut], weights, lanes, seed)
        self.right = _Node.over(names[cut:], weights, lanes, seed)

    @classmethod
    def over(cls, names: list[str], weights: Sequence[Mapping[str, Fraction]], lanes: int, seed: int) -> _Node | str:
        """A tree over some sources: the heaviest first, ties by name."""
        if len(names) == 1:
            return names[0]
        return cls(sorted(names, key=lambda name: (-weights[0][name], name)), weights, lanes, seed)


class _Borders:
    """Evaluate what one node sends to its left side in one lane."""

    def __init__(self, starts: Int64Array, shares: Int64Array, phase: int) -> None:
        self._starts, self._shares = starts, shares
        # P at the segments' starts, as the words above and below 2**32; the phase counts as if it had come before.
        high, low = _product(shares[:-1], np.diff(starts))
        above = np.concatenate([[0], np.cumsum(high)])
        below = np.concatenate([[0], np.cumsum(low)]) + phase
        self._above, self._below = above + (below >> _UNIT_BITS), below & _MASK

    def left(self, passed: Int64Array) -> Int64Array:
        """Of the first ``passed`` passages, how many went left; int64, any shape."""
        segment = np.searchsorted(self._starts, passed, side="right") - 1
        high, low = _product(self._shares[segment], passed - self._starts[segment])
        sent: Int64Array = self._above[segment] + high + ((self._below[segment] + low) >> _UNIT_BITS)
        return sent


def _product(shares: Int64Array, counts: Int64Array) -> tuple[Int64Array, Int64Array]:
    """``shares * counts``, shares up to 2**32 and counts up to 2**50, as the words above and below 2**32."""
    upper = shares * (counts >> _LOW_BITS)
    lower = shares * (counts & ((1 << _LOW_BITS) - 1))
    keep = _UNIT_BITS - _LOW_BITS
    rest = ((upper & ((1 << keep) - 1)) << _LOW_BITS) + lower
    return (upper >> keep) + (rest >> _UNIT_BITS), rest & _MASK


def _halved(weights: Sequence[Fraction]) -> int:
    """Where to cut a list of weights so that its sides weigh most nearly the same; both sides hold some."""
    total, left = sum(weights, Fraction()), Fraction()
    best, cut = None, len(weights) // 2
    for index, weight in enumerate(weights[:-1], start=1):
        left += weight
        uneven = abs(total - 2 * left)
        if total and (best is None or uneven < best):
            best, cut = uneven, index
    return cut


def _phases(names: Sequence[str], lanes: int, seed: int) -> Int64Array:
    """``(i + 1/2) / lanes`` in units of 2**-32, permuted over the lanes by the seed and the node's names; int64[L]."""
    text = "\n".join(sorted(names)).encode()
    key = int.from_bytes(hashlib.blake2b(text, digest_size=8, key=seed.to_bytes(8, "little")).digest(), "little")
    places = permutations(key, np.array([0]), lanes)[0]
    phases: Int64Array = (2 * places + 1) * (_UNIT // 2) // lanes
    return phases


def _checked(segments: Sequence[Segment]) -> list[dict[str, Fraction]]:
    """The weights of the segments as exact numbers."""
    if not segments or segments[0].start != 0:
        raise ConfigError("weights: the first segment must start at position 0")
    exact = []
    for before, segment in zip([None, *segments], segments, strict=False):
        if before is not None and (segment.start < before.start or set(segment.weights) != set(before.weights)):
            raise ConfigError(
                f"weights from position {segment.start}: expected one not before {before.start}, for the sources "
                f"{sorted(before.weights)}, got the sources {sorted(segment.weights)}"
            )
        exact.append(_exact(segment))
    return exact


def _exact(segment: Segment) -> dict[str, Fraction]:
    weights = {}
    for name, weight in segment.weights.items():
        number = isinstance(weight, (int, float, np.number, Fraction)) and not isinstance(weight, bool)
        if not number or not 0 <= weight < float("inf"):
            raise ConfigError(f"weights: {name!r}: expected a number from 0 on, got {weight!r}")
        weights[name] = Fraction(weight if isinstance(weight, (int, Fraction)) else float(weight))
    if not any(weights.values()):
        raise ConfigError(f"weights from position {segment.start}: at least one must be above 0, got {weights}")
    return weights
