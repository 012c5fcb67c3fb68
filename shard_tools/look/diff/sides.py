"""Open the two sets of a comparison: by their index, or to be read entirely if there is none."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pyarrow as pa

from shard_tools.change.sets.open_set import READ_THREADS, OpenSet, relative_names, shards_beside, sizes_of, table_of
from shard_tools.look.diff.rows import AT, rows_of_samples, rows_of_table
from streaming.common.arrays import sums
from streaming.common.threads import map_threads
from streaming.errors import ConfigError, IndexMissingError, NotFoundError, StorageError
from streaming.sets.filters.late_columns import LateColumn
from streaming.shards.catalog.build import load_index, samples_url
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.columns import Values
from streaming.shards.index.files import is_sealed, read_footer
from streaming.shards.index.sample_table import SampleTable, Spans
from streaming.shards.schema.value import Schema
from streaming.shards.tar.samples import iter_samples
from streaming.storage import Storage, redact
from streaming.types import Int64Array

_PIECE_BYTES = 8 << 20  # one request
_SAMPLE_BYTES = 1 << 10  # estimate for uncounted samples; a wrong one costs memory
_SCANS = 4  # unindexed shards at a time: each takes CPU and holds a sample in memory


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardRows:
    """The rows of one shard, the columns of its samples, and the number of bytes read for them."""

    rows: pa.Table
    columns: tuple[str, ...] = ()
    num_bytes: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Side:
    """One of the two sets, without an index: all its bytes are read, once.

    Attributes:
        urls: Its shards.
        storage: Their store.
        sizes: Bytes of each shard.
        late: Its late columns; none without an index.
        schemas: Its schemas, by directory of the index as shown.
    """

    urls: tuple[str, ...]
    storage: Storage
    sizes: tuple[int, ...]
    late: Mapping[str, LateColumn] = field(default_factory=dict)
    schemas: Mapping[str, Schema] = field(default_factory=dict)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of its shards, below their common folder."""
        try:
            return tuple(relative_names(self.urls))
        except ConfigError:
            return tuple(map(redact, self.urls))

    @property
    def num_samples(self) -> int:
        """Number of samples to identify by number; 0 if the set is read only once."""
        return 0

    def num_samples_of(self, positions: Sequence[int]) -> int:
        """Return the approximate number of samples of some shards."""
        return sum(self.sizes[position] for position in positions) // _SAMPLE_BYTES

    def rows(self, positions: Sequence[int], late: Sequence[str]) -> Iterator[ShardRows]:  # noqa: ARG002  there are none
        """Yield the rows of some shards, in this order, with the values of columns and of these late columns."""
        first = 0
        for position, rows in zip(positions, map_threads(self._read, positions, _SCANS), strict=True):
            numbered = rows.set_column(1, AT, pa.array(np.arange(first, first + rows.num_rows)))
            yield ShardRows(rows=numbered, num_bytes=self.sizes[position])
            first += rows.num_rows

    def _read(self, position: int) -> pa.Table:
        url, size_bytes = self.urls[position], self.sizes[position]
        starts = range(0, size_bytes, _PIECE_BYTES)
        pieces = (self.storage.read(url, start, min(size_bytes, start + _PIECE_BYTES)) for start in starts)
        return rows_of_samples(iter_samples(pieces, redact(url)), 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class IndexedSide(Side):
    """One of the two sets, with an index.

    Attributes:
        opened: The set as other commands open it.
    """

    opened: OpenSet

    @cached_property
    def firsts(self) -> Int64Array:
        """int64 ``[S + 1]``: number of the first sample of each shard, then the number of all samples."""
        return sums([shard.num_samples for shard in self.opened.chunks.shards])

    @cached_property
    def digests(self) -> tuple[str, ...]:
        """Digest of each shard from the index: equal for equal bytes, whatever the names."""
        return tuple(_digest(self.opened.chunks.of_shard(position)) for position in range(len(self.urls)))

    @property
    def num_samples(self) -> int:
        """See :class:`Side`."""
        return int(self.firsts[-1])

    def num_samples_of(self, positions: Sequence[int]) -> int:
        """See :class:`Side`."""
        return int(np.diff(self.firsts)[list(positions)].sum())

    def table(self, position: int) -> SampleTable:
        """Return the sample table of a shard."""
        return table_of(self.opened, position, self.storage)

    def spans(self, position: int) -> Spans:
        """Return the spans of a shard without the rest of its sample table."""
        url = samples_url(self.urls[position], self.opened.index_url)
        return self.storage.read_parsed(url, Spans.from_parquet, is_sealed)

    def footer(self, position: int) -> bytes | None:
        """Return the footer of a shard's sample table, with its checksums and contents; None: no file."""
        url = samples_url(self.urls[position], self.opened.index_url)
        try:
            size_bytes = self.storage.info(url).size_bytes
        except NotFoundError:
            return None
        return read_footer(lambda start, stop: self.storage.read(url, start, stop), size_bytes, redact(url))

    def values(self, position: int, table: SampleTable | None, late: Sequence[str]) -> dict[str, Values]:
        """Return the columns of a shard: those of its sample table, if given, and some late columns."""
        found: dict[str, Values] = dict(table.columns) if table is not None else {}
        columns = [self.late[name] for name in late]
        return {**found, **(self.opened.late_values(self.storage, position, columns) if columns else {})}

    def rows(self, positions: Sequence[int], late: Sequence[str]) -> Iterator[ShardRows]:
        """See :class:`Side`."""

        def load(position: int) -> ShardRows:
            table = self.table(position)
            values = self.values(position, table, late)
            rows = rows_of_table(table, int(self.firsts[position]), values)
            return ShardRows(rows=rows, columns=tuple(values))

        yield from map_threads(load, positions, READ_THREADS)


def _digest(shard: ChunkTable) -> str:
    """Return a digest of the bytes of a shard: of its size and its chunks."""
    size_bytes = np.array([shard.shards[0].size_bytes], np.int64)
    facts = np.concatenate([size_bytes, shard.num_samples, shard.byte_start, shard.byte_end, shard.crc32c])
    return hashlib.blake2b(facts.astype(np.int64).tobytes(), digest_size=16).hexdigest()


def open_side(url: str, storage: Storage, index_url: str | None, *, allow_unfinished: bool) -> Side:
    """Open the shards at ``url``, with their index if there is one.

    Raises:
        UnfinishedError: The set is unfinished, and ``allow_unfinished`` is False.
        NotFoundError: Nothing matches.
    """
    shards, marks = shards_beside([url], storage, None, allow_unfinished=allow_unfinished)
    try:
        chunks = load_index(storage, shards, index_url)
    except IndexMissingError:
        if index_url is not None:
            raise
        return Side(urls=shards, storage=storage, sizes=tuple(sizes_of(storage, shards)))
    opened = OpenSet(urls=shards, chunks=chunks, scanned=None, index_url=index_url, marks=marks)
    sizes = tuple(shard.size_bytes for shard in chunks.shards)
    try:
        late = opened.late_columns(storage)
    except StorageError:  # a store that cannot list
        late = {}
    schemas = {redact(home): schema for home, schema in opened.schemas(storage).items()}
    return IndexedSide(urls=shards, storage=storage, sizes=sizes, late=late, opened=opened, schemas=schemas)
