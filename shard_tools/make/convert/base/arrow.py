"""Open Parquet files, and map Arrow columns to fields.

The field of a column is decided once for all rows; values become plain Python.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shard_tools.make.convert.base.files import SourceFile, open_stored
from shard_tools.make.convert.base.rows import DROP, RowMapper, as_payload, choose_type, safe_extension, with_lists
from shard_tools.make.write.filetypes import file_type
from streaming.errors import ConfigError, DataError, ShardstreamError, shell_word
from streaming.storage import Storage

LOOKED_AT = 10_000  # values of a binary column that decide its type; later ones are compared with it when they are read


def open_parquet(file: SourceFile, storage: Storage) -> pq.ParquetFile:
    """Open a stored Parquet file; close it with ``close(force=True)``, which also releases its buffers.

    Raises:
        DataError: It is not a Parquet file, or is damaged.
    """
    stream = open_stored(file, storage, unzip=False)
    try:
        with told(file):
            return pq.ParquetFile(pa.PythonFile(stream, mode="r"))
    except ShardstreamError:
        stream.close()
        raise


@contextlib.contextmanager
def told(file: SourceFile) -> Iterator[None]:
    """Name the file in errors of pyarrow."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, ShardstreamError):
            raise
        raise DataError(
            f"{file.shown_url}: not a Parquet file, or a damaged one: {error}; fetch it again, or write it anew"
        ) from error


@dataclass(frozen=True, slots=True)
class Column:
    """The kind of a column, by the schema.

    ``kind`` is "binary", "files" (lists of binary values), "list" (of numbers), "lists" (of lists of numbers) or "".
    """

    kind: str
    items: str = ""  # type of the numbers in lists, by NumPy's name

    @classmethod
    def of(cls, kind: pa.DataType) -> Column | None:
        """Return the column of an Arrow type; None: the column is empty, so another file decides."""
        while pa.types.is_dictionary(kind) or isinstance(kind, pa.BaseExtensionType):
            kind = kind.value_type if pa.types.is_dictionary(kind) else kind.storage_type
        if pa.types.is_null(kind):
            return None
        depth = 0
        while _is_list(kind):
            kind, depth = kind.value_type, depth + 1
        if depth:
            numbers = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
            name = str(np.dtype(kind.to_pandas_dtype())) if numbers else ""
            if depth == 1 and _is_binary(kind):
                return cls("files")
            return cls(("list" if depth == 1 else "lists") if numbers else "", name)
        return cls("binary" if _is_binary(kind) else "")

    def joined(self, other: Column) -> Column:
        """Return the column that holds both, in a field that an option names."""
        items = "" if "" in {self.items, other.items} else str(np.result_type(self.items, other.items))
        return Column(self.kind if self.kind == other.kind else "", items)


class ArrowColumns:
    """The columns of all files of a source; each becomes one field.

    Args:
        named: Columns that an option names.
    """

    def __init__(self, named: Collection[str]) -> None:
        self._named = named
        self._columns: dict[str, Column] = {}
        self._first = ""

    @property
    def item_types(self) -> dict[str, str]:
        """Types of the numbers in lists, by column."""
        return {name: column.items for name, column in self._columns.items() if column.items}

    def add(self, schema: pa.Schema, where: str, *, arrays: Collection[str] = ()) -> None:
        """Add the columns of another file; a column must have the same type in all files that have it.

        Args:
            schema: Its columns.
            where: The file, for messages.
            arrays: Columns of lists of lists that are arrays of one shape.

        Raises:
            ConfigError: A column that becomes a separate field has another type here.
        """
        self._first = self._first or where
        for field in schema:
            here = Column.of(field.type)
            if here is not None and field.name in arrays and here.kind == "lists":
                here = Column("list", here.items)
            there = self._columns.setdefault(field.name, here) if here is not None else None
            if here is None or there is None or here == there:
                continue
            if field.name in self._named:
                self._columns[field.name] = here.joined(there)
            else:
                named = shell_word(field.name)
                raise ConfigError(
                    f"{where}: column {field.name!r} is {field.type}, but another type in {self._first} or "
                    f"after it; a column becomes one field: say which with --field {named}=EXT, leave it out with "
                    f"--field {named}=-, or convert these files apart"
                )

    def fit(self, mapper: RowMapper, looks: Iterable[Callable[[list[str]], dict[str, Counter[str]]]]) -> RowMapper:
        """Decide the field of each column once, for all rows of all files.

        Args:
            mapper: The mapper with the options.
            looks: One function per file, which counts the types of the first values of the given columns, as far as the
            file has them (:func:`count_types`); called file by file until each column has values.
        """
        columns, named = self._columns, dict(mapper.fields)
        kinds = {name: column.kind for name, column in columns.items() if name not in named}
        bytes_of = [name for name, kind in kinds.items() if kind in {"binary", "files"}]
        found: dict[str, Counter[str]] = {}
        for look in looks:
            left = [column for column in bytes_of if not found.get(column)]
            if not left:
                break
            found |= look(left)
        types = {name: choose_type(name, found.get(name, Counter())) for name in bytes_of}
        alone = [*kinds.values()].count("binary") == 1
        binary = {
            name: kind if alone else f"{safe_extension(name)}.{kind}"
            for name, kind in types.items()
            if kinds[name] == "binary"
        }
        lists = {
            name: named.get(name) or f"{safe_extension(name)}.{types[name]}"
            for name, column in columns.items()
            if column.kind == "files" and named.get(name) != DROP
        }
        arrays = {name: f"{safe_extension(name)}.npy" for name, kind in kinds.items() if kind == "list"}
        return with_lists(replace(mapper, binary=binary, arrays=arrays, items=self.item_types), lists, columns)


def count_types(batches: Iterable[pa.RecordBatch], columns: Sequence[str]) -> dict[str, Counter[str]]:
    """Count the types of the first values of columns of bytes, or of lists of bytes; ``""`` for an unknown type."""
    found = {column: Counter[str]() for column in columns}
    left = LOOKED_AT
    for batch in batches:
        for column in columns:
            values = batch.column(column)[:left].to_pylist()
            items = itertools.chain.from_iterable(one if isinstance(one, list) else (one,) for one in values)
            found[column].update(file_type(payload) for payload in map(as_payload, items) if payload)
        left -= batch.num_rows
        if left <= 0:
            break
    return found


def plain_rows(batch: pa.RecordBatch, where: str) -> Iterator[dict[str, object]]:
    """Yield the rows of a batch.

    Nanosecond times become ISO text with nine digits, and durations become seconds, equal with and without pandas.

    Raises:
        DataError: A date or time is beyond the years 1 to 9999; the message begins with ``where``.
    """
    columns: list[list[object]] = []
    for name, array in zip(batch.schema.names, batch.columns, strict=True):
        try:
            columns.append(plain_list(array))
        except (OverflowError, ValueError, AttributeError) as error:
            raise DataError(
                f"{where}: column {name!r}, {array.type}: a value that Python cannot hold, such as a date beyond the "
                f"years 1 to 9999 ({error}); correct it, or leave the column out before the conversion"
            ) from error
    names = batch.schema.names
    for values in zip(*columns, strict=True) if columns else ({} for _ in range(batch.num_rows)):
        yield dict(zip(names, values, strict=True))


def plain_list(array: pa.Array) -> list[object]:
    """Return the values of an array as Python's own, whatever packages are installed."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if not _has_fine_times(array.type):
        plain: list[object] = array.to_pylist()
        return plain
    kind = array.type
    if pa.types.is_dictionary(kind):
        return plain_list(array.dictionary_decode())
    if _is_list(kind):
        items = iter(plain_list(array.flatten()))
        lengths = array.value_lengths().to_pylist() if not pa.types.is_fixed_size_list(kind) else None
        sizes = [kind.list_size if one.is_valid else None for one in array] if lengths is None else lengths
        return [None if size is None else [next(items) for _ in range(size)] for size in sizes]
    if pa.types.is_struct(kind):
        names = [kind.field(number).name for number in range(kind.num_fields)]
        columns = [plain_list(column) for column in array.flatten()]
        rows = zip(*columns, strict=True)
        valid = array.is_valid().to_pylist()
        return [dict(zip(names, row, strict=True)) if there else None for row, there in zip(rows, valid, strict=True)]
    return _fine_times(array)


def _fine_times(array: pa.Array) -> list[object]:
    """Return nanosecond times as text, durations as seconds."""
    kind = array.type
    numbers = array.cast(pa.int64()).to_pylist()
    if pa.types.is_duration(kind):
        return [None if number is None else number / 1e9 for number in numbers]
    coarse = pa.timestamp("us", kind.tz) if pa.types.is_timestamp(kind) else pa.time64("us")
    times = pa.array([None if number is None else number // 1000 for number in numbers], pa.int64()).cast(coarse)
    return [
        None if time is None else _fine_text(time, number % 1000)
        for time, number in zip(times.to_pylist(), numbers, strict=True)
    ]


def _fine_text(time: object, nanoseconds: int) -> object:
    if not nanoseconds:
        return time
    text: str = time.isoformat(timespec="microseconds")  # type: ignore[attr-defined]  # a datetime or a time
    end = text.index(".") + 7
    return f"{text[:end]}{nanoseconds:03d}{text[end:]}"


def _has_fine_times(kind: pa.DataType) -> bool:
    """Return whether values of a type hold nanosecond times, whose last digits Python's own types lose."""
    if isinstance(kind, pa.BaseExtensionType):
        return _has_fine_times(kind.storage_type)
    if pa.types.is_dictionary(kind) or _is_list(kind):
        return _has_fine_times(kind.value_type)
    if pa.types.is_struct(kind):
        return any(_has_fine_times(kind.field(number).type) for number in range(kind.num_fields))
    return kind in {pa.duration("ns"), pa.time64("ns")} or (pa.types.is_timestamp(kind) and kind.unit == "ns")


def _is_binary(kind: pa.DataType) -> bool:
    """Return whether values of a type are bytes, or Hugging Face's struct of bytes and a path."""
    if isinstance(kind, pa.BaseExtensionType):
        return _is_binary(kind.storage_type)
    if pa.types.is_struct(kind):
        return {kind.field(i).name for i in range(kind.num_fields)} == {"bytes", "path"}
    binary = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)
    return bool(binary or pa.types.is_binary_view(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
