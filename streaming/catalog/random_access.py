"""Read single samples, and distinguish versions of a shard at the same URL."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np

from streaming.arrays import sums
from streaming.catalog.open import OpenShards, sample_table
from streaming.decode import decode_field, raw
from streaming.decode.registry import FieldDecoder
from streaming.fetch.layout import TakeApart, UnitLayout, taken_apart
from streaming.fetch.read import FetchRange, UnitKey
from streaming.forks import in_children
from streaming.index.chunk_table import ChunkTable
from streaming.index.sample_table import SampleTable
from streaming.recent import Recent
from streaming.storage import Storage
from streaming.types import Int64Array, Sample

_log = logging.getLogger(__name__)
TABLE_REQUESTS = 16
"""Number of sample tables requested in parallel."""
_RECENT_CHUNKS = 4
"""Number of chunks cached for random access, because neighbors are usually requested together."""
_RECENT_TABLES_BYTES = 128 << 20
"""Size of the sample table cache: four tables of a million samples, or ten thousand tables of a hundred videos."""


class Readable(Protocol):
    """Interface of a dataset for random access."""

    storage: Storage
    shards: OpenShards
    fields: tuple[str, ...] | None
    decoders: FieldDecoder

    @property
    def table(self) -> ChunkTable:
        """The chunk table."""

    def urls_of(self, chunk_ids: Int64Array) -> list[str]:
        """Return the URL of the shard of each chunk, as messages show it."""

    def samples_of(self, chunk_ids: Int64Array, offsets: Int64Array) -> Int64Array:
        """Return the sample inside each chunk that stands at an offset."""

    def chunk(self, chunk_id: int) -> FetchRange:
        """Return the bytes of a whole chunk."""

    def slice(self, chunk_id: int, first: int, stop: int) -> FetchRange:
        """Return the bytes of samples ``[first, stop)`` of a chunk."""

    def fetch_unit(self, wanted: FetchRange, out: memoryview) -> UnitLayout | TakeApart:
        """Fetch a range into ``out``; locating its samples may be left to the caller."""


class Versions:
    """Version of a shard, which distinguishes it from others at the same URL: its store, size and chunk checksums."""

    def __init__(self, shards: OpenShards, storage_options: Mapping[str, object] | None) -> None:
        self._shards = shards
        options = storage_options or {}
        self._store = str(options.get("endpoint_url", ""))
        self._known: dict[int, str] = {}

    def of(self, shard: int) -> str:
        """Return the version of one shard; the same in every process."""
        version = self._known.get(shard)
        if version is None:
            table = self._shards.chunks
            low, high = table.rows_of(shard)
            sums = hashlib.blake2b(table.crc32c[low:high].tobytes(), digest_size=16).hexdigest()
            version = self._known[shard] = f"{self._store}|{table.shards[shard].size_bytes}|{sums}"
        return version


class RandomAccess:
    """Cache recent reads of one dataset, for random access. Thread-safe.

    The dataset, which owns this, is given to each call: if both knew each other, its tables would stay until Python's
    garbage collector runs, which large jobs turn off. Other selections of its shards, and copies with other functions,
    share it: what is kept depends on neither.
    """

    def __init__(self) -> None:
        self._chunks: OrderedDict[UnitKey, tuple[bytes, UnitLayout]] = OrderedDict()
        self._tables = Recent[int, SampleTable | None](_RECENT_TABLES_BYTES, _size_of_table)
        self._renew_locks()
        in_children(self, RandomAccess._renew_locks)

    def _renew_locks(self) -> None:
        """Give a forked child its own locks; what was read before the fork stays cached."""
        self._lock = threading.Lock()
        self._told_lost = False

    def sample(self, dataset: Readable, index: int) -> Sample:
        """Return sample number ``index``, decoded but not transformed."""
        starts = sums(dataset.table.num_samples)
        chunk = int(np.searchsorted(starts, index, side="right")) - 1
        offset = np.array([index - starts[chunk]], np.int64)
        inside = int(dataset.samples_of(np.array([chunk], np.int64), offset)[0])
        (url,) = dataset.urls_of(np.array([chunk]))
        key, fields = self._fields(dataset, chunk, inside)
        return _decode(dataset, url, key, fields)

    def table(self, dataset: Readable, shard: int) -> SampleTable | None:
        """Return the sample table of a shard, or None if it has none; read once, even if many threads ask."""
        return self._tables.of(shard, lambda: sample_table(dataset.storage, dataset.shards, shard))

    def tell_lost(self, shown_url: str) -> None:
        """Log, once, that a shard's sample table is missing while others exist."""
        with self._lock:
            told, self._told_lost = self._told_lost, True  # one thread finds it False
        if not told:
            _log.warning(
                "%s: this shard's sample table is gone, so each rank reads whole chunks where it needs only a part "
                "(other shards may be affected too). `shard_tools index %s` rebuilds it",
                shown_url,
                shown_url,
            )

    def _fields(self, dataset: Readable, chunk: int, offset: int) -> tuple[str, dict[str, bytes]]:
        """Return key and raw fields of the sample at this place inside a chunk."""
        whole = dataset.chunk(chunk)
        with self._lock:
            # The entry may go right afterwards; what was returned stays valid, since nobody changes it.
            known = self._chunks.get(whole.key)
        if known is None and self.table(dataset, int(dataset.table.shard[chunk])) is not None:
            wanted = dataset.slice(chunk, offset, offset + 1)
            offset = wanted.lead
            known = _read(dataset, wanted)
        else:
            offset += whole.lead
            known = known or _read(dataset, whole)
            with self._lock:
                # At most _RECENT_CHUNKS; two threads that read the same chunk leave one entry.
                self._chunks[whole.key] = known
                while len(self._chunks) > _RECENT_CHUNKS:
                    self._chunks.popitem(last=False)
        data, layout = known
        if offset in layout.damage:
            raise layout.damage[offset]
        fields = {}
        for column, name in enumerate(layout.fields):
            start = int(layout.starts[offset, column])
            if start >= 0 and (dataset.fields is None or name in dataset.fields):
                fields[name] = data[start : start + int(layout.sizes[offset, column])]
        return layout.keys[offset], fields


def _read(dataset: Readable, wanted: FetchRange) -> tuple[bytes, UnitLayout]:
    buffer = bytearray(wanted.num_bytes)
    with memoryview(buffer) as out:
        layout = taken_apart(dataset.fetch_unit(wanted, out), out)
    return bytes(buffer), layout


def _decode(dataset: Readable, url: str, key: str, fields: Mapping[str, bytes]) -> Sample:
    sample: Sample = {"__key__": key, "__url__": url}
    for name in sorted(fields):
        decoder = dataset.decoders.decoder_for(name)
        data = fields[name]
        sample[name] = data if decoder is raw else decode_field(decoder, data, url=url, key=key, field=name)
    return sample


def span_borders(
    table: ChunkTable, room_bytes: Int64Array, samples_of: Callable[[int], SampleTable | None]
) -> tuple[Int64Array, Int64Array]:
    """Return where the spans of a set begin, in samples and in bytes of its chunks laid end to end.

    Reads all sample tables.

    Args:
        table: The chunk table, perhaps of a view; a chunk that crosses its border is counted whole.
        room_bytes: int64 [C], room that each chunk takes there.
        samples_of: Returns the sample table of a shard by number. Without one, a chunk counts as one span.

    Returns:
        int64 [n] each, ascending; without chunks none.
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

    with ThreadPoolExecutor(TABLE_REQUESTS, "shardstream-tables") as threads:
        found = [(sample_base[:0], byte_base[:0]), *threads.map(of_shard, np.unique(table.shard).tolist())]
    return np.concatenate([firsts for firsts, _ in found]), np.concatenate([begins for _, begins in found])


def _size_of_table(table: SampleTable | None) -> int:
    """Estimate what a table takes in memory: keys are Python strings, fields have two numbers, large ones three."""
    return 0 if table is None else table.num_samples * (100 + 24 * len(table.fields))
