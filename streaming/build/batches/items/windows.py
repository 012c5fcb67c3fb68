"""Make rows of moments of recordings: ``WindowRows``. Frames lie in memory once, and rows say which they have.

A window of n frames has in memory, for each of its entries: a *block*, an ``.npy`` of distinct frames or steps, which
many windows share, and *indices*, int64 [n], into it; ``~i`` says that frame i stands in for one beyond the edge. Its
*moment* holds the time, and which frames and steps are there.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from streaming.build.batches.build import BatchBuilder, Mask, Recipe, Samples
from streaming.build.batches.collate import collate_field
from streaming.build.batches.draws import BatchDraws
from streaming.build.batches.jagged import Allocate, fresh
from streaming.build.batches.rows import DecodedRow, FieldRange, Rows
from streaming.build.decode import FieldDecoder, decode_field, of_shard
from streaming.build.decode.arrays import npy_view
from streaming.common.arrays import sums
from streaming.common.platforms import later
from streaming.errors import DecodeError
from streaming.types import Batch, Decoder, ReadBuffer, Sample, override

if TYPE_CHECKING:
    import torch
else:
    torch = later("torch", globals())

BLOCK_ALIGN = 64
"""Blocks begin at multiples of this: a cache line."""
MOMENT = "\0moment"
_INDICES = "\0at"
_HEAD = 24


def indices_of(name: str) -> str:
    """Return the field of the indices of an entry."""
    return name + _INDICES


def block_head(shape: tuple[int, ...], dtype: npt.DTypeLike) -> bytes:
    """Return the head of the ``.npy`` of an array."""
    head = io.BytesIO()
    facts = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(head, facts)
    return head.getvalue()


def moment_bytes(num_frames: int, num_steps: int) -> int:
    """Return the size of a moment of a row with this many frames and steps."""
    return _HEAD + -(-(num_frames + num_steps) // 8) * 8


def moments(
    times: npt.NDArray[np.float64], frames: Sequence[npt.NDArray[np.bool_]], steps: Sequence[npt.NDArray[np.bool_]]
) -> npt.NDArray[np.uint8]:
    """Return the moments of n rows, uint8 [n, bytes].

    Args:
        times: [n], in seconds.
        frames: For each stream, [n, k]: whether each frame is there.
        steps: For each table, the same.
    """
    num_frames, num_steps = (sum(one.shape[1] for one in some) for some in (frames, steps))
    made = np.zeros((len(times), moment_bytes(num_frames, num_steps)), np.uint8)
    made[:, :8] = np.ascontiguousarray(times, np.float64)[:, None].view(np.uint8)
    made[:, 8:_HEAD] = np.array([num_frames, num_steps], np.int64).view(np.uint8)
    borders = sums([one.shape[1] for one in (*frames, *steps)])
    for start, one in zip(borders, (*frames, *steps), strict=False):
        made[:, _HEAD + start : _HEAD + start + one.shape[1]] = one
    return made


class _Moment:
    """Return the time of a row, and which of its frames and of its steps are there."""

    accepts_buffer = True

    def __call__(self, data: ReadBuffer) -> tuple[float, npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        found = np.frombuffer(data, np.uint8)
        num_frames, num_steps = found[8:_HEAD].view(np.int64).tolist()
        there = found[_HEAD : _HEAD + num_frames + num_steps].astype(np.bool_)
        return float(found[:8].view(np.float64)[0]), there[:num_frames], there[num_frames:]


class _Indices:
    """Return the places of a row's frames or steps in their block."""

    accepts_buffer = True

    def __call__(self, data: ReadBuffer) -> npt.NDArray[np.int64]:
        found: npt.NDArray[np.int64] = np.frombuffer(data, np.int64)
        return np.where(found < 0, ~found, found)


class _Block:
    """Return the frames or steps of a block, without a copy."""

    accepts_buffer = True

    def __call__(self, data: ReadBuffer) -> npt.NDArray[Any]:
        return npy_view(data)


_MOMENT, _PLACES, _BLOCK = _Moment(), _Indices(), _Block()


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowFields:
    """Decode the fields of windows in memory. ``FieldDecoder``.

    Attributes:
        blocks: Names of the entries that have a block.
        carried: Fields of the recording that rows have as a whole, by their names in rows.
        wraps: Decodes these.
    """

    blocks: frozenset[str]
    carried: tuple[tuple[str, str], ...]
    wraps: FieldDecoder

    def decoder_for(self, field: str, /) -> Decoder:
        """See ``FieldDecoder``."""
        if field == MOMENT:
            return _MOMENT
        if field.endswith(_INDICES):
            return _PLACES
        if field in self.blocks:
            return _BLOCK
        return self.wraps.decoder_for(dict(self.carried).get(field, field))


class WindowColumns:
    """The rows of a batch, taken from their blocks straight into its tensors.

    Rows that would not form one tensor for each entry are refused with a ``DecodeError``: build them one by one.

    Args:
        rows: The rows, all intact.
        recipe: How to build.
        allocate: Allocates tensors.
    """

    def __init__(self, rows: Rows, recipe: Recipe, allocate: Allocate) -> None:
        self._rows, self._recipe, self._allocate = rows, recipe, allocate

    def batch(self, low: int, high: int) -> Batch:
        """Return the batch of rows ``[low, high)``.

        Raises:
            DecodeError: They differ in their entries.
        """
        rows, count = self._rows, high - low
        batch: Batch = {"__key__": rows.keys[low:high], "__url__": rows.urls[low:high]}
        names = [self._recipe.part_of(rows, row).name for row in range(low, high)]
        if any(names):
            batch["__source__"] = names
        for name, where in rows.fields.items():
            if name == MOMENT or name.endswith(_INDICES):
                continue
            at = rows.fields.get(indices_of(name))
            span = slice(low, high)
            batch[name] = self._carried(name, low, high) if at is None else self._taken(where.of(span), at.of(span))
        moment = rows.fields[MOMENT]
        found = [_MOMENT(rows.view[start : start + size]) for start, size in _places(moment.of(slice(low, high)))]
        batch["__time__"] = collate_field([time for time, _, _ in found], name="__time__", allocate=self._allocate)
        for name, there in {"__valid_frames__": [one for _, one, _ in found],
                            "__valid_steps__": [one for _, _, one in found]}.items():  # fmt: skip
            if len({len(one) for one in there}) != 1 and count:
                raise DecodeError(f"{name}: rows have different numbers of them")
            if count and len(there[0]):
                batch[name] = collate_field(list(there), name=name, allocate=self._allocate)
        return batch

    def _taken(self, blocks: FieldRange, indices: FieldRange) -> Any:
        """Return the frames or steps of rows, [B, k, …]."""
        view = self._rows.view
        if min(blocks.sizes.min(initial=0), indices.sizes.min(initial=0)) < 0:
            raise DecodeError("some rows lack an entry")
        known = {place: _BLOCK(view[place[0] : place[0] + place[1]]) for place in dict.fromkeys(_places(blocks))}
        kinds = {(one.dtype, one.shape[1:]) for one in known.values()}
        if len(kinds) != 1 or len(widths := set(indices.sizes.tolist())) != 1:
            raise DecodeError("rows differ in size")
        ((dtype, shape),) = kinds
        made = self._allocate((len(blocks.starts), widths.pop() // 8, *shape), _torch_type(dtype))
        for out, block, (start, size) in zip(made.numpy(), _places(blocks), _places(indices), strict=True):
            np.take(known[block], _PLACES(view[start : start + size]), axis=0, out=out, mode="clip")
        return made

    def _carried(self, name: str, low: int, high: int) -> Any:
        """Return the values of a field that rows have as a whole, as a batch has them."""
        rows, values = self._rows, list[object]()
        if rows.fields[name].sizes[low:high].min(initial=0) < 0:
            raise DecodeError("some rows lack a field")
        for row, (start, size) in enumerate(_places(rows.fields[name].of(slice(low, high))), low):
            decoder = of_shard(self._recipe.part_of(rows, row).decoders.decoder_for(name), rows.urls[row])
            of = {"url": rows.urls[row], "key": rows.keys[row], "field": name}
            data = rows.view[start : start + size]
            given = data if getattr(decoder, "accepts_buffer", False) else bytes(data)
            values.append(decode_field(decoder, given, **of))
        return collate_field(values, name=name, allocate=self._allocate)


def _places(where: FieldRange) -> list[tuple[int, int]]:
    return list(zip(where.starts.tolist(), where.sizes.tolist(), strict=True))


def _torch_type(dtype: np.dtype[Any]) -> torch.dtype:
    """Return torch's type of a NumPy type.

    Raises:
        DecodeError: There is none.
    """
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except TypeError as error:
        raise DecodeError(f"{dtype}: torch has no such type") from error


@dataclass(frozen=True, slots=True)
class WindowRows(Samples):
    """A row is a moment of a recording, with the frames and steps around it."""

    @property
    @override
    def grouped(self) -> None:
        return None

    @override
    def lacks(self, name: str, fields: Sequence[str]) -> str:
        shown = ", ".join(repr(one) for one in fields if one != MOMENT and not one.endswith(_INDICES))
        return f"a row has {shown}, not {name!r}; name a field of the recordings in Windows(…, carry=({name!r},))"

    @override
    def place_in_sample(self, rows: Rows, i: int) -> str:
        found = rows.fields.get(MOMENT)
        if found is None or found.sizes[i] < 0:
            return ""
        start, size = int(found.starts[i]), int(found.sizes[i])
        time, _, _ = _MOMENT(rows.view[start : start + size])
        return f"the window at second {time:.3f}"

    @override
    def build(self, builder: BatchBuilder, rows: Rows, valid: Mask) -> Any:
        mask = builder.recipe.mask_of(len(rows.keys), valid)
        copied = None if builder.recipe.jagged else builder.copied(self, rows, mask, rows.cuts)
        return self.one_by_one(builder, rows, mask) if copied is None else copied

    def columns(  # type: ignore[override]
        self,
        recipe: Recipe,
        rows: Rows,
        allocate: Allocate | None = None,
        place: DecodedRow | None = None,  # noqa: ARG002
        draws: BatchDraws | None = None,  # noqa: ARG002
    ) -> WindowColumns:
        """See ``GroupedRows``: of the rows of one batch."""
        return WindowColumns(rows, recipe, allocate or fresh)

    @override
    def assembled(self, sample: Sample) -> Sample:
        given: dict[str, Any] = dict(sample)
        time, frames, steps = given.pop(MOMENT)
        made: Sample = {}
        for name, value in given.items():
            if name.endswith(_INDICES):
                continue
            at = given.get(indices_of(name))
            made[name] = value if at is None else np.take(value, at, axis=0)
        made["__time__"], made["__valid_frames__"] = time, frames
        if len(steps):
            made["__valid_steps__"] = steps
        return made
