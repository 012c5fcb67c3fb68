"""Detect the type of a file from its content, by marks too long to occur by chance.

A mark of two or three bytes occurs in one of 65,536 to 16 million random values, such as digests. Every mark here has
at least four bytes, or a structure that repeats.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

_BOXED: Final = {b"WEBP": "webp", b"WAVE": "wav", b"AVI ": "avi"}  # RIFF containers, by the word at byte 8
_BRANDS: Final = {
    b"avif": "avif",
    b"avis": "avif",
    b"heic": "heic",
    b"M4A ": "m4a",
}  # ISO media files, by the brand at byte 8
_MARKS: Final = (
    (re.compile(rb"\xff\xd8\xff[\xc0-\xcf\xda-\xfe]"), "jpg"),
    (re.compile(rb"\x89PNG\r\n\x1a\n"), "png"),
    (re.compile(rb"GIF8[79]a"), "gif"),
    (re.compile(rb"BM....\0\0\0\0....[\x0c\x28\x34\x38\x40\x6c\x7c]\0\0\0", re.DOTALL), "bmp"),  # a known header size
    (re.compile(rb"II\*\0|MM\0\*"), "tif"),
    (re.compile(rb"\0\0\0\x0cjP  \r\n\x87\n|\xff\x4f\xff\x51"), "jp2"),
    (re.compile(rb"fLaC"), "flac"),
    (re.compile(rb"ID3[\2-\4][\0-\x0f]"), "mp3"),
    (re.compile(rb"OggS"), "ogg"),
    (re.compile(rb"%PDF"), "pdf"),
    (re.compile(rb"\x93NUMPY"), "npy"),
    (re.compile(rb"\x1aE\xdf\xa3"), "webm"),
)
_BITRATES: Final = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)  # kbit/s of MPEG-1 layer III
_SAMPLE_RATES: Final = (44100, 48000, 32000)
_ALIASES: Final[Mapping[str, str]] = {
    "jpeg": "jpg", "jpe": "jpg", "tiff": "tif", **dict.fromkeys(("j2k", "j2c", "jpx"), "jp2"),
}  # fmt: skip
FILE_TYPES: Final = frozenset(
    {*(name for _, name in _MARKS), *_BOXED.values(), *_BRANDS.values(), "mp4", *_ALIASES}
)  # fmt: skip
"""Extensions of the types that :func:`file_type` detects, with other usual spellings."""
_ONE_DECODER: Final = frozenset(
    {"jpg", "png", "gif", "bmp", "tif", "webp", "avif", "jp2"}
)  # whose decoder inspects the content

ONE_FIELD: Final = "all become the field .%s, since decoders of images look at the content; other tools may not"


def file_type(payload: bytes) -> str:
    """Return the extension of a file with this content, or ``""`` if the type is unknown."""
    if payload[:4] == b"RIFF":
        return _BOXED.get(bytes(payload[8:12]), "")
    if payload[4:8] == b"ftyp":
        return _BRANDS.get(bytes(payload[8:12]), "mp4")
    found = next((extension for mark, extension in _MARKS if mark.match(payload)), "")
    return found or ("mp3" if _is_bare_mp3(payload) else "")


def is_read_as(payload: bytes, extension: str) -> bool:
    """Return whether the type of ``payload`` matches ``extension``, or the same decoder reads both.

    For types without a mark the content is not inspected, and the result is True.
    """
    extension = extension.lower()
    return extension not in FILE_TYPES or is_alike(file_type(payload), extension)


def plain_extension(extension: str) -> str:
    """Return the usual spelling of an extension: ``jpg`` for ``jpeg``."""
    return _ALIASES.get(extension, extension)


def is_alike(one: str, other: str) -> bool:
    """Return whether two extensions mean the same type, or types that one decoder distinguishes by content."""
    pair = {plain_extension(one), plain_extension(other)}
    return len(pair) == 1 or pair <= _ONE_DECODER


def _is_bare_mp3(payload: bytes) -> bool:
    """Return whether this is MPEG-1 layer III without a tag: two frames, the second where the first one ends."""
    if len(payload) < 4 or payload[0] != 0xFF or payload[1] not in {0xFA, 0xFB}:
        return False
    bitrate, rate, padding = payload[2] >> 4, payload[2] >> 2 & 3, payload[2] >> 1 & 1
    if bitrate in {0, 15} or rate == 3:
        return False
    following = 144_000 * _BITRATES[bitrate] // _SAMPLE_RATES[rate] + padding
    return payload[following : following + 2] == payload[:2]
