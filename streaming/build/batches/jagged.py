"""Concatenate the values of jagged fields over a batch, and record where each row begins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from streaming.common.arguments import is_list
from streaming.common.platforms import later
from streaming.errors import ConfigError

if TYPE_CHECKING:
    import torch
else:
    torch = later("torch", globals())

Allocate: TypeAlias = "Callable[[tuple[int, ...], torch.dtype], torch.Tensor]"
"""Returns an uninitialized, contiguous CPU tensor of a given shape and dtype, perhaps in page-locked memory."""
Form: TypeAlias = Literal["values", "nested", "flat"]
"""Form of a jagged field in a batch. ``"values"``: a ``Jagged`` of rows that differ along their first axis only;
``"nested"``: the same as torch's nested tensor; ``"flat"``: a ``Jagged`` of flattened rows with the shape of each."""


def fresh(shape: tuple[int, ...], dtype: torch.dtype, *, pinned: bool = False) -> torch.Tensor:
    """Allocate an uninitialized tensor in host memory, whatever torch's default device is.

    This package allocates all its tensors here or by NumPy, because a script calls ``torch.set_default_device`` for its
    own tensors.
    """
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pinned)


def int64s(values: Iterable[int | Sequence[int]]) -> torch.Tensor:
    """Make an int64 tensor in host memory; see ``fresh``."""
    return torch.tensor(list(values), dtype=torch.int64, device="cpu")


_HOW = 'write names of fields, jagged=("audio", "jpg"), or the form of each, jagged={"audio": "nested", "jpg": "flat"}'


class _Fields(NamedTuple):
    values: torch.Tensor
    offsets: torch.Tensor
    shapes: torch.Tensor | None = None


class Jagged(_Fields):
    """Hold a field whose size differs from sample to sample: all B rows concatenated into one tensor, with row offsets.

    A named tuple of tensors, so it can be page-locked, copied to devices and sent between processes like any other. ::

        loader = DataLoader(StreamingDataset(url, decode={"jpg": None}), 64, jagged=("jpg",))
        for batch in loader:
            values, offsets, _ = batch["jpg"]                  # uint8 [all bytes], int64 [65]
            images = decode_jpeg(batch["jpg"].rows(), device="cuda")

    Attributes:
        values: [total, ...]; row i is ``values[offsets[i]:offsets[i + 1]]``. In the form ``"flat"``: [total items].
        offsets: int64 [B + 1], from 0 to the total.
        shapes: int64 [B, dimensions], the shape of each row, in the form ``"flat"``; else None.
    """

    __slots__ = ()

    def __new__(
        cls, values: torch.Tensor | Iterable[Any], offsets: torch.Tensor | None = None, shapes: Any = None
    ) -> Self:
        """Create one from its fields, or from an iterable of them, as transformers' ``Trainer`` copies tuples."""
        if offsets is not None:
            return super().__new__(cls, values, offsets, shapes)  # type: ignore[arg-type]
        if isinstance(values, torch.Tensor):
            raise TypeError("Jagged: offsets are missing: int64 [B + 1], from 0 to the number of values")
        return cls._make(values)

    @classmethod
    def of(cls, values: Sequence[Any], form: Literal["values", "flat"] = "values") -> Jagged:
        """Concatenate arrays, tensors or bytes, for use in a ``collate_fn``. None becomes an empty row.

        Raises:
            ConfigError: The values cannot be concatenated; the message names the value and the reason.
        """
        return laid("of", list(values), form)

    @property
    def num_rows(self) -> int:
        """Number of rows, B."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> torch.Tensor:
        """Length of each row along the concatenated axis, int64 [B]."""
        return self.offsets.diff()

    def rows(self) -> list[torch.Tensor]:
        """Return the B rows as views, without copying. If the tensors are on a device, this waits for their offsets."""
        rows = list(torch.split(self.values, self.lengths.tolist()))
        if self.shapes is None:
            return rows
        return [row.view(shape) for row, shape in zip(rows, self.shapes.tolist(), strict=True)]

    def nested(self) -> torch.Tensor:
        """Return a view of the same memory as torch's nested tensor ``[B, *, ...]`` with the jagged layout.

        Raises:
            ConfigError: The form is ``"flat"``: rows differ along several axes.
        """
        if self.shapes is not None:
            raise ConfigError('nested(): rows of the form "flat" differ along several axes; use rows() instead')
        return nested_on(self.values, self.offsets)

    def padded(self, value: float = 0.0) -> torch.Tensor:
        """Return a tensor [B, longest, ...] with copies of the rows, shorter rows padded with ``value``.

        Raises:
            ConfigError: The form is ``"flat"``: rows differ along several axes.
        """
        if self.shapes is not None:
            raise ConfigError('padded(): rows of the form "flat" differ along several axes; use rows() instead')
        if not self.num_rows:
            return self.values.new_empty((0, 0, *self.values.shape[1:]))
        return torch.nn.utils.rnn.pad_sequence(self.rows(), batch_first=True, padding_value=value)

    def first(self, count: int) -> Jagged:
        """Return a copy of the first ``count`` rows."""
        shapes = None if self.shapes is None else self.shapes[:count].clone()
        offsets = self.offsets[: count + 1].clone()
        return Jagged(self.values[: int(offsets[-1])].clone(), offsets, shapes)


def nested_on(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return a view of ``values`` [total, ...] as a jagged nested tensor, with row ``offsets`` int64 [B + 1]."""
    made: torch.Tensor = torch.nested.nested_tensor_from_jagged(values, offsets)
    return made


def nested_parts(value: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the values and offsets from which :func:`nested_on` rebuilds a nested tensor of the jagged layout.

    Returns None for anything else, and for nested tensors that these two do not describe: those with holes between
    rows, or jagged along another axis than the second.
    """
    if not isinstance(value, torch.Tensor) or value.layout is not torch.jagged or value.requires_grad:
        return None
    nested: Any = value
    return (nested.values(), nested.offsets()) if nested._lengths is None and nested._ragged_idx == 1 else None


def checked_jagged(jagged: object, collate_fn: object = None) -> dict[str, Form]:
    """Validate the option ``jagged`` and return the form of each field.

    Raises:
        ConfigError: ``jagged`` is neither a mapping of names to forms nor a list of names, or there is also a
            ``collate_fn``.
    """
    if jagged is None:
        return {}
    if collate_fn is not None:
        raise ConfigError(
            f"jagged={jagged!r} has no effect with a collate_fn, which makes the batch itself; leave one of them out, "
            'or lay fields end to end in that function: Jagged.of([sample["audio"] for sample in samples])'
        )
    if isinstance(jagged, Mapping):
        named = dict(jagged)
    elif is_list(jagged) and all(isinstance(name, str) for name in jagged):
        named = dict.fromkeys(jagged, "values")
    else:
        raise ConfigError(f"jagged: expected names of fields or a form for each, got {jagged!r}; {_HOW}")
    for name, form in named.items():
        if not isinstance(name, str) or form not in get_args(Form):
            forms = ", ".join(map(repr, get_args(Form)))
            raise ConfigError(
                f"jagged: expected names of fields with one of {forms}, got {form!r} for {name!r}; {_HOW}"
            )
    return named


def collate_jagged(
    name: str, values: list[Any], form: Form, keys: Sequence[object] = (), make: Allocate | None = None
) -> Any:
    """Concatenate the values of one field over a batch. None, for a sample that lacks the field, becomes an empty row.

    Args:
        name: Name of the field, for messages.
        values: Arrays or tensors of one dtype, or bytes; one per sample.
        form: The form that the user chose.
        keys: Keys of the samples, for messages.
        make: Allocator; None: fresh memory.

    Returns:
        A ``Jagged``, or a nested tensor of the same memory.

    Raises:
        ConfigError: The values cannot be concatenated; the message names the value and a cure.
    """
    made = laid(f"field {name!r}", values, form, keys, make)
    return made.nested() if form == "nested" else made


def laid(what: str, values: list[Any], form: Form, keys: Sequence[object] = (), make: Allocate | None = None) -> Jagged:
    """Concatenate values; see :func:`collate_jagged`."""
    there = [value for value in values if value is not None]
    if there and all(isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16 for value in there):
        bits = laid(what, [None if value is None else value.view(torch.int16) for value in values], form, keys, make)
        return bits._replace(values=bits.values.view(torch.bfloat16))  # NumPy has no such type
    arrays = [_as_array(what, value, number, keys) for number, value in enumerate(values)]
    first = next((array for array in arrays if array is not None), None)
    if first is None:
        raise ConfigError(f"jagged: {what}: none of the {len(values)} samples has a value; leave it out of jagged")
    flat = form == "flat"
    for number, array in enumerate(arrays):
        if array is None:
            continue
        if array.dtype != first.dtype or array.ndim != first.ndim:
            raise _unlike(what, number, keys, first, array, "one dtype and number of axes; convert them in transform")
        if not flat and array.shape[1:] != first.shape[1:]:
            cure = 'shapes that differ in their first axis only; write jagged={field: "flat"}, or move that axis first'
            raise _unlike(what, number, keys, first, array, cure)
    empty = np.empty((0, *first.shape[1:]), first.dtype)
    rows = [empty if array is None else array for array in arrays]
    shapes = None
    if flat:
        shapes = int64s(row.shape for row in rows)
        rows = [row.reshape(-1) for row in rows]
    return joined(rows, first.dtype.newbyteorder("="), make, shapes)


def joined(
    rows: list[npt.NDArray[Any]], dtype: np.dtype[Any], make: Allocate | None = None, shapes: torch.Tensor | None = None
) -> Jagged:
    """Concatenate rows that agree in all axes but the first, as ``dtype``, into memory from ``make``."""
    make = fresh if make is None else make
    offsets = make((len(rows) + 1,), torch.int64)
    borders = offsets.numpy()
    borders[0] = 0
    np.cumsum(np.fromiter(map(len, rows), np.int64, len(rows)), out=borders[1:])
    values = make((int(borders[-1]), *rows[0].shape[1:]), torch.from_numpy(np.empty(0, dtype)).dtype)
    np.concatenate(rows, out=values.numpy(), casting="same_kind")
    return Jagged(values, offsets, shapes)


def _as_array(what: str, value: Any, number: int, keys: Sequence[object]) -> npt.NDArray[Any] | None:
    """Return a value as an array with at least one axis; None stays None."""
    if value is None:
        return None
    if isinstance(value, (bytes, bytearray, memoryview)):
        return np.frombuffer(value, np.uint8)
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type == "cpu":
        value = value if value.dtype is torch.bfloat16 else value.detach().numpy()
    if isinstance(value, np.ndarray) and value.ndim and value.dtype.kind in "biufc":
        return value
    got = f"{value.dtype} {list(value.shape)}" if hasattr(value, "shape") else type(value).__name__
    raise ConfigError(
        f"jagged: {what}: {_sample(number, keys)} is {got}; expected bytes, or an array or CPU tensor of numbers with "
        "at least one axis. Leave it out of jagged, take it as bytes with decode={field: None}, or make it an array in "
        "transform"
    )


def _unlike(
    what: str, number: int, keys: Sequence[object], first: npt.NDArray[Any], got: npt.NDArray[Any], expected: str
) -> ConfigError:
    return ConfigError(
        f"jagged: {what}: {_sample(number, keys)} is {got.dtype} {list(got.shape)}, but one before it is {first.dtype} "
        f"{list(first.shape)}; expected {expected}"
    )


def _sample(number: int, keys: Sequence[object]) -> str:
    key = keys[number] if number < len(keys) else None  # a transform may have left the key out
    return f"row {number}" if key is None else f"sample {key!r}"
