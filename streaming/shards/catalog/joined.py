"""Join several datasets into one table of chunks, for loops and engines: ``JoinedSource``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from hashlib import sha256
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from streaming.build.decode import ReadDistant
from streaming.common.arrays import rows_by, sums
from streaming.order.packing.layout import KeptPacks, PackRows, RowSamples
from streaming.shards.cache import NodeCache
from streaming.shards.catalog.source import ChunkSource, OneOrder
from streaming.shards.fetch.chunks import Bytes, InPlace, Table
from streaming.shards.fetch.layout import Fetched, TakeApart, UnitLayout
from streaming.shards.fetch.read import FetchRange
from streaming.shards.index.sample_table import SampleLocation
from streaming.storage import ActiveRequest, Storage
from streaming.types import Int64Array, ReadBuffer, override


class Joinable(Table, Bytes, Protocol):
    """Interface of a set among others: its chunks, their rows, and its storage.

    Attributes:
        storage: The store of its shards.
        cache: Cache of fetched chunks, or None.
        has_gaps: A filter leaves samples out of the bytes of chunks.
        is_packed: Packs of samples are dealt to ranks.
    """

    storage: Storage
    cache: NodeCache | None

    @property
    def has_gaps(self) -> bool: ...  # noqa: D102

    @property
    def is_packed(self) -> bool: ...  # noqa: D102

    @property
    def fingerprint(self) -> str:
        """Identifies its samples."""

    @property
    def urls(self) -> Sequence[str]:
        """Its shards."""

    @property
    def byte_starts(self) -> Int64Array:
        """See ``InPlace``."""

    @property
    def rows(self) -> RowSamples:
        """The samples of its rows."""

    def counters(self) -> Mapping[str, float]:
        """Return the counters of storage and cache since the set was opened."""

    def in_flight(self) -> list[ActiveRequest]:
        """Return the storage requests in progress, oldest first."""


class JoinedSource(OneOrder):
    """Read several datasets chunk by chunk: their chunks are concatenated, in the order of the sets' names.

    Questions about a chunk go to the chunk's set, with that set's storage, cache and fields. A
    ``streaming.run.engine.source.Source``. Thread-safe.

    Args:
        sets: The datasets by name.
    """

    def __init__(self, sets: Mapping[str, Joinable]) -> None:
        for name in ("chunk_samples", "chunk_bytes", "byte_starts", "_shown_urls", "_have_gaps"):
            self.__dict__.pop(name, None)  # cached values of a copy over other sets
        self._sets = [sets[name] for name in sorted(sets)]
        self._joined = _sharing_storages(self._sets)
        self.names = tuple(sorted(sets))
        self._starts = sums([len(one.chunk_samples) for one in self._joined])

    @property
    def fingerprints(self) -> dict[str, str]:
        """The fingerprint of each source."""
        return {name: one.fingerprint for name, one in zip(self.names, self._joined, strict=True)}

    @property
    def fingerprint(self) -> str:
        """Identifies the sources and their names."""
        lines = "\n".join(f"{len(name)} {name} {found}" for name, found in self.fingerprints.items())
        return sha256(lines.encode()).hexdigest()

    @property
    def urls(self) -> Sequence[str]:
        """URLs of the shards of all sources, as requested; they may contain secrets."""
        return [url for one in self._joined for url in one.urls]

    @cached_property
    def chunk_samples(self) -> Int64Array:
        """int64 [C], number of samples of each chunk."""
        return self._column(lambda one: one.chunk_samples)

    @cached_property
    def chunk_bytes(self) -> Int64Array:
        """int64 [C], size of each chunk in bytes."""
        return self._column(lambda one: one.chunk_bytes)

    @cached_property
    def byte_starts(self) -> Int64Array:
        """int64 [C], offset of each chunk in its shard."""
        return self._column(lambda one: one.byte_starts)

    @property
    def is_local(self) -> bool:
        """Whether all shards are files of this machine."""
        return all(one.is_local for one in self._joined)

    @property
    def in_place(self) -> Self | None:
        """See ``Bytes``: if those of all sets are."""
        return self if all(one.in_place is not None for one in self._joined) else None

    def source_of(self, chunk_ids: Int64Array) -> Int64Array:
        """Return the index into ``names`` of each chunk's source."""
        return np.searchsorted(self._starts, chunk_ids, side="right") - 1

    def samples_of(self, chunk_ids: Int64Array, offsets: Int64Array) -> Int64Array:
        """See ``Source``: the offsets, unless a filter keeps only part of a source."""
        if not self._have_gaps.any():
            return offsets
        found, sources = offsets.copy(), self.source_of(chunk_ids)
        filtered = np.flatnonzero(self._have_gaps[sources])
        for source, among in rows_by(sources[filtered]):
            rows = filtered[among]
            found[rows] = self._joined[source].samples_of(chunk_ids[rows] - self._starts[source], offsets[rows])
        return found

    @cached_property
    def _have_gaps(self) -> npt.NDArray[np.bool_]:
        return np.array([one.has_gaps for one in self._joined])

    def pack_passes(self, passes: Int64Array) -> Int64Array:
        """Return the pass numbers that determine which documents share a pack, for these passes."""
        return passes

    @property
    @override
    def rows(self) -> Self:
        return self

    def packs(self, chunk_ids: Int64Array, offsets: Int64Array, passes: Int64Array, seed: int) -> PackRows:
        """See ``RowSamples``."""
        sources, passes = self.source_of(chunk_ids), self.pack_passes(passes)
        within = chunk_ids - self._starts[sources]
        if len(sources) and (sources == sources[0]).all():
            alone: PackRows = self._joined[sources[0]].rows.packs(within, offsets, passes, seed)
            return replace(alone, sources=sources)
        parts: dict[int, tuple[KeptPacks, int]] = {}
        for source, rows in rows_by(sources):
            found = self._joined[source].rows.packs(within[rows], offsets[rows], passes[rows], seed).kept()
            parts |= {row: (found, pack) for pack, row in enumerate(rows.tolist())}
        return replace(PackRows.chosen([parts[row] for row in range(len(sources))]), sources=sources)

    def has_packs(self, chunk_ids: Int64Array, passes: Int64Array, seed: int) -> bool:
        """See ``RowSamples``."""
        passes = self.pack_passes(passes)
        return all(
            self._joined[source].rows.has_packs(chunk_ids[rows] - self._starts[source], passes[rows], seed)
            for source, rows in rows_by(self.source_of(chunk_ids))
        )

    def keep_at_most(self, num_bytes: int) -> None:
        """See ``RowSamples``: all sets get an equal part."""
        for one in self._joined:
            one.rows.keep_at_most(num_bytes // len(self._joined))

    @property
    def is_packed(self) -> bool:
        """Whether packs of samples are dealt to ranks, by all sets or none."""
        return all(one.is_packed for one in self._joined)

    @cached_property
    def _shown_urls(self) -> npt.NDArray[np.object_]:
        """The shard of each chunk, for display; 8 bytes per chunk."""
        every = [one.urls_of(np.arange(len(one.chunk_samples))) for one in self._joined]
        return np.array([url for urls in every for url in urls], object)

    def urls_of(self, chunk_ids: Int64Array) -> list[str]:
        """Return the URL of the shard of each chunk, as shown in samples and messages."""
        urls: list[str] = self._shown_urls[chunk_ids].tolist()
        return urls

    def chunk(self, chunk_id: int) -> FetchRange:
        """Return the bytes of a whole chunk."""
        source, within = self._place(chunk_id)
        return replace(self._joined[source].chunk(within), source=source)

    def slice(self, chunk_id: int, first: int, stop: int) -> FetchRange:
        """See ``Slices``."""
        source, within = self._place(chunk_id)
        return replace(_sliced(self._joined[source]).slice(within, first, stop), source=source)

    def fetch_unit(self, wanted: FetchRange, out: memoryview) -> Fetched:
        """Fetch a range into ``out``. Locating its samples may be left to the caller."""
        return self._joined[wanted.source].fetch_unit(wanted, out)

    def apart(self, wanted: FetchRange) -> UnitLayout | TakeApart:
        """See ``InPlace``."""
        return self._in_place(wanted).apart(wanted)

    def reads_whole(self, wanted: FetchRange) -> bool:
        """Return whether :meth:`fetch_unit` reads all of a range."""
        return self._in_place(wanted).reads_whole(wanted)

    def _in_place(self, wanted: FetchRange) -> InPlace:
        found = self._joined[wanted.source].in_place
        assert found is not None, "chunks are mapped if those of all sets can be"  # noqa: S101
        return found

    @property
    def read_distant(self) -> ReadDistant | None:
        """See ``Bytes``: if one of the sets leaves members in its store."""
        return self._read_distant if any(one.read_distant is not None for one in self._joined) else None

    def _read_distant(self, chunk_id: int, start: int, stop: int, *, whole: bool) -> ReadBuffer:
        source, within = self._place(chunk_id)
        read = self._joined[source].read_distant
        assert read is not None, "only members of sets that leave some in the store are distant"  # noqa: S101
        return read(within, start, stop, whole=whole)

    def unit_bytes(self, chunk_ids: Int64Array) -> Int64Array:
        """Return the number of bytes that each chunk takes with its source's ``fields``."""
        found = np.empty(len(chunk_ids), np.int64)
        for source, rows in rows_by(self.source_of(chunk_ids)):
            found[rows] = self._joined[source].unit_bytes(chunk_ids[rows] - self._starts[source])
        return found

    @property
    def slices(self) -> Self | None:
        """See ``Table``: if parts of chunks of every set can be read."""
        return self if all(one.slices is not None for one in self._joined) else None

    def span_borders(self, room_bytes: Int64Array) -> tuple[Int64Array, Int64Array]:
        """See ``Slices``."""
        samples, begins = [], []
        num_samples = num_bytes = 0
        for source, one in enumerate(self._joined):
            room = room_bytes[self._starts[source] : self._starts[source + 1]]
            found = _sliced(one).span_borders(room)
            samples.append(found[0] + num_samples)
            begins.append(found[1] + num_bytes)
            num_samples += int(one.chunk_samples.sum())
            num_bytes += int(room.sum())
        return np.concatenate(samples), np.concatenate(begins)

    def locate(self, chunk_id: int, inside: int) -> SampleLocation | None:
        """Return the location in its shard of a sample inside a chunk."""
        source, within = self._place(chunk_id)
        return self._joined[source].locate(within, inside)

    def counters(self) -> dict[str, float]:
        """Return the counters of all sources' storages and caches since they were opened, summed."""
        counted: dict[str, float] = {}
        for one in self._apart():
            for name, value in one.counters().items():
                counted[name] = counted.get(name, 0) + value
        return counted

    def in_flight(self) -> list[ActiveRequest]:
        """Return the requests in progress of all storages, oldest first."""
        calls = [call for one in self._apart() for call in one.in_flight()]
        return sorted(calls, key=lambda call: -call.age_s)

    def _apart(self) -> list[Joinable]:
        """Return the sets without those that share the storage of an earlier one: views, and sets named twice."""
        return list({(id(one.storage), id(one.cache)): one for one in self._sets}.values())

    def _place(self, chunk_id: int) -> tuple[int, int]:
        source = int(np.searchsorted(self._starts, chunk_id, side="right")) - 1
        return source, chunk_id - int(self._starts[source])

    def _column(self, of: Callable[[Any], Int64Array]) -> Int64Array:
        column = np.concatenate([of(one) for one in self._joined])
        column.setflags(write=False)
        return column


def _sliced(one: Joinable) -> ChunkSource:
    """Return a set whose chunks are read in parts."""
    assert isinstance(one, ChunkSource), "other sets are read whole"  # noqa: S101
    return one


def _sharing_storages(sets: Sequence[Joinable]) -> list[Joinable]:
    """Return the sets, copied to use an earlier set's storage if their options are the same.

    So hundreds of sets in a bucket share one client, and its open connections.
    """
    storages: list[Storage] = []
    found: list[Joinable] = []
    for one in sets:
        same = next((storage for storage in storages if storage.is_like(one.storage)), None)
        if same is None:
            storages.append(one.storage)
        elif same is not one.storage and isinstance(one, ChunkSource):
            one = copy.copy(one)  # noqa: PLW2901  the caller's own set does not change
            one.storage = same
        found.append(one)
    return found
