"""Batch sizes that change with the rows of a run: P1 to P5, resumes in the middle, ``len``, what is refused."""

from __future__ import annotations

import logging
import pickle
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streaming import DataLoader, DeviceMeshFetcher, DeviceMeshSampler, Mixture, Packed, Schedule, StreamingDataset
from streaming.errors import ConfigError
from streaming.order.plan.settings import order_settings
from streaming.order.plan.sizes import Sizes
from tests.support.sets.data_sets import SampleSet, merged, mesh_of, play, total, valid_keys, world_from, write_set
from tests.support.sets.packed_sets import write as write_documents

RAMP = Schedule.steps({0: 6, 40: 12, 130: 24, 420: 9})
SIZE = 202  # samples of the set


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    return write_set(tmp_path_factory.mktemp("ramps"))


@pytest.fixture(scope="module")
def data(samples: SampleSet) -> StreamingDataset:
    return samples.open()


def sizes_of(ramp: Schedule, epoch: int, size: int = SIZE, last_batch: str = "drop") -> list[int]:
    """Valid samples of each batch of an epoch, one after the other."""
    found, seen = [], 0
    while seen < size:
        due = int(ramp.at(epoch * size + seen))  # type: ignore[arg-type]
        if seen + due > size and last_batch == "drop":
            break
        found.append(min(due, size - seen))
        seen += due
    return found


@given(
    steps=st.dictionaries(st.integers(1, 300), st.integers(1, 40), max_size=4), first=st.integers(1, 40),
    row=st.integers(0, 300), num_samples=st.integers(0, 300), last_batch=st.sampled_from(["drop", "pad"]),
)  # fmt: skip
def test_batches_are_counted_one_by_one(
    steps: dict[int, int], first: int, row: int, num_samples: int, last_batch: Any
) -> None:
    sizes = Sizes.chosen(None, Schedule.steps({0: first, **steps}), 1)
    count, seen = 0, 0
    while seen < num_samples and (last_batch == "pad" or seen + sizes.at(row + seen) <= num_samples):
        seen += sizes.at(row + seen)
        count += 1
    assert sizes.batches(row, num_samples, last_batch) == count


def test_lanes_are_a_common_divisor_of_all_sizes() -> None:
    for steps, lanes in (({0: 256, 9: 512}, 32), ({0: 96, 5: 144}, 16), ({0: 250, 9: 256}, 25), ({0: 7, 9: 9}, 7)):
        sizes = Sizes.chosen(None, Schedule.steps(steps), 1)
        chosen = order_settings(
            shuffle=True, seed=0, lanes=None, window=None, global_batch_size=sizes.size_for_lanes, num_samples=10**6,
            num_chunks=100,
        )  # fmt: skip
        assert chosen.lanes == lanes, steps


@pytest.mark.thorough
@pytest.mark.parametrize("last_batch", ["drop", "pad", "partial"])
@pytest.mark.parametrize("kind", ["set", "mixture", "in order"])
def test_epochs_are_dealt_out_alike_on_all_worlds(samples: SampleSet, last_batch: str, kind: str) -> None:
    dataset: Any = samples.open(shuffle=kind != "in order")
    dataset = Mixture({"a": dataset}) if kind == "mixture" else dataset
    options = {"global_batch_size": RAMP, "last_batch": last_batch, "num_threads": 0, "epochs": 3}
    whole = merged(play(dataset, 1, **options))
    expected = [sizes_of(RAMP, epoch, last_batch=last_batch) for epoch in range(3)]
    assert [batch.total() for batch in whole] == [size for sizes in expected for size in sizes]
    for ranks in (2, 4):
        assert merged(play(dataset, ranks, **options)) == whole
    if last_batch != "drop":
        at = 0
        for sizes in expected:
            assert total(whole[at : at + len(sizes)]) == Counter(samples.keys)
            at += len(sizes)


def test_packs_in_batches_that_grow_are_the_same_on_all_worlds(tmp_path: Path) -> None:
    write_documents(tmp_path)
    packed = Packed(StreamingDataset(str(tmp_path)), 64)
    ramp = Schedule.steps({0: 4, 12: 8, 40: 16})

    def rows(ranks: int, state: Any = None) -> tuple[list[list[list[int]]], Any]:
        found, middle = [], None
        for rank in range(ranks):
            with DataLoader(packed, global_batch_size=ramp, device_mesh=mesh_of(ranks, rank), num_threads=0) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                mine = []
                for number, batch in enumerate(loader):
                    mine.append(batch["input_ids"].tolist())
                    middle = loader.state_dict() if number == 4 else middle
                found.append(mine)
        return [[row for part in parts for row in part] for parts in zip(*found, strict=True)], middle

    whole, state = rows(1)
    assert [len(batch) for batch in whole[:8]] == [4, 4, 4, 8, 8, 8, 8, 16]
    assert rows(2)[0] == whole
    assert rows(4, state)[0] == whole[5:]


def world(dataset: Any, ranks: int, count: int, state: Any = None, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """So many global batches from a state on, over epochs, and the state behind them."""

    def take(loader: DataLoader) -> list[list[str]]:
        mine: list[list[str]] = []
        while len(mine) < count:
            mine += [valid_keys(batch) for batch in islice(loader, count - len(mine))]
        return mine

    return world_from(dataset, ranks, take, state, **{"global_batch_size": RAMP, "num_threads": 0, **options})


@pytest.mark.thorough
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ranks=st.sampled_from([1, 2, 3]), others=st.sampled_from([1, 2, 5]), stop=st.integers(1, 39),
    kind=st.sampled_from(["set", "endless", "virtual"]),
)  # fmt: skip
def test_stopped_anywhere_and_resumed_on_another_world(
    data: StreamingDataset, ranks: int, others: int, stop: int, kind: str
) -> None:
    dataset: Any = data if kind == "set" else Mixture({"a": data}, weights={"a": 1})
    options = {"epoch_size": 150} if kind == "virtual" else {}
    whole, _ = world(dataset, 1, 40, **options)
    before, state = world(dataset, ranks, stop, **options)
    after, _ = world(dataset, others, 40 - stop, state, **options)
    assert before + after == whole


@pytest.mark.usefixtures("one_fork_server")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_workers_len_and_what_the_loader_says(
    data: StreamingDataset, num_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "streaming")
    expected, _ = world(data, 1, 12)
    with DataLoader(data, batch_size=RAMP, num_workers=num_workers, device_mesh=mesh_of(1, 0)) as loader:
        assert loader.state_dict()["order"]["lanes"] == 3  # which divide all sizes
        found = []
        for epoch in range(2):
            assert len(loader) == len(sizes_of(RAMP, epoch))
            for batch in loader:
                found.append(Counter(valid_keys(batch)))
                if loader.epoch == epoch:
                    row = loader.state_dict()["samples_seen"] + epoch * SIZE
                    assert loader.global_batch_size == loader.batch_size == RAMP.at(row)
                    assert len(loader) == len(sizes_of(RAMP, epoch))
        assert found[:12] == expected
        assert pickle.loads(pickle.dumps(loader)).epoch == 2
    assert "from row 42 batches have 12 samples; before they had 6" in caplog.messages
    assert any("batches over all ranks of 6 from row 0 on, 12 from row 40 on" in line for line in caplog.messages)


def test_bad_samples_of_an_epoch_are_counted_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    samples = write_set(tmp_path, (30, 30))
    dataset = samples.open(transform=drops_seven, max_bad_samples=1.0)
    with DataLoader(dataset, global_batch_size=Schedule.steps({0: 5, 20: 10}), num_threads=0) as loader:
        found = [key for batch in loader for key in batch["__key__"]]
        assert len(found) == 60
        assert loader.metrics()["dropped_samples"] == 1
    assert sum("end: 1 of about" in line for line in caplog.messages) == 1


def drops_seven(sample: dict[str, Any]) -> dict[str, Any] | None:
    return None if sample["cls"] == 7 else sample


def test_another_world_in_the_middle_of_a_ramp(data: StreamingDataset) -> None:
    whole, _ = world(data, 1, 20)
    _, state = world(data, 2, 7)
    found = []
    for rank in range(3):
        with DataLoader(data, global_batch_size=RAMP, device_mesh=mesh_of(2, rank % 2), num_threads=0) as loader:
            next(iter(loader))
            loader.remesh(rank, 3, at=state)
            batches = iter(loader)
            found.append([valid_keys(next(batches)) for _ in range(8)])
            with pytest.raises(ConfigError, match="batches change in size during this run"):
                loader.remesh(rank, 3, at=5)
            assert pickle.loads(pickle.dumps(loader)).has_ramp
    assert merged(found) == whole[7:15]


def test_a_fetcher_has_them_too(data: StreamingDataset) -> None:
    fetched = [len(rows) for rows in DeviceMeshFetcher(data, global_batch_size=RAMP, device_mesh=mesh_of(2, 1))]
    assert fetched == [size // 2 for size in sizes_of(RAMP, 0)]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda d: DataLoader(d, global_batch_size=Schedule.linear(2, 9, over=9)), "Schedule.steps of integers"),
        (lambda d: DataLoader(d, global_batch_size=Schedule.steps({0: 2.5})), "Schedule.steps of integers"),
        (lambda d: DataLoader(d, global_batch_size=Schedule.steps({0: 0})), "Schedule.steps of integers"),
        (lambda d: DataLoader(d, batch_size=Schedule.steps({0: {"a": 3}})), "Schedule.steps of integers"),
        (lambda d: DataLoader(d, batch_size=RAMP, global_batch_size=4), "exactly one of batch_size"),
        (lambda d: DataLoader(d, global_batch_size=Schedule.steps({0: 8, 9: 2}), device_mesh=mesh_of(4, 0)),
         "2 samples cannot be dealt to 4"),
        (lambda d: DataLoader(Mixture({"a": d}, weights={"a": 1}, batches="one_source"), global_batch_size=RAMP),
         'or use batches="mixed"'),
        (lambda d: DataLoader(list(range(9)), batch_size=RAMP), "needs a StreamingDataset with an index"),
        (lambda d: DeviceMeshSampler(d, batch_size=RAMP, device_mesh=mesh_of(1, 0)), "give an integer"),
    ],
)  # fmt: skip
def test_wrong_arguments_name_the_cure(data: StreamingDataset, make: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(data)
    assert words in str(caught.value)
