"""``OlmoCoreLoader`` of OLMo-core: what it counts, what it refuses, and what a place that was loaded means to it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from infra import DeviceMesh
from streaming import DataLoader, Mixture, Packed, StreamingDataset
from streaming.errors import ConfigError
from tests.support.sets.packed_sets import write

LENGTH, ROWS = 64, 6


class Base:
    """The part of ``TextDataLoaderBase`` that counts; the whole contract is in olmo_core_stub.py."""

    def __init__(self, *, global_batch_size: int, dp_world_size: int, dp_rank: int, **_: Any) -> None:
        self._global_batch_size, self.dp_world_size, self.dp_rank = global_batch_size, dp_world_size, dp_rank
        self._epoch, self.batches_processed, self.tokens_processed = None, 0, 0

    @property
    def rank_batch_size(self) -> int:
        return int(self.global_batch_size) // self.dp_world_size  # type: ignore[attr-defined]


@pytest.fixture
def shard_loader(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class, over a package that is not installed here."""
    data: Any = ModuleType("olmo_core.data")
    data.TextDataLoaderBase, data.DataCollator = Base, SimpleNamespace
    monkeypatch.setitem(sys.modules, "olmo_core", ModuleType("olmo_core"))
    monkeypatch.setitem(sys.modules, "olmo_core.data", data)
    monkeypatch.delitem(sys.modules, "streaming.integrations.olmo_core", raising=False)
    yield importlib.import_module("streaming.integrations.olmo_core").OlmoCoreLoader
    sys.modules.pop("streaming.integrations.olmo_core", None)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    folder = tmp_path_factory.mktemp("olmo")
    write(folder / "tokens", num_docs=120)
    return Packed(StreamingDataset(folder / "tokens"), LENGTH, shift_labels=True)


@pytest.fixture
def loader(packed: Packed) -> Iterator[DataLoader]:
    with DataLoader(packed, global_batch_size=ROWS) as made:
        yield made


def rows(batches: Any) -> list[Any]:
    return [batch["input_ids"].tolist() for batch in batches]


def test_it_counts_in_tokens(shard_loader: Any, loader: DataLoader) -> None:
    made = shard_loader(loader, LENGTH, work_dir="work")
    assert made.global_batch_size == made.rank_batch_size == ROWS * LENGTH
    assert made.total_batches == len(loader)
    assert made.get_mock_batch()["input_ids"].shape == (ROWS, LENGTH)
    assert loader.state_dict()["samples_seen"] == 0


def test_an_endless_loader_has_no_number_of_batches(shard_loader: Any, packed: Packed) -> None:
    with DataLoader(Mixture({"web": packed}, weights={"web": 1}), global_batch_size=ROWS) as endless:
        assert shard_loader(endless, LENGTH, work_dir="work").total_batches is None


@pytest.mark.parametrize("at", [0, 2, -1])
def test_a_loaded_place_is_kept_by_the_epoch_that_it_is_in(shard_loader: Any, packed: Packed, at: int) -> None:
    def opened() -> Any:
        return shard_loader(DataLoader(packed, global_batch_size=ROWS), LENGTH, work_dir="work")

    whole = opened()
    whole.reshuffle(1)
    first, states = [], []
    for batch in whole._iter_batches():
        first.append(batch["input_ids"].tolist())
        whole.batches_processed += 1
        states.append(whole.state_dict())
    whole.reshuffle()
    second = rows(whole._iter_batches())
    again = opened()
    again.load_state_dict(states[at])
    again.reshuffle(1)
    end = range(len(first))[at] + 1
    assert again.batches_processed == end
    assert rows(again._iter_batches()) == first[end:]
    again.reshuffle(2)
    assert rows(again._iter_batches()) == second
    for made in (whole, again):
        made.loader.close()


def test_what_it_refuses(shard_loader: Any, packed: Packed, loader: DataLoader) -> None:
    with pytest.raises(ConfigError, match=r"expected a streaming.DataLoader, got a .*Packed"):
        shard_loader(packed, LENGTH, work_dir="work")
    with pytest.raises(ConfigError, match=r"cannot be set to 512 tokens in mid-run.*global_batch_size=Schedule\.steps"):
        shard_loader(loader, LENGTH, work_dir="work").global_batch_size = 512
    mesh = DeviceMesh.from_sizes(dp_size=4, rank=0)
    with (
        DataLoader(packed, global_batch_size=ROWS, device_mesh=mesh) as uneven,
        pytest.raises(ConfigError, match=r"rows on each of 4 data ranks, got global_batch_size=6; .*multiple of 4"),
    ):
        shard_loader(uneven, LENGTH, work_dir="work")
