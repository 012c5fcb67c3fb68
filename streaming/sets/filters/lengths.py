"""Read the number of tokens and other budgeted sizes of every sample, shard by shard; recent shards are cached."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from streaming.common.lru_cache import LruCache
from streaming.errors import ConfigError, IndexMissingError, shell_word
from streaming.sets.filters.late_columns import LateColumn
from streaming.sets.filters.select import column_reader, late_names
from streaming.shards.catalog.open import OpenShards
from streaming.shards.index.chunk_table import is_missing, numbers
from streaming.shards.index.columns import Values, amounts_of, numbers_of, plain_values
from streaming.shards.index.where import Quantity, unknown_column, written
from streaming.storage import Storage, redact
from streaming.types import Int64Array

UNKNOWN = -1
"""Number of tokens of a sample without a value in the column."""
UNDEFINED = -(2**63)
"""Derived size of a sample whose columns have values for which the arithmetic divides by 0."""
_KEPT_BYTES = 256 << 20
"""Memory for the columns of recently used shards: 32 million samples. The columns of other shards are read again."""
_MOST = 2.0**62
"""Largest derived size: larger ones count as this, which no budget holds."""
_TYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


class Lengths:
    """Read the size of each sample of a shard. Thread-safe; a copy in another process reads for itself.

    Args:
        storage: Store of the index.
        shards: The shards.
        columns: Names of the columns, or arithmetic over them: the tokens, and other sizes with a budget.
        late: The late columns among them.
    """

    def __init__(
        self, storage: Storage, shards: OpenShards, columns: Sequence[str | Quantity], late: Mapping[str, LateColumn]
    ) -> None:
        self._storage, self._shards, self._columns, self._late = storage, shards, tuple(columns), late
        self._begin()

    def _begin(self) -> None:
        if self._shards.table is None:
            raise IndexMissingError(f"Packed needs an index; {self._shards.missing_index}")
        self._read: Callable[[int], tuple[dict[str, Values], list[str]]] = column_reader(
            self._storage, self._shards, self._shards.table, names_in(self._columns), self._late
        )
        self._recent = LruCache[int, Int64Array](_KEPT_BYTES, attrgetter("nbytes"))

    def __getstate__(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in ("_storage", "_shards", "_columns", "_late")}

    def __setstate__(self, state: Mapping[str, object]) -> None:
        self.__dict__.update(state)
        self._begin()

    def __call__(self, shard: int) -> Int64Array:
        """Return the sizes of a shard's samples, int64 [n] or int64 [n, columns].

        A size below 0 is none: ``UNKNOWN`` where a value is missing, ``UNDEFINED``, or what :func:`value_below_0`
        gives.

        Raises:
            ConfigError: A column does not exist, or holds something other than integers.
            IndexMissingError: The shard has no sample table.
        """
        return self._recent.of(shard, lambda: self._values(shard))

    def keep_at_most(self, num_bytes: int) -> None:
        """Limit the columns kept in memory to ``num_bytes``; the latest one is kept whatever its size."""
        self._recent.keep_at_most(num_bytes)

    def _values(self, shard: int) -> Int64Array:
        columns, there = self._read(shard)
        found = [
            self._derived(shard, one, columns, there) if isinstance(one, Quantity) else
            self._column(shard, one, columns, there) for one in self._columns
        ]  # fmt: skip
        return found[0] if len(found) == 1 else np.column_stack(found)

    def _column(self, shard: int, column: str, columns: Mapping[str, Values], there: list[str]) -> Int64Array:
        shown = redact(self._shards.urls[shard])
        is_tokens = column == self._columns[0]
        if column not in columns:
            known = sorted({*there, *late_names(self._storage, self._shards)})
            if not is_tokens:
                raise unknown_column(column, known, "Packed: budgets= or alike=", shown)
            raise ConfigError(
                f"Packed: no column {column!r} in the sample table of {shown} to say how many tokens each sample "
                f"has; there are: {', '.join(known) or 'none'}. Name the column with column=…, or make it: "
                "`shard_tools convert --tokenizer` turns text into tokens and writes the column, "
                f"`shard_tools column add URL {shell_word(column)} --compute tokens` counts existing tokens by the "
                f'size of their field, and a writer of your own takes ShardWriter(columns={{"{column}": …}})'
            )
        values = columns[column]
        if str(values.type) not in _TYPES and len(values) != values.null_count:
            raise ConfigError(
                f"Packed: column {column!r} of {shown} holds {values.type}, expected whole numbers"
                + (": the number of tokens of each sample" if is_tokens else ". A budget of fractions is arithmetic: "
                   f"budgets={{{column!r}: ('{written(column)} * 1000', 600_000)}}")
            )  # fmt: skip
        found = numbers(values.cast("int64"), np.int64, missing=0)
        return _marked(found, is_missing(values), UNKNOWN)

    def _derived(
        self, shard: int, quantity: Quantity, columns: Mapping[str, Values], there: list[str]
    ) -> Int64Array:  # fmt: skip
        """Return a derived size of each sample, rounded up to a whole number."""
        missing = sorted(quantity.names - columns.keys())
        if missing:
            known = {*there, *late_names(self._storage, self._shards)}
            shown = redact(self._shards.urls[shard])
            raise unknown_column(missing[0], known, f"Packed: budgets: {str(quantity)!r}", shown)
        rows = len(columns[min(quantity.names)])
        found = numbers_of(plain_values(amounts_of(quantity, columns, rows)))
        if found is None:
            raise AssertionError("arithmetic gives numbers")
        lacks = np.any([is_missing(columns[name]) for name in quantity.names], axis=0)
        whole = np.ceil(np.clip(np.nan_to_num(found), -_MOST, _MOST)).astype(np.int64)
        return _marked(whole, np.isnan(found), np.where(lacks, UNKNOWN, UNDEFINED))


def _marked(sizes: Int64Array, is_missing: npt.NDArray[np.bool_], mark: int | Int64Array) -> Int64Array:
    """Return sizes with a mark where they are missing; those below 0 become distinct from ``UNKNOWN``."""
    return np.where(is_missing, mark, np.where(sizes < 0, sizes - 1, sizes))


def value_below_0(size: int) -> int:
    """Return the value in a column, or of arithmetic, that a size below ``UNKNOWN`` stands for."""
    return size + 1


def names_in(columns: Sequence[str | Quantity]) -> list[str]:
    """Return the names of the columns that some sizes are read from or derived from, each once."""
    found = [sorted(one.names) if isinstance(one, Quantity) else [one] for one in columns]
    return list(dict.fromkeys(name for names in found for name in names))
