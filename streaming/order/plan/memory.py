"""Compute the memory that a plan needs: the arithmetic that the loop obeys and ``shard_tools plan`` prints.

A rank's ``memory_limit`` is divided: chunks get three quarters. The rest is for batches that are built but not yet
delivered and, for a packed dataset, for the data that packs are made from. The chunks that a plan needs at once must
fit into the part for chunks; the remainder of that part is used for read-ahead::

    memory_limit   |------------- chunks: 75 % -------------|-- batches --|
                   |--- live ---|- read ahead: <= 256 MiB -|

Chunks take whole pages, so all sizes here are those of :func:`whole_pages`.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self, TypeAlias

import numpy as np
import numpy.typing as npt

from streaming.common.arrays import sums
from streaming.order.plan.order import EpochOrders, OrderSettings
from streaming.order.plan.plan import Plan
from streaming.types import SPAN_BYTES, Int64Array

Spans: TypeAlias = tuple[Int64Array, Int64Array]
PAGE_BYTES = mmap.PAGESIZE
LEAST_MAPPED_BYTES = 256 << 10
"""Smaller chunks of local files are copied: a copy costs no more than the system calls for a mapping."""
READ_AHEAD_BYTES = 256 << 20
"""Maximum bytes that the reader runs ahead. More would slow down the start, because first-touch page faults take longer
than filling the memory."""
MOST_FOR_PACKS = 256 << 20
"""Half of it holds a thousand groups of 256 packs of 8,192 tokens, made of documents of 600 tokens each."""
CHUNKS_SHARE = 0.75
"""Fraction of memory_limit for chunks; the rest is for batches that are built but not yet delivered."""
BATCHES_BESIDE = (
    ". That is for chunks; batches get the rest of the limit, and their size is known once they are made: if "
    "they prove too large for it, a warning names a larger limit"
)
"""The end of each refusal, after the limit that it recommends."""
EPOCHS_VARY = 0.9
"""Safety margin of recommendations: each epoch combines different chunks, and chunks differ in size."""


def whole_pages(sizes: npt.ArrayLike) -> Int64Array:
    """Return the memory that chunks of these sizes take in the arena, int64, any shape."""
    given = np.asarray(sizes, dtype=np.int64)
    return np.asarray(-(-given // PAGE_BYTES) * PAGE_BYTES, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Budget:
    """A rank's ``memory_limit``, divided.

    Attributes:
        limit_bytes: Upper bound on everything that the rank buffers.
        packs_bytes: The part for data that packs are made from; 0: there are no packs.
    """

    limit_bytes: int
    packs_bytes: int = 0

    @classmethod
    def of(cls, limit_bytes: int, *, packs: bool) -> Self:
        """Return the budget of a dataset with or without packs; packs get a quarter of the part for batches."""
        return cls(limit_bytes, min(int(limit_bytes * (1 - CHUNKS_SHARE)) // 4, MOST_FOR_PACKS) if packs else 0)

    @property
    def chunks_bytes(self) -> int:
        """The part for chunks."""
        return int(self.limit_bytes * CHUNKS_SHARE)

    @property
    def batches_bytes(self) -> int:
        """The part for batches that are built but not yet delivered."""
        return int(self.limit_bytes * (1 - CHUNKS_SHARE)) - self.packs_bytes

    @property
    def recommended_bytes(self) -> int:
        """The part for chunks, with a margin for other epochs."""
        return int(self.chunks_bytes * EPOCHS_VARY)

    @property
    def parts(self) -> dict[str, int]:
        """The parts by name, without empty ones."""
        found = {"chunks": self.chunks_bytes, "batches": self.batches_bytes, "packs": self.packs_bytes}
        return {name: size for name, size in found.items() if size}

    def with_read_ahead(self, live_bytes: int) -> int:
        """Return the maximum bytes that chunks take: ``live_bytes``, which are needed at once, plus read-ahead."""
        return min(self.chunks_bytes, live_bytes + READ_AHEAD_BYTES)

    def holds(self, all_bytes: int) -> bool:
        """Return whether all chunks of a dataset fit, as for most small datasets."""
        return all_bytes <= min(READ_AHEAD_BYTES, self.chunks_bytes)


def needed_mib(chunks_bytes: int) -> int:
    """Return a ``memory_limit``, in MiB, into which this many bytes of chunks fit in every epoch."""
    return math.ceil(chunks_bytes / CHUNKS_SHARE / EPOCHS_VARY / (16 << 20)) * 16


def enough_for_batches_mib(batches_bytes: int) -> int:
    """Return a ``memory_limit``, in MiB, that leaves this many bytes for batches."""
    return math.ceil(batches_bytes / (1 - CHUNKS_SHARE) / (16 << 20)) * 16


def least_mib(chunks_bytes: int) -> int:
    """Return the least ``memory_limit``, in MiB, that gives chunks this many bytes."""
    return math.ceil(chunks_bytes / CHUNKS_SHARE / (1 << 20))


def most_of_a_batch(plan: Plan, sizes: Int64Array) -> int:
    """Return an upper bound on the memory for the chunks of a rank's share of a batch, in every order.

    It is the bound of :func:`most_of_rows`. If whole chunks are laid end to end, rows come from one run of samples per
    lane, extended by the window; then only the chunks that these runs touch count.

    Args:
        plan: The plan.
        sizes: int64 [C], memory that each chunk takes.
    """
    most = most_of_rows(plan, sizes)
    if not isinstance(plan.orders, EpochOrders):
        return most
    there = plan.chunk_samples > 0
    sizes, counts = sizes[there], plan.chunk_samples[there]
    num_runs, num_samples = _runs_of_a_batch(plan)
    # The first and last chunk of a run may have a single sample in it; chunks in between lie in it with all samples.
    left = max(num_samples - 2 * num_runs, 0)
    densest = np.argsort(-sizes / counts, kind="stable")
    inside = np.clip(left - sums(counts[densest])[:-1], 0, counts[densest]) / counts[densest]
    between = math.ceil(float((inside * sizes[densest]).sum()))
    return min(most, _largest(sizes, 2 * num_runs) + between)


def most_of_rows(plan: Plan, sizes: Int64Array) -> int:
    """Return the memory for the largest pieces, one for each row of a rank's share of a batch.

    Args:
        plan: The plan.
        sizes: int64 [n], memory of each piece: a chunk, or the span of a sample.
    """
    return _largest(sizes, plan.shape.most_rows)


def _largest(sizes: Int64Array, count: int) -> int:
    """Return the sum of the largest ``count`` sizes."""
    first = max(len(sizes) - count, 0)
    return int(np.partition(sizes, first)[first:].sum()) if first else int(sizes.sum())


def _runs_of_a_batch(plan: Plan) -> tuple[int, int]:
    """Return the number of runs of samples that contain a rank's share of a batch, and the samples in these runs."""
    lanes, window, size, rows = plan.settings.lanes, plan.settings.window, plan.global_batch_size, plan.shape.most_rows
    is_even = size % lanes == 0 and lanes % plan.dp_world_size == 0
    num_lanes = min(-(-rows * lanes // size) + (not is_even), lanes)
    passes = 1 if plan.num_samples == plan.samples_per_pass else -(-size // plan.samples_per_pass) + 1
    num_runs = num_lanes * passes
    return num_runs, num_lanes * -(-size // lanes) + num_runs * 2 * max(window - 1, 0)


def reads_slices(plan: Plan, chunk_bytes: Int64Array, memory: Budget) -> bool:
    """Return whether ranks that share a storage order read slices of chunks, instead of each reading all chunks.

    A slice is widened to borders of spans, by 64 KiB in total on average. If a rank's share of a batch plus this is at
    least the batch, each rank reads everything in any case, and whole chunks take far fewer requests.

    Args:
        plan: The plan; several ranks read the same chunks only in storage order.
        chunk_bytes: int64 [C], size of each chunk.
        memory: A rank's ``memory_limit``; if whole chunks do not fit, slices are read.
    """
    if plan.settings.shuffle or plan.dp_world_size == 1:
        return False
    sample_bytes = int(chunk_bytes.sum()) / plan.samples_per_pass
    if plan.shape.most_rows * sample_bytes + SPAN_BYTES < plan.global_batch_size * sample_bytes:
        return True
    return plan.live_bytes(whole_pages(chunk_bytes), 0) > memory.chunks_bytes


def slices_bytes(plan: Plan, room_bytes: Int64Array, spans: Callable[[], Spans], memory: Budget) -> int:
    """Return an upper bound on the memory for a rank's share of any batch, read as slices of chunks.

    It holds for every rank, epoch and start, because it is the bound of the largest run of that many samples. If whole
    chunks fit, they give the bound; otherwise the sample tables are needed.

    Args:
        plan: The plan.
        room_bytes: int64 [C], :func:`whole_pages` of each chunk.
        spans: The first sample of each span, and where each begins in chunks laid end to end, ``room_bytes`` each.
        memory: A rank's ``memory_limit``.
    """
    firsts = np.cumsum(plan.chunk_samples) - plan.chunk_samples
    bound = _largest_run(plan, firsts, np.cumsum(room_bytes) - room_bytes, int(room_bytes.sum()))
    if bound <= memory.chunks_bytes:
        return bound
    edges = 4 * PAGE_BYTES  # the first and the last slice are rounded to whole pages at both ends
    return min(bound, _largest_run(plan, *spans(), int(room_bytes.sum())) + edges)


def _largest_run(plan: Plan, firsts: Int64Array, begins: Int64Array, total_bytes: int) -> int:
    """Return the maximum bytes of pieces touched by a run of samples as long as a rank's share of a batch.

    Args:
        plan: The plan. If its epochs are not whole passes, a run may wrap from the end of a pass to its beginning.
        firsts: int64 [n], first sample of each piece, in storage order; the first is 0.
        begins: int64 [n], first byte of each.
        total_bytes: Bytes of all pieces.
    """
    rows, num_samples = plan.shape.most_rows, plan.samples_per_pass
    wraps = plan.num_samples != num_samples
    if rows >= num_samples or (wraps and rows > num_samples - int(plan.chunk_samples.max())):
        return total_bytes
    # Among the runs that end in a piece, the one that ends with its first sample reaches back farthest.
    starts = firsts - (rows - 1)
    before = starts < 0
    starts = np.where(before, starts + num_samples if wraps else 0, starts)
    lows = begins[np.searchsorted(firsts, starts, side="right") - 1]
    highs = np.append(begins[1:], total_bytes) + (total_bytes * before if wraps else 0)
    return min(int((highs - lows).max()), total_bytes)


def cures_of_lanes(plan: Plan, chunk_bytes: Int64Array, dp_rank: int, limit_bytes: int, *, whole: bool) -> str:
    """Recommend fewer lanes than the plan has, such that it fits with a margin for other epochs; "" if none do.

    Args:
        plan: The plan.
        chunk_bytes: int64 [C], memory that each chunk takes.
        dp_rank: The data-parallel rank.
        limit_bytes: Memory for chunks.
        whole: Whether samples can be read only with their whole chunks.
    """
    lanes = plan.settings.lanes
    divides = plan.global_batch_size % lanes == 0
    while lanes > 1:
        lanes //= 2
        if divides and plan.global_batch_size % lanes:
            continue
        world_size = plan.dp_world_size
        if _fits(plan, chunk_bytes, [dp_rank], limit_bytes, lanes=lanes, dp_world_size=world_size, whole=whole):
            return f", or fewer lanes: ShuffleConfig(lanes={lanes}), or a smaller window"
    return ""


def cures_of_resumed(plan: Plan, chunk_bytes: Int64Array, _: int, limit_bytes: int, *, whole: bool) -> str:
    """Recommend a cure if lanes and window are fixed: more ranks, which share the lanes, or another order."""
    lanes, enough = plan.settings.lanes, plan.dp_world_size
    if lanes == 1:
        return ""
    most = min(lanes, plan.global_batch_size)
    while enough < most:
        enough = min(2 * enough, most)
        if _fits(plan, chunk_bytes, range(enough), limit_bytes, lanes=lanes, dp_world_size=enough, whole=whole):
            break
    else:
        enough = 0
    return (f", or {enough} data-parallel ranks" if enough else "") + (
        ". Lanes and window come from the loaded state: to change them, give up the rest of this epoch, with "
        f"another loader that loads no state but calls set_epoch({plan.epoch + 1})"
    )


def _fits(
    plan: Plan, chunk_bytes: Int64Array, dp_ranks: Iterable[int], limit_bytes: int, *, lanes: int, dp_world_size: int,
    whole: bool,
) -> bool:  # fmt: skip
    """Return whether the plan with other lanes or ranks fits on these ranks, with a margin for other epochs."""
    settings = OrderSettings(**{**plan.settings.to_dict(), "lanes": lanes})
    other = Plan(
        plan.chunk_samples,
        settings,
        global_batch_size=plan.global_batch_size,
        dp_world_size=dp_world_size,
        last_batch=plan.last_batch,
        epoch=plan.epoch,
        epoch_size=plan.num_samples,
        orders=plan.orders.under(settings),
    )
    if whole and most_of_a_batch(other, chunk_bytes) > limit_bytes:
        return False
    return all(other.live_bytes(chunk_bytes, rank) <= limit_bytes * EPOCHS_VARY for rank in dp_ranks)
