"""Read the values of a field for many rows at once, if they are only copied from memory or decoded one by one.

Facts about rows (whether they are complete, of one size, which blocks hold them) are computed once for the rows of
several batches; then each batch is cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from streaming.build.batches.collate import collate_field
from streaming.build.batches.draws import BatchDraws
from streaming.build.batches.jagged import Allocate, Form, collate_jagged, fresh, joined
from streaming.build.batches.rows import DecodedRow, FieldRange, Rows
from streaming.build.decode import (
    ArrayDecoder,
    BySet,
    FieldDecoder,
    ImageDecoder,
    RandomCropDecoder,
    draws_numbers,
    has_one_shape,
    of_shard,
    raw,
    view,
)
from streaming.common.arrays import sums
from streaming.common.platforms import later
from streaming.errors import ConfigError, DecodeError
from streaming.types import Batch, Decoder

if TYPE_CHECKING:
    import torch
else:
    torch = later("torch", globals())

Cut: TypeAlias = Callable[[int, int], Any]
"""Returns the collated values of rows [low, high)."""

_BLOCK_BYTES = 512
_BYTE = np.dtype(np.uint8)
_GATHER_BYTES = 1 << 10
"""Maximum mean size at which bytes are gathered before they are cut: cutting scattered rows in place pays one memory
latency per row (256 records of 430 bytes: 56 instead of 144 us, benchmarks/bench_cut.py)."""
_COPY_ROWS_BYTES = 8 << 10
"""Minimum size at which copying row by row is faster than gathering blocks."""


class Columns:
    """Make batches of rows, with the default collation. For one thread.

    Args:
        rows: All rows; none damaged.
        decoders: Decoder of every field, for each source; one for a single dataset.
        allocate: Allocator for tensors; None: fresh memory.
        place: Receives the row that is being decoded; None: not needed.
        names: Names of a mixture's sources, for ``__source__``; if all are "", the entry is absent.
        jagged: Fields whose values are concatenated, and the form of each.
        draws: Random numbers of decoders, by row; None: those at the start of epoch 0.
    """

    def __init__(
        self, rows: Rows, decoders: Sequence[FieldDecoder], allocate: Allocate | None = None,
        place: DecodedRow | None = None, names: Sequence[str] = (), jagged: Mapping[str, Form] | None = None,
        draws: BatchDraws | None = None,
    ) -> None:  # fmt: skip
        self._rows = rows
        self._sources: list[str] | None = None
        if rows.sources is not None and any(names):
            self._sources = np.array(names, object)[rows.sources].tolist()
        turn = _Turn([-1] if place is None else place, draws or BatchDraws())
        self._cuts = []
        for name, where in rows.fields.items():
            decoder, form = _decoders_of(rows, decoders, name, where), (jagged or {}).get(name)
            if form is None:
                cut = _cut_of(rows, name, decoder, where, allocate, turn)
            else:
                cut = _jagged(name, form, rows, decoder, where, allocate, turn)
            self._cuts.append((name, cut))

    def batch(self, low: int, high: int) -> Batch:
        """Return the batch of rows ``[low, high)``.

        Raises:
            DecodeError: A value cannot be decoded; decode row by row to find which.
        """
        rows = self._rows
        batch: Batch = {"__key__": rows.keys[low:high], "__url__": rows.urls[low:high]}
        if self._sources is not None:
            batch["__source__"] = self._sources[low:high]
        for name, cut in self._cuts:
            batch[name] = cut(low, high)
        return batch


@dataclass(frozen=True, slots=True)
class _Turn:
    """Step from row to row as values are decoded.

    Attributes:
        place: Receives the row of the batch.
        draws: Random numbers of decoders that draw, by row.
    """

    place: DecodedRow
    draws: BatchDraws

    def call(
        self, step: Callable[[Decoder, int], object], decoder: Decoder, begin: int, end: int, low: int
    ) -> list[Any]:
        """Return ``step(decoder, row)`` for rows ``[begin, end)`` of a batch that begins at row ``low``.

        Raises:
            DecodeError: A value cannot be decoded.
        """
        place, draws = self.place, draws_numbers(decoder)
        made, one = [], decoder
        try:
            for row in range(begin, end):
                place[0] = row - low
                if draws:
                    one = self.draws.of_row(decoder, row)
                made.append(step(one, row))
        except (ConfigError, MemoryError):
            raise
        except Exception as error:
            raise DecodeError("a value of the column does not decode") from error
        place[0] = -1
        return made


def _decoders_of(rows: Rows, decoders: Sequence[FieldDecoder], name: str, where: FieldRange) -> Decoder | list[Decoder]:
    """Return the decoder of a field; a list, one for each row, if the sources or sets of the rows differ in it."""
    if rows.sources is None or len(decoders) == 1:
        only = decoders[0].decoder_for(name)
        return [only.of_shard(url) for url in rows.urls] if isinstance(only, BySet) else only
    # A source whose samples lack the field may have no decoder for it.
    having = rows.sources[where.sizes >= 0]
    there = np.flatnonzero(np.bincount(having)).tolist()
    known: dict[int, Decoder] = {source: decoders[source].decoder_for(name) for source in there}
    if not known:
        return raw
    first, *others = known.values()
    if all(one == first for one in others) and not isinstance(first, BySet):
        return first
    return [of_shard(known.get(source, raw), url) for source, url in zip(rows.sources.tolist(), rows.urls, strict=True)]


def _cut_of(
    rows: Rows, name: str, decoder: Decoder | list[Decoder], where: FieldRange, allocate: Allocate | None, turn: _Turn
) -> Cut:
    complete = bool((where.sizes >= 0).all())
    if complete and isinstance(decoder, ArrayDecoder):
        gathered = _gatherer(rows.view, where, decoder, allocate)
        if gathered is not None:
            return gathered
    if decoder is raw and complete and where.sizes.mean() <= _GATHER_BYTES and not (where.starts % _BLOCK_BYTES).any():
        return gathered_bytes(rows.view, where)
    if decoder is raw:
        return cut_in_place(rows.memory, where)
    if complete and has_one_shape(decoder):
        return _images(rows.view, decoder, where, allocate, turn)
    if decoder is view:
        return lambda low, high: rows.lent(where.of(slice(low, high)))
    values = _values_of(rows, decoder, where, turn)
    return lambda low, high: collate_field(values(low, high), name=name, allocate=allocate)


def _values_of(
    rows: Rows, decoder: Decoder | list[Decoder], where: FieldRange, turn: _Turn
) -> Callable[[int, int], list[Any]]:
    """Return the decoded values of rows [low, high), None if a sample lacks the field.

    If ``decoder`` is a list, it has one for each row.
    """
    memory, starts, stops = rows.view, where.starts.tolist(), (where.starts + where.sizes).tolist()

    def step(decoder: Decoder, row: int) -> object:
        return decoder(memory[starts[row] : stops[row]]) if stops[row] >= starts[row] else None

    if not isinstance(decoder, list):
        return lambda low, high: turn.call(step, decoder, low, high, low)

    def values(low: int, high: int) -> list[Any]:
        found: list[Any] = []
        for row in range(low, high):
            if decoder[row] is view:
                found += rows.lent(where.of(slice(row, row + 1)))
                continue
            found += turn.call(step, decoder[row], row, row + 1, low)
        return found

    return values


def _images(
    memory: memoryview, decoder: ImageDecoder | RandomCropDecoder, where: FieldRange, allocate: Allocate | None,
    turn: _Turn,
) -> Cut:  # fmt: skip
    """Decode images of one shape, each into its row of the batch."""
    starts, stops = where.starts.tolist(), (where.starts + where.sizes).tolist()
    shape, dtype = decoder.shape or (), torch.from_numpy(np.empty(0, decoder.dtype)).dtype

    def cut(low: int, high: int) -> torch.Tensor:
        whole = (high - low, *shape)
        tensor = (allocate or fresh)(whole, dtype)
        array = tensor.numpy()

        def step(decoder: Any, row: int) -> None:
            decoder.into(memory[starts[row] : stops[row]], array[row - low])

        turn.call(step, decoder, low, high, low)
        return tensor

    return cut


def _jagged(
    name: str, form: Form, rows: Rows, decoder: Decoder | list[Decoder], where: FieldRange, allocate: Allocate | None,
    turn: _Turn,
) -> Cut:  # fmt: skip
    """Return concatenated values; bytes and plain items are copied only once, from the chunk into the batch."""
    values = _values_of(rows, decoder, where, turn)
    plain = ArrayDecoder(dtype=_BYTE, to=_BYTE) if decoder in (raw, view) else decoder
    if not isinstance(plain, ArrayDecoder) or plain.shape is not None or form == "flat":
        return lambda low, high: collate_jagged(name, values(low, high), form, rows.keys[low:high], allocate)
    stored, to, sizes = plain.dtype, plain.to, where.sizes.clip(0)
    if (sizes % stored.itemsize).any():  # the decoder reports why
        return values
    counts = (sizes // stored.itemsize).tolist()
    starts = np.where(sizes > 0, where.starts, 0).tolist()

    def cut(low: int, high: int) -> Any:
        places = zip(counts[low:high], starts[low:high], strict=True)
        laid = joined([np.frombuffer(rows.view, stored, count, start) for count, start in places], to, allocate)
        return laid.nested() if form == "nested" else laid

    return cut


def cut_in_place(memory: Any, where: FieldRange) -> Cut:
    """Return payloads as bytes, each copied from its place; None if the sample lacks the field."""
    starts, stops = where.starts.tolist(), (where.starts + where.sizes).tolist()
    if (where.sizes >= 0).all():
        return lambda low, high: [memory[a:b] for a, b in zip(starts[low:high], stops[low:high], strict=True)]
    return lambda low, high: [
        memory[a:b] if b >= a else None for a, b in zip(starts[low:high], stops[low:high], strict=True)
    ]


def gathered_bytes(view: memoryview, where: FieldRange) -> Cut:
    """Return payloads that begin at multiples of 512 as bytes, by one gather of their blocks."""
    blocks = np.frombuffer(view, np.uint8).reshape(-1, _BLOCK_BYTES)
    counts = -(-where.sizes // _BLOCK_BYTES)
    splits = sums(counts)
    wanted = np.repeat(where.starts // _BLOCK_BYTES - splits[:-1], counts) + np.arange(splits[-1])

    def cut(low: int, high: int) -> list[bytes]:
        data = blocks.take(wanted[splits[low] : splits[high]], 0).tobytes()
        starts = (splits[low:high] - splits[low]) * _BLOCK_BYTES
        stops = starts + where.sizes[low:high]
        return [data[a:b] for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]

    return cut


def _gatherer(view: memoryview, where: FieldRange, decoder: ArrayDecoder, allocate: Allocate | None) -> Cut | None:
    """Gather payloads of one size and type as tensors [n, ...]; None if sizes or types differ."""
    size = int(where.sizes[0]) if len(where.sizes) else 0
    if not size or size % decoder.dtype.itemsize or (where.sizes != size).any() or (where.starts % _BLOCK_BYTES).any():
        return None
    num_items = size // decoder.dtype.itemsize
    shape = _shape_of(num_items, decoder)
    if shape is None:
        return None
    dtype = torch.from_numpy(np.empty(0, decoder.to)).dtype
    if size >= _COPY_ROWS_BYTES:
        fill = _copied_rows(view, where, decoder, num_items)
    elif size % _BLOCK_BYTES == 0 and decoder.dtype == decoder.to:
        fill = _gathered_blocks(view, where, size)
    else:
        fill = _gathered_windows(view, where, decoder, num_items)

    def cut(low: int, high: int) -> torch.Tensor:
        whole = (high - low, *shape)
        if allocate is None:
            array = np.empty(whole, decoder.to)
            tensor = torch.from_numpy(array)
        else:
            tensor = allocate(whole, dtype)
            array = tensor.numpy()
        fill(low, high, array.reshape(high - low, num_items))
        return tensor

    return cut


Fill: TypeAlias = Callable[[int, int, npt.NDArray[Any]], None]
"""Writes rows [low, high) into an array [high - low, items]."""


def _copied_rows(view: memoryview, where: FieldRange, decoder: ArrayDecoder, num_items: int) -> Fill:
    starts = where.starts.tolist()

    def fill(low: int, high: int, out: npt.NDArray[Any]) -> None:
        for row, start in zip(out, starts[low:high], strict=True):
            row[:] = np.frombuffer(view, decoder.dtype, num_items, start)

    return fill


def _gathered_blocks(view: memoryview, where: FieldRange, size: int) -> Fill:
    """Gather blocks of 512 bytes, unchanged, directly to their places, all rows at once."""
    blocks = np.frombuffer(view, np.uint8).reshape(-1, _BLOCK_BYTES)  # [blocks of the arena, 512]
    num_blocks = size // _BLOCK_BYTES
    # [n * num_blocks]: the blocks of row 0, then those of row 1, …
    wanted = ((where.starts // _BLOCK_BYTES)[:, None] + np.arange(num_blocks)).reshape(-1)

    def fill(low: int, high: int, out: npt.NDArray[Any]) -> None:
        chosen = wanted[low * num_blocks : high * num_blocks]
        np.take(blocks, chosen, 0, out.view(np.uint8).reshape(-1, _BLOCK_BYTES), "clip")

    return fill


def _gathered_windows(view: memoryview, where: FieldRange, decoder: ArrayDecoder, num_items: int) -> Fill:
    """Gather values that start at multiples of 512 bytes, as in any tar, from overlapping windows at each multiple."""
    size = num_items * decoder.dtype.itemsize
    # [blocks of the arena, num_items]: row b is the value that would begin at block b; a view with a stride of 512.
    shape = ((len(view) - size) // _BLOCK_BYTES + 1, num_items)
    windows: npt.NDArray[Any] = np.ndarray(shape, decoder.dtype, view, 0, (_BLOCK_BYTES, decoder.dtype.itemsize))
    wanted = where.starts // _BLOCK_BYTES

    def fill(low: int, high: int, out: npt.NDArray[Any]) -> None:
        out[:] = windows[wanted[low:high]]

    return fill


def _shape_of(num_items: int, decoder: ArrayDecoder) -> tuple[int, ...] | None:
    """Return the shape of a payload of ``num_items``; None if it does not fit (the decoder reports why)."""
    if decoder.shape is None:
        return (num_items,)
    known = math.prod(length for length in decoder.shape if length >= 0)
    if -1 not in decoder.shape:
        return decoder.shape if known == num_items else None
    if not known or num_items % known:
        return None
    return tuple(num_items // known if length < 0 else length for length in decoder.shape)
