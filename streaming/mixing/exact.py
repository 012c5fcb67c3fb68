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
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from streaming.arrays import rows_by
from streaming.errors import ConfigError, StateError
from streaming.mixing.endless import Endless
from streaming.mixing.passes import Listing, Sources, Weights, keyed_number
from streaming.mixing.shares import BatchShares, LaneShares, ShareTree
from streaming.mixing.source_lanes import SourceLanes
from streaming.plan.order import ENDLESS, LEAST_STRETCH, LaneParts, OrderSettings, window_place, window_slice
from streaming.types import Int64Array

_Int32s = npt.NDArray[np.int32]
_DRAWS_AHEAD = 512  # evaluated at once, which takes as long as one; 4 KiB per source and lane
_AHEAD_OF_ALL = 2**14  # of all lanes at most: each may be of another pass over a small source
_APART = 8  # lanes of a source are apart by a few draws
_LEAST_GROUP, _MOST_GROUPS = 16, 32  # lanes evaluated together
_KEPT_PARTS = 2**20  # of passes, over all sources; some 24 MiB
_STRETCH_ROWS = 2**18  # of all lanes; many lanes then start sooner
_LEAST_LONG = 256  # lane positions of a stretch nevertheless


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


class Stream(Protocol):
    """What lanes draw from: in each lane an endless stream of draws, numbered 0, 1, 2, … Thread-safe."""

    def draws(self, lane: int, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        """Return chunk ids and offsets inside them of draws ``[start, stop)``, at least one, of a lane; int64 [n]."""

    def parts(self, low: int, high: int, start: int, stop: int) -> LaneParts:
        """Return all runs in lanes ``[low, high)`` that may be due at draws ``[start, stop)``, and perhaps others.

        Their ``begins`` and ``ends`` are draws, and not cut to those asked for.
        """

    def find(self, chunk_id: int, offset: int, start: int, stop: int) -> list[tuple[int, int]]:
        """Return lanes and draws, from ``[start, stop)``, at which a sample is due."""


class SourceOrder:
    """One source's own order: in each lane an endless stream of its draws, independent of other sources.

    Its window is the mixture's, at most twice its own mean chunk and a lane's run of a pass. It moves no sample into
    another pass.

    Args:
        listings: Lists of the source, more than one if it grew.
        settings: Settings of the mixture.
        kept_parts: See ``SourceLanes``.
        places: The place of each lane in a row of draws, int64 [L]; None: its number. Only a source with fewer samples
            than lanes needs it. Of others each lane has a run of its own, and lanes beside each other share chunks.

    Attributes:
        lanes: The source's streams, before the window moves samples.
        settings: The source's own settings.
        group: Number of lanes that are evaluated together: NumPy takes as long for one.
    """

    def __init__(
        self, listings: Sequence[Listing], settings: OrderSettings, *, kept_parts: int = 0,
        places: Int64Array | None = None,
    ) -> None:  # fmt: skip
        is_sparse = listings[0].samples_per_pass < settings.lanes
        self.lanes = SourceLanes(listings, settings, kept_parts=kept_parts, places=places if is_sparse else None)
        own = own_settings(listings[0], settings)
        self.settings = replace(own, window=min(own.window, max(self.lanes.run_samples, 1)))
        self.group = max(_LEAST_GROUP, -(-settings.lanes // _MOST_GROUPS))
        self._lane_size = ENDLESS // settings.lanes
        self._more = max(min(_DRAWS_AHEAD, _AHEAD_OF_ALL // settings.lanes), 1)
        self._kept: dict[int, _Ahead] = {}

    @property
    def reach(self) -> int:
        """Maximum distance that the window moves a sample, in draws."""
        return max(self.settings.window - 1, 0)

    def draws(self, lane: int, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        """See ``Stream``. Lanes of a group are evaluated together, and a few more draws than asked for."""
        group, within = divmod(lane, self.group)
        kept = self._kept.get(group)
        if kept is None or not kept.start <= start <= stop <= kept.stop:
            kept = self._kept[group] = self._evaluated(group, max(start - _APART, 0), stop + _APART + self._more)
        rows = slice(start - kept.start, stop - kept.start)
        return kept.chunk_ids[within, rows].astype(np.int64), kept.offsets[within, rows].astype(np.int64)

    def _evaluated(self, group: int, start: int, stop: int) -> _Ahead:
        low = group * self.group
        high, stop = min(low + self.group, self.settings.lanes), min(stop, self._lane_size)
        places = [
            window_slice(self.settings, 0, lane, start, stop, self._lane_size, partial(self.lanes.passes_at, lane))
            for lane in range(low, high)
        ]
        since, until = (int(found) for found in (np.min(places), np.max(places) + 1))
        runs = self.lanes.runs(low, high, since, until)
        chunk_ids, offsets = (np.empty((high - low, stop - start), np.int32) for _ in range(2))
        cuts = np.searchsorted(runs.lanes, np.arange(low, high + 1)).tolist()
        for row, (first, last) in enumerate(pairwise(cuts)):
            chunk_ids[row], offsets[row] = runs.taken(slice(first, last)).at(places[row])
        return _Ahead(start, stop, chunk_ids, offsets)

    def parts(self, low: int, high: int, start: int, stop: int) -> LaneParts:
        """See ``Stream``."""
        runs = self.lanes.runs(low, high, max(start - self.reach, 0), stop + self.reach)
        return LaneParts(
            chunk_ids=runs.chunk_ids, lanes=runs.lanes, begins=runs.begins - self.reach,
            ends=runs.begins + runs.sizes + self.reach,
        )  # fmt: skip

    def find(self, chunk_id: int, offset: int, start: int, stop: int) -> list[tuple[int, int]]:
        """See ``Stream``."""
        laid = self.lanes.find(chunk_id, offset, max(start - self.reach, 0), stop + self.reach)
        found = [
            (lane, window_place(self.settings, 0, lane, place, self._lane_size, partial(self.lanes.passes_at, lane)))
            for lane, place in laid
        ]
        return [(lane, draw) for lane, draw in found if start <= draw < stop]


@dataclass(frozen=True, slots=True)
class _Ahead:
    """Draws ``[start, stop)`` of the lanes of a group: int32 [lanes, stop - start] each."""

    start: int
    stop: int
    chunk_ids: _Int32s
    offsets: _Int32s


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
        self._orders: dict[str, SourceOrder] = {}
        super().__init__(sources, schedule, lock=lock)

    @property
    def stretch(self) -> int:
        """See ``Orders``: shorter with many lanes."""
        lanes = self.settings.lanes
        return max(2 * self.settings.window, min(LEAST_STRETCH, max(_STRETCH_ROWS // lanes, _LEAST_LONG)))

    def _weigh(self) -> None:
        """See ``Endless``."""
        names, seed, lanes = self.sources.every_name, self.settings.seed, self.settings.lanes
        self._leaves: tuple[str, ...] = names
        self._by_leaf: tuple[Weights, ...] = self.schedule
        self._shares: LaneShares
        if self.batch_size is None:
            self._shares = ShareTree(names, self.schedule, lanes=lanes, seed=seed)
        else:
            self._shares = BatchShares(names, self.schedule, batch_rows=self.batch_size // lanes, seed=seed)
        self._streams: list[Stream] = [self._order_of(name) for name in self.sources.names]

    def _order_of(self, name: str) -> SourceOrder:
        """Return the order of a source; the same one as before, unless weights name it for the first time."""
        places = self._shares.places_of(self._leaves.index(name))
        found = self._orders.get(name)
        if found is None or (places is not None and not found.lanes.is_placed):
            found = self._orders[name] = SourceOrder(
                self.sources.eras[name], self.settings, kept_parts=_KEPT_PARTS // len(self.sources.names),
                places=places,
            )  # fmt: skip
        return found

    def _leaf_of(self, chunk_id: int) -> int:
        """Return the leaf of the tree of sources to which a chunk belongs."""
        return int(self.sources.source_of(np.array([chunk_id]))[0])

    def under(self, settings: OrderSettings) -> ExactLanes:
        """Return the same mixture with other settings."""
        return ExactLanes(self.sources.under(settings), self.schedule, batch_size=self.batch_size)

    # --- the order ---

    def lane_samples(self, lane: int, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        """See ``Order``."""
        leaves, draws = self._planned(stop).draws(lane, start, stop)
        absent = np.flatnonzero(leaves >= len(self._streams))
        if len(absent):
            name = self._leaves[int(leaves[absent[0]])]
            raise gone(name, (start + int(absent[0])) * self.settings.lanes + lane)
        return located(leaves, draws, lambda leaf, first, last: self._streams[leaf].draws(lane, first, last))

    def lane_parts(self, low: int, high: int, start: int, stop: int) -> LaneParts:
        """See ``Order``: cut to ``[start, stop)``."""
        if low == high:
            return LaneParts.joined([])
        shares, lanes = self._planned(stop), range(low, high)
        dealt = [shares.draws(lane, start, stop)[0] for lane in lanes]
        # For each lane: the positions of the draws, leaf by leaf, and where each leaf begins: [lanes, …].
        places = np.array([np.argsort(leaves, kind="stable") for leaves in dealt]).reshape(len(lanes), -1)
        counts = np.array([np.bincount(leaves, minlength=len(self._leaves)) for leaves in dealt])
        before = np.array([shares.counts(lane, start) for lane in lanes])
        bases = np.cumsum(counts, axis=1) - counts
        weights = [entry.weights for entry in self._by_leaf if entry.start < max(stop, 1)][-1]
        found = []
        for leaf, stream in enumerate(self._streams):
            since, until = before[:, leaf], before[:, leaf] + counts[:, leaf]
            if not until.any():
                continue
            parts = stream.parts(low, high, int(since.min()), int(until.max()) + 1)
            lane = parts.lanes - low
            since, until, first, last = since[lane], until[lane], parts.begins, parts.ends
            # A run that was due before, or is due later, is kept although its source may not be drawn meanwhile;
            # except if the source has no weight any more: then it may never be due.
            is_held = weights.get(self._leaves[leaf], 0) > 0
            due = np.flatnonzero((first < until) & (last > since) & (is_held | (since < until)))
            lane, since, until, first, last = lane[due], since[due], until[due], first[due], last[due]
            base, most = bases[lane, leaf], max(stop - start - 1, 0)
            begins = start + places[lane, np.minimum(base + np.maximum(first - since, 0), most)]
            ends = start + places[lane, np.clip(base + np.minimum(last, until) - since - 1, 0, most)] + 1
            goes_on = (last > until) & is_held
            found.append(
                LaneParts(
                    chunk_ids=parts.chunk_ids[due], lanes=parts.lanes[due],
                    begins=np.where(first < since, start, begins), ends=np.where(goes_on, stop, ends), goes_on=goes_on,
                )
            )  # fmt: skip
        return LaneParts.joined(found)

    def find(self, chunk_id: int, offset: int, start: int, stop: int) -> list[tuple[int, int]]:
        """See ``Order``."""
        shares, leaf = self._planned(stop), self._leaf_of(chunk_id)
        lanes = range(self.settings.lanes)
        first = min(int(shares.counts(lane, start)[leaf]) for lane in lanes)
        last = max(int(shares.counts(lane, stop)[leaf]) for lane in lanes)
        found = []
        for lane, draw in self._streams[leaf].find(chunk_id, offset, first, last) if last else ():
            due = int(shares.positions(lane, leaf, np.array([draw]))[0])
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
        order, frontier, leaf = self._orders[name], self.frontier, self._leaves.index(name)
        drawn = max(int(self._shares.counts(lane, frontier)[leaf]) for lane in range(self.settings.lanes))
        return order.lanes.free_pass(drawn + order.settings.window) if drawn else 0

    @property
    def known_from(self) -> int:
        """See ``Endless``: where the last weight of an absent source ends."""
        absent = self._leaves[len(self._streams) :]
        stops = [*(entry.start for entry in self._by_leaf[1:]), ENDLESS]
        spans = zip(self._by_leaf, stops, strict=True)
        return max((stop for entry, stop in spans if any(map(entry.weights.get, absent))), default=0)

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
