"""Packs dealt by cost: the same global batch, as many packs for each rank, the same on every rank; and less waiting."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infra import DeviceMesh
from streaming import DataLoader, Packed, StreamingDataset
from streaming.errors import ConfigError
from streaming.order.packing.balance import exchange, idle, order_local, pack_costs
from streaming.order.packing.fit import other_company, pack
from streaming.order.packing.rules import PackRules
from streaming.run.replicas.batch_codec import decode, encode
from streaming.run.replicas.exchange import _allocated
from tests.support.code.folders import PROGRAMS
from tests.support.processes.forked import Forked, all_end
from tests.support.programs.exchange_rank import GLOBAL_BATCH, LENGTH, RAMP, dearness, loader_of, rows_of
from tests.support.sets.packed_sets import write

costs_of_batches = st.lists(st.integers(0, 6), min_size=1, max_size=9).flatmap(
    lambda shares: st.lists(st.integers(0, 50), min_size=sum(shares), max_size=sum(shares)).map(
        lambda costs: (np.array(costs, np.int64), shares)
    )
)  # fmt: skip
even_costs = st.tuples(st.integers(1, 9), st.integers(1, 6)).flatmap(
    lambda shape: st.lists(
        st.integers(0, 50), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]
    ).map(lambda costs: (np.array(costs), shape[0]))
)  # fmt: skip


@settings(deadline=None)
@given(costs_of_batches)
def test_exchange_deals_every_pack_once_and_each_rank_as_many_as_it_had(batch: tuple[np.ndarray, list[int]]) -> None:
    costs, shares = batch
    dealt = exchange(costs, shares)
    assert [len(packs) for packs in dealt] == shares
    assert sorted(pack for packs in dealt for pack in packs.tolist()) == list(range(len(costs)))
    assert all(map(np.array_equal, dealt, exchange(costs.copy(), shares)))
    # Microbatch by microbatch, of those ranks that have one: none is dearer than any of the one before.
    rounds = [[int(costs[packs[j]]) for packs in dealt if len(packs) > j] for j in range(max(shares))]
    assert all(max(after) <= min(before) for before, after in pairwise(rounds))


@settings(deadline=None)
@given(even_costs)
def test_exchange_evens_out_what_ranks_cost(batch: tuple[np.ndarray, int]) -> None:
    costs, num_ranks = batch
    rounds = costs[np.stack(exchange(costs, [len(costs) // num_ranks] * num_ranks))]
    # All of a microbatch are at least as dear as all of the next, and no rank waits longer than as dealt.
    assert np.all(rounds.min(axis=0)[:-1] >= rounds.max(axis=0)[1:])
    assert rounds.max(axis=0).sum() <= costs.reshape(num_ranks, -1).max(axis=0).sum()
    # Sums of ranks differ by no more than the dearest pack.
    assert int(np.ptp(rounds.sum(axis=1))) <= int(costs.max(initial=0))


@settings(deadline=None)
@given(even_costs)
def test_no_order_within_ranks_waits_less_than_the_local_one(batch: tuple[np.ndarray, int]) -> None:
    costs, num_ranks = batch
    ranks = costs.reshape(num_ranks, -1)
    ordered = np.stack([rank[order_local(rank)] for rank in ranks])
    assert np.array_equal(np.sort(ordered, axis=1), np.sort(ranks, axis=1))
    assert ordered.max(axis=0).sum() <= ranks.max(axis=0).sum()


def test_equal_costs_keep_their_order() -> None:
    assert order_local(np.array([3, 5, 3, 5])).tolist() == [1, 3, 0, 2]
    assert [packs.tolist() for packs in exchange(np.full(6, 1.5), (2, 2, 2))] == [[0, 5], [1, 4], [2, 3]]
    assert [packs.tolist() for packs in exchange(np.full(5, 1.5), (2, 1, 2))] == [[0, 4], [1], [2, 3]]


def test_costs_are_exact_integers() -> None:
    lengths, splits = np.array([3, 4, 100_000]), np.array([0, 2, 3])
    sizes = np.array([8, 131_072])
    assert pack_costs(lengths, splits, sizes).tolist() == [8 * 61_000 + 25, 131_072 * 61_000 + 10**10]
    assert pack_costs(lengths, splits, sizes, 2).tolist() == [16 + 25, 262_144 + 10**10]
    assert pack_costs(lengths, splits, sizes, lambda found: float(found.max())).tolist() == [4, 100_000]
    assert pack_costs(lengths[:0], np.array([0]), sizes[:0]).tolist() == []


@pytest.mark.parametrize("cost", [0, 1.5, "long", True, lambda _: None, lambda _: float("nan")])
def test_costs_that_cannot_be(cost: Any) -> None:
    with pytest.raises(ConfigError, match="cost: expected"):
        pack_costs(np.array([3]), np.array([0, 1]), np.array([8]), cost)


def test_ranks_wait_less_by_the_factors_of_the_design() -> None:
    """32 ranks with 8 packs of 32,768 tokens, log-normal documents: a half by order alone, a quarter by exchange."""
    random = np.random.default_rng(0)
    lengths = np.exp(random.normal(np.log(600), 1.1, 12_000)).astype(np.int64) + 1
    packs = other_company(pack(lengths, PackRules(length=32_768)), seed=0, epoch=0, group=0)
    costs = random.permutation(pack_costs(packs.lengths, packs.splits, packs.sizes))[:256].reshape(32, 8)
    local = np.stack([rank[order_local(rank)] for rank in costs])
    dealt = costs.ravel()[np.stack(exchange(costs.ravel(), [8] * 32))]
    assert 0.1 < idle(costs) < 0.3
    assert idle(local) < 0.6 * idle(costs)
    assert idle(dealt) < 0.3 * idle(costs)
    assert idle(np.zeros((2, 3))) == 0


# --- in a loader


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("documents")
    write(target)
    return target


def batches_of(folder: Path, rank: int, world: int, **options: Any) -> list[list[Any]]:
    with loader_of(str(folder), DeviceMesh.from_sizes(dp_size=world, rank=rank), **options) as loader:
        return [rows_of(batch) for batch in loader]


@pytest.mark.thorough
@pytest.mark.usefixtures("one_fork_server")
@pytest.mark.parametrize(("num_workers", "size"), [(0, GLOBAL_BATCH), (2, GLOBAL_BATCH), (0, RAMP)])
def test_local_balance_puts_the_dearest_packs_first(folder: Path, num_workers: int, size: Any) -> None:
    for rank in range(2):
        plain = plain_batches(folder, rank, 2, size)
        ordered = batches_of(folder, rank, 2, balance="local", num_workers=num_workers, global_batch_size=size)
        assert len(ordered) == len(plain) > 5
        for mine, theirs in zip(ordered, plain, strict=True):
            costs = [dearness(row) for row in theirs]
            assert mine == [theirs[number] for number in order_local(np.array(costs))]
        assert ordered != plain


def plain_batches(folder: Path, rank: int, world: int, size: Any = GLOBAL_BATCH) -> list[list[Any]]:
    packed = Packed(StreamingDataset(folder, seed=3), LENGTH)
    mesh = DeviceMesh.from_sizes(dp_size=world, rank=rank)
    with DataLoader(packed, global_batch_size=size, device_mesh=mesh, last_batch="partial") as loader:
        return [rows_of(batch) for batch in loader]


@pytest.mark.parametrize("options", [{}, {"max_docs": 9}, {"multiple": 4}])
def test_rows_of_a_batch_join_to_that_batch(folder: Path, options: dict[str, Any]) -> None:
    packed = Packed(StreamingDataset(folder, seed=3), LENGTH, **options)
    with DataLoader(packed, batch_size=6, device_mesh=DeviceMesh.from_sizes(dp_size=1, rank=0)) as loader:
        for number, batch in enumerate(loader):
            batch["input_ids"][0, 0] = 2**32 - 1  # of a field of uint32: too much to travel as int32
            rows = packed.source.items.split(batch)
            for place in range(3):  # as if they had come from another rank
                rows[place] = decode(encode([packed.source.items.sent(rows[place])], _allocated))[0]
            assert [row["input_ids"].dtype for row in rows[:2]] == [torch.int64, torch.int32]
            again = packed.source.items.joined(rows)
            assert again.keys() == batch.keys()
            for name, value in batch.items():
                alike = torch.equal(value, again[name]) if isinstance(value, torch.Tensor) else value == again[name]
                assert alike, name
                assert type(value) is type(again[name])
                assert not isinstance(value, torch.Tensor) or value.dtype == again[name].dtype
            if number == 5:
                break


@pytest.mark.thorough
@pytest.mark.distributed
def test_four_ranks_exchange_packs(folder: Path, tmp_path: Path, forked: Forked) -> None:
    """The same global batches, each rank as many packs as before, dealt as computed; resumed after three batches."""
    world = 4
    program, output = PROGRAMS / "exchange_rank.py", tmp_path / "output"
    ranks = [
        forked.start(program, str(folder), str(tmp_path), str(rank), str(world), output=output) for rank in range(world)
    ]
    assert all_end(ranks, 200) == [0] * world, output.read_text()[-8000:]
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(world)]
    plain = json.loads(json.dumps([plain_batches(folder, rank, world) for rank in range(world)]))
    waits = {"as dealt": 0, "exchanged": 0}
    assert len(plain[0]) > 5
    assert all(one["state"] == found[0]["state"] for one in found)
    # Rows have one length, so squares alone put them in the same order as ``cost=64``.
    assert all(one["by columns"] == one["batches"][:3] for one in found)
    for number in range(len(plain[0])):
        before = [plain[rank][number] for rank in range(world)]
        after = [found[rank]["batches"][number] for rank in range(world)]
        assert [len(rows) for rows in after] == [len(rows) for rows in before]
        flat = [row for rows in before for row in rows]
        costs = np.array([dearness(row) for row in flat])
        shares = [len(rows) for rows in before]
        assert after == [[flat[pack] for pack in rank] for rank in exchange(costs, shares)]
        if len(set(shares)) == 1:
            each = costs.reshape(world, -1)
            waits["as dealt"] += int(each.max(axis=0).sum())
            waits["exchanged"] += int(np.array([[dearness(row) for row in rows] for rows in after]).max(axis=0).sum())
        for rank in range(world):
            tokens, labels, longest, names = found[rank]["counts"][number]
            rows = after[rank]
            assert tokens == sum(document >= 0 for row in rows for document in row[3])
            assert labels == sum(label != -100 for row in rows for label in row[1])
            assert "costs" not in names
            assert longest <= LENGTH
    assert all(len(one["batches"]) == len(plain[0]) > 5 for one in found)
    assert waits["exchanged"] < waits["as dealt"]
    ramped = json.loads(json.dumps([plain_batches(folder, rank, world, RAMP) for rank in range(world)]))
    for number, size in enumerate([4, 4, 16, 16, 8, 8, 8]):
        flat = [row for rank in range(world) for row in ramped[rank][number]]
        assert len(flat) == size
        dealt = exchange(np.array([dearness(row) for row in flat]), [size // world] * world)
        assert [one["ramp"][number] for one in found] == [[flat[pack] for pack in rank] for rank in dealt]
    assert all("is gone, left its loop, or asked" in one["left"] for one in found[1:])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"balance": "global"}, "balance: expected one of local, exchange"),
        ({"cost": 5}, 'add balance="local"'),
        ({"balance": "local", "cost": 0}, "cost: expected an integer"),
        ({"balance": "exchange", "collate_fn": list}, "with a collate_fn"),
    ],
)
def test_choices_that_cannot_work(folder: Path, options: dict[str, Any], words: str) -> None:
    packed = Packed(StreamingDataset(folder), LENGTH)
    mesh = DeviceMesh.from_sizes(dp_size=2, rank=0)
    with pytest.raises(ConfigError, match=words):
        DataLoader(packed, **{"global_batch_size": 16, "device_mesh": mesh, **options})


@pytest.mark.parametrize("make", [StreamingDataset, lambda _: [1, 2, 3]])
def test_what_is_not_packed_is_not_balanced(folder: Path, make: Any) -> None:
    with pytest.raises(ConfigError, match=r"balance(='local')?: expected a Packed\(…\), or a Mixture of them, got a "):
        DataLoader(make(folder), 2, balance="local")


def test_exchange_needs_a_process_group(folder: Path) -> None:
    loader = loader_of(str(folder), DeviceMesh.from_sizes(dp_size=2, rank=0), balance="exchange")
    with loader, pytest.raises(ConfigError, match=r'balance="exchange" needs torch.distributed'):
        next(iter(loader))


@pytest.mark.thorough
def test_one_rank_that_exchanges_puts_packs_in_order(folder: Path) -> None:
    assert batches_of(folder, 0, 1, balance="exchange") == batches_of(folder, 0, 1, balance="local")


def test_a_cost_function_gets_lengths_of_pieces(folder: Path) -> None:
    packed = Packed(StreamingDataset(folder, seed=3), LENGTH)
    options: dict[str, Any] = {"device_mesh": DeviceMesh.from_sizes(dp_size=1, rank=0), "balance": "local"}
    with DataLoader(packed, batch_size=8, cost=len, **options) as loader:
        counts = [[len(keys) for keys in batch["__key__"]] for batch in loader]
    assert all(one == sorted(one, reverse=True) for one in counts)
    loader = DataLoader(packed, batch_size=8, cost=lambda _: "much", **options)  # type: ignore[arg-type,return-value]
    with loader, pytest.raises(ConfigError, match="cost: expected a finite number for a pack whose documents"):
        next(iter(loader))
