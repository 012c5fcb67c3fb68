"""Decide which rank gets which sample in which batch, and how long each chunk is needed.

A *stream* repeats the dataset without end: stream position ``s`` is global position ``s % D`` of pass
``s // D``, and every pass has an order of its own. Epoch ``e`` covers ``[e * E, (e + 1) * E)`` of the stream;
without an ``epoch_size``, E is D and one epoch is one pass. If ``start`` samples of an epoch are consumed, global batch
``k`` is the G stream positions from ``e * E + start + k * G`` on. It does not depend on the world size.

Within a global batch the positions are ordered by lane, and rank ``r`` of R takes the slice
``[n * r // R, n * (r + 1) // R)`` of the n positions. For example, 8 positions of 4 lanes for three world sizes::

    lanes    a a b b c c d d
    R = 2    0 0 0 0 1 1 1 1        whole lanes: no chunk is read by two ranks
    R = 3    0 0 1 1 1 2 2 2        lane c is shared by two ranks
    R = 4    0 0 1 1 2 2 3 3
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from streaming.common.arguments import MAX_COUNT, checked_count, checked_int
from streaming.common.arrays import sums
from streaming.errors import ConfigError
from streaming.order.plan.intervals import ChunkIntervals
from streaming.order.plan.order import (
    ENDLESS,
    LEAST_STRETCH,
    EpochOrders,
    Order,
    Orders,
    OrderSettings,
    deal_by_lane,
)
from streaming.order.plan.settings import Shape
from streaming.order.plan.sizes import Sizes
from streaming.types import Int64Array, LastBatch, override

PASSES_LOOKED_AT = 8
"""Number of passes whose chunks are counted at the start of an epoch of many passes. Others are planned when due."""
_MANY_USES = 2**15  # of chunks: the memory needed at once has converged by then, unless it still grows
_HARDLY_MORE = 1.01
FIRST_ROWS = 2**14
"""Number of rows of the first batches whose chunks training looks up exactly, which takes a few ms."""
_CACHED_PASSES = 4  # a batch shorter than a pass touches two; two more because the reader runs ahead
_RowPlaces = tuple[Int64Array, npt.NDArray[np.bool_], Int64Array, Int64Array, Int64Array]
_Segment = tuple[int, int, npt.NDArray[np.int32], npt.NDArray[np.int32]]  # start, stop, chunk ids, offsets


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankBatches:
    """The rows of one rank in consecutive batches, batch after batch.

    Rows ``row_splits[i]`` to ``row_splits[i + 1]`` are the i-th batch. The caller owns the arrays.

    Attributes:
        chunk_ids: int64 [n], chunk id in the dataset.
        offsets: int64 [n], sample inside the chunk.
        passes: int64 [n], pass of the stream; uses of a chunk in two passes form two live intervals.
        positions: int64 [n], stream positions.
        valid: bool [n], False for padding rows; each real sample is valid exactly once.
        row_splits: int64 [num_batches + 1].
    """

    chunk_ids: Int64Array
    offsets: Int64Array
    passes: Int64Array
    positions: Int64Array
    valid: npt.NDArray[np.bool_]
    row_splits: Int64Array


class Plan:
    """Batches of one epoch, or of the rest of it.

    Immutable and thread-safe: its caches hold only values that it would compute again.

    The steps from a batch to samples (``rank_batches``), n rows in B batches::

        batch            ->  stream positions [start, stop), [B]      _slices, by the rank's share
        stream position  ->  pass, lane, lane position, [n]          _places: deal_by_lane, in closed form
        lane position    ->  chunk id, offset in the chunk, [n]      _locate: a range per lane, by its Order

    and from chunks to memory (``chunk_intervals``)::

        rank             ->  lanes [low, high)                       rank_lanes
        lanes, stretch   ->  runs of chunks, and when they are due   Order.lane_parts
        runs             ->  first and last batch of each chunk      _regular_intervals; _odd_uses at both ends

    Attributes:
        num_samples: Samples in the epoch, including consumed ones.
        first_row: Samples of the run, over all ranks and epochs, that come before ``start``.
        num_batches: Number of batches from ``start`` on, equal on every rank.
        is_endless: Whether the epoch has no end; ``num_samples`` and ``num_batches`` are then beyond any position.
    """

    def __init__(
        self,
        chunk_samples: npt.ArrayLike,
        settings: OrderSettings,
        *,
        global_batch_size: int,
        dp_world_size: int,
        last_batch: LastBatch = "drop",
        epoch: int = 0,
        epoch_size: int | None = None,
        start: int = 0,
        orders: Orders | None = None,
        most_batches: int | None = None,
        micro_batch_size: int | None = None,
    ) -> None:
        """Validate the numbers. Orders are made when they are first needed.

        Args:
            chunk_samples: int64 [C], samples of each chunk in dataset order.
            settings: The order settings.
            global_batch_size: G, samples of one batch over all ranks. Need not be a multiple of anything.
            dp_world_size: R, the number of data-parallel ranks.
            last_batch: Treatment of the last ``num_samples % G`` samples. "drop" leaves them out. "partial" deals them
                like any batch; a rank may get 0 rows. "pad" also adds invalid rows, so that every rank has ``ceil(G /
                R)`` rows in every batch.
            epoch: Number of the epoch.
            epoch_size: E, samples of a virtual epoch over the endlessly repeated dataset; default: one pass.
            start: Samples of this epoch that are already consumed.
            orders: The orders of all passes, under the same settings and over the same chunks; default: those of one
                dataset. If they are endless, so is an epoch without an ``epoch_size``.
            most_batches: Number of batches after which the plan ends, even before the epoch does; default: no limit.
            micro_batch_size: Most rows of the micro-batches of a rank's share; None: it is not cut.

        Raises:
            ConfigError: An argument is out of range, or the dataset is empty.
        """
        self.orders = EpochOrders(chunk_samples, settings) if orders is None else orders
        self.chunk_samples = self.orders.chunk_samples
        self.settings = settings
        if self.orders.settings != settings or len(self.chunk_samples) != len(np.atleast_1d(chunk_samples)):
            raise ConfigError(
                f"orders: expected those of {settings} and {len(np.atleast_1d(chunk_samples))} chunks, got those of "
                f"{self.orders.settings} and {len(self.chunk_samples)} chunks"
            )
        self.samples_per_pass = self.orders.samples_per_pass
        self.shape = Shape(
            sizes=Sizes.constant(global_batch_size), last_batch=last_batch,
            num_ranks=checked_int("dp_world_size", dp_world_size, 1, 2**31 - 1),
            epoch_size=self.samples_per_pass if epoch_size is None else epoch_size, micro_batch_size=micro_batch_size,
        )  # fmt: skip
        self.global_batch_size, self.dp_world_size = self.shape.global_batch_size, self.shape.num_ranks
        self.last_batch: LastBatch = last_batch
        self.num_samples = self.shape.num_samples
        self.is_endless = self.orders.is_endless and epoch_size is None and most_batches is None
        self._at_once = _Stretches() if self.orders.is_endless else _Passes()
        self.epoch = checked_int("epoch", epoch, 0, self._at_once.most_samples // self.num_samples - 1)
        self.start = checked_int("start", start, 0, self.num_samples)
        self.first_row = self.epoch * self.num_samples + self.start
        left = self.num_samples - self.start
        self.num_batches = self.shape.batches_in(left)
        if most_batches is not None:
            self.num_batches = min(self.num_batches, checked_count("most_batches", most_batches))
        self._stop = self.first_row + min(left, self.num_batches * self.global_batch_size)
        self._orders: dict[int, Order] = {}
        self._segments: dict[tuple[int, int], _Segment] = {}
        self._looked: tuple[int, dict[tuple[int, range], ChunkIntervals]] = -1, {}
        self._odd: tuple[tuple[int, int], _RowPlaces | None] = (-1, -1), None

    @classmethod
    def of(cls, shape: Shape, chunk_samples: npt.ArrayLike, settings: OrderSettings, **where: Any) -> Self:
        """Return the plan of the batches of ``shape``.

        ``where`` gives the start and the orders, as arguments of the class.
        """
        return cls(
            chunk_samples, settings, global_batch_size=shape.global_batch_size, dp_world_size=shape.num_ranks,
            last_batch=shape.last_batch, epoch_size=shape.epoch_size, micro_batch_size=shape.micro_batch_size, **where,
        )  # fmt: skip

    @classmethod
    def behind(
        cls, shape: Shape, chunk_samples: npt.ArrayLike, settings: OrderSettings, *, epoch: int, start: int,
        orders: Orders,
    ) -> Self:  # fmt: skip
        """Return the plan of the batches from sample ``start`` of an epoch on, until their size changes."""
        num_samples = orders.samples_per_pass if shape.epoch_size is None else shape.epoch_size
        row, left, sizes = epoch * num_samples + start, num_samples - start, shape.sizes
        return cls.of(
            shape.at(row), chunk_samples, settings, epoch=epoch, start=start, orders=orders,
            most_batches=None if sizes.next_change(row) is None else sizes.batches_alike(row, left, shape.last_batch),
        )  # fmt: skip

    @classmethod
    def of_epoch(
        cls, shape: Shape, chunk_samples: npt.ArrayLike, settings: OrderSettings, *, epoch: int, start: int = 0,
        orders: Orders | None = None,
    ) -> Iterator[Self]:  # fmt: skip
        """Yield the plans of an epoch from sample ``start`` on: one per run of batches of equal size."""
        orders = EpochOrders(chunk_samples, settings) if orders is None else orders
        while True:
            here = cls.behind(shape, chunk_samples, settings, epoch=epoch, start=start, orders=orders)
            if here.num_batches:
                yield here
            start += here.num_batches * here.global_batch_size
            if shape.sizes.next_change(here.first_row) is None or not here.num_batches or start >= here.num_samples:
                return

    def among(self, dp_world_size: int) -> Self:
        """Return the same batches, dealt to another number of ranks; the caches of lanes are shared."""
        made = copy(self)
        made.shape = replace(self.shape, num_ranks=checked_int("dp_world_size", dp_world_size, 1, 2**31 - 1))
        made.dp_world_size, made._looked, made._odd = made.shape.num_ranks, (-1, {}), ((-1, -1), None)
        return made

    def from_the_start(self) -> Plan:
        """Return the whole plan of epoch 0 in the same order; if the order has no passes, this plan itself."""
        if self.orders.is_endless or (self.epoch, self.start) == (0, 0):
            return self
        return Plan.of(self.shape, self.chunk_samples, self.settings, orders=self.orders)

    @property
    def passes(self) -> range:
        """The passes of the stream that the remaining batches touch."""
        if not self.num_batches:
            return range(0)
        return range(self.first_row // self.samples_per_pass, (self._stop - 1) // self.samples_per_pass + 1)

    def order(self, pass_number: int) -> Order:
        """Return the order of one pass; the latest are cached."""
        order = self._orders.get(pass_number)
        if order is None:
            order = self.orders.of_pass(pass_number)
            kept = _CACHED_PASSES + self.global_batch_size // self.samples_per_pass
            for old in sorted(self._orders)[: max(len(self._orders) - kept + 1, 0)]:
                self._orders.pop(old, None)
                for key in [key for key in list(self._segments) if key[0] == old]:
                    self._segments.pop(key, None)
            self._orders[pass_number] = order
        return order

    def row_of(self, batch: int) -> int:
        """Return the row of the run at which a batch begins."""
        return self.first_row + batch * self.global_batch_size

    def cuts(self, batch: int, num_rows: int) -> tuple[int, ...] | None:
        """Return where a rank's rows of a batch are cut into micro-batches; None: they are not."""
        left = self.num_samples - self.start - batch * self.global_batch_size
        return self.shape.cuts(min(self.global_batch_size, left), num_rows)

    def batch_size(self, batch: int, dp_rank: int) -> int:
        """Return the number of rows, including padding, of one rank in one batch."""
        self._check_range(batch, batch + 1, dp_rank)
        return int(self._slices(np.array([batch]), dp_rank).rows[0])

    def num_valid(self, batch: int, dp_rank: int) -> int:
        """Return the number of rows, without padding, of one rank in one batch; these come first."""
        self._check_range(batch, batch + 1, dp_rank)
        return int(self._slices(np.array([batch]), dp_rank).counts[0])

    def rank_batches(self, first: int, last: int, dp_rank: int) -> RankBatches:
        """Return the rows of one rank in batches ``[first, last)``; some ten thousand rows at once are most efficient.

        Raises:
            ConfigError: The range or the rank does not exist.
        """
        row_splits, valid, passes, lanes, places = self._rows(first, last, dp_rank)
        chunk_ids, offsets = self._locate(passes, lanes, places)
        positions = places * self.settings.lanes + lanes + passes * self.samples_per_pass
        return RankBatches(
            chunk_ids=chunk_ids,
            offsets=offsets,
            passes=passes,
            positions=positions,
            valid=valid,
            row_splits=row_splits,
        )

    def when(self, chunk_id: int, offset: int, *, first: int = 0, last: int | None = None) -> list[tuple[int, int]]:
        """Return the batches in ``[first, last)`` that hold a sample, and its rank in each; padding does not count.

        Raises:
            ConfigError: There is no such sample or range, or the epoch has no end and ``last`` is not given.
        """
        if last is None:
            self._check_ends()
        last = self.num_batches if last is None else last
        self._check_range(first, last, 0)
        if not 0 <= chunk_id < len(self.chunk_samples) or not 0 <= offset < self.chunk_samples[chunk_id]:
            raise ConfigError(f"sample {offset} of chunk {chunk_id}: there is none")
        num_lanes, size = self.settings.lanes, self.global_batch_size
        begin, end = self.first_row + first * size, min(self.first_row + last * size, self._stop)
        found = []
        for number in range(begin // self.samples_per_pass, -(-end // self.samples_per_pass)):
            origin = number * self.samples_per_pass
            low, high = max(begin - origin, 0), min(end - origin, self.samples_per_pass)
            for lane, place in self.order(number).find(chunk_id, offset, low // num_lanes, -(-high // num_lanes)):
                if low <= place * num_lanes + lane < high:
                    found.append(self._dealt_to(origin + place * num_lanes + lane))
        return sorted(found)

    def _dealt_to(self, position: int) -> tuple[int, int]:
        """Return the batch of a stream position and the rank that gets it."""
        batch = (position - self.first_row) // self.global_batch_size
        cut = self._slices(np.array([batch]), 0)
        start, stop = int(cut.starts[0]), int(cut.stops[0])
        lane = position % self.samples_per_pass % self.settings.lanes
        # Its slot among the batch's positions by lane: the positions of lower lanes, then the earlier ones of its own
        # lane.
        slot, at = 0, start
        while at < stop:
            origin = at // self.samples_per_pass * self.samples_per_pass
            end = min(stop, origin + self.samples_per_pass)
            slot += _below(end - origin, lane, self.settings.lanes) - _below(at - origin, lane, self.settings.lanes)
            own = min(max(position, at), end) - origin
            slot += -(-(own - lane) // self.settings.lanes) - -(-(at - origin - lane) // self.settings.lanes)
            at = end
        return batch, self.shape.rank_of(slot, stop - start)

    def chunk_intervals(self, dp_rank: int) -> ChunkIntervals:
        """Return the intervals in which this rank needs chunks, over all remaining batches, in closed form.

        A chunk on lane positions [a, b) is used only while its lane is in [a - W, b + W]. The bounds hold for every
        use, including padding, and are loose by at most 2 W lane positions.

        Raises:
            ConfigError: The epoch has no end.
        """
        self._check_ends()
        return self._at_once.joined(self.intervals_by_pass(dp_rank))

    def intervals_by_pass(self, dp_rank: int) -> Iterator[ChunkIntervals]:
        """Yield ``chunk_intervals`` pass by pass; concatenated, the results are the whole, in the same order.

        No use in a pass comes before the last batch of the previous pass. An endless pass comes in stretches of
        batches: a chunk belongs to the stretch in which it is first needed, and its intervals of two stretches may
        overlap. If it is not known yet how long a chunk is needed (``LaneParts.goes_on``), its interval ends one batch
        after the stretch, and the next stretch includes the chunk again. Requested in time, the chunk need not be
        fetched again.
        """
        self._check_range(0, 0, dp_rank)
        rank, known = self._looked
        self._looked = -1, {}  # the first is used now; the others would be held for long
        for pass_number in self.passes:
            for stretch in self._stretches(pass_number):
                found, known = known.get((pass_number, stretch)) if rank == dp_rank else None, {}
                yield self._intervals(pass_number, stretch, dp_rank) if found is None else found

    def needs(self, dp_rank: int) -> ChunkIntervals:
        """Return ``chunk_intervals`` as training obeys them: with exact first uses in the first batches.

        Raises:
            ConfigError: The epoch has no end.
        """
        self._check_ends()
        return self._at_once.joined(self.needs_by_pass(dp_rank))

    def needs_by_pass(self, dp_rank: int, most_rows: int = FIRST_ROWS) -> Iterator[ChunkIntervals]:
        """Yield ``intervals_by_pass``, with exact first uses in the first batches of at most ``most_rows`` rows.

        The closed form is early by up to W lane positions. A reader that runs ahead does not notice, but the first
        batch would wait: with the default window, for 2.5 to 3 times as many chunks as it uses. After a start in the
        middle, chunks that no batch uses any more are left out.
        """
        parts = self.intervals_by_pass(dp_rank)
        for live in parts:
            yield self._begun(live, dp_rank, most_rows)
            break
        yield from parts

    def _begun(self, live: ChunkIntervals, dp_rank: int, most_rows: int) -> ChunkIntervals:
        """Return the first intervals, with exact first uses in the first batches."""
        pass_number = self.passes[0]
        count = min(max(most_rows // self.shape.most_rows, 1), len(next(self._stretches(pass_number))))
        rows = self.rank_batches(0, count, dp_rank)
        of_pass = rows.passes == pass_number
        batches = np.repeat(np.arange(count), np.diff(rows.row_splits))[of_pass]
        used, at = np.unique(rows.chunk_ids[of_pass], return_index=True)  # rows are sorted by batch
        return live.begun(used, batches[at], count)

    def rank_chunks(self, dp_rank: int) -> Int64Array:
        """Return the ids of the chunks that this rank needs, sorted, int64 [n].

        For an epoch of many passes, other chunks may be included.
        """
        looked_at, is_all = self._at_once.first(self)
        if not is_all and self.settings.scope == "global":
            return np.arange(len(self.chunk_samples))
        return np.unique(ChunkIntervals.joined(self._at_once.look(self, looked_at, dp_rank)).chunk_ids)

    def live_bytes(self, chunk_bytes: npt.ArrayLike, dp_rank: int) -> int:
        """Return an upper bound on the bytes of chunks that this rank needs at the same time, without read-ahead.

        For an endless epoch, or one of more than ``PASSES_LOOKED_AT`` passes, it is the maximum over the first passes
        plus a ninth, because other passes combine other chunks; but at most the bytes of all chunks.

        Args:
            chunk_bytes: int64 [C], size of each chunk in dataset order.
            dp_rank: The data-parallel rank.
        """
        sizes = self._chunk_bytes(chunk_bytes)
        looked_at, is_all = self._at_once.first(self)
        if not is_all:
            return _with_others(self._at_once.live_bytes(self, looked_at, sizes, dp_rank), sizes)
        return self._at_once.joined(self._at_once.look(self, looked_at, dp_rank)).live_bytes(sizes)

    # --- batches ---

    def _check_ends(self) -> None:
        if self.is_endless:
            raise ConfigError("this plan has no end: give an epoch_size to count what an epoch reads")

    def _check_range(self, first: int, last: int, dp_rank: int) -> None:
        if not 0 <= first <= last <= self.num_batches:
            raise ConfigError(f"batches [{first}, {last}): expected a range within [0, {self.num_batches})")
        if not 0 <= dp_rank < self.dp_world_size:
            raise ConfigError(f"dp_rank: expected one in [0, {self.dp_world_size}), got {dp_rank}")

    def _slices(self, batches: Int64Array, dp_rank: int) -> _Slices:
        starts = self.first_row + batches * self.global_batch_size
        stops = np.minimum(starts + self.global_batch_size, self._stop)
        lows, highs = self.shape.share(stops - starts, dp_rank)
        counts = rows = highs - lows
        if self.last_batch == "pad":
            rows = np.full_like(counts, self.shape.most_rows)
        return _Slices(starts=starts, stops=stops, lows=lows, counts=counts, rows=rows)

    def _places(self, cut: _Slices, batch: Int64Array, slots: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return pass, lane and lane position of the rows at ``slots`` of the batches' positions by lane, int64 [n]."""
        first_pass = cut.starts // self.samples_per_pass
        crossing = np.flatnonzero((cut.stops - 1) // self.samples_per_pass != first_pass)
        begins = cut.starts - first_pass * self.samples_per_pass
        ends = np.minimum(cut.stops - first_pass * self.samples_per_pass, self.samples_per_pass)
        passes = first_pass[batch]
        if not len(crossing):
            lanes, places = deal_by_lane(begins, ends, batch, slots, self.settings.lanes)
            return passes, lanes, places
        inside = ~np.isin(batch, crossing)
        lanes, places = np.empty_like(batch), np.empty_like(batch)
        lanes[inside], places[inside] = deal_by_lane(begins, ends, batch[inside], slots[inside], self.settings.lanes)
        for index in crossing.tolist():
            rows = batch == index
            # A batch with positions of several passes: sort its positions by lane, then by stream position.
            stream = np.arange(cut.starts[index], cut.stops[index], dtype=np.int64)
            lane = stream % self.samples_per_pass % self.settings.lanes
            chosen = stream[np.argsort(lane, kind="stable")[slots[rows]]]
            passes[rows], lanes[rows], places[rows] = dealt(self, chosen)
        return passes, lanes, places

    def _rows(self, first: int, last: int, dp_rank: int) -> _RowPlaces:
        """Return the row splits of the batches, which rows are valid, and the pass, lane and place of each row."""
        self._check_range(first, last, dp_rank)
        cut = self._slices(np.arange(first, last, dtype=np.int64), dp_rank)
        row_splits = sums(cut.rows)
        # Per row, int64 [n]: its batch, its number in the batch, its slot among the batch's positions by lane.
        batch = np.repeat(np.arange(last - first), cut.rows)
        number = np.arange(row_splits[-1]) - row_splits[batch]
        valid = number < cut.counts[batch]
        slots = cut.lows[batch] + (number if valid.all() else number % np.maximum(cut.counts, 1)[batch])
        return row_splits, valid, *self._places(cut, batch, slots)

    def _locate(self, passes: Int64Array, lanes: Int64Array, places: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return chunk ids and offsets in them, int64 [n] each."""
        chunk_ids, offsets = np.empty_like(lanes), np.empty_like(lanes)
        if not len(passes):
            return chunk_ids, offsets
        if passes[0] == passes[-1] and (passes == passes[0]).all():
            return self._locate_in_pass(int(passes[0]), lanes, places)
        for pass_number in np.unique(passes).tolist():
            rows = passes == pass_number
            chunk_ids[rows], offsets[rows] = self._locate_in_pass(pass_number, lanes[rows], places[rows])
        return chunk_ids, offsets

    def _locate_in_pass(self, pass_number: int, lanes: Int64Array, places: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Evaluate the range that covers the rows in each lane, then pick the rows."""
        order = self.order(pass_number)
        # 1. Per lane, int64 [lanes]: the range of lane positions that the rows cover.
        low_lane, num_lanes = int(lanes.min()), int(lanes.max() - lanes.min()) + 1
        row_lanes = lanes - low_lane
        lows, highs = np.full(num_lanes, MAX_COUNT), np.full(num_lanes, -1)
        np.minimum.at(lows, row_lanes, places)
        np.maximum.at(highs, row_lanes, places)
        # 2. The samples of all ranges end to end; ``bases`` maps a lane position to its index there.
        bases, length = np.zeros(num_lanes, dtype=np.int64), 0
        pieces: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]] = []
        for lane in np.flatnonzero(highs >= 0).tolist():
            low, high = int(lows[lane]), int(highs[lane]) + 1
            start, _, ids, offsets = self._segment(order, pass_number, low_lane + lane, low, high)
            pieces.append((ids[low - start : high - start], offsets[low - start : high - start]))
            bases[lane] = length - low
            length += high - low
        index = bases[row_lanes] + places
        return (
            np.concatenate([ids for ids, _ in pieces])[index].astype(np.int64),
            np.concatenate([offsets for _, offsets in pieces])[index].astype(np.int64),
        )

    def _segment(self, order: Order, pass_number: int, lane: int, low: int, high: int) -> _Segment:
        """Return chunk ids and offsets of a lane range that covers ``[low, high)``, cached for later batches."""
        segment = self._segments.get((pass_number, lane))
        if segment is None or not segment[0] <= low <= high <= segment[1]:
            ahead = max(high, low + min(max(2 * self.settings.window, LEAST_STRETCH), self.orders.stretch))
            stop = min(ahead, order.lane_size(lane))
            ids, offsets = order.lane_samples(lane, low, stop)
            segment = (low, stop, ids.astype(np.int32), offsets.astype(np.int32))
            self._segments[pass_number, lane] = segment
        return segment

    # --- live intervals ---

    def _chunk_bytes(self, chunk_bytes: npt.ArrayLike) -> Int64Array:
        sizes = np.asarray(chunk_bytes, dtype=np.int64)
        if sizes.shape != self.chunk_samples.shape:
            raise ConfigError(
                f"chunk_bytes: expected one size per chunk ({len(self.chunk_samples)}), got {sizes.shape}"
            )
        return sizes

    def _touched(self, pass_number: int) -> range:
        """Return the remaining batches that hold a sample of a pass."""
        begin = pass_number * self.samples_per_pass - self.first_row
        end = begin + self.samples_per_pass
        return range(
            max(begin // self.global_batch_size, 0),
            min(-(-end // self.global_batch_size), self.num_batches),
        )

    def _stretches(self, pass_number: int) -> Iterator[range]:
        """Yield the ranges of batches of a pass that are evaluated at once: all, or parts of an endless pass."""
        touched, step = self._touched(pass_number), self.stretch_batches
        for first in range(touched.start, touched.stop, step):
            yield range(first, min(first + step, touched.stop))

    @cached_property
    def stretch_batches(self) -> int:
        """Number of batches whose chunks are computed at once: all, or a part of an endless pass."""
        return self._at_once.batches(self)

    def batches_on(self, lane_positions: int) -> int:
        """Return the number of batches that ``lane_positions`` positions of all lanes fill, at least 1."""
        return max(lane_positions * self.settings.lanes // self.global_batch_size, 1)

    def _intervals(self, pass_number: int, stretch: range, dp_rank: int) -> ChunkIntervals:
        """Return the live intervals of one pass that begin in one of its stretches, sorted by their first batch."""
        self._check_range(0, 0, dp_rank)
        touched = self._touched(pass_number)
        # Full batches inside this pass follow the closed form; at most the first and the last do not.
        odd = {batch for batch in (touched[0], touched[-1]) if not self._is_regular(batch)}
        regular = range(touched[0] + (touched[0] in odd), touched[-1] + 1 - (touched[-1] in odd))
        parts = [self._odd_uses(pass_number, batch, dp_rank) for batch in sorted(odd) if batch in stretch]
        part = range(max(regular.start, stretch.start), min(regular.stop, stretch.stop))
        if part:
            parts.append(self._regular_intervals(pass_number, regular, part, dp_rank))
        ids, first, last = (np.concatenate([part[i] for part in parts]) for i in range(3))
        return ChunkIntervals.merged(ids, first, last, pass_number)

    def _is_regular(self, batch: int) -> bool:
        start = self.first_row + batch * self.global_batch_size
        stop = start + self.global_batch_size
        return stop <= self._stop and start // self.samples_per_pass == (stop - 1) // self.samples_per_pass

    def _odd_uses(self, pass_number: int, batch: int, dp_rank: int) -> tuple[Int64Array, Int64Array, Int64Array]:
        known, rows = self._odd
        if known != (batch, dp_rank) or rows is None:  # a batch may span many passes, and each pass requests it
            rows = self._rows(batch, batch + 1, dp_rank)
            self._odd = (batch, dp_rank), rows
        _, _, passes, lanes, places = rows
        of_pass = passes == pass_number
        ids = np.unique(self._locate(passes[of_pass], lanes[of_pass], places[of_pass])[0])
        at = np.full(len(ids), batch, dtype=np.int64)
        return ids, at, at

    def _regular_intervals(
        self, pass_number: int, batches: range, stretch: range, dp_rank: int
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return intervals over full batches of a pass that begin in a stretch: ids, first, last; int64 [n] each."""
        num_lanes, size = self.settings.lanes, self.global_batch_size
        origin = pass_number * self.samples_per_pass - self.first_row
        low, high = self.rank_lanes(dp_rank)
        start = (stretch[0] * size - origin) // num_lanes
        stop = ((stretch[-1] + 1) * size - 1 - origin) // num_lanes + 1
        parts = self.order(pass_number).lane_parts(low, high, start, stop)
        # The batches that hold the lane positions at which the parts may be due.
        first = np.maximum((origin + parts.begins * num_lanes + parts.lanes) // size, batches[0])
        last = np.minimum((origin + (parts.ends - 1) * num_lanes + parts.lanes) // size, batches[-1])
        if parts.goes_on is not None:
            first = np.maximum(first, stretch[0])
            last = np.where(parts.goes_on, min(stretch[-1] + 1, batches[-1]), last)
        due = (first <= last) & (first >= stretch[0]) & (first <= stretch[-1])
        return parts.chunk_ids[due], first[due], last[due]

    def rank_lanes(self, dp_rank: int) -> tuple[int, int]:
        """Return the lanes ``[low, high)`` from which this rank may hold a row in a full batch inside one pass."""
        size, num_lanes = self.global_batch_size, self.settings.lanes
        low, high = self.shape.share(size, dp_rank)
        if self.last_batch == "pad":
            high = max(high, low + 1)  # without a sample of its own, a rank pads with another rank's
        if high <= low:
            return 0, 0
        # If the lanes do not divide the batch, the lane at which it starts matters.
        begins = np.arange(num_lanes if size % num_lanes else 1, dtype=np.int64)
        batch = np.repeat(np.arange(len(begins)), 2)
        lanes, _ = deal_by_lane(begins, begins + size, batch, np.tile([low, high - 1], len(begins)), num_lanes)
        return int(lanes.min()), int(lanes.max()) + 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Slices:
    """The shares of one rank in some batches, int64 [B] each.

    ``starts`` and ``stops`` are stream positions. Of a batch's positions ordered by lane, the rank holds ``counts``
    from ``lows`` on. ``rows`` are its rows, including padding.
    """

    starts: Int64Array
    stops: Int64Array
    lows: Int64Array
    counts: Int64Array
    rows: Int64Array


class _Passes:
    """The units in which a plan is evaluated, and those examined first: passes, whose chunks never change."""

    most_samples = MAX_COUNT  # in all epochs

    def batches(self, plan: Plan) -> int:
        """See ``Plan.stretch_batches``."""
        return max(plan.num_batches, 1)

    def first(self, plan: Plan) -> tuple[list[tuple[int, range]], bool]:
        """Return the stretches that are examined first, with their passes, and whether these are all."""
        passes = plan.passes[:PASSES_LOOKED_AT]
        return [(number, plan._touched(number)) for number in passes], len(passes) == len(plan.passes)

    def look(self, plan: Plan, looked_at: Sequence[tuple[int, range]], dp_rank: int) -> list[ChunkIntervals]:
        """Return the intervals of some stretches; the plan keeps them until they are due."""
        rank, known = plan._looked
        found = {each: known[each] if rank == dp_rank and each in known else plan._intervals(*each, dp_rank)
                 for each in looked_at}  # fmt: skip
        plan._looked = dp_rank, found
        return list(found.values())

    def joined(self, parts: Iterable[ChunkIntervals]) -> ChunkIntervals:
        """Merge intervals of passes, or of stretches of an endless pass, which may share chunks."""
        return ChunkIntervals.joined(parts)

    def live_bytes(self, plan: Plan, looked_at: Sequence[tuple[int, range]], sizes: Int64Array, dp_rank: int) -> int:
        """Return the maximum bytes that a rank needs at once in the examined stretches, if there are others."""
        return self.joined(self.look(plan, looked_at, dp_rank)).live_bytes(sizes)


class _Stretches(_Passes):
    """Parts of one endless pass. Its mix may change until it is planned, so nothing is kept."""

    most_samples = ENDLESS

    @override
    def batches(self, plan: Plan) -> int:
        return plan.batches_on(plan.orders.stretch)

    @override
    def first(self, plan: Plan) -> tuple[list[tuple[int, range]], bool]:
        step, size = plan.batches_on(max(2 * plan.settings.window, LEAST_STRETCH)), plan.global_batch_size
        changed = [(border - plan.first_row) // size for border in plan.orders.borders]
        changed = [batch for batch in changed if 0 < batch < plan.num_batches]
        changed = changed[:: -(-len(changed) // PASSES_LOOKED_AT)] if changed else []
        stop = -(-plan.num_batches // step)
        numbers = {*range(min(4 * PASSES_LOOKED_AT, stop))}
        for batch in changed:  # the stretches after each of the next few changes of the mix
            numbers |= {*range(batch // step, min(batch // step + PASSES_LOOKED_AT, stop))}
        found = [range(number * step, min((number + 1) * step, plan.num_batches)) for number in sorted(numbers)]
        return [(0, stretch) for stretch in found], len(numbers) == stop

    @override
    def look(self, plan: Plan, looked_at: Sequence[tuple[int, range]], dp_rank: int) -> list[ChunkIntervals]:
        return [plan._intervals(*each, dp_rank) for each in looked_at]

    @override
    def joined(self, parts: Iterable[ChunkIntervals]) -> ChunkIntervals:
        found = ChunkIntervals.joined(parts)
        return ChunkIntervals.merged(found.chunk_ids, found.first_batches, found.last_batches, 0)

    @override
    def live_bytes(self, plan: Plan, looked_at: Sequence[tuple[int, range]], sizes: Int64Array, dp_rank: int) -> int:
        """See ``_Passes``.

        Consecutive stretches are skipped if they cannot change the result, or hardly: when everything is needed at
        once, or when twice as many stretches, with many uses of chunks of all sources, needed hardly more.
        """
        found: list[ChunkIntervals] = []
        num_uses = num_stretches = behind = live = 0
        is_enough = False
        for each in looked_at:
            if each[1].start != behind:
                num_uses, num_stretches, is_enough = 0, 0, False
            behind = each[1].stop
            if is_enough:
                continue
            found.append(plan._intervals(*each, dp_rank))
            num_uses, num_stretches = num_uses + len(found[-1].chunk_ids), num_stretches + 1
            if num_stretches & num_stretches - 1 == 0:  # 1, 2, 4, …
                before, live = live, self.joined(found).live_bytes(sizes)
                if _with_others(live, sizes) == sizes.sum():
                    return live
                is_mixed = num_stretches * len(each[1]) >= plan.batches_on(plan.orders.mixed_after)
                is_enough = num_uses >= _MANY_USES and is_mixed and num_stretches > 1 and live <= before * _HARDLY_MORE
        return self.joined(found).live_bytes(sizes)


def dealt(plan: Plan, positions: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return pass, lane and place in the lane of stream positions of a plan, int64 [n] each."""
    passes, within = np.divmod(positions, plan.samples_per_pass)
    places, lanes = np.divmod(within, plan.settings.lanes)
    return passes, lanes, places


def _with_others(live_bytes: int, sizes: Int64Array) -> int:
    """Return an upper bound for all passes and stretches, given the bound of the examined ones."""
    return min(live_bytes + -(-live_bytes // 9), int(sizes.sum()))


def _below(position: int, lane: int, num_lanes: int) -> int:
    """Return the number of positions of a pass before ``position`` that belong to lanes below ``lane``."""
    return position // num_lanes * lane + min(position % num_lanes, lane)
