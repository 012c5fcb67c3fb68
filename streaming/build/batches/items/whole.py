"""Make batches of whole samples of similar size: ``WholeSamples``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from streaming.build.batches.build import BatchBuilder, Mask, OnError, Samples, SourceRecipe
from streaming.build.batches.collate import default_collate
from streaming.build.batches.items.pieces import OneEach, each_piece, pieces_of
from streaming.build.batches.jagged import Form, checked_jagged
from streaming.build.batches.rows import Cuts, FieldRange, Rows
from streaming.common.arrays import sums
from streaming.order.packing.layout import PackRows
from streaming.types import Int64Array, Sample, override

_FATE = (
    "Another sample of its batch takes the place of each; a batch without samples becomes one sample of another batch, "
    "so that no batch exceeds its budget"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeSamples(OneEach, Samples):
    """A row is a batch of whole samples of similar size, decoded, transformed and collated like any other.

    Attributes:
        length: Maximum number of samples times the largest size, in the unit of the column.
        multiple: Sizes are rounded up to a multiple of this.
        max_docs: Maximum number of samples; None: no maximum.
    """

    length: int
    multiple: int = 1
    max_docs: int | None = None

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
