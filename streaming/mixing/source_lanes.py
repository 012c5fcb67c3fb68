"""Cut one source into L endless streams, one for each lane: ``SourceLanes``, whose samples come in ``Runs``.

Draw ``n`` of a source belongs to lane ``n % L``, and in each pass every lane gets an equal run of the shuffled chunks.
So all lanes of a source begin a pass together, and the location of the source's sample ``x`` of a lane follows by
arithmetic. A source with fewer chunks than lanes is cut in *rounds* of several passes, so that a lane still reads whole
chunks: the passes of a round are delivered side by side. Sources are independent of each other here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from streaming.arrays import IntColumns, sums
from streaming.errors import ConfigError
from streaming.mixing.passes import Listing, keep_latest, keyed_number
from streaming.plan.order import OrderSettings
from streaming.plan.permutation import hash_table
from streaming.types import Int64Array

_BUNDLED_PARTS = 2**12  # several rounds of a small source are laid out together
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

    Attributes:
        chunk_ids: int64 [P], the chunk of each part.
        starts: int64 [P + 1], linear position of the first sample of each part.
        lane_starts: int64 [rounds, L + 1], linear position at which each lane of each round starts.
        first_draws: int64 [rounds], the source's draws before each round.
        turns: int64 [rounds, L], linear position of the border between parts at which a lane begins to read its run: it
            reads from there to the end, then what is before. So the parts cut by lane borders, which are smaller, do
            not come in all lanes of all sources at the same time.
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
        # The source's draws in each round, by lane: draw n belongs to lane n % L.
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

    @property
    def num_bundled(self) -> int:
        """Number of rounds that are made together."""
        return max(_BUNDLED_PARTS // (self.num_passes * self.listing.num_chunks), 1)


def _eras(listings: Sequence[Listing], lanes: int) -> Iterator[_Era]:
    """Yield the eras of a source, the last one without an end.

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
        )  # fmt: skip
        first_round, first_draw = stop_round, stop_draw


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
        self._kept = max(_KEPT_BUNDLES, kept_parts // max(_BUNDLED_PARTS, settings.lanes))
        self.eras = list(_eras(listings, settings.lanes))
        self.mean_chunk = listings[0].mean_chunk
        self.largest_chunk = max(listing.largest_chunk for listing in listings)
        self._bundles: dict[tuple[int, int], Rounds] = {}

    def bundle(self, era: _Era, number: int) -> Rounds:
        """Return the consecutive rounds made together with a round of an era; the latest are cached."""
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
            keep_latest(self._bundles, key, found, self._kept)
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
        """Return the first pass that begins a round of which no lane has anything before ``stop`` of its stream."""
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
        # One row for each lane, round, and side of its turn, in order.
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
