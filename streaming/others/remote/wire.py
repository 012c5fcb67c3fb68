"""Pack batches for Ray's object store: tensors as NumPy arrays.

Ray writes arrays into shared memory unchanged, and maps them into every process of the node that reads them; torch
tensors are pickled as a stream of bytes (`benchmarks/bench_ray.py` compares the two).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_AS_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Types that carry the bits of types that NumPy lacks (bfloat16, float8), by item size in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTensor:
    """The content of a tensor, and its type if NumPy has no equivalent."""

    array: np.ndarray[Any, Any]
    dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedView:
    """The bytes of a view, which itself cannot be pickled."""

    array: np.ndarray[Any, Any]


def pack(value: Any) -> Any:
    """Pack tensors and views in ``value``, in dicts, lists and tuples, at any depth. Other objects stay unchanged."""
    if type(value) is memoryview:
        return PackedView(array=np.frombuffer(value, np.uint8) if len(value) else np.empty(0, np.uint8))
    if isinstance(value, torch.Tensor):
        is_plain = value.layout is torch.strided and not value.is_quantized
        if not is_plain or value.device.type != "cpu" or value.requires_grad:
            return value
        whole = value.resolve_conj().resolve_neg().contiguous()
        try:
            return PackedTensor(array=whole.numpy())
        except TypeError:  # NumPy has no such type
            bits = _AS_BITS[whole.element_size()]
            return PackedTensor(array=whole.view(bits).numpy(), dtype=value.dtype)
    return _rebuilt(value, pack)


def unpack(value: Any) -> Any:
    """Return the argument of ``pack`` in new memory, so tensors may be changed."""
    if isinstance(value, PackedTensor):
        tensor = torch.from_numpy(value.array.copy())
        return tensor if value.dtype is None else tensor.view(value.dtype)
    if isinstance(value, PackedView):
        return memoryview(value.array.tobytes())
    return _rebuilt(value, unpack)


def num_bytes(value: Any) -> int:
    """Return the payload size of a packed batch: arrays, bytes and text, at any depth."""
    if isinstance(value, (PackedTensor, PackedView)):
        return value.array.nbytes
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, (bytes, bytearray, memoryview, str)):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(num_bytes, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(num_bytes, value))
    return 0


def num_rows(value: Any) -> int | None:
    """Return the number of samples in a packed batch, by its first column or as a list; None if unknown."""
    if isinstance(value, Mapping):
        return num_rows(next(iter(value.values()), ()))
    offsets = getattr(value, "offsets", None)
    if isinstance(offsets, PackedTensor):  # of a Jagged, whose values do not show the number of rows
        return len(offsets.array) - 1
    array = value.array if isinstance(value, PackedTensor) else value
    if isinstance(array, np.ndarray):
        return len(array) if array.ndim else None
    if isinstance(value, (list, tuple)):
        columns = bool(value) and isinstance(value[0], (PackedTensor, np.ndarray))
        return num_rows(value[0]) if columns else len(value)
    return None


def _rebuilt(value: Any, function: Any) -> Any:
    if type(value) is dict:
        return {name: function(part) for name, part in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(function(part) for part in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(function(part) for part in value))
    return value
