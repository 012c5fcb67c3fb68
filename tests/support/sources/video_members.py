"""Videos as members of shards, and their streams as the index of videos has them."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from fractions import Fraction
from functools import cache
from pathlib import Path

import av

from shard_tools.change.columns.video import stream_of
from streaming.build.decode.groups.demux import find_packets
from streaming.shards.video.table import VideoStream
from tests.support.sources import streams


def stream_at(data: bytes, at: int = 0, *, sample: int = 0, field: str = "mp4") -> VideoStream:
    """The stream of a video that begins at byte ``at`` of a shard."""
    return stream_of(sample, field, find_packets(data), data, at)


def encoded(
    codec: str, form: str, num_frames: int = 60, *, options: Mapping[str, str] | None = None, pix_fmt: str = "yuv420p"
) -> bytes:
    """Frames of 48 x 64 at 30 a second, by any encoder of FFmpeg."""
    return _encoded(codec, form, num_frames, tuple((options or {}).items()), pix_fmt)


@cache
def _encoded(codec: str, form: str, num_frames: int, options: tuple[tuple[str, str], ...], pix_fmt: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "made")
        with av.open(str(path), "w", format=form) as container:
            stream = container.add_stream(codec, rate=30, options={"threads": "1", **dict(options)})
            stream.height, stream.width, stream.pix_fmt = 64, 64, pix_fmt
            for number in range(num_frames):
                frame = av.VideoFrame.from_ndarray(streams.picture(number, 64, 64))
                frame.pts, frame.time_base = number, Fraction(1, 30)
                container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
        return path.read_bytes()
