"""Cut one source into L endless streams, one for each lane: ``SourceLanes``, whose samples come in ``Runs``.

Draw ``n`` of a source belongs to lane ``n % L``, and in each pass every lane gets an equal run of the shuffled chunks::

    pass 0   |-- lane 0 --|-- lane 1 --|-- lane 2 --|        runs differ by one sample at most
    pass 1   |-- lane 0 --|-- lane 1 --|-- lane 2 --|

So all lanes of a source begin a pass together, whatever its size, and the location of a lane's sample ``x`` of the
source follows by arithmetic. A source with fewer samples than lanes gives each lane a sample only in some passes.
Sources are independent of each other here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from streaming.common.arrays import IntColumns, sums
from streaming.errors import ConfigError
from streaming.order.mixing.passes import Listing, keep_latest, keyed_number, orders_of
from streaming.order.plan.order import OrderSettings
from streaming.order.plan.permutation import UInt64Array, hash_places
from streaming.types import Int64Array

_BUNDLED_PARTS = 2**12  # several passes over a small source are laid out together
_LEAST_BUNDLED = 2**7
_BUNDLES = 4  # of one source that ``kept_parts`` allows
_KEPT_BUNDLES = 3  # of each source at least
_NEVER = 2**62


class LaidPasses:
    """Consecutive passes over one source, laid end to end.

    Args:
        listing: List of the source.
        numbers: Numbers of the passes.
        first_draw: Number of the source's draws before them.

    Attributes:
        chunk_ids: int64 [P], the chunk of each part; set by :func:`lay_passes`, like the following.
        firsts: int64 [P], first sample of each part in its chunk.
        starts: int64 [P + 1], linear position of the first sample of each part.
    """

    chunk_ids: Int64Array
    firsts: Int64Array
    starts: Int64Array

    def __init__(self, listing: Listing, numbers: range, first_draw: int) -> None:
        self.listing, self.numbers, self.first_draw = listing, numbers, first_draw


def lay_passes(some: Sequence[LaidPasses]) -> None:
    """Lay passes over several sources, or several stretches of one.

    All are laid at once, since each alone would take a dozen calls into NumPy.
    """
    # 1. Per bundle, int64 [B]: its passes; per pass, int64 [P]: its bundle, and its number in the bundle's list.
    listings = [one.listing for one in some]
    num_passes = np.array([len(one.numbers) for one in some])
    owner = np.repeat(np.arange(len(some)), num_passes)  # of each pass
    before = np.array([one.numbers.start - one.listing.first_pass for one in some]) - sums(num_passes)[:-1]
    places = orders_of(listings, owner, np.arange(len(owner)) + before[owner])
    # 2. Per part of a pass, int64 [N]: its chunk, its first sample in the chunk, its size; all passes end to end.
    num_chunks = np.array([one.num_chunks for one in listings])
    num_parts = num_chunks * num_passes
    if len(some) > 1:
        places += np.repeat(sums(num_chunks)[:-1], num_parts)
    chunk_ids, firsts, sizes = (
        _end_to_end([getattr(one, name) for one in listings])[places] for name in ("chunk_ids", "firsts", "sizes")
    )
    # 3. Cut the arrays into bundles.
    ends = sums(sizes)
    for one, (low, high) in zip(some, pairwise(sums(num_parts).tolist()), strict=True):
        is_all = len(some) == 1  # otherwise copies, or each would keep the arrays of all
        one.chunk_ids = chunk_ids if is_all else chunk_ids[low:high].copy()
        one.firsts = firsts if is_all else firsts[low:high].copy()
        one.starts = ends if is_all else ends[low : high + 1] - ends[low]


def _end_to_end(some: Sequence[Int64Array]) -> Int64Array:
    return some[0] if len(some) == 1 else np.concatenate(some)


def _dealt(draws: Int64Array, lane: Int64Array, lanes: int) -> Int64Array:
    """Return how many of the first ``draws`` draws belong to lanes before ``lane``, int64 [n]."""
    whole, rest = np.divmod(draws, lanes)
    return whole * lane + np.minimum(rest, lane)


def _turns(
    keys: UInt64Array, numbers: Int64Array, lanes: Int64Array, begins: Int64Array, stops: Int64Array,
    borders: Int64Array,
) -> Int64Array:  # fmt: skip
    """Return where lanes begin to read their runs ``[begins, stops)`` of some passes; int64 [n] each.

    A lane reads from a border between parts, drawn for (source, lane, pass), to the end of its run, and then the
    beginning. So the parts cut by lane borders, which are smaller, do not come in all lanes of all sources at once.

    Args:
        keys: Keys of the sources.
        numbers: Numbers of the passes.
        lanes: The lanes.
        begins: First linear position of each run.
        stops: End (exclusive) of each.
        borders: Linear positions of all parts, ascending.
    """
    drawn = (hash_places(keys, numbers, 0, lanes) >> np.uint64(33)).astype(np.int64)
    sizes = stops - begins
    # drawn * sizes >> 31, in two steps: the product would overflow for runs of 2**32 samples.
    anywhere = begins + drawn * (sizes >> 31) + (drawn * (sizes & (1 << 31) - 1) >> 31)
    found = [borders[np.searchsorted(borders, place)] for place in (anywhere, begins)]
    return np.where(found[0] < stops, found[0], np.where(found[1] < stops, found[1], begins))


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
        """Return the chunk ids and offsets, int64 [n] each, of the samples at ``places`` of the runs' lane."""
        row = np.searchsorted(self.begins, places, side="right") - 1
        return self.chunk_ids[row], places - (self.begins - self.firsts)[row]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Era:
    """The passes over a source before ``stop_pass``, over the chunks that it has until it grows.

    They hold its draws ``[first_draw, stop_draw)``.
    """

    listing: Listing
    first_draw: int
    stop_pass: int
    stop_draw: int
    num_bundled: int
    """Number of passes that are laid together."""

    @property
    def samples(self) -> int:
        """Samples of a pass."""
        return self.listing.samples_per_pass

    @property
    def first_pass(self) -> int:
        """Number of the first pass."""
        return self.listing.first_pass


def _eras(listings: Sequence[Listing], pieces: int, bundled: int) -> Iterator[_Era]:
    """Yield the eras of a source, the last one without an end; their bundles have about ``bundled`` parts.

    Raises:
        ConfigError: An era does not begin after the previous one.
    """
    first_draw = 0
    for whole, later in zip(listings, [*listings[1:], None], strict=True):
        listing = whole.in_pieces(pieces)
        stop_pass = stop_draw = _NEVER
        if later is not None:
            stop_pass = later.first_pass
            if stop_pass <= listing.first_pass:
                raise ConfigError(
                    f"source {listing.name!r}: it grew at pass {stop_pass}; expected a pass behind pass "
                    f"{listing.first_pass}"
                )
            stop_draw = first_draw + (stop_pass - listing.first_pass) * listing.samples_per_pass
        yield _Era(
            listing=listing, first_draw=first_draw, stop_pass=stop_pass, stop_draw=stop_draw,
            num_bundled=max(bundled // listing.num_chunks, 1),
        )  # fmt: skip
        first_draw = stop_draw


@dataclass(frozen=True, slots=True)
class _Part:
    """The passes of a bundle that hold requested positions."""

    source: SourceLanes
    era: _Era
    bundle: LaidPasses
    numbers: range
    is_new: bool


class SourceLanes:
    """One source as L endless streams. Thread-safe, and immutable except for caches.

    A source that has grown has more chunks from one of its passes on. Earlier passes do not change, nor does anything
    that depends on ``mean_chunk``.

    Args:
        listings: Lists of the source; several if it has grown.
        settings: Settings of the mixture.
        kept_parts: Maximum number of cached parts of chunks; 0: as few as possible.
        pieces: See ``Listing.in_pieces``; 0: whole chunks are shuffled.

    Attributes:
        mean_chunk: Mean number of samples of a chunk that a lane reads at once, over the chunks that the source began
            with.
        largest_chunk: Samples of the largest chunk (or piece).
        run_samples: Minimum number of samples of a lane in each pass; 0: the source has fewer samples than lanes.

    Raises:
        ConfigError: The eras are not ascending.
    """

    def __init__(
        self, listings: Sequence[Listing], settings: OrderSettings, *, kept_parts: int = 0, pieces: int = 0
    ) -> None:
        self.num_lanes = settings.lanes
        bundled = min(_BUNDLED_PARTS, max(kept_parts // _BUNDLES, _LEAST_BUNDLED)) if kept_parts else _BUNDLED_PARTS
        self.eras = list(_eras(listings, pieces, bundled))
        # At most ``kept_parts`` parts, but at least ``_KEPT_BUNDLES`` bundles: the next lanes need the same ones.
        self._kept = max(_KEPT_BUNDLES, kept_parts // max(bundled, self.eras[0].listing.num_chunks))
        self.run_samples = self.eras[0].samples // settings.lanes
        self.mean_chunk = min(self.eras[0].listing.mean_chunk, max(self.run_samples, 1))
        self.largest_chunk = max(era.listing.largest_chunk for era in self.eras)
        self.key = keyed_number(settings.seed, "turns", listings[0].name)
        self._bundles: dict[tuple[int, int], LaidPasses] = {}

    def bundle(self, era: _Era, number: int) -> LaidPasses:
        """Return the consecutive passes laid together with a pass of an era; the latest are cached."""
        found = self._known(era, number)
        if found is None:
            found = self._unlaid(era, number)
            lay_passes([found])
            self.keep(era, found)
        return found

    def _known(self, era: _Era, number: int) -> LaidPasses | None:
        return self._bundles.get((era.first_pass, (number - era.first_pass) // era.num_bundled))

    def _unlaid(self, era: _Era, number: int) -> LaidPasses:
        """Return the bundle that holds a pass, before it is laid."""
        first = number - (number - era.first_pass) % era.num_bundled
        numbers = range(first, min(first + era.num_bundled, era.stop_pass))
        return LaidPasses(era.listing, numbers, era.first_draw + (first - era.first_pass) * era.samples)

    def keep(self, era: _Era, laid: LaidPasses) -> None:
        """Cache a bundle."""
        within = (laid.numbers.start - era.first_pass) // era.num_bundled
        keep_latest(self._bundles, (era.first_pass, within), laid, self._kept)

    def bundles_of(self, low: int, high: int, start: int, stop: int) -> Iterator[_Part]:
        """Yield the passes that hold these positions (see :meth:`passes_of`), by bundle, laid or not."""
        for era, numbers in self.passes_of(low, high, start, stop):
            number = numbers.start
            while number < numbers.stop:
                known = self._known(era, number)
                bundle = self._unlaid(era, number) if known is None else known
                stop_here = min(numbers.stop, bundle.numbers.stop)
                yield _Part(self, era, bundle, range(number, stop_here), known is None)
                number = stop_here

    def passes_of(self, low: int, high: int, start: int, stop: int) -> Iterator[tuple[_Era, range]]:
        """Yield the passes, by era, that hold positions ``[start, stop)`` of the streams of lanes ``[low, high)``."""
        first, last = start * self.num_lanes + low, (stop - 1) * self.num_lanes + high - 1
        for era in self.eras:
            if first < era.stop_draw and last >= era.first_draw:
                begin, end = max(first, era.first_draw), min(last, era.stop_draw - 1)
                within = ((draw - era.first_draw) // era.samples for draw in (begin, end))
                yield era, range(era.first_pass + next(within), era.first_pass + next(within) + 1)

    def passes_at(self, lane: int, positions: Int64Array) -> Int64Array:
        """Return the pass to which each position of a lane's stream belongs, int64 [n]; positions ascend."""
        draws = positions * self.num_lanes + lane
        found: Int64Array = np.zeros_like(draws)
        for era in self.eras:
            here = slice(*np.searchsorted(draws, (era.first_draw, era.stop_draw)).tolist())
            found[here] = era.first_pass + (draws[here] - era.first_draw) // era.samples
        return found

    def free_pass(self, stop: int) -> int:
        """Return the first pass without a sample before position ``stop`` of any lane's stream."""
        draw = stop * self.num_lanes
        era = next(era for era in self.eras if draw <= era.stop_draw)
        return era.first_pass + -(-max(draw - era.first_draw, 0) // era.samples)

    def runs(self, low: int, high: int, start: int, stop: int) -> Runs:
        """Return the whole runs that hold positions ``[start, stop)`` of the streams of lanes ``[low, high)``."""
        return runs_of([self], low, high, np.array([start]), np.array([stop]))[0]

    def find(self, chunk_id: int, offset: int, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the lanes and the positions of their streams, in ``[start, stop)``, of a sample of this source."""
        found: list[tuple[int, int]] = []
        borders = np.arange(self.num_lanes + 1)
        passes = [(era, number) for era, all_ in self.passes_of(0, self.num_lanes, start, stop) for number in all_]
        for era, number in passes:
            bundle = self.bundle(era, number)
            within = number - bundle.numbers.start
            first_draw = bundle.first_draw + within * era.samples
            starts = within * era.samples + (
                _dealt(np.array(first_draw + era.samples), borders, self.num_lanes)
                - _dealt(np.array(first_draw), borders, self.num_lanes)
            )
            part = np.flatnonzero(bundle.chunk_ids == chunk_id)
            linear = bundle.starts[part] + offset - bundle.firsts[part]
            linear = linear[(offset >= bundle.firsts[part]) & (linear < bundle.starts[part + 1])]
            linear = linear[(linear >= starts[0]) & (linear < starts[-1])]
            lanes = np.searchsorted(starts, linear, side="right") - 1
            begins, stops = starts[lanes], starts[lanes + 1]
            keys = np.full(len(lanes), self.key, np.uint64)
            after_turn = linear - _turns(keys, np.full(len(lanes), number), lanes, begins, stops, bundle.starts)
            first = (first_draw - lanes + self.num_lanes - 1) // self.num_lanes
            at = first + np.where(after_turn < 0, after_turn + stops - begins, after_turn)
            due = (at >= start) & (at < stop)
            found += zip(lanes[due].tolist(), at[due].tolist(), strict=True)
        return found


def runs_of(
    sources: Sequence[SourceLanes], low: int, high: int, starts: Int64Array, stops: Int64Array
) -> tuple[Runs, Int64Array]:
    """Return ``runs(low, high, starts[i], stops[i])`` of each source, source after source, and the number of each.

    All sources are handled at once, like :func:`lay_passes`.
    """
    bounds = zip(sources, starts.tolist(), stops.tolist(), strict=True)
    found = [list(source.bundles_of(low, high, start, stop)) for source, start, stop in bounds]
    parts = [part for some in found for part in some]
    new = [part for part in parts if part.is_new]
    if new:
        lay_passes([part.bundle for part in new])
        for part in new:
            part.source.keep(part.era, part.bundle)
    whose = np.repeat(np.arange(len(sources)), [len(some) for some in found])
    runs, of = _runs_of(parts, (low, high), starts[whose], stops[whose])
    owner = whose[of]
    if len(parts) > len(sources):  # the bundles of a source come lane by lane
        runs = runs.taken(np.lexsort((runs.lanes, owner)))
    return runs, np.bincount(owner, minlength=len(sources))


def _runs_of(
    parts: Sequence[_Part], lane_range: tuple[int, int], starts: Int64Array, stops: Int64Array
) -> tuple[Runs, Int64Array]:
    """Return the runs of each part that hold ``[starts[i], stops[i])`` of the streams, by lane, and each run's part."""
    low, high = lane_range
    num_lanes, bundles = parts[0].source.num_lanes, [part.bundle for part in parts]
    # 1. Per part, int64 [P]: its number of passes, the samples of a pass, its first pass within the bundle, and the
    # first draw of the bundle.
    num_passes, sizes, skipped, drawn = np.array(
        [(len(one.numbers), one.era.samples, one.numbers.start - one.bundle.numbers.start, one.bundle.first_draw)
         for one in parts]
    ).T  # fmt: skip
    # 2. One row per part and lane; then one row per pass of the part in which the lane has a run.
    part = np.repeat(np.arange(len(parts)), high - low)
    lane = np.tile(np.arange(low, high), len(parts))
    is_sparse = (sizes < num_lanes)[part]  # a lane has a sample only in some passes: then one row per draw
    begin = drawn[part] + skipped[part] * sizes[part]
    before, behind = (-(-(at - lane) // num_lanes) for at in (begin, begin + num_passes[part] * sizes[part]))
    before, behind = np.maximum(before, starts[part]), np.minimum(behind, stops[part])
    counts = np.where(is_sparse, np.maximum(behind - before, 0), num_passes[part])
    row = np.repeat(np.arange(len(part)), counts)
    index = np.arange(len(row)) - sums(counts)[row]
    of, lanes = part[row], lane[row]
    draw = (before[row] + index) * num_lanes + lanes
    within = np.where(is_sparse[row], (draw - drawn[of]) // sizes[of], skipped[of] + index)
    # 3. Put the linear positions of all bundles end to end; per row: its run [begins, ends) and its turn.
    shifts = sums([int(one.starts[-1]) for one in bundles])
    borders = _end_to_end([one.starts + shift for one, shift in zip(bundles, shifts.tolist(), strict=False)])
    draws, base = drawn[of] + within * sizes[of], shifts[of] + within * sizes[of]
    first = -(-(draws - lanes) // num_lanes)
    begins, ends = (base + _dealt(draws + sizes[of], at, num_lanes) - _dealt(draws, at, num_lanes)
                    for at in (lanes, lanes + 1))  # fmt: skip
    turns = _turns(
        np.array([one.source.key for one in parts], np.uint64)[of],
        np.array([one.numbers.start for one in bundles])[of] + within, lanes, begins, ends, borders,
    )  # fmt: skip
    # 4. Two rows per run, one per side of the turn; keep those that hold requested positions.
    lows, highs = np.stack([turns, begins], axis=1).ravel(), np.stack([ends, turns], axis=1).ravel()
    first = np.stack([first, first + ends - turns], axis=1).ravel()
    of, lanes = np.repeat(of, 2), np.repeat(lanes, 2)
    here = np.flatnonzero((highs > lows) & (first < stops[of]) & (first + highs - lows > starts[of]))
    lows, highs, first, of, lanes = lows[here], highs[here], first[here], of[here], lanes[here]
    # 5. One row per part of a chunk in each.
    low_border = np.searchsorted(borders, np.maximum(lows, lows + starts[of] - first), side="right") - 1
    nums = np.searchsorted(borders, np.minimum(highs, lows + stops[of] - first), side="left") - low_border
    row = np.repeat(np.arange(len(nums)), nums)
    border = np.arange(len(row)) + np.repeat(low_border - (np.cumsum(nums) - nums), nums)
    start, owner = np.maximum(borders[border], lows[row]), of[row]
    laid = border - owner  # each bundle has one border more than it has parts
    runs = Runs(
        lanes=lanes[row],
        chunk_ids=_end_to_end([one.chunk_ids for one in bundles])[laid],
        firsts=start - borders[border] + _end_to_end([one.firsts for one in bundles])[laid],
        sizes=np.minimum(borders[border + 1], highs[row]) - start,
        begins=first[row] + start - lows[row],
    )
    return runs, owner
