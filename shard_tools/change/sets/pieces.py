"""Read any samples of a shard by its index, in verified pieces: spans, or chunks if the index has no spans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from streaming.shards.fetch.layout import UnitLayout
from streaming.shards.fetch.read import FetchRange, ShardFacts, fetch_range
from streaming.shards.index.sample_table import SampleTable
from streaming.storage import Storage
from streaming.types import Int64Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardPieces:
    """The ``P`` pieces of one shard of ``n`` samples: runs of samples whose bytes have a checksum.

    Attributes:
        url: The shard.
        size_bytes: Its size as a file.
        bounds: int64 ``[P + 1]``, first sample of each piece, and ``n``.
        borders: int64 ``[P + 1]``, byte where each piece begins, and where the last one ends.
        crc32c: uint32 ``[P]``, of the bytes of each piece.
    """

    url: str
    size_bytes: int
    bounds: Int64Array
    borders: Int64Array
    crc32c: npt.NDArray[np.uint32]

    @classmethod
    def of(cls, url: str, table: SampleTable) -> ShardPieces:
        """Return the pieces of the shard at ``url``, which ``table`` describes."""
        chunks = table.chunks
        spans = table.num_spans > 0
        bounds = table.span_starts if spans else np.append(chunks.first_sample, table.num_samples)
        return cls(
            url=url,
            size_bytes=table.shard.size_bytes,
            bounds=bounds,
            borders=table.record_starts[bounds],
            crc32c=table.span_crc32c if spans else chunks.crc32c,
        )

    @property
    def num_samples(self) -> int:
        """Number of samples of the shard."""
        return int(self.bounds[-1])

    def piece_of(self, rows: Int64Array) -> Int64Array:
        """Return the piece of each of these samples: int64, the shape of ``rows``."""
        return np.searchsorted(self.bounds, rows, side="right").astype(np.int64) - 1

    def around(self, rows: Int64Array) -> ShardPieces:
        """Keep only the pieces that hold these samples; each gap between them becomes one piece that cannot be read."""
        held = np.unique(self.piece_of(rows))
        kept = np.unique(np.concatenate([held, held + 1, [0, self.bounds.size - 1]]))
        crc32c = np.zeros(kept.size - 1, np.uint32)
        crc32c[np.searchsorted(kept, held)] = self.crc32c[held]
        return replace(self, bounds=self.bounds[kept], borders=self.borders[kept], crc32c=crc32c)

    def range(self, first: int, stop: int) -> FetchRange:
        """Return the bytes of pieces ``[first, stop)``."""
        borders = self.borders[first : stop + 1]
        ends = (borders[1:] - borders[0]).tolist()
        return FetchRange(
            url=self.url,
            byte_start=int(borders[0]),
            byte_end=int(borders[-1]),
            first_sample=int(self.bounds[first]),
            num_samples=int(self.bounds[stop] - self.bounds[first]),
            crc32c=None,
            shard_bytes=self.size_bytes,
            spans=tuple(zip(ends, self.crc32c[first:stop].tolist(), strict=True)),
        )


def read_pieces(
    storage: Storage, wanted: FetchRange, samples: Callable[[], SampleTable | None]
) -> tuple[bytearray, UnitLayout]:
    """Return the bytes of ``wanted`` and the layout of fields in them; the layout lists damaged samples.

    Args:
        storage: Store of the shard.
        wanted: The byte range.
        samples: Loads the shard's sample table, to find out which samples are damaged.

    Raises:
        ChecksumError: Bytes are damaged, and the index does not show which samples.
        TarError, IndexMismatchError, StorageError: As for :func:`streaming.shards.fetch.read.fetch_range`.
    """
    buffer = bytearray(wanted.num_bytes)
    with memoryview(buffer) as out:
        layout = fetch_range(storage, wanted, out, known=ShardFacts(samples=samples, gap_bytes=0))
    return buffer, layout
