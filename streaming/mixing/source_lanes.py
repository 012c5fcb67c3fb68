"""Cut one source into L endless streams, one for each lane: ``SourceLanes``, whose samples come in ``Runs``.

Draw ``n`` of a source belongs to lane ``n % L``, and in each pass every lane gets an equal run of the shuffled chunks.
So all lanes of a source begin a pass together, and the location of the source's sample ``x`` of a lane follows by
arithmetic. A source with fewer chunks than lanes is cut in *rounds* of several passes, so that a lane still reads whole
chunks: the passes of a round are delivered side by side. Sources are independent of each other here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from streaming.arrays import IntColumns, sums
from streaming.errors import ConfigError
from streaming.mixing.passes import Listing, keep_latest, keyed_number, orders_of
from streaming.plan.order import OrderSettings
from streaming.plan.permutation import hash_tables
from streaming.types import Int64Array

_BUNDLED_PARTS = 2**12  # several rounds of a small source are laid out together
_LEAST_BUNDLED = 2**7
_BUNDLES = 4  # of one source that ``kept_parts`` allow
_KEPT_BUNDLES = 3  # of each source at least
_NEVER = 2**62


class Rounds:
    """Consecutive rounds over one source, laid end to end and cut into lanes, whose sizes even out from round to round.

    Args:
        listing: Listing of the source.
        numbers: Numbers of the rounds.
        num_passes: Passes in a round.
        lanes: L.
        first_round: Number of the listing's first round.
        first_draw: The source's draws before that.
        lay: False: :func:`lay_rounds` computes the attributes.

    Attributes:
        chunk_ids: int64 [P], the chunk of each part.
        starts: int64 [P + 1], linear position of the first sample of each part.
        lane_starts: int64 [rounds, L + 1], linear position at which each lane of each round starts.
        first_draws: int64 [rounds], the source's draws before each round.
        turns: int64 [rounds, L], linear position of the border between parts at which a lane begins to read its run: it
            reads from there to the end, then what is before. So the parts cut by lane borders, which are smaller, do
            not come in all lanes of all sources at the same time.
    """

    chunk_ids: Int64Array
    starts: Int64Array
    lane_starts: Int64Array
    first_draws: Int64Array
    turns: Int64Array

    def __init__(
        self, listing: Listing, numbers: range, num_passes: int, lanes: int, *, first_round: int = 0,
        first_draw: int = 0, lay: bool = True,
    ) -> None:  # fmt: skip
        self.listing, self.numbers, self.num_passes, self.lanes = listing, numbers, num_passes, lanes
        self.first_round, self.first_draw = first_round, first_draw
        if lay:
            lay_rounds([self])


def lay_rounds(some: Sequence[Rounds]) -> None:
    """Compute the attributes of rounds over several sources, or of several of one source, with equal lanes.

    All at once: one by one, each would take thirty calls into NumPy.
    """
    listings, lanes = [one.listing for one in some], some[0].lanes
    num_rounds = np.array([len(one.numbers) for one in some])
    num_passes = np.array([one.num_passes for one in some])
    owner = np.repeat(np.arange(len(some)), num_rounds)  # of each round
    number = np.concatenate([np.array(one.numbers) for one in some])
    place = number - np.array([one.first_round for one in some])[owner]
    # The chunks of all passes, end to end; the linear positions of each of the rounds given begin with 0 again.
    owners = np.repeat(np.arange(len(some)), num_rounds * num_passes)  # of each pass
    before = place[sums(num_rounds)[:-1]] * num_passes - sums(num_rounds * num_passes)[:-1]
    chunks = orders_of(listings, owners, np.arange(len(owners)) + before[owners])
    num_chunks = np.array([one.num_chunks for one in listings])
    num_parts = num_chunks * num_passes * num_rounds
    if len(some) > 1:
        chunks += np.repeat(sums(num_chunks)[:-1], num_parts)
    chunk_ids = _end_to_end([one.chunk_ids for one in listings])[chunks]
    ends = sums(_end_to_end([one.sizes for one in listings])[chunks])
    cuts = sums(num_parts)
    # The source's draws in each round, by lane: draw n belongs to lane n % L.
    size = (num_passes * np.array([one.samples_per_pass for one in listings]))[owner]
    draws = np.array([one.first_draw for one in some])[owner] + place * size
    first = np.repeat(draws[sums(num_rounds)[:-1]], num_rounds)
    lane = np.arange(lanes + 1, dtype=np.int64)
    lane_starts = _dealt(draws + size, lane, lanes) - _dealt(draws, lane, lanes) + (draws - first)[:, None]
    turns = _turns(some, owner, number, lane_starts, ends, ends[cuts[:-1]])
    rows = sums(num_rounds).tolist()
    for one, (low, high), (top, bottom) in zip(some, pairwise(cuts.tolist()), pairwise(rows), strict=True):
        is_all = len(some) == 1  # otherwise copies, or each would keep the arrays of all
        one.chunk_ids = chunk_ids if is_all else chunk_ids[low:high].copy()
        one.starts = ends if is_all else ends[low : high + 1] - ends[low]
        one.lane_starts = lane_starts if is_all else lane_starts[top:bottom].copy()
        one.first_draws = draws if is_all else draws[top:bottom].copy()
        one.turns = turns if is_all else turns[top:bottom].copy()


def _end_to_end(some: Sequence[Int64Array]) -> Int64Array:
    return some[0] if len(some) == 1 else np.concatenate(some)


def _dealt(draws: Int64Array, lane: Int64Array, lanes: int) -> Int64Array:
    """Return how many of the first draws belong to lanes before each ``lane``: int64 [draws, lane]."""
    whole, rest = np.divmod(draws[:, None], lanes)
    return whole * lane + np.minimum(rest, lane)


def _turns(
    some: Sequence[Rounds], owner: Int64Array, number: Int64Array, lane_starts: Int64Array, ends: Int64Array,
    shifts: Int64Array,
) -> Int64Array:  # fmt: skip
    """Return ``Rounds.turns`` of all rounds; ``ends`` are shifted to ``shifts``, where those of each source begin."""
    lanes = some[0].lanes
    keys = np.array([keyed_number(one.listing.seed, "turns", one.listing.name) for one in some], np.uint64)
    drawn = (hash_tables(keys[owner], number, 0, lanes) >> np.uint64(33)).astype(np.int64)
    shifted = lane_starts + shifts[owner][:, None]
    begins, stops = shifted[:, :-1], shifted[:, 1:]
    sizes = stops - begins
    # drawn * sizes >> 31, whose product would not fit for lanes of 2**32 samples.
    anywhere = begins + drawn * (sizes >> 31) + (drawn * (sizes & (1 << 31) - 1) >> 31)
    borders = [ends[np.searchsorted(ends, place)] for place in (anywhere, begins)]
    found = np.where(borders[0] < stops, borders[0], np.where(borders[1] < stops, borders[1], begins))
    return found - shifts[owner][:, None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Runs(IntColumns):
    """Runs of samples of one chunk each, in lanes; int64 [n] each, sorted by lane, then by position.

    Attributes:
        lanes: The lane.
        chunk_ids: The chunk.
        firsts: First sample in the chunk.
        sizes: Number of samples, at least one.
        begins: Where the run begins in the lane's stream.
    """

    lanes: Int64Array
    chunk_ids: Int64Array
    firsts: Int64Array
    sizes: Int64Array
    begins: Int64Array

    def at(self, places: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return chunk ids and offsets, int64 [n] each, of the samples at places of a lane, whose runs these are."""
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
    num_bundled: int
    """Number of rounds that are made together."""


def _eras(listings: Sequence[Listing], lanes: int, bundled: int) -> Iterator[_Era]:
    """Yield the eras of a source, the last one without an end, whose bundles have about so many parts.

    Raises:
        ConfigError: One does not begin with a round of the previous one.
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
            num_bundled=max(bundled // (num_passes * listing.num_chunks), 1),
        )  # fmt: skip
        first_round, first_draw = stop_round, stop_draw


@dataclass(frozen=True, slots=True)
class _Part:
    """Those of the rounds of a bundle that hold some positions."""

    source: SourceLanes
    era: _Era
    rounds: Rounds
    numbers: range
    is_new: bool

    @property
    def rows(self) -> slice:
        """The rounds, counted from the first of the bundle."""
        return slice(self.numbers.start - self.rounds.numbers.start, self.numbers.stop - self.rounds.numbers.start)


class SourceLanes:
    """One source as L endless streams. Thread-safe, and immutable except for caches.

    A source with fewer chunks than lanes has rounds of several passes. One that has grown has other rounds from one of
    its passes on; what comes before does not change, nor does what depends on ``mean_chunk``.

    Args:
        listings: Listings of the source; several if it has grown.
        settings: Settings of the mixture.

    Attributes:
        mean_chunk: Mean samples per chunk, over the chunks that the source began with.
        largest_chunk: Samples of the largest chunk.

    Raises:
        ConfigError: The source grew in the middle of a round.
    """

    def __init__(self, listings: Sequence[Listing], settings: OrderSettings, *, kept_parts: int = 0) -> None:
        self._lanes = settings.lanes
        bundled = min(_BUNDLED_PARTS, max(kept_parts // _BUNDLES, _LEAST_BUNDLED)) if kept_parts else _BUNDLED_PARTS
        self._kept = max(_KEPT_BUNDLES, kept_parts // max(bundled, settings.lanes))
        self.eras = list(_eras(listings, settings.lanes, bundled))
        self.mean_chunk = listings[0].mean_chunk
        self.largest_chunk = max(listing.largest_chunk for listing in listings)
        self._bundles: dict[tuple[int, int], Rounds] = {}

    def bundle(self, era: _Era, number: int) -> Rounds:
        """Return the consecutive rounds made together with a round of an era; the latest are cached."""
        found = self._known(era, number)
        if found is None:
            found = self._asked(era, number)
            lay_rounds([found])
            self.keep(era, found)
        return found

    def _known(self, era: _Era, number: int) -> Rounds | None:
        return self._bundles.get((era.first_round, (number - era.first_round) // era.num_bundled))

    def _asked(self, era: _Era, number: int) -> Rounds:
        """Return a bundle whose rounds are yet to be laid."""
        first = number - (number - era.first_round) % era.num_bundled
        return Rounds(
            era.listing, range(first, min(first + era.num_bundled, era.stop_round)), era.num_passes, self._lanes,
            first_round=era.first_round, first_draw=era.first_draw, lay=False,
        )  # fmt: skip

    def keep(self, era: _Era, rounds: Rounds) -> None:
        """Cache a bundle."""
        within = (rounds.numbers.start - era.first_round) // era.num_bundled
        keep_latest(self._bundles, (era.first_round, within), rounds, self._kept)

    def bundles_of(self, low: int, high: int, start: int, stop: int) -> Iterator[_Part]:
        """Yield the rounds that hold these positions (see :meth:`rounds_of`), by bundle; some are yet to be laid."""
        for era, numbers in self.rounds_of(low, high, start, stop):
            number = numbers.start
            while number < numbers.stop:
                known = self._known(era, number)
                rounds = self._asked(era, number) if known is None else known
                stop_here = min(numbers.stop, rounds.numbers.stop)
                yield _Part(self, era, rounds, range(number, stop_here), known is None)
                number = stop_here

    def rounds_of(self, low: int, high: int, start: int, stop: int) -> Iterator[tuple[_Era, range]]:
        """Yield the rounds, by era, that hold positions ``[start, stop)`` of the streams of lanes ``[low, high)``."""
        first, last = start * self._lanes + low, (stop - 1) * self._lanes + high - 1
        for era in self.eras:
            if first < era.stop_draw and last >= era.first_draw:
                begin, end = max(first, era.first_draw), min(last, era.stop_draw - 1)
                places = ((draw - era.first_draw) // era.round_samples for draw in (begin, end))
                yield era, range(era.first_round + next(places), era.first_round + next(places) + 1)

    def free_pass(self, stop: int) -> int:
        """Return the first pass that begins a round of which no lane has anything before ``stop`` of its stream."""
        draw = stop * self._lanes
        era = next(era for era in self.eras if draw <= era.stop_draw)
        rounds = -(-max(draw - era.first_draw, 0) // era.round_samples)
        return era.listing.first_pass + rounds * era.num_passes

    def runs(self, low: int, high: int, start: int, stop: int) -> Runs:
        """Return the runs that hold positions ``[start, stop)`` of the streams of lanes ``[low, high)``, whole."""
        return runs_of([self], low, high, np.array([start]), np.array([stop]))[0]

    def _first_of(self, bundle: Rounds, within: int, lanes: Int64Array) -> Int64Array:
        """Return where a round of a bundle begins in the streams of lanes."""
        return (int(bundle.first_draws[within]) - lanes + self._lanes - 1) // self._lanes

    def find(self, chunk_id: int, offset: int, start: int, stop: int) -> list[tuple[int, int]]:
        """Return lanes and positions of their streams, in ``[start, stop)``, at which a sample of this source is."""
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


def runs_of(
    sources: Sequence[SourceLanes], low: int, high: int, starts: Int64Array, stops: Int64Array
) -> tuple[Runs, Int64Array]:
    """Return ``runs(low, high, starts[i], stops[i])`` of each source, one after the other, and the number of each.

    All sources are handled at once, like :func:`lay_rounds`.
    """
    bounds = zip(sources, starts.tolist(), stops.tolist(), strict=True)
    found = [list(source.bundles_of(low, high, start, stop)) for source, start, stop in bounds]
    parts = [part for some in found for part in some]
    new = [part for part in parts if part.is_new]
    if new:
        lay_rounds([part.rounds for part in new])
        for part in new:
            part.source.keep(part.era, part.rounds)
    whose = np.repeat(np.arange(len(sources)), [len(some) for some in found])
    runs, of = _runs_of(parts, (low, high), starts[whose], stops[whose])
    owner = whose[of]
    if len(parts) > len(sources):  # the bundles of a source come lane by lane
        runs = runs.taken(np.lexsort((runs.lanes, owner)))
    return runs, np.bincount(owner, minlength=len(sources))


def _runs_of(
    parts: Sequence[_Part], lane_range: tuple[int, int], starts: Int64Array, stops: Int64Array
) -> tuple[Runs, Int64Array]:
    """Return the runs of each part that hold ``[starts[i], stops[i])`` of the streams, by lane, and its number."""
    low, high = lane_range
    num_lanes, bundles, cuts = parts[0].rounds.lanes, [part.rounds for part in parts], [part.rows for part in parts]
    counts = np.array([len(part.numbers) for part in parts])
    # One row for each lane and round, in order. Linear positions of each bundle come behind those of the previous one.
    of = np.repeat(np.arange(len(parts)), counts * (high - low))
    lanes, place = np.divmod(np.arange(len(of)) - sums(counts * (high - low))[of], counts[of])
    lanes += low
    draws = _end_to_end([one.first_draws[rows] for one, rows in zip(bundles, cuts, strict=True)])
    first = (draws[sums(counts)[of] + place] - lanes + num_lanes - 1) // num_lanes
    shifts = sums([int(one.starts[-1]) for one in bundles])
    lane_starts = [one.lane_starts[rows, low : high + 1] for one, rows in zip(bundles, cuts, strict=True)]
    begins, ends, turns = (
        _end_to_end([table.T.ravel() for table in tables]) + shifts[of]
        for tables in (
            [table[:, :-1] for table in lane_starts],
            [table[:, 1:] for table in lane_starts],
            [one.turns[rows, low:high] for one, rows in zip(bundles, cuts, strict=True)],
        )
    )
    # Two for each side of the turn, of which those are kept that hold some of the positions.
    lows, highs = np.stack([turns, begins], axis=1).ravel(), np.stack([ends, turns], axis=1).ravel()
    first = np.stack([first, first + ends - turns], axis=1).ravel()
    of, lanes = np.repeat(of, 2), np.repeat(lanes, 2)
    here = np.flatnonzero((highs > lows) & (first < stops[of]) & (first + highs - lows > starts[of]))
    lows, highs, first, of, lanes = lows[here], highs[here], first[here], of[here], lanes[here]
    # One row for each chunk in it.
    borders = _end_to_end([one.starts + shift for one, shift in zip(bundles, shifts.tolist(), strict=False)])
    low_border = np.searchsorted(borders, np.maximum(lows, lows + starts[of] - first), side="right") - 1
    nums = np.searchsorted(borders, np.minimum(highs, lows + stops[of] - first), side="left") - low_border
    row = np.repeat(np.arange(len(nums)), nums)
    border = np.arange(len(row)) + np.repeat(low_border - (np.cumsum(nums) - nums), nums)
    start, owner = np.maximum(borders[border], lows[row]), of[row]
    runs = Runs(
        lanes=lanes[row],
        chunk_ids=_end_to_end([one.chunk_ids for one in bundles])[border - owner],  # each has one border more
        firsts=start - borders[border],
        sizes=np.minimum(borders[border + 1], highs[row]) - start,
        begins=first[row] + start - lows[row],
    )
    return runs, owner
