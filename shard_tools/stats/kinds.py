"""Tell what kind of content a field has: by its extension, and otherwise by what its values look like."""

from __future__ import annotations

from typing import Final

from shard_tools.write.filetypes import file_type

_BY_KIND: Final = {
    "image": "jpg jpeg jpe jfif png webp bmp gif tif tiff ppm pgm pbm pnm avif heic heif jp2 jxl",
    "audio": "wav flac mp3 ogg opus m4a aac",
    "video": "mp4 webm mkv avi mov m4v mpg mpeg",
    "text": "txt text transcript",
    "json": "json jsn",
    "tensor": "npy npz safetensors sft",
    "class": "cls cls2",
    "number": "index inx id int float",
    "tokens": "tok",
    "msgpack": "msgpack mp msg",
    "pickle": "pyd pickle pkl pth pt",
}
_BY_EXTENSION: Final = {name: kind for kind, names in _BY_KIND.items() for name in names.split()}
CLASS_NAMES: Final = frozenset(
    {"cls", "cls2", "class", "class_name", "classes", "label", "labels", "category", "target"}
)
"""Last parts of names, in lower case, of columns that hold a class."""
UNKNOWN: Final = "bytes"


def kind_of(field: str) -> str:
    """Return the kind that the name of a field says; ``"bytes"`` if none."""
    return _BY_EXTENSION.get(field.lower().rpartition(".")[2], UNKNOWN)


def kind_of_value(data: bytes, *, is_cut: bool) -> str:
    """Return the kind that a value of no known name looks like, from its beginning."""
    found = file_type(data)
    if found:
        return _BY_EXTENSION.get(found, UNKNOWN)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        if not is_cut or error.start < len(data) - 4:
            return UNKNOWN
        text = data[: error.start].decode()
    return "text" if data and not any(ord(one) < 32 and one not in "\t\n\r\f" for one in text) else UNKNOWN


def is_class(column: str) -> bool:
    """Tell whether a column of this name holds a class."""
    return column.lower().rpartition(".")[2] in CLASS_NAMES
