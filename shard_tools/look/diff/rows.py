"""Describe samples as rows: the key, and for each field its size and a number that represents its bytes.

A row of an Arrow table has ``key``, ``at`` (the sample's number in its set), and per field ``size.FIELD`` (-1 if the
sample lacks the field) and ``sum.FIELD``:

- below 2**32: the CRC32C of the field's bytes;
- from 2**62 on: a *place*, a hash of the checksum that covers the field and of the field's position in those bytes.
  Two fields with equal place and size have the same bytes; fields with different places may still have the same bytes.

Column values are in ``column.NAME``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from crc32c import crc32c

from streaming.shards.index.chunk_table import numbers
from streaming.shards.index.columns import Values
from streaming.shards.index.keys import key_array
from streaming.shards.index.sample_table import SampleTable
from streaming.types import Int64Array

Mask: TypeAlias = npt.NDArray[np.bool_]
KEY, AT, SIZE, SUM, COLUMN = "key", "at", "size.", "sum.", "column."
_PLACE = 1 << 62
_IS_EXACT_BELOW = 1 << 32


def is_exact(sums: Int64Array) -> Mask:
    """Return a mask of exact sums (checksums of the bytes, or of an absent field); the others are places."""
    return sums < _IS_EXACT_BELOW


def rows_of_table(table: SampleTable, first: int, columns: Mapping[str, Values]) -> pa.Table:
    """Return the rows of a shard from its sample table; the first sample has the number ``first``."""
    arrays = {KEY: _keys(table.keys), AT: pa.array(np.arange(first, first + table.num_samples))}
    for name, (sizes, sums) in known_sums(table).items():
        arrays |= {SIZE + name: pa.array(sizes), SUM + name: pa.array(sums)}
    return pa.table({**arrays, **{COLUMN + name: values for name, values in columns.items()}})


def rows_of_samples(samples: Iterable[tuple[str, Mapping[str, bytes]]], first: int) -> pa.Table:
    """Return the rows of samples whose bytes are in memory."""
    keys: list[str] = []
    found: dict[str, tuple[list[int], list[int], list[int]]] = {}  # by field: numbers of samples, sizes, sums
    for number, (key, fields) in enumerate(samples):
        keys.append(key)
        for name, data in fields.items():
            rows, sizes, sums = found.setdefault(name, ([], [], []))
            rows.append(number)
            sizes.append(len(data))
            sums.append(crc32c(data))
    arrays = {KEY: _keys(keys), AT: pa.array(np.arange(first, first + len(keys)))}
    for name, (rows, sizes, sums) in found.items():
        for prefix, values in ((SIZE, sizes), (SUM, sums)):
            whole = np.full(len(keys), -1, np.int64)
            whole[rows] = values
            arrays[prefix + name] = pa.array(whole)
    return pa.table(arrays)


def _keys(keys: Sequence[str]) -> pa.Array:
    return key_array(keys).cast(pa.large_binary())


def known_sums(table: SampleTable) -> dict[str, tuple[Int64Array, Int64Array]]:
    """Return the size and the sum of each field in each of ``n`` samples, int64 ``[n]`` each, by field."""
    spans = np.repeat(np.arange(table.num_spans), np.diff(table.span_starts))  # int64 [n]: the span of each sample
    span_bytes = table.record_starts[table.span_starts]  # int64 [S + 1]
    # A span with large members has a checksum of the rest, which holds their headers and thus their positions.
    is_cut = table.large.rest >= 0 if table.large.rest.size else np.zeros(table.num_spans, np.bool_)
    covers = np.where(is_cut, table.large.rest, table.span_crc32c) if is_cut.any() else table.span_crc32c
    cover_hash = mixed(covers.astype(np.uint64) * np.uint64(2) + is_cut, np.diff(span_bytes))
    found = {}
    for name, (starts, sizes) in table.fields.items():
        places = (mixed(cover_hash[spans], starts - span_bytes[spans]) >> np.uint64(2)).astype(np.int64) | _PLACE
        exact = table.large.fields.get(name, np.full(starts.size, -1, np.int64))
        exact = np.where(sizes == 0, 0, exact)
        sums = np.where(starts < 0, -1, np.where(exact >= 0, exact, places))
        found[name] = np.where(starts < 0, -1, sizes), sums
    return found


def mixed(state: npt.NDArray[np.uint64], values: Int64Array) -> npt.NDArray[np.uint64]:
    """Mix numbers into hashes, using the finalizer of splitmix64."""
    z = (state ^ values.astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)), np.uint64)


def fields_of(*tables: pa.Table) -> list[str]:
    """Return the fields that occur in any of these tables, sorted."""
    names = {name.removeprefix(SIZE) for table in tables for name in table.column_names if name.startswith(SIZE)}
    return sorted(names)


def columns_of(table: pa.Table) -> list[str]:
    """Return the columns of a table that have values, sorted."""
    return sorted(name.removeprefix(COLUMN) for name in table.column_names if name.startswith(COLUMN))


def numbers_of(table: pa.Table, name: str, rows: Int64Array) -> Int64Array:
    """Return some rows of a column of sizes or sums; -1 where the column or the value is missing."""
    if name not in table.column_names:
        return np.full(rows.size, -1, np.int64)
    values: Int64Array = numbers(table.column(name), np.int64, missing=-1)[rows]
    return values


def without_columns(table: pa.Table) -> pa.Table:
    """Return the rows without column values."""
    return table.select([name for name in table.column_names if not name.startswith(COLUMN)])


def joined(tables: Sequence[pa.Table]) -> pa.Table:
    """Concatenate tables with different columns; missing columns become null.

    Columns of different types become one type that holds all values: a numeric type, or else text.
    """
    if not tables:
        return pa.table({KEY: pa.array([], pa.large_binary()), AT: pa.array([], pa.int64())})
    try:
        return pa.concat_tables(tables, promote_options="permissive").combine_chunks()
    except (pa.ArrowTypeError, pa.ArrowInvalid):
        return pa.concat_tables([_as_text(table) for table in tables], promote_options="permissive").combine_chunks()


def _as_text(table: pa.Table) -> pa.Table:
    for number, name in enumerate(table.column_names):
        if name.startswith(COLUMN):
            table = table.set_column(number, name, table.column(name).cast(pa.large_string()))
    return table


def shown_key(key: bytes) -> str:
    """Return a key as text; bytes that are not UTF-8 become surrogates."""
    return key.decode("utf-8", "surrogateescape")
