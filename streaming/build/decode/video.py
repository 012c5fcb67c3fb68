"""Decode frames of videos by FFmpeg's libraries, which PyAV bundles: MP4, MOV, Matroska and WebM.

The content decides, not the name, and only these two families of files are opened: playlists and other files that would
make FFmpeg open URLs or paths are refused before it sees them. A clip equals the same frames of the whole decoded
video.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Final, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from streaming.build.decode.clips import (
    FIRST_SHARE,
    MAX_BYTES,
    DrawnClip,
    Short,
    Start,
    begin_of,
    check_begin,
    check_bytes,
    checked_number,
    checked_ranges,
    checked_start,
    pays,
    too_short,
)
from streaming.build.decode.images import MAX_PIXELS
from streaming.build.decode.streams.files import Encoded, WatchedFile, opened
from streaming.build.decode.upright import turned
from streaming.build.decode.values import require
from streaming.common.arguments import checks_names
from streaming.errors import ConfigError

_MATROSKA: Final = b"\x1a\x45\xdf\xa3"
_SEGMENT: Final = b"\x18\x53\x80\x67"
_MP4: Final = frozenset((b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot", b"styp", b"sidx", b"moof"))
CODECS: Final = frozenset((
    *("h264", "hevc", "vvc", "av1", "libdav1d", "libaom-av1", "vp8", "vp9", "libvpx", "libvpx-vp9", "theora"),
    *("mpeg4", "mpeg1video", "mpeg2video", "msmpeg4v2", "msmpeg4v3", "h263", "svq3", "cinepak"),
    *("mjpeg", "png", "ffv1", "prores", "dnxhd", "rawvideo"),
))  # fmt: skip
"""FFmpeg's decoders that are used."""
_OPTIONS: Final = {"protocol_whitelist": "none", "enable_drefs": "0", "use_absolute_path": "0", "threads": "1"}
_MAX_DECODED: Final = 2**38
"""Maximum number of pixels decoded for one clip and the frames before it: over an hour of 1920 x 1080, minutes of
work."""
_BOXES: Final = 16
"""Maximum number of boxes that are read: more than unfragmented files have."""
_DISCARD_ALL: Final = 48
"""AVDISCARD_ALL: packets of a stream are skipped without being read, where the file allows."""
_BEFORE_S: Final = 3600
"""A time before all frames, relative to the first."""
_INTRA: Final = 1
"""PyAV's number for pictures that do not depend on others."""
SAME_S: Final = 1e-6
"""Tolerance for equal times, in seconds: times of frames are fractions, times of users are floats."""
_DURATION: Final = re.compile(r"(\d+):(\d\d):(\d\d(?:\.\d+)?)")
_ORIENTATIONS: Final = {  # EXIF orientation by the signs of the matrix a b / c d
    (1, 0, 0, 1): 1, (-1, 0, 0, 1): 2, (-1, 0, 0, -1): 3, (1, 0, 0, -1): 4,
    (0, 1, 1, 0): 5, (0, 1, -1, 0): 6, (0, -1, -1, 0): 7, (0, -1, 1, 0): 8,
}  # fmt: skip


_Timed: TypeAlias = tuple[float, npt.NDArray[np.uint8]]


@checks_names({
    "num_frames": "write frames=", "duration": "write seconds=", "stride": "write every=", "step": "write every=",
    "frame_rate": "write fps=", "offset": "write start=", "resize": "write size=",
})  # fmt: skip
@dataclass(frozen=True, slots=True, kw_only=True)
class Video:
    """Decode a video, or a clip of it: uint8 ``[frames, H, W, 3]`` in RGB, upright.

    ::

        StreamingDataset(url, decode={"mp4": Video(frames=16, every=2, size=(224, 224))})  # uint8 [16, 224, 224, 3]

    Needs the extra ``video``.

    Attributes:
        frames: Number of frames of a clip; None, and no ``seconds``: the whole video.
        seconds: Length of a clip, with ``fps``: round(seconds * fps) frames.
        every: Take every n-th frame, whenever it is shown; default 1.
        fps: Take the frame that is shown at each 1 / fps of a second, leaving out or repeating frames, so that clips of
            videos with different or varying rates have the same speed.
        size: (height, width) to scale to, without keeping the aspect; None keeps the size. FFmpeg's bilinear filter
            takes all pixels into account.
        start: Where a clip begins: ``"random"`` (default; drawn by seed, epoch and position), ``"first"``,
            ``"center"``, or a second after the first frame. Without a length, everything from that second on is
            decoded.
        short: What to do with a clip longer than its video: ``"pad"`` (default) adds black frames at the end,
            ``"keep"`` returns a shorter clip, ``"refuse"`` makes it a bad sample.
        upright: Whether to apply the rotation that a camera recorded.
        details: Whether to return a dict: ``frames``, ``length`` (number of frames before the black ones), ``times`` of
            the frames in seconds (float64; NaN for black ones), and ``rate``, the mean number of frames per second.
        max_pixels: Largest height x width that is decoded.
        max_bytes: Maximum size of a decoded value.
        reads_ranges: Whether to read only the bytes around a clip, which no checksum covers, from streams of at least 8
            MiB; False reads and verifies every byte. None (default): True for clips.

    Raises:
        ConfigError: An argument is out of range, or would not act.
    """

    frames: int | None = None
    seconds: float | None = None
    every: int | None = None
    fps: float | None = None
    size: tuple[int, int] | None = None
    start: Start | None = None
    short: Short | None = None
    upright: bool = True
    details: bool = False
    max_pixels: int = MAX_PIXELS
    max_bytes: int = MAX_BYTES
    reads_ranges: bool | None = None

    accepts_buffer: ClassVar[bool] = True
    needs: ClassVar[tuple[tuple[str, str], ...]] = (("av", "video"),)

    def __post_init__(self) -> None:
        """Reject invalid arguments."""
        for option in ("frames", "every", "max_pixels", "max_bytes"):
            checked_number("Video", option, getattr(self, option), whole=True)
        for option in ("seconds", "fps"):
            checked_number("Video", option, getattr(self, option), whole=False)
        if self.size is not None and (len(self.size) != 2 or min(self.size) < 1):
            raise ConfigError(f"Video: size={self.size!r}: expected (height, width), such as (224, 224)")
        if self.every is not None and self.fps is not None:
            raise ConfigError("Video: every= counts frames and fps= says when they are shown; leave one out")
        if self.seconds is not None and (self.frames is not None or self.fps is None):
            raise ConfigError(
                f"Video: seconds={self.seconds!r} needs fps=, so that all clips have the same number of frames, and "
                "takes the place of frames=; write seconds= and fps=, or frames= with every= or fps="
            )
        checked_start("Video", self.start, self.short, is_clip=self._wanted is not None)
        checked_ranges("Video", self.reads_ranges, is_part=self._wanted is not None or self._start != "first")

    @property
    def _wanted(self) -> int | None:
        """Number of frames of a clip."""
        if self.seconds is None or self.fps is None:
            return self.frames
        return max(1, round(self.seconds * self.fps))

    @property
    def _start(self) -> Start:
        return self.start if self.start is not None else "random" if self._wanted is not None else "first"

    def reads_ranges_of(self, field: str) -> bool:
        """Return whether large members of a field are read in ranges."""
        return pays(self.reads_ranges, field, is_clip=self._wanted is not None)

    def with_rng(self, rng: np.random.Generator) -> DrawnClip:
        """Return a decoder for one video, with a clip drawn from ``rng``."""
        return DrawnClip(self._decoded, rng.random())

    def __call__(self, data: Encoded) -> npt.NDArray[np.uint8] | dict[str, Any]:
        """Return frames of ``data``, bytes or a seekable file; without ``with_rng``, a random clip is the middle.

        Raises:
            ValueError: The data is not a known kind of video, is damaged or ends early, or is too large.
            Exception: Other errors of FFmpeg, and of reading.
        """
        return self._decoded(data, FIRST_SHARE)

    def _decoded(self, data: Encoded, share: float) -> npt.NDArray[np.uint8] | dict[str, Any]:
        with opened(data) as file, closing(opened_container(file, self.max_pixels)) as container:
            video = VideoReader(container, self.max_pixels)
            with claims():
                found = self._found(video, share)
            if not found:
                raise ValueError("it has no frames")
            return self._made(found, video.rate)

    def _found(self, video: VideoReader, share: float) -> list[_Timed]:
        """Return the wanted frames that exist, with their times."""
        start, wanted = self._start, self._wanted
        if wanted is None or start not in ("random", "center"):
            if start == "first":  # all frames, whatever times the file states
                return self._clip(video, 0.0 if self.fps is not None else -math.inf)
            check_begin(start, video.lasts_s())
            return self._clip(video, begin_of(start, share, 0, 1))
        lasts = wanted / self.fps if self.fps is not None else ((wanted - 1) * self._every + 1) / video.rate
        found = self._clip(video, begin_of(start, share, video.lasts_s() - lasts, 1))
        if len(found) < wanted:  # fewer frames than length and mean rate suggest: count them
            times = video.all_times()
            last = times[max(0, len(times) - (wanted - 1) * self._every - 1)] if times else 0.0
            room = last if self.fps is None else times[-1] + 1 / video.rate - lasts
            found = self._clip(video, begin_of(start, share, room, 1))
        return found

    @property
    def _every(self) -> int:
        return 1 if self.every is None else self.every

    def _clip(self, video: VideoReader, begin: float) -> list[_Timed]:
        """Return the frames from the one shown at ``begin`` on, up to the wanted number or the end."""
        wanted, found, num_bytes = self._wanted, [], 0
        shown: Any = None
        orientation = 0
        frames = video.stepped(begin, self._every) if self.fps is None else video.shown_at(begin, 1 / self.fps)
        for time, frame in frames:
            if frame is not shown:
                orientation = orientation or (orientation_of(frame) if self.upright else 1)
                shown, pixels = frame, pixels_of(frame, self.size, orientation)
            num_bytes += pixels.nbytes
            check_bytes(pixels.nbytes * wanted if wanted else num_bytes, self.max_bytes, "the frames")
            found.append((time, pixels))
            if len(found) == wanted:
                break
        return found

    def _made(self, found: list[_Timed], rate: float) -> npt.NDArray[np.uint8] | dict[str, Any]:
        """Return the frames as an array, or a dict with details."""
        wanted, shape = self._wanted, found[0][1].shape
        if wanted is not None and self.short == "refuse" and len(found) < wanted:
            raise too_short(len(found), wanted, "frames")
        length = len(found) if wanted is None or self.short == "keep" else wanted
        made, times = np.zeros((length, *shape), np.uint8), np.full(length, np.nan)
        for number, (time, pixels) in enumerate(found):
            if pixels.shape != shape:
                raise ValueError(f"its frames change from {shape[:2]} to {pixels.shape[:2]} pixels; give a size=")
            made[number], times[number] = pixels, time
        if not self.details:
            return made
        return {"frames": made, "length": len(found), "times": times, "rate": rate}


def pixels_of(frame: Any, size: tuple[int, int] | None, orientation: int) -> npt.NDArray[np.uint8]:
    """Return a frame as uint8 [H, W, 3], upright; ``size``: (height, width) to scale the upright frame to."""
    height, width = size or (frame.height, frame.width)
    if size is not None and orientation > 4:  # the size is that of the upright frame
        height, width = width, height
    pixels = frame.to_ndarray(format="rgb24", height=height, width=width, interpolation="BILINEAR", threads=1)
    return turned(pixels, orientation)


def orientation_of(frame: Any) -> int:
    """Return the EXIF orientation of a frame, 1 to 8; 1 for rotations by other angles."""
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return 1
    values = np.frombuffer(bytes(matrix), "=i4")[[0, 1, 3, 4]]
    return _ORIENTATIONS.get(tuple(np.sign(values).tolist()), 1)


def measured(data: Encoded, max_pixels: int = MAX_PIXELS) -> tuple[float, float, int, int]:
    """Return the seconds of a video, its mean number of frames a second, width and height, without decoding it.

    Raises:
        ValueError: It is no video that :class:`Video` reads.
        Exception: Errors of FFmpeg.
    """
    with opened(data) as file, closing(opened_container(file, max_pixels)) as container:
        reader = VideoReader(container, max_pixels)
        return reader.lasts_s(), reader.rate, *reader.size


def ffmpeg() -> Any:
    """Return PyAV, which holds FFmpeg's libraries.

    Raises:
        ConfigError: It is not installed.
    """
    return require("av", extra="video")


def opened_container(file: WatchedFile, max_pixels: int) -> Any:
    """Open a file of a known kind.

    Raises:
        ValueError: The file is of another kind, or damaged.
    """
    head = file.peek(0, 12)
    if head[:4] == _MATROSKA:
        kind = "matroska"
        _check_segment(file)
    elif head[4:8] in _MP4:
        kind = "mp4"
        _check_boxes(file)
    else:
        raise ValueError(f"not an MP4, MOV, Matroska or WebM file: it starts with {head[:8]!r}")
    options = _OPTIONS | {"max_pixels": str(max_pixels)}
    with claims():
        return ffmpeg().open(file, "r", format=kind, options=options, metadata_errors="replace", io_open=_refused)


@contextmanager
def claims() -> Iterator[None]:
    """Report a failed allocation of a size that a file claims as damage, because a ``MemoryError`` would end the run.

    Raises:
        ValueError: PyAV raised its own ``MemoryError``, which has an errno.
    """
    try:
        yield
    except MemoryError as error:
        if not hasattr(error, "errno"):
            raise
        raise ValueError(f"FFmpeg cannot allocate what the file claims: {error}") from error


def _check_segment(file: WatchedFile) -> None:
    """Refuse a Matroska file that is shorter than it states, which FFmpeg would read up to its end.

    Raises:
        ValueError: The file is shorter.
    """
    at = 0
    for number in (_MATROSKA, _SEGMENT):
        head = file.peek(at, 12)
        if head[:4] != number or not head[4:]:
            return  # FFmpeg reports the error
        width = 9 - head[4].bit_length()
        bits = 7 * width
        size = int.from_bytes(head[4 : 4 + width], "big") & (1 << bits) - 1
        at += 4 + width + size
    if at > file.num_bytes and size != (1 << bits) - 1:  # all bits set: written to a pipe, size unknown
        raise ValueError(f"its header states {at} bytes, and it has {file.num_bytes}: truncated")


def _check_boxes(file: WatchedFile) -> None:
    """Refuse an MP4 whose first boxes extend beyond its end, even if the clip ends before.

    Raises:
        ValueError: A box extends beyond the end.
    """
    at = 0
    for _ in range(_BOXES):
        head = file.peek(at, 16)
        size = int.from_bytes(head[8:16] if head[:4] == b"\0\0\0\1" else head[:4], "big")
        if len(head) < 8 or size < 8:  # the last box may state 0
            return
        at += size
        if at > file.num_bytes and head[4:8] in (b"moov", b"mdat", b"moof"):
            raise ValueError(f"its header states {at} bytes, and it has {file.num_bytes}: truncated")


def check_size(width: int, height: int, max_pixels: int) -> None:
    """Refuse frames that are too large.

    Raises:
        ValueError: They are.
    """
    if width * height > max_pixels:
        raise ValueError(
            f"frames of {height} x {width} pixels, more than the {max_pixels} allowed; raise the limit with max_pixels="
        )


def _refused(url: str, flags: object, options: object) -> NoReturn:  # noqa: ARG001  as PyAV calls it
    raise ValueError(f"it refers to {url!r}, which is not opened")


class VideoReader:
    """The best video stream of an open container.

    Attributes:
        stream: PyAV's stream.
        base: The unit of its times, in seconds.
        first: The time of second 0.
        rate: Mean number of frames per second.
    """

    def __init__(self, container: Any, max_pixels: int) -> None:
        self._container, self._max_pixels = container, max_pixels
        stream = container.streams.best("video")
        if stream is None or stream.codec_context is None:
            raise ValueError("it has no video stream that FFmpeg decodes")
        if stream.codec_context.name not in CODECS:
            raise ValueError(
                f"codec {stream.codec_context.name!r} is not read; expected one of {' '.join(sorted(CODECS))}"
            )
        check_size(stream.codec_context.width, stream.codec_context.height, max_pixels)
        stream.codec_context.options = {"max_pixels": str(max_pixels)}
        stream.thread_count, stream.thread_type = 1, "NONE"
        for other in container.streams:
            if other is not stream:
                other.discard = _DISCARD_ALL
        self.stream, self._left, self._is_fresh = stream, _MAX_DECODED, True
        self.base: Fraction = stream.time_base
        self.first: int = stream.start_time or 0
        self.rate = float(stream.average_rate or stream.guessed_rate or 25)

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of its frames, as stored."""
        return self.stream.codec_context.width, self.stream.codec_context.height

    def lasts_s(self) -> float:
        """Return the length of the stream in seconds."""
        stated = self._stated_s()
        if stated is not None:
            return stated
        times = self.all_times()
        return times[-1] + 1 / self.rate if times else 0.0

    def _stated_s(self) -> float | None:
        """Return the length of the stream that the file states, in seconds."""
        stream = self.stream
        if stream.duration:
            return float(stream.duration * self.base)
        tag = next((text for name, text in stream.metadata.items() if name.upper().startswith("DURATION")), "")
        found = _DURATION.match(tag)
        if found is not None:
            hours, minutes, seconds = found.groups()
            return 3600 * int(hours) + 60 * int(minutes) + float(seconds) - float(self.first * self.base)
        return self._container.duration / 1e6 if self._container.duration else None

    def all_times(self) -> list[float]:
        """Return the time of each frame, in order, by reading all packets without decoding them."""
        self._seek(0)
        self._is_fresh = False
        found = [p.pts for p in self._container.demux(self.stream) if p.pts is not None and not p.is_discard]
        return [self._time(pts) for pts in sorted(found) if pts >= self.first]

    def _time(self, pts: int) -> float:
        return float((pts - self.first) * self.base)

    def _seek(self, time: float) -> None:
        """Seek to the last key frame before a time, or to the first one."""
        # FFmpeg seeks by decoding time: that of the second key frame may precede the time at which the first picture is
        # shown.
        ticks = math.floor((time if time > 0 else -_BEFORE_S) / self.base)
        self._container.seek(self.first + ticks, stream=self.stream)

    def shown_at(self, begin: float, step: float) -> Iterator[tuple[float, Any]]:
        """Yield (time, frame shown then) at ``begin``, ``begin + step``, …, up to the end."""
        number, shown, until = 0, None, 0.0
        for time, frame in self._from(begin):
            while shown is not None and begin + number * step < time - SAME_S:
                yield shown
                number += 1
            shown, until = (time, frame), time + (float((frame.duration or 0) * self.base) or 1 / self.rate)
        while shown is not None and begin + number * step < until - SAME_S:
            yield shown
            number += 1

    def stepped(self, begin: float, every: int) -> Iterator[tuple[float, Any]]:
        """Yield (time, frame) of every ``every``-th frame from the one shown at ``begin``, up to the end."""
        number, shown = 0, None
        for one in self._from(begin):
            if one[0] <= begin + SAME_S:  # shown at begin, unless the next one is
                shown = one
                continue
            if shown is not None:
                yield shown
                number, shown = 1, None
            if number % every == 0:
                yield one
            number += 1
        if shown is not None:
            yield shown

    def _from(self, begin: float) -> Iterator[tuple[float, Any]]:
        """Yield (time, frame) of all frames in order of time, from the one shown at ``begin`` or an earlier one."""
        back = 0.0
        while True:
            if begin > 0 or not self._is_fresh:
                self._seek(max(0.0, begin - back))
            frames = self._decoded()
            first = next(frames, None)
            if back > begin or (first is not None and first[0] <= begin + SAME_S and first[1].pict_type == _INTRA):
                break
            # Either the key frame is shown later than frames that follow it, or there is none, only pictures refreshed
            # in parts (H.264), which FFmpeg returns unfinished near the end.
            back = 4 * back + 1
        if first is not None:
            yield first
        yield from frames

    def _decoded(self) -> Iterator[tuple[float, Any]]:
        """Yield (time, frame) of all frames from the current position on."""
        last, self._is_fresh = -math.inf, False
        for packet in self._container.demux(self.stream):
            if packet.is_corrupt:
                raise ValueError(f"the data after second {max(last, 0):.3f} is damaged or cut off")
            for frame in packet.decode():
                check_size(frame.width, frame.height, self._max_pixels)
                self._left -= frame.width * frame.height
                if self._left < 0:
                    raise ValueError(
                        f"more than {_MAX_DECODED} pixels would be decoded for one clip: key frames are too rare"
                    )
                if frame.pts is None or frame.is_corrupt:
                    raise ValueError(f"a frame after second {max(last, 0):.3f} is damaged, or states no time")
                last = self._time(frame.pts)
                yield last, frame
        if last >= 0:
            self.check_end(last)

    def check_end(self, last: float) -> None:
        """Refuse a Matroska file that ends early, which FFmpeg reads as a shorter one.

        Raises:
            ValueError: The file ends early.
        """
        tag = any(name.upper().startswith("DURATION") for name in self.stream.metadata)
        stated = self._stated_s()
        if (
            tag
            and stated is not None
            and last + 2 / self.rate + 0.1 < stated
            and self._container.format.name.startswith("matroska")
        ):
            raise ValueError(f"its video ends at second {max(last, 0):.3f} of the {stated:.3f} it states: truncated")
