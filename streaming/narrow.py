"""What is left of a damaged range: the samples whose own checksums hold."""

from __future__ import annotations

import numpy as np

from streaming.errors import ChecksumError, DataError
from streaming.index.samples import SampleTable
from streaming.index.sums import sums_of
from streaming.layout import UnitLayout


def narrowed(samples: SampleTable, first: int, stop: int, data: memoryview, url: str) -> UnitLayout | None:
    """The layout of the damaged ``data``, by the sample table alone: a header may be what is damaged.

    Args:
        samples: The sample table of the shard.
        first: The first sample of the shard that ``data`` holds.
        stop: One past the last.
        data: The bytes of their records, as they are.
        url: The shard, for messages.

    Returns:
        None where nothing can be told apart: the table has no spans, these samples are not whole spans, or no span
        differs.
    """
    base = int(samples.record_starts[first])
    damage: dict[int, DataError] = {}
    for one in sums_of(samples, first, stop):
        got = one.found_in([data[start - base : end - base] for start, end in one.ranges])
        if got != one.crc32c:
            error = checksum_error(url, one.ranges[0][0], one.ranges[-1][1], got, one.crc32c)
            damage |= dict.fromkeys(range(one.first - first, one.stop - first), error)
    return _by_table(samples, first, stop, damage) if damage else None


def _by_table(samples: SampleTable, first: int, stop: int, damage: dict[int, DataError]) -> UnitLayout:
    base = samples.record_starts[first]
    columns = {name: (starts[first:stop], sizes[first:stop]) for name, (starts, sizes) in samples.fields.items()}
    fields = tuple(name for name, (starts, _) in columns.items() if (starts >= 0).any())
    starts = np.stack([columns[name][0] for name in fields], axis=1)
    return UnitLayout(
        keys=samples.keys[first:stop],
        fields=fields,
        starts=np.where(starts < 0, -1, starts - base),
        sizes=np.stack([columns[name][1] for name in fields], axis=1),
        damage=damage,
    )


def checksum_error(url: str, start: int, end: int, got: int, expected: int) -> ChecksumError:
    """Says that bytes ``[start, end)`` of a shard are not those of the index."""
    return ChecksumError(
        f"{url}, bytes {start}-{end}: CRC32C {got:08x}, the index says {expected:08x}, twice in a row. The shard is "
        f"damaged, or was replaced by one of the same size. shard_tools verify {url} lists what differs; "
        f"shard_tools index --force accepts the shard as it is"
    )
