"""Read the headers of FLAC (RFC 9639): the number of samples, the end of the stream, and the start of the next.

FLAC that was written to a pipe states no length: then the last frame shows it. Truncated FLAC, and FLAC followed by
FLAC, are detected because the last frame differs from the one that the header states.
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Final

from streaming.build.decode.streams.files import WatchedFile
from streaming.build.decode.streams.links import Link

_BEGIN: Final = re.compile(rb"fLaC[\x00\x80]\x00\x00\x22")
_FRAME: Final = re.compile(rb"\xff[\xf8\xf9]")
_INFO_BYTES: Final = 42  # the magic word and STREAMINFO
_MOST_BLOCKS: Final = 1 << 10
"""Maximum number of metadata blocks that are read."""
_TAIL_BYTES: Final = 1 << 16
"""Number of bytes at the end that are first searched for the last frame, unless the header states longer frames."""
_TAG_BYTES: Final = 128  # of ID3, after the last frame
_HEAD_BYTES: Final = 16  # longest header of a frame


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """The facts about frames in the header of a stream.

    Attributes:
        frames: First byte of the frames.
        least_block: Number of samples in the shortest frame, except the last.
        most_block: Number of samples in the longest frame.
        most_bytes: Number of bytes in the longest frame; 0: unknown.
        num_samples: Total number of samples; 0: unknown.
    """

    frames: int
    least_block: int
    most_block: int
    most_bytes: int
    num_samples: int

    @property
    def most(self) -> float:
        """Return the maximum size of all frames and a tag after them; further bytes belong to another stream."""
        if not self.most_bytes or not self.least_block:
            return math.inf
        return -(-self.num_samples // self.least_block) * self.most_bytes + _TAG_BYTES


def links_of_flac(stream: WatchedFile, at: int) -> list[Link]:
    """Return the links of a FLAC file whose first link begins at byte ``at``.

    Raises:
        ValueError: The last frame of a link is missing, or differs from the one that its header states.
    """
    head = _head(stream, at)
    if not stream.in_memory and head.num_samples and stream.num_bytes - head.frames <= head.most:
        with suppress(ValueError):  # it may be a chain, whose first header states fewer samples
            return [_link(stream, at, stream.num_bytes)]
    starts = [at, *(place for place in stream.places_of(_BEGIN, 8) if place >= head.frames)]
    stops = [*starts[1:], stream.num_bytes]
    return [_link(stream, start, stop) for start, stop in zip(starts, stops, strict=True)]


def _link(stream: WatchedFile, start: int, stop: int) -> Link:
    head = _head(stream, start)
    found = _num_samples(stream, head, stop)
    if found is None:
        stated = f"its head states {head.num_samples} samples, and " if head.num_samples else ""
        raise ValueError(f"{stated}its last frame is missing: the FLAC is truncated or damaged")
    if head.num_samples:
        return Link(start=start, stop=stop, num_samples=found)
    # Without a length, libFLAC cannot seek to some positions. The 36 bits of the length precede a checksum of 128.
    info = stream.peek(start, _INFO_BYTES)
    filled = info[:21] + (int.from_bytes(info[21:26], "big") | found).to_bytes(5, "big") + info[26:]
    return Link(start=start + _INFO_BYTES, stop=stop, num_samples=found, head=filled)


def _head(stream: WatchedFile, start: int) -> _Head:
    """Read the header of a stream.

    Raises:
        ValueError: There is no header.
    """
    info = stream.peek(start, _INFO_BYTES)
    if len(info) < _INFO_BYTES or _BEGIN.match(info) is None:
        raise ValueError("the FLAC does not begin with its STREAMINFO: damaged")
    at, is_last = start + 4, False
    for _ in range(_MOST_BLOCKS):
        block = stream.peek(at, 4)
        if is_last or len(block) < 4:
            break
        is_last, at = block[0] >= 0x80, at + 4 + int.from_bytes(block[1:], "big")
    return _Head(
        frames=at,
        least_block=int.from_bytes(info[8:10], "big"),
        most_block=int.from_bytes(info[10:12], "big"),
        most_bytes=int.from_bytes(info[15:18], "big"),
        num_samples=int.from_bytes(info[21:26], "big") & (1 << 36) - 1,
    )


def _num_samples(stream: WatchedFile, head: _Head, stop: int) -> int | None:
    """Return the number of samples up to the end of the last frame; None: the frame is missing."""
    if head.frames >= stop:
        return 0 if not head.num_samples and head.frames == stop else None
    tail_bytes = max(_TAIL_BYTES, head.most_bytes + _HEAD_BYTES + _TAG_BYTES)
    while True:
        begin = max(head.frames, stop - tail_bytes)
        tail = stream.peek(begin, stop - begin)
        others = _BEGIN.search(tail)
        places = [match.start() for match in _FRAME.finditer(tail) if others is None or match.start() > others.start()]
        for place in reversed(places):
            end = _end_of(tail[place : place + _HEAD_BYTES], head.most_block)
            if end is not None and (end == head.num_samples if head.num_samples else _is_last(tail[place:])):
                return end
        if begin == head.frames or others is not None:
            return None
        tail_bytes *= 4


def _end_of(data: bytes, most_block: int) -> int | None:
    """Return the end of a frame, as a sample number, from its header; None: it is not a frame."""
    if len(data) < 6 or data[2] >> 4 == 0 or data[2] & 15 == 15 or data[3] & 1:
        return None
    count = 8 - (data[4] ^ 0xFF).bit_length()  # ones before the first zero, as in UTF-8
    if count in (1, 8) or len(data) < 4 + max(1, count):
        return None
    number = data[4] & (0x7F >> count)
    for byte in data[5 : 4 + count]:
        if byte >> 6 != 2:
            return None
        number = number << 6 | byte & 63
    at, code, rate = 4 + max(1, count), data[2] >> 4, data[2] & 15
    wide = {6: 1, 7: 2}.get(code, 0)
    block = 1 + int.from_bytes(data[at : at + wide], "big") if wide else 192 if code == 1 else 576 << code - 2
    if not wide and code >= 8:
        block = 256 << code - 8
    at += wide + {12: 1, 13: 2, 14: 2}.get(rate, 0)
    if at >= len(data) or _crc(data[:at], 8, 0x07) != data[at]:
        return None
    return (number if data[1] & 1 else number * most_block) + block


def _is_last(frame: bytes) -> bool:
    """Return whether a frame extends to the end, or to an ID3 tag there, according to its checksum."""
    if frame[-_TAG_BYTES:][:3] == b"TAG" and _crc(frame[:-_TAG_BYTES], 16, 0x8005) == 0:
        return True
    return _crc(frame, 16, 0x8005) == 0


@cache
def _table(bits: int, polynomial: int) -> tuple[int, ...]:
    """Return the checksum of each byte."""
    found = []
    for byte in range(256):
        value = byte << bits - 8
        for _ in range(8):
            value = (value << 1 ^ polynomial if value >> bits - 1 else value << 1) & (1 << bits) - 1
        found.append(value)
    return tuple(found)


def _crc(data: bytes, bits: int, polynomial: int) -> int:
    table, value, mask = _table(bits, polynomial), 0, (1 << bits) - 1
    for byte in data:
        value = value << 8 & mask ^ table[value >> bits - 8 ^ byte]
    return value
