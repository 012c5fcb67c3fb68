"""DeviceMeshSampler and RetrySampler: the promises for map-style data sets under torch's own DataLoader."""

from __future__ import annotations

import os
import pickle
import threading
from collections import Counter
from contextlib import nullcontext
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, SubsetRandomSampler

from infra import DeviceMesh
from streaming.errors import ConfigError, StateError, TooManyBadSamplesError, TransferError
from streaming.order.plan.permutation import MAX_SORTED, Permutation, substitutes
from streaming.others.torch_datasets.mesh_sampler import DeviceMeshSampler, RetrySampler
from streaming.others.torch_datasets.retry import Candidates, SharedLog
from tests.support.processes.leftovers import leftovers
from tests.support.processes.waiting import PATIENCE_S

WORLD_SIZES = (1, 2, 3, 4, 6, 8)


def mesh(rank: int, world_size: int) -> DeviceMesh:
    return DeviceMesh.from_sizes(dp_size=world_size, rank=rank, world_size=world_size)


def samplers(num_samples: int, world_size: int, **options: Any) -> list[DeviceMeshSampler]:
    return [DeviceMeshSampler(num_samples, device_mesh=mesh(rank, world_size), **options) for rank in range(world_size)]


def merged(ranks: list[list[list[int]]]) -> list[list[int]]:
    """Global batches: the ranks' slices one after the other."""
    return [[index for rows in batch for index in rows] for batch in zip(*ranks, strict=True)]


class Numbers(Dataset[int]):
    """Sample i is 10 i; some raise, some are None. Counts fetches in this process."""

    def __init__(self, size: int, bad: dict[int, list[Exception | None]] | None = None) -> None:
        self.size, self.bad = size, bad or {}
        self.fetched: Counter[int] = Counter()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        assert type(index) is int
        self.fetched[index] += 1
        faults = self.bad.get(index, [])
        if len(faults) >= self.fetched[index] or (faults and faults[-1] is None):
            fault = faults[min(self.fetched[index], len(faults)) - 1]
            if fault is None:
                return None
            raise fault
        return 10 * index


class Always(Numbers):
    """Sample ``i`` in ``bad`` raises every time."""

    def __init__(self, size: int, bad: set[int], error: type[Exception] = ValueError) -> None:
        super().__init__(size)
        self.always, self.error = bad, error

    def __getitem__(self, index: int) -> Any:
        self.fetched[index] += 1
        if index in self.always:
            raise self.error(f"sample {index} is rotten")
        return 10 * index


# --- the permutation ---


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_a_small_permutation_is_one(num_samples: int, seed: int, pass_number: int) -> None:
    permutation = Permutation(num_samples, seed, pass_number)
    assert sorted(permutation(np.arange(num_samples)).tolist()) == list(range(num_samples))


@pytest.mark.parametrize("num_samples", [MAX_SORTED + 1, MAX_SORTED * 2, MAX_SORTED * 2 + 1])
def test_a_large_permutation_is_one(num_samples: int) -> None:
    found = Permutation(num_samples, 3, 1)(np.arange(num_samples))
    assert np.array_equal(np.sort(found), np.arange(num_samples))


def test_a_large_permutation_looks_uniform() -> None:
    """Where samples go from each of 64 equal parts: chi-square over 64 x 64 cells; neighbors do not stay together."""
    size = MAX_SORTED + 12345
    found = Permutation(size, 11, 0)(np.arange(size))
    cells = np.bincount(np.arange(size) * 64 // size * 64 + found * 64 // size, minlength=4096)
    expected = size / 4096
    chi = float(((cells - expected) ** 2 / expected).sum())
    assert 3969 - 5 * 89 < chi < 3969 + 5 * 89  # 63 * 63 degrees of freedom, 5 standard deviations
    assert abs(np.corrcoef(np.arange(size), found)[0, 1]) < 0.006
    assert np.count_nonzero(np.abs(np.diff(found)) == 1) < 20
    other = Permutation(size, 11, 1)(np.arange(size))
    assert np.count_nonzero(other == found) < 20


def test_every_order_of_four_is_about_as_frequent() -> None:
    counts = Counter(tuple(Permutation(4, 5, number)(np.arange(4)).tolist()) for number in range(4800))
    assert len(counts) == 24
    assert max(counts.values()) < 270
    assert min(counts.values()) > 135


def test_a_billion_samples_take_no_memory_and_no_time() -> None:
    sampler = DeviceMeshSampler(10**9, global_batch_size=4096, device_mesh=mesh(3, 8), epoch_size=None)
    first = list(islice(sampler, 3))
    assert [len(rows) for rows in first] == [512] * 3
    assert not sampler._permutations[0, 0]._sorted


def test_the_order_is_pinned() -> None:
    """A checkpoint must mean the same in every release."""
    assert Permutation(10, 0, 0)(np.arange(10)).tolist() == PINNED_SMALL
    assert Permutation(10**9, 7, 2)(np.array([0, 1, 10**9 - 1])).tolist() == PINNED_LARGE
    found = substitutes(np.array([0, 1]), np.array([5, 15]), seed=0, num_samples=10**6, count=2)
    assert found.tolist() == PINNED_SUBSTITUTES


# --- the promises ---


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("last_batch", ["drop", "pad", "partial"])
@pytest.mark.parametrize("epoch_size", [None, 70, 250])
def test_exactly_once_equal_ends_and_elastic(shuffle: bool, last_batch: str, epoch_size: int | None) -> None:
    options = {"global_batch_size": 24, "shuffle": shuffle, "seed": 5, "last_batch": last_batch}
    reference: list[list[list[int]]] = []
    for world_size in WORLD_SIZES:
        ranks = samplers(105, world_size, epoch_size=epoch_size, **options)
        stream: list[int] = []
        for epoch in range(3):
            played = [list(sampler) for sampler in ranks]
            assert {len(rows) for rows in played} == {len(ranks[0])}
            assert {sampler.epoch for sampler in ranks} == {epoch + 1}
            batches = merged(
                [
                    [
                        [index for index, real in zip(rows, sampler.valid_mask(number).tolist(), strict=True) if real]
                        for number, rows in enumerate(batch)
                    ]
                    for sampler, batch in zip(ranks, played, strict=True)
                ]
            )
            if last_batch == "pad":
                assert {len(rows) for one in played for rows in one} == {24 // world_size}
            if world_size == 1:
                reference.append(batches)
            assert batches == reference[epoch]
            stream += [index for batch in batches for index in batch]
        if last_batch != "drop" and epoch_size is None:
            assert Counter(stream) == Counter(dict.fromkeys(range(105), 3))
        if last_batch != "drop":  # of an endless repetition, each pass gives each sample once
            whole = len(stream) // 105 * 105
            assert set(Counter(stream[:whole]).values()) == {whole // 105}
        if not shuffle and last_batch != "drop":
            assert stream == [position % 105 for position in range(len(stream))]


@given(st.integers(1, 40), st.integers(1, 30), st.integers(1, 8), st.integers(1, 8), st.data())
@settings(deadline=None)
def test_resume_anywhere_on_any_world_size(size: int, batch: int, before: int, after: int, data: st.DataObject) -> None:
    options = {"global_batch_size": max(batch, before, after), "last_batch": "pad", "seed": size}
    stop = data.draw(st.integers(0, len(samplers(size, 1, **options)[0])))
    whole = merged([list(one) for one in samplers(size, 1, **options)])
    first = samplers(size, before, **options)
    for one in first:
        assert len(list(islice(one, stop))) == stop
    states = [one.state_dict() for one in first]
    assert all(state == states[0] for state in states)
    second = samplers(size, after, **options)
    for one in second:
        one.load_state_dict(states[0])
        one.set_epoch(0)  # the one in progress: keeps the position
    rest = [list(one) for one in second]
    real = [
        [
            [index for index, valid in zip(rows, one.valid_mask(number).tolist(), strict=True) if valid]
            for number, rows in enumerate(batches)
        ]
        for one, batches in zip(second, rest, strict=True)
    ]
    seen = states[0]["samples_seen"]
    flat = [index for rows in whole for index in rows][:size]
    assert [index for rows in merged(real) for index in rows] == flat[seen:]


def test_seed_and_epochs_change_the_order_and_left_loops_are_epochs() -> None:
    (sampler,) = samplers(50, 1, batch_size=10)
    first = list(sampler)
    second = list(islice(sampler, 2))
    assert sampler.epoch == 1
    assert list(islice(sampler, 2)) != second
    assert sampler.epoch == 2
    sampler.set_epoch(1)
    assert list(islice(sampler, 2)) == second
    sampler.set_epoch(1)
    assert list(sampler)[:2] == second
    sampler.set_epoch(1)
    second = list(sampler)
    assert second != first
    sampler.set_epoch(0)
    assert list(sampler) == first
    sampler.set_seed(9)
    state = sampler.state_dict()
    assert state["next_seed"] == 9
    assert list(sampler) != second
    (other,) = samplers(50, 1, batch_size=10)
    other.load_state_dict(state)
    other.set_seed(0)
    assert list(other) == second
    (sampler,) = samplers(50, 1, batch_size=10)
    first = next(batches := iter(sampler))
    sampler.set_seed(9)
    state = sampler.state_dict(num_consumed=0)
    epoch = [first, *batches]
    other.load_state_dict(state)
    assert [list(other), list(other)] == [epoch, list(sampler)]
    next(iter(other))
    other.set_epoch(2)  # which no iterator goes on with
    assert (other.epoch, other.samples_seen) == (2, 0)
    assert list(map(len, samplers(20_000, 1, batch_size=10_000)[0])) == [10_000] * 2


def test_a_tail_that_is_too_small_for_the_ranks_is_that_behind_the_state() -> None:
    for seen, is_too_small in ((0, True), (2, False), (48, True), (30, False)):
        sampler = samplers(50, 4, global_batch_size=16, last_batch="partial")[0]
        sampler.load_state_dict({**sampler.state_dict(), "samples_seen": seen})
        with pytest.raises(ConfigError, match="of the last 2 samples") if is_too_small else nullcontext():
            assert len(list(sampler)) == -(-(50 - seen) // 16)


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 2])
def test_under_torch_with_exact_state(num_workers: int) -> None:
    before = settled()
    options = {"batch_size": 4, "seed": 3}
    (reference,) = samplers(50, 1, **options)
    expected = [[[10 * i for i in rows] for rows in reference] for _ in range(2)]
    (sampler,) = samplers(50, 1, **options)
    loader = DataLoader(Numbers(50), batch_sampler=sampler, num_workers=num_workers, persistent_workers=num_workers > 0)
    assert len(loader) == 12
    found, states = [], []
    for epoch in range(2):
        assert sampler.state_dict()["epoch"] == epoch, "though torch keeps what asked for the indices"
        for batch in sampler.follow(loader):
            found.append(batch.tolist())
            states.append(sampler.state_dict())
    assert found == expected[0] + expected[1]
    places = [(state["epoch"], state["samples_seen"]) for state in states]
    assert [places[number] for number in (0, 10, 11, 12)] == [(0, 4), (0, 44), (0, 50), (1, 4)]
    for stop in (1, 5, 11, 12, 13):
        (resumed,) = samplers(50, 1, **options)
        resumed.load_state_dict(states[stop - 1])
        loader = DataLoader(Numbers(50), batch_sampler=resumed, num_workers=num_workers)
        rest = [batch.tolist() for batch in resumed.follow(loader)]
        assert rest == (found[stop:12] if stop <= 12 else found[stop:])
    del loader, batch
    assert not settled() - before, "an earlier test's loader may end meanwhile; nothing of this one may stay"


def test_state_with_prefetching_and_without_follow() -> None:
    (sampler,) = samplers(40, 1, batch_size=4)
    loader = DataLoader(Numbers(40), batch_sampler=sampler, num_workers=2)
    for number, _ in enumerate(loader):
        state = sampler.state_dict(num_consumed=number + 1)
        assert (state["epoch"], state["samples_seen"]) == (0, 4 * number + 4)
        assert sampler.valid_mask(number).tolist() == [True] * 4
    state = sampler.state_dict(num_consumed=10)
    assert (state["epoch"], state["samples_seen"]) == (1, 0), "the loop has asked for more"
    with pytest.raises(ConfigError, match="has no 11 batches"):
        sampler.state_dict(num_consumed=11)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": 0, "batch_size": 1}, "dataset"),
        ({"dataset": iter([1]), "batch_size": 1}, "has none"),
        ({"dataset": 5, "batch_size": 6}, "do not fill"),
        ({"dataset": 5, "batch_size": 1, "global_batch_size": 2}, "exactly one"),
        ({"dataset": 5, "batch_size": 1, "last_batch": "keep"}, "last_batch"),
        ({"dataset": 5, "batch_size": 1, "seed": -1}, "seed"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DeviceMeshSampler(**options)


def test_states_of_other_sets_are_refused() -> None:
    (sampler,) = samplers(40, 1, batch_size=4)
    for other, message in (
        (samplers(41, 1, batch_size=4), "another data set"),
        (samplers(40, 1, batch_size=4, epoch_size=8), "epoch_size"),
        (samplers(40, 1, batch_size=4, shuffle=False), "shuffle"),
    ):
        with pytest.raises(StateError, match=message):
            sampler.load_state_dict(other[0].state_dict())
    with pytest.raises(StateError):
        sampler.load_state_dict({})


# --- RetrySampler ---


def settled() -> Counter[str]:
    """What is left once the threads of torch's queues, which close their pipes when they end, have ended."""
    for thread in threading.enumerate():
        if thread.name.startswith("QueueFeederThread"):
            thread.join(PATIENCE_S)
    return leftovers()


def retry(dataset: Any, sampler: Any = None, **options: Any) -> RetrySampler:
    if sampler is None:
        sampler = DeviceMeshSampler(dataset, batch_size=4, seed=1, device_mesh=mesh(0, 1))
    return RetrySampler(sampler, dataset, **{"backoff_s": 0, "max_bad_samples": 100, **options})


def test_good_samples_are_fetched_once() -> None:
    dataset = Numbers(40)
    sampler = retry(dataset)
    found = [value for batch in sampler.follow(DataLoader(sampler.dataset, batch_sampler=sampler)) for value in batch]
    assert sorted(map(int, found)) == [10 * i for i in range(40)]
    assert dataset.fetched == Counter(range(40))
    assert sampler.bad == []


def test_what_may_pass_is_retried_and_nothing_else() -> None:
    bad: dict[int, list[Exception | None]] = {
        3: [OSError("reset"), TransferError("short")],  # passes at the third attempt
        5: [TimeoutError("slow")] * 9,  # never
        7: [FileNotFoundError("gone")] * 9,  # final at once
        9: [ValueError("rotten")] * 9,
        11: [None],  # and None
    }
    dataset = Numbers(40, bad)
    sampler = retry(dataset, max_retries=2)
    list(DataLoader(sampler.dataset, batch_sampler=sampler))
    own = {index: dataset.fetched[index] for index in bad}
    replaced = {one["number"]: one["substitute"] for one in sampler.bad}
    assert set(replaced) == {5, 7, 9, 11}
    taken = Counter(replaced.values())
    assert {index: count - taken[index] for index, count in own.items()} == {3: 3, 5: 3, 7: 1, 9: 1, 11: 1}
    reasons = {one["number"]: one["reason"] for one in sampler.bad}
    assert reasons[5] == "TimeoutError: slow"
    assert reasons[11] == "DataError: sample 11 is None"
    assert sampler.metrics.get("bad_samples") == 4


def test_all_that_was_tried_is_told_once_and_of_its_own_epoch() -> None:
    dataset = Always(40, {2, 17})
    sampler = retry(dataset)
    iter(sampler)
    for _ in range(2):
        assert sampler.dataset[Candidates(2, (2, 17, 5))] == 50
    assert dataset.fetched == {2: 2, 17: 2, 5: 2}
    assert {one["number"]: one["substitute"] for one in sampler.bad} == {2: 5, 17: None}
    assert sampler.metrics.get("bad_samples") == 2
    sampler.dataset[Candidates(17, (5,))]  # a worker that is late
    iter(sampler)
    assert sampler.bad == []
    ((first, *_),) = retry(Always(3, {1}), [[1, 1, 2]])
    assert first.substitutes == (2,)


def test_a_share_of_bad_samples_is_rounded_up() -> None:
    for bad, is_too_many in (({1, 2}, False), ({1, 2, 3}, True)):
        sampler = retry(Always(150, bad), SequentialSampler(range(150)), max_bad_samples=0.01)
        with pytest.raises(TooManyBadSamplesError, match="allows 2") if is_too_many else nullcontext():
            list(sampler.follow(DataLoader(sampler.dataset, sampler=sampler, batch_size=10)))


def test_a_report_is_taken_when_it_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    log = SharedLog()
    log.append({"a": 1})
    os.write(log.open(), b'{"b"')
    assert log.take() == [{"a": 1}]
    os.write(log.open(), b": 2}\n")
    assert log.take() == [{"b": 2}]
    log.append({"c": 3})
    monkeypatch.setattr(os, "getpid", lambda: 1)  # as in a forked child
    log.begin()
    assert log.take() == [], "it has a log of its own"


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 2])
def test_substitutes_do_not_depend_on_world_size_or_workers(num_workers: int) -> None:
    rotten = {2, 17, 30}
    expected: list[list[int]] = []
    for world_size in (1, 2, 4):
        ranks = []
        for rank in range(world_size):
            inner = DeviceMeshSampler(40, global_batch_size=8, seed=1, device_mesh=mesh(rank, world_size))
            sampler = retry(Always(40, rotten), inner)
            loader = DataLoader(sampler.dataset, batch_sampler=sampler, num_workers=num_workers)
            ranks.append([batch.tolist() for batch in sampler.follow(loader)])
        batches = merged(ranks)
        expected = expected or batches
        assert batches == expected
    flat = [value // 10 for batch in expected for value in batch]
    assert len(flat) == 40
    assert not set(flat) & rotten


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.thorough)])
def test_reports_come_back_from_worker_processes(method: str) -> None:
    before = settled()
    sampler = retry(Always(24, {2, 17}))
    num_workers = 2 if method == "fork" else 1  # a fork server's imports this file and torch, which takes seconds
    loader = DataLoader(
        sampler.dataset, batch_sampler=sampler, num_workers=num_workers, multiprocessing_context=method,
        persistent_workers=True,
    )  # fmt: skip
    for _ in range(2):
        assert len([None for _ in sampler.follow(loader)]) == 6
        assert sorted(one["number"] for one in sampler.bad) == [2, 17]
    del loader, sampler
    found = settled() - before
    assert method == "forkserver" or not found  # the fork server itself stays, as multiprocessing has it


def test_too_many_stop_the_run_by_name() -> None:
    sampler = retry(Always(400, set(range(0, 400, 4))), max_bad_samples=3)
    loader = DataLoader(sampler.dataset, batch_sampler=sampler, num_workers=2)
    with pytest.raises(
        TooManyBadSamplesError, match=r"max_bad_samples=3 allows 3(?s:.*)\d+: ValueError: sample \d+ is rot"
    ):
        list(sampler.follow(loader))
    assert sampler.bad  # can be looked at afterwards


@pytest.mark.parametrize("limit", [-1, 1.5, float("nan"), float("inf"), True, "3"])
def test_a_limit_that_is_none_is_refused_as_by_a_streaming_dataset(limit: Any) -> None:
    with pytest.raises(ConfigError, match=r"max_bad_samples: expected a count .*a float of at most 1"):
        retry(Always(4, set()), max_bad_samples=limit)


def test_on_error_raise_and_nothing_left_to_take() -> None:
    sampler = retry(Always(40, {2}), on_error="raise")
    with pytest.raises(ValueError, match="sample 2 is rotten"):
        list(DataLoader(sampler.dataset, batch_sampler=sampler))
    sampler = retry(Always(40, set(range(40))))
    with pytest.raises(ValueError, match="is rotten") as raised:
        list(DataLoader(sampler.dataset, batch_sampler=sampler))
    assert "8 others" in raised.value.__notes__[0]


def test_over_torch_samplers_substitutes_stay_in_their_selection() -> None:
    chosen = list(range(0, 40, 2))
    for batched in (False, True):
        inner: Any = SubsetRandomSampler(chosen, generator=torch.Generator().manual_seed(0))
        inner = BatchSampler(inner, 5, drop_last=False) if batched else inner
        dataset = Always(40, {4, 8, 20})
        sampler = retry(dataset, inner)
        options = {"batch_sampler": sampler} if batched else {"sampler": sampler, "batch_size": 5}
        found = [int(value) // 10 for batch in DataLoader(sampler.dataset, **options) for value in batch]
        assert len(found) == len(chosen)
        assert set(found) == set(chosen) - {4, 8, 20}
        assert len(sampler) == (4 if batched else 20)
    lonely = retry(Always(3, {1}), SequentialSampler(range(3)))  # a single index: its neighbors in the order
    assert [int(value) for value in DataLoader(lonely.dataset, sampler=lonely, batch_size=None)] == [0, 20, 20]


def test_batched_getitems_is_used_and_falls_back() -> None:
    class Many(Always):
        calls = 0

        def __getitems__(self, indices: list[int]) -> list[Any]:
            self.calls += 1
            return [self[index] for index in indices]

    dataset = Many(40, {2})
    sampler = retry(dataset)
    found = [value for batch in DataLoader(sampler.dataset, batch_sampler=sampler) for value in batch.tolist()]
    assert dataset.calls == 10
    assert len(found) == 40
    assert 20 not in found
    assert [one["number"] for one in sampler.bad] == [2]


def test_candidates_and_the_wrapped_set_pickle() -> None:
    index = pickle.loads(pickle.dumps(Candidates(3, (4, 5))))
    assert index == 3
    assert index.substitutes == (4, 5)
    sampler = retry(Always(10, {3}))
    assert pickle.loads(pickle.dumps(sampler.dataset))[index] == 40


def test_state_passes_through() -> None:
    sampler = retry(Numbers(40))
    loader = DataLoader(sampler.dataset, batch_sampler=sampler)
    for _ in islice(sampler.follow(loader), 3):
        pass
    state = sampler.state_dict()
    assert state["samples_seen"] == 12
    other = retry(Numbers(40))
    other.load_state_dict(state)
    assert len(list(other)) == 7
    assert other.epoch == 1
    other.set_epoch(5)
    assert other.epoch == 5


PINNED_SMALL = [2, 6, 3, 5, 8, 9, 0, 7, 1, 4]
PINNED_LARGE = [709205022, 977002331, 344221280]
PINNED_SUBSTITUTES = [[985769, 303510], [448027, 352611]]
