"""Read the tables that windows cut: arrays, columns of Parquet tables, and sounds, as steps along the first axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from streaming.build.decode import npy
from streaming.build.decode.sound import Sound
from streaming.common.arguments import is_number
from streaming.errors import DecodeError
from streaming.sets.windows.recording import Float64Array, steps_in
from streaming.sets.windows.spec import ColumnEntry, place_of
from streaming.shards.index.columns import number_column

Array = npt.NDArray[Any]
_SOUND = Sound(details=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class StepTable:
    """The steps of one table of a recording.

    Attributes:
        steps: [T, …], numbers in native byte order.
        clock: Steps per second, or the ascending time of each step; None: steps are frames.
    """

    steps: Array
    clock: float | Float64Array | None

    @property
    def shape(self) -> StepShape:
        """What a step is."""
        rate = self.clock if isinstance(self.clock, float) else None
        return StepShape(dtype=self.steps.dtype, shape=self.steps.shape[1:], rate=rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What each step of a table is, the same in all recordings of a set.

    Attributes:
        dtype: Type of its numbers.
        shape: Shape of a step.
        rate: Steps per second; None: its clock is the frames, or a table of times.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    rate: float | None

    @property
    def num_bytes(self) -> int:
        """Bytes of a step."""
        return int(self.dtype.itemsize * np.prod(self.shape, dtype=np.int64))

    def width_of(self, entry: ColumnEntry) -> int:
        """Return the number of steps of a row."""
        if entry.span is not None:
            assert self.rate is not None, "a span has a rate"  # noqa: S101  WindowSpec checks it
            return steps_in(entry.span, self.rate)
        return len(entry.steps or entry.seconds or ())

    @property
    def words(self) -> str:
        """The shape for messages."""
        at = "" if self.rate is None else f" at {self.rate:g} a second"
        return f"{self.dtype}{list(self.shape)}{at}"


def table_of(entry: ColumnEntry, data: Mapping[str, bytes], where: str) -> StepTable:
    """Return the table of a recording.

    Args:
        entry: The table.
        data: The bytes of fields of the recording.
        where: The recording, for messages.

    Raises:
        DecodeError: The recording lacks the table, or it cannot be read.
    """
    steps, rate = _array(entry.field, entry.column, data, where)
    clock: float | Float64Array | None = rate
    if is_number(entry.clock):
        clock = float(entry.clock)
    elif entry.clock is not None:
        clock = _times(entry, data, len(steps), where)
    return StepTable(steps=steps, clock=clock)


def _times(entry: ColumnEntry, data: Mapping[str, bytes], count: int, where: str) -> Float64Array:
    clock = str(entry.clock)
    times, _ = _array(*place_of(clock), data, where)
    if times.ndim != 1 or times.dtype.kind not in "iuf" or len(times) != count:
        raise DecodeError(
            f"{where}: {clock!r}, the clock of {entry.given!r}: expected the time in seconds of each of its "
            f"{count} steps, got {times.dtype}{list(times.shape)}"
        )
    seconds = times.astype(np.float64)
    if not np.isfinite(seconds).all() or (np.diff(seconds) < 0).any():
        raise DecodeError(f"{where}: {clock!r}, the clock of {entry.given!r}: its times do not ascend")
    return seconds


def _array(field: str, column: str, data: Mapping[str, bytes], where: str) -> tuple[Array, float | None]:
    """Return the steps of a field, and their rate if it is a sound."""
    if field not in data:
        raise DecodeError(f"{where}: it has no {field!r}")
    rate = None
    try:
        if column:
            found = number_column(data[field], column)
        elif field.lower().endswith("npy"):
            found = npy(data[field])
        else:
            sound: Any = _SOUND(data[field])
            found, rate = sound["samples"].T, float(sound["rate"])
    except Exception as error:
        raise DecodeError(f"{where}: {field!r}: {error}") from error
    if found.ndim < 1 or not len(found):
        raise DecodeError(f"{where}: {field!r}: expected steps along the first axis, got {list(found.shape)}")
    if found.dtype.kind not in "biufc":
        raise DecodeError(f"{where}: {field!r}: expected numbers, got {found.dtype}")
    return np.ascontiguousarray(found, found.dtype.newbyteorder("=")), rate


def check_count(entry: ColumnEntry, found: StepTable, planned: int | None, where: str) -> None:
    """Refuse a table with another number of steps than its size says: rows at its edges were chosen by that number.

    Args:
        entry: The table.
        found: The table as it was read.
        planned: The number of steps by which rows were chosen; None: none.
        where: The recording, for messages.

    Raises:
        DecodeError: It has another number.
    """
    if planned is not None and planned != len(found.steps):
        raise DecodeError(
            f"{where}: {entry.given!r} has {len(found.steps)} steps, and by its size {planned}, since its file has "
            'another head than that of the first recording of the set; write all recordings alike, or give edge="pad"'
        )


def check_step(entry: ColumnEntry, found: StepTable, expected: StepShape, where: str) -> None:
    """Refuse a table whose steps differ from those of the set's first recording: they would not form a batch.

    Raises:
        DecodeError: They differ.
    """
    if found.shape != expected:
        raise DecodeError(
            f"{where}: {entry.given!r} has steps of {found.shape.words}, and the first recording of the set has "
            f"{expected.words}; write all recordings alike"
        )
