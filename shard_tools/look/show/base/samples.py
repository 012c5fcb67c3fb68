"""Find samples of a set by number, key or condition, in bounded time; locate their fields."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from shard_tools.look.plan.keys import places_by_order
from streaming.common.arrays import sums
from streaming.common.threads import on_threads
from streaming.errors import DataError, IndexMissingError, NotFoundError, StorageError, shell_place
from streaming.sets.filters.late_columns import LateColumn
from streaming.sets.filters.select import column_reader, late_columns_of, late_names, reading_threads
from streaming.shards.index.columns import KEY, Bits, Values, fitting, kept_rows, no_values
from streaming.shards.index.sample_table import SampleLocation, SampleTable
from streaming.shards.index.where import parse_where, unknown_column
from streaming.types import Int64Array

if TYPE_CHECKING:
    from streaming.sets.sources.samples import SampleSource

FEW_SAMPLES = 4_000_000
"""Up to this number of samples, a condition is evaluated for all at once, so that the total is known."""
SEARCH_SECONDS = 5.0
"""Time limit of one request's search in a larger set; the next request continues from there."""


@dataclass(frozen=True, slots=True)
class SamplePlace:
    """Where a sample is stored: its number in the set, its shard, and its number there."""

    number: int
    shard: int
    row: int


@dataclass(frozen=True, eq=False)
class SampleSet:
    """The samples of a set, by number: those that its filter keeps, in storage order. Thread-safe.

    Attributes:
        source: What training reads.
    """

    source: SampleSource

    @cached_property
    def starts(self) -> Int64Array:
        """int64 [C + 1], number of samples before each chunk."""
        return sums(self.source.table.num_samples)

    @property
    def total(self) -> int:
        """Number of samples."""
        return int(self.starts[-1])

    def located(self, numbers: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the shards of samples, and their rows there, given by existing numbers, int64 [n] each."""
        table = self.source.table
        chunks = np.searchsorted(self.starts, numbers, side="right") - 1
        rows = table.first_sample[chunks] + self.source.samples_of(chunks, numbers - self.starts[chunks])
        return table.shard[chunks].astype(np.int64), rows.astype(np.int64)

    def keys(self, numbers: Int64Array) -> list[str]:
        """Return the keys of samples, given by existing numbers, int64 [n]; reads the sample table of each shard once.

        Raises:
            IndexMissingError: A shard has no sample table.
        """
        shards, rows = self.located(numbers)
        found = [""] * len(numbers)
        order = np.argsort(shards, kind="stable")
        borders = np.flatnonzero(np.diff(shards[order])) + 1
        for some in np.split(order, borders) if len(order) else ():
            keys = self.table(int(shards[some[0]])).keys
            for at, row in zip(some.tolist(), rows[some].tolist(), strict=True):
                found[at] = keys[row]
        return found

    def places(self, numbers: Int64Array) -> list[SamplePlace]:
        """Return where samples are stored, given by existing numbers, int64 [n]."""
        shards, rows = self.located(numbers)
        return [SamplePlace(*one) for one in zip(numbers.tolist(), shards.tolist(), rows.tolist(), strict=True)]

    def place(self, number: int) -> SamplePlace:
        """Return where a sample is stored.

        Raises:
            NotFoundError: There is no such sample.
        """
        if number >= self.total:
            raise NotFoundError(f"number: no sample {number:,}; there are {self.total:,}, the first is 0")
        return self.places(np.array([number], np.int64))[0]

    def table(self, shard: int) -> SampleTable:
        """Return the sample table of a shard.

        Raises:
            IndexMissingError: There is no sample table.
        """
        found = self.source.samples_at(self.source.urls[shard])
        if found is None:
            shown = self.source.shards.shown_urls[shard]
            raise IndexMissingError(
                f"{shown}: no sample table of this shard; build it with `shard_tools index {shell_place(shown)}`"
            )
        return found

    def locate(self, place: SamplePlace) -> SampleLocation:
        """Return the positions of a sample's fields in its shard.

        Raises:
            IndexMissingError: There is no sample table.
        """
        return self.table(place.shard).lookup(place.row)

    def number_of(self, shard: int, row: int) -> int | None:
        """Return the number of a sample given by its place; None: the set leaves it out."""
        if not self.source.selection.mask(shard)[row]:
            return None
        return int(self.source.numbers_of(np.array([shard]), np.array([row]))[0])

    def by_key(self, key: str) -> list[int]:
        """Return the numbers of samples with a key if keys ascend from shard to shard; otherwise it may find none."""
        found = (self.number_of(*at) for at in places_by_order(self.source.shard_keys, key))
        return [number for number in found if number is not None]

    def numbers_of(self, shard: int, rows: Int64Array) -> Int64Array:
        """Return the numbers in the set of the samples that it keeps, given by their numbers in a shard, int64 [n]."""
        return self.source.numbers_of(np.full(len(rows), shard), rows)

    @cached_property
    def filled(self) -> list[int]:
        """Shards that hold samples of the set, ascending."""
        found: list[int] = np.unique(self.source.table.shard).tolist()
        return found

    def rows_of(self, shard: int) -> Int64Array:
        """Return the numbers in a shard of the samples that the set keeps, int64 [n], ascending."""
        return np.flatnonzero(self.source.selection.mask(shard))

    # --- columns ---

    @cached_property
    def late(self) -> Mapping[str, LateColumn]:
        """The late columns, by name; none if the store cannot list, or if they do not cover all shards."""
        shards = self.source.shards
        try:
            return late_columns_of(self.source.storage, shards, late_names(self.source.storage, shards), None)
        except (DataError, StorageError):
            return {}

    @cached_property
    def column_names(self) -> tuple[str, ...]:
        """Names of the first shard's columns and of the late ones, sorted."""
        first = self.table(self.filled[0]).columns if self.filled else ()
        return tuple(sorted({*first, *self.late}))

    def columns(self, shard: int, names: Collection[str]) -> dict[str, Values]:
        """Return the columns of all samples of a shard; a column that only other shards have is all missing.

        Raises:
            IndexMissingError: The shard has no sample table.
            IndexMismatchError: A late column is of another version of the shard.
        """
        if not names:
            return {}
        source = self.source
        late = {name: self.late[name] for name in names if name in self.late}
        found, _ = column_reader(source.storage, source.shards, source.shards.chunks, names, late)(shard)
        count = source.shards.chunks.shards[shard].num_samples
        return {name: found[name] if name in found else no_values(count) for name in names}

    def check_columns(self, names: Collection[str], what: str) -> None:
        """Refuse columns that do not exist in the first shard or, in a small set, in any shard.

        Raises:
            ConfigError: There is such a column.
        """
        unknown = sorted({*names} - {KEY, *self.column_names})
        there = set(self.column_names)
        for shard in self.filled[1:] if unknown and self.total <= FEW_SAMPLES else ():
            there.update(self.table(shard).columns)
            if there >= {*unknown}:
                return
        if unknown:
            raise unknown_column(unknown[0], {*there, KEY}, what)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Samples that were found.

    Attributes:
        numbers: int64 [n], the requested samples.
        total: Total number of matches; None: not all of the set was searched.
        num_looked: Number of shards searched.
        num_shards: Number of shards that could hold a match.
    """

    numbers: Int64Array
    total: int | None
    num_looked: int
    num_shards: int


class Search:
    """Find the samples that meet a condition, in order, shard by shard, as far as requested. Thread-safe.

    Args:
        within: The set.
        where: The condition.

    Raises:
        ConfigError: It is invalid, or names a column that does not exist.
    """

    def __init__(self, within: SampleSet, where: str) -> None:
        self.within, self.where = within, parse_where(where)
        within.check_columns(self._names, "where")
        self._lock = threading.Lock()  # guards _bits, _ends
        self._bits: list[Bits] = []
        self._ends = [0]

    @property
    def _names(self) -> frozenset[str]:
        return self.where.names or frozenset()

    def find(self, first: int, stop: int) -> Found:
        """Return matches ``[first, stop)``, searching further shards if needed, for a limited time.

        Raises:
            ConfigError: The condition does not fit the columns.
        """
        shards = self.within.filled
        with self._lock:
            # Results are known for a prefix of the shards; a thread that waits here most likely needs the same ones.
            self._look(shards, stop)
            done = len(self._bits)
            ends = np.array(self._ends, np.int64)
        total = int(ends[-1])
        parts = [np.empty(0, np.int64)]
        sizes = self.within.source.shards.chunks.shards
        for at in range(int(np.searchsorted(ends[1:], first, side="right")), done):
            if ends[at] >= stop:
                break
            rows = np.flatnonzero(kept_rows(self._bits[at], sizes[shards[at]].num_samples))
            low, high = max(first - int(ends[at]), 0), stop - int(ends[at])
            parts.append(self.within.numbers_of(shards[at], rows[low:high]))
        numbers = np.concatenate(parts)
        return Found(
            numbers=numbers, total=total if done == len(shards) else None, num_looked=done, num_shards=len(shards)
        )

    def _look(self, shards: list[int], stop: int) -> None:
        """Evaluate shards until enough matches are known, all shards are done, or the time is over."""
        wants_all = self.within.total <= FEW_SAMPLES
        until = time.monotonic() + SEARCH_SECONDS * (4 if wants_all else 1)
        num_threads = reading_threads(self.within.source.shards)
        while len(self._bits) < len(shards) and (wants_all or self._ends[-1] < stop) and time.monotonic() < until:
            done = len(self._bits)
            some = shards[done : done + 2 * num_threads]
            for bits, count in on_threads(self._fitting, some, num_threads, name="shardstream-search"):
                self._bits.append(bits)
                self._ends.append(self._ends[-1] + count)

    def _fitting(self, shard: int) -> tuple[Bits, int]:
        """Return which samples of a shard match, and their number."""
        count = self.within.source.shards.chunks.shards[shard].num_samples
        bits = fitting(self.where, self.within.columns(shard, self._names), count)
        bits = bits & np.packbits(self.within.source.selection.mask(shard), bitorder="little")
        return bits, int(np.unpackbits(bits).sum())
