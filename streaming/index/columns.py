"""Columns of a sample table as conditions take them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import pyarrow as pa

from streaming.errors import ConfigError
from streaming.index.sample_table import SampleTable
from streaming.index.where import Column

KEY = "__key__"
"""The name under which a condition asks for the samples' keys."""


def where_columns(table: SampleTable, names: Collection[str]) -> Mapping[str, Column]:
    """Those of the columns ``names`` that the table has; ``__key__`` is one.

    Raises:
        ConfigError: A column holds neither numbers, text nor booleans.
    """
    found = {name: _column(name, table.columns[name]) for name in names if name in table.columns}
    if KEY in names:
        keys = np.array([*table.keys, None], object)[:-1]
        found[KEY] = Column(kind="text", values=keys, valid=np.ones(len(keys), np.bool_))
    return found


def missing_column(num_rows: int) -> Column:
    """A column without any value: what a shard has in the place of a column of other shards."""
    return Column(kind="nothing", values=np.zeros(num_rows, np.bool_), valid=np.zeros(num_rows, np.bool_))


def _column(name: str, array: pa.Array) -> Column:
    kind, valid = array.type, array.is_valid().to_numpy(zero_copy_only=False)
    if not valid.any():
        return missing_column(len(array))
    if pa.types.is_boolean(kind):
        return Column(kind="bool", values=array.cast(pa.int8()).fill_null(0).to_numpy().astype(np.bool_), valid=valid)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return Column(kind="number", values=array.fill_null(0).to_numpy(zero_copy_only=False), valid=valid)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return Column(kind="text", values=array.fill_null("").to_numpy(zero_copy_only=False), valid=valid)
    raise ConfigError(f"column {name!r} holds {kind}; conditions know numbers, text and booleans")
