"""When packs are made (ahead, once for a group, never under the engine's lock), and what is kept of them."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
import torch

from streaming import Mixture, Packed, StreamingDataset
from streaming.build.batches.items.packs import TokenPacks
from streaming.common.lru_cache import LruCache
from streaming.order.packing.fit import Fit, fit
from streaming.order.packing.rules import PackRules
from streaming.order.plan import memory as budget
from streaming.run.engine.delivery import Haste
from streaming.shards.catalog import packed as catalog
from streaming.shards.catalog.packed import PackedSource
from tests.support.processes.waiting import until
from tests.support.sets.data_sets import same_batch
from tests.support.sets.packed_sets import LENGTH, epoch_of, loader_of, write


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("documents")
    write(target)
    return target


def packed_of(folder: Path) -> Packed:
    return Packed(StreamingDataset(folder, shuffle=False), LENGTH)


def callers() -> Iterator[str]:
    """Names of the functions under way in this thread."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame.f_code.co_name
        frame = frame.f_back


@pytest.mark.parametrize("ahead", [True, False])
def test_a_group_is_packed_once_and_not_under_the_lock(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, ahead: bool
) -> None:
    expected = epoch_of(packed_of(folder))
    made: list[tuple[int, bool]] = []
    packed_by = PackedSource._packed

    def noted(self: PackedSource, group: int, pass_number: int, seed: int) -> object:
        made.append((group, "_begin" in callers()))  # which the engine calls with its lock held
        return packed_by(self, group, pass_number, seed)

    monkeypatch.setattr(PackedSource, "_packed", noted)
    if not ahead:
        monkeypatch.setattr(TokenPacks, "ahead", lambda *_: None)
    packed = packed_of(folder)
    found = epoch_of(packed)
    assert all(map(same_batch, found, expected))
    assert len(found) == len(expected)
    assert sorted(made) == [(group, False) for group in range(len(packed.source.chunk_samples))]


def test_a_group_is_fitted_once_by_what_counts_it_and_by_a_copy_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = epoch_of(packed_of(folder))
    packed = packed_of(folder)
    fitted: list[int] = []

    def noted(lengths: np.ndarray, rules: PackRules) -> Fit:
        fitted.append(len(lengths))
        return fit(lengths, rules)

    monkeypatch.setattr(catalog, "fit", noted)
    for one, groups in ((packed, 0), (pickle.loads(pickle.dumps(packed)), len(packed.source.chunk_samples))):
        found = epoch_of(one)
        assert len(found) == len(expected)
        assert all(map(same_batch, found, expected))
        assert len(fitted) == groups


def test_groups_that_are_fetched_are_packed_before_they_are_asked_for(folder: Path) -> None:
    packed = packed_of(folder)
    groups = np.arange(len(packed.source.chunk_samples))
    assert len(groups) > 1
    with loader_of(packed) as loader:
        next(iter(loader))  # of the first group alone
        has_packs = packed.source.has_packs
        until(lambda: has_packs(groups, np.zeros_like(groups), packed.seed), "all groups are packed")


@pytest.mark.parametrize("is_great", [False, True], ids=["one by one", "groups"])
def test_batches_lie_in_page_locked_memory_from_when_it_is_asked_for(
    folder: Path, is_great: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Haste, "asks", lambda haste: setattr(haste, "is_great", is_great))
    given: list[torch.Tensor] = []

    class Locker:
        def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            given.append(torch.empty(shape, dtype=dtype))
            return given[-1]

        def lock(self, memory: object) -> bool:
            raise AssertionError

        def unlock(self, memory: object) -> None:
            raise AssertionError

    with loader_of(packed_of(folder), num_threads=0) as loader:  # none are built ahead
        batches = iter(loader)
        for _ in range(3):  # the rest is cut out of one group, or of few
            next(batches)
        loader.page_lock(Locker())
        locked = [next(batches) for _ in range(3)]
        loader.page_lock(None)
        next(batches)
    names = ("input_ids", "labels", "position_ids", "document_ids")
    assert [one.data_ptr() for one in given] == [batch[name].data_ptr() for batch in locked for name in names]


def test_mixtures_ask_their_sources(folder: Path) -> None:
    mixed = Mixture({"a": packed_of(folder), "b": packed_of(folder)}, weights={"a": 2, "b": 1})
    groups = np.arange(len(mixed.source.chunk_samples))
    passes = np.ones_like(groups)
    assert not mixed.source.rows.has_packs(groups, passes, 3)
    mixed.source.rows.packs(groups, np.zeros_like(groups), passes, 3)
    assert mixed.source.rows.has_packs(groups, passes, 3)
    assert not mixed.source.rows.has_packs(groups, passes, 4)


def test_what_is_kept_counts_in_memory_limit(folder: Path) -> None:
    limit = 64 << 20
    memory = budget.Budget.of(limit, packs=True)
    assert memory.batches_bytes + memory.packs_bytes == limit // 4
    packed = packed_of(folder)
    with loader_of(packed, memory_limit=limit) as loader:
        for _ in loader:
            pass
    parts = (packed.source._recent, packed.source._fits, packed.source._records, packed.source._lengths._recent)
    assert sum(part._limit_bytes for part in parts) == memory.packs_bytes
    assert all(0 < part._kept_bytes <= part._limit_bytes for part in parts)


def test_keep_at_most_drops_what_was_asked_for_longest_ago() -> None:
    recent = LruCache[str, bytes](100, len)
    for name in "abc":
        recent.of(name, lambda: bytes(30))
    recent.of("a", bytes)
    recent.keep_at_most(60)
    assert ["a" in recent, "b" in recent, "c" in recent] == [True, False, True]
