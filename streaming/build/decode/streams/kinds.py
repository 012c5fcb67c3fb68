"""Recognize a kind of sound by its first bytes, before a library sees it, and return its links."""

from __future__ import annotations

from typing import Final, Literal

from streaming.build.decode.streams.files import WatchedFile
from streaming.build.decode.streams.flac import links_of_flac
from streaming.build.decode.streams.links import Link
from streaming.build.decode.streams.mpeg import behind_tags, first_frame, links_of_mp3
from streaming.build.decode.streams.ogg import links_of_ogg

_MOST_CHUNKS: Final = 64
_GSM: Final = 0x31  # Microsoft's number of GSM 6.10
_GSM_BLOCK: Final = 65  # bytes, of 320 samples


def links_of(stream: WatchedFile) -> list[Link]:
    """Return the links of a sound file; refuse other files, and truncated ones, which libsndfile reads as shorter.

    Raises:
        ValueError: The file is of another kind, or truncated.
    """
    head = stream.peek(0, 12)
    if _is_wav(head):
        return _links_of_wav(stream)
    if head[:4] == b"OggS":
        return links_of_ogg(stream)
    at = behind_tags(stream, 0)
    if stream.peek(at, 4) == b"fLaC":
        return links_of_flac(stream, at)
    first = first_frame(stream, at)
    if first is None:
        raise ValueError(f"not a WAV, FLAC, MP3 or Ogg file: it starts with {head[:8]!r}")
    return links_of_mp3(stream, first)


def _is_wav(head: bytes) -> bool:
    return head[:4] in (b"RIFF", b"RIFX", b"RF64") and head[8:12] == b"WAVE"


def _links_of_wav(stream: WatchedFile) -> list[Link]:
    """Return the links of a WAV file.

    Raises:
        ValueError: A link is shorter than it states.
    """
    links: list[Link] = []
    at = 0
    while True:
        head = stream.peek(at, 28)
        order: Literal["little", "big"] = "big" if head[:4] == b"RIFX" else "little"
        size = int.from_bytes(head[20:28], order) if head[12:16] == b"ds64" else int.from_bytes(head[4:8], order)
        stop = stream.num_bytes
        # Programs that write to a pipe leave 0 or the largest number as the size.
        if 0 < size < 2**32 - 1 - 64 or head[:4] == b"RF64":
            missing = size + 8 - (stream.num_bytes - at)
            if missing > 1 or (missing == 1 and not _lacks_pad(stream, at, order)):
                raise ValueError(f"its header states {size + 8} bytes, and it has {stream.num_bytes - at}: truncated")
            ends = at + size + 8
            stop = next((end for end in (ends, ends + 1) if _is_wav(stream.peek(end, 12))), stop)
        links.append(Link(start=at, stop=stop, num_samples=_num_samples_of_gsm(stream, at, stop, order)))
        if stop == stream.num_bytes:
            return links
        at = stop


def _lacks_pad(stream: WatchedFile, at: int, order: Literal["little", "big"]) -> bool:
    """Return whether the WAV ends with a complete chunk of odd size, whose padding byte is often left out."""
    at, num_data_bytes = at + 12, 0
    for _ in range(_MOST_CHUNKS):
        head = stream.peek(at, 24)
        size = int.from_bytes(head[4:8], order)
        if head[:4] == b"ds64":
            num_data_bytes = int.from_bytes(head[16:24], order)
        elif head[:4] == b"data" and size == 2**32 - 1:
            size = num_data_bytes
        at += 8 + size
        if len(head) < 8 or at >= stream.num_bytes:
            return at == stream.num_bytes and size % 2 == 1
        at += size % 2
    return False


def _num_samples_of_gsm(stream: WatchedFile, at: int, stop: int, order: Literal["little", "big"]) -> int | None:
    """Return the number of samples in the GSM blocks of a WAV; None: it is not GSM.

    libsndfile mistakes a padding byte for a block.
    """
    at, is_gsm = at + 12, False
    for _ in range(_MOST_CHUNKS):
        head = stream.peek(at, 10)
        size = int.from_bytes(head[4:8], order)
        if head[:4] == b"fmt ":
            is_gsm = int.from_bytes(head[8:10], order) == _GSM
        if not is_gsm and head[:4] in (b"fmt ", b"data", b""):
            return None
        if head[:4] == b"data":
            size = size if 0 < size <= stop - at - 8 else stop - at - 8
            return size // _GSM_BLOCK * 320
        at += 8 + size + size % 2
    return None
