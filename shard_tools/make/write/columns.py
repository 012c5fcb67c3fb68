"""Make columns: a value per sample, an array per shard, by one rule wherever columns are made.

A column of a shard holds one kind of values, or none, and each value equals the given one exactly:

| given | stored |
|---|---|
| None; NaT | missing |
| bool | bool |
| whole numbers from -2^63 to 2^63 - 1 | int64 |
| whole numbers from 0 to 2^64 - 1, one of them 2^63 or more | uint64 |
| floats, also NaN, -0.0 and infinities | float64 |
| floats and whole numbers with an equal float64 | float64 |
| text; dates and times as ISO 8601; decimals as their digits | text |
| durations | float64, in seconds |

Everything else is refused: floats beside a whole number without an equal float64, whole numbers below 0 beside others
of 2^63 and more, text that UTF-8 cannot hold, booleans, text and numbers side by side, lists, objects, bytes.
"""

from __future__ import annotations

import datetime as dt
import decimal
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa

from streaming.build.decode.values import unpacked
from streaming.common.arguments import unpacked_name
from streaming.errors import ConfigError
from streaming.shards.index.columns import recast
from streaming.shards.index.where import is_string

ColumnSource = str | Callable[[Mapping[str, object]], object]
ColumnSpec = Mapping[str, ColumnSource] | Sequence[str] | None
ColumnValue = bool | int | float | str | None

_PLAIN = frozenset({bool, int, float, str, type(None)})
_WORDS = {bool: "booleans", int: "whole numbers", float: "floats", str: "text"}
_TYPES = {bool: (pa.bool_(),), int: (pa.int64(), pa.uint64()), float: (pa.float64(),), str: (pa.string(),)}
_LEAST, _MOST = -(2**63), 2**64 - 1


def parse_columns(columns: ColumnSpec) -> dict[str, ColumnSource]:
    """Map each column's name to its source; a list of paths names each column by its path.

    Raises:
        ConfigError: ``columns`` is neither a mapping of names to callables or paths nor a list of paths.
    """
    if columns is None:
        return {}
    if isinstance(columns, str):
        raise ConfigError(
            f"columns: expected a list of paths or a mapping, got the str {columns!r}; write [{columns!r}]"
        )
    pairs = columns.items() if isinstance(columns, Mapping) else [(path, path) for path in columns]
    sources = dict(pairs)
    for name, source in sources.items():
        if not isinstance(name, str) or not name or name.startswith("__"):
            raise ConfigError(f"columns: {name!r} cannot name a column; use a str that does not start with '__'")
        if not (callable(source) or (isinstance(source, str) and source)):
            raise ConfigError(f"columns[{name!r}]: expected a callable or a path such as 'json.w', got {source!r}")
    return sources


def column_value(sample: Mapping[str, object], name: str, source: ColumnSource, key: str) -> ColumnValue:
    """Return the value of one column for one sample, or None if the sample has no such entry.

    Raises:
        ConfigError: No column can hold such a value. An exception of a user's callable passes through, with a note that
            names the sample and the column.
    """
    try:
        value = follow(sample, source) if isinstance(source, str) else source(sample)
    except Exception as error:
        error.add_note(f"while computing column {name!r} of sample {key!r}")
        raise
    try:
        return stored_value(value)
    except ValueError as error:
        raise ConfigError(f"sample {key!r}, column {name!r}: {error}. {_cure(name)}") from error


def stored_value(value: object) -> ColumnValue:
    """Return a value in the form in which a column holds it.

    Raises:
        ValueError: No column can hold it.
    """
    if type(value) not in _PLAIN:
        value = _as_plain(value)
    if type(value) is int and not _LEAST <= value <= _MOST:
        raise ValueError(f"{_shown(value)} is beyond the whole numbers that a column holds, -2^63 to 2^64 - 1")
    if type(value) is str and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            lone = ord(value[error.start])
            raise ValueError(f"{_shown(value)}: U+{lone:04X} is half a character, which UTF-8 cannot hold") from error
    return value  # type: ignore[return-value]  # now one of the plain types


def plain_value(value: object) -> object:
    """Return dates and times as ISO text, durations as seconds, decimals as text, and other values unchanged."""
    if isinstance(value, (dt.date, dt.time)):
        return value.isoformat()
    if isinstance(value, dt.timedelta):
        return value.total_seconds()
    return str(value) if isinstance(value, decimal.Decimal) else value


def _as_plain(value: object) -> ColumnValue:
    """Return an equal value of one of Python's own types.

    Raises:
        ValueError: There is none.
    """
    if isinstance(value, (np.datetime64, np.timedelta64, dt.date, dt.timedelta)) and str(value) == "NaT":
        return None
    if isinstance(value, np.longdouble) and float(value) != value and not np.isnan(value):
        raise ValueError(f"{value!r} has more digits than a float64")
    if isinstance(value, np.datetime64):
        plain: object = str(value)
    elif isinstance(value, np.timedelta64):
        plain = float(value / np.timedelta64(1, "s"))
    else:
        plain = plain_value(value.item() if isinstance(value, np.generic) else value)
    if plain is None or isinstance(plain, bool):
        return plain
    if isinstance(plain, str):
        return str.__str__(plain)  # for a member of an enum its value, not its name
    if isinstance(plain, int):
        return int(plain)
    if isinstance(plain, (float, np.longdouble)):
        return float(plain)
    raise ValueError(f"expected a number, text, a bool, a date, a time or None, got {type(value).__name__}")


def column_array(
    values: Sequence[ColumnValue], name: str, shard: str, keys: Callable[[], Sequence[str]], *, cure: str = ""
) -> pa.Array:  # fmt: skip
    """Return the column ``name`` of a shard as an array, by the rule of this module.

    Args:
        values: One per sample, as returned by :func:`column_value`.
        name: The column.
        shard: The shard, for messages.
        keys: Returns the samples' keys, for messages.
        cure: What to do about values that do not fit; default: advice for a function that makes the values.

    Raises:
        ConfigError: No column can hold these values together, or one of them.
    """
    kinds = {*map(type, values)} - {type(None)}
    if not kinds:
        return pa.nulls(len(values))
    given = values
    if kinds == {int, float}:
        given = [float(value) if type(value) is int and _is_float(value) else value for value in values]
        kinds = {*map(type, given)} - {type(None)}
    for kind in _TYPES.get(kinds.pop(), ()) if len(kinds) == 1 else ():
        with suppress(pa.ArrowException, OverflowError, UnicodeEncodeError):
            found = pa.array(given, kind)
            if isinstance(found, pa.Array):  # otherwise it has several parts: more than 2 GiB of text
                return found
    raise ConfigError(f"{shard}: column {name!r}: {_mismatch(values, keys())}. {cure or _cure(name)}")


def stored_array(values: pa.Array) -> pa.Array:
    """Return an array of numbers, text or booleans in the stored type: uint64 only if a value needs it."""
    narrow = recast(values, pa.int64()) if values.type == pa.uint64() else None
    return values if narrow is None else narrow


def stored_type(kind: pa.DataType) -> pa.DataType | None:
    """Return the stored type for an Arrow type; None if columns cannot hold it."""
    while pa.types.is_dictionary(kind) or isinstance(kind, pa.BaseExtensionType):
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind.storage_type
    if pa.types.is_null(kind) or pa.types.is_boolean(kind) or kind == pa.uint64():
        return kind
    if pa.types.is_integer(kind):
        return pa.int64()
    if pa.types.is_floating(kind) or pa.types.is_duration(kind):
        return pa.float64()
    texts = (is_string, pa.types.is_decimal, pa.types.is_date, pa.types.is_time, pa.types.is_timestamp)
    return pa.string() if any(is_one(kind) for is_one in texts) else None


def _is_float(number: int) -> bool:
    """Return whether a float64 equals a whole number."""
    try:
        return float(number) == number
    except OverflowError:
        return False


def _mismatch(values: Sequence[ColumnValue], keys: Sequence[str]) -> str:
    """Describe which values do not form a column, and why."""
    for value, key in zip(values, keys, strict=True):
        try:
            stored_value(value)
        except ValueError as error:
            return f"sample {key!r}: {error}"
    first: dict[type, int] = {}
    for number, value in enumerate(values):
        if value is not None:
            first.setdefault(type(value), number)

    def named(*numbers: int) -> str:
        return " beside ".join(f"{_shown(values[at])} (sample {keys[at]!r})" for at in numbers)

    if first.keys() == {int, float}:
        odd = next(at for at, value in enumerate(values) if type(value) is int and not _is_float(value))
        return f"{named(odd, first[float])}: floats stand beside whole numbers, and no float64 is equal to the first"
    if len(first) > 1:
        what = " and ".join(_WORDS[kind] for kind in first)
        return f"{named(*first.values())}: {what}, but a column holds one kind"
    if first.keys() == {int}:
        at_of = {value: at for at, value in enumerate(values) if isinstance(value, int)}
        ends = named(at_of[min(at_of)], at_of[max(at_of)])
        return f"{ends}: whole numbers are from -2^63 to 2^63 - 1, or from 0 to 2^64 - 1"
    return "more than 2 GiB of text in one shard"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _cure(name: str) -> str:
    """Explain how to get a column from such values."""
    return (
        f"Name another value, or have a function give text, or numbers of one kind: columns={{{json.dumps(name)}: …}} "
        "in Python, or, once the shards are there, `shard_tools column add URL NAME --compute MODULE:FUNCTION`"
    )


def follow(sample: Mapping[str, object], path: str) -> object:
    """Return entry ``w`` of field ``json`` for the path ``"json.w"``.

    The longest field name that is a prefix of the path wins. Gzip fields, such as ``json.gz``, are unpacked.
    """
    parts = path.split(".")
    for num_parts in range(len(parts), 0, -1):
        field = ".".join(parts[:num_parts])
        if field in sample:
            value = sample[field]
            if isinstance(value, (bytes, bytearray, memoryview)) and unpacked_name(field) is not None:
                value = unpacked(value)
            return _descend(value, parts[num_parts:])
    return None


def _descend(value: Any, parts: list[str]) -> object:
    if isinstance(value, (bytes, bytearray, memoryview)) or (parts and isinstance(value, str)):
        text = value if isinstance(value, str) else bytes(value).decode("utf-8")
        value = json.loads(text) if parts else text
    for part in parts:
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value
