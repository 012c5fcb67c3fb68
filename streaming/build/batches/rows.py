"""Represent the input of a batch: locations of its samples in a buffer, and the row being decoded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, TypeAlias

from streaming.build.decode import DistantMember, ReadDistant
from streaming.errors import DataError
from streaming.order.packing.layout import PackRows
from streaming.types import Int64Array

Index: TypeAlias = "Int64Array | slice"
"""Selects rows: by number, or all of them unchanged."""
Cuts: TypeAlias = "Sequence[int] | None"
"""The first row of each micro-batch, and the end of the last one; None: all rows form one batch."""
Lend: TypeAlias = "Callable[[Int64Array, Int64Array], list[memoryview | None]]"
"""Returns ranges of a buffer, given their starts and sizes (int64 [n] each), as read-only views that users may keep;
None where a size is negative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldRange:
    """Location of one field for each of n rows.

    Attributes:
        starts: int64 [n], first byte in the arena; ``~b`` if the field is distant, that is, not in a buffer but at byte
            b of its shard; meaningless if ``sizes`` is -1.
        sizes: int64 [n], number of bytes; -1 if the sample lacks the field.
    """

    starts: Int64Array
    sizes: Int64Array

    def of(self, rows: Index) -> FieldRange:
        """Return the locations of some of the rows."""
        return FieldRange(starts=self.starts[rows], sizes=self.sizes[rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The samples of one batch, as locations in a buffer.

    Attributes:
        memory: The buffer; slicing it copies to ``bytes`` (``bytes`` or an ``mmap``).
        view: The same buffer; slicing it gives a view.
        keys: ``__key__`` of each of n rows.
        urls: ``__url__`` of each row.
        fields: Location of each field in the buffer.
        damage: Errors by row, for rows whose bytes could not be fetched intact; their other entries are meaningless.
        numbers: int64 [n], number of each row's sample in the dataset; None if unknown.
        positions: int64 [n], position of each row in the epoch's global order, which determines random numbers; None: 0
            to n.
        sources: int64 [n], source of each row in a mixture; None: there is one dataset.
        packs: The packs that the rows (documents, or pieces of them) form, which are the rows of the batch; None: the
            rows themselves are the rows of the batch.
        lend: Cuts views from the buffer that users may keep, for ``decode="view"``; None: users get copies.
        chunk_ids: int64 [n], chunk of each row; only if fields may be distant.
        read_distant: Reads distant fields; None: there are no distant fields.
        cuts: Where the rows of the batch (as planned: packs, where these are rows) are cut into micro-batches, so that
            the batch is the list of these; None: the batch is not cut.
    """

    memory: Any
    view: memoryview
    keys: list[str]
    urls: list[str]
    fields: Mapping[str, FieldRange]
    damage: Mapping[int, DataError]
    numbers: Int64Array | None = None
    positions: Int64Array | None = None
    sources: Int64Array | None = None
    packs: PackRows | None = None
    lend: Lend | None = None
    chunk_ids: Int64Array | None = None
    read_distant: ReadDistant | None = None
    cuts: Cuts = None

    @property
    def has_distant(self) -> bool:
        """Whether a field of a row is distant."""
        if self.read_distant is None:
            return False
        return any(bool(((where.starts < 0) & (where.sizes >= 0)).any()) for where in self.fields.values())

    def member(self, where: FieldRange, i: int) -> DistantMember | None:
        """Return the field of row i if it is distant."""
        if where.starts[i] >= 0 or where.sizes[i] < 0 or self.read_distant is None or self.chunk_ids is None:
            return None
        read = partial(self.read_distant, int(self.chunk_ids[i]))
        return DistantMember.at(read, ~int(where.starts[i]), int(where.sizes[i]))

    def lent(self, where: FieldRange) -> list[memoryview | None]:
        """Return a field as views that users may keep, or as views of copies; None for rows that lack it."""
        if self.lend is not None:
            return self.lend(where.starts, where.sizes)
        places = zip(where.starts.tolist(), where.sizes.tolist(), strict=True)
        return [memoryview(bytes(self.view[start : start + size])) if size >= 0 else None for start, size in places]


class DecodedRow(Protocol):
    """Item 0 is the row of the batch that is being decoded; -1: none. Writing it costs almost nothing."""

    def __setitem__(self, index: int, row: int, /) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRows:
    """Planned rows of batches: int64 [n] each.

    Attributes:
        chunk_ids: Chunk of each row.
        offsets: Row within its chunk.
        passes: Pass of the stream.
        positions: Position in the epoch's global order.
        first_rows: Number in the row table of the first sample of the row's unit; -1: the unit is not in memory.
        within: Number of the row's sample in its unit, if rows are samples.
    """

    chunk_ids: Int64Array
    offsets: Int64Array
    passes: Int64Array
    positions: Int64Array
    first_rows: Int64Array
    within: Int64Array


class Stock(Protocol):
    """The samples of a dataset that a rank has in memory.

    Attributes:
        source: The dataset, ``streaming.run.engine.source.Source``.
        seed: Seed of the order.
    """

    source: Any
    seed: int

    def rows(self, row_numbers: Int64Array, chunk_ids: Int64Array, lost: Mapping[int, DataError]) -> Rows:
        """Return samples by their numbers in the row table; chunks in ``lost`` are not in the table."""

    def begins(self, of: PlannedRows) -> Int64Array:
        """Return the row of the run at which the global batch of each planned row begins, int64 [n]."""

    def numbers(self, of: PlannedRows) -> Int64Array | None:
        """Return the numbers of planned samples in the dataset; None: the samples have no numbers."""


def cut_up(cuts: Cuts, num_rows: int, make: Callable[[int, int], Any]) -> Any:
    """Return the result of ``make`` for all rows, or the list of its results for the rows of each micro-batch.

    Args:
        cuts: Where rows are cut.
        num_rows: The number of all rows.
        make: Returns a batch of rows ``[low, high)``.
    """
    return make(0, num_rows) if cuts is None else [make(low, high) for low, high in pairwise(cuts)]


def has_empty(cuts: Cuts) -> bool:
    """Tell whether a micro-batch has no rows."""
    return cuts is not None and any(low == high for low, high in pairwise(cuts))


def scaled(cuts: Cuts, each: int) -> Cuts:
    """Return cuts among rows, ``each`` of them per planned row."""
    return cuts if cuts is None or each == 1 else [cut * each for cut in cuts]
