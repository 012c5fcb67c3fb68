"""Rows of every kind, and of a kind that streaming/ does not know, through one battery."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from shutil import copytree
from types import MappingProxyType
from typing import Any

import pytest

from streaming import Schedule, StreamingDataset
from tests.support.contracts.items_contract import KEYS, ItemsContract, PackedContract, windows, write_documents
from tests.support.processes.played_ranks import Play, played


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("items") / "docs")


@pytest.fixture
def documents(written: Path, tmp_path: Path) -> Path:
    return Path(copytree(written, tmp_path / "docs"))


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    return played(monkeypatch)


class TestSamples(ItemsContract):
    def make(self, folder: Path, **options: Any) -> StreamingDataset:
        return StreamingDataset(str(folder), **options)


class TestPacks(PackedContract):
    packed = MappingProxyType({"length": 24})


class TestPacksInGrowingRows(PackedContract):
    packed = MappingProxyType({"length": Schedule.steps({0: 8, 6: 12, 14: 24})})

    def rows(self, batch: Any) -> list[tuple[str, ...]]:
        """The packs of the plan: rows of T / k tokens are k for each."""
        keys, each = batch["__key__"], 24 // batch["input_ids"].shape[1]
        assert len(batch["input_ids"]) == len(keys)
        packs = [keys[at : at + each] for at in range(0, len(keys), each)]
        return [tuple(dict.fromkeys(key for row in rows for key in row)) for rows in packs]


class TestPaddedDocuments(PackedContract):
    packed = MappingProxyType({"length": 24, "padded": True})
    as_list = True


class TestWholeSamples(PackedContract):
    packed = MappingProxyType({"length": 30, "padded": True, "field": None})
    as_list = True
    field = "cls"


class TestWindows(ItemsContract):
    def make(self, folder: Path, **options: Any) -> StreamingDataset:
        return windows(folder, 3, **options)

    def due(self) -> Counter[tuple[str, ...]]:
        firsts = [number for number in range(len(KEYS)) if number % 8 < 6]
        return Counter(tuple(KEYS[first : first + 3]) for first in firsts)
