"""Random histories of tickets: every row is settled exactly once, whatever was killed, late, requeued or given up."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
from torch.utils.data import Dataset

from infra import DeviceMesh
from shard_tools import ShardWriter
from streaming import DataLoader, DeviceMeshFetcher, Mixture, Schedule, StreamingDataset
from tests.support.models.ticket_histories import History, RowsLoader
from tests.support.tiers import first_here

NUM_SAMPLES = 61


def drawn(seed: int) -> None:
    rng = random.Random(seed)
    num_rows, num_epochs = rng.randint(1, 90), rng.randint(1, 3)
    batch, group = rng.randint(1, 40), rng.choice([1, 1, 3])
    worlds = sorted({rng.randint(1, 6), rng.randint(1, 6), rng.choice([1, 2, 8, 64])})
    history = History(
        rng, lambda size, rank: RowsLoader(num_rows, batch, size, rank), num_epochs, worlds, group=group
    )  # fmt: skip
    settled = history.run(rng.randint(10, 400))
    rows = {f"{epoch}:{row}" for epoch in range(num_epochs) for row in range(num_rows)}
    assert settled.keys() == rows, f"lost: {sorted(rows - settled.keys())}"
    assert set(settled.values()) == {1}, f"doubled: {[row for row, times in settled.items() if times > 1]}"


@pytest.mark.parametrize("part", first_here(range(8), 1))
def test_every_row_is_settled_once(part: int) -> None:
    for number in range(60 if part == 0 else 200):
        drawn(part * 1000 + number)


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folders = [str(tmp_path_factory.mktemp(f"set{number}")) for number in range(2)]
    for number, folder in enumerate(folders):
        with ShardWriter(f"{folder}/{{:02d}}.tar", max_samples=8) as writer:
            for row in range(NUM_SAMPLES):
                writer.write({"__key__": f"{number}-{row:03d}", "cls": b"1"})
    return folders


class Named:
    """A loader of ours whose samples have a name that is the same on every world: of epoch and key."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def uncollated(self) -> Named:
        return Named(self._loader.uncollated())

    def with_state(self) -> Any:
        return _Named(self._loader)


class _Named:
    def __init__(self, loader: Any) -> None:
        self._loader, self._batches = loader, loader.with_state()

    def __iter__(self) -> _Named:
        return self

    def __next__(self) -> Any:
        samples, after = next(self._batches)
        epoch = self._batches.came_from()["epoch"]
        return [{"row": f"{epoch}:{_name(sample)}"} for sample in samples], after

    def came_from(self) -> Any:
        return self._batches.came_from()


def _name(sample: Any) -> str:
    key = sample["__key__"] if isinstance(sample, dict) and "__key__" in sample else sample
    return key if isinstance(key, str) else repr(key)


class Numbers(Dataset[int]):
    """A map-style set of torch's."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


def opened(kind: str, urls: list[str], size: int, rank: int) -> Named:
    mesh = DeviceMesh.from_sizes(dp_size=size, rank=rank)
    options: dict[str, Any] = {"global_batch_size": 10, "device_mesh": mesh, "last_batch": "partial"}
    one, two = (StreamingDataset(url, fields=["cls"]) for url in urls)
    if kind == "map":
        return Named(DataLoader(Numbers(), **options))
    options["agreement_timeout"] = None
    if kind == "fetcher":
        return Named(DeviceMeshFetcher(one, **options))
    if kind == "padded":
        options["last_batch"] = "pad"
    if kind == "ramp":
        options["global_batch_size"] = Schedule.steps({0: 6, 24: 10})
    dataset = Mixture({"a": one, "b": two}, repeats={"a": 1, "b": 1}) if kind == "mixture" else one
    return Named(DataLoader(dataset, **options))


@pytest.mark.parametrize("kind", first_here(["padded", "mixture", "ramp", "fetcher", "map"], 2))
def test_with_loaders(urls: list[str], kind: str) -> None:
    for seed in range(4):
        rng = random.Random(seed)
        history = History(rng, partial(opened, kind, urls), 2, [1, 2, 3, 5])
        settled = history.run(rng.randint(30, 200))
        assert set(settled.values()) == {1}
        assert len(settled) == 2 * NUM_SAMPLES * (1 + (kind == "mixture"))
