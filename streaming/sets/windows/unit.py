"""Lay out the rows of a unit in memory, and fill it: decoded frames and steps once each, and which a row has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from streaming.build.batches.items.windows import BLOCK_ALIGN, MOMENT, block_head, indices_of, moment_bytes, moments
from streaming.errors import DataError, DecodeError
from streaming.sets.windows.recording import CutRecording, NeededFrames, clipped, needed_frames
from streaming.sets.windows.spec import ColumnEntry, WindowSpec
from streaming.sets.windows.tables import StepShape, StepTable
from streaming.shards.fetch.layout import UnitLayout
from streaming.types import Int64Array

ReadGroups: TypeAlias = Callable[[int, Int64Array, Int64Array], "Sequence[GroupFrames]"]
"""Returns the frames of groups of a stream, given the number of the stream, the groups, and the ascending frames."""


class GroupFrames(NamedTuple):
    """Frames of one group of pictures.

    Attributes:
        frames: int64 [u], their numbers.
        pixels: uint8 [u, H, W, 3]; or the error of the group, which is damaged.
    """

    frames: Int64Array
    pixels: npt.NDArray[np.uint8] | DataError


def frame_shape(recording: CutRecording, spec: WindowSpec, entry: int) -> tuple[int, int, int]:
    """Return the shape of a frame of the stream ``entry``, as rows have it."""
    stream, size = recording.streams[entry], spec.sizes[entry]
    if size is not None:
        return (*size, 3)
    height, width = (stream.width, stream.height) if stream.orientation > 4 else (stream.height, stream.width)
    return height, width, 3


def aligned(num_bytes: Any) -> Any:
    """Return the memory that blocks of these sizes take."""
    return -(-num_bytes // BLOCK_ALIGN) * BLOCK_ALIGN


def room_of(head_bytes: int, items: Any, item_bytes: int) -> Any:
    """Return the memory of blocks of ``items`` frames or steps each."""
    return aligned(head_bytes + items * item_bytes)


def rows_room(spec: WindowSpec, rows: Any, widths: Sequence[int]) -> Any:
    """Return the memory of what rows have besides frames and steps: moments, and the places of both."""
    num_frames, num_steps = sum(len(one.offsets) for one in spec.video), sum(widths)
    entries = [len(one.offsets) for one in spec.video] + list(widths)
    return aligned(rows * moment_bytes(num_frames, num_steps)) + sum(aligned(rows * 8 * count) for count in entries)


@dataclass(kw_only=True)
class _Memory:
    """Memory that is filled from its beginning, block by block."""

    out: memoryview
    used: int = 0
    columns: dict[str, tuple[Int64Array, Int64Array]] = field(default_factory=dict)

    def block(self, shape: tuple[int, ...], dtype: npt.DTypeLike, *, headed: bool) -> tuple[npt.NDArray[Any], int, int]:
        """Return an array in the next free memory, and where it begins and how long it is with its head."""
        head = block_head(shape, dtype) if headed else b""
        start, found = self.used, np.dtype(dtype)
        num_bytes = len(head) + int(np.prod(shape, dtype=np.int64)) * found.itemsize
        if start + num_bytes > len(self.out):
            raise AssertionError(f"a unit needs {start + num_bytes} bytes of {len(self.out)}")
        self.out[start : start + len(head)] = head
        self.used = min(start + aligned(num_bytes), len(self.out))
        data = np.frombuffer(self.out[start + len(head) : start + num_bytes], found).reshape(shape)
        return data, start, num_bytes

    def add(self, name: str, starts: Any, sizes: Any, count: int) -> None:
        """Enter a field of all rows."""
        self.columns[name] = (
            np.broadcast_to(np.asarray(starts, np.int64), count),
            np.broadcast_to(np.asarray(sizes, np.int64), count),
        )

    def add_each(self, name: str, values: npt.NDArray[Any]) -> None:
        """Enter a field whose values differ from row to row: [n, …]."""
        data, start, _ = self.block(values.shape, values.dtype, headed=False)
        data[...] = values
        each = values.nbytes // max(len(values), 1)
        self.add(name, start + np.arange(len(values)) * each, each, len(values))


def fill_rows(
    spec: WindowSpec, recording: CutRecording, rows: Int64Array, out: memoryview, *, key: str,
    tables: Sequence[StepTable], carried: Mapping[str, bytes], read: ReadGroups, where: str,
) -> UnitLayout:  # fmt: skip
    """Fill ``out`` with rows of a recording, and return their places.

    Args:
        spec: The options.
        recording: The recording.
        rows: int64 [n], its rows.
        out: Memory of at least the size that the plan reserved.
        key: Key of the recording.
        tables: The tables of ``spec.columns``.
        carried: Bytes of the fields that rows have as a whole, by field.
        read: Reads frames.
        where: The recording, for messages.
    """
    memory, damage = _Memory(out=out), dict[int, DataError]()
    frames = needed_frames(recording, spec.video, rows)
    steps = [_steps(entry, recording, rows, table) for entry, table in zip(spec.columns, tables, strict=True)]
    if spec.edge == "drop":
        damage |= _reaching_out(spec, steps, tables, where)
    there = [one.at >= 0 for one in frames], [one.at >= 0 for one in steps]
    memory.add_each(MOMENT, moments(recording.moments[rows], *there))
    for column, needed, table in zip(spec.columns, steps, tables, strict=True):
        memory.add_each(indices_of(column.name), needed.at)
        data, start, size = memory.block((len(needed.frames), *table.steps.shape[1:]), table.steps.dtype, headed=True)
        data[...] = table.steps[needed.frames]
        memory.add(column.name, start, size, len(rows))
    for number, (entry, needed) in enumerate(zip(spec.video, frames, strict=True)):
        memory.add_each(indices_of(entry.name), needed.at)
        data, start, size = memory.block(
            (len(needed.frames), *frame_shape(recording, spec, number)), np.uint8, headed=True
        )
        memory.add(entry.name, start, size, len(rows))
        groups = np.unique(recording.streams[number].groups_of(needed.frames))
        for found in read(number, groups, needed.frames):
            places = np.searchsorted(needed.frames, found.frames)
            if isinstance(found.pixels, DataError):
                lost = np.isin(needed.places, places).any(axis=1)
                damage.update(dict.fromkeys(np.flatnonzero(lost).tolist(), found.pixels))
            else:
                data[places] = found.pixels
    for name, part in spec.carry:
        if part not in carried:
            memory.add(name, -1, -1, len(rows))
            continue
        value = np.frombuffer(carried[part], np.uint8)
        data, start, size = memory.block(value.shape, np.uint8, headed=False)
        data[...] = value
        memory.add(name, start, size, len(rows))
    return UnitLayout(
        keys=[key] * len(rows), fields=tuple(memory.columns), num_bytes=memory.used, damage=damage,
        starts=np.stack([starts for starts, _ in memory.columns.values()], axis=1),
        sizes=np.stack([sizes for _, sizes in memory.columns.values()], axis=1),
    )  # fmt: skip


def _steps(entry: ColumnEntry, recording: CutRecording, rows: Int64Array, table: StepTable) -> NeededFrames:
    return NeededFrames.of(clipped(recording.steps_of(entry, rows, table.clock), len(table.steps)))


def _reaching_out(
    spec: WindowSpec, steps: Sequence[NeededFrames], tables: Sequence[StepTable], where: str
) -> dict[int, DataError]:
    """Return the rows that need steps which a table lacks, although they lie within the recording."""
    found: dict[int, DataError] = {}
    for entry, needed, table in zip(spec.columns, steps, tables, strict=True):
        for row in np.flatnonzero((needed.at < 0).any(axis=1)).tolist():
            found.setdefault(row, DecodeError(
                f"{where}: {entry.given!r} ends before its video: it has {len(table.steps)} steps, and a row needs "
                'others. Write edge="pad", which repeats the last one and marks it, or give its clocks='
            ))  # fmt: skip
    return found


def carried_of(spec: WindowSpec, data: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the fields among ``data`` that rows have as a whole."""
    return {part: data[part] for _, part in spec.carry if part in data}


def heads_bytes(shapes: Sequence[StepShape]) -> int:
    """Return an upper bound on the bytes of one block's head."""
    ranks = [4, *(1 + len(one.shape) for one in shapes)]
    return max(len(block_head((2**40,) * rank, np.float64)) for rank in ranks)
