"""Keep the rows of both sets by key: in memory while there is room, then in temporary files."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from pyarrow import feather

from shard_tools.look.diff.rows import KEY, joined
from streaming.common.arrays import rows_by
from streaming.shards.index.columns import stable_hash

_ROW_BYTES = 256  # of a row of four fields with a key of 40 bytes, twice: while its part is put together
_SHARE = 4  # of the memory: a part of each set, and what comparing them takes


@dataclass(frozen=True, slots=True)
class _Held:
    """Rows of one set and one part: in memory, and the files of others."""

    tables: list[pa.Table]
    files: list[str]


class KeyedRows:
    """Rows of two sets, cut into parts by a hash of their keys: equal keys meet in one part. Used by one thread.

    In memory are at most a quarter of ``memory_bytes`` (the rest is for a part of both sets while it is compared), if
    there are no more rows than ``num_rows`` and they are of usual size.

    Args:
        num_rows: Rows that are expected.
        memory_bytes: Memory for them.
        folder: Where the temporary files go.
        name: Begins their names.
    """

    def __init__(self, num_rows: int, *, memory_bytes: int, folder: str, name: str) -> None:
        self._limit_bytes = memory_bytes // _SHARE
        self.num_parts = max(1, -(-num_rows * _ROW_BYTES // max(1, self._limit_bytes)))
        self._held = {(side, part): _Held([], []) for side in (0, 1) for part in range(self.num_parts)}
        self._folder, self._name = folder, name
        self._held_bytes = self._num_files = 0
        self.num_rows = 0
        """Rows added so far."""

    def add(self, side: int, rows: pa.Table) -> None:
        """Add rows of set 0 or 1."""
        if not rows.num_rows:
            return
        self._held_bytes += rows.nbytes
        self.num_rows += rows.num_rows
        if self.num_parts == 1:
            self._held[side, 0].tables.append(rows)
        else:
            hashes = stable_hash(rows.column(KEY).combine_chunks()).to_numpy(zero_copy_only=False)
            for part, chosen in rows_by((hashes % self.num_parts).astype(np.int64)):
                self._held[side, part].tables.append(rows.take(pa.array(chosen)))
        if self._held_bytes > self._limit_bytes:
            self._write()

    def _write(self) -> None:
        for held in self._held.values():
            if held.tables:
                path = os.path.join(self._folder, f"{self._name}-{self._num_files}.arrow")
                feather.write_feather(joined(held.tables), path, compression="lz4")
                held.tables.clear()
                held.files.append(path)
                self._num_files += 1
        self._held_bytes = 0

    def part(self, number: int) -> tuple[pa.Table, pa.Table]:
        """Return the rows of one part of both sets, and forget them."""
        return self._taken(0, number), self._taken(1, number)

    def _taken(self, side: int, number: int) -> pa.Table:
        held = self._held.pop((side, number))
        table = joined([*(feather.read_table(path, memory_map=False) for path in held.files), *held.tables])
        for path in held.files:
            os.unlink(path)
        return table
