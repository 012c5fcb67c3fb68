"""Find samples by key, and keys by sample, reading as few key columns of sample tables as possible."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streaming.common.lru_cache import LruCache
from streaming.common.platforms import num_cores
from streaming.common.threads import map_threads
from streaming.errors import IndexMissingError
from streaming.types import Int64Array

if TYPE_CHECKING:
    from streaming.sets.sources.keys import KeysOfShards

_T = TypeVar("_T")
_G = TypeVar("_G")
_BLOCK = 4096  # keys per cached block: consecutive steps are in the same chunks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Places:
    """Where the samples of some rows are stored; a row has one or more samples.

    Attributes:
        splits: int64 [B + 1]; entries ``splits[b]`` to ``splits[b + 1]`` belong to row b.
        shards: int64 [n], shard of each sample, numbered within its set.
        numbers: int64 [n], number of each sample in its shard.
        pieces: int64 [n, 3]; of a document in a pack the first token, one past the last, and its length; else 0.
    """

    splits: Int64Array
    shards: Int64Array
    numbers: Int64Array
    pieces: Int64Array

    @classmethod
    def of(
        cls, source: Any, number_of: Callable[[int, str], int], chunk_ids: Int64Array, offsets: Int64Array,
        passes: Int64Array, seed: int,
    ) -> Places:  # fmt: skip
        """Find the samples of rows at offsets of chunks, int64 [B] each.

        Args:
            source: A ``streaming.run.engine.source.Source``.
            number_of: Returns the number of a chunk's shard, given the chunk and its URL.
            chunk_ids: Chunk of each row.
            offsets: Number of each row in its chunk.
            passes: Pass in which each row is read.
            seed: Seed of the order.
        """
        rows = source.rows.packs(chunk_ids, offsets, passes, seed)
        chunks, which = np.unique(chunk_ids[rows.packs], return_inverse=True)
        ranges = [(number_of(chunk, one.url), one.first_sample + one.lead)
                  for chunk, one in ((chunk, source.chunk(chunk)) for chunk in chunks.tolist())]  # fmt: skip
        shards, firsts = np.array(ranges, np.int64).reshape(-1, 2).T
        pieces = np.stack([rows.starts, rows.stops, rows.lengths], axis=1)
        return cls(splits=rows.splits, shards=shards[which], numbers=firsts[which] + rows.samples, pieces=pieces)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptKeys:
    """Keys of shards, with a cache of the keys read last. Implements ``KeysOfShards``.

    Attributes:
        known: Reads the keys.
        kept: Cache of blocks of keys, by set, shard and block; it may be shared.
    """

    known: KeysOfShards
    kept: LruCache[tuple[int, int, int], Any]

    @classmethod
    def cache(cls, num_bytes: int) -> LruCache[tuple[int, int, int], Any]:
        """Return a cache for ``num_bytes`` bytes of keys."""
        return LruCache(num_bytes, _size_of)

    @property
    def home(self) -> object:
        """See ``KeysOfShards``."""
        return self.known.home

    @property
    def filled(self) -> list[int]:
        """See ``KeysOfShards``."""
        return self.known.filled

    @property
    def num_threads(self) -> int:
        """See ``KeysOfShards``."""
        return self.known.num_threads

    def column(
        self, shard: int, only: tuple[int, int] | None = None, turns: AbstractContextManager[Any] | None = None
    ) -> Any:
        """See ``KeysOfShards``."""
        if only is None:
            return self.known.column(shard, None, turns)
        low, high = only[0] // _BLOCK, -(-only[1] // _BLOCK)
        read: dict[str, Any] = {}

        def block(number: int) -> Any:
            if not read:
                read["all"] = self.known.column(shard, (number * _BLOCK, high * _BLOCK), turns)
                read["from"] = number
            return read["all"].slice((number - read["from"]) * _BLOCK, _BLOCK)

        blocks = [self.kept.of((id(self.home), shard, number), partial(block, number)) for number in range(low, high)]
        found = blocks[0] if len(blocks) == 1 else pa.concat_arrays(blocks)
        return found.slice(only[0] - low * _BLOCK, only[1] - only[0])


def _size_of(keys: Any) -> int:
    return int(keys.nbytes) + 200


def keys_at(dataset: Any, chunk_ids: Int64Array, offsets: Int64Array) -> list[str | None]:
    """Return the key of each sample of a set; None if the shard has no sample table."""
    numbers = {url: number for number, url in enumerate(dataset.urls)}
    found = Places.of(dataset, lambda _, url: numbers[url], chunk_ids, offsets, np.zeros_like(offsets), 0)
    return keys_of(dataset.shard_keys, found.shards, found.numbers)


def keys_of(known: KeysOfShards, shards: Int64Array, rows: Int64Array) -> list[str | None]:
    """Return the key of each sample, given by shard and number in it; None: no sample table."""
    return keys_of_all([(known, shards, rows)])[0]


def keys_of_all(wanted: Sequence[tuple[KeysOfShards, Int64Array, Int64Array]]) -> list[list[str | None]]:
    """Return the keys of samples of several sets, as :func:`keys_of` does, read in parallel."""
    keys: list[list[str | None]] = [[None] * len(rows) for _, _, rows in wanted]
    parts: list[tuple[int, int, Int64Array]] = []  # number of the set, shard, positions of its samples in the list
    for number, (_, shards, _) in enumerate(wanted):
        distinct, which = np.unique(shards, return_inverse=True)
        order = np.argsort(which, kind="stable")
        cuts = np.flatnonzero(np.diff(which[order])) + 1
        parts += [(number, shard, at) for shard, at in zip(distinct.tolist(), np.split(order, cuts), strict=False)]

    def read(part: tuple[int, int, Int64Array], turns: AbstractContextManager[Any]) -> list[Any]:
        number, shard, at = part
        known, _, rows = wanted[number]
        only = (int(rows[at].min()), int(rows[at].max()) + 1)
        try:
            column = known.column(shard, only, turns)
        except IndexMissingError:
            return []
        return list(zip(at.tolist(), column.take(pa.array(rows[at] - only[0])).to_pylist(), strict=True))

    num_threads = max((known.num_threads for known, _, _ in wanted), default=1)
    for (number, _, _), found in zip(parts, _mapped(num_threads, read, parts), strict=True):
        for place, key in found:
            keys[number][place] = key if isinstance(key, str) else key.decode("utf-8", "surrogateescape")
    return keys


def places_by_order(known: KeysOfShards, key: str) -> list[tuple[int, int]]:
    """Find shard and number of samples with a key if keys ascend from shard to shard; otherwise it may find none.

    Writers that number their samples produce ascending keys. Reading about a dozen key columns then finds the shard.

    Raises:
        IndexMissingError: A shard has no sample table.
    """
    wanted = key.encode("utf-8", "surrogateescape")
    shard = _by_order(known, wanted)
    return [] if shard is None else [(shard, row) for row in _rows_in(known, shard, wanted)]


def all_places(known: KeysOfShards, key: str) -> list[tuple[int, int]]:
    """Find shard and number of all samples with a key, reading all key columns.

    Raises:
        IndexMissingError: A shard has no sample table.
    """
    wanted = key.encode("utf-8", "surrogateescape")
    filled = known.filled
    found = _mapped(known.num_threads, lambda shard, turns: _rows_in(known, shard, wanted, turns), filled)
    return [(shard, row) for shard, rows in zip(filled, found, strict=True) for row in rows]


def _mapped(
    num_threads: int, function: Callable[[_G, AbstractContextManager[Any]], list[_T]], given: Sequence[_G]
) -> Iterator[list[_T]]:
    """Call a function with each value and a semaphore to hold while unpacking keys; yield results in order."""
    turns = threading.Semaphore(num_cores())
    return map_threads(lambda one: function(one, turns), given, num_threads)


def _by_order(known: KeysOfShards, wanted: bytes) -> int | None:
    """Find the last shard whose first key is not greater than ``wanted``, assuming ascending keys."""
    filled = known.filled
    low, high = 0, len(filled)
    while low < high:
        middle = (low + high) // 2
        first = _bytes(known.column(filled[middle], (0, 1)))[0].as_py()
        low, high = (middle + 1, high) if first <= wanted else (low, middle)
    return filled[low - 1] if low else None


def _bytes(keys: Any) -> Any:
    return keys.cast(pa.large_binary() if pa.types.is_large_string(keys.type) else pa.binary())


def _rows_in(
    known: KeysOfShards, shard: int, wanted: bytes, turns: AbstractContextManager[Any] | None = None
) -> list[int]:
    keys = _bytes(known.column(shard, turns=turns))
    if not len(keys):  # pyarrow up to 18 crashes below on an empty array
        return []
    rows: list[int] = pc.indices_nonzero(pc.equal(keys, pa.scalar(wanted, keys.type))).to_pylist()
    return rows
