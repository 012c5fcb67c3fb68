"""A ``StreamingDataset`` inside torch's own ``DataLoader``: the view keeps the promises, the bare set warns."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils.data
from torch.utils.data.distributed import DistributedSampler

from infra import DeviceMesh
from streaming import DeviceMeshSampler, Mixture, StreamingDataset, TorchIterable
from streaming.errors import ConfigError, StateError
from streaming.others.torch_datasets.retry import SharedLog
from streaming.torch_view import _Epochs
from tests.support.sets.data_sets import SampleSet, write_set

pytestmark = pytest.mark.thorough

TOTAL = 85


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    return write_set(tmp_path_factory.mktemp("foreign"), (41, 17, 27))


def keys_only(rows: list[dict[str, Any]]) -> list[str]:
    return [row["__key__"] if row.get("__valid__", True) else "" for row in rows]


def view_of(samples: SampleSet, rank: int = 0, ranks: int = 1, **options: Any) -> TorchIterable:
    dataset = samples.open(decode=None, fields=("cls",))
    return TorchIterable(dataset, device_mesh=DeviceMesh.from_sizes(dp_size=ranks, rank=rank), **options)


def loader_of(view: TorchIterable, num_workers: int = 0, **options: Any) -> torch.utils.data.DataLoader[Any]:
    options = {"batch_size": 4, "num_workers": num_workers, "collate_fn": keys_only} | options
    return torch.utils.data.DataLoader(view, **options)


@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (1, False), (2, False), (2, True)])
def test_every_sample_reaches_one_rank_once_in_another_order_each_epoch(
    samples: SampleSet, num_workers: int, persistent: bool
) -> None:
    loaders = [
        loader_of(view_of(samples, rank, 2, last_batch="partial"), num_workers, persistent_workers=persistent)
        for rank in range(2)
    ]
    orders = []
    for _ in range(3):
        shares = [[key for batch in loader for key in batch] for loader in loaders]
        assert Counter(shares[0] + shares[1]) == Counter(samples.keys)
        assert abs(len(shares[0]) - len(shares[1])) <= max(1, num_workers)
        orders.append(shares[0])
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert orders[0] != sorted(orders[0])
    for loader in loaders:  # the second pass over the same epoch gives the same
        loader.dataset.set_epoch(1)
    assert [key for batch in loaders[0] for key in batch] == orders[1]
    assert [key for batch in loaders[0] for key in batch] == orders[2]


@pytest.mark.parametrize("last_batch", ["drop", "pad"])
def test_parts_are_equal(samples: SampleSet, last_batch: str) -> None:
    found, sizes = Counter[str](), []
    for rank in range(3):
        view = view_of(samples, rank, 3, last_batch=last_batch)
        assert len(view) == (28 if last_batch == "drop" else 29)
        keys = [key for batch in loader_of(view) for key in batch]
        sizes.append(len(keys))
        found += Counter(keys)
    padding = found.pop("", 0)
    assert set(sizes) == {28 if last_batch == "drop" else 29}
    assert (sum(found.values()), max(found.values())) == ((84, 1) if last_batch == "drop" else (85, 1))
    assert padding == (0 if last_batch == "drop" else 2)


def test_an_epoch_left_early_is_over(samples: SampleSet) -> None:
    view = view_of(samples)
    whole = [[row["__key__"] for row in view] for _ in range(2)]
    other = view_of(samples)
    next(iter(other))
    assert [row["__key__"] for row in other] == whole[1]


@pytest.mark.parametrize("stop", [1, 63, 64, 65, 84, 85])
def test_the_state_is_that_of_torchdata(samples: SampleSet, stop: int) -> None:
    """``StatefulDataLoader`` takes ``state_dict`` of the data set after each batch and gives it back before iter."""
    view = view_of(samples)
    epochs = [[row["__key__"] for row in view] for _ in range(3)]
    view.set_epoch(1)
    rows: Iterator[dict[str, Any]] = iter(view)
    seen = [next(rows)["__key__"] for _ in range(stop)]
    state = view.state_dict()
    assert seen == epochs[1][:stop]
    resumed = view_of(samples)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert [row["__key__"] for row in resumed] == epochs[1][stop:]
    assert [row["__key__"] for row in resumed] == epochs[2]


@pytest.mark.parametrize("batch_size", [17, 20], ids=["equal batches", "a short last one"])
def test_the_end_of_an_epoch_lasts_as_long_as_the_iterator_of_torch(samples: SampleSet, batch_size: int) -> None:
    """For a short batch torch asks for one sample more, before the program has the batch."""
    view = view_of(samples)
    loader = loader_of(view, batch_size=batch_size)
    epochs, states = [], []
    for _ in range(2):
        epochs.append([])
        for batch in loader:
            epochs[-1].append(batch)
            states.append(view.state_dict())
        states.append(view.state_dict())
    for state, due in ((states[len(epochs[0]) - 1], []), (states[len(epochs[0])], epochs[1])):
        resumed = view_of(samples)
        resumed.load_state_dict(state)
        assert list(loader_of(resumed, batch_size=batch_size)) == due


@pytest.mark.parametrize("last_batch", ["drop", "pad", "partial"])
@pytest.mark.parametrize(("total", "ranks"), [(64, 1), (64, 2), (65, 2), (66, 3), (67, 2)])
def test_the_last_samples_of_an_epoch_can_be_gone_on_from(
    samples: SampleSet, last_batch: str, total: int, ranks: int
) -> None:
    """64 samples of all ranks are planned as one: a resume may begin right behind them, or before the padding."""

    def view(rank: int) -> TorchIterable:
        mesh = DeviceMesh.from_sizes(dp_size=ranks, rank=rank)
        return TorchIterable(samples.open(fields=("cls",))[:total], device_mesh=mesh, last_batch=last_batch)

    for rank in range(ranks):
        rows, states = [], []
        for row in (whole := view(rank)):
            rows.append(row)
            states.append(whole.state_dict())
        later = list(whole)
        for stop in range(len(rows) - 2, len(rows) + 1):
            resumed = view(rank)
            resumed.load_state_dict(states[stop - 1])
            assert [list(resumed), list(resumed)] == [rows[stop:], later]


def test_workers_that_load_a_state_go_on_together(samples: SampleSet) -> None:
    """Two workers, as torchdata restores them: each in its own copy, one claim of an epoch for both."""
    view = view_of(samples)
    first = view._epochs
    second = _Epochs(SharedLog(os.dup(first._log.open())))
    assert [first.claim([2, 99], 0, 5), second.claim([2, 99], 1, 5)] == [5, 5]
    assert [second.claim([2, 99], 1, None), first.claim([2, 99], 0, None)] == [6, 6]
    assert [first.claim([1, 7], 0, None), first.claim([2, 99], 0, None), second.claim([2, 99], 1, None)] == [7, 8, 8]
    view.set_epoch(3)
    assert [second.claim([2, 98], 1, None), first.claim([2, 98], 0, None)] == [3, 3]


def test_states_that_do_not_fit_are_refused(samples: SampleSet, tmp_path_factory: pytest.TempPathFactory) -> None:
    view = view_of(samples)
    with pytest.raises(StateError, match="StatefulDataLoader"):
        view.state_dict()
    next(iter(view))
    state = view.state_dict()
    elsewhere = view_of(samples, 1, 2)
    elsewhere.load_state_dict(state)
    with pytest.raises(StateError, match=r"part 0 of 1.* part 1 of 2"):
        next(iter(elsewhere))
    other = view_of(write_set(tmp_path_factory.mktemp("other"), (40,)))
    other.load_state_dict(state)
    with pytest.raises(StateError, match="another data set"):
        next(iter(other))
    for wrong in ({}, {**state, "version": 2}, []):
        with pytest.raises(StateError, match="expected the dict of TorchIterable"):
            view.load_state_dict(wrong)  # type: ignore[arg-type]


def test_what_a_view_cannot_show_is_named(samples: SampleSet) -> None:
    with pytest.raises(ConfigError, match="expected a StreamingDataset, got a list"):
        TorchIterable([1, 2])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"got a Mixture; streaming.DataLoader deals its samples"):
        TorchIterable(Mixture({"a": samples.open()}))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="85 samples cannot be dealt to 86 parts"):
        next(iter(view_of(samples, 3, 86)))


Recorder = pytest.LogCaptureFixture


def warned(caplog: Recorder) -> int:
    return sum("each of 2 ranks gets all samples" in record.getMessage() for record in caplog.records)


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")


def bare(samples: SampleSet) -> StreamingDataset:
    return samples.open(decode=None, fields=("cls",))


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"num_workers": 1}, {"batch_size": None}])
def test_a_bare_set_on_two_ranks_warns_once(
    samples: SampleSet, two_ranks: None, caplog: Recorder, options: dict[str, Any]
) -> None:
    loader = torch.utils.data.DataLoader(bare(samples), **{"batch_size": 40, **options, "collate_fn": len})
    with caplog.at_level(logging.WARNING, "streaming"):
        for _ in range(2):
            assert len(list(loader)) == (TOTAL if options == {"batch_size": None} else 3)
    assert warned(caplog) == 1
    assert "TorchIterable(dataset)" in caplog.text
    assert "streaming.DataLoader(dataset, batch_size)" in caplog.text


def test_loops_that_shard_do_not_warn(samples: SampleSet, two_ranks: None, caplog: Recorder) -> None:
    dataset = bare(samples)

    class Cut(torch.utils.data.Sampler[list[int]]):
        """As Accelerate's: cuts the batches of torch's own sampler."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __iter__(self) -> Iterator[list[int]]:
            for number, batch in enumerate(self.inner):
                if number % 2:
                    yield batch

    torchs = torch.utils.data.BatchSampler(torch.utils.data.RandomSampler(dataset), 20, drop_last=False)
    ways: list[dict[str, Any]] = [
        {"sampler": DistributedSampler(dataset, 2, 1), "batch_size": 20},
        {"batch_sampler": DeviceMeshSampler(dataset, 20)},
        {"batch_sampler": Cut(torchs)},
    ]
    with caplog.at_level(logging.WARNING, "streaming"):
        for options in ways:
            assert len(list(torch.utils.data.DataLoader(dataset, collate_fn=len, **options))) == (
                3 if "sampler" in options else 2
            )
        assert len(dataset) == TOTAL
        assert [len(rows) for rows in zip(dataset, range(3), strict=False)] == [2, 2, 2]
    assert warned(caplog) == 0


def test_one_rank_does_not_warn(samples: SampleSet, caplog: Recorder) -> None:
    with caplog.at_level(logging.WARNING, "streaming"):
        list(torch.utils.data.DataLoader(bare(samples), batch_size=40, collate_fn=len))
    assert warned(caplog) == 0
