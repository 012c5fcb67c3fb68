"""Put samples into the order of a column, or into a random one: all of a set, or shards spread over a large one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shard_tools.look.show.base.samples import SampleSet
from streaming.common.arguments import counted
from streaming.common.threads import on_threads
from streaming.errors import ConfigError
from streaming.sets.filters.select import reading_threads
from streaming.shards.index.columns import Values, fitting, kept_rows
from streaming.shards.index.where import Where, is_comparable, parse_where
from streaming.types import Int64Array

MOST_ROWS: Final = 2_000_000
"""With more samples, only some shards, spread evenly over the set, are read."""
MOST_SHARDS: Final = 64
_ROUNDS = 4  # of a Feistel network, whose result depends on every bit of its input


def spread_shards(within: SampleSet) -> list[int]:
    """Return the shards whose columns are read: all if there are few, else some at equal distances."""
    shards = within.filled
    if within.total <= MOST_ROWS and len(shards) <= 16 * MOST_SHARDS:
        return shards
    fitting_rows = int(MOST_ROWS * len(shards) / max(within.total, 1))
    count = max(1, min(MOST_SHARDS, fitting_rows, len(shards)))
    return [shards[(2 * place + 1) * len(shards) // (2 * count)] for place in range(count)]


def read_words(within: SampleSet, shards: Sequence[int]) -> str:
    """Return in words which samples these shards hold."""
    if len(shards) == len(within.filled):
        return f"all {counted(within.total, 'sample')}"
    num = sum(within.rows_of(shard).size for shard in shards)
    return (
        f"{num:,} of {counted(within.total, 'sample')}, in {len(shards):,} of {len(within.filled):,} shards spread "
        "over all"
    )


def joined_values(name: str, parts: Sequence[Values]) -> Values:
    """Return the values of a column of several shards as one array, of one type.

    Raises:
        ConfigError: The values cannot be compared.
    """
    filled = [one for one in parts if not pa.types.is_null(one.type)]
    for one in filled:
        if not is_comparable(one.type):
            raise ConfigError(f"{name}: holds {one.type}; numbers, texts and booleans can be compared")
    kinds = {str(one.type) for one in filled}
    kind = filled[0].type if filled else pa.null()
    if len(kinds) > 1:
        kind = pa.float64() if are_numbers(filled) else pa.string()
    whole = [pa.nulls(len(one), kind) if pa.types.is_null(one.type) else one.cast(kind, safe=False) for one in parts]
    values = pa.chunked_array(whole, kind).combine_chunks()
    return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values


def are_numbers(parts: Sequence[Values]) -> bool:
    """Return whether all arrays hold numbers."""
    return all(pa.types.is_integer(one.type) or pa.types.is_floating(one.type) for one in parts)


def as_plain(values: Values) -> Values:
    """Return the values of a column without a dictionary."""
    return values.dictionary_decode() if pa.types.is_dictionary(values.type) else values


@dataclass(frozen=True, slots=True, eq=False)
class Arranged:
    """Samples in an order: their numbers, int64 [n], and which of the set were read, in words."""

    numbers: Int64Array
    words: str

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return self.numbers.nbytes + 1000


def by_column(within: SampleSet, where: str, name: str, *, descending: bool) -> Arranged:
    """Return the samples that meet a condition in the order of a column, those without a value last.

    Raises:
        ConfigError: There is no such column, its values cannot be compared, or the condition cannot be evaluated.
    """
    within.check_columns([name], "order")
    numbers, values, words = _taken(within, where, name)
    order = pc.array_sort_indices(
        values, order="descending" if descending else "ascending", null_placement="at_end"
    ).to_numpy()  # fmt: skip
    return Arranged(numbers[order], words)


def at_random(within: SampleSet, where: str, seed: int) -> Arranged:
    """Return the samples that meet a condition in a random order.

    Raises:
        ConfigError: The condition cannot be evaluated.
    """
    numbers, _, words = _taken(within, where, "")
    return Arranged(np.random.default_rng(seed).permutation(numbers), words)


def _taken(within: SampleSet, where: str, name: str) -> tuple[Int64Array, Values, str]:
    """Return the numbers of matching samples in the shards that are read, int64 [n], and their values of a column."""
    condition = parse_where(where) if where else None
    if condition is not None:
        within.check_columns(condition.names or (), "where")
    shards = spread_shards(within)

    def read(shard: int) -> tuple[Int64Array, Values]:
        return _of_shard(within, shard, condition, name)

    parts = on_threads(read, shards, reading_threads(within.source.shards), name="shardstream-order")
    numbers = np.concatenate([np.empty(0, np.int64), *(one for one, _ in parts)])
    return numbers, joined_values(name, [values for _, values in parts]), read_words(within, shards)


def _of_shard(within: SampleSet, shard: int, condition: Where | None, name: str) -> tuple[Int64Array, Values]:
    names = {*((name,) if name else ()), *((condition.names or ()) if condition is not None else ())}
    found = within.columns(shard, names)
    kept = within.source.selection.mask(shard)
    if condition is not None:
        kept = kept & kept_rows(fitting(condition, found, len(kept)), len(kept))
    rows = np.flatnonzero(kept)
    values = as_plain(found[name].take(pa.array(rows))) if name else pa.nulls(len(rows))
    return within.numbers_of(shard, rows), values


def shuffled(place: int, total: int, seed: int) -> int:
    """Return the number at a place of a random order of ``total`` numbers, without laying out the order."""
    half = max((total - 1).bit_length() + 1, 2) // 2
    mask, number = (1 << half) - 1, place
    while True:
        left, right = number >> half, number & mask
        for turn in range(_ROUNDS):
            digest = hashlib.blake2b(f"{seed} {turn} {right}".encode(), digest_size=8).digest()
            left, right = right, left ^ int.from_bytes(digest, "little") & mask
        number = left << half | right
        if number < total:
            return number
