"""Find the page of a Parquet column that holds a row, so that Arrow need not unpack the pages before it."""

from __future__ import annotations

from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

_COMPRESSED_SIZE, _PAGE, _PAGE_V2, _NUM_VALUES = 3, 5, 8, 1  # fields of page headers
_TRUE, _FALSE, _INTEGERS, _BINARY, _STRUCT = 1, 2, (4, 5, 6), 8, 12  # types of Thrift's compact protocol
_MAX_DEPTH = 4  # of structs in a page header

_Struct: TypeAlias = "dict[int, Any]"


def begun_at_page(file: pq.ParquetFile, buffer: memoryview, group: int, name: str, row: int) -> tuple[Any, int]:
    """Return a file whose column begins with the page that holds a row, and the first row of that page.

    Arrow always unpacks a column from its first page on. The returned file has the same metadata, but the pages from
    this one on lie where the column begins. Only this column of this group can be read from it, up to its last row.

    Args:
        file: The file. Some rows of the group must have been read: damaged metadata of a column ends the process.
        buffer: Its bytes.
        group: Number of the row group.
        name: A column without lists.
        row: Number of the row in the group.

    Returns:
        ``file`` itself and 0 if the first page holds the row, or if the pages need a dictionary or cannot be
        distinguished.
    """
    data, metadata = buffer.cast("B"), file.metadata
    number = next(at for at in range(metadata.num_columns) if metadata.schema.column(at).path == name)
    column = metadata.row_group(group).column(number)
    if column.has_dictionary_page:
        return file, 0
    start = column.data_page_offset
    stop = start + column.total_compressed_size
    at, before = start, 0
    try:
        while True:
            header, body = _struct(data, at)
            count = (header.get(_PAGE) or header[_PAGE_V2])[_NUM_VALUES]
            if count < 0 or header[_COMPRESSED_SIZE] < 0:
                return file, 0
            if before + count > row:
                break
            at, before = body + header[_COMPRESSED_SIZE], before + count
    except (IndexError, KeyError, TypeError, ValueError):
        return file, 0  # Arrow reports its damage, if it has any
    if not 0 <= start < at < stop <= len(data):
        return file, 0
    moved = b"".join((bytes(start), data[at:stop], bytes(at - start)))
    return pq.ParquetFile(pa.BufferReader(moved), metadata=metadata), before


def _struct(data: memoryview, at: int, depth: int = 0) -> tuple[_Struct, int]:
    """Return the integers and structs of the Thrift struct at a place, by field, and its end.

    Raises:
        ValueError: It has fields of types that page headers do not have.
        IndexError: It does not end.
    """
    found: _Struct = {}
    field = 0
    while head := data[at]:
        at, step, kind = at + 1, head >> 4, head & 15
        field += step
        if not step or depth > _MAX_DEPTH:
            raise ValueError("not a page header")
        if kind in _INTEGERS:
            value, at = _varint(data, at)
            found[field] = (value >> 1) ^ -(value & 1)
        elif kind == _BINARY:
            size, at = _varint(data, at)
            at += size
        elif kind == _STRUCT:
            found[field], at = _struct(data, at, depth + 1)
        elif kind not in (_TRUE, _FALSE):
            raise ValueError("not a page header")
    return found, at + 1


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return the number at a place, seven bits per byte, the lowest first, and its end."""
    value = shift = 0
    while True:
        byte = data[at]
        at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
        if byte < 128:
            return value, at
