"""Tell a kind of sound by its first bytes, before a library sees it, and return its links."""

from __future__ import annotations

from typing import Literal

from streaming.decode.streams.files import WatchedFile
from streaming.decode.streams.flac import links_of_flac
from streaming.decode.streams.links import Link
from streaming.decode.streams.mpeg import behind_tags, first_frame, links_of_mp3
from streaming.decode.streams.ogg import links_of_ogg


def links_of(stream: WatchedFile) -> list[Link]:
    """Return the links of a file of sound; refuse other files, and those cut off, which libsndfile takes for shorter.

    Raises:
        ValueError: It is one.
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
    """Return the links of a file of WAV.

    Raises:
        ValueError: One is shorter than it states.
    """
    links: list[Link] = []
    at = 0
    while True:
        head = stream.peek(at, 28)
        order: Literal["little", "big"] = "big" if head[:4] == b"RIFX" else "little"
        size = int.from_bytes(head[20:28], order) if head[12:16] == b"ds64" else int.from_bytes(head[4:8], order)
        stop = stream.num_bytes
        # Programs that write to a pipe leave 0 or the largest number.
        if 0 < size < 2**32 - 1 - 64 or head[:4] == b"RF64":
            if stream.num_bytes - at + 1 < size + 8:  # the byte that pads an odd chunk is often left out
                raise ValueError(f"its header states {size + 8} bytes, and it has {stream.num_bytes - at}: truncated")
            ends = at + size + 8
            stop = next((end for end in (ends, ends + 1) if _is_wav(stream.peek(end, 12))), stop)
        links.append(Link(start=at, stop=stop))
        if stop == stream.num_bytes:
            return links
        at = stop
