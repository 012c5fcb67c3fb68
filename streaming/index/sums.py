"""Which bytes of a shard have a checksum of their own, and whose samples they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from streaming.index.samples import SampleTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """Bytes of a shard with one checksum.

    Attributes:
        start: First byte.
        end: One past the last.
        crc32c: Their CRC32C.
        first: First sample of the shard that is bad if they differ.
        stop: One past the last such sample.
    """

    start: int
    end: int
    crc32c: int
    first: int
    stop: int


def sums_of(samples: SampleTable, first: int, stop: int) -> tuple[Sum, ...]:
    """The sums by which samples ``[first, stop)`` are checked, in order of their bytes.

    Empty where the index has no spans, or where these samples are not whole spans.
    """
    low, high = np.searchsorted(samples.span_starts, [first, stop]).tolist()
    borders = samples.span_starts[low : high + 1]
    if not samples.num_spans or borders.tolist()[:: max(1, len(borders) - 1)] != [first, stop]:
        return ()
    ends = samples.record_starts[borders].tolist()
    rows, sums = borders.tolist(), samples.span_crc32c[low:high].tolist()
    return tuple(
        Sum(start=ends[i], end=ends[i + 1], crc32c=crc, first=rows[i], stop=rows[i + 1]) for i, crc in enumerate(sums)
    )
