"""Draw videos of every codec, container, distance of key frames and kind of group."""

from __future__ import annotations

import tempfile
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

from tests.support.sources import streams

RATE = 30
SIZE = (64, 64)


def drawn_video(number: int, seed: int = 1) -> tuple[str, bytes]:
    """Return what a video is, in words, and its bytes."""
    rng = np.random.default_rng([seed, number])
    kind = KINDS[number % len(KINDS)]
    gop, between, count = int(rng.choice([4, 9, 25, 60])), int(rng.integers(0, 5)), int(rng.integers(20, 90))
    codec, options = _options(kind, gop, between)
    form = "matroska" if kind == "vp8" else str(rng.choice(["mp4", "mp4", "matroska"]))
    settings: dict[str, str] = {}
    if form == "mp4" and rng.random() < 0.5:
        settings = {"movflags": str(rng.choice(["faststart", "frag_keyframe+empty_moov"]))}
    elif form == "matroska" and rng.random() < 0.3:
        settings = {"live": "1"}
    words = f"{number}: {kind} in {form} {settings}, {count} frames, a key frame each {gop}, {between} between"
    return words, _written(codec, form, count, options, settings)


def _options(kind: str, gop: int, between: int) -> tuple[str, dict[str, str]]:
    plain = {"g": str(gop), "bf": str(between)}
    if kind == "h264 open":
        group = f"open-gop=1:keyint={gop}:min-keyint=1:b-pyramid=normal:scenecut=0"
        return "libx264", plain | {"x264-params": group}
    if kind == "h264 refreshed":  # a column of each picture instead of key frames
        return "libx264", {"x264-params": f"intra-refresh=1:keyint={gop}:scenecut=0"}
    if kind.startswith("hevc"):
        group = f"keyint={gop}:bframes={between}:open-gop={int(kind == 'hevc open')}:log-level=none"
        return "libx265", {"x265-params": group, "preset": "fast" if kind == "hevc open" else "ultrafast"}
    if kind.startswith("vp"):
        hidden = {"deadline": "realtime", "cpu-used": "8", "lag-in-frames": "10", "auto-alt-ref": "1"}
        return "libvpx" if kind == "vp8" else "libvpx-vp9", {"g": str(gop)} | hidden
    return {"h264": "libx264", "mpeg4": "mpeg4", "mpeg2": "mpeg2video"}[kind], plain


KINDS = ("h264", "h264 open", "h264 refreshed", "mpeg4", "mpeg2", "vp8", "vp9", "hevc", "hevc open")


def _written(codec: str, form: str, count: int, options: dict[str, str], settings: dict[str, str]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "made")
        with av.open(str(path), "w", format=form, options=settings) as container:
            stream = container.add_stream(codec, rate=RATE, options=options | {"threads": "1"})
            stream.height, stream.width = SIZE
            stream.pix_fmt = "yuv420p"
            for number in range(count):
                frame = av.VideoFrame.from_ndarray(streams.picture(number, *SIZE))
                frame.pts, frame.time_base = number, Fraction(1, RATE)
                container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
        return path.read_bytes()
