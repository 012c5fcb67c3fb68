"""Define the interface to the chunks of a set: ``Table``, which chunks there are, and ``Bytes``, where they come from.

An ability that only some sets have is a value that others lack, not a method that they refuse: ``slices``,
``in_place``, ``read_distant``.
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
    """Chunks that can be memory-mapped where they lie: in files of this machine, without a cache in front of them."""

    @property
    def byte_starts(self) -> Int64Array:
        """int64 [C], offset of each chunk in its shard."""

    def apart(self, wanted: FetchRange) -> UnitLayout | TakeApart:
        """Return the locations of the samples of a present, verified range, or a function that finds them."""

    def reads_whole(self, wanted: FetchRange) -> bool:
        """Return whether ``fetch_unit`` reads all of a range, given its ``fields``; partial reads are not mapped."""


class Slices(SpanBorders, Protocol):
    """Reading of parts of chunks, by their sample tables."""

    def slice(self, chunk_id: int, first: int, stop: int) -> FetchRange:
        """Return the byte range of samples ``[first, stop)`` inside a chunk. The range may be wider."""


class Table(Protocol):
    """The chunks of a set, and the samples that they yield: facts that cost no reading.

    There are ``C`` chunks. One yields ``chunk_samples`` samples, at *offsets* 0, 1, …; with a filter these are fewer
    than its bytes hold, and ``samples_of`` maps offsets to samples. Methods that concern bytes (``chunk``, ``slices``,
    ``locate``) count the samples *inside* the chunk.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the sources inside, such as ``"web"`` or ``"code/py"``; () for a single set."""

    @property
    def chunk_samples(self) -> Int64Array:
        """int64 [C], number of samples that each chunk yields."""

    @property
    def chunk_bytes(self) -> Int64Array:
        """int64 [C], size of each chunk in its store, in bytes."""

    def source_of(self, chunk_ids: Int64Array) -> Int64Array:
        """Return the index into ``names`` for each chunk; zeros for a single set."""

    def samples_of(self, chunk_ids: Int64Array, offsets: Int64Array) -> Int64Array:
        """Return the sample inside each chunk at an offset. Without a filter these are the offsets themselves."""

    def urls_of(self, chunk_ids: Int64Array) -> list[str]:
        """Return the shard of each chunk, as shown in samples and messages."""

    def chunk(self, chunk_id: int) -> FetchRange:
        """Return the byte range of a whole chunk, which may begin with ``lead`` further samples."""

    @property
    def slices(self) -> Slices | None:
        """Reads parts of chunks; None: chunks are read whole, except for bytes that ``fields`` leave out."""

    def unit_bytes(self, chunk_ids: Int64Array) -> Int64Array:
        """Return the number of bytes that each chunk takes with these ``fields``. Reads sample tables."""

    def locate(self, chunk_id: int, inside: int) -> SampleLocation | None:
        """Return the location in its shard of a sample inside a chunk; None if no sample table has it."""


class Bytes(Protocol):
    """Source of the bytes of chunks. Thread-safe."""

    @property
    def is_local(self) -> bool:
        """Whether all shards are files of this machine."""

    def fetch_unit(self, wanted: FetchRange, out: memoryview) -> Fetched:
        """Fetch a range into ``out``. Locating its samples may be left to the caller."""

    @property
    def in_place(self) -> InPlace | None:
        """Maps chunks where they lie; None: they are read."""

    @property
    def read_distant(self) -> ReadDistant | None:
        """Reads parts of members that ``fetch_unit`` leaves in the store; None: it leaves none there.

        It returns bytes ``[start, stop)`` of the shard of a chunk. ``whole`` means that they are all of a member, and
        are compared with its checksum; parts have none.

        Raises:
            ChangedError: The shard was replaced since this process first read it. For a whole member, its checksum
                decides whether that matters.
            ChecksumError: The member is damaged.
            IndexMismatchError: The shard is missing, or differs from the one in the index.
            StorageError: The store failed.
        """
