"""Stamp the runs of all sources with the times at which their shares reach them, and sort them by time.

The amount that a source has given grows with time, counted in samples of a lane (``Growth``). The amount due at a time
follows by arithmetic, and so does the time at which an amount is due. The runs that some lanes lay out in a stretch of
time (``LaneBlock``) are then a slice of the runs of all sources (``Drawn``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from streaming.common.arrays import sums
from streaming.order.mixing.passes import Weights
from streaming.order.mixing.source_lanes import Runs
from streaming.order.plan.schedule import checked_weights
from streaming.types import Int64Array

Floats = npt.NDArray[np.float64]
_COMPARED = 8  # segments: with more of them, each source's samples are looked up by bisection
_SORTED_FROM = 8  # blocks: sorting all runs takes as long as scanning them this many times


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Growth:
    """The amount that one source has given, by time: linear between the times at which weights change.

    Attributes:
        times: float64 [n], start of each segment, the first at 0.
        shares: float64 [n], share in each segment.
        dues: float64 [n], samples due at each start.
    """

    times: Floats
    shares: Floats
    dues: Floats

    @classmethod
    def of_all(cls, growths: Sequence[Growth]) -> Growth:
        """Combine the growths of several sources, with equal times, into one whose ``due`` returns all: float64 [S]."""
        shares, dues = (np.stack([getattr(one, name) for one in growths], axis=-1) for name in ("shares", "dues"))
        return cls(times=growths[0].times, shares=shares, dues=dues)

    @property
    def ends_at(self) -> float:
        """The time from which the source no longer has a share; infinity: it still has one; 0: it never had one."""
        given = np.flatnonzero(self.shares)
        return float(np.append(self.times[1:], np.inf)[given[-1]]) if len(given) else 0.0

    def due(self, time: float) -> Any:
        """Return the number of samples of this source due within the first ``time`` samples of a lane."""
        segment = int(np.searchsorted(self.times, time, side="right")) - 1
        return self.dues[segment] + (time - self.times[segment]) * self.shares[segment]

    def stamps(self, samples: Floats) -> Floats:
        """Return the earliest times at which ``samples`` (above 0) are due; infinity if never.

        Monotone despite rounding. Times before a segment starts do not depend on that segment.
        """
        segment = np.searchsorted(self.dues, samples, side="left") - 1
        return self._stamps_in(segment, samples, self.shares[segment], self.dues[segment])

    def stamps_of(self, sources: Int64Array, samples: Floats) -> Floats:
        """Return ``stamps`` of samples of several sources, sorted by source, for a growth made by ``of_all``; [n]."""
        if len(self.times) > _COMPARED:
            borders = np.searchsorted(sources, np.arange(self.dues.shape[1] + 1))
            found = np.empty(len(samples))
            for source in np.flatnonzero(np.diff(borders)).tolist():
                rows = slice(borders[source], borders[source + 1])
                one = Growth(times=self.times, shares=self.shares[:, source], dues=self.dues[:, source])
                found[rows] = one.stamps(samples[rows])
            return found
        segment = np.zeros(len(samples), np.int64)
        for dues in self.dues[1:]:
            segment += dues[sources] < samples
        return self._stamps_in(segment, samples, self.shares[segment, sources], self.dues[segment, sources])

    def _stamps_in(self, segment: Int64Array, samples: Floats, share: Floats, due: Floats) -> Floats:
        """Return ``stamps`` of samples, given the segment of each, its share, and the amount due at its start; [n]."""
        after = np.full(len(samples), np.inf)
        with np.errstate(over="ignore"):  # the smallest shares give infinity: never
            np.divide(samples - due, share, out=after, where=share > 0)
        ends = np.append(self.times[1:], np.inf)
        stamps: Floats = np.minimum(self.times[segment] + after, ends[segment])
        return stamps


def growths(names: Sequence[str], schedule: Sequence[Weights]) -> dict[str, Growth]:
    """Return the growth of every source; sources that weights do not name have no share."""
    times = [float(entry.start) for entry in schedule]
    lengths = [after.start - before.start for before, after in pairwise(schedule)]
    exact = [checked_weights(entry.weights) for entry in schedule]
    totals = [sum(weights.values(), Fraction()) for weights in exact]
    found = {}
    for name in names:
        shares = [float(weights[name] / total) if name in weights else 0.0 for weights, total in
                  zip(exact, totals, strict=True)]  # fmt: skip
        dues, due = [0.0], Fraction()
        for share, length in zip(shares, lengths, strict=False):
            due += Fraction(share) * length
            dues.append(float(due))
        found[name] = Growth(times=np.array(times), shares=np.array(shares), dues=np.array(dues))
    return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LaneBlock:
    """The runs that some lanes lay out in a stretch of time, which begins at ``time``.

    ``runs.begins`` are lane positions. Lane ``low + i`` has runs ``splits[i]`` to ``splits[i + 1]``, at lane positions
    ``[starts[i], stops[i])``. ``stamps`` are the stamps of the runs, ascending in each lane.
    """

    time: int
    runs: Runs
    stamps: Floats
    splits: Int64Array
    starts: Int64Array
    stops: Int64Array


@dataclass(slots=True, kw_only=True, eq=False)
class Drawn:
    """Runs of all sources in a group of lanes, source after source, by name.

    Lookups by block are cached; callers hold the lock of the order.

    Attributes:
        since: int64 [S], first position of each source's streams that the runs cover.
        until: int64 [S], end (exclusive) of these positions; 0: no runs of the source.
        splits: int64 [S + 1], the first run of each source.
        runs: The runs; ``begins`` are positions in the streams of their source.
        stamps: The stamp of each run.
        sources: The source of each run.
        is_first: Whether each run is its source's first in a lane.
    """

    since: Int64Array
    until: Int64Array
    splits: Int64Array
    runs: Runs
    stamps: Floats
    sources: Int64Array = field(init=False)
    is_first: npt.NDArray[np.bool_] = field(init=False)
    _blocks: int = 0
    _by_time: _ByTime | None = None

    def __post_init__(self) -> None:
        self.sources = np.repeat(np.arange(len(self.since)), np.diff(self.splits))
        self.is_first = (np.diff(self.runs.lanes, prepend=-1) != 0) | (np.diff(self.sources, prepend=-1) != 0)

    @classmethod
    def none(cls, num_sources: int) -> Drawn:
        """Return an instance without runs."""
        nothing = np.zeros(num_sources, np.int64)
        splits = np.zeros(num_sources + 1, np.int64)
        return cls(since=nothing, until=nothing, splits=splits, runs=Runs.joined([]), stamps=np.empty(0))

    def replaced(
        self, sources: Int64Array, starts: Int64Array, stops: Int64Array, runs: Runs, counts: Int64Array, stamps: Floats
    ) -> Drawn:
        """Replace the runs of some sources, given in ascending order, with their bounds, runs, counts and stamps."""
        since, until, sizes = self.since.copy(), self.until.copy(), np.diff(self.splits)
        since[sources], until[sources], sizes[sources] = starts, stops, counts
        is_kept = np.ones(len(since), np.bool_)
        is_kept[sources] = False
        rows = np.flatnonzero(is_kept[self.sources])
        order = np.argsort(np.concatenate([self.sources[rows], np.repeat(sources, counts)]), kind="stable")
        return Drawn(
            since=since, until=until, splits=sums(sizes),
            runs=Runs.joined([self.runs.taken(rows), runs]).taken(order),
            stamps=np.concatenate([self.stamps[rows], stamps])[order],
        )  # fmt: skip

    def stamped(self, start: int, stop: int, lanes: range) -> tuple[Int64Array, Runs, Floats]:
        """Return the samples given up to ``start``, int64 [lanes], and the runs stamped in ``(start, stop]``.

        The runs are sorted by lane, then by stamp. The samples of a source up to ``start`` are those before its first
        run here, and those of the runs here that are stamped no later than ``start``.
        """
        self._blocks += 1
        if self._blocks >= _SORTED_FROM:
            if self._by_time is None:
                self._by_time = _ByTime.of(self, lanes)
            given, rows = self._by_time.between(start, stop)
            return given, self.runs.taken(rows), self.stamps[rows]
        runs, stamps, is_first = self.runs, self.stamps, self.is_first
        is_before = stamps <= start
        given = np.zeros(len(lanes), np.int64)
        np.add.at(given, runs.lanes[is_first] - lanes.start, runs.begins[is_first])
        np.add.at(given, runs.lanes[is_before] - lanes.start, runs.sizes[is_before])
        rows = np.flatnonzero(~is_before & (stamps <= stop))
        rows = rows[np.lexsort((stamps[rows], runs.lanes[rows]))]
        return given, runs.taken(rows), stamps[rows]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _ByTime:
    """Drawn runs sorted by lane, then by stamp, so that a block is a slice of each lane.

    Attributes:
        order: int64 [n], the runs.
        stamps: Their stamps, in this order.
        splits: int64 [lanes + 1], the first run of each lane.
        given: int64 [n + 1], cumulative amount given in all lanes up to each run.
        begun: int64 [lanes], amount given before the first runs.
    """

    order: Int64Array
    stamps: Floats
    splits: Int64Array
    given: Int64Array
    begun: Int64Array

    @classmethod
    def of(cls, drawn: Drawn, lanes: range) -> _ByTime:
        """Sort what was drawn in some lanes."""
        order = np.lexsort((drawn.stamps, drawn.runs.lanes))
        begun = np.zeros(len(lanes), np.int64)
        np.add.at(begun, drawn.runs.lanes[drawn.is_first] - lanes.start, drawn.runs.begins[drawn.is_first])
        return cls(
            order=order,
            stamps=drawn.stamps[order],
            splits=np.searchsorted(drawn.runs.lanes[order], np.arange(lanes.start, lanes.stop + 1)),
            given=sums(drawn.runs.sizes[order]),
            begun=begun,
        )

    def between(self, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        """Return the samples given up to ``start``, int64 [lanes], and the runs stamped in ``(start, stop]``."""
        cuts = [low + np.searchsorted(self.stamps[low:high], (start, stop), side="right")
                for low, high in pairwise(self.splits.tolist())]  # fmt: skip
        lows = np.array([cut[0] for cut in cuts])
        rows = np.concatenate([self.order[low:high] for low, high in cuts])
        return self.begun + self.given[lows] - self.given[self.splits[:-1]], rows
