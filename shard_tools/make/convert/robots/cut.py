"""Cut an episode out of a video of several: its packets, unchanged, in a file of their own. Nothing is encoded."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

from streaming.build.decode.images import MAX_PIXELS
from streaming.build.decode.streams.files import Encoded, opened
from streaming.build.decode.values import require
from streaming.build.decode.video import opened_container

_OPTIONS: Final = {"fflags": "+bitexact"}  # no version of FFmpeg in the file
_INTRA: Final = 1
"""PyAV's number for pictures that do not depend on others."""
_MOST_BACK_S: Final = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CutVideo:
    """An episode's part of a video.

    Attributes:
        data: An MP4 file: the packets as they were, with times that begin at 0.
        num_hidden: Number of frames before the episode that its own depend on; the file's edit list hides them.
    """

    data: bytes
    num_hidden: int


def num_frames(data: Encoded) -> int:
    """Return the number of frames that a video shows, without decoding it.

    Raises:
        ValueError: It is no video.
        Exception: Other errors of FFmpeg, and of reading.
    """
    with opened(data) as file, closing(opened_container(file, MAX_PIXELS)) as container:
        stream = _video_of(container)
        return sum(packet.pts is not None and not packet.is_discard for packet in container.demux(stream))


def cut_video(data: Encoded, begin_s: float, num: int) -> CutVideo:
    """Return ``num`` frames of a video, from the one shown at second ``begin_s`` on.

    The packets are those of the file, so the frames are bit by bit those of the whole, whatever decodes them.

    Raises:
        ValueError: The video is damaged, has too few frames there, or cannot be cut there without decoding it.
        Exception: Other errors of FFmpeg, and of reading.
    """
    with opened(data) as file, closing(opened_container(file, MAX_PIXELS)) as source:
        if "mp4" not in source.format.name:
            raise ValueError("it is no MP4, and only these are cut; bring it into MP4, without encoding it again")
        stream = _video_of(source)
        first, packets = _packets_of(source, stream, begin_s, num)
        hidden = sum(packet.pts < first for packet in packets)
        if packets[0].is_keyframe and packets[0].pts != _start_of(stream):
            _check_key_frame(stream, packets[0])
        return CutVideo(data=_written(stream, packets, first), num_hidden=hidden)


def _video_of(container: Any) -> Any:
    """Return the video stream.

    Raises:
        ValueError: There is none.
    """
    stream = container.streams.best("video")
    if stream is None:
        raise ValueError("it has no video stream")
    return stream


def _start_of(stream: Any) -> int:
    return int(stream.start_time or 0)


def _packets_of(source: Any, stream: Any, begin_s: float, num: int) -> tuple[int, Sequence[Any]]:
    """Return the time of the first frame, and the packets that decode to the frames, in order of decoding.

    Raises:
        ValueError: They cannot be separated from others.
    """
    rate = float(stream.average_rate or stream.guessed_rate or 25)
    half = max(1, math.floor(0.5 / rate / stream.time_base))
    wanted = _start_of(stream) + round(begin_s / stream.time_base)
    read = _read_around(source, stream, wanted - half, num)
    times = sorted(one.pts for one in read if one.pts >= wanted - half and not one.is_discard)[:num]
    if not times or times[0] > wanted + half:
        raise ValueError(f"no frame is shown at second {begin_s:.3f}, where the episode begins")
    if len(times) < num:
        raise ValueError(f"{len(times)} frames from second {begin_s:.3f} on; the episode has {num} steps")
    first, last = times[0], times[-1]
    places = [place for place, one in enumerate(read) if first <= one.pts <= last]
    keys = [place for place, one in enumerate(read[: places[0] + 1]) if one.is_keyframe and one.pts <= first]
    if not keys:
        raise ValueError(f"no key frame at or before second {begin_s:.3f}")
    # Pictures that follow the key frame and are shown before it belong to the group before.
    kept = [one for one in read[keys[-1] : places[-1] + 1] if one.pts >= read[keys[-1]].pts]
    if any(one.pts > last for one in kept):
        raise ValueError(
            f"its last frames depend on frames that follow second {float((last - wanted) * stream.time_base):.3f} of "
            "the episode, so that its packets cannot be separated"
        )
    if any(one.has_sidedata("new_extradata") for one in kept):
        raise ValueError("the parameters of its codec change within the file, so that it cannot be cut there")
    return first, kept


def _read_around(source: Any, stream: Any, low: int, num: int) -> list[Any]:
    """Return packets in order of decoding: from a key frame shown at ``low`` or before, up to one behind ``num``."""
    back_s = 0.0
    while True:
        # FFmpeg seeks by decoding time: the key frame that it finds may be shown later than it is decoded.
        source.seek(max(low - round(back_s / stream.time_base), _start_of(stream) - 1), stream=stream)
        found: list[Any] = []
        count = 0
        for packet in source.demux(stream):
            if packet.pts is None or packet.dts is None:
                continue  # the mark of the end
            if packet.is_corrupt:
                raise ValueError("its data is damaged or cut off")
            if not found and packet.pts > low and low > _start_of(stream) and back_s < _MOST_BACK_S:
                break
            if packet.is_keyframe and count >= num:
                return found
            found.append(packet)
            count += packet.pts >= low and not packet.is_discard
        if found or back_s >= _MOST_BACK_S:
            return found
        back_s = 4 * back_s + 1


def _check_key_frame(stream: Any, packet: Any) -> None:
    """Refuse a frame that is marked as a key frame and does not decode by itself, such as one of a refreshed stream.

    Raises:
        ValueError: It is none.
    """
    av = require("av", extra="video")
    context = av.CodecContext.create(stream.codec_context.name, "r")
    context.extradata = stream.codec_context.extradata
    context.thread_count = 1
    alone = av.Packet(bytes(packet))
    alone.pts, alone.dts, alone.time_base = packet.pts, packet.dts, packet.time_base
    frames = [*context.decode(alone), *context.decode(None)]
    if not frames or int(frames[0].pict_type) != _INTRA:
        raise ValueError("the frame at which the episode begins depends on earlier ones, though it is marked as a key")


def _written(stream: Any, packets: Sequence[Any], first: int) -> bytes:
    """Return packets as an MP4 file, in which time ``first`` is 0."""
    av = require("av", extra="video")
    out = io.BytesIO()
    with av.open(out, "w", format="mp4", options=_OPTIONS) as target:
        copy = target.add_stream_from_template(stream, opaque=True)
        copy.time_base = stream.time_base
        for packet in packets:
            packet.pts, packet.dts = packet.pts - first, packet.dts - first
            packet.stream = copy
            target.mux(packet)
    return out.getvalue()
