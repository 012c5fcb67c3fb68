"""Decode one group of pictures, given its bytes: ``decode_group``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from streaming.build.decode.images import MAX_PIXELS
from streaming.build.decode.video import CODECS, check_size, claims, ffmpeg, pixels_of
from streaming.common.arguments import counted
from streaming.types import Int64Array, ReadBuffer

_MOST_REORDERED: Final = 16
"""What H.264 and H.265 allow; decoders hold an array of this length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoFormat:
    """What a decoder must know of a video stream before its first packet.

    Attributes:
        codec: FFmpeg's name of the decoder.
        extradata: The codec's own header.
        width: Width of the frames as stored.
        height: Height of the frames as stored.
        orientation: EXIF orientation, 1 to 8, that the camera recorded; from 5 on, upright frames are as high as stored
            ones are wide.
        coded_size: Width and height that the container states.
        tag: The container's name of the codec, four characters.
        pix_fmt: FFmpeg's name of the format of pixels that the container states; "" if it states none.
        bits: Bits of a coded pixel that the container states; 0: none.
        reorder_depth: Number of frames that may precede a frame in decoding order and follow it in order of
            presentation.
        color: Range, primaries, transfer characteristic and space, FFmpeg's numbers.
    """

    codec: str
    extradata: bytes
    width: int
    height: int
    orientation: int
    coded_size: tuple[int, int]
    tag: str
    pix_fmt: str
    bits: int
    reorder_depth: int
    color: tuple[int, int, int, int]

    def __post_init__(self) -> None:
        """Refuse what would end the process inside FFmpeg, or name a decoder that ``Video`` does not use.

        Raises:
            ValueError: It would.
        """
        if not 0 <= self.reorder_depth <= _MOST_REORDERED:
            raise ValueError(f"{self.reorder_depth} frames that are reordered; expected at most {_MOST_REORDERED}")
        if self.codec not in CODECS:
            raise ValueError(f"codec {self.codec!r} is not read")


class GroupPlace(Protocol):
    """Where a group of pictures is; ``streaming.shards.video.groups.Group``."""

    @property
    def first_packet(self) -> int:
        """Its first packet, in decoding order."""

    @property
    def stop_packet(self) -> int:
        """The packet after its last one."""

    @property
    def byte_start(self) -> int:
        """Its first byte in the shard."""

    @property
    def byte_end(self) -> int:
        """The byte after its last one."""

    @property
    def first_frame(self) -> int:
        """Its first frame, in order of presentation."""

    @property
    def stop_frame(self) -> int:
        """The frame after its last one."""


class GroupedStream(Protocol):
    """A video stream with the places of its packets; ``streaming.shards.video.table.VideoStream``."""

    @property
    def format(self) -> VideoFormat:
        """What the decoder must know."""

    @property
    def groups(self) -> Sequence[GroupPlace]:
        """Its groups of pictures."""

    @property
    def byte_start(self) -> Int64Array:
        """int64 [P], the first byte of each packet in the shard."""

    @property
    def num_bytes(self) -> Int64Array:
        """int64 [P], the size of each packet."""

    @property
    def packet_of_frame(self) -> Int64Array:
        """int64 [F], the packet of each frame."""

    @property
    def times(self) -> npt.NDArray[np.float64]:
        """float64 [F], when each frame is shown, in seconds."""


def decode_group(
    stream: GroupedStream, group_number: int, data: ReadBuffer, *, size: tuple[int, int] | None = None,
    frames: Sequence[int] | None = None, max_pixels: int = MAX_PIXELS,
) -> npt.NDArray[np.uint8]:  # fmt: skip
    """Return frames of one group of pictures, uint8 ``[n, H, W, 3]`` in RGB, upright.

    They equal the same frames of ``Video()`` of the whole file. The bytes are not compared with the group's checksum:
    ``WindowReader`` does that when it reads them.

    Args:
        stream: The stream.
        group_number: The group.
        data: The shard's bytes from the group's ``byte_start`` to its ``byte_end``.
        size: (height, width) to scale to, as of ``Video``.
        frames: Numbers of the frames to return, in this order; all of the group by default. Decoding ends at the last.
        max_pixels: Largest height x width that is decoded.

    Raises:
        IndexError: A frame is in another group.
        ValueError: The group is damaged, or ``data`` is not its bytes.
    """
    group = stream.groups[group_number]
    if len(data) != group.byte_end - group.byte_start:
        raise ValueError(f"group {group_number} has {group.byte_end - group.byte_start} bytes, got {len(data)}")
    wanted = range(group.first_frame, group.stop_frame) if frames is None else frames
    rows: dict[int, list[int]] = {}
    for row, number in enumerate(wanted):
        if not group.first_frame <= number < group.stop_frame:
            raise IndexError(
                f"frame {number} is not in group {group_number}, which has frames {group.first_frame} to "
                f"{group.stop_frame - 1}"
            )
        rows.setdefault(int(stream.packet_of_frame[number]), []).append(row)
    made: npt.NDArray[np.uint8] | None = None
    for packet, frame in decoded_packets(stream.format, _packets_of(stream, group, data), max_pixels) if rows else ():
        places = rows.pop(packet, None)
        if places is None:  # of a neighboring group, or a picture that is not shown
            continue
        with damage():
            pixels = pixels_of(frame, size, stream.format.orientation)
        if made is None:
            made = np.empty((len(wanted), *pixels.shape), np.uint8)
        elif made.shape[1:] != pixels.shape:
            raise ValueError(
                f"its frames change from {made.shape[1:3]} to {pixels.shape[:2]} pixels within a group; give a size="
            )
        made[places] = pixels
        if not rows:
            break
    if rows:
        raise _lacking(stream, group_number, [wanted[row] for places in rows.values() for row in places])
    return np.empty((0, *_shown_size(stream.format, size), 3), np.uint8) if made is None else made


def _packets_of(stream: GroupedStream, group: GroupPlace, data: ReadBuffer) -> Iterator[tuple[int, memoryview]]:
    """Yield number and bytes of each packet of a group."""
    view = memoryview(data).cast("B")
    for packet in range(group.first_packet, group.stop_packet):
        start = int(stream.byte_start[packet]) - group.byte_start
        yield packet, view[start : start + int(stream.num_bytes[packet])]


def _lacking(stream: GroupedStream, group_number: int, frames: Sequence[int]) -> ValueError:
    group, first = stream.groups[group_number], min(frames)
    return ValueError(
        f"damaged: {counted(len(frames), 'frame')} of the {group.stop_frame - group.first_frame} of group "
        f"{group_number} did not decode, first frame {first}, at second {stream.times[first]:.3f}"
    )


def _shown_size(form: VideoFormat, size: tuple[int, int] | None) -> tuple[int, int]:
    if size is not None:
        return size
    return (form.width, form.height) if form.orientation > 4 else (form.height, form.width)


@contextmanager
def damage() -> Iterator[None]:
    """Report errors of FFmpeg as damage of the data: some of their types would count as failures of a store."""
    try:
        with claims():
            yield
    except ffmpeg().FFmpegError as error:
        raise ValueError(f"FFmpeg cannot decode it: {error}") from error


def decoded_packets(
    form: VideoFormat, packets: Iterable[tuple[int, ReadBuffer]], max_pixels: int
) -> Iterator[tuple[int, Any]]:
    """Decode packets without a container; yield (number of the packet that holds it, PyAV's frame) as they come.

    Args:
        form: The format of the stream.
        packets: Number and bytes of each packet, in decoding order, the first one of a key frame.
        max_pixels: Largest height x width that is decoded.

    Raises:
        ValueError: The packets are damaged, or FFmpeg has no such decoder here.
    """
    av = ffmpeg()
    with damage():
        decoder = _decoder(av, form, max_pixels)
        for number, data in packets:
            packet = av.Packet(len(data))  # with the padding behind it that decoders read
            packet.update(data)
            packet.pts = number  # so that each frame says which packet holds it
            yield from _frames(decoder.decode(packet), max_pixels)
        yield from _frames(decoder.decode(None), max_pixels)


def _frames(frames: Iterable[Any], max_pixels: int) -> Iterator[tuple[int, Any]]:
    for frame in frames:
        check_size(frame.width, frame.height, max_pixels)
        if frame.pts is None or frame.is_corrupt:
            raise ValueError("a frame is damaged")
        yield frame.pts, frame


def _decoder(av: Any, form: VideoFormat, max_pixels: int) -> Any:
    """Return a decoder in the state in which an opened container has it.

    Raises:
        ValueError: FFmpeg has no such decoder here.
    """
    try:
        decoder = av.CodecContext.create(form.codec, "r")
    except av.codec.codec.UnknownCodecError as error:
        raise ValueError(f"this FFmpeg has no decoder {form.codec!r}") from error
    if form.extradata:
        decoder.extradata = form.extradata
    decoder.width, decoder.height = form.coded_size
    decoder.codec_tag, decoder.bits_per_coded_sample = form.tag, form.bits
    if form.pix_fmt:
        decoder.pix_fmt = form.pix_fmt
    decoder.color_range, decoder.color_primaries, decoder.color_trc, decoder.colorspace = form.color
    decoder.reorder_depth = form.reorder_depth  # without it, decoders drop frames that come later than they expect
    decoder.options = {"max_pixels": str(max_pixels)}
    decoder.thread_count, decoder.thread_type = 1, "NONE"
    return decoder
