"""Lift columns of samples, into sample tables or as late columns, and evaluate conditions on them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from streaming.errors import ConfigError, IndexFormatError
from streaming.shards.index.chunk_table import ShardInfo, numbers, shard_rows, shards_of_rows
from streaming.shards.index.files import ADD_AGAIN, COLUMN_KIND, content_errors, read_table, write_table
from streaming.shards.index.keys import key_array
from streaming.shards.index.sample_table import KIND as SAMPLES
from streaming.shards.index.sample_table import SampleTable
from streaming.shards.index.where import Where, compared_exactly, hash_column, is_comparable, is_string, unknown_column
from streaming.types import Int64Array

KEY = "__key__"
"""The name of the samples' keys in conditions."""
_VALUE = "value"
_NO_FIELD = re.compile(r"No match for FieldRef\.Name\((.*?)\) in ", re.DOTALL)
_MAX_NAMES = 1000
_HASHED_AT_ONCE = 8192
_LOOKED_AT = 1024  # number of texts examined, to decide whether few of them are distinct

Values: TypeAlias = pa.Array
"""A column's values, for modules that pass them on without importing Arrow."""
Bits: TypeAlias = npt.NDArray[np.uint8]
"""One bit for each of ``n`` rows, eight per byte, the first in the lowest bit; bits beyond ``n`` are 0."""
_U64 = npt.NDArray[np.uint64]


# ------------------------------------------------------------------------------------------------------ conditions


def sample_columns(table: SampleTable, names: Collection[str]) -> dict[str, pa.Array]:
    """Return those of the columns ``names`` that the table has. ``__key__`` may be among them."""
    found = {name: table.columns[name] for name in names if name in table.columns}
    if KEY in names:
        found[KEY] = key_array(table.keys)
    return found


def names_of(where: Where, type_of: Callable[[str], pa.DataType]) -> frozenset[str]:
    """Return the columns that a condition uses.

    Those of a pyarrow expression are found by binding it, name by name.

    Args:
        where: The condition.
        type_of: Returns the type of a column; raises if there is no such column.

    Raises:
        ConfigError: The expression does not fit the columns' types.
    """
    if where.names is not None:
        return where.names
    types: dict[str, pa.DataType] = {}
    while len(types) < _MAX_NAMES:
        try:
            _project(where.expression(types), {name: pa.array([], kind) for name, kind in types.items()}, 0)
        except pa.ArrowException as error:
            match = _NO_FIELD.match(str(error))
            if match is None or match[1] in types:
                raise _unfit(where, error) from error
            types[match[1]] = type_of(match[1])
        else:
            return frozenset(types)
    raise ConfigError(f"where: the expression asks for more than {_MAX_NAMES} columns")


def fitting(where: Where, columns: Mapping[str, pa.Array], num_rows: int) -> Bits:
    """Return whether each of ``num_rows`` rows satisfies a condition.

    Args:
        where: The condition.
        columns: Its columns. A column without any value may be of Arrow's type null, one of texts a dictionary.
        num_rows: Number of rows of each.

    Raises:
        ConfigError: A column is missing or cannot be compared in this way, or a sum exceeds 64 bits.
    """
    missing = sorted((where.names or frozenset()) - columns.keys())
    if missing:
        raise unknown_column(missing[0], columns)
    given = dict(columns)
    if where.names is not None:  # an all-null column's type is arbitrary: shards of one dataset may differ in it
        given = {name: pa.nulls(num_rows) if array.null_count == num_rows else array for name, array in given.items()}
    known = _Columns(given)
    # A row satisfies a chain if it satisfies each part, so parts are evaluated one by one.
    found = [_part(part, known, num_rows) for part in where.parts or (where,)]
    return reduce(np.bitwise_and, found)


class _Columns:
    """Columns in the forms that parts of a condition require, each made once."""

    def __init__(self, given: Mapping[str, pa.Array]) -> None:
        self.given = given
        self._plain: dict[str, pa.Array] = {}
        self._hashed: dict[str, pa.Array] = {}

    def plain(self, name: str) -> pa.Array:
        """Return a column without a dictionary."""
        if name not in self._plain:
            self._plain[name] = _plain(self.given[name])
        return self._plain[name]

    def hashed(self, name: str) -> pa.Array:
        """Return the hashes of a column."""
        if name not in self._hashed:
            self._hashed[name] = stable_hash(self.given[name])
        return self._hashed[name]

    def of(self, where: Where) -> dict[str, pa.Array]:
        """Return the columns that a condition's expression uses."""
        compared = self.given if where.compared is None else where.compared
        return {name: self.plain(name) for name in compared} | {
            hash_column(name): self.hashed(name) for name in where.hashed
        }


def _part(where: Where, known: _Columns, num_rows: int) -> Bits:
    """Return the rows that satisfy a condition. On one column with few distinct texts, evaluate each text once."""
    if where.names is not None and len(where.names) == 1:
        (name,) = where.names
        column = known.given[name]
        if pa.types.is_dictionary(column.type):
            values = pa.concat_arrays([column.dictionary, pa.nulls(1, column.dictionary.type)])
            taken = kept_rows(_mask(where, _Columns({name: values}).of(where), len(values)), len(values))
            codes = column.indices.fill_null(len(values) - 1).to_numpy(zero_copy_only=False)
            return np.packbits(taken[codes], bitorder="little")
    return _mask(where, known.of(where), num_rows)


def _mask(where: Where, columns: Mapping[str, pa.Array], num_rows: int) -> Bits:
    expression = where.expression({name: array.type for name, array in columns.items()})
    try:
        mask = _project(expression, columns, num_rows)
    except pa.ArrowException as error:
        raise _unfit(where, error) from error
    if not pa.types.is_boolean(mask.type):
        raise ConfigError(f"where: {where} is not a condition: its values are of type {mask.type}, not bool")
    return _bits(mask)


def _plain(column: pa.Array) -> pa.Array:
    return column.dictionary.take(column.indices) if pa.types.is_dictionary(column.type) else column


def _unfit(where: Where, error: pa.ArrowException) -> ConfigError:
    return ConfigError(f"where: {where}: {str(error).splitlines()[0]}")


def _project(expression: pc.Expression, columns: Mapping[str, pa.Array], num_rows: int) -> pa.Array:
    """Return the values of an expression by a plan of a single step, the only way to evaluate one in Arrow."""
    import pyarrow.acero as ac  # noqa: PLC0415  it imports pandas if that is installed

    table = pa.table({**columns, "": pa.nulls(num_rows)})
    source = ac.Declaration("table_source", ac.TableSourceNodeOptions(table))
    step = ac.Declaration("project", ac.ProjectNodeOptions([expression], [_VALUE]), [source])
    found = step.to_table(use_threads=False)[_VALUE]
    return found.chunk(0) if found.num_chunks == 1 else pa.concat_arrays(found.chunks or [pa.array([], found.type)])


def _bits(mask: pa.Array) -> Bits:
    """Return the bits of the rows for which a mask is true."""
    if mask.null_count:
        mask = pc.fill_null(mask, fill_value=False)
    values = np.frombuffer(mask.buffers()[1], np.uint8) if len(mask) else np.empty(0, np.uint8)
    low, whole = divmod(mask.offset, 8)
    if whole:
        flat = np.unpackbits(values, bitorder="little")[mask.offset : mask.offset + len(mask)]
        return np.packbits(flat, bitorder="little")
    found = values[low : low + -(-len(mask) // 8)].copy()
    if len(mask) % 8:
        found[-1] &= (1 << len(mask) % 8) - 1
    return found


def places_in(keys: Values, others: Values) -> Int64Array:
    """Return the place of each key in ``others``, or -1, int64 [n]. :func:`key_array` makes both."""
    if keys.type != others.type:
        keys, others = keys.cast(pa.binary()), others.cast(pa.binary())
    places: Int64Array = pc.index_in(keys, value_set=others).cast(pa.int64()).fill_null(-1).to_numpy()
    return places


def kept_rows(bits: Bits, num_rows: int) -> npt.NDArray[np.bool_]:
    """Return bits as a mask, bool ``[num_rows]``."""
    return np.unpackbits(bits, count=num_rows, bitorder="little").view(np.bool_)


# ------------------------------------------------------------------------------------------------------------ hash


def stable_hash(column: pa.Array) -> pa.Array:
    """Hash values to numbers from 0 to 2**63 - 1 that depend only on the values, in every release, on every machine.

    ``mix`` is the finalizer of splitmix64 after its increment: ``z = x + 0x9E3779B97F4A7C15``, then
    ``z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9``, ``z = (z ^ z >> 27) * 0x94D049BB133111EB``, ``z ^ z >> 31``,
    modulo 2**64.

    - Text: its UTF-8 bytes, padded with zeros to words of 8 bytes, little-endian. ``h = mix(number of bytes)``,
      then ``h = mix(h ^ word)`` for each word in order.
    - Integers and booleans: ``mix`` of their two's complement. Floats that are integers below 2**63 hash like
      those, others as their IEEE 754 bits (so a column may hold 1 in one shard and 1.0 in another).

    The result is ``h >> 1``; missing values stay missing.
    """
    if pa.types.is_dictionary(column.type):
        return stable_hash(column.dictionary).take(column.indices)
    kind = column.type
    if pa.types.is_null(kind):
        return column.cast(pa.int64())
    if not is_comparable(kind):
        raise ConfigError(f"where: hash() knows numbers, text and booleans, not {kind}")
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind):
        whole = column.cast(pa.int8()) if pa.types.is_boolean(kind) else column
        hashed = _mix(whole.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64).view(np.uint64))
    elif pa.types.is_floating(kind):
        hashed = _mix(_words_of_floats(column.cast(pa.float64()).fill_null(0.0).to_numpy(zero_copy_only=False)))
    elif len(column[:_LOOKED_AT].unique()) * 4 < min(len(column), _LOOKED_AT):  # few distinct values: hash each once
        encoded = column.dictionary_encode()
        return _hash_of_texts(encoded.dictionary).take(encoded.indices)
    else:
        return _hash_of_texts(column)
    mask = column.is_null().to_numpy(zero_copy_only=False) if column.null_count else None
    hashed >>= np.uint64(1)
    return pa.array(hashed.view(np.int64), pa.int64(), mask=mask)


def _hash_of_texts(texts: Values) -> Values:
    """Hash texts like :func:`stable_hash`, one by one."""
    mask = texts.is_null().to_numpy(zero_copy_only=False) if texts.null_count else None
    hashed = _hash_of_bytes(texts)
    hashed >>= np.uint64(1)
    return pa.array(hashed.view(np.int64), pa.int64(), mask=mask)


def _mix(values: _U64) -> _U64:
    """Compute ``mix`` of each value, in place, in pieces that fit in the CPU's caches."""
    spare = np.empty(min(len(values), _HASHED_AT_ONCE), np.uint64)
    for at in range(0, len(values), _HASHED_AT_ONCE):
        some = values[at : at + _HASHED_AT_ONCE]
        shifted = spare[: len(some)]
        some += np.uint64(0x9E3779B97F4A7C15)
        some ^= np.right_shift(some, np.uint64(30), out=shifted)
        some *= np.uint64(0xBF58476D1CE4E5B9)
        some ^= np.right_shift(some, np.uint64(27), out=shifted)
        some *= np.uint64(0x94D049BB133111EB)
        some ^= np.right_shift(some, np.uint64(31), out=shifted)
    return values


def _words_of_floats(values: npt.NDArray[np.float64]) -> _U64:
    whole = (np.trunc(values) == values) & (np.abs(values) < 2.0**63)
    as_integers = np.where(whole, values, 0.0).astype(np.int64)
    same_nan = np.where(np.isnan(values), np.nan, values)
    return np.where(whole, as_integers.view(np.uint64), same_nan.view(np.uint64))


def _hash_of_bytes(column: pa.Array) -> _U64:
    """Hash texts, except for the last shift, some thousands at a time: only the result is a large array."""
    large = pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type)
    _, offsets, data = column.buffers()
    borders = np.frombuffer(offsets, np.int64 if large else np.int32)[column.offset : column.offset + len(column) + 1]
    texts = np.frombuffer(b"" if data is None else data, np.uint8)
    hashed = np.empty(len(column), np.uint64)
    for at in range(0, len(column), _HASHED_AT_ONCE):
        some = borders[at : at + _HASHED_AT_ONCE + 1].astype(np.int64)
        sizes, first = np.diff(some), int(some[0])
        words = _words_at_each_byte(texts, first, int(some[-1]))
        found = hashed[at : at + len(sizes)]
        found[:] = sizes.view(np.uint64)
        _mix(found)
        if sizes.min() == sizes.max():
            _add_rows(found, words, int(sizes[0]))
        else:
            _add_texts(found, words, some[:-1] - first, sizes)
    return hashed


def _words_at_each_byte(texts: npt.NDArray[np.uint8], start: int, stop: int) -> _U64:
    """Return, as numbers, the 8 bytes that begin at each of bytes ``[start, stop]``.

    Bytes beyond ``stop`` are arbitrary.
    """
    if stop + 8 > len(texts):
        texts, start, stop = np.concatenate([texts[start:stop], np.zeros(8, np.uint8)]), 0, stop - start
    return np.ndarray(stop - start + 1, "<u8", texts, start, (1,))


def _add_rows(hashed: _U64, words: _U64, length: int) -> None:
    """Mix texts of equal length, which lie end to end, into the hashes."""
    here = np.empty(len(hashed), np.uint64)
    for done in range(0, length, 8):
        here[:] = words[done::length][: len(hashed)]
        if done + 8 > length:
            here &= np.uint64(2**64 - 1) >> np.uint64(8 * (done + 8 - length))
        hashed ^= here
        _mix(hashed)


def _add_texts(hashed: _U64, words: _U64, starts: Int64Array, sizes: Int64Array) -> None:
    """Mix texts of any length into the hashes."""
    # Word by word: ``rows`` are the texts that are longer than the ``done`` bytes mixed so far.
    rows, done = np.flatnonzero(sizes), 0
    while rows.size:
        left = np.minimum(sizes[rows] - done, 8).astype(np.uint64)
        here = words[starts[rows] + done] & (np.uint64(2**64 - 1) >> (np.uint64(64) - np.uint64(8) * left))
        hashed[rows] = _mix(hashed[rows] ^ here)
        done += 8
        rows = rows[sizes[rows] > done]


# -------------------------------------------------------------------------------------------------- values, counted


def plain_values(values: pa.Array) -> pa.Array:
    """Return values as int64, uint64, float64, text or booleans. NaN becomes a missing value, and -0.0 becomes 0.0."""
    kind = values.type
    if pa.types.is_floating(kind):
        doubles = pc.add(values.cast(pa.float64()), 0.0)
        return pc.if_else(pc.is_nan(doubles), pa.scalar(None, pa.float64()), doubles)
    if pa.types.is_integer(kind):
        return values if kind == pa.uint64() else values.cast(pa.int64())
    return values.cast(pa.string()) if pa.types.is_large_string(kind) else values


def joined_type(types: Iterable[pa.DataType]) -> pa.DataType | None:
    """Return the type of a column whose parts have some types; None: the parts cannot be compared.

    Parts without any value, of type null, agree with all others. Numbers agree with numbers: float64 if a part holds
    floats, else uint64 if one needs it. (Shards keep their own types; see :func:`recast` for values that get the joined
    type.)
    """
    found = {pa.string() if is_string(kind) else kind for kind in types if not pa.types.is_null(kind)}
    if len(found) < 2:
        return next(iter(found), pa.null())
    if not all(pa.types.is_integer(kind) or pa.types.is_floating(kind) for kind in found):
        return None
    if any(map(pa.types.is_floating, found)):
        return pa.float64()
    return pa.uint64() if pa.uint64() in found else pa.int64()


def joined_type_name(one: str, other: str) -> str | None:
    """Return Arrow's name of the type that joins two others, given by name; None: they cannot be compared."""
    try:
        kind = joined_type([pa.type_for_alias(one), pa.type_for_alias(other)])
    except ValueError:  # a type without a short name, which joins no other
        return None
    return None if kind is None else str(kind)


def recast(values: pa.Array, kind: pa.DataType) -> pa.Array | None:
    """Return values of a column as ``kind``, a type of columns; None if a value would change."""
    try:
        if not (pa.types.is_integer(values.type) and pa.types.is_floating(kind)):
            return values.cast(kind)
    except pa.ArrowInvalid:  # below 0, too large, or not whole
        return None
    whole = values if values.type == pa.uint64() else values.cast(pa.int64())
    rounded = whole.cast(kind, safe=False)
    return rounded if pc.all(compared_exactly("=", whole, rounded, whole.type)).as_py() in {True, None} else None


def type_of_all(parts: Sequence[pa.Array], name: str) -> pa.DataType:
    """Return the type in which no value of the column ``name``, given in parts, changes.

    Raises:
        ConfigError: There is no such type.
    """
    kinds = sorted({values.type for values in parts}, key=str)
    joined = joined_type(kinds)
    for kind in () if joined is None else (joined, pa.int64()):
        if all(recast(values, kind) is not None for values in parts):
            return kind
    what = "its values are of different kinds" if joined is None else "no type holds all of its numbers as they are"
    raise ConfigError(
        f"column {name!r}: {what} in different shards: {', '.join(map(str, kinds))}. Add a late column of one kind "
        "with `shard_tools column add`"
    )


def there_of(values: pa.Array, mask: npt.NDArray[np.bool_]) -> pa.Array:
    """Return the values in the rows of a mask, without missing ones."""
    bits = pa.py_buffer(np.packbits(mask, bitorder="little"))  # pa.array would import pandas if it is installed
    return values.filter(pa.Array.from_buffers(pa.bool_(), len(mask), [None, bits])).drop_null()


def count_values(
    parts: Iterable[tuple[pa.Array, npt.NDArray[np.int64] | None]], name: str
) -> tuple[pa.Array, npt.NDArray[np.int64]]:
    """Count the distinct values of some arrays of the column ``name``. Return sorted values and int64 [n] counts.

    Args:
        parts: Plain values, none missing, and the number of times that each counts; None: once.
        name: Name of the column.

    Raises:
        ConfigError: The values are of different kinds.
    """
    filled = [(values, counts) for values, counts in parts if len(values)]
    kind = type_of_all([values for values, _ in filled], name)
    if not filled:
        return pa.nulls(0), np.empty(0, np.int64)
    encoded = pa.concat_arrays([recast(values, kind) for values, _ in filled]).dictionary_encode()
    times = [np.ones(len(values), np.int64) if counts is None else counts for values, counts in filled]
    total = np.bincount(encoded.indices.to_numpy(), np.concatenate(times), len(encoded.dictionary)).astype(np.int64)
    order = pc.sort_indices(encoded.dictionary)
    return encoded.dictionary.take(order), total[order.to_numpy()]


def pack_counts(values: pa.Array, counts: npt.NDArray[np.int64]) -> bytes:
    """Serialize values and their counts, for other ranks."""
    batch = pa.record_batch({_VALUE: values, "count": pa.array(counts)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def unpack_counts(data: bytes) -> tuple[pa.Array, npt.NDArray[np.int64]]:
    """Return the inverse of :func:`pack_counts`."""
    table = pa.ipc.open_stream(data).read_all()
    return table[_VALUE].combine_chunks(), table["count"].to_numpy()


def numbers_of(values: pa.Array) -> npt.NDArray[np.float64] | None:
    """Return values as float64, missing ones as NaN; None if they are not numbers."""
    kind = values.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind)):
        return None
    found: npt.NDArray[np.float64] = values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return found.astype(np.float64)


def labels_of(values: pa.Array, labels: pa.Array) -> npt.NDArray[np.int64]:
    """Return the index of each value in ``labels``, which are distinct values of its kind; -1 if it is absent."""
    if pa.types.is_null(values.type) or not len(labels):
        return np.full(len(values), -1, np.int64)
    places = pc.index_in(values.cast(labels.type, safe=False), value_set=labels)
    found: npt.NDArray[np.int64] = pc.fill_null(places, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    return found


# ----------------------------------------------------------------------------------------------------------- files


def read_sample_columns(
    buffer: Any, names: Collection[str], source: str, *, coded: bool = False, only: tuple[int, int] | None = None
) -> tuple[dict[str, pa.Array], Mapping[str, Any]]:
    """Return those of the columns ``names`` that a sample file has, and the file's facts.

    Nothing else in the file is unpacked.

    With ``coded``, texts stored with a dictionary are returned as dictionaries, as :func:`fitting` takes them. With
    ``only``, return the samples from one number to before another; for keys alone.

    Raises:
        IndexFormatError: The bytes are damaged, or not a sample file.
    """

    def wanted(facts: Mapping[str, Any]) -> list[str]:
        lifted = set(facts.get("columns", ()))
        return [*sorted(lifted & set(names)), *(["key"] if KEY in names else [])]

    rows, facts = read_table(buffer, SAMPLES, source, columns=wanted, coded=coded, only=only)
    lifted = set(facts.get("columns", ()))
    found = {name: _whole(rows.column(name)) for name in rows.column_names if name in lifted}
    if KEY in names:
        found[KEY] = _plain(_whole(rows.column("key")))
    return found, facts


def _whole(column: pa.ChunkedArray) -> pa.Array:
    """Return all values of a column. A single chunk, the usual case, is not copied."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def write_column(values: pa.Array, *, name: str, shard: ShardInfo, fingerprint: str, version: str) -> bytes:
    """Return the bytes of ``columns/<name>/<shard>.parquet``. The same values give the same bytes.

    Args:
        values: One for each sample of the shard, in order.
        name: Name of the column.
        shard: The shard.
        fingerprint: Fingerprint of the shard's own chunk table.
        version: Version of the column, the same for all shards.
    """
    facts = {
        "kind": COLUMN_KIND, "column": name, "column_version": version, "shard": shard_rows([shard])[0],
        "fingerprint": fingerprint,
    }  # fmt: skip
    plain = [] if pa.types.is_boolean(values.type) or is_string(values.type) else [_VALUE]
    return write_table(pa.table({_VALUE: values}), facts, plain=plain)


def read_column(buffer: Any, source: str) -> tuple[pa.Array, Mapping[str, Any]]:
    """Return the values in the bytes of a column file, and its facts (see :func:`write_column`).

    Raises:
        IndexFormatError: The bytes are damaged, or not a column file.
    """
    rows, facts = read_table(buffer, COLUMN_KIND, source)
    problem = ""
    try:
        (shard,) = shards_of_rows([facts["shard"]])
        values = rows.column(_VALUE).combine_chunks()
        if len(values) != shard.num_samples or not is_comparable(values.type):
            problem = f"{len(values)} values of type {values.type} for {shard.num_samples} samples"
        if not all(isinstance(facts[name], str) for name in ("column", "column_version", "fingerprint")):
            problem = "its footer does not say which column and shard it belongs to"
    except (KeyError, TypeError, ValueError, pa.ArrowException) as error:
        problem = str(error)
    if problem:
        raise IndexFormatError(f"{source}: damaged column file ({problem}); {ADD_AGAIN}")
    return values, facts


def write_numbers(columns: Mapping[str, npt.NDArray[Any]], facts: Mapping[str, Any], *, repeating: list[str]) -> bytes:
    """Return columns of numbers of equal length as an index file. The same input gives the same bytes.

    Args:
        columns: The columns.
        facts: The file's facts, with its ``kind``.
        repeating: Columns of few distinct numbers.
    """
    table = pa.table({name: pa.array(values) for name, values in columns.items()})
    return write_table(table, facts, plain=[name for name in columns if name not in repeating])


def read_numbers(
    buffer: Any, kind: str, source: str, dtypes: Mapping[str, Any], cure: str
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """Return the columns of an index file (:func:`write_numbers`), read-only, and its facts.

    Raises:
        IndexFormatError: The bytes are damaged, or not such a file.
    """
    rows, facts = read_table(buffer, kind, source)
    with content_errors(source, "columns of another kind", cure):
        return {name: numbers(rows.column(name), dtype) for name, dtype in dtypes.items()}, facts


def type_named(name: str) -> pa.DataType:
    """Return the type with the name in a column's document, such as ``double``.

    Raises:
        ValueError: Conditions do not support such a type.
    """
    kind = pa.type_for_alias(name)
    if not is_comparable(kind):
        raise ValueError(f"a column of type {name}")
    return kind


def no_values(num_rows: int) -> pa.Array:
    """Return a column without any value, which replaces one that only other shards have."""
    return pa.nulls(num_rows)


def number_column(data: bytes, name: str) -> np.ndarray[Any, Any]:
    """Return a column of a Parquet file of other people: numbers, or lists of numbers of one length; [rows, …].

    Raises:
        ValueError: The file lacks the column, or it holds something else.
        pyarrow.ArrowException: It is no Parquet file, or damaged.
    """
    file = pq.ParquetFile(pa.BufferReader(data))
    if name not in file.schema_arrow.names:
        raise ValueError(f"it has no column {name!r}, only {', '.join(map(repr, file.schema_arrow.names))}")
    found = file.read(columns=[name]).column(0).combine_chunks()
    shape = [len(found)]
    while pa.types.is_list(found.type) or pa.types.is_large_list(found.type) or pa.types.is_fixed_size_list(found.type):
        count = len(found)
        lengths = pc.unique(pc.list_value_length(found)).to_pylist()
        if found.null_count or len(lengths) > 1:
            raise ValueError(f"column {name!r}: its lists differ in length, or some are missing")
        found = found.flatten()
        shape.append(len(found) // max(count, 1))
    kind = found.type
    if found.null_count or not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise ValueError(f"column {name!r}: expected numbers without gaps, or lists of them, got {kind}")
    return np.asarray(found.to_numpy(zero_copy_only=False)).reshape(shape)
