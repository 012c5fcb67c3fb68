"""Read single samples, and distinguish versions of a shard at the same URL."""

from __future__ import annotations

import hashlib
import itertools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np

from streaming.build.decode import DistantMember, ReadDistant, decode_field, decode_member, of_shard, raw
from streaming.common.arrays import sums
from streaming.common.forks import in_children
from streaming.common.lru_cache import LruCache
from streaming.common.threads import map_threads, on_threads
from streaming.errors import shell_place
from streaming.shards.catalog.open import OpenShards, sample_table
from streaming.shards.fetch.layout import Fetched, UnitLayout
from streaming.shards.fetch.read import FetchRange, UnitKey
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.sample_table import SampleTable
from streaming.shards.late.fields import LateField
from streaming.storage import Storage
from streaming.types import Decoder, Int64Array, Sample

_log = logging.getLogger(__name__)
TABLE_REQUESTS = 16
"""Number of sample tables requested in parallel."""
NEAR_BYTES = 1 << 20
"""Largest gap, in bytes, between samples of a chunk that are read with one request: 12 ms at the 85 MB/s of one GET,
about the time to start another one."""
_RECENT_CHUNKS = 4
"""Number of chunks cached for random access, because neighbors are usually requested together."""
_RECENT_TABLES_BYTES = 128 << 20
"""Size of the sample table cache: four tables of a million samples, or ten thousand tables of a hundred videos."""


class Readable(Protocol):
    """Interface of a dataset for random access."""

    storage: Storage
    shards: OpenShards
    fields: tuple[str, ...] | None

    @property
    def table(self) -> ChunkTable:
        """The chunk table."""

    def urls_of(self, chunk_ids: Int64Array) -> list[str]:
        """Return the URL of the shard of each chunk, as messages show it."""

    def samples_of(self, chunk_ids: Int64Array, offsets: Int64Array) -> Int64Array:
        """Return the sample inside each chunk at an offset."""

    def chunk(self, chunk_id: int) -> FetchRange:
        """Return the bytes of a whole chunk."""

    def slice(self, chunk_id: int, first: int, stop: int) -> FetchRange:
        """Return the bytes of samples ``[first, stop)`` of a chunk."""

    def fetch_unit(self, wanted: FetchRange, out: memoryview) -> Fetched:
        """Fetch a range into ``out``. Locating its samples may be left to the caller."""

    @property
    def read_distant(self) -> ReadDistant | None:
        """Reads members that ``fetch_unit`` left in the store; None: it leaves none there."""


class Decodable(Readable, Protocol):
    """Interface of a dataset whose samples are decoded."""

    def decoder_of(self, field: str, number: int) -> Decoder:
        """Return the decoder of a field of one sample, by its number in the dataset."""


class HasChunks(Protocol):
    """Shards with a chunk table."""

    @property
    def chunks(self) -> ChunkTable:
        """The chunk table."""


class Versions:
    """Version of a shard, which distinguishes it from others at the same URL: its store, size and chunk checksums."""

    def __init__(self, shards: HasChunks, storage_options: Mapping[str, object] | None) -> None:
        self._shards = shards
        options = storage_options or {}
        self._store = str(options.get("endpoint_url", ""))
        self._known: dict[int, str] = {}

    def of(self, shard: int) -> str:
        """Return the version of one shard. It is the same in every process."""
        version = self._known.get(shard)
        if version is None:
            table = self._shards.chunks
            low, high = table.rows_of(shard)
            sums = hashlib.blake2b(table.crc32c[low:high].tobytes(), digest_size=16).hexdigest()
            version = self._known[shard] = f"{self._store}|{table.shards[shard].size_bytes}|{sums}"
        return version


class RandomAccess:
    """Cache recent reads of one dataset, for random access. Thread-safe.

    Each call gets the dataset, which owns this object: with a reference back, its tables would stay until Python's
    garbage collector runs, which large jobs turn off. Other selections of its shards, and copies with other functions,
    share this object: cached data depends on neither.
    """

    def __init__(self) -> None:
        self._chunks: OrderedDict[UnitKey, tuple[bytes, UnitLayout]] = OrderedDict()
        self._tables = LruCache[int | tuple[str, int], SampleTable | None](_RECENT_TABLES_BYTES, _size_of_table)
        self._renew_locks()
        in_children(self, RandomAccess._renew_locks)

    def _renew_locks(self) -> None:
        """Give a forked child its own locks. Data read before the fork stays cached."""
        self._lock = threading.Lock()
        self._told_lost = False

    def read(self, dataset: Decodable, numbers: Int64Array) -> list[Sample]:
        """Return samples by number, int64 [n], in this order, decoded but not transformed.

        Samples that lie close together are read with one request, several requests at a time.
        """
        starts = sums(dataset.table.num_samples)
        chunks = np.searchsorted(starts, numbers, side="right") - 1
        inside = dataset.samples_of(chunks, numbers - starts[chunks])
        urls = dataset.urls_of(chunks)
        found: dict[int, Sample] = {}
        for places, piece in self._pieces(dataset, chunks, inside):
            for place in places:
                key, fields = piece.sample(int(inside[place]), dataset, int(chunks[place]))
                found[place] = _decode(dataset, urls[place], key, fields, int(numbers[place]))
        return [found[place] for place in range(len(numbers))]

    def scan(self, dataset: Decodable) -> Iterator[Sample]:
        """Yield all samples in storage order, decoded but not transformed. Each chunk is read once."""
        place = itertools.count()
        for chunk, count in enumerate(dataset.table.num_samples.tolist()):
            chunks = np.full(count, chunk, np.int64)
            inside = dataset.samples_of(chunks, np.arange(count)).tolist()
            (url,) = dataset.urls_of(chunks[:1])
            piece = self._piece(dataset, chunk, inside[0], inside[-1])
            for number in inside:
                key, fields = piece.sample(number, dataset, chunk)
                yield _decode(dataset, url, key, fields, next(place))

    def table(self, dataset: Readable, shard: int) -> SampleTable | None:
        """Return the sample table of a shard; None if it has none. Read once, even if many threads request it."""
        return self._tables.of(shard, lambda: sample_table(dataset.storage, dataset.shards, shard))

    def late_table(self, dataset: Readable, late: LateField, tar: int) -> SampleTable:
        """Return the sample table of a tar of a late field; read once.

        Raises:
            IndexMismatchError: It is gone, or of another tar.
            IndexFormatError: It is damaged.
        """
        found = self._tables.of((late.name, tar), lambda: late.sample_table(dataset.storage, tar))
        assert found is not None  # noqa: S101  what was made
        return found

    def tell_lost(self, shown_url: str) -> None:
        """Log once that a shard's sample table is missing while others exist."""
        with self._lock:
            told, self._told_lost = self._told_lost, True  # one thread finds it False
        if not told:
            _log.warning(
                "%s: this shard's sample table is gone, so each rank reads whole chunks where it needs only a part "
                "(other shards may be affected too). `shard_tools index %s` rebuilds it",
                shown_url,
                shell_place(shown_url),
            )

    def _pieces(self, dataset: Readable, chunks: Int64Array, inside: Int64Array) -> Iterator[tuple[list[int], _Piece]]:
        """Read the bytes of some samples inside chunks, int64 [n] each; yield them with the places that they serve."""
        runs: list[list[int]] = []
        ends = (-1, 0)  # chunk and last byte of the last run
        for place in np.lexsort((inside, chunks)).tolist():
            chunk, number = int(chunks[place]), int(inside[place])
            alone = self._range(dataset, chunk, number, number)
            if runs and ends[0] == chunk and alone.byte_start - ends[1] <= NEAR_BYTES:
                runs[-1].append(place)
            else:
                runs.append([place])
            ends = chunk, alone.byte_end

        def read(run: list[int]) -> _Piece:
            return self._piece(dataset, int(chunks[run[0]]), int(inside[run[0]]), int(inside[run[-1]]))

        num_threads = min(TABLE_REQUESTS, len(runs))
        pieces = map_threads(read, runs, num_threads, name="shardstream-samples", ahead=len(runs))
        with closing(pieces):
            yield from zip(runs, pieces, strict=True)

    def _range(self, dataset: Readable, chunk: int, first: int, last: int) -> FetchRange:
        """Return the range to read for samples ``first`` to ``last`` of a chunk: all of it, without a sample table."""
        if self._has_table(dataset, chunk):
            return dataset.slice(chunk, first, last + 1)
        whole = dataset.chunk(chunk)
        return replace(whole, lead=whole.lead + first)

    def _has_table(self, dataset: Readable, chunk: int) -> bool:
        return self.table(dataset, int(dataset.table.shard[chunk])) is not None

    def _piece(self, dataset: Readable, chunk: int, first: int, last: int) -> _Piece:
        """Read samples ``first`` to ``last`` inside a chunk; without a sample table, read all of it and cache it."""
        wanted, whole = self._range(dataset, chunk, first, last), dataset.chunk(chunk)
        with self._lock:
            # The entry may be dropped right afterwards. The returned piece stays valid, since it never changes.
            known = self._chunks.get(whole.key)
        if known is not None:
            return _Piece(*known, -whole.lead)
        known = _read(dataset, wanted)
        if not self._has_table(dataset, chunk):
            with self._lock:
                # At most _RECENT_CHUNKS. Two threads that read the same chunk leave one entry.
                self._chunks[whole.key] = known
                while len(self._chunks) > _RECENT_CHUNKS:
                    self._chunks.popitem(last=False)
        return _Piece(*known, first - wanted.lead)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes of a chunk that were read, and the places of their samples.

    Attributes:
        data: The bytes.
        layout: Places of the fields of each sample in the bytes.
        first: Index inside the chunk of the first sample of the layout.
    """

    data: bytes
    layout: UnitLayout
    first: int

    def sample(self, number: int, dataset: Readable, chunk: int) -> tuple[str, dict[str, bytes | DistantMember]]:
        """Return key and fields of a sample inside the chunk: the fields that the dataset reads.

        Raises:
            DataError: It is damaged.
        """
        row, wanted = number - self.first, dataset.fields
        if row in self.layout.damage:
            raise self.layout.damage[row]
        fields: dict[str, bytes | DistantMember] = {}
        for column, name in enumerate(self.layout.fields):
            start, size = int(self.layout.starts[row, column]), int(self.layout.sizes[row, column])
            if start == -1 or (wanted is not None and name not in wanted):
                continue
            if start < 0:
                assert dataset.read_distant is not None, "it left the member in the store"  # noqa: S101
                fields[name] = DistantMember.at(partial(dataset.read_distant, chunk), ~start, size)
            else:
                fields[name] = self.data[start : start + size]
        return self.layout.keys[row], fields


def _read(dataset: Readable, wanted: FetchRange) -> tuple[bytes, UnitLayout]:
    buffer = bytearray(wanted.num_bytes)
    with memoryview(buffer) as out:
        layout = dataset.fetch_unit(wanted, out).apart(out)
        return bytes(out[: layout.num_bytes]), layout


def _decode(dataset: Decodable, url: str, key: str, fields: Mapping[str, bytes | DistantMember], number: int) -> Sample:
    sample: Sample = {"__key__": key, "__url__": url}
    for name in sorted(fields):
        decoder = of_shard(dataset.decoder_of(name, number), url)
        data = fields[name]
        if isinstance(data, DistantMember):
            sample[name] = decode_member(decoder, data, url=url, key=key, field=name)
            continue
        sample[name] = data if decoder is raw else decode_field(decoder, data, url=url, key=key, field=name)
    return sample


def span_borders(
    table: ChunkTable, room_bytes: Int64Array, samples_of: Callable[[int], SampleTable | None]
) -> tuple[Int64Array, Int64Array]:
    """Return where the spans of a set begin, in samples and in bytes of its chunks laid end to end.

    Reads all sample tables.

    Args:
        table: The chunk table, perhaps of a view; a chunk that crosses its border is counted whole.
        room_bytes: int64 [C], room that each chunk takes, in bytes.
        samples_of: Returns the sample table of a shard by number. Without one, a chunk counts as one span.
        samples_of: Returns the sample table of a shard by number. Without one, a chunk counts as one span.

    Returns:
        int64 [n] each, ascending; empty without chunks.
    """
    sample_base, byte_base = np.cumsum(table.num_samples) - table.num_samples, np.cumsum(room_bytes) - room_bytes

    def of_shard(shard: int) -> tuple[Int64Array, Int64Array]:
        low, high = table.rows_of(shard)
        samples = samples_of(shard)
        if samples is None:
            return sample_base[low:high], byte_base[low:high]
        firsts = table.first_sample[low:high].astype(np.int64)
        cuts = samples.span_starts
        cuts = np.union1d(firsts, cuts[(cuts > firsts[0]) & (cuts < firsts[-1] + table.num_samples[high - 1])])
        chunks = np.searchsorted(firsts, cuts, side="right") - 1
        inside = samples.record_starts[cuts] - table.byte_start[low + chunks]
        inside[np.searchsorted(cuts, firsts)] = 0
        return sample_base[low + chunks] + cuts - firsts[chunks], byte_base[low + chunks] + inside

    shards: list[int] = np.unique(table.shard).tolist()
    found = on_threads(of_shard, shards, TABLE_REQUESTS, name="shardstream-tables")
    found.insert(0, (sample_base[:0], byte_base[:0]))
    return np.concatenate([firsts for firsts, _ in found]), np.concatenate([begins for _, begins in found])


def _size_of_table(table: SampleTable | None) -> int:
    """Estimate the memory of a table: keys are Python strings, fields have two numbers, large ones three."""
    return 0 if table is None else table.num_samples * (100 + 24 * len(table.fields))
