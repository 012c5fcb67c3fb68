"""Deal the positions of a lane to named sources in given shares: exact, seekable, in integer arithmetic.

The sources are the leaves of a balanced binary tree. A node that has been passed ``k`` times in a lane has sent::

    left(k) = (P(k) + phase(node, lane)) >> 32,    P(k) = sum over segments of p(node, segment) * (passages in it)

passages to its left side and the rest to its right side, where ``p`` is the share of the left side in units of 2**-32.
The function grows by 0 or 1 per passage, so it also determines where passage ``k`` goes, independently of earlier ones.
Over the lanes, the phases of a node are a permutation of ``(i + 1/2) / lanes``. By Hermite's identity, the counts over
all lanes are then the rounded shares of the whole, and no two lanes deal the same sequence.

One leaf may be ``apart``: a child of the root. All lanes pass the root once in every row, so its draws come in rounds
of one draw per lane, ordered by the lanes' phases, whatever the weights are. The numbers of its draws over all lanes
thus follow from those in each lane (:attr:`ShareTree.lane_places`): draw ``k`` of a lane is number ``k * lanes +
place``.

Sources are identified by name: seeds and phases depend on names, never on the order in which sources are listed.
Sources added during a run form a tree of their own beside the existing one, so that earlier positions do not change::

    web, code, math from the start; chat and news from row 512,000 on          (((web) (code math)) (chat news))
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from streaming.common.arguments import checked_int, checked_seed
from streaming.common.arrays import sums
from streaming.errors import ConfigError
from streaming.order.mixing.endless_order import checked_schedule
from streaming.order.mixing.passes import Weights, keep_latest
from streaming.order.plan.permutation import permutations
from streaming.order.plan.schedule import checked_weights
from streaming.types import Int64Array

MAX_POSITIONS = 2**50
"""Maximum number of positions in a lane; products of a share and a count then fit into two 64-bit words."""
UNIT_BITS = 32
_LOW_BITS = 20  # of a count, so that share * (count >> 20) fits into 62 bits
_UNIT = 1 << UNIT_BITS
_MASK = np.int64(_UNIT - 1)
_KEPT_NUMBERS = 2**23  # 64 MiB of cached lane states: three numbers per node and segment


class LaneShares(Protocol):
    """Determine which source each position of a lane draws from, and the number of that draw. Thread-safe.

    The draws of a source in one lane are numbered 0, 1, 2, … in the order of positions.
    """

    def draws(self, lane: int, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        """Return the sources (indices into the names) and draws at lane positions ``[start, stop)``, int64 [n] each.

        Raises:
            ConfigError: There is no such lane, or no such range.
        """

    def counts(self, lane: int, position: int) -> Int64Array:
        """Count the draws of each source among the first ``position`` positions of a lane, int64 [sources].

        Raises:
            ConfigError: There is no such lane, or no such position.
        """

    def positions(self, lane: int, source: int, draws: Int64Array) -> Int64Array:
        """Return the lane positions of some draws of a source, int64 [n].

        A draw that never comes has the position :data:`MAX_POSITIONS`.
        """


class _State(NamedTuple):
    """The passages of all nodes in one lane before each segment, int64 [nodes, segments] each.

    ``passed`` counts passages; ``above`` and ``below`` are ``P + phase`` as the words above and below 2**32, so
    ``above`` is also the number of passages that went left.
    """

    passed: Int64Array
    above: Int64Array
    below: Int64Array


class ShareTree:
    """The shares of :class:`LaneShares`, for single positions.

    Immutable except for caches, and thread-safe.

    Args:
        names: The sources; counts are returned in this order.
        schedule: Weights by lane position. A source joins the tree with the first entry that names it, even with weight
            0.
        lanes: L, the number of lanes.
        seed: Seed of the phases.
        apart: The source directly below the root, beside a tree of all others.

    Attributes:
        lane_places: int64 [L], for the source apart: the place of each lane in a round of its draws.

    Raises:
        ConfigError: The weights are invalid.

    Example:
        >>> tree = ShareTree(["web", "code"], [Weights(start=0, weights={"web": 3, "code": 1})], lanes=1, seed=0)
        >>> sources, draws = tree.draws(0, 0, 8)
        >>> sorted(tree.names[source] for source in sources)
        ['code', 'code', 'web', 'web', 'web', 'web', 'web', 'web']
    """

    def __init__(
        self, names: Sequence[str], schedule: Sequence[Weights], *, lanes: int, seed: int, apart: str | None = None
    ) -> None:
        self.lanes = checked_int("lanes", lanes, 1, 2**20)
        self.seed = checked_seed("seed", seed)
        self.names, self._apart = tuple(names), apart
        self._index = {name: index for index, name in enumerate(self.names)}
        entries = checked_schedule(self.names, schedule)
        self.starts: Int64Array = np.array([entry.start for entry in entries], np.int64)
        self._exact = [checked_weights(entry.weights) for entry in entries]
        self._sides: list[tuple[int, int]] = []  # for each node: a node, or -1 - source
        self._below: list[frozenset[str]] = []  # for each node: the sources below it
        shares: list[list[int]] = []
        phases: list[Int64Array] = []
        self._grow(shares, phases)
        nodes = len(self._sides)
        self.shares: Int64Array = np.array(shares, np.int64).reshape(nodes, len(entries))
        self.phases: Int64Array = np.array(phases, np.int64).reshape(nodes, self.lanes)
        self._children: Int64Array = np.array(self._sides, np.int64).reshape(nodes, 2)
        self.lane_places: Int64Array = np.argsort(
            np.argsort(-self._phases_of([apart or ""]))
        )  # the largest comes first
        self._levels = list(_levels(self.root, self._sides))
        self._states: dict[int, _State] = {}

    # --- the tree ---

    def _grow(self, shares: list[list[int]], phases: list[Int64Array]) -> None:
        """Make the nodes: for each segment, a tree over its new sources, and a node that joins it to the rest."""
        self.root, known = -1, frozenset[str]()
        for weights in self._exact:
            fresh = sorted(set(weights) - known - {self._apart})
            if not fresh:
                continue
            side = self._over(fresh, weights, shares, phases)
            self.root = self._split((self.root, known), (side, frozenset(fresh)), shares, phases) if known else side
            known |= set(fresh)
        if self._apart is not None and any(self._apart in weights for weights in self._exact):
            leaf = -1 - self._index[self._apart]
            if known:
                alone = (leaf, frozenset([self._apart]))
                leaf = self._split(alone, (self.root, known), shares, phases)
                phases[-1] = self._phases_of([self._apart])  # independent of sources that join the others later
            self.root = leaf

    def _over(
        self, names: Sequence[str], weights: Mapping[str, Fraction], shares: list[list[int]], phases: list[Int64Array]
    ) -> int:
        """Return a balanced tree over some sources: the heaviest first, ties by name."""
        if len(names) == 1:
            return -1 - self._index[names[0]]
        names = sorted(names, key=lambda name: (-weights[name], name))
        cut = _halved([weights[name] for name in names])
        sides = [(self._over(some, weights, shares, phases), frozenset(some)) for some in (names[:cut], names[cut:])]
        return self._split(sides[0], sides[1], shares, phases)

    def _split(
        self, left: tuple[int, frozenset[str]], right: tuple[int, frozenset[str]], shares: list[list[int]],
        phases: list[Int64Array],
    ) -> int:  # fmt: skip
        """Make a node above two sides and return it."""
        found = []
        for weights in self._exact:
            part, other = (
                sum((weights.get(name, Fraction()) for name in side), Fraction()) for _, side in (left, right)
            )
            # Rounded half up; a node with no weight below it is never passed, whatever its share.
            found.append(int(part / (part + other) * _UNIT + Fraction(1, 2)) if part + other else _UNIT // 2)
        shares.append(found)
        phases.append(self._phases_of(left[1] | right[1]))
        self._sides.append((left[0], right[0]))
        self._below.append(left[1] | right[1])
        return len(self._sides) - 1

    def _phases_of(self, names: Iterable[str]) -> Int64Array:
        return _phases(names, self.lanes, self.seed)

    def path(self, source: int) -> list[tuple[int, int]]:
        """Return the nodes above a source from the root down, and the side that leads to it; [] if not drawn."""
        parents = {child: (node, side) for node, sides in enumerate(self._sides) for side, child in enumerate(sides)}
        found, at = [], -1 - source
        while at in parents:
            found.append(parents[at])
            at = parents[at][0]
        return found[::-1]

    # --- draws ---

    def draws(self, lane: int, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        """See ``LaneShares``."""
        self._check(lane, start, stop)
        sources, numbers = np.empty(stop - start, np.int64), np.empty(stop - start, np.int64)
        borders = [start, *self.starts[(self.starts > start) & (self.starts < stop)].tolist(), stop]
        for low, high in pairwise(borders):
            here = slice(low - start, high - start)
            self._descend(lane, self._segment(low), np.arange(low, high), sources[here], numbers[here])
        return sources, numbers

    def counts(self, lane: int, position: int) -> Int64Array:
        """See ``LaneShares``."""
        self._check(lane, position, position)
        segment = self._segment(position)
        # Passages of each node, followed by those of each source: index -1 is source 0.
        passed = np.zeros(len(self._sides) + len(self.names), np.int64)
        passed[self.root] = position
        for nodes in self._levels:
            left, _ = self._went(lane, segment, nodes, passed[nodes])
            passed[self._children[nodes, 0]] = left
            passed[self._children[nodes, 1]] = passed[nodes] - left
        return passed[::-1][: len(self.names)].copy()

    def positions(self, lane: int, source: int, draws: Int64Array) -> Int64Array:
        """See ``LaneShares``."""
        path, state = self.path(source), self._state(lane)
        if not path and self.root != -1 - source:
            return np.full(len(draws), MAX_POSITIONS)
        found = np.array(draws, np.int64)
        for node, side in reversed(path):
            # The number of passages to the right is the same kind of function, with the complements of share and phase.
            given, below, shares = state.above[node], state.below[node], self.shares[node]
            if side:
                given, below, shares = state.passed[node] - given, _MASK - below, _UNIT - shares
            segment = np.searchsorted(given, found, side="right") - 1
            share, missing = shares[segment], found - given[segment]
            steps = np.where(found >= MAX_POSITIONS, MAX_POSITIONS, steps_to(share, missing, below[segment]))
            found = np.minimum(state.passed[node][segment] + steps, MAX_POSITIONS)
        return found

    def begun(self, source: int) -> Int64Array:
        """Count the draws of a source in each lane before each segment, int64 [L, segments]."""
        found = np.broadcast_to(self.starts, (self.lanes, len(self.starts)))
        path = self.path(source)
        if not path and self.root != -1 - source:
            return np.zeros_like(found)
        for node, side in path:
            high, low = product(self.shares[node, :-1], np.diff(found, axis=1))
            left = np.zeros_like(found)
            left[:, 1:] = np.cumsum(high, axis=1) + (np.cumsum(low, axis=1) + self.phases[node][:, None] >> UNIT_BITS)
            found = found - left if side else left
        return found

    @cached_property
    def _of_root(self) -> tuple[Int64Array, Int64Array, Int64Array]:
        """The root's passages to the left in any lane before each segment, as two words, and its sorted phases."""
        above, below = product(self.shares[self.root, :-1], np.diff(self.starts))
        return sums(above), sums(below), np.sort(self.phases[self.root])

    def rows_of(self, positions: Int64Array) -> Int64Array:
        """Count the draws of the source apart before some positions, over all lanes, int64 [n]."""
        if self.root < 0:
            return positions * self.lanes
        above, below, phases = self._of_root
        segment = np.searchsorted(self.starts, positions, side="right") - 1
        high, low = product(self.shares[self.root, segment], positions - self.starts[segment])
        low += below[segment]
        # A lane has drawn once more if its phase carries the low word over.
        more = np.searchsorted(phases, _UNIT - (low & _MASK))
        return (above[segment] + high + (low >> UNIT_BITS)) * self.lanes + self.lanes - more

    def draws_at(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the sources and draws at given positions, ascending, in a tree of one lane, int64 [n] each."""
        sources, numbers = np.empty_like(positions), np.empty_like(positions)
        cuts = np.searchsorted(positions, self.starts).tolist()
        for segment, (low, high) in enumerate(pairwise([*cuts, len(positions)])):
            self._descend(0, segment, positions[low:high], sources[low:high], numbers[low:high])
        return sources, numbers

    def _descend(self, lane: int, segment: int, passed: Int64Array, sources: Int64Array, numbers: Int64Array) -> None:
        """Write the source and the draw's number of each position of a segment into ``sources`` and ``numbers``."""
        rows, at = np.arange(len(passed)), np.full(len(passed), self.root)
        while len(rows):
            done = at < 0
            sources[rows[done]], numbers[rows[done]] = -1 - at[done], passed[done]
            rows, at, passed = rows[~done], at[~done], passed[~done]
            went, goes_left = self._went(lane, segment, at, passed)
            passed = np.where(goes_left, went, passed - went)
            at = self._children[at, np.where(goes_left, 0, 1)]

    def _check(self, lane: int, start: int, stop: int) -> None:
        checked_int("lane", lane, 0, self.lanes - 1)
        if not 0 <= start <= stop <= MAX_POSITIONS:
            raise ConfigError(f"lane positions [{start}, {stop}): expected a range within [0, 2**50]")

    def _segment(self, position: int) -> int:
        return int(np.searchsorted(self.starts, position, side="right")) - 1

    def _went(
        self, lane: int, segment: int, nodes: Int64Array, passed: Int64Array
    ) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
        """Return how many of the first ``passed`` passages went left, and whether the next goes left; [n] each."""
        state, share = self._state(lane), self.shares[nodes, segment]
        high, low = product(share, passed - state.passed[nodes, segment])
        below = state.below[nodes, segment] + low
        left = state.above[nodes, segment] + high + (below >> UNIT_BITS)
        return left, (below & _MASK) + share >= _UNIT

    def _state(self, lane: int) -> _State:
        """Return the passages of nodes before each segment of one lane; cached for some lanes."""
        known = self._states.get(lane)
        if known is not None:
            return known
        shape = self.shares.shape
        passed, above, below = (np.zeros(shape, np.int64) for _ in range(3))
        if self._levels:
            passed[self.root] = self.starts
        for nodes in self._levels:
            here = passed[nodes]
            # P at the segments' starts, [nodes, segments]; the phase is added before the first.
            high, low = product(self.shares[nodes, :-1], np.diff(here, axis=1))
            above[nodes, 1:], below[nodes, 1:] = np.cumsum(high, axis=1), np.cumsum(low, axis=1)
            below[nodes] += self.phases[nodes, lane][:, None]
            above[nodes] += below[nodes] >> UNIT_BITS
            below[nodes] &= _MASK
            for side, went in ((0, above[nodes]), (1, here - above[nodes])):
                children = self._children[nodes, side]
                passed[children[children >= 0]] = went[children >= 0]
        most = max(_KEPT_NUMBERS // max(3 * passed.size, 1), 1)
        found = _State(passed, above, below)
        keep_latest(self._states, lane, found, most)
        return found


class BatchShares:
    """The shares of :class:`LaneShares`, for whole batches: all lanes draw from one source for the length of a batch.

    Args:
        names: See ``ShareTree``.
        schedule: Weights by lane position; an entry takes effect with the first batch that begins there or later.
        batch_rows: Positions of a batch in each lane.
        seed: See ``ShareTree``.

    Raises:
        ConfigError: See ``ShareTree``.
    """

    def __init__(self, names: Sequence[str], schedule: Sequence[Weights], *, batch_rows: int, seed: int) -> None:
        self._rows = batch_rows
        by_batch = [Weights(start=-(-entry.start // batch_rows), weights=entry.weights) for entry in schedule]
        self._tree = ShareTree(names, by_batch, lanes=1, seed=seed)

    def draws(self, lane: int, start: int, stop: int) -> tuple[Int64Array, Int64Array]:  # noqa: ARG002  all alike
        """See ``LaneShares``."""
        first = start // self._rows
        sources, numbers = self._tree.draws(0, first, -(-stop // self._rows))
        batch, place = np.divmod(np.arange(start, stop), self._rows)
        return sources[batch - first], numbers[batch - first] * self._rows + place

    def counts(self, lane: int, position: int) -> Int64Array:  # noqa: ARG002  all alike
        """See ``LaneShares``."""
        batch, place = divmod(position, self._rows)
        counts = self._tree.counts(0, batch) * self._rows
        if place:
            counts[self._tree.draws(0, batch, batch + 1)[0]] += place
        return counts

    def positions(self, lane: int, source: int, draws: Int64Array) -> Int64Array:  # noqa: ARG002  all alike
        """See ``LaneShares``."""
        batch, place = np.divmod(draws, self._rows)
        return np.minimum(self._tree.positions(0, source, batch) * self._rows + place, MAX_POSITIONS)


def steps_to(share: Int64Array, missing: Int64Array, below: Int64Array) -> Int64Array:
    """Count the passages before passage number ``missing`` to a side, for shares in units of 2**-32, int64 [n].

    This is the smallest m with ``share * (m + 1) + below >= (missing + 1) * 2**32``; :data:`MAX_POSITIONS` if there is
    none.
    """
    some = np.maximum(share, 1)
    times, rest = np.divmod(missing, some)
    words = (rest.astype(np.uint64) << np.uint64(UNIT_BITS)) + (_MASK - below).astype(np.uint64)
    never = (share == 0) | (times >= MAX_POSITIONS >> UNIT_BITS)
    steps = (np.where(never, 0, times) << UNIT_BITS) + (words // some.astype(np.uint64)).astype(np.int64)
    return np.where(never, MAX_POSITIONS, steps)


def _levels(root: int, sides: Sequence[tuple[int, int]]) -> Iterator[Int64Array]:
    """Yield the nodes, level by level from the root down."""
    level = [root] if root >= 0 else []
    while level:
        yield np.array(level, np.int64)
        level = [child for node in level for child in sides[node] if child >= 0]


def product(shares: Int64Array, counts: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return ``shares * counts``, shares up to 2**32 and counts up to 2**50, as the words above and below 2**32."""
    upper = shares * (counts >> _LOW_BITS)
    lower = shares * (counts & ((1 << _LOW_BITS) - 1))
    keep = UNIT_BITS - _LOW_BITS
    rest = ((upper & ((1 << keep) - 1)) << _LOW_BITS) + lower
    return (upper >> keep) + (rest >> UNIT_BITS), rest & _MASK


def _halved(weights: Sequence[Fraction]) -> int:
    """Return where to cut a list of weights into two non-empty sides whose sums are as equal as possible."""
    total, left = sum(weights, Fraction()), Fraction()
    best, cut = None, len(weights) // 2
    for index, weight in enumerate(weights[:-1], start=1):
        left += weight
        uneven = abs(total - 2 * left)
        if total and (best is None or uneven < best):
            best, cut = uneven, index
    return cut


def _phases(names: Iterable[str], lanes: int, seed: int) -> Int64Array:
    """Return ``(i + 1/2) / lanes`` in units of 2**-32, int64 [L], permuted by the seed and the node's names."""
    text = "\n".join(sorted(names)).encode()
    key = int.from_bytes(hashlib.blake2b(text, digest_size=8, key=seed.to_bytes(8, "little")).digest(), "little")
    places = permutations(key, np.array([0]), lanes)[0]
    phases: Int64Array = (2 * places + 1) * (_UNIT // 2) // lanes
    return phases
