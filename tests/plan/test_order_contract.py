"""Orders of every kind, and of a kind that streaming/ does not know, through one battery."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shard_tools.look.plan.report import PlanOptions, plan_opened
from shard_tools.look.plan.steps import PlannedRun
from streaming import Curriculum, DataLoader, Schedule, StreamingDataset
from streaming.order.mixing.exact import BatchLanes, EvenLanes, ExactLanes
from streaming.order.mixing.lanes import MixedLanes
from streaming.order.mixing.passes import MixedPasses, Sources, Weights
from streaming.order.mixing.quotas import BatchPasses, ExactPasses
from streaming.order.plan.order import EpochOrders, OrderSettings
from streaming.order.plan.state import LoaderState
from streaming.sets.datasets.face import DataSet
from streaming.testing import OrderTests
from streaming.testing.ranks import mesh_of
from streaming.testing.sources import SAMPLES
from tests.support.contracts.own_kinds import DictSource, ReversedBits, write_samples

CHUNKS = [7, 5, 9, 1, 6, 8, 5, 7]
LANED = OrderSettings(seed=3, lanes=4, window=6)


def sources(settings: OrderSettings = LANED) -> Sources:
    return Sources({"code": CHUNKS[:3], "web": CHUNKS[3:]}, settings)


def weights() -> list[Weights]:
    return [Weights(start=0, weights={"code": 1, "web": 2}), Weights(start=20, weights={"code": 2, "web": 1})]


class TestStored(OrderTests):
    def orders(self) -> Any:
        return EpochOrders(CHUNKS, OrderSettings.unshuffled())


class TestLanes(OrderTests):
    def orders(self) -> Any:
        return EpochOrders(CHUNKS, LANED)


class TestLanesOfTheirOwn(OrderTests):
    def orders(self) -> Any:
        return EpochOrders(CHUNKS, OrderSettings(seed=3, lanes=4, window=6, scope="lane"))


class TestLanesThatDoNotDivideTheBatch(OrderTests):
    batch_size = 7

    def orders(self) -> Any:
        return EpochOrders(CHUNKS, OrderSettings(seed=3, lanes=5, window=0))


class TestMixedPasses(OrderTests):
    def orders(self) -> Any:
        return MixedPasses(sources(), quotas={"code": sum(CHUNKS[:3]), "web": sum(CHUNKS[3:])})


class TestExactPasses(OrderTests):
    def orders(self) -> Any:
        return ExactPasses(sources(), quotas={"code": sum(CHUNKS[:3]), "web": sum(CHUNKS[3:])})


class TestPassesOfOneSource(OrderTests):
    is_passed = False

    def orders(self) -> Any:
        return BatchPasses(sources(), quotas={"code": 12, "web": 24}, batch_size=12)


class TestPassesOfKinds(OrderTests):
    is_passed = False

    def orders(self) -> Any:
        return BatchPasses(sources(), quotas={"code": 13, "web": 23}, batch_size=12)


class TestMixedLanes(OrderTests):
    is_passed = False

    def orders(self) -> Any:
        return MixedLanes(sources(), weights())


class TestEvenLanes(OrderTests):
    is_passed = False

    def orders(self) -> Any:
        return EvenLanes(Sources({"code": CHUNKS[:3], "web": CHUNKS[3:]}, LANED, even={"code": "runs"}), weights())


class TestLanesOfOneSource(OrderTests):
    is_passed = False

    def orders(self) -> Any:
        return BatchLanes(sources(), weights(), batch_size=12)


class TestExactLanes(OrderTests):
    """Those of a curriculum, too: its buckets are sources whose weights change."""

    is_passed = False

    def orders(self) -> Any:
        return ExactLanes(sources(), weights())


class TestCurriculum(OrderTests):
    is_passed = False

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _source(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        folder = write_samples(tmp_path_factory.mktemp("curriculum") / "set")
        schedule = Schedule.linear(0.4, 1.0, over=40)
        cls.source = Curriculum(StreamingDataset(str(folder)), "tokens", schedule, buckets=3).source

    def orders(self) -> Any:
        return self.source.orders(LANED)


class TestReversedBits(OrderTests):
    def orders(self) -> Any:
        return ReversedBits(np.array(CHUNKS), LANED)


class OrderedSource(DictSource):
    """A source that is read in an order of its own."""

    def orders(self, settings: OrderSettings) -> Any:
        return ReversedBits(self.chunk_samples, settings)


@pytest.mark.parametrize("world", [1, 2])
def test_a_source_in_an_order_of_its_own_is_read_planned_and_looked_up_in_it(world: int) -> None:
    source = OrderedSource(SAMPLES, per_chunk=5)
    shape = {"global_batch_size": 8, "last_batch": "partial"}
    report = plan_opened(source, options=PlanOptions(mesh=mesh_of(world, 0), **shape))  # type: ignore[arg-type]
    ranks = []
    for rank in range(world):
        with DataLoader(DataSet(source), device_mesh=mesh_of(world, rank), num_threads=0, **shape) as loader:  # type: ignore[arg-type]
            state = loader.state_dict()
            ranks.append([batch["__key__"] for batch in loader])
            told = loader.metrics()
        assert told["arena_limit_bytes"] == report.loads[rank].limit_bytes
        assert told["arena_peak_bytes"] <= report.loads[rank].held_bytes
    run = PlannedRun(planned=source, state=LoaderState.from_dict(state), num_ranks=world, **shape)  # type: ignore[arg-type]
    found = run.who(range(len(SAMPLES) // 8)).rows
    for step, parts in enumerate(zip(*ranks, strict=True)):
        for rank, keys in enumerate(parts):
            assert [row.key for row in found if (row.step, row.dp_rank) == (step, rank)] == keys
    assert sorted(str(row.key) for row in found) == [*SAMPLES]
    for row in found[::7]:
        assert [(one.step, one.dp_rank) for one in run.when(str(row.key), range(len(SAMPLES) // 8)).rows] == [
            (row.step, row.dp_rank)
        ]
