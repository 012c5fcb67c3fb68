"""Provide the documents of groups of chunks as packs: ``PackedSource``."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from operator import attrgetter
from typing import Self, TypeAlias

import numpy as np

from streaming.common.arrays import sums
from streaming.common.lru_cache import LruCache
from streaming.errors import IndexMismatchError, StorageError
from streaming.order.packing.fit import Fit, fit, other_company, pack
from streaming.order.packing.layout import KeptPacks, PackRows
from streaming.order.packing.rules import PackRules
from streaming.shards.catalog.open import sample_records
from streaming.shards.catalog.source import ChunkSource, OneOrder
from streaming.shards.fetch.layout import Fetched, TakeApart, UnitLayout
from streaming.shards.fetch.read import FetchRange, apart_later, layout_by_records
from streaming.shards.index.sample_table import Records, SampleLocation
from streaming.shards.late.fields import LateField
from streaming.storage import ActiveRequest
from streaming.types import Int64Array, override

LengthsOf: TypeAlias = Callable[[int], Int64Array]
"""Returns the number of tokens of every sample of a shard, by the shard's number: int64[n], or int64[n, 1 + budgets];
-1: unknown. Thread-safe; the function caches its results."""
_KEPT_BYTES = 256 << 20
"""Bytes of packs kept of the groups that were needed last. A group of 256 packs of 8,192 tokens, with documents of 600
tokens, takes 110 KB, so these are some thousand groups."""
_FITS_SHARE, _RECORDS_SHARE = 8, 4
"""Divisors of the memory of packs: for fits (4 bytes per piece, packs 32), and for the records of documents."""
Fits: TypeAlias = LruCache[int, Fit]
"""Pieces of a group that go together, by the group's first chunk."""


def kept_fits() -> Fits:
    """Return a cache of the fits of the groups that were counted or packed last."""
    return LruCache[int, Fit](_KEPT_BYTES // _FITS_SHARE, attrgetter("num_bytes"))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackGroups:
    """Runs of chunks, each of one shard, that are packed separately; int64 [G] each.

    Attributes:
        firsts: First chunk of each, among those of the dataset.
        stops: End (exclusive) of the chunks of each.
        packs: K, number of packs of each.
        digests: Identify the lengths of the documents of each shard, as hex digits; "" of one without any.
        digest: Identifies the lengths of all documents.
    """

    firsts: Int64Array
    stops: Int64Array
    packs: Int64Array
    digests: tuple[str, ...]
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", self.digest_when(len(self.digests)))

    def digest_when(self, num_shards: int) -> str:
        """Return what ``digest`` was when there were only the first shards."""
        return sha256(bytes.fromhex("".join(self.digests[:num_shards]))).hexdigest()


class PackedSource(OneOrder):
    """Provide the documents of a dataset as packs: its groups act as chunks, its packs as samples.

    A ``streaming.run.engine.source.Source``. The number of packs in a group depends only on the documents' lengths;
    which documents share a pack also depends on the order's seed and the pass. Thread-safe.

    Args:
        documents: The dataset.
        groups: Groups that hold all chunks of the dataset, in their order.
        lengths_of: Returns the number of tokens of each sample of a shard.
        rules: Rules for packing documents.
        fits: Known fits of groups that were counted here.
    """

    has_gaps = can_be_cut = False
    why_whole = "a Packed reads whole groups of chunks"
    fields: tuple[str, ...] | None

    slices = read_distant = None  # groups are read whole

    def __init__(
        self, documents: ChunkSource, groups: PackGroups, lengths_of: LengthsOf, rules: PackRules, fits: Fits
    ) -> None:
        self.documents = documents.kept_whole()  # several documents are joined from memory
        self.rules = rules
        self.storage, self.cache = documents.storage, documents.cache
        self.shuffle, self.shuffle_config, self.seed = documents.shuffle, documents.shuffle_config, documents.seed
        self._groups = groups
        self._lengths_of = lengths_of
        self._fits = fits
        self._recent = LruCache[tuple[int, int, int], KeptPacks](_KEPT_BYTES, attrgetter("num_bytes"))
        self._records = LruCache[int, Records | None](_KEPT_BYTES // _RECORDS_SHARE, _size_of_records)

    @property
    def is_packed(self) -> bool:
        """See ``OneOrder``: they are."""
        return True

    @property
    def late(self) -> tuple[LateField, ...]:
        """See ``ChunkSource``: the late fields of the documents."""
        return self.documents.late

    @property
    def num_ranges(self) -> int:
        """See ``ChunkSource``."""
        return self.documents.num_ranges

    # --- packs ---

    @property
    @override
    def rows(self) -> Self:
        return self

    def packs(self, chunk_ids: Int64Array, offsets: Int64Array, passes: Int64Array, seed: int) -> PackRows:
        """See ``RowSamples``."""
        groups = list(zip(chunk_ids.tolist(), passes.tolist(), strict=True))
        found = {group: self._packs_of(*group, seed) for group in dict.fromkeys(groups)}
        return PackRows.chosen([(found[group], offset) for group, offset in zip(groups, offsets.tolist(), strict=True)])

    def has_packs(self, chunk_ids: Int64Array, passes: Int64Array, seed: int) -> bool:
        """See ``RowSamples``."""
        groups = dict.fromkeys(zip(chunk_ids.tolist(), passes.tolist(), strict=True))
        return all((*group, seed) in self._recent for group in groups)

    def keep_at_most(self, num_bytes: int) -> None:
        """See ``RowSamples``: fits, records and packs have parts of it."""
        self._fits.keep_at_most(num_bytes // _FITS_SHARE)
        self._records.keep_at_most(num_bytes // _RECORDS_SHARE)
        self._recent.keep_at_most(num_bytes - num_bytes // _FITS_SHARE - num_bytes // _RECORDS_SHARE)

    def _packs_of(self, group: int, pass_number: int, seed: int) -> KeptPacks:
        """Return all packs of a group in a pass. Computed once, even if many threads request it."""
        return self._recent.of((group, pass_number, seed), lambda: self._packed(group, pass_number, seed))

    def _packed(self, group: int, pass_number: int, seed: int) -> KeptPacks:
        shard, samples = self.samples_in(group)
        lengths = self._lengths_of(shard)[samples]
        tokens = tokens_of(lengths)
        known = self._fits.of(int(self._groups.firsts[group]), lambda: fit(lengths, self.rules))
        packs = other_company(pack(lengths, self.rules, known), seed=seed, epoch=pass_number, group=group)
        return PackRows(
            splits=packs.splits, samples=(samples - self.chunk(group).first_sample)[packs.documents],
            starts=packs.starts, stops=packs.stops, lengths=tokens[packs.documents],
        ).kept()  # fmt: skip

    def samples_in(self, group: int) -> tuple[int, Int64Array]:
        """Return the shard of a group, and the numbers in it of the group's samples that the dataset delivers."""
        first, stop = int(self._groups.firsts[group]), int(self._groups.stops[group])
        return samples_between(self.documents, first, stop)

    def records_of(self, shard: int) -> Records | None:
        """Return the locations of the fields read in a shard; None if its sample table is missing, or of another shard.

        Raises:
            IndexFormatError: It is damaged.
        """
        documents = self.documents

        def read() -> Records | None:
            return sample_records(documents.storage, documents.shards, shard, documents.fields or ())

        try:
            return self._records.of(shard, read)
        except IndexMismatchError:
            return None

    # --- what the engine needs (streaming.run.engine.source.Source) ---

    @property
    def fingerprint(self) -> str:
        """Identifies these packs: the documents, their lengths, and how they are packed."""
        return self._fingerprint_of(self.documents.fingerprint, self._groups.digest)

    def _fingerprint_of(self, documents: str, lengths: str) -> str:
        """Return the fingerprint of packs, given that of their documents and a digest of their lengths."""
        rules = {name: value for name, value in asdict(self.rules).items() if value or name != "alike"}  # as before it
        return sha256(json.dumps([documents, lengths, rules], sort_keys=True).encode()).hexdigest()

    @property
    def can_grow(self) -> bool:
        """See ``ChunkSource``: as the documents, since a group lies in one shard."""
        return self.documents.can_grow

    @property
    def opened_versions(self) -> dict[str, tuple[int, ...]]:
        """See ``Source``: those of the documents."""
        return self.documents.opened_versions

    def where_is(self, fingerprint: str, numbers: Sequence[int] = ()) -> str:  # noqa: ARG002  it is one of packs
        """See ``Source``: the version of the documents that the state names."""
        return self.documents.where_is("", numbers)

    def chunks_when(self, fingerprint: str, num_shards: int | None) -> int | None:
        """See ``ChunkSource``: the number of groups; None also for a state that does not say how many shards it had."""
        if fingerprint == self.fingerprint:
            return len(self.chunk_samples)
        if num_shards is None or not self.can_grow or not 0 < num_shards < len(self.urls):
            return None
        documents, lengths = self.documents.fingerprint_when(num_shards), self._groups.digest_when(num_shards)
        if fingerprint != self._fingerprint_of(documents, lengths):
            return None
        return int(np.searchsorted(self._groups.firsts, np.searchsorted(self.documents.table.shard, num_shards)))

    @property
    def urls(self) -> Sequence[str]:
        """URLs of the shards, as requested; they may contain secrets."""
        return self.documents.urls

    @property
    def chunk_samples(self) -> Int64Array:
        """int64 [G], number of packs of each group."""
        return self._groups.packs

    @property
    def used_samples(self) -> Int64Array:
        """int64 [G], number of documents of each group that the dataset delivers."""
        before = sums(self.documents.chunk_samples)
        return before[self._groups.stops] - before[self._groups.firsts]

    @property
    def stored_samples(self) -> Int64Array:
        """int64 [G], number of documents in the bytes of each group, including those that a filter leaves out."""
        return self.documents.selection.stored_between(self._groups.firsts, self._groups.stops)

    def why_left_out(self, shard: int, number: int) -> str:
        """See ``OneOrder``: documents may be in no pack."""
        if not self.documents.selection.mask(shard)[number]:
            return ""
        return (
            f"is in no pack: it is longer than length={self.rules.length} (overlong={self.rules.overlong!r}), larger "
            "than a budget, or empty"
        )

    def chunk_with(self, shard: int, number: int) -> int | None:
        """Return the group of a document of a shard; None: the document is in no pack."""
        chunk = self.documents.chunk_with(shard, number)
        return None if chunk is None else int(np.searchsorted(self._groups.firsts, chunk, side="right")) - 1

    @property
    def chunk_bytes(self) -> Int64Array:
        """int64 [G], size of each group in its shard, in bytes."""
        return self.documents.laid(self._groups.firsts, self._groups.stops)[1]

    @property
    def byte_starts(self) -> Int64Array:
        """int64 [G], offset of each group in its shard."""
        return self.documents.laid(self._groups.firsts, self._groups.stops)[0]

    @property
    def is_local(self) -> bool:
        """Whether all shards are files of this machine."""
        return self.documents.is_local

    @property
    def in_place(self) -> Self | None:
        """See ``Bytes``: if chunks are."""
        return None if self.documents.in_place is None else self

    def urls_of(self, chunk_ids: Int64Array) -> list[str]:
        """Return the URL of the shard of each group, as shown in samples and messages."""
        return self.documents.urls_of(self._groups.firsts[chunk_ids])

    def chunk(self, chunk_id: int) -> FetchRange:
        """Return the byte range of a whole group: its chunks, and samples between them that a filter leaves out."""
        return self.documents.run(int(self._groups.firsts[chunk_id]), int(self._groups.stops[chunk_id]))

    def fetch_unit(self, wanted: FetchRange, out: memoryview) -> Fetched:
        """Fill ``out``. Locating its samples may be left to the caller; the lengths of its shard are then cached."""
        self._lengths_of(self.documents.shard_of(wanted))
        return self.documents.fetch_unit(wanted, out, self.apart)

    def apart(self, wanted: FetchRange) -> UnitLayout | TakeApart:
        """See ``InPlace``: the sample table says it in less time than headers, unless it is gone or does not fit."""
        if wanted.late:
            return apart_later(wanted)
        found, numbers = None, self.documents.shards.numbers
        with suppress(StorageError):
            records = None if self.documents.fields is None else self.records_of(numbers[wanted.url])
            found = None if records is None else layout_by_records(records, wanted)
        return apart_later(wanted) if found is None else found

    def reads_whole(self, wanted: FetchRange) -> bool:
        """Return whether :meth:`fetch_unit` reads all of a range."""
        return self.documents.reads_whole(wanted)

    def unit_bytes(self, chunk_ids: Int64Array) -> Int64Array:
        """Return the number of bytes that each group takes with these ``fields`` and this filter."""
        return self.documents.range_bytes([self.chunk(chunk_id) for chunk_id in chunk_ids.tolist()])

    def locate(self, chunk_id: int, inside: int) -> SampleLocation | None:
        """Return the location in its shard of a document inside a group."""
        wanted = self.chunk(chunk_id)
        samples = self.documents.samples_at(wanted.url)
        return None if samples is None else samples.lookup(wanted.first_sample + inside)

    def counters(self) -> dict[str, float]:
        """Return the counters of storage and cache since the set was opened."""
        return self.documents.counters()

    def in_flight(self) -> list[ActiveRequest]:
        """Return the storage requests in progress, oldest first."""
        return self.documents.in_flight()


def _size_of_records(records: Records | None) -> int:
    return 0 if records is None else records.num_bytes


def tokens_of(lengths: Int64Array) -> Int64Array:
    """Return the first column of lengths, int64[n]: tokens, even if packs have other budgets."""
    return lengths if lengths.ndim == 1 else lengths[:, 0]


def samples_between(documents: ChunkSource, first: int, stop: int) -> tuple[int, Int64Array]:
    """Return the shard of chunks ``[first, stop)``, all of one, and the numbers in it of their samples."""
    return int(documents.table.shard[first]), documents.selection.samples(first, stop)
