"""Read what the headers of sounds and videos state: codec, rate, channels, frame size, length. Nothing is decoded.

The headers are parsed here, in a few short reads, and no library sees the bytes: a hostile file takes bounded time and
memory. The figures are those that the file states; ``verify --decode`` compares them with its frames.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from streaming.build.decode.streams.files import WatchedFile
from streaming.build.decode.streams.mpeg import behind_tags, first_frame

Read = Callable[[int, int], bytes]
"""Return bytes ``[start, stop)`` of a value."""
_BLOCK_BYTES: Final = 16 << 10
_MOST_READS: Final = 24
_MOST_BYTES: Final = 1 << 20  # of one read
_MOST_BOXES: Final = 64  # of one level
_MOST_TRACKS: Final = 16
_TAIL_BYTES: Final = 16 << 10  # of an Ogg file, whose last page states the length
_MATROSKA: Final = b"\x1a\x45\xdf\xa3"
_WAV_CODECS: Final = {1: "PCM", 3: "PCM float", 6: "A-law", 7: "mu-law", 0x11: "ADPCM", 0x31: "GSM", 0x55: "MP3"}
_KBITS: Final = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 0)
_KBITS_2: Final = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 0)
_MP3_RATES: Final = (44_100, 48_000, 32_000, 0)
_AAC_RATES: Final = (96_000, 88_200, 64_000, 48_000, 44_100, 32_000, 24_000, 22_050, 16_000, 12_000, 11_025, 8000, 7350)
_BOX_CODECS: Final = {
    "avc1": "H.264", "avc3": "H.264", "hvc1": "HEVC", "hev1": "HEVC", "av01": "AV1", "vp09": "VP9", "vp08": "VP8",
    "mp4v": "MPEG-4", "mp4a": "AAC", "Opus": "Opus", "fLaC": "FLAC", "alac": "ALAC", ".mp3": "MP3", "jpeg": "MJPEG",
}  # fmt: skip
_MATROSKA_CODECS: Final = {
    "V_MPEG4/ISO/AVC": "H.264", "V_MPEGH/ISO/HEVC": "HEVC", "V_AV1": "AV1", "V_VP9": "VP9", "V_VP8": "VP8",
    "A_OPUS": "Opus", "A_VORBIS": "Vorbis", "A_FLAC": "FLAC", "A_MPEG/L3": "MP3",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """What a file states about one stream; 0 and "": it does not state it.

    Attributes:
        codec: Name of the codec.
        seconds: Length.
        rate: Samples of a sound per second.
        channels: Channels of a sound.
        width: Width of the frames, in pixels.
        height: Height of the frames.
        frame_rate: Mean number of frames per second.
    """

    codec: str
    seconds: float = 0.0
    rate: int = 0
    channels: int = 0
    width: int = 0
    height: int = 0
    frame_rate: float = 0.0


class RangedValue:
    """A value as a file: its beginning is in memory, further bytes are read in blocks, a bounded number of them.

    Args:
        head: The beginning.
        num_bytes: Size of the value.
        more: Reads other bytes of it; None: only the beginning is there.
    """

    def __init__(self, head: bytes, num_bytes: int, more: Read | None) -> None:
        self._num_bytes, self._more, self._at, self._num_reads = num_bytes, more, 0, 0
        self._blocks: list[tuple[int, bytes]] = [(0, head)]

    def read(self, size: int = -1, /) -> bytes:
        """Return up to ``size`` bytes.

        Raises:
            ValueError: That takes more reads than headers need.
        """
        stop = self._num_bytes if size < 0 else min(self._at + size, self._num_bytes)
        found = self._between(self._at, stop) if stop > self._at else b""
        self._at += len(found)
        return found

    def _between(self, start: int, stop: int) -> bytes:
        for first, block in self._blocks:
            if first <= start and stop <= first + len(block):
                return block[start - first : stop - first]
        if self._more is None:
            raise ValueError(f"bytes {start} to {stop} are not at hand")
        self._num_reads += 1
        if self._num_reads > _MOST_READS or stop - start > _MOST_BYTES:
            raise ValueError("its headers are spread over too many places")
        block = self._more(start, min(max(stop, start + _BLOCK_BYTES), self._num_bytes))
        self._blocks[1:] = [(start, block)]
        return block[: stop - start]

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move to a position; return it."""
        self._at = max(0, {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._num_bytes}[whence] + offset)
        return self._at

    def tell(self) -> int:
        """Return the position of the next byte."""
        return self._at


def stated_by(value: RangedValue, *, is_video: bool) -> Stated:
    """Return what a file states about its first stream of a video, or of a sound.

    Raises:
        ValueError: It is of another kind, or damaged.
    """
    stream = WatchedFile(value)
    head = stream.peek(0, 12)
    if head[:4] == _MATROSKA:
        return _chosen(_matroska(stream), is_video=is_video)
    if head[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"styp"):
        return _chosen(_mp4(stream), is_video=is_video)
    if is_video:
        raise ValueError(f"not an MP4, MOV, Matroska or WebM file: it starts with {head[:8]!r}")
    if head[:4] in (b"RIFF", b"RIFX", b"RF64") and head[8:12] == b"WAVE":
        return _wav(stream)
    if head[:4] == b"OggS":
        return _ogg(stream)
    at = behind_tags(stream, 0)
    if stream.peek(at, 4) == b"fLaC":
        return _flac(stream.peek(at + 8, 34))
    return _mpeg(stream, at)


def _chosen(streams: list[Stated], *, is_video: bool) -> Stated:
    found = next((one for one in streams if bool(one.width) == is_video and (one.width or one.rate)), None)
    if found is None:
        raise ValueError(f"it has no stream of {'video' if is_video else 'sound'}")
    return found


# --- sounds


def _wav(stream: WatchedFile) -> Stated:
    order = ">" if stream.peek(0, 4) == b"RIFX" else "<"
    at, long_bytes, byte_rate = 12, 0, 0
    found: Stated | None = None
    for _ in range(_MOST_BOXES):
        head = stream.peek(at, 24)
        if len(head) < 8:
            break
        name, size = head[:4], struct.unpack(order + "I", head[4:8])[0]
        if name == b"ds64":
            long_bytes = int.from_bytes(head[16:24], "little")
        elif name == b"fmt ":
            body = stream.peek(at + 8, 26).ljust(26, b"\0")
            tag, channels, rate, byte_rate, _, bits = struct.unpack(order + "HHIIHH", body[:16])
            tag = struct.unpack(order + "H", body[24:26])[0] if tag == 0xFFFE else tag
            codec = _WAV_CODECS.get(tag, f"WAV {tag}") + (f" {bits} bits" if tag in {1, 3} else "")
            found = Stated(codec=codec, rate=rate, channels=channels)
        elif name == b"data" and found is not None:
            size = long_bytes if size == 2**32 - 1 else size
            size = min(size or stream.num_bytes, stream.num_bytes - at - 8)
            return replace(found, seconds=size / byte_rate if byte_rate else 0.0)
        at += 8 + size + size % 2
    raise ValueError("WAV without format or data")


def _flac(info: bytes) -> Stated:
    if len(info) < 34:
        raise ValueError("the FLAC ends within its STREAMINFO")
    rate, samples = int.from_bytes(info[10:13], "big") >> 4, int.from_bytes(info[13:18], "big") & (1 << 36) - 1
    return Stated(codec="FLAC", rate=rate, channels=(info[12] >> 1 & 7) + 1, seconds=samples / rate if rate else 0.0)


def _ogg(stream: WatchedFile) -> Stated:
    page = stream.peek(0, 27 + 255 + 64)
    packet = page[27 + page[26] :] if len(page) > 27 else b""
    skipped, clock = 0, 0
    if packet[:8] == b"OpusHead" and len(packet) >= 19:
        found, clock = Stated(codec="Opus", rate=48_000, channels=packet[9]), 48_000
        skipped = int.from_bytes(packet[10:12], "little")
    elif packet[:7] == b"\x01vorbis" and len(packet) >= 16:
        rate = clock = int.from_bytes(packet[12:16], "little")
        found = Stated(codec="Vorbis", rate=rate, channels=packet[11])
    elif packet[:5] == b"\x7fFLAC":
        return _flac(packet[17:51])
    else:
        raise ValueError(f"Ogg whose first packet begins with {packet[:8]!r}")
    tail = stream.peek(max(stream.num_bytes - _TAIL_BYTES, 0), _TAIL_BYTES)
    at = tail.rfind(b"OggS\0")
    granule = int.from_bytes(tail[at + 6 : at + 14], "little", signed=True) if at >= 0 else -1
    return replace(found, seconds=max(granule - skipped, 0) / clock) if granule > 0 and clock else found


def _mpeg(stream: WatchedFile, at: int) -> Stated:
    """Return what the first frame of an MP3, or of AAC in ADTS, states; without a count of frames, by its bit rate."""
    head = stream.peek(at, 128)
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE0 != 0xE0:
        first = first_frame(stream, at)
        if first is None:
            raise ValueError(f"not a WAV, FLAC, MP3, AAC, MP4 or Ogg file: it starts with {head[:8]!r}")
        at, head = first, stream.peek(first, 128)
    if len(head) < 4:
        raise ValueError(f"a sound of {stream.num_bytes} bytes")
    head = head.ljust(128, b"\0")
    version, layer = head[1] >> 3 & 3, head[1] >> 1 & 3
    if layer == 0:
        number, channels = head[2] >> 2 & 15, (head[2] & 1) << 2 | head[3] >> 6
        if number >= len(_AAC_RATES):
            raise ValueError("AAC of an unknown rate")
        return Stated(codec="AAC", rate=_AAC_RATES[number], channels=channels)
    rate = _MP3_RATES[head[2] >> 2 & 3] >> {3: 0, 2: 1, 0: 2}.get(version, 0)
    if not rate or version == 1:
        raise ValueError("a frame of MP3 of an unknown rate")
    found = Stated(codec="MP3" if layer == 1 else "MP2", rate=rate, channels=1 if head[3] >> 6 == 3 else 2)
    tag = max(head.find(b"Xing", 0, 64), head.find(b"Info", 0, 64))
    if tag >= 0 and head[tag + 7] & 1:
        frames = int.from_bytes(head[tag + 8 : tag + 12], "big")
        return replace(found, seconds=frames * (1152 if version == 3 else 576) / rate)
    kbits = (_KBITS if version == 3 else _KBITS_2)[head[2] >> 4]
    return replace(found, seconds=8 * (stream.num_bytes - at) / (1000 * kbits)) if kbits and layer == 1 else found


# --- MP4 and MOV


def _boxes(stream: WatchedFile, at: int, stop: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield name, first byte of the content, and end of each box between two bytes."""
    for _ in range(_MOST_BOXES):
        head = stream.peek(at, min(16, stop - at)) if at < stop else b""
        if len(head) < 8:
            return
        size, begin = int.from_bytes(head[:4], "big"), at + 8
        if size == 1:
            size, begin = int.from_bytes(head[8:16], "big"), at + 16
        end = stop if size == 0 else at + size
        if size and end < begin:
            raise ValueError(f"a box of {size} bytes")
        yield head[4:8], begin, min(end, stop)
        at = end


def _mp4(stream: WatchedFile) -> list[Stated]:
    moov = next((span for name, *span in _boxes(stream, 0, stream.num_bytes) if name == b"moov"), None)
    if moov is None:
        raise ValueError("MP4 without its table of contents (moov): truncated")
    tracks = [span for name, *span in _boxes(stream, moov[0], moov[1]) if name == b"trak"][:_MOST_TRACKS]
    return [_track(stream, start, stop) for start, stop in tracks]


def _track(stream: WatchedFile, start: int, stop: int) -> Stated:
    inner: dict[bytes, tuple[int, int]] = {}
    for within in (b"trak", b"mdia", b"minf", b"stbl"):
        place = (start, stop) if within == b"trak" else inner.get(within)
        if place is not None:
            inner |= {name: (begin, end) for name, begin, end in _boxes(stream, *place)}
    seconds = 0.0
    if b"mdhd" in inner:
        head = stream.peek(inner[b"mdhd"][0], 36).ljust(36, b"\0")
        scale, length = struct.unpack(">IQ", head[20:32]) if head[0] == 1 else struct.unpack(">II", head[12:20])
        seconds = length / scale if scale else 0.0
    kind = stream.peek(inner[b"hdlr"][0] + 8, 4) if b"hdlr" in inner else b""
    if b"stsd" not in inner or kind not in (b"vide", b"soun"):
        return Stated(codec="")
    entry = stream.peek(inner[b"stsd"][0] + 8, 44).ljust(44, b"\0")
    name = entry[4:8].decode("latin-1")
    found = Stated(codec=_BOX_CODECS.get(name, name), seconds=seconds)
    if kind == b"soun":
        rate, channels = int.from_bytes(entry[32:34], "big"), int.from_bytes(entry[24:26], "big")
        return replace(found, rate=48_000 if name == "Opus" else rate, channels=channels)
    width, height = struct.unpack(">HH", entry[32:36])
    frames = int.from_bytes(stream.peek(inner[b"stsz"][0] + 8, 4), "big") if b"stsz" in inner else 0
    return replace(found, width=width, height=height, frame_rate=frames / seconds if seconds else 0.0)


# --- Matroska and WebM


def _elements(stream: WatchedFile, at: int, stop: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield number, first byte of the content, and end of each element between two bytes."""
    for _ in range(_MOST_BOXES):
        head = stream.peek(at, min(12, stop - at)) if at < stop else b""
        if len(head) < 2 or not head[0]:
            return
        num_id = 9 - head[0].bit_length()
        if num_id > 4 or num_id >= len(head) or not head[num_id]:
            return
        width = 9 - head[num_id].bit_length()
        bits = 7 * width
        size = int.from_bytes(head[num_id : num_id + width], "big") & (1 << bits) - 1
        begin = at + num_id + width
        end = stop if size == (1 << bits) - 1 else min(begin + size, stop)
        yield head[:num_id], begin, end
        at = end


def _values(stream: WatchedFile, start: int, stop: int) -> dict[bytes, bytes]:
    return {number: stream.peek(begin, min(end - begin, 64)) for number, begin, end in _elements(stream, start, stop)}


def _matroska(stream: WatchedFile) -> list[Stated]:
    found: list[Stated] = []
    seconds = 0.0
    top = [span for number, *span in _elements(stream, 0, stream.num_bytes) if number == b"\x18\x53\x80\x67"]
    for start, stop in top[:1]:
        for number, begin, end in _elements(stream, start, stop):
            if number == b"\x15\x49\xa9\x66":
                info = _values(stream, begin, end)
                scale = int.from_bytes(info.get(b"\x2a\xd7\xb1", b"\x0f\x42\x40"), "big")
                seconds = _float(info.get(b"\x44\x89", b"")) * scale / 1e9
            elif number == b"\x16\x54\xae\x6b":
                tracks = [span for entry, *span in _elements(stream, begin, end) if entry == b"\xae"]
                found += [_entry(stream, *span) for span in tracks[:_MOST_TRACKS]]
            elif number == b"\x1f\x43\xb6\x75":  # frames; what precedes them is enough
                break
    if not found:
        raise ValueError("Matroska without a list of its tracks before its frames")
    return [replace(one, seconds=seconds) for one in found]


def _entry(stream: WatchedFile, start: int, stop: int) -> Stated:
    inner = {number: (begin, end) for number, begin, end in _elements(stream, start, stop)}
    values = _values(stream, start, stop)
    name = values.get(b"\x86", b"").decode("latin-1")
    codec = _MATROSKA_CODECS.get(name, name.partition("_")[2] or name)
    if b"\xe0" in inner:
        video = _values(stream, *inner[b"\xe0"])
        each = int.from_bytes(values.get(b"\x23\xe3\x83", b""), "big")
        width, height = (int.from_bytes(video.get(number, b"")[:4], "big") for number in (b"\xb0", b"\xba"))
        return Stated(codec=codec, width=width, height=height, frame_rate=1e9 / each if each else 0.0)
    if b"\xe1" in inner:
        sound = _values(stream, *inner[b"\xe1"])
        rate = _float(sound.get(b"\xb5", b"")) or 8000.0
        channels = int.from_bytes(sound.get(b"\x9f", b"\1")[:2], "big")
        return Stated(codec=codec, rate=int(rate) if 0 < rate < 2**31 else 0, channels=channels)
    return Stated(codec="")


def _float(data: bytes) -> float:
    if len(data) not in {4, 8}:
        return 0.0
    found: float = struct.unpack(">f" if len(data) == 4 else ">d", data)[0]
    return found if 0 <= found < 1e15 else 0.0
