"""Inspect one value of a field: sizes, modes, lengths, types, from headers only; pixels and sounds are not decoded."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from PIL import TiffImagePlugin

from shard_tools.look.stats.kinds import MASK, UNKNOWN, kind_of_value
from shard_tools.look.stats.media_heads import RangedValue, Read, Stated, stated_by
from shard_tools.look.stats.sketches import Word
from streaming.build.decode.images import MAX_PIXELS, open_image
from streaming.build.decode.upright import orientation_of
from streaming.build.decode.values import unpacked_head
from streaming.common.arguments import unpacked_name

HEAD_BYTES: Final = 32 << 10  # holds the header of most images and arrays
TEXT_BYTES: Final = 1 << 20  # the part of a text or JSON that is read
_HEADS: Final = {"image": HEAD_BYTES, "audio": 4096, "video": 16 << 10, "tensor": 4096, UNKNOWN: 512}
_WHOLE: Final = ("text", "json", "class", "number", MASK)
_MEDIA: Final = ("audio", "video")
_WORD_CHARACTERS = 64
_JSON_KEYS = 64
_DEEPEST = 64  # most dimensions of an array
_WEBP_EXIF: Final = 0x08
_UNREADABLE_IMAGES: Final = frozenset({"avif", "heic", "heif", "jp2", "jxl"})
_UNREADABLE_VIDEOS: Final = frozenset({"avi", "mpg", "mpeg"})


@dataclass(frozen=True, slots=True)
class Seen:
    """Facts of one value: numbers and words, by name."""

    numbers: Mapping[str, float] = field(default_factory=dict)
    words: Mapping[str, Word] = field(default_factory=dict)
    many: Mapping[str, Sequence[Word]] = field(default_factory=dict)


class CutError(ValueError):
    """The beginning of a value does not suffice to inspect it."""


def head_bytes(kind: str) -> int:
    """Return the number of bytes of a value of this kind to inspect; 0: none."""
    return TEXT_BYTES if kind in _WHOLE else _HEADS.get(kind, 0)


def look(kind: str, field_name: str, data: bytes, num_bytes: int, more: Read | None = None) -> Seen:
    """Return the facts of a value.

    Args:
        kind: The kind of the field.
        field_name: The field.
        data: The beginning of its bytes, at least :func:`head_bytes` bytes of them.
        num_bytes: Size of the whole value.
        more: Reads other bytes of it, for sounds and videos, whose headers may lie at the end.

    Raises:
        CutError: More of its bytes are needed.
        Exception: The value is broken; the error may come from any library.
    """
    found = _LOOKS.get(kind)
    if found is None and kind not in _MEDIA:
        return Seen()
    inner = unpacked_name(field_name)
    if kind in _MEDIA and inner is None:
        return _media(field_name, RangedValue(data, num_bytes, more), is_video=kind == "video")
    if inner is not None:
        field_name, (data, is_whole) = inner, unpacked_head(data, head_bytes(kind))
        num_bytes = len(data) + (not is_whole)
    if found is None:
        return Seen()
    try:
        return found(field_name, data, num_bytes)
    except Exception as error:
        if len(data) < num_bytes and kind in _HEADS:
            raise CutError(f"{error}") from error
        raise


def _image(field_name: str, data: bytes, num_bytes: int) -> Seen:
    if field_name.lower().rpartition(".")[2] in _UNREADABLE_IMAGES:
        return Seen()
    webp = _webp_canvas(data)
    if webp is not None:  # Pillow would allocate its pixels on opening
        width, height, mode = webp
        if data[12:16] == b"VP8X" and data[20] & _WEBP_EXIF and len(data) < num_bytes:
            raise ValueError("its EXIF block comes last")
        return _image_seen("WEBP", mode, width, height, orientation_of(data))
    with open_image(data) as image:
        orientation = orientation_of(data)
        if isinstance(image, TiffImagePlugin.TiffImageFile):
            orientation = int(image.tag_v2.get(274, 1))
        return _image_seen(str(image.format), image.mode, image.width, image.height, orientation)


def _image_seen(kind: str, mode: str, width: int, height: int, orientation: int) -> Seen:
    words: dict[str, Word] = {"format": kind, "mode": mode, "size": f"{width}x{height}", "orientation": orientation}
    if width * height > MAX_PIXELS:
        words["too_large"] = True
    return Seen(numbers={"width": width, "height": height}, words=words)


def _webp_canvas(data: bytes) -> tuple[int, int, str] | None:
    """Return width, height and mode of a WebP by its first chunk; None if the data is not a WebP."""
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        return None
    if len(data) < 30:
        raise ValueError(f"WebP of {len(data)} bytes")
    name = data[12:16]
    if name == b"VP8X":
        mode = "RGBA" if data[20] & 0x10 else "RGB"
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1, mode
    if name == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF, "RGB"
    if name == b"VP8L" and data[20] == 0x2F:
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, "RGBA" if bits >> 28 & 1 else "RGB"
    raise ValueError(f"WebP whose first chunk is {name!r}")


def _text(_: str, data: bytes, num_bytes: int) -> Seen:
    if len(data) < num_bytes:
        return Seen(words={"longer_than_read": True})
    text = data.decode()
    return Seen(numbers={"characters": len(text), "words": len(text.split())})


def _json(_: str, data: bytes, num_bytes: int) -> Seen:
    if len(data) < num_bytes:
        return Seen(words={"longer_than_read": True})
    content = json.loads(data)
    if not isinstance(content, dict):
        return Seen(words={"type": type(content).__name__})
    return Seen(words={"type": "object"}, many={"keys": [_short(name) for name in list(content)[:_JSON_KEYS]]})


def _tensor(field_name: str, data: bytes, num_bytes: int) -> Seen:
    kind = field_name.lower().rpartition(".")[2]
    if kind in {"safetensors", "sft"}:
        size = int.from_bytes(data[:8], "little")
        if size > num_bytes - 8:
            raise ValueError(f"a header of {size} bytes in {num_bytes}")
        header = json.loads(data[8 : 8 + size])
        shapes = (_shape(one["dtype"], one["shape"]) for name, one in header.items() if name != "__metadata__")
        return Seen(many={"array": [*dict.fromkeys(shapes)][:_JSON_KEYS]})
    if kind != "npy":
        return Seen()
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    read: Any = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(stream)
    if dtype.hasobject:
        raise ValueError("an array of Python objects, which are pickles: decoders refuse it")
    return Seen(words={"array": _shape(str(dtype), shape)}, numbers={"items": float(np.prod(shape, dtype=np.float64))})


def _shape(dtype: str, shape: Any) -> str:
    return _short(f"{dtype} [{', '.join(str(one) for one in list(shape)[:_DEEPEST])}]")


def _media(field_name: str, value: RangedValue, *, is_video: bool) -> Seen:
    if field_name.lower().rpartition(".")[2] in _UNREADABLE_VIDEOS:
        return Seen()
    found = stated_by(value, is_video=is_video)
    words: dict[str, Word] = {"codec": _short(found.codec)}
    words |= {"rate": found.rate} if found.rate else {}
    words |= {"channels": found.channels} if found.channels else {}
    words |= {"size": f"{found.width}x{found.height}"} if found.width else {}
    return Seen(numbers=_stated_numbers(found), words=words)


def _stated_numbers(found: Stated) -> dict[str, float]:
    numbers = {"seconds": found.seconds, "width": found.width, "height": found.height}
    numbers["frames_per_second"] = round(found.frame_rate, 3)
    return {name: number for name, number in numbers.items() if number}


def _mask(_: str, data: bytes, num_bytes: int) -> Seen:  # noqa: ARG001  the signature of all these functions
    supervised = len(data) - data.count(0)
    words: dict[str, Word] = {"kind": MASK}
    return Seen(
        numbers={"tokens": len(data), "supervised": supervised},
        words=words if supervised or not data else {**words, "unsupervised": True},
    )


def _class(_: str, data: bytes, num_bytes: int) -> Seen:  # noqa: ARG001  the signature of all these functions
    text = data.decode().strip()
    try:
        return Seen(words={"value": int(text) if len(text) < 19 else _short(text)})
    except ValueError:
        return Seen(words={"value": _short(text)})


def _number(_: str, data: bytes, num_bytes: int) -> Seen:  # noqa: ARG001  the signature of all these functions
    return Seen(numbers={"value": float(data)})


def _unknown(_: str, data: bytes, num_bytes: int) -> Seen:
    return Seen(words={"kind": kind_of_value(data, is_cut=len(data) < num_bytes)})


def _short(text: str) -> str:
    return text if len(text) <= _WORD_CHARACTERS else text[: _WORD_CHARACTERS - 1] + "…"


_LOOKS: Final[Mapping[str, Callable[[str, bytes, int], Seen]]] = {
    "image": _image, "text": _text, "json": _json, "tensor": _tensor, "class": _class, "number": _number, MASK: _mask,
    UNKNOWN: _unknown,
}  # fmt: skip
