"""Read chunks that contain only regular members with plain ustar headers, as most shards do.

This reader touches only headers: it follows the first few, and then either continues in this way (large members), or
expects the same steps to repeat (members of one size). The guess is verified, so its result is that of
:mod:`streaming.shards.tar.fast`; for anything else it returns None. Memory outside the CPU caches costs more than
everything else, and only the header is touched of a member that is not read yet.
"""

from __future__ import annotations

from itertools import pairwise
from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streaming.shards.tar.blocks import BLOCK_BYTES, Members
from streaming.types import Int64Array

_FIRST = 8
"""Number of members that are followed one by one, to find the pattern."""
_LARGE_BYTES = 8 << 10
"""Mean size from which following the headers one by one costs less than anything that examines all blocks."""
_FEW = 64
"""Number of members up to which it costs less, too: NumPy's calls take a quarter of a millisecond at least."""
_HEADER = Struct("<100s24x11sc20xc100x5s83xc")  # name, size and the byte after it, kind, magic, first of the prefix
_PLAIN = {(closed, kind, b"ustar", b"\0") for closed in (b"\0", b" ") for kind in (b"0", b"\0")}
_WEIGHTS = 8.0 ** np.arange(10, -1, -1)
"""Number of octal digits of a size; such a number is exact in a float64."""
_ALIKE = ((124, 136), (156, 157), (257, 262), (345, 346))
"""Bytes that identify a plain header: size and the byte after it, kind, magic, first of the prefix."""


def read_plain(raw: NDArray[np.uint8]) -> Members | None:
    """Return the members of the whole of ``raw``; None if they do not fit this reader."""
    walk = _Walk(raw.data)
    if raw.size % BLOCK_BYTES or not walk.go(_FIRST):
        return None
    if walk.at >= min(_LARGE_BYTES, raw.size // _FEW) * _FIRST:
        walk.go(raw.size)
    if walk.at == raw.size:
        return walk.members()
    steps = _period(walk.places, raw.size) if len(walk.places) == _FIRST else None
    if steps is None:
        return None
    period = len(steps)
    places = np.add.outer(np.arange(0, raw.size, sum(steps)), walk.places[:period])
    found = None
    if walk.sizes[period:] == walk.sizes[:-period]:
        found = _alike(raw, places, walk.sizes[:period])
    return _members(raw, places.reshape(-1)) if found is None else found


class _Walk:
    """Follow headers one by one, as long as they are plain."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.at = 0
        self.names: list[bytes] = []
        self.places: list[int] = []
        self.sizes: list[int] = []

    def go(self, steps: int) -> bool:
        """Follow at most ``steps`` headers. Return whether each place before the end had a plain one."""
        data, at, end, unpack = self._data, self.at, len(self._data) - BLOCK_BYTES, _HEADER.unpack_from
        names, places, sizes = self.names, self.places, self.sizes
        for _ in range(steps):
            if at > end:
                break
            name, digits, closed, kind, magic, prefix = unpack(data, at)
            if (closed, kind, magic, prefix) not in _PLAIN or not digits.isdigit():
                return False
            try:
                size = int(digits, 8)
            except ValueError:
                return False
            names.append(name)
            places.append(at)
            sizes.append(size)
            at += BLOCK_BYTES + (size + BLOCK_BYTES - 1 & -BLOCK_BYTES)
        self.at = at
        return at > 0

    def members(self) -> Members:
        """Return the members found. All bytes must have been walked over."""
        names = [name.partition(b"\0")[0] for name in self.names]
        places, sizes = np.array(self.places, np.int64), np.array(self.sizes, np.int64)
        return Members(names=names, headers=places, data=places + BLOCK_BYTES, sizes=sizes, end=self.at, ended=False)


def _period(first: list[int], end: int) -> list[int] | None:
    """Return the steps between the ``first`` headers that repeat, up to ``end``; None if they do not."""
    steps = [b - a for a, b in pairwise(first)]
    for period in range(1, _FIRST // 2 + 1):
        if steps[period:] == steps[:-period] and end % sum(steps[:period]) == 0:
            return steps[:period]
    return None


def _alike(raw: NDArray[np.uint8], places: Int64Array, sizes: list[int]) -> Members | None:
    """Return the members if all headers equal those of the first period, which are plain; None if they do not.

    Few bytes of each are compared, as bytes: any calculation takes longer.

    Args:
        raw: The chunk.
        places: Places of headers, int64 [n, p]: n periods of p members.
        sizes: Sizes of the members of a period.
    """
    num_periods = len(places)
    steps = (raw.size // num_periods,)
    names: NDArray[Any] = np.empty(places.shape, "S100")
    for column, place in enumerate(places[0].tolist()):
        # Bytes ``[low, high)`` of the header at this column of all periods, end to end, against those of the first one.
        for low, high in _ALIKE:
            column_bytes = np.ndarray((num_periods,), f"V{high - low}", raw, place + low, steps).tobytes()
            if column_bytes != column_bytes[: high - low] * num_periods:
                return None
        names[:, column] = np.ndarray((num_periods,), "S100", raw, place, steps)
    headers = places.reshape(-1)
    return Members(
        names=names.reshape(-1), headers=headers, data=headers + BLOCK_BYTES,
        sizes=np.tile(np.array(sizes, np.int64), num_periods), end=raw.size, ended=False,
    )  # fmt: skip


def _members(raw: NDArray[np.uint8], places: Int64Array) -> Members | None:
    """Return the members with headers at ``places``; None if they are missing or not plain."""
    headers = raw.reshape(-1, BLOCK_BYTES).take(places // BLOCK_BYTES, 0)
    digits = headers[:, 124:135] - np.uint8(ord("0"))
    sizes = (digits @ _WEIGHTS).astype(np.int64)
    data = places + BLOCK_BYTES
    following = data + (sizes + (BLOCK_BYTES - 1) & -BLOCK_BYTES)
    alike = headers[:, 156:262]  # kind, link name and magic; those of the first are plain
    is_plain = (
        following[-1] == raw.size
        and (following[:-1] == places[1:]).all()
        and digits.max() <= 7
        and not (headers[:, 135] & 0xDF).any()
        and (alike == alike[0]).all()
        and not headers[:, 345].any()
    )
    if not is_plain:
        return None
    names: NDArray[Any] = np.ndarray((len(places),), "S100", headers, 0, (BLOCK_BYTES,)).copy()
    return Members(names=names, headers=places, data=data, sizes=sizes, end=raw.size, ended=False)
