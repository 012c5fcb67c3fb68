"""Find samples by key, and the keys of samples, from as few key columns of sample tables as possible."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shard_tools.running.engine import map_ordered
from streaming.catalog.source import ChunkSource
from streaming.errors import IndexMissingError
from streaming.filters.select import key_column, reading_threads
from streaming.platforms import num_cores
from streaming.types import Int64Array

_T = TypeVar("_T")


def keys_at(dataset: ChunkSource, chunk_ids: Int64Array, offsets: Int64Array) -> list[str | None]:
    """Return the key of each sample; None if the shard has no sample table."""
    found = dataset.places(chunk_ids, offsets, np.zeros_like(offsets), 0)
    return keys_of(dataset, found.shards, found.numbers)


def keys_of(dataset: ChunkSource, shards: Int64Array, rows: Int64Array) -> list[str | None]:
    """Return the key of each sample, given by its shard and its number there; None: no sample table."""
    keys: list[str | None] = [None] * len(rows)

    distinct, which = np.unique(shards, return_inverse=True)
    first, last = np.full(len(distinct), np.iinfo(np.int64).max), np.zeros(len(distinct), np.int64)  # row wanted
    np.minimum.at(first, which, rows)
    np.maximum.at(last, which, rows)

    def read(number: int, turns: AbstractContextManager[Any]) -> list[Any]:
        at = np.flatnonzero(which == number)
        only = (int(first[number]), int(last[number]) + 1)
        try:
            column = key_column(dataset.storage, dataset.shards, int(distinct[number]), only, turns)
        except IndexMissingError:
            return []
        return list(zip(at.tolist(), column.take(pa.array(rows[at] - only[0])).to_pylist(), strict=True))

    for found in _mapped(dataset, read, range(len(distinct))):
        for place, key in found:
            keys[place] = key if isinstance(key, str) else key.decode("utf-8", "surrogateescape")
    return keys


def places_by_order(dataset: ChunkSource, key: str) -> list[tuple[int, int]]:
    """Find shard and number of samples with a key if keys ascend from shard to shard; else, most likely, none.

    Writers that number their samples leave ascending keys. About a dozen key columns then suffice to find the shard.

    Raises:
        IndexMissingError: A shard has no sample table.
    """
    wanted = key.encode("utf-8", "surrogateescape")
    shard = _by_order(dataset, wanted)
    return [] if shard is None else [(shard, row) for row in _rows_in(dataset, shard, wanted)]


def all_places(dataset: ChunkSource, key: str) -> list[tuple[int, int]]:
    """Find shard and number of all samples that have a key, reading all key columns.

    Raises:
        IndexMissingError: A shard has no sample table.
    """
    wanted = key.encode("utf-8", "surrogateescape")
    found = _mapped(
        dataset, lambda shard, turns: _rows_in(dataset, shard, wanted, turns), range(len(dataset.shards.urls))
    )
    return [(shard, row) for shard, rows in enumerate(found) for row in rows]


def _mapped(
    dataset: ChunkSource, function: Callable[[int, AbstractContextManager[Any]], list[_T]], numbers: range
) -> Iterator[list[_T]]:
    """Call a function with each number and the semaphore held while keys are unpacked; yield results in order."""
    turns = threading.Semaphore(num_cores())
    return map_ordered(lambda number: function(number, turns), numbers, reading_threads(dataset.shards))


def _by_order(dataset: ChunkSource, wanted: bytes) -> int | None:
    """Find the last shard whose first key is not greater than ``wanted``, if keys ascend from shard to shard."""
    filled = [shard for shard, info in enumerate(dataset.shards.table.shards) if info.num_samples]  # type: ignore[union-attr]
    low, high = 0, len(filled)
    while low < high:
        middle = (low + high) // 2
        first = _bytes(key_column(dataset.storage, dataset.shards, filled[middle], (0, 1)))[0].as_py()
        low, high = (middle + 1, high) if first <= wanted else (low, middle)
    return filled[low - 1] if low else None


def _bytes(keys: Any) -> Any:
    return keys.cast(pa.large_binary() if pa.types.is_large_string(keys.type) else pa.binary())


def _rows_in(
    dataset: ChunkSource, shard: int, wanted: bytes, turns: AbstractContextManager[Any] | None = None
) -> list[int]:
    keys = _bytes(key_column(dataset.storage, dataset.shards, shard, turns=turns))
    rows: list[int] = pc.indices_nonzero(pc.equal(keys, pa.scalar(wanted, keys.type))).to_pylist()
    return rows
