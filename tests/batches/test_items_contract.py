"""Rows of every kind, and of a kind that streaming/ does not know, through one battery."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from streaming import Packed, Schedule, StreamingDataset
from streaming.testing import RowTests
from streaming.testing.rows import KEYS
from tests.support.contracts.own_kinds import windows


class PackedRows(RowTests):
    """Rows by ``Packed``, whose documents are of tokens."""

    field = ""
    packed: Mapping[str, Any] = MappingProxyType({})

    def make(self, folder: Path, **options: Any) -> Packed:
        return Packed(StreamingDataset(str(folder), **options), **self.packed)


class TestSamples(RowTests):
    def make(self, folder: Path, **options: Any) -> StreamingDataset:
        return StreamingDataset(str(folder), **options)


class TestPacks(PackedRows):
    packed = MappingProxyType({"length": 24})


class TestPacksInGrowingRows(PackedRows):
    packed = MappingProxyType({"length": Schedule.steps({0: 8, 6: 12, 14: 24})})

    def rows(self, batch: Any) -> list[tuple[str, ...]]:
        """The packs of the plan: rows of T / k tokens are k for each."""
        keys, each = batch["__key__"], 24 // batch["input_ids"].shape[1]
        assert len(batch["input_ids"]) == len(keys)
        packs = [keys[at : at + each] for at in range(0, len(keys), each)]
        return [tuple(dict.fromkeys(key for row in rows for key in row)) for rows in packs]


class TestPaddedDocuments(PackedRows):
    packed = MappingProxyType({"length": 24, "padded": True})
    as_list = True


class TestWholeSamples(PackedRows):
    packed = MappingProxyType({"length": 30, "padded": True, "field": None})
    as_list = True
    field = "cls"


class TestWindows(RowTests):
    def make(self, folder: Path, **options: Any) -> StreamingDataset:
        return windows(folder, 3, **options)

    def due(self) -> Counter[tuple[str, ...]]:
        firsts = [number for number in range(len(KEYS)) if number % 8 < 6]
        return Counter(tuple(KEYS[first : first + 3]) for first in firsts)
