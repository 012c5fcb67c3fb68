"""Read keys and values of a table (Parquet, JSONL or CSV files), batch by batch, as often as needed."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from shard_tools.make.convert.base.arrow import open_parquet, plain_list, told
from shard_tools.make.convert.base.files import SourceFile, find_files
from shard_tools.make.convert.base.identity import SourceStorage, origins_of
from shard_tools.make.convert.base.records import SourceOptions
from shard_tools.make.convert.sources import LAYOUTS, kind_of_name, open_source
from shard_tools.make.write.columns import ColumnValue, column_array, stored_type, stored_value
from streaming.errors import ConfigError
from streaming.shards.index.columns import joined_type, recast
from streaming.shards.index.where import is_comparable
from streaming.storage import Storage, redact

_KINDS = ("parquet", "jsonl", "csv")
_BATCH_ROWS = 1 << 18
_LINES = 1 << 16  # rows of text in a batch: their values are Python objects
_LOOKED_AT = 1000  # lines read to find the columns: each line may have its own
_HASH_BYTES = 8 << 20
_TYPES_OF_TEXT = (pa.int64(), pa.uint64(), pa.float64(), pa.bool_())  # the first that fits all values of a CSV file
_CURE = "Write the values as text, or all as numbers of one kind, or name another column with --value"
_SURE_DIGITS = 15  # float64 represents every whole number of at most 15 digits


class TableRows(Protocol):
    """Keys and values of a table.

    Attributes:
        value: Column that holds the values.
        kind: Their type.
        num_rows: Rows of all files.
    """

    value: str
    kind: pa.DataType
    num_rows: int

    def batches(self) -> Iterator[tuple[pa.Array, pa.Array]]:
        """Yield keys (as bytes) and values: two arrays of equal length."""


def open_rows(source: str, storage: Storage, *, name: str, on: str, value: str | None) -> tuple[TableRows, str]:
    """Open the table at ``source`` (a file, a folder or a pattern); return its rows, and a digest of its bytes.

    Args:
        source: The files. Suffixes such as ``.jsonl`` and ``.csv`` give the format; other files are Parquet.
        storage: Their store.
        name: The late column that is added.
        on: Column that holds keys.
        value: Column that holds values; None: ``name``, or the only other one.

    Raises:
        NotFoundError: There is no file.
        DataError: A file is damaged.
        ConfigError: The files are of several formats, a column does not exist, or its values cannot be compared.
    """
    storage = SourceStorage.of(storage)
    files = find_files(source, storage)
    storage.expect(origins_of(files, storage))
    known = {kind for file in files if (kind := kind_of_name(file.name)) in _KINDS}
    kind = next(iter(known), "parquet")
    if len(known) > 1:
        raise ConfigError(f"{redact(source)}: tables of several formats ({', '.join(sorted(known))}); name one")
    if len(files) > 1:  # a folder may hold other files, too
        files = [file for file in files if file.name.lower().endswith(LAYOUTS[kind].suffixes)] or files
    digest = _digest(files, storage)
    if kind == "parquet":
        return _ParquetRows(files, storage, name, on, value), digest
    return _TextRows(kind, source, storage, name, on, value), digest


class _ParquetRows:
    """Rows of Parquet files."""

    def __init__(self, files: Sequence[SourceFile], storage: Storage, name: str, on: str, value: str | None) -> None:
        self._files, self._storage, self._on = files, storage, on
        self.value, self.num_rows = "", 0
        kinds: list[pa.DataType] = []
        for file in files:
            with _opened(file, storage) as parquet:
                schema = parquet.schema_arrow
                self.value = self.value or _value_column(schema.names, name, on, value)
                _check_columns(file.url, schema.names, on, self.value)
                _check_key(file.url, on, _plain_type(schema.field(on).type))
                kinds.append(_stored_type(schema.field(self.value).type, file.url, self.value))
                self.num_rows += parquet.metadata.num_rows
        self.kind = _joined_kind(kinds, files[0].url, self.value)

    def batches(self) -> Iterator[tuple[pa.Array, pa.Array]]:
        columns = list(dict.fromkeys([self._on, self.value]))
        for file in self._files:
            with _opened(file, self._storage) as parquet:
                for batch in parquet.iter_batches(batch_size=_BATCH_ROWS, columns=columns, use_threads=False):
                    keys, values = (batch.column(batch.schema.get_field_index(name)) for name in (self._on, self.value))
                    keys = keys.cast(pa.binary())
                    yield keys, _recast(_plain_array(values), self.kind, keys, file.url, self.value)


class _TextRows:
    """Rows of JSONL or CSV files. Their types are known only after all rows have been read once."""

    def __init__(self, kind: str, source: str, storage: Storage, name: str, on: str, value: str | None) -> None:
        self._reader = open_source(source, storage, kind=kind, options=SourceOptions(named_only=True))
        self._url, self._on, self._is_csv = source, on, kind == "csv"
        with closing(self._reader.records(0)) as records:
            names = list(dict.fromkeys(name for one in itertools.islice(records, _LOOKED_AT) for name in one.metadata))
        self.value = _value_column(names, name, on, value)
        _check_columns(source, names, on, self.value)
        self.num_rows = 0
        kinds: list[pa.DataType] = []
        fitting = list(_TYPES_OF_TEXT)
        for _, values in self._lines():
            self.num_rows += len(values)
            if self._is_csv:
                fitting = [one for one in fitting if _fits(values, one)]
            else:
                kinds.append(values.type)
        self.kind = next(iter(fitting), pa.string()) if self._is_csv else _joined_kind(kinds, source, self.value)

    def batches(self) -> Iterator[tuple[pa.Array, pa.Array]]:
        for keys, values in self._lines():
            yield keys.cast(pa.binary()), _recast(values, self.kind, keys, self._url, self.value)

    def _lines(self) -> Generator[tuple[pa.Array, pa.Array], None, None]:
        """Yield keys and values as written in the file; an empty CSV value is missing."""
        with closing(self._reader.records(0)) as records:
            while rows := [record.metadata for record in itertools.islice(records, _LINES)]:
                keys = self._keys([row.get(self._on) for row in rows])
                values = [row.get(self.value) for row in rows]
                yield keys, self._texts(values) if self._is_csv else self._values(values, keys)

    def _keys(self, values: list[object]) -> pa.Array:
        try:
            keys = pa.array(values, pa.string() if self._is_csv else None)
        except (pa.ArrowException, OverflowError, UnicodeEncodeError) as error:
            raise ConfigError(f"{redact(self._url)}: column {self._on!r}: keys are not all text ({error})") from error
        _check_key(self._url, self._on, keys.type)
        return keys

    def _texts(self, values: list[object]) -> pa.Array:
        return pa.array([None if one == "" else one for one in values], pa.string())

    def _values(self, values: list[object], keys: pa.Array) -> pa.Array:
        def shown_keys() -> list[str]:
            return [*map(_shown, keys.to_pylist())]

        plain = list[ColumnValue]()
        for at, value in enumerate(values):
            try:
                plain.append(stored_value(value))
            except ValueError as error:
                where = f"{redact(self._url)}: column {self.value!r}, key {shown_keys()[at]!r}"
                raise ConfigError(f"{where}: {error}. {_CURE}") from error
        return column_array(plain, self.value, redact(self._url), shown_keys, cure=_CURE)


@contextmanager
def _opened(file: SourceFile, storage: Storage) -> Iterator[pq.ParquetFile]:
    parquet = open_parquet(file, storage)
    try:
        with told(file):
            yield parquet
    finally:
        parquet.close(force=True)


def _value_column(names: Sequence[str], name: str, on: str, value: str | None) -> str:
    others = [one for one in names if one != on]
    return value or (name if name in others or len(others) != 1 else others[0])


def _check_columns(url: str, names: Sequence[str], *wanted: str) -> None:
    for column in wanted:
        if column not in names:
            raise ConfigError(
                f"{redact(url)}: no column {column!r}; there are: {', '.join(names)}. The samples' keys are in --on, "
                "the values in --value"
            )


def _check_key(url: str, on: str, kind: pa.DataType) -> None:
    is_text = pa.types.is_string(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    if not is_text and not pa.types.is_null(kind):
        raise ConfigError(
            f"{redact(url)}: column {on!r} holds {kind}; keys of samples are text, such as '000017'. Write them as text"
        )


def _stored_type(kind: pa.DataType, url: str, column: str) -> pa.DataType:
    """Return the type in which late columns hold values of a column.

    Raises:
        ConfigError: Late columns cannot hold values of this type.
    """
    found = stored_type(kind)
    if found is None:
        raise ConfigError(
            f"{redact(url)}: column {column!r} holds {kind}; late columns hold numbers, text, booleans, dates and times"
        )
    return found


def _joined_kind(kinds: Sequence[pa.DataType], url: str, column: str) -> pa.DataType:
    """Return the type that holds the values of all files.

    Raises:
        ConfigError: The files have types that cannot be compared.
    """
    kind = joined_type(kinds)
    if kind is None:
        names = ", ".join(map(str, dict.fromkeys(kinds)))
        raise ConfigError(
            f"{redact(url)}: column {column!r} holds values of several types, {names}; "
            f"a late column holds numbers, or text, or booleans. {_CURE}"
        )
    return pa.int64() if pa.types.is_null(kind) else kind


def _plain_array(values: pa.Array) -> pa.Array:
    """Return values of a table in the type that columns store, converted as single values are."""
    kind = stored_type(values.type)
    if is_comparable(values.type) and values.type != pa.float16():
        return recast(values, kind)
    if pa.types.is_dictionary(values.type) and is_comparable(values.type.value_type):
        return _plain_array(values.dictionary_decode())
    return pa.array([stored_value(one) for one in plain_list(values)], kind)


def _recast(values: pa.Array, kind: pa.DataType, keys: pa.Array, url: str, column: str) -> pa.Array:
    """Cast values of a column to the common type of all its values.

    Raises:
        ConfigError: The cast would change a value.
    """
    found = recast(values, kind)
    if found is not None:
        return found
    at = next(at for at in range(len(values)) if recast(values.slice(at, 1), kind) is None)
    raise ConfigError(
        f"{redact(url)}: column {column!r}, key {_shown(keys[at].as_py())!r}: {values[at]} is no {kind}, as the values "
        f"of other rows are. {_CURE}"
    )


def _shown(key: str | bytes | None) -> str:
    return "NULL" if key is None else key.decode("utf-8", "surrogateescape") if isinstance(key, bytes) else str(key)


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """Remove dictionary encoding; give text 32-bit offsets."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.string() if pa.types.is_large_string(kind) else kind


def _fits(texts: pa.Array, kind: pa.DataType) -> bool:
    try:
        texts.cast(kind)
    except pa.ArrowInvalid:
        return False
    if not pa.types.is_floating(kind):
        return True
    # Digits alone are a whole number: a cast to float64 must not change it.
    long = texts.filter(pc.match_substring_regex(texts, f"^[+-]?[0-9]{{{_SURE_DIGITS + 1},}}$"))
    return all(int(float(text)) == int(text) for text in long.drop_null().to_pylist())


def _digest(files: Sequence[SourceFile], storage: Storage) -> str:
    """Return a digest of the files' bytes, so that the same table gives the same column version."""
    digest: Any = hashlib.sha256()
    for file in files:
        for start in range(0, file.size_bytes, _HASH_BYTES):
            digest.update(storage.read(file.url, start, min(start + _HASH_BYTES, file.size_bytes)))
    return str(digest.hexdigest())
