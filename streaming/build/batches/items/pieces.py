"""Provide the common base of rows made of several samples: ``PieceItems``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from streaming.build.batches.build import RowKind, SourceRecipe
from streaming.build.batches.jagged import Form, checked_jagged
from streaming.build.batches.rows import PlannedRows, Rows, Stock
from streaming.errors import ConfigError, DataError
from streaming.order.packing.balance import BalanceRules
from streaming.order.packing.layout import PackRows
from streaming.order.plan.memory import Budget
from streaming.order.plan.settings import Shape
from streaming.types import Int64Array, Sample, override

_MOST_OF_PACK = 2**24
"""Maximum number of samples in a pack; random numbers of a sample derive from the pack's position times this, plus the
sample's index.
"""


class PieceItems(RowKind):
    """A row is made of several samples, or pieces of them, that ``Source.rows`` names."""

    unit = "tokens"
    documents = "documents"
    at_most = ""
    no_map = (
        "Packed: transform (or map) would not be called, since tokens go straight from the shards into the batch. "
        "Leave it out; change tokens when shards are written, or whole packs in the loader's collate_fn"
    )
    no_jagged = ""
    """Words for messages: the unit of lengths ("": the column), the things that have lengths, a limit on full rows,
    and why options are refused."""

    fields: tuple[str, ...] = ()
    """Fields that are read, instead of the fields of the documents' dataset; (): the fields of the dataset."""

    raw: tuple[str, ...] = ()
    """Those of ``fields`` that are taken as stored, whatever ``decode`` says."""

    def typed(self, look: Callable[[str], str]) -> PieceItems:  # noqa: ARG002
        """Return this kind with the dtype of tokens that ``look`` returns for their field; whole samples have none."""
        return self

    def rows(self, stock: Stock, of: PlannedRows, lost: Mapping[int, DataError]) -> Rows:
        """See ``RowKind``: the pieces; even damaged ones have the name of their sample."""
        packs = self.packs(stock, of)
        row_of = packs.planned
        damage = {piece: lost[row] for piece, row in enumerate(row_of.tolist()) if row in lost} if lost else {}
        chunk_ids = of.chunk_ids[row_of]
        rows = stock.rows(of.first_rows[row_of] + packs.samples, chunk_ids, damage)
        for piece in rows.damage:  # named if the sample table has the key
            place = stock.source.locate(int(chunk_ids[piece]), int(packs.samples[piece]))
            rows.keys[piece] = rows.keys[piece] if place is None else place.key
        return replace(rows, packs=packs, positions=self.positions(of.positions, packs))

    def packs(self, stock: Stock, of: PlannedRows) -> PackRows:
        """Return the pieces of these rows."""
        packs: PackRows = stock.source.rows.packs(of.chunk_ids, of.offsets, of.passes, stock.seed)
        return packs

    def positions(self, positions: Int64Array, packs: PackRows) -> Int64Array:  # noqa: ARG002
        """Return the positions from which random numbers derive, one per row or per piece."""
        return positions

    def checked_jagged(self, jagged: Any, collate_fn: object) -> dict[str, Form]:
        """See ``RowKind``: nothing is concatenated that is not already."""
        forms = checked_jagged(jagged, collate_fn)
        if forms:
            raise ConfigError(f"jagged={tuple(forms)!r}: {self.no_jagged}")
        return forms

    @override
    def row_of(self, rows: Rows, i: int) -> int:
        return int(pieces_of(rows).planned[i])

    def first_numbers(self, chunk_samples: Int64Array) -> Int64Array | None:  # noqa: ARG002
        """See ``RowKind``: rows are not samples."""
        return None

    def ahead(self, stock: Stock, chunk_id: int, pass_number: int) -> Callable[[], object] | None:
        """See ``RowKind``: computes the pieces of the rows of a group."""
        group, offset, number = (np.array([value]) for value in (chunk_id, 0, pass_number))
        return partial(stock.source.rows.packs, group, offset, number, stock.seed)

    def budget(self, limit_bytes: int) -> Budget:
        """See ``RowKind``: a part is for packs and lengths of documents."""
        return Budget.of(limit_bytes, packs=True)

    @abstractmethod
    def alone(self, part: SourceRecipe, samples: Sequence[Sample], packs: PackRows) -> Sample:
        """Return the single row of ``packs``, made by ``part`` of samples.

        They are as their dataset returns them, or as stored if the row has ``fields``.

        Raises:
            DataError: A sample cannot be used.
        """


class OneEach(PieceItems):
    """A row is a batch by itself: a rank gets one at a time, or its ``collate_fn`` a list of them."""

    length: int
    at_most = " at most, padded"

    def balanced(self, rules: BalanceRules, *, dataset: object, collate_fn: object) -> RowKind:  # noqa: ARG002
        """See ``RowKind``: there is nothing to balance."""
        raise ConfigError(
            f"balance={rules.how!r} with Packed(…, padded=True): a padded pack is the whole of a rank's batch, and "
            "costs the same as any other except for its last rows; leave out balance, or padded"
        )

    def check_shape(self, shape: Shape, collate_fn: object) -> None:
        """See ``RowKind``: several packs in one rank's batch would differ in shape."""
        if collate_fn is not None or shape.sizes.most <= shape.num_ranks or shape.micro_batch_size == 1:
            return
        raise ConfigError(
            "batch_size: with Packed(…, padded=True) each padded pack is already a batch, with the budget "
            f"length={self.length}; expected batch_size=1, which is global_batch_size={shape.num_ranks} on "
            f"{shape.num_ranks} rank(s), got global_batch_size={shape.sizes.most}. For several packs per step and rank "
            "give micro_batch_size=1, which hands them out one by one, or collate_fn=list, which makes each batch a "
            "list of padded packs"
        )


def each_piece(positions: Int64Array, packs: PackRows) -> Int64Array:
    """Return a position for each piece, given that of each pack, so that each draws its own random numbers."""
    return positions[packs.planned] * _MOST_OF_PACK + packs.places


def pieces_of(rows: Rows) -> PackRows:
    """Return the pieces of rows of several samples."""
    if rows.packs is None:
        raise AssertionError("rows of several samples have packs")
    return rows.packs


def measured_by(
    rules: BalanceRules, stock: Stock, of: PlannedRows, packs: PackRows
) -> npt.NDArray[np.float64] | None:  # fmt: skip
    """Return the quantities of documents that the cost of packs needs, float64 [n, quantities]; None: it needs none."""
    if not rules.quantities:
        return None
    source: Any = stock.source.rows
    found: npt.NDArray[np.float64] = source.measured(rules.quantities, of.chunk_ids[packs.planned], packs)
    return found


def check_measured(rules: BalanceRules, dataset: Any) -> None:
    """Check that the documents of a data set have the quantities that the cost of packs needs.

    Raises:
        ConfigError: A column does not exist, or holds no numbers.
    """
    if rules.quantities:
        dataset.source.rows.measures_of(rules.quantities)
