"""Make the tar blocks of many small samples at once, in a fifth of the time that single samples take."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shard_tools.make.write.columns import ColumnValue
from shard_tools.make.write.keys import check_field, check_keys
from streaming.errors import ConfigError
from streaming.shards.index.large_members import LARGE_BYTES
from streaming.shards.tar.blocks import is_meta
from streaming.shards.tar.group import MAX_FIELDS
from streaming.shards.tar.headers import BLOCK_BYTES, member_headers, padding
from streaming.types import Int64Array

_Sample = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRun:
    """Consecutive samples with the same fields, in tar form.

    Attributes:
        keys: Keys of the ``n`` samples.
        fields: Their fields, sorted.
        starts: int64 ``[n, fields]``: offsets of the contents from the first byte of their record.
        sizes: int64 ``[n, fields]``: sizes of the contents.
        ends: int64 ``[n]``: end of each record, counted from the start of the run.
        pieces: Header, content and padding of each field of each sample.
        columns: The ``n`` values of each column.
    """

    keys: Sequence[str]
    fields: tuple[str, ...]
    starts: Int64Array
    sizes: Int64Array
    ends: Int64Array
    pieces: Sequence[bytes]
    columns: Sequence[Sequence[ColumnValue]]

    def part(self, start: int, stop: int) -> SampleRun:
        """Return the samples with numbers from ``start`` to ``stop``."""
        pieces_each = 3 * len(self.fields)
        return SampleRun(
            keys=self.keys[start:stop],
            fields=self.fields,
            starts=self.starts[start:stop],
            sizes=self.sizes[start:stop],
            ends=self.ends[start:stop] - (self.ends[start - 1] if start else 0),
            pieces=self.pieces[start * pieces_each : stop * pieces_each],
            columns=[values[start:stop] for values in self.columns],
        )


def sample_run(samples: Sequence[_Sample], columns: Sequence[Sequence[ColumnValue]]) -> SampleRun | None:
    """Return samples with equal entry names as a run.

    Returns:
        None if the samples must be written one by one, because one of them is invalid, or needs an encoder, a longer
        header, or checksums of its own.
    """
    try:
        keys = [sample["__key__"] for sample in samples]
        check_keys(keys)
        fields = tuple(sorted(check_field(name, keys[0]) for name in samples[0] if not is_meta(name)))
    except (ConfigError, KeyError, AttributeError):
        return None
    values = [sample[field] for sample in samples for field in fields]
    if not 0 < len(fields) <= MAX_FIELDS or {*map(type, values)} != {bytes}:
        return None
    lengths = [*map(len, values)]
    headers = member_headers([f"{key}.{field}" for key in keys for field in fields], lengths)
    if {*map(len, headers)} != {BLOCK_BYTES}:
        return None
    sizes = np.array(lengths, np.int64).reshape(len(keys), len(fields))
    members = -(-sizes // BLOCK_BYTES) * BLOCK_BYTES + BLOCK_BYTES
    member_ends = members.cumsum(axis=1)
    records = member_ends[:, -1]
    if records.max() >= LARGE_BYTES:
        return None
    return SampleRun(
        keys=keys,
        fields=fields,
        starts=member_ends - members + BLOCK_BYTES,
        sizes=sizes,
        ends=records.cumsum(),
        pieces=[*itertools.chain.from_iterable(zip(headers, values, map(padding, lengths), strict=True))],
        columns=columns,
    )
