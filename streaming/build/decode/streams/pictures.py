"""Read what packets of pictures state: whether a decoder can start there, and whether they hold a frame to be shown.

Only the first bits of a packet are read. Sections are those of H.264 (08/2021), H.265 (08/2021), RFC 6386 (VP8) and
the VP9 bitstream specification (v0.7).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

ONE_FRAME: Final = frozenset((
    *("h264", "hevc", "vvc", "av1", "libdav1d", "libaom-av1", "vp8", "vp9", "libvpx", "libvpx-vp9"),
    *("mpeg4", "mpeg1video", "mpeg2video", "mjpeg", "png", "ffv1", "prores", "dnxhd", "rawvideo"),
))  # fmt: skip
"""Decoders that give one frame for each packet that is shown, except where a packet states something else."""
_IDR, _SLICE, _SEI = 5, 1, 6  # types of H.264's units (table 7-1)
_RECOVERY_POINT: Final = 6  # type of an SEI message (H.264, D.1)
_INTRA_SLICES: Final = (2, 4)  # I and SI, modulo 5 (H.264, table 7-6)
_LAST_SLICE, _IRAP = 31, range(16, 24)  # types of H.265's units (table 7-1)
_NOT_CODED_BYTES: Final = 16
"""A picture of MPEG-4 that is not coded, which decoders leave out, has fewer bytes."""


def starts_group(codec: str, extradata: bytes, packet: memoryview) -> bool:
    """Return whether a decoder that starts at a packet, which the container calls a key frame, gives whole pictures.

    Containers also mark pictures from which a decoder recovers slowly, such as those of a periodic intra refresh.

    Args:
        codec: FFmpeg's name of the decoder.
        extradata: The codec's header, as of ``VideoFormat``.
        packet: The packet.
    """
    if codec == "h264":
        return _starts_h264(extradata, packet)
    if codec == "hevc":
        return _first_slice_hevc(extradata, packet) in _IRAP
    if codec in ("vp8", "libvpx"):
        return len(packet) > 0 and not packet[0] & 1
    return True


def num_shown(codec: str, packet: memoryview) -> int | None:
    """Return how many frames are shown when a packet has been decoded; None: only decoding can tell."""
    if codec not in ONE_FRAME or (codec == "mpeg4" and len(packet) < _NOT_CODED_BYTES):
        return None
    if codec in ("vp8", "libvpx"):
        return len(packet) > 0 and packet[0] >> 4 & 1
    if codec in ("vp9", "libvpx-vp9"):
        return sum(_is_shown_vp9(frame) for frame in _frames_vp9(packet))
    return 1


def _units(packet: memoryview, length_bytes: int) -> Iterator[memoryview]:
    """Yield the NAL units of a packet: behind their lengths, or behind start codes (``length_bytes`` 0)."""
    if length_bytes:
        at = 0
        while at + length_bytes < len(packet):
            size = int.from_bytes(packet[at : at + length_bytes], "big")
            at += length_bytes
            yield packet[at : at + size]
            at += size
        return
    data = bytes(packet)
    at = data.find(b"\0\0\1")
    while at >= 0:
        stop = data.find(b"\0\0\1", at + 3)
        yield packet[at + 3 : stop if stop >= 0 else len(packet)]
        at = stop


def _starts_h264(extradata: bytes, packet: memoryview) -> bool:
    """Return whether a packet is an instantaneous refresh, or an intra picture at which decoding recovers at once."""
    length_bytes = (extradata[4] & 3) + 1 if len(extradata) > 6 and extradata[0] == 1 else 0
    recovers, is_intra, has_slice = False, True, False
    for unit in _units(packet, length_bytes):
        kind = unit[0] & 31 if len(unit) else 0
        if kind == _IDR:
            return True
        if kind == _SEI:
            recovers |= _recovers_at_once(unit)
        if kind == _SLICE:
            has_slice = True
            is_intra &= _slice_type(unit) % 5 in _INTRA_SLICES
    return recovers and has_slice and is_intra


def _recovers_at_once(unit: memoryview) -> bool:
    """Return whether an SEI unit has a recovery point of no frames: its first bit is 1 (Exp-Golomb 0)."""
    at = 1
    while at + 2 < len(unit):
        found = [0, 0]  # type and size of the message, each a sum of bytes up to the first that is not 255
        for number in range(2):
            while at < len(unit) and unit[at] == 255:
                found[number] += 255
                at += 1
            if at >= len(unit):
                return False
            found[number] += unit[at]
            at += 1
        kind, size = found
        if kind == _RECOVERY_POINT:
            return at < len(unit) and unit[at] >= 128
        at += size
    return False


def _slice_type(unit: memoryview) -> int:
    """Return the type of a slice, the second Exp-Golomb number of its header."""
    data = bytes(unit[1:25]).replace(b"\0\0\3", b"\0\0")
    bits = f"{int.from_bytes(data, 'big'):0{8 * len(data)}b}"
    at = 0
    value = 0
    for _ in range(2):
        zeros = bits.find("1", at) - at
        if zeros < 0 or at + 2 * zeros + 1 > len(bits):
            return 0
        value = int(bits[at + zeros : at + 2 * zeros + 1], 2) - 1
        at += 2 * zeros + 1
    return value


def _first_slice_hevc(extradata: bytes, packet: memoryview) -> int:
    """Return the type of the first slice of a packet; -1: it has none."""
    has_starts = extradata[:3] == b"\0\0\1" or extradata[:4] == b"\0\0\0\1"
    length_bytes = (extradata[21] & 3) + 1 if len(extradata) > 22 and not has_starts else 0
    for unit in _units(packet, length_bytes):
        kind = unit[0] >> 1 & 63 if len(unit) else 63
        if kind <= _LAST_SLICE:
            return kind
    return -1


def _frames_vp9(packet: memoryview) -> Iterator[memoryview]:
    """Yield the frames of a packet, which may be a superframe (annex B)."""
    marker = packet[-1] if len(packet) else 0
    num, width = (marker & 7) + 1, (marker >> 3 & 3) + 1
    index = 2 + num * width
    if marker & 0xE0 != 0xC0 or len(packet) < index or packet[-index] != marker:
        yield packet
        return
    at = 0
    for number in range(num):
        place = len(packet) - index + 1 + number * width
        size = int.from_bytes(packet[place : place + width], "little")
        yield packet[at : at + size]
        at += size


def _is_shown_vp9(frame: memoryview) -> bool:
    """Return ``show_existing_frame`` or ``show_frame`` of a frame's header (6.2)."""
    if not len(frame):
        return False
    bits = frame[0] << (frame[0] & 0x30 == 0x30)  # profile 3 has a bit more
    return bool(bits & 0x08 or bits & 0x02)
