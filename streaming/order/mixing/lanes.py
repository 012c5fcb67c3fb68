"""Lay out the lanes of an endless mixture: every lane is a stream of chunks from all sources, by weight.

Each source is a stream of its own, cut into lanes (:mod:`streaming.order.mixing.source_lanes`). In a lane, the chunks
of all sources are ordered by their stamps (see :mod:`streaming.order.mixing.passes`): the times, in samples of the
lane, at which the source's share reaches them. The amount that a source has given by some time also follows by
arithmetic, so any position can be evaluated without its predecessors::

    time            0 ------ t --------->
    share of web    0 ... 0.7 t              laid by t: web's chunks of its first 0.7 t samples, one more or less
    share of code   0 ... 0.3 t
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np

from streaming.common.arrays import sums
from streaming.errors import ConfigError, StateError
from streaming.order.mixing.endless_order import EndlessOrder
from streaming.order.mixing.passes import Sources, Weights, drawn_in_lanes, keep_latest, keyed_number
from streaming.order.mixing.source_lanes import Runs, SourceLanes, runs_of
from streaming.order.mixing.virtual_time import Drawn, Floats, Growth, LaneBlock, growths
from streaming.order.plan.order import ENDLESS, LaneParts, OrderSettings, window_place, window_slice
from streaming.order.plan.permutation import permutations_of
from streaming.types import Int64Array, override

_LEAST_GROUP = 16  # lanes laid out together: NumPy takes as long for one
_MOST_GROUPS = 32  # of all lanes: each group lays the passes over all sources again, and a pass holds all lanes
_KEPT_BLOCKS = 256  # laid blocks, each of one group of lanes
_BLOCKS_AHEAD = 64  # blocks for which a source's runs are drawn together: a single block costs as much
_CHUNKS_AHEAD = 64  # upper bound on these, per source and lane
_RUNS_AHEAD = 2**16  # over all sources and lanes of a group: with a thousand sources, far fewer blocks are efficient
_SOURCES_AT_ONCE = 512  # whose runs are drawn together: ten thousand at once would take hundreds of MB for a moment
_KEPT_PARTS = 2**20  # of passes, over all sources: groups of lanes need the same ones; some 32 MiB
_LEAST_BLOCK = 1024  # samples of a lane
_LEAST_STRETCH = 512  # samples of a lane; half as many cost a third more per row


class MixedLanes(EndlessOrder):
    """The order of an endless mixture: one pass, number 0, in which every lane is a stream of chunks by weight.

    After ``n`` samples of a lane, a source has given ``n`` times its share, to within one of its chunks plus its share
    of one chunk of every source. Any position is found by arithmetic and one permutation per pass and source.

    Args:
        sources: See ``EndlessOrder``.
        schedule: See ``EndlessOrder``.
        lock: See ``EndlessOrder``.
        names: The sources that are laid, present and absent; None: all.
        row_at: Returns the row of the run by which a lane has drawn a given number of these samples, for messages;
            None: lanes draw from no other sources.
    """

    @override
    @property
    def stretch(self) -> int:
        return stretch_of(self.settings)

    def __init__(
        self, sources: Sources, schedule: Sequence[Weights], *, lock: AbstractContextManager[Any] | None = None,
        names: Sequence[str] | None = None, row_at: Callable[[int], int] | None = None,
    ) -> None:  # fmt: skip
        lanes = sources.settings.lanes
        self._row_at = row_at or (lambda time: time * lanes)
        every_name = sources.every_name if names is None else names
        self._names = names = sorted(name for name in every_name if name in sources.names)
        self._absent = [name for name in every_name if name not in sources.names]
        settings = sources.settings
        kept = _KEPT_PARTS // len(names)
        self._lanes = {name: SourceLanes(sources.eras[name], settings, kept_parts=kept) for name in names}
        self._in_order = list(self._lanes.values())
        self._mean_chunks = np.array([lanes.mean_chunk for lanes in self._lanes.values()])
        # The distance from a chunk of a source to its next chunk, or from the start, is at most this many samples of
        # it.
        self._chunks_between = self._mean_chunks + np.array([lanes.largest_chunk for lanes in self._in_order])
        place_of = {name: place for place, name in enumerate(sources.names)}
        self._places = np.array([place_of[name] for name in names])
        self._phase_table = _phases(names, settings)
        self._phases = dict(zip(names, self._phase_table, strict=True))
        self._group = max(_LEAST_GROUP, -(-settings.lanes // _MOST_GROUPS))
        self._block_time = max(_LEAST_BLOCK * _LEAST_GROUP // self._group, 2 * settings.window)
        super().__init__(sources, schedule, lock=lock)

    @override
    def _weigh(self) -> None:
        self._growths = growths(self._names, self.schedule)
        self._growth = Growth.of_all(list(self._growths.values()))
        shares = np.where(self._growth.shares > 0, self._growth.shares, np.inf)
        with np.errstate(over="ignore"):  # by the smallest shares
            self.mixed_after = int(min(np.ceil((self._chunks_between / shares).max()), ENDLESS))
        self._weigh_absent()
        # Blocks beyond the frontier have not been returned; all others are laid out again exactly as before.
        self._kept: dict[int, Drawn] = {}  # a new dict: an order that looks ahead keeps the old one
        self._blocks: dict[tuple[int, int], LaneBlock] = {}

    def _weigh_absent(self) -> None:
        """Compute the time from which absent sources give nothing more, and their samples in each lane by then."""
        absent = growths(self._absent, self.schedule)
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
        """Return the number of samples that a source without a share has in each lane once all is laid, int64 [L].

        Raises:
            ConfigError: It still has a share.
        """
        growth, lanes = self._growths[name], self._lanes[name]
        if growth.ends_at == np.inf:
            raise ConfigError(f"source {name!r}: draws from it never end")
        laid, due = np.zeros(self.settings.lanes, np.int64), int(growth.dues[-1])
        if growth.ends_at:
            runs = lanes.runs(0, self.settings.lanes, max(due - lanes.mean_chunk - 1, 0), due + 2)
            stamps = growth.stamps(runs.begins + lanes.mean_chunk * self._phases[name][runs.lanes])
            is_first, is_laid = np.diff(runs.lanes, prepend=-1) != 0, stamps < np.inf
            np.add.at(laid, runs.lanes[is_first], runs.begins[is_first])
            np.add.at(laid, runs.lanes[is_laid], runs.sizes[is_laid])
        return laid

    # --- the order ---

    @override
    def lane_samples(self, lane: int, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        if start == stop:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        places = window_slice(self.settings, 0, lane, start, stop, self.lane_size(lane))
        return self.laid(lane, int(places.min()), int(places.max()) + 1).at(places)

    def lane_parts(self, low: int, high: int, start: int, stop: int) -> LaneParts:
        """See ``Order``."""
        reach = max(self.settings.window - 1, 0)
        found = []
        with self._lock:
            # All returned runs are stamped below the frontier: later weights cannot change them.
            for group in range(low // self._group, -(-high // self._group)):
                lanes = slice(max(low - group * self._group, 0), min(high - group * self._group, self._group))
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
        """See ``Order``. Moves the frontier past everything examined."""
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
            # If the sample is not found in this range, it must never come in it: so the range may no longer change.
            self._frontier = max(self._frontier, until + 1)
        for lane, place in lanes.find(chunk_id, offset, *stream):
            run = lanes.runs(lane, lane + 1, place, place + 1)
            stamp = float(growth.stamps(run.begins + lanes.mean_chunk * self._phases[name][run.lanes])[0])
            if stamp > until or (stamp <= self._behind_absent <= start - window - slack):  # or is due before the start
                continue
            number = max(-(-int(np.ceil(stamp)) // self._block_time) - 1, 0)
            block = self._block(lane // self._group, number)
            runs = block.runs
            holds = (runs.lanes == lane) & (runs.chunk_ids == chunk_id)
            holds &= (runs.firsts <= offset) & (offset < runs.firsts + runs.sizes)
            for laid in (runs.begins - runs.firsts)[holds].tolist():
                due = window_place(self.settings, 0, lane, laid + offset, self.lane_size(lane))
                if start <= due < stop:
                    found.append((lane, due))
        return sorted(set(found))

    def laid(self, lane: int, start: int, stop: int) -> Runs:
        """Return the runs at positions ``[start, stop)`` of a lane as laid out, before the window moves samples."""
        group, within = lane // self._group, lane % self._group
        with self._lock:
            # All returned runs are stamped below the frontier, as in lane_parts().
            found = list(self._blocks_of(group, slice(within, within + 1), start, stop))
            rows = [slice(*block.splits[within : within + 2].tolist()) for block in found]
            runs = Runs.joined([block.runs.taken(row) for block, row in zip(found, rows, strict=True)])
            low = int(np.searchsorted(runs.begins, start, side="right")) - 1
            high = int(np.searchsorted(runs.begins, stop, side="left"))
            self._give(np.concatenate([block.stamps[row] for block, row in zip(found, rows, strict=True)])[low:high])
        return runs.taken(slice(low, high))

    def _give(self, stamps: Floats) -> None:
        """Count runs with these stamps as planned."""
        if len(stamps):
            # Invariant: every returned run is stamped before the frontier, so weights from there on do not change it.
            self._frontier = max(self._frontier, int(np.ceil(stamps.max())) + 1)

    def given(self, lane: int, place: int) -> Int64Array:
        """Count the samples of each source on positions ``[0, place)`` of a lane as laid out, int64 [sources]."""
        group, within = lane // self._group, lane % self._group
        counts = np.zeros(len(self.sources.every_name), np.int64)
        for number, name in enumerate(self.sources.every_name):
            if (
                name in self._absent and name in self.sources.laid
            ):  # all its samples come before any position that can be requested
                counts[number] = self.sources.laid[name][lane]
        with self._lock:
            # All counted runs are stamped below the frontier: later weights do not change the counts.
            block = next(self._blocks_of(group, slice(within, within + 1), place, place + 1))
            drawn = self._drawn(group, block.time, block.time)
            here = drawn.runs.lanes == lane
            first, given = here & drawn.is_first, here & (drawn.stamps <= block.time)
            np.add.at(counts, self._places[drawn.sources[first]], drawn.runs.begins[first])
            np.add.at(counts, self._places[drawn.sources[given]], drawn.runs.sizes[given])
            rows = np.arange(block.splits[within], block.splits[within + 1])
            rows = rows[block.runs.begins[rows] < place]
            self._give(np.append(block.stamps[rows], block.time))
        runs = block.runs.taken(rows)
        taken = np.minimum(runs.sizes, place - runs.begins)
        np.add.at(counts, self.sources.source_of(runs.chunk_ids), taken)
        return counts

    def drawn(self, lane: int, place: int) -> Int64Array:
        """Count the samples of each source at positions ``[0, place)`` of a lane, int64 [``Sources.every_name``]."""
        return self.sources.drawn(self, 0, lane, place)

    @override
    def drawn_before(self, row: int) -> Int64Array:
        return drawn_in_lanes(self.drawn, self.settings.lanes, row)

    @override
    def free_pass(self, name: str) -> int:
        with self._lock:
            # due follows from the frontier at one moment; a later frontier only makes it later.
            due = self._growths[name].due(self._frontier)
        # Every laid run is stamped before the frontier, so it begins before the samples due there.
        return self._lanes[name].free_pass(int(due) + 2) if due else 0

    def _blocks_of(self, group: int, lanes: slice, start: int, stop: int) -> Iterator[LaneBlock]:
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

    def _block(self, group: int, number: int) -> LaneBlock:
        """Return the block that a group of lanes lays out in one stretch of time; the latest blocks are cached."""
        with self._lock:
            # Laying a block again gives the same block: it depends only on weights below the frontier.
            found = self._blocks.get((group, number))
            if found is None:
                start, stop = number * self._block_time, (number + 1) * self._block_time
                found = self._lay(group, start, stop)
                keep_latest(self._blocks, (group, number), found, _KEPT_BLOCKS)
            return found

    def _lay(self, group: int, start: int, stop: int) -> LaneBlock:
        """Return the runs stamped in ``(start, stop]``, by lane and stamp.

        Raises:
            StateError: Some belong to a source that no longer exists.
        """
        if start < self._absent_until:
            raise self._still_needed(start)
        # The runs of all sources in the block, int64 [R], by lane, then by stamp; and the samples laid before, [lanes].
        lanes = self._lanes_of(group)
        given, runs, stamps = self._drawn(group, start, stop).stamped(start, stop, lanes)
        before = self._absent_laid[lanes.start : lanes.stop] + given
        # Each run begins where the previous run of its lane ends; the first, after the samples laid before.
        splits = np.searchsorted(runs.lanes, np.arange(lanes.start, lanes.stop + 1))
        ends = sums(runs.sizes)
        sizes = np.diff(ends[splits])
        begins = ends[:-1] + np.repeat(before - ends[splits[:-1]], np.diff(splits))
        return LaneBlock(
            time=start, runs=replace(runs, begins=begins), stamps=stamps, splits=splits, starts=before,
            stops=before + sizes,
        )  # fmt: skip

    def _lanes_of(self, group: int) -> range:
        return range(group * self._group, min((group + 1) * self._group, self.settings.lanes))

    @property
    def _behind_absent(self) -> int:
        """The time from which on no block has runs of an absent source."""
        return -(-int(min(self._absent_until, ENDLESS)) // self._block_time) * self._block_time

    @property
    def _slack(self) -> int:
        """Upper bound on the difference between positions and times: less than a chunk of each source."""
        return sum(each.largest_chunk + each.mean_chunk for each in self._lanes.values()) + self._absent_slack

    @property
    def _free(self) -> int:
        """The time from which a run can continue without the absent sources.

        It is the start of the next block, plus the distance that the window and the counting of drawn samples look
        back.
        """
        return self._behind_absent + 3 * self.settings.window + self._absent_slack

    @override
    @property
    def known_from(self) -> int:
        """See ``EndlessOrder``. Everything that :meth:`find` searches comes after it, too."""
        looked_at = self._behind_absent + self.settings.window + self._slack
        return max(self._free, looked_at) if self._absent_until else 0

    def _still_needed(self, time: int) -> StateError:
        """Make the error for a stretch of time in which absent sources may have runs."""
        advice = "Add the source"
        if self._absent_until < np.inf:
            advice += f" with the weight 0 up to row {self._row_at(self._free):,} or so; after that it may be deleted"
        return StateError(
            f"around row {self._row_at(time):,} this mixture draws from {', '.join(map(repr, self._absent))}, which it "
            f"lacks: chunks are laid out whole, and what was laid out is read to its end. {advice}"
        )

    def _drawn(self, group: int, start: int, stop: int) -> Drawn:
        """Return at least the runs of all sources stamped in ``[start, stop]``.

        Runs of a few more chunks and of several blocks are cached: most sources have nothing new in most blocks.
        """
        drawn = self._kept.get(group) or Drawn.none(len(self._lanes))
        due = self._growth.due(stop)
        more = ((due - self._growth.due(start)) * _BLOCKS_AHEAD).astype(np.int64)
        # At the stamp of a run, up to a mean chunk more is due than comes before the run.
        since = np.maximum(self._growth.due(start).astype(np.int64) - self._mean_chunks - 1, 0)
        until = np.where(due, due.astype(np.int64) + 2, 0)  # nothing from a source that has no share yet
        missing = np.flatnonzero((drawn.since > since) | (until > drawn.until))
        if len(missing):
            ahead = np.minimum(more, _CHUNKS_AHEAD * self._mean_chunks)[missing]
            # All sources look equally far ahead in time: as far as their runs together stay below the limit.
            num_runs = float((ahead / self._mean_chunks[missing]).sum()) * self._group
            ahead = (ahead * min(1.0, _RUNS_AHEAD / max(num_runs, 1.0))).astype(np.int64)
            ahead = np.maximum(until[missing] + ahead, since[missing] + 4 * self._mean_chunks[missing])
            drawn = self._kept[group] = drawn.replaced(missing, *self._windows(missing, group, since[missing], ahead))
        return drawn

    def _windows(
        self, sources: Int64Array, group: int, starts: Int64Array, stops: Int64Array
    ) -> tuple[Int64Array, Int64Array, Runs, Int64Array, Floats]:
        """Return starts, stops, the runs of some sources between them, the number of each, and their stamps."""
        lanes, found = self._lanes_of(group), []
        for some in np.array_split(np.arange(len(sources)), -(-len(sources) // _SOURCES_AT_ONCE)):
            drawn = [self._in_order[place] for place in sources[some].tolist()]
            found.append(runs_of(drawn, lanes.start, lanes.stop, starts[some], stops[some]))
        runs, counts = Runs.joined([runs for runs, _ in found]), np.concatenate([counts for _, counts in found])
        source = np.repeat(sources, counts)
        # The phase is in units of the mean chunk. In units of the actual chunk, small chunks would come first
        # everywhere.
        marks = runs.begins + self._mean_chunks[source] * self._phase_table[source, runs.lanes]
        return starts, stops, runs, counts, self._growth.stamps_of(source, marks)


def stretch_of(settings: OrderSettings) -> int:
    """Return the shortest efficient stretch, so that new weights can take effect soon."""
    return max(settings.window // 2, _LEAST_STRETCH)


def _phases(names: Sequence[str], settings: OrderSettings) -> Floats:
    """Return the fraction of a chunk at which each source begins in each lane, float64 [names, L].

    The phases of each source are a permutation of ``(i + 1/2) / L``.
    """
    keys = np.array([keyed_number(settings.seed, "phases", name) for name in names], np.uint64)
    sizes = np.full(len(names), settings.lanes)
    places = permutations_of(keys, np.zeros(len(names), np.int64), sizes).reshape(len(names), settings.lanes)
    phases: Floats = (2 * places + 1) / (2 * settings.lanes)
    return phases
