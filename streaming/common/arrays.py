"""Handle rows of numbers: running sums, rows of one value, and classes whose fields are columns of equal length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Self

import numpy as np
import numpy.typing as npt

from streaming.types import Int64Array


def sums(values: npt.ArrayLike) -> Int64Array:
    """Return the sum of the values before each, and of all: int64 [n + 1] for n integers."""
    numbers = np.asarray(values, np.int64)
    found = np.zeros(len(numbers) + 1, dtype=np.int64)
    np.cumsum(numbers, out=found[1:])
    return found


def rows_by(values: Int64Array) -> Iterator[tuple[int, npt.NDArray[np.intp]]]:
    """Yield each distinct value, ascending, and the rows that hold it, ascending; values must not be negative."""
    order = np.argsort(values, kind="stable")
    borders = np.flatnonzero(np.diff(values[order], prepend=-1, append=-1))
    for low, high in pairwise(borders.tolist()):
        yield int(values[order[low]]), order[low:high]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IntColumns:
    """Rows of numbers, stored as columns: each field of a subclass is int64 [n]."""

    def taken(self, rows: npt.NDArray[np.intp] | npt.NDArray[np.bool_] | slice) -> Self:
        """Return some of the rows, in the given order."""
        return type(self)(**{one.name: getattr(self, one.name)[rows] for one in fields(self)})

    @classmethod
    def joined(cls, some: Iterable[Self]) -> Self:
        """Concatenate the rows of several instances."""
        parts, empty = list(some), np.empty(0, np.int64)
        names = [one.name for one in fields(cls)]
        return cls(**{name: np.concatenate([empty, *(getattr(each, name) for each in parts)]) for name in names})
