"""Decode text, numbers and structured text or binary: str, int, float, JSON, MessagePack."""

from __future__ import annotations

import importlib
import json as _json
import sys
from types import ModuleType

from streaming.errors import ConfigError
from streaming.types import ReadBuffer


def raw(data: ReadBuffer) -> bytes:
    """Return the bytes themselves, as a separate copy."""
    return bytes(data)


def view(data: ReadBuffer) -> memoryview | bytes:
    """Return the bytes as a read-only view: of a copy, which is free if ``data`` are ``bytes``.

    The engine, which knows this decoder, hands out views of its own memory instead. In a worker of torch's loader the
    result is ``bytes``: workers pickle what they return, and a view cannot be pickled.
    """
    own = bytes(data)
    return own if _in_torch_worker() else memoryview(own)


def _in_torch_worker() -> bool:
    """Tell whether this process is a worker of torch's ``DataLoader``, which pickles samples."""
    loaders = sys.modules.get("torch.utils.data")
    return loaders is not None and loaders.get_worker_info() is not None


def text(data: ReadBuffer) -> str:
    """Return UTF-8 text, exactly as stored: nothing is stripped.

    Raises:
        UnicodeDecodeError: It is not UTF-8.
    """
    return str(data, "utf-8")


def integer(data: ReadBuffer) -> int:
    """Parse a decimal integer in ASCII; surrounding white space is allowed.

    Raises:
        ValueError: It is anything else.
    """
    return int(bytes(data))


def number(data: ReadBuffer) -> float:
    """Parse a float, including ``inf`` and ``nan``; surrounding white space is allowed.

    Raises:
        ValueError: It is anything else.
    """
    return float(bytes(data))


def json(data: ReadBuffer) -> object:
    """Parse a JSON document (UTF-8, 16 or 32); ``NaN`` and ``Infinity`` are accepted, as Python writes them.

    Raises:
        ValueError: It is not JSON.
        RecursionError: It is nested deeper than the interpreter's stack.
    """
    try:
        text = str(data, "utf-8")  # loads(bytes) would detect the encoding first, which takes as long as parsing
    except UnicodeDecodeError:
        return _json.loads(bytes(data))
    if text[:1] in _FOREIGN_START or text[1:2] == "\0":
        return _json.loads(bytes(data))
    return _json.loads(text)


_FOREIGN_START = frozenset(("\ufeff", "\0"))  # a byte order mark; UTF-16 or 32 without one


def msgpack(data: ReadBuffer) -> object:
    """Parse a MessagePack document; lengths in it are limited to the length of ``data``.

    Raises:
        ConfigError: The package ``msgpack`` is not installed.
        ValueError: It is not MessagePack.
    """
    return require("msgpack", extra="msgpack").unpackb(data, raw=False, strict_map_key=False)


def require(module: str, *, extra: str) -> ModuleType:
    """Return the optional dependency ``module``.

    Raises:
        ConfigError: It is not installed; names the extra that provides it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"decoding needs the package {module.partition('.')[0]!r}, which is not installed; "
            f"pip install 'shardstream[{extra}]', or take the field as bytes with decode={{field: None}}"
        ) from error
