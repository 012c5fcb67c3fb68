"""Define what the loop, the engine and the plan ask of a data set, whatever it is made of: ``Source``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from streaming.batches.build import OnError, Part
from streaming.batches.draws import Chain
from streaming.decode import DecodeSpec
from streaming.decode.registry import FieldDecoder
from streaming.fetch.layout import TakeApart, UnitLayout
from streaming.fetch.read import FetchRange
from streaming.index.sample_table import SampleLocation
from streaming.packing.layout import PackRows
from streaming.plan.order import Orders, OrderSettings
from streaming.storage import ActiveRequest
from streaming.types import Int64Array, Transform


class ShardSet(Protocol):
    """Shards that are read, with an index or without: what accounts, reports and comparisons of ranks ask of them."""

    fields: tuple[str, ...] | None
    """Fields to read; None: all."""
    decode: DecodeSpec
    """The user's choice, which ranks compare."""
    decoders: FieldDecoder
    transform: Transform | Chain | None
    on_error: OnError
    max_bad_samples: float
    """A count (int) or a share of the epoch (float)."""
    bad_samples_file: str | None

    @property
    def is_packed(self) -> bool:
        """Whether what is dealt out are packs of samples: see ``Source.packs``."""

    @property
    def urls(self) -> Sequence[str]:
        """The shards, in the order of the data set; they may hold secrets, so messages redact them."""

    @property
    def recipe_parts(self) -> tuple[Part, ...]:
        """How the samples of each source become objects; one for a single set."""

    def counters(self) -> Mapping[str, float]:
        """Count what storage and cache did since the set was opened; all its loaders count there."""

    def in_flight(self) -> list[ActiveRequest]:
        """List the storage's calls under way, oldest first."""


class Source(ShardSet, Protocol):
    """A data set of ``C`` chunks with known numbers of samples; thread-safe.

    A chunk gives ``chunk_samples`` samples, at *offsets* 0, 1, …; with a filter these are fewer than lie in its bytes,
    and ``samples_of`` says which. What is about bytes (``slice``, ``locate``) counts the samples *inside* the chunk.

    Of a packed set, chunks are groups and what stands at offsets are packs: ``packs`` says which samples inside they
    are made of. Such a set has no slices.
    """

    @property
    def fingerprint(self) -> str:
        """What tells the samples from those of other sets; goes into the state."""

    @property
    def names(self) -> tuple[str, ...]:
        """The sources inside, as ``"web"`` or ``"code/py"``; () for a single set."""

    @property
    def chunk_samples(self) -> Int64Array:
        """int64[C], samples that each chunk gives."""

    @property
    def chunk_bytes(self) -> Int64Array:
        """int64[C], bytes of each chunk in its store."""

    @property
    def byte_starts(self) -> Int64Array:
        """int64[C], where each chunk begins in its shard."""

    @property
    def is_local(self) -> bool:
        """Whether all shards are files of this machine."""

    @property
    def can_be_mapped(self) -> bool:
        """Whether chunks can be mapped where they lie: from local files, without a cache before them."""

    def source_of(self, chunk_ids: Int64Array) -> Int64Array:
        """Return which of ``names`` each chunk belongs to; zeros for a single set."""

    def samples_of(self, chunk_ids: Int64Array, offsets: Int64Array) -> Int64Array:
        """Find the sample inside each chunk that stands at an offset; without a filter these are the offsets."""

    def packs(self, chunk_ids: Int64Array, offsets: Int64Array, passes: Int64Array, seed: int) -> PackRows:
        """Find what the packs at offsets of chunks, int64[B] each, are made of in these passes; of a packed set."""

    def has_packs(self, chunk_ids: Int64Array, passes: Int64Array, seed: int) -> bool:
        """Tell whether ``packs`` of chunks in these passes, int64[B] each, are made already: it waits for nothing."""

    def keep_at_most(self, num_bytes: int) -> None:
        """Bound what is kept to make packs of (packs of groups, lengths of documents), from now on."""

    def order_settings(self, global_batch_size: int) -> OrderSettings:
        """Choose the order under a loader with batches of this size: as the user did, else by default."""

    def orders(self, settings: OrderSettings) -> Orders:
        """Return the order of each pass under these settings."""

    def urls_of(self, chunk_ids: Int64Array) -> list[str]:
        """Name the shard of each chunk, as samples and messages show it."""

    def chunk(self, chunk_id: int) -> FetchRange:
        """Describe the bytes of a whole chunk, which may begin with ``lead`` samples beside it."""

    def slice(self, chunk_id: int, first: int, stop: int) -> FetchRange:
        """Describe the bytes of samples ``[first, stop)`` inside a chunk; the range may be wider."""

    def fetch_unit(self, wanted: FetchRange, out: memoryview) -> UnitLayout | TakeApart:
        """Fill ``out``; taking it apart may be left to the caller."""

    def apart(self, wanted: FetchRange) -> UnitLayout | TakeApart:
        """Say where the samples of a range lie, all of which is there and matches its checksums, or how to find out."""

    def reads_whole(self, wanted: FetchRange) -> bool:
        """Tell whether ``fetch_unit`` reads all of a range, as its ``fields`` are."""

    def unit_bytes(self, chunk_ids: Int64Array) -> Int64Array:
        """Count the bytes that each chunk takes with these ``fields``; reads sample tables."""

    def has_sample_tables(self) -> bool:
        """Tell whether parts of chunks can be read."""

    def span_borders(self, room_bytes: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Tell where what has a checksum begins, in samples and in bytes of chunks that lie end to end.

        Args:
            room_bytes: int64[C], what each chunk takes there.
        """

    def locate(self, chunk_id: int, inside: int) -> SampleLocation | None:
        """Look up where a sample inside a chunk lies in its shard; None if no sample table says it."""
