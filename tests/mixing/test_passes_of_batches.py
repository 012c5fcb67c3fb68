"""Passes of whole batches, with quotas that are no whole batches: an independent model of what waits, and worlds."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streaming.order.mixing.forecast import drawn_before
from streaming.order.mixing.passes import Sources
from streaming.order.mixing.quotas import BatchPasses, batches_by
from streaming.order.plan.order import OrderSettings
from streaming.order.plan.plan import Plan
from tests.support.models.mixed_plans import global_batches, unhurried

CHUNK = 7
BUCKETS = {"448": 101, "512": 227, "640": 182, "768": 113, "896": 105}  # a set of which 60 packs once waited
TABLES = [
    (BUCKETS, 8), ({"a": 9, "b": 9, "c": 9, "d": 15}, 8), ({"a": 8, "b": 12, "c": 13}, 8), ({"a": 16, "b": 24}, 8),
    ({"a": 5}, 4), ({"a": 5, "b": 100}, 4), (dict.fromkeys("abcdefghij", 13), 12), ({"a": 3, "b": 2, "c": 2}, 1),
]  # fmt: skip


def passes_of(sizes: dict[str, int], batch: int, *, lanes: int = 1, seed: int = 3) -> BatchPasses:
    chunks = {name: [CHUNK] * (size // CHUNK) + [size % CHUNK] for name, size in sizes.items()}
    return BatchPasses(Sources(chunks, OrderSettings(seed=seed, lanes=lanes, window=4)), batch_size=batch)


def plan_of(orders: BatchPasses, batch: int, epoch: int, *, world: int = 1, start: int = 0) -> Plan:
    return Plan(
        orders.chunk_samples, orders.settings, orders=orders, global_batch_size=batch, dp_world_size=world,
        last_batch="drop", epoch=epoch, start=start,
    )  # fmt: skip


@unhurried
@given(st.data(), st.integers(1, 64), st.integers(0, 10**9))
def test_batches_follow_the_shares_and_never_fall(data: st.DataObject, batch: int, number: int) -> None:
    """Against fractions, for any kinds of at least a batch, at any pass and the next one."""
    sizes = data.draw(st.dictionaries(st.text("abc", min_size=1), st.integers(batch, 3 * batch) | st.just(0)))
    total = sum(sizes.values())
    if not total:
        return
    steps = -(-total // batch)
    now, then = (batches_by(sizes, at * steps) for at in (number, number + 1))
    for counts, at in ((now, number), (then, number + 1)):
        assert sum(counts.values()) == at * steps
        assert all(abs(counts[name] - at * steps * Fraction(size, total)) < 1 for name, size in sizes.items())
        assert all(at * size - counts[name] * batch < batch for name, size in sizes.items())
    assert all(then[name] >= now[name] for name in sizes)


@pytest.mark.parametrize(("sizes", "batch"), TABLES)
def test_less_than_a_batch_of_each_source_waits_after_any_epoch(sizes: dict[str, int], batch: int) -> None:
    orders, epochs = passes_of(sizes, batch), 12
    drawn, times = Counter[str](), Counter[tuple[int, int]]()
    steps = -(-sum(sizes.values()) // batch)
    for epoch in range(epochs):
        batches = global_batches(plan_of(orders, batch, epoch))
        assert len(batches) == steps
        for rows in batches:
            chunks = np.array([chunk for _, chunk, _ in rows])
            (source,) = set(orders.sources.source_of(chunks).tolist())
            drawn[orders.sources.names[source]] += len(rows)
            times.update((chunk, offset) for _, chunk, offset in rows)
        more = (epoch + 1) * (steps * batch - sum(sizes.values()))
        for name, size in sizes.items():
            waiting = (epoch + 1) * size - drawn[name]
            assert -more - batch < waiting < batch
        assert drawn_before(orders, (epoch + 1) * steps * batch) == drawn
    for number, name in enumerate(orders.sources.names):  # each source is read pass after pass
        counts = [count for (chunk, _), count in times.items() if orders.sources.source_of(np.array([chunk])) == number]
        assert len(counts) == sizes[name]
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(("sizes", "batch"), TABLES)
def test_any_epoch_is_the_same_on_every_world_and_from_any_batch(sizes: dict[str, int], batch: int) -> None:
    lanes = max(n for n in (1, 2, 4) if batch % n == 0)
    for epoch in (0, 5, 10**6):
        whole = global_batches(plan_of(passes_of(sizes, batch, lanes=lanes), batch, epoch))
        for world in (n for n in (2, 3, 4) if batch % n == 0):
            at = (epoch + world) % len(whole)
            rest = plan_of(passes_of(sizes, batch, lanes=lanes), batch, epoch, world=world, start=at * batch)
            assert global_batches(rest) == whole[at:]


def test_whole_quotas_are_the_same_in_every_pass() -> None:
    sizes = {"a": 16, "b": 24}
    drawn = [passes_of(sizes, 8).drawn_by(number) for number in range(9)]
    assert all({name: stop[name] - start[name] for name in sizes} == sizes for start, stop in pairwise(drawn))
