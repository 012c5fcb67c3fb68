"""Derive the kind of content of a field from its extension."""

from __future__ import annotations

from typing import Final

from streaming.common.arguments import unpacked_name

KINDS: Final = ("image", "audio", "video", "text", "tokens", "integer", "float", "array", "json", "bytes")
"""Kinds of content of a field."""
_BY_KIND: Final = {
    "image": "jpg jpeg jpe jfif png webp bmp gif tif tiff ppm pgm pbm pnm avif heic heif jp2 j2k j2c jpx jxl",
    "audio": "wav flac mp3 ogg opus m4a aac",
    "video": "mp4 webm mkv avi mov m4v mpg mpeg",
    "text": "txt text transcript",
    "json": "json jsn",
    "array": "npy npz safetensors sft",
    "integer": "cls cls2 index inx id int",
    "float": "float",
}
_BY_EXTENSION: Final = {name: kind for kind, names in _BY_KIND.items() for name in names.split()}


def kind_by_name(field: str) -> str:
    """Return the kind that the last part of a field's name states; ``""`` if it states none.

    A gzip field, such as ``json.gz``, has the kind of its content: it is unpacked before it is decoded.
    """
    inner = unpacked_name(field)
    return _BY_EXTENSION.get((field if inner is None else inner).lower().rpartition(".")[2], "")
