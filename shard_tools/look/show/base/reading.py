"""Read the beginnings of values with as few requests and unneeded bytes as possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from shard_tools.look.show.base.samples import SampleSet
from streaming.common.arguments import counted
from streaming.common.threads import on_threads
from streaming.errors import TransferError

_SPARE = 0.25
"""Unneeded bytes as a share of the needed ones: headers between values that one request joins."""
_FARTHEST = 64 << 10  # bytes between neighbors; for more, another request is faster
_REQUESTS = 32


@dataclass(frozen=True, slots=True, order=True)
class Wanted:
    """Bytes of a shard: a half-open range."""

    shard: int
    start: int
    stop: int


def read_all(within: SampleSet, wanted: Sequence[Wanted], beside: int = 0) -> list[bytes]:
    """Return bytes of shards, in the order of ``wanted``.

    Neighbors are read with one request, the closest first, while the gaps stay below a quarter of all bytes that the
    page shows.

    Args:
        within: The set that the shards are of.
        wanted: The bytes.
        beside: Bytes that the page shows in addition, such as pictures.

    Raises:
        StorageError: They cannot be read.
    """
    runs = _joined(wanted, beside)
    if not runs:
        return [b""] * len(wanted)

    def read(run: Wanted) -> memoryview:
        url = within.source.urls[run.shard]
        found = memoryview(within.source.storage.read(url, run.start, run.stop))
        if len(found) < run.stop - run.start:
            raise TransferError(f"{url}: {counted(len(found), 'byte')} instead of {run.stop - run.start}")
        return found

    pieces = on_threads(read, runs, _REQUESTS, name="shardstream-show")
    found: dict[Wanted, bytes] = {}
    places = iter(zip(runs, pieces, strict=True))
    run, piece = next(places)
    for one in sorted({one for one in wanted if one.stop > one.start}):
        while one.shard != run.shard or one.stop > run.stop:
            run, piece = next(places)
        found[one] = bytes(piece[one.start - run.start : one.stop - run.start])
    return [found.get(one, b"") for one in wanted]


def _joined(wanted: Sequence[Wanted], beside: int) -> list[Wanted]:
    """Return the ranges to request, in order; overlapping values share one."""
    listed = sorted({one for one in wanted if one.stop > one.start})
    left = int(_SPARE * (beside + sum(one.stop - one.start for one in listed)))
    gaps = sorted(
        (max(after.start - before.stop, 0), number)
        for number, (before, after) in enumerate(pairwise(listed))
        if after.shard == before.shard
    )
    joined = set[int]()
    for gap, number in gaps:
        left -= gap
        if left < 0 or gap > _FARTHEST:
            break
        joined.add(number + 1)
    runs: list[Wanted] = []
    for number, one in enumerate(listed):
        if number in joined:
            runs[-1] = Wanted(one.shard, runs[-1].start, max(runs[-1].stop, one.stop))
        else:
            runs.append(one)
    return runs
