"""Compute the memory demand of a plan: what one rank needs at once, what it takes, and the cure if it does not fit.

The loop obeys the demand, and ``shard_tools plan`` prints it. How chunks are kept is decided once per plan::

    all chunks fit          KeptDemand      each is fetched once and stays
    ranks share an order    SlicesDemand    a rank reads its slices of chunks, which saves bytes
    otherwise               LiveDemand      chunks are fetched when needed and freed afterwards

Chunks differ in size, so each epoch, rank and start needs a different amount at once. The check of ``memory_limit``
(``ChunkMemory.check``) depends on none of them: it uses the needs of fixed ranks in epoch 0. A plan that later needs
more memory than there is can still be read (``ChunksInTurns``): its chunks stay only while batches use them, and some
are fetched again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Protocol

import numpy as np

from streaming.common.arguments import format_bytes
from streaming.errors import MemoryLimitError
from streaming.order.plan import memory as budget
from streaming.order.plan.memory import Budget
from streaming.order.plan.plan import Plan
from streaming.types import Int64Array, override

RANKS_LOOKED_AT = 16
"""Number of evenly spaced ranks whose needs decide whether a run is refused, at a millisecond each; others are
similar."""


class ByteStarts(Protocol):
    """Where chunks lie in files that are mapped."""

    @property
    def byte_starts(self) -> Int64Array: ...  # noqa: D102


class SpanBorders(Protocol):
    """Where parts of chunks that are read alone begin."""

    def span_borders(self, room_bytes: Int64Array) -> budget.Spans:
        """Return the borders of checksummed spans, in samples and in bytes of chunks laid end to end.

        Args:
            room_bytes: int64 [C], room that each chunk takes there.
        """


class Chunks(Protocol):
    """The sizes of a dataset's chunks; see ``streaming.run.engine.source.Table``."""

    @property
    def chunk_bytes(self) -> Int64Array: ...  # noqa: D102

    @property
    def in_place(self) -> ByteStarts | None: ...  # noqa: D102

    @property
    def slices(self) -> SpanBorders | None: ...  # noqa: D102

    def unit_bytes(self, chunk_ids: Int64Array) -> Int64Array: ...  # noqa: D102

    def memory_cure(self, lanes: int, room_bytes: int, *, resumed: bool = False) -> str: ...  # noqa: D102


class ChunkMemory:
    """The memory that the chunks of a dataset take. Thread-safe; reads sample tables where whole chunks do not fit.

    Args:
        chunks: The dataset.
        memory: The rank's ``memory_limit``, divided.
        is_shared: Whether other processes see the memory. Otherwise, large chunks of local files may be mapped in
            place.

    Attributes:
        memory: As given.
        align_bytes: The memory of a chunk begins at a multiple of this many bytes of its file: a page if chunks are
            mapped, otherwise 1.
    """

    def __init__(self, chunks: Chunks, memory: Budget, *, is_shared: bool = False) -> None:
        self.chunks, self.memory = chunks, memory
        self._latest: Demand | None = None
        self.in_place = None if is_shared else chunks.in_place
        self.align_bytes = 1 if self.in_place is None else budget.PAGE_BYTES

    @property
    def chunk_bytes(self) -> Int64Array:
        """int64 [C], bytes of each chunk in its store."""
        return self.chunks.chunk_bytes

    @cached_property
    def all_bytes(self) -> int:
        """Memory that all chunks take."""
        return int(self.room_bytes.sum())

    @property
    def most_bytes(self) -> int:
        """The most that chunks can ever take: the limit, or all of them, doubled because slices may overlap."""
        return min(self.memory.chunks_bytes, 2 * self.all_bytes + (16 << 20))

    @cached_property
    def room_bytes(self) -> Int64Array:
        """int64 [C], memory that each chunk takes."""
        sizes = self.chunks.chunk_bytes
        skews = 0 if self.in_place is None else self.in_place.byte_starts % self.align_bytes
        return budget.whole_pages(sizes + np.where(sizes < budget.LEAST_MAPPED_BYTES, 0, skews))

    @cached_property
    def span_rooms(self) -> Int64Array:
        """int64 [n], the maximum memory for a sample read without the rest of its chunk, by span.

        Reads all sample tables.
        """
        _, begins = self.borders()
        return budget.whole_pages(np.diff(begins, append=self.all_bytes) + self.align_bytes - 1)

    def borders(self) -> budget.Spans:
        """Return where spans begin, in samples and in memory of chunks laid end to end; reads all sample tables."""
        slices = self.chunks.slices
        assert slices is not None, "chunks are read whole"  # noqa: S101
        return slices.span_borders(self.room_bytes)

    def slice_room(self, num_bytes: int) -> int:
        """Return the maximum memory that a slice of this many bytes takes."""
        return int(budget.whole_pages(num_bytes + self.align_bytes - 1))

    def demand(self, plan: Plan, dp_rank: int) -> Demand:
        """Return the demand of a rank for a plan. The latest is cached, because the start of a run checks it first."""
        found = self._latest
        if found is None or found.plan is not plan or found.dp_rank != dp_rank:
            self._latest = found = self._kind(plan)(self, plan, dp_rank)
        return found

    def check(self, plan: Plan, *, resumed: bool = False) -> None:
        """Refuse a run whose memory limit is too small; the same on all ranks, in every epoch, at every resume.

        Args:
            plan: Any plan of the run.
            resumed: The order comes from a loaded state, which overrides the dataset's lanes and window.

        Raises:
            MemoryLimitError: The demand exceeds the limit; the message shows the calculation and the remedies.
        """
        self.first_demand(plan).check(resumed=resumed)

    def first_demand(self, plan: Plan) -> Demand:
        """Return the largest demand of the deciding ranks at the start of a plan's run."""
        start = plan.from_the_start()
        first = self.demand(start, 0)
        if not first.differs_by_rank:
            return first
        others, count = start.dp_world_size - 1, min(start.dp_world_size, RANKS_LOOKED_AT) - 1
        ranks = [] if start.is_endless else [others * number // count for number in range(1, count + 1)]
        return max([first, *(self.demand(start, rank) for rank in ranks)], key=lambda one: one.live_bytes)

    def _kind(self, plan: Plan) -> type[Demand]:
        if budget.reads_slices(plan, self.chunk_bytes, self.memory) and self.chunks.slices is not None:
            return SlicesDemand
        return KeptDemand if self.memory.holds(self.all_bytes) else LiveDemand


class Demand(ABC):
    """The memory that a rank needs for a plan. Costly values are computed when first read.

    Attributes:
        is_sliced: Slices of chunks are read, not whole chunks.
        is_short: The plan needs more at once than the limit allows, as far as that is known beforehand.
        differs_by_rank: Ranks need different amounts at once.
    """

    is_sliced = is_short = differs_by_rank = False

    def __init__(self, rooms: ChunkMemory, plan: Plan, dp_rank: int) -> None:
        self.rooms, self.plan, self.dp_rank = rooms, plan, dp_rank

    @property
    @abstractmethod
    def live_bytes(self) -> int:
        """An upper bound on the bytes needed at the same time, without read-ahead."""

    @property
    @abstractmethod
    def limit_bytes(self) -> int:
        """The maximum bytes that chunks take."""

    @property
    def lent_bytes(self) -> int:
        """The maximum bytes of chunks kept only for users' views: at most half, and never bytes that the plan needs."""
        most_bytes = self.rooms.most_bytes
        return max(0, min(most_bytes // 2, most_bytes - self.live_bytes))

    @property
    def pieces(self) -> Mapping[int, int]:
        """Bytes of the chunks that are read only in part, by chunk, if they had to be looked up."""
        return {}

    @property
    def sizes(self) -> Int64Array:
        """int64 [C], memory that each chunk takes, given how it is read."""
        return self.rooms.room_bytes

    @property
    def retains(self) -> bool:
        """Whether chunks that are no longer needed stay in memory as long as there is room."""
        return False

    @property
    def least_bytes(self) -> int:
        """An amount of memory for chunks that ``check`` accepts.

        It is the smallest one or, if the limit allows it, the smallest that can be computed without sample tables.
        """
        return 0

    def shortage(self) -> str:
        """Return the message that the chunks needed at once do not fit, with consequences and cures."""
        return f"memory_limit: {format_bytes(self.rooms.memory.limit_bytes)} is too little for this plan"

    @abstractmethod
    def check(self, *, resumed: bool = False) -> None:
        """Refuse a run that begins with this demand and needs more at once than the limit allows.

        Args:
            resumed: The order comes from a loaded state, which overrides the dataset's lanes and window.

        Raises:
            MemoryLimitError: The demand exceeds the limit; the message shows the calculation and the remedies.
        """


class KeptDemand(Demand):
    """All chunks of a small dataset; they fit, so the bytes needed at once do not matter."""

    @cached_property
    @override
    def live_bytes(self) -> int:
        return self.plan.live_bytes(self.rooms.room_bytes, self.dp_rank)

    @property
    @override
    def limit_bytes(self) -> int:
        return self.rooms.memory.with_read_ahead(self.rooms.all_bytes)

    @property
    @override
    def retains(self) -> bool:
        return True

    def check(self, *, resumed: bool = False) -> None:
        """See ``Demand``: all chunks fit."""


class SlicesDemand(Demand):
    """The slices of chunks that hold a rank's share of one batch."""

    is_sliced = True

    @cached_property
    def live_bytes(self) -> int:
        """See ``Demand``: the same for every rank, epoch and start."""
        rooms = self.rooms
        return budget.slices_bytes(self.plan, rooms.room_bytes, rooms.borders, rooms.memory)

    @property
    @override
    def limit_bytes(self) -> int:
        return self.rooms.memory.chunks_bytes

    @property
    @override
    def least_bytes(self) -> int:
        return self.live_bytes

    @override
    def check(self, *, resumed: bool = False) -> None:
        memory, num_bytes = self.rooms.memory, self.live_bytes
        if num_bytes > memory.chunks_bytes:
            raise MemoryLimitError(
                f"memory_limit: {format_bytes(memory.limit_bytes)} is too little for this plan: where samples are "
                f"largest, the {self.plan.shape.most_rows} of one rank in a batch take {format_bytes(num_bytes)}, and "
                f'chunks get {budget.CHUNKS_SHARE:.0%} of the limit. Use memory_limit="{budget.needed_mib(num_bytes)}'
                f'MiB", or a smaller batch{budget.BATCHES_BESIDE}'
            )


class LiveDemand(Demand):
    """Whole chunks while they are needed; if they do not fit, only the parts that ``fields`` and the filter keep."""

    differs_by_rank = True

    @cached_property
    def _live(self) -> tuple[int, dict[int, int], Int64Array]:
        """Bytes needed at once, sizes of chunks that are read in part, and the memory of each chunk."""
        rooms, plan, dp_rank = self.rooms, self.plan, self.dp_rank
        num_bytes = plan.live_bytes(rooms.room_bytes, dp_rank)
        if num_bytes <= rooms.memory.chunks_bytes:
            return num_bytes, {}, rooms.room_bytes
        needed = plan.rank_chunks(dp_rank)
        read_bytes = rooms.chunks.unit_bytes(needed)
        in_pieces = read_bytes < rooms.chunk_bytes[needed]
        needed, read_bytes = needed[in_pieces], read_bytes[in_pieces]
        sizes = rooms.room_bytes.copy()
        sizes[needed] = budget.whole_pages(np.maximum(read_bytes, 1) + rooms.align_bytes - 1)
        return plan.live_bytes(sizes, dp_rank), dict(zip(needed.tolist(), read_bytes.tolist(), strict=True)), sizes

    @property
    @override
    def live_bytes(self) -> int:
        return self._live[0]

    @property
    @override
    def pieces(self) -> Mapping[int, int]:
        return self._live[1]

    @property
    @override
    def sizes(self) -> Int64Array:
        return self._live[2]

    @property
    @override
    def is_short(self) -> bool:  # type: ignore[override]
        return self.live_bytes > self.rooms.memory.chunks_bytes

    @property
    @override
    def limit_bytes(self) -> int:
        return self.rooms.memory.with_read_ahead(self.live_bytes)

    @cached_property
    @override
    def retains(self) -> bool:
        return self.limit_bytes >= int(self.rooms.room_bytes[self.plan.rank_chunks(self.dp_rank)].sum())

    @property
    @override
    def least_bytes(self) -> int:
        return max(self.live_bytes, self._batch_bytes)

    @cached_property
    def _batch_bytes(self) -> int:
        """The maximum bytes that a batch of this size can need in any order, if only its own units are in memory.

        Chunks that do not fit are read in part, if possible.
        """
        num_bytes = budget.most_of_a_batch(self.plan, self.sizes)
        if num_bytes <= self.rooms.memory.chunks_bytes or self.rooms.chunks.slices is None:
            return num_bytes
        return min(num_bytes, budget.most_of_rows(self.plan, self.rooms.span_rooms))

    @override
    def shortage(self) -> str:
        memory, plan = self.rooms.memory, self.plan
        room, cure = format_bytes(memory.chunks_bytes), budget.needed_mib(max(self.live_bytes, memory.chunks_bytes))
        needs = f"{format_bytes(self.live_bytes)}" if self.is_short else f"more than {room}"
        return (
            f"memory_limit: in epoch {plan.epoch} rank {self.dp_rank} of {plan.dp_world_size} needs {needs} of chunks "
            f"at the same time, and {room} of {format_bytes(memory.limit_bytes)} are for them. Where they do not fit, "
            "a chunk stays in memory only while batches use it, and may be fetched more than once; batches stay the "
            f'same. To fetch each once, use memory_limit="{cure}MiB"'
        )

    @override
    def check(self, *, resumed: bool = False) -> None:
        memory, plan, room_bytes = self.rooms.memory, self.plan, self.rooms.room_bytes
        if self.is_short:
            lanes = -(-plan.settings.lanes // plan.dp_world_size)
            find_cures = budget.cures_of_resumed if resumed else budget.cures_of_lanes
            whole = self.rooms.chunks.slices is None
            cures = find_cures(plan, room_bytes, self.dp_rank, memory.chunks_bytes, whole=whole)
            cures += self.rooms.chunks.memory_cure(lanes, memory.recommended_bytes, resumed=resumed)
            raise MemoryLimitError(
                f"memory_limit: {format_bytes(memory.limit_bytes)} is too little for this plan. Rank {self.dp_rank} of "
                f"{plan.dp_world_size} goes through {lanes} of {plan.settings.lanes} lanes at once; with chunks of "
                f"{format_bytes(int(room_bytes.mean()))} ({plan.chunk_samples.mean():.0f} samples) and a window of "
                f"{plan.settings.window} samples it needs up to {format_bytes(self.live_bytes)} of chunks at the same "
                f"time, and chunks get {budget.CHUNKS_SHARE:.0%} of the limit. Use memory_limit="
                f'"{budget.needed_mib(self.least_bytes)}MiB"{cures}{budget.BATCHES_BESIDE}'
            )
        if budget.most_of_rows(plan, self.sizes) > memory.chunks_bytes < self._batch_bytes:
            raise MemoryLimitError(
                f"memory_limit: {format_bytes(memory.limit_bytes)} is too little for this plan: a batch has "
                f"{plan.shape.most_rows} rows of one rank, and in some epoch these may be the largest ones, which take "
                f"up to {format_bytes(self._batch_bytes)} including bytes read along with them. Chunks get "
                f'{budget.CHUNKS_SHARE:.0%} of the limit. Use memory_limit="{budget.least_mib(self._batch_bytes)}MiB", '
                f"or a smaller batch{budget.BATCHES_BESIDE}"
            )
