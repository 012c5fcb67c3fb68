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

_ROW_BYTES = 256  # a row of four fields with a 40-byte key, held twice while its part is joined
_SHARE = 4  # memory is divided by this: one part of each set, and temporary arrays


@dataclass(frozen=True, slots=True)
class _Held:
    """Rows of one set and one part: those in memory, and the files of the others."""

    tables: list[pa.Table]
    files: list[str]


class KeyedRows:
    """Rows of two sets, partitioned by a hash of their keys, so that equal keys meet in one part. Used by one thread.

    At most a quarter of ``memory_bytes`` is in memory (the rest is for comparing a part of both sets), provided that
    there are at most ``num_rows`` rows of usual size.

    Args:
        num_rows: Expected number of rows.
        memory_bytes: Memory for them.
        folder: Folder of the temporary files.
        name: Prefix of their names.
    """

    def __init__(self, num_rows: int, *, memory_bytes: int, folder: str, name: str) -> None:
        self._limit_bytes = memory_bytes // _SHARE
        self.num_parts = max(1, -(-num_rows * _ROW_BYTES // max(1, self._limit_bytes)))
        self._held = {(side, part): _Held([], []) for side in (0, 1) for part in range(self.num_parts)}
        self._folder, self._name = folder, name
        self._held_bytes = self._num_files = 0
        self.num_rows = 0
        """Number of rows added so far."""

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
