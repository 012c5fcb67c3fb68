"""Hold every chunk of every shard: the chunk table, which has all facts about a dataset that streaming needs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from streaming.errors import IndexFormatError, IndexMismatchError
from streaming.shards.index.files import content_errors, damaged, read_table, write_table
from streaming.shards.tar.headers import BLOCK_BYTES
from streaming.types import Int64Array

KIND = "chunks"
_LIVES = "lives"
_MAX_TOTAL_BYTES = 1 << 62  # so that no sum of sizes or samples leaves int64
_COLUMNS = {
    "shard": np.int32,
    "first_sample": np.int64,
    "num_samples": np.int64,
    "byte_start": np.int64,
    "byte_end": np.int64,
    "crc32c": np.uint32,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInfo:
    """Facts about the content of one shard: its name relative to the index, its size in bytes, its sample count."""

    name: str
    size_bytes: int
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionFacts:
    """What the chunk table of a set that lives says beyond its rows.

    Attributes:
        number: Number of the version; each change of the set has the next one.
        schema: What the set means, as ``schema.json`` says it of other sets.
        inputs: Names of the lists of inputs of what was appended.
        records: Number of the next record, where keys are numbers; 0: nothing was appended yet.
    """

    number: int
    schema: Mapping[str, Any]
    inputs: tuple[str, ...] = ()
    records: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        return {
            "number": self.number, "schema": dict(self.schema), "inputs": [*self.inputs], "records": self.records,
        }  # fmt: skip

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> VersionFacts | None:
        """Return what the facts of a chunk table say; None: the set does not live.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: They are damaged.
        """
        said = facts.get(_LIVES)
        if said is None:
            return None
        number = _checked_count(said["number"])
        if number < 1:
            raise ValueError(f"version {number}")
        inputs = tuple(map(_checked_name, said["inputs"]))
        return cls(
            number=number, schema=dict(said["schema"]), inputs=inputs, records=_checked_count(said["records"])
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkTable:
    """The ``C`` chunks of some shards, shard by shard, each shard's chunks in order of their bytes.

    The arrays are read-only. A shard's chunk ranges tile its bytes from 0 to the end of its last record; they exclude
    the end-of-archive mark.

    Attributes:
        shards: The shards, in the order of the dataset.
        shard: int32 ``[C]``, index into ``shards``, non-decreasing.
        first_sample: int64 ``[C]``, number of the chunk's first sample within its shard.
        num_samples: int64 ``[C]``, positive.
        byte_start: int64 ``[C]``, offset in the shard.
        byte_end: int64 ``[C]``, exclusive.
        crc32c: uint32 ``[C]``, CRC32C (Castagnoli) of the chunk's bytes.
        version: Of a set that lives, which version this is; it is no part of what tables are compared by. Tables that
            are made of another one have none.
    """

    shards: tuple[ShardInfo, ...]
    shard: NDArray[np.int32] = field(repr=False)
    first_sample: Int64Array = field(repr=False)
    num_samples: Int64Array = field(repr=False)
    byte_start: Int64Array = field(repr=False)
    byte_end: Int64Array = field(repr=False)
    crc32c: NDArray[np.uint32] = field(repr=False)
    version: VersionFacts | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name, dtype in _COLUMNS.items():
            column = np.ascontiguousarray(getattr(self, name), dtype).view()
            column.flags.writeable = False
            object.__setattr__(self, name, column)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ChunkTable):
            return NotImplemented
        return self.shards == other.shards and all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in _COLUMNS
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def num_chunks(self) -> int:
        """Number of chunks."""
        return int(self.shard.size)

    @cached_property
    def total_samples(self) -> int:
        """Number of samples of all shards."""
        return int(self.num_samples.sum())

    @cached_property
    def chunk_bytes(self) -> NDArray[np.int64]:
        """int64 ``[C]``, size of each chunk in bytes; read-only."""
        sizes = self.byte_end - self.byte_start
        sizes.flags.writeable = False
        return sizes

    @cached_property
    def total_bytes(self) -> int:
        """Total size of all chunks in bytes."""
        return int(self.chunk_bytes.sum())

    @cached_property
    def fingerprint(self) -> str:
        """64 hex digits over the shards' names and content facts, in order; independent of their location."""
        digest = hashlib.sha256(b"shardstream chunks 1\n")
        for shard in self.shards:
            raw = shard.name.encode("utf-8", "surrogateescape")
            digest.update(b"%d %d %d " % (len(raw), shard.size_bytes, shard.num_samples) + raw)
        for name, dtype in _COLUMNS.items():
            digest.update(getattr(self, name).astype(np.dtype(dtype).newbyteorder("<")).tobytes())
        return digest.hexdigest()

    def select(self, names: Sequence[str]) -> ChunkTable:
        """Return the chunks of the named shards, in the order of ``names``.

        Raises:
            IndexMismatchError: A name is not in the table, or names two of its shards.
        """
        position: dict[str, int] = {}
        for index, shard in enumerate(self.shards):
            if position.setdefault(shard.name, index) != index and shard.name in names:
                raise IndexMismatchError(
                    f"the index holds two shards named {shard.name!r}: select before joining tables"
                )
        missing = [name for name in names if name not in position]
        if missing:
            raise IndexMismatchError(
                f"{len(missing)} of {len(names)} shards are not in the index, first {missing[0]!r}; "
                "index them with `shard_tools index URL`"
            )
        return self.take([position[name] for name in names])

    def take(self, shards: Sequence[int]) -> ChunkTable:
        """Return the chunks of the shards with these indices, in this order. Indices may repeat."""
        wanted = np.array(shards, np.int64)
        bounds = np.array(self._bounds, np.int64)
        counts = (bounds[1:] - bounds[:-1])[wanted]
        # Row r of the result is row (its rank within its shard) after the shard's first row here.
        first = np.repeat(bounds[:-1][wanted] - np.concatenate(([0], np.cumsum(counts)[:-1])), counts)
        rows = first + np.arange(int(counts.sum()))
        columns = {name: getattr(self, name)[rows] for name in _COLUMNS}
        columns["shard"] = np.repeat(np.arange(wanted.size), counts)
        return ChunkTable(shards=tuple(self.shards[index] for index in wanted.tolist()), **columns)

    def rows(self, chunks: NDArray[np.int64], num_samples: NDArray[np.int64]) -> ChunkTable:
        """Return some chunks, each with a given number of samples. Their bytes stay whole, as in :meth:`between`."""
        columns = {name: getattr(self, name)[chunks] for name in _COLUMNS}
        return ChunkTable(shards=self.shards, **{**columns, "num_samples": num_samples})

    @cached_property
    def _bounds(self) -> list[int]:
        """The first row of each shard, followed by the number of all rows."""
        bounds: list[int] = np.searchsorted(self.shard, np.arange(len(self.shards) + 1)).tolist()
        return bounds

    def rows_of(self, shard: int) -> tuple[int, int]:
        """Return the rows ``[first, stop)`` of one shard."""
        first, stop = self._bounds[shard : shard + 2]
        return first, stop

    def of_shard(self, shard: int) -> ChunkTable:
        """Return the table of one shard alone."""
        rows = slice(*self.rows_of(shard))
        columns = {name: getattr(self, name)[rows] for name in _COLUMNS}
        return ChunkTable(
            shards=(self.shards[shard],), **{**columns, "shard": np.zeros(rows.stop - rows.start, np.int32)}
        )

    def between(self, first: int, stop: int) -> tuple[int, ChunkTable]:
        """Return the number of the first chunk that holds samples ``[first, stop)`` of all, and these chunks' table.

        In the first and the last chunk, ``first_sample`` and ``num_samples`` describe the samples in the range; bytes
        and checksums stay those of the whole chunk. So the result must not be written (see :meth:`validate`).
        """
        ends = np.cumsum(self.num_samples)
        low, high = (int(row) for row in np.searchsorted(ends, [first, max(first, stop - 1)], side="right"))
        rows = slice(low, high + 1 if stop > first else low)
        columns = {name: getattr(self, name)[rows].copy() for name in _COLUMNS}
        starts = (ends - self.num_samples)[rows]
        columns["first_sample"] += np.maximum(first - starts, 0)
        columns["num_samples"] = np.minimum(ends[rows], stop) - np.maximum(starts, first)
        return low, ChunkTable(shards=self.shards, **columns)

    def by_shard(self) -> dict[str, ChunkTable]:
        """Return a table of each shard alone, by name."""
        return {shard.name: self.of_shard(number) for number, shard in enumerate(self.shards)}

    @classmethod
    def concat(cls, tables: Sequence[ChunkTable]) -> ChunkTable:
        """Return the shards of all tables, table after table."""
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(table, name) for table in tables] or [np.empty(0, dtype)])
            for name, dtype in _COLUMNS.items()
        }
        offsets = np.cumsum([0] + [len(table.shards) for table in tables])
        columns["shard"] = columns["shard"] + np.repeat(offsets[:-1], [table.num_chunks for table in tables])
        return cls(shards=tuple(shard for table in tables for shard in table.shards), **columns)

    @classmethod
    def merged(cls, *by_shard: Mapping[str, ChunkTable]) -> ChunkTable:
        """Merge tables of single shards, by name, into one table in the order of the names.

        If a name repeats, the last table counts.
        """
        tables = {name: table for tables in by_shard for name, table in tables.items()}
        return cls.concat([tables[name] for name in sorted(tables)])

    def validate(self, source: str = "chunk table") -> None:
        """Check all promises that the table makes on its own.

        Raises:
            IndexFormatError: A promise is broken; the message names the first shard that breaks one.
        """
        if len({getattr(self, name).shape for name in _COLUMNS}) != 1 or self.shard.ndim != 1:
            raise damaged(source, "columns of different lengths")
        bad = (self.shard < 0) | (self.shard >= len(self.shards))
        if bad.any() or (np.diff(self.shard) < 0).any():
            raise damaged(source, "chunks are not grouped by shard in the order of the shards")
        starts = np.concatenate(([True], self.shard[1:] != self.shard[:-1])) if self.num_chunks else np.empty(0, bool)
        previous_end = np.where(starts, 0, np.roll(self.byte_end, 1))
        previous_sample = np.where(starts, 0, np.roll(self.first_sample + self.num_samples, 1))
        size = np.array([shard.size_bytes for shard in self.shards], np.int64)
        self._refuse(self.num_samples < 1, "a chunk without samples", source)
        self._refuse(self.byte_end <= self.byte_start, "an empty byte range", source)
        self._refuse(self.byte_start != previous_end, "chunks that do not tile the shard's bytes", source)
        self._refuse(self.first_sample != previous_sample, "chunks that do not tile the shard's samples", source)
        if self.num_chunks:
            self._refuse(self.byte_end > size[self.shard], "a chunk beyond the end of the shard", source)
        self._refuse(self.num_samples > self.chunk_bytes // BLOCK_BYTES, "more samples than headers fit", source)
        if sum(max(0, shard.size_bytes) for shard in self.shards) > _MAX_TOTAL_BYTES:
            raise damaged(source, f"shards of more than {_MAX_TOTAL_BYTES} bytes together")
        counted = np.zeros(len(self.shards), np.int64)
        np.add.at(counted, self.shard, self.num_samples)
        for shard, num_samples in zip(self.shards, counted.tolist(), strict=True):
            if shard.num_samples != num_samples or shard.size_bytes < 0:
                raise IndexFormatError(
                    f"{source}: shard {shard.name!r} has {shard.num_samples} samples, its chunks {num_samples}"
                )

    def _refuse(self, bad: NDArray[np.bool_], what: str, source: str) -> None:
        if bad.any():
            row = int(np.argmax(bad))
            raise damaged(source, f"{what}: chunk {row}, shard {self.shards[self.shard[row]].name!r}")

    def to_parquet(self, *, kind: str = KIND, more: Mapping[str, Any] | None = None) -> bytes:
        """Return the table as the bytes of ``chunks.parquet``. The same table gives the same bytes.

        Args:
            kind: What the file is.
            more: Further members of its JSON.

        Raises:
            IndexFormatError: The table is not valid, or two shards have the same name.
        """
        self.validate()
        names = [shard.name for shard in self.shards]
        if len(set(names)) != len(names):
            raise IndexFormatError("chunk table: two shards of one name cannot be in one index file")
        shard_column = pa.DictionaryArray.from_arrays(pa.array(self.shard), pa.array(names, pa.string()))
        arrays = [shard_column.cast(pa.string()), *(pa.array(getattr(self, name)) for name in list(_COLUMNS)[1:])]
        facts: dict[str, Any] = {"kind": kind, "shards": shard_rows(self.shards), **(more or {})}
        if self.version is not None:
            facts[_LIVES] = self.version.as_dict()
        return write_table(pa.table(arrays, names=list(_COLUMNS)), facts, plain=list(_COLUMNS)[1:])

    @classmethod
    def from_parquet(cls, buffer: Any, source: str) -> ChunkTable:
        """Return the table in the bytes of a ``chunks.parquet``. ``source`` is its URL, for messages.

        Raises:
            IndexFormatError: The bytes are damaged, not a chunk table, or of a newer major version.
        """
        return cls.with_facts(buffer, KIND, source)[0]

    @classmethod
    def with_facts(cls, buffer: Any, kind: str, source: str) -> tuple[ChunkTable, dict[str, Any]]:
        """Return the table in the bytes of a file of this ``kind``, and the file's JSON.

        Raises:
            IndexFormatError: As :meth:`from_parquet`.
        """
        table, facts = read_table(buffer, kind, source)
        with content_errors(source, "not a chunk table"):
            shards = shards_of_rows(facts["shards"])
            columns = {name: numbers(table.column(name), dtype) for name, dtype in list(_COLUMNS.items())[1:]}
            columns["shard"] = _places(table.column("shard"), [shard.name for shard in shards])
            version = VersionFacts.of_facts(facts)
        chunks = cls(shards=shards, version=version, **columns)
        chunks.validate(source)
        return chunks, facts


def _places(column: Any, names: Sequence[str]) -> NDArray[np.int32]:
    """Return the index in ``names`` of each text in a column, int32 ``[n]``; ValueError if one is missing."""
    if column.null_count:
        raise ValueError(f"{column.null_count} chunks without a shard")
    encoded = column.combine_chunks().dictionary_encode()
    places = {name: place for place, name in enumerate(names)}
    known = [places.get(name, -1) for name in encoded.dictionary.to_pylist()]
    if -1 in known:
        raise ValueError(f"chunks of {encoded.dictionary[known.index(-1)]}, which is none of the shards")
    return np.array(known, np.int32)[numbers(encoded.indices, np.int64)] if known else np.empty(0, np.int32)


def numbers(column: Any, dtype: Any, *, missing: int | None = None) -> NDArray[Any]:
    """Return a column as an array of ``dtype``, with nulls replaced by ``missing``.

    Raises:
        ValueError: There are nulls, and ``missing`` is None.
    """
    if column.null_count and missing is None:
        raise ValueError(f"{column.null_count} missing values")
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    parts = [_values(chunk, dtype, missing) for chunk in chunks if len(chunk)]
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def is_missing(column: pa.Array | pa.ChunkedArray) -> NDArray[np.bool_]:
    """Return which values of a column are missing, without pandas, which ``to_numpy`` imports if it is installed."""
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    return np.concatenate([~_is_there(chunk) for chunk in chunks]) if chunks else np.empty(0, np.bool_)


def _is_there(array: Any) -> NDArray[np.bool_]:
    """Return which values of an Arrow array are not missing."""
    if array.null_count in {0, len(array)}:  # of the second kind, those of type null have no bits
        return np.full(len(array), not array.null_count)
    bits = np.frombuffer(array.buffers()[0], np.uint8)
    return np.unpackbits(bits, count=array.offset + len(array), bitorder="little")[array.offset :].astype(np.bool_)


_FLOATS = {"halffloat": "float16", "float": "float32", "double": "float64"}


def _values(array: Any, dtype: Any, missing: int | None) -> NDArray[Any]:
    """Return the numbers of an Arrow array. ``to_numpy`` and ``fill_null`` would import pandas if it is installed."""
    kind = array.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise TypeError(f"expected numbers, got {kind}")
    stored = np.dtype(_FLOATS.get(str(kind), str(kind)))
    values = np.frombuffer(array.buffers()[1], stored, len(array), array.offset * stored.itemsize)
    values = values.astype(dtype, casting="same_kind", copy=False)
    if not array.null_count:
        return values
    return np.where(_is_there(array), values, np.array(missing, dtype))


def shard_rows(shards: Sequence[ShardInfo]) -> list[list[Any]]:
    """Return shards as JSON-able rows."""
    return [[shard.name, shard.size_bytes, shard.num_samples] for shard in shards]


def shards_of_rows(rows: Any) -> tuple[ShardInfo, ...]:
    """Return the inverse of :func:`shard_rows`; ValueError or TypeError if ``rows`` are malformed."""
    return tuple(
        ShardInfo(name=_checked_name(name), size_bytes=_checked_count(size_bytes), num_samples=_checked_count(num))
        for name, size_bytes, num in rows
    )


def _checked_count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > _MAX_TOTAL_BYTES:
        raise ValueError(f"expected a number of bytes or samples, got {str(value)[:80]}")
    return value


def _checked_name(name: Any) -> str:
    """Return ``name`` if it stays below the shards' directory: tools join it to URLs that they read and delete."""
    if not isinstance(name, str) or "\0" in name or not {"", ".", ".."}.isdisjoint(name.split("/")):
        raise ValueError(f"shard name {str(name)[:80]!r} is not a path below the folder of the shards")
    return name


def one_shard_table(shard: ShardInfo, rows: Mapping[str, Any]) -> ChunkTable:
    """Return the chunk table of one shard from its columns, without ``shard``."""
    columns: dict[str, Any] = {name: np.array(rows[name], dtype) for name, dtype in list(_COLUMNS.items())[1:]}
    return ChunkTable(shards=(shard,), shard=np.zeros(columns["crc32c"].size, np.int32), **columns)


def chunk_columns(table: ChunkTable) -> dict[str, list[int]]:
    """Return the columns of a one-shard table as JSON-able lists, without ``shard``."""
    return {name: getattr(table, name).tolist() for name in list(_COLUMNS)[1:]}
