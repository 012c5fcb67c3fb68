"""Lay the lanes of an endless mixture by single samples, or by whole batches: shares are exact at every row.

A tree of integer splits (:mod:`streaming.order.mixing.shares`) determines which source a lane position draws from, and
the index of that draw. The source resolves the draw by an order of its own, independent of other sources::

    lane position     0    1    2    3    4    5    6
    source           web  web code  web  web code  web
    draw of it        0    1    0    2    3    1    4       ->  web's own lane: chunks in its order, a window of its own

Sources with few chunks or samples share one leaf of the tree; all lanes draw from it together (``RowStream``).

Each source therefore keeps chunks in memory in every lane at all times: the memory of a plan grows with the number of
sources. Weights apply from the exact position for which they are set, so how long a chunk is needed depends on future
weights. The plan is therefore made one stretch at a time (``LaneParts.goes_on``), and nothing is planned beyond the
stretch.

A mixture dealt in chunks (:mod:`streaming.order.mixing.lanes`) also deals some sources this way: those that it repeats
so fast that lanes, which differ by some chunks, would differ by whole passes (``EvenLanes``). All other sources
together are one leaf::

    lane position      0    1    2    3    4    5    6    7
    drawn from        laid laid few  laid laid laid few  laid
    draw of it         0    1    0    2    3    4    1    5       ->  MixedLanes: web's and code's chunks, by stamps
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

import numpy as np

from streaming.common.arrays import rows_by
from streaming.errors import ConfigError, StateError
from streaming.order.mixing.endless_order import EndlessOrder
from streaming.order.mixing.lanes import MixedLanes, stretch_of
from streaming.order.mixing.passes import Sources, Weights
from streaming.order.mixing.shares import MAX_POSITIONS, BatchShares, LaneShares, ShareTree
from streaming.order.mixing.streams import LaidStream, RowStream, SourceOrder, Stream
from streaming.order.plan.order import ENDLESS, LEAST_STRETCH, LaneParts, OrderSettings
from streaming.types import Int64Array, override

ROWS, LAID = "/rows", "/chunks"
"""Leaf names that no source may have: the sources that lanes draw from together, and the sources laid in chunks."""
_KEPT_PARTS = 2**20  # of passes, over all sources; some 24 MiB
_STRETCH_ROWS = 2**18  # of all lanes; many lanes then start sooner
_LEAST_LONG = 256  # lane positions of a stretch nevertheless
_WINDOWS_AHEAD, _SAMPLES_AHEAD = 64, 2**12
"""Nothing is laid farther than this many windows plus samples beyond a lane's position: chunks move by a few
windows."""


class ExactLanes(EndlessOrder):
    """The order of an endless mixture whose shares are exact at every row.

    After ``n`` samples of a lane, a source has given ``n`` times its share, to within one sample per node above it in
    the tree of sources.

    Args:
        sources: See ``EndlessOrder``. The samples that absent sources gave need not be known: no position depends on
            another source's chunks.
        schedule: See ``EndlessOrder``.
        lock: See ``EndlessOrder``.

    Raises:
        ConfigError: There are no weights.
    """

    def __init__(
        self, sources: Sources, schedule: Sequence[Weights], *, lock: AbstractContextManager[Any] | None = None
    ) -> None:
        self._orders: dict[str, SourceOrder] = {}
        super().__init__(sources, schedule, lock=lock)

    @override
    @property
    def stretch(self) -> int:
        """See ``Orders``: shorter with many lanes."""
        return max(2 * self.settings.window, min(LEAST_STRETCH, self._few_rows))

    @property
    def _few_rows(self) -> int:
        return max(_STRETCH_ROWS // self.settings.lanes, _LEAST_LONG)

    # --- the tree of sources ---

    def _members(self) -> dict[str, list[str]]:
        """Return the sources of each leaf."""
        rows = [name for name in self.sources.every_name if self.sources.even.get(name) == "rows"]
        found = {ROWS: rows} if rows else {}
        return {**found, **{name: [name] for name in self.sources.every_name if name not in rows}}

    @override
    def _weigh(self) -> None:
        self._names_of = self._members()
        self._leaf_of = {name: leaf for leaf, names in self._names_of.items() for name in names}
        present = set(self.sources.names)
        # Leaves that have a stream come first.
        here = [leaf for leaf, names in self._names_of.items() if leaf == ROWS or present.intersection(names)]
        self._leaves = (*here, *(leaf for leaf in self._names_of if leaf not in here))
        self._by_leaf = tuple(map(self._leaf_weights, self.schedule))
        self._shares = self._dealt()
        self._streams: list[Stream] = [self._stream(leaf) for leaf in here]

    def _leaf_weights(self, entry: Weights) -> Weights:
        """Return weights of leaves."""
        found: dict[str, list[float]] = {}
        for name in sorted(entry.weights):
            found.setdefault(self._leaf_of[name], []).append(entry.weights[name])
        return Weights(start=entry.start, weights={leaf: sum(weights) for leaf, weights in found.items()})

    def _dealt(self) -> LaneShares:
        """Return how lane positions are dealt to leaves."""
        self._tree = ShareTree(
            self._leaves, self._by_leaf, lanes=self.settings.lanes, seed=self.settings.seed,
            apart=ROWS if ROWS in self._leaves else None,
        )  # fmt: skip
        return self._tree

    def _stream(self, leaf: str) -> Stream:
        if leaf == ROWS:
            return self._rows()
        if leaf not in self._orders:
            kept = _KEPT_PARTS // len(self.sources.names)
            self._orders[leaf] = SourceOrder(self.sources.eras[leaf], self.settings, kept_parts=kept)
        return self._orders[leaf]

    def _rows(self) -> RowStream:
        """Return the stream of sources that lanes draw from together; its time counts the draws of all lanes."""
        names, eras = self._names_of[ROWS], self.sources.eras
        starts = self._tree.begun(self._leaves.index(ROWS)).sum(axis=0).tolist()
        # Draws of rows before an entry have numbers below its start, so weights apply from that row on.
        schedule = self._inner(names, starts)
        self._row_stream = RowStream(
            {name: eras[name] for name in names if name in eras},
            ShareTree(sorted(names), schedule, lanes=1, seed=self.settings.seed),
            self._tree, self._leaves.index(ROWS), self.settings, absent=self._gone,
        )  # fmt: skip
        return self._row_stream

    def _inner(self, names: Sequence[str], starts: Sequence[int]) -> list[Weights]:
        """Return the weights of some sources among themselves, given the starts of entries in their time."""
        found: list[Weights] = []
        for entry, start in zip(self.schedule, starts, strict=True):
            weights = {name: entry.weights[name] for name in sorted(names) if name in entry.weights}
            if any(weights.values()):
                found.append(Weights(start=start if found else 0, weights=weights))
        return found or [Weights(start=0, weights=dict.fromkeys(names, 1.0))]

    def _gone(self, name: str, lane: int, draw: int) -> StateError:
        place = int(self._shares.positions(lane, self._leaves.index(ROWS), np.array([draw]))[0])
        return gone(name, place * self.settings.lanes + lane)

    # --- the order ---

    @override
    def lane_samples(self, lane: int, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        leaves, draws = self._planned(stop).draws(lane, start, stop)
        absent = np.flatnonzero(leaves >= len(self._streams))
        if len(absent):
            name = self._names_of[self._leaves[int(leaves[absent[0]])]][0]
            raise gone(name, (start + int(absent[0])) * self.settings.lanes + lane)
        return located(leaves, draws, lambda leaf, first, last: self._streams[leaf].draws(lane, first, last))

    def lane_parts(self, low: int, high: int, start: int, stop: int) -> LaneParts:
        """See ``Order``: cut to ``[start, stop)``."""
        if low == high:
            return LaneParts.joined([])
        shares, lanes = self._planned(stop), range(low, high)
        dealt = [shares.draws(lane, start, stop)[0] for lane in lanes]
        # 1. Per lane: the positions sorted by leaf, int64 [lanes, stop - start], and the number of draws per leaf,
        # within the range and before it, and where each leaf's positions begin, int64 [lanes, leaves].
        places = np.array([np.argsort(leaves, kind="stable") for leaves in dealt]).reshape(len(lanes), -1)
        counts = np.array([np.bincount(leaves, minlength=len(self._leaves)) for leaves in dealt])
        before = np.array([shares.counts(lane, start) for lane in lanes])
        bases = np.cumsum(counts, axis=1) - counts
        weights = [entry.weights for entry in self._by_leaf if entry.start < max(stop, 1)][-1]
        found = []
        for leaf, stream in enumerate(self._streams):
            # 2. Per leaf: the draws [since, until) that each lane makes from it, int64 [lanes], and its runs, int64
            # [runs].
            since, until = before[:, leaf], before[:, leaf] + counts[:, leaf]
            if not until.any():
                continue
            parts = stream.parts(low, high, int(since.min()), int(until.max()) + 1)
            lane = parts.lanes - low
            since, until, first, last = since[lane], until[lane], parts.begins, parts.ends
            # 3. Keep the runs that are due here. A run that began before, or ends later, stays in memory even if its
            # source is not drawn in between; unless the source has lost its weight, and the run may never be due again.
            is_held = weights.get(self._leaves[leaf], 0) > 0
            due = np.flatnonzero((first < until) & (last > since) & (is_held | (since < until)))
            lane, since, until, first, last = lane[due], since[due], until[due], first[due], last[due]
            # 4. Convert draws into lane positions, int64 [runs due], cut to [start, stop).
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
        shares = self._planned(stop)
        name = self.sources.names[int(self.sources.source_of(np.array([chunk_id]))[0])]
        leaf, lanes = self._leaves.index(self._leaf_of[name]), range(self.settings.lanes)
        first = min(int(shares.counts(lane, start)[leaf]) for lane in lanes)
        last = max(int(shares.counts(lane, stop)[leaf]) for lane in lanes)
        found = []
        for lane, draw in self._streams[leaf].find(chunk_id, offset, first, last) if last else ():
            due = int(shares.positions(lane, leaf, np.array([draw]))[0])
            if start <= due < stop:
                found.append((lane, due))
        return sorted(found)

    @override
    def settle(self, place: int) -> None:
        """See ``EndlessOrder``; fixes only the weights before these rows."""
        self._planned(place)

    @override
    def drawn_before(self, row: int) -> Int64Array:
        lanes = self.settings.lanes
        whole, rest = divmod(row, lanes)
        counts = np.array([self._shares.counts(lane, whole + (lane < rest)) for lane in range(lanes)])
        found: dict[str, int] = {}
        for leaf, drawn in zip(self._leaves, counts.T, strict=True):
            found.update(self._drawn_of(leaf, drawn, row))
        return np.array([found[name] for name in self.sources.every_name], np.int64)

    def _drawn_of(self, leaf: str, drawn: Int64Array, row: int) -> Mapping[str, int]:
        """Count the samples of each source of a leaf before a row, given each lane's draws from the leaf."""
        if leaf != ROWS:
            return {leaf: int(drawn.sum())}
        index, (whole, rest) = self._leaves.index(leaf), divmod(row, self.settings.lanes)
        before = np.array([int(self._shares.counts(lane, whole)[index]) for lane in range(self.settings.lanes)])
        found = dict(self._row_stream.counts(int(before.sum())))
        for lane in np.flatnonzero(drawn > before)[:rest].tolist():  # of lanes that are one row further
            found[self._row_stream.source_at(lane, int(before[lane]))] += 1
        return found

    @override
    def free_pass(self, name: str) -> int:
        leaf, frontier = self._leaf_of[name], self.frontier
        index = self._leaves.index(leaf)
        drawn = [int(self._shares.counts(lane, frontier)[index]) for lane in range(self.settings.lanes)]
        if leaf == ROWS:
            return self._row_stream.free_pass(name, sum(drawn))
        order = self._orders[name]
        return order.lanes.free_pass(max(drawn) + order.settings.window) if any(drawn) else 0

    @override
    @property
    def known_from(self) -> int:
        """See ``EndlessOrder``: where the last weight of an absent source ends."""
        stops = [*(entry.start for entry in self.schedule[1:]), ENDLESS]
        spans, absent = zip(self.schedule, stops, strict=True), list(self._absent())
        return max((stop for entry, stop in spans if any(map(entry.weights.get, absent))), default=0)

    @override
    def check_from(self, place: int) -> None:
        known_from, lanes = self.known_from, self.settings.lanes
        if place >= known_from:
            return
        ends, absent = [*(entry.start for entry in self.schedule[1:]), ENDLESS], set(self._absent())
        coming = [entry.weights for entry, end in zip(self.schedule, ends, strict=True) if end > place]
        names = sorted({repr(name) for weights in coming for name in absent if weights.get(name)})
        raise StateError(
            f"rows {place * lanes:,} to {known_from * lanes:,} draw from {', '.join(names)}, which this mixture lacks: "
            "the weights that leave it out apply after them. Add the source, with the weight 0, to continue from here; "
            f"a state of row {known_from * lanes:,} or later does without it"
        )

    def _absent(self) -> Iterator[str]:
        """Yield the absent sources whose draws are not known."""
        yield from (name for name in self.sources.every_name if name not in self.sources.names)

    def _planned(self, stop: int) -> LaneShares:
        """Return the shares, which from now on are final at positions before ``stop``."""
        with self._lock:
            # Weights from the frontier on leave everything before it unchanged.
            self._frontier = max(self._frontier, stop)
            return self._shares


class BatchLanes(ExactLanes):
    """The order of an endless mixture in which each global batch comes from one source, and shares count batches.

    Args:
        sources: See ``ExactLanes``.
        schedule: See ``EndlessOrder``.
        batch_size: G.
        lock: See ``EndlessOrder``.

    Raises:
        ConfigError: There are no weights, or the lanes do not divide the batch.
    """

    def __init__(
        self, sources: Sources, schedule: Sequence[Weights], *, batch_size: int,
        lock: AbstractContextManager[Any] | None = None,
    ) -> None:  # fmt: skip
        check_lanes(sources.settings, batch_size)
        self.batch_size = batch_size
        super().__init__(sources, schedule, lock=lock)

    @override
    def _members(self) -> dict[str, list[str]]:
        return {name: [name] for name in self.sources.every_name}

    @override
    def _dealt(self) -> LaneShares:
        rows = self.batch_size // self.settings.lanes
        return BatchShares(self._leaves, self._by_leaf, batch_rows=rows, seed=self.settings.seed)

    @override
    def under(self, settings: OrderSettings) -> Self:
        return type(self)(self.sources.under(settings), self.schedule, batch_size=self.batch_size)


class EvenLanes(ExactLanes):
    """The order of an endless mixture dealt in chunks, except that sources in ``Sources.even`` are dealt by samples.

    After ``k`` passes over one of these, each of its samples has come ``k`` times, or once more or less; see
    ``ExactLanes``. For the other sources, see ``MixedLanes``; its time counts the samples that a lane draws from all of
    them. New weights among them apply from a row after everything that is laid. While they have no weight, there is no
    such row; new weights then apply a fixed number of draws after the sources regain a weight.

    Args:
        sources: See ``EndlessOrder``.
        schedule: See ``EndlessOrder``.
        lock: See ``EndlessOrder``.
    """

    def __init__(
        self, sources: Sources, schedule: Sequence[Weights], *, lock: AbstractContextManager[Any] | None = None
    ) -> None:
        self._large = [name for name in sources.every_name if name not in sources.even]
        self._laid: MixedLanes | None = None
        super().__init__(sources, schedule, lock=lock)

    @override
    @property
    def stretch(self) -> int:
        """See ``Orders``: as short as that of ``MixedLanes``, and shorter with many lanes."""
        return max(self.settings.window // 2, min(stretch_of(self.settings), self._few_rows))

    @override
    def _members(self) -> dict[str, list[str]]:
        found = {leaf: names for leaf, names in super()._members().items() if leaf not in self._large}
        return {**({LAID: self._large} if self._large else {}), **found}

    @override
    def _weigh(self) -> None:
        super()._weigh()
        self.mixed_after = max(map(self._mixed_after, self._leaves[: len(self._streams)]))

    def _mixed_after(self, leaf: str) -> int:
        """Return the number of lane positions after which all sources of a leaf with a weight have begun."""
        shares = [entry.weights[leaf] / sum(entry.weights.values()) for entry in self._by_leaf
                  if entry.weights.get(leaf)]  # fmt: skip
        draws = self._laid.mixed_after if leaf == LAID and self._laid is not None else 1
        least = min(shares, default=1.0)
        return math.ceil((draws + 1) / least) if draws + 1 < least * ENDLESS else ENDLESS

    @override
    def _stream(self, leaf: str) -> Stream:
        if leaf != LAID:
            return super()._stream(leaf)
        schedule = self._laid_schedule()
        if self._laid is None:
            self._laid = MixedLanes(self.sources, schedule, lock=self._lock, names=self._large, row_at=self._row_at)
        else:
            self._laid.reschedule(schedule)
        return LaidStream(self._laid)

    def _laid_schedule(self) -> list[Weights]:
        """Return the weights of the large sources among themselves; time counts a lane's draws from all of them."""
        draws = self._tree.begun(self._leaves.index(LAID))  # in each lane before each entry
        starts = draws.min(axis=0)
        # While none was drawn, earlier weights had some laid ahead, up to an unknown row.
        is_drawn = np.array([bool(entry.weights.get(LAID)) for entry in self._by_leaf])
        is_back = np.flatnonzero(is_drawn[1:] & ~is_drawn[:-1] & (draws.max(axis=0)[1:] > 0)) + 1
        starts[is_back] += _WINDOWS_AHEAD * self.settings.window + _SAMPLES_AHEAD
        return self._inner(self._large, np.maximum.accumulate(starts).tolist())

    @override
    def apart(self) -> Self:
        made = super().apart()
        if self._laid is not None:
            made._laid = self._laid.apart()
            made._streams = [LaidStream(made._laid) if leaf == LAID else stream for leaf, stream in
                             zip(self._leaves, self._streams, strict=False)]  # fmt: skip
        return made

    # --- draws ---

    @override
    def _drawn_of(self, leaf: str, drawn: Int64Array, row: int) -> Mapping[str, int]:
        if leaf != LAID:
            return super()._drawn_of(leaf, drawn, row)
        if self._laid is None:  # all of it is before any position that can be requested
            return {name: int(np.sum(self.sources.laid.get(name, 0))) for name in self._large}
        counts = np.sum([self._laid.drawn(lane, count) for lane, count in enumerate(drawn.tolist())], axis=0)
        found = dict(zip(self.sources.every_name, counts.tolist(), strict=True))
        return {name: found[name] for name in self._large}

    def laid_at_the_end(self, name: str) -> Int64Array | None:
        """Return the number of samples that a source without a share has in each lane once all is laid, int64 [L].

        None: the source is not laid in chunks; or the number depends on future weights, since no laid source has a
        share.
        """
        is_laid = self._laid is not None and name in self._large and self._by_leaf[-1].weights.get(LAID)
        return self._laid.laid_at_the_end(name) if is_laid and self._laid is not None else None

    # --- how far it is planned ---

    @override
    @property
    def frontier(self) -> int:
        """See ``EndlessOrder``: after all planned positions, and after all laid chunks of large sources are drawn."""
        with self._lock:
            # Both parts are read at one moment, and only grow.
            laid = 0 if self._laid is None else self._laid.frontier
            return max(self._frontier, self._behind(laid) if laid else 0)

    def _behind(self, laid: int) -> int:
        """Return the first lane position before which every lane has drawn ``laid`` samples of large sources.

        If large sources lose their weight before that, return the position after the one where they lose it.
        """
        found = max(self._position(lane, laid - 1) for lane in range(self.settings.lanes)) + 1
        if found <= MAX_POSITIONS:
            return found
        drawn = [index for index, entry in enumerate(self._by_leaf) if entry.weights.get(LAID)]
        return self._by_leaf[drawn[-1] + 1].start + 1 if drawn and drawn[-1] + 1 < len(self._by_leaf) else 1

    def _position(self, lane: int, draw: int) -> int:
        """Return the position of a lane's draw number ``draw`` from the large sources."""
        return int(self._shares.positions(lane, self._leaves.index(LAID), np.array([draw]))[0])

    def _row_at(self, time: int) -> int:
        return min(self._position(0, time), ENDLESS // self.settings.lanes) * self.settings.lanes

    @override
    def settle(self, place: int) -> None:
        super().settle(place)
        if self._laid is not None and place:
            leaf = self._leaves.index(LAID)
            self._laid.settle(max(int(self._shares.counts(lane, place)[leaf]) for lane in range(self.settings.lanes)))

    @override
    def free_pass(self, name: str) -> int:
        return self._laid.free_pass(name) if self._laid is not None and name in self._large else super().free_pass(name)

    @override
    @property
    def known_from(self) -> int:
        needed = self._laid.known_from if self._laid is not None else 0
        behind = max(self._position(lane, needed) for lane in range(self.settings.lanes)) if needed else 0
        return max(super().known_from, behind)

    @override
    def _absent(self) -> Iterator[str]:
        """See ``ExactLanes``; the positions of absent laid sources follow from the ledger."""
        yield from (name for name in super()._absent() if self._laid is None or name not in self._large)


def gone(name: str, row: int) -> StateError:
    """Make the error for a row that draws from a source that no longer exists."""
    return StateError(
        f"row {row} draws from {name!r}, which this mixture lacks: it was dropped after that row. Add the source to "
        "continue from there"
    )


def check_lanes(settings: OrderSettings, batch_size: int) -> None:
    """Check that every lane contributes the same number of samples to a batch of one source.

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
    """Return the chunk ids and the offsets in them of lane positions that draw from several sources, int64 [n] each.

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
