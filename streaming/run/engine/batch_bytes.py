"""Estimate the memory that a batch takes: exact for tensors and arrays, sampled for Python objects.

A Python object takes far more memory than its content: a number in a list 32 bytes, an empty dict 64. Examining every
object would cost about as much as decoding. So only a few evenly spaced items of a long list are examined; they
represent the others. Their references are followed level by level, in loops that run in C, and each level is sampled.

No user code runs: values that a user's mapping computes on access are not requested.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from streaming.build.batches.jagged import Jagged

_LOOKED_AT, _FLAT_LOOKED_AT = 8, 32
"""Number of items examined per list, and per list of only text and numbers. For 256 samples of JSON this costs a
tenth of decoding. Items of bytes, which may be whole images, are all counted."""
_EMPTY_BYTES = sys.getsizeof(b"")
_MOST_OBJECTS = 20_000
"""Maximum number of objects followed per level: some milliseconds."""
_RUN = 100
"""Number of neighbors examined together, so that alternating objects (a key, its value) are both seen."""
_ROUNDING_BYTES = 8
"""Python allocates in steps of 16 bytes, so on average half a step is lost per object."""
_HEADER_BYTES = 96
"""Memory of a tensor or array in addition to its content."""
_FLAT = frozenset((str, bytes, int, float, bool, complex, type(None)))
_PLAIN = _FLAT | {dict, list, tuple, set, frozenset, bytearray}
_ARRAYS = frozenset((torch.Tensor, np.ndarray))
_MOST_NESTED = 4
"""Micro-batches, their entries, a list for each row, and its values."""
_SHARED = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
"""Types of objects that are shared with others rather than owned by the object that refers to them."""


def weigh(batch: Any) -> int:
    """Estimate the memory in bytes that is freed with a batch. Never raises; takes microseconds for tensors.

    Example:
        ``weigh({"jpg": torch.zeros(8, 3, 224, 224, dtype=torch.uint8), "txt": ["a cat", ...]})``
    """
    kind = type(batch)
    if kind is dict:
        return sys.getsizeof(batch) + sum(map(weigh, batch.values()))
    if kind is not list and kind is not tuple:
        return _weigh_all([batch])
    kinds = set(map(type, batch))
    own = sys.getsizeof(batch)
    if kinds in ({bytes}, {memoryview}):  # a view counts only its own bytes
        sizes = map(len, batch) if kinds == {bytes} else (view.nbytes + _HEADER_BYTES for view in batch)
        return own + sum(sizes) + (_EMPTY_BYTES + _ROUNDING_BYTES) * len(batch)
    return own + _weigh_items(batch, kinds)


def _weigh_items(batch: Any, kinds: set[type]) -> int:
    """Estimate the bytes of the items of a list, of these types: of all arrays, also in a list for each row."""
    if kinds <= _ARRAYS:
        return _weigh_all(batch)
    if kinds == {list} and all(type(one) in _ARRAYS for one in chain.from_iterable(batch)):  # ends at the first other
        return sum(map(sys.getsizeof, batch)) + _weigh_all(chain.from_iterable(batch))
    at_most = _FLAT_LOOKED_AT if kinds <= _FLAT else _LOOKED_AT
    if len(batch) <= at_most:
        return _weigh_all(batch)
    looked_at = batch[:: -(-len(batch) // at_most)]
    if kinds <= _FLAT:
        return sum(map(sys.getsizeof, looked_at)) * len(batch) // len(looked_at) + _ROUNDING_BYTES * len(batch)
    return _weigh_all(looked_at) * len(batch) // len(looked_at)


def tensor_bytes(batch: Any, depth: int = _MOST_NESTED) -> int:
    """Return the bytes of :func:`weigh` that belong to tensors and arrays which are entries of the batch.

    The rest belongs to Python objects.

    Args:
        batch: A batch, or a part of one.
        depth: How many dicts and lists are entered: a batch may contain itself.
    """
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        return _own_bytes(batch)
    if isinstance(batch, Jagged):
        return sum(map(tensor_bytes, batch))
    inner: Iterable[Any] = ()
    if type(batch) is dict:
        inner = batch.values()
    elif type(batch) in (list, tuple) and all(isinstance(one, (torch.Tensor, np.ndarray)) for one in batch):
        return sum(map(_own_bytes, batch))
    elif type(batch) is list and all(type(one) in (dict, list) for one in batch):  # micro-batches; a list for each row
        inner = batch
    return sum(tensor_bytes(one, depth - 1) for one in inner) if depth else 0


def _weigh_all(objects: Iterable[Any]) -> int:
    """Estimate the bytes of objects and of everything that they refer to. Count each object once."""
    total, scale = 0.0, 1.0
    seen: dict[int, Any] = {}
    level = list(objects)
    while level:
        if len(level) > _MOST_OBJECTS:  # objects left out count like the examined ones
            starts = range(0, len(level), -(-len(level) // (_MOST_OBJECTS // _RUN)))
            thinned = [one for start in starts for one in level[start : start + _RUN]]
            scale *= len(level) / len(thinned)
            level = thinned
        fresh = dict(zip(map(id, level), level, strict=True))
        for known in fresh.keys() & seen.keys():
            del fresh[known]
        seen |= fresh
        level = list(fresh.values())
        odd = [one for one in level if type(one) not in _PLAIN] if set(map(type, level)) - _PLAIN else []
        plain = [one for one in level if type(one) in _PLAIN] if odd else level
        total += scale * (sum(map(sys.getsizeof, plain)) + _ROUNDING_BYTES * len(plain) + sum(map(_own_bytes, odd)))
        level = gc.get_referents(*plain)
        for one in odd:
            level += _referents(one)
    return int(total)


def _own_bytes(one: Any) -> int:
    """Return an object's own size in bytes, without its references; 0 if it cannot report one."""
    try:
        if isinstance(one, torch.Tensor):
            return _HEADER_BYTES + _tensor_bytes(one)
        if isinstance(one, (np.ndarray, memoryview)):
            return _HEADER_BYTES + one.nbytes
        if type(one).__module__.startswith("PIL."):
            width, height = one.size
            return int(width * height * (4 if one.mode in ("I", "F") else max(1, len(one.mode))))
        return object.__sizeof__(one) + _ROUNDING_BYTES + 16
    except Exception:  # noqa: BLE001  a user's class may fail here; the rest still counts
        return 0


def _tensor_bytes(tensor: torch.Tensor) -> int:
    if tensor.is_nested:
        return tensor.values().nbytes if tensor.layout == torch.jagged else tensor.numel() * tensor.element_size()
    if tensor.layout == torch.strided:
        return tensor.nbytes
    if tensor.layout == torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    by_row = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)  # otherwise by column
    names = ("crow_indices", "col_indices") if by_row else ("ccol_indices", "row_indices")
    parts = (getattr(tensor, name)() for name in ("values", *names))
    return sum(part.nbytes for part in parts)


def _referents(one: Any) -> list[Any]:
    """Return the objects that an object owns."""
    if isinstance(one, (torch.Tensor, memoryview)) or type(one).__module__.startswith("PIL."):
        return []
    if isinstance(one, np.ndarray):
        return list(one.ravel()) if one.dtype == object else []
    return [other for other in gc.get_referents(one) if not isinstance(other, _SHARED)]
