"""Choose substitutes for samples that cannot be delivered: which, in what order, and where their bytes come from.

The choice depends on the plan's order and on the damage in the store, so it is the same for every world size. Bytes
come from the arena if they are there, otherwise from the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Self

import numpy as np

from streaming.build.batches.rows import Lend, Rows
from streaming.build.decode import ReadDistant
from streaming.errors import DataError, IndexFormatError
from streaming.order.plan.plan import Plan
from streaming.run.engine.memory.chunk_store import ChunkStore, Unit
from streaming.run.engine.memory.row_table import RowTable
from streaming.run.engine.source import Source
from streaming.types import Int64Array


class Substitutes:
    """The substitutes for the rows of one batch. A context manager that releases what it holds. For one thread.

    It keeps one chunk outside the arena: the latest one that it had to fetch.

    Args:
        plan: The plan.
        chunk_starts: int64 [C + 1], number of the first sample of each chunk in the dataset; None: rows are not
            samples, and the samples that they are made of have no numbers.
        source: The dataset.
        store: Contents of the arena.
        fields: Fields to read; None: all.
        narrowed: Removes from rows the fields that their sources do not read.
        read_distant: Reads distant fields; None: there are none.
    """

    def __init__(
        self, plan: Plan, chunk_starts: Int64Array | None, source: Source, store: ChunkStore,
        fields: tuple[str, ...] | None, narrowed: Callable[[Rows], Rows], read_distant: ReadDistant | None = None,
    ) -> None:  # fmt: skip
        self._plan = plan
        self._chunk_starts = chunk_starts
        self._source = source
        self._store = store
        self._fields = fields
        self._narrowed = narrowed
        self._read_distant = read_distant
        self._held: dict[int, list[Unit]] = {}
        self._apart: tuple[int, _Apart | None] = (-1, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        held = [unit for units in self._held.values() for unit in units]
        if held:
            with self._store.changed:
                for unit in held:  # Invariant: each was held once, so the store's counts are restored
                    self._store.release(unit)
                self._store.changed.notify_all()

    def of(self, chunk: int, offset: int, pass_number: int) -> Iterator[Rows]:
        """Yield single rows to try instead of a sample: those after it in its chunk, then those of earlier chunks.

        If rows are made of several samples: the samples of the rows after it, then those of the rows of earlier chunks.
        """
        order = self._plan.order(pass_number)
        size = int(self._plan.chunk_samples[chunk])
        yield from self._rows(chunk, (offset + np.arange(1, size)) % size, pass_number)
        for other in order.chunks_before(chunk):
            yield from self._rows(other, np.arange(self._plan.chunk_samples[other]), pass_number)

    def any(self) -> Iterator[Rows]:
        """Yield readable rows of the epoch, as a template for a batch without rows."""
        for chunk in range(len(self._plan.chunk_samples)):
            yield from self._rows(chunk, np.arange(self._plan.chunk_samples[chunk]), 0)

    def _rows(self, chunk: int, offsets: Int64Array, pass_number: int) -> Iterator[Rows]:
        """Yield the intact samples of a chunk at these offsets, as single rows."""
        wanted = self._source.chunk(chunk)
        units = self._hold(chunk)
        if any(unit.damage is not None and unit.wanted.key == wanted.key for unit in units):
            return
        arena, table = self._store.arena, self._store.rows
        lead = wanted.lead
        chunk_ids, passes = np.full_like(offsets, chunk), np.full_like(offsets, pass_number)
        inside = self._source.rows.packs(chunk_ids, offsets, passes, self._plan.settings.seed).samples
        numbers = None if self._chunk_starts is None else self._chunk_starts[chunk] + offsets
        for at, place in enumerate(inside.tolist()):
            number = None if numbers is None else numbers[at : at + 1]
            sample = wanted.first_sample + lead + place
            unit = next((unit for unit in units if _has(unit, sample)), None)
            if unit is not None:
                row = unit.first_row + sample - unit.wanted.first_sample
                found = self._row(table, row, chunk, number, arena.memory, arena.view, self._store.lender.lend)
            else:
                apart = self._fetch_apart(chunk)
                if apart is None:
                    return
                found = self._row(
                    apart.rows,
                    apart.first_row + lead + place,
                    chunk,
                    number,
                    apart.data,
                    memoryview(apart.data),
                )
            if found is not None:
                yield found

    def _row(
        self, table: RowTable, row: int, chunk: int, number: Int64Array | None, memory: object, view: memoryview,
        lend: Lend | None = None,
    ) -> Rows | None:  # fmt: skip
        where = np.array([row])
        if table.damage(where):
            return None
        keys, fields = table.select(where, self._fields)
        chunk_ids = np.array([chunk])
        sources = self._source.source_of(chunk_ids) if self._source.names else None
        rows = Rows(memory=memory, view=view, keys=keys, urls=self._source.urls_of(chunk_ids), fields=fields,
                    damage={}, numbers=number, sources=sources, lend=lend)  # fmt: skip
        if self._read_distant is not None:
            rows = replace(rows, chunk_ids=chunk_ids, read_distant=self._read_distant)
        return self._narrowed(rows)

    def _hold(self, chunk: int) -> list[Unit]:
        if chunk not in self._held:
            wanted = self._source.chunk(chunk)
            with self._store.changed:
                # The units are held, by count, until this object releases them.
                self._held[chunk] = self._store.hold(wanted)
        return self._held[chunk]

    def _fetch_apart(self, chunk: int) -> _Apart | None:
        if self._apart[0] != chunk:
            self._apart = (-1, None)  # free its memory before the next fetch
            self._apart = (chunk, self._read(chunk))
        return self._apart[1]

    def _read(self, chunk: int) -> _Apart | None:
        wanted = self._source.chunk(chunk)
        memory = bytearray(wanted.num_bytes)
        rows = RowTable()
        try:
            with memoryview(memory) as out:
                layout = self._source.fetch_unit(wanted, out).apart(out)
                data = bytes(out[: layout.num_bytes])
            first_row = rows.add(layout, 0)
        except IndexFormatError:
            raise  # of the index, not of the chunk's bytes
        except DataError:
            return None
        return _Apart(data, rows, first_row)


class _Apart:
    """A chunk in memory outside the arena."""

    def __init__(self, data: bytes, rows: RowTable, first_row: int) -> None:
        self.data = data
        self.rows = rows
        self.first_row = first_row


def _has(unit: Unit, sample: int) -> bool:
    """Return whether a unit holds a sample of the shard, in bytes that a checksum has verified."""
    if unit.first_row < 0:
        return False
    return 0 <= sample - unit.wanted.first_sample < unit.wanted.num_samples
