"""Locate samples by the sample table if headers cannot be used: for ranges read in pieces, and damaged ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from streaming.errors import ChecksumError, DataError, shell_place
from streaming.shards.fetch.checksums import EVERY, Mask, Sum, sums_of
from streaming.shards.fetch.distant import Distant
from streaming.shards.fetch.layout import Fetched, UnitLayout
from streaming.shards.fetch.pieces import RangePieces
from streaming.shards.index.sample_table import Records, SampleTable
from streaming.storage import Checked, Parts, crc_of


def narrowed(
    samples: SampleTable, rows: range, pieces: RangePieces, data: memoryview, fields: Sequence[str] | None, url: str,
    *, kept: Mask = EVERY, distant: Distant | None = None,
) -> Fetched | None:  # fmt: skip
    """Return the known state of damaged bytes. The layout's ``damage`` names the samples that no checksum confirms.

    Whether a sample is bad depends on the bytes of its shard and on ``fields``, not on which pieces were read.

    Args:
        samples: The sample table of the shard.
        rows: The samples in these bytes.
        pieces: The pieces that were read.
        data: The bytes.
        fields: Fields to deliver; None: all.
        url: The shard, for messages.
        kept: Whether each of the samples is delivered, bool [n].
        distant: Members that were not read; None: none.

    Returns:
        None if good and bad samples cannot be distinguished: they are not whole spans, or no checksum differs.
    """
    damage: dict[int, DataError] = {}
    sums = sums_of(samples, rows.start, rows.stop, fields, kept, distant)
    for one in sums:
        got, _ = crc_of(pieces.parts(data, one.ranges))
        if got != one.crc32c:
            error = checksum_error(url, one.ranges[0][0], one.ranges[-1][1], got, one.crc32c)
            damage |= dict.fromkeys(range(one.first - rows.start, one.stop - rows.start), error)
    is_part = fields is not None or not kept.all()
    if not damage and (not is_part or narrowed(samples, rows, pieces, data, None, url) is None):
        return None
    # Without damage, the differing bytes are unused ones, of a chunk that was read whole.
    checked = None if damage else Checked.comparing(pieces.num_bytes, summed_parts(sums, pieces, data))
    return Fetched(checked=checked, found=layout_by_table(samples, rows, pieces, fields, damage, distant))


def summed_parts(sums: Iterable[Sum], pieces: RangePieces, data: memoryview) -> Iterator[tuple[Parts, int]]:
    """Yield the bytes of each checksum in the memory of ``pieces``, and its expected value, for ``Checked``."""
    return ((pieces.parts(data, one.ranges), one.crc32c) for one in sums)


def layout_by_table(
    samples: SampleTable | Records, rows: range, pieces: RangePieces, fields: Sequence[str] | None,
    damage: Mapping[int, DataError], distant: Distant | None = None,
) -> UnitLayout:  # fmt: skip
    """Return, according to the sample table, the places of the fields of some samples in the memory of ``pieces``.

    For ``distant`` members, return where they begin in the shard.
    """
    among = slice(rows.start, rows.stop)
    columns = {
        name: (starts[among], sizes[among])
        for name, (starts, sizes) in samples.fields.items()
        if fields is None or name in fields
    }
    names = tuple(name for name, (starts, _) in columns.items() if (starts >= 0).any())
    starts = np.array([columns[name][0] for name in names], np.int64).reshape(-1, len(rows)).T
    sizes = np.array([columns[name][1] for name in names], np.int64).reshape(-1, len(rows)).T
    places = np.where(starts < 0, -1, pieces.located(starts))
    if distant is not None:
        for column, name in enumerate(names):
            stay = distant.among(name, sizes[:, column])
            places[stay, column] = ~starts[stay, column]
    return UnitLayout(
        keys=samples.keys[among],
        fields=names,
        starts=places,
        sizes=sizes,
        num_bytes=pieces.num_bytes,
        damage=damage,
    )


def checksum_error(url: str, start: int, end: int, got: int, expected: int) -> ChecksumError:
    """Make the error for bytes ``[start, end)`` of a shard that differ from the index."""
    return ChecksumError(
        f"{url}, bytes {start}-{end}: CRC32C {got:08x}, the index says {expected:08x}, also when read again. The "
        f"shard is damaged, or was replaced by one of the same size. shard_tools verify {shell_place(url)} lists what "
        f"differs; shard_tools index --force accepts the shard as it is"
    )
