"""Build a batch from its rows: decode, transform, collate; unreadable samples are substituted, masked or raised."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice, pairwise
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from streaming.batches.collate import default_collate, empty_like, without_rows
from streaming.batches.columns import Columns, PackColumns, as_planned, exclude_packs
from streaming.batches.draws import BatchDraws, Chain, as_chain
from streaming.batches.jagged import Allocate, Form
from streaming.batches.losses import DROPPED, cure_of, user_trace
from streaming.batches.portion import Portion
from streaming.batches.rows import DecodedRow, FieldRange, Rows
from streaming.decode import FieldDecoder, decode_field, raw, runs_code_of_user
from streaming.errors import ConfigError, DecodeError, TooManyBadSamplesError
from streaming.packing.layout import PackRows, PackShape
from streaming.storage import redact
from streaming.types import Batch, Int64Array, Sample, Transform

OnError: TypeAlias = Literal["substitute", "skip", "raise"]
LENGTH = "length"
"""Stage of a document whose number of tokens differs from its column; it can be read, so it is not a bad sample."""
Mask: TypeAlias = "npt.NDArray[np.bool_] | None"
MAX_SUBSTITUTES = 256
"""Number of neighbors tried in place of an unreadable sample before giving up: a few damaged chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadSample:
    """One sample that could not be delivered.

    Attributes:
        url: URL of the shard.
        key: Key of the sample; "" if even the key could not be read, and no sample table has it.
        stage: ``"fetch"``, ``"decode"`` or ``"transform"``; or ``LENGTH``.
        reason: The error's message.
        dropped: The user's transform dropped it: nothing is wrong with it.
        number: Number of the sample in the dataset; -1 if unknown.
        byte_start: First byte of its record in the shard; -1 without a sample table.
        byte_end: End of the record (exclusive); -1 without a sample table.
        source: Source in a mixture; "" for a single dataset.
        trace: Traceback of the user's code, "" if there is none; depends on who builds, so it is not compared.
    """

    url: str
    key: str
    stage: str
    reason: str
    dropped: bool = False
    number: int = -1
    byte_start: int = -1
    byte_end: int = -1
    source: str = ""
    trace: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """How the samples of one source are decoded and transformed.

    Attributes:
        decoders: Decoder of every field.
        transform: Function of one sample, or of a sample and ``rng``, or None; becomes a ``Chain``.
        on_error: What to do with samples that cannot be delivered.
        fields: Fields to read; None: all.
        name: Name of the source in a mixture, as in ``__source__``; "" for a single dataset and for its groups.
        packs: Shape of a batch whose rows are packs of tokens; None: rows are samples.
        budget: Limit of a batch of whole samples of similar size; None: no limit.
    """

    decoders: FieldDecoder
    transform: Transform | Chain | None = None
    on_error: OnError = "substitute"
    fields: tuple[str, ...] | None = None
    name: str = ""
    packs: PackShape | None = None
    budget: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "transform", as_chain(self.transform))

    @property
    def functions_of_user(self) -> list[Any]:
        """All functions that run user code between bytes and a sample."""
        chained = as_chain(self.transform)
        functions: list[Any] = [] if chained is None else list(chained.functions)
        return [*functions, self.decoders] if runs_code_of_user(self.decoders) else functions


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How bytes become a batch: the user's options. Thread-safe as far as the user's functions are.

    What is derived from all parts is computed once: a mixture may have hundreds of parts, and batches come by the
    thousand.

    Attributes:
        parts: How samples are made, for each source; one for a single dataset.
        collate_fn: Function of a list of samples, or None: the default.
        portion: What this rank uses of a batch; taken where the batch is built.
        finish: Last step of every batch, such as page-locking it, or None.
        jagged: Fields of the default batch whose values are concatenated, and the form of each.
    """

    parts: tuple[Part, ...]
    collate_fn: Callable[[list[Any]], Any] | None = None
    portion: Portion = Portion()  # noqa: RUF009  frozen
    finish: Callable[[Any], Any] | None = None
    jagged: Mapping[str, Form] = field(default_factory=dict)

    @cached_property
    def is_plain(self) -> bool:
        """Whether a batch consists of independent columns: no user function sees whole samples."""
        return self.collate_fn is None and all(part.transform is None for part in self.parts)

    @property
    def packs(self) -> PackShape | None:
        """Shape of a batch of packs, the same for all sources; None: rows are samples."""
        return self.parts[0].packs

    @cached_property
    def skips(self) -> bool:
        """Whether substitutes are marked, so that every batch has ``__valid__``."""
        return any(part.on_error == "skip" for part in self.parts)

    @property
    def functions_of_user(self) -> list[Any]:
        """All functions that run user code between bytes and a batch."""
        functions = [function for part in self.parts for function in part.functions_of_user]
        return functions if self.collate_fn is None else [*functions, self.collate_fn]

    @property
    def fields(self) -> tuple[str, ...] | None:
        """Fields that are read of any source; None: all."""
        if any(part.fields is None for part in self.parts):
            return None
        return tuple(dict.fromkeys(name for part in self.parts for name in part.fields or ()))

    def part_of(self, rows: Rows, i: int) -> Part:
        """Return how row i becomes a sample."""
        return self.parts[0 if rows.sources is None else int(rows.sources[i])]

    def columns(
        self, rows: Rows, allocate: Allocate | None = None, place: DecodedRow | None = None
    ) -> Columns | PackColumns:
        """Return the rows, none of them damaged, as columns from which plain batches are cut.

        Rows of packs must be ``as_planned``.
        """
        if rows.packs is not None and self.packs is not None:
            names = [part.name for part in self.parts]
            return PackColumns(rows, rows.packs, self.packs, rows.packs.lengths, allocate, names)
        decoders = [part.decoders for part in self.parts]
        return Columns(rows, decoders, allocate, place, [part.name for part in self.parts], self.jagged)

    def narrowed(self, rows: Rows) -> Rows:
        """Return the rows without fields that their sources' ``fields`` leave out, if sources differ in these."""
        if rows.sources is None or len({part.fields for part in self.parts}) == 1:
            return rows
        fields: dict[str, FieldRange] = {}
        for name, where in rows.fields.items():
            wants = np.array([part.fields is None or name in part.fields for part in self.parts])[rows.sources]
            if wants.any():
                sizes = where.sizes if wants.all() else np.where(wants, where.sizes, -1)
                fields[name] = FieldRange(starts=where.starts, sizes=sizes)
        return replace(rows, fields=fields)

    def mask_of(self, num_rows: int, valid: Mask) -> Mask:
        """Return ``__valid__`` for a batch of ``num_rows`` rows: ``valid``, or all True, or None."""
        if valid is not None:
            return valid.copy()
        return np.ones(num_rows, np.bool_) if self.skips else None

    def whole(self, batch: Batch, mask: Mask, num_rows: int) -> Any:
        """Finish a default batch: add its mask, take this rank's portion, and apply the last step."""
        if mask is not None:
            if self.packs is not None:
                exclude_packs(batch, mask)
            batch["__valid__"] = torch.from_numpy(mask)
        return self.cut(batch, num_rows)

    def cut(self, batch: Any, num_rows: int) -> Any:
        """Return this rank's portion of a batch, after the last step."""
        return self.finished(self.portion(batch, num_rows))

    def finished(self, batch: Any) -> Any:
        """Return the batch after the last step."""
        return batch if self.finish is None else self.finish(batch)


BadSampleReport: TypeAlias = Callable[[BadSample], None]
"""Called for every sample that could not be delivered; may raise to stop the run."""


class _Bad(Exception):  # noqa: N818  carries a finding, is no error of the program
    """A row that cannot be delivered: the stage, and what happened (None: the transform dropped it)."""

    def __init__(self, stage: str, error: Exception | None) -> None:
        super().__init__(stage, error)
        self.stage = stage
        self.error = error

    @property
    def kind(self) -> str:
        """The stage, as losses are counted: a sample that was dropped is not one that failed."""
        return DROPPED if self.error is None else self.stage


class BatchBuilder:
    """Build one batch; used once.

    Args:
        recipe: How to build.
        substitutes: For row i of the batch, single-row ``Rows`` to try in its place, in order.
        report: Called for every sample that could not be delivered; may raise to stop the run.
        allocate: Allocator for the tensors of the default batch; None: fresh memory. Not used for a batch of which only
            a portion is kept.
        place: Receives the row that is being decoded; None: not needed.
        draws: Random numbers of functions; None: those at the start of epoch 0, without seeding anything.
    """

    def __init__(
        self,
        recipe: Recipe,
        substitutes: Callable[[int], Iterator[Rows]],
        report: BadSampleReport,
        allocate: Allocate | None = None,
        place: DecodedRow | None = None,
        draws: BatchDraws | None = None,
    ) -> None:
        self._draws = draws or BatchDraws()
        self._allocate = allocate if recipe.portion.is_whole else None
        self._place: DecodedRow = [-1] if place is None else place
        self._recipe = recipe
        self._substitutes = substitutes
        self._report = report
        self._lost: list[str] = []  # stages in which the sample in progress, and those tried in its place, were lost

    def build(self, rows: Rows, valid: Mask) -> Any:
        """Return the batch of ``rows``; with ``valid``, or under ``on_error="skip"``, it has ``__valid__`` [n]."""
        recipe = self._recipe
        if rows.packs is not None and recipe.packs is not None:
            return self._packed(rows, rows.packs, recipe.packs, valid)
        if rows.packs is not None:  # packs of whole samples, which are marked one by one
            valid = None if valid is None else valid[rows.packs.packs]
        mask = recipe.mask_of(len(rows.keys), valid)
        if recipe.is_plain and not rows.damage and not self._draws.seeds:
            with suppress(DecodeError):  # building row by row will find out which value
                columns = recipe.columns(rows, self._allocate, self._place)
                return recipe.whole(columns.batch(0, len(rows.keys)), mask, len(rows.keys))
        if rows.packs is not None:
            return self._by_size(rows, rows.packs, mask)
        return self.collate([self._sample_or_substitute(rows, i, mask) for i in range(len(rows.keys))], mask)

    # --- batches by size ---

    def _by_size(self, rows: Rows, packs: PackRows, mask: Mask) -> Any:
        """Return the batch of packs of whole samples: at most the planned rows, none longer than the budget allows."""
        found = [self._pack_of(rows, low, high, mask) for low, high in pairwise(packs.splits.tolist())]
        if self._recipe.collate_fn is not None:
            of_packs = None if mask is None else np.array([mask[list(pack)].any() for pack in found])
            return self.collate([self._default(list(pack.values())) for pack in found], of_packs)
        kept = [row for pack in found for row in pack]
        return self.collate(
            [sample for pack in found for sample in pack.values()], None if mask is None else mask[kept]
        )

    def _pack_of(self, rows: Rows, low: int, high: int, mask: Mask) -> dict[int, Sample]:
        """Return the samples of one pack by row; those that are lost are replaced by others of it.

        A row is left out if a transform drops all of these, too. A pack of which nothing can be delivered becomes a
        single sample of another pack: several of these could take more room than the budget allows.
        """
        found: dict[int, Sample] = {}
        for i in range(low, high):
            sample = self._delivered(rows, i, mask)
            if sample is None:
                sample = self._first_delivered(i, _others_of_pack(rows, i))
            if sample is not None:
                found[i] = sample
        return found or {low: self._substitute(rows, low)}

    def _default(self, samples: list[Sample]) -> Batch:
        return default_collate(samples, allocate=self._allocate, jagged=self._recipe.jagged)

    # --- packs ---

    def _packed(self, rows: Rows, packs: PackRows, shape: PackShape, valid: Mask) -> Any:
        """Return the batch of ``packs``, whose pieces are ``rows``; documents that cannot be read become padding."""
        available = self._tokens_there(rows, packs, shape)
        is_plain = self._recipe.collate_fn is None
        of, count = packs.packs, packs.num_packs
        if shape.padded and is_plain:  # its rows are documents, which are marked
            valid = None if valid is None else valid[of]
            of, count = np.arange(len(of)), len(of)
        mask = self._recipe.mask_of(count, valid)
        if self._recipe.skips and mask is not None:  # under "skip", a pack of which nothing could be read
            mask &= np.bincount(of[available > packs.starts], minlength=count) > 0
        columns = self._columns_of(rows, packs, shape, available)
        if is_plain:
            return self._recipe.whole(columns.batch(0, packs.num_packs), mask, count)
        alone = (columns.batch(pack, pack + 1) for pack in range(packs.num_packs))
        return self.collate([one if shape.padded else _only_row(one) for one in alone], mask)

    def _columns_of(self, rows: Rows, packs: PackRows, shape: PackShape, available: Int64Array) -> PackColumns:
        allocate = self._allocate if self._recipe.collate_fn is None else None
        return PackColumns(rows, packs, shape, available, allocate, [part.name for part in self._recipe.parts])

    def _tokens_there(self, rows: Rows, packs: PackRows, shape: PackShape) -> Int64Array:
        """Return the number of tokens of each piece's document, int64 [n].

        It is 0 for a document that cannot be delivered, which is reported.
        """
        if as_planned(rows, packs, shape):
            return packs.lengths
        missing = np.full(len(rows.keys), -1)
        sizes, masks = (
            rows.fields[name].sizes if name in rows.fields else missing
            for name in (shape.field, shape.mask_field or shape.field)
        )
        tokens = sizes // shape.token_bytes
        odd = (sizes < 0) | (sizes % shape.token_bytes != 0)
        if shape.mask_field is not None:
            odd |= masks != tokens
        for i in range(len(rows.keys)):
            self._place[0] = i
            if i in rows.damage or odd[i]:
                error = rows.damage.get(i) or _no_tokens(rows, i, shape, int(sizes[i]), int(masks[i]))
                self._handle(_Bad("fetch" if i in rows.damage else "decode", error), rows, i)
                tokens[i] = 0
            elif tokens[i] != packs.lengths[i]:
                part = self._recipe.part_of(rows, i)
                reason = f"{tokens[i]} tokens, but its column says {packs.lengths[i]}"
                self._report(
                    BadSample(url=rows.urls[i], key=rows.keys[i], stage=LENGTH, reason=reason, source=part.name)
                )
        self._place[0] = -1
        return tokens

    def _no_packs(self, shape: PackShape) -> Any:
        """Return the batch of no packs."""
        nothing = np.empty(0, np.int64)
        rows = Rows(memory=b"", view=memoryview(b""), keys=[], urls=[], fields={}, damage={})
        recipe = replace(self._recipe, finish=None)
        splits = np.zeros(1 if recipe.collate_fn is None else 2, np.int64)
        is_mixed = len(recipe.parts) > 1 or bool(recipe.parts[0].name)
        sources = np.zeros(len(splits) - 1, np.int64) if is_mixed else None
        packs = PackRows(
            splits=splits, samples=nothing, starts=nothing, stops=nothing, lengths=nothing, sources=sources
        )
        batch = self._columns_of(rows, packs, shape, nothing).batch(0, packs.num_packs)
        if recipe.collate_fn is None:
            return recipe.whole(batch, recipe.mask_of(0, None), 0)
        sample = (batch if shape.padded else _only_row(batch)) | ({"__valid__": True} if recipe.skips else {})
        return recipe.portion(without_rows(partial(self._collated, recipe.collate_fn), sample), 0)

    def collate(self, samples: list[Sample], mask: Mask) -> Any:
        """Return the batch of samples, by the user's function or the default one."""
        self._place[0] = -1
        if self._recipe.collate_fn is not None:
            self._draws.begin_collate()
            if mask is not None:
                for sample, valid in zip(samples, mask, strict=True):
                    if isinstance(sample, dict):
                        if self._recipe.packs is not None:
                            exclude_packs(sample, np.asarray(valid))
                        sample["__valid__"] = bool(valid)
            return self._recipe.cut(self._collated(self._recipe.collate_fn, samples), len(samples))
        return self._recipe.whole(self._default(samples), mask, len(samples))

    @staticmethod
    def _collated(collate_fn: Callable[[list[Any]], Any], samples: list[Sample]) -> Any:
        try:
            return collate_fn(samples)
        except Exception as error:
            first = samples[0] if samples and isinstance(samples[0], Mapping) else {}
            key, url, what = first.get("__key__"), first.get("__url__"), "samples"
            if isinstance(key, list):
                key, what = next(iter(key), None), "packs (each a dict, whose entries hold all that is in it)"
                url = next(iter(url), None) if isinstance(url, list) else url
            error.add_note(f"in collate_fn, given {len(samples)} {what}, the first of them {key!r} of {url}")
            raise

    def empty(self, prototypes: Iterator[Rows]) -> Any:
        """Make the batch of no rows, using the first of ``prototypes`` (single rows) that can be read as a template.

        Unreadable prototypes are skipped silently, because they are not samples of this batch. A user's function is
        never called without samples, see :func:`without_rows`.

        Raises:
            TooManyBadSamplesError: None can be read.
        """
        if self._recipe.packs is not None:
            return self._no_packs(self._recipe.packs)
        sample = self._first_of(prototypes)
        if self._recipe.parts[0].budget is not None and self._recipe.collate_fn is not None:
            sample = self._default([sample])
        if self._recipe.skips and self._recipe.collate_fn is not None and isinstance(sample, dict):
            sample["__valid__"] = True
        if self._recipe.collate_fn is not None:
            return self._recipe.portion(without_rows(partial(self._collated, self._recipe.collate_fn), sample), 0)
        whole = replace(self._recipe, portion=Portion(), finish=None)
        row = whole.whole(self._default([sample]), whole.mask_of(1, None), 1)
        return self._recipe.portion(empty_like(row), 0)

    def _first_of(self, prototypes: Iterator[Rows]) -> Sample:
        lost: list[str] = []
        for rows in islice(prototypes, MAX_SUBSTITUTES):
            try:
                return self._sample(rows, 0)
            except _Bad as bad:
                lost.append(bad.kind)
        raise TooManyBadSamplesError(
            f"this rank gets no rows of the last batch, and none of the {len(lost)} samples tried for the shape of an "
            f"empty one could be read and was kept by transform. {cure_of(lost)}"
        )

    def samples(self, rows: Rows) -> list[Sample]:
        """Return the decoded, transformed samples of ``rows``, not collated."""
        return [self._sample_or_substitute(rows, i, None) for i in range(len(rows.keys))]

    def _sample_or_substitute(self, rows: Rows, i: int, mask: Mask) -> Sample:
        sample = self._delivered(rows, i, mask)
        return self._substitute(rows, i) if sample is None else sample

    def _delivered(self, rows: Rows, i: int, mask: Mask) -> Sample | None:
        """Return row i as a sample; None if it is lost, which is reported and marked."""
        self._place[0] = i
        self._lost.clear()
        try:
            self._draws.begin_sample(i)
            return self._sample(rows, i)
        except _Bad as bad:
            self._lost.append(bad.kind)
            self._handle(bad, rows, i)
            if mask is not None and self._recipe.part_of(rows, i).on_error == "skip":
                mask[i] = False
        return None

    def _substitute(self, rows: Rows, i: int) -> Sample:
        """Return a sample in place of row i.

        Raises:
            TooManyBadSamplesError: None of those tried can be delivered.
        """
        sample = self._first_delivered(i, self._substitutes(i))
        if sample is not None:
            return sample
        url, tried = redact(rows.urls[i]), len(self._lost) - 1
        others = f"so are all {tried} others tried in its place" if tried else "there is no other to take its place"
        raise TooManyBadSamplesError(
            f"{url}: sample {rows.keys[i]!r} is unreadable or dropped, and {others}. {cure_of(self._lost, url)}"
        )

    def _first_delivered(self, i: int, others: Iterator[Rows]) -> Sample | None:
        """Return the first of the single rows that can be delivered in place of row i; None: none of those tried."""
        self._place[0] = i
        for tried, other in enumerate(islice(others, MAX_SUBSTITUTES)):
            try:
                self._draws.begin_sample(i, tried + 1)
                return self._sample(other, 0)
            except _Bad as bad:
                self._lost.append(bad.kind)
                if bad.error is not None:
                    self._handle(bad, other, 0)
        return None

    def _handle(self, bad: _Bad, rows: Rows, i: int) -> None:
        reason = "transform returned None" if bad.error is None else str(bad.error)
        part = self._recipe.part_of(rows, i)
        if part.on_error == "raise":
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
                trace="" if bad.error is None or bad.stage == "fetch" else user_trace(bad.error),
                number=number,
                source=part.name,
            )
        )

    def _sample(self, rows: Rows, i: int) -> Sample:
        """Decode and transform row i.

        Raises:
            _Bad: It cannot be delivered.
        """
        damage = rows.damage.get(i)
        if damage is not None:
            raise _Bad("fetch", damage)
        key, url, part = rows.keys[i], rows.urls[i], self._recipe.part_of(rows, i)
        sample: Sample = {"__key__": key, "__url__": url}
        if part.name:
            sample["__source__"] = part.name
        for name, where in rows.fields.items():
            size = int(where.sizes[i])
            if size < 0:
                continue
            start = int(where.starts[i])
            decoder = part.decoders.decoder_for(name)
            try:
                sample[name] = (
                    rows.memory[start : start + size]
                    if decoder is raw
                    else decode_field(decoder, rows.view[start : start + size], url=url, key=key, field=name)
                )
            except DecodeError as error:
                raise _Bad("decode", error) from error
        functions = as_chain(part.transform)
        return sample if functions is None else self._transformed(functions, sample)

    def _transformed(self, functions: Chain, sample: Sample) -> Sample:
        key, url = sample["__key__"], str(sample["__url__"])
        try:
            changed = functions(sample, self._draws)
        except MemoryError:
            raise
        except Exception as error:
            wrapped = DecodeError(f"{redact(url)}: sample {key!r}: transform raised {type(error).__name__}: {error}")
            wrapped.__cause__ = error
            raise _Bad("transform", wrapped) from error
        if changed is None:
            raise _Bad("transform", None)
        if self._recipe.collate_fn is None and not isinstance(changed, Mapping):
            raise ConfigError(
                f"{redact(url)}: sample {key!r}: transform returned {type(changed).__name__}, expected a dict of "
                f"fields (or None to drop the sample); other types need a collate_fn that takes them"
            )
        return changed


def _others_of_pack(rows: Rows, i: int) -> Iterator[Rows]:
    """Yield single rows that may replace row i: intact ones of its pack, of similar size, starting with the next."""
    if rows.packs is None:
        return
    pack = int(rows.packs.packs[i])
    low, high = rows.packs.splits[pack : pack + 2].tolist()
    for other in (*range(i + 1, high), *range(low, i)):
        if other not in rows.damage:
            one = slice(other, other + 1)
            fields = {name: FieldRange(starts=f.starts[one], sizes=f.sizes[one]) for name, f in rows.fields.items()}
            sources = None if rows.sources is None else rows.sources[one]
            yield replace(
                rows, keys=rows.keys[one], urls=rows.urls[one], fields=fields, damage={}, sources=sources, packs=None
            )


def _only_row(batch: Batch) -> Sample:
    """Return the only pack of a batch, as functions of samples see it."""
    alone: Sample = {}
    for name, value in batch.items():
        if isinstance(value, list) or (isinstance(value, torch.Tensor) and name != "cu_seqlens"):
            alone[name] = value[0]
        else:
            alone[name] = value
    return alone


def _no_tokens(rows: Rows, i: int, shape: PackShape, num_bytes: int, mask_bytes: int) -> DecodeError:
    """Describe why the tokens of a document cannot be used."""
    what = f"{redact(rows.urls[i])}: sample {rows.keys[i]!r}"
    if num_bytes < 0:
        return DecodeError(f"{what} has no field {shape.field!r}, which should hold its tokens")
    if num_bytes % shape.token_bytes:
        return DecodeError(
            f"{what}: field {shape.field!r} has {num_bytes} bytes, which is not a whole number of tokens of "
            f"{shape.token_bytes} bytes"
        )
    found = "no mask" if mask_bytes < 0 else f"a mask of {mask_bytes} bytes"
    return DecodeError(
        f"{what}: {found} (field {shape.mask_field!r}) for {num_bytes // shape.token_bytes} tokens; expected one byte "
        "for each"
    )
