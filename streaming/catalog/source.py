"""Read shards as loops and engines do, chunk by chunk or in slices, with their order: ``ChunkSource``."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from streaming.arguments import checked_seed
from streaming.arrays import sums
from streaming.cache import NodeCache
from streaming.catalog.open import OpenShards
from streaming.catalog.random_access import TABLE_REQUESTS, RandomAccess, Versions, span_borders
from streaming.decode.registry import FieldDecoder
from streaming.errors import ConfigError, IndexMismatchError, IndexMissingError, StorageError
from streaming.fetch.layout import TakeApart, UnitLayout
from streaming.fetch.read import (
    Apart,
    FetchRange,
    ShardFacts,
    apart_later,
    fetch_unit,
    reads_whole,
    size_of_unit,
)
from streaming.index.chunk_table import ChunkTable
from streaming.index.kept import Selected
from streaming.index.sample_table import SampleLocation, SampleTable
from streaming.packing.layout import PackRows
from streaming.plan.order import EpochOrders, Orders, OrderSettings
from streaming.plan.settings import ShuffleConfig, order_settings
from streaming.storage import ActiveRequest, Storage, redact, scheme_of
from streaming.types import Int64Array

LOCAL_GAP_BYTES = 128 << 10
"""A hole in a file that is worth another read: one takes 20 us, and 256 KiB more of the page cache another 22 us
(benchmarks/bench_fields.py, 2026-11), to which the checksum and disks that are slower than memory come."""
REMOTE_GAP_BYTES = 1 << 20
"""Smallest gap in an object that is worth another GET: 12 ms at the 85 MB/s of one GET, by AWS's guidelines for S3.
The same as in the Rust crate object_store (``OBJECT_STORE_COALESCE_DEFAULT``) and in zarr-python."""

FILTER_GAP_BYTES = 128 << 10
"""The same where samples are filtered out, in any store: what is read costs the network's rate, while the requests of
other chunks are on their way; at 10 % kept of samples of 100 KB, holes of 1 MiB would be nearly all that there is
(docs/design/0023-filters.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The part of the shards that a view covers: samples ``[first, stop)``, which begin in chunk ``first_chunk``.

    ``table`` has the rows of these samples: of their chunks, which ``chunks`` has anyway, or of the units of a cut set.
    """

    first: int
    stop: int
    first_chunk: int
    table: ChunkTable
    chunks: ChunkTable

    @classmethod
    def of(cls, shards: OpenShards, first: int, stop: int, units: ChunkTable | None = None) -> Window:
        """Return samples ``[first, stop)`` of some shards, or of the ``units`` that these are cut into.

        Raises:
            IndexMissingError: They have no chunk table.
        """
        if shards.table is None:
            raise IndexMissingError(shards.missing_index)
        first_chunk, chunks = shards.table.between(first, stop)
        if units is None:
            return cls(first=first, stop=stop, first_chunk=first_chunk, table=chunks, chunks=chunks)
        first_chunk, table = units.between(first, stop)
        return cls(first=first, stop=stop, first_chunk=first_chunk, table=table, chunks=chunks)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Places:
    """Where the samples of some rows are stored: one of each row, or those of its pack.

    Attributes:
        splits: int64 [B + 1]; entries ``splits[b]`` to ``splits[b + 1]`` are of row b.
        shards: int64 [n], shard of each sample, among those of its set.
        numbers: int64 [n], its number in the shard.
    """

    splits: Int64Array
    shards: Int64Array
    numbers: Int64Array


class OneOrder(ABC):
    """Order the chunks of a set, pass after pass, with the user's settings.

    Attributes:
        shuffle: Whether epochs are shuffled.
        shuffle_config: How they are shuffled.
        seed: Seed of the order.
        names: See ``Source``: a single set has none.
        bad_samples_file: Where bad samples are recorded; None: nowhere.
    """

    shuffle: bool
    shuffle_config: ShuffleConfig
    seed: int
    names: tuple[str, ...] = ()
    bad_samples_file: str | None

    @property
    @abstractmethod
    def chunk_samples(self) -> Int64Array:
        """int64[C], samples of each chunk."""

    @property
    def dealing(self) -> dict[str, object]:
        """The options that say how samples are dealt out, as given."""
        chosen = replace(self.shuffle_config, seed=None)
        shuffle = self.shuffle if chosen == ShuffleConfig() else chosen
        return {"shuffle": shuffle, "seed": self.seed}

    @property
    def bad_files(self) -> dict[str, str]:
        """See ``ShardSet``."""
        return {} if self.bad_samples_file is None else {"": self.bad_samples_file}

    def _order_by(self, shuffle: object, seed: object) -> None:
        """Apply the user's choice of order: True, False or a ``ShuffleConfig``, whose seed overrides ``seed``.

        Raises:
            ConfigError: It is none of these, or the seed is invalid.
        """
        if not isinstance(shuffle, (bool, ShuffleConfig)):
            raise ConfigError(f"shuffle: expected True, False or a ShuffleConfig, got {shuffle!r}")
        self.shuffle = bool(shuffle)
        self.shuffle_config = shuffle if isinstance(shuffle, ShuffleConfig) else ShuffleConfig()
        self.seed = checked_seed("seed", seed if self.shuffle_config.seed is None else self.shuffle_config.seed)

    def source_of(self, chunk_ids: Int64Array) -> Int64Array:
        """See ``Source``: zeros."""
        return np.zeros(len(chunk_ids), np.int64)

    def order_settings(self, global_batch_size: int) -> OrderSettings:
        """Return the order under a loader with batches of this size."""
        chosen = self.shuffle_config
        return order_settings(
            shuffle=self.shuffle, seed=self.seed, lanes=chosen.lanes, window=chosen.window, scope=chosen.scope,
            global_batch_size=global_batch_size, num_samples=int(self.chunk_samples.sum()),
            num_chunks=len(self.chunk_samples),
        )  # fmt: skip

    def orders(self, settings: OrderSettings) -> Orders:
        """Return the order of each pass."""
        return EpochOrders(self.chunk_samples, settings)

    def ordered(
        self, *, shuffle: bool | None = None, seed: int | None = None, lanes: int | None = None,
        window: int | None = None,
    ) -> Self:  # fmt: skip
        """Return the same set in another order; None: as it is.

        Raises:
            ConfigError: A number is out of range.
        """
        made = copy.copy(self)
        changes: dict[str, Any] = {"seed": seed, "lanes": lanes, "window": window}
        made.shuffle = self.shuffle if shuffle is None else shuffle
        made.shuffle_config = replace(
            self.shuffle_config, **{name: value for name, value in changes.items() if value is not None}
        )
        made.seed = self.seed if seed is None else checked_seed("seed", seed)
        return made

    def memory_cure(self, lanes: int, room_bytes: int, *, resumed: bool = False) -> str:  # noqa: ARG002  as Source has it
        """See ``Source``: nothing of its own."""
        return ""


class ChunkSource(OneOrder):
    """Read shards with a chunk table, or a range of their samples: the engine's view of a ``StreamingDataset``.

    A ``streaming.engine.source.Source``. Thread-safe.

    Attributes:
        storage: The store of the shards.
        shards: The shards, and their chunk table if they have one.
        cache: Cache of fetched chunks, or None.
        fields: Fields to read; None: all.
    """

    is_packed = False
    storage: Storage
    shards: OpenShards
    cache: NodeCache | None
    fields: tuple[str, ...] | None
    decoders: FieldDecoder
    _window: Window | None
    _selected: Selected | None
    _versions: Versions
    _recent: RandomAccess
    _units: ChunkTable | None = None

    @property
    def table(self) -> ChunkTable:
        """The chunk table.

        Raises:
            IndexMissingError: The set has no index and is too large to index on the fly.
        """
        if self._selected is not None:
            return self._selected.table
        return self.whole_table if self._window is None else self._window.table

    @property
    def whole_table(self) -> ChunkTable:
        """The rows of all shards, of which ``table`` has those that this set reads: chunks, or units.

        Raises:
            IndexMissingError: The set has no index and is too large to index on the fly.
        """
        if self.shards.table is None:
            raise IndexMissingError(self.shards.missing_index)
        return self.shards.table if self._units is None else self._units

    @property
    def can_be_cut(self) -> bool:
        """Whether ``in_units`` works: not for groups of samples, each of which reads parts of the same chunks."""
        return self._selected is None or self._selected.can_be_cut

    def in_units(self, units: ChunkTable) -> Self:
        """Return the same set with rows of a finer table of its shards as its chunks (``streaming.catalog.cut``)."""
        made = copy.copy(self)
        made._units = units
        if self._selected is not None:
            made._selected = self._selected.over(units)
        elif self._window is not None:
            made._window = Window.of(self.shards, self._window.first, self._window.stop, units)
        made._recent = RandomAccess(self._recent)
        return made

    @property
    def indexed(self) -> bool:
        """Whether there is a chunk table; without one the set can only be streamed."""
        return self.shards.table is not None

    @property
    def urls(self) -> Sequence[str]:
        """URLs of the shards, as they are requested; they may contain secrets."""
        return self.shards.urls

    @property
    def fingerprint(self) -> str:
        """See ``ChunkTable.fingerprint``, and ``Selected.fingerprint`` of a filtered set."""
        if self._selected is not None:
            return self._selected.fingerprint
        chunks = self.shards.table if self._window is None else self._window.chunks
        return self.table.fingerprint if chunks is None else chunks.fingerprint

    @property
    def can_grow(self) -> bool:
        """Whether the set can be recognized after shards were appended; not for ranges and groups of samples."""
        return self._window is None and (self._selected is None or self._selected.is_whole)

    def chunks_when(self, fingerprint: str, num_shards: int | None) -> int | None:
        """Return the number of chunks that the set had when this was its fingerprint.

        Returns None unless shards have only been appended since.

        Args:
            fingerprint: Fingerprint of the set, current or earlier.
            num_shards: Number of shards that it had; None: search, from all of them downwards.
        """
        whole = self.shards.table
        if fingerprint == self.fingerprint:
            return len(self.chunk_samples)
        if whole is None or not self.can_grow:
            return None
        counts = range(len(whole.shards) - 1, 0, -1) if num_shards is None else (num_shards,)
        for count in counts:
            if not 0 < count < len(whole.shards):
                continue
            base = whole.take(range(count)).fingerprint
            if fingerprint == (base if self._selected is None else self._selected.fingerprint_of(base, count)):
                return int(np.searchsorted(self.table.shard, count))
        return None

    @property
    def chunk_samples(self) -> Int64Array:
        """int64[C], samples of each chunk."""
        return self.table.num_samples

    @property
    def stored_samples(self) -> Int64Array:
        """int64 [C], samples in the bytes of each chunk, including those that a filter leaves out."""
        if self._selected is None:
            return self.chunk_samples
        return self.whole_table.num_samples[self._selected.chunks]

    @property
    def used_samples(self) -> Int64Array:
        """int64 [C], samples in the bytes of each chunk that are delivered."""
        return self.chunk_samples

    def stored_between(self, firsts: Int64Array, stops: Int64Array) -> Int64Array:
        """Return the samples stored in the bytes of each run of chunks ``[first, stop)``, int64 [n]."""
        counts = self.chunk_samples
        if self._selected is not None:
            counts = self.whole_table.num_samples
            firsts, stops = self._selected.chunks[firsts], self._selected.chunks[stops - 1] + 1
        before = sums(counts)
        return before[stops] - before[firsts]

    @property
    def stored_set(self) -> ChunkSource:
        """The set whose shards hold the samples: this one."""
        return self

    def places(self, chunk_ids: Int64Array, offsets: Int64Array, passes: Int64Array, seed: int) -> Places:  # noqa: ARG002
        """Return where the samples at these offsets of chunks are stored, the same in all passes."""
        numbers = self.table.first_sample[chunk_ids] + self.samples_of(chunk_ids, offsets)
        splits = np.arange(len(chunk_ids) + 1)
        return Places(splits=splits, shards=self.table.shard[chunk_ids].astype(np.int64), numbers=numbers)

    def chunk_with(self, shard: int, number: int) -> int | None:
        """Return the chunk that delivers a sample of a shard if no filter leaves it out; None: none does."""
        low, high = self.table.rows_of(shard)
        chunk = low + int(np.searchsorted(self.table.first_sample[low:high], number, side="right")) - 1
        return chunk if chunk >= low else None

    def numbers_of(self, shards: Int64Array, numbers: Int64Array) -> Int64Array:
        """Return the number in this set of each sample, which it has, given by shard and number there; int64 [n]."""
        starts, found = sums(self.chunk_samples), np.empty_like(numbers)
        for shard in np.unique(shards).tolist():
            low, _ = self.table.rows_of(shard)
            rows = shards == shard
            found[rows] = starts[low] + sums(self.keeps(shard))[numbers[rows]]
        return found

    @property
    def chunk_bytes(self) -> Int64Array:
        """int64[C], bytes of each chunk."""
        return self.table.chunk_bytes

    @property
    def byte_starts(self) -> Int64Array:
        """int64[C], where each chunk begins in its shard."""
        return self.table.byte_start

    @property
    def is_local(self) -> bool:
        """Whether all shards are files of this machine."""
        return all(scheme_of(url) == "file" for url in self.shards.urls)

    @property
    def can_be_mapped(self) -> bool:
        """Whether chunks can be mapped where they lie."""
        return self.cache is None and self.is_local

    @property
    def has_gaps(self) -> bool:
        """Whether a filter leaves samples out, so that offsets differ from the numbers inside a chunk's bytes."""
        return self._selected is not None

    def samples_of(self, chunk_ids: Int64Array, offsets: Int64Array) -> Int64Array:
        """See ``Source``: the offsets, unless a filter leaves samples out."""
        return offsets if self._selected is None else self._selected.inside(chunk_ids, offsets)

    def members(self, chunk_id: int, offsets: Int64Array, pass_number: int, seed: int) -> Int64Array:  # noqa: ARG002
        """See ``Source``: one sample each, the same in all passes."""
        return self.samples_of(np.full_like(offsets, chunk_id), offsets)

    def packs(self, chunk_ids: Int64Array, offsets: Int64Array, passes: Int64Array, seed: int) -> PackRows:  # noqa: ARG002
        """See ``Source``: this is no packed set."""
        raise AssertionError("samples are dealt out one by one")

    def has_packs(self, chunk_ids: Int64Array, passes: Int64Array, seed: int) -> bool:  # noqa: ARG002  as Source has it
        """See ``Source``: this is no packed set."""
        return False

    def keep_at_most(self, num_bytes: int) -> None:
        """See ``Source``: nothing is kept."""

    def keeps(self, shard: int) -> npt.NDArray[np.bool_]:
        """Return which samples of a shard are in the set, bool [n]."""
        whole = self.shards.table
        if whole is None:
            raise IndexMissingError(self.shards.missing_index)
        count = whole.shards[shard].num_samples
        if self._selected is not None:
            return self._selected.rows(shard, count)
        before = sum(one.num_samples for one in whole.shards[:shard])
        low, high = (0, count) if self._window is None else (self._window.first - before, self._window.stop - before)
        places = np.arange(count)
        return (places >= low) & (places < high)

    def counters(self) -> dict[str, float]:
        """Return the counters of storage and cache since the set was opened, over all its loaders."""
        cache = {} if self.cache is None else self.cache.metrics.snapshot()
        return {**self.storage.metrics.snapshot(), **cache}

    def in_flight(self) -> list[ActiveRequest]:
        """Return the storage requests in progress, oldest first."""
        return self.storage.in_flight()

    @cached_property
    def _shown_urls(self) -> npt.NDArray[np.object_]:
        return np.array([redact(url) for url in self.shards.urls], object)

    def urls_of(self, chunk_ids: Int64Array) -> list[str]:
        """Return the URL of the shard of each chunk, as shown in samples and messages, without secrets."""
        urls: list[str] = self._shown_urls[self.table.shard[chunk_ids]].tolist()
        return urls

    def _whole_id(self, chunk_id: int) -> int:
        """Return the number of a chunk in the table of all chunks."""
        if self._selected is not None:
            return int(self._selected.chunks[chunk_id])
        return chunk_id if self._window is None else self._window.first_chunk + chunk_id

    def run(self, first: int, stop: int) -> FetchRange:
        """Return the byte range of chunks ``[first, stop)`` of one shard, including what a filter leaves out.

        Samples count from the first one in the first chunk's bytes: there is no ``lead``.
        """
        head, whole = self.chunk(first), self.whole_table
        low, high = self._whole_id(first), self._whole_id(stop - 1) + 1
        if high - low == 1:
            return replace(head, lead=0)
        ends, sums = (whole.byte_end[low:high] - head.byte_start).tolist(), whole.crc32c[low:high].tolist()
        return replace(
            head, byte_end=int(whole.byte_end[high - 1]), num_samples=int(whole.num_samples[low:high].sum()),
            crc32c=None, spans=tuple(zip(ends, sums, strict=True)), lead=0,
        )  # fmt: skip

    def chunk(self, chunk_id: int) -> FetchRange:
        """Return the byte range of a whole chunk; in a view, a chunk that crosses its border includes other samples."""
        table, lead = self.table, 0
        if self._selected is not None:
            table, chunk_id = self.whole_table, int(self._selected.chunks[chunk_id])
        elif self._window is not None:
            first = int(table.first_sample[chunk_id])
            table, chunk_id = self.whole_table, self._window.first_chunk + chunk_id
            lead = first - int(table.first_sample[chunk_id])
        shard = int(table.shard[chunk_id])
        return FetchRange(
            url=self.shards.urls[shard],
            byte_start=int(table.byte_start[chunk_id]),
            byte_end=int(table.byte_end[chunk_id]),
            first_sample=int(table.first_sample[chunk_id]),
            num_samples=int(table.num_samples[chunk_id]),
            crc32c=int(table.crc32c[chunk_id]),
            shard_bytes=table.shards[shard].size_bytes,
            version="" if self.cache is None else self._versions.of(shard),
            lead=lead,
            fields=self.fields,
            kept="" if self._selected is None else self._selected.fingerprint,
        )

    def slice(self, chunk_id: int, first: int, stop: int) -> FetchRange:
        """Return the byte range of samples ``[first, stop)`` of a chunk.

        For less than the chunk this needs a sample table.

        The range consists of whole spans, so that it can be checked: it begins with ``lead`` other samples, and may end
        with some. If the table is missing, it is the whole chunk.
        """
        whole = self.chunk(chunk_id)
        there = whole.num_samples if self._selected is not None else self.table.num_samples[chunk_id]
        if first == 0 and stop == there:
            return whole
        samples = self._recent.table(self, int(self.table.shard[chunk_id]))
        if samples is None:
            self._recent.tell_lost(whole.shown_url)
            return replace(whole, lead=whole.lead + first)
        begin = int(self.table.first_sample[chunk_id])
        low, high, spans = samples.widened(begin + first, begin + stop)
        lead = begin + first - low
        if high - low == whole.num_samples:
            return replace(whole, lead=lead)
        starts = samples.record_starts
        return replace(
            whole,
            byte_start=int(starts[low]),
            byte_end=int(starts[high]),
            first_sample=low,
            num_samples=high - low,
            crc32c=None,
            spans=spans,
            lead=lead,
        )

    def fetch_unit(self, wanted: FetchRange, out: memoryview, apart: Apart = apart_later) -> UnitLayout | TakeApart:
        """Fetch a range into ``out``; locating its samples, by ``apart``, may be left to the caller."""
        known = replace(self._facts_of(wanted.url), apart=apart)
        return fetch_unit(self.storage, wanted, out, self.cache, known)

    def apart(self, wanted: FetchRange) -> TakeApart:
        """See ``Source``: samples are located by the tar headers."""
        return apart_later(wanted)

    def reads_whole(self, wanted: FetchRange) -> bool:
        """Tell whether :meth:`fetch_unit` reads all of a range, as its ``fields`` are."""
        return reads_whole(wanted, self._facts_of(wanted.url))

    def unit_bytes(self, chunk_ids: Int64Array) -> Int64Array:
        """Return the number of bytes that each chunk takes with these ``fields`` and this filter, int64.

        Reads sample tables.
        """
        if self.fields is None and self._selected is None:
            return self.chunk_bytes[chunk_ids]
        return self.range_bytes([self.chunk(chunk_id) for chunk_id in chunk_ids.tolist()])

    def range_bytes(self, ranges: Sequence[FetchRange]) -> Int64Array:
        """Return the number of bytes that each range takes with these ``fields`` and this filter, int64.

        Reads sample tables.
        """

        def size(wanted: FetchRange) -> int:
            return size_of_unit(wanted, self._facts_of(wanted.url))

        with ThreadPoolExecutor(TABLE_REQUESTS, "shardstream-tables") as threads:
            return np.fromiter(threads.map(size, ranges), np.int64, len(ranges))

    def _facts_of(self, url: str) -> ShardFacts:
        gap_bytes = LOCAL_GAP_BYTES if scheme_of(url) == "file" else REMOTE_GAP_BYTES
        samples = partial(self.samples_at, url)
        if self._selected is None:
            return ShardFacts(samples=samples, gap_bytes=gap_bytes)
        kept = partial(self._selected.kept.rows, self._numbers[url])
        return ShardFacts(samples=samples, gap_bytes=min(gap_bytes, FILTER_GAP_BYTES), kept=kept)

    def locate(self, chunk_id: int, inside: int) -> SampleLocation | None:
        """Return the location of a sample in its shard; None if the sample table is missing or unreadable."""
        try:
            samples = self.samples_at(self.shards.urls[int(self.table.shard[chunk_id])])
        except StorageError:
            return None
        return None if samples is None else samples.lookup(int(self.table.first_sample[chunk_id]) + inside)

    def samples_at(self, url: str) -> SampleTable | None:
        """Return the sample table of a shard; None if it is missing or does not match.

        Raises:
            IndexFormatError: It is damaged.
        """
        try:
            return self._recent.table(self, self._numbers[url])
        except IndexMismatchError:
            return None

    def span_borders(self, room_bytes: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return where spans begin, in samples and in bytes of chunks laid end to end, ``room_bytes`` each.

        Of a filtered set, where chunks begin.
        """
        if self._selected is not None:
            counts = self.table.num_samples
            return np.cumsum(counts) - counts, np.cumsum(room_bytes) - room_bytes
        return span_borders(self.table, room_bytes, lambda shard: self.samples_at(self.shards.urls[shard]))

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """The number of each shard, by its URL."""
        return {url: number for number, url in enumerate(self.shards.urls)}

    def has_sample_tables(self) -> bool:
        """Tell whether the first shard has a sample table (datasets are indexed as a whole)."""
        return self._recent.table(self, 0) is not None
