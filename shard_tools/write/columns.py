"""Extract columns of the sample table from samples while they are written."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from streaming.errors import ConfigError

ColumnSource = str | Callable[[Mapping[str, object]], object]
ColumnSpec = Mapping[str, ColumnSource] | Sequence[str] | None
ColumnValue = bool | int | float | str | None


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
        ConfigError: The value is not a number, str, bool or None. An exception of a user's callable passes through,
            with a note that names the sample and the column.
    """
    try:
        value = follow(sample, source) if isinstance(source, str) else source(sample)
    except Exception as error:
        error.add_note(f"while computing column {name!r} of sample {key!r}")
        raise
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ConfigError(
        f"sample {key!r}, column {name!r}: expected a number, str, bool or None, "
        f"got {type(value).__name__}; return one of these"
    )


def follow(sample: Mapping[str, object], path: str) -> object:
    """Return entry ``w`` of field ``json`` for the path ``"json.w"``.

    The longest field name that starts the path wins.
    """
    parts = path.split(".")
    for num_parts in range(len(parts), 0, -1):
        field = ".".join(parts[:num_parts])
        if field in sample:
            return _descend(sample[field], parts[num_parts:])
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
