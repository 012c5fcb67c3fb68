"""The least ``memory_limit`` that is accepted suffices in every epoch, on every rank, after every resume.

Chunks are uneven, so each order needs another amount at once. Nothing is read here: what must be in memory for a batch
is counted from the plan, as the engine holds it in turns (``ChunksInTurns``). ``tests/engine/test_turns.py`` reads.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streaming.common.arrays import sums
from streaming.errors import MemoryLimitError
from streaming.order.mixing.exact import BatchLanes, ExactLanes
from streaming.order.mixing.lanes import MixedLanes
from streaming.order.mixing.passes import MixedPasses, Sources, Weights
from streaming.order.mixing.quotas import BatchPasses, ExactPasses
from streaming.order.plan import memory as budget
from streaming.order.plan.demand import ChunkMemory
from streaming.order.plan.memory import Budget
from streaming.order.plan.order import EpochOrders, Orders, OrderSettings, default_lanes, default_window
from streaming.order.plan.plan import Plan
from streaming.run.engine.units import ChunksInTurns
from streaming.shards.fetch.read import FetchRange
from streaming.types import Int64Array

NUM_SETS, NUM_EPOCHS, GROUP = 200, 30, 20
FEW_SETS, FEW_EPOCHS = 12, 6
WORLDS = (1, 2, 3, 4, 8)
ENDLESS_ROWS = 1_500
"""Rows that are read of an order without an end, from each start on."""


class UnevenSet:
    """Chunks of which only the sizes are known. A record of every sample lies in its chunk, one behind the other.

    Args:
        sample_bytes: int64 [n] of each chunk, the size of each sample.
        has_slices: Samples can be read without the rest of their chunk; packs cannot.
    """

    in_place = None

    def __init__(self, sample_bytes: list[Int64Array], *, has_slices: bool) -> None:
        self._starts = [sums(sizes) for sizes in sample_bytes]
        self._has_slices = has_slices
        self.chunk_samples = np.array([len(sizes) for sizes in sample_bytes], np.int64)
        self.chunk_bytes = np.array([int(starts[-1]) for starts in self._starts], np.int64)

    def unit_bytes(self, chunk_ids: Int64Array) -> Int64Array:
        return self.chunk_bytes[chunk_ids]

    @property
    def slices(self) -> UnevenSet | None:
        return self if self._has_slices else None

    def span_borders(self, room_bytes: Int64Array) -> budget.Spans:
        bases = sums(room_bytes).tolist()
        begins = [base + starts[:-1] for base, starts in zip(bases, self._starts, strict=False)]
        return np.arange(int(self.chunk_samples.sum())), np.concatenate(begins)

    def memory_cure(self, lanes: int, room_bytes: int, *, resumed: bool = False) -> str:
        return ""

    def samples_of(self, chunk_ids: Int64Array, offsets: Int64Array) -> Int64Array:
        return offsets.copy()

    def chunk(self, chunk_id: int) -> FetchRange:
        return self.slice(chunk_id, 0, int(self.chunk_samples[chunk_id]))

    def slice(self, chunk_id: int, first: int, stop: int) -> FetchRange:
        starts = self._starts[chunk_id]
        return FetchRange(
            url=str(chunk_id), byte_start=int(starts[first]), byte_end=int(starts[stop]), first_sample=first,
            num_samples=stop - first, crc32c=None, shard_bytes=int(starts[-1]),
        )  # fmt: skip


@dataclass(frozen=True)
class Case:
    chunks: UnevenSet
    orders: Orders
    world: int
    batch_size: int
    epoch_size: int | None

    def plan(self, epoch: int, start: int = 0) -> Plan:
        of = {"epoch": epoch, "epoch_size": self.epoch_size}
        if self.orders.is_endless:
            of = {"most_batches": ENDLESS_ROWS // self.batch_size}
            start = epoch * ENDLESS_ROWS + start
        return Plan(
            self.chunks.chunk_samples, self.orders.settings, global_batch_size=self.batch_size,
            dp_world_size=self.world, last_batch="partial", orders=self.orders, start=start, **of,
        )  # fmt: skip

    def rooms(self, limit_bytes: int) -> ChunkMemory:
        return ChunkMemory(self.chunks, Budget.of(limit_bytes, packs=self.chunks.slices is None))


def mixed(make: Callable[[Sources, dict[str, int], int], Orders]) -> Callable[[Int64Array, OrderSettings, int], Orders]:
    """Return orders of three sources, as large as they come."""

    def orders(samples: Int64Array, settings: OrderSettings, batch_size: int) -> Orders:
        parts = dict(zip("abc", np.array_split(samples, 3), strict=True))
        sizes = {name: max(int(part.sum()) // batch_size, 1) * batch_size for name, part in parts.items()}
        return make(Sources(parts, settings), sizes, batch_size)

    return orders


def weighed(sizes: dict[str, int]) -> list[Weights]:
    other = {name: size * (3 if name == "a" else 1) for name, size in sizes.items()}
    return [Weights(start=0, weights=sizes), Weights(start=700, weights=other)]


ORDERS: dict[str, Callable[[Int64Array, OrderSettings, int], Orders]] = {
    "set": lambda samples, settings, _: EpochOrders(samples, settings),
    "packs": lambda samples, settings, _: EpochOrders(samples, settings),
    "lanes": lambda samples, settings, _: EpochOrders(samples, replace(settings, scope="lane")),
    "passes": mixed(lambda sources, sizes, _: MixedPasses(sources, quotas=sizes)),
    "exact passes": mixed(lambda sources, sizes, _: ExactPasses(sources, quotas=sizes)),
    "endless": mixed(lambda sources, sizes, _: MixedLanes(sources, weighed(sizes))),
    "exact": mixed(lambda sources, sizes, _: ExactLanes(sources, weighed(sizes))),
    "passes of one source": mixed(lambda sources, sizes, size: BatchPasses(sources, quotas=sizes, batch_size=size)),
    "passes of kinds": mixed(
        lambda sources, _, size: BatchPasses(
            sources, quotas={name: max(one, size) for name, one in sources.sizes.items()}, batch_size=size
        )
    ),
    "batches of one source": mixed(lambda sources, sizes, size: BatchLanes(sources, weighed(sizes), batch_size=size)),
    "packs, mixed": mixed(lambda sources, sizes, _: MixedPasses(sources, quotas=sizes)),
}


def drawn(number: int) -> Case:
    """Return a case: sets with a few giants, with sizes over three orders of magnitude, of large samples, …"""
    dice, of_sizes = random.Random(number), np.random.default_rng(number)
    kind = [*ORDERS][number % len(ORDERS)]
    world, per_rank = dice.choice(WORLDS), dice.choice((1, 2, 4, 8))
    num_chunks, mean = dice.randint(20, 120), dice.choice((4, 16, 30))
    counts = of_sizes.integers(1, 2 * mean, num_chunks)
    if dice.random() < 0.4:
        counts = np.maximum(of_sizes.lognormal(math.log(mean), 1, num_chunks).astype(np.int64), 1)
    scale = of_sizes.lognormal(math.log(100 << 10), dice.choice((0.1, 0.7, 1.5)), num_chunks)
    if dice.random() < 0.3:
        scale[of_sizes.choice(num_chunks, 3, replace=False)] *= 30
    spread = dice.choice((0.0, 1.0))
    samples = [
        np.maximum(one * of_sizes.lognormal(0, spread, count), 512).astype(np.int64)
        for one, count in zip(scale, counts.tolist(), strict=True)
    ]
    batch_size = world * per_rank
    settings = OrderSettings(
        seed=number,
        lanes=default_lanes(batch_size),
        window=dice.choice((0, mean, default_window(int(counts.sum()), num_chunks))),
    )
    orders = ORDERS[kind](counts, settings, batch_size)
    epoch_size = None
    if dice.random() < 0.25 and not orders.is_endless:
        epoch_size = max(int(counts.sum() * dice.choice((0.4, 1.3, 2.5))), batch_size)
    return Case(UnevenSet(samples, has_slices="packs" not in kind), orders, world, batch_size, epoch_size)


def needed_by_batch(case: Case, plan: Plan, dp_rank: int, rooms: ChunkMemory) -> dict[int, int]:
    """Return the memory for the units of each batch, held in turns; check that they hold the samples of the plan."""
    has_slices = case.chunks.slices is not None
    units = ChunksInTurns(
        plan, dp_rank, case.chunks, sizes=rooms.room_bytes, room_bytes=rooms.memory.chunks_bytes,
        slice_room=rooms.slice_room if has_slices else None,
    )  # fmt: skip
    held: dict[int, dict[Any, int]] = defaultdict(dict)
    of_batch: dict[int, set[int]] = defaultdict(set)
    last = 0
    for need in units.needs():
        assert need.first_batch >= last
        last, wanted = need.first_batch, units.wanted(need.unit)
        for batch in range(need.first_batch, need.last_batch + 1):
            held[batch][wanted.key] = rooms.slice_room(wanted.num_bytes)
            of_batch[batch].add(need.unit)
    block = units.block(0, plan.num_batches)
    rows = block.rows
    batches = np.repeat(np.arange(plan.num_batches), np.diff(rows.row_splits))
    for batch, unit in np.unique(np.stack([batches, block.units]), axis=1).T.tolist():
        assert unit in of_batch[batch]
    for unit in np.unique(block.units).tolist():
        wanted, here = units.wanted(unit), block.units == unit
        assert {wanted.url} == set(map(str, rows.chunk_ids[here].tolist()))
        assert (rows.offsets[here] == wanted.first_sample + wanted.lead + block.within[here]).all()
    return {batch: sum(found.values()) for batch, found in held.items()}


def played(case: Case, num_epochs: int) -> Iterator[tuple[int, int]]:
    """Yield the least limit's part for chunks, and what a rank needs at once, of the ranks in all epochs.

    Checks that the limit suffices for them.
    """
    first = case.plan(0)
    start = first.from_the_start()
    ranks = range(1 if case.orders.is_endless else case.world)
    live = max(start.live_bytes(case.rooms(1).room_bytes, rank) for rank in ranks)
    least = case.rooms(math.ceil(live / budget.CHUNKS_SHARE)).first_demand(first).least_bytes
    limit = math.ceil(least / budget.CHUNKS_SHARE)
    rooms = case.rooms(limit)
    rooms.check(first)
    with pytest.raises(MemoryLimitError):
        case.rooms(limit - 8192).check(first)
    dice = random.Random(num_epochs)
    for epoch in range(num_epochs):
        start = dice.randrange(first.num_samples if not case.orders.is_endless else ENDLESS_ROWS) if epoch % 3 else 0
        plan = case.plan(epoch, start)
        if not case.orders.is_endless:
            case.rooms(limit).check(plan, resumed=True)  # alike in every epoch and at every resume
        for dp_rank in {0, dice.randrange(case.world)}:
            live = plan.live_bytes(rooms.room_bytes, dp_rank)
            if plan.num_batches and (live > rooms.memory.chunks_bytes or case.orders.is_endless or epoch < 1):
                needed = needed_by_batch(case, plan, dp_rank, rooms)
                assert max(needed.values(), default=0) <= rooms.memory.chunks_bytes, (epoch, dp_rank)
            yield rooms.memory.chunks_bytes, live


@pytest.fixture(autouse=True)
def _nothing_is_kept_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "READ_AHEAD_BYTES", 0)


@given(
    counts=st.lists(st.integers(0, 6), min_size=3, max_size=40).filter(any),
    lanes=st.integers(1, 6), window=st.integers(0, 12), per_rank=st.integers(1, 12), ranks=st.integers(1, 4),
    epoch_size=st.none() | st.integers(30, 90), seed=st.integers(0, 9),
)  # fmt: skip
def test_no_batch_of_any_order_needs_more_than_the_bound(
    counts: list[int], lanes: int, window: int, per_rank: int, ranks: int, epoch_size: int | None, seed: int
) -> None:
    sizes = np.random.default_rng(seed).integers(1, 9, len(counts)) ** 2
    settings = OrderSettings(seed=seed, lanes=lanes, window=window)
    for epoch in range(3):
        plan = Plan(
            counts, settings, global_batch_size=per_rank * ranks, dp_world_size=ranks, last_batch="partial",
            epoch=epoch, epoch_size=epoch_size,
        )  # fmt: skip
        bound = budget.most_of_a_batch(plan, sizes)
        assert bound <= budget.most_of_rows(plan, sizes) <= sizes.sum()
        for rank in range(ranks):
            rows = plan.rank_batches(0, plan.num_batches, rank)
            for low, high in pairwise(rows.row_splits.tolist()):
                assert sizes[np.unique(rows.chunk_ids[low:high])].sum() <= bound


@pytest.mark.parametrize(
    ("lanes", "window", "expected"),
    [(1, 0, 4), (4, 0, 10), (4, 8, 13), (4, 16, 17), (1, 4096, 32)],
)
def test_the_bound_of_equal_chunks_is_what_lanes_and_window_touch(lanes: int, window: int, expected: int) -> None:
    """Of chunks of 16 samples, 32 rows a batch: in each lane two at the ends, and what lies between them."""
    settings = OrderSettings(seed=1, lanes=lanes, window=window)
    plan = Plan([16] * 100, settings, global_batch_size=32, dp_world_size=1)
    assert budget.most_of_a_batch(plan, np.ones(100, np.int64)) == expected


@pytest.mark.parametrize("number", range(FEW_SETS))
def test_the_least_limit_that_is_accepted_suffices(number: int) -> None:
    assert len(list(played(drawn(number), FEW_EPOCHS))) >= FEW_EPOCHS


@pytest.mark.thorough
@pytest.mark.parametrize("first", range(0, NUM_SETS, GROUP))
def test_of_many_sets_it_suffices_for_a_long_run(first: int) -> None:
    """Most need more in a later epoch, or on another rank, than the limit leaves; and it is not much above that."""
    found = [list(played(drawn(number), NUM_EPOCHS)) for number in range(first, first + GROUP)]
    ratios = [one[0][0] / max(live for _, live in one) for one in found]
    print([round(ratio, 3) for ratio in ratios])
    assert sum(ratio < 1 for ratio in ratios) > GROUP // 2
    assert max(ratios) < 3
