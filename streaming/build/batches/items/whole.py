"""Make batches of whole samples of similar size, ``WholeSamples``, and lists of whole samples, ``SampleLists``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from streaming.build.batches.build import BatchBuilder, Mask, OnError, RowKind, Samples, SourceRecipe
from streaming.build.batches.collate import default_collate
from streaming.build.batches.items.pieces import (
    OneEach,
    PieceItems,
    check_measured,
    each_piece,
    measured_by,
    pieces_of,
)
from streaming.build.batches.jagged import Form, checked_jagged
from streaming.build.batches.rows import Cuts, FieldRange, Index, PlannedRows, Rows, Stock, cut_up
from streaming.common.arrays import sums
from streaming.errors import ConfigError
from streaming.order.packing.balance import BalanceRules, order_local
from streaming.order.packing.layout import PackRows
from streaming.types import Int64Array, Sample, override

_OF_LIST = (
    "It leaves its list; a list without samples becomes one sample of another one, so that none exceeds its budgets"
)
_FATE = (
    "Another sample of its batch takes the place of each; a batch without samples becomes one sample of another batch, "
    "so that no batch exceeds its budget"
)


class _Whole(PieceItems, Samples):
    """A row is made of whole samples, decoded and transformed like any other."""

    __slots__ = ()

    unit = ""
    documents = "samples"
    no_map = (
        "Packed: map: functions of samples belong to the data set; write Packed(StreamingDataset(…, transform=…), …)"
    )

    @property
    @override
    def grouped(self) -> None:
        return None

    def positions(self, positions: Int64Array, packs: PackRows) -> Int64Array:
        """See ``PieceItems``: each sample draws its own random numbers."""
        return each_piece(positions, packs)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeSamples(OneEach, _Whole):
    """A row is a batch of whole samples of similar size, decoded, transformed and collated like any other.

    Attributes:
        length: Maximum number of samples times the largest size, in the unit of the column.
        multiple: Sizes are rounded up to a multiple of this.
        max_docs: Maximum number of samples; None: no maximum.
    """

    length: int
    multiple: int = 1
    max_docs: int | None = None

    def build(self, builder: BatchBuilder, rows: Rows, valid: Mask) -> Any:
        """See ``RowKind``: each sample has its own entry in the mask."""
        return Samples.build(self, builder, rows, None if valid is None else valid[pieces_of(rows).packs])

    @override
    def cuts(self, rows: Rows) -> Cuts:
        return None if rows.cuts is None else pieces_of(rows).splits[list(rows.cuts)].tolist()

    def one_by_one(self, builder: BatchBuilder, rows: Rows, mask: Mask) -> Any:
        """Return at most the planned samples, so that no batch exceeds its budget."""
        found = [self._batch_of(builder, rows, span, mask) for span in pairwise(pieces_of(rows).splits.tolist())]
        if builder.recipe.collate_fn is not None:
            each = None if mask is None else np.array([mask[list(batch)].any() for batch in found])
            return builder.collate([builder.default(list(batch.values())) for batch in found], each, rows.cuts)
        kept = [row for batch in found for row in batch]
        samples = [sample for batch in found for sample in batch.values()]
        cuts = None if rows.cuts is None else sums([len(batch) for batch in found])[list(rows.cuts)].tolist()
        return builder.collate(samples, None if mask is None else mask[kept], cuts)

    def _batch_of(self, builder: BatchBuilder, rows: Rows, span: tuple[int, int], mask: Mask) -> dict[int, Sample]:
        """Return the samples of one batch by row; lost ones are replaced by others of the same batch.

        A row is left out if a transform also drops all of its replacements. A batch without any deliverable sample
        becomes a single sample of another batch: several of these could exceed the budget.
        """
        found: dict[int, Sample] = {}
        for i in range(*span):
            sample = builder.delivered(rows, i, mask)
            if sample is None:
                sample = builder.first_delivered(i, _others(rows, i, span))
            if sample is not None:
                found[i] = sample
        return found or {span[0]: builder.substitute(rows, span[0])}

    def given(self, builder: BatchBuilder, sample: Sample) -> Sample:
        """See ``Samples``: a batch."""
        return builder.default([sample])

    def alone(self, part: SourceRecipe, samples: Sequence[Sample], packs: PackRows) -> Sample:  # noqa: ARG002
        """See ``PieceItems``: the batch of samples, which are decoded and transformed."""
        named = {"__source__": part.name} if part.name else {}
        return default_collate([one | named for one in samples])

    def checked_jagged(self, jagged: Any, collate_fn: object) -> dict[str, Form]:  # noqa: ARG002
        """See ``RowKind``: samples are concatenated within a batch; ``collate_fn`` gets a list of such batches."""
        return checked_jagged(jagged, None)

    @override
    def fate(self, on_error: OnError) -> str:
        if on_error == "raise":
            return Samples.fate(self, on_error)
        return f'{_FATE}. Replacements have False in batch["__valid__"]' if on_error == "skip" else _FATE

    @property
    @override
    def options(self) -> dict[str, Any]:
        return {"length": self.length, "field": "", "max_docs": self.max_docs, "multiple": self.multiple,
                "padded": True}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLists(_Whole):
    """A row is a list of whole samples that are within all budgets together; users collate themselves.

    A batch is a list of such lists, or what ``collate_fn`` makes of it. A sample that cannot be read leaves its list.

    Attributes:
        length: Maximum sum of sizes, in the unit of the column.
        multiple: Sizes are rounded up to a multiple of this.
        max_docs: Maximum number of samples; None: no maximum.
        balance: See ``RowKind``.
    """

    length: int
    multiple: int = 1
    max_docs: int | None = None
    balance: BalanceRules | None = None

    no_jagged = (
        "batches of Packed(…, field=None) are lists of samples, and nothing is concatenated. Leave jagged out, and "
        "concatenate in collate_fn; or add padded=True"
    )

    def order(self, stock: Stock, of: PlannedRows) -> Index:
        """See ``RowKind``: with ``balance="local"``, from the most to the least expensive list."""
        if self.balance is None:
            return slice(None)
        packs = self.packs(stock, of)
        return order_local(packs.costs_by(self.balance, self.length, measured_by(self.balance, stock, of, packs)))

    def build(self, builder: BatchBuilder, rows: Rows, valid: Mask) -> Any:
        """See ``RowKind``: each sample has its own ``__valid__``, if there is a mask."""
        packs, recipe = pieces_of(rows), builder.recipe
        mask = recipe.mask_of(len(rows.keys), None if valid is None else valid[packs.packs])
        builder.read_ahead(rows)
        lists = [self._list_of(builder, rows, span, mask) for span in pairwise(packs.splits.tolist())]
        if recipe.collate_fn is not None:
            return builder.collate(lists, None, rows.cuts)
        return cut_up(rows.cuts, len(lists), lambda low, high: recipe.cut(lists[low:high], high - low))

    def _list_of(self, builder: BatchBuilder, rows: Rows, span: tuple[int, int], mask: Mask) -> Any:
        """Return the samples of one list that can be delivered; if there is none, one of another list."""
        found = {i: sample for i in range(*span) if (sample := builder.delivered(rows, i, mask)) is not None}
        found = found or {span[0]: builder.substitute(rows, span[0])}
        if mask is not None:
            for i, sample in found.items():
                if isinstance(sample, dict):
                    sample["__valid__"] = bool(mask[i])
        return list(found.values())

    def empty(self, builder: BatchBuilder, prototypes: Iterator[Rows], begin: int) -> Any:  # noqa: ARG002
        """See ``RowKind``: no list; ``collate_fn`` sees lists of one sample to find the form of no list."""
        if builder.recipe.collate_fn is None:
            return builder.recipe.cut([], 0)
        sample: Any = builder.first_of(prototypes)
        if builder.recipe.skips and isinstance(sample, dict):
            sample["__valid__"] = True
        row: Any = [sample]
        return builder.nothing(row)

    def alone(self, part: SourceRecipe, samples: Sequence[Sample], packs: PackRows) -> Any:  # noqa: ARG002
        """See ``PieceItems``: the list of samples."""
        named = {"__source__": part.name} if part.name else {}
        return [one | named if isinstance(one, Mapping) else one for one in samples]

    def balanced(self, rules: BalanceRules, *, dataset: object, collate_fn: object) -> RowKind:  # noqa: ARG002
        """See ``RowKind``: lists are sorted, but never sent to other ranks."""
        if rules.how == "exchange":
            raise ConfigError(
                'balance="exchange" with Packed(…, field=None): decoded samples are not sent to other ranks. Use '
                'balance="local", and budgets= for what a list may cost: Packed(…, budgets={"patches": 4096})'
            )
        check_measured(rules, dataset)
        return replace(self, balance=rules)

    @override
    def fate(self, on_error: OnError) -> str:
        return Samples.fate(self, on_error) if on_error == "raise" else _OF_LIST

    @property
    @override
    def options(self) -> dict[str, Any]:
        return {"length": self.length, "field": "", "max_docs": self.max_docs, "multiple": self.multiple,
                "padded": False}  # fmt: skip


def _others(rows: Rows, i: int, span: tuple[int, int]) -> Iterator[Rows]:
    """Yield single rows that may replace row i: intact rows of its batch, which have a similar size, next one first."""
    low, high = span
    for other in (*range(i + 1, high), *range(low, i)):
        if other not in rows.damage:
            one = slice(other, other + 1)
            fields = {name: FieldRange(starts=f.starts[one], sizes=f.sizes[one]) for name, f in rows.fields.items()}
            sources = None if rows.sources is None else rows.sources[one]
            yield replace(
                rows, keys=rows.keys[one], urls=rows.urls[one], fields=fields, damage={}, sources=sources, packs=None
            )
