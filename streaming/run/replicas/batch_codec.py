"""Turn a batch into JSON and bytes, and back, to send it from one rank to another. No pickle.

Tensors, NumPy arrays and byte strings are sent as they lie in memory, jagged fields as their parts; dicts with text
keys, lists, tuples, text, numbers, bools and None as one JSON header. Anything else (objects that a user's
``collate_fn`` puts into a batch) is rejected by name: ``Broadcast(encode=…, decode=…)`` takes functions that convert
such a batch to these types and back.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch

from streaming.build.batches.jagged import Jagged, fresh, nested_on, nested_parts
from streaming.errors import ConfigError

ALIGN_BYTES = 64
"""Alignment of each buffer, so that any dtype can be a view, and copies run at full speed."""

Buffers: TypeAlias = list[tuple[int, torch.Tensor]]

_TENSOR, _ARRAY, _BYTES, _LIST, _TUPLE, _DICT = "tensor", "array", "bytes", "list", "tuple", "dict"
_JAGGED, _NESTED, _VIEW = "jagged", "nested", "view"
_SEQUENCES: dict[type, str] = {list: _LIST, tuple: _TUPLE, Jagged: _JAGGED}
_REBUILT: dict[str, Callable[[list[Any]], Any]] = {
    _LIST: list, _TUPLE: tuple, _JAGGED: Jagged._make, _NESTED: lambda parts: nested_on(*parts),
}  # fmt: skip


def encode(batch: Any, allocate: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """Return the batch as one uint8 tensor ``[n]``.

    Args:
        batch: The batch; not changed.
        allocate: Returns a uint8 tensor of a given size, with arbitrary content.

    Raises:
        ConfigError: It contains an object that cannot be encoded; the message names its place.
    """
    buffers: Buffers = []
    header = json.dumps(_Encoder(buffers).encode(batch, "batch"), separators=(",", ":")).encode()
    start = _aligned(8 + len(header))
    end = start + (buffers[-1][0] + len(buffers[-1][1]) if buffers else 0)
    out = allocate(end)
    out[:8] = torch.from_numpy(np.array([len(header)], "<i8").view(np.uint8))
    out[8 : 8 + len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    for offset, buffer in buffers:
        out[start + offset : start + offset + len(buffer)] = buffer
    return out


def decode(data: torch.Tensor) -> Any:
    """Return the batch of ``encode``. Its tensors and arrays are views of ``data`` and keep it alive."""
    size = int(data[:8].numpy().view("<i8")[0])
    header = json.loads(bytes(data[8 : 8 + size].numpy()))
    return _decoded(header, data[_aligned(8 + size) :])


class _Encoder:
    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._end = 0

    def encode(self, value: Any, where: str) -> Any:
        """Return JSON for ``value``: the value itself, or a list that begins with its kind."""
        kind = type(value)
        if value is None or kind in {bool, int, float, str}:
            return value
        if kind is torch.Tensor and value.layout is torch.strided and not value.is_quantized:
            flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
            return [_TENSOR, str(value.dtype).removeprefix("torch."), list(value.shape), self._place(flat)]
        if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject and value.dtype.kind != "V":
            # C order; "b1" and "<i8" both as bytes.
            flat = torch.frombuffer(bytearray(np.asarray(value).tobytes()), dtype=torch.uint8) if value.size else None
            return [_ARRAY, value.dtype.str, list(value.shape), kind is not np.ndarray, self._place(flat)]
        if kind in {bytes, bytearray, memoryview}:
            flat = torch.frombuffer(bytearray(value), dtype=torch.uint8) if len(value) else None
            return [_VIEW if kind is memoryview else _BYTES, len(value), self._place(flat)]
        nested = nested_parts(value)
        if kind in _SEQUENCES or nested is not None:
            items = [self.encode(item, f"{where}[{number}]") for number, item in enumerate(nested or value)]
            return [_SEQUENCES.get(kind, _NESTED), items]
        if kind is dict and all(type(name) is str for name in value):
            return [_DICT, {name: self.encode(item, f"{where}[{name!r}]") for name, item in value.items()}]
        raise ConfigError(
            f"one rank reads for others: {where} is a {kind.__module__}.{kind.__qualname__}, which cannot be sent to "
            "other ranks. Have what made it (transform, collate_fn, or the data set that is dealt out) make tensors, "
            "arrays, text, numbers, lists and dicts of them, or give replicate=Broadcast(encode=…, decode=…)"
        )

    def _place(self, flat: torch.Tensor | None) -> int:
        """Return the place of a tensor's bytes after the header."""
        start = self._end
        if flat is not None and flat.numel():
            buffer = flat.view(torch.uint8)
            self._buffers.append((start, buffer))
            self._end = _aligned(start + len(buffer))
        return start


def _decoded(value: Any, data: torch.Tensor) -> Any:
    if not isinstance(value, list):
        return value
    kind, *rest = value
    if kind == _TENSOR:
        dtype = getattr(torch, rest[0])
        return _cut(data, rest[2], _count(rest[1]) * dtype.itemsize).view(dtype).view(rest[1])
    if kind == _ARRAY:
        dtype = np.dtype(rest[0])
        array = _cut(data, rest[3], _count(rest[1]) * dtype.itemsize).numpy().view(dtype).reshape(rest[1])
        return array[()] if rest[2] else array
    if kind in (_BYTES, _VIEW):
        own = _cut(data, rest[1], rest[0]).numpy().tobytes()
        return memoryview(own) if kind == _VIEW else own
    if kind == _DICT:
        return {name: _decoded(item, data) for name, item in rest[0].items()}
    return _REBUILT[kind]([_decoded(item, data) for item in rest[0]])


def _cut(data: torch.Tensor, start: int, size: int) -> torch.Tensor:
    return data[start : start + size] if size else fresh((0,), torch.uint8)


def _count(shape: list[int]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _aligned(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES
