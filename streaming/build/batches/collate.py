"""Collate samples into a batch: numbers and arrays of equal shape become tensors, everything else stays a list.

The type of a field in a batch follows from the types of its values, by a rule that does not depend on their order.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache, reduce
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import numpy as np
import numpy.typing as npt

from streaming.build.batches.jagged import Allocate, Form, Jagged, collate_jagged, fresh, nested_parts
from streaming.common.platforms import later
from streaming.errors import ConfigError
from streaming.types import Batch

if TYPE_CHECKING:
    import torch
else:
    torch = later("torch", globals())

_NUMBERS = frozenset((bool, int, float))
_LACKING = "None (a sample without the field)"
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

    - arrays, array scalars or tensors of one shape: one tensor ``[B, ...]`` of their dtype, in native byte order;
      numbers as ``bool``, ``int`` or ``float``: bool, int64 or float64 ``[B]``; values of different types: the type to
      which ``torch.promote_types`` promotes all of them, whatever their order, and a warning once per process;
    - fields that ``jagged`` names: see :class:`streaming.build.batches.jagged.Jagged`;
    - arrays or tensors that differ in shape: a list of B tensors;
    - everything else (text, bytes, dicts, lists, objects) and ``__key__``, ``__url__`` and ``__source__``: a list of B
      values. A sample that lacks the field has None there; if the other values of the field would be a tensor, a
      warning is logged once per process.

    Stacked tensors share no memory with the samples; values in lists do.

    Args:
        samples: Decoded samples; without any, the batch has no fields.
        allocate: Allocates the memory of tensors; default: fresh memory.
        jagged: Fields whose values are concatenated, and the form of each.

    Raises:
        ValueError: ``allocate`` returned a tensor of another shape, dtype or layout than requested.
        ConfigError: The values of a jagged field cannot be concatenated, values of one shape have types that torch does
            not promote (uint16, uint32 or uint64 beside other integers), or a number does not fit into 64 bits.
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
    """Return the batch that ``collate_fn`` would return for an empty list, without calling it with one.

    ``collate_fn`` is called with one sample and with two: each dimension is cut by as much as it grows per sample, on
    any axis (rows, concatenated tokens, offsets); a dimension that does not grow stays.

    Example:
        ``without_rows(torch.utils.data.default_collate, (image, 3))`` gives ``[float32 [0, 3, 224, 224], int64 [0]]``.

    Args:
        collate_fn: Function of a list of samples. It gets shallow copies, which it may change.
        sample: Any readable sample; the result holds none of its values.

    Raises:
        ConfigError: The part of an object in the batch that belongs to a sample cannot be determined.
    """
    one = collate_fn([copy.copy(sample)])
    two = collate_fn([copy.copy(sample), copy.copy(sample)])
    return _cut_back(one, two, "the batch")


def _cut_back(one: Any, two: Any, where: str) -> Any:
    """Return a part of a batch of one sample, cut by the growth of that part in a batch of two."""
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
    except Exception:  # noqa: BLE001  a user's type; a dict serves as well
        return left


def _cannot_cut(part: object, where: str) -> ConfigError:
    return ConfigError(
        f'last_batch="partial": this rank gets no rows of the last batch, so collate_fn is called with one sample and '
        f"its rows are removed again; {where} is a {type(part).__name__}, whose rows cannot be told apart. "
        f'Have collate_fn return tensors, arrays, lists, tuples, dicts or dataclasses of them, or use last_batch="pad"'
    )


def promoted(values: Sequence[object]) -> torch.Tensor | None:
    """Return one tensor of numbers and arrays of one shape but of several types, as :func:`default_collate` makes it.

    Returns None if there is nothing to promote: values are of one type, differ in shape, or are not numbers.

    Raises:
        ConfigError: Torch has no common type, or a number fits into no type.
    """
    kinds = set(map(type, values))
    if len(kinds) == 1:
        kind = next(iter(kinds))
        if not issubclass(kind, (np.ndarray, torch.Tensor)) or len({cast("Any", one).dtype for one in values}) == 1:
            return None
    listed = to_tensors(values)
    if not all(type(value) in _NUMBERS or isinstance(value, torch.Tensor) for value in listed):
        return None
    if len({tuple(getattr(value, "shape", ())) for value in listed}) > 1:
        return None
    made = _collate_field(listed, fresh, "")
    return made if isinstance(made, torch.Tensor) else None


def collate_field(values: list[object], *, name: str, allocate: Allocate | None = None) -> object:
    """Collate the values of one field, one per sample, as :func:`default_collate` does."""
    return _collate_field(values, fresh if allocate is None else _checking(allocate), name)


def _collate_field(values: list[object], make: Allocate, name: str) -> object:
    """Return the values of one field as a tensor if all are numbers, or arrays of one shape; otherwise as a list."""
    kinds = set(map(type, values))
    if len(kinds) > 1:
        return _collate_mixed(values, kinds, make, name)
    kind = kinds.pop()
    if kind is np.ndarray or issubclass(kind, np.generic):
        return _stack_arrays(cast("list[npt.NDArray[Any]]", values), make, name)
    if kind in _NUMBERS:
        return _integers(cast("list[int]", values), make, name) if kind is int else _fill(np.array(values, kind), make)
    if issubclass(kind, torch.Tensor):
        return _stack_tensors(cast("list[torch.Tensor]", values), make, name)
    if issubclass(kind, np.ndarray) and _is_array(values[0]):  # np.memmap
        return _stack_arrays([np.asarray(value) for value in values], make, name)
    return values


def _collate_mixed(values: list[object], kinds: set[type], make: Allocate, name: str) -> object:
    """Collate values of several types: one tensor of torch's promoted type; a list if torch lacks one of the types.

    A number has the type that it has in a batch of its own: ``int`` is int64, ``float`` is float64.

    Raises:
        ConfigError: Torch has no common type, or a number fits into no type.
    """
    if kinds <= _NUMBERS:
        is_float = float in kinds
        _tell_of_promotion(name, frozenset(kind.__name__ for kind in kinds), "float64" if is_float else "int64")
        numbers = cast("list[int]", values)
        return _floats(numbers, make, name) if is_float else _integers(numbers, make, name)
    listed = to_tensors(values)
    stacks = [type(value) in _NUMBERS or isinstance(value, torch.Tensor) for value in listed]
    if all(stacks):
        tensors = [value if isinstance(value, torch.Tensor) else _number(value, name) for value in listed]
        made = _stack_tensors(tensors, make, name)
        return listed if made is tensors else made
    if any(stacks):
        _tell_of_lists(name, frozenset(_LACKING if kind is type(None) else kind.__name__ for kind in kinds))
    return listed


def _number(value: Any, name: str) -> torch.Tensor:
    """Return a number as a tensor without dimensions, of the type that it has in a batch of its own."""
    if type(value) is int and not _INT64.min <= value <= _INT64.max:
        raise _too_large(name, value)
    return torch.from_numpy(np.array(value, np.int64 if type(value) is int else type(value)))


def _floats(values: Sequence[float], make: Allocate, name: str) -> object:
    """Return the values as float64 ``[B]``.

    Raises:
        ConfigError: An ``int`` exceeds the range of a float.
    """
    try:
        return _fill(np.array(values, np.float64), make)
    except OverflowError as error:
        raise _too_large(name, max(values, key=abs)) from error


def _integers(values: list[int], make: Allocate, name: str) -> object:
    """Return the values as int64 ``[B]``.

    Raises:
        ConfigError: A value does not fit.
    """
    low, high = min(values), max(values)
    if low < _INT64.min or high > _INT64.max:
        raise _too_large(name, low if low < _INT64.min else high)
    return _fill(np.array(values, np.int64), make)


def _too_large(name: str, value: float) -> ConfigError:
    shown = str(value) if abs(value) < 10**30 else "a number of more than 30 digits"
    as_text = f"take the field as text, decode={{{name!r}: str}}; or " if name else ""
    return ConfigError(
        f"{_of(name)}: {shown} does not fit into a tensor of 64 bits, while smaller numbers of the field make one. "
        f"To cure this, {as_text}have transform, or the data set itself, make them all text or np.uint64"
    )


def _of(name: str) -> str:
    return f"field {name!r}" if name else "samples"


def _fill(array: npt.NDArray[Any], make: Allocate) -> torch.Tensor:
    """Return a tensor from ``make`` that holds a copy of ``array``."""
    tensor = make(array.shape, _torch_dtypes()[array.dtype])
    np.copyto(tensor.numpy(), array)
    return tensor


def _stack_arrays(values: list[npt.NDArray[Any]], make: Allocate, name: str) -> object:
    """Return one tensor if shapes agree and torch has the types; else a list."""
    first = values[0]
    dtype = _torch_dtypes().get(first.dtype.newbyteorder("="))
    if dtype is None or any(value.shape != first.shape or value.dtype != first.dtype for value in values):
        tensors = to_tensors(values)
        if not all(isinstance(value, torch.Tensor) for value in tensors):
            _tell_of_lists(name, frozenset(str(value.dtype) for value in values))
            return tensors
        return _stack_tensors(cast("list[torch.Tensor]", tensors), make, name)
    tensor = make((len(values), *first.shape), dtype)
    np.stack(values, out=tensor.numpy())
    return tensor


def _stack_tensors(values: list[torch.Tensor], make: Allocate, name: str) -> object:
    """Return one tensor, of the promoted type, if shapes and devices agree and all are dense; else the list.

    Raises:
        ConfigError: Only the types differ, and torch has no common type.
    """
    first, dtype = values[0], values[0].dtype
    layout = (first.shape, dtype, first.device, torch.strided)
    if any((value.shape, value.dtype, value.device, value.layout) != layout for value in values):
        place = (first.shape, first.device, torch.strided)
        if any((value.shape, value.device, value.layout) != place for value in values):
            _tell_of_lists(name, frozenset(_named(value.dtype) for value in values))
            return values
        dtype = _promoted(name, frozenset(value.dtype for value in values))
        values = [value.to(dtype) for value in values]
    values = [value.detach() for value in values]
    if first.device.type != "cpu":
        return torch.stack(values)
    return torch.stack(values, out=make((len(values), *first.shape), dtype))


@cache
def _promoted(name: str, dtypes: frozenset[torch.dtype]) -> torch.dtype:
    """Return the type to which torch promotes all of these, whatever their order; warn once per process.

    Raises:
        ConfigError: There is no such type.
    """
    # Floats first: torch promotes them with any integer, but uint16 to uint64 with no other integer.
    ordered = sorted(dtypes, key=lambda one: (not one.is_floating_point, one.is_complex, str(one)))
    names = frozenset(map(_named, dtypes))
    try:
        dtype = reduce(torch.promote_types, ordered)
    except RuntimeError as error:
        raise ConfigError(
            f"{_of(name)}: values of one shape but of types {', '.join(sorted(names))} in one batch, for which torch "
            "has no common type. Have transform, or the data set itself, make them one type; or give the loader a "
            "collate_fn"
        ) from error
    _tell_of_promotion(name, names, _named(dtype))
    return dtype


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def _tell_of_promotion(name: str, types: frozenset[str], dtype: str) -> None:
    """Warn, once per process, that a batch has another type than some of its values."""
    _log.warning(
        "%s: values of types %s in one batch, which become %s as torch promotes them. A batch of only one of these "
        "types keeps that type; have transform, or the data set itself, make them one",
        _of(name), ", ".join(sorted(types)), dtype,
    )  # fmt: skip


@cache
def _tell_of_lists(name: str, types: frozenset[str]) -> None:
    """Warn, once per process, that values of unlike types stay a list."""
    if len(types) > 1:
        _log.warning(
            "%s: values of types %s in one batch, which stay a list; a batch of numbers, or of arrays of one shape, is "
            "a tensor. Have transform, or the data set itself, make them one type",
            _of(name), ", ".join(sorted(types)),
        )  # fmt: skip


def to_tensors(values: Sequence[object]) -> list[object]:
    """Return the values; arrays and scalars of dtypes that torch knows as tensors, without a copy if possible."""
    return [_to_tensor(value) if _is_array(value) else value for value in values]


def _is_array(value: object) -> TypeGuard[npt.NDArray[Any] | np.generic]:
    """Return whether ``value`` is a NumPy array or scalar that may become a tensor; masked arrays may not."""
    return isinstance(value, (np.ndarray, np.generic)) and not isinstance(value, np.ma.MaskedArray)


def _to_tensor(value: npt.NDArray[Any] | np.generic) -> object:
    native = value.dtype.newbyteorder("=")
    if native not in _torch_dtypes():
        return value
    array = np.asarray(value, native)
    usable = array.flags.writeable and all(stride >= 0 for stride in array.strides)
    return torch.from_numpy(array if usable else array.copy())


@cache
def _torch_dtypes() -> dict[np.dtype[Any], torch.dtype]:
    """Return torch's type for each NumPy type that both have."""
    return {np.dtype(name): getattr(torch, name) for name in _DTYPES}


def _checking(allocate: Allocate) -> Allocate:
    """Return ``allocate`` with a check of its results."""

    def make(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = allocate(shape, dtype)
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"allocate({shape}, {dtype}) returned {tuple(tensor.shape)}, {tensor.dtype}, "
                f"contiguous: {tensor.is_contiguous()}; return a contiguous tensor of that shape and dtype"
            )
        return tensor

    return make
