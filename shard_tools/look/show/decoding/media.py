"""Draw a sound as a waveform, and a video as its poster; both state how long it lasts. Runs in a decoding process."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from streaming.build.decode import sound, video
from streaming.build.decode.sound import Sound
from streaming.build.decode.video import Video

_DRAWN_S: Final = 600.0
"""Most seconds of a sound that are decoded for its waveform."""
_POSTER_S: Final = 1.0
"""Moment of a poster: the first frames of many videos are black."""
_HEIGHT: Final = 96
_BACK, _WAVE, _INK, _PAPER = (0, 0, 0, 0), (91, 124, 184, 255), (255, 255, 255, 255), (0, 0, 0, 168)
_Sound = npt.NDArray[np.float32]


def waveform(data: bytes, pixels: int) -> tuple[dict[str, Any], Image.Image]:
    """Return facts about a sound, and its waveform: for each column of pixels, the range of all channels.

    Raises:
        Exception: The data is damaged, or no sound that :class:`Sound` reads; the error may come from any library.
    """
    length, rate, channels = sound.measured(data)
    facts: dict[str, Any] = {"seconds": length / rate, "rate": rate, "channels": channels}
    part = Sound(seconds=_DRAWN_S, start=0.0, short="keep") if length > _DRAWN_S * rate else Sound()
    found = np.asarray(part(data))
    facts["drawn_s"] = found.shape[-1] / rate
    picture = Image.new("RGBA", (pixels, _HEIGHT), _BACK)
    draw = ImageDraw.Draw(picture)
    for column, (low, high) in enumerate(ranges(found, pixels)):
        top, bottom = ((1 - value) / 2 * (_HEIGHT - 1) for value in (high, low))
        draw.line([(column, top), (column, bottom)], fill=_WAVE)
    _label(picture, lasting(facts["seconds"]))
    return facts, picture


def ranges(found: _Sound, columns: int) -> list[tuple[float, float]]:
    """Return the least and the greatest value, within -1 and 1, in each of at most ``columns`` equal parts of a sound.

    Args:
        found: float32 [channels, samples].
        columns: Number of parts.
    """
    samples = found.shape[-1]
    if not samples:
        return []
    starts = np.unique(np.linspace(0, samples, min(columns, samples), endpoint=False).astype(np.int64))
    flat = np.nan_to_num(found.reshape(-1, samples), nan=0.0, posinf=1.0, neginf=-1.0).clip(-1, 1)
    lows = np.minimum.reduceat(flat.min(axis=0), starts)
    highs = np.maximum.reduceat(flat.max(axis=0), starts)
    return [(float(low), float(high)) for low, high in zip(lows, highs, strict=True)]


_STRIP = 8
"""Frames of a strip."""


def poster(data: bytes, pixels: int) -> tuple[dict[str, Any], Image.Image]:
    """Return facts about a video, and the upright frame at its first second, or earlier in a shorter one.

    Raises:
        Exception: The data is damaged, or no video that :class:`Video` reads; the error may come from any library.
    """
    seconds, rate, width, height = video.measured(data)
    facts: dict[str, Any] = {"seconds": seconds, "rate": rate, "width": width, "height": height}
    begin = 0.0 if seconds <= 2 * _POSTER_S else _POSTER_S
    frames: Any = Video(frames=1, start=begin or "first")(data)
    picture = Image.fromarray(frames[0])
    if max(picture.size) > pixels:
        picture.thumbnail((pixels, pixels), Image.Resampling.BOX)
    _label(picture, lasting(seconds))
    return facts, picture


def strip(data: bytes, pixels: int) -> tuple[dict[str, Any], Image.Image]:
    """Return facts about a video, and upright frames at even distances of time, side by side.

    Raises:
        Exception: As for :func:`poster`.
    """
    seconds, rate, width, height = video.measured(data)
    facts: dict[str, Any] = {"seconds": seconds, "rate": rate, "width": width, "height": height}
    frames: Any = Video(
        frames=_STRIP, fps=_STRIP / max(seconds, _STRIP / max(rate, 1e-3)), start="first", short="keep"
    )(data)
    each = max(1, pixels // _STRIP)
    pictures = [Image.fromarray(frame) for frame in frames]
    for one in pictures:
        one.thumbnail((each, each), Image.Resampling.BOX)
    made = Image.new("RGB", (sum(one.width for one in pictures), max(one.height for one in pictures)))
    at = 0
    for one in pictures:
        made.paste(one, (at, 0))
        at += one.width
    return facts, made


def lasting(seconds: float) -> str:
    """Return a duration as players write it: ``0:07``, ``1:02:03``; below ten seconds with tenths, ``3.2 s``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _label(picture: Image.Image, text: str) -> None:
    """Write a text into the lower right corner of a picture."""
    draw, font = ImageDraw.Draw(picture, "RGBA"), ImageFont.load_default(12)
    left, top, right, bottom = draw.textbbox((0, 0), text, font=font)
    x, y = picture.width - (right - left) - 6, picture.height - (bottom - top) - 6
    draw.rectangle([x - 3, y - 3, picture.width - 1, picture.height - 1], fill=_PAPER)
    draw.text((x - left, y - top), text, font=font, fill=_INK)
