"""Lay the lanes of an endless mixture by single samples, or by whole batches: shares are exact at every row.

A tree of integer splits (:mod:`streaming.mixing.shares`) tells which source a lane position draws from, and the index
of that draw; the source answers from an order of its own. Sources know nothing of each other::

    lane position     0    1    2    3    4    5    6
    source           web  web code  web  web code  web
    draw of it        0    1    0    2    3    1    4       ->  web's own lane: chunks in its order, a window of its own

So each source has chunks in memory in every lane, all the time: the memory of a plan grows with the number of sources.
Weights apply from the exact position for which they are set, and how long a chunk is needed depends on future weights.
So the plan is made one stretch at a time (``LaneParts.goes_on``), and nothing is planned beyond the stretch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from streaming.arrays import rows_by
from streaming.errors import ConfigError, StateError
from streaming.mixing.endless import Endless
from streaming.mixing.passes import Listing, Sources, Weights, keyed_number
from streaming.mixing.shares import BatchShares, LaneShares, ShareTree
from streaming.mixing.source_lanes import SourceLanes
from streaming.plan.order import ENDLESS, LaneParts, OrderSettings, window_place, window_slice
from streaming.types import Int64Array

_Int32s = npt.NDArray[np.int32]
_DRAWS_AHEAD = 512  # evaluated at once, which takes as long as one; 4 KiB per source and lane


def own_settings(listing: Listing, settings: OrderSettings) -> OrderSettings:
    """Return the settings of one source: a seed from its name, and a window of at most twice its mean chunk.

    So it holds about five chunks in each lane, however large the chunks of other sources are.
    """
    window = min(settings.window, 2 * listing.mean_chunk)
    return replace(settings, seed=keyed_number(settings.seed, "window", listing.name), window=window)


class DrawsAhead:
    """Find draws of one source in its lanes, more at a time than requested: small shares request few.

    Args:
        locate: Returns chunk ids and offsets inside them of draws ``[start, stop)`` of a lane, int64 [n] each.
    """

    def __init__(self, locate: Callable[[int, int, int], tuple[Int64Array, Int64Array]]) -> None:
        self._locate = locate
        self._kept: dict[int, tuple[int, int, _Int32s, _Int32s]] = {}

    def draws(self, lane: int, start: int, stop: int, size: int) -> tuple[Int64Array, Int64Array]:
        """Return the same as ``locate``, for a lane with ``size`` draws."""
        kept = self._kept.get(lane)
        if kept is None or not kept[0] <= start <= stop <= kept[1]:
            ahead = min(max(stop, start + _DRAWS_AHEAD), size)
            chunk_ids, offsets = self._locate(lane, start, ahead)
            kept = self._kept[lane] = (start, ahead, chunk_ids.astype(np.int32), offsets.astype(np.int32))
        rows = slice(start - kept[0], stop - kept[0])
        return kept[2][rows].astype(np.int64), kept[3][rows].astype(np.int64)


class SourceOrder:
    """One source's own order: in each lane an endless stream of its draws, independent of other sources.

    Args:
        listings: Lists of the source, more than one if it grew.
        settings: Settings of the mixture.

    Attributes:
        lanes: The source's streams, before the window moves samples.
        settings: The source's own settings.
    """

    def __init__(self, listings: Sequence[Listing], settings: OrderSettings) -> None:
        self.lanes = SourceLanes(listings, settings)
        self.settings = own_settings(listings[0], settings)
        self._lane_size = ENDLESS // settings.lanes
        self._ahead = DrawsAhead(self._located)

    @property
    def reach(self) -> int:
        """Maximum distance that the window moves a sample, in draws."""
        return max(self.settings.window - 1, 0)

    def draws(self, lane: int, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        """Return chunk ids and offsets inside them of draws ``[start, stop)``, at least one, of a lane; int64 [n]."""
        return self._ahead.draws(lane, start, stop, self._lane_size)

    def _located(self, lane: int, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        places = window_slice(self.settings, 0, lane, start, stop, self._lane_size)
        return self.lanes.runs(lane, lane + 1, int(places.min()), int(places.max()) + 1).at(places)


class ExactLanes(Endless):
    """The order of an endless mixture whose shares are exact at every row, by samples or by batches.

    After ``n`` samples of a lane a source has given ``n`` times its share, to within one for each node above it in the
    tree of sources.

    Args:
        sources: See ``Endless``. What absent sources gave is not needed: no position depends on another source's
            chunks.
        schedule: See ``Endless``.
        lock: See ``Endless``.
        batch_size: G, if each global batch is to be of one source; None: single samples are dealt.

    Raises:
        ConfigError: There are no weights, or the lanes do not divide the batch.
    """

    def __init__(
        self, sources: Sources, schedule: Sequence[Weights], *, lock: AbstractContextManager[Any] | None = None,
        batch_size: int | None = None,
    ) -> None:  # fmt: skip
        if batch_size is not None:
            check_lanes(sources.settings, batch_size)
        self.batch_size = batch_size
        self._orders = [SourceOrder(listings, sources.settings) for listings in sources.eras.values()]
        super().__init__(sources, schedule, lock=lock)

    def _weigh(self) -> None:
        """See ``Endless``."""
        names, seed, lanes = self.sources.every_name, self.settings.seed, self.settings.lanes
        self._shares: LaneShares
        if self.batch_size is None:
            self._shares = ShareTree(names, self.schedule, lanes=lanes, seed=seed)
        else:
            self._shares = BatchShares(names, self.schedule, batch_rows=self.batch_size // lanes, seed=seed)

    def under(self, settings: OrderSettings) -> ExactLanes:
        """Return the same mixture with other settings."""
        return ExactLanes(self.sources.under(settings), self.schedule, batch_size=self.batch_size)

    # --- the order ---

    def lane_samples(self, lane: int, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        """See ``Order``."""
        sources, draws = self._planned(stop).draws(lane, start, stop)
        absent = np.flatnonzero(sources >= len(self._orders))
        if len(absent):
            name = self.sources.every_name[int(sources[absent[0]])]
            raise gone(name, (start + int(absent[0])) * self.settings.lanes + lane)
        return located(sources, draws, lambda source, first, last: self._orders[source].draws(lane, first, last))

    def lane_parts(self, low: int, high: int, start: int, stop: int) -> LaneParts:
        """See ``Order``: cut to ``[start, stop)``."""
        if low == high:
            return LaneParts.joined([])
        shares, lanes = self._planned(stop), range(low, high)
        dealt = [shares.draws(lane, start, stop)[0] for lane in lanes]
        # For each lane: the positions of the draws, source by source, and where each source begins: [lanes, …].
        places = np.array([np.argsort(sources, kind="stable") for sources in dealt]).reshape(len(lanes), -1)
        counts = np.array([np.bincount(sources, minlength=len(self.sources.every_name)) for sources in dealt])
        before = np.array([shares.counts(lane, start) for lane in lanes])
        bases = np.cumsum(counts, axis=1) - counts
        weights = [entry.weights for entry in self.schedule if entry.start < max(stop, 1)][-1]
        found = []
        for source, order in enumerate(self._orders):
            since, until = before[:, source], before[:, source] + counts[:, source]
            if not until.any():
                continue
            runs = order.lanes.runs(
                low, high, max(int(since.min()) - order.reach, 0), int(until.max()) + order.reach + 1
            )
            lane = runs.lanes - low
            since, until = since[lane], until[lane]
            first, last = runs.begins - order.reach, runs.begins + runs.sizes + order.reach
            # A run that was due before, or is due later, is kept although its source may not be drawn meanwhile;
            # except if the source has no weight any more: then it may never be due.
            is_held = weights.get(self.sources.names[source], 0) > 0
            due = np.flatnonzero((first < until) & (last > since) & (is_held | (since < until)))
            lane, since, until, first, last = lane[due], since[due], until[due], first[due], last[due]
            base, most = bases[lane, source], max(stop - start - 1, 0)
            begins = start + places[lane, np.minimum(base + np.maximum(first - since, 0), most)]
            ends = start + places[lane, np.clip(base + np.minimum(last, until) - since - 1, 0, most)] + 1
            goes_on = (last > until) & is_held
            found.append(
                LaneParts(
                    chunk_ids=runs.chunk_ids[due], lanes=runs.lanes[due],
                    begins=np.where(first < since, start, begins), ends=np.where(goes_on, stop, ends), goes_on=goes_on,
                )
            )  # fmt: skip
        return LaneParts.joined(found)

    def find(self, chunk_id: int, offset: int, start: int, stop: int) -> list[tuple[int, int]]:
        """See ``Order``."""
        shares = self._planned(stop)
        source = int(self.sources.source_of(np.array([chunk_id]))[0])
        order, lanes = self._orders[source], range(self.settings.lanes)
        first = min(int(shares.counts(lane, start)[source]) for lane in lanes)
        last = max(int(shares.counts(lane, stop)[source]) for lane in lanes)
        found = []
        for lane, place in order.lanes.find(chunk_id, offset, max(first - order.reach, 0), last + order.reach):
            draw = window_place(order.settings, 0, lane, place, self.lane_size(lane))
            due = int(shares.positions(lane, source, np.array([draw]))[0])
            if start <= due < stop:
                found.append((lane, due))
        return sorted(found)

    def settle(self, place: int) -> None:
        """See ``Endless``: only the weights before these rows."""
        self._planned(place)

    def drawn(self, lane: int, place: int) -> Int64Array:
        """See ``Endless``."""
        return self._shares.counts(lane, place)

    def free_pass(self, name: str) -> int:
        """See ``Endless``."""
        source = self.sources.names.index(name)
        order, frontier = self._orders[source], self.frontier
        drawn = max(int(self._shares.counts(lane, frontier)[source]) for lane in range(self.settings.lanes))
        return order.lanes.free_pass(drawn + order.settings.window) if drawn else 0

    @property
    def known_from(self) -> int:
        """See ``Endless``: where the last weight of an absent source ends."""
        absent = self.sources.every_name[len(self._orders) :]
        stops = [*(entry.start for entry in self.schedule[1:]), ENDLESS]
        spans = zip(self.schedule, stops, strict=True)
        return max((stop for entry, stop in spans if any(map(entry.weights.get, absent))), default=0)

    def check_from(self, place: int) -> None:
        """See ``Endless``."""
        known_from, lanes = self.known_from, self.settings.lanes
        if place >= known_from:
            return
        ends = [*(entry.start for entry in self.schedule[1:]), ENDLESS]
        coming = [entry.weights for entry, end in zip(self.schedule, ends, strict=True) if end > place]
        drawn = {name for weights in coming for name, weight in weights.items() if weight}
        names = [repr(name) for name in self.sources.every_name[len(self._orders) :] if name in drawn]
        raise StateError(
            f"rows {place * lanes:,} to {known_from * lanes:,} draw from {', '.join(names)}, which this mixture lacks: "
            "the weights that leave it out apply after them. Add the source, with the weight 0, to continue from here; "
            f"a state of row {known_from * lanes:,} or later does without it"
        )

    def _planned(self, stop: int) -> LaneShares:
        """Return the shares, which from now on are final at positions before ``stop``."""
        with self._lock:
            # Weights from the frontier on leave everything before it unchanged.
            self._frontier = max(self._frontier, stop)
            return self._shares


def gone(name: str, row: int) -> StateError:
    """Make the error for a row that draws from a source that no longer exists."""
    return StateError(
        f"row {row} draws from {name!r}, which this mixture lacks: it was dropped after that row. Add the source to "
        "continue from there"
    )


def check_lanes(settings: OrderSettings, batch_size: int) -> None:
    """Reject batches of one source to which lanes would not contribute equally many samples.

    Raises:
        ConfigError: The lanes do not divide the batch.
    """
    if batch_size % settings.lanes:
        raise ConfigError(
            f"batches of one source: {settings.lanes} lanes do not divide a global batch of {batch_size}; each lane "
            "must give as many samples to every batch. Give ShuffleConfig(lanes=…) a divisor"
        )


def located(
    sources: Int64Array, draws: Int64Array, draws_of: Callable[[int, int, int], tuple[Int64Array, Int64Array]]
) -> tuple[Int64Array, Int64Array]:
    """Return chunk ids and offsets inside them of lane positions that draw from some sources, int64 [n] each.

    Args:
        sources: int64 [n], the source of each position.
        draws: int64 [n], the index of the draw in its source; those of one source are consecutive.
        draws_of: Returns chunk ids and offsets of draws ``[first, last)`` of a source.
    """
    chunk_ids, offsets = np.empty_like(sources), np.empty_like(sources)
    for source, rows in rows_by(sources):
        first = int(draws[rows[0]])
        chunk_ids[rows], offsets[rows] = draws_of(source, first, first + len(rows))
    return chunk_ids, offsets
