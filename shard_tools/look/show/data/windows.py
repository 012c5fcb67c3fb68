"""Show windows: their own frames, by camera and offset, and the steps of their columns as numbers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np

from shard_tools.look.show.base.page import Content, Query, address
from shard_tools.look.show.base.subject import Subject
from shard_tools.look.show.data.values import workers_of
from shard_tools.look.show.decoding.window import column_facts, group_facts
from shard_tools.look.show.decoding.workers import MOST_MEDIA_BYTES, Decoded, DecodingWorkers
from streaming.common.arguments import counted, format_bytes
from streaming.errors import ConfigError, DataError, DecodeError, NotFoundError
from streaming.sets.sources.windows import WindowSource
from streaming.sets.windows.reader import words_of
from streaming.sets.windows.recording import CutRecording
from streaming.storage import redact_text

FRAME_ASKS = ("source", "number", "camera", "at")
SHOWN_FRAMES: Final = 8
"""Frames of each camera that are shown."""
_SHOWN_CAMERAS: Final = 8
_SHOWN_COLUMNS: Final = 16
_PIXELS: Final = 320
_PICTURE_SECONDS: Final = 600


@dataclass(kw_only=True)
class TimeLeft:
    """The time that a page may spend on windows; one that decodes slowly must not hold it up for all others."""

    seconds: float
    _until: float = field(init=False)

    @classmethod
    def of(cls, subject: Subject) -> TimeLeft:
        """Begin to count for a page. Its windows may take as long as one value."""
        return cls(seconds=workers_of(subject).seconds)

    def __post_init__(self) -> None:
        """Begin to count."""
        self._until = time.monotonic() + self.seconds

    def check(self) -> None:
        """Refuse work after the time is over.

        Raises:
            DecodeError: It is.
        """
        if time.monotonic() >= self._until:
            raise DecodeError(f"not decoded: this page has spent its {self.seconds:g} s on the windows before")


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowFrame:
    """A frame of a window.

    Attributes:
        offset: Seconds from the moment, with a sign.
        link: Address of its picture.
        padded: Words for a frame that only stands in; "": it is there.
        error: Why it cannot be shown; "": it can.
    """

    offset: str
    link: str
    padded: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowCamera:
    """The frames of one camera; the name is that of the row, and the field that of the recording."""

    name: str
    field: str
    frames: tuple[WindowFrame, ...]
    others: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowStep:
    """A step of a column: its number in the table, its first values, and words for one that only stands in."""

    number: int
    values: tuple[Any, ...]
    padded: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowColumn:
    """The steps of one column.

    Attributes:
        name: Its name in rows.
        what: Type and shape of a step.
        steps: The first steps.
        others: Number of further ones.
        is_cut: Whether steps have further values.
        error: Why it cannot be shown; "": it can.
    """

    name: str
    what: str = ""
    steps: tuple[WindowStep, ...] = ()
    others: int = 0
    is_cut: bool = False
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowLook:
    """A row that is a window.

    Attributes:
        place: Name of its set, and its number there.
        key: Key of its recording.
        link: Address of the recording.
        time: Its moment, in seconds.
        cameras: The frames of each camera.
        columns: The steps of each column.
        others: Cameras and columns that are not shown, in words; "": none.
    """

    place: tuple[str, int]
    key: str
    link: str
    time: float
    cameras: tuple[WindowCamera, ...]
    columns: tuple[WindowColumn, ...]
    others: str


def window_of(subject: Subject, name: str, number: int, link: str, left: TimeLeft) -> WindowLook:
    """Return a window by its number in a set; damaged parts have the error in their place.

    Raises:
        StorageError: The store failed.
    """
    one = _Window.of(subject, name, number)
    spec = one.source.spec
    hidden = [
        counted(len(some) - most, noun)
        for some, most, noun in (
            (spec.video, _SHOWN_CAMERAS, "more camera"), (spec.columns, _SHOWN_COLUMNS, "more column"),
        ) if len(some) > most
    ]  # fmt: skip
    return WindowLook(
        place=(name, number), key=one.source.reader.key_of(one.shard, one.recording.sample), link=link,
        time=float(one.recording.moments[one.row]), others=" and ".join(hidden),
        cameras=tuple(one.camera(entry, left) for entry in range(min(len(spec.video), _SHOWN_CAMERAS))),
        columns=one.columns(left),
    )  # fmt: skip


def frame(subject: Subject, query: Query) -> Content:
    """Return the picture of a frame of a window.

    Raises:
        NotFoundError: There is no such window, or no such frame.
        DataError: Its group of pictures is damaged.
        ConfigError: A parameter is missing or invalid.
    """
    name, number = query.text("source"), query.some_number("number")
    source = subject.windows.get(name)
    if number is None:
        raise ConfigError("/frame: expected the number of a window")
    if source is None or number >= source.num_readable:
        raise NotFoundError(f"/frame: there is no window {number} of the source {name[:80]!r}")
    camera, at = query.number("camera", 0), query.number("at", 0)
    if camera >= min(len(source.spec.video), _SHOWN_CAMERAS):
        raise NotFoundError(f"/frame: there is no picture of camera {camera}")
    if at >= min(len(source.spec.video[camera].offsets), SHOWN_FRAMES):
        raise NotFoundError(f"/frame: there is no picture of frame {at} of camera {camera}")
    picture = _Window.of(subject, name, number).picture(camera, at)
    return Content(
        media_type="image/jpeg", num_bytes=len(picture), seconds=_PICTURE_SECONDS,
        read=lambda first, last: iter((picture[first:last],)),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Window:
    """A window in its recording, and what decodes it.

    Attributes:
        source: The windows.
        name: Name of their set.
        number: Its number there.
        shard: Number of its shard.
        recording: Its recording.
        row: Its number among the windows of the recording.
        workers: Decode.
    """

    source: WindowSource
    name: str
    number: int
    shard: int
    recording: CutRecording
    row: int
    workers: DecodingWorkers

    @classmethod
    def of(cls, subject: Subject, name: str, number: int) -> _Window:
        source = subject.windows[name]
        shard, inside = source.place_of(number)
        recording, row = source.reader.shard(shard).place_of(inside)
        return cls(
            source=source, name=name, number=number, shard=shard, recording=recording, row=row,
            workers=workers_of(subject),
        )  # fmt: skip

    @property
    def _where(self) -> str:
        return self.source.reader.where_of(self.shard, self.recording.sample)

    def _padded(self, *, valid: bool, what: str) -> str:
        """Return words for a frame or step that is not there."""
        if valid:
            return ""
        return "missing: the row is bad" if self.source.spec.edge == "drop" else f"padded: {what} stands in"

    # --- frames ---

    def camera(self, number: int, left: TimeLeft) -> WindowCamera:
        """Return the frames of a camera; the groups of pictures that they need are decoded once each."""
        entry = self.source.spec.video[number]
        frames, valid = self._frames(number)
        groups = self.recording.streams[number].groups_of(frames)
        errors = {group: self._error(number, group, left) for group in dict.fromkeys(groups.tolist())}
        shown = tuple(
            WindowFrame(
                offset=f"{offset:+g} s", error=errors[group],
                padded=self._padded(valid=there, what="the nearest frame"),
                link=address("/frame", source=self.name, number=str(self.number), camera=str(number), at=str(at)),
            ) for at, (offset, there, group) in enumerate(zip(entry.offsets, valid, groups.tolist(), strict=False))
        )  # fmt: skip
        return WindowCamera(name=entry.name, field=entry.field, frames=shown, others=len(entry.offsets) - len(shown))

    def picture(self, number: int, at: int) -> bytes:
        """Return the picture of a frame.

        Raises:
            DataError: Its group of pictures is damaged.
        """
        frames, _ = self._frames(number)
        group = int(self.recording.streams[number].groups_of(frames)[at])
        found = self._group(number, group)
        place = self._in_group(number, group).index(int(frames[at]))
        start = sum(found.facts["sizes"][:place])
        return found.picture[start : start + found.facts["sizes"][place]]

    def _frames(self, number: int) -> tuple[Any, list[bool]]:
        """Return the first frames of a camera, int64 [n], and whether each is there."""
        offsets = self.source.spec.video[number].offsets[:SHOWN_FRAMES]
        placed = self.recording.frames_of(number, offsets, np.array([self.row]))
        return placed.numbers[0], placed.valid[0].tolist()

    def _in_group(self, number: int, group: int) -> list[int]:
        """Return the distinct frames of a camera that lie in a group, ascending."""
        frames, _ = self._frames(number)
        found: list[int] = np.unique(frames[self.recording.streams[number].groups_of(frames) == group]).tolist()
        return found

    def _error(self, number: int, group: int, left: TimeLeft) -> str:
        """Return why the frames of a group cannot be shown; "": they can."""
        try:
            left.check()
            self._group(number, group)
        except DataError as error:
            return redact_text(str(error))
        return ""

    def _group(self, number: int, group: int) -> Decoded:
        """Return the frames of a group, from a worker or from the cache.

        Raises:
            DataError: It is damaged, too large, or takes too long.
            StorageError: The store failed.
        """
        stream, size = self.recording.streams[number], self.source.spec.sizes[number]
        place, frames = stream.groups[group], self._in_group(number, group)
        what = f"{self._where}: {words_of(stream, group)}"
        num_bytes = place.byte_end - place.byte_start
        if num_bytes > MOST_MEDIA_BYTES:
            most = format_bytes(MOST_MEDIA_BYTES)
            raise DecodeError(f"{what}: not decoded: {format_bytes(num_bytes)}, more than {most}")
        read = partial(self.source.reader.group, self.shard, stream, group)
        name = (self.source.urls[self.shard], stream.field, place, tuple(frames), size)
        try:
            return self.workers.known(
                name, "frames", _PIXELS, num_bytes, read, group_facts(stream, group, frames, size)
            )  # fmt: skip
        except DataError as error:
            raise type(error)(f"{what}: {error}") from error

    # --- steps ---

    def columns(self, left: TimeLeft) -> tuple[WindowColumn, ...]:
        """Return the steps of the columns."""
        entries = self.source.spec.columns[:_SHOWN_COLUMNS]
        if not entries:
            return ()
        try:
            left.check()
            found = self._steps().facts["columns"]
        except DataError as error:
            return tuple(WindowColumn(name=one.name, error=redact_text(str(error))) for one in entries)
        return tuple(self._column(entry.name, one) for entry, one in zip(entries, found, strict=True))

    def _steps(self) -> Decoded:
        """Return facts about the steps, from a worker.

        Raises:
            DataError: The fields that hold them are damaged, or too large.
            StorageError: The store failed.
        """
        reader, sample = self.source.reader, self.recording.sample
        num_bytes = reader.fields_bytes(self.shard, sample)
        if num_bytes > MOST_MEDIA_BYTES:
            most = format_bytes(MOST_MEDIA_BYTES)
            raise DecodeError(f"{self._where}: its tables are not decoded: {format_bytes(num_bytes)}, more than {most}")
        fields = reader.fields_of(self.shard, sample)
        columns = [
            column_facts(entry, shape, self.recording, self.row)
            for entry, shape in zip(self.source.spec.columns[:_SHOWN_COLUMNS], reader.shapes, strict=False)
        ]
        facts = {
            "fields": [[name, len(value)] for name, value in fields.items()],
            "columns": columns,
            "where": self._where,
        }
        return self.workers.decode("steps", 0, b"".join(fields.values()), facts)

    def _column(self, name: str, found: Mapping[str, Any]) -> WindowColumn:
        if "error" in found:
            return WindowColumn(name=name, error=redact_text(found["error"]))
        shape = found["shape"]
        steps = tuple(
            WindowStep(number=number, values=tuple(values), padded=self._padded(valid=valid, what="the nearest step"))
            for number, valid, values in zip(found["numbers"], found["valid"], found["values"], strict=True)
        )
        return WindowColumn(
            name=name, what=f"{found['dtype']} {_shape(shape)}", steps=steps, others=found["total"] - len(steps),
            is_cut=bool(steps) and int(np.prod(shape, dtype=np.int64)) > len(steps[0].values),
        )  # fmt: skip


def _shape(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]" if shape else "number"
