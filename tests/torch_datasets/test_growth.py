"""Map-style sets that grow: their length is that of each epoch's beginning, as under torch's loader."""

from __future__ import annotations

import logging
import threading
from itertools import islice
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader as TorchLoader

from infra import DeviceMesh
from streaming import DataLoader, DeviceMeshSampler, RetrySampler
from streaming.errors import AgreementError, ConfigError, StateError
from streaming.others.torch_datasets import mesh_sampler
from tests.support.processes.thread_peers import on_ranks
from tests.support.tiers import first_here

pytestmark = pytest.mark.usefixtures("one_fork_server")

ALONE = DeviceMesh.from_sizes(dp_size=1, rank=0, environ={})


def loader(rows: list[int], **options: Any) -> DataLoader[Any]:
    return DataLoader(rows, **{"batch_size": 4, "device_mesh": ALONE, "last_batch": "partial"} | options)


def epoch_of(one: Any) -> list[int]:
    return [row for batch in one for row in batch.tolist()]


@pytest.mark.parametrize("shuffle", first_here([True, False], 1))
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("persistent", [True, False])
def test_each_epoch_has_the_length_of_its_beginning(num_workers: int, *, persistent: bool, shuffle: bool) -> None:
    """Whatever comes while it runs belongs to the next one; a length that stays keeps its order and its workers."""
    rows = list(range(10))
    one = loader(rows, shuffle=shuffle, num_workers=num_workers, persistent_workers=persistent)
    torchs = TorchLoader(rows, 4)
    for extra in (0, 7, 0, 25, -30):
        rows[:] = rows[:extra] if extra < 0 else [*rows, *range(len(rows), len(rows) + extra)]
        size = len(rows)
        fixed = loader(list(rows), shuffle=shuffle)
        fixed.set_epoch(one.epoch)
        assert len(one) == len(torchs) == len(fixed) == -(-size // 4)
        got = []
        for batch in one:
            got.extend(batch.tolist())
            rows.append(-1)
            assert len(one) == len(fixed)
            assert one.batches_left == len(fixed) - len(got) // 4 - (len(got) % 4 > 0)
        del rows[size:]
        assert got == epoch_of(fixed)
        assert sorted(got) == rows
        if not shuffle:
            assert got == epoch_of(torchs)
    one.close()


def test_a_change_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "streaming.others.torch_datasets")
    rows = list(range(10))
    one = loader(rows)
    epoch_of(one)
    assert not caplog.records
    rows.extend(range(10, 12))
    epoch_of(one)
    (record,) = caplog.records
    assert record.message == "the data set has 12 samples as epoch 1 begins, and had 10 before"
    assert record.levelname == "INFO"
    del rows[5:]
    epoch_of(one)
    assert caplog.records[-1].levelname == "WARNING"
    rows.clear()
    assert len(one) == 0
    assert one.state_dict()["epoch"] == 3
    with pytest.raises(ConfigError, match="this list is empty"):
        epoch_of(one)
    rows.extend(range(3))
    with pytest.raises(ConfigError, match="3 samples do not fill one global batch of 4"):
        epoch_of(loader(rows, last_batch="drop"))
    rows.extend(range(3, 8))
    assert sorted(epoch_of(one)) == rows


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_that_is_resumed_keeps_its_length(num_workers: int, caplog: pytest.LogCaptureFixture) -> None:
    rows = list(range(10))
    one = loader(rows, num_workers=num_workers)
    epoch_of(one)
    rows.extend(range(10, 22))
    got = [batch.tolist() for batch in islice(one, 2)]
    state = one.state_dict()
    assert (state["num_samples"], state["samples_seen"]) == (22, 8)
    one.load_state_dict(state)
    rest = [epoch_of(one), epoch_of(one)]
    one.close()
    assert sorted([row for batch in got for row in batch] + rest[0]) == rows
    assert not caplog.records

    other = loader([*rows, 22, 23, 24], num_workers=num_workers)
    other.load_state_dict(state)
    assert "the data set has 25 samples, and had 22 when the state was saved" in caplog.text
    assert (len(other), other.batches_left) == (6, 4)
    assert epoch_of(other) == rest[0]
    assert sorted(epoch_of(other)) == list(range(25))
    other.close()

    with pytest.raises(StateError, match=r"22 samples; this one has 21\. Give it the same samples again"):
        loader(rows[:21]).load_state_dict(state)


@pytest.mark.parametrize("moment", ["end", "between"])
def test_states_at_an_end_and_between_epochs_leave_the_next_one_its_own_length(moment: str) -> None:
    rows = list(range(10))
    one = loader(rows)
    batches = iter(one)
    list(islice(batches, 3))
    if moment == "between":
        next(batches, None)
    rows.extend(range(10, 15))
    state = one.state_dict()
    assert (state["epoch"], state["num_samples"]) == ((0, 10) if moment == "end" else (1, 15))
    other = loader(rows)
    other.load_state_dict(state)
    if moment == "end":
        assert epoch_of(other) == []
    expected = epoch_of(one)
    assert epoch_of(other) == expected
    assert sorted(expected) == rows


def test_with_an_epoch_size_positions_are_counted_in_passes_of_the_new_length() -> None:
    rows = list(range(10))
    one = loader(rows, epoch_size=20, last_batch="drop")
    assert sorted(epoch_of(one)) == sorted(rows * 2)
    rows.extend(range(10, 20))
    assert len(one) == 5
    assert sorted(epoch_of(one)) == rows


def test_samplers_under_torchs_loader_follow_as_well() -> None:
    rows = list(range(10))
    sampler = DeviceMeshSampler(rows, 4, device_mesh=ALONE, last_batch="partial")
    tried = RetrySampler(sampler, rows)
    torchs: Any = TorchLoader(tried.dataset, batch_sampler=tried)
    assert sorted(epoch_of(tried.follow(torchs))) == rows
    rows.extend(range(10, 22))
    assert len(torchs) == len(sampler) == 6
    followed = tried.follow(torchs)
    first = next(followed).tolist()
    state = sampler.state_dict()
    rows.append(22)
    rest = epoch_of(followed)
    assert sorted(first + rest) == rows[:22]
    assert len(sampler) == 6 or sampler.epoch == 2
    other = DeviceMeshSampler(rows, 4, device_mesh=ALONE, last_batch="partial")
    other.load_state_dict(state)
    assert epoch_of(other.follow(TorchLoader(rows, batch_sampler=other))) == rest  # type: ignore[arg-type]


@pytest.mark.parametrize("added", [(5, 5), (5, 7)])
def test_ranks_compare_a_length_that_has_changed(added: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    board = dist.HashStore()

    def this_rank() -> int:
        return int(threading.current_thread().name.split()[1])

    monkeypatch.setattr(mesh_sampler, "job_world_size", lambda: 2)
    monkeypatch.setattr(mesh_sampler, "job_store", lambda _: (this_rank(), board))

    def train() -> list[int]:
        rank = this_rank()
        rows = list(range(10))
        mesh = DeviceMesh.from_sizes(dp_size=2, rank=rank, world_size=2)
        one = DataLoader(rows, global_batch_size=5, device_mesh=mesh, last_batch="partial")
        epoch_of(one)
        rows.extend(range(10, 10 + added[rank]))
        return epoch_of(one)

    first, second = on_ranks(train, 2)
    if added[0] == added[1]:
        assert sorted(first + second) == list(range(15))
    else:
        assert {type(one) for one in (first, second)} == {AgreementError}
        assert "samples of the data set is 17; most of the 2 ranks have 15" in str(first)
