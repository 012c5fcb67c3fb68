"""What the engine asks of a data set."""

from __future__ import annotations

from typing import Protocol

from streaming.fetch.layout import UnitLayout
from streaming.fetch.read import FetchRange
from streaming.index.sample_table import SampleLocation
from streaming.types import Int64Array


class Source(Protocol):
    """The data set, as the pipeline sees it. Thread-safe."""

    def urls_of(self, chunk_ids: Int64Array) -> list[str]:
        """URL of the shard of each chunk."""

    def chunk(self, chunk_id: int) -> FetchRange:
        """The bytes of a whole chunk."""

    def fetch(self, wanted: FetchRange, out: memoryview) -> UnitLayout:
        """Fill ``out`` and take it apart."""

    def locate(self, chunk_id: int, offset: int) -> SampleLocation | None:
        """Where a sample of a chunk lies in its shard; None if no sample table says it."""
