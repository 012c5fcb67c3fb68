"""Decode ``tf.train.Example`` and ``SequenceExample``, protocol buffers of lists of bytes, float32 or int64 by name.

This is only the wire format (protobuf.dev/programming-guides/encoding): varints, fixed sizes, and sized bytes. Unknown
fields are skipped; a message that claims more bytes than it has is refused.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Values = list[bytes] | npt.NDArray[Any]
"""Values of a feature: a list of bytes, or an array float32 ``[n]`` or int64 ``[n]``."""

_VARINT, _FIXED64, _SIZED, _FIXED32 = 0, 1, 2, 5
_BYTES, _FLOATS, _INTS = 1, 2, 3  # fields of a feature


@dataclass(frozen=True, slots=True)
class Example:
    """An example.

    Attributes:
        features: Values by name; None: a feature without a list.
        lists: For a SequenceExample, the values at each step, by name; None for an Example.
    """

    features: dict[str, Values | None]
    lists: dict[str, list[Values | None]] | None


def parse_example(data: bytes) -> Example:
    """Decode an Example or a SequenceExample.

    Raises:
        ValueError: It is not one.
    """
    features: dict[str, Values | None] = {}
    lists: dict[str, list[Values | None]] | None = None
    known = 0
    for number, value in _fields(data):
        if not isinstance(value, memoryview) or number not in {1, 2}:
            continue
        known += 1
        for name, entry in _entries(value):
            if number == 1:
                features[name] = _feature(entry)
            else:
                steps = [_feature(step) for one, step in _fields(entry) if one == 1 and isinstance(step, memoryview)]
                lists = (lists or {}) | {name: steps}
        if number == 2:
            lists = lists or {}
    if data and not known:
        raise ValueError("it has no features")
    return Example(features, lists)


def _entries(data: memoryview) -> Iterator[tuple[str, memoryview]]:
    """Yield the entries of a map; each is a message with a key and a value."""
    for number, entry in _fields(data):
        if number != 1 or not isinstance(entry, memoryview):
            continue
        name, value = "", memoryview(b"")
        for part, content in _fields(entry):
            if part == 1 and isinstance(content, memoryview):
                name = bytes(content).decode()
            elif part == 2 and isinstance(content, memoryview):
                value = content
        yield name, value


def _feature(data: memoryview) -> Values | None:
    """Return the values of a feature: those of its last kind, as in every protobuf reader."""
    kind, found = 0, list[memoryview]()
    for number, value in _fields(data):
        if number in {_BYTES, _FLOATS, _INTS} and isinstance(value, memoryview):
            found = [*found, value] if number == kind else [value]
            kind = number
    if not kind:
        return None
    if kind == _BYTES:
        return [
            bytes(value)
            for part in found
            for number, value in _fields(part)
            if number == 1 and isinstance(value, memoryview)
        ]
    dtype: npt.DTypeLike = np.float32 if kind == _FLOATS else np.int64
    arrays = [array for part in found for array in _numbers(part, floats=kind == _FLOATS)]
    return arrays[0] if len(arrays) == 1 else np.concatenate([np.empty(0, dtype), *arrays])


def _numbers(data: memoryview, *, floats: bool) -> Iterator[npt.NDArray[Any]]:
    """Yield the numbers of a list: packed or single."""
    for number, value in _fields(data):
        if number != 1:
            continue
        if isinstance(value, memoryview):
            yield np.frombuffer(value, "<f4") if floats else _varints(value)
        elif floats and isinstance(value, float):
            yield np.array([value], np.float32)
        elif not floats and isinstance(value, int):
            yield np.array([value], np.uint64).view(np.int64)


def _varints(data: memoryview) -> npt.NDArray[np.int64]:
    """Decode varints: int64 ``[n]``, one number per byte whose highest bit is not set."""
    if len(data) == 1 and data[0] < 0x80:  # most labels
        return np.array([data[0]], np.int64)
    raw = np.frombuffer(data, np.uint8)
    if not raw.size or raw.max() < 0x80:
        return raw.astype(np.int64)
    ends = np.flatnonzero(raw < 0x80) + 1
    if not ends.size or ends[-1] != raw.size:
        raise ValueError("a list of numbers ends within one")
    begins = np.concatenate([[0], ends[:-1]]).astype(np.int64)[: ends.size]
    sizes = ends - begins
    if sizes.max() > 10:
        raise ValueError("a number of more than 10 bytes")
    found = np.zeros(ends.size, np.uint64)
    for place in range(int(sizes.max())):
        has = sizes > place
        found[has] |= (raw[begins[has] + place] & np.uint8(0x7F)).astype(np.uint64) << np.uint64(7 * place)
    return found.view(np.int64)


def _fields(data: bytes | memoryview) -> Iterator[tuple[int, int | float | memoryview]]:
    """Yield number and value of each field: an int for a varint, a float for 4 bytes, otherwise the bytes."""
    view, at = memoryview(data), 0
    while at < len(view):
        tag, at = _varint(view, at)
        number, kind = tag >> 3, tag & 7
        if not 0 < number < 1 << 29:
            raise ValueError(f"a field of number {number}")
        value: int | float | memoryview
        if kind == _VARINT:
            value, at = _varint(view, at)
        elif kind == _SIZED:
            size, at = _varint(view, at)
            value, at = view[at : at + size], at + size
        elif kind == _FIXED32:
            value, at = _float(view[at : at + 4]), at + 4
        elif kind == _FIXED64:
            value, at = view[at : at + 8], at + 8
        else:
            raise ValueError(f"a field of kind {kind}")
        if at > len(view):
            raise ValueError("a field ends after its message")
        yield number, value


def _float(data: memoryview) -> float:
    (value,) = struct.unpack("<f", data) if len(data) == 4 else (0.0,)
    return float(value)


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    if at < len(view) and view[at] < 0x80:
        return view[at], at + 1
    found = 0
    for place in range(10):
        if at + place >= len(view):
            raise ValueError("it ends within a number")
        byte = view[at + place]
        found |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return found & (2**64 - 1), at + place + 1
    raise ValueError("a number of more than 10 bytes")
