"""Make rows of the tokens of documents: ``TokenPacks``; and ``PaddedDocuments``, whose rows are whole batches."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from streaming.build.batches.build import (
    LENGTH,
    BadSample,
    BatchBuilder,
    ExchangedRows,
    GroupedRows,
    Mask,
    OnError,
    Recipe,
    RowKind,
    SourceRecipe,
)  # fmt: skip
from streaming.build.batches.draws import BatchDraws
from streaming.build.batches.items.columns import PackColumns, PaddedColumns
from streaming.build.batches.items.pieces import OneEach, PieceItems, check_measured, measured_by, pieces_of
from streaming.build.batches.items.split_rows import join_packs, narrow_pack, split_packs
from streaming.build.batches.jagged import Allocate
from streaming.build.batches.rows import DecodedRow, FieldRange, Index, PlannedRows, Rows, Stock, cut_up, scaled
from streaming.build.batches.sequence import SequenceSlice
from streaming.common.platforms import later
from streaming.errors import ConfigError, DecodeError
from streaming.order.packing.balance import BalanceRules, order_local
from streaming.order.packing.layout import NO_DOCUMENT, PackRows, PackShape
from streaming.order.packing.shorter import shorter
from streaming.order.plan.sizes import Steps
from streaming.order.plan.state import LoaderState
from streaming.storage import redact
from streaming.types import Batch, Int64Array, Sample, override

if TYPE_CHECKING:
    import torch
else:
    torch = later("torch", globals())

_log = logging.getLogger(__name__)
LayOut: TypeAlias = "Callable[[Recipe, Rows, PackRows, Int64Array, Allocate | None], PackColumns]"
"""Lays documents out, given the number of tokens that each has."""
_FATE = "Padding takes the place of its tokens and carries no loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPacks(PieceItems):
    """A row is a pack of documents, whose tokens go straight from the shards into the batch.

    A document that cannot be read becomes padding. While ``parts`` is k, each pack is laid out as k rows.

    Attributes:
        shape: The user's options for a batch; its length is that of a pack.
        balance: See ``RowKind``.
        parts: Number of rows per pack, by the row of the run at which its global batch begins; each divides the length.
        unmasked: Numbers of a mixture's sources that were given no mask: all tokens of their documents have loss.
    """

    shape: PackShape
    balance: BalanceRules | None = None
    parts: Steps = Steps(((0, 1),))  # noqa: RUF009  frozen
    unmasked: tuple[int, ...] = ()

    no_jagged = "packed documents already lie end to end, with their borders in cu_seqlens; leave it out"

    def __post_init__(self) -> None:
        self._check_labels()

    group_rows = 8_192
    """More than for samples: pieces take more NumPy calls, whose cost is shared (docs/design/0024)."""

    @property
    @override
    def grouped(self) -> GroupedRows | None:
        return self if self.balance is None else None

    @property
    @override
    def exchanged(self) -> ExchangedRows | None:
        return self if self.balance is not None and self.balance.how == "exchange" else None

    @property
    @override
    def fields(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.shape.fields

    @property
    @override
    def raw(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.fields

    @override
    def typed(self, look: Callable[[str], str]) -> PieceItems:
        return replace(self, shape=replace(self.shape, dtype=look(self.shape.field)))

    @override
    def mixed(self, kinds: Sequence[RowKind]) -> Self:
        masks = [one.shape.mask_field for one in kinds if isinstance(one, TokenPacks)]
        named = next((name for name in masks if name is not None), None)
        unmasked = () if named is None else tuple(number for number, name in enumerate(masks) if name is None)
        return replace(self, shape=replace(self.shape, mask_field=named), unmasked=unmasked)

    def unmasked_of(self, rows: Rows) -> npt.NDArray[np.bool_] | None:
        """Return which pieces have no mask, because their source was given none, bool [n]; None: none of them."""
        return np.isin(rows.sources, self.unmasked) if self.unmasked and rows.sources is not None else None

    # --- which samples ---

    def order(self, stock: Stock, of: PlannedRows) -> Index:
        """See ``RowKind``: with ``balance="local"``, from the most to the least expensive pack."""
        if self.balance is None or self.balance.how != "local":
            return slice(None)
        costs = self._costs(stock, of, self.packs(stock, of), self.balance)
        return order_local(costs.reshape(len(of.offsets), -1).sum(axis=1))  # a pack costs the sum of its rows

    def packs(self, stock: Stock, of: PlannedRows) -> PackRows:
        """See ``PieceItems``; if packs are to be exchanged, with their costs. All batches have equally many parts."""
        packs = PieceItems.packs(self, stock, of)
        if not self.parts.is_constant:
            parts = self.parts.at(int(stock.begins(of)[0]))
            packs = shorter(packs, self.shape.length, parts, self.shape.multiple)
        if self.balance is None or self.exchanged is None:
            return packs
        return replace(packs, costs=self._costs(stock, of, packs, self.balance))

    def _costs(self, stock: Stock, of: PlannedRows, packs: PackRows, rules: BalanceRules) -> Any:
        return packs.costs_by(rules, self.shape.length // packs.parts, measured_by(rules, stock, of, packs))

    def rows_at_once(self, stock: Stock, of: PlannedRows) -> Rows | None:
        """See ``GroupedRows``; under the engine's lock, never packs or waits for a column of lengths."""
        if not stock.source.rows.has_packs(of.chunk_ids, of.passes, stock.seed):
            return None
        if not self.parts.is_constant:
            begins = stock.begins(of)
            if self.parts.next_change(int(begins.min())) != self.parts.next_change(int(begins.max())):
                return None
        rows = self.rows(stock, of, {})
        return rows if as_planned(rows, pieces_of(rows), self.shape, self.unmasked_of(rows)) else None

    # --- batches ---

    @override
    def build(self, builder: BatchBuilder, rows: Rows, valid: Mask) -> Any:
        available = self._tokens_there(builder, rows, pieces_of(rows))
        return self._built(builder, rows, valid, available, self._laid_out)

    def _built(
        self, builder: BatchBuilder, rows: Rows, valid: Mask, available: Int64Array, lay: LayOut,
        firsts: Int64Array | None = None,
    ) -> Any:  # fmt: skip
        """Return the batch of documents with ``available`` tokens each, laid out by ``lay``.

        ``firsts`` are the first piece of each pack, if pieces draw random numbers of their own.
        """
        packs, recipe = pieces_of(rows), builder.recipe
        of, count, valid = self._marked(packs, valid, is_plain=recipe.collate_fn is None)
        mask = recipe.mask_of(count, valid)
        if recipe.skips and mask is not None:  # under "skip", a row without any readable document
            mask &= (np.bincount(of[available > packs.starts], minlength=count) > 0) | (
                np.bincount(of, minlength=count) == 0
            )
        allocate = builder.allocate if recipe.collate_fn is None else None
        columns, cuts = lay(recipe, rows, packs, available, allocate), scaled(rows.cuts, packs.parts)
        if recipe.collate_fn is None:

            def make(low: int, high: int) -> Any:
                first, stop = self._entries(packs, low, high)
                marks = None if mask is None else mask[first:stop]
                return recipe.whole(columns.batch(low, high), marks, stop - first)

            return cut_up(cuts, packs.num_packs, make)
        each = (columns.batch(pack, pack + 1) for pack in range(packs.num_packs))
        return builder.collate([self._as_row(one) for one in each], mask, cuts, firsts)

    def empty(self, builder: BatchBuilder, prototypes: Iterator[Rows], begin: int) -> Any:  # noqa: ARG002
        """See ``RowKind``; the options determine its form."""
        nothing, recipe = np.empty(0, np.int64), replace(builder.recipe, finish=None)
        rows = Rows(memory=b"", view=memoryview(b""), keys=[], urls=[], fields={}, damage={})
        splits = np.zeros(1 if recipe.collate_fn is None else 2, np.int64)
        is_mixed = any(part.name for part in recipe.parts)  # unlike the kinds of one set
        sources = np.zeros(len(splits) - 1, np.int64) if is_mixed else None
        packs = PackRows(
            splits=splits, samples=nothing, starts=nothing, stops=nothing, lengths=nothing, sources=sources,
            parts=self.rows_each(begin),
        )  # fmt: skip
        batch = self._laid_out(recipe, rows, packs, nothing, None).batch(0, packs.num_packs)
        if recipe.collate_fn is None:
            return recipe.whole(batch, recipe.mask_of(0, None), 0)
        return builder.without_rows(self._as_row(batch))

    def columns(
        self,
        recipe: Recipe,
        rows: Rows,
        allocate: Allocate | None = None,
        place: DecodedRow | None = None,  # noqa: ARG002
        draws: BatchDraws | None = None,  # noqa: ARG002
    ) -> PackColumns:
        """See ``GroupedRows``; documents must be ``as_planned``."""
        packs = pieces_of(rows)
        return self._laid_out(recipe, rows, packs, packs.lengths, allocate)

    def exclude(self, batch: Batch, valid: npt.NDArray[np.bool_]) -> None:
        """See ``RowKind``: excluded rows have no labels and are not counted; their other entries stay."""
        if valid.all():
            return
        counts, labels, ignored = torch.from_numpy(valid), batch["labels"], self.shape.ignore_id
        labels[~counts] = ignored  # type: ignore[index]
        batch["num_tokens"] = int(self._is_token(batch)[counts].sum())
        batch["num_labels"] = int((labels != ignored).sum())  # type: ignore[attr-defined]

    @override
    def alone(self, part: SourceRecipe, samples: Sequence[Sample], packs: PackRows) -> Sample:
        found: list[Any] = list(samples)
        memory = b"".join(one.get(name, b"") for name in self.fields for one in found)
        places, at = {}, 0
        for name in self.fields:
            sizes = np.array([len(one[name]) if name in one else -1 for one in found], np.int64)
            lengths = sizes.clip(0)
            places[name] = FieldRange(starts=at + np.cumsum(lengths) - lengths, sizes=sizes)
            at += int(lengths.sum())
        keys, urls = [str(one["__key__"]) for one in found], [str(one["__url__"]) for one in found]
        rows = Rows(memory=memory, view=memoryview(memory), keys=keys, urls=urls, fields=places, damage={}, packs=packs)
        recipe = Recipe(parts=(replace(part, on_error="raise"),), items=self, collate_fn=operator.itemgetter(0))
        row: Sample = BatchBuilder(recipe, lambda _: iter(()), _ignored).build(rows, None)
        return row | ({"__source__": part.name} if part.name else {})

    def _laid_out(
        self, recipe: Recipe, rows: Rows, packs: PackRows, available: Int64Array, allocate: Allocate | None
    ) -> PackColumns:
        shape = self.shape if packs.parts == 1 else replace(self.shape, length=self.shape.length // packs.parts)
        names = [part.name for part in recipe.parts]
        return PackColumns(rows, packs, shape, available, allocate, names, self.unmasked_of(rows))

    def _marked(self, packs: PackRows, valid: Mask, *, is_plain: bool) -> tuple[Int64Array, int, Mask]:  # noqa: ARG002
        """Return the mask entry of each piece, the number of mask entries, and the mask of valid ones."""
        return packs.packs, packs.num_packs, None if valid is None else valid.repeat(packs.parts)

    def _entries(self, packs: PackRows, low: int, high: int) -> tuple[int, int]:  # noqa: ARG002
        """Return which entries of the mask packs ``[low, high)`` are under."""
        return low, high

    def _as_row(self, batch: Batch) -> Sample:
        """Return the single pack of a batch in the form of a sample."""
        return {
            name: value[0] if isinstance(value, list | torch.Tensor) and name != "cu_seqlens" else value
            for name, value in batch.items()
        }

    def _is_token(self, batch: Batch) -> torch.Tensor:
        """Return a bool mask of the positions of a batch, or of a row, that hold a token."""
        documents: Any = batch["document_ids"]
        is_token: torch.Tensor = documents != NO_DOCUMENT
        return is_token

    def _tokens_there(self, builder: BatchBuilder, rows: Rows, packs: PackRows) -> Int64Array:
        """Return the number of tokens of each piece's document, int64 [n].

        It is 0 for a document that cannot be delivered, after reporting it.
        """
        shape = self.shape
        unmasked = self.unmasked_of(rows)
        if as_planned(rows, packs, shape, unmasked):
            return packs.lengths
        missing = np.full(len(rows.keys), -1)
        sizes, masks = (
            rows.fields[name].sizes if name in rows.fields else missing
            for name in (shape.field, shape.mask_field or shape.field)
        )
        tokens = sizes // shape.token_bytes
        odd = (sizes < 0) | (sizes % shape.token_bytes != 0)
        if shape.mask_field is not None:
            odd |= (masks != tokens) if unmasked is None else (masks != tokens) & ~unmasked
        for i in range(len(rows.keys)):
            builder.place[0] = i
            if i in rows.damage or odd[i]:
                error = rows.damage.get(i) or _no_tokens(rows, i, shape, int(sizes[i]), int(masks[i]))
                builder.lost(rows, i, "fetch" if i in rows.damage else "decode", error)
                tokens[i] = 0
            elif tokens[i] != packs.lengths[i]:
                part = builder.recipe.part_of(rows, i)
                reason = f"{tokens[i]} tokens, but its column says {packs.lengths[i]}"
                builder.report(
                    BadSample(url=rows.urls[i], key=rows.keys[i], stage=LENGTH, reason=reason, source=part.name)
                )
        builder.place[0] = -1
        return tokens

    # --- over a run ---

    @property
    def lengths(self) -> Steps:
        """Number of tokens per row, by the row of the run at which its global batch begins."""
        return Steps(tuple((row, self.shape.length // parts) for row, parts in self.parts.steps))

    @override
    def rows_each(self, begin: int) -> int:
        return self.parts.at(begin)

    @property
    @override
    def changes(self) -> Sequence[tuple[int, str]]:
        if self.parts.is_constant:
            return ()
        return [(row, f"rows of {length:,} tokens") for row, length in self.lengths.steps]

    @override
    def facts(self, state: LoaderState | None = None, row: int = 0) -> dict[str, Any]:
        own, was = self.lengths, None if state is None else state.lengths
        if was is None:
            return {"lengths": own}
        if not was.goes_on_as(own, row):
            _log.info(
                "the length of rows changes at row %d: the state had %s; this loader has %s. The packs, their order "
                "and the number of steps stay the same; packs are laid out in rows of other lengths from that row on",
                row, was, own,
            )  # fmt: skip
        return {"lengths": was.followed_by(own, row)}

    # --- between ranks ---

    def split(self, batch: Batch) -> list[Batch]:
        """See ``ExchangedRows``."""
        return split_packs(batch)

    def sent(self, row: Batch) -> Batch:
        """See ``ExchangedRows``."""
        return narrow_pack(row)

    def joined(self, rows: Sequence[Batch], allocate: Allocate | None = None) -> Batch:
        """See ``ExchangedRows``."""
        return join_packs(rows, self.shape, allocate)

    # --- options ---

    @property
    @override
    def options(self) -> dict[str, Any]:
        return {**asdict(self.shape), **self._masks, "length": self.lengths.plain, "padded": False}

    @property
    def _masks(self) -> dict[str, Any]:
        """What ranks compare beside the shape: the sources without a mask."""
        return {"unmasked": list(self.unmasked)} if self.unmasked else {}

    @override
    def fate(self, on_error: OnError) -> str:
        return RowKind.fate(self, on_error) if on_error == "raise" else _FATE

    @override
    def balanced(self, rules: BalanceRules, *, dataset: object, collate_fn: object) -> RowKind:
        if rules.how == "exchange" and collate_fn is not None:
            raise ConfigError(
                'balance="exchange" with a collate_fn: ranks can only exchange packs in the batches that Packed makes '
                'itself. Call the function on the batch in the training loop, or use balance="local"'
            )
        check_measured(rules, dataset)
        return replace(self, balance=rules)

    def _check_labels(self) -> None:
        shape = self.shape
        if shape.labels_across and shape.multiple > 1 and not shape.shift_labels:
            raise ConfigError(
                f"labels_across=True with multiple={shape.multiple}: a model that shifts labels itself would predict "
                "the first token of a document from the padding before it, not from the last token of the previous "
                "document. Add shift_labels=True, for a loss that compares position by position, or leave one of them "
                "out"
            )

    def check_sequence(self, wanted: SequenceSlice, least: int) -> None:
        """See ``RowKind``: documents must be divisible; warns about labels whose tokens are on other ranks."""
        if wanted.borders is not None:
            self._check_borders(wanted, least)
        elif not self.parts.is_constant:
            self._check_lengths(least)
        if "labels" in wanted.fields and not self.shape.shift_labels:
            _log.warning(
                "sequence: labels are sliced unchanged, with labels[t] = input_ids[t] (shift_labels=False). A model "
                "that shifts them itself sees one slice only, and compares the tokens at its borders with the wrong "
                "labels: write Packed(…, shift_labels=True) and use a loss that compares position by position"
            )

    def _check_lengths(self, least: int) -> None:
        for row, length in self.lengths.steps:
            if length % least:
                raise ConfigError(
                    f"sequence: rows of {length} tokens, which come from row {row:,} on, cannot be cut into equal "
                    f"slices: the length must be a multiple of {least}. Use other lengths in Packed(…, length="
                    "Schedule.steps({…}))"
                )

    def _check_borders(self, wanted: SequenceSlice, least: int) -> None:
        if self.shape.multiple % least:
            raise ConfigError(
                f"sequence: SequenceSlice(borders={wanted.borders!r}) cuts each document of a pack into equal parts, "
                f"so its length must be a multiple of {least}, got multiple={self.shape.multiple}; write Packed(…, "
                f"multiple={least})"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedDocuments(OneEach, TokenPacks):
    """A row is a batch under a token budget: documents of similar length, one per line, padded to the longest."""

    @property
    @override
    def grouped(self) -> None:
        return None

    @property
    def length(self) -> int:  # type: ignore[override]
        """Maximum number of documents times the length of the longest, in tokens."""
        return self.shape.length

    def _check_labels(self) -> None:
        if self.shape.labels_across:
            raise ConfigError(
                "labels_across=True with padded=True: each document is a row of its own, and nothing comes before it; "
                "leave one of them out"
            )

    def _laid_out(
        self, recipe: Recipe, rows: Rows, packs: PackRows, available: Int64Array, allocate: Allocate | None
    ) -> PackColumns:
        names = [part.name for part in recipe.parts]
        return PaddedColumns(rows, packs, self.shape, available, allocate, names, self.unmasked_of(rows))

    def _marked(self, packs: PackRows, valid: Mask, *, is_plain: bool) -> tuple[Int64Array, int, Mask]:
        """See ``TokenPacks``: documents are marked, unless ``collate_fn`` gets batches."""
        if not is_plain:
            return TokenPacks._marked(self, packs, valid, is_plain=is_plain)
        count = len(packs.samples)
        return np.arange(count), count, None if valid is None else valid[packs.packs]

    @override
    def _entries(self, packs: PackRows, low: int, high: int) -> tuple[int, int]:
        return int(packs.splits[low]), int(packs.splits[high])

    def _as_row(self, batch: Batch) -> Sample:
        return batch

    def _is_token(self, batch: Batch) -> torch.Tensor:
        attended: Any = batch["attention_mask"]
        is_token: torch.Tensor = attended
        return is_token

    @property
    @override
    def options(self) -> dict[str, Any]:
        return {**asdict(self.shape), **self._masks, "padded": True}

    @override
    def facts(self, state: LoaderState | None = None, row: int = 0) -> dict[str, Any]:
        return {}  # its length is a budget

    def _check_borders(self, wanted: SequenceSlice, least: int) -> None:  # noqa: ARG002
        raise ConfigError(
            f"sequence: SequenceSlice(borders={wanted.borders!r}) with Packed(…, padded=True): each row is one "
            "document, so rows are cut directly; leave borders out"
        )


def as_planned(
    rows: Rows, packs: PackRows, shape: PackShape, unmasked: npt.NDArray[np.bool_] | None = None
) -> bool:  # fmt: skip
    """Return whether all documents can be read, with tokens and masks of the lengths in the column.

    Pieces that are ``unmasked``, bool [n], need no mask.
    """
    missing = np.full(len(rows.keys), -1)
    sizes = rows.fields[shape.field].sizes if shape.field in rows.fields else missing
    if rows.damage or not np.array_equal(sizes, packs.lengths * shape.token_bytes):
        return False
    mask = shape.mask_field
    if mask is None or (unmasked is not None and unmasked.all()):
        return True
    if mask not in rows.fields:
        return False
    fits = rows.fields[mask].sizes == packs.lengths
    return bool((fits if unmasked is None else fits | unmasked).all())


def _ignored(bad: BadSample) -> None:
    """Ignore a bad sample: a document of another length is shown unchanged."""


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
