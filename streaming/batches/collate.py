"""Collate samples into a batch: numbers and arrays of equal shape become tensors, everything else stays a list."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from streaming.batches.jagged import Allocate, Form, Jagged, collate_jagged, fresh, nested_parts
from streaming.errors import ConfigError
from streaming.platforms import later
from streaming.types import Batch

if TYPE_CHECKING:
    import torch
else:
    torch = later("torch", globals())

_ALWAYS_LISTS = frozenset(("__key__", "__url__", "__source__"))
_INT64 = np.iinfo(np.int64)
_NONE: Mapping[str, Form] = MappingProxyType({})
_DTYPES: tuple[str, ...] = ("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
_DTYPES += ("float16", "float32", "float64", "complex64", "complex128")


_log = logging.getLogger(__name__)


def default_collate(
    samples: Sequence[Mapping[str, object]], *, allocate: Allocate | None = None, jagged: Mapping[str, Form] = _NONE
) -> Batch:
    """Return one batch of ``samples``: every field of any sample, in the order first seen.

    Per field, with B samples:

    - arrays, array scalars or tensors of one shape and dtype: one tensor ``[B, ...]`` of that dtype, in
      native byte order; numbers as ``bool``, ``int`` or ``float``: bool, int64 or float64 ``[B]`` (``int``
      and ``float`` mixed: float64);
    - fields that ``jagged`` names: see :class:`streaming.batches.jagged.Jagged`;
    - arrays or tensors that differ in shape or dtype: a list of B tensors;
    - everything else (text, bytes, dicts, objects, integers beyond 64 bits, mixed kinds) and ``__key__``,
      ``__url__`` and ``__source__``: a list of B values. A sample that lacks the field has None there.

    Stacked tensors share no memory with the samples; what stays in a list does.

    Args:
        samples: Decoded samples; without any, the batch has no fields.
        allocate: Allocates the memory of tensors; default: fresh memory.
        jagged: Fields whose values are laid end to end, and the form of each.

    Raises:
        ValueError: If ``allocate`` gives a tensor of another shape, dtype or layout than asked for.
        ConfigError: If the values of a jagged field cannot be laid so.
    """
    names: dict[str, None] = {}
    for sample in samples:
        names.update(dict.fromkeys(sample))
    make = fresh if allocate is None else _checking(allocate)
    batch: Batch = {}
    for name in names:
        values = [sample.get(name) for sample in samples]
        if name in jagged:
            batch[name] = collate_jagged(name, values, jagged[name], [one.get("__key__") for one in samples], make)
        else:
            batch[name] = values if name in _ALWAYS_LISTS else _collate_field(values, make, name)
    return batch


@cache
def _tell_of_types(name: str, types: frozenset[str]) -> None:
    """Warn, once per process, that arrays of unlike types stay a list."""
    if len(types) > 1:
        _log.warning(
            "field %r: arrays of types %s in one batch, which stay a list; have transform make them one type",
            name, ", ".join(sorted(types)),
        )  # fmt: skip


def empty_like(batch: Mapping[str, object]) -> Batch:
    """Return the batch with the same fields and no samples: tensors ``[0, ...]`` of the same dtype, empty lists.

    The tensors own their (empty) memory, so they do not keep the batch alive.
    """
    return {name: _without_values(value) for name, value in batch.items()}


def _without_values(column: object) -> object:
    if isinstance(column, Jagged):
        return column.first(0)
    if not isinstance(column, torch.Tensor):
        return []
    nested = nested_parts(column)
    return torch.empty_like(column[:0]) if nested is None else Jagged(*nested).first(0).nested()


def without_rows(collate_fn: Callable[[list[Any]], Any], sample: Any) -> Any:
    """Make the batch that ``collate_fn`` would return for an empty list, without calling it with one.

    It is called with one sample and with two: each dimension is cut by as much as it grows per sample, whichever axis
    that is (rows, concatenated tokens, offsets); what does not grow stays.

    Example:
        ``without_rows(torch.utils.data.default_collate, (image, 3))`` gives ``[float32 [0, 3, 224, 224], int64 [0]]``.

    Args:
        collate_fn: Function of a list of samples. It gets shallow copies, which it may change.
        sample: Any readable sample; nothing of it is in the result.

    Raises:
        ConfigError: For some object in the batch it cannot be determined what belongs to a sample.
    """
    one = collate_fn([copy.copy(sample)])
    two = collate_fn([copy.copy(sample), copy.copy(sample)])
    return _cut_back(one, two, "the batch")


def _cut_back(one: Any, two: Any, where: str) -> Any:
    """Return the part of a batch of one sample, cut by what the same part of a batch of two has more."""
    if type(one) is not type(two):
        raise _cannot_cut(one, where)
    left: Any
    if isinstance(one, (torch.Tensor, np.ndarray)):
        left = _cut_array(one, two, where)
    elif isinstance(one, Mapping):
        left = _like(one, {name: _cut_back(one[name], two.get(name), f"{where}[{name!r}]") for name in one})
    elif dataclasses.is_dataclass(one) and not isinstance(one, type):
        names = [field.name for field in dataclasses.fields(one)]
        changed = {name: _cut_back(getattr(one, name), getattr(two, name), f"{where}.{name}") for name in names}
        left = dataclasses.replace(one, **changed)
    elif isinstance(one, (list, tuple)):
        left = _cut_sequence(one, two, where)
    elif isinstance(one, int) and not isinstance(one, bool):
        left = 2 * one - two
    elif one is None or isinstance(one, (bool, float, str, bytes, memoryview, np.generic, torch.dtype, torch.device)):
        left = one
    else:
        raise _cannot_cut(one, where)
    return left


def _cut_array(one: Any, two: Any, where: str) -> Any:
    """Return a tensor or array, cut along each axis that grows with the number of samples."""
    if tuple(one.shape) == tuple(two.shape):
        return one
    if one.ndim != two.ndim or (isinstance(one, torch.Tensor) and one.layout != torch.strided):
        raise _cannot_cut(one, where)
    left = one[tuple(slice(0, max(0, 2 * a - b)) for a, b in zip(one.shape, two.shape, strict=True))]
    return left.clone() if isinstance(left, torch.Tensor) else left.copy()


def _cut_sequence(one: Any, two: Any, where: str) -> Any:
    """Return a list or tuple: empty if it grows with the number of samples, otherwise with each element cut."""
    if len(one) != len(two):
        return one[: max(0, 2 * len(one) - len(two))]
    parts = [_cut_back(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(one, two, strict=True))]
    return type(one)(*parts) if hasattr(one, "_fields") else type(one)(parts)


def _like(mapping: Any, left: dict[Any, Any]) -> Any:
    """Return ``left`` as a mapping of the same type, if that can be made from a dict."""
    try:
        return type(mapping)(left)
    except Exception:  # noqa: BLE001  a type of the user's; a dict serves as well
        return left


def _cannot_cut(part: object, where: str) -> ConfigError:
    return ConfigError(
        f'last_batch="partial": this rank gets no rows of the last batch, so collate_fn is called with one sample and '
        f"its rows are removed again; {where} is a {type(part).__name__}, whose rows cannot be told apart. "
        f'Have collate_fn return tensors, arrays, lists, tuples, dicts or dataclasses of them, or use last_batch="pad"'
    )


def collate_field(values: list[object], *, name: str, allocate: Allocate | None = None) -> object:
    """Collate the values of one field, one per sample, as :func:`default_collate` does."""
    return _collate_field(values, fresh if allocate is None else _checking(allocate), name)


def _collate_field(values: list[object], make: Allocate, name: str) -> object:
    """Return the values of one field as a tensor if all agree, otherwise as a list."""
    kinds = set(map(type, values))
    if len(kinds) > 1:
        return _collate_mixed(values, make)
    kind = kinds.pop()
    if kind is np.ndarray or issubclass(kind, np.generic):
        return _stack_arrays(cast("list[npt.NDArray[Any]]", values), make, name)
    if kind is int:
        return _integers(cast("list[int]", values), make)
    if kind is float or kind is bool:
        return _fill(np.array(values, kind), make)
    if issubclass(kind, torch.Tensor):
        return _stack_tensors(cast("list[torch.Tensor]", values), make)
    return values


def _collate_mixed(values: list[object], make: Allocate) -> object:
    """Collate values of several types: float64 for int with float, one tensor for arrays and tensors, else a list."""
    types = {type(value) for value in values}
    if types == {int, float}:
        return _floats(cast("list[float]", values), make)
    listed = _to_tensors(values)
    if all(isinstance(value, torch.Tensor) for value in listed):
        return _stack_tensors(cast("list[torch.Tensor]", listed), make)
    return listed


def _floats(values: list[float], make: Allocate) -> object:
    try:
        return _fill(np.array(values, np.float64), make)
    except OverflowError:  # an int beyond the range of a float
        return values


def _integers(values: list[int], make: Allocate) -> object:
    """Make int64 ``[B]``, or return the list if one does not fit."""
    if min(values) < _INT64.min or max(values) > _INT64.max:
        return values
    return _fill(np.array(values, np.int64), make)


def _fill(array: npt.NDArray[Any], make: Allocate) -> torch.Tensor:
    """Return a tensor from ``make`` that holds a copy of ``array``."""
    tensor = make(array.shape, _torch_dtypes()[array.dtype])
    np.copyto(tensor.numpy(), array)
    return tensor


def _stack_arrays(values: list[npt.NDArray[Any]], make: Allocate, name: str) -> object:
    """Return one tensor if shapes and dtypes agree and torch knows the dtype; else a list."""
    first = values[0]
    dtype = _torch_dtypes().get(first.dtype.newbyteorder("="))
    if dtype is None or any(value.shape != first.shape or value.dtype != first.dtype for value in values):
        _tell_of_types(name, frozenset(str(value.dtype) for value in values))
        return _to_tensors(values)
    tensor = make((len(values), *first.shape), dtype)
    np.stack(values, out=tensor.numpy())
    return tensor


def _stack_tensors(values: list[torch.Tensor], make: Allocate) -> object:
    """Return one tensor if shapes, dtypes and devices agree and all are dense; else the list."""
    first = values[0]
    layout = (first.shape, first.dtype, first.device, torch.strided)
    if any((value.shape, value.dtype, value.device, value.layout) != layout for value in values):
        return values
    values = [value.detach() for value in values]
    if first.device.type != "cpu":
        return torch.stack(values)
    return torch.stack(values, out=make((len(values), *first.shape), first.dtype))


def _to_tensors(values: Sequence[object]) -> list[object]:
    """Return the values; arrays and scalars of dtypes that torch knows as tensors, without a copy if possible."""
    return [_to_tensor(value) if isinstance(value, (np.ndarray, np.generic)) else value for value in values]


def _to_tensor(value: npt.NDArray[Any] | np.generic) -> object:
    native = value.dtype.newbyteorder("=")
    if native not in _torch_dtypes():
        return value
    array = np.asarray(value, native)
    usable = array.flags.writeable and all(stride >= 0 for stride in array.strides)
    return torch.from_numpy(array if usable else array.copy())


@cache
def _torch_dtypes() -> dict[np.dtype[Any], torch.dtype]:
    """Return torch's types by NumPy's, of those that both have."""
    return {np.dtype(name): getattr(torch, name) for name in _DTYPES}


def _checking(allocate: Allocate) -> Allocate:
    """Return ``allocate``, with a check that the result is what was requested."""

    def make(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = allocate(shape, dtype)
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"allocate({shape}, {dtype}) returned {tuple(tensor.shape)}, {tensor.dtype}, "
                f"contiguous: {tensor.is_contiguous()}; return a contiguous tensor of that shape and dtype"
            )
        return tensor

    return make
