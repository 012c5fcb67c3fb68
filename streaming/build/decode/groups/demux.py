"""Find the packets of the video stream in a file, without decoding more than its first picture: ``find_packets``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from streaming.build.decode.groups.decode import VideoFormat, damage, decoded_packets
from streaming.build.decode.images import MAX_PIXELS
from streaming.build.decode.streams.files import opened
from streaming.build.decode.streams.pictures import num_shown, starts_group
from streaming.build.decode.video import VideoReader, opened_container, orientation_of
from streaming.types import Int64Array

_HEAD_BYTES: Final = 64
"""Bytes searched for a packet's first one from the place that FFmpeg states: Matroska's is that of the block's
header."""
_CHANGES: Final = ("new_extradata", "param_change", "palette", "encryption_info")
"""Side data that a decoder needs, and that is no part of a packet's bytes."""
_PROGRESSIVE: Final = 1
"""The largest of FFmpeg's numbers of the order of fields for frames that are whole, or not known not to be."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FoundPackets:
    """The packets of a video stream, in decoding order.

    Attributes:
        format: What a decoder must know.
        time_base: The unit of ``pts``, in seconds.
        first_pts: The time of second 0.
        last_ticks: How long the last frame is shown; 0: not stated.
        rate: Mean number of frames per second.
        pts: int64 [P], presentation times, which include the edit list.
        byte_start: int64 [P], the first byte of each packet in the file.
        num_bytes: int64 [P], its size.
        can_start: bool [P], whether a decoder can start there.
        is_shown: bool [P], whether its frame is shown.
    """

    format: VideoFormat
    time_base: Fraction
    first_pts: int
    last_ticks: int
    rate: Fraction
    pts: Int64Array
    byte_start: Int64Array
    num_bytes: Int64Array
    can_start: npt.NDArray[np.bool_]
    is_shown: npt.NDArray[np.bool_]


def find_packets(
    data: bytes | bytearray, start: int = 0, stop: int | None = None, *, max_pixels: int = MAX_PIXELS
) -> FoundPackets:
    """Return the packets of the video stream that ``Video`` decodes of a file.

    Every packet's bytes are compared with those at its place. Where the packets do not say which frames are shown
    (interlaced pictures, rare codecs, a file that begins without a key frame), they are decoded once.

    Args:
        data: Bytes that hold the file.
        start: Where it begins in them.
        stop: Where it ends; None: at their end.
        max_pixels: Largest height x width that is decoded.

    Raises:
        ValueError: The file is damaged, of another kind, or cannot be decoded from its packets alone.
    """
    with (
        damage(), memoryview(data)[start:stop] as view, opened(view) as file,
        closing(opened_container(file, max_pixels)) as container,
    ):  # fmt: skip
        return _Finder(data, start, len(view), VideoReader(container, max_pixels), max_pixels).found(container)


class _Row(NamedTuple):
    """The facts noted about one packet.

    Attributes:
        pts: Its time.
        ticks: How long its frame is shown; 0: not stated.
        byte_start: Its first byte in the file.
        num_bytes: Its size.
        can_start: Whether a decoder can start there.
        is_shown: Whether it states that its frame is shown.
        is_known: Whether it can state that.
        is_left_out: Whether an edit list leaves it out.
    """

    pts: int
    ticks: int
    byte_start: int
    num_bytes: int
    can_start: bool
    is_shown: bool
    is_known: bool
    is_left_out: bool


class _Finder:
    """Reads the packets of one stream."""

    def __init__(
        self, data: bytes | bytearray, begin: int, num_bytes: int, reader: VideoReader, max_pixels: int
    ) -> None:
        self._data, self._begin, self._stop = data, begin, begin + num_bytes
        self._reader, self._max_pixels = reader, max_pixels
        self._context = reader.stream.codec_context
        self._codec: str = self._context.name
        self._extradata: bytes = self._context.extradata or b""
        self._before = _format_before(self._context, self._extradata)
        self._picture: Any = None
        self._is_begun = False

    def found(self, container: Any) -> FoundPackets:
        """Return all packets.

        Raises:
            ValueError: See :func:`find_packets`.
        """
        rows = list[_Row]()
        for packet in container.demux(self._reader.stream):
            if packet.size:  # the last one, which PyAV adds, has none
                rows.append(self._row(packet, len(rows)))
        if self._picture is None and self._is_begun:
            self._picture = next(iter(self._context.decode(None)), None)
        if not rows or self._picture is None:
            raise ValueError("it has no frames that decode")
        columns = {name: np.array(values) for name, values in zip(_Row._fields, zip(*rows, strict=True), strict=True)}
        form, pts = self._format(), columns["pts"]
        is_shown, can_start = self._settled(form, columns)
        if not is_shown.any():
            raise ValueError("it has no frames")
        if (np.diff(np.sort(pts[is_shown])) == 0).any():
            raise ValueError("two of its frames state the same time")
        last = rows[int(np.argmax(np.where(is_shown, pts, pts.min() - 1)))]
        self._reader.check_end(float((last.pts - self._reader.first) * self._reader.base))
        stream = self._reader.stream
        return FoundPackets(
            format=form, time_base=self._reader.base, first_pts=self._reader.first, last_ticks=max(0, last.ticks),
            rate=Fraction(stream.average_rate or stream.guessed_rate or 25), pts=pts, byte_start=columns["byte_start"],
            num_bytes=columns["num_bytes"], can_start=can_start, is_shown=is_shown,
        )  # fmt: skip

    def _row(self, packet: Any, number: int) -> _Row:
        """Return the facts about a packet."""
        if packet.is_corrupt:
            raise ValueError(f"packet {number} is damaged or cut off")
        if packet.pts is None:
            raise ValueError(f"packet {number} states no time")
        if any(one.data_type in _CHANGES for one in packet.iter_sidedata()):
            raise ValueError(
                f"from packet {number} on, its packets need more than their bytes: it changes, or is secret"
            )
        view = memoryview(packet)
        is_key = packet.is_keyframe
        if self._picture is None and (is_key or self._is_begun):
            self._offer(packet)
        num = num_shown(self._codec, view)
        if num is not None and num > 1:
            raise ValueError(f"packet {number} shows {num} frames")
        is_start = is_key and starts_group(self._codec, self._extradata, view)
        return _Row(
            pts=packet.pts, ticks=packet.duration or 0, byte_start=self._place(packet, view, number),
            num_bytes=len(view), can_start=is_start, is_shown=num != 0 and not packet.is_discard,
            is_known=num is not None, is_left_out=packet.is_discard,
        )  # fmt: skip

    def _offer(self, packet: Any) -> None:
        """Decode a packet, unless there was a picture, to see the size of frames, and how the camera was turned."""
        frames = packet.decode()
        if not frames and not self._is_begun and not packet.is_discard:  # it waits for later ones: none will come
            frames = self._context.decode(None)
            self._context.flush_buffers()
        self._is_begun = True
        self._picture = next(iter(frames), None)

    def _place(self, packet: Any, view: memoryview, number: int) -> int:
        """Return where the bytes of a packet lie in the file.

        Raises:
            ValueError: They lie nowhere: the file stores them otherwise.
        """
        first: int = -1 if packet.pos is None else packet.pos
        for at in range(first, first + _HEAD_BYTES) if first >= 0 else ():
            if self._data.startswith(view, self._begin + at, self._stop):
                return at
        raise ValueError(f"the bytes of packet {number} are not stored as they are: it is compressed again, or secret")

    def _format(self) -> VideoFormat:
        """Return what a decoder must know, with what the first picture says."""
        picture = self._picture
        form = self._before
        return VideoFormat(
            codec=form.codec, extradata=form.extradata, width=picture.width, height=picture.height,
            orientation=orientation_of(picture), coded_size=form.coded_size, tag=form.tag, pix_fmt=form.pix_fmt,
            bits=form.bits, reorder_depth=form.reorder_depth, color=form.color,
        )  # fmt: skip

    def _settled(
        self, form: VideoFormat, columns: Mapping[str, npt.NDArray[Any]]
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Return which packets are shown, and where a decoder can start.

        These are what packets state, or, where that is not sure, what decoding them says.

        Args:
            form: The format.
            columns: An array for each member of ``_Row``.
        """
        pts, stated, can_start = columns["pts"], columns["is_shown"], columns["can_start"]
        if _is_joined(columns):  # each decoded picture depends on all that comes before
            can_start = np.arange(len(pts)) == 0
        keys = np.flatnonzero(can_start)
        is_whole = _is_joined(columns) or not columns["is_known"].all() or self._context.field_order > _PROGRESSIVE
        begins_late = not keys.size or keys[0] > 0 or bool((pts[stated] < pts[0]).any())
        if not is_whole and not begins_late:
            return stated, can_start
        stop = len(pts) if is_whole or keys.size < 2 else int(keys[1])
        places = zip(columns["byte_start"][:stop].tolist(), columns["num_bytes"][:stop].tolist(), strict=True)
        view = memoryview(self._data)[self._begin :]
        packets = ((number, view[at : at + size]) for number, (at, size) in enumerate(places))
        order = [number for number, _ in decoded_packets(form, packets, self._max_pixels) if stated[number]]
        if (np.diff(pts[order]) <= 0).any():
            raise ValueError("its frames are not shown in the order of their times")
        found = stated.copy()
        found[:stop] = False
        found[order] = True
        return found, can_start


def _is_joined(columns: Mapping[str, npt.NDArray[Any]]) -> bool:
    """Return whether an edit list joins several parts of a file, given an array for each member of ``_Row``.

    One that only cuts off the beginning and the end leaves nothing out between frames that are shown.
    """
    pts, shown = columns["pts"], columns["pts"][columns["is_shown"]]
    if not shown.size:
        return False
    between = columns["is_left_out"] & (pts > shown.min()) & (pts < shown.max())
    return bool(between.any() or (np.diff(columns["byte_start"]) <= 0).any())


def _format_before(context: Any, extradata: bytes) -> VideoFormat:
    """Return what a container says before the first packet: the state in which it gives the codec's context."""
    try:
        tag = context.codec_tag
    except UnicodeDecodeError:
        tag = "\0\0\0\0"
    return VideoFormat(
        codec=context.name, extradata=extradata, width=context.width, height=context.height, orientation=1,
        coded_size=(context.width, context.height), tag=tag, pix_fmt=context.pix_fmt or "",
        bits=context.bits_per_coded_sample, reorder_depth=context.reorder_depth,
        color=(
            int(context.color_range), int(context.color_primaries), int(context.color_trc), int(context.colorspace),
        ),
    )  # fmt: skip
