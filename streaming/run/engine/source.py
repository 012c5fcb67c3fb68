"""Define the interface that the loop, the engine and the plan require of a dataset: ``Source``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from streaming.build.batches.build import OnError, RowKind, SourceRecipe
from streaming.build.batches.draws import Chain
from streaming.build.decode import DecodeSpec
from streaming.build.decode.registry import FieldDecoder
from streaming.order.packing.layout import PackRows
from streaming.order.plan.order import Orders, OrderSettings
from streaming.shards.fetch.layout import Fetched, TakeApart, UnitLayout
from streaming.shards.fetch.read import FetchRange
from streaming.shards.index.sample_table import SampleLocation
from streaming.storage import ActiveRequest
from streaming.types import Int64Array, Transform


class ShardSet(Protocol):
    """Shards to read, with an index or without: the interface for accounting, reports and comparisons between ranks."""

    fields: tuple[str, ...] | None
    """Fields to read; None: all."""
    decode: DecodeSpec
    """The user's option, which ranks compare."""
    decoders: FieldDecoder
    transform: Transform | Chain | None
    on_error: OnError
    max_bad_samples: float
    """A count (int) or a share of the epoch (float)."""

    @property
    def bad_files(self) -> Mapping[str, str]:
        """Files in which bad samples are recorded, by the name in batches of the source they are in; "": of all."""

    @property
    def items(self) -> RowKind:
        """What a row of a batch is."""

    def expected_samples(self, num_rows: float) -> float:
        """Return how many samples ``num_rows`` rows of batches are made of, on average."""

    @property
    def urls(self) -> Sequence[str]:
        """The shards, in the order of the dataset. They may contain secrets, so messages must redact them."""

    @property
    def recipe_parts(self) -> tuple[SourceRecipe, ...]:
        """How the samples of each source are decoded and transformed; one entry for a single set."""

    def counters(self) -> Mapping[str, float]:
        """Return the counters of storage and cache since the set was opened, over all its loaders."""

    def in_flight(self) -> list[ActiveRequest]:
        """Return the storage requests in progress, oldest first."""


class Source(ShardSet, Protocol):
    """A dataset of ``C`` chunks with known numbers of samples; thread-safe.

    A chunk yields ``chunk_samples`` samples, at *offsets* 0, 1, …; with a filter these are fewer than its bytes hold,
    and ``samples_of`` maps offsets to samples. Whatever concerns bytes (``slice``, ``locate``) counts the samples
    *inside* the chunk.

    What stands at an offset is a row of a batch: a sample, or in a set whose ``items`` say so, several samples inside
    the chunk, which ``packs`` names. Such a set has no slices.
    """

    @property
    def fingerprint(self) -> str:
        """Identifies the samples of this set; stored in the state."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the sources inside, such as ``"web"`` or ``"code/py"``; () for a single set."""

    @property
    def chunk_samples(self) -> Int64Array:
        """int64 [C], number of samples that each chunk yields."""

    @property
    def chunk_bytes(self) -> Int64Array:
        """int64 [C], size of each chunk in its store."""

    @property
    def byte_starts(self) -> Int64Array:
        """int64 [C], offset of each chunk in its shard."""

    @property
    def is_local(self) -> bool:
        """Whether all shards are files of this machine."""

    @property
    def can_be_mapped(self) -> bool:
        """Whether chunks can be memory-mapped: from local files, without a cache in front of them."""

    def source_of(self, chunk_ids: Int64Array) -> Int64Array:
        """Return the index into ``names`` for each chunk; zeros for a single set."""

    def samples_of(self, chunk_ids: Int64Array, offsets: Int64Array) -> Int64Array:
        """Return the sample inside each chunk at an offset; without a filter these are the offsets themselves."""

    def packs(self, chunk_ids: Int64Array, offsets: Int64Array, passes: Int64Array, seed: int) -> PackRows:
        """Return the samples inside that make the rows at offsets of chunks in these passes (int64 [B] each).

        One sample each, the same in all passes, unless the set deals out rows of several.
        """

    def has_packs(self, chunk_ids: Int64Array, passes: Int64Array, seed: int) -> bool:
        """Tell whether the result of ``packs`` for these chunks and passes (int64 [B] each) is already computed.

        Never blocks.
        """

    def keep_at_most(self, num_bytes: int) -> None:
        """Limit the memory for what ``packs`` keeps (packs of groups, lengths of documents) from now on."""

    def order_settings(self, global_batch_size: int) -> OrderSettings:
        """Return the order under a loader with this batch size: the user's choices, with defaults for the rest."""

    def orders(self, settings: OrderSettings) -> Orders:
        """Return the order of each pass under these settings."""

    def urls_of(self, chunk_ids: Int64Array) -> list[str]:
        """Return the shard of each chunk, as shown in samples and messages."""

    def chunk(self, chunk_id: int) -> FetchRange:
        """Return the byte range of a whole chunk, which may begin with ``lead`` further samples."""

    def slice(self, chunk_id: int, first: int, stop: int) -> FetchRange:
        """Return the byte range of samples ``[first, stop)`` inside a chunk; the range may be wider."""

    def fetch_unit(self, wanted: FetchRange, out: memoryview) -> Fetched:
        """Fetch a range into ``out``; locating its samples may be left to the caller."""

    @property
    def has_distant(self) -> bool:
        """Whether ``fetch_unit`` may leave members in the store, whose decoders read parts of them; see ``Distant``."""

    def read_distant(self, chunk_id: int, start: int, stop: int, *, whole: bool) -> bytearray:
        """Return bytes ``[start, stop)`` of the shard of a chunk: of a distant member.

        Args:
            chunk_id: The chunk.
            start: First byte in the shard.
            stop: End (exclusive).
            whole: They are all of the member, and are compared with its checksum. Parts have none.

        Raises:
            ChangedError: The shard was replaced since this process first read it. Of a whole member, its checksum tells
                whether that matters.
            ChecksumError: The member is damaged.
            IndexMismatchError: The shard is missing, or differs from the one in the index.
            StorageError: The store failed.
        """

    def apart(self, wanted: FetchRange) -> UnitLayout | TakeApart:
        """Return the locations of the samples of a present, verified range, or a function that finds them."""

    def reads_whole(self, wanted: FetchRange) -> bool:
        """Tell whether ``fetch_unit`` reads all of a range, given its ``fields``."""

    def unit_bytes(self, chunk_ids: Int64Array) -> Int64Array:
        """Return the number of bytes that each chunk takes with these ``fields``; reads sample tables."""

    def has_sample_tables(self) -> bool:
        """Tell whether parts of chunks can be read."""

    def span_borders(self, room_bytes: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the borders of checksummed spans, in samples and in bytes of chunks laid end to end.

        Args:
            room_bytes: int64 [C], room that each chunk takes there.
        """

    def where_is(self, fingerprint: str) -> str:
        """Say how to open what had this fingerprint, of which there is a state; "" if that is not known."""

    def memory_cure(self, lanes: int, room_bytes: int, *, resumed: bool = False) -> str:
        """Return what makes this set need less memory, for messages; "" if nothing of its own does.

        Args:
            lanes: Lanes of a rank.
            room_bytes: Memory for chunks.
            resumed: A state was loaded, which says how chunks are cut.
        """

    def locate(self, chunk_id: int, inside: int) -> SampleLocation | None:
        """Return the location in its shard of a sample inside a chunk; None if no sample table has it."""
