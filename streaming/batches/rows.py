"""Hold what a batch is built from: its samples as places in a buffer, and which of them is being decoded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from streaming.errors import DataError
from streaming.packing.layout import PackRows
from streaming.types import Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldRange:
    """Where one field lies for each of n rows.

    Attributes:
        starts: int64 [n], first byte in the arena; meaningless where ``sizes`` is -1.
        sizes: int64 [n], number of bytes; -1 where the sample lacks the field.
    """

    starts: Int64Array
    sizes: Int64Array


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
        positions: int64 [n], of each row in the epoch's global order: decides what functions draw; None: 0 to n.
        sources: int64 [n], which source of a mixture each row is of; None: there is one data set.
        packs: The rows are documents, or pieces of them, that make packs, which are the rows of the batch; None: they
            are its rows themselves.
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


class DecodedRow(Protocol):
    """Item 0 is the row of the batch that is being decoded; -1: none. Writing it costs nothing worth a name."""

    def __setitem__(self, index: int, row: int, /) -> None: ...
