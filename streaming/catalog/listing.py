"""What listing and reading an index found, as bytes: for ranks that did not look themselves."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from streaming.index.chunk_table import ChunkTable, shard_rows, shards_of_rows

_COLUMNS = ("shard", "first_sample", "num_samples", "byte_start", "byte_end", "crc32c")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Shards as they were found.

    Attributes:
        urls: The shards.
        table: Their chunk table, or None if there is no index.
        sizes: Bytes of each shard, where there is no index.
        missing_index: Why there is none; "" if there is one.
    """

    urls: tuple[str, ...]
    table: ChunkTable | None
    sizes: tuple[int, ...] = ()
    missing_index: str = ""

    def to_bytes(self) -> bytes:
        """All of it; the columns as they lie in memory, little-endian."""
        head: dict[str, Any] = {"urls": self.urls, "sizes": self.sizes, "missing_index": self.missing_index}
        columns = []
        if self.table is not None:
            head["shards"] = shard_rows(self.table.shards)
            head["chunks"] = self.table.num_chunks
            columns = [np.ascontiguousarray(getattr(self.table, name)) for name in _COLUMNS]
            head["types"] = [column.dtype.str for column in columns]
        text = json.dumps(head).encode()
        return b"".join([len(text).to_bytes(8, "little"), text, *(column.tobytes() for column in columns)])

    @classmethod
    def from_bytes(cls, data: bytes) -> Found:
        """The inverse."""
        start = 8 + int.from_bytes(data[:8], "little")
        head = json.loads(data[8:start])
        table = None
        if "shards" in head:
            columns = {}
            for name, dtype in zip(_COLUMNS, head["types"], strict=True):
                columns[name] = np.frombuffer(data, dtype, head["chunks"], start)
                start += columns[name].nbytes
            table = ChunkTable(shards=shards_of_rows(head["shards"]), **columns)
        return cls(
            urls=tuple(head["urls"]), table=table, sizes=tuple(head["sizes"]), missing_index=head["missing_index"]
        )
