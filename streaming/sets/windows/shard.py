"""List the windows of a shard, in units, from the index of its videos: ``ShardWindows``."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np

from streaming.build.batches.items.windows import BLOCK_ALIGN
from streaming.common.arguments import counted
from streaming.common.arrays import sums
from streaming.sets.windows.recording import (
    CutRecording,
    cut_units,
    most_steps,
    needs_per_unit,
    rows_of,
    touched_bytes,
)
from streaming.sets.windows.spec import WindowSpec
from streaming.sets.windows.tables import StepShape
from streaming.sets.windows.unit import aligned, frame_shape, heads_bytes, room_of, rows_room
from streaming.shards.video.table import VideoIndex, VideoStream
from streaming.types import Int64Array

_COLUMNS = ("shards", "firsts", "rows", "sizes", "read_bytes", "requests")


@dataclass(frozen=True, kw_only=True, eq=False)
class WindowUnits:
    """Units of windows, in the order of shards; int64 [U] each.

    Attributes:
        shards: The shard of each.
        firsts: Its first window, among those of the shard.
        rows: Number of its windows.
        sizes: Bytes of its memory.
        read_bytes: Bytes that it reads: groups of pictures, and tables.
        requests: Requests that this takes.
    """

    shards: Int64Array
    firsts: Int64Array
    rows: Int64Array
    sizes: Int64Array
    read_bytes: Int64Array
    requests: Int64Array

    @classmethod
    def joined(cls, parts: Sequence[WindowUnits]) -> WindowUnits:
        """Return the units of several parts, in order."""
        nothing = np.empty(0, np.int64)
        return cls(**{name: np.concatenate([nothing, *(getattr(one, name) for one in parts)]) for name in _COLUMNS})

    def to_bytes(self) -> bytes:
        """Return the numbers as bytes."""
        return np.stack([getattr(self, name) for name in _COLUMNS]).astype("<i8").tobytes()

    @classmethod
    def from_bytes(cls, data: Any) -> Self:
        """Return the inverse of :meth:`to_bytes`."""
        columns = np.frombuffer(data, "<i8").reshape(len(_COLUMNS), -1).astype(np.int64)
        return cls(**dict(zip(_COLUMNS, columns, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Recordings without windows, by the reason.

    Attributes:
        lacking: Number of those that lack a stream or a table, by its field.
        damaged: Number of those with a stream that the index could not read, by its field.
        short: Number of those without a moment that has all frames and steps.
        example: One of the damaged: its field, its key and the reason; ("", "", ""): there is none.
    """

    lacking: Mapping[str, int] = field(default_factory=dict)
    damaged: Mapping[str, int] = field(default_factory=dict)
    short: int = 0
    example: Sequence[str] = ("", "", "")

    def __add__(self, other: LeftOut) -> LeftOut:
        return LeftOut(
            lacking=Counter(self.lacking) + Counter(other.lacking),
            damaged=Counter(self.damaged) + Counter(other.damaged), short=self.short + other.short,
            example=self.example if self.example[0] else other.example,
        )  # fmt: skip

    @property
    def plain(self) -> dict[str, Any]:
        """The same as JSON."""
        return {"lacking": dict(self.lacking), "damaged": dict(self.damaged), "short": self.short,
                "example": list(self.example)}  # fmt: skip

    @property
    def num_recordings(self) -> int:
        """Number of recordings without windows."""
        return sum(self.lacking.values()) + sum(self.damaged.values()) + self.short

    def words(self, spec: WindowSpec) -> str:
        """Say which recordings have no windows, and why; "" if all have some."""
        said = [f"{counted(count, 'recording')} without {name!r}" for name, count in sorted(self.lacking.items())]
        said += [f"{counted(count, 'recording')} whose {name!r} the index could not read"
                 for name, count in sorted(self.damaged.items())]  # fmt: skip
        if self.short:
            said.append(f"{counted(self.short, 'recording')} too short for a whole window (edge={spec.edge!r})")
        if not said:
            return ""
        name, key, reason = self.example
        more = f"; the first is {name!r} of {key!r}: {reason}" if name else ""
        return f"no windows of {' and '.join(said)}{more}"


class OtherCount(NamedTuple):
    """A recording whose table has another number of steps than its first stream has frames.

    Attributes:
        key: Its key.
        steps: Number of steps.
        frames: Number of frames.
        seconds: Length of the stream.
    """

    key: str
    steps: int
    frames: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenTables:
    """Tables whose steps are taken to be frames, although recordings have other numbers of them.

    Attributes:
        counts: Number of these recordings, by table.
        examples: The first of them, by table.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    examples: Mapping[str, OtherCount] = field(default_factory=dict)

    def __add__(self, other: UnevenTables) -> UnevenTables:
        return UnevenTables(
            counts=Counter(self.counts) + Counter(other.counts), examples={**other.examples, **self.examples}
        )

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> UnevenTables:
        """Return the inverse of ``plain``."""
        examples = {name: OtherCount(*one) for name, one in plain["examples"].items()}
        return cls(counts=plain["counts"], examples=examples)

    @property
    def plain(self) -> dict[str, Any]:
        """The same as JSON."""
        return {"counts": dict(self.counts), "examples": {name: [*one] for name, one in self.examples.items()}}

    def words(self, spec: WindowSpec) -> Iterator[str]:
        """Say for each table how many recordings differ, by example, and what a clock would say."""
        for name, count in self.counts.items():
            one, stream = self.examples[name], spec.video[0].field
            rate = one.steps / one.seconds if one.seconds > 0 else 1.0
            yield (
                f"{name!r} has another number of steps than {stream!r} has frames in {counted(count, 'recording')}, "
                f"such as {one.key!r}: {counted(one.steps, 'step')}, {counted(one.frames, 'frame')}. Step i is taken "
                f"for that of frame i. If its steps have a rate of their own, write clocks={{{name!r}: {rate:.6g}}}, "
                "the steps per second (that of this recording), or name the field of their times"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardWindows:
    """The windows of a shard.

    Attributes:
        recordings: Its recordings that have windows, in order.
        starts: int64 [R + 1], the first window of each, and their number.
        units: Its units.
        left_out: Recordings without windows.
        uneven: Tables with other numbers of steps than frames.
        once_bytes: Bytes that windows need, each counted once.
        digest: Identifies the windows and units, as hex digits.
    """

    recordings: tuple[CutRecording, ...]
    starts: Int64Array
    units: WindowUnits
    left_out: LeftOut
    uneven: UnevenTables
    once_bytes: int
    digest: str

    @property
    def num_bytes(self) -> int:
        """Memory of these numbers, estimated for the streams."""
        streams = sum(60 * stream.num_packets for one in self.recordings for stream in one.streams)
        return streams + sum(one.num_bytes for one in self.recordings) + 32 * len(self.units.rows)

    def place_of(self, row: int) -> tuple[CutRecording, int]:
        """Return the recording of a window of the shard, and the number of the window in it."""
        number = int(np.searchsorted(self.starts, row, side="right")) - 1
        return self.recordings[number], row - int(self.starts[number])


@dataclass(frozen=True, kw_only=True, eq=False)
class WindowFacts:
    """What the windows of a shard follow from.

    Attributes:
        shard: Its number.
        samples: int64 [n], its recordings.
        index: The index of its videos.
        shapes: What the steps of each table are.
        carried_bytes: Returns the bytes of the fields of a recording that rows have as a whole.
        table_bytes: Returns the bytes that reading the tables of a recording takes.
        lacking: Returns the first field of tables that a recording lacks; "": none, as far as is known.
        num_steps: Returns the number of steps of each table of a recording; None: it is not known before it is read.
        key: Returns the key of a recording.
    """

    shard: int
    samples: Int64Array
    index: VideoIndex
    shapes: Sequence[StepShape]
    carried_bytes: Callable[[int], int]
    table_bytes: Callable[[int], int]
    lacking: Callable[[int], str]
    num_steps: Callable[[int], Sequence[int | None]]
    key: Callable[[int], str]


def windows_of(spec: WindowSpec, facts: WindowFacts) -> ShardWindows:
    """Return the windows of a shard."""
    by_field = [facts.index.streams(entry.field) for entry in spec.video]
    recordings, needs, left_out, uneven = list[CutRecording](), list[_Needs](), LeftOut(), UnevenTables()
    for sample in facts.samples.tolist():
        streams = [one.get(sample) for one in by_field]
        whole = tuple(one for one in streams if one is not None and one.num_frames)
        if len(whole) < len(streams):
            left_out += _why(spec, facts.index, sample, streams)
            continue
        if lacking := facts.lacking(sample):
            left_out += LeftOut(lacking={lacking: 1})
            continue
        num_steps = facts.num_steps(sample)
        uneven += _uneven(spec, facts, sample, whole[0], num_steps)
        one = _recording(spec, facts, sample, whole, num_steps)
        if not len(one.moments):
            left_out += LeftOut(short=1)
            continue
        recordings.append(one)
        needs.append(_needs(spec, facts, one))
    starts = sums([len(one.moments) for one in recordings])
    return ShardWindows(
        recordings=tuple(recordings), starts=starts, units=_units(facts.shard, recordings, starts, needs),
        left_out=left_out, uneven=uneven, once_bytes=sum(one.once_bytes for one in needs), digest=_digest(recordings),
    )  # fmt: skip


def _why(spec: WindowSpec, index: VideoIndex, sample: int, streams: Sequence[VideoStream | None]) -> LeftOut:
    """Return why a recording has no windows: the first stream that it lacks, or that is damaged."""
    field_ = next(
        entry.field for entry, one in zip(spec.video, streams, strict=True) if one is None or not one.num_frames
    )
    damage = index.damaged(field_).get(sample)
    if damage is None:
        return LeftOut(lacking={field_: 1})
    return LeftOut(damaged={field_: 1}, example=(field_, damage.key, damage.reason))


def _uneven(
    spec: WindowSpec, facts: WindowFacts, sample: int, first: VideoStream, num_steps: Sequence[int | None]
) -> UnevenTables:  # fmt: skip
    """Return the tables of a recording whose steps are taken to be frames, and have another number."""
    found = {
        entry.given: count for entry, count in zip(spec.columns, num_steps, strict=True)
        if entry.by_frame and count is not None and count != first.num_frames
    }  # fmt: skip
    if not found:
        return UnevenTables()
    key, seconds = facts.key(sample), first.end_s - float(first.times[0])
    return UnevenTables(
        counts=dict.fromkeys(found, 1),
        examples={name: OtherCount(key, count, first.num_frames, seconds) for name, count in found.items()},
    )


def _recording(
    spec: WindowSpec, facts: WindowFacts, sample: int, streams: tuple[VideoStream, ...],
    num_steps: Sequence[int | None],
) -> CutRecording:  # fmt: skip
    moments, frames = rows_of(spec, streams, num_steps)
    one = CutRecording(sample=sample, streams=streams, moments=moments, frames=frames, borders=np.zeros(1, np.int64))
    frame_bytes = [int(np.prod(frame_shape(one, spec, number))) for number in range(len(streams))]
    borders = cut_units(
        spec, streams, moments, frame_bytes=frame_bytes,
        table_bytes=facts.table_bytes(sample) if spec.tables else 0,
    )  # fmt: skip
    return CutRecording(sample=sample, streams=streams, moments=moments, frames=frames, borders=borders)


class _Needs(NamedTuple):
    """What the units of a recording take: memory, bytes and requests, int64 [U] each; and all bytes, each once."""

    sizes: Int64Array
    read_bytes: Int64Array
    requests: Int64Array
    once_bytes: int


def _needs(spec: WindowSpec, facts: WindowFacts, one: CutRecording) -> _Needs:
    """Return what the units of a recording take; their memory is what ``fill_rows`` takes at most."""
    rows, head = np.diff(one.borders), heads_bytes(facts.shapes)
    widths = [shape.width_of(entry) for entry, shape in zip(spec.columns, facts.shapes, strict=True)]
    sizes = rows_room(spec, rows, widths) + aligned(facts.carried_bytes(one.sample)) + BLOCK_ALIGN * len(spec.carry)
    of_tables = facts.table_bytes(one.sample) if spec.tables else 0
    read_bytes, requests = np.full(len(rows), of_tables), np.full(len(rows), int(bool(spec.tables)))
    once_bytes = of_tables
    for number, (entry, stream) in enumerate(zip(spec.video, one.streams, strict=True)):
        found = needs_per_unit(entry, stream, one.moments, one.borders)
        sizes = sizes + room_of(head, found.frames, int(np.prod(frame_shape(one, spec, number))))
        read_bytes, requests = read_bytes + found.num_bytes, requests + found.requests
        once_bytes += touched_bytes(entry, stream, one.moments)
    for column, shape, width in zip(spec.columns, facts.shapes, widths, strict=True):
        sizes = sizes + room_of(head, most_steps(column, one, shape.rate, width), shape.num_bytes)
    return _Needs(np.asarray(sizes, np.int64), read_bytes, requests, once_bytes)


def _units(shard: int, recordings: Sequence[CutRecording], starts: Int64Array, needs: Sequence[_Needs]) -> WindowUnits:
    firsts = [start + one.borders[:-1] for start, one in zip(starts.tolist(), recordings, strict=False)]
    nothing = np.empty(0, np.int64)
    rows = np.concatenate([nothing, *(np.diff(one.borders) for one in recordings)])
    return WindowUnits(
        shards=np.full(len(rows), shard, np.int64), firsts=np.concatenate([nothing, *firsts]), rows=rows,
        sizes=np.concatenate([nothing, *(one.sizes for one in needs)]),
        read_bytes=np.concatenate([nothing, *(one.read_bytes for one in needs)]),
        requests=np.concatenate([nothing, *(one.requests for one in needs)]),
    )  # fmt: skip


def _digest(recordings: Sequence[CutRecording]) -> str:
    """Identify windows and units: what an order and its states depend on."""
    digest = hashlib.blake2b(digest_size=16)
    for one in recordings:
        digest.update(np.int64(one.sample).tobytes() + one.moments.astype("<f8").tobytes())
        digest.update(one.borders.astype("<i8").tobytes())
    return digest.hexdigest()
