"""Exact quotas: shares at every row against big integers, each source's own order, changes, one source a batch."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streaming.errors import ConfigError, StateError
from streaming.order.mixing.exact import BatchLanes, ExactLanes
from streaming.order.mixing.forecast import drawn_before
from streaming.order.mixing.passes import Sources, Weights
from streaming.order.mixing.quotas import BatchPasses, ExactPasses, QuotaTree
from streaming.order.mixing.shares import BatchShares, ShareTree
from streaming.order.mixing.source_lanes import SourceLanes
from streaming.order.plan.order import OrderSettings
from streaming.order.plan.plan import Plan
from tests.support.code.folders import GOLDEN
from tests.support.models.mixed_plans import Case, cases, global_batches, oracle, unhurried, weights_

FIVE = {"a": 0.41, "b": 0.3, "c": 0.17, "d": 0.1, "e": 0.02}


def exact(case: Case) -> ExactLanes:
    """Each source on its own."""
    orders = replace(case, even={}).orders()
    assert isinstance(orders, ExactLanes)
    return orders


def tree_of(orders: ExactLanes) -> ShareTree:
    shares = orders._shares
    return shares._tree if isinstance(shares, BatchShares) else shares  # type: ignore[return-value]


@unhurried
@given(cases(endless=True, dealt="samples"), st.integers(0, 2000) | st.integers(0, 10**12))
def test_what_was_drawn_is_exact_at_every_row(case: Case, row: int) -> None:
    """Against Python's integers: in each lane, over all of them, and one row further."""
    orders, lanes = exact(case), case.settings.lanes
    tree, expected = tree_of(orders), np.zeros(len(case.sources), np.int64)
    for lane in range(lanes):
        place = row // lanes + (lane < row % lanes)
        counts = oracle(tree, lane, place)
        assert tree.counts(lane, place).tolist() == counts
        expected += np.array(counts)
    counted = drawn_before(orders, row)
    assert list(counted.values()) == expected.tolist()
    chunk_ids, _ = orders.lane_samples(row % lanes, row // lanes, row // lanes + 1)
    drawn = orders.sources.names[int(orders.sources.source_of(chunk_ids)[0])]
    assert drawn_before(orders, row + 1) == {**counted, drawn: counted[drawn] + 1}


@pytest.mark.thorough
@unhurried
@given(st.integers(0, 10**12), st.integers(0, 2**64 - 1))
def test_counts_stay_near_their_share_however_long_it_runs(row: int, seed: int) -> None:
    """Of 64 lanes together, where chance strays by hundreds of thousands."""
    sources = Sources({name: [7] * 9 for name in FIVE}, OrderSettings(seed=seed, lanes=64, window=8))
    orders = ExactLanes(sources, [Weights(start=0, weights=FIVE)])
    tree = tree_of(orders)
    for number, (name, count) in enumerate(drawn_before(orders, row).items()):
        share = Fraction(1)  # the one that is dealt: of each node in units of 2**-32
        for node, side in tree.path(number):
            left = Fraction(int(tree.shares[node, 0]), 2**32)
            share *= 1 - left if side else left
        assert abs(float(share) - FIVE[name]) < 2**-30
        assert abs(count - share * row) <= 12
        assert all(abs(int(tree.counts(lane, row)[number]) - share * row) < len(tree.path(number)) for lane in range(3))


@pytest.mark.thorough
@unhurried
@given(cases(endless=True), st.integers(0, 3))
def test_a_source_gives_its_samples_in_its_own_order(case: Case, first: int) -> None:
    """Whatever the others are: those of its draws, each moved by less than its window, and never to another pass."""
    case = replace(case, dealt="samples", even={})
    orders = exact(case)
    for lane in {0, case.settings.lanes - 1}:
        sources, draws = orders._shares.draws(lane, first, first + 150)
        chunk_ids, offsets = orders.lane_samples(lane, first, first + 150)
        for number, name in enumerate(orders.sources.names):
            rows = sources == number
            got = list(zip(chunk_ids[rows].tolist(), offsets[rows].tolist(), strict=True))
            start, stop = (int(draws[rows][0]), int(draws[rows][-1]) + 1) if got else (0, 0)
            own = orders._orders[name]
            run = sum(case.sources[name]) // case.settings.lanes
            most = min(case.settings.window, 2 * orders.sources.eras[name][0].mean_chunk, max(run, 1))
            assert own.settings.window == most
            lanes = SourceLanes(orders.sources.eras[name], case.settings, pieces=case.settings.lanes)
            laid = stream_of(lanes, lane, stop + most)
            passes = lanes.passes_at(lane, np.arange(stop + most))
            for number_of_pass in np.unique(passes[start:stop]).tolist():
                whole = np.flatnonzero(passes == number_of_pass)
                if len(whole) and start <= whole[0] and whole[-1] < stop:
                    of_pass = slice(int(whole[0]) - start, int(whole[-1]) + 1 - start)
                    assert Counter(got[of_pass]) == Counter(laid[whole[0] : whole[-1] + 1])
            assert not Counter(got) - Counter(laid[max(start - most, 0) :])
            assert not Counter(laid[start + most : max(stop - most, 0)]) - Counter(got)
            if not most:
                assert got == laid[start:stop]
            if first == 0 and got:  # the same whatever else is mixed
                alone = Sources({name: case.sources[name]}, case.settings)
                single = ExactLanes(alone, [Weights(start=0, weights={name: 1})])
                ids, places = single.lane_samples(lane, 0, stop)
                base = sum(len(table) for other, table in case.sources.items() if other_before(orders, other, name))
                assert list(zip((ids + base).tolist(), places.tolist(), strict=True)) == got


def other_before(orders: ExactLanes, other: str, name: str) -> bool:
    return orders.sources.names.index(other) < orders.sources.names.index(name)


def stream_of(lanes: SourceLanes, lane: int, stop: int) -> list[tuple[int, int]]:
    runs = lanes.runs(lane, lane + 1, 0, max(stop, 1))
    rows = zip(runs.chunk_ids.tolist(), runs.firsts.tolist(), runs.sizes.tolist(), strict=True)
    return [(chunk, first + k) for chunk, first, size in rows for k in range(size)][:stop]


@pytest.mark.thorough
@unhurried
@given(cases(endless=True, dealt="batches"))
def test_each_global_batch_is_of_one_source(case: Case) -> None:
    size = case.global_batch_size
    case = replace(case, epoch_size=20 * size, start=0, last_batch="drop")
    orders, whole = exact(case), case.plan()
    starts = [-(-entry.start * case.settings.lanes // size) for entry in case.schedule]
    for number, batch in enumerate(global_batches(whole)):
        found = {int(source) for source in orders.sources.source_of(np.array([chunk for _, chunk, _ in batch]))}
        assert len(found) == 1
        acting = [e for e, start in zip(case.schedule, starts, strict=True) if start <= case.epoch * 20 + number][-1]
        assert acting.weights.get(orders.sources.names[found.pop()], 0) > 0
    # So many of each as one lane deals.
    counts = tree_of(orders).counts(0, 20 * case.epoch + 20) * size
    assert list(drawn_before(orders, (case.epoch + 1) * 20 * size).values()) == counts.tolist()


def test_lanes_that_do_not_divide_the_batch_have_no_batches_of_one_source() -> None:
    sources = Sources({"a": [5]}, OrderSettings(seed=1, lanes=4, window=6))
    with pytest.raises(ConfigError, match=r"4 lanes do not divide a global batch of 6.*lanes="):
        BatchLanes(sources, [Weights(start=0, weights={"a": 1})], batch_size=6)


@pytest.mark.thorough
@unhurried
@given(cases(endless=False), st.integers(0, 3), st.data())
def test_a_pass_that_ends_is_exact_at_every_row(case: Case, number: int, data: st.DataObject) -> None:
    """In each lane; over all lanes each source gives its quota to the sample, and its list goes on where it stopped."""
    orders = replace(case, dealt="samples").orders()
    assert isinstance(orders, ExactPasses)
    order, names, lanes = orders.of_pass(number), orders.sources.names, case.settings.lanes
    tree = order._shares
    assert isinstance(tree, QuotaTree)
    total = orders.samples_per_pass
    for lane in range(lanes):
        size = order.lane_size(lane)
        assert size == total // lanes + (lane < total % lanes)
        place = data.draw(st.integers(0, size))
        counts = tree.counts(lane, place).tolist()
        assert sum(counts) == place
        for source, (name, count) in enumerate(zip(names, counts, strict=True)):
            nodes = len(tree.path(source))
            assert abs(count - Fraction(place * orders.quotas[name], total)) < max(2 * nodes, 1)
        chunk_ids, _ = order.lane_samples(lane, place, size) if place < size else (np.empty(0, np.int64), None)
        rest = np.bincount(orders.sources.source_of(chunk_ids), minlength=len(names))
        assert (rest + counts).tolist() == tree.counts(lane, size).tolist()
    whole = drawn_before(orders, (number + 1) * total)
    assert whole == {name: (number + 1) * orders.quotas[name] for name in names}


@unhurried
@given(
    st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 40) | st.integers(0, 10**12), min_size=1).filter(
        lambda quotas: any(quotas.values())
    ),
    st.integers(1, 64), st.integers(0, 2**64 - 1), st.data(),
)  # fmt: skip
def test_quotas_are_dealt_to_the_sample_however_many_there_are(
    quotas: dict[str, int], lanes: int, seed: int, data: st.DataObject
) -> None:
    tree, total = QuotaTree(quotas, lanes=lanes, seed=seed), sum(quotas.values())
    assert tree.sizes.sum(axis=1).tolist() == list(quotas.values())
    assert tree.sizes.sum(axis=0).tolist() == [total // lanes + (lane < total % lanes) for lane in range(lanes)]
    lane = data.draw(st.integers(0, lanes - 1))
    size = int(tree.sizes[:, lane].sum())
    assert tree.counts(lane, size).tolist() == tree.sizes[:, lane].tolist()
    start = data.draw(st.integers(0, size) | st.just(max(size - 30, 0)))
    counts, drift = tree.counts(lane, start), Fraction(start, 2**32)
    for source, (name, count) in enumerate(zip(tree.names, counts.tolist(), strict=True)):
        depth = len(tree.path(source))
        assert abs(count - Fraction(start * quotas[name], total)) < max(depth, 1) * (2 + drift)
    stop = min(start + 30, size)
    sources, draws = tree.draws(lane, start, stop)
    for place, source, draw in zip(range(start, stop), sources.tolist(), draws.tolist(), strict=True):
        assert draw == counts[source]
        assert tree.places(source, np.array([lane]), np.array([draw])).tolist() == [place]
        counts[source] += 1
    assert counts.tolist() == tree.counts(lane, stop).tolist()


@pytest.mark.thorough
@unhurried
@given(st.integers(0, 10**6), st.integers(0, 2**64 - 1))
def test_lanes_together_stay_near_their_share_in_a_pass_that_ends(row: int, seed: int) -> None:
    quotas = {name: round(share * 10**6) for name, share in FIVE.items()}
    tree = QuotaTree(quotas, lanes=64, seed=seed)
    counts = np.sum([tree.counts(lane, row // 64 + (lane < row % 64)) for lane in range(64)], axis=0)
    assert all(abs(int(count) - FIVE[name] * row) <= 12 for name, count in zip(quotas, counts, strict=True))


@pytest.mark.thorough
@unhurried
@given(cases(endless=False, dealt="batches"))
def test_each_global_batch_of_a_pass_that_ends_is_of_one_source(case: Case) -> None:
    size = case.global_batch_size
    orders, plan = case.orders(), replace(case, epoch_size=None, start=0).plan()
    assert isinstance(orders, ExactPasses)
    of = [
        {int(source) for source in orders.sources.source_of(np.array([chunk for _, chunk, _ in batch]))}
        for batch in global_batches(plan)
    ]
    counts = Counter(orders.sources.names[one] for (one,) in of)
    assert counts == {name: quota // size for name, quota in orders.quotas.items() if quota}
    order, again = orders.of_pass(0), orders.under(orders.settings).of_pass(0)
    stop = min(2 * size // case.settings.lanes, order.lane_size(0))
    found = order.lane_samples(0, 0, stop)
    assert [column.tolist() for column in again.lane_samples(0, 0, stop)] == [column.tolist() for column in found]
    for place, (chunk, offset) in enumerate(zip(*(column.tolist() for column in found), strict=True)):
        assert (0, place) in order.find(chunk, offset, 0, stop)


def test_quotas_of_batches_hold_a_batch() -> None:
    sources = Sources({"a": [9], "b": [8]}, OrderSettings(seed=1, lanes=2, window=6))
    with pytest.raises(ConfigError, match=r"at least a batch of 10 samples of each source, got .*'a': 9"):
        BatchPasses(sources, quotas={"a": 9, "b": 16}, batch_size=10)
    with pytest.raises(ConfigError, match=r"2 lanes do not divide a global batch of 3.*lanes="):
        BatchPasses(sources, quotas={"a": 9, "b": 6}, batch_size=3)


@pytest.mark.thorough
@unhurried
@given(cases(endless=True), st.booleans(), st.data())
def test_appended_weights_are_those_that_were_there_from_the_start(
    case: Case, by_batch: bool, data: st.DataObject
) -> None:
    """From the frontier on, behind all that a plan looked at; also with a source that has no share until then."""
    size = case.settings.lanes * 3
    case = replace(case, dealt="batches" if by_batch else "samples", global_batch_size=size, epoch_size=40 * size)
    case = replace(case, epoch=0, start=0, schedule=case.schedule[:1], last_batch="drop")
    orders = case.orders()
    assert isinstance(orders, ExactLanes)
    plan = Plan(
        orders.chunk_samples, case.settings, orders=orders, global_batch_size=size, dp_world_size=1,
        epoch_size=40 * size,
    )  # fmt: skip
    plan.__dict__["stretch_batches"] = 4
    looked_at = data.draw(st.integers(0, 9))
    stretches = plan.intervals_by_pass(0)
    told = [next(stretches) for _ in range(looked_at)]
    assert orders.frontier == 3 * 4 * looked_at  # no further than the stretches
    later = Weights(start=orders.frontier, weights=data.draw(weights_(list(case.sources))))
    if looked_at:
        with pytest.raises(ConfigError, match=f"planned up to {orders.frontier}"):
            orders.append(replace(later, start=orders.frontier - 1))
    orders.append(later)
    whole = replace(case, schedule=[*case.schedule, later]).plan(dp_world_size=1)
    expected = whole.rank_batches(0, 40, 0)
    got = plan.rank_batches(0, 40, 0)
    assert (got.chunk_ids.tolist(), got.offsets.tolist()) == (expected.chunk_ids.tolist(), expected.offsets.tolist())
    # What was told before the change, and what is told behind it, cover every use.
    told += list(stretches)
    batch = np.repeat(np.arange(40), size)
    chunks, at = np.unique([got.chunk_ids, batch], axis=1)[:, :, None]
    held = np.zeros(len(chunks), bool)
    for live in told:
        held |= ((live.chunk_ids == chunks) & (live.first_batches <= at) & (live.last_batches >= at)).any(1)
    assert held.all()


def test_chunks_of_a_rare_source_are_held_from_stretch_to_stretch() -> None:
    """One interval over all stretches, with one batch in common; not where the source has no weight any more."""
    sources = Sources({"web": [8] * 50, "rare": [40]}, OrderSettings(seed=1, lanes=2, window=0))
    orders = ExactLanes(
        sources, [Weights(start=0, weights={"web": 99, "rare": 1}), Weights(start=2048, weights={"web": 1})]
    )
    plan = Plan(
        orders.chunk_samples, orders.settings, orders=orders, global_batch_size=8, dp_world_size=1, epoch_size=8192
    )
    plan.__dict__["stretch_batches"] = 64
    parts = list(plan.intervals_by_pass(0))
    spans = [
        (int(live.first_batches[0]), int(live.last_batches[0]))
        for live in (replace(one, **rows_of(one, 50)) for one in parts)
        if len(live.chunk_ids)
    ]
    assert [last for _, last in spans[:-1]] == [64 * n for n in range(1, 8)]  # one batch into the next stretch
    assert [first for first, _ in spans[1:]] == [64 * n for n in range(1, 8)]
    joined = plan.chunk_intervals(0)
    assert int((joined.chunk_ids == 50).sum()) == 1
    assert spans[-1][1] <= 512  # the batch from which on it has no weight


def test_a_chunk_is_held_over_stretches_in_which_nothing_of_it_is_due() -> None:
    sources = Sources({"web": [8] * 50, "rare": [40]}, OrderSettings(seed=1, lanes=1, window=0))
    orders = ExactLanes(sources, [Weights(start=0, weights={"web": 999, "rare": 1})])
    plan = Plan(
        orders.chunk_samples, orders.settings, orders=orders, global_batch_size=8, dp_world_size=1, epoch_size=8192
    )
    plan.__dict__["stretch_batches"] = 16
    drawn = np.flatnonzero(orders.sources.source_of(orders.lane_samples(0, 0, 8192)[0])) // 8
    assert max(np.diff(drawn)) > 3 * 16
    live = plan.chunk_intervals(0)
    (row,) = np.flatnonzero(live.chunk_ids == 50)
    assert (live.first_batches[row], live.last_batches[row]) == (drawn[0], 8192 // 8 - 1)


def test_a_source_grows_behind_what_is_planned_in_any_lane() -> None:
    sources = Sources({"a": [3] * 40, "b": [2] * 8}, OrderSettings(seed=1, lanes=8, window=0))
    orders = ExactLanes(sources, [Weights(start=0, weights={"a": 3, "b": 1})])
    for place in range(1, 200):
        orders.settle(place)
        samples = 16 * orders.free_pass("b")
        for lane in range(8):
            assert -(-(samples - lane) // 8) >= tree_of(orders).counts(lane, place)[1]
    orders.settle(10)
    assert orders.frontier == 199, "a look back leaves what is planned as it is"


def test_the_row_that_draws_from_a_source_that_is_gone_is_told() -> None:
    settings, schedule = OrderSettings(seed=1, lanes=4, window=6), [Weights(start=0, weights={"a": 3, "b": 1})]
    whole = ExactLanes(Sources({"a": [9] * 9, "b": [9] * 9}, settings), schedule)
    first = 3 + int(np.flatnonzero(whole.lane_samples(1, 3, 60)[0] >= 9)[0])
    rest = ExactLanes(Sources({"a": [9] * 9}, settings, absent=["b"]), schedule)
    with pytest.raises(StateError, match=f"row {4 * first + 1} draws from 'b'"):
        rest.lane_samples(1, 3, 60)


def rows_of(live: object, chunk: int) -> dict[str, object]:
    columns = {name: getattr(live, name) for name in ("chunk_ids", "passes", "first_batches", "last_batches")}
    return {name: column[columns["chunk_ids"] == chunk] for name, column in columns.items()}


def golden_orders() -> dict[str, ExactLanes | ExactPasses]:
    tables = {"web": [5, 4, 6, 5] * 5, "code": [3, 0, 3], "math": [1, 1], "chat": [9, 9]}
    settings = OrderSettings(seed=11, lanes=4, window=8)
    sources = Sources(tables, settings)
    quotas = {"web": 100, "code": 18, "math": 7, "chat": 18}
    schedule = [
        Weights(start=0, weights={"web": 0.5, "code": 0.3, "math": 0.2}),
        Weights(start=110, weights={"web": 1, "code": 0.01}),
        Weights(start=130, weights={"web": 1, "chat": 2, "math": 1}),
    ]
    return {
        "by samples": ExactLanes(sources, schedule),
        "by samples, small ones in rows": ExactLanes(
            Sources(tables, settings, even={"math": "rows", "code": "rows"}), schedule
        ),
        "by batches": BatchLanes(sources, schedule, batch_size=8),
        "by samples, with an end": ExactPasses(sources, quotas=quotas),
        "by batches, with an end": BatchPasses(
            sources, quotas={name: quota - quota % 8 for name, quota in quotas.items()} | {"math": 8}, batch_size=8
        ),
    }


def test_the_exact_order_is_the_same_for_ever() -> None:
    found = {}
    for name, orders in golden_orders().items():
        plan = Plan(
            orders.chunk_samples, orders.settings, orders=orders, global_batch_size=8, dp_world_size=1, epoch=1,
            epoch_size=400,
        )  # fmt: skip
        rows = plan.rank_batches(0, 30, 0)
        found[name] = [f"{chunk}:{offset}" for chunk, offset in zip(rows.chunk_ids, rows.offsets, strict=True)]
    assert found == json.loads((GOLDEN / "exact_order.json").read_text())
