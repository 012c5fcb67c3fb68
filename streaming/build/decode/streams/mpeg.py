"""Read the frames of MP3: their positions, their number of samples, and the start of a following MP3.

A stream may begin with a frame of numbers instead of sound (Xing, Info, VBRI), which states the length: libsndfile
reads up to there, and ignores the rest. In a stream without such a frame, the frames are counted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from streaming.build.decode.streams.files import WatchedFile
from streaming.build.decode.streams.links import Link

_KBITS: Final = (  # of MPEG 1 and 2 in layer III, by the number in a frame's header
    (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 0),
    (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 0),
)
_RATES: Final = (44_100, 48_000, 32_000, 0)
_SYNC: Final = re.compile(rb"\xff[\xe0-\xff]")
_ODD_BYTES: Final = 1 << 16
"""Maximum number of odd bytes before the first frame."""
_SURE: Final = 4
"""Number of consecutive frames that confirm that the first of them is a frame."""
_TAG: Final = re.compile(rb"Xing|Info|VBRI")
_NUMBERS_AT: Final = (13, 15, 21, 23, 36, 38)
"""Offsets at which a frame may hold its numbers: after its header, an optional checksum, and its side information."""
_MOST_TAGS: Final = 64


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The facts about a stream in its first frame; 0 bytes: unknown."""

    num_bytes: int


def links_of_mp3(stream: WatchedFile, first: int) -> list[Link]:
    """Return the links of an MP3 file whose first frame begins at byte ``first``.

    Raises:
        ValueError: There is other data between the frames, or there are frames after the stated length.
    """
    found: list[Link] = []
    while True:
        numbers = _numbers(stream, first)
        if numbers is None:
            samples, stop = _counted(stream, first)
        else:
            samples, stop = None, first + numbers.num_bytes if numbers.num_bytes else stream.num_bytes
        behind = behind_tags(stream, stop)
        goes_on = behind < stream.num_bytes and _mp3_frame(stream.peek(behind, 4))[0] > 0
        if goes_on and behind == stop and _numbers(stream, behind) is None:
            _check_end(stream, stop)
            goes_on = False
        found.append(Link(start=first, stop=behind if goes_on else stream.num_bytes, num_samples=samples))
        if not goes_on:
            return found
        first = behind


def first_frame(stream: WatchedFile, at: int) -> int | None:
    """Return the position of the first frame of an MP3, at byte ``at`` or after odd bytes; None: no frame near it."""
    data = stream.peek(at, 2 * _ODD_BYTES)
    if _SYNC.match(data) is not None:
        return at
    for match in _SYNC.finditer(data, 0, _ODD_BYTES):
        begin, frames = match.start(), 0
        while frames < _SURE:
            size, _ = _mp3_frame(data[begin : begin + 4])
            if not size:
                break
            begin, frames = begin + size, frames + 1
        if frames == _SURE:
            return at + match.start()
    return None


def behind_tags(stream: WatchedFile, at: int) -> int:
    """Return the byte after the ID3 tags that begin at byte ``at``."""
    for _ in range(_MOST_TAGS):
        head = stream.peek(at, 10)
        if head[:3] == b"TAG":
            at += 128
        elif head[:3] == b"ID3" and len(head) == 10:
            at += 10 + (head[6] << 21 | head[7] << 14 | head[8] << 7 | head[9]) + (10 if head[5] & 0x10 else 0)
        else:
            break
    return at


def _numbers(stream: WatchedFile, first: int) -> _Numbers | None:
    """Return the facts in the frame of numbers at byte ``first``; None: the frame holds sound."""
    head = stream.peek(first, 64)
    for at in _NUMBERS_AT:
        if head[at : at + 4] in (b"Xing", b"Info"):
            flags = head[at + 7]
            place = at + 8 + (4 if flags & 1 else 0)
            return _Numbers(int.from_bytes(head[place : place + 4], "big") if flags & 2 else 0)
    return _Numbers(int.from_bytes(head[46:50], "big")) if head[36:40] == b"VBRI" else None


def _counted(stream: WatchedFile, first: int) -> tuple[int, int]:
    """Return the number of samples in the frames from byte ``first`` on, and their end, at a tag or a frame of numbers.

    Raises:
        ValueError: The frames are followed by something other than a tag.
    """
    data, at, samples = stream.peek(first, stream.num_bytes), 0, 0
    tags = [match.start() for match in _TAG.finditer(data)]
    while at < len(data):
        while tags and tags[0] < at:
            tags.pop(0)
        if tags and at and tags[0] - at in _NUMBERS_AT and _mp3_frame(data[at : at + 4])[0]:
            break
        size, count = _mp3_frame(data[at : at + 4])
        if not size and data[at:].lstrip(b"\0")[:3] not in (b"", b"TAG", b"APE", b"LYR", b"ID3"):
            raise ValueError(f"no frame of MPEG layer III at byte {first + at}, and no tag: damaged")
        if not size or at + size > len(data):
            break
        at, samples = at + size, samples + count
    return samples, first + at


def _check_end(stream: WatchedFile, stop: int) -> None:
    """Refuse frames after the end that the first frame states, except one: some programs do not count that frame.

    Raises:
        ValueError: There are such frames.
    """
    at, frames = stop, 0
    while frames < 2 and (size := _mp3_frame(stream.peek(at, 4))[0]) and at + size <= stream.num_bytes:
        at, frames = at + size, frames + 1
    if frames == 2:
        raise ValueError(
            f"the MP3 continues after byte {stop}, where its first frame says that it ends, and libsndfile would leave "
            "the rest out; rewrite it, for example with ffmpeg -i a.mp3 -c copy b.mp3"
        )


def _mp3_frame(header: bytes) -> tuple[int, int]:
    """Return the size in bytes and samples of a frame, from its header; 0 if it is not a frame."""
    word = int.from_bytes(header, "big")
    version = word >> 19 & 3  # 3: MPEG 1; 2: MPEG 2; 0: MPEG 2.5
    kbits, rate = _KBITS[version != 3][word >> 12 & 15], _RATES[word >> 10 & 3] >> (2, 0, 1, 0)[version]
    if word >> 21 != 0x7FF or version == 1 or word >> 17 & 3 != 1 or not kbits or not rate:
        return 0, 0
    half = version != 3
    return (72_000 if half else 144_000) * kbits // rate + (word >> 9 & 1), 576 if half else 1152
