"""Find samples of a set by number, key or condition, in bounded time; tell where their fields lie."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from shard_tools.plan.keys import places_by_order
from streaming.arrays import sums
from streaming.errors import IndexMissingError, NotFoundError
from streaming.index.sample_table import SampleLocation, SampleTable
from streaming.types import Int64Array

if TYPE_CHECKING:
    from streaming.sources.samples import SampleSource


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
        """int64 [C + 1], samples before each chunk."""
        return sums(self.source.table.num_samples)

    @property
    def total(self) -> int:
        """How many samples there are."""
        return int(self.starts[-1])

    def places(self, numbers: Int64Array) -> list[SamplePlace]:
        """Return where samples are stored, given by numbers that exist, int64 [n]."""
        table = self.source.table
        chunks = np.searchsorted(self.starts, numbers, side="right") - 1
        rows = table.first_sample[chunks] + self.source.samples_of(chunks, numbers - self.starts[chunks])
        shards = table.shard[chunks]
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
            IndexMissingError: There is none.
        """
        found = self.source.samples_at(self.source.urls[shard])
        if found is None:
            shown = self.source.shards.shown_urls[shard]
            raise IndexMissingError(
                f"{shown}: no sample table of this shard; build it with `shard_tools index {shown}`"
            )
        return found

    def locate(self, place: SamplePlace) -> SampleLocation:
        """Return where the fields of a sample lie in its shard.

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
        """Return the numbers of samples with a key, if keys ascend from shard to shard; else, most likely, none."""
        found = (self.number_of(*at) for at in places_by_order(self.source.shard_keys, key))
        return [number for number in found if number is not None]
