"""Compute what one data rank reads and holds under a plan, using the planner of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from shard_tools.look.plan.sources import Reads
from streaming.common.arrays import sums
from streaming.order.plan.demand import ChunkMemory, Demand
from streaming.order.plan.plan import Plan
from streaming.types import SPAN_BYTES, Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    """One data rank's part of an epoch.

    Reads are upper bounds without retries: training may find a chunk in memory that it was free to drop.

    Attributes:
        dp_rank: The data-parallel rank.
        ranks: The processes that receive this share, by replica rank.
        lanes: Its lanes, ``[first, last)``.
        num_samples: Samples that it receives, without padding.
        num_chunks: Distinct chunks that it reads from.
        num_requests: Ranged GETs.
        read_bytes: Bytes of these requests.
        start_requests: Requests that the first batch waits for; an upper bound if there are many ranks (``Loads.of``).
        start_bytes: Bytes of the start requests.
        live_bytes: Maximum that must be in memory at the same time.
        limit_bytes: Upper bound for chunks, ``arena_limit_bytes`` of ``loader.metrics()``: live chunks and read-ahead,
            or all memory that the limit leaves for chunks.
        held_bytes: Memory that chunks use, ``arena_peak_bytes``: at most the bytes of all chunks read.
        keeps_all: All its chunks fit in memory: each is fetched once and kept for the next epoch.
        amplification: Bytes read per byte delivered (samples times their mean size).
        fetched: int64 [n], the chunk of each fetch; None if slices are read. Not in the JSON-able form.
    """

    dp_rank: int
    ranks: tuple[int, ...]
    lanes: tuple[int, int]
    num_samples: int
    num_chunks: int
    num_requests: int
    read_bytes: int
    start_requests: int
    start_bytes: int
    live_bytes: int
    limit_bytes: int
    held_bytes: int
    keeps_all: bool
    amplification: float
    fetched: Int64Array | None = field(default=None, repr=False, compare=False)

    def as_dict(self) -> dict[str, object]:
        """Return the JSON-able form."""
        names = [name for name in self.__dataclass_fields__ if name != "fetched"]
        values: dict[str, object] = {name: getattr(self, name) for name in names}
        return {**values, "ranks": list(self.ranks), "lanes": list(self.lanes)}


class Loads:
    """Loads of the ranks of an epoch. Immutable, like its plans.

    Args:
        plans: The plans of the epoch, one per batch size.
        reads: Bytes and requests per chunk.
        rooms: The memory for chunks.
        run: The plans of a run without end that begins with this epoch; memory is sized for the whole run.
    """

    def __init__(self, plans: Sequence[Plan], reads: Reads, rooms: ChunkMemory, run: Sequence[Plan] = ()) -> None:
        self.plans, self.reads, self.rooms = tuple(plans), reads, rooms
        self.plan = self.plans[0]
        self.chunk_bytes = rooms.chunk_bytes
        self._demands: dict[tuple[Plan, int], Demand] = {}
        self._in_slices = [plan for plan in self.plans if self._demand(plan, 0).is_sliced]
        self._in_chunks = [plan for plan in self.plans if plan not in self._in_slices]
        self.held = list(run) or self._in_chunks

    def _demand(self, plan: Plan, dp_rank: int) -> Demand:
        """Return the demand of a rank under a plan, computed once."""
        if (plan, dp_rank) not in self._demands:
            self._demands[plan, dp_rank] = self.rooms.demand(plan, dp_rank)
        return self._demands[plan, dp_rank]

    @property
    def sliced(self) -> bool:
        """Whether only slices of chunks are read."""
        return not self._in_chunks

    @property
    def unit(self) -> str:
        """The unit of a request: ``"chunk"``, ``"slice"`` or both."""
        return " or ".join((["chunk"] if self._in_chunks else []) + (["slice"] if self._in_slices else []))

    @property
    def num_rows(self) -> int:
        """Number of delivered samples of the epoch."""
        last = self.plans[-1]
        return min(last.start + last.num_batches * last.global_batch_size, last.num_samples)

    @property
    def num_batches(self) -> int:
        """Number of batches of the epoch."""
        return sum(plan.num_batches for plan in self.plans)

    def step_of(self, row: int) -> int:
        """Return the number of the batch that holds a row of the epoch."""
        step = 0
        for plan in self.plans:
            step += max(0, min(plan.num_batches, (row - plan.start) // plan.global_batch_size))
        return step

    def num_samples(self, dp_rank: int) -> int:
        """Return the number of samples that a rank receives in the whole epoch, without padding."""
        found = 0
        for plan in self.plans:
            rows = min(plan.num_batches * plan.global_batch_size, plan.num_samples - plan.start)
            whole, tail = divmod(rows, plan.global_batch_size)
            for times, size in ((whole, plan.global_batch_size), (1, tail)):
                low, high = plan.shape.share(size, dp_rank)
                found += times * (high - low)
        return found

    def of(self, dp_rank: int, ranks: tuple[int, ...], *, exact: bool = True) -> RankLoad:
        """Return the load of one rank; ``ranks`` are the processes that receive its share.

        Unless ``exact``, the count includes chunks that only the closed form counts, which saves some ms per rank.
        """
        if not self._in_slices:
            return self._of_chunks(dp_rank, ranks, exact=exact)
        slices = self._of_slices(dp_rank, ranks)
        if not self._in_chunks:
            return slices
        chunks = self._of_chunks(dp_rank, ranks, exact=exact)
        first = slices if self.plan in self._in_slices else chunks
        return self._load(
            dp_rank, ranks, num_chunks=max(chunks.num_chunks, slices.num_chunks),
            num_requests=chunks.num_requests + slices.num_requests, read_bytes=chunks.read_bytes + slices.read_bytes,
            start_requests=first.start_requests, start_bytes=first.start_bytes,
            live_bytes=max(chunks.live_bytes, slices.live_bytes),
            limit_bytes=max(chunks.limit_bytes, slices.limit_bytes),
            held_bytes=max(chunks.held_bytes, slices.held_bytes), keeps_all=False,
        )  # fmt: skip

    def check_memory(self) -> None:
        """Reject what training would reject, in this epoch or any other.

        Raises:
            MemoryLimitError: The memory needed at once does not fit; the message says what to do.
        """
        for one in self._first:
            one.check()

    @cached_property
    def _first(self) -> list[Demand]:
        """The demand at the start of the run, per batch size; training accepts or refuses by it."""
        return [self.rooms.first_demand(plan) for plan in (*self._in_slices, *self.held)]

    @property
    def least_bytes(self) -> int:
        """The smallest memory for chunks that training accepts."""
        return max(one.least_bytes for one in self._first)

    def shortage(self, load: RankLoad) -> str:
        """Explain that a rank needs more at once in this epoch than fits; "": it fits."""
        demands = (self._demand(plan, load.dp_rank) for plan in self.held)
        return next((one.shortage() for one in demands if one.is_short), "")

    def neediest(self, dp_rank: int) -> Plan:
        """Return the plan under which a rank needs the most memory at once."""
        if len(self.plans) == 1:
            return self.plan
        return max(self.plans, key=lambda plan: plan.live_bytes(self.rooms.room_bytes, dp_rank))

    def _of_chunks(self, dp_rank: int, ranks: tuple[int, ...], *, exact: bool) -> RankLoad:
        room_bytes = self.rooms.room_bytes
        demands = [self._demand(plan, dp_rank) for plan in self.held]
        live_bytes = max(demand.live_bytes for demand in demands)
        limit_bytes = max(demand.limit_bytes for demand in demands)
        live = [plan.needs(dp_rank) if exact else plan.chunk_intervals(dp_rank) for plan in self._in_chunks]
        chunk_ids = np.concatenate([one.chunk_ids for one in live])
        at_start = np.concatenate([one.first_batches == (0 if not number else -1) for number, one in enumerate(live)])
        different, first_seen = np.unique(chunk_ids, return_index=True)
        # As in the loop: with room for all its chunks, a rank fetches each of them once.
        keeps_all = limit_bytes >= int(room_bytes[different].sum())
        fetched = np.sort(first_seen) if keeps_all else np.arange(len(chunk_ids))
        chunk_ids, at_start = chunk_ids[fetched], at_start[fetched]
        sizes, requests = self.reads.num_bytes[chunk_ids], self.reads.num_requests[chunk_ids]
        return self._load(
            dp_rank,
            ranks,
            num_chunks=len(different),
            num_requests=round(requests.sum()),
            read_bytes=int(sizes.sum()),
            start_requests=round(requests[at_start].sum()),
            start_bytes=int(sizes[at_start].sum()),
            live_bytes=live_bytes,
            limit_bytes=limit_bytes,
            held_bytes=min(limit_bytes, int(room_bytes[chunk_ids].sum())),
            keeps_all=keeps_all,
            fetched=chunk_ids,
        )

    def _of_slices(self, dp_rank: int, ranks: tuple[int, ...]) -> RankLoad:
        """Count requests: batch k covers stream positions [low, high), with one request per chunk in that range."""
        lows, highs = map(np.concatenate, zip(*(_ranges(plan, dp_rank) for plan in self._in_slices), strict=True))
        low_chunks, low_bytes = self._along_stream(lows)
        high_chunks, _ = self._along_stream(highs - 1)
        _, high_bytes = self._along_stream(highs, up=True)
        requests = high_chunks - low_chunks + 1
        demands = [self._demand(plan, dp_rank) for plan in self._in_slices]
        limit_bytes = max(demand.limit_bytes for demand in demands)
        return self._load(
            dp_rank,
            ranks,
            num_chunks=_distinct(low_chunks, high_chunks, len(self.plan.chunk_samples)),
            num_requests=int(requests.sum()),
            read_bytes=int((high_bytes - low_bytes).sum()),
            start_requests=int(requests[:1].sum()),
            start_bytes=int((high_bytes - low_bytes)[:1].sum()),
            live_bytes=max(demand.live_bytes for demand in demands),
            limit_bytes=limit_bytes,
            held_bytes=limit_bytes,
            keeps_all=False,
        )

    def _along_stream(self, positions: Int64Array, *, up: bool = False) -> tuple[Int64Array, Int64Array]:
        """Find the chunk of each stream position in storage order, and the bytes before the span border there.

        The border is the last one at or before the position, or with ``up`` the first one at or after it, assuming that
        the records of a chunk have equal sizes. Chunks and bytes are counted over all passes.
        """
        chunk_starts = sums(self.plan.chunk_samples)
        byte_starts = np.cumsum(self.chunk_bytes)
        passes, within = np.divmod(positions, self.plan.samples_per_pass)
        chunks = np.searchsorted(chunk_starts, within, side="right") - 1
        counts, offsets = np.maximum(self.plan.chunk_samples[chunks], 1), within - chunk_starts[chunks]
        per_span = np.maximum(-(-SPAN_BYTES * counts // np.maximum(self.chunk_bytes[chunks], 1)), 1)
        offsets = np.minimum(-(-offsets // per_span) * per_span, counts) if up else offsets // per_span * per_span
        share = offsets / counts
        num_bytes = byte_starts[chunks] - np.round(self.chunk_bytes[chunks] * (1 - share)).astype(np.int64)
        return passes * len(self.chunk_bytes) + chunks, passes * int(byte_starts[-1]) + num_bytes

    def _load(self, dp_rank: int, ranks: tuple[int, ...], *, read_bytes: int, **more: Any) -> RankLoad:
        num_samples = self.num_samples(dp_rank)
        delivered = num_samples * self.reads.sample_bytes
        return RankLoad(
            dp_rank=dp_rank,
            ranks=ranks,
            lanes=self.plan.rank_lanes(dp_rank),
            num_samples=num_samples,
            read_bytes=read_bytes,
            amplification=read_bytes / delivered if delivered else 0.0,
            **more,
        )


def _ranges(plan: Plan, dp_rank: int) -> tuple[Int64Array, Int64Array]:
    """Return the stream positions [low, high) of each batch of a rank that has any, int64 [n] each."""
    starts = plan.epoch * plan.num_samples + plan.start
    begins = starts + np.arange(plan.num_batches, dtype=np.int64) * plan.global_batch_size
    sizes = np.minimum(plan.global_batch_size, (plan.epoch + 1) * plan.num_samples - begins)
    low, high = plan.shape.share(sizes, dp_rank)
    lows, highs = begins + low, begins + high
    if plan.last_batch == "pad":
        highs = np.maximum(highs, lows + 1)
    return lows[highs > lows], highs[highs > lows]


def _distinct(low_chunks: Int64Array, high_chunks: Int64Array, num_chunks: int) -> int:
    """Count the distinct chunks in the ascending closed ranges [low, high]; numbers repeat every ``num_chunks``."""
    if not len(low_chunks):
        return 0
    touched = np.zeros(num_chunks + 1, dtype=np.int64)
    for shift in range(int(high_chunks[-1]) // num_chunks - int(low_chunks[0]) // num_chunks + 1):
        base = (int(low_chunks[0]) // num_chunks + shift) * num_chunks
        lows, highs = np.clip(low_chunks - base, 0, num_chunks), np.clip(high_chunks + 1 - base, 0, num_chunks)
        np.add.at(touched, lows, 1)
        np.add.at(touched, highs, -1)
    return int((touched.cumsum()[:-1] > 0).sum())
