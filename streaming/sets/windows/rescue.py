"""Tell damage of videos from damage of the tables beside them, if one checksum covers both. Pure but for reading.

Members of less than 128 KiB share the checksum of their span. If a byte of such a video is damaged, nothing says that
the tables in the span are intact, except that groups of pictures have checksums of their own. CRCs are linear: what an
error changes in the checksum of a group, moved over the bytes behind the group, is what it changes in that of the span.
If the errors of groups explain the whole difference, all other bytes match, with the certainty of the checksum itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from crc32c import crc32c

from streaming.shards.fetch.checksums import Sum

_ZEROS = bytes(1 << 16)


class Summed(NamedTuple):
    """Bytes of a shard with a checksum of their own.

    Attributes:
        start: The first one.
        end: The one after the last.
        crc32c: The checksum.
    """

    start: int
    end: int
    crc32c: int


def is_explained(one: Sum, data: memoryview, groups: Iterable[Summed]) -> bool:
    """Return whether errors inside groups of pictures are all errors of bytes that share a checksum.

    Args:
        one: The ranges, and their checksum.
        data: Their bytes, concatenated.
        groups: Groups of pictures that do not overlap; those outside of the ranges do not matter.
    """
    left, at = crc32c(data) ^ one.crc32c, 0
    places = []
    for start, end in one.ranges:
        places.append((start, end, at))
        at += end - start
    for group in groups:
        for start, end, begin in places:
            if start <= group.start and group.end <= end:
                low = begin + group.start - start
                high = low + group.end - group.start
                left ^= _moved(crc32c(data[low:high]) ^ group.crc32c, at - high)
    return left == 0


def _moved(difference: int, num_bytes: int) -> int:
    """Return the difference of two checksums after ``num_bytes`` equal bytes more."""
    first, second = difference, 0
    while num_bytes and difference:
        part = _ZEROS[: min(num_bytes, len(_ZEROS))]
        first, second, num_bytes = crc32c(part, first), crc32c(part, second), num_bytes - len(part)
    return first ^ second


def intact(
    sums: Sequence[Sum], read: Callable[[int, int], bytes], groups: Sequence[Summed]
) -> dict[int, memoryview] | None:
    """Return the bytes of ranges by their first byte, if they are intact but for groups of pictures; else None.

    Args:
        sums: The ranges and their checksums.
        read: Returns bytes of the shard.
        groups: Groups of pictures of the shard.
    """
    found: dict[int, memoryview] = {}
    for one in sums:
        parts = [read(start, end) for start, end in one.ranges]
        if not is_explained(one, memoryview(b"".join(parts)), groups):
            return None
        found |= {start: memoryview(part) for (start, _), part in zip(one.ranges, parts, strict=True)}
    return found
