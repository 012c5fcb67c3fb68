"""P1 to P5 of the plan, for every rank of every world in one process, and its bounds on what a rank must
hold."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from streaming.errors import ConfigError
from streaming.order.plan import memory as budget
from streaming.order.plan.intervals import ChunkIntervals
from streaming.order.plan.order import EpochOrder, OrderSettings, default_lanes, default_window
from streaming.order.plan.plan import Plan, RankBatches
from streaming.types import LastBatch
from tests.support.models.sample_numbers import samples_at

# A busy machine is no failure.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclass(frozen=True, kw_only=True)
class Case:
    """Arguments of a plan."""

    sizes: tuple[int, ...]
    settings: OrderSettings
    global_batch_size: int
    dp_world_size: int
    last_batch: LastBatch
    epoch: int
    epoch_size: int | None
    start: int

    def plan(self, **change: Any) -> Plan:
        case = replace(self, **change)
        return Plan(
            np.array(case.sizes),
            case.settings,
            global_batch_size=case.global_batch_size,
            dp_world_size=case.dp_world_size,
            last_batch=case.last_batch,
            epoch=case.epoch,
            epoch_size=case.epoch_size,
            start=case.start,
        )


@st.composite
def cases(draw: st.DrawFn, /, **fixed: Any) -> Case:
    sizes = tuple(draw(st.lists(st.integers(0, 12), min_size=1, max_size=14).filter(sum)))
    global_batch_size = draw(st.integers(1, 30))
    shuffled = OrderSettings(
        seed=draw(st.integers(0, 3)),
        lanes=draw(st.integers(1, 8) | st.just(default_lanes(global_batch_size))),
        window=draw(st.integers(0, 20)),
    )
    epoch_size = draw(fixed.get("epoch_size", st.none() | st.integers(1, 3 * sum(sizes))))
    epoch_samples = epoch_size or sum(sizes)
    case = Case(
        sizes=sizes,
        settings=draw(st.just(shuffled) | st.just(OrderSettings.unshuffled())),
        global_batch_size=global_batch_size,
        dp_world_size=draw(st.integers(1, 9)),
        last_batch=draw(st.sampled_from(["drop", "pad", "partial"])),
        epoch=draw(st.integers(0, 3)),
        epoch_size=epoch_size,
        start=draw(st.just(0) | st.integers(0, epoch_samples)),
    )
    return replace(case, **{name: value for name, value in fixed.items() if name != "epoch_size"})


def rows_by_batch(rows: RankBatches) -> list[list[tuple[int, int, int, int]]]:
    """Per batch: (stream position, pass, chunk, offset) of its valid rows."""
    table = list(
        zip(
            rows.positions.tolist(),
            rows.passes.tolist(),
            rows.chunk_ids.tolist(),
            rows.offsets.tolist(),
            strict=True,
        )
    )
    splits = rows.row_splits.tolist()
    return [[table[i] for i in range(start, stop) if rows.valid[i]] for start, stop in pairwise(splits)]


def global_batches(plan: Plan) -> list[list[tuple[int, int, int, int]]]:
    """Valid rows of all ranks per global batch, as sorted lists: duplicates would show."""
    per_rank = [rows_by_batch(plan.rank_batches(0, plan.num_batches, dp_rank)) for dp_rank in range(plan.dp_world_size)]
    return [sorted(row for rank in per_rank for row in rank[k]) for k in range(plan.num_batches)]


def expected_batches(case: Case) -> list[list[tuple[int, int, int, int]]]:
    """The same from the definition: position by position over the orders of the passes."""
    per_pass = sum(case.sizes)
    size = case.epoch_size or per_pass
    begin, end = case.epoch * size + case.start, (case.epoch + 1) * size
    rows = []
    for pass_number in range(begin // per_pass, -(-end // per_pass)):
        order = EpochOrder(np.array(case.sizes), case.settings, pass_number)
        samples, starts = samples_at(order), np.cumsum([0, *case.sizes])
        chunks = np.searchsorted(starts, samples, side="right") - 1
        offsets = samples - starts[chunks]
        rows += [
            (pass_number * per_pass + p, pass_number, int(chunks[p]), int(offsets[p]))
            for p in range(per_pass)
            if begin <= pass_number * per_pass + p < end
        ]
    batches = [rows[i : i + case.global_batch_size] for i in range(0, len(rows), case.global_batch_size)]
    if batches and len(batches[-1]) < case.global_batch_size and case.last_batch == "drop":
        batches.pop()
    return batches


@unhurried
@given(cases())
def test_p1_p3_global_batches_follow_the_definition(case: Case) -> None:
    # Equal sorted lists: no sample is missing, none comes twice, whatever the number of ranks.
    plan = case.plan()
    assert global_batches(plan) == expected_batches(case)
    assert plan.num_batches == len(expected_batches(case))


@unhurried
@given(cases())
def test_ranks_take_slices_of_the_positions_by_lane(case: Case) -> None:
    plan, per_pass, world = case.plan(), sum(case.sizes), case.dp_world_size
    for k, batch in enumerate(expected_batches(case)):
        by_lane = sorted((row[0] for row in batch), key=lambda p: (p % per_pass % case.settings.lanes, p))
        for dp_rank in range(world):
            rows = plan.rank_batches(k, k + 1, dp_rank)
            low, high = len(batch) * dp_rank // world, len(batch) * (dp_rank + 1) // world
            assert rows.positions[rows.valid].tolist() == by_lane[low:high]


@unhurried
@given(cases(epoch_size=st.none(), start=0, last_batch="partial"))
def test_p1_an_epoch_is_an_exact_partition(case: Case) -> None:
    seen = [(chunk, offset) for batch in global_batches(case.plan()) for _, _, chunk, offset in batch]
    assert sorted(seen) == [(chunk, i) for chunk, size in enumerate(case.sizes) for i in range(size)]


@unhurried
@given(cases(epoch_size=st.none(), start=0, epoch=2), st.integers(1, 9))
def test_p3_world_size_does_not_change_a_global_batch(case: Case, other: int) -> None:
    assert global_batches(case.plan()) == global_batches(case.plan(dp_world_size=other))


@unhurried
@given(cases())
def test_p2_counts_are_equal_and_sizes_are_fair(case: Case) -> None:
    plan = case.plan()
    sizes = np.array([np.diff(plan.rank_batches(0, plan.num_batches, r).row_splits) for r in range(case.dp_world_size)])
    assert sizes.shape == (case.dp_world_size, plan.num_batches)
    assert np.ptp(sizes, axis=0).max(initial=0) <= 1
    if case.last_batch == "pad":
        assert (sizes == -(-case.global_batch_size // case.dp_world_size)).all()
    elif plan.num_batches:
        whole = [case.global_batch_size] * (plan.num_batches - 1)
        assert sizes.sum(axis=0).tolist()[:-1] == whole
    for k in range(plan.num_batches):
        assert [plan.batch_size(k, r) for r in range(case.dp_world_size)] == sizes[:, k].tolist()


@unhurried
@given(cases(last_batch="pad"))
def test_padding_repeats_samples_of_its_own_global_batch(case: Case) -> None:
    plan = case.plan()
    batches = [{row[0] for row in batch} for batch in expected_batches(case)]
    for dp_rank in range(case.dp_world_size):
        rows = plan.rank_batches(0, plan.num_batches, dp_rank)
        for k, (start, stop) in enumerate(zip(rows.row_splits[:-1], rows.row_splits[1:], strict=True)):
            assert set(rows.positions[start:stop].tolist()) <= batches[k]
            mask = rows.valid[start:stop]
            assert not mask[mask.sum() :].any()  # valid rows come first


@unhurried
@given(cases(start=0), st.data())
def test_p4_any_start_gives_the_rest_of_the_epoch(case: Case, data: st.DataObject) -> None:
    whole = case.plan()
    done = data.draw(st.integers(0, whole.num_batches))
    start = min(done * case.global_batch_size, case.epoch_size or sum(case.sizes))
    other = data.draw(st.integers(1, 9))
    assert global_batches(case.plan(start=start, dp_world_size=other)) == global_batches(whole)[done:]


@unhurried
@given(cases(), st.data())
def test_p4_a_block_is_a_slice_of_the_whole(case: Case, data: st.DataObject) -> None:
    plan, dp_rank = case.plan(), data.draw(st.integers(0, case.dp_world_size - 1))
    first = data.draw(st.integers(0, plan.num_batches))
    last = data.draw(st.integers(first, plan.num_batches))
    whole = plan.rank_batches(0, plan.num_batches, dp_rank)
    block = case.plan().rank_batches(first, last, dp_rank)
    start, stop = whole.row_splits[first], whole.row_splits[last]
    assert np.array_equal(block.row_splits, whole.row_splits[first : last + 1] - start)
    for name in ("chunk_ids", "offsets", "passes", "positions", "valid"):
        assert np.array_equal(getattr(block, name), getattr(whole, name)[start:stop]), name


@unhurried
@given(cases(), st.permutations(range(6)))
def test_p5_what_was_asked_before_changes_nothing(case: Case, requests: list[int]) -> None:
    # A replica may have read other batches before: the memory of evaluated lane ranges must not show.
    plan = case.plan(dp_world_size=2)
    for request in requests:
        first = min(request, plan.num_batches)
        last = min(first + 1, plan.num_batches)
        warm = plan.rank_batches(first, last, 1)
        cold = case.plan(dp_world_size=2).rank_batches(first, last, 1)
        assert np.array_equal(warm.chunk_ids, cold.chunk_ids)
        assert np.array_equal(warm.offsets, cold.offsets)


SHORT_LAST_BATCH = Case(
    sizes=(4, 2, 8), settings=OrderSettings(seed=39, lanes=3, window=5), global_batch_size=4, dp_world_size=3,
    last_batch="partial", epoch=2, epoch_size=33, start=0,
)  # fmt: skip
"""Its last batch has one sample, of a lane that its rank has nothing of in full ones."""
RANKS_THAT_ONLY_PAD = replace(
    SHORT_LAST_BATCH, sizes=(3, 3, 3, 3), settings=OrderSettings(seed=1, lanes=2, window=0), global_batch_size=2,
    last_batch="pad", epoch=0, epoch_size=None,
)  # fmt: skip


@unhurried
@given(cases())
@example(SHORT_LAST_BATCH)
@example(RANKS_THAT_ONLY_PAD)
@pytest.mark.parametrize("most_rows", [0, 1, 9, 1 << 14])
def test_intervals_cover_every_use(most_rows: int, case: Case) -> None:
    """Those in closed form, and those of which so many rows at the beginning are exact."""
    plan = case.plan()
    every = np.arange(len(case.sizes))
    for dp_rank in range(case.dp_world_size):
        rows = plan.rank_batches(0, plan.num_batches, dp_rank)
        batch = np.repeat(np.arange(plan.num_batches), np.diff(rows.row_splits))
        live = plan.chunk_intervals(dp_rank)
        if most_rows:
            live = ChunkIntervals.joined(plan.needs_by_pass(dp_rank, most_rows))
        assert (np.diff(live.first_batches) >= 0).all()
        spans: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for chunk, pass_number, first, last in zip(
            live.chunk_ids.tolist(),
            live.passes.tolist(),
            live.first_batches.tolist(),
            live.last_batches.tolist(),
            strict=True,
        ):
            assert 0 <= first <= last < plan.num_batches
            spans.setdefault((chunk, pass_number), []).append((first, last))
        for several in spans.values():
            assert all(b[0] > a[1] + 1 for a, b in pairwise(several))
        for pass_number in plan.passes:
            for chunk in every.tolist():
                uses = batch[(rows.chunk_ids == chunk) & (rows.passes == pass_number)].tolist()
                own = spans.get((chunk, pass_number), [])
                for use in uses:
                    assert sum(first <= use <= last for first, last in own) == 1


@unhurried
@given(cases())
@example(SHORT_LAST_BATCH)
def test_the_first_batches_wait_for_what_they_use_alone(case: Case) -> None:
    """Of the first pass: of the next one, chunks may be due a little early, in the batch where it begins."""
    plan = case.plan()
    for dp_rank in range(case.dp_world_size if plan.num_batches else 0):
        needed = next(plan.needs_by_pass(dp_rank, 2 * plan.shape.most_rows))
        rows = plan.rank_batches(0, min(2, plan.num_batches), dp_rank)
        for batch in range(len(rows.row_splits) - 1 if len(plan.passes) == 1 else 1):
            stop = rows.row_splits[batch + 1]
            used = rows.chunk_ids[:stop][rows.passes[:stop] == plan.passes[0]]
            assert set(needed.chunk_ids[needed.first_batches <= batch].tolist()) == set(used.tolist())


def test_a_default_window_costs_the_first_batch_no_more_chunks_than_rows() -> None:
    """In closed form it would wait for each chunk that the window reaches: 2.5 to 3 times as many."""
    order = OrderSettings(seed=0, lanes=16, window=default_window(200 * 32, 200))
    plan = Plan([32] * 200, order, global_batch_size=16, dp_world_size=1)
    closed, needed = next(plan.intervals_by_pass(0)), next(plan.needs_by_pass(0, 1 << 14))
    assert (closed.first_batches == 0).sum() >= 40
    assert (needed.first_batches == 0).sum() == 16
    resumed = Plan([32] * 200, order, global_batch_size=16, dp_world_size=1, start=16 * 100)
    assert len(next(resumed.needs_by_pass(0, 1 << 14)).chunk_ids) < len(next(resumed.intervals_by_pass(0)).chunk_ids)


def test_an_epoch_of_many_passes_is_looked_at_in_part() -> None:
    """The chunks of a rank are then all, and what is live is that of the first passes, and a ninth."""

    def plan(num_passes: int) -> Plan:
        order = OrderSettings(seed=0, lanes=8, window=4)
        return Plan([1] * 40, order, global_batch_size=8, dp_world_size=8, epoch_size=40 * num_passes)

    for dp_rank in range(8):
        used = plan(12).rank_batches(0, plan(12).num_batches, dp_rank).chunk_ids
        assert set(used.tolist()) <= set(plan(12).rank_chunks(dp_rank).tolist())
        first = plan(8).live_bytes([9] * 40, dp_rank)
        assert plan(12).live_bytes([9] * 40, dp_rank) == -(-10 * first // 9)


@unhurried
@given(cases(), st.data())
def test_live_bytes_are_the_most_that_is_held(case: Case, data: st.DataObject) -> None:
    plan, dp_rank = case.plan(), data.draw(st.integers(0, case.dp_world_size - 1))
    num_chunks = len(case.sizes)
    chunk_bytes = np.array(data.draw(st.lists(st.integers(0, 99), min_size=num_chunks, max_size=num_chunks)))
    live, held = plan.chunk_intervals(dp_rank), [0]
    for k in range(plan.num_batches):
        now = (live.first_batches <= k) & (k <= live.last_batches)
        held.append(int(chunk_bytes[live.chunk_ids[now]].sum()))
    assert plan.live_bytes(chunk_bytes, dp_rank) == max(held)


def chunks_read(plan: Plan) -> int:
    """Chunks that all ranks read, each once per live interval."""
    return sum(len(plan.chunk_intervals(dp_rank).chunk_ids) for dp_rank in range(plan.dp_world_size))


@pytest.mark.parametrize("dp_world_size", [1, 2, 4, 8, 16])
def test_worlds_that_divide_the_lanes_own_whole_lanes(dp_world_size: int) -> None:
    num_chunks, lanes = 400, 16
    settings = OrderSettings(seed=1, lanes=lanes, window=20)
    plan = Plan([20] * num_chunks, settings, global_batch_size=64, dp_world_size=dp_world_size)
    owners: list[set[int]] = [set() for _ in range(num_chunks)]
    for dp_rank in range(dp_world_size):
        for chunk in plan.rank_batches(0, plan.num_batches, dp_rank).chunk_ids.tolist():
            owners[chunk].add(dp_rank)
    assert sum(len(ranks) > 1 for ranks in owners) == 0  # 25 whole chunks to a lane: no chunk reaches over
    chunk_bytes = np.ones(num_chunks, dtype=np.int64)
    assert chunks_read(plan) == num_chunks
    # A chunk of 20 lives while its lane moves by at most 60 + a batch: four chunks, and one for the batch's
    # grain.
    assert plan.live_bytes(chunk_bytes, 0) <= lanes // dp_world_size * 5


def test_only_chunks_at_lane_borders_are_read_twice() -> None:
    sizes = np.arange(1, 301) % 17 + 1
    settings = OrderSettings(seed=2, lanes=8, window=9)
    for dp_world_size in (1, 2, 4, 8):
        plan = Plan(sizes, settings, global_batch_size=32, dp_world_size=dp_world_size)
        assert chunks_read(plan) <= 300 + 7  # seven borders


def test_worlds_that_do_not_divide_read_little_more() -> None:
    plan = Plan([50] * 2000, OrderSettings(seed=0, lanes=64, window=50), global_batch_size=768, dp_world_size=12)
    assert chunks_read(plan) <= 1.45 * 2000


@unhurried
@given(cases(settings=OrderSettings.unshuffled(), epoch_size=st.none()))
def test_unshuffled_batches_are_ranges_of_the_data_set(case: Case) -> None:
    plan = case.plan()
    starts = np.cumsum([0, *case.sizes])
    for k in range(plan.num_batches):
        samples: list[int] = []
        for dp_rank in range(case.dp_world_size):
            rows = plan.rank_batches(k, k + 1, dp_rank)
            samples += (starts[rows.chunk_ids] + rows.offsets)[rows.valid].tolist()
        begin = case.start + k * case.global_batch_size
        assert samples == list(range(begin, min(begin + case.global_batch_size, sum(case.sizes))))


def test_epochs_differ_and_virtual_epochs_continue() -> None:
    settings = OrderSettings(seed=0, lanes=4, window=10)

    def chunks(**change: Any) -> list[int]:
        plan = Plan([10] * 30, settings, global_batch_size=20, dp_world_size=1, **change)
        chunk_ids: list[int] = plan.rank_batches(0, plan.num_batches, 0).chunk_ids.tolist()
        return chunk_ids

    assert chunks(epoch=0) != chunks(epoch=1)
    # Three virtual epochs of 200 are two passes of 300: each sample twice.
    thrice = [chunk for epoch in range(3) for chunk in chunks(epoch_size=200, epoch=epoch)]
    assert np.bincount(thrice).tolist() == [20] * 30
    assert sorted(thrice[:300]) == sorted(chunks(epoch=0))
    assert sorted(thrice[300:]) == sorted(chunks(epoch=1))


def test_passes_are_let_go() -> None:
    plan = Plan(
        [3, 4],
        OrderSettings(seed=0, lanes=2, window=2),
        global_batch_size=4,
        dp_world_size=1,
        epoch_size=7000,
    )
    plan.rank_batches(0, plan.num_batches, 0)
    assert len(plan.passes) == 1000
    assert len(plan._orders) <= 4
    assert len(plan._segments) <= 8


def test_batches_of_many_passes_are_planned_pass_by_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A set of one sample: each batch of 64 spans 64 passes, and each is evaluated a few times, not 64 times."""
    asked: Counter[int] = Counter()
    lane_samples = EpochOrder.lane_samples

    def counted(order: EpochOrder, *args: Any) -> Any:
        asked[order.epoch] += 1
        return lane_samples(order, *args)

    monkeypatch.setattr(EpochOrder, "lane_samples", counted)
    plan = Plan(np.array([1]), OrderSettings(seed=1, lanes=1, window=4), global_batch_size=64, dp_world_size=1,
                last_batch="drop", epoch_size=320)  # fmt: skip
    assert sum(len(one.chunk_ids) for one in plan.intervals_by_pass(0)) == 320
    assert len(plan.rank_batches(0, 5, 0).chunk_ids) == 320
    assert asked.total() <= 3 * 320


def test_a_big_plan_is_light() -> None:
    # What bench_plan.py times, for correctness only: 10**8 samples; far positions, all ranks of one batch.
    sizes = np.full(100_000, 1000)
    settings = OrderSettings(seed=1, lanes=default_lanes(2048), window=default_window(10**8, 100_000))
    plan = Plan(sizes, settings, global_batch_size=2048, dp_world_size=24)
    k = plan.num_batches - 3
    rows = [plan.rank_batches(k, k + 1, r) for r in range(24)]
    positions = np.sort(np.concatenate([r.positions for r in rows]))
    assert np.array_equal(positions, np.arange(k * 2048, (k + 1) * 2048))
    samples = np.concatenate([r.chunk_ids * 1000 + r.offsets for r in rows])
    assert len(np.unique(samples)) == 2048


GOOD: dict[str, Any] = {"global_batch_size": 4, "dp_world_size": 2}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"global_batch_size": 0}, "global_batch_size"),
        ({"dp_world_size": 0}, "dp_world_size"),
        ({"last_batch": "keep"}, "last_batch"),
        ({"epoch": -1}, "epoch"),
        ({"epoch_size": 0}, "epoch_size"),
        ({"start": 11}, "start"),
        ({"start": -1}, "start"),
    ],
)
def test_arguments_that_cannot_work(change: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        Plan([5, 5], OrderSettings.unshuffled(), **{**GOOD, **change})


def test_ranges_that_do_not_exist() -> None:
    plan = Plan([5, 5], OrderSettings.unshuffled(), **GOOD)
    for call in (
        lambda: plan.rank_batches(0, 3, 0),
        lambda: plan.rank_batches(-1, 1, 0),
        lambda: plan.rank_batches(2, 1, 0),
        lambda: plan.rank_batches(0, 1, 2),
        lambda: plan.batch_size(2, 0),
        lambda: plan.chunk_intervals(-1),
        lambda: plan.live_bytes([1, 2, 3], 0),
    ):
        with pytest.raises(ConfigError, match="expected"):
            call()


def test_nothing_left_to_do() -> None:
    plan = Plan([5, 5], OrderSettings.unshuffled(), start=10, **GOOD)
    assert plan.num_batches == 0
    assert list(plan.passes) == []
    assert len(plan.rank_batches(0, 0, 1).positions) == 0
    assert plan.live_bytes([1, 1], 0) == chunks_read(plan) == 0


@pytest.mark.parametrize("wraps", [False, True])
def test_the_largest_run_of_pieces_is_that_of_all_runs(wraps: bool) -> None:
    rng = np.random.default_rng(5)
    for _ in range(60):
        counts, sizes = rng.integers(1, 5, 8), rng.integers(1, 9, 8)
        rows, num_samples = int(rng.integers(1, counts.sum())), int(counts.sum())
        plan: Any = SimpleNamespace(
            shape=SimpleNamespace(most_rows=rows), samples_per_pass=num_samples, chunk_samples=counts,
            num_samples=num_samples + wraps,
        )  # fmt: skip
        found = budget._largest_run(plan, np.cumsum(counts) - counts, np.cumsum(sizes) - sizes, int(sizes.sum()))
        piece_of = np.repeat(np.arange(8), counts)
        starts = range(num_samples if wraps else num_samples - rows + 1)
        runs = [np.unique(piece_of[np.arange(start, start + rows) % num_samples]) for start in starts]
        exact = max(int(sizes[pieces].sum()) for pieces in runs)
        assert found == exact or (wraps and found > exact and rows > num_samples - int(counts.max()))


@pytest.mark.parametrize("mib", [1, 47, 48, 49, 10_000])
def test_limits_that_messages_recommend_are_enough(mib: int) -> None:
    recommended = budget.needed_mib(mib << 20) << 20
    assert budget.Budget(recommended).chunks_bytes * budget.EPOCHS_VARY >= mib << 20
    assert budget.Budget(budget.enough_for_batches_mib(mib << 20) << 20).batches_bytes >= mib << 20
