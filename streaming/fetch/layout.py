"""Say where the samples of a fetched range lie in memory, and which of them are damaged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from streaming.errors import DataError
from streaming.types import Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitLayout:
    """The ``n`` samples of a fetched range. Offsets count from the start of its memory.

    Attributes:
        keys: The key of each sample.
        fields: The ``F`` extensions.
        starts: int64 ``[n, F]``, where each field's bytes begin; -1 where the sample lacks the field.
        sizes: int64 ``[n, F]``, their number.
        num_bytes: Bytes of the memory that they lie in; what was given beyond that is not in use.
        damage: Samples whose bytes are not those of the index, and why; all others are intact.
    """

    keys: Sequence[str]
    fields: tuple[str, ...]
    starts: Int64Array
    sizes: Int64Array
    num_bytes: int
    damage: Mapping[int, DataError] = field(default_factory=dict)


TakeApart: TypeAlias = Callable[[memoryview], UnitLayout]
"""Where the samples lie in bytes that were fetched and checked; a ``DataError`` if they are not what the index says.
It costs Python, and no waiting. So the thread that needs it does it: fetching threads would take the interpreter
from that thread dozens of times a unit."""


def taken_apart(found: UnitLayout | TakeApart, data: memoryview) -> UnitLayout:
    """Return where samples lie in ``data``; what is not known yet is found out now."""
    return found if isinstance(found, UnitLayout) else found(data)
