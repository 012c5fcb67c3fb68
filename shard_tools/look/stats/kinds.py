"""Determine the kind of content of a field: by its extension, or else by its values."""

from __future__ import annotations

from typing import Final

from shard_tools.make.write.filetypes import file_type
from streaming.common.arguments import unpacked_name
from streaming.shards.schema.kinds import kind_by_name

_WORDS: Final = {"array": "tensor", "integer": "number", "float": "number"}
"""Kinds with other names here than in a schema."""
_OTHERS: Final = {
    **dict.fromkeys(("cls", "cls2"), "class"),
    "tok": "tokens",
    **dict.fromkeys(("msgpack", "mp", "msg"), "msgpack"),
    **dict.fromkeys(("pyd", "pickle", "pkl", "pth", "pt"), "pickle"),
}
"""Extensions whose kind is more specific here than in a schema, or absent there."""
CLASS_NAMES: Final = frozenset(
    {"cls", "cls2", "class", "class_name", "classes", "label", "labels", "category", "target"}
)
"""Last parts of the names (in lower case) of columns that hold a class."""
UNKNOWN: Final = "bytes"
MASK: Final = "mask"
"""Kind of a field that marks tokens, which only a schema states."""


def kind_of(field: str) -> str:
    """Return the kind that the field's name implies (for a gzip field, that of the inner name); ``"bytes"`` if none."""
    inner = unpacked_name(field)
    extension = (field if inner is None else inner).lower().rpartition(".")[2]
    if inner is not None and extension == "tok":  # tokens are read in place, from shards
        return UNKNOWN
    kind = kind_by_name(extension)
    return _OTHERS.get(extension) or _WORDS.get(kind, kind) or UNKNOWN


def kind_of_value(data: bytes, *, is_cut: bool) -> str:
    """Return the kind of a value of no known name, judged by its beginning."""
    found = file_type(data)
    if found:
        return kind_of(found)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        if not is_cut or error.start < len(data) - 4:
            return UNKNOWN
        text = data[: error.start].decode()
    return "text" if data and not any(ord(one) < 32 and one not in "\t\n\r\f" for one in text) else UNKNOWN


def is_class(column: str) -> bool:
    """Return whether a column of this name holds a class."""
    return column.lower().rpartition(".")[2] in CLASS_NAMES
