"""Read shards as loops and engines do, chunk by chunk or in slices, with their order: ``ChunkSource``."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Self

import numpy as np

from streaming.build.decode import ReadDistant
from streaming.build.decode.registry import FieldDecoder, ranged_fields
from streaming.common.arguments import checked_seed
from streaming.common.arrays import sums
from streaming.common.threads import on_threads
from streaming.errors import ConfigError, IndexMismatchError, IndexMissingError, StorageError
from streaming.order.packing.layout import RowSamples, SingleSamples
from streaming.order.plan.memory import LEAST_MAPPED_BYTES, PAGE_BYTES
from streaming.order.plan.order import EpochOrders, Orders, OrderSettings
from streaming.order.plan.settings import ShuffleConfig, order_settings
from streaming.shards.cache import NodeCache
from streaming.shards.catalog.open import OpenShards
from streaming.shards.catalog.random_access import TABLE_REQUESTS, RandomAccess, Versions, span_borders
from streaming.shards.fetch.beside import fetch_parts, size_of_parts
from streaming.shards.fetch.distant import Distant
from streaming.shards.fetch.layout import Fetched, TakeApart
from streaming.shards.fetch.read import (
    Apart,
    FetchRange,
    ShardFacts,
    apart_later,
    fetch_unit,
    place_behind,
    read_member,
    read_part,
    reads_whole,
)
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.sample_table import SampleLocation, SampleTable
from streaming.shards.index.selection import Selection
from streaming.shards.late.fields import LateField
from streaming.shards.schema.meeting import Meaning
from streaming.storage import ActiveRequest, Storage, scheme_of
from streaming.types import Int64Array, override

LOCAL_GAP_BYTES = 128 << 10
"""Smallest gap in a file that is worth another read: a read takes 20 us, and 256 KiB more of the page cache another 22
us (benchmarks/bench_fields.py, 2026-11), in addition to the checksum and to disks that are slower than memory."""
REMOTE_GAP_BYTES = 1 << 20
"""Smallest gap in an object that is worth another GET: 12 ms at the 85 MB/s of one GET, by AWS's guidelines for S3. The
same as in the Rust crate object_store (``OBJECT_STORE_COALESCE_DEFAULT``) and in zarr-python."""

FILTER_GAP_BYTES = 128 << 10
"""The same for filtered samples, in any store: bytes cost the network's rate, while the requests of other chunks are in
flight. With 10 % kept of samples of 100 KB, gaps of 1 MiB would be nearly all gaps
(docs/design/0020-filters.md)."""


class OneOrder(ABC):
    """Order the chunks of a set, pass after pass, with the user's settings.

    Attributes:
        shuffle: Whether epochs are shuffled.
        shuffle_config: How they are shuffled.
        seed: Seed of the order.
        names: See ``Source``: a single set has none.
        bad_samples_file: File in which bad samples are recorded; None: no file.
        meaning: The meaning of the sets that are read as one; empty for most kinds of sets.
        why_whole: Why chunks cannot be cut, if so, for messages.
    """

    shuffle: bool
    shuffle_config: ShuffleConfig
    seed: int
    names: tuple[str, ...] = ()
    bad_samples_file: str | None
    meaning: Meaning = Meaning()
    why_whole = "it is a group of samples"

    @property
    def is_packed(self) -> bool:
        """Whether packs of samples are dealt to ranks."""
        return False

    @property
    @abstractmethod
    def chunk_samples(self) -> Int64Array:
        """int64 [C], number of samples of each chunk."""

    @property
    def used_samples(self) -> Int64Array:
        """int64 [C], number of samples in the bytes of each chunk that are delivered."""
        return self.chunk_samples

    @property
    def stored_samples(self) -> Int64Array:
        """int64 [C], number of samples in the bytes of each chunk, including those that a filter leaves out."""
        return self.used_samples

    def why_left_out(self, shard: int, number: int) -> str:  # noqa: ARG002  few sets know
        """Return why no row has a sample of a shard, if neither filters nor ranges explain it; otherwise ""."""
        return ""

    @property
    def dealing(self) -> dict[str, object]:
        """The options that determine how samples are dealt to ranks, as given."""
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

    @property
    def indexed(self) -> bool:
        """Whether the number of samples is known; otherwise the set can only be streamed."""
        return True

    def samples_of(self, chunk_ids: Int64Array, offsets: Int64Array) -> Int64Array:  # noqa: ARG002  as Source has it
        """See ``Source``: the offsets, as nothing is left out."""
        return offsets

    @property
    def rows(self) -> RowSamples:
        """See ``Source``: one sample each, unless a set deals out rows of several."""
        return SingleSamples(self.samples_of)

    def order_settings(self, global_batch_size: int) -> OrderSettings:
        """Return the order for this global batch size."""
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
        """Return the same set in another order; None: keep the order.

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

    @property
    def opened_versions(self) -> dict[str, tuple[int, ...]]:
        """See ``Source``: none."""
        return {}

    def where_is(self, fingerprint: str, numbers: Sequence[int] = ()) -> str:  # noqa: ARG002  few sets know
        """See ``Source``: not known."""
        return ""

    def memory_cure(self, lanes: int, room_bytes: int, *, resumed: bool = False) -> str:  # noqa: ARG002  as Source has it
        """See ``Source``: nothing of its own."""
        return ""


def _no_version(shard: int) -> str:  # noqa: ARG001  only the node cache asks for versions
    return ""


def _skews(starts: Int64Array, sizes: Int64Array) -> Int64Array:
    """Return how far into a page chunks begin; see ``FetchRange.skew_bytes``."""
    return np.where(sizes >= LEAST_MAPPED_BYTES, starts % PAGE_BYTES, 0)


class OfTable(OneOrder):
    """A set whose chunks are the rows of a chunk table."""

    @property
    @abstractmethod
    def table(self) -> ChunkTable:
        """The chunk table: the rows that this set reads."""

    @property
    def chunk_samples(self) -> Int64Array:
        """int64 [C], number of samples of each chunk."""
        return self.table.num_samples

    @property
    @override
    def used_samples(self) -> Int64Array:
        return self.table.num_samples

    @property
    def chunk_bytes(self) -> Int64Array:
        """int64 [C], size of each chunk in bytes."""
        return self.table.chunk_bytes

    @property
    def byte_starts(self) -> Int64Array:
        """int64 [C], offset of each chunk in its shard."""
        return self.table.byte_start


class ChunkSource(OfTable):
    """Read shards with a chunk table, or a range of their samples: the engine's view of a ``StreamingDataset``.

    A ``streaming.run.engine.source.Source``. Thread-safe.

    Attributes:
        storage: The store of the shards.
        shards: The shards, and their chunk table if they have one.
        cache: Cache of fetched chunks, or None.
        fields: Fields to read; None: all.
        late: Those of them that were added after the shards were written.
    """

    storage: Storage
    shards: OpenShards
    cache: NodeCache | None
    fields: tuple[str, ...] | None
    decoders: FieldDecoder
    late: tuple[LateField, ...] = ()
    _selection: Selection | None
    _versions: Versions
    _late_versions: Mapping[str, Versions] = MappingProxyType({})
    _recent: RandomAccess
    _has_no_distant = False

    @property
    def selection(self) -> Selection:
        """The samples of the shards that this set has, and the rows of their table that hold them.

        Raises:
            IndexMissingError: The set has no index and is too large to index on the fly.
        """
        if self._selection is None:
            raise IndexMissingError(self.shards.missing_index)
        return self._selection

    @property
    def table(self) -> ChunkTable:
        """See ``OfTable`` and ``selection``."""
        return self.selection.table

    def selecting(self, selection: Selection) -> Self:
        """Return the same set with other samples of its shards, or with its samples in other rows of their table."""
        made = copy.copy(self)
        made._selection = selection
        return made

    @property
    def can_be_cut(self) -> bool:
        """See ``Selection``; late fields have chunks of their own."""
        return self.selection.can_be_cut and not self.late

    @property
    def can_grow(self) -> bool:
        """See ``Selection``."""
        return self.selection.can_grow

    @property
    def indexed(self) -> bool:
        """See ``OneOrder``: with a chunk table."""
        return self.shards.table is not None

    @property
    @override
    def chunk_bytes(self) -> Int64Array:
        return self._laid[1] if self.late else self.table.chunk_bytes

    @property
    @override
    def byte_starts(self) -> Int64Array:
        return self._laid[0] if self.late else self.table.byte_start

    @property
    def _laid(self) -> tuple[Int64Array, Int64Array]:
        every = np.arange(self.table.num_chunks)
        return self.laid(every, every + 1)

    def laid(self, firsts: Int64Array, stops: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return where runs of chunks begin in their files, and the memory that they take with late fields beside them.

        Args:
            firsts: int64 [n], first chunk of each run, which is of one shard.
            stops: int64 [n], end (exclusive) of its chunks.
        """
        table, rows = self.table, np.asarray(self.selection.rows)
        starts = table.byte_start[firsts]
        ends = table.byte_end[stops - 1] - starts
        skews, is_first = _skews(starts, ends), np.full(len(ends), self._only_late)
        for one in self.late:
            mine = one.rows[rows[firsts]]
            at, there = np.maximum(mine, 0), mine >= 0
            begins = one.chunks.byte_start[at]
            sizes = one.chunks.byte_end[np.maximum(one.rows[rows[stops - 1]], 0)] - begins
            heads = _skews(begins, sizes)
            behind = place_behind(skews, ends, heads) + sizes
            first = there & is_first
            starts, skews = np.where(first, begins, starts), np.where(first, heads, skews)
            ends = np.where(first, sizes, np.where(there, behind, ends))
            is_first &= ~there
        return starts, ends

    @property
    def urls(self) -> Sequence[str]:
        """URLs of the shards, as requested; they may contain secrets."""
        return self.shards.urls

    @property
    def fingerprint(self) -> str:
        """See ``Selection.identity``."""
        return self.selection.identity

    def shard_of(self, wanted: FetchRange) -> int:
        """Return the number of the shard whose samples a range holds, of itself or of a late field of it."""
        if wanted.late:
            late = next(one for one in self.late if one.name == wanted.late)
            return int(late.of_tar[late.numbers[wanted.url]])
        return self.shards.numbers[wanted.url]

    def fingerprint_when(self, num_shards: int) -> str:
        """Return the fingerprint of the same selection of the first shards alone, for a set that can grow."""
        return self.selection.identity_when(num_shards)

    def chunks_when(self, fingerprint: str, num_shards: int | None) -> int | None:
        """See ``Selection.rows_when``."""
        return self.selection.rows_when(fingerprint, num_shards)

    @property
    @override
    def stored_samples(self) -> Int64Array:
        return self.selection.stored_samples

    def chunk_with(self, shard: int, number: int) -> int | None:
        """Return the chunk that delivers a sample of a shard if no filter leaves it out; None: no chunk does."""
        low, high = self.table.rows_of(shard)
        chunk = low + int(np.searchsorted(self.table.first_sample[low:high], number, side="right")) - 1
        return chunk if chunk >= low else None

    def numbers_of(self, shards: Int64Array, numbers: Int64Array) -> Int64Array:
        """Return the numbers in this set of samples that it has, given by shard and number there; int64 [n]."""
        starts, found = sums(self.chunk_samples), np.empty_like(numbers)
        for shard in np.unique(shards).tolist():
            low, _ = self.table.rows_of(shard)
            rows = shards == shard
            found[rows] = starts[low] + sums(self.selection.mask(shard))[numbers[rows]]
        return found

    @property
    def is_local(self) -> bool:
        """Whether all shards are files of this machine."""
        urls = [*self.shards.urls, *(one.urls[0] for one in self.late)]
        return all(scheme_of(url) == "file" for url in urls)

    @property
    def in_place(self) -> Self | None:
        """See ``Bytes``: local files, without a cache in front of them."""
        return self if self.cache is None and self.is_local else None

    @property
    def has_gaps(self) -> bool:
        """Whether a filter leaves samples out, so that offsets differ from the numbers inside a chunk's bytes."""
        return bool(self.selection.filter)

    def samples_of(self, chunk_ids: Int64Array, offsets: Int64Array) -> Int64Array:
        """See ``Source``, and ``Selection.inside``."""
        return self.selection.inside(chunk_ids, offsets)

    def counters(self) -> dict[str, float]:
        """Return the counters of storage and cache since the set was opened, over all its loaders."""
        cache = {} if self.cache is None else self.cache.metrics.snapshot()
        return {**self.storage.metrics.snapshot(), **cache}

    def in_flight(self) -> list[ActiveRequest]:
        """Return the storage requests in progress, oldest first."""
        return self.storage.in_flight()

    def urls_of(self, chunk_ids: Int64Array) -> list[str]:
        """Return the URL of the shard of each chunk, as shown in samples and messages, without secrets."""
        urls: list[str] = self.shards.shown_urls[self.table.shard[chunk_ids]].tolist()
        return urls

    def run(self, first: int, stop: int) -> FetchRange:
        """Return the byte range of chunks ``[first, stop)`` of one shard, including samples that a filter leaves out.

        Samples count from the first one in the first chunk's bytes: there is no ``lead``.
        """
        head, whole, rows = self._chunk(first), self.selection.whole, self.selection.rows
        low, high = int(rows[first]), int(rows[stop - 1]) + 1
        if high - low > 1:
            ends, sums = (whole.byte_end[low:high] - head.byte_start).tolist(), whole.crc32c[low:high].tolist()
            head = replace(
                head, byte_end=int(whole.byte_end[high - 1]), num_samples=int(whole.num_samples[low:high].sum()),
                crc32c=None, spans=tuple(zip(ends, sums, strict=True)),
            )  # fmt: skip
        return self._with_late(replace(head, lead=0), low, high)

    def chunk(self, chunk_id: int) -> FetchRange:
        """Return the byte range of a whole chunk. In a view, a chunk that crosses its border includes other samples."""
        row = int(self.selection.rows[chunk_id])
        return self._with_late(self._chunk(chunk_id), row, row + 1)

    def _with_late(self, wanted: FetchRange, low: int, high: int) -> FetchRange:
        """Return a range with those of late fields beside it, given the rows ``[low, high)`` of whole chunks around it.

        If only late fields are read, without the range itself.
        """
        if not self.late:
            return wanted
        beside: list[FetchRange] = []
        main = wanted
        for one in self.late:
            version_of = _no_version if self.cache is None else self._late_versions[one.name].of
            found = one.run(low, high, wanted.kept, version_of)
            if found is None:
                continue
            found = self._around(found, one, main)
            if main is wanted and self._only_late:
                main = replace(found, lead=wanted.lead + wanted.first_sample - found.first_sample)
            else:
                beside.append(found)
        return main.with_beside(tuple(beside))

    @property
    def num_ranges(self) -> int:
        """How many ranges a chunk is: its own, and one for each late field."""
        return len(self.late) + (not self._only_late or not self.late)

    @property
    def _only_late(self) -> bool:
        """Whether nothing is read of the shards themselves."""
        return self.fields is not None and {*self.fields} <= {one.name for one in self.late}

    def _around(self, found: FetchRange, late: LateField, wanted: FetchRange) -> FetchRange:
        """Return the part of a range of a late field that holds the samples of another range, in whole spans."""
        if found.num_samples == wanted.num_samples:
            return found
        table = self._recent.late_table(self, late, late.numbers[found.url])
        low, high, spans = table.widened(wanted.first_sample, wanted.first_sample + wanted.num_samples)
        if high - low == found.num_samples:
            return found
        starts = table.record_starts
        return replace(
            found, byte_start=int(starts[low]), byte_end=int(starts[high]), first_sample=low, num_samples=high - low,
            crc32c=None, spans=spans,
        )  # fmt: skip

    def _chunk(self, chunk_id: int) -> FetchRange:
        given = self.selection
        whole, row = given.whole, int(given.rows[chunk_id])
        shard, first_sample = int(whole.shard[row]), int(whole.first_sample[row])
        return FetchRange(
            url=self.shards.urls[shard],
            byte_start=int(whole.byte_start[row]),
            byte_end=int(whole.byte_end[row]),
            first_sample=first_sample,
            num_samples=int(whole.num_samples[row]),
            crc32c=int(whole.crc32c[row]),
            shard_bytes=whole.shards[shard].size_bytes,
            version="" if self.cache is None else self._versions.of(shard),
            lead=int(given.table.first_sample[chunk_id]) - first_sample,
            fields=self.fields,
            kept=given.filter,
        )

    def slice(self, chunk_id: int, first: int, stop: int) -> FetchRange:
        """Return the byte range of samples ``[first, stop)`` of a chunk.

        A part of a chunk needs a sample table.

        The range consists of whole spans, so that it can be checked: it begins with ``lead`` other samples, and may end
        with others. Without the table, it is the whole chunk.
        """
        row = int(self.selection.rows[chunk_id])
        return self._with_late(self._slice(chunk_id, first, stop), row, row + 1)

    def _slice(self, chunk_id: int, first: int, stop: int) -> FetchRange:
        whole = self._chunk(chunk_id)
        if first == 0 and stop == self.stored_samples[chunk_id]:
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

    def fetch_unit(self, wanted: FetchRange, out: memoryview, apart: Apart = apart_later) -> Fetched:
        """Fetch a range into ``out``. Locating its samples, by ``apart``, may be left to the caller."""

        def fetch(part: FetchRange, _: int, memory: memoryview) -> Fetched:
            known = self._facts_of(part, apart_later if part.late else apart)
            return fetch_unit(self.storage, part, memory, self.cache, known)

        return fetch_parts(wanted, out, fetch)

    def apart(self, wanted: FetchRange) -> TakeApart:
        """See ``InPlace``: samples are located by the tar headers."""
        return apart_later(wanted)

    def reads_whole(self, wanted: FetchRange) -> bool:
        """Return whether :meth:`fetch_unit` reads all of a range, given these ``fields``."""
        return self._is_read_whole or reads_whole(wanted, self._facts_of(wanted))

    def unit_bytes(self, chunk_ids: Int64Array) -> Int64Array:
        """Return the number of bytes that each chunk takes with these ``fields`` and this filter, int64.

        Reads sample tables.
        """
        if self._is_read_whole:
            return self.chunk_bytes[chunk_ids]
        return self.range_bytes([self.chunk(chunk_id) for chunk_id in chunk_ids.tolist()])

    def range_bytes(self, ranges: Sequence[FetchRange]) -> Int64Array:
        """Return the number of bytes that each range takes with these ``fields`` and this filter, int64.

        Reads sample tables.
        """

        def size(wanted: FetchRange) -> int:
            return size_of_parts(wanted, self._facts_of)

        return np.array(on_threads(size, ranges, TABLE_REQUESTS, name="shardstream-tables"), np.int64)

    @property
    def _is_read_whole(self) -> bool:
        """Whether every range is read as a whole, for any choice of samples."""
        return self.fields is None and not self.selection.filter and self.distant is None

    def _facts_of(self, wanted: FetchRange, apart: Apart = apart_later) -> ShardFacts:
        url = wanted.url
        gap_bytes = LOCAL_GAP_BYTES if scheme_of(url) == "file" else REMOTE_GAP_BYTES
        if self.selection.filter:
            gap_bytes = min(gap_bytes, FILTER_GAP_BYTES)
        kept = partial(self.selection.kept, self.shard_of(wanted))
        if wanted.late:
            late = next(one for one in self.late if one.name == wanted.late)
            of_late = partial(self._recent.late_table, self, late, late.numbers[url])
            return ShardFacts(samples=of_late, gap_bytes=gap_bytes, kept=kept, apart=apart)
        samples = partial(self.samples_at, url)
        return ShardFacts(samples=samples, gap_bytes=gap_bytes, kept=kept, apart=apart, distant=self.distant)

    @property
    def distant(self) -> Distant | None:
        """Determines which members stay in the store, for ``read_distant``; None: none."""
        reads = None if self._has_no_distant else ranged_fields(self.decoders)
        return None if reads is None else Distant(reads)

    def kept_whole(self) -> Self:
        """Return the same set, without distant members; it shares the sample tables that were read."""
        made = copy.copy(self)
        made._has_no_distant, made._recent = True, self._recent
        return made

    @property
    def read_distant(self) -> ReadDistant | None:
        """See ``Bytes``: as ``distant`` says."""
        return None if self.distant is None else self._read_distant

    def _read_distant(self, chunk_id: int, start: int, stop: int, *, whole: bool) -> bytearray:
        wanted = self._chunk(chunk_id)
        if whole:
            return read_member(self.storage, wanted, start, stop, self.samples_at(wanted.url))
        return read_part(self.storage, wanted, start, stop)

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
            return self._recent.table(self, self.shards.numbers[url])
        except IndexMismatchError:
            return None

    def stored_sizes(self, shard: int, field: str) -> Int64Array | None:
        """Return the bytes of a field of each sample of a shard, int64 [n]; -1: the sample lacks it.

        None: the sample table is missing or does not match.

        Raises:
            IndexMismatchError: The sample table of a late field is gone.
            IndexFormatError: A sample table is damaged.
        """
        late = next((one for one in self.late if one.name == field), None)
        samples: SampleTable | None
        if late is None:
            samples = self.samples_at(self.shards.urls[shard])
            if samples is None:
                return None
        else:
            tar = int(late.shards[shard])
            samples = None if tar < 0 else self._recent.late_table(self, late, tar)
        if samples is None or field not in samples.fields:
            return np.full(self.table.shards[shard].num_samples, -1, np.int64)
        starts, sizes = samples.fields[field]
        return np.where(starts >= 0, sizes, -1)

    def span_borders(self, room_bytes: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return where spans begin, in samples and in bytes of chunks laid end to end, ``room_bytes`` each.

        For a filtered set, and for one with late fields, return where chunks begin.
        """
        if self.selection.filter or self.late:
            counts = self.table.num_samples
            return np.cumsum(counts) - counts, np.cumsum(room_bytes) - room_bytes
        return span_borders(self.table, room_bytes, lambda shard: self.samples_at(self.shards.urls[shard]))

    @property
    def slices(self) -> Self | None:
        """See ``Table``: by sample tables, if the first shard has one (datasets are indexed as a whole)."""
        return None if self._recent.table(self, 0) is None else self
