"""Leave large members in the store if their decoders read ranges of them: which ones are *distant*."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from streaming.types import Int64Array

LEAST_BYTES = 8 << 20
"""Size from which members stay in the store: a clip takes about seven requests (its head, the requests of a search for
its place, its frames). Each costs as much as a MiB, and below that size they save nothing. The same for files and all
stores, so that the same members are checked as a whole everywhere (docs/design/0055)."""


@dataclass(frozen=True, slots=True)
class Distant:
    """Determine which members of a dataset are distant: those of 8 MiB and more, of fields whose decoder reads ranges.

    In layouts and row tables, ``~b`` is the start of a distant member that begins at byte b of its shard.

    Attributes:
        reads_ranges: Returns whether the decoder of a field reads ranges.
    """

    reads_ranges: Callable[[str], bool]

    def may_be_in(self, num_bytes: int) -> bool:
        """Return whether a range of ``num_bytes`` may hold a distant member."""
        return num_bytes >= LEAST_BYTES

    def among(self, field: str, sizes: Int64Array) -> Int64Array:
        """Return the samples, by index into the sizes of their ``field``, in which it is distant."""
        if not self.reads_ranges(field):
            return np.empty(0, np.int64)
        return np.flatnonzero(sizes >= LEAST_BYTES)
