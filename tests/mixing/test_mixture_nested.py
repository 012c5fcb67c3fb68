"""Properties of mixtures of mixtures, whatever their nesting: P1 to P5 and the shares, by the plan alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from infra import DeviceMesh
from streaming import Mixture, ShuffleConfig, StreamingDataset
from streaming.order.plan.ledger import Ledger
from streaming.order.plan.plan import Plan
from tests.support.sets.data_sets import write_set

SHARDS = {"web": (41, 7, 23), "code": (20, 3), "math": (5,), "chat": (11, 1)}
LARGEST = 4  # samples of a chunk


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, StreamingDataset]:
    root = tmp_path_factory.mktemp("sets")
    return {
        name: StreamingDataset(write_set(root / name, sizes, chunk_samples=LARGEST).url)
        for name, sizes in SHARDS.items()
    }


@dataclass(frozen=True)
class Node:
    """A set, or a mixture of nodes by ``numbers``: by size (""), "repeats" or "weights"."""

    leaf: str = ""
    kind: str = ""
    children: Mapping[str, Node] | None = None
    numbers: Mapping[str, int] | None = None

    def made(self, sets: Mapping[str, StreamingDataset], **options: Any) -> Any:
        if self.children is None:
            return sets[self.leaf]
        sources = {name: child.made(sets) for name, child in self.children.items()}
        chosen = {self.kind: {name: number / 4 for name, number in (self.numbers or {}).items()}} if self.kind else {}
        return Mixture(sources, **chosen, **options)

    def quotas(self, name: str = "") -> dict[str, int]:
        """Samples of each leaf in a pass; of mixtures that end alone."""
        if self.children is None:
            return {name: sum(SHARDS[self.leaf])}
        times = {
            each: Fraction(number, 4) for each, number in (self.numbers or dict.fromkeys(self.children, 4)).items()
        }
        return {
            leaf: int(times[each] * count + Fraction(1, 2))
            for each, child in self.children.items()
            for leaf, count in child.quotas(f"{name}/{each}" if name else each).items()
        }

    def shares(self, name: str = "") -> dict[str, Fraction]:
        """Share of each leaf."""
        if self.kind != "weights":
            quotas = self.quotas(name)
            return {leaf: Fraction(count, sum(quotas.values())) for leaf, count in quotas.items()}
        numbers = self.numbers or {}
        return {
            leaf: Fraction(numbers[each], sum(numbers.values())) * share
            for each, child in (self.children or {}).items()
            for leaf, share in child.shares(f"{name}/{each}" if name else each).items()
        }


@st.composite
def nodes(draw: st.DrawFn, *, endless: bool, depth: int = 3) -> Node:
    """A mixture; within one that ends all end."""
    children = {}
    for name in draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True)):
        is_leaf = depth == 1 or draw(st.booleans())
        leaf = Node(leaf=draw(st.sampled_from(sorted(SHARDS))))
        children[name] = leaf if is_leaf else draw(nodes(endless=endless and draw(st.booleans()), depth=depth - 1))
    kind = "weights" if endless else draw(st.sampled_from(["", "repeats"]))
    numbers = {name: draw(st.integers(1, 9)) for name in children} if kind else None
    node = Node(kind=kind, children=children, numbers=numbers)
    assume(endless or any(node.quotas().values()))  # quarters of quarters of a few samples may come to none
    return node


def plan_of(mix: Mixture, size: int, ranks: int, *, ledger: Ledger | None = None, **options: Any) -> Plan:
    order = mix.source.order_settings(size)
    orders = mix.source.orders(order, mix.source.begun(size) if ledger is None else ledger)
    return Plan(mix.source.chunk_samples, order, global_batch_size=size, dp_world_size=ranks, orders=orders, **options)


def rows_of(plan: Plan, rank: int) -> list[list[tuple[int, int, int]]]:
    """(position, chunk, offset) of the valid rows of a rank, batch by batch."""
    found = plan.rank_batches(0, plan.num_batches, rank)
    rows = list(zip(found.positions.tolist(), found.chunk_ids.tolist(), found.offsets.tolist(), strict=True))
    return [
        [rows[at] for at in range(start, stop) if found.valid[at]]
        for start, stop in zip(found.row_splits[:-1].tolist(), found.row_splits[1:].tolist(), strict=True)
    ]


def batches_of(plan: Plan) -> list[list[tuple[int, int, int]]]:
    """Of all ranks together; each has as many batches (P2)."""
    ranks = [rows_of(plan, rank) for rank in range(plan.dp_world_size)]
    assert {len(each) for each in ranks} == {plan.num_batches}
    return [sorted(row for each in ranks for row in each[k]) for k in range(plan.num_batches)]


worlds = {
    "size": st.integers(1, 24), "ranks": st.integers(1, 5), "others": st.integers(1, 5), "stop": st.integers(0, 6),
    "lanes": st.sampled_from([None, 1, 3, 8]), "seed": st.integers(0, 2**64 - 1),
}  # fmt: skip
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def check_worlds(mix: Mixture, size: int, ranks: int, others: int, stop: int, epoch_size: int | None) -> list[Any]:
    """P3 to P5: the same batches on any world, stopped anywhere, on all replicas; returns them."""
    options: dict[str, Any] = {"last_batch": "partial", "epoch_size": epoch_size}
    whole = batches_of(plan_of(mix, size, 1, **options))
    assert batches_of(plan_of(mix, size, ranks, **options)) == whole
    stop = min(stop, len(whole) - 1)
    saved = Ledger.from_list(json.loads(json.dumps(mix.source.begun(size).to_list())))
    went_on = mix.source.drawing.resumed(saved, mix.source.order_settings(size), stop * size)
    assert went_on == mix.source.begun(size)
    assert batches_of(plan_of(mix, size, others, ledger=went_on, start=stop * size, **options)) == whole[stop:]
    # Ranks along other axes than data have the data rank of one share.
    shares = [DeviceMesh.from_sizes(dp_size=ranks, tp_size=2, rank=rank, environ={}) for rank in range(2 * ranks)]
    assert Counter(mesh.data_rank for mesh in shares) == dict.fromkeys(range(ranks), 2)
    return whole


@unhurried
@given(node=nodes(endless=False), dealt=st.sampled_from(["chunks", "exact"]), **worlds)
def test_nested_mixtures_that_end_give_each_sample_as_often_as_they_say(
    sets: dict[str, StreamingDataset], node: Node, dealt: Any, size: int, ranks: int, others: int, stop: int,
    lanes: int | None, seed: int,
) -> None:  # fmt: skip
    mix = node.made(sets, seed=seed, quotas=dealt, shuffle=ShuffleConfig(lanes=lanes))
    quotas = node.quotas()
    assert len(mix) == sum(quotas.values())
    whole = check_worlds(mix, size, ranks, others, stop, None)
    got = Counter((chunk, offset) for batch in whole for _, chunk, offset in batch)
    of = mix.source.source_of(np.array([chunk for chunk, _ in got]))
    for number, name in enumerate(mix.names):
        counts = [count for (sample, count), at in zip(got.items(), of.tolist(), strict=True) if at == number]
        times, rest = divmod(quotas[name], mix.sizes[name])
        assert sum(counts) == quotas[name]
        expected = [times + 1] * rest + [times] * (mix.sizes[name] - rest)
        assert sorted(counts, reverse=True) == [count for count in expected if count]  # P1


@unhurried
@given(node=nodes(endless=True), quotas=st.sampled_from(["chunks", "exact"]), **worlds)
def test_nested_mixtures_without_end_hold_the_product_of_their_shares(
    sets: dict[str, StreamingDataset], node: Node, quotas: Any, size: int, ranks: int, others: int, stop: int,
    lanes: int | None, seed: int,
) -> None:  # fmt: skip
    mix = node.made(sets, seed=seed, quotas=quotas, shuffle=ShuffleConfig(lanes=lanes))
    shares, count = node.shares(), 40 * size
    assert set(shares) == set(mix.names)
    whole = check_worlds(mix, size, ranks, others, stop, count)
    drawn = Counter(mix.source.source_of(np.array([chunk for batch in whole for _, chunk, _ in batch])).tolist())
    width = mix.source.order_settings(size).lanes
    for number, name in enumerate(mix.names):
        # In each lane: one chunk, and its share of one of each source; or a sample for each level of the tree.
        strayed = LARGEST * (1 + shares[name] * len(shares)) if quotas == "chunks" else len(shares)
        window = mix.source.order_settings(size).window if quotas == "chunks" else 0
        assert abs(drawn[number] - shares[name] * count) <= width * (strayed + window + 1)
