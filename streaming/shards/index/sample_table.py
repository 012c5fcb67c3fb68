"""Hold the keys, byte ranges of every field, and lifted columns of one shard: the sample table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from streaming.errors import ConfigError, IndexFormatError
from streaming.shards.index.chunk_table import (
    ChunkTable,
    ShardInfo,
    chunk_columns,
    numbers,
    one_shard_table,
    shard_rows,
    shards_of_rows,
)
from streaming.shards.index.files import (
    content_errors,
    damaged,
    is_original,
    read_facts,
    read_table,
    types_of_columns,
    write_table,
)
from streaming.shards.index.keys import Keys, key_array
from streaming.shards.index.large_members import LargeSums
from streaming.types import Int64Array

KIND = "samples"
_SPAN_CRC32C, _REST_CRC32C = "span_crc32c", "rest_crc32c"
_FIXED_COLUMNS = ("key", "chunk", "record_start", "record_size", _SPAN_CRC32C, _REST_CRC32C)
_START, _SIZE, _CRC32C = "start.", "size.", "crc32c."

FieldRanges = Mapping[str, tuple[Int64Array, Int64Array]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLocation:
    """The location of one sample in its shard: its record (with headers and padding) and the bytes of its fields."""

    key: str
    chunk: int
    record_start: int
    record_end: int
    fields: Mapping[str, tuple[int, int]]
    """Start and end of the bytes of each field that the sample has."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleTable:
    """The ``n`` samples of one shard, in the shard's order. The arrays must not be changed.

    Attributes:
        chunks: The shard and its chunk rows: a chunk table of this one shard.
        keys: The key of each sample.
        chunk: int32 ``[n]``, the chunk (of this shard) that holds the sample, non-decreasing.
        record_starts: int64 ``[n + 1]``, offsets of the records in the shard; record ``i`` is
            ``[record_starts[i], record_starts[i + 1])``. An empty shard has ``[0]``.
        fields: Per extension the offsets (-1: the sample lacks the field) and sizes of its bytes, each int64 ``[n]``.
        columns: Lifted columns: numbers or strings, Arrow arrays of ``n``, nulls allowed.
        span_starts: int64 ``[S + 1]``, the first sample of each span (:mod:`streaming.shards.index.spans`), and ``n``.
            ``[0]`` in an empty shard.
        span_crc32c: uint32 ``[S]``, CRC32C of the bytes of each span.
        large: Checksums of large members and of the rest of their spans.
    """

    chunks: ChunkTable
    keys: Sequence[str] = field(repr=False)
    chunk: NDArray[np.int32] = field(repr=False)
    record_starts: Int64Array = field(repr=False)
    fields: FieldRanges = field(repr=False)
    columns: Mapping[str, pa.Array] = field(default_factory=dict, repr=False)
    span_starts: Int64Array = field(repr=False)
    span_crc32c: NDArray[np.uint32] = field(repr=False)
    large: LargeSums = field(default_factory=LargeSums, repr=False)

    @classmethod
    def build(
        cls,
        *,
        name: str,
        size_bytes: int,
        keys: Sequence[str],
        record_starts: Int64Array,
        fields: FieldRanges,
        chunk_bounds: Int64Array,
        crc32c: Sequence[int] | NDArray[np.uint32],
        columns: Mapping[str, pa.Array] | None = None,
        spans: tuple[Int64Array, NDArray[np.uint32]] | None = None,
        large: LargeSums | None = None,
    ) -> SampleTable:
        """Build the table of the shard ``name`` of ``size_bytes`` from the data of a writer or a scanner.

        Args:
            name: The shard's name relative to the index.
            size_bytes: The size of the tar as a file.
            keys: ``n`` keys.
            record_starts: int64 ``[n + 1]``.
            fields: As the attribute.
            chunk_bounds: int64 ``[C + 1]``: chunk ``c`` holds samples ``[chunk_bounds[c], chunk_bounds[c + 1])``.
            crc32c: CRC32C of the bytes of each of the ``C`` chunks.
            columns: As the attribute.
            spans: ``span_starts`` and ``span_crc32c``, as the attributes; None: each chunk is a span.
            large: As the attribute; None: no such sums.

        Raises:
            ConfigError: The format itself uses the name of a lifted column.
            IndexFormatError: Lengths or ranges are inconsistent.
        """
        counts = np.diff(chunk_bounds)
        rows = {
            "first_sample": chunk_bounds[:-1],
            "num_samples": counts,
            "byte_start": record_starts[chunk_bounds[:-1]],
            "byte_end": record_starts[chunk_bounds[1:]],
            "crc32c": crc32c,
        }
        shard = ShardInfo(name=name, size_bytes=size_bytes, num_samples=len(keys))
        table = cls(
            chunks=one_shard_table(shard, rows),
            keys=keys,
            chunk=np.repeat(np.arange(counts.size, dtype=np.int32), counts),
            record_starts=record_starts,
            fields=dict(fields),
            columns=dict(columns or {}),
            span_starts=np.asarray(chunk_bounds, np.int64) if spans is None else spans[0],
            span_crc32c=np.asarray(crc32c, np.uint32) if spans is None else spans[1],
            large=large or LargeSums(),
        )
        for column in table.columns:
            if column in _FIXED_COLUMNS or column.startswith((_START, _SIZE, _CRC32C)):
                raise ConfigError(f"column {column!r}: the sample table uses this name itself; choose another")
        table.validate(name)
        return table

    @property
    def shard(self) -> ShardInfo:
        """The shard's content facts."""
        return self.chunks.shards[0]

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return len(self.keys)

    @property
    def num_spans(self) -> int:
        """Number of spans."""
        return self.span_crc32c.size

    def widened(self, first: int, stop: int) -> tuple[int, int, tuple[tuple[int, int], ...]]:
        """Return the spans that hold samples ``[first, stop)``, at least one.

        Returns:
            First sample, one past the last, and per span its end (in bytes from the first sample's record on) and
            CRC32C.
        """
        low = int(np.searchsorted(self.span_starts, first, side="right")) - 1
        high = int(np.searchsorted(self.span_starts, stop, side="left"))
        borders = self.span_starts[low : high + 1]
        ends = self.record_starts[borders[1:]] - self.record_starts[borders[0]]
        return (
            int(borders[0]),
            int(borders[-1]),
            tuple(zip(ends.tolist(), self.span_crc32c[low:high].tolist(), strict=True)),
        )

    def lookup(self, index: int) -> SampleLocation:
        """Return the location of sample ``index`` in the shard.

        Raises:
            IndexError: There is no such sample.
        """
        if not 0 <= index < len(self.keys):
            raise IndexError(f"sample {index} of shard {self.shard.name!r}, which has {len(self.keys)}")
        ranges = {
            name: (int(starts[index]), int(starts[index] + sizes[index]))
            for name, (starts, sizes) in self.fields.items()
            if starts[index] >= 0
        }
        return SampleLocation(
            key=self.keys[index],
            chunk=int(self.chunk[index]),
            record_start=int(self.record_starts[index]),
            record_end=int(self.record_starts[index + 1]),
            fields=ranges,
        )

    def validate(self, source: str = "sample table") -> None:
        """Check that lengths and ranges are consistent.

        Raises:
            IndexFormatError: They are not; the message names the first column at fault.
        """
        self.chunks.validate(source)
        num_samples = len(self.keys)
        if self.shard.num_samples != num_samples or self.record_starts.shape != (num_samples + 1,):
            raise damaged(source, f"{self.shard.num_samples} samples, but {num_samples} keys")
        if (np.diff(self.record_starts) <= 0).any() or self.record_starts[0] != 0:
            raise damaged(source, "records do not follow each other from byte 0 on")
        if not np.array_equal(self.chunk, np.repeat(np.arange(self.chunks.num_chunks), self.chunks.num_samples)):
            raise damaged(source, "column 'chunk' disagrees with the chunk rows")
        firsts = self.chunks.first_sample
        if not np.array_equal(self.record_starts[firsts], self.chunks.byte_start) or (
            firsts.size and self.record_starts[-1] != self.chunks.byte_end[-1]
        ):
            raise damaged(source, "the records do not fill the chunks")
        self._validate_spans(source)
        self._validate_large(source)
        begins, ends = self.record_starts[:-1], self.record_starts[1:]
        for name, (starts, sizes) in self.fields.items():
            if starts.shape != (num_samples,) or sizes.shape != (num_samples,):
                raise damaged(source, f"field {name!r} has {starts.size} rows of {num_samples}")
            bad = (starts < begins) | (sizes < 0) | (sizes > ends - starts)
            if (bad & (starts != -1)).any():
                raise damaged(source, f"field {name!r} of sample {int(np.argmax(bad))} leaves its record")
        for name, column in self.columns.items():
            if len(column) != num_samples:
                raise damaged(source, f"column {name!r} has {len(column)} rows of {num_samples}")

    def _validate_spans(self, source: str) -> None:
        starts = self.span_starts
        if starts.shape != (self.num_spans + 1,) or starts[0] != 0 or (np.diff(starts) <= 0).any():
            raise damaged(source, f"column {_SPAN_CRC32C!r}: the spans do not follow each other")
        if starts[-1] != len(self.keys) or not np.isin(self.chunks.first_sample, starts, assume_unique=True).all():
            raise damaged(source, f"column {_SPAN_CRC32C!r}: the spans do not fill the chunks")

    def _validate_large(self, source: str) -> None:
        """Check that every large member has a sum, its span one of the rest, and that no other span has one."""
        expected = np.zeros(self.num_spans, np.bool_)
        for name, sums in self.large.fields.items():
            rows = np.flatnonzero(sums >= 0)
            if name not in self.fields or sums.shape != (len(self.keys),) or (self.fields[name][0][rows] < 0).any():
                raise damaged(source, f"column {_CRC32C + name!r} is of a field that is not there")
            expected[np.searchsorted(self.span_starts, rows, side="right") - 1] = True
        if not np.array_equal(self.large.rest >= 0, expected) and (expected.any() or self.large.rest.size):
            raise damaged(source, f"column {_REST_CRC32C!r}: not of the spans that have large members")

    def to_parquet(self) -> bytes:
        """Return the table as the bytes of ``samples/<shard>.parquet``. The same table gives the same bytes.

        Raises:
            IndexFormatError: A field's name is not UTF-8.
        """
        arrays: dict[str, Any] = {
            "key": key_array(self.keys),
            "chunk": pa.array(self.chunk, pa.int32()),
            "record_start": pa.array(self.record_starts[:-1]),
            "record_size": pa.array(np.diff(self.record_starts)),
        }
        for name, (starts, sizes) in self.fields.items():
            if name.encode("utf-8", "surrogateescape").decode("utf-8", "replace") != name:
                raise IndexFormatError(f"shard {self.shard.name!r}: extension {name!r} is not UTF-8; rename the files")
            arrays[_START + name] = pa.array(np.ascontiguousarray(starts))
            arrays[_SIZE + name] = pa.array(np.ascontiguousarray(sizes))
        arrays[_SPAN_CRC32C] = self._span_column(self.span_crc32c.astype(np.int64))
        if self.large.fields:
            arrays[_REST_CRC32C] = self._span_column(self.large.rest)
            arrays |= {_CRC32C + name: _sum_column(sums) for name, sums in self.large.fields.items()}
        plain = list(arrays)
        arrays.update(self.columns)
        facts = {
            "kind": KIND,
            "shard": shard_rows([self.shard])[0],
            "fields": list(self.fields),
            "columns": list(self.columns),
            "chunks": chunk_columns(self.chunks),
        }
        return write_table(pa.table(arrays), facts, plain=plain)

    def _span_column(self, sums: Int64Array) -> pa.Array:
        """Return checksums of spans (-1: none), each in the row of its span's first sample; null elsewhere."""
        column = np.full(len(self.keys), -1, np.int64)
        column[self.span_starts[:-1]] = sums
        return _sum_column(column)

    def restored(self, buffer: Any) -> bytes | None:
        """Return the file that a damaged one, ``buffer``, was, with its lifted columns; None if that cannot be proved.

        Args:
            buffer: The damaged sample file.

        Returns:
            This table, without columns so far, and the columns that the damaged file gives, as the bytes of a file
            whose checksums are those in the damaged one.
        """
        with suppress(IndexFormatError, KeyError, TypeError, ValueError, pa.ArrowException):
            rows, facts = read_table(buffer, KIND, "", lambda facts: list(facts["columns"]), checked=False)
            columns = {name: rows.column(name).combine_chunks() for name in facts["columns"]}
            rebuilt = replace(self, columns=columns).to_parquet()
            return rebuilt if is_original(rebuilt, buffer) else None
        return None

    @classmethod
    def from_parquet(cls, buffer: Any, source: str) -> SampleTable:
        """Return the table in the bytes of a sample file. ``source`` is its URL, for messages.

        Raises:
            IndexFormatError: The bytes are damaged, not a sample table, or of a newer major version.
        """
        rows, facts = read_table(buffer, KIND, source)
        chunks = _chunks_of_facts(facts, source)
        with content_errors(source, "not a sample table"):
            span_starts, span_crc32c = _spans(rows)
            starts = numbers(rows.column("record_start"), np.int64)
            sizes = numbers(rows.column("record_size"), np.int64)
            table = cls(
                chunks=chunks,
                keys=_keys(rows.column("key")),
                chunk=numbers(rows.column("chunk"), np.int32),
                record_starts=np.concatenate((starts, starts[-1:] + sizes[-1:]))
                if starts.size
                else np.zeros(1, np.int64),
                fields=_ranges(rows, facts["fields"]),
                columns={name: rows.column(name).combine_chunks() for name in facts["columns"]},
                span_starts=span_starts,
                span_crc32c=span_crc32c,
                large=_large(rows, facts, span_starts),
            )
        table.validate(source)
        return table


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Records:
    """Locate some fields of a shard's samples: the part of a sample table that this takes, and no more.

    Attributes:
        chunks: The shard and its chunk rows.
        keys: The key of each of ``n`` samples.
        fields: As ``SampleTable.fields``, for the requested fields that exist.
    """

    chunks: ChunkTable
    keys: Keys
    fields: FieldRanges

    @property
    def num_bytes(self) -> int:
        """Memory in bytes that the records take."""
        return int(self.keys.array.nbytes) + 16 * len(self.keys) * len(self.fields)

    @classmethod
    def of_table(cls, table: SampleTable, fields: Sequence[str]) -> Records:
        """Take the records from a whole table."""
        there = {name: table.fields[name] for name in fields if name in table.fields}
        return cls(chunks=table.chunks, keys=Keys(key_array(table.keys)), fields=there)

    @classmethod
    def from_parquet(cls, buffer: Any, fields: Sequence[str], source: str) -> Records:
        """Take the records from the bytes of a sample file.

        Nothing else in the file is unpacked, and the places of fields are not checked.

        Raises:
            IndexFormatError: The bytes are damaged, not a sample table, or of a newer major version.
        """

        def wanted(facts: dict[str, Any]) -> list[str]:
            there = facts.get("fields")
            known = [name for name in fields if isinstance(there, list) and name in there]
            return ["key", *(part + name for name in known for part in (_START, _SIZE))]

        rows, facts = read_table(buffer, KIND, source, columns=wanted)
        with content_errors(source, "not a sample table"):
            chunks = _chunks_of_facts(facts, source)
            found = _ranges(rows, [name for name in facts["fields"] if name in fields])
        keys = rows.column("key").combine_chunks()
        if len(keys) != chunks.shards[0].num_samples or keys.null_count:
            raise damaged(source, f"{chunks.shards[0].num_samples} samples, but {len(keys)} keys")
        return cls(chunks=chunks, keys=Keys(keys), fields=found)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spans:
    """The spans of one shard: the part of a sample table that they take, and no more.

    Attributes:
        chunks: The shard and its chunk rows.
        firsts: int64 ``[S]``, the first sample of each span.
        byte_starts: int64 ``[S]``, offset of each span in the shard.
        crc32c: uint32 ``[S]``, CRC32C of the bytes of each span.
    """

    chunks: ChunkTable
    firsts: Int64Array
    byte_starts: Int64Array
    crc32c: NDArray[np.uint32]

    @classmethod
    def of_table(cls, table: SampleTable) -> Spans:
        """Take the spans from a whole table."""
        firsts = table.span_starts[: table.num_spans]
        return cls(
            chunks=table.chunks, firsts=firsts, byte_starts=table.record_starts[firsts], crc32c=table.span_crc32c
        )

    @classmethod
    def from_parquet(cls, buffer: Any, source: str) -> Spans:
        """Take the spans from the bytes of a sample file. Little else of it is unpacked.

        Raises:
            IndexFormatError: The bytes are damaged, not a sample table, or of a newer major version; or a chunk does
                not begin with a span.
        """
        rows, facts = read_table(buffer, KIND, source, columns=lambda _: ["record_start", _SPAN_CRC32C])
        with content_errors(source, "not a sample table"):
            chunks = _chunks_of_facts(facts, source)
            starts, sums = _spans(rows)
            records = numbers(rows.column("record_start"), np.int64)
        firsts = starts[: sums.size]
        if len(records) != chunks.shards[0].num_samples:
            raise damaged(source, f"{chunks.shards[0].num_samples} samples, but {len(records)} records")
        byte_starts = records[firsts]
        if not (
            np.isin(chunks.first_sample, firsts).all() and np.isin(chunks.byte_start, byte_starts).all()
            and (np.diff(byte_starts) > 0).all()
        ):  # fmt: skip
            raise damaged(source, "a chunk that does not begin with a span")
        return cls(chunks=chunks, firsts=firsts, byte_starts=byte_starts, crc32c=sums)


def chunk_rows_from_footer(buffer: Any, source: str = "sample file", *, whole: bool = False) -> ChunkTable:
    """Return the chunk rows of one shard from its sample file, or from any tail of it that contains the footer.

    Use :func:`streaming.shards.index.files.read_footer` to get such a tail. If ``buffer`` is the ``whole`` file, all of
    it is checked.

    Raises:
        IndexFormatError: The footer is damaged, of another kind of file, or of a newer major version.
    """
    chunks = _chunks_of_facts(read_facts(buffer, KIND, source, whole=whole), source)
    chunks.validate(source)
    return chunks


def columns_from_footer(buffer: Any, source: str) -> list[str]:
    """Return the names of the lifted columns of a sample file, from a tail of it that contains the footer.

    Raises:
        IndexFormatError: As :func:`chunk_rows_from_footer`.
    """
    return list(map(str, read_facts(buffer, KIND, source).get("columns", ())))


def contents_from_footer(buffer: Any, source: str) -> tuple[list[str], dict[str, str]]:
    """Return the fields of a sample file, and its lifted columns with their types, from a tail of it.

    Raises:
        IndexFormatError: As :func:`chunk_rows_from_footer`.
    """
    facts, types = types_of_columns(buffer, KIND, source)
    return list(map(str, facts["fields"])), {name: types[name] for name in map(str, facts["columns"])}


def _chunks_of_facts(facts: Mapping[str, Any], source: str) -> ChunkTable:
    with content_errors(source, "damaged footer"):
        return one_shard_table(shards_of_rows([facts["shard"]])[0], facts["chunks"])


def _ranges(rows: pa.Table, names: Sequence[str]) -> FieldRanges:
    """Return the start of each field in the samples, and its sizes."""
    return {
        name: (numbers(rows.column(_START + name), np.int64), numbers(rows.column(_SIZE + name), np.int64))
        for name in names
    }


def _spans(rows: pa.Table) -> tuple[Int64Array, NDArray[np.uint32]]:
    """Return ``span_starts`` and ``span_crc32c``."""
    column = rows.column(_SPAN_CRC32C)
    if not len(column):  # pyarrow up to 18 crashes on an empty column
        return np.zeros(1, np.int64), np.zeros(0, np.uint32)
    firsts = numbers(pc.indices_nonzero(column.is_valid()), np.uint64)
    starts = np.append(firsts, len(column) if firsts.size else 0).astype(np.int64)
    return starts, numbers(column.drop_null(), np.uint32)


def _large(rows: pa.Table, facts: Mapping[str, Any], span_starts: Int64Array) -> LargeSums:
    """Return sums of large members, if there are any."""
    names = [name for name in facts["fields"] if _CRC32C + name in rows.column_names]
    if not names:
        return LargeSums()
    rest = _sums_of_column(rows.column(_REST_CRC32C))
    return LargeSums(
        fields={name: _sums_of_column(rows.column(_CRC32C + name)) for name in names},
        rest=rest[span_starts[:-1]],
    )


def _sum_column(sums: Int64Array) -> pa.Array:
    """Return checksums as a column, uint32. -1 becomes null."""
    missing = sums < 0
    return pa.array(np.where(missing, 0, sums).astype(np.uint32), mask=missing)


def _sums_of_column(column: Any) -> Int64Array:
    """Return the inverse of :func:`_sum_column`."""
    return numbers(column, np.int64, missing=-1)


def _keys(column: Any) -> list[str]:
    if column.null_count:
        raise ValueError(f"{column.null_count} samples without a key")
    values = column.to_pylist()
    if pa.types.is_binary(column.type):
        return [value.decode("utf-8", "surrogateescape") for value in values]
    return values  # type: ignore[no-any-return]
