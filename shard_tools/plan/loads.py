"""Compute what one data rank reads and holds under a plan, with the planner that training uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from shard_tools.plan.sources import Reads
from streaming.arrays import sums
from streaming.index.spans import SPAN_BYTES
from streaming.plan import memory as budget
from streaming.plan.plan import Plan
from streaming.types import Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    """One data rank's part of an epoch.

    Reads are upper bounds, without retries: training may find a chunk still in memory that it was free to drop.

    Attributes:
        dp_rank: The data-parallel rank.
        ranks: The processes that receive this share, by replica rank.
        lanes: Its lanes, ``[first, last)``.
        num_samples: Samples that it receives, without padding.
        num_chunks: Distinct chunks that it reads from.
        num_requests: Ranged GETs.
        read_bytes: Bytes of these.
        start_requests: Requests that the first batch waits for.
        start_bytes: Bytes of these.
        live_bytes: Maximum that must be in memory at the same time.
        held_bytes: Memory taken by chunks: live ones and read-ahead, or all that the limit leaves for chunks.
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
    """Loads of the ranks of one plan. Immutable, like the plan."""

    def __init__(
        self,
        plan: Plan,
        chunk_bytes: Int64Array,
        reads: Reads,
        *,
        spans: Callable[[Int64Array], budget.Spans] | None,
        memory_limit_bytes: int,
    ) -> None:
        """Prepare the columns that all ranks need.

        Args:
            plan: The plan.
            chunk_bytes: int64 [C], bytes of its chunks.
            reads: What is read of them.
            spans: Returns where spans begin in chunks of given sizes; its presence means that slices of chunks can be
                read, which training does in storage order over several ranks if that saves bytes. Called if whole
                chunks might not fit.
            memory_limit_bytes: Memory limit of one rank.
        """
        self.plan, self.reads = plan, reads
        self.memory_limit_bytes = memory_limit_bytes
        self.chunk_bytes = chunk_bytes
        self.room_bytes = budget.whole_pages(chunk_bytes)
        self.sliced = spans is not None and budget.reads_slices(
            plan, self.chunk_bytes, memory_limit_bytes=memory_limit_bytes
        )
        self._slices_bytes = 0
        if self.sliced and spans is not None:
            self._slices_bytes = budget.slices_bytes(
                plan, self.room_bytes, partial(spans, self.room_bytes), memory_limit_bytes=memory_limit_bytes
            )

    def num_samples(self, dp_rank: int) -> int:
        """Return the number of samples that a rank receives in the whole plan, without padding."""
        plan = self.plan
        whole, tail = divmod(plan.num_samples - plan.start, plan.global_batch_size)
        if plan.last_batch == "drop":
            tail = 0
        sizes = ((whole, plan.global_batch_size), (1, tail))
        shares = ((times, *plan.shape.share(size, dp_rank)) for times, size in sizes)
        return sum(times * (high - low) for times, low, high in shares)

    def of(self, dp_rank: int, ranks: tuple[int, ...]) -> RankLoad:
        """Return the load of one rank; ``ranks`` are the processes that receive its share."""
        return self._of_slices(dp_rank, ranks) if self.sliced else self._of_chunks(dp_rank, ranks)

    def check_memory(self, load: RankLoad) -> None:
        """Reject what training would reject.

        Raises:
            MemoryLimitError: What this rank needs at once does not fit; the message says what to do.
        """
        limit = self.memory_limit_bytes
        if self.sliced:
            budget.check_slices(self.plan, self._slices_bytes, memory_limit_bytes=limit)
        else:
            live = load.live_bytes
            budget.check_whole_chunks(
                self.plan, self.room_bytes, load.dp_rank, live_bytes=live, memory_limit_bytes=limit
            )

    def _of_chunks(self, dp_rank: int, ranks: tuple[int, ...]) -> RankLoad:
        live_bytes = self.plan.live_bytes(self.room_bytes, dp_rank)  # as training counts it, by the intervals it keeps
        live = self.plan.chunk_intervals(dp_rank)
        different, first_seen = np.unique(live.chunk_ids, return_index=True)
        held = min(budget.chunks_bytes(self.memory_limit_bytes, live_bytes), int(self.room_bytes[live.chunk_ids].sum()))
        # The same decision as in the loop: with room for all its chunks, a rank fetches each of them once.
        keeps_all = budget.chunks_bytes(self.memory_limit_bytes, live_bytes) >= int(self.room_bytes[different].sum())
        fetched = np.sort(first_seen) if keeps_all else np.arange(len(live.chunk_ids))
        chunk_ids = live.chunk_ids[fetched]
        sizes, requests = self.reads.num_bytes[chunk_ids], self.reads.num_requests[chunk_ids]
        at_start = live.first_batches[fetched] == 0
        return self._load(
            dp_rank,
            ranks,
            num_chunks=len(different),
            num_requests=round(requests.sum()),
            read_bytes=int(sizes.sum()),
            start_requests=round(requests[at_start].sum()),
            start_bytes=int(sizes[at_start].sum()),
            live_bytes=live_bytes,
            held_bytes=held,
            keeps_all=keeps_all,
            fetched=chunk_ids,
        )

    def _of_slices(self, dp_rank: int, ranks: tuple[int, ...]) -> RankLoad:
        """Count requests: batch k covers stream positions [low, high), with one request per chunk in that range."""
        plan, size = self.plan, self.plan.global_batch_size
        starts = plan.epoch * plan.num_samples + plan.start + np.arange(plan.num_batches, dtype=np.int64) * size
        end = (plan.epoch + 1) * plan.num_samples
        sizes = np.minimum(size, end - starts)
        low, high = plan.shape.share(sizes, dp_rank)
        lows, highs = starts + low, starts + high
        if plan.last_batch == "pad":
            highs = np.maximum(highs, lows + 1)
        lows, highs = lows[highs > lows], highs[highs > lows]
        low_chunks, low_bytes = self._along_stream(lows)
        high_chunks, _ = self._along_stream(highs - 1)
        _, high_bytes = self._along_stream(highs, up=True)
        requests = high_chunks - low_chunks + 1
        return self._load(
            dp_rank,
            ranks,
            num_chunks=_distinct(low_chunks, high_chunks, len(plan.chunk_samples)),
            num_requests=int(requests.sum()),
            read_bytes=int((high_bytes - low_bytes).sum()),
            start_requests=int(requests[:1].sum()),
            start_bytes=int((high_bytes - low_bytes)[:1].sum()),
            live_bytes=self._slices_bytes,
            held_bytes=budget.chunks_limit_bytes(self.memory_limit_bytes),
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
