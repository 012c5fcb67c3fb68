"""Compute the rows of one recording, the frames and steps of each, and the units in which they are read. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from streaming.build.decode.video import SAME_S
from streaming.common.arguments import is_number
from streaming.sets.windows.spec import ColumnEntry, VideoEntry, WindowSpec
from streaming.shards.video.table import VideoStream
from streaming.types import Int64Array

Float64Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
MOST_READ_TWICE = 1.25
"""Most bytes that units read, over the bytes of the groups that a recording's rows touch: windows reach into groups of
the unit before or behind, which both read. Longer units share less."""
MOST_UNIT_BYTES = 256 << 20
"""Decoded bytes beyond which a unit is not made longer to read less twice."""


class Placed(NamedTuple):
    """Frames or steps of rows: which, and whether they are there.

    Attributes:
        numbers: int64 [n, k], the frame or step; where there is none, the nearest one.
        valid: bool [n, k], whether it is there.
    """

    numbers: Int64Array
    valid: BoolArray


@dataclass(frozen=True, kw_only=True, eq=False)
class CutRecording:
    """One sample of a shard whose streams are cut into rows.

    Attributes:
        sample: Its number in the shard.
        streams: The streams of ``WindowSpec.video``.
        moments: float64 [M], the moment of each row in seconds.
        frames: int64 [M], frame of the first stream that is shown then.
        borders: int64 [U + 1], first row of each unit, and the end.
    """

    sample: int
    streams: tuple[VideoStream, ...]
    moments: Float64Array = field(repr=False)
    frames: Int64Array = field(repr=False)
    borders: Int64Array = field(repr=False)

    @property
    def num_bytes(self) -> int:
        """Memory of these numbers, without the streams."""
        return self.moments.nbytes + self.frames.nbytes + self.borders.nbytes

    def frames_of(self, entry: int, offsets: Sequence[float], rows: Int64Array) -> Placed:
        """Return the frames of the stream ``entry`` at these offsets from the moments of rows."""
        return shown(self.streams[entry], self.moments[rows][:, None] + np.asarray(offsets))

    def steps_of(self, entry: ColumnEntry, rows: Int64Array, clock: float | Float64Array | None) -> Int64Array:
        """Return the steps of a table for rows, int64 [n, k]; some may lie outside it.

        Args:
            entry: The table.
            rows: The rows, int64 [n].
            clock: Steps per second, or the ascending time of each step, float64 [T]; None: steps are frames.
        """
        moments = self.moments[rows]
        if entry.span is not None:
            assert isinstance(clock, float), "a span has a rate"  # noqa: S101  WindowSpec checks it
            return _steps_at(clock, moments + entry.span[0])[:, None] + np.arange(steps_in(entry.span, clock))
        if entry.seconds is not None:
            times = moments[:, None] + np.asarray(entry.seconds)
            if clock is not None:
                return _steps_at(clock, times)
            placed = shown(self.streams[0], times)
            return np.where(placed.valid, placed.numbers, np.where(times < self.streams[0].times[0], -1, _BEYOND))
        steps = self.frames[rows] if clock is None else _steps_at(clock, moments)
        return steps[:, None] + np.asarray(entry.steps, np.int64)

    def reach_of(
        self, entry: ColumnEntry, rows: Int64Array, clock: float | Float64Array | None
    ) -> tuple[Int64Array, Int64Array]:
        """Return the first and the last step of a table for rows, int64 [n] each; see :meth:`steps_of`.

        They take the memory of two steps per row, however many a row has.
        """
        if entry.span is not None:
            assert isinstance(clock, float), "a span has a rate"  # noqa: S101  WindowSpec checks it
            first = _steps_at(clock, self.moments[rows] + entry.span[0])
            return first, first + steps_in(entry.span, clock) - 1
        found = self.steps_of(entry.outermost, rows, clock)
        return found[:, 0], found[:, -1]


_BEYOND = np.iinfo(np.int64).max >> 1


def steps_in(span: tuple[float, float], rate: float) -> int:
    """Return the number of steps of a span of seconds."""
    return max(1, round((span[1] - span[0]) * rate))


def shown(stream: VideoStream, seconds: Float64Array) -> Placed:
    """Return the frames of a stream that are shown at these times, of any shape."""
    flat = np.ravel(seconds)
    found = stream.frames_at(flat)
    valid = found >= 0
    nearest = np.where(flat + SAME_S < stream.times[0], 0, len(stream.times) - 1)
    numbers = np.where(valid, found, nearest)
    return Placed(numbers.reshape(seconds.shape), valid.reshape(seconds.shape))


def clipped(steps: Int64Array, count: int) -> Placed:
    """Return steps of a table of ``count`` steps."""
    return Placed(np.clip(steps, 0, count - 1), (steps >= 0) & (steps < count))


def _steps_at(clock: float | Float64Array, times: Float64Array) -> Int64Array:
    if isinstance(clock, float):
        return np.floor((times + SAME_S) * clock).astype(np.int64)
    return np.searchsorted(clock, times + SAME_S, side="right").astype(np.int64) - 1


# --- rows ---


def rows_of(
    spec: WindowSpec, streams: tuple[VideoStream, ...], num_steps: Sequence[int | None] = ()
) -> tuple[Float64Array, Int64Array]:  # fmt: skip
    """Return the moments of the rows of a recording, and the frame of the first stream that is shown at each.

    Args:
        spec: The options.
        streams: The streams.
        num_steps: With ``edge="drop"``, the number of steps of each table; None: it is not known.
    """
    first = streams[0]
    if spec.every == "frame":
        moments, frames = np.asarray(first.times, np.float64), np.arange(len(first.times))
    else:
        begin, last = float(first.times[0]), float(first.times[-1])
        count = int((max(last, first.end_s) - begin) / spec.every) + 2
        moments = begin + spec.every * np.arange(count, dtype=np.float64)
        placed = shown(first, moments)
        moments, frames = moments[placed.valid], placed.numbers[placed.valid]
    if spec.edge == "drop":
        one = CutRecording(sample=-1, streams=streams, moments=moments, frames=frames, borders=np.zeros(1, np.int64))
        whole = _are_whole(spec, one, num_steps)
        moments, frames = moments[whole], frames[whole]
    return moments, frames


def _are_whole(spec: WindowSpec, one: CutRecording, num_steps: Sequence[int | None]) -> BoolArray:
    """Return which rows have all their frames and steps, bool [M].

    A table whose number of steps is not known is taken to be as long as the first stream.
    """
    first, rows = one.streams[0], np.arange(len(one.moments))
    whole = np.ones(len(rows), np.bool_)
    for number, entry in enumerate(spec.video):
        for offset in entry.offsets:
            whole &= one.frames_of(number, (offset,), rows).valid[:, 0]
    for column, count in zip(spec.columns, num_steps, strict=True):
        rate = float(column.clock) if is_number(column.clock) else None
        if column.by_frame or (count is not None and rate is not None):
            low, high = one.reach_of(column, rows, rate)
            whole &= (low >= 0) & (high < (len(first.times) if count is None else count))
            continue
        for second in _edges(column):
            whole &= shown(first, one.moments + second).valid
    return whole


def _edges(column: ColumnEntry) -> tuple[float, ...]:
    """Return the first and last second that a table's steps reach from the moment; () if its rate is not known yet."""
    if column.seconds is not None:
        return min(column.seconds), max(column.seconds)
    if column.span is not None:
        return column.span[0], column.span[1] - 2 * SAME_S
    if isinstance(column.clock, float) and column.steps is not None:
        return min(column.steps) / column.clock, max(column.steps) / column.clock
    return ()


# --- units ---


class _Touched(NamedTuple):
    """Groups of pictures of a stream that rows need, as pairs; int64 [n] each.

    Attributes:
        ranks: The group of the first stream by which a row belongs to a unit, counted among those that have rows.
        groups: The group of this stream.
        sizes: Bytes of each group of this stream.
    """

    ranks: Int64Array
    groups: Int64Array
    sizes: Int64Array

    def read_bytes(self, each: int) -> int:
        """Return the bytes that units of ``each`` ranks read."""
        pairs = np.unique(self.ranks // each * len(self.sizes) + self.groups)
        return int(self.sizes[pairs % len(self.sizes)].sum())

    @property
    def once_bytes(self) -> int:
        """Bytes of the groups, each counted once."""
        return int(self.sizes[np.unique(self.groups)].sum())


def group_sizes(stream: VideoStream) -> Int64Array:
    """Return the bytes of each group of a stream, int64."""
    return stream.groups.byte_end - stream.groups.byte_start


def cut_units(
    spec: WindowSpec, streams: tuple[VideoStream, ...], moments: Float64Array, *, frame_bytes: Sequence[int],
    table_bytes: int,
) -> Int64Array:  # fmt: skip
    """Return the first row of each unit of a recording, and the end: int64 [U + 1].

    A unit is a run of groups of pictures of the first stream, with the rows whose earliest frames lie in them, and
    holds what these rows need of all streams. So the last rows need the first frames of the group behind, which take
    little time to decode; counted by moments, the first ones would need the last frames of the group before, and all of
    it would be decoded. A unit has as few groups as make all units together read little more than each group once.

    Args:
        spec: The options.
        streams: The streams.
        moments: float64 [M].
        frame_bytes: Bytes of a decoded frame of each stream.
        table_bytes: Bytes of tables that each unit reads.
    """
    if not len(moments):
        return np.zeros(1, np.int64)
    earliest = min(offset for entry in spec.video for offset in entry.offsets)
    first = shown(streams[0], moments + min(earliest, 0.0)).numbers
    _, ranks = np.unique(streams[0].groups_of(first), return_inverse=True)
    ranks = ranks.astype(np.int64)
    touched, decoded = [], np.zeros(int(ranks[-1]) + 1, np.int64)
    for number, (entry, stream) in enumerate(zip(spec.video, streams, strict=True)):
        numbers = shown(stream, moments[:, None] + np.asarray(entry.offsets)).numbers
        count = len(stream.times)
        at, found = np.divmod(np.unique(ranks[:, None] * count + numbers), count)
        decoded += np.bincount(at, minlength=len(decoded)) * frame_bytes[number]
        touched.append(_Touched(at, stream.groups_of(found), group_sizes(stream)))
    each = spec.groups or _groups_each(touched, decoded, table_bytes)
    firsts = np.flatnonzero(np.diff(ranks // each, prepend=-1))
    return np.append(firsts, len(moments))


def _groups_each(touched: Sequence[_Touched], decoded: Int64Array, table_bytes: int) -> int:
    """Return the number of groups of a unit; see ``cut_units``.

    Args:
        touched: The groups that rows touch.
        decoded: int64 [R], decoded bytes of the frames of each group with rows.
        table_bytes: Bytes of tables that each unit reads.
    """
    num_ranks = len(decoded)
    once = sum(one.once_bytes for one in touched) + table_bytes
    each = 1
    while each < num_ranks:
        read = sum(one.read_bytes(each) for one in touched) + -(-num_ranks // each) * table_bytes
        if read <= MOST_READ_TWICE * once:
            break
        if int(np.add.reduceat(decoded, np.arange(0, num_ranks, 2 * each)).max()) > MOST_UNIT_BYTES:
            break
        each *= 2
    return each


@dataclass(frozen=True, kw_only=True, eq=False)
class NeededFrames:
    """The frames of one stream that some rows need, each once.

    Attributes:
        frames: int64 [u], ascending.
        at: int64 [n, k], the place of each row's frames among them; ``~place`` for one that only stands in.
    """

    frames: Int64Array
    at: Int64Array

    @classmethod
    def of(cls, placed: Placed) -> NeededFrames:
        """Return the distinct frames or steps among these."""
        frames, inverse = np.unique(placed.numbers, return_inverse=True)
        places = inverse.reshape(placed.numbers.shape).astype(np.int64)
        return cls(frames=frames, at=np.where(placed.valid, places, ~places))

    @cached_property
    def places(self) -> Int64Array:
        """The place of each row's frames, whether they are there or stand in: int64 [n, k]."""
        return np.where(self.at < 0, ~self.at, self.at)


def needed_frames(recording: CutRecording, video: Sequence[VideoEntry], rows: Int64Array) -> list[NeededFrames]:
    """Return the frames of each stream that rows of a recording need."""
    return [NeededFrames.of(recording.frames_of(number, entry.offsets, rows)) for number, entry in enumerate(video)]


class UnitNeeds(NamedTuple):
    """What the units of a recording need of one stream; int64 [U] each.

    Attributes:
        frames: Number of distinct frames.
        num_bytes: Bytes of their groups of pictures.
        requests: Runs of groups whose bytes follow each other.
    """

    frames: Int64Array
    num_bytes: Int64Array
    requests: Int64Array


def needs_per_unit(entry: VideoEntry, stream: VideoStream, moments: Float64Array, borders: Int64Array) -> UnitNeeds:
    """Return what each unit of a recording needs of a stream."""
    count, num_units = len(stream.times), len(borders) - 1
    units = np.arange(num_units).repeat(np.diff(borders))
    numbers = shown(stream, moments[:, None] + np.asarray(entry.offsets)).numbers
    of_frame, frames = np.divmod(np.unique(units[:, None] * count + numbers), count)
    num_groups = len(stream.groups)
    of_group, groups = np.divmod(np.unique(of_frame * num_groups + stream.groups_of(frames)), num_groups)
    starts, ends = stream.groups.byte_start[groups], stream.groups.byte_end[groups]
    goes_on = (np.diff(of_group) == 0) & (np.diff(groups) == 1) & (ends[:-1] == starts[1:])
    begins = np.concatenate(([True], ~goes_on))[: len(groups)]
    return UnitNeeds(
        frames=np.bincount(of_frame, minlength=num_units),
        num_bytes=np.bincount(of_group, ends - starts, minlength=num_units).astype(np.int64),
        requests=np.bincount(of_group, begins, minlength=num_units).astype(np.int64),
    )  # fmt: skip


def touched_bytes(entry: VideoEntry, stream: VideoStream, moments: Float64Array) -> int:
    """Return the bytes of all groups of pictures that rows of a recording need of a stream, each counted once."""
    numbers = np.unique(shown(stream, moments[:, None] + np.asarray(entry.offsets)).numbers)
    return int(group_sizes(stream)[np.unique(stream.groups_of(numbers))].sum())


def most_steps(entry: ColumnEntry, recording: CutRecording, rate: float | None, width: int) -> Int64Array:
    """Return an upper bound on the distinct steps of a table that each unit needs, int64 [U].

    Args:
        entry: The table.
        recording: The recording.
        rate: Its steps per second; None: its clock is the frames, or is not known before it is read.
        width: Steps of a row.
    """
    firsts, lasts = recording.borders[:-1], recording.borders[1:] - 1
    each = (lasts - firsts + 1) * width
    if not entry.by_frame and rate is None:
        return each
    # Steps ascend with the moments.
    (low, _), (_, high) = (recording.reach_of(entry, rows, rate) for rows in (firsts, lasts))
    if rate is None and entry.seconds is not None:
        count = len(recording.streams[0].times)
        low, high = np.clip(low, -1, count), np.clip(high, -1, count)
    found: Int64Array = np.minimum(each, high - low + 1)
    return found
