"""Sum large members separately, so that readers may skip them, or read nothing else, and still check all bytes.

THE rule, shared by the writer and the indexer: a member is *large* from 128 KiB on. Its bytes have a CRC32C of their
own, and so has the *rest* of its span: the span without the bytes of its large members, end to end. Below that size a
gap in a range costs more than it saves (docs/design/0006), and small records cost nothing more to index.

As for spans, no byte is summed twice: while a chunk is summed, the CRC32C so far is recorded at the start and at the
end of each large member, and :func:`large_sums` computes all these sums from the records, for a whole shard at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from streaming.shards.index.spans import followed_by_zeros
from streaming.types import Int64Array

UInt32s = NDArray[np.uint32]

LARGE_BYTES = 128 << 10


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LargeSums:
    """Checksums of the large members of a shard of ``n`` samples and ``S`` spans; -1 where there is none.

    Attributes:
        fields: By field, int64 ``[n]``: CRC32C of the field's bytes. Fields without large members are absent.
        rest: int64 ``[S]``: CRC32C of the rest of each span that has a large member. Empty if there are none.
    """

    fields: Mapping[str, Int64Array] = field(default_factory=dict)
    rest: Int64Array = field(default_factory=lambda: np.empty(0, np.int64))


def large_sums(
    record_starts: Int64Array,
    fields: Mapping[str, tuple[Int64Array, Int64Array]],
    chunk_bounds: ArrayLike,
    span_starts: ArrayLike,
    span_running: ArrayLike,
    running: Mapping[int, int],
) -> LargeSums:
    """Return the sums of a shard, from the CRC32C values recorded while its chunks were summed.

    Args:
        record_starts: int64 ``[n + 1]``.
        fields: Per extension the offsets and sizes of its bytes, each int64 ``[n]``.
        chunk_bounds: As in :func:`streaming.shards.index.spans.spans_of`.
        span_starts: As in :func:`streaming.shards.index.spans.spans_of`.
        span_running: ``running`` of :func:`streaming.shards.index.spans.spans_of`.
        running: CRC32C of the chunk's bytes up to the start, and up to the end, of each large member, by offset.
    """
    found = {name: np.flatnonzero(sizes >= LARGE_BYTES) for name, (_, sizes) in fields.items()}
    found = {name: rows for name, rows in found.items() if rows.size}
    if not found:
        return LargeSums()
    starts = np.concatenate([fields[name][0][rows] for name, rows in found.items()])
    sizes = np.concatenate([fields[name][1][rows] for name, rows in found.items()])
    befores, afters = (
        np.array([running[offset] for offset in offsets.tolist()], np.uint32) for offsets in (starts, starts + sizes)
    )
    sums = np.split(afters ^ followed_by_zeros(befores, sizes), np.cumsum([rows.size for rows in found.values()])[:-1])
    columns = {}
    for (name, rows), sums_of_field in zip(found.items(), sums, strict=True):
        columns[name] = np.full(record_starts.size - 1, -1, np.int64)
        columns[name][rows] = sums_of_field
    spans = np.asarray(span_starts, np.int64)
    at_end = np.asarray(span_running, np.uint32)
    at_start = np.where(np.isin(spans[:-1], chunk_bounds), np.uint32(0), np.roll(at_end, 1))
    order = np.argsort(starts)
    cuts = starts[order], (starts + sizes)[order], befores[order], afters[order]
    return LargeSums(fields=columns, rest=_rest(record_starts[spans], at_start, at_end, *cuts))


def _rest(
    borders: Int64Array,
    at_start: UInt32s,
    at_end: UInt32s,
    starts: Int64Array,
    ends: Int64Array,
    befores: UInt32s,
    afters: UInt32s,
) -> Int64Array:
    """Sum each span without its members ``[starts, ends)``, which ascend: CRC32C, int64, -1 for spans without members.

    The other arrays are the running CRC32C at the borders of the spans (``[S]``) and of the members.
    """
    of_members = np.searchsorted(borders, starts, side="right") - 1
    spans = np.unique(of_members)
    # The rest of a span consists of sections: from its start to a member, from member to member, from there to its end.
    of_sections = np.concatenate((spans, of_members))
    first = np.lexsort((np.concatenate((borders[spans], ends)), of_sections))
    last = np.lexsort((np.concatenate((borders[spans + 1], starts)), of_sections))
    # int64 [sections]: length of each, then CRC32C of its bytes alone, from the running values at its ends.
    lengths = np.concatenate((borders[spans + 1], starts))[last] - np.concatenate((borders[spans], ends))[first]
    sums = np.concatenate((at_end[spans], befores))[last]
    sums = sums ^ followed_by_zeros(np.concatenate((at_start[spans], afters))[first], lengths)
    # Each section's sum is shifted by the bytes of the later sections of its span; then those of a span are combined.
    heads = np.searchsorted(of_sections[first], spans)
    behind = np.cumsum(lengths)
    totals = np.repeat(np.append(behind[heads[1:] - 1], behind[-1:]), np.diff(np.append(heads, lengths.size)))
    rest = np.full(at_end.size, -1, np.int64)
    rest[spans] = np.bitwise_xor.reduceat(followed_by_zeros(sums, totals - behind), heads)
    return rest
