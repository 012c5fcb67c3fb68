"""Divide the chunks of a shard into groups; each group is packed separately."""

from __future__ import annotations

import numpy as np

from streaming.common.arrays import sums
from streaming.types import Int64Array

PACKS_OF_GROUP = 256
"""Minimum number of packs in a group, if the shard has enough: best-fit then fills 99 % or more (docs/design/0024)."""
MAX_GROUP_BYTES = 64 << 20
"""Maximum size of a group: a group is fetched as a whole, and a lane holds about five groups."""


def cut_groups(tokens: Int64Array, starts: Int64Array, ends: Int64Array, *, length: int) -> Int64Array:
    """Divide the chunks of one shard into groups of at least ``PACKS_OF_GROUP`` packs.

    The last group includes a remainder that is too small for a group. A group larger than ``MAX_GROUP_BYTES`` is cut
    earlier, unless it is a single chunk.

    Args:
        tokens: int64 [C], tokens of each chunk.
        starts: int64 [C], first byte of each chunk in the shard, ascending.
        ends: int64 [C], end (exclusive) of each chunk.
        length: T, tokens of a pack.

    Returns:
        int64 [G], the first chunk of each group.
    """
    enough = PACKS_OF_GROUP * length
    before = sums(tokens)
    firsts: list[int] = []
    first, num_chunks = 0, len(tokens)
    while first < num_chunks:
        firsts.append(first)
        full = int(np.searchsorted(before, before[first] + enough))  # first chunk after that many tokens
        if full > num_chunks or before[-1] - before[full] < enough:
            full = num_chunks
        fits = int(np.searchsorted(ends, starts[first] + MAX_GROUP_BYTES, side="right"))
        first = max(min(full, fits), first + 1)
    return np.array(firsts, np.int64)
