"""The samplers as torch's own loader uses samplers: ``sampler=``, ``num_replicas=``, ``rank=``; and skipping."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader, Dataset, RandomSampler

import streaming
from infra import DeviceMesh
from streaming import DeviceMeshSampler, RetrySampler
from streaming.errors import ConfigError, TooManyBadSamplesError

pytestmark = pytest.mark.thorough


class Flaky(Dataset[int]):
    """Numbers, of which some cannot be had."""

    def __init__(self, size: int, bad: tuple[int, ...] = ()) -> None:
        self.size, self.bad = size, bad

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            raise ValueError(f"sample {index} is damaged")
        return index


class Many(Flaky):
    """The same, many at a time, None for what cannot be had."""

    def __getitems__(self, indices: list[int]) -> list[int | None]:
        return [None if index in self.bad else index for index in indices]


def rows(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("kind", [Flaky, Many])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sampler_that_skips_leaves_out_what_cannot_be_had(kind: type[Flaky], num_workers: int) -> None:
    dataset = kind(20, bad=(3, 4, 11))
    over = DeviceMeshSampler(dataset, 5, shuffle=False, device_mesh=DeviceMesh.from_sizes(dp_size=1, rank=0))
    sampler = RetrySampler(over, dataset, on_error="skip", max_bad_samples=3)
    loader = DataLoader(sampler.dataset, batch_sampler=sampler, num_workers=num_workers)
    expected = [[0, 1, 2], [5, 6, 7, 8, 9], [10, 12, 13, 14], [15, 16, 17, 18, 19]]
    assert [batch.tolist() for batch in sampler.follow(loader)] == expected
    assert [(bad["number"], bad["substitute"]) for bad in sampler.bad] == [(3, None), (4, None), (11, None)]
    sampler.close()


def test_it_skips_over_torchs_own_sampler() -> None:
    dataset = Flaky(30, bad=(7, 20))
    sampler = RetrySampler(RandomSampler(dataset), dataset, on_error="skip", max_bad_samples=2)
    found = rows(DataLoader(sampler.dataset, sampler=sampler, batch_size=6))
    assert sorted(number for batch in found for number in batch) == [
        number for number in range(30) if number not in dataset.bad
    ]
    assert min(map(len, found)) < 6


def test_it_skips_only_after_the_substitutes_that_it_may_try() -> None:
    dataset = Flaky(6, bad=(1, 2))
    over = DeviceMeshSampler(dataset, 6, shuffle=False, device_mesh=DeviceMesh.from_sizes(dp_size=1, rank=0))
    sampler = RetrySampler(over, dataset, on_error="skip", max_substitutes=30, max_bad_samples=2)
    (batch,) = rows(DataLoader(sampler.dataset, batch_sampler=sampler))
    assert len(batch) == 6
    assert {1, 2}.isdisjoint(batch)


def test_a_batch_of_which_nothing_is_left_is_an_error() -> None:
    dataset = Flaky(6, bad=(0, 1))
    over = DeviceMeshSampler(dataset, 2, shuffle=False, device_mesh=DeviceMesh.from_sizes(dp_size=1, rank=0))
    sampler = RetrySampler(over, dataset, on_error="skip", max_bad_samples=5)
    with pytest.raises(ValueError, match="sample 1 is damaged") as caught:
        rows(DataLoader(sampler.dataset, batch_sampler=sampler))
    assert "every other sample of its batch of 2" in str(caught.value.__notes__)


def test_skipping_has_a_limit_and_a_place() -> None:
    dataset = Flaky(40, bad=(1, 9, 17))
    over = DeviceMeshSampler(dataset, 4, shuffle=False, device_mesh=DeviceMesh.from_sizes(dp_size=1, rank=0))
    sampler = RetrySampler(over, dataset, on_error="skip", max_bad_samples=2)
    with pytest.raises(TooManyBadSamplesError, match="3 invalid samples"):
        list(sampler.follow(DataLoader(sampler.dataset, batch_sampler=sampler)))
    with pytest.raises(ConfigError, match="one of substitute, skip, raise"):
        RetrySampler(over, dataset, on_error="ignore")
    with streaming.DataLoader(
        streaming.OrdinaryDataset(dataset, on_error="skip", shuffle=False, max_bad_samples=5), 4
    ) as loader:
        assert [len(batch) for batch in loader] == [3, 4, 3, 4, 3, 4, 4, 4, 4, 4]
    with pytest.raises(ConfigError, match=r'on_error="skip".*"pad"'):
        streaming.DataLoader(streaming.OrdinaryDataset(dataset, on_error="skip"), 4, last_batch="pad")


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("drop_last", [True, False])
def test_it_stands_in_for_torchs_distributed_sampler(num_workers: int, drop_last: bool) -> None:
    dataset = Flaky(23)
    epochs = []
    for epoch in range(3):
        shares = []
        for rank in range(4):
            sampler = DeviceMeshSampler(dataset, num_replicas=4, rank=rank, seed=3, drop_last=drop_last)
            assert len(sampler) == (5 if drop_last else 6)
            sampler.set_epoch(epoch)
            loader = DataLoader(dataset, batch_size=2, sampler=sampler, num_workers=num_workers)
            shares.append([number for batch in loader for number in batch.tolist()])
        assert {len(share) for share in shares} == {5 if drop_last else 6}
        counts = Counter(number for share in shares for number in share)
        assert (sum(counts.values()), len(counts)) == ((20, 20) if drop_last else (24, 23))
        epochs.append(shares)
    assert epochs[0] != epochs[1] != epochs[2]
    (one,) = [DeviceMeshSampler(dataset, num_replicas=np.int64(1), rank=0, shuffle=False)]  # type: ignore[arg-type]
    assert list(one) == list(range(23))


def test_single_indices_are_resumed_on_other_ranks() -> None:
    dataset = Flaky(24)
    taken: list[int] = []
    states = []
    for rank in range(2):
        sampler = DeviceMeshSampler(dataset, num_replicas=2, rank=rank)
        batches = sampler.follow(DataLoader(dataset, batch_size=3, sampler=sampler, num_workers=1))
        taken += [number for _ in range(2) for number in next(batches).tolist()]
        states.append(sampler.state_dict())
        batches.close()
    assert states[0] == states[1]
    assert states[0]["samples_seen"] == 12
    for rank in range(3):
        sampler = DeviceMeshSampler(dataset, num_replicas=3, rank=rank)
        sampler.load_state_dict(states[0])
        taken += list(sampler)
    assert sorted(taken) == list(range(24))


def test_what_torchs_loader_drops_at_the_end_of_an_epoch_begins_none() -> None:
    def made() -> tuple[DeviceMeshSampler, DataLoader[int]]:
        sampler = DeviceMeshSampler(20, num_replicas=1, rank=0)
        return sampler, DataLoader(Flaky(20), batch_size=8, sampler=sampler, drop_last=True)

    sampler, loader = made()
    batches = sampler.follow(loader)
    found = [[next(batches).tolist() for _ in range(2)]]
    state = sampler.state_dict()  # in the body of the last step
    assert (next(batches, "over"), sampler.epoch, sampler.samples_seen) == ("over", 1, 0)
    found.append(rows(sampler.follow(loader)))
    sampler, loader = made()
    sampler.load_state_dict(state)
    assert [rows(sampler.follow(loader)) for _ in range(2)] == [[], found[1]]
    for _ in range(2):  # left early, an epoch is not over
        next(batches := sampler.follow(loader))
        batches.close()
    assert (sampler.epoch, sampler.samples_seen) == (3, 8)
    assert (len(list(sampler)), sampler.epoch) == (20, 5), "without `follow` what is asked for counts again"
    kept = rows(sampler.follow(DataLoader(Flaky(20), batch_size=8, sampler=sampler)))
    assert ([len(batch) for batch in kept], sampler.epoch, sampler.samples_seen) == ([8, 8, 4], 6, 0)
    with pytest.raises(ConfigError, match="does not use this sampler"):
        next(sampler.follow(DataLoader(Flaky(20), batch_size=8)))


def test_it_retries_single_indices() -> None:
    dataset = Flaky(20, bad=(3,))
    over = DeviceMeshSampler(dataset, num_replicas=1, rank=0, shuffle=False)
    sampler = RetrySampler(over, dataset, max_bad_samples=1)
    loader = DataLoader(sampler.dataset, batch_size=5, sampler=sampler)
    found = [batch.tolist() for batch in sampler.follow(loader)]
    assert [len(batch) for batch in found] == [5, 5, 5, 5]
    assert 3 not in found[0]
    assert over.state_dict()["epoch"] == 1


def test_what_torchs_names_cannot_say_is_named() -> None:
    dataset = Flaky(20)
    mesh = DeviceMesh.from_sizes(dp_size=1, rank=0)
    with pytest.raises(ConfigError, match="not both"):
        DeviceMeshSampler(dataset, device_mesh=mesh, rank=0)
    with pytest.raises(ConfigError, match=r"rank: expected an integer in \[0, 1\], got 2"):
        DeviceMeshSampler(dataset, num_replicas=2, rank=2)
    with pytest.raises(ConfigError, match='use "drop" or "pad"'):
        DeviceMeshSampler(dataset, num_replicas=2, rank=1, last_batch="partial")
    batches = DeviceMeshSampler(dataset, 4, device_mesh=mesh)
    with pytest.raises(ConfigError, match="batch_sampler=sampler"):
        list(DataLoader(dataset, batch_size=4, sampler=batches))
