"""``Windows``: rows equal a model of whole decoded videos, each comes once an epoch, damage is named."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from infra import DeviceMesh
from streaming import (
    Balanced,
    Curriculum,
    DataLoader,
    Mixture,
    Packed,
    Schedule,
    StreamingDataset,
    Video,
    Windows,
)
from streaming.errors import ConfigError, DataError, IndexMissingError, TooManyBadSamplesError
from tests.support.sets import recordings
from tests.support.sources import streams

PAIR = {"front.mp4": [-0.2, 0.0], "wrist.mp4": [0.0, 0.1]}
STEPS = {"action.npy": (0, 8)}
GRID: dict[str, dict[str, Any]] = {
    "frames": {"video": {"front.mp4": [0.0]}},
    "two cameras": {"video": PAIR, "columns": STEPS},
    "dropped edges": {"video": PAIR, "columns": STEPS, "edge": "drop"},
    "every 0.25 s": {"video": {"wrist.mp4": [-0.1, 0.0, 0.3]}, "every": 0.25},
    "every 0.1 s, dropped": {"video": PAIR, "every": 0.1, "edge": "drop", "columns": {"action.npy": [-0.1, 0.0]}},
    "smaller": {"video": PAIR, "size": (16, 20)},
    "names": {"video": PAIR, "columns": STEPS, "names": {"front.mp4": "front", "action.npy": "action"}},
    "a rate": {"video": {"front.mp4": [0.0]}, "columns": {"imu.npy": (-4, 4)}, "clocks": {"imu.npy": 120.0}},
    "a rate, dropped": {
        "video": {"front.mp4": [0.0]}, "columns": {"imu.npy": (-4, 4)}, "clocks": {"imu.npy": 120.0}, "edge": "drop",
    },
    "times": {
        "video": {"front.mp4": [0.0]}, "columns": {"force.npy": [-1, 0], "action.npy": [-0.1, 0.0]},
        "clocks": {"force.npy": "force_time.npy"},
    },
    "a table": {
        "video": {"front.mp4": [0.0]}, "columns": {"steps.parquet:action": (0, 4), "steps.parquet:reward": [0]},
        "clocks": {"steps.parquet:reward": "steps.parquet:at"},
    },
    "carried": {"video": {"front.mp4": [0.0]}, "carry": ("json",), "columns": {"action.npy": [0]}},
    "one group": {"video": PAIR, "groups": 1},
    "many groups": {"video": PAIR, "groups": 3, "columns": STEPS},
}  # fmt: skip


@pytest.fixture(scope="module")
def written() -> list[recordings.Recorded]:
    return recordings.of_set()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, written: list[recordings.Recorded]) -> Path:
    return recordings.write(tmp_path_factory.mktemp("recordings"), written)


def windows_of(folder: Path, options: Mapping[str, Any], **of_set: Any) -> Windows:
    return Windows(StreamingDataset(folder, **of_set), **options)


def loader_of(windows: Any, rank: int = 0, world: int = 1, *, size: int = 8, **options: Any) -> DataLoader:
    mesh = DeviceMesh.from_sizes(dp_size=world, rank=rank)
    return DataLoader(
        windows, global_batch_size=size, device_mesh=mesh, **{"last_batch": "partial", "num_workers": 0, **options}
    )


def rows_in(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a batch."""
    count = len(batch["__key__"])
    return [
        {
            name: value[i].item() if name == "__time__" else value[i].numpy() if torch.is_tensor(value) else value[i]
            for name, value in batch.items()
        }
        for i in range(count)
    ]


def names_of(rows: Any) -> list[tuple[str, float]]:
    return [(row["__key__"], round(row["__time__"], 6)) for row in rows]


@pytest.mark.parametrize("options", GRID.values(), ids=GRID)
def test_rows_equal_the_model(folder: Path, written: list[recordings.Recorded], options: dict[str, Any]) -> None:
    windows, model = windows_of(folder, options), recordings.Model(written, options)
    assert len(windows) == len(model.rows)
    for number, (found, expected) in enumerate(zip(windows, model.rows, strict=True)):
        assert not recordings.differ(found, expected), number
    chosen = [len(windows) - 1, 0, len(windows) // 2, 0]
    for number, found in zip(chosen, windows[chosen], strict=True):
        assert not recordings.differ(found, model.rows[number])


@pytest.mark.parametrize(("world", "workers"), [(1, 0), (1, 2), (2, 2), (3, 0), (4, 0)])
def test_each_row_comes_once_an_epoch_on_any_world(
    folder: Path, written: list[recordings.Recorded], world: int, workers: int
) -> None:
    options = GRID["two cameras"]
    expected = {name: row for row in recordings.Model(written, options).rows for name in names_of([row])}
    found = []
    for rank in range(world):
        with loader_of(windows_of(folder, options, seed=5), rank, world, num_workers=workers) as loader:
            found += [row for batch in loader for row in rows_in(batch)]
    assert sorted(names_of(found)) == sorted(expected)
    for row in found:
        assert not recordings.differ(row, expected[names_of([row])[0]])
