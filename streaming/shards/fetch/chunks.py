"""Define what is asked of the chunks of a set: ``Table``, which there are, and ``Bytes``, where they come from.

What only some sets can do is a value that others lack, not a method that they refuse: ``slices``, ``in_place``,
``read_distant``.
"""

from __future__ import annotations

from typing import Protocol

from streaming.build.decode import ReadDistant
from streaming.order.plan.demand import SpanBorders
from streaming.shards.fetch.layout import Fetched, TakeApart, UnitLayout
from streaming.shards.fetch.read import FetchRange
from streaming.shards.index.sample_table import SampleLocation
from streaming.types import Int64Array


class InPlace(Protocol):
    """How chunks are memory-mapped where they lie: in files of this machine, without a cache in front of them."""

    @property
    def byte_starts(self) -> Int64Array:
        """int64 [C], offset of each chunk in its shard."""

    def apart(self, wanted: FetchRange) -> UnitLayout | TakeApart:
        """Return the locations of the samples of a present, verified range, or a function that finds them."""

    def reads_whole(self, wanted: FetchRange) -> bool:
        """Tell whether ``fetch_unit`` reads all of a range, given its ``fields``; parts are not mapped."""


class Slices(SpanBorders, Protocol):
    """How parts of chunks are read, by their sample tables."""

    def slice(self, chunk_id: int, first: int, stop: int) -> FetchRange:
        """Return the byte range of samples ``[first, stop)`` inside a chunk; the range may be wider."""


class Table(Protocol):
    """Which chunks there are, and which samples they yield: facts that cost no reading.

    There are ``C`` chunks. One yields ``chunk_samples`` samples, at *offsets* 0, 1, …; with a filter these are fewer
    than its bytes hold, and ``samples_of`` maps offsets to samples. Whatever concerns bytes (``chunk``, ``slices``,
    ``locate``) counts the samples *inside* the chunk.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the sources inside, such as ``"web"`` or ``"code/py"``; () for a single set."""

    @property
    def chunk_samples(self) -> Int64Array:
        """int64 [C], number of samples that each chunk yields."""

    @property
    def chunk_bytes(self) -> Int64Array:
        """int64 [C], size of each chunk in its store."""

    def source_of(self, chunk_ids: Int64Array) -> Int64Array:
        """Return the index into ``names`` for each chunk; zeros for a single set."""

    def samples_of(self, chunk_ids: Int64Array, offsets: Int64Array) -> Int64Array:
        """Return the sample inside each chunk at an offset; without a filter these are the offsets themselves."""

    def urls_of(self, chunk_ids: Int64Array) -> list[str]:
        """Return the shard of each chunk, as shown in samples and messages."""

    def chunk(self, chunk_id: int) -> FetchRange:
        """Return the byte range of a whole chunk, which may begin with ``lead`` further samples."""

    @property
    def slices(self) -> Slices | None:
        """How parts of chunks are read; None: chunks are read whole, but for what ``fields`` leave out."""

    def unit_bytes(self, chunk_ids: Int64Array) -> Int64Array:
        """Return the number of bytes that each chunk takes with these ``fields``; reads sample tables."""

    def locate(self, chunk_id: int, inside: int) -> SampleLocation | None:
        """Return the location in its shard of a sample inside a chunk; None if no sample table has it."""


class Bytes(Protocol):
    """Where the bytes of chunks come from. Thread-safe."""

    @property
    def is_local(self) -> bool:
        """Whether all shards are files of this machine."""

    def fetch_unit(self, wanted: FetchRange, out: memoryview) -> Fetched:
        """Fetch a range into ``out``; locating its samples may be left to the caller."""

    @property
    def in_place(self) -> InPlace | None:
        """How chunks are mapped where they lie; None: they are read."""

    @property
    def read_distant(self) -> ReadDistant | None:
        """Reads parts of members that ``fetch_unit`` leaves in the store; None: it leaves none there.

        It returns bytes ``[start, stop)`` of the shard of a chunk. ``whole`` says that they are all of a member, and
        are compared with its checksum; parts have none.

        Raises:
            ChangedError: The shard was replaced since this process first read it. Of a whole member, its checksum tells
                whether that matters.
            ChecksumError: The member is damaged.
            IndexMismatchError: The shard is missing, or differs from the one in the index.
            StorageError: The store failed.
        """
