"""A batch from its rows: decode, transform, collate; what is unreadable is substituted, masked or raised."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from streaming.collate import Allocate, collate_field, default_collate, empty_like
from streaming.decode import ArrayDecoder, FieldDecoder, decode_field, raw
from streaming.engine.rows import FieldRange
from streaming.errors import ConfigError, DataError, DecodeError, TooManyBadSamplesError
from streaming.types import Batch, Decoder, Sample, Transform

OnError: TypeAlias = Literal["substitute", "skip", "raise"]
_COPY_ROWS_BYTES = 8 << 10
"""From this size on copying row by row costs less than a gather of blocks."""
MAX_SUBSTITUTES = 256
"""Neighbours tried in place of one unreadable sample before the search is given up: a few chunks of damage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The samples of one batch, as places in a buffer.

    Attributes:
        memory: The buffer; slicing gives ``bytes`` of its own (``bytes`` or an ``mmap``).
        view: The same buffer; slicing gives a view.
        keys: ``__key__`` of each of n rows.
        urls: ``__url__`` of each row.
        fields: Where each field lies in the buffer.
        damage: Rows whose bytes could not be fetched intact, and why; their other entries are meaningless.
        numbers: int64 [n], number of each row's sample in the data set; None where nobody knows them.
    """

    memory: Any
    view: memoryview
    keys: list[str]
    urls: list[str]
    fields: Mapping[str, FieldRange]
    damage: Mapping[int, DataError]
    numbers: npt.NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BadSample:
    """One sample that could not be delivered.

    Attributes:
        url: Shard.
        key: Sample; "" where even the key could not be read, and no sample table names it.
        stage: ``"fetch"``, ``"decode"`` or ``"transform"``.
        reason: The error's message.
        dropped: The user's transform dropped it: nothing is wrong with it.
        number: Of the sample in the data set; -1 where nobody knows it.
        byte_start: First byte of its record in the shard; -1 where there is no sample table.
        byte_end: One past the last; -1 where there is no sample table.
    """

    url: str
    key: str
    stage: str
    reason: str
    dropped: bool = False
    number: int = -1
    byte_start: int = -1
    byte_end: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How bytes become a batch: what users choose about it. Thread-safe as far as the user's functions are.

    Attributes:
        decoders: Decoder of every field.
        transform: Function of one sample, or None.
        collate_fn: Function of a list of samples, or None: the default.
        on_error: What becomes of samples that cannot be delivered.
        finish: Last step of every batch, such as page-locking it, or None.
    """

    decoders: FieldDecoder
    transform: Transform | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    on_error: OnError = "substitute"
    finish: Callable[[Any], Any] | None = None

    def finished(self, batch: Any) -> Any:
        """The batch, after its last step."""
        return batch if self.finish is None else self.finish(batch)


BadSampleReport: TypeAlias = Callable[[BadSample], None]
"""Told of every sample that could not be delivered; may raise to stop the run."""


class _Bad(Exception):  # noqa: N818  carries a finding, is no error of the program
    """A row that cannot be delivered: the stage, and what happened (None: the transform dropped it)."""

    def __init__(self, stage: str, error: Exception | None) -> None:
        super().__init__(stage, error)
        self.stage = stage
        self.error = error


class BatchBuilder:
    """Builds one batch; used once.

    Args:
        recipe: What to do.
        substitutes: For row i of the batch, single-row ``Rows`` to try in its place, in order.
        report: Told of every sample that could not be delivered; may raise to stop the run.
        allocate: Where the memory of the default batch's tensors comes from; None: fresh memory.
    """

    def __init__(
        self,
        recipe: Recipe,
        substitutes: Callable[[int], Iterator[Rows]],
        report: BadSampleReport,
        allocate: Allocate | None = None,
    ) -> None:
        self._allocate = allocate
        self._recipe = recipe
        self._substitutes = substitutes
        self._report = report

    def build(self, rows: Rows, valid: npt.NDArray[np.bool_] | None) -> Any:
        """The batch of ``rows``; with ``valid``, or under ``on_error="skip"``, it has ``__valid__`` [n]."""
        recipe = self._recipe
        mask = np.ones(len(rows.keys), np.bool_) if valid is None and recipe.on_error == "skip" else valid
        if mask is not None:
            mask = mask.copy()
        plain = recipe.transform is None and recipe.collate_fn is None and not rows.damage
        columns = self._columns(rows) if plain else None
        if columns is not None:
            batch = _collate_columns(rows, columns, self._allocate)
            if mask is not None:
                batch["__valid__"] = _tensor(mask)
            return recipe.finished(batch)
        samples = [self._sample_or_substitute(rows, i, mask) for i in range(len(rows.keys))]
        return self.collate(samples, mask)

    def collate(self, samples: list[Sample], mask: npt.NDArray[np.bool_] | None) -> Any:
        """The batch of samples, by the user's function or the default one."""
        if self._recipe.collate_fn is not None:
            if mask is not None:
                for sample, valid in zip(samples, mask.tolist(), strict=True):
                    if isinstance(sample, dict):
                        sample["__valid__"] = valid
            return self._recipe.finished(self._collated(self._recipe.collate_fn, samples))
        batch = default_collate(samples, allocate=self._allocate)
        if mask is not None:
            batch["__valid__"] = _tensor(mask)
        return self._recipe.finished(batch)

    @staticmethod
    def _collated(collate_fn: Callable[[list[Any]], Any], samples: list[Sample]) -> Any:
        try:
            return collate_fn(samples)
        except Exception as error:
            first = samples[0] if samples and isinstance(samples[0], Mapping) else {}
            error.add_note(
                f"in collate_fn, over {len(samples)} samples, the first of them {first.get('__key__')!r} of "
                f"{first.get('__url__')}"
            )
            raise

    def empty(self, prototype: Rows) -> Any:
        """A batch of no rows, shaped like a batch of ``prototype`` (one row)."""
        if self._recipe.collate_fn is not None:
            return self._recipe.collate_fn([])
        return empty_like(self.build(prototype, None))

    def samples(self, rows: Rows) -> list[Sample]:
        """The decoded, transformed samples of ``rows``, not collated."""
        return [self._sample_or_substitute(rows, i, None) for i in range(len(rows.keys))]

    def _columns(self, rows: Rows) -> dict[str, Any] | None:
        """Every field decoded as a column; None if any value does not decode (row by row it will say which)."""
        try:
            return {name: self._column(rows, name, where) for name, where in rows.fields.items()}
        except DecodeError:
            return None

    def _column(self, rows: Rows, name: str, where: FieldRange) -> Any:
        decoder = self._recipe.decoders.decoder_for(name)
        complete = bool((where.sizes >= 0).all())
        if complete and isinstance(decoder, ArrayDecoder):
            gathered = _gather(rows.view, where, decoder, self._allocate)
            if gathered is not None:
                return gathered
        starts = where.starts.tolist()
        stops = (where.starts + where.sizes).tolist()
        if decoder is raw:
            memory = rows.memory
            if complete:
                return [memory[a:b] for a, b in zip(starts, stops, strict=True)]
            return [memory[a:b] if b >= a else None for a, b in zip(starts, stops, strict=True)]
        return _decode_column(rows.view, decoder, starts, stops)

    def _sample_or_substitute(self, rows: Rows, i: int, mask: npt.NDArray[np.bool_] | None) -> Sample:
        try:
            return self._sample(rows, i)
        except _Bad as bad:
            self._handle(bad, rows, i)
            if mask is not None and self._recipe.on_error == "skip":
                mask[i] = False
        for tried, substitute in enumerate(self._substitutes(i)):
            if tried >= MAX_SUBSTITUTES:
                break
            try:
                return self._sample(substitute, 0)
            except _Bad as bad:
                if bad.error is not None:
                    self._handle(bad, substitute, 0)
        raise TooManyBadSamplesError(
            f"{rows.urls[i]}: sample {rows.keys[i]!r} is unreadable or dropped, and so are the {MAX_SUBSTITUTES} "
            f"samples next to it that could stand in. Check the shard with `shard_tools verify {rows.urls[i]}`; "
            f"if transform drops most samples, filter the data set instead (shard_tools convert)"
        )

    def _handle(self, bad: _Bad, rows: Rows, i: int) -> None:
        reason = "transform returned None" if bad.error is None else str(bad.error)
        if self._recipe.on_error == "raise":
            if bad.error is not None:
                raise bad.error
            raise DecodeError(
                f"{rows.urls[i]}: sample {rows.keys[i]!r}: transform returned None, which drops the sample; under "
                f'on_error="raise" that is an error. Use on_error="substitute" or "skip" to drop samples'
            )
        number = -1 if rows.numbers is None else int(rows.numbers[i])
        self._report(
            BadSample(
                url=rows.urls[i],
                key=rows.keys[i],
                stage=bad.stage,
                reason=reason,
                dropped=bad.error is None,
                number=number,
            )
        )

    def _sample(self, rows: Rows, i: int) -> Sample:
        """Row i, decoded and transformed.

        Raises:
            _Bad: If it cannot be delivered.
        """
        damage = rows.damage.get(i)
        if damage is not None:
            raise _Bad("fetch", damage)
        key, url = rows.keys[i], rows.urls[i]
        sample: Sample = {"__key__": key, "__url__": url}
        for name, where in rows.fields.items():
            size = int(where.sizes[i])
            if size < 0:
                continue
            start = int(where.starts[i])
            decoder = self._recipe.decoders.decoder_for(name)
            try:
                sample[name] = (
                    rows.memory[start : start + size]
                    if decoder is raw
                    else decode_field(decoder, rows.view[start : start + size], url=url, key=key, field=name)
                )
            except DecodeError as error:
                raise _Bad("decode", error) from error
        return sample if self._recipe.transform is None else self._transformed(self._recipe.transform, sample)

    def _transformed(self, transform: Transform, sample: Sample) -> Sample:
        key, url = sample["__key__"], sample["__url__"]
        try:
            changed = transform(sample)
        except MemoryError:
            raise
        except Exception as error:
            wrapped = DecodeError(f"{url}: sample {key!r}: transform raised {type(error).__name__}: {error}")
            wrapped.__cause__ = error
            raise _Bad("transform", wrapped) from error
        if changed is None:
            raise _Bad("transform", None)
        if self._recipe.collate_fn is None and not isinstance(changed, Mapping):
            raise ConfigError(
                f"{url}: sample {key!r}: transform returned {type(changed).__name__}, expected a dict of fields (or "
                f"None to drop the sample); other types need a collate_fn that takes them"
            )
        return changed


def _decode_column(view: memoryview, decoder: Decoder, starts: list[int], stops: list[int]) -> list[Any]:
    try:
        return [decoder(view[a:b]) if b >= a else None for a, b in zip(starts, stops, strict=True)]
    except (ConfigError, MemoryError):
        raise
    except Exception as error:
        raise DecodeError("a value of the column does not decode") from error


def _collate_columns(rows: Rows, columns: Mapping[str, Any], allocate: Allocate | None) -> Batch:
    """The default batch of decoded columns."""
    batch: Batch = {"__key__": rows.keys, "__url__": rows.urls}
    for name, values in columns.items():
        batch[name] = values if isinstance(values, torch.Tensor) else collate_field(values, allocate=allocate)
    return batch


def _tensor(array: npt.NDArray[Any]) -> Any:
    return torch.from_numpy(array)


def _gather(
    view: memoryview, where: FieldRange, decoder: ArrayDecoder, allocate: Allocate | None
) -> torch.Tensor | None:
    """Equal-sized fixed-type payloads as one tensor [n, ...], or None where the values are not alike.

    Payloads of a tar start at multiples of 512 bytes, so a batch of small ones is one gather of 512-byte blocks.
    """
    size = int(where.sizes[0]) if len(where.sizes) else 0
    if not size or size % decoder.dtype.itemsize or (where.sizes != size).any() or (where.starts % 512).any():
        return None
    num_items = size // decoder.dtype.itemsize
    shape = _shape_of(num_items, decoder)
    if shape is None:
        return None
    dtype = torch.from_numpy(np.empty(0, decoder.to)).dtype
    shape = (len(where.sizes), *shape)
    tensor = torch.empty(shape, dtype=dtype) if allocate is None else allocate(shape, dtype)
    out = tensor.numpy().reshape(-1, num_items)
    if size >= _COPY_ROWS_BYTES:
        for row, start in zip(out, where.starts.tolist(), strict=True):
            row[:] = np.frombuffer(view, decoder.dtype, num_items, start)
        return tensor
    blocks = np.frombuffer(view, np.uint8).reshape(-1, 512)
    wanted = (where.starts // 512)[:, None] + np.arange(-(-size // 512))
    if size % 512 == 0 and decoder.dtype == decoder.to:
        np.take(blocks, wanted.reshape(-1), 0, out.view(np.uint8).reshape(-1, 512), "clip")
        return tensor
    gathered = blocks[wanted].reshape(len(out), -1)[:, :size]
    out[:] = np.ascontiguousarray(gathered).view(decoder.dtype)
    return tensor


def _shape_of(num_items: int, decoder: ArrayDecoder) -> tuple[int, ...] | None:
    """The shape of a payload of that many items; None if it does not fit (the decoder says why)."""
    if decoder.shape is None:
        return (num_items,)
    known = math.prod(length for length in decoder.shape if length >= 0)
    if -1 not in decoder.shape:
        return decoder.shape if known == num_items else None
    if not known or num_items % known:
        return None
    return tuple(num_items // known if length < 0 else length for length in decoder.shape)


def size_of(batch: Any) -> int:
    """About how many bytes a batch holds: its tensors, arrays and byte strings; objects are not looked into."""
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        return int(batch.nbytes)
    if isinstance(batch, (bytes, bytearray, str)):
        return len(batch)
    if isinstance(batch, Mapping):
        return sum(size_of(value) for value in batch.values())
    if isinstance(batch, (list, tuple)):
        return sum(size_of(value) for value in batch)
    return 0
