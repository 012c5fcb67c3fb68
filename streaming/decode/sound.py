"""Decode sounds, or clips of them, by libsndfile: WAV, FLAC, MP3, and Ogg with Vorbis or Opus; resample them by soxr.

The content decides, not the name. A clip has the samples that decoding everything would give, and of a file only
the bytes around it are read (of MP3, all before it, since nothing says where its frames lie).

What states its own length must keep to it: a stream that ends early is an error, never a shorter sound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

import numpy as np
import numpy.typing as npt

from streaming.arguments import checks_names
from streaming.decode.clips import (
    FIRST_SHARE,
    MAX_BYTES,
    DrawnClip,
    Encoded,
    Short,
    Start,
    WatchedFile,
    begin_of,
    check_begin,
    check_bytes,
    checked_number,
    checked_ranges,
    checked_start,
    opened,
    pays,
    too_short,
)
from streaming.decode.values import require
from streaming.errors import ConfigError

_FORMATS: Final = frozenset(("WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3"))
_CONTEXT: Final = 400
"""Periods of the lower rate that are read around a clip before it is resampled: the filter of soxr's quality HQ reaches
160 (errors of 1e-6 and less of the loudest sample from there on, from 8 to 192 kHz)."""
_OPUS_BEFORE_S: Final = 1
"""What is decoded before a clip of Opus, beside the 80 ms of libsndfile (RFC 7845): the decoder predicts from what it
has decoded. Steady tones at 16 kHz, jumped into: off by 0.03 without it, by up to 0.002 with it, most by nothing."""
_PAGE_BYTES: Final = 65_307  # the largest page of Ogg (RFC 3533)
_KBITS: Final = (  # of MPEG 1 and 2 in layer III, by the number in a frame's header
    (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 0),
    (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 0),
)
_RATES: Final = (44_100, 48_000, 32_000, 0)


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
        samples: Length of a clip, at the rate that comes out.
        rate: Samples per second that come out; None: as stored. The whole sound would give the same after resampling,
            by soxr in quality HQ.
        channels: 1 mixes all channels (their mean), 2 and more repeat one channel; None: as stored. Other changes are
            an error of the sample.
        start: Where a clip begins: ``"random"`` (default; drawn by seed, epoch and position), ``"first"``,
            ``"center"``, or a second of the stream. Without a length, a second is where the rest begins.
        short: What becomes of a clip that is longer than its sound: ``"pad"`` (default) adds zeros at the end,
            ``"keep"`` leaves it shorter, ``"refuse"`` makes it a bad sample.
        dtype: ``"float32"``, or ``"int16"``: 32,768 times as large, rounded and clipped.
        details: Whether a dict comes out: ``samples``, ``length`` (number of samples before the zeros), ``rate``, and
            ``start`` in seconds.
        max_bytes: Largest value that is decoded.
        reads_ranges: Whether of streams of 8 MiB and more only the bytes around a clip are read, which then no checksum
            covers: True, or False, which reads and checks every byte; None (default): of clips, except in fields that
            are named mp3, of which half the file would be read.

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
        """Tell whether large members of a field are read in ranges."""
        return pays(self.reads_ranges, field, is_clip=self._is_clip)

    def with_rng(self, rng: np.random.Generator) -> DrawnClip:
        """Return the decoder of one sound, whose clip ``rng`` draws."""
        return DrawnClip(self._decoded, rng.random())

    def __call__(self, data: Encoded) -> npt.NDArray[Any] | dict[str, Any]:
        """Return the sound of ``data``, bytes or a seekable file; without ``with_rng``, a random clip is the middle.

        Raises:
            ValueError: It is no sound of a known kind, is damaged or ends early, is too large, or does not fit.
            Exception: Other errors of libsndfile, and of reading.
        """
        return self._decoded(data, FIRST_SHARE)

    def _decoded(self, data: Encoded, share: float) -> npt.NDArray[Any] | dict[str, Any]:
        soundfile = require("soundfile", extra="audio")
        with opened(data) as stream:
            _check_start_and_end(stream)
            with soundfile.SoundFile(stream) as sound:
                if sound.format not in _FORMATS:
                    raise ValueError(f"{sound.format} is not read; expected WAV, FLAC, MP3, or Ogg (Vorbis, Opus)")
                return self._taken(_Reader(sound, num_samples_of_mp3(stream) if sound.format == "MP3" else None), share)

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
    """An open sound."""

    def __init__(self, sound: Any, total: int | None) -> None:
        self._sound, stated = sound, int(sound.frames)
        self.rate, self.channels = int(sound.samplerate), int(sound.channels)
        if self.rate < 1 or self.channels < 1:
            raise ValueError(f"it states {self.rate} samples a second and {self.channels} channels")
        if total is not None and total > stated:
            raise ValueError(
                f"the MP3 has {total} samples, of which libsndfile reads {stated}: its bit rate varies, and no header "
                "states its length; write it anew, for example with ffmpeg -i a.mp3 -c copy b.mp3"
            )
        self.total = stated if total is None else total

    def resampled(self, first: int, stop: int, rate: int, max_bytes: int) -> npt.NDArray[np.float32]:
        """Return samples [first, stop) of the sound at ``rate``: float32 ``[samples, channels]``."""
        if rate == self.rate:
            return self.stored(first, stop, max_bytes)
        if stop <= first:
            return np.empty((0, self.channels), np.float32)
        common = math.gcd(self.rate, rate)
        up, down = rate // common, self.rate // common
        around = _CONTEXT * max(1, -(-self.rate // rate))
        # At multiples of ``down`` stored samples, samples of both rates lie at the same time.
        begins = max(0, first * down // up - around) // down
        low, high = begins * down, min(self.total, -(-stop * down // up) + around)
        soxr = require("soxr", extra="audio")
        made: npt.NDArray[np.float32] = soxr.resample(self.stored(low, high, max_bytes), self.rate, rate)
        part = made[first - begins * up : stop - begins * up]
        if len(part) < stop - first:  # a few samples at the end of very short sounds
            part = np.concatenate([part, np.zeros((stop - first - len(part), self.channels), np.float32)])
        return part

    def stored(self, first: int, stop: int, max_bytes: int) -> npt.NDArray[np.float32]:
        """Return samples [first, stop) as stored: float32 ``[samples, channels]``.

        Raises:
            ValueError: There are fewer, or they are damaged.
        """
        count = stop - first
        check_bytes(4 * self.channels * count, max_bytes, f"{count} samples of {self.channels} channels")
        if count <= 0:
            return np.empty((0, self.channels), np.float32)
        begin = max(0, first - self.rate * _OPUS_BEFORE_S) if self._sound.subtype == "OPUS" else first
        self._sound.seek(begin)  # to 0 as well: as everybody does, and libmpg123 rounds otherwise if not
        found: npt.NDArray[np.float32] = self._sound.read(stop - begin, dtype="float32", always_2d=True)
        if len(found) < stop - begin:
            raise ValueError(
                f"it states {self.total} samples and ends after {begin + len(found)}: truncated or damaged"
            )
        # libsndfile reads on behind damaged pages, and says so in a log only.
        if self._sound.format == "OGG" and "Corrupted bitstream" in self._sound.extra_info:
            raise ValueError("pages of the Ogg stream are damaged")
        return found[first - begin :]


def resampled_length(length: int, rate: int, to: int) -> int:
    """Return how many samples ``length`` of them become, as soxr rounds."""
    return (2 * length * to + rate) // (2 * rate)


def to_int16(sound: npt.NDArray[np.float32]) -> npt.NDArray[np.int16]:
    """Return ``sound`` in 16 bits: exactly what a file of 16 bits stores."""
    made: npt.NDArray[np.int16] = np.clip(np.rint(sound * np.float32(32768)), -32768, 32767).astype(np.int16)
    return made


def _check_start_and_end(stream: WatchedFile) -> None:
    """Refuse other kinds of files before a library sees them, and those cut off, which libsndfile takes for shorter.

    Raises:
        ValueError: It is one.
    """
    head = stream.peek(0, 28)
    if head[:4] in (b"RIFF", b"RIFX", b"RF64") and head[8:12] == b"WAVE":
        order: Literal["little", "big"] = "big" if head[:4] == b"RIFX" else "little"
        size = int.from_bytes(head[20:28], order) if head[12:16] == b"ds64" else int.from_bytes(head[4:8], order)
        # Programs that write to a pipe leave 0 or the largest number.
        if 0 < size < 2**32 - 1 - 64 or head[:4] == b"RF64":
            _check_length(stream, size + 8)
    elif head[:4] == b"OggS":
        _check_last_page(stream)
    elif not (head[:4] == b"fLaC" or head[:3] == b"ID3" or (head[:1] == b"\xff" and head[1:2] >= b"\xe0")):
        raise ValueError(f"not a WAV, FLAC, MP3 or Ogg file: it starts with {head[:8]!r}")


def _check_length(stream: WatchedFile, expected: int) -> None:
    if stream.num_bytes + 1 < expected:  # the byte that pads an odd chunk is often left out
        raise ValueError(f"its header states {expected} bytes, and it has {stream.num_bytes}: truncated")


def _check_last_page(stream: WatchedFile) -> None:
    tail = stream.peek(max(0, stream.num_bytes - _PAGE_BYTES), _PAGE_BYTES)
    at = len(tail)
    while (at := tail.rfind(b"OggS", 0, at)) >= 0:
        page = tail[at:]
        if len(page) >= 27 and page[4] == 0 and page[5] < 8:
            sizes = page[27 : 27 + page[26]]
            if page[5] & 4 and len(sizes) == page[26] and 27 + len(sizes) + sum(sizes) <= len(page):
                return
            break
    raise ValueError("the Ogg stream ends without its last page: truncated")


def num_samples_of_mp3(stream: WatchedFile) -> int | None:
    """Return how many samples an MP3 has, by the headers of its frames; None: its first frame states it.

    Raises:
        ValueError: Something else comes between the frames.
    """
    head, first = stream.peek(0, 10), 0
    if head[:3] == b"ID3" and len(head) == 10:
        first = 10 + (head[6] << 21 | head[7] << 14 | head[8] << 7 | head[9])
    if any(name in stream.peek(first, 256) for name in (b"Xing", b"Info", b"VBRI")):
        return None
    data, at, samples = stream.peek(first, stream.num_bytes), 0, 0
    while at < len(data):
        size, count = _mp3_frame(data[at : at + 4])
        if not size and data[at:].lstrip(b"\0")[:3] not in (b"", b"TAG", b"APE", b"LYR", b"ID3"):
            raise ValueError(f"no frame of MPEG layer III at byte {first + at}, and no tag: damaged")
        if not size or at + size > len(data):
            break
        at, samples = at + size, samples + count
    return samples


def _mp3_frame(header: bytes) -> tuple[int, int]:
    """Return the bytes and the samples of a frame by its header; 0 if it is none."""
    word = int.from_bytes(header, "big")
    version = word >> 19 & 3  # 3: MPEG 1; 2: MPEG 2; 0: MPEG 2.5
    kbits, rate = _KBITS[version != 3][word >> 12 & 15], _RATES[word >> 10 & 3] >> (2, 0, 1, 0)[version]
    if word >> 21 != 0x7FF or version == 1 or word >> 17 & 3 != 1 or not kbits or not rate:
        return 0, 0
    half = version != 3
    return (72_000 if half else 144_000) * kbits // rate + (word >> 9 & 1), 576 if half else 1152
