"""Videos as members of shards, and their streams as the index of videos has them."""

from __future__ import annotations

import io
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
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
    codec: str, form: str, num_frames: int = 60, *, options: Mapping[str, str] | None = None, pix_fmt: str = "yuv420p",
    color: tuple[int, int] = (0, 2),
) -> bytes:  # fmt: skip
    """Frames of 64 x 64 at 30 a second, by any encoder of FFmpeg; ``color`` is FFmpeg's range and space."""
    return _encoded(codec, form, num_frames, tuple((options or {}).items()), pix_fmt, color)


@cache
def _encoded(
    codec: str, form: str, num_frames: int, options: tuple[tuple[str, str], ...], pix_fmt: str, color: tuple[int, int]
) -> bytes:  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "made")
        with av.open(str(path), "w", format=form) as container:
            stream = container.add_stream(codec, rate=30, options={"threads": "1", **dict(options)})
            stream.height, stream.width, stream.pix_fmt = 64, 64, pix_fmt
            stream.codec_context.color_range, stream.codec_context.colorspace = color
            for number in range(num_frames):
                frame = av.VideoFrame.from_ndarray(streams.picture(number, 64, 64))
                frame.pts, frame.time_base = number, Fraction(1, 30)
                container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
        return path.read_bytes()


def begun_late(data: bytes, skips: int, form: str = "matroska") -> bytes:
    """The same packets in a new file, without the first ones."""
    out = io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(out, "w", format=form) as target:
        copy = target.add_stream_from_template(source.streams.video[0])
        for number, packet in enumerate(source.demux(video=0)):
            if number >= skips and packet.dts is not None:
                packet.stream = copy
                target.mux(packet)
    return out.getvalue()


def with_hidden(data: bytes) -> bytes:
    """The same VP8, and behind every third packet a copy of it that decoders use and do not show."""
    out = io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(out, "w", format="matroska") as target:
        copy = target.add_stream_from_template(source.streams.video[0])
        for number, packet in enumerate(source.demux(video=0)):
            if packet.dts is None:
                continue
            hidden = av.Packet(bytes(packet))
            hidden.update(bytes([bytes(packet)[0] & ~0x10]) + bytes(packet)[1:])
            hidden.pts, hidden.dts, hidden.time_base = packet.pts + 3, packet.dts + 3, packet.time_base
            for one in (packet, hidden) if number % 3 == 2 else (packet,):
                one.stream = copy
                target.mux(one)
    return out.getvalue()


def edited(data: bytes, edits: Sequence[tuple[float, float | None]]) -> bytes:
    """The same MP4, whose table is behind its media, with another edit list for its first stream.

    Args:
        data: The file.
        edits: Of each edit how long it lasts, and at which second of the media it begins (None: nothing is shown).
    """
    out = bytearray(data)
    (movie, movie_end), (track, track_end) = _found(out, 0, len(out), b"moov", b"trak")
    [(media, media_end)] = _found(out, track + 8, track_end, b"mdia")
    units = _number(out, _found(out, movie + 8, movie_end, b"mvhd")[0][0] + 20)
    media_units = _number(out, _found(out, media + 8, media_end, b"mdhd")[0][0] + 20)
    rows = [(round(lasts * units), -1 if at is None else round(at * media_units)) for lasts, at in edits]
    entries = struct.pack(">II", 0, len(rows)) + b"".join(struct.pack(">IiHH", *row, 1, 0) for row in rows)
    made = _box(b"edts", _box(b"elst", entries))
    there = _found(out, track + 8, track_end, b"edts") or [(media, media)]
    out[slice(*there[0])] = made
    grown = len(made) - (there[0][1] - there[0][0])
    for at in (track, movie):
        out[at : at + 4] = struct.pack(">I", _number(out, at) + grown)
    return bytes(out)


def _box(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I4s", 8 + len(content), kind) + content


def _number(data: bytes | bytearray, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "big")


def _found(data: bytes | bytearray, at: int, stop: int, *kinds: bytes) -> list[tuple[int, int]]:
    """Where the first box of the first kind is, and in it that of the next."""
    for kind, first, last in _boxes(data, at, stop):
        if kind == kinds[0]:
            return [(first, last), *(_found(data, first + 8, last, *kinds[1:]) if kinds[1:] else ())]
    return []


def _boxes(data: bytes | bytearray, at: int, stop: int) -> Iterator[tuple[bytes, int, int]]:
    while at + 8 <= stop:
        size = _number(data, at)
        yield bytes(data[at + 4 : at + 8]), at, at + size
        at += size
