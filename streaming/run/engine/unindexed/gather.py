"""Gather samples that were read one by one into the rows of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from streaming.build.batches.rows import FieldRange, Rows
from streaming.run.engine.unindexed.samples import RawSample

_ALIGN_BYTES = 512  # as in a tar: arrays of equal size can then be gathered in one step


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The layout of a batch: the fields of its samples, end to end.

    Attributes:
        samples: The samples.
        fields: Fields by name; places relative to the start of the batch.
        num_bytes: Total size.
    """

    samples: Sequence[RawSample]
    fields: dict[str, FieldRange]
    num_bytes: int

    def place(self, memory: Any, view: memoryview, base: int) -> Rows:
        """Copy the rows into a buffer from byte ``base`` on. Return the copy."""
        fields = {
            name: FieldRange(starts=where.starts + base, sizes=where.sizes) for name, where in self.fields.items()
        }
        for name, where in fields.items():
            for sample, start in zip(self.samples, where.starts.tolist(), strict=True):
                data = sample.fields.get(name)
                if data is not None:
                    view[start : start + len(data)] = data
        return Rows(
            memory=memory,
            view=view,
            keys=[sample.key for sample in self.samples],
            urls=[sample.url for sample in self.samples],
            fields=fields,
            damage={},
        )

    def place_alone(self) -> Rows:
        """Return the rows in memory outside the arena."""
        room = bytearray(self.num_bytes)
        rows = self.place(room, memoryview(room), 0)
        return replace(rows, view=memoryview(room).toreadonly())


def pack_samples(samples: Sequence[RawSample], wanted: tuple[str, ...] | None) -> Packing:
    """Lay out the ``wanted`` fields, whether or not any sample has them.

    None: all fields that any of the samples has.
    """
    names = sorted({name for sample in samples for name in sample.fields}) if wanted is None else wanted
    # int64 [samples, fields]: -1 for a field that the sample lacks
    sizes = np.array(
        [[len(sample.fields[name]) if name in sample.fields else -1 for name in names] for sample in samples], np.int64
    ).reshape(len(samples), len(names))
    room = -(-sizes.clip(0) // _ALIGN_BYTES) * _ALIGN_BYTES
    stops = np.cumsum(room).reshape(room.shape)
    fields = {
        name: FieldRange(starts=stops[:, i] - room[:, i], sizes=sizes[:, i].copy()) for i, name in enumerate(names)
    }
    return Packing(samples=samples, fields=fields, num_bytes=int(room.sum()))


def neighbors(rows: Rows, row: int) -> Iterator[Rows]:
    """Yield the other rows of a batch, from the one after ``row`` on and around, each in memory outside the arena."""
    num_rows = len(rows.keys)
    for step in range(1, num_rows):
        yield alone(rows, (row + step) % num_rows)


def alone(rows: Rows, row: int) -> Rows:
    """Return one of the rows in memory outside the arena."""
    one = slice(row, row + 1)
    places = [(int(where.starts[row]), int(where.sizes[row])) for where in rows.fields.values()]
    begin = min((start for start, size in places if size >= 0), default=0)
    end = max((start + size for start, size in places if size >= 0), default=0)
    memory = bytes(rows.view[begin:end])
    fields = {
        name: FieldRange(starts=where.starts[one] - begin, sizes=where.sizes[one])
        for name, where in rows.fields.items()
    }
    return replace(
        rows, memory=memory, view=memoryview(memory), keys=rows.keys[one], urls=rows.urls[one], fields=fields
    )
