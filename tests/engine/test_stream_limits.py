"""Limits: epochs of any length start at once, what is bounded stays bounded, each error names a cure that works."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest

from streaming import DataLoader
from streaming.order.plan import order as order_module
from streaming.order.plan.order import EpochOrder, OrderSettings
from streaming.order.plan.plan import PASSES_LOOKED_AT, Plan
from tests.support.sets.data_sets import SampleSet, mesh_of, write_set


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    """300 samples."""
    return write_set(tmp_path_factory.mktemp("samples"), (100, 100, 100))


# --- epochs far larger than the set ---


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The passes whose order was made."""
    made: list[int] = []

    class Counting(EpochOrder):
        def __init__(self, chunk_samples: Any, settings: OrderSettings, epoch: int) -> None:
            made.append(epoch)
            super().__init__(chunk_samples, settings, epoch)

    monkeypatch.setattr(order_module, "EpochOrder", Counting)
    return made


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("epoch_size", [10**6, 10**12])
@pytest.mark.parametrize("consumed", [0, 640_000])
def test_a_long_epoch_starts_and_goes_on_at_once(
    samples: SampleSet, passes: list[int], epoch_size: int, consumed: int, rank: int
) -> None:
    """Only the passes near the position are planned, and the batches are those of the plan."""
    dataset = samples.open(seed=3)
    options: dict[str, Any] = {"global_batch_size": 64, "epoch_size": epoch_size, "device_mesh": mesh_of(2, rank)}
    with DataLoader(dataset, **options) as loader:
        loader.load_state_dict({**loader.state_dict(), "samples_seen": consumed})
        found = [batch["cls"].tolist() for batch in islice(loader, 40)]
        order = OrderSettings.from_dict(loader.state_dict()["order"])
    assert len(set(passes)) < 128
    plan = Plan(
        dataset.source.table.num_samples,
        order,
        global_batch_size=64,
        dp_world_size=2,
        epoch_size=epoch_size,
        start=consumed,
    )
    rows = plan.rank_batches(0, 40, rank)
    numbers = np.concatenate([[0], np.cumsum(dataset.source.table.num_samples)])[rows.chunk_ids] + rows.offsets
    assert found == numbers.reshape(40, 32).tolist()


def test_memory_of_a_plan_does_not_grow_with_its_passes() -> None:
    plan = Plan([30] * 10, OrderSettings(seed=1, lanes=16, window=60), global_batch_size=64, dp_world_size=1,
                epoch_size=10**9)  # fmt: skip
    for first in range(0, 4000, 20):
        plan.rank_batches(first, first + 20, 0)
    assert len(plan._orders) <= 4
    assert len(plan._segments) <= 4 * 16


def test_what_a_long_epoch_needs_is_bounded_by_the_set() -> None:
    sizes, ones = [30] * 100, np.ones(100, np.int64)

    def plan(lanes: int, num_passes: int) -> Plan:
        settings = OrderSettings(seed=1, lanes=lanes, window=30)
        return Plan(sizes, settings, global_batch_size=64, dp_world_size=1, epoch_size=num_passes * 3000)

    few, many = (plan(4, number).live_bytes(ones, 0) for number in (PASSES_LOOKED_AT, 10**6))
    assert few < many <= 1.2 * few
    assert plan(64, 10**6).live_bytes(ones, 0) <= 100
    assert plan(4, 10**6).rank_chunks(0).tolist() == list(range(100))
