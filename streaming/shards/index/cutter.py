"""Cut the records of a shard into chunks: THE rule, shared by the writer and the indexer.

A chunk closes after the record with which it holds 4 MiB, or 1 MiB and 256 samples. So chunks of large records are
about 4 MiB, one fast ranged GET. Chunks of small records are about 1 MiB, because a shuffle over many small chunks
mixes better for the same memory (design, section 4). And a request never costs more than its bytes. The rule depends
only on the records before the cut: the same records always give the same chunks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from streaming.errors import ConfigError
from streaming.types import Int64Array

TARGET_BYTES = 4 << 20
MIN_BYTES = 1 << 20
MIN_SAMPLES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRule:
    """Close a chunk at ``target_bytes``, or at ``min_bytes`` once it has ``min_samples``.

    Raises:
        ConfigError: A number is not positive, or ``min_bytes`` exceeds ``target_bytes``.
    """

    target_bytes: int = TARGET_BYTES
    min_bytes: int = MIN_BYTES
    min_samples: int = MIN_SAMPLES

    def __post_init__(self) -> None:
        if min(self.target_bytes, self.min_bytes, self.min_samples) < 1 or self.min_bytes > self.target_bytes:
            raise ConfigError(f"chunk rule: expected 1 <= min_bytes <= target_bytes and min_samples >= 1, got {self}")

    def closes(self, num_bytes: int, num_samples: int) -> bool:
        """Return whether a chunk of this size is full."""
        return num_bytes >= self.target_bytes or (num_bytes >= self.min_bytes and num_samples >= self.min_samples)


DEFAULT_RULE = ChunkRule()


class GivenCutter:
    """Cut a shard's records where those of another shard are cut. One cutter per shard; not thread-safe.

    Args:
        ends: Number of the sample behind each chunk.
    """

    def __init__(self, ends: Iterable[int]) -> None:
        self._ends = frozenset(ends)
        self._num_samples = 0

    def add(self, record_bytes: int) -> bool:  # noqa: ARG002  as ChunkCutter has it
        """Add one record; True if a chunk closes after it."""
        self._num_samples += 1
        return self._num_samples in self._ends


class ChunkCutter:
    """Cut a shard's records into chunks as they arrive. One cutter per shard; not thread-safe."""

    def __init__(self, rule: ChunkRule = DEFAULT_RULE) -> None:
        self.rule = rule
        self.num_bytes = 0
        """Number of bytes in the open chunk."""
        self.num_samples = 0
        """Number of samples in the open chunk."""

    def add(self, record_bytes: int) -> bool:
        """Add one record of this size (including headers and padding). Return whether the chunk closes after it."""
        self.num_bytes += record_bytes
        self.num_samples += 1
        if not self.rule.closes(self.num_bytes, self.num_samples):
            return False
        self.num_bytes = self.num_samples = 0
        return True

    def extend(self, record_starts: Int64Array) -> Int64Array:
        """Add the records ``[record_starts[i], record_starts[i + 1])``: ``add`` for many.

        Args:
            record_starts: int64 ``[n + 1]``, increasing.

        Returns:
            int64, increasing: contains ``i`` if a chunk closes after record ``i - 1``, before record ``i``.
        """
        num_records = record_starts.size - 1
        cuts: list[int] = []
        at = 0
        while at < num_records:
            start = int(record_starts[at]) - self.num_bytes
            full = int(np.searchsorted(record_starts, start + self.rule.target_bytes))
            enough = int(np.searchsorted(record_starts, start + self.rule.min_bytes))
            cut = max(at + 1, min(full, max(enough, at + self.rule.min_samples - self.num_samples)))
            if cut > num_records:
                self.num_bytes = int(record_starts[-1]) - start
                self.num_samples += num_records - at
                break
            cuts.append(cut)
            self.num_bytes = self.num_samples = 0
            at = cut
        return np.array(cuts, np.int64)
