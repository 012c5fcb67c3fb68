"""What a plan asks of memory: the arithmetic that the loop obeys and ``shard_tools plan`` prints.

``memory_limit`` of a rank is shared out: chunks get three quarters, the rest is for batches that are built but not
handed out. What a plan needs at once must fit into the chunks' part; what is left of it serves read-ahead::

    memory_limit   |------------- chunks: 75 % -------------|-- batches --|
                   |--- live ---|- read ahead: <= 256 MiB -|

Chunks lie on whole pages, so all sizes here are those of :func:`whole_pages`.
"""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from streaming.errors import MemoryLimitError
from streaming.index.spans import SPAN_BYTES
from streaming.plan.order import Int64Array, OrderSettings, Scope, default_lanes, default_window
from streaming.plan.plan import Plan
from streaming.units import format_bytes

PAGE_BYTES = mmap.PAGESIZE
READ_AHEAD_BYTES = 256 << 20
"""How far the reader runs ahead of what is needed, memory allowing. More costs at the start:
memory that nobody touched before takes longer to come by than the bytes to put there."""
CHUNKS_SHARE = 0.75
"""Of memory_limit; the rest is for batches that are built but not handed out."""
EPOCHS_VARY = 0.9
"""Room that advice leaves: other epochs put other chunks side by side, and chunks differ in size."""


def order_settings(
    *,
    shuffle: bool,
    seed: int,
    lanes: int | None,
    window: int | None,
    global_batch_size: int,
    num_samples: int,
    num_chunks: int,
    scope: Scope = "global",
) -> OrderSettings:
    """The order of a data set under a loader: what the user chose, and defaults where he chose nothing.

    Args:
        shuffle: False: storage order, whatever ``lanes`` and ``window`` say.
        seed: Seed of the order.
        lanes: L, or None for the default of the global batch size.
        window: W in samples, or None for twice the mean number of samples per chunk.
        global_batch_size: G.
        num_samples: Samples of the data set.
        num_chunks: Its chunks.
        scope: What a pass permutes.
    """
    if not shuffle:
        return OrderSettings(seed=seed, lanes=1, window=0, shuffle=False)
    return OrderSettings(
        seed=seed,
        lanes=lanes or default_lanes(global_batch_size),
        window=default_window(num_samples, num_chunks) if window is None else window,
        scope=scope,
    )


def whole_pages(sizes: npt.ArrayLike) -> Int64Array:
    """The room that chunks of these sizes take in the arena, int64, any shape."""
    given = np.asarray(sizes, dtype=np.int64)
    return np.asarray(-(-given // PAGE_BYTES) * PAGE_BYTES, dtype=np.int64)


def chunks_limit_bytes(memory_limit_bytes: int) -> int:
    """What of ``memory_limit`` chunks may take."""
    return int(memory_limit_bytes * CHUNKS_SHARE)


def most_room(all_chunks_bytes: int) -> int:
    """What chunks of a data set may ever take: all of them, and as much again where slices overlap."""
    return 2 * all_chunks_bytes + (16 << 20)


def batches_limit_bytes(memory_limit_bytes: int) -> int:
    """What of ``memory_limit`` is for batches that are built but not handed out."""
    return int(memory_limit_bytes * (1 - CHUNKS_SHARE))


def needed_mib(chunks_bytes: int) -> int:
    """A ``memory_limit``, in MiB, in which so many bytes of chunks fit in every epoch."""
    return math.ceil(chunks_bytes / CHUNKS_SHARE / EPOCHS_VARY / (16 << 20)) * 16


def chunks_bytes(memory_limit_bytes: int, live_bytes: int) -> int:
    """What a rank's chunks take at most: all that is needed at once, and some read-ahead."""
    return min(chunks_limit_bytes(memory_limit_bytes), live_bytes + READ_AHEAD_BYTES)


def live_bytes_of_pieces(plan: Plan, whole_bytes: Int64Array, piece_bytes: Int64Array, dp_rank: int) -> int:
    """What is needed at once where chunks are read in pieces.

    A chunk is given room for all of it, and gives back what it does not need when it has come. Those that have come
    take ``piece_bytes``; the next one takes ``whole_bytes``.
    """
    return plan.live_bytes(piece_bytes, dp_rank) + int(whole_bytes.max())


def check_whole_chunks(
    plan: Plan, chunk_bytes: Int64Array, dp_rank: int, *, live_bytes: int, memory_limit_bytes: int
) -> None:
    """Refuse a plan whose live chunks do not fit.

    Args:
        plan: The plan.
        chunk_bytes: int64[C], :func:`whole_pages` of each chunk.
        dp_rank: The data-parallel rank.
        live_bytes: ``plan.live_bytes(chunk_bytes, dp_rank)``.
        memory_limit_bytes: The rank's ``memory_limit``.

    Raises:
        MemoryLimitError: They do not fit; the message holds the arithmetic and the cure.
    """
    limit_bytes = chunks_limit_bytes(memory_limit_bytes)
    if live_bytes <= limit_bytes:
        return
    lanes = -(-plan.settings.lanes // plan.dp_world_size)
    mean = int(chunk_bytes.mean())
    per_chunk = plan.samples_per_pass / len(plan.chunk_samples)
    fewer = _fitting_lanes(plan, chunk_bytes, dp_rank, limit_bytes)
    raise MemoryLimitError(
        f"memory_limit: {format_bytes(memory_limit_bytes)} are too little for this plan. Rank {dp_rank} of "
        f"{plan.dp_world_size} goes through {lanes} of {plan.settings.lanes} lanes at once; with chunks of "
        f"{format_bytes(mean)} ({per_chunk:.0f} samples) and a window of {plan.settings.window} samples it "
        f"needs up to {format_bytes(live_bytes)} of chunks at the same time, and chunks get {CHUNKS_SHARE:.0%} of "
        f'the limit. Use memory_limit="{needed_mib(live_bytes)}MiB"'
        + (f", or fewer lanes: ShuffleConfig(lanes={fewer}), or a smaller window" if fewer else "")
    )


def slices_bytes(rows: int, sample_bytes: int) -> int:
    """What a batch of ``rows`` samples takes that is read as slices of chunks.

    Its samples are a run, widened to borders of spans: by less than 64 KiB before it, and by less than 64 KiB and a
    sample after it.
    """
    return (rows + 1) * sample_bytes + 2 * (SPAN_BYTES + PAGE_BYTES)


def check_slices(rows: int, sample_bytes: int, *, memory_limit_bytes: int) -> int:
    """What a batch that is read as slices of chunks (storage order over several ranks) takes, in bytes.

    Args:
        rows: Samples of one rank in one batch.
        sample_bytes: Bytes of a sample, on average over the chunk whose samples are largest.
        memory_limit_bytes: The rank's ``memory_limit``.

    Raises:
        MemoryLimitError: One batch does not fit.
    """
    batch_bytes = slices_bytes(rows, sample_bytes)
    if batch_bytes > chunks_limit_bytes(memory_limit_bytes):
        raise MemoryLimitError(
            f"memory_limit: {format_bytes(memory_limit_bytes)} are too little for this plan: a batch of {rows} samples "
            f"of up to {format_bytes(sample_bytes)} on average takes {format_bytes(batch_bytes)}, and chunks get "
            f'{CHUNKS_SHARE:.0%} of the limit. Use memory_limit="{needed_mib(batch_bytes)}MiB", or a smaller batch'
        )
    return batch_bytes


def _fitting_lanes(plan: Plan, chunk_bytes: Int64Array, dp_rank: int, limit_bytes: int) -> int | None:
    """A number of lanes, fewer than the plan's, that fits with some room for other epochs; None if none does."""
    lanes = plan.settings.lanes
    while lanes > 1:
        lanes //= 2
        settings: dict[str, Any] = {**plan.settings.to_dict(), "lanes": lanes}
        other = Plan(
            plan.chunk_samples,
            OrderSettings(**settings),
            global_batch_size=plan.global_batch_size,
            dp_world_size=plan.dp_world_size,
            last_batch=plan.last_batch,
            epoch=plan.epoch,
            epoch_size=plan.num_samples,
        )
        if other.live_bytes(chunk_bytes, dp_rank) <= limit_bytes * EPOCHS_VARY:
            return lanes
    return None
