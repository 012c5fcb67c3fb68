"""Decide how much memory the chunks of a plan take on a rank: for the loop that obeys it, and tools that show it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Protocol

import numpy as np

from streaming.plan import memory as budget
from streaming.plan.plan import Plan
from streaming.types import Int64Array


class Chunks(Protocol):
    """The sizes of a dataset's chunks; see ``streaming.engine.source.Source``."""

    @property
    def chunk_bytes(self) -> Int64Array: ...  # noqa: D102

    @property
    def byte_starts(self) -> Int64Array: ...  # noqa: D102

    def unit_bytes(self, chunk_ids: Int64Array) -> Int64Array: ...  # noqa: D102

    def has_sample_tables(self) -> bool: ...  # noqa: D102

    def span_borders(self, room_bytes: Int64Array) -> budget.Spans: ...  # noqa: D102

    def memory_cure(self, lanes: int, room_bytes: int, *, resumed: bool = False) -> str: ...  # noqa: D102


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """The chunks that a rank needs at the same time.

    Attributes:
        num_bytes: An upper bound of their bytes.
        pieces: Bytes of those chunks of which only parts are read, by chunk, where this had to be looked up.
    """

    num_bytes: int
    pieces: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The memory for the chunks of one plan on one rank.

    Attributes:
        limit_bytes: The most that chunks take.
        pieces: See ``Live``.
        retain: Chunks stay in memory when they are no longer needed, because there is room for all.
        is_sliced: Slices of chunks are read, not whole chunks.
    """

    limit_bytes: int
    pieces: dict[int, int] = field(default_factory=dict)
    retain: bool = False
    is_sliced: bool = False


class Rooms:
    """Decide the memory of plans over one dataset. Thread-safe; reads sample tables where whole chunks do not fit.

    Args:
        chunks: The dataset.
        memory_limit_bytes: The rank's ``memory_limit``.
        is_mapped: Whether large chunks are memory-mapped where they lie, at the page borders of their files.
    """

    def __init__(self, chunks: Chunks, memory_limit_bytes: int, *, is_mapped: bool) -> None:
        self._chunks, self.memory_limit_bytes, self._is_mapped = chunks, memory_limit_bytes, is_mapped

    @property
    def chunk_bytes(self) -> Int64Array:
        """int64 [C], bytes of each chunk in its store."""
        return self._chunks.chunk_bytes

    @cached_property
    def all_bytes(self) -> int:
        """Memory that all chunks take."""
        return int(self.room_bytes.sum())

    @cached_property
    def room_bytes(self) -> Int64Array:
        """int64 [C], memory that each chunk takes."""
        sizes = self._chunks.chunk_bytes
        if self._is_mapped:
            skews = self._chunks.byte_starts % budget.PAGE_BYTES
            sizes = sizes + np.where(sizes < budget.LEAST_MAPPED_BYTES, 0, skews)
        return budget.whole_pages(sizes)

    def reads_slices(self, plan: Plan) -> bool:
        """Tell whether ranks read slices of chunks, because they share a storage order and it saves bytes."""
        if plan.settings.shuffle or plan.dp_world_size == 1:
            return False
        saves = budget.reads_slices(plan, self._chunks.chunk_bytes, memory_limit_bytes=self.memory_limit_bytes)
        return saves and self._chunks.has_sample_tables()

    def slices_bytes(self, plan: Plan) -> int:
        """Return an upper bound of the memory for a batch that is read as slices of chunks."""
        spans = partial(self._chunks.span_borders, self.room_bytes)
        return budget.slices_bytes(plan, self.room_bytes, spans, memory_limit_bytes=self.memory_limit_bytes)

    def live(self, plan: Plan, dp_rank: int) -> Live:
        """Return what a rank needs at once; if whole chunks do not fit, only what ``fields`` and filter leave."""
        num_bytes = plan.live_bytes(self.room_bytes, dp_rank)
        if num_bytes <= budget.chunks_limit_bytes(self.memory_limit_bytes):
            return Live(num_bytes=num_bytes)
        needed = plan.rank_chunks(dp_rank)
        read_bytes = self._chunks.unit_bytes(needed)
        in_pieces = read_bytes < self._chunks.chunk_bytes[needed]
        needed, read_bytes = needed[in_pieces], read_bytes[in_pieces]
        sizes = self.room_bytes.copy()
        sizes[needed] = budget.whole_pages(np.maximum(read_bytes, 1)) + (budget.PAGE_BYTES if self._is_mapped else 0)
        pieces = dict(zip(needed.tolist(), read_bytes.tolist(), strict=True))
        return Live(num_bytes=plan.live_bytes(sizes, dp_rank), pieces=pieces)

    def limit(self, live_bytes: int) -> int:
        """Return the most that whole chunks take, where so many bytes are needed at once; of a small set, all."""
        holds_all = budget.holds_all(self.memory_limit_bytes, self.all_bytes)
        return budget.chunks_bytes(self.memory_limit_bytes, self.all_bytes if holds_all else live_bytes)

    def check(self, plan: Plan, dp_rank: int, live_bytes: int, *, resumed: bool = False) -> None:
        """Refuse a plan of which a rank needs more at once than there is room for.

        Args:
            plan: The plan.
            dp_rank: The data-parallel rank.
            live_bytes: The result of ``slices_bytes`` if it reads slices, else the bytes of ``live``.
            resumed: The order comes from a loaded state, which overrides the dataset's lanes and window.

        Raises:
            MemoryLimitError: It does not fit; the message shows the calculation and the remedies.
        """
        limit = self.memory_limit_bytes
        if self.reads_slices(plan):
            budget.check_slices(plan, live_bytes, memory_limit_bytes=limit)
        elif live_bytes > budget.chunks_limit_bytes(limit):
            lanes = -(-plan.settings.lanes // plan.dp_world_size)
            room_bytes = int(budget.chunks_limit_bytes(limit) * budget.EPOCHS_VARY)
            budget.check_whole_chunks(
                plan, self.room_bytes, dp_rank, live_bytes=live_bytes, memory_limit_bytes=limit, resumed=resumed,
                more_cures=self._chunks.memory_cure(lanes, room_bytes, resumed=resumed),
            )  # fmt: skip

    def of(self, plan: Plan, dp_rank: int, *, resumed: bool = False) -> Room:
        """Decide how much memory chunks take, and whether they stay there when they are no longer needed.

        Raises:
            MemoryLimitError: What is needed at once does not fit.
        """
        limit = self.memory_limit_bytes
        if self.reads_slices(plan):
            self.check(plan, dp_rank, self.slices_bytes(plan))
            return Room(limit_bytes=budget.chunks_limit_bytes(limit), is_sliced=True)
        if budget.holds_all(limit, self.all_bytes):  # what is needed at once does not matter
            return Room(limit_bytes=self.limit(0), retain=True)
        live = self.live(plan, dp_rank)
        self.check(plan, dp_rank, live.num_bytes, resumed=resumed)
        limit_bytes = self.limit(live.num_bytes)
        retain = limit_bytes >= int(self.room_bytes[plan.rank_chunks(dp_rank)].sum())
        return Room(limit_bytes=limit_bytes, pieces=live.pieces, retain=retain)
