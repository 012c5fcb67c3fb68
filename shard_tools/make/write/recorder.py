"""Record the index of the shards that a ``ShardWriter`` writes, as their bytes pass through."""

from __future__ import annotations

import logging
import os
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self, cast

import crc32c
import numpy as np
import pyarrow as pa

from shard_tools.make.write.above import meet_above
from shard_tools.make.write.array_types import array_types, is_npy, without_array_types
from shard_tools.make.write.columns import ColumnSpec, ColumnValue, column_array, column_value, follow, parse_columns
from shard_tools.make.write.encode import Buffers
from shard_tools.make.write.sample_runs import SampleRun
from streaming.common.threads import on_threads
from streaming.errors import ConfigError, IndexFormatError, NotFoundError
from streaming.shards.catalog.build import read_chunks, read_footer_of, read_schema, shard_name, write_schema
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.columns import joined_type
from streaming.shards.index.cutter import ChunkCutter, GivenCutter
from streaming.shards.index.large_members import LARGE_BYTES, large_sums
from streaming.shards.index.layout import samples_path
from streaming.shards.index.sample_table import SampleTable, chunk_rows_from_footer, contents_from_footer
from streaming.shards.index.spans import SpanCutter, spans_of
from streaming.shards.schema.joined import SchemaConflict, joined
from streaming.shards.schema.kinds import kind_by_name
from streaming.shards.schema.meeting import met
from streaming.shards.schema.value import Schema, SchemaColumn, SchemaField
from streaming.shards.tar.group import check_density
from streaming.shards.versions.publish import write_index
from streaming.storage import Storage, join_url, redact
from streaming.types import Int64Array

_log = logging.getLogger(__name__)

# Most footers fit into this many bytes at the end of a sample file; a longer one costs a second request.
_NUM_THREADS = 16
_Types = Mapping[str, tuple[pa.DataType, str]]
"""The type of each column, and a shard with such values."""
_SILENT = Schema()
_PLAIN_TYPES = {bool, int, float, str, type(None)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TarRecord:
    """One sample in tar form: a whole number of 512-byte blocks.

    ``starts`` are the offsets of the fields' contents from the record's first byte; ``pieces`` are valid only as long
    as the caller's values are.
    """

    key: str
    fields: tuple[str, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    num_bytes: int
    pieces: Buffers


class ShardRecorder:
    """Collect the sample table of one shard. Not thread-safe.

    Args:
        name: The shard.
        columns: Columns whose values come with the samples.
        ends: Number of the sample behind each chunk; None: chunks are cut by the rule. With it, samples come one by
            one.
    """

    def __init__(self, name: str, columns: Iterable[str], ends: Iterable[int] | None = None) -> None:
        self.name = name
        self._keys: list[str] = []
        self._record_starts = array("q", [0])
        self._fields: dict[str, tuple[array[int], array[int], array[int]]] = {}
        self._columns: dict[str, list[ColumnValue]] = {column: [] for column in columns}
        self._cutter = ChunkCutter()
        self._closes = self._cutter.add if ends is None else GivenCutter(ends).add
        self._chunk_bounds = array("q", [0])
        self._crcs: list[int] = []
        self._crc = 0
        self._span_cutter = SpanCutter()
        self._span_starts = array("q", [0])
        self._span_crcs = array("L")
        self._large_crcs: dict[int, int] = {}

    def add(self, record: TarRecord, pieces: Buffers, values: tuple[ColumnValue, ...]) -> None:
        """Add the next sample; ``pieces`` are the record's bytes."""
        start = self._record_starts[-1]
        for field, field_start, size in zip(record.fields, record.starts, record.sizes, strict=True):
            ranges = self._ranges_of(field)
            ranges[0].append(len(self._keys))
            ranges[1].append(start + field_start)
            ranges[2].append(size)
        for column, value in zip(self._columns.values(), values, strict=True):
            column.append(value)
        self._keys.append(record.key)
        self._record_starts.append(start + record.num_bytes)
        if record.num_bytes < LARGE_BYTES:
            for piece in pieces:
                self._crc = crc32c.crc32c(piece, self._crc)
        else:
            self._sum_large(record, pieces, start)
        chunk_closes = self._closes(record.num_bytes)
        if self._span_cutter.add(record.num_bytes, chunk_closes=chunk_closes):
            self._close_span(len(self._keys))
        if chunk_closes:
            self._close_chunk(len(self._keys))

    def add_run(self, run: SampleRun, content: bytes) -> None:
        """Add the next samples at once, none with a large field; ``content`` are the bytes of their records."""
        first, start, num_samples = len(self._keys), self._record_starts[-1], len(run.keys)
        bounds = start + np.concatenate((np.zeros(1, np.int64), run.ends))
        rows = np.arange(first, first + num_samples).tobytes()
        for position, field in enumerate(run.fields):
            ranges = self._ranges_of(field)
            ranges[0].frombytes(rows)
            ranges[1].frombytes((bounds[:-1] + run.starts[:, position]).tobytes())
            ranges[2].frombytes(run.sizes[:, position].tobytes())
        for column, values in zip(self._columns.values(), run.columns, strict=True):
            column.extend(values)
        self._keys += run.keys
        self._record_starts.frombytes(bounds[1:].tobytes())
        chunk_cuts = self._cutter.extend(bounds).tolist()
        whole, done = memoryview(content), 0
        for cut in self._span_cutter.extend(bounds, chunk_cuts):
            end = int(run.ends[cut - 1])
            self._crc, done = crc32c.crc32c(whole[done:end], self._crc), end
            self._close_span(first + cut)
            if cut in chunk_cuts:
                self._close_chunk(first + cut)
        self._crc = crc32c.crc32c(whole[done:], self._crc)

    def _ranges_of(self, field: str) -> tuple[array[int], array[int], array[int]]:
        ranges = self._fields.get(field)
        if ranges is None:
            ranges = self._fields[field] = (array("q"), array("q"), array("q"))
        return ranges

    def _sum_large(self, record: TarRecord, pieces: Buffers, start: int) -> None:
        """Checksum a record, with intermediate sums at the start and end of each large field."""
        large = [(at, at + size) for at, size in zip(record.starts, record.sizes, strict=True) if size >= LARGE_BYTES]
        borders = sorted(border for span in large for border in span)
        at = 0  # offset in the record
        for piece in pieces:
            done, whole = 0, memoryview(piece).cast("B")
            while borders and borders[0] <= at + len(whole):
                border = borders.pop(0)
                self._crc = crc32c.crc32c(whole[done : border - at], self._crc)
                self._large_crcs[start + border] = self._crc
                done = border - at
            self._crc = crc32c.crc32c(whole[done:], self._crc)
            at += len(whole)

    def table(self, size_bytes: int) -> SampleTable:
        """Return the sample table of the finished shard, which has ``size_bytes`` bytes.

        Raises:
            ConfigError: A column cannot hold its values together, or the format reserves its name.
            TarError: The samples have too many different fields for readers.
        """
        num_members = sum(len(rows) for rows, _, _ in self._fields.values())
        check_density(len(self._keys), list(self._fields), num_members, self.name)
        if self._span_starts[-1] != len(self._keys):
            self._close_span(len(self._keys))
        if self._chunk_bounds[-1] != len(self._keys):
            self._close_chunk(len(self._keys))
        record_starts = np.array(self._record_starts, np.int64)
        fields = {field: self._ranges(field) for field in self._fields}
        spans = self._chunk_bounds, self._span_starts, self._span_crcs
        return SampleTable.build(
            name=self.name,
            size_bytes=size_bytes,
            keys=self._keys,
            record_starts=record_starts,
            fields=fields,
            chunk_bounds=np.array(self._chunk_bounds, np.int64),
            crc32c=self._crcs,
            columns={column: self._arrow(column) for column in self._columns},
            spans=spans_of(record_starts, *spans),
            large=large_sums(record_starts, fields, *spans, self._large_crcs),
        )

    def empty_columns(self) -> list[str]:
        """Return the columns without a value in any sample, if there are samples."""
        return [name for name, values in self._columns.items() if values and all(one is None for one in values)]

    def _close_span(self, num_samples: int) -> None:
        self._span_starts.append(num_samples)
        self._span_crcs.append(self._crc)

    def _close_chunk(self, num_samples: int) -> None:
        self._chunk_bounds.append(num_samples)
        self._crcs.append(self._crc)
        self._crc = 0

    def _ranges(self, field: str) -> tuple[Int64Array, Int64Array]:
        starts = np.full(len(self._keys), -1, np.int64)
        sizes = np.zeros(len(self._keys), np.int64)
        rows, starts_of_rows, sizes_of_rows = (np.array(part, np.int64) for part in self._fields[field])
        starts[rows] = starts_of_rows
        sizes[rows] = sizes_of_rows
        return starts, sizes

    def _arrow(self, column: str) -> pa.Array:
        return column_array(self._columns[column], column, self.name, lambda: self._keys)


class IndexRecorder:
    """Write each shard's sample table when the shard is published, and the chunk table at the end. Not thread-safe.

    Args:
        storage: The store of shards and index.
        directory: The shards' directory; empty for the working directory.
        index: Directory of the index (``streaming.shards.index.layout``); None: the shards' own.
        columns: See ``ShardWriter``.
        schema: The writer's schema; fields and types of columns are added.
    """

    def __init__(
        self, storage: Storage, directory: str, *, index: str | None, columns: ColumnSpec, schema: Schema = _SILENT
    ) -> None:
        self._storage = storage
        self._directory = directory or "."
        self._elsewhere = index
        self._index = index or self._directory
        self._columns = parse_columns(columns)
        self._warned: set[str] = set()
        self._types: _Types = {}
        self._shard: ShardRecorder | None = None
        self._sealed: SampleTable | None = None
        self._tables: dict[str, ChunkTable] = {}
        self._schema = schema
        ShardRecorder("", self._columns).table(0)  # refuses column names that the format reserves

    @classmethod
    def create(
        cls, storage: Storage, directory: str, *, index: bool | str | os.PathLike[str], columns: ColumnSpec,
        schema: Schema = _SILENT,
    ) -> Self | None:  # fmt: skip
        """Return a recorder, or None if no index is wanted."""
        if index is False:
            if parse_columns(columns):
                raise ConfigError("columns: they live in the sample table, which index=False leaves out")
            if schema:
                raise ConfigError("classes: their names are a part of the index, which index=False leaves out")
            return None
        if index is True:
            return cls(storage, directory, index=None, columns=columns, schema=schema)
        if not isinstance(index, (str, os.PathLike)) or not os.fspath(index):
            raise ConfigError(f"index: expected True, False or a URL, got {index!r}")
        return cls(storage, directory, index=os.fspath(index), columns=columns, schema=schema)

    def check_beside(self) -> None:
        """Compare the new schema with those of the existing index and of sets above.

        Raises:
            ConfigError: They contradict each other.
        """
        self._beside()
        meet_above(self._index, self._schema, self._storage)

    def _beside(self) -> Schema:
        """Return the joined schema of this writer's shards and the existing ones."""
        there = read_schema(self._storage, self._index)
        if not there:
            return self._schema
        both = {
            f"the set in {redact(self._index)}": without_array_types(there),
            "the shards to be written": without_array_types(self._schema),
        }
        return met(both, cure="Number the classes as there, or write to a directory of their own").schema

    def column_values(self, sample: Mapping[str, object], key: str) -> tuple[ColumnValue, ...]:
        """Return the values of all columns for one sample."""
        return tuple(column_value(sample, name, source, key) for name, source in self._columns.items())

    def columns_of(self, samples: Sequence[Mapping[str, object]]) -> list[list[ColumnValue]] | None:
        """Return the values of each column for many samples; None if a sample fails, for a retry one by one."""
        found = []
        for source in self._columns.values():
            try:
                values = [follow(one, source) if isinstance(source, str) else source(one) for one in samples]
            except Exception:  # noqa: BLE001  a user's function may raise anything
                return None
            if not {*map(type, values)} <= _PLAIN_TYPES:
                return None
            found.append(cast("list[ColumnValue]", values))
        return found

    def start_shard(self, url: str) -> None:
        """Begin a shard; the following samples belong to it."""
        self._shard = ShardRecorder(shard_name(url, self._elsewhere), self._columns)

    def add_run(self, run: SampleRun, content: bytes) -> None:
        """Add the next samples of the shard."""
        if self._shard is not None:
            self._shard.add_run(run, content)

    def add(self, record: TarRecord, pieces: Buffers, values: tuple[ColumnValue, ...]) -> None:
        """Add the next sample of the shard."""
        if self._shard is not None:
            self._shard.add(record, pieces, values)

    def seal_shard(self, size_bytes: int, *, replaces: bool) -> None:
        """Make the sample table of the current shard, before the shard is published.

        Args:
            size_bytes: Size of the shard's file.
            replaces: Whether the shard may replace another, whose sample table must be removed first.

        Raises:
            ConfigError: A column cannot hold its values together, or an earlier shard holds values of another kind.
            TarError: The samples have too many different fields for readers.
        """
        if self._shard is None:
            return
        self._sealed = self._shard.table(size_bytes)
        self._types = _joined_types(self._types, self._sealed)
        self._saw(list(self._sealed.fields), {name: str(one.type) for name, one in self._sealed.columns.items()})
        self._warn_of_empty(self._shard)
        self._shard = None
        if replaces:
            self._storage.delete(self._samples_url(self._sealed.shard.name))

    def _warn_of_empty(self, shard: ShardRecorder) -> None:
        """Warn, once per column, of columns without a value in a whole shard."""
        for name in shard.empty_columns():
            source = self._columns[name]
            if isinstance(source, str) and name not in self._warned:
                self._warned.add(name)
                _log.warning(
                    "columns[%r]: no sample of %s has a value at %r, so the column is NULL there. Give the path of a "
                    "value in the sample, such as 'cls' or 'json.width', or a function of the sample",
                    name, shard.name, source,
                )  # fmt: skip

    def publish_shard(self) -> None:
        """Write the sealed sample table, now that its shard is published."""
        table, self._sealed = self._sealed, None
        if table is not None:
            self._storage.put(self._samples_url(table.shard.name), table.to_parquet())
            self._tables[table.shard.name] = table.chunks

    def publish_chunk_table(self) -> None:
        """Write the chunk table of all indexed shards in the directory, including those of other writers."""
        names = self._sizes_below(self._directory, ".tar")
        sizes = {self._name_of(name): size_bytes for name, size_bytes in names.items()}
        tables = dict(self._tables)
        before = self._chunk_table()
        beside = self._from_chunk_table(before, sizes, known=tables.keys())
        tables |= beside
        if before is None or before.version is None:  # else what else is there is of other versions
            tables |= self._from_sample_tables(sizes, known=tables.keys())
        if not tables:
            return
        if beside:
            self._schema = self._beside()
        self._add_array_types([name for name in names if self._name_of(name) in tables])
        write_index(self._storage, self._index, ChunkTable.merged(tables), before, self._schema)

    def recorded(self) -> tuple[dict[str, ChunkTable], Schema]:
        """Return the chunk tables of the shards that were written, by name, and what they mean, to be published."""
        self._add_array_types(list(self._tables))
        return dict(self._tables), self._schema

    def _name_of(self, name: str) -> str:
        """Return the name that a shard of the directory has in the index."""
        return shard_name(join_url(self._directory, name), self._elsewhere)

    def _add_array_types(self, names: Sequence[str]) -> None:
        """Add to the schema the types of arrays in these shards of the directory, for fields of a single type."""
        arrays = {name for name in self._schema.fields if is_npy(name)}
        urls = [join_url(self._directory, name) for name in sorted(names)]
        types = array_types(self._storage, urls, self._elsewhere, arrays)
        said = {name: replace(self._schema.fields[name], dtype=types.get(name, "")) for name in arrays}
        self._schema = replace(self._schema, fields={**self._schema.fields, **said})

    def renew_schema(self) -> None:
        """Rewrite the schema: the writer's own, with the fields and columns of the sample tables."""
        names = self._sizes_below(self._directory, ".tar")
        self._from_sample_tables({self._name_of(name): size for name, size in names.items()}, known=())
        self._add_array_types(list(names))
        write_schema(self._storage, self._index, self._schema)

    def _saw(self, fields: Sequence[str], columns: Mapping[str, str]) -> None:
        """Add the fields and columns of a shard to the schema."""
        seen = Schema(
            fields={
                name: SchemaField(kind=kind_by_name(name)) for name in fields
                if name not in self._schema.fields
            },
            columns={name: SchemaColumn(type=kind, origin=self._origin(name)) for name, kind in columns.items()},
        )  # fmt: skip
        both = joined({"": self._schema, "this shard": seen})
        self._schema = both.agreed if isinstance(both, SchemaConflict) else both

    def _origin(self, name: str) -> str:
        """Return the path of a column's values in a sample, if it differs from the column's name."""
        source = self._columns.get(name)
        return source if isinstance(source, str) and source != name else ""

    def _chunk_table(self) -> ChunkTable | None:
        """Return the chunk table that is there; a damaged one is rebuilt from the sample tables."""
        try:
            return read_chunks(self._storage, self._index)
        except (NotFoundError, IndexFormatError):
            return None

    def _from_chunk_table(
        self, table: ChunkTable | None, sizes: Mapping[str, int], known: Iterable[str]
    ) -> dict[str, ChunkTable]:  # fmt: skip
        if table is None:
            return {}
        # An index in another place may also cover other directories, whose shards are not in `sizes`.
        wanted = {
            shard.name
            for shard in table.shards
            if sizes.get(shard.name, shard.size_bytes if self._elsewhere else None) == shard.size_bytes
        }
        return {name: table.select([name]) for name in wanted.difference(known)}

    def _from_sample_tables(self, sizes: Mapping[str, int], known: Iterable[str]) -> dict[str, ChunkTable]:
        there = self._sizes_below(join_url(self._index, samples_path("x").rpartition("/")[0]), ".parquet")
        wanted = {name.removesuffix(".parquet"): size for name, size in there.items()}
        names = sorted(sizes.keys() & wanted.keys() - set(known))
        if not names:
            return {}
        footers = dict(
            zip(names, on_threads(lambda name: self._footer(name, wanted[name]), names, _NUM_THREADS), strict=True)
        )
        tables: dict[str, ChunkTable] = {}
        for name, footer in footers.items():
            if footer is not None and footer[0].shards[0].size_bytes == sizes[name]:
                tables[name] = footer[0]
                self._saw(*footer[1])
        return tables

    def _footer(self, name: str, num_bytes: int) -> tuple[ChunkTable, tuple[list[str], dict[str, str]]] | None:
        url = self._samples_url(name)
        try:
            return read_footer_of(self._storage, url, _rows_and_contents, num_bytes)
        except (
            IndexFormatError,
            NotFoundError,
        ):  # damaged, or being replaced: `shard_tools index` handles it
            return None

    def _sizes_below(self, url: str, suffix: str) -> dict[str, int]:
        """Return the size of every file below ``url`` with this suffix, by relative name."""
        prefix = url.rstrip("/") + "/"
        return {
            info.url.removeprefix(prefix): info.size_bytes
            for info in self._storage.list(url)
            if info.url.endswith(suffix)
        }

    def _samples_url(self, name: str) -> str:
        return join_url(self._index, samples_path(name))


def _rows_and_contents(tail: bytes, source: str) -> tuple[ChunkTable, tuple[list[str], dict[str, str]]]:
    """Return the chunks, the fields, and the columns with their types from the tail of a sample file."""
    return chunk_rows_from_footer(tail, source), contents_from_footer(tail, source)


def _joined_types(
    known: Mapping[str, tuple[pa.DataType, str]], table: SampleTable
) -> dict[str, tuple[pa.DataType, str]]:
    """Return the types of columns over all shards so far, with the first shard that has values in each.

    Raises:
        ConfigError: The new shard holds values of another kind.
    """
    found = {**known}
    for name, values in table.columns.items():
        before, shard = known.get(name, (pa.null(), ""))
        joined = joined_type([before, values.type])
        if joined is None:
            raise ConfigError(
                f"column {name!r}: {shard} holds {before}, {table.shard.name} {values.type}; a column has numbers, or "
                f"text, or booleans. Have columns={{{name!r}: …}} give values of one kind"
            )
        found[name] = joined, table.shard.name if pa.types.is_null(before) else shard
    return found
