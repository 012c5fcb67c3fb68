"""A run that was accepted does not end for lack of memory: where chunks do not fit together, they come in turns."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shard_tools import ShardWriter
from shard_tools.look.plan.report import PlanOptions, plan_opened
from streaming import DataLoader, Mixture, Packed, Schedule, ShuffleConfig, StreamingDataset
from streaming.errors import MemoryLimitError
from streaming.order.plan import memory as budget
from streaming.order.plan.demand import ChunkMemory
from streaming.order.plan.memory import Budget
from streaming.order.plan.plan import Plan
from streaming.shards.catalog.build import index_shards
from streaming.shards.catalog.urls import expand_urls
from streaming.shards.index.cutter import ChunkRule
from streaming.storage import Storage
from tests.support.sets.data_sets import mesh_of
from tests.support.tiers import first_here

NUM_EPOCHS, SIZE = 8, 8
TURNS = "a chunk stays in memory only while batches use it"


def write(folder: Path, first: int = 0) -> str:
    """Chunks of eight samples, from 16 KiB to 2 MiB: the larger ones are mapped from their files."""
    sizes = np.random.default_rng(first).lognormal(np.log(16 << 10), 1.2, 24).clip(2 << 10, 250 << 10).astype(int)
    rule, lengths = ChunkRule(min_bytes=1, min_samples=8), {"tokens": lambda sample: len(sample["tok"]) // 4}
    with ShardWriter(f"{folder}/{{:03d}}.tar", max_samples=64, columns=lengths) as writer:
        for number in range(192):
            data = np.full(sizes[number // 8] // 4, first + number, "<u4").tobytes()
            writer.write({"__key__": f"{first + number:05d}", "tok": data})
    storage = Storage()
    index_shards(storage, expand_urls(f"{folder}/", storage), rule=rule, force=True)
    return f"{folder}/"


@pytest.fixture(autouse=True)
def _nothing_is_kept_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "READ_AHEAD_BYTES", 0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [write(tmp_path_factory.mktemp(name), first) for name, first in (("one", 0), ("two", 1000))]


def opened(kind: str, folders: list[str]) -> Any:
    order = ShuffleConfig(seed=3, lanes=4, window=16)
    if kind == "mixture":
        return Mixture(dict(zip("ab", map(StreamingDataset, folders), strict=True)), repeats={"a": 1, "b": 2}, seed=3)
    if kind == "endless":
        return Mixture(dict(zip("ab", map(StreamingDataset, folders), strict=True)), weights={"a": 1, "b": 2}, seed=3)
    if kind == "packs":
        return Packed(StreamingDataset(folders[0], shuffle=order), 1 << 14, field="tok", dtype="uint32")
    return StreamingDataset(folders[0], shuffle=order, fields=("tok",) if kind == "fields" else None)


def live_of(dataset: Any, world: int, **options: Any) -> tuple[ChunkMemory, Plan]:
    """What memory there is without a limit, and the plan of epoch 0."""
    with DataLoader(dataset, device_mesh=mesh_of(world, 0), **options) as loader:
        loop = loader._loop
        source, orders = loop.course.source, loop.course.orders(loop.order)
        plan = Plan.of(loop.shape, source.chunk_samples, loop.order, orders=orders)
    return ChunkMemory(source, Budget.of(1 << 40, packs=source.is_packed)), plan


def rows(batch: Any) -> Any:
    return batch["input_ids"].tolist() if "input_ids" in batch else batch["__key__"]


def told(loader: DataLoader, num_epochs: int) -> list[Any]:
    """All batches, of which some 24 of a run without an end."""
    if loader._loop.is_endless:
        batches = iter(loader)
        return [rows(next(batches)) for _ in range(24 * num_epochs)]
    return [[rows(batch) for batch in loader] for _ in range(num_epochs)]


@pytest.mark.thorough
@pytest.mark.parametrize("threads", first_here([2, 0], 1))
@pytest.mark.parametrize("kind", first_here(["set", "packs", "fields", "mixture"], 1))
def test_the_least_limit_that_is_accepted_reads_every_epoch_on_every_rank(
    kind: str, threads: int, folders: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    dataset, options = opened(kind, folders), {"global_batch_size": SIZE, "num_threads": threads}
    for world in (1, 2):
        rooms, plan = live_of(dataset, world, **options)
        limit = math.ceil(rooms.first_demand(plan).least_bytes / budget.CHUNKS_SHARE)
        for rank in range(world):
            mesh = mesh_of(world, rank)
            with DataLoader(dataset, device_mesh=mesh, **options) as loader:
                expected = told(loader, NUM_EPOCHS)
            with DataLoader(dataset, device_mesh=mesh, memory_limit=limit, **options) as loader:
                assert told(loader, NUM_EPOCHS) == expected
                assert loader.metrics()["arena_peak_bytes"] <= limit * 3 // 4
            for epoch in (1, NUM_EPOCHS - 1):  # a job that goes on there is accepted, too
                with DataLoader(dataset, device_mesh=mesh, memory_limit=limit, **options) as loader:
                    loader.set_epoch(epoch)
                    assert told(loader, 1) == expected[epoch : epoch + 1]
            with (
                DataLoader(dataset, device_mesh=mesh, memory_limit=limit - 8192, **options) as loader,
                pytest.raises(MemoryLimitError, match="is too little for this plan"),
            ):
                next(iter(loader))
    if kind == "set":
        assert TURNS in caplog.text  # in some epoch more is needed than in the first one


@pytest.mark.thorough
@pytest.mark.parametrize("threads", first_here([2, 0], 1))
@pytest.mark.parametrize("kind", first_here(["endless", "set", "fields", "mixture"], 1))
def test_in_turns_batches_are_the_same_however_little_room_there_is(
    kind: str, threads: int, folders: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As if such limits were accepted: chunks are fetched again, and samples without the rest of their chunk.

    The last limit is the least with which that is possible.
    """
    monkeypatch.setattr(ChunkMemory, "check", lambda *_, **__: None)
    dataset, options = opened(kind, folders), {"global_batch_size": SIZE, "num_threads": threads}
    rooms, plan = live_of(dataset, 1, **options)
    live, gets = plan.live_bytes(rooms.room_bytes, 0), list[float]()
    floor = budget.most_of_rows(plan, rooms.span_rooms) / live
    assert floor < 0.6
    with DataLoader(dataset, device_mesh=mesh_of(1, 0), **options) as loader:
        expected = told(loader, 2)
    for part in (0.9, 0.6, floor):
        limit = math.ceil(live * part / budget.CHUNKS_SHARE)
        with DataLoader(dataset, device_mesh=mesh_of(1, 0), memory_limit=limit, **options) as loader:
            assert told(loader, 2) == expected
            assert loader.metrics()["arena_peak_bytes"] <= budget.whole_pages(limit * 3 // 4)
            gets.append(loader.metrics()["fetched_chunks"])
    assert gets[0] < gets[-1]
    assert TURNS in caplog.text


@pytest.mark.thorough
def test_a_warning_says_what_happens_and_what_helps(
    folders: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ChunkMemory, "check", lambda *_, **__: None)
    dataset = opened("set", folders)
    rooms, plan = live_of(dataset, 1, global_batch_size=SIZE)
    limit = int(plan.live_bytes(rooms.room_bytes, 0) * 0.6 / budget.CHUNKS_SHARE)

    def warnings(memory_limit: int | str) -> list[str]:
        caplog.clear()
        with DataLoader(dataset, global_batch_size=SIZE, memory_limit=memory_limit) as loader:
            told(loader, 2)
        return [text for one in caplog.records if TURNS in (text := one.getMessage())]

    found = warnings(limit)
    assert len(found) == 2  # one for each epoch
    assert not warnings(found[0].partition('memory_limit="')[2].partition('"')[0])


def test_a_size_that_batches_will_have_is_refused_at_the_start(folders: list[str]) -> None:
    dataset, ramp = opened("set", folders), Schedule.steps({0: SIZE, 10 * SIZE: 8 * SIZE})
    limits = []
    for size in (SIZE, 8 * SIZE):
        rooms, plan = live_of(dataset, 1, global_batch_size=size)
        limits.append(math.ceil(rooms.first_demand(plan).least_bytes / budget.CHUNKS_SHARE))
    assert limits[0] < limits[1]
    for limit in limits:
        with DataLoader(dataset, global_batch_size=ramp, memory_limit=limit) as loader:
            if limit < limits[1]:
                with pytest.raises(MemoryLimitError):
                    next(iter(loader))
            else:
                assert len(list(loader)) == 10 + 1  # of 192 samples, without the rest


@pytest.mark.parametrize("kind", ["set", "mixture", "packs"])
def test_the_plan_says_of_any_epoch_what_training_accepts(kind: str, folders: list[str]) -> None:
    dataset = opened(kind, folders)
    rooms, plan = live_of(dataset, 2, global_batch_size=SIZE)
    least = rooms.first_demand(plan).least_bytes
    for limit in (math.ceil(least / budget.CHUNKS_SHARE) - 8192, math.ceil(least / budget.CHUNKS_SHARE)):
        for epoch in (0, 3):
            options = PlanOptions(mesh=mesh_of(2, 0), global_batch_size=SIZE, epoch=epoch, memory_limit_bytes=limit)
            report = plan_opened(dataset.source, options=options)
            refused = any("training would refuse" in warning for warning in report.warnings)
            assert report.needed_limit_bytes >= report.least_limit_bytes >= limit
            with DataLoader(dataset, global_batch_size=SIZE, device_mesh=mesh_of(2, 1), memory_limit=limit) as loader:
                loader.set_epoch(epoch)
                begun = iter(loader)
                if refused:
                    with pytest.raises(MemoryLimitError):
                        next(begun)
                else:
                    next(begun)
            assert refused == (limit * budget.CHUNKS_SHARE < least)
