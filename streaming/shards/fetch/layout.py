"""Describe the places of the samples of a fetched range in memory, and its damaged samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from streaming.errors import DataError
from streaming.storage import Checked
from streaming.types import Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitLayout:
    """The ``n`` samples of a fetched range. Offsets count from the start of its memory.

    Attributes:
        keys: The key of each sample.
        fields: The ``F`` extensions.
        starts: int64 ``[n, F]``, first byte of each field; -1 if the sample lacks the field; ``~b`` (never -1) if it is
            distant: it is not in memory, but begins at byte b of the shard.
        sizes: int64 ``[n, F]``, number of bytes of each field.
        num_bytes: Number of bytes of memory in use; memory allocated beyond that is free.
        damage: Samples whose bytes differ from the index, with the error; all others are intact.
    """

    keys: Sequence[str]
    fields: tuple[str, ...]
    starts: Int64Array
    sizes: Int64Array
    num_bytes: int
    damage: Mapping[int, DataError] = field(default_factory=dict)

    def damage_at(self, start: int) -> DataError | None:
        """Return the error of the sample that has a byte of a field at this place; None: it is intact."""
        there = (self.starts >= 0) & (self.starts <= start) & (start < self.starts + self.sizes)
        rows, _ = np.nonzero(there)
        return next((self.damage[row] for row in rows.tolist() if row in self.damage), None)


TakeApart: TypeAlias = Callable[[memoryview], UnitLayout]
"""Locates the samples in bytes that were fetched and checked; raises ``DataError`` if they do not match the index. It
takes Python time but does not block, so the thread that needs the result calls it: fetching threads would contend with
that thread for the GIL dozens of times per unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A range in memory, with the check of its bytes, and the places of its samples.

    Attributes:
        checked: Its bytes match their checksums; None: those of some samples do not, which ``found`` names as damage.
        found: The places of its samples, or a function that finds them.
    """

    checked: Checked | None
    found: UnitLayout | TakeApart

    def __post_init__(self) -> None:
        if self.checked is None and not (isinstance(self.found, UnitLayout) and self.found.damage):
            raise AssertionError("bytes that do not match their checksums, and no sample is named as damaged")

    def apart(self, data: memoryview) -> UnitLayout:
        """Return the locations of samples in ``data``. Compute them now if they are not known yet."""
        return self.found if isinstance(self.found, UnitLayout) else self.found(data)
