"""Decode text, numbers and structured data: str, int, float, JSON, MessagePack; unpack gzip before that."""

from __future__ import annotations

import gzip
import importlib
import json as _json
import sys
import zlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

from streaming.common.arguments import format_bytes
from streaming.common.inflate import GZIP_MAGIC, MAX_GZIP_RATIO, GzipError, gunzipped
from streaming.errors import ConfigError
from streaming.types import Decoder, ReadBuffer

MAX_INFLATED_BYTES = 4 << 30
"""Limit on the inflated size of one field, whatever the ratio; equal to that of a sample in a ``.tar.gz``."""


def raw(data: ReadBuffer) -> bytes:
    """Return a copy of the bytes."""
    return bytes(data)


def view(data: ReadBuffer) -> memoryview | bytes:
    """Return a read-only view of a copy of the bytes; if ``data`` is ``bytes``, nothing is copied.

    The engine recognizes this decoder and returns views of its own memory instead. In a worker of torch's loader the
    result is ``bytes``: workers pickle their samples, and a view cannot be pickled.
    """
    own = bytes(data)
    return own if _in_torch_worker() else memoryview(own)


def _in_torch_worker() -> bool:
    """Return whether this process is a worker of torch's ``DataLoader``, which pickles samples."""
    loaders = sys.modules.get("torch.utils.data")
    return loaders is not None and loaders.get_worker_info() is not None


def text(data: ReadBuffer) -> str:
    """Return UTF-8 text, exactly as stored: nothing is stripped.

    Raises:
        UnicodeDecodeError: The data is not UTF-8.
    """
    return str(data, "utf-8")


def integer(data: ReadBuffer) -> int:
    """Parse a decimal integer in ASCII; surrounding white space is allowed.

    Raises:
        ValueError: The data is not an integer.
    """
    return int(bytes(data))


def number(data: ReadBuffer) -> float:
    """Parse a float, including ``inf`` and ``nan``; surrounding white space is allowed.

    Raises:
        ValueError: The data is not a number.
    """
    return float(bytes(data))


def json(data: ReadBuffer) -> object:
    """Parse a JSON document (UTF-8, 16 or 32); ``NaN`` and ``Infinity`` are accepted, as Python writes them.

    Raises:
        ValueError: The data is not JSON.
        RecursionError: The document is nested deeper than the interpreter's stack.
    """
    try:
        text = str(data, "utf-8")  # loads(bytes) first detects the encoding, which takes as long as parsing
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
        ValueError: The data is not MessagePack.
    """
    return require("msgpack", extra="msgpack").unpackb(data, raw=False, strict_map_key=False)


def unpacked(data: ReadBuffer, max_ratio: float = MAX_GZIP_RATIO) -> bytes:
    """Return the inflated content of a field's gzip stream.

    Raises:
        GzipError: The stream is damaged, or inflates to more than ``max_ratio`` times its size (and to more than 64
            MiB), or to more than 4 GiB.
    """
    pieces, num_bytes = [], 0
    for piece in gunzipped((bytes(data),), max_ratio, "give StreamingDataset a larger max_gzip_ratio="):
        num_bytes += len(piece)
        if num_bytes > MAX_INFLATED_BYTES:
            raise GzipError(f"the field inflates to more than the {format_bytes(MAX_INFLATED_BYTES)} allowed")
        pieces.append(piece)
    return b"".join(pieces)


def unpacked_head(head: bytes, most_bytes: int) -> tuple[bytes, bool]:
    """Return at most ``most_bytes`` inflated from the start of a gzip stream, and whether they are complete.

    Raises:
        GzipError: The stream is damaged.
    """
    inflater = zlib.decompressobj(wbits=31)
    try:
        out = inflater.decompress(head, most_bytes)
    except zlib.error as error:
        raise GzipError(f"damaged gzip stream ({error})") from error
    return out, inflater.eof and not inflater.unused_data.strip(b"\0")


def is_gzip(data: bytes) -> bool:
    """Return whether ``data`` begins like a gzip stream."""
    return data.startswith(GZIP_MAGIC)


def packed(data: bytes) -> bytes:
    """Return ``data`` as a gzip stream without a time, so that equal data give equal bytes."""
    return gzip.compress(data, mtime=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpacked:
    """Unpack the gzip stream of a field, and decode its content.

    Attributes:
        below: Decoder of the content.
        max_ratio: Maximum ratio of inflated to stored size; content below 64 MiB may exceed it.
    """

    below: Decoder
    max_ratio: float = MAX_GZIP_RATIO

    accepts_buffer = True

    @staticmethod
    def before(decoder: Decoder, max_ratio: float) -> Unpacked:
        """Return a decoder that unpacks, then applies ``decoder``; a view of unpacked bytes is a copy."""
        kind = DrawingUnpacked if hasattr(decoder, "with_rng") else Unpacked
        return kind(below=raw if decoder is view else decoder, max_ratio=max_ratio)

    def __call__(self, data: ReadBuffer) -> object:
        """Return the decoded value.

        Raises:
            GzipError: The stream is damaged, or inflates to more than the limit.
        """
        return self.below(unpacked(data, self.max_ratio))


class DrawingUnpacked(Unpacked):
    """Unpack the gzip stream of a field for a decoder that draws random numbers."""

    __slots__ = ()

    def with_rng(self, rng: object) -> Unpacked:
        """Return a decoder for one sample, which draws from ``rng``."""
        return Unpacked(below=cast("Any", self.below).with_rng(rng), max_ratio=self.max_ratio)


def require(module: str, *, extra: str) -> ModuleType:
    """Return the optional dependency ``module``.

    Raises:
        ConfigError: The module is not installed; the message names the extra that provides it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"decoding needs the package {module.partition('.')[0]!r}, which is not installed; "
            f"pip install 'shardstream[{extra}]', or take the field as bytes with decode={{field: None}}"
        ) from error
