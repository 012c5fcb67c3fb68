"""Find the bytes of a shard that have a checksum of their own, and the samples to which they belong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from streaming.shards.fetch.distant import Distant
from streaming.shards.index.sample_table import SampleTable
from streaming.types import Int64Array

Mask: TypeAlias = npt.NDArray[np.bool_]
EVERY: Mask = np.ones((), np.bool_)
"""All samples, whatever their number: an array without dimensions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """Bytes of a shard with one checksum.

    Attributes:
        ranges: Ranges of the bytes, half-open, non-empty, in order.
        crc32c: CRC32C of all of them, concatenated.
        first: First sample of the shard that is bad if the checksum differs.
        stop: End (exclusive) of these samples.
    """

    ranges: tuple[tuple[int, int], ...]
    crc32c: int
    first: int
    stop: int


def sums_of(
    samples: SampleTable, first: int, stop: int, fields: Sequence[str] | None = None, kept: Mask = EVERY,
    distant: Distant | None = None,
) -> tuple[Sum, ...]:  # fmt: skip
    """Return the checksums for samples ``[first, stop)``, in order of their first bytes.

    With ``fields``, return only the checksums that these fields need: those of their large members, and for other
    fields the rest of their spans. Spans in which no sample has any of the fields are left out. With ``kept``, bool
    [stop - first], return only those that these samples need. Checksums of ``distant`` members are left out, but not
    the rest of their spans: it holds their headers, which show whether the shard is the one that the index describes.

    Empty if these samples are not whole spans.
    """
    low, high = np.searchsorted(samples.span_starts, [first, stop]).tolist()
    borders = samples.span_starts[low : high + 1]
    if borders.tolist()[:: max(1, len(borders) - 1)] != [first, stop]:
        return ()
    offsets = samples.record_starts[borders].tolist()
    sums = samples.span_crc32c[low:high].tolist()
    rest = samples.large.rest[low:high].tolist() or [-1] * len(sums)
    large = _large_members(samples, first, stop, fields, kept, distant)
    beside = _has_small(samples, borders, fields, kept)
    found: list[Sum] = []
    at = 0
    for place, (head, tail) in enumerate(pairwise(borders.tolist())):
        begin, end = offsets[place : place + 2]
        members = []
        while at < len(large) and large[at][0] < end:
            members.append(large[at])
            at += 1
        needs_rest = beside[place] or any(stays for *_, stays in members)
        if needs_rest and not members:
            found.append(Sum(ranges=((begin, end),), crc32c=sums[place], first=head, stop=tail))
        elif needs_rest:
            cuts = [begin, *(border for start, stop_, *_ in members for border in (start, stop_)), end]
            ranges = tuple((a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=True) if a < b)
            found.append(Sum(ranges=ranges, crc32c=rest[place], first=head, stop=tail))
        found += [
            Sum(ranges=((start, stop_),), crc32c=crc, first=row, stop=row + 1)
            for start, stop_, row, crc, asked, _ in members
            if asked
        ]
    return tuple(found)


def crc_of_member(samples: SampleTable, start: int, stop: int) -> int | None:
    """Return the CRC32C of the large member in these bytes of a shard; None if there is none."""
    for name, sums in samples.large.fields.items():
        starts, sizes = samples.fields[name]
        for row in np.flatnonzero((starts == start) & (sizes == stop - start) & (sums >= 0)).tolist():
            return int(sums[row])
    return None


def _large_members(
    samples: SampleTable, first: int, stop: int, fields: Sequence[str] | None, kept: Mask, distant: Distant | None
) -> list[tuple[int, int, int, int, bool, bool]]:
    """Return start, end, sample and CRC32C of every large member of some samples, by start.

    Also return whether each is read, and whether each is wanted but distant.
    """
    members, kept = [], np.broadcast_to(kept, stop - first)
    for name, sums in samples.large.fields.items():
        starts, sizes = samples.fields[name]
        asked = fields is None or name in fields
        stays = set() if distant is None or not asked else set(distant.among(name, sizes[first:stop]).tolist())
        for row in (np.flatnonzero(sums[first:stop] >= 0) + first).tolist():
            start, there = int(starts[row]), row - first in stays
            wanted = asked and bool(kept[row - first])
            members.append(
                (start, start + int(sizes[row]), row, int(sums[row]), wanted and not there, wanted and there)
            )
    return sorted(members)


def _has_small(samples: SampleTable, borders: Int64Array, fields: Sequence[str] | None, kept: Mask) -> list[bool]:
    """Return whether each span has wanted bytes outside its large members."""
    first, stop = borders[[0, -1]].tolist()
    there = np.full(stop - first, fields is None)
    for name in fields or ():
        if name in samples.fields:
            small = samples.fields[name][0][first:stop] >= 0
            if name in samples.large.fields:
                small &= samples.large.fields[name][first:stop] < 0
            there |= small
    there &= kept
    found: list[bool] = np.logical_or.reduceat(there, borders[:-1] - first).tolist()
    return found
