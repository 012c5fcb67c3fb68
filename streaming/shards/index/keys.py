"""Hold the keys of a shard's samples as one Arrow array: keys become Python objects only when requested."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, overload

import numpy as np
import pyarrow as pa

from streaming.types import Int64Array

_MAX_STRING_BYTES = (1 << 31) - 1


class Keys(Sequence[str]):
    """Keys as text, over an Arrow array of strings, or of bytes if one key is not UTF-8; immutable."""

    def __init__(self, array: Any) -> None:
        self.array = array
        """Array of type ``string`` or ``binary``, without nulls."""

    @classmethod
    def of_packed(cls, data: bytes, stops: Int64Array) -> Keys:
        """Split all keys, stored end to end. Key ``i`` ends at ``stops[i]``."""
        large = len(data) > _MAX_STRING_BYTES
        if data.isascii():
            return cls(_from_buffers(pa.large_string() if large else pa.string(), data, stops))
        array = _from_buffers(pa.large_binary() if large else pa.binary(), data, stops)
        try:
            return cls(array.cast(pa.large_string() if large else pa.string()))
        except pa.ArrowInvalid:
            return cls(array)

    def __len__(self) -> int:
        return len(self.array)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            part = self.array[index]
            if pa.types.is_string(part.type) or pa.types.is_large_string(part.type):
                return part.to_pylist()  # type: ignore[no-any-return]
            return [_text(value) for value in part.to_pylist()]
        return _text(self.array[int(index)].as_py())

    def __iter__(self) -> Iterator[str]:
        return iter(self[:])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Sequence) and not isinstance(other, str):
            return len(self) == len(other) and self[:] == list(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return Keys, (self.array,)


def key_array(keys: Collection[str]) -> pa.Array:
    """Return an array of keys: text, or all bytes if one is not UTF-8 (its invalid bytes are surrogates in Python)."""
    if isinstance(keys, Keys):
        return keys.array
    try:
        return pa.array(keys, pa.string())
    except (UnicodeEncodeError, pa.ArrowException):
        return pa.array([key.encode("utf-8", "surrogateescape") for key in keys], pa.binary())


def _from_buffers(kind: Any, data: bytes, stops: Int64Array) -> Any:
    offsets = np.zeros(stops.size + 1, np.int64 if len(data) > _MAX_STRING_BYTES else np.int32)
    offsets[1:] = stops
    return pa.Array.from_buffers(kind, stops.size, [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("utf-8", "surrogateescape")
