"""Turn the plan into work: the units that one rank's batches need, from which batch on, and until which."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from streaming.order.plan.plan import Plan, RankBatches
from streaming.shards.fetch.chunks import Table
from streaming.shards.fetch.read import FetchRange
from streaming.types import Int64Array

BLOCK_SAMPLES = 16_384
"""Rows planned at once. A block takes a few milliseconds to evaluate, and far less per row than a small one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A unit that this rank's batches ``first_batch`` to (at most) ``last_batch`` use, in a pass of the stream.

    The pass is not set for slices, which no packed dataset has.
    """

    unit: int
    first_batch: int
    last_batch: int
    pass_number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Planned batches ``[first, last)`` of one rank.

    Attributes:
        first: First batch.
        last: One past the last batch.
        rows: The n rows of these batches.
        units: int64 [n], the unit that holds each row.
        within: int64 [n], the number of the row's sample in its unit, not counting the ``lead`` of the unit's
            ``wanted``.
    """

    first: int
    last: int
    rows: RankBatches
    units: Int64Array
    within: Int64Array


class Units(Protocol):
    """The pieces fetched for one rank's share of a plan. Not thread-safe.

    A unit is a small number. ``needs`` lists units in the order of their first use; it may be ahead of ``block``.
    """

    def block(self, first: int, last: int) -> Block:
        """Return the rows of batches ``[first, last)``."""

    def needs(self) -> Iterator[Need]:
        """Yield every need of the rank's remaining batches, sorted by ``first_batch``."""

    def wanted(self, unit: int) -> FetchRange:
        """Return the byte range of a unit, which may begin with other samples (``FetchRange.lead``)."""


class WholeChunks:
    """Units are whole chunks, in the order in which the lanes reach them."""

    def __init__(self, plan: Plan, dp_rank: int, source: Table) -> None:
        self._plan = plan
        self._dp_rank = dp_rank
        self._source = source

    def block(self, first: int, last: int) -> Block:
        """See ``Units``."""
        rows = self._plan.rank_batches(first, last, self._dp_rank)
        return Block(first=first, last=last, rows=rows, units=rows.chunk_ids,
                     within=self._source.samples_of(rows.chunk_ids, rows.offsets))  # fmt: skip

    def needs(self) -> Iterator[Need]:
        """See ``Units``."""
        for live in self._plan.needs_by_pass(self._dp_rank):
            columns = zip(live.chunk_ids, live.first_batches, live.last_batches, live.passes, strict=True)
            for unit, first_batch, last_batch, number in columns:
                yield Need(
                    unit=int(unit), first_batch=int(first_batch), last_batch=int(last_batch), pass_number=int(number)
                )

    def wanted(self, unit: int) -> FetchRange:
        """See ``Units``."""
        return self._source.chunk(unit)


class BatchSlices:
    """Units are the runs of consecutive samples that one batch needs.

    Used for plans in storage order over several ranks, where otherwise every rank that needs a slice of a chunk would
    read the whole chunk.
    """

    def __init__(self, plan: Plan, dp_rank: int, source: Table) -> None:
        assert source.slices is not None, "a demand is sliced only where parts of chunks can be read"  # noqa: S101
        self._plan = plan
        self._dp_rank = dp_rank
        self._source, self._slices = source, source.slices
        self._first_unit: dict[int, int] = {}
        self._runs: list[tuple[int, int, int]] = []
        rows_per_batch = max(1, plan.global_batch_size // plan.dp_world_size)
        self._step = max(1, BLOCK_SAMPLES // rows_per_batch)

    def block(self, first: int, last: int) -> Block:
        """See ``Units``."""
        rows = self._plan.rank_batches(first, last, self._dp_rank)
        units, within = np.empty_like(rows.chunk_ids), np.empty_like(rows.chunk_ids)
        inside = self._source.samples_of(rows.chunk_ids, rows.offsets)
        for batch in range(first, last):
            span = slice(int(rows.row_splits[batch - first]), int(rows.row_splits[batch - first + 1]))
            units[span], within[span] = self._slice(batch, rows.chunk_ids[span], inside[span])
        return Block(first=first, last=last, rows=rows, units=units, within=within)

    def needs(self) -> Iterator[Need]:
        """See ``Units``."""
        for first in range(0, self._plan.num_batches, self._step):
            block = self.block(first, min(first + self._step, self._plan.num_batches))
            for batch in range(block.first, block.last):
                low, high = block.rows.row_splits[batch - first : batch - first + 2].tolist()
                for unit in np.unique(block.units[low:high]).tolist():
                    yield Need(unit=unit, first_batch=batch, last_batch=batch)

    def wanted(self, unit: int) -> FetchRange:
        """See ``Units``."""
        return self._slices.slice(*self._runs[unit])

    def _slice(self, batch: int, chunk_ids: Int64Array, inside: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the unit of each row of one batch and its place there; the same batch always gets the same units."""
        known = self._first_unit.setdefault(batch, len(self._runs))
        chunks, inverse = np.unique(chunk_ids, return_inverse=True)
        lows = np.full(len(chunks), np.iinfo(np.int64).max)
        highs = np.zeros(len(chunks), np.int64)
        np.minimum.at(lows, inverse, inside)
        np.maximum.at(highs, inverse, inside + 1)
        if known == len(self._runs):
            self._runs.extend(zip(chunks.tolist(), lows.tolist(), highs.tolist(), strict=True))
        return known + inverse, inside - lows[inverse]


class ChunksInTurns:
    """Units are chunks, each in memory only while batches use it, or single samples of chunks too large for a batch.

    For plans that need more memory at once than there is. A chunk's uses in consecutive batches are one need. Between
    needs it may leave memory and be fetched again. So only the units of one batch must be in memory together, and these
    fit. If the chunks of a batch do not fit together, the largest are read sample by sample, provided the source has
    slices.

    Args:
        plan: The plan.
        dp_rank: The data-parallel rank.
        source: The dataset.
        sizes: int64 [C], bytes of memory per chunk.
        room_bytes: Memory for the units of a batch.
        slice_room: Returns the memory that a slice takes, given its bytes.
    """

    def __init__(
        self, plan: Plan, dp_rank: int, source: Table, *, sizes: Int64Array, room_bytes: int,
        slice_room: Callable[[int], int],
    ) -> None:  # fmt: skip
        self._plan, self._dp_rank, self._source = plan, dp_rank, source
        self._sizes, self._room_bytes = sizes, room_bytes
        self._slices, self._slice_room = source.slices, slice_room
        self._num_chunks = len(sizes)
        self._samples: list[tuple[int, int]] = []
        self._slice_of: dict[tuple[int, int], int] = {}
        rows_per_batch = max(1, plan.global_batch_size // plan.dp_world_size)
        self._step = max(1, min(BLOCK_SAMPLES // rows_per_batch, plan.stretch_batches))

    def block(self, first: int, last: int) -> Block:
        """See ``Units``."""
        rows = self._plan.rank_batches(first, last, self._dp_rank)
        within = self._source.samples_of(rows.chunk_ids, rows.offsets)
        units = rows.chunk_ids.copy()
        for batch in self._crowded(rows):
            span = slice(*rows.row_splits[batch : batch + 2].tolist())
            units[span], within[span] = self._cut(units[span], within[span])
        return Block(first=first, last=last, rows=rows, units=units, within=within)

    def needs(self, first: int = 0) -> Iterator[Need]:
        """See ``Units``; from batch ``first`` on."""
        for low in range(first, self._plan.num_batches, self._step):
            block = self.block(low, min(low + self._step, self._plan.num_batches))
            batches = np.repeat(np.arange(block.first, block.last), np.diff(block.rows.row_splits))
            columns = _consecutive(block.units, block.rows.passes, batches)
            for unit, number, first_batch, last_batch in zip(*(column.tolist() for column in columns), strict=True):
                yield Need(unit=unit, first_batch=first_batch, last_batch=last_batch, pass_number=number)

    def wanted(self, unit: int) -> FetchRange:
        """See ``Units``."""
        if unit < self._num_chunks:
            return self._source.chunk(unit)
        return self._slice(*self._samples[unit - self._num_chunks])

    def _slice(self, chunk: int, sample: int) -> FetchRange:
        assert self._slices is not None, "only chunks that have parts are cut"  # noqa: S101
        return self._slices.slice(chunk, sample, sample + 1)

    def _crowded(self, rows: RankBatches) -> list[int]:
        """Return the batches of these rows whose chunks do not fit, numbered within the batches of the rows."""
        if self._slices is None:
            return []
        batches = np.repeat(np.arange(len(rows.row_splits) - 1), np.diff(rows.row_splits))
        pairs = np.unique(batches * self._num_chunks + rows.chunk_ids)
        taken = np.bincount(pairs // self._num_chunks, self._sizes[pairs % self._num_chunks])
        return np.flatnonzero(taken > self._room_bytes).tolist()

    def _cut(self, chunk_ids: Int64Array, inside: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the unit of each row of one batch, and the row's place in it, such that all units fit."""
        units, within = chunk_ids.copy(), inside.copy()
        different = np.unique(chunk_ids)
        left = int(self._sizes[different].sum()) - self._room_bytes
        for chunk in different[np.argsort(-self._sizes[different], kind="stable")].tolist():
            if left <= 0:
                break
            rows = np.flatnonzero(chunk_ids == chunk)
            found = [self._slice(chunk, sample) for sample in inside[rows].tolist()]
            saved = int(self._sizes[chunk]) - sum({one.key: self._slice_room(one.num_bytes) for one in found}.values())
            if saved > 0:
                units[rows] = [self._slice_of_sample(chunk, sample) for sample in inside[rows].tolist()]
                within[rows], left = 0, left - saved
        return units, within

    def _slice_of_sample(self, chunk: int, sample: int) -> int:
        """Return the unit of a single sample of a chunk; a sample always gets the same unit."""
        number = self._slice_of.setdefault((chunk, sample), len(self._samples))
        if number == len(self._samples):
            self._samples.append((chunk, sample))
        return self._num_chunks + number


def _consecutive(
    units: Int64Array, passes: Int64Array, batches: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """Return unit, pass, first and last batch of each run of consecutive batches that use a unit, by first batch."""
    by_unit = np.lexsort((batches, passes, units))
    units, passes, batches = units[by_unit], passes[by_unit], batches[by_unit]
    begins = (np.diff(units, prepend=-1) != 0) | (np.diff(passes, prepend=-1) != 0) | (np.diff(batches, prepend=-1) > 1)
    firsts = np.flatnonzero(begins)
    lasts = np.append(firsts, len(units))[1:] - 1
    by_time = np.argsort(batches[firsts], kind="stable")
    firsts, lasts = firsts[by_time], lasts[by_time]
    return units[firsts], passes[firsts], batches[firsts], batches[lasts]
