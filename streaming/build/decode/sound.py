"""Decode sounds, or clips of them, by libsndfile: WAV, FLAC, MP3, and Ogg with Vorbis or Opus; resample them by soxr.

The content decides, not the name. A clip equals the same samples of the whole decoded sound, and only the bytes around
it are read from a file (for MP3, everything before it, since no table locates the frames).

A stream that states its length must have it: one that ends early is an error, never a shorter sound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Final, Literal

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
from streaming.build.decode.streams.files import Encoded, WatchedFile, opened
from streaming.build.decode.streams.kinds import links_of
from streaming.build.decode.streams.links import Known, Link
from streaming.build.decode.values import require
from streaming.common.arguments import checks_names
from streaming.errors import ConfigError

_FORMATS: Final = frozenset(("WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3"))
_CONTEXT: Final = 400
"""Number of periods of the lower rate that are read around a clip before it is resampled: the filter of soxr's quality
HQ reaches 160 (beyond them, errors are at most 1e-6 of the loudest sample, from 8 to 192 kHz)."""
_PASSED: Final = 1 << 16
"""Number of samples that are decoded at a time before a clip."""


@checks_names({
    "sample_rate": "write rate=", "sr": "write rate=", "duration": "write seconds=", "mono": "write channels=1",
    "offset": "write start=",
})  # fmt: skip
@dataclass(frozen=True, slots=True, kw_only=True)
class Sound:
    """Decode a sound, or a clip of it: float32 ``[channels, samples]`` in -1 to 1.

    ::

        StreamingDataset(url, decode={"flac": Sound(seconds=2.0, rate=16_000, channels=1)})  # float32 [1, 32000]

    Needs the extra ``audio``.

    Attributes:
        seconds: Length of a clip; None, and no ``samples``: the whole sound.
        samples: Length of a clip, in samples of the output.
        rate: Samples per second of the output; None: as stored. A clip equals the same part of the whole sound
            resampled by soxr in quality HQ.
        channels: Channels of the output: 1 mixes all channels (their mean), 2 and more repeat one channel; None: as
            stored. Any other change makes a bad sample.
        start: Where a clip begins: ``"random"`` (default; drawn by seed, epoch and position), ``"first"``,
            ``"center"``, or a second of the stream. Without a length, everything from that second on is decoded.
        short: What to do with a clip longer than its sound: ``"pad"`` (default) adds zeros at the end, ``"keep"``
            returns a shorter clip, ``"refuse"`` makes it a bad sample.
        dtype: ``"float32"``, or ``"int16"``: 32,768 times as large, rounded and clipped.
        details: Whether to return a dict: ``samples``, ``length`` (number of samples before the zeros), ``rate``, and
            ``start`` in seconds.
        max_bytes: Maximum size of a decoded value.
        reads_ranges: Whether to read only the bytes around a clip, which no checksum covers, from streams of at least 8
            MiB; False reads and verifies every byte. None (default): True for clips, except in fields named mp3, where
            half the file would be read.

    Raises:
        ConfigError: An argument is out of range, or would not act.
    """

    seconds: float | None = None
    samples: int | None = None
    rate: int | None = None
    channels: int | None = None
    start: Start | None = None
    short: Short | None = None
    dtype: Literal["float32", "int16"] = "float32"
    details: bool = False
    max_bytes: int = MAX_BYTES
    reads_ranges: bool | None = None

    accepts_buffer: ClassVar[bool] = True
    needs: ClassVar[tuple[tuple[str, str], ...]] = (("soundfile", "audio"), ("soxr", "audio"))

    def __post_init__(self) -> None:
        """Reject invalid arguments."""
        for option in ("samples", "rate", "channels", "max_bytes"):
            checked_number("Sound", option, getattr(self, option), whole=True)
        checked_number("Sound", "seconds", self.seconds, whole=False)
        if self.seconds is not None and self.samples is not None:
            raise ConfigError("Sound: seconds= and samples= are both given; leave one out")
        if self.dtype not in ("float32", "int16"):
            raise ConfigError(f'Sound: dtype={self.dtype!r}: expected "float32" or "int16"')
        checked_start("Sound", self.start, self.short, is_clip=self._is_clip)
        checked_ranges("Sound", self.reads_ranges, is_part=self._is_clip or self._start != "first")

    @property
    def _is_clip(self) -> bool:
        return self.seconds is not None or self.samples is not None

    @property
    def _start(self) -> Start:
        return self.start if self.start is not None else "random" if self._is_clip else "first"

    def reads_ranges_of(self, field: str) -> bool:
        """Return whether large members of a field are read in ranges."""
        return pays(self.reads_ranges, field, is_clip=self._is_clip)

    def with_rng(self, rng: np.random.Generator) -> DrawnClip:
        """Return a decoder for one sound, with a clip drawn from ``rng``."""
        return DrawnClip(self._decoded, rng.random())

    def __call__(self, data: Encoded) -> npt.NDArray[Any] | dict[str, Any]:
        """Return the sound of ``data``, bytes or a seekable file; without ``with_rng``, a random clip is the middle.

        Raises:
            ValueError: The data is not a known kind of sound, is damaged or ends early, is too large, or does not fit.
            Exception: Other errors of libsndfile, and of reading.
        """
        return self._decoded(data, FIRST_SHARE)

    def _decoded(self, data: Encoded, share: float) -> npt.NDArray[Any] | dict[str, Any]:
        with opened(data) as stream, _opened_parts(stream) as parts:
            return self._taken(_Reader(parts), share)

    def _taken(self, reader: _Reader, share: float) -> npt.NDArray[Any] | dict[str, Any]:
        """Return the wanted part of an open sound."""
        rate = self.rate or reader.rate
        total = resampled_length(reader.total, reader.rate, rate)
        check_begin(self._start, reader.total / reader.rate)
        wanted = self.samples if self.seconds is None else max(1, round(self.seconds * rate))
        room = 0 if wanted is None else max(0, total - wanted)
        first = int(begin_of(self._start, share, room + 1, rate))
        there = max(0, total - first if wanted is None else min(wanted, total - first))
        length = there if wanted is None or self.short == "keep" else wanted
        if wanted is not None and there < wanted and self.short == "refuse":
            raise too_short(there, wanted, "samples")
        channels = self.channels or reader.channels
        check_bytes(4 * channels * length, self.max_bytes, f"{length} samples of {channels} channels")
        sound = np.empty((channels, length), np.float32)
        sound[:, there:] = 0
        sound[:, :there] = self._mixed(reader.resampled(first, first + there, rate, self.max_bytes))
        made = sound if self.dtype == "float32" else to_int16(sound)
        return {"samples": made, "length": there, "rate": rate, "start": first / rate} if self.details else made

    def _mixed(self, sound: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return ``sound`` [samples, channels] as [channels, samples], mixed or repeated."""
        stored = sound.shape[1]
        if self.channels == 1 and stored > 1:
            mean: npt.NDArray[np.float32] = sound.mean(axis=1, dtype=np.float32)
            return mean[None]
        if self.channels in (None, stored) or stored == 1:
            return sound.T
        raise ValueError(f"it has {stored} channels, and channels={self.channels}; expected 1, {stored} or None")


class _Reader:
    """The samples of a file: the concatenation of its links."""

    def __init__(self, parts: list[_Part]) -> None:
        self._parts = parts
        shapes = [(part.known.rate, part.known.channels) for part in parts]
        if len(set(shapes)) > 1:
            raise ValueError(
                "it is a chain of streams of different rates or channels, "
                + ", ".join(f"{rate} Hz x {channels}" for rate, channels in dict.fromkeys(shapes))
                + "; write them as one, for example with ffmpeg -i a.ogg b.flac"
            )
        self.rate, self.channels = shapes[0]
        self.total = sum(part.known.num_samples for part in parts)

    def resampled(self, first: int, stop: int, rate: int, max_bytes: int) -> npt.NDArray[np.float32]:
        """Return samples [first, stop) of the sound at ``rate``: float32 ``[samples, channels]``."""
        if rate == self.rate:
            return self.stored(first, stop, max_bytes)
        if stop <= first:
            return np.empty((0, self.channels), np.float32)
        common = math.gcd(self.rate, rate)
        up, down = rate // common, self.rate // common
        around = _CONTEXT * max(1, -(-self.rate // rate))
        # At multiples of ``down`` stored samples, samples of both rates coincide.
        begins = max(0, first * down // up - around) // down
        low, high = begins * down, min(self.total, -(-stop * down // up) + around)
        soxr = require("soxr", extra="audio")
        stored = self.stored(low, high, max_bytes)
        if low and high == self.total:  # produces the last sample, whose half soxr rounds in floating point
            stored = np.pad(stored, ((0, 1 + down // up), (0, 0)))
        made: npt.NDArray[np.float32] = soxr.resample(stored, self.rate, rate)
        part = made[first - begins * up : stop - begins * up]
        if len(part) < stop - first:  # a few samples at the end of very short sounds
            part = np.concatenate([part, np.zeros((stop - first - len(part), self.channels), np.float32)])
        return part

    def stored(self, first: int, stop: int, max_bytes: int) -> npt.NDArray[np.float32]:
        """Return samples [first, stop) as stored: float32 ``[samples, channels]``.

        Raises:
            ValueError: There are fewer samples, or they are damaged.
        """
        count = max(0, stop - first)
        check_bytes(4 * self.channels * count, max_bytes, f"{count} samples of {self.channels} channels")
        found, behind = [], 0
        for part in self._parts:
            begin, end = max(0, first - behind), min(part.known.num_samples, stop - behind)
            if begin < end:
                found.append(part.stored(begin, end))
            behind += part.known.num_samples
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else np.empty((0, self.channels), np.float32)


class _Part:
    """An open link."""

    def __init__(self, stream: WatchedFile, link: Link, sound: Any) -> None:
        if sound.format not in _FORMATS:
            raise ValueError(f"{sound.format} is not read; expected WAV, FLAC, MP3, or Ogg (Vorbis, Opus)")
        rate, channels, stated = int(sound.samplerate), int(sound.channels), int(sound.frames)
        if rate < 1 or channels < 1:
            raise ValueError(f"it states {rate} samples a second and {channels} channels")
        total = stated if link.num_samples is None else link.num_samples
        if total > stated:
            raise ValueError(
                f"the MP3 has {total} samples, but libsndfile reads {stated}: its frames differ in length from "
                "the first, and no header states its length; rewrite it, as with ffmpeg -i a.mp3 -c copy b.mp3"
            )
        self._stream, self._link, self._sound = stream, link, sound
        self.known = Known(codec=sound.subtype, rate=rate, channels=channels, num_samples=total)

    def stored(self, first: int, stop: int) -> npt.NDArray[np.float32]:
        """Return samples [first, stop).

        Raises:
            ValueError: There are fewer samples, or they are damaged.
        """
        at = self._sought(self._link.begin(self._stream, self.known, first, stop))
        while at < first:  # decoded only as the context of later samples
            at += self._read(at, min(first - at, _PASSED))[0]
        _, found = self._read(at, stop - first)
        # libsndfile continues after damaged pages, and reports them only in a log.
        if self._sound.format == "OGG" and "Corrupted bitstream" in self._sound.extra_info:
            raise ValueError("pages of the Ogg stream are damaged")
        return found

    def _sought(self, begin: int) -> int:
        """Seek to a sample, or to the first one if the library cannot; return the position."""
        if not self._sound.can_seek():
            return 0  # freshly opened
        if begin and self._sound.seek(begin) == begin:
            return begin
        self._sound.seek(0)  # the usual way; without it, libmpg123 rounds differently
        return 0

    def _read(self, at: int, count: int) -> tuple[int, npt.NDArray[np.float32]]:
        """Return the next samples, and their number.

        Raises:
            ValueError: There are fewer samples.
        """
        found: npt.NDArray[np.float32] = self._sound.read(count, dtype="float32", always_2d=True)
        if len(found) < count:
            raise ValueError(
                f"it states {self.known.num_samples} samples and ends after {at + len(found)}: truncated or damaged"
            )
        return count, found


@cache
def _straight() -> Any:
    """Return a subclass of ``SoundFile`` that does not seek between reads.

    soundfile seeks to its current position after each read, which makes libmpg123 drop the state that the next frames
    need.
    """

    class Straight(require("soundfile", extra="audio").SoundFile):  # type: ignore[misc]
        def can_seek(self) -> bool:
            found: bool = super().seekable()
            return found

        def seekable(self) -> bool:
            return False

    return Straight


@contextmanager
def _opened_parts(stream: WatchedFile) -> Iterator[list[_Part]]:
    """Open the links of a file."""
    straight = _straight()
    with ExitStack() as stack:
        parts = []
        for link in links_of(stream):
            file = stack.enter_context(opened(stream.part(link.start, link.stop, link.head)))
            parts.append(_Part(stream, link, stack.enter_context(straight(file))))
        yield parts


def measured(data: Encoded) -> tuple[int, int, int]:
    """Return the number of samples of a sound, its samples per second, and its channels, without decoding it.

    Raises:
        ValueError: The data is not a sound that :class:`Sound` reads.
        Exception: Errors of libsndfile.
    """
    with opened(data) as stream, _opened_parts(stream) as parts:
        reader = _Reader(parts)
        return reader.total, reader.rate, reader.channels


def resampled_length(length: int, rate: int, to: int) -> int:
    """Return the number of samples after resampling ``length`` samples, rounded as soxr does in floating point."""
    return int(length / (rate / to) + 0.5)


def to_int16(sound: npt.NDArray[np.float32]) -> npt.NDArray[np.int16]:
    """Return ``sound`` in 16 bits: exactly the values that a file of 16 bits stores."""
    made: npt.NDArray[np.int16] = np.clip(np.rint(sound * np.float32(32768)), -32768, 32767).astype(np.int16)
    return made
