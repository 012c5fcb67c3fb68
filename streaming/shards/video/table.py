"""Hold the video streams of one field of a shard, and read and write them as a sealed file (``docs/format.md``)."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from streaming.build.decode.groups.decode import VideoFormat
from streaming.build.decode.video import SAME_S
from streaming.shards.index.chunk_table import ShardInfo, shard_rows, shards_of_rows
from streaming.shards.index.columns import read_numbers, write_numbers
from streaming.shards.index.files import INDEX_VIDEO_AGAIN, VIDEO_KIND, content_errors
from streaming.shards.video.groups import Flags, Groups, frame_packets, groups_of_packets
from streaming.types import Int64Array

_KEY, _SHOWN = 1, 2
_NUMBERS = {"pts": np.int64, "byte_start": np.int64, "num_bytes": np.int64, "crc32c": np.uint32, "flags": np.uint8}
_MOST = 1 << 62  # so that no sum leaves int64


@dataclass(frozen=True, kw_only=True, eq=False)
class VideoStream:
    """The video stream of one member: its packets in decoding order, its frames in order of presentation.

    Attributes:
        sample: Number of the sample in its shard.
        field: The field.
        format: What a decoder must know.
        time_base: The unit of ``pts`` in seconds, as (numerator, denominator).
        first_pts: The time of second 0.
        last_ticks: How long the last frame is shown, in units of ``pts``; 0: not stated.
        rate: Mean number of frames per second, as (numerator, denominator).
        pts: int64 [P], when each packet's frame is shown.
        byte_start: int64 [P], the packet's first byte, in the shard.
        num_bytes: int64 [P], its size.
        is_key: bool [P], whether it begins a group.
        is_shown: bool [P], whether it is shown at all: an edit list may leave it out.
        crc32c: int64 [P], checksums of the groups that begin there.
    """

    sample: int
    field: str
    format: VideoFormat
    time_base: tuple[int, int]
    first_pts: int
    last_ticks: int
    rate: tuple[int, int]
    pts: Int64Array = dataclasses.field(repr=False)
    byte_start: Int64Array = dataclasses.field(repr=False)
    num_bytes: Int64Array = dataclasses.field(repr=False)
    is_key: Flags = dataclasses.field(repr=False)
    is_shown: Flags = dataclasses.field(repr=False)
    crc32c: Int64Array = dataclasses.field(repr=False)

    @property
    def codec(self) -> str:
        """FFmpeg's name of the decoder."""
        return self.format.codec

    @property
    def extradata(self) -> bytes:
        """The codec's own header."""
        return self.format.extradata

    @property
    def width(self) -> int:
        """Width of the frames as stored."""
        return self.format.width

    @property
    def height(self) -> int:
        """Height of the frames as stored."""
        return self.format.height

    @property
    def orientation(self) -> int:
        """EXIF orientation, 1 to 8."""
        return self.format.orientation

    @property
    def num_packets(self) -> int:
        """Number of packets."""
        return len(self.pts)

    @property
    def num_frames(self) -> int:
        """Number of frames that are shown."""
        return len(self.packet_of_frame)

    @cached_property
    def packet_of_frame(self) -> Int64Array:
        """The packet of each frame, int64 [F]."""
        return frame_packets(self.pts, self.is_shown)

    @cached_property
    def times(self) -> npt.NDArray[np.float64]:
        """When each frame is shown, in seconds, float64 [F]: the times of ``Video(details=True)``."""
        ticks, (num, den) = self.pts[self.packet_of_frame] - self.first_pts, self.time_base
        found: npt.NDArray[np.float64] = ticks * num / den  # products of integers: rounded once, as fractions are
        return found

    @property
    def end_s(self) -> float:
        """When the last frame is shown no longer, in seconds; 0 without frames."""
        if not self.num_frames:
            return 0.0
        num, den = self.time_base
        return float(self.times[-1]) + (self.last_ticks * num / den if self.last_ticks else self.rate[1] / self.rate[0])

    @cached_property
    def groups(self) -> Groups:
        """Its groups of pictures."""
        return groups_of_packets(
            self.pts, self.is_shown, self.is_key, self.byte_start, self.byte_start + self.num_bytes, self.crc32c
        )

    def groups_of(self, frames: npt.ArrayLike) -> Int64Array:
        """Return the group of each frame number, int64 ``[n]``.

        Raises:
            IndexError: There is no such frame.
        """
        numbers = np.asarray(frames, np.int64)
        if numbers.size and not (numbers.min() >= 0 and numbers.max() < self.num_frames):
            raise IndexError(f"frames {numbers.min()} to {numbers.max()} of a stream of {self.num_frames}")
        return np.searchsorted(self.groups.stop_frame, numbers, "right").astype(np.int64)

    def frames_at(self, seconds: npt.ArrayLike) -> Int64Array:
        """Return the frame shown at each moment, int64 ``[n]``; -1 before the first, and from the end of the last on.

        A moment up to a microsecond before a frame is taken for its own, as ``Video(fps=…)`` does.
        """
        moments = np.asarray(seconds, np.float64)
        found = np.searchsorted(self.times, moments + SAME_S, "right").astype(np.int64) - 1
        return np.where(moments < self.end_s - SAME_S, found, -1)


class DamagedStream(NamedTuple):
    """A member that is not indexed.

    Attributes:
        sample: Number of the sample in its shard.
        key: The sample's key.
        reason: Why.
    """

    sample: int
    key: str
    reason: str


@dataclass(frozen=True, kw_only=True, eq=False)
class VideoTable:
    """The video streams of one field of a shard.

    Attributes:
        field: The field.
        shard: The shard.
        fingerprint: That of its own chunk table.
        streams: Its streams, by sample, in order; samples without the field have none.
        damaged: Members that are not indexed.
    """

    field: str
    shard: ShardInfo
    fingerprint: str
    streams: tuple[VideoStream, ...]
    damaged: tuple[DamagedStream, ...]

    def to_parquet(self) -> bytes:
        """Return the table as the bytes of a file. The same table gives the same bytes."""
        formats: dict[VideoFormat, int] = {}
        streams = [
            [
                one.sample, formats.setdefault(one.format, len(formats)), one.num_packets, *one.time_base,
                one.first_pts, one.last_ticks, *one.rate,
            ]
            for one in self.streams
        ]  # fmt: skip
        facts = {
            "kind": VIDEO_KIND, "field": self.field, "shard": shard_rows([self.shard])[0],
            "fingerprint": self.fingerprint, "formats": [_format_row(one) for one in formats], "streams": streams,
            "damaged": [[*one] for one in self.damaged],
        }  # fmt: skip
        columns = {
            name: np.concatenate([np.empty(0, kind), *(_column(one, name) for one in self.streams)]).astype(kind)
            for name, kind in _NUMBERS.items()
        }
        return write_numbers(columns, facts, repeating=["flags"])

    @classmethod
    def from_parquet(cls, buffer: Any, source: str) -> VideoTable:
        """Return the inverse of :meth:`to_parquet`.

        Raises:
            IndexFormatError: The bytes are damaged, not such a file, or of a newer major version.
        """
        columns, facts = read_numbers(buffer, VIDEO_KIND, source, _NUMBERS, INDEX_VIDEO_AGAIN)
        with content_errors(source, "not the index of videos", INDEX_VIDEO_AGAIN):
            (shard,) = shards_of_rows([facts["shard"]])
            formats = [_format_of_row(row) for row in facts["formats"]]
            name = str(facts["field"])
            damage = tuple(DamagedStream(int(row), str(key), str(why)) for row, key, why in facts["damaged"])
            streams = _streams(name, shard, formats, facts["streams"], columns)
            if not all(0 <= one.sample < shard.num_samples for one in damage):
                raise ValueError("a damaged stream of a sample that the shard does not have")
            return cls(
                field=name, shard=shard, fingerprint=str(facts["fingerprint"]), streams=streams, damaged=damage
            )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class VideoIndex:
    """The video streams of one shard.

    Attributes:
        tables: Its tables, by field.
    """

    tables: Mapping[str, VideoTable]

    @property
    def fields(self) -> tuple[str, ...]:
        """Its fields."""
        return tuple(self.tables)

    def streams(self, field: str) -> Mapping[int, VideoStream]:
        """Return the streams of a field, by the number of their sample in the shard; damaged ones are left out.

        Raises:
            KeyError: The field was not read.
        """
        return {one.sample: one for one in self.tables[field].streams}

    def damaged(self, field: str) -> Mapping[int, DamagedStream]:
        """Return the members of a field that are not indexed, by the number of their sample in the shard.

        Raises:
            KeyError: The field was not read.
        """
        return {one.sample: one for one in self.tables[field].damaged}


def _column(stream: VideoStream, name: str) -> npt.NDArray[Any]:
    if name == "flags":
        return (_KEY * stream.is_key + _SHOWN * stream.is_shown).astype(np.uint8)
    found: npt.NDArray[Any] = getattr(stream, name)
    return found


def _format_row(form: VideoFormat) -> dict[str, Any]:
    return asdict(form) | {"extradata": base64.b64encode(form.extradata).decode()}


def _format_of_row(row: Mapping[str, Any]) -> VideoFormat:
    """Return the inverse of :func:`_format_row`.

    Raises:
        ValueError, TypeError, KeyError: It is damaged.
    """
    width, height, reorder, bits, orientation = (
        _count(row[name]) for name in ("width", "height", "reorder_depth", "bits", "orientation")
    )
    coded_width, coded_height = map(_count, row["coded_size"])
    reach, primaries, transfer, space = map(_count, row["color"])
    if not 1 <= orientation <= 8 or not width * height or len(str(row["tag"])) != 4:
        raise ValueError(f"orientation {orientation}, {width} x {height} pixels, tag {row['tag']!r}")
    return VideoFormat(
        codec=str(row["codec"]), extradata=base64.b64decode(row["extradata"], validate=True), width=width,
        height=height, orientation=orientation, coded_size=(coded_width, coded_height), tag=str(row["tag"]),
        pix_fmt=str(row["pix_fmt"]), bits=bits, reorder_depth=reorder, color=(reach, primaries, transfer, space),
    )  # fmt: skip


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise ValueError(f"{str(value)[:40]} where a count is expected")
    return value


def _streams(
    name: str, shard: ShardInfo, formats: Sequence[VideoFormat], rows: Sequence[Any], columns: Mapping[str, Any]
) -> tuple[VideoStream, ...]:
    """Return the streams of a file, checked.

    Raises:
        ValueError, TypeError, IndexError: They contradict each other, or the shard.
    """
    found, at, last = list[VideoStream](), 0, -1
    for sample, form, num, num_base, den_base, first_pts, last_ticks, num_rate, den_rate in rows:
        if not last < sample < shard.num_samples or not 0 <= form < len(formats):
            raise ValueError(f"a stream of sample {sample} of format {form}")
        if any(
            type(value) is not int for value in (num_base, den_base, first_pts, last_ticks, num_rate, den_rate, num)
        ):
            raise ValueError(f"a stream of sample {sample} with facts that are no whole numbers")
        if min(num_base, den_base, num_rate, den_rate, num) < 1 or last_ticks < 0 or num > len(columns["pts"]) - at:
            raise ValueError(f"a stream of {num} packets, time base {num_base}/{den_base}, rate {num_rate}/{den_rate}")
        part = {key: values[at : at + num] for key, values in columns.items()}
        flags = part.pop("flags")
        stream = VideoStream(
            sample=sample, field=name, format=formats[form], time_base=(num_base, den_base), first_pts=first_pts,
            last_ticks=last_ticks, rate=(num_rate, den_rate), is_key=(flags & _KEY) > 0, is_shown=(flags & _SHOWN) > 0,
            **(part | {"crc32c": part["crc32c"].astype(np.int64)}),
        )  # fmt: skip
        found.append(stream)
        at, last = at + num, sample
    if at != len(columns["pts"]):
        raise ValueError(f"{at} packets of {len(columns['pts'])} belong to streams")
    _check_packets(shard, found, columns)
    return tuple(found)


def _check_packets(shard: ShardInfo, streams: Sequence[VideoStream], columns: Mapping[str, Any]) -> None:
    """Check the packets of all streams at once.

    Raises:
        ValueError: A packet lies outside of the shard, or a group begins where none can.
    """
    start, size, pts = columns["byte_start"], columns["num_bytes"], columns["pts"]
    if len(start) and (
        start.min() < 0 or size.min() < 1 or start.max() > _MOST or size.max() > _MOST
        or (start + size).max() > shard.size_bytes or pts.max() > _MOST or pts.min() < -_MOST
    ):  # fmt: skip
        raise ValueError("a packet outside of the shard")
    for one in streams:
        keys = one.pts[one.is_key]
        if not one.is_key[0] or (np.diff(keys) <= 0).any():
            raise ValueError(f"sample {one.sample}: its groups are not in order")
