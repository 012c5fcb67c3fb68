"""Lay the lanes of a mixture without end: every lane is a stream of chunks of all sources, by weight.

Each source is a stream of its own, cut into lanes: draw ``n`` of a source belongs to lane ``n % L``, and pass after
pass every lane gets an equal run of the shuffled chunks. So all lanes of a source begin a pass together, and where the
source's sample ``x`` of a lane lies is arithmetic. A source with fewer chunks than lanes is cut in *rounds* of several
passes, so that a lane still reads whole chunks: the passes of a round are given side by side.

In a lane, the chunks of all sources are laid in the order of their stamps (see :mod:`streaming.mixing.passes`): the
times, in samples of the lane, at which the source's share has grown to them. How much a source has given by some time
is arithmetic too; so what stands at a position is found without what comes before it::

    time            0 ------ t --------->
    share of web    0 ... 0.7 t              laid by t: web's chunks of its first 0.7 t samples, one more or less
    share of code   0 ... 0.3 t
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from streaming.arrays import IntColumns, sums
from streaming.errors import ConfigError, StateError
from streaming.mixing.endless import Endless
from streaming.mixing.passes import Listing, MixedPasses, Sources, Weights, keep_latest, keyed_number
from streaming.plan.order import ENDLESS, LaneParts, OrderSettings, window_place, window_slice
from streaming.plan.permutation import hash_table, permutations
from streaming.plan.schedule import checked_weights
from streaming.types import Int64Array

_Floats = npt.NDArray[np.float64]
_GROUP = 16  # lanes laid at once: NumPy takes as long for one
_KEPT_BLOCKS = 256  # laid, of a group of lanes each
_BLOCKS_AHEAD = 64  # of which a source's runs are drawn at once: one block costs as much
_SORTED_FROM = 8  # blocks: sorting all runs takes as long as looking through them so often
_BUNDLED_PARTS = 2**12  # rounds of small sources are laid several at once
_KEPT_BUNDLES = 3  # of each source
_LEAST_BLOCK = 1024  # samples of a lane
_LEAST_STRETCH = 512  # samples of a lane; half of it costs a third more per row
_NEVER = 2**62


class Rounds:
    """Some rounds over one source, laid end to end and cut into lanes, whose sizes even out from round to round.

    Args:
        listing: Of the source.
        numbers: Of the rounds.
        num_passes: Passes in a round.
        lanes: L.
        first_round: Number of the listing's first round.
        first_draw: The source's draws before that.

    Attributes:
        chunk_ids: int64[P], the chunk of each part.
        starts: int64[P+1], linear position of the first sample of each part.
        lane_starts: int64[rounds, L+1], linear position at which each lane of each round starts.
        first_draws: int64[rounds], the source's draws before each round.
        turns: int64[rounds, L], linear position of the border between parts at which a lane begins to read its run: it
            reads from there to the end, then what is before. So the parts that lane borders cut, which are smaller, do
            not come in all lanes of all sources at once.
    """

    def __init__(
        self, listing: Listing, numbers: range, num_passes: int, lanes: int, *, first_round: int = 0,
        first_draw: int = 0,
    ) -> None:  # fmt: skip
        self.numbers = numbers
        places = np.arange(numbers.start, numbers.stop + 1, dtype=np.int64) - first_round
        passes = np.arange(places[0] * num_passes, places[-1] * num_passes) + listing.first_pass
        chunks = listing.orders(passes).ravel()
        self.chunk_ids = listing.chunk_ids[chunks]
        self.starts = sums(listing.sizes[chunks])
        # Of the source's draws, those of each round by lane: draw n belongs to lane n % L.
        size = num_passes * listing.samples_per_pass
        draws = first_draw + places[:, None] * size
        self.first_draws: Int64Array = draws[:-1, 0]
        lane = np.arange(lanes + 1, dtype=np.int64)
        dealt = draws // lanes * lane + np.minimum(draws % lanes, lane)
        self.lane_starts: Int64Array = np.diff(dealt, axis=0) + (draws[:-1] - draws[0])
        begins, ends = self.lane_starts[:, :-1], self.lane_starts[:, 1:]
        draw = hash_table(keyed_number(listing.seed, "turns", listing.name), np.array(numbers), 0, lanes) >> np.uint64(
            33
        )
        sizes, drawn = ends - begins, draw.astype(np.int64)
        # drawn * sizes >> 31, whose product would not fit for lanes of 2**32 samples.
        anywhere = begins + drawn * (sizes >> 31) + (drawn * (sizes & (1 << 31) - 1) >> 31)
        borders = [self.starts[np.searchsorted(self.starts, place)] for place in (anywhere, begins)]
        self.turns = np.where(borders[0] < ends, borders[0], np.where(borders[1] < ends, borders[1], begins))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Runs(IntColumns):
    """Runs of samples of one chunk each, in lanes; int64[n] each, sorted by lane, then as they follow one another.

    Attributes:
        lanes: The lane.
        chunk_ids: The chunk.
        firsts: First sample in the chunk.
        sizes: Samples, at least one.
        begins: Where the run begins in the lane's stream.
    """

    lanes: Int64Array
    chunk_ids: Int64Array
    firsts: Int64Array
    sizes: Int64Array
    begins: Int64Array

    def at(self, places: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return chunk ids and offsets inside them of the samples at places of a lane, whose runs these are.

        They are int64[n] each.
        """
        row = np.searchsorted(self.begins, places, side="right") - 1
        return self.chunk_ids[row], places - (self.begins - self.firsts)[row]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Era:
    """Rounds ``[first_round, stop_round)`` of a source, over the chunks that it has until it grows.

    They hold its draws ``[first_draw, stop_draw)``.
    """

    listing: Listing
    num_passes: int
    round_samples: int
    first_round: int
    first_draw: int
    stop_round: int
    stop_draw: int

    @property
    def num_bundled(self) -> int:
        """Rounds that are made at once."""
        return max(_BUNDLED_PARTS // (self.num_passes * self.listing.num_chunks), 1)


def _eras(listings: Sequence[Listing], lanes: int) -> Iterator[_Era]:
    """Yield the eras of a source, the last one without end.

    Raises:
        ConfigError: One does not begin with a round of the one before.
    """
    first_round = first_draw = 0
    for listing, later in zip(listings, [*listings[1:], None], strict=True):
        num_passes = -(-lanes // listing.num_chunks)
        size = num_passes * listing.samples_per_pass
        stop_round = stop_draw = _NEVER
        if later is not None:
            num_rounds, rest = divmod(later.first_pass - listing.first_pass, num_passes)
            if num_rounds < 1 or rest:
                raise ConfigError(
                    f"source {listing.name!r}: it grew at pass {later.first_pass}; expected a multiple of {num_passes} "
                    f"passes behind pass {listing.first_pass}"
                )
            stop_round, stop_draw = first_round + num_rounds, first_draw + num_rounds * size
        yield _Era(
            listing=listing, num_passes=num_passes, round_samples=size, first_round=first_round, first_draw=first_draw,
            stop_round=stop_round, stop_draw=stop_draw,
        )  # fmt: skip
        first_round, first_draw = stop_round, stop_draw


class SourceLanes:
    """One source as L endless streams. Safe to share between threads: it keeps only what it would make again.

    A source with fewer chunks than lanes has rounds of several passes. One that grew has other rounds from one of its
    passes on; what comes before stays as it is, and so does what depends on ``mean_chunk``.

    Args:
        listings: Of the source, more than one where it grew.
        settings: Of the mixture.

    Attributes:
        mean_chunk: Samples of a chunk, on average, of those that the source began with.
        largest_chunk: Samples of the largest chunk.

    Raises:
        ConfigError: The source grew in the middle of a round.
    """

    def __init__(self, listings: Sequence[Listing], settings: OrderSettings) -> None:
        self._lanes = settings.lanes
        self.eras = list(_eras(listings, settings.lanes))
        self.mean_chunk = listings[0].mean_chunk
        self.largest_chunk = max(listing.largest_chunk for listing in listings)
        self._bundles: dict[tuple[int, int], Rounds] = {}

    def bundle(self, era: _Era, number: int) -> Rounds:
        """Return the rounds made with a round of an era, that follow one another; the latest are kept."""
        within = (number - era.first_round) // era.num_bundled
        key = era.first_round, within
        found = self._bundles.get(key)
        if found is None:
            first = era.first_round + within * era.num_bundled
            numbers = range(first, min(first + era.num_bundled, era.stop_round))
            found = Rounds(
                era.listing, numbers, era.num_passes, self._lanes, first_round=era.first_round,
                first_draw=era.first_draw,
            )  # fmt: skip
            keep_latest(self._bundles, key, found, _KEPT_BUNDLES)
        return found

    def rounds_of(self, low: int, high: int, start: int, stop: int) -> Iterator[tuple[_Era, range]]:
        """Yield the rounds, by era, that hold positions ``[start, stop)`` of the streams of lanes ``[low, high)``."""
        first, last = start * self._lanes + low, (stop - 1) * self._lanes + high - 1
        for era in self.eras:
            if first < era.stop_draw and last >= era.first_draw:
                begin, end = max(first, era.first_draw), min(last, era.stop_draw - 1)
                places = ((draw - era.first_draw) // era.round_samples for draw in (begin, end))
                yield era, range(era.first_round + next(places), era.first_round + next(places) + 1)

    def free_pass(self, stop: int) -> int:
        """Find the first pass that begins a round of which no lane has anything before ``stop`` of its stream."""
        draw = stop * self._lanes
        era = next(era for era in self.eras if draw <= era.stop_draw)
        rounds = -(-max(draw - era.first_draw, 0) // era.round_samples)
        return era.listing.first_pass + rounds * era.num_passes

    def runs(self, low: int, high: int, start: int, stop: int) -> Runs:
        """Return the runs that hold positions ``[start, stop)`` of the streams of lanes ``[low, high)``, whole."""
        found = []
        for era, numbers in self.rounds_of(low, high, start, stop):
            number = numbers.start
            while number < numbers.stop:
                bundle = self.bundle(era, number)
                found.append(self._runs_of(bundle, numbers, (low, high), (start, stop)))
                number = bundle.numbers.stop
        if len(found) == 1:
            return found[0]
        whole = Runs.joined(found)
        return whole.taken(np.argsort(whole.lanes, kind="stable"))

    def _runs_of(self, bundle: Rounds, numbers: range, lane_range: tuple[int, int], positions: tuple[int, int]) -> Runs:
        """Return the runs of those rounds that a bundle holds, by lane."""
        rounds = range(max(numbers.start, bundle.numbers.start), min(numbers.stop, bundle.numbers.stop))
        # One row for each lane, round, and side of its turn, as they follow one another.
        lanes = np.repeat(np.arange(*lane_range, dtype=np.int64), 2 * len(rounds))
        number = np.tile(np.repeat(np.arange(rounds.start, rounds.stop, dtype=np.int64), 2), len(range(*lane_range)))
        within, is_late = number - bundle.numbers.start, np.arange(len(lanes)) % 2 == 1
        turn = bundle.turns[within, lanes]
        lows = np.where(is_late, bundle.lane_starts[within, lanes], turn)
        highs = np.where(is_late, turn, bundle.lane_starts[within, lanes + 1])
        first = self._first_of(bundle, within, lanes)
        first[1::2] += (highs - lows)[::2]
        here = np.flatnonzero((highs > lows) & (first < positions[1]) & (first + highs - lows > positions[0]))
        # One row for each part in it.
        from_low = np.maximum(lows[here], lows[here] + positions[0] - first[here])
        to_high = np.minimum(highs[here], lows[here] + positions[1] - first[here])
        low_part = np.searchsorted(bundle.starts, from_low, side="right") - 1
        counts = np.searchsorted(bundle.starts, to_high, side="left") - low_part
        row = np.repeat(here, counts)
        part = np.arange(len(row)) + np.repeat(low_part - (np.cumsum(counts) - counts), counts)
        begins = np.maximum(bundle.starts[part], lows[row])
        return Runs(
            lanes=lanes[row],
            chunk_ids=bundle.chunk_ids[part],
            firsts=begins - bundle.starts[part],
            sizes=np.minimum(bundle.starts[part + 1], highs[row]) - begins,
            begins=first[row] + begins - lows[row],
        )

    def _first_of(self, bundle: Rounds, within: Int64Array | int, lanes: Int64Array) -> Int64Array:
        """Return where rounds of a bundle begin in the streams of lanes; any shape."""
        return (bundle.first_draws[within] - lanes + self._lanes - 1) // self._lanes

    def find(self, chunk_id: int, offset: int, start: int, stop: int) -> list[tuple[int, int]]:
        """Return lanes and positions of their streams, in ``[start, stop)``, at which a sample of this source lies."""
        found: list[tuple[int, int]] = []
        rounds = [(era, number) for era, numbers in self.rounds_of(0, self._lanes, start, stop) for number in numbers]
        for era, number in rounds:
            bundle = self.bundle(era, number)
            within = number - bundle.numbers.start
            starts, turns = bundle.lane_starts[within], bundle.turns[within]
            part = np.flatnonzero(bundle.chunk_ids == chunk_id)
            linear = bundle.starts[part] + offset
            linear = linear[(linear >= starts[0]) & (linear < starts[-1])]
            lanes = np.searchsorted(starts, linear, side="right") - 1
            after_turn = linear - turns[lanes]
            size = starts[lanes + 1] - starts[lanes]
            places = self._first_of(bundle, within, lanes) + np.where(after_turn < 0, after_turn + size, after_turn)
            due = (places >= start) & (places < stop)
            found += zip(lanes[due].tolist(), places[due].tolist(), strict=True)
        return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Growth:
    """How the share of one source grows with time: linear between the times at which weights change.

    Attributes:
        times: float64[n], at which each segment starts, the first at 0.
        shares: float64[n], in each segment.
        dues: float64[n], samples due at each start.
    """

    times: _Floats
    shares: _Floats
    dues: _Floats

    @classmethod
    def of_all(cls, growths: Sequence[Growth]) -> Growth:
        """Return those of several sources at the same times as one, of which ``due`` gives all: float64[S]."""
        shares, dues = (np.stack([getattr(one, name) for one in growths], axis=-1) for name in ("shares", "dues"))
        return cls(times=growths[0].times, shares=shares, dues=dues)

    @property
    def ends_at(self) -> float:
        """The time from which on the source has no share any more; infinity: it has one; 0: it never had."""
        given = np.flatnonzero(self.shares)
        return float(np.append(self.times[1:], np.inf)[given[-1]]) if len(given) else 0.0

    def due(self, time: float) -> Any:
        """Count the samples that the share of the first ``time`` samples of a lane comes to."""
        segment = int(np.searchsorted(self.times, time, side="right")) - 1
        return self.dues[segment] + (time - self.times[segment]) * self.shares[segment]

    def stamps(self, samples: _Floats) -> _Floats:
        """Return the times at which so many samples (above 0) are due, at the earliest; infinity where they never are.

        Monotone, whatever is rounded. What is due before a segment starts does not depend on that segment.
        """
        segment = np.searchsorted(self.dues, samples, side="left") - 1
        share = self.shares[segment]
        after = np.full(len(samples), np.inf)
        np.divide(samples - self.dues[segment], share, out=after, where=share > 0)
        ends = np.append(self.times[1:], np.inf)
        stamps: _Floats = np.minimum(self.times[segment] + after, ends[segment])
        return stamps


def growths(names: Sequence[str], schedule: Sequence[Weights]) -> dict[str, Growth]:
    """Tell how the shares of all sources grow; those that weights do not name have none."""
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
class _Block:
    """What some lanes lay in a stretch of time.

    ``runs.begins`` are lane positions; those of lane ``low + i`` are rows ``splits[i]`` to ``splits[i + 1]``, on lane
    positions ``[starts[i], stops[i])``. ``stamps`` are theirs, rising in each lane.
    """

    runs: Runs
    stamps: _Floats
    splits: Int64Array
    starts: Int64Array
    stops: Int64Array


@dataclass(slots=True, kw_only=True, eq=False)
class _Drawn:
    """Runs of all sources in a group of lanes, one source after the other, by name.

    What blocks look up is kept; whoever asks for blocks holds the lock of the order.

    Attributes:
        since: int64[S], of each source, the first position of its streams that the runs hold.
        until: int64[S], one past the last; 0: there are none of it.
        splits: int64[S+1], the first run of each source.
        runs: They; ``begins`` are positions of their source's streams.
        stamps: Of each.
        sources: Of each, its source.
        is_first: Of each, whether it is its source's first in a lane.
    """

    since: Int64Array
    until: Int64Array
    splits: Int64Array
    runs: Runs
    stamps: _Floats
    sources: Int64Array = field(init=False)
    is_first: npt.NDArray[np.bool_] = field(init=False)
    _blocks: int = 0
    _by_time: _ByTime | None = None

    def __post_init__(self) -> None:
        self.sources = np.repeat(np.arange(len(self.since)), np.diff(self.splits))
        self.is_first = (np.diff(self.runs.lanes, prepend=-1) != 0) | (np.diff(self.sources, prepend=-1) != 0)

    @classmethod
    def none(cls, num_sources: int) -> _Drawn:
        """Return no runs."""
        nothing = np.zeros(num_sources, np.int64)
        splits = np.zeros(num_sources + 1, np.int64)
        return cls(since=nothing, until=nothing, splits=splits, runs=Runs.joined([]), stamps=np.empty(0))

    def replaced(self, windows: Mapping[int, tuple[int, int, Runs, _Floats]]) -> _Drawn:
        """Replace the runs of some sources by others: first position, one past the last, runs, and their stamps."""
        since, until = self.since.copy(), self.until.copy()
        parts = [
            windows[source][2:] if source in windows else (self.runs.taken(slice(low, high)), self.stamps[low:high])
            for source, (low, high) in enumerate(pairwise(self.splits.tolist()))
        ]
        for source, (start, stop, *_) in windows.items():
            since[source], until[source] = start, stop
        return _Drawn(
            since=since, until=until, splits=sums([len(stamps) for _, stamps in parts]),
            runs=Runs.joined([runs for runs, _ in parts]), stamps=np.concatenate([stamps for _, stamps in parts]),
        )  # fmt: skip

    def of(self, counted: npt.NDArray[np.bool_]) -> tuple[Runs, _Floats, Int64Array, npt.NDArray[np.bool_]]:
        """Take the runs of some sources, bool[S], their stamps and sources, and which are the first in a lane."""
        if counted.all():
            return self.runs, self.stamps, self.sources, self.is_first
        rows = np.flatnonzero(counted[self.sources])
        return self.runs.taken(rows), self.stamps[rows], self.sources[rows], self.is_first[rows]

    def stamped(
        self, start: int, stop: int, counted: npt.NDArray[np.bool_], lanes: range
    ) -> tuple[Int64Array, Runs, _Floats]:
        """Tell what sources gave before ``start``, int64[lanes], and the runs stamped in ``(start, stop]``.

        The runs are sorted by lane, then by stamp. What a source gave before is all up to its first run here, and of
        these those that are stamped no later.
        """
        self._blocks += 1
        if self._blocks >= _SORTED_FROM and not self.until[~counted].any():
            if self._by_time is None:
                self._by_time = _ByTime.of(self, lanes)
            given, rows = self._by_time.between(start, stop)
            return given, self.runs.taken(rows), self.stamps[rows]
        runs, stamps, _, is_first = self.of(counted)
        is_before = stamps <= start
        given = np.zeros(len(lanes), np.int64)
        np.add.at(given, runs.lanes[is_first] - lanes.start, runs.begins[is_first])
        np.add.at(given, runs.lanes[is_before] - lanes.start, runs.sizes[is_before])
        rows = np.flatnonzero(~is_before & (stamps <= stop))
        rows = rows[np.lexsort((stamps[rows], runs.lanes[rows]))]
        return given, runs.taken(rows), stamps[rows]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _ByTime:
    """Drawn runs by lane, then by stamp, of which a block is a slice of each lane.

    Attributes:
        order: int64[n], the runs.
        stamps: Theirs, in this order.
        splits: int64[lanes+1], the first run of each lane.
        given: int64[n+1], what sources gave in all lanes up to each run, the runs before it added up.
        begun: int64[lanes], what they gave up to their first runs.
    """

    order: Int64Array
    stamps: _Floats
    splits: Int64Array
    given: Int64Array
    begun: Int64Array

    @classmethod
    def of(cls, drawn: _Drawn, lanes: range) -> _ByTime:
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
        """Return what was given before ``start``, int64[lanes].

        The runs stamped in ``(start, stop]``, by lane and stamp.
        """
        cuts = [low + np.searchsorted(self.stamps[low:high], (start, stop), side="right")
                for low, high in pairwise(self.splits.tolist())]  # fmt: skip
        lows = np.array([cut[0] for cut in cuts])
        rows = np.concatenate([self.order[low:high] for low, high in cuts])
        return self.begun + self.given[lows] - self.given[self.splits[:-1]], rows


class MixedLanes(Endless):
    """The order of a mixture without end: one pass, number 0, in which every lane is a stream of chunks by weight.

    After ``n`` samples of a lane a source has given ``n`` times its share, give or take one of its chunks, and its
    share of one chunk of every source. Any position is found by arithmetic and a pass's permutation of each source.
    """

    @property
    def stretch(self) -> int:
        """See ``Orders``: as little as costs little, so that other weights may soon apply."""
        return max(self.settings.window // 2, _LEAST_STRETCH)

    def __init__(
        self, sources: Sources, schedule: Sequence[Weights], *, lock: AbstractContextManager[Any] | None = None
    ) -> None:
        self._names = names = sorted(sources.names)
        settings = sources.settings
        self._lanes = {name: SourceLanes(sources.eras[name], settings) for name in names}
        self._mean_chunks = np.array([lanes.mean_chunk for lanes in self._lanes.values()])
        place_of = {name: place for place, name in enumerate(sources.names)}
        self._places = np.array([place_of[name] for name in names])
        self._phases = {name: _phases(name, settings) for name in names}
        self._block_time = max(_LEAST_BLOCK, 2 * settings.window)
        super().__init__(sources, schedule, lock=lock)

    def _weigh(self) -> None:
        """See ``Endless``."""
        self._growths = growths(sorted(self.sources.names), self.schedule)
        self._growth = Growth.of_all(list(self._growths.values()))
        self._weigh_absent()
        # What is laid behind the frontier was given to nobody; the rest is laid again as it was.
        self._kept: dict[int, _Drawn] = {}  # others than those that a look ahead still has
        self._blocks: dict[tuple[int, int], _Block] = {}

    def _weigh_absent(self) -> None:
        """Tell from when on absent sources give nothing more, and what of all of them lies in each lane by then."""
        absent = growths(self.sources.every_name[len(self._names) :], self.schedule)
        self._absent_until, self._absent_laid, due = 0.0, np.zeros(self.settings.lanes, np.int64), 0.0
        for name, growth in absent.items():
            laid = self.sources.laid.get(name)
            if not growth.ends_at:
                continue
            if laid is None or len(laid) != self.settings.lanes:
                self._absent_until = np.inf
                continue
            self._absent_until = max(self._absent_until, growth.ends_at)
            self._absent_laid = self._absent_laid + laid
            due += float(growth.dues[-1])
        self._absent_slack = int(np.ceil(np.abs(self._absent_laid - due).max()))

    def laid_at_the_end(self, name: str) -> Int64Array:
        """Count the samples of a source in each lane when all of it is laid, int64[L]; it has no share any more.

        Raises:
            ConfigError: It has one.
        """
        growth, lanes = self._growths[name], self._lanes[name]
        if growth.ends_at == np.inf:
            raise ConfigError(f"source {name!r}: it is drawn from without end")
        laid, due = np.zeros(self.settings.lanes, np.int64), int(growth.dues[-1])
        if growth.ends_at:
            runs = lanes.runs(0, self.settings.lanes, max(due - lanes.mean_chunk - 1, 0), due + 2)
            stamps = growth.stamps(runs.begins + lanes.mean_chunk * self._phases[name][runs.lanes])
            is_first, is_laid = np.diff(runs.lanes, prepend=-1) != 0, stamps < np.inf
            np.add.at(laid, runs.lanes[is_first], runs.begins[is_first])
            np.add.at(laid, runs.lanes[is_laid], runs.sizes[is_laid])
        return laid

    # --- the order ---

    def lane_samples(self, lane: int, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        """See ``Order``."""
        if start == stop:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        places = window_slice(self.settings, 0, lane, start, stop, self.lane_size(lane))
        return self.laid(lane, int(places.min()), int(places.max()) + 1).at(places)

    def lane_parts(self, low: int, high: int, start: int, stop: int) -> LaneParts:
        """See ``Order``."""
        reach = max(self.settings.window - 1, 0)
        found = []
        with self._lock:
            for group in range(low // _GROUP, -(-high // _GROUP)):
                lanes = slice(max(low - group * _GROUP, 0), min(high - group * _GROUP, _GROUP))
                found += list(self._blocks_of(group, lanes, max(start - reach, 0), stop + reach))
            runs = Runs.joined([block.runs for block in found])
            is_due = (runs.begins < stop + reach) & (runs.begins + runs.sizes > start - reach)
            is_due &= (runs.lanes >= low) & (runs.lanes < high)
            self._give(np.concatenate([np.empty(0), *(block.stamps for block in found)])[is_due])
        runs = runs.taken(is_due)
        runs = runs.taken(np.lexsort((runs.lanes, runs.chunk_ids)))
        return LaneParts(
            chunk_ids=runs.chunk_ids,
            lanes=runs.lanes,
            begins=np.maximum(runs.begins - reach, 0),
            ends=runs.begins + runs.sizes + reach,
        )

    def find(self, chunk_id: int, offset: int, start: int, stop: int) -> list[tuple[int, int]]:
        """See ``Order``. Moves the frontier up to what is looked at."""
        name = self.sources.names[int(self.sources.source_of(np.array([chunk_id]))[0])]
        growth, lanes, window = self._growths[name], self._lanes[name], self.settings.window
        slack = self._slack
        since, until = max(start - window - slack, 0), stop + window + slack
        stream = (
            max(int(growth.due(since)) - lanes.mean_chunk - lanes.largest_chunk, 0),
            int(growth.due(until)) + 2,
        )
        found = []
        with self._lock:
            # Where the sample is not found it must not come either: nothing is laid otherwise up to here.
            self._frontier = max(self._frontier, until + 1)
        for lane, place in lanes.find(chunk_id, offset, *stream):
            run = lanes.runs(lane, lane + 1, place, place + 1)
            stamp = float(growth.stamps(run.begins + lanes.mean_chunk * self._phases[name][run.lanes])[0])
            if stamp > until or (stamp <= self._behind_absent <= start - window - slack):  # or due before the start
                continue
            number = max(-(-int(np.ceil(stamp)) // self._block_time) - 1, 0)
            block = self._block(lane // _GROUP, number)
            runs = block.runs
            holds = (runs.lanes == lane) & (runs.chunk_ids == chunk_id)
            holds &= (runs.firsts <= offset) & (offset < runs.firsts + runs.sizes)
            for laid in (runs.begins - runs.firsts)[holds].tolist():
                due = window_place(self.settings, 0, lane, laid + offset, self.lane_size(lane))
                if start <= due < stop:
                    found.append((lane, due))
        return sorted(set(found))

    def laid(self, lane: int, start: int, stop: int) -> Runs:
        """Return the runs at positions ``[start, stop)`` of a lane as it is laid, before the window moves samples."""
        group, within = lane // _GROUP, lane % _GROUP
        with self._lock:
            found = list(self._blocks_of(group, slice(within, within + 1), start, stop))
            rows = [slice(*block.splits[within : within + 2].tolist()) for block in found]
            runs = Runs.joined([block.runs.taken(row) for block, row in zip(found, rows, strict=True)])
            low = int(np.searchsorted(runs.begins, start, side="right")) - 1
            high = int(np.searchsorted(runs.begins, stop, side="left"))
            self._give(np.concatenate([block.stamps[row] for block, row in zip(found, rows, strict=True)])[low:high])
        return runs.taken(slice(low, high))

    def _give(self, stamps: _Floats) -> None:
        """Count runs with these stamps as planned."""
        if len(stamps):
            # All that was given is stamped before the frontier: weights from there on leave it as it is.
            self._frontier = max(self._frontier, int(np.ceil(stamps.max())) + 1)

    def given(self, lane: int, place: int) -> Int64Array:
        """Count the samples of each source on positions ``[0, place)`` of a lane as it is laid, int64[sources]."""
        group, within = lane // _GROUP, lane % _GROUP
        counts = np.zeros(len(self.sources.every_name), np.int64)
        for number, name in enumerate(self.sources.every_name):
            if name in self.sources.laid:  # all of it lies before any position that can be asked for
                counts[number] = self.sources.laid[name][lane]
        with self._lock:
            block = next(self._blocks_of(group, slice(within, within + 1), place, place + 1))
            start = self._block_starts(group, block)
            drawn, counted = self._drawn(group, start, start)
            runs, stamps, sources, is_first = drawn.of(counted)
            here = runs.lanes == lane
            first, given = here & is_first, here & (stamps <= start)
            np.add.at(counts, self._places[sources[first]], runs.begins[first])
            np.add.at(counts, self._places[sources[given]], runs.sizes[given])
            rows = np.arange(block.splits[within], block.splits[within + 1])
            rows = rows[block.runs.begins[rows] < place]
            self._give(np.append(block.stamps[rows], start))
        runs = block.runs.taken(rows)
        taken = np.minimum(runs.sizes, place - runs.begins)
        np.add.at(counts, self.sources.source_of(runs.chunk_ids), taken)
        return counts

    def drawn(self, lane: int, place: int) -> Int64Array:
        """See ``Endless``."""
        return self.sources.drawn(self, 0, lane, place)

    def free_pass(self, name: str) -> int:
        """See ``Endless``."""
        with self._lock:
            due = self._growths[name].due(self._frontier)
        # All that is laid is stamped before the frontier: it begins before what is due there.
        return self._lanes[name].free_pass(int(due) + 2) if due else 0

    def _block_starts(self, group: int, block: _Block) -> int:
        """Return the time at which a block begins."""
        return next(number for (of, number), kept in self._blocks.items() if of == group and kept is block) * (
            self._block_time
        )

    def _blocks_of(self, group: int, lanes: slice, start: int, stop: int) -> Iterator[_Block]:
        """Yield the blocks that hold positions ``[start, stop)`` of some lanes of a group."""
        number = start // self._block_time
        while number and (self._block(group, number).starts[lanes] > start).any():
            number -= 1
        while (self._block(group, number).stops[lanes] <= start).all():
            number += 1
        while True:
            block = self._block(group, number)
            yield block
            if (block.stops[lanes] >= stop).all():
                return
            number += 1

    def _block(self, group: int, number: int) -> _Block:
        """Return what a group of lanes lays in one stretch of time; the latest are kept."""
        with self._lock:
            found = self._blocks.get((group, number))
            if found is None:
                start, stop = number * self._block_time, (number + 1) * self._block_time
                found = self._lay(group, start, stop)
                keep_latest(self._blocks, (group, number), found, _KEPT_BLOCKS)
            return found

    def _lay(self, group: int, start: int, stop: int) -> _Block:
        """Return the runs stamped in ``(start, stop]``, by lane and stamp.

        Raises:
            StateError: Some are of a source that is not there any more.
        """
        if start < self._absent_until:
            raise self._still_needed(start)
        low, high = group * _GROUP, min((group + 1) * _GROUP, self.settings.lanes)
        drawn, counted = self._drawn(group, start, stop)
        given, runs, stamps = drawn.stamped(start, stop, counted, range(low, high))
        before = self._absent_laid[low:high] + given
        splits = np.searchsorted(runs.lanes, np.arange(low, high + 1))
        ends = sums(runs.sizes)
        sizes = np.diff(ends[splits])
        begins = ends[:-1] + np.repeat(before - ends[splits[:-1]], np.diff(splits))
        return _Block(
            runs=replace(runs, begins=begins),
            stamps=stamps,
            splits=splits,
            starts=before,
            stops=before + sizes,
        )

    @property
    def _behind_absent(self) -> int:
        """The time from which on no block has runs of an absent source."""
        return -(-int(min(self._absent_until, ENDLESS)) // self._block_time) * self._block_time

    @property
    def _slack(self) -> int:
        """By how much positions and times differ at most: less than a chunk of each source."""
        return sum(each.largest_chunk + each.mean_chunk for each in self._lanes.values()) + self._absent_slack

    @property
    def _free(self) -> int:
        """The time from which on a run goes on without the absent sources.

        From the block behind on, as far as the window and what counts drawn samples look back.
        """
        return self._behind_absent + 3 * self.settings.window + self._absent_slack

    @property
    def known_from(self) -> int:
        """See ``Endless``. What :meth:`find` looks through lies behind that, too."""
        looked_at = self._behind_absent + self.settings.window + self._slack
        return max(self._free, looked_at) if self._absent_until else 0

    def _still_needed(self, time: int) -> StateError:
        """Make the error of a stretch of time in which absent sources may have runs."""
        lanes, names = self.settings.lanes, self.sources.every_name[len(self._names) :]
        advice = "Give it the source"
        if self._absent_until < np.inf:
            advice += f" with the weight 0 up to row {self._free * lanes:,} or so; behind that it may be gone"
        return StateError(
            f"around row {time * lanes:,} this mixture draws from {', '.join(map(repr, names))}, which it "
            f"lacks: chunks are laid whole, and what was laid is read to its end. {advice}"
        )

    def _drawn(self, group: int, start: int, stop: int) -> tuple[_Drawn, npt.NDArray[np.bool_]]:
        """Return the runs of all sources that may be stamped in ``[start, stop]``, and others.

        Also, which sources have given any.

        Those of a few chunks more, and of so many blocks, are kept: most sources have nothing new in most blocks.
        """
        drawn = self._kept.get(group) or _Drawn.none(len(self._lanes))
        due = self._growth.due(stop)
        more = ((due - self._growth.due(start)) * _BLOCKS_AHEAD).astype(np.int64)
        # A run is stamped when up to a mean chunk more is due than comes before it.
        since = np.maximum(self._growth.due(start).astype(np.int64) - self._mean_chunks - 1, 0)
        until, counted = due.astype(np.int64) + 2, due != 0
        missing = np.flatnonzero(counted & ((drawn.since > since) | (until > drawn.until)))
        if len(missing):
            windows = {source: self._window(source, group, int(since[source]), int(until[source]), int(more[source]))
                       for source in missing.tolist()}  # fmt: skip
            drawn = self._kept[group] = drawn.replaced(windows)
        return drawn, counted

    def _window(self, source: int, group: int, start: int, stop: int, more: int) -> tuple[int, int, Runs, _Floats]:
        """Return ``start``, an end of at least ``stop + more``, one source's runs between them, and their stamps."""
        name, low, high = self._names[source], group * _GROUP, min((group + 1) * _GROUP, self.settings.lanes)
        lanes = self._lanes[name]
        ahead = max(stop + more, start + 4 * lanes.mean_chunk)
        runs = lanes.runs(low, high, start, ahead)
        # The phase counts in mean chunks, not in those that come: else small ones would come first everywhere.
        marks = runs.begins + lanes.mean_chunk * self._phases[name][runs.lanes]
        return start, ahead, runs, self._growths[name].stamps(marks)


def _phases(name: str, settings: OrderSettings) -> _Floats:
    """Return where in a chunk's length a source begins in each lane: ``(i + 1/2) / lanes``, permuted over the lanes."""
    places = permutations(keyed_number(settings.seed, "phases", name), np.array([0]), settings.lanes)[0]
    phases: _Floats = (2 * places + 1) / (2 * settings.lanes)
    return phases


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
