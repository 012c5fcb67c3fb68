"""Read the frames of MP3: where they begin, how many samples they hold, and where another MP3 follows.

A stream may begin with a frame of numbers instead of sound (Xing, Info, VBRI), which says how long it is: libsndfile
reads up to there, and nothing behind it. One without is counted.
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
"""How many odd bytes may come before the first frame."""
_SURE: Final = 4
"""Frames in a row that make it sure that the first of them is one."""
_TAG: Final = re.compile(rb"Xing|Info|VBRI")
_NUMBERS_AT: Final = (13, 15, 21, 23, 36, 38)
"""Where a frame holds its numbers: behind its head, a checksum that it may have, and its side information."""
_MOST_TAGS: Final = 64


@dataclass(frozen=True, slots=True)
class _Numbers:
    """What a first frame says of its stream; 0 bytes: nothing."""

    num_bytes: int


def links_of_mp3(stream: WatchedFile, first: int) -> list[Link]:
    """Return the links of a file of MP3 whose first frame begins at a byte.

    Raises:
        ValueError: Something else comes between the frames, or frames come that no length counts.
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
    """Return where the first frame of an MP3 begins, at a byte or behind odd bytes; None: nowhere near."""
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
    """Return the byte behind the ID3 tags that begin at a byte."""
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
    """Return what the frame at a byte says of its stream; None: it holds sound."""
    head = stream.peek(first, 64)
    for at in _NUMBERS_AT:
        if head[at : at + 4] in (b"Xing", b"Info"):
            flags = head[at + 7]
            place = at + 8 + (4 if flags & 1 else 0)
            return _Numbers(int.from_bytes(head[place : place + 4], "big") if flags & 2 else 0)
    return _Numbers(int.from_bytes(head[46:50], "big")) if head[36:40] == b"VBRI" else None


def _counted(stream: WatchedFile, first: int) -> tuple[int, int]:
    """Return how many samples the frames from a byte on hold, and where they end, or a frame of numbers begins.

    Raises:
        ValueError: What follows is no tag.
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
    """Refuse frames behind the end that the first frame states, except one: some programs do not count that frame.

    Raises:
        ValueError: There are some.
    """
    at, frames = stop, 0
    while frames < 2 and (size := _mp3_frame(stream.peek(at, 4))[0]) and at + size <= stream.num_bytes:
        at, frames = at + size, frames + 1
    if frames == 2:
        raise ValueError(
            f"the MP3 goes on behind byte {stop}, where its first frame says that it ends, and libsndfile would leave "
            "the rest out; write it anew, for example with ffmpeg -i a.mp3 -c copy b.mp3"
        )


def _mp3_frame(header: bytes) -> tuple[int, int]:
    """Return the bytes and the samples of a frame by its header; 0 if it is none."""
    word = int.from_bytes(header, "big")
    version = word >> 19 & 3  # 3: MPEG 1; 2: MPEG 2; 0: MPEG 2.5
    kbits, rate = _KBITS[version != 3][word >> 12 & 15], _RATES[word >> 10 & 3] >> (2, 0, 1, 0)[version]
    if word >> 21 != 0x7FF or version == 1 or word >> 17 & 3 != 1 or not kbits or not rate:
        return 0, 0
    half = version != 3
    return (72_000 if half else 144_000) * kbits // rate + (word >> 9 & 1), 576 if half else 1152
