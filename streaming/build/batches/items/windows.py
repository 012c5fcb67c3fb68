"""Make rows of moments of recordings: ``WindowRows``. Frames lie in memory once, and rows say which they have.

A window of n frames has in memory, for each of its entries: a *block*, an ``.npy`` of distinct frames or steps, which
many windows share, and *indices*, int64 [n], into it; ``~i`` says that frame i stands in for one beyond the edge. Its
*moment* holds the time, and which frames and steps are there.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from streaming.build.batches.build import BatchBuilder, Mask, Samples
from streaming.build.batches.rows import Rows
from streaming.build.decode import FieldDecoder
from streaming.build.decode.arrays import npy_view
from streaming.common.arrays import sums
from streaming.types import Decoder, ReadBuffer, Sample, override

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


@dataclass(frozen=True, slots=True)
class WindowRows(Samples):
    """A row is a moment of a recording, with the frames and steps around it."""

    @property
    @override
    def grouped(self) -> None:
        return None

    @override
    def build(self, builder: BatchBuilder, rows: Rows, valid: Mask) -> Any:
        return self.one_by_one(builder, rows, builder.recipe.mask_of(len(rows.keys), valid))

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
