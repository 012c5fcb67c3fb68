"""Sounds and videos that tests make: by soundfile and PyAV."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Mapping
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import av
import numpy as np
import soundfile

KINDS = {"wav": ("WAV", "PCM_16"), "flac": ("FLAC", "PCM_16"), "mp3": ("MP3", None), "ogg": ("OGG", "VORBIS"),
         "opus": ("OGG", "OPUS")}  # fmt: skip
"""Format and subtype of soundfile by extension."""
CODECS = {"mp4": ("mp4", "libx264"), "mkv": ("matroska", "libx264"), "webm": ("webm", "libvpx-vp9")}
"""Format and encoder of PyAV by extension."""
TICKS = 3000
"""Units of time of made videos in a second."""


@cache
def sound(
    kind: str = "flac", seconds: float = 3.0, *, rate: int = 16_000, channels: int = 1, seed: int = 0, tone: float = 0.0
) -> bytes:
    """A sweep with noise, a little different in each channel; with ``tone``, a sine of so many Hz alone."""
    count = round(seconds * rate)
    times = np.arange(count)[:, None] / rate
    if tone:
        waves = np.repeat(0.4 * np.sin(2 * np.pi * tone * times), channels, 1)
    else:
        pitches = 200 * (1 + np.arange(channels)) * (1 + times / max(seconds, 1e-9))
        waves = 0.3 * np.sin(2 * np.pi * pitches * times)
        waves += np.random.default_rng(seed).normal(0, 0.05, waves.shape)
    out = io.BytesIO()
    form, subtype = KINDS[kind]
    with soundfile.SoundFile(out, "w", rate, channels, subtype, format=form) as file:
        for first in range(0, count, 8000):  # encoders of Ogg crash on very long blocks
            file.write(waves[first : first + 8000].astype(np.float32))
    return out.getvalue()


def heard(data: bytes) -> np.ndarray[Any, Any]:
    """All samples as soundfile decodes them: float32 [samples, channels]."""
    found, _ = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    return found


def picture(number: int, height: int, width: int, grain: int = 0) -> np.ndarray[Any, Any]:
    """A frame that tells its number, top from bottom and left from right; ``grain`` takes many bytes."""
    made = np.zeros((height, width, 3), np.uint8)
    if grain:
        made += np.random.default_rng(number).integers(0, grain, made.shape, np.uint8)
    made[: height // 4] = number * 5 % 256
    made[:, : width // 8, 0] = 255
    left = 3 * number % (width - 8)
    made[height // 2 : height // 2 + 8, left : left + 8] = (40, 200, 90)
    return made


@cache
def video(
    kind: str = "mp4", num_frames: int = 90, *, size: tuple[int, int] = (48, 64), gop: int = 12, bframes: int = 3,
    varying: bool = False, first: int = 0, grain: int = 0, sound_s: float = 0.0, streams: int = 1,
    faststart: bool = False, options: tuple[tuple[str, str], ...] = (),
) -> bytes:  # fmt: skip
    """Frames at 30 a second, or at varying times.

    Args:
        kind: Extension.
        num_frames: How many.
        size: Height and width of the first stream.
        gop: Frames from one key frame to the next.
        bframes: Frames in a row that refer to later ones.
        varying: Whether frames last unequally long.
        first: Number of the first picture.
        grain: Of each picture.
        sound_s: Seconds of a stream of sound.
        streams: How many streams of pictures; all but the first are of half the size.
        faststart: Whether an MP4 begins with its table of samples.
        options: Of the container.
    """
    form, codec = CODECS[kind]
    settings = dict(options) | ({"movflags": "faststart"} if faststart else {})
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, f"made.{kind}"))
        with av.open(path, "w", format=form, options=settings) as container:
            made = [_added(container, codec, (size[0] >> n, size[1] >> n), gop, bframes) for n in range(streams)]
            if sound_s:
                _add_sound(container, sound_s, "aac" if form == "mp4" else "libopus")
            for number in range(num_frames):
                for stream in made:
                    frame = av.VideoFrame.from_ndarray(picture(first + number, stream.height, stream.width, grain))
                    frame.pts = number * TICKS // 30 + (number % 3 * 23 if varying else 0)
                    frame.time_base = Fraction(1, TICKS)
                    container.mux(stream.encode(frame))
            for stream in made:
                container.mux(stream.encode(None))
        return Path(path).read_bytes()


def _added(container: Any, codec: str, size: tuple[int, int], gop: int, bframes: int) -> Any:
    options = {"g": str(gop)} | (
        {"bf": str(bframes)} if codec == "libx264" else {"deadline": "realtime", "cpu-used": "8"}
    )
    stream = container.add_stream(codec, rate=30, options=options | {"threads": "1"})
    stream.height, stream.width = size
    stream.pix_fmt, stream.codec_context.time_base = "yuv420p", Fraction(1, TICKS)
    return stream


def _add_sound(container: Any, seconds: float, codec: str) -> None:
    stream = container.add_stream(codec, rate=48_000)
    for number in range(round(seconds * 50)):
        form = "fltp" if codec == "aac" else "flt"
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 960), np.float32), format=form, layout="mono")
        frame.sample_rate, frame.pts = 48_000, number * 960
        container.mux(stream.encode(frame))
    container.mux(stream.encode(None))


def remuxed(
    data: bytes,
    *,
    turn: int | None = None,
    flip: bool = False,
    earlier: int = 0,
    options: Mapping[str, str] | None = None,
) -> bytes:
    """The same packets in a new MP4: with a display matrix, or with frames before the start of its edit list."""
    out = io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(out, "w", format="mp4", options=dict(options or {})) as target:
        stream = source.streams.video[0]
        copy = target.add_stream_from_template(stream)
        if turn is not None:
            copy.set_display_rotation(turn, hflip=flip)
        for packet in source.demux(stream):
            if packet.dts is not None and packet.pts is not None:
                packet.pts, packet.dts, packet.stream = packet.pts - earlier, packet.dts - earlier, copy
                target.mux(packet)
    return out.getvalue()


def seen(data: bytes, **options: Any) -> tuple[list[float], np.ndarray[Any, Any]]:
    """Times after the first frame, and all frames as PyAV decodes them: uint8 [frames, H, W, 3]."""
    with av.open(io.BytesIO(data)) as container:
        frames = list(container.decode(container.streams.best("video")))
        base = frames[0].time_base
        times = [float((frame.pts - frames[0].pts) * base) for frame in frames]
        return times, np.stack([frame.to_ndarray(format="rgb24", **options) for frame in frames])


class CountedFile(io.BytesIO):
    """A file that says which bytes were read, or fails from the given one on."""

    def __init__(self, data: bytes, fails_from: int | None = None) -> None:
        super().__init__(data)
        self.read_parts: list[tuple[int, int]] = []
        self.fails_from = fails_from

    def read(self, size: int | None = -1, /) -> bytes:
        begin = self.tell()
        found = super().read(size)
        if self.fails_from is not None and self.tell() > self.fails_from:
            raise ConnectionError("the store is gone")
        self.read_parts.append((begin, self.tell()))
        return found

    @property
    def num_read(self) -> int:
        """How many different bytes."""
        told = np.zeros(len(self.getbuffer()), bool)
        for begin, stop in self.read_parts:
            told[begin:stop] = True
        return int(told.sum())


@cache
def motion_jpeg(num_frames: int = 3) -> bytes:
    """A MOV whose frames are JPEGs, each of which states its own size."""
    out = io.BytesIO()
    with av.open(out, "w", format="mov") as container:
        stream = container.add_stream("mjpeg", rate=10)
        stream.height, stream.width, stream.pix_fmt = 48, 64, "yuvj420p"
        for number in range(num_frames):
            frame = av.VideoFrame.from_ndarray(picture(number, 48, 64))
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return out.getvalue()
