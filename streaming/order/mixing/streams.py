"""Give each lane a stream of samples of one source, or of a group of sources, for orders dealt by single samples.

``SourceOrder``: a single source; every lane has an equal run of each pass. ``RowStream``: sources with few chunks or
samples; all lanes draw from them together, row by row. ``LaidStream``: sources laid in chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from streaming.common.arrays import rows_by
from streaming.order.mixing.lanes import MixedLanes
from streaming.order.mixing.passes import Listing, keep_latest, keyed_number, listed
from streaming.order.mixing.shares import ShareTree
from streaming.order.mixing.source_lanes import SourceLanes
from streaming.order.plan.order import ENDLESS, LaneParts, OrderSettings, window_place, window_slice
from streaming.order.plan.permutation import hash_each
from streaming.types import Int64Array

_Int32s = npt.NDArray[np.int32]
_DRAWS_AHEAD = 512  # evaluated at once, which takes as long as one; 4 KiB per source and lane
_AHEAD_OF_ALL = 2**14  # upper bound over all lanes: each draw may belong to another pass over a small source
_APART = 8  # lanes of a source differ by a few draws
_LEAST_GROUP, _MOST_GROUPS = 16, 32  # lanes evaluated together
_ROWS_AT_ONCE = 2**14  # draws of all lanes: 50 ms
_KEPT_BLOCKS = 64
_FOUND_AT_ONCE = 2**20
_MOST_PIECES = 2**20  # of a source: with at most this many samples, each sample is shuffled


def own_settings(listing: Listing, settings: OrderSettings) -> OrderSettings:
    """Return the settings of one source: a seed from its name, and a window of at most twice its mean chunk.

    So the source holds about five chunks in each lane, however large the chunks of other sources are.
    """
    window = min(settings.window, 2 * listing.mean_chunk)
    return replace(settings, seed=keyed_number(settings.seed, "window", listing.name), window=window)


class DrawsAhead:
    """Locate draws of one source in its lanes, more at a time than requested: small shares request few.

    Args:
        locate: Returns the chunk ids and the offsets in them of draws ``[start, stop)`` of a lane, int64 [n] each.
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
    """A source of draws for lanes: in each lane an endless stream of draws, numbered 0, 1, 2, … Thread-safe."""

    def draws(self, lane: int, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        """Return chunk ids and offsets in them of draws ``[start, stop)``, at least one, of a lane; int64 [n] each."""

    def parts(self, low: int, high: int, start: int, stop: int) -> LaneParts:
        """Return all runs in lanes ``[low, high)`` that may be due at draws ``[start, stop)``, and perhaps others.

        Their ``begins`` and ``ends`` are draws, and are not cut to the requested range.
        """

    def find(self, chunk_id: int, offset: int, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the lanes and draws, in ``[start, stop)``, at which a sample is due."""


class SourceOrder:
    """One source's own order: in each lane an endless stream of its draws, independent of other sources.

    Its window is that of the mixture, but at most twice its own mean chunk, and at most a lane's run of a pass. The
    window moves no sample into another pass. With fewer chunks than lanes, a lane needs most of its chunks again in the
    next pass, and keeps them until then.

    Args:
        listings: Lists of the source, more than one if it grew.
        settings: Settings of the mixture.
        kept_parts: See ``SourceLanes``.

    Attributes:
        lanes: The source's streams, before the window moves samples.
        settings: The source's own settings.
        group: Number of lanes evaluated together: NumPy takes as long for one.
    """

    def __init__(self, listings: Sequence[Listing], settings: OrderSettings, *, kept_parts: int = 0) -> None:
        self.lanes = SourceLanes(listings, settings, kept_parts=kept_parts, pieces=settings.lanes)
        own = own_settings(listings[0], settings)
        self.settings = replace(own, window=min(own.window, max(self.lanes.run_samples, 1)))
        self.group = max(_LEAST_GROUP, -(-settings.lanes // _MOST_GROUPS))
        has_few = listings[0].num_chunks < settings.lanes
        self._hold = max(self.reach, self.lanes.run_samples, 1) if has_few else self.reach
        self._lane_size = ENDLESS // settings.lanes
        self._more = max(min(_DRAWS_AHEAD, _AHEAD_OF_ALL // settings.lanes), 1)
        self._kept: dict[int, _Ahead] = {}

    @property
    def reach(self) -> int:
        """Maximum distance that the window moves a sample, in draws."""
        return max(self.settings.window - 1, 0)

    def draws(self, lane: int, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        """See ``Stream``. Evaluates all lanes of a group together, and a few more draws than requested."""
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
        runs = self.lanes.runs(low, high, max(start - self._hold, 0), stop + self.reach)
        return LaneParts(
            chunk_ids=runs.chunk_ids, lanes=runs.lanes, begins=runs.begins - self.reach,
            ends=runs.begins + runs.sizes + self._hold,
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


class RowStream:
    """Sources with few chunks or samples, from which all lanes draw together, row by row.

    The draws of all lanes are numbered row by row, each row starting at another lane: if lanes came in step with the
    sources, they would never draw from some of them. A tree of one lane deals the numbers to the sources. The n-th draw
    of a source is sample n of its endless list, whose samples are shuffled in each pass. So after every row, the counts
    of a source's samples differ by at most one.

    A chunk is held for a window after each draw, like a laid chunk.

    Args:
        listings: Lists of each source, by name; absent sources have none.
        tree: Deals draws to the sources, by name; a tree of one lane.
        lanes: Deals positions of lanes to the leaf of all these sources, which is apart.
        leaf: Number of that leaf.
        settings: Settings of the mixture.
        absent: Returns the error for a draw from an absent source, given the source, the lane and the draw.
    """

    def __init__(
        self, listings: Mapping[str, Sequence[Listing]], tree: ShareTree, lanes: ShareTree, leaf: int,
        settings: OrderSettings, *, absent: Callable[[str, int, int], Exception],
    ) -> None:  # fmt: skip
        self._tree, self._lanes, self._leaf, self._hold, self._absent = tree, lanes, leaf, settings.window, absent
        self._num_lanes, single = settings.lanes, replace(settings, lanes=1)
        self._key = keyed_number(settings.seed, "rows", "")
        self._index = {name: index for index, name in enumerate(tree.names)}
        self._sources = {
            self._index[name]: SourceLanes(some, single, pieces=_MOST_PIECES) for name, some in listings.items()
        }
        self._blocks: dict[int, _Ahead] = {}

    def draws(self, lane: int, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        """See ``Stream``."""
        chunk_ids, offsets = self._drawn(lane, start, stop)
        gone = np.flatnonzero(chunk_ids < 0)
        if len(gone):
            draw = start + int(gone[0])
            raise self._absent(self.source_at(lane, draw), lane, draw)
        return chunk_ids, offsets

    def _drawn(self, lane: int, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        """Return ``draws``, with chunk -1 for those from absent sources."""
        numbers = self._numbers(lane, np.arange(start, stop))
        block, place = np.divmod(numbers, _ROWS_AT_ONCE)
        chunk_ids, offsets = np.empty_like(numbers), np.empty_like(numbers)
        for number, rows in rows_by(block):
            found = self._block(number)
            chunk_ids[rows], offsets[rows] = found.chunk_ids[0, place[rows]], found.offsets[0, place[rows]]
        return chunk_ids, offsets

    def _numbers(self, lane: int, draws: Int64Array) -> Int64Array:
        """Return the numbers of some draws of a lane, int64 [n]."""
        begins, sizes, turns = self._rows(lane, draws)
        numbers = draws * self._num_lanes + self._lanes.lane_places[lane]
        found: Int64Array = begins + (numbers - begins + turns) % sizes
        return found

    def _drawn_at(self, numbers: Int64Array) -> Iterator[tuple[int, int]]:
        """Yield lanes and draws of some numbers, in any order."""
        lane_at = np.argsort(self._lanes.lane_places)
        draws, places = np.divmod(numbers, self._num_lanes)
        for place, some in rows_by(places):  # the draw belongs to this lane, or to another one in the same row
            begins, sizes, turns = self._rows(int(lane_at[place]), draws[some])
            found, other = np.divmod(begins + (numbers[some] - begins - turns) % sizes, self._num_lanes)
            yield from zip(lane_at[other].tolist(), found.tolist(), strict=True)

    def _rows(self, lane: int, draws: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return the rows of some draws of a lane: first numbers, sizes, and their rotations; int64 [n] each."""
        rows = self._lanes.positions(lane, self._leaf, draws)
        begins, ends = self._lanes.rows_of(rows), self._lanes.rows_of(rows + 1)
        sizes = np.maximum(ends - begins, 1)  # a draw that never comes has no row
        turns = hash_each(rows.astype(np.uint64), self._key) % sizes.astype(np.uint64)
        return begins, sizes, turns.astype(np.int64)

    def _block(self, number: int) -> _Ahead:
        """Return consecutive draws of all lanes; the latest blocks are cached. Absent sources have chunk -1."""
        found = self._blocks.get(number)
        if found is None:
            start, stop = number * _ROWS_AT_ONCE, (number + 1) * _ROWS_AT_ONCE
            sources, draws = self._tree.draws_at(np.arange(start, stop))
            chunk_ids, offsets = np.full((1, stop - start), -1, np.int32), np.zeros((1, stop - start), np.int32)
            here = [(source, rows) for source, rows in rows_by(sources) if source in self._sources]
            if here:  # the draws of a source follow each other
                spans = [(source, int(draws[rows[0]]), int(draws[rows[-1]]) + 1) for source, rows in here]
                every = np.concatenate([rows for _, rows in here])
                chunk_ids[0, every], offsets[0, every] = self._samples(spans)
            found = _Ahead(start, stop, chunk_ids, offsets)
            keep_latest(self._blocks, number, found, _KEPT_BLOCKS)
        return found

    def _samples(self, spans: Sequence[tuple[int, int, int]]) -> tuple[Int64Array, Int64Array]:
        """Return chunk ids and offsets of draws ``[start, stop)`` of some sources, end to end; int64 [n] each."""
        lists, starts, stops = [], [], []
        for source, start, stop in spans:
            for era in self._sources[source].eras:
                begin, end = max(start, era.first_draw), min(stop, era.stop_draw)
                if begin < end:
                    lists.append(era.listing)
                    starts.append(begin - era.first_draw)
                    stops.append(end - era.first_draw)
        parts, _ = listed(lists, np.array(starts), np.array(stops))
        row = np.repeat(np.arange(len(parts.sizes)), parts.sizes)
        within = np.arange(len(row)) - np.repeat(np.cumsum(parts.sizes) - parts.sizes, parts.sizes)
        return parts.chunk_ids[row], parts.firsts[row] + within

    def parts(self, low: int, high: int, start: int, stop: int) -> LaneParts:
        """See ``Stream``."""
        first = max(start - self._hold, 0)
        chunk_ids = np.concatenate([self._drawn(lane, first, stop)[0] for lane in range(low, high)])
        here, lanes = chunk_ids >= 0, np.repeat(np.arange(low, high), stop - first)
        begins = np.tile(np.arange(first, stop), high - low)[here]
        return LaneParts(chunk_ids=chunk_ids[here], lanes=lanes[here], begins=begins, ends=begins + 1 + self._hold)

    def find(self, chunk_id: int, offset: int, start: int, stop: int) -> list[tuple[int, int]]:
        """See ``Stream``."""
        source = next(one for one, lanes in self._sources.items() if chunk_id in lanes.eras[-1].listing.chunk_ids)
        begin, end = (int(self._tree.counts(0, at * self._num_lanes)[source]) for at in (start, stop))
        found: list[tuple[int, int]] = []
        for first in range(begin, end, _FOUND_AT_ONCE):
            chunk_ids, offsets = self._samples([(source, first, min(first + _FOUND_AT_ONCE, end))])
            draws = first + np.flatnonzero((chunk_ids == chunk_id) & (offsets == offset))
            found += self._drawn_at(self._tree.positions(0, source, draws))
        return found

    def counts(self, num_draws: int) -> dict[str, int]:
        """Count the samples of each source among the first draws of all lanes, up to the end of a row."""
        return dict(zip(self._tree.names, self._tree.counts(0, num_draws).tolist(), strict=True))

    def source_at(self, lane: int, draw: int) -> str:
        """Return the source of a draw of a lane."""
        return self._tree.names[int(self._tree.draws_at(self._numbers(lane, np.array([draw])))[0][0])]

    def free_pass(self, name: str, num_draws: int) -> int:
        """Return the first pass over a source without a sample among the first ``num_draws`` draws of all lanes."""
        draws = self.counts(num_draws)[name]
        return self._sources[self._index[name]].free_pass(draws) if draws else 0


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
