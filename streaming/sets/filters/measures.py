"""Measure the pieces of packs by columns of their documents, or by arithmetic over them: ``Measures``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Self, TypeAlias

import numpy as np
import numpy.typing as npt

from streaming.common.lru_cache import LruCache
from streaming.errors import ConfigError, IndexMissingError
from streaming.sets.filters.select import column_reader, late_columns_of, late_names
from streaming.shards.catalog.open import OpenShards
from streaming.shards.index.columns import Values, amounts_of, column_of, numbers_of, plain_values
from streaming.shards.index.where import Quantity, parse_quantity, unknown_column
from streaming.shards.schema.value import SUPERVISED
from streaming.storage import Storage, redact
from streaming.types import Int64Array

Numbers: TypeAlias = "npt.NDArray[np.int64] | npt.NDArray[np.float64]"
_KEPT_BYTES = 64 << 20
"""Memory for the columns of recently used shards: 8 million samples with a column each."""


class Measures:
    """Evaluate quantities for pieces of documents. Thread-safe; a copy in another process reads for itself.

    Args:
        storage: Store of the index.
        shards: The shards.
        quantities: Arithmetic over columns, in the order of the results.

    Raises:
        ConfigError: The first shard lacks a column, or a column holds no numbers.
        IndexMissingError: There is no index, or no sample table.
    """

    def __init__(self, storage: Storage, shards: OpenShards, quantities: Sequence[Quantity]) -> None:
        self._storage, self._shards, self._quantities = storage, shards, tuple(quantities)
        self._names = sorted({name for one in quantities for name in one.names})
        self._late = late_columns_of(storage, shards, self._names, None)
        self._begin()
        self._of_shard(0)

    @classmethod
    def of(cls, storage: Storage, shards: OpenShards, texts: Sequence[str], known: Mapping[str, Quantity]) -> Self:
        """Return the measures by some texts: names of ``known`` quantities, or arithmetic over columns."""
        return cls(storage, shards, [known.get(text) or parse_quantity(text, "cost") for text in texts])

    def _begin(self) -> None:
        if self._shards.table is None:
            raise IndexMissingError(f"cost needs an index; {self._shards.missing_index}")
        self._read: Callable[[int], tuple[dict[str, Values], list[str]]] = column_reader(
            self._storage, self._shards, self._shards.table, self._names, self._late
        )
        self._recent = LruCache[int, dict[str, Numbers]](_KEPT_BYTES, _size_of)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_read", "_recent")}

    def __setstate__(self, state: Mapping[str, object]) -> None:
        self.__dict__.update(state)
        self._begin()

    def of_pieces(
        self, pieces: Sequence[tuple[int, Int64Array]], tokens: Int64Array, of: Int64Array
    ) -> npt.NDArray[np.float64]:
        """Return the quantities of n pieces, float64 [n, quantities].

        A piece of a document that was cut counts its share, by tokens, of every column.

        Args:
            pieces: Shards, and the numbers of samples in each: together those of the n pieces, in order.
            tokens: int64 [n], tokens of each piece.
            of: int64 [n], tokens of its whole document.

        Raises:
            ConfigError: A sample has no value in a column, or arithmetic exceeds 64 bits.
        """
        columns = {name: np.concatenate(found) for name, found in self._gathered(pieces)}
        if (cut := tokens != of).any():
            for column in columns.values():
                divide = np.floor_divide if column.dtype == np.int64 else np.divide
                column[cut] = divide(column[cut] * tokens[cut], np.maximum(of[cut], 1))
        given = {name: column_of(column) for name, column in columns.items()}
        found = [numbers_of(plain_values(amounts_of(one, given, len(tokens)))) for one in self._quantities]
        return np.column_stack([np.empty(len(tokens)) if one is None else one for one in found])

    def _gathered(self, pieces: Sequence[tuple[int, Int64Array]]) -> Iterator[tuple[str, list[Numbers]]]:
        for name in self._names:
            parts: list[Numbers] = [np.empty(0, np.int64)]
            for shard, samples in pieces:
                some = self._of_shard(shard)[name][samples]
                if some.dtype == np.float64 and np.isnan(some).any():
                    number = int(samples[np.isnan(some).argmax()])
                    raise ConfigError(
                        f"cost: column {name!r} has no value for sample {number} of {self._url(shard)}; leave such "
                        f'samples out, StreamingDataset(…, where="{name} IS NOT NULL"), or rebuild the column '
                        "(`shard_tools column add`)"
                    )
                parts.append(some)
            yield name, parts

    def _of_shard(self, shard: int) -> dict[str, Numbers]:
        return self._recent.of(shard, lambda: self._values(shard))

    def _values(self, shard: int) -> dict[str, Numbers]:
        columns, there = self._read(shard)
        found = {}
        for name in self._names:
            if name not in columns:
                raise self._unknown(name, shard, there)
            numbers = numbers_of(plain_values(columns[name]))
            if numbers is None:
                raise ConfigError(
                    f"cost: column {name!r} of {self._url(shard)} holds {columns[name].type}, expected numbers"
                )
            is_whole = columns[name].null_count == 0 and "int" in str(columns[name].type)
            found[name] = numbers.astype(np.int64) if is_whole else numbers
        return found

    def _unknown(self, name: str, shard: int, there: Sequence[str]) -> ConfigError:
        known = {*there, *late_names(self._storage, self._shards)}
        error = unknown_column(name, known, "cost", self._url(shard))
        if name != SUPERVISED:
            return error
        return ConfigError(
            f"{error}. The column {SUPERVISED!r} counts the tokens that carry loss: `shard_tools convert` writes it "
            "for every set with masks; for other shards, count the ones of the mask with a function of your own: "
            "`shard_tools column add URL num_labels --compute MODULE:FUNCTION`"
        )

    def _url(self, shard: int) -> str:
        return redact(self._shards.urls[shard])


def _size_of(columns: Mapping[str, Numbers]) -> int:
    return sum(column.nbytes for column in columns.values())
