"""Deal small sources by single samples and lay the others in whole chunks: the order of ``quotas="chunks"``.

Laid in chunks, lanes draw from a source at different times: one reads a chunk of it while another waits for its next.
That evens out over a source with many chunks. But of one with fewer chunks than lanes, some samples would come a dozen
times before others came once. So the tree of integer splits (:mod:`streaming.mixing.shares`) deals the positions of a
lane to each small source and to all others together, which are laid on the positions that are theirs
(:mod:`streaming.mixing.lanes`)::

    lane position      0    1    2    3    4    5    6    7
    drawn from        laid laid tiny laid laid laid tiny laid
    place in it        0    1    0    2    3    4    1    5       ->  MixedLanes: web's and code's chunks, by stamps

The chunks of small sources are in memory all the time; those of the others, as in a mixture without small ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

import numpy as np

from streaming.mixing.exact import ExactLanes
from streaming.mixing.lanes import MixedLanes, stretch_of
from streaming.mixing.passes import Sources, Weights
from streaming.mixing.shares import MAX_POSITIONS, ShareTree
from streaming.plan.order import ENDLESS, LaneParts, OrderSettings
from streaming.types import Int64Array

LAID = "/"
"""The leaf of all sources that are laid in chunks; no source has this name."""
_WINDOWS_AHEAD, _SAMPLES_AHEAD = 64, 2**12
"""So many windows and samples beyond a lane's position nothing is laid: chunks move by a few windows."""


class LaidStream:
    """Sources laid in chunks, as a stream that lanes draw from.

    Args:
        orders: Their order; its lane positions are the draws.
    """

    def __init__(self, orders: MixedLanes) -> None:
        self._orders = orders

    def draws(self, lane: int, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        """See ``Stream``."""
        return self._orders.lane_samples(lane, start, stop)

    def parts(self, low: int, high: int, start: int, stop: int) -> LaneParts:
        """See ``Stream``."""
        return self._orders.lane_parts(low, high, start, stop)

    def find(self, chunk_id: int, offset: int, start: int, stop: int) -> list[tuple[int, int]]:
        """See ``Stream``."""
        return self._orders.find(chunk_id, offset, start, stop)


class EvenLanes(ExactLanes):
    """The order of an endless mixture dealt in chunks, whose small sources (``Sources.small``) are dealt by samples.

    After ``k`` passes over a small source, each of its samples has come ``k`` times, or once more or less (twice, near
    the border of a window); see ``ExactLanes``. For the other sources see ``MixedLanes``, whose time is the number of
    samples that a lane draws from all of them. Other weights among them apply from a row behind all that is laid. While
    they have no weight no row is, and other weights then apply a fixed number of draws after they have one again.

    Args:
        sources: See ``Endless``. Absent sources are small if nothing is recorded to be laid of them.
        schedule: See ``Endless``.
        lock: See ``Endless``.
    """

    def __init__(
        self, sources: Sources, schedule: Sequence[Weights], *, lock: AbstractContextManager[Any] | None = None
    ) -> None:
        small = set(sources.small)
        self._large = [name for name in sources.every_name if name not in small]
        self._own = [name for name in sources.names if name in small]  # dealt by samples
        self._laid: MixedLanes | None = None
        self._laid_here = any(name in sources.names for name in self._large)
        gone = [name for name in sources.every_name if name in small and name not in self._own]
        # Leaves with a stream come first. Without a large source nothing is laid: then their leaf is gone, too.
        large = [LAID] if self._large else []
        self._leaves = (*(large if self._laid_here else ()), *self._own, *gone, *(() if self._laid_here else large))
        super().__init__(sources, schedule, lock=lock)

    @property
    def stretch(self) -> int:
        """See ``Orders``: like that of ``MixedLanes``."""
        return stretch_of(self.settings)

    def _weigh(self) -> None:
        """See ``Endless``."""
        self._by_leaf = tuple(map(self._leaf_weights, self.schedule))
        tree = ShareTree(self._leaves, self._by_leaf, lanes=self.settings.lanes, seed=self.settings.seed)
        self._shares: ShareTree = tree
        self._streams = [self._order_of(name) for name in self._own]
        if self._laid_here:
            schedule = self._laid_schedule(tree)
            if self._laid is None:
                self._laid = MixedLanes(self.sources, schedule, lock=self._lock, names=self._large, row_at=self._row_at)
            else:
                self._laid.reschedule(schedule)
            self._streams.insert(0, LaidStream(self._laid))
        self.mixed_after = max(self._mixed_after(leaf) for leaf in self._leaves[: len(self._streams)])

    def _mixed_after(self, leaf: str) -> int:
        """Return the lane positions by which the sources of a leaf have begun, wherever it has a weight."""
        shares = [entry.weights[leaf] / sum(entry.weights.values()) for entry in self._by_leaf
                  if entry.weights.get(leaf)]  # fmt: skip
        draws = self._laid.mixed_after if leaf == LAID and self._laid is not None else 1
        return math.ceil((draws + 1) / min(shares, default=1.0))

    def _leaf_weights(self, entry: Weights) -> Weights:
        """Return the weights of leaves."""
        found = {name: weight for name, weight in entry.weights.items() if name in self._leaves}
        large = [entry.weights[name] for name in sorted(self._large) if name in entry.weights]
        return Weights(start=entry.start, weights={**found, **({LAID: sum(large)} if large else {})})

    def _laid_schedule(self, tree: ShareTree) -> list[Weights]:
        """Return the weights of the large sources among themselves, by the number of draws of a lane from them all."""
        found: list[Weights] = []
        draws = tree.begun(self._leaves.index(LAID))  # in each lane before each entry
        was_drawn, ahead = True, _WINDOWS_AHEAD * self.settings.window + _SAMPLES_AHEAD
        for entry, least, most in zip(
            self.schedule, draws.min(axis=0).tolist(), draws.max(axis=0).tolist(), strict=True
        ):
            weights = {name: entry.weights[name] for name in self._large if name in entry.weights}
            is_drawn = any(weights.values())
            if is_drawn:
                # While none was drawn, some were laid ahead by earlier weights, up to nobody knows which row.
                start = least if was_drawn or not most else least + ahead
                found.append(Weights(start=max([start, *(one.start for one in found[-1:])]), weights=weights))
            was_drawn = is_drawn
        return found or [Weights(start=0, weights=dict.fromkeys(self._large, 1.0))]

    def apart(self) -> Self:
        """See ``Endless``."""
        made = super().apart()
        if self._laid is not None:
            made._laid = self._laid.apart()
            made._streams = [LaidStream(made._laid), *self._streams[1:]]
        return made

    def under(self, settings: OrderSettings) -> EvenLanes:
        """Return the same mixture with other settings."""
        return EvenLanes(self.sources.under(settings), self.schedule)

    def _leaf_of(self, chunk_id: int) -> int:
        """See ``ExactLanes``."""
        name = self.sources.names[int(self.sources.source_of(np.array([chunk_id]))[0])]
        return self._leaves.index(LAID if name in self._large else name)

    # --- what is drawn ---

    def drawn(self, lane: int, place: int) -> Int64Array:
        """See ``Endless``."""
        by_leaf = dict(zip(self._leaves, self._shares.counts(lane, place).tolist(), strict=True))
        counts = np.array([by_leaf.get(name, 0) for name in self.sources.every_name], np.int64)
        if self._laid is not None:
            counts += self._laid.drawn(lane, by_leaf[LAID])
        elif LAID in by_leaf:  # all of it is before any position that can be requested
            for index, name in enumerate(self.sources.every_name):
                counts[index] += (
                    self.sources.laid[name][lane] if name in self._large and name in self.sources.laid else 0
                )
        return counts

    def laid_at_the_end(self, name: str) -> Int64Array | None:
        """Return what a source without a share has in each lane when all of it is laid, int64 [L].

        Of a small one nothing is laid, int64 [0]. None: that depends on weights to come, since no large source has one.
        """
        if self._laid is None or name not in self._large:
            return np.empty(0, np.int64)
        return self._laid.laid_at_the_end(name) if self._by_leaf[-1].weights.get(LAID) else None

    # --- how far it is planned ---

    @property
    def frontier(self) -> int:
        """See ``Endless``: behind what is planned, and where lanes have drawn all large chunks that are laid."""
        with self._lock:
            laid = 0 if self._laid is None else self._laid.frontier
            return max(self._frontier, self._behind(laid) if laid else 0)

    def _behind(self, laid: int) -> int:
        """Return the first lane position before which every lane has drawn so many samples of large sources.

        If they have no weight from some position on, so that this never comes: behind that one.
        """
        found = max(self._position(lane, laid - 1) for lane in range(self.settings.lanes)) + 1
        if found <= MAX_POSITIONS:
            return found
        drawn = [index for index, entry in enumerate(self._by_leaf) if entry.weights.get(LAID)]
        return self._by_leaf[drawn[-1] + 1].start + 1 if drawn and drawn[-1] + 1 < len(self._by_leaf) else 1

    def _position(self, lane: int, draw: int) -> int:
        """Return the position of a lane at which it draws for so many times from the large sources."""
        return int(self._shares.positions(lane, self._leaves.index(LAID), np.array([draw]))[0])

    def _row_at(self, time: int) -> int:
        return min(self._position(0, time), ENDLESS // self.settings.lanes) * self.settings.lanes

    def settle(self, place: int) -> None:
        """See ``Endless``."""
        super().settle(place)
        if self._laid is not None and place:
            leaf = self._leaves.index(LAID)
            self._laid.settle(max(int(self._shares.counts(lane, place)[leaf]) for lane in range(self.settings.lanes)))

    def free_pass(self, name: str) -> int:
        """See ``Endless``."""
        return self._laid.free_pass(name) if self._laid is not None and name in self._large else super().free_pass(name)

    @property
    def known_from(self) -> int:
        """See ``Endless``."""
        needed = 0 if self._laid is None else self._laid.known_from
        behind = max(self._position(lane, needed) for lane in range(self.settings.lanes)) if needed else 0
        return max(super().known_from, behind)
