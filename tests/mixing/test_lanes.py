"""Mixtures under a plan: P1 to P5, shares at every row, intervals that cover every use, changes; both regimes."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streaming.errors import ConfigError, StateError
from streaming.order.mixing import virtual_time
from streaming.order.mixing.exact import EvenLanes, ExactLanes
from streaming.order.mixing.lanes import MixedLanes
from streaming.order.mixing.passes import Listing, MixedPasses, Sources, Weights, eras_grown
from streaming.order.mixing.source_lanes import Runs, SourceLanes, runs_of
from streaming.order.mixing.virtual_time import growths
from streaming.order.plan.order import ENDLESS, Orders, OrderSettings
from streaming.order.plan.plan import Plan
from tests.support.code.folders import GOLDEN
from tests.support.models.mixed_plans import Case, batches_of, cases, global_batches, named, unhurried, weights_


def all_samples(sources: dict[str, list[int]]) -> list[tuple[int, int]]:
    sizes = [size for table in sources.values() for size in table]
    return [(chunk, offset) for chunk, size in enumerate(sizes) for offset in range(size)]


@pytest.mark.thorough
@unhurried
@given(cases(), st.integers(1, 9))
def test_batches_do_not_depend_on_the_ranks_and_are_dealt_equally(case: Case, other: int) -> None:
    whole = case.plan(dp_world_size=1)
    expected = global_batches(whole)
    for ranks in {case.dp_world_size, other}:
        plan = case.plan(dp_world_size=ranks)
        assert plan.num_batches == whole.num_batches
        assert global_batches(plan) == expected
    positions = [row[0] for batch in expected for row in batch]
    first = case.epoch * whole.num_samples + case.start
    assert sorted(positions) == list(range(first, first + len(positions)))


@unhurried
@given(cases(endless=False), st.integers(0, 3))
def test_a_pass_gives_each_sample_once_or_as_often_as_its_quota_says(case: Case, number: int) -> None:
    plan = case.plan(epoch=number, epoch_size=None, start=0, last_batch="partial")
    got = Counter((chunk, offset) for batch in global_batches(plan) for _, chunk, offset in batch)
    if case.quotas is None:
        assert got == Counter(all_samples(case.sources))
        return
    sources = Sources(case.sources, case.settings)
    expected: Counter[tuple[int, int]] = Counter()
    for name, quota in case.quotas.items():
        parts = sources.listings[name].samples(number * quota, (number + 1) * quota)
        for chunk, first, size in zip(
            parts.chunk_ids.tolist(), parts.firsts.tolist(), parts.sizes.tolist(), strict=True
        ):
            expected.update((chunk, offset) for offset in range(first, first + size))
    assert got == expected


@pytest.mark.thorough
@unhurried
@given(cases(), st.data())
def test_a_resume_at_any_sample_is_the_tail(case: Case, data: st.DataObject) -> None:
    case = replace(case, start=0, last_batch="partial")
    whole = case.plan(dp_world_size=1)
    rows = sorted(row for batch in global_batches(whole) for row in batch)
    start = data.draw(st.integers(0, len(rows)))
    tail = global_batches(case.plan(start=start))
    assert sorted(row for batch in tail for row in batch) == rows[start:]


@unhurried
@given(cases())
def test_intervals_cover_every_use_and_come_in_order(case: Case) -> None:
    plan = case.plan()
    plan.__dict__["stretch_batches"] = 2 if case.schedule else plan.stretch_batches
    for dp_rank in {0, plan.dp_world_size - 1}:
        rows = plan.rank_batches(0, plan.num_batches, dp_rank)
        batch = np.repeat(np.arange(plan.num_batches), np.diff(rows.row_splits))
        live = plan.chunk_intervals(dp_rank)
        assert np.all(np.diff(live.first_batches) >= 0) or not case.schedule
        assert live.first_batches.min(initial=0) >= 0
        assert live.last_batches.max(initial=0) <= max(plan.num_batches - 1, 0)
        for chunk, at in zip(rows.chunk_ids.tolist(), batch.tolist(), strict=True):
            mine = live.chunk_ids == chunk
            assert np.any(mine & (live.first_batches <= at) & (live.last_batches >= at))
        needed = set(rows.chunk_ids.tolist())
        assert needed <= set(plan.rank_chunks(dp_rank).tolist())
        sizes = np.arange(1, len(plan.chunk_samples) + 1)
        at_once = max(
            (int(sizes[np.unique(rows.chunk_ids[batch == k])].sum()) for k in range(plan.num_batches)), default=0
        )
        live_bytes = plan.live_bytes(sizes, dp_rank)
        assert at_once <= live_bytes
        assert live_bytes <= int(sizes.sum()) or not case.schedule  # two passes may hold a chunk twice


@pytest.mark.thorough
@settings(unhurried, max_examples=10)  # a third of a second each
@given(cases(endless=True, dealt="chunks"), st.lists(st.integers(0, 9), min_size=2, max_size=4))
def test_blocks_cut_out_of_sorted_runs_are_those_of_all_runs_looked_through(case: Case, numbers: list[int]) -> None:
    """In any order, also backwards to before a source was first drawn."""
    case = replace(case, schedule=[Weights(start=10 * one.start, weights=one.weights) for one in case.schedule])
    found = []
    for sorted_from in (1, 10**9):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(virtual_time, "_SORTED_FROM", sorted_from)
            orders = case.laid()
            blocks = [orders._block(0, number) for number in numbers]
        found.append([(*vars_of(block.runs), block.stamps.tolist(), block.starts.tolist(), block.stops.tolist(),
                       block.splits.tolist()) for block in blocks])  # fmt: skip
    assert found[0] == found[1]


def vars_of(runs: Runs) -> list[list[int]]:
    return [getattr(runs, name).tolist() for name in runs.__dataclass_fields__]


def laid_by_hand(case: Case, lane: int, stop: int) -> list[tuple[int, int]]:
    """(chunk, offset) of the first samples of a lane, source by source from the beginning, one chunk at a time."""
    orders = case.laid()
    waiting = []
    for name in sorted(case.sources):
        listing, lanes, seen = orders.sources.listings[name], case.settings.lanes, 0
        stream: list[tuple[float, int, int, int]] = []
        number = -1
        while seen < stop:
            number += 1
            samples = [
                (part, int(listing.chunk_ids[chunk]), offset)
                for part, chunk in enumerate(listing.orders(np.array([number]))[0].tolist())
                for offset in range(int(listing.sizes[chunk]))
            ]
            dealt = Counter(n % lanes for n in range(number * len(samples), (number + 1) * len(samples)))
            begin = sum(dealt[below] for below in range(lane))
            mine = samples[begin : begin + dealt[lane]]
            if not mine:
                continue
            runs = orders._lanes[name].runs(lane, lane + 1, seen, seen + 1)
            turn = [each[1:] for each in mine].index(next(iter(inside(runs, seen, seen + 1))))
            assert turn == 0 or mine[turn - 1][0] != mine[turn][0]  # a run begins where one of its chunks does
            mine = mine[turn:] + mine[:turn]
            for _, each in groupby(mine, key=lambda sample: (sample[0], samples.index(sample) < begin + turn)):
                run = [(chunk, offset) for _, chunk, offset in each]
                mark = seen + orders._lanes[name].mean_chunk * orders._phases[name][lane]
                stamp = float(orders._growths[name].stamps(np.array([mark]))[0])
                stream.append((stamp, run[0][0], run[0][1], len(run)))
                seen += len(run)
        waiting += stream
    laid = sorted(waiting, key=lambda run: run[0])
    return [(chunk, first + k) for _, chunk, first, size in laid for k in range(size)][:stop]


def test_lanes_of_more_samples_than_32_bits_count_hold_each_once() -> None:
    sizes, num_lanes = [2**31 - 1] * 64, 8
    listing = Listing("huge", sizes, first_chunk=0, seed=1)
    source = SourceLanes([listing], OrderSettings(seed=1, lanes=num_lanes, window=0))
    share = sum(sizes) // num_lanes
    for number in range(3):
        runs = source.runs(0, num_lanes, number * share, (number + 1) * share)
        parts = sorted(zip(runs.chunk_ids.tolist(), runs.firsts.tolist(), runs.sizes.tolist(), strict=True))
        stops = dict.fromkeys(range(64), 0)
        for chunk, first, size in parts:
            assert first == stops[chunk], (number, chunk)
            stops[chunk] += size
        assert list(stops.values()) == sizes


@pytest.mark.thorough
@unhurried
@given(cases(endless=True, dealt="chunks"), st.integers(1, 150), st.data())
def test_lanes_are_laid_by_stamps(case: Case, stop: int, data: st.DataObject) -> None:
    orders = case.laid()
    lane = data.draw(st.integers(0, case.settings.lanes - 1))
    expected = laid_by_hand(case, lane, stop)
    start = data.draw(st.integers(0, stop - 1))
    orders._block_time = data.draw(st.integers(1, 100))
    runs = orders.laid(lane, start, stop)
    got = {
        begin + k: (chunk, first + k)
        for begin, chunk, first, size in zip(
            runs.begins.tolist(), runs.chunk_ids.tolist(), runs.firsts.tolist(), runs.sizes.tolist(), strict=True
        )
        for k in range(size)
    }
    assert [got[place] for place in range(start, stop)] == expected[start:]


@pytest.mark.thorough
@unhurried
@given(cases(), st.data())
def test_when_finds_every_use_of_a_sample_and_its_rank(case: Case, data: st.DataObject) -> None:
    plan = case.plan()
    first = data.draw(st.integers(0, plan.num_batches))
    last = data.draw(st.integers(first, plan.num_batches))
    expected: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for dp_rank in range(plan.dp_world_size):
        for batch, rows in enumerate(batches_of(plan, dp_rank)):
            for _, chunk, offset in rows if first <= batch < last else []:
                expected.setdefault((chunk, offset), []).append((batch, dp_rank))
    for chunk, offset in data.draw(st.lists(st.sampled_from(all_samples(case.sources)), max_size=5)):
        found = plan.when(chunk, offset, first=first, last=last)
        assert found == sorted(expected.get((chunk, offset), []))


def test_when_knows_parts_of_chunks() -> None:
    """A pass of fewer samples than a source has begins, and ends, within its chunks."""
    sources = Sources({"web": [6], "code": [5, 4]}, OrderSettings(seed=1, lanes=2, window=3))
    orders = MixedPasses(sources, quotas={"web": 4, "code": 7})
    for epoch in range(4):
        plan = Plan(
            orders.chunk_samples, orders.settings, global_batch_size=3, dp_world_size=1, epoch=epoch, orders=orders
        )
        rows = [(chunk, offset, batch) for batch, each in enumerate(batches_of(plan, 0)) for _, chunk, offset in each]
        for chunk, size in enumerate([6, 5, 4]):
            for offset in range(size):
                expected = [(batch, 0) for one, other, batch in rows if (one, other) == (chunk, offset)]
                assert plan.when(chunk, offset) == expected


@pytest.mark.thorough
def test_when_finds_the_first_and_the_last_of_each_batch() -> None:
    """A lane's samples at the borders of what is looked through count, too."""
    sizes = {"web": [6, 3], "code": [5, 4]}
    sources = Sources(sizes, OrderSettings(seed=1, lanes=2, window=3))
    orders = MixedLanes(sources, [Weights(start=0, weights={"web": 2, "code": 1})])
    plan = Plan(
        orders.chunk_samples, orders.settings, global_batch_size=4, dp_world_size=2, epoch_size=12, orders=orders
    )
    for batch, rows in enumerate(global_batches(plan)):
        found = [sample for sample in all_samples(sizes) if plan.when(*sample, first=batch, last=batch + 1)]
        assert found == sorted({(chunk, offset) for _, chunk, offset in rows}), batch


def share_of(name: str, schedule: list[Weights], laid: int) -> tuple[Fraction, Fraction]:
    """What a source should have given of so many samples, and its greatest share so far."""
    target, most = Fraction(), Fraction()
    for index, entry in enumerate(schedule):
        stop = schedule[index + 1].start if index + 1 < len(schedule) else laid
        if index and entry.start > laid + 1000:
            break
        share = Fraction(entry.weights.get(name, 0), sum(entry.weights.values()))
        target += share * max(min(stop, laid) - entry.start, 0)
        most = max(most, share)
    return target, most


@pytest.mark.thorough
@unhurried
@given(cases(endless=True, dealt="chunks"), st.integers(0, 500) | st.integers(0, 10**11))
def test_shares_hold_at_every_row_of_every_lane(case: Case, start: int) -> None:
    """Within one chunk of the source and its share of one chunk of every source, near the start and far away."""
    orders = case.laid()
    biggest = {name: max(sizes) for name, sizes in case.sources.items()}
    lane = start % case.settings.lanes
    runs = orders.laid(lane, start, start + 40)
    of = orders.sources.source_of(runs.chunk_ids)
    before = orders.given(lane, int(runs.begins[0]))
    assert before.sum() == runs.begins[0]
    if start < 5_000:
        laid = orders.laid(lane, 0, max(start, 1))
        counts = np.bincount(orders.sources.source_of(laid.chunk_ids), weights=laid.sizes, minlength=len(before))
        counts[of[0]] -= laid.begins[-1] + laid.sizes[-1] - runs.begins[0]
        assert before.tolist() == counts.tolist()
    for index, name in enumerate(orders.sources.names):
        counted = int(before[index])
        for row in range(len(runs.sizes)):
            target, share = share_of(name, case.schedule, int(runs.begins[row]))
            assert abs(counted - target) <= biggest[name] + share * sum(biggest.values()) + Fraction(1, 100)
            counted += int(runs.sizes[row]) * (of[row] == index)


@pytest.mark.thorough
def test_weights_from_the_frontier_on_leave_what_was_planned() -> None:
    """However little that was, and however early they come."""
    for planned in range(1, 120):
        sources = Sources({"a": [3, 5] * 9, "b": [4] * 9, "c": [2] * 9}, OrderSettings(seed=2, lanes=2, window=0))
        orders = MixedLanes(sources, [Weights(start=0, weights={"a": 5, "b": 3, "c": 2})])
        before = [orders.lane_samples(lane, 0, planned) for lane in range(2)]
        for lane in range(2):  # nothing that is laid is of a pass that may still be a larger one
            runs = orders.laid(lane, 0, planned)
            drawn = int(runs.sizes[orders.sources.source_of(runs.chunk_ids) == 0].sum())
            assert (drawn - 1) * 2 + lane < 72 * orders.free_pass("a")
        start = orders.frontier
        orders.append(Weights(start=start, weights={"a": 1, "b": 50, "c": 1}))
        assert orders.borders == (2 * start,)  # in samples of all lanes
        after = [orders.lane_samples(lane, 0, planned) for lane in range(2)]
        assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))
        orders.find(0, 0, 0, start + 50)  # where it is not found counts as planned, too
        assert orders.frontier > start + 50


def test_a_source_ends_with_the_last_weight_that_it_has() -> None:
    schedule = [Weights(start=10 * at, weights={"a": 1, "b": weight}) for at, weight in enumerate((1, 2, 0, 3, 0))]
    assert growths(["a", "b"], schedule)["b"].ends_at == 40


@pytest.mark.thorough
@unhurried
@given(cases(endless=True, dealt="chunks"), st.integers(1, 300), st.data())
def test_appended_weights_are_those_that_were_there_from_the_start(
    case: Case, change_at: int, data: st.DataObject
) -> None:
    """And what was planned before stays: a run with feedback can be replayed."""
    first = replace(case, schedule=case.schedule[:1])
    later = Weights(start=change_at, weights=data.draw(weights_(list(case.sources))))
    whole = replace(first, schedule=[*first.schedule, later]).laid()
    appended = first.laid()
    for order in (whole, appended):
        order._block_time = 16
    lane, stop = case.settings.lanes - 1, data.draw(st.integers(0, 150))
    before = appended.laid(lane, 0, stop).begins.tolist() if stop else []
    # Other weights may apply right behind what was asked for: times and positions differ by less than all chunks.
    assert appended.frontier <= (stop + sum(max(sizes) for sizes in case.sources.values()) + 2 if stop else 0)
    if appended.frontier > change_at:
        with pytest.raises(ConfigError, match=f"planned up to {appended.frontier}"):
            appended.append(later)
        return
    appended.append(later)
    got, expected = appended.laid(lane, 0, 600), whole.laid(lane, 0, 600)
    assert got.chunk_ids.tolist() == expected.chunk_ids.tolist()
    assert got.begins.tolist() == expected.begins.tolist()
    assert got.begins.tolist()[: len(before)] == before


@pytest.mark.thorough
@unhurried
@given(
    cases(endless=True), st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=9), max_size=2), st.booleans(),
    st.data(),
)  # fmt: skip
def test_every_pass_over_a_source_gives_each_sample_once(
    case: Case, more: list[list[int]], in_pieces: bool, data: st.DataObject
) -> None:
    """Also where it grows, once or twice; what comes before does not change."""
    name, lanes, whole = min(case.sources), case.settings.lanes, sum(more, case.sources[min(case.sources)])

    def cut(table: list[int], eras: list[tuple[int, int]]) -> SourceLanes:
        sources = Sources({name: table}, case.settings, eras={name: eras})
        return SourceLanes(sources.eras[name], case.settings, pieces=lanes if in_pieces else 0)

    sizes = [len(case.sources[name])]
    eras = [(0, sizes[0])]
    source = alone = cut(whole[: sizes[0]], eras)
    for chunks in more:
        sizes.append(sizes[-1] + len(chunks))
        eras = eras_grown(eras, source.free_pass(data.draw(st.integers(1, 60))), sizes[-1])
        source = cut(whole, eras)
    tables = [whole[:count] for _, count in eras]
    draw = 0
    for era, table in zip(source.eras, tables, strict=True):
        assert draw == era.first_draw
        for _ in range(2 if era is source.eras[-1] else era.stop_pass - era.first_pass):
            got: Counter[tuple[int, int]] = Counter()
            ends = []
            for lane in range(lanes):
                start, stop = ((at - lane + lanes - 1) // lanes for at in (draw, draw + era.samples))
                ends.append(stop)
                if stop > start:
                    got.update(inside(source.runs(lane, lane + 1, start, stop), start, stop))
            assert got == dict.fromkeys(all_samples({name: table}), 1)
            assert max(ends) - min(ends) <= 1  # lanes stay together, for ever
            draw += era.samples
    first = source.eras[0].stop_draw // lanes if len(tables) > 1 else 100
    for lane in range(lanes if first else 0):
        old, new = alone.runs(lane, lane + 1, 0, first), source.runs(lane, lane + 1, 0, first)
        assert Counter(inside(old, 0, first)) == Counter(inside(new, 0, first))


@pytest.mark.thorough
@unhurried
@given(cases(endless=True, dealt="chunks"), st.data())
def test_the_others_stand_where_they_do_when_sources_are_gone(case: Case, data: st.DataObject) -> None:
    """Positions and counts follow from what the ledger holds of those that were dropped."""
    names = sorted(case.sources)
    kept = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    dropped = sorted(set(names) - set(kept))
    until = case.schedule[-1].start + data.draw(st.integers(1, 300))
    schedule = [*case.schedule, Weights(start=until, weights=dict.fromkeys(kept, 1))]
    whole = MixedLanes(Sources(case.sources, case.settings), schedule)
    laid = {name: json.loads(json.dumps(whole.laid_at_the_end(name).tolist())) for name in dropped}
    left = {name: case.sources[name] for name in case.sources if name in kept}
    cut = MixedLanes(Sources(left, case.settings, absent=dropped, laid=laid), schedule)
    for order in (whole, cut):
        order._block_time = 16
    start, lane = until + 250 + data.draw(st.integers(0, 100)), data.draw(st.integers(0, case.settings.lanes - 1))
    (chunks, offsets), (others, other_offsets) = (one.lane_samples(lane, start, start + 40) for one in (whole, cut))
    assert named(case.sources, chunks) == named(left, others)
    assert offsets.tolist() == other_offsets.tolist()
    counts = [dict(zip(one.sources.every_name, one.drawn(lane, start).tolist(), strict=True)) for one in (whole, cut)]
    assert counts[0] == counts[1]
    if any(name in entry.weights and entry.weights[name] for name in dropped for entry in schedule):
        with pytest.raises(StateError, match="which it lacks"):
            cut.lane_samples(lane, 0, 1)


def test_from_where_an_absent_source_is_not_needed() -> None:
    """Counting what was drawn looks back by three windows, of samples that lie far apart in chunks of one."""
    order = OrderSettings(seed=1, lanes=2, window=60)
    tables, schedule = {"a": [1] * 90, "b": [1] * 90}, [
        Weights(start=0, weights={"a": 1, "b": 1}), Weights(start=900, weights={"a": 1}),
    ]  # fmt: skip
    whole = MixedLanes(Sources(tables, order), schedule)
    laid = {"b": whole.laid_at_the_end("b").tolist()}
    cut = MixedLanes(Sources({"a": tables["a"]}, order, absent=["b"], laid=laid), schedule)
    for lane in range(2):
        assert cut.drawn(lane, cut.known_from).tolist() == whole.drawn(lane, cut.known_from).tolist()


def inside(runs: Runs, start: int, stop: int) -> list[tuple[int, int]]:
    """(chunk, offset) of the samples of runs at positions ``[start, stop)`` of the lane's stream."""
    rows = zip(runs.begins.tolist(), runs.chunk_ids.tolist(), runs.firsts.tolist(), runs.sizes.tolist(), strict=True)
    return [(chunk, first + k) for at, chunk, first, size in rows for k in range(size) if start <= at + k < stop]


@unhurried
@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any), min_size=1, max_size=6),
    st.sampled_from([1, 3, 8, 20]), st.data(),
)  # fmt: skip
def test_runs_of_sources_drawn_at_once_are_those_of_each(
    tables: list[list[int]], lanes: int, data: st.DataObject
) -> None:
    """In bundles of one pass or of many, also for one that has grown."""
    order = OrderSettings(seed=1, lanes=lanes, window=0)
    named = {f"{number}": table for number, table in enumerate(tables)}
    grown = SourceLanes(Sources(named, order).eras["0"], order).free_pass(data.draw(st.integers(1, 30)))
    named["0"] = [*tables[0], 3, 5]
    eras = Sources(named, order, eras={"0": [(0, len(tables[0])), (grown, len(tables[0]) + 2)]}).eras
    low = data.draw(st.integers(0, lanes - 1))
    high = data.draw(st.integers(low + 1, lanes))
    starts = np.array(data.draw(st.lists(st.integers(0, 200), min_size=len(tables), max_size=len(tables))))
    stops = starts + data.draw(st.integers(1, 60))
    alone = [
        SourceLanes(eras[name], order).runs(low, high, start, stop)
        for name, start, stop in zip(named, starts.tolist(), stops.tolist(), strict=True)
    ]
    for kept_parts in (0, 1):
        some = [SourceLanes(eras[name], order, kept_parts=kept_parts) for name in named]
        some[-1].runs(0, lanes, 0, 5)  # one whose first bundle is known already
        runs, counts = runs_of(some, low, high, starts, stops)
        assert counts.tolist() == [len(each.lanes) for each in alone]
        for name in ("lanes", "chunk_ids", "firsts", "sizes", "begins"):
            assert getattr(runs, name).tolist() == getattr(Runs.joined(alone), name).tolist()


@pytest.mark.parametrize("segments", [1, 3, 20])
def test_stamps_of_several_sources_are_those_of_each(segments: int) -> None:
    draw = np.random.default_rng(segments)
    names = ["a", "b", "c", "none"]
    schedule = [
        Weights(start=30 * at, weights={name: int(draw.integers(0, 4)) for name in names[:-1]} | {"a": 1})
        for at in range(segments)
    ]
    each = list(virtual_time.growths(names, schedule).values())
    sources = np.repeat([0, 1, 3], 50)
    samples = draw.random(150) * 40 * segments + 0.01
    found = virtual_time.Growth.of_all(each).stamps_of(sources, samples)
    assert found.tolist() == np.concatenate([each[at].stamps(samples[sources == at]) for at in (0, 1, 3)]).tolist()


def test_memory_that_has_converged_is_not_looked_at_any_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of 32 stretches then give the same bound, to a ninth.

    It is not cut short as long as it grows, nor before all sources have begun: of the second mixture two stretches need
    the same, but its large chunks begin in the last half.
    """
    sources = {f"{number}": [1 + number % 3] * 40 for number in range(50)}
    order = OrderSettings(seed=1, lanes=2, window=20)
    orders = MixedLanes(Sources(sources, order), [Weights(start=0, weights=dict.fromkeys(sources, 1))])
    rare = MixedLanes(
        Sources({"small": [20] * 100, "large": [4000] * 99}, order),
        [Weights(start=0, weights={"small": 99, "large": 1})],
    )
    late = MixedLanes(
        Sources({"small": [8] * 3000, "large": [4000] * 9}, order),
        [Weights(start=0, weights={"small": 50, "large": 1})],
    )

    def looked_at(orders: MixedLanes) -> tuple[int, int]:
        plan = Plan(orders.chunk_samples, order, orders=orders, global_batch_size=4, dp_world_size=1)
        seen: list[range] = []
        monkeypatch.setattr(plan, "_intervals", lambda *each: seen.append(each[1]) or Plan._intervals(plan, *each))
        return plan.live_bytes(np.maximum(orders.chunk_samples, 1) ** 2, 0), len(seen)

    monkeypatch.setattr("streaming.order.plan.plan._MANY_USES", 10**9)
    whole, all_stretches = looked_at(orders)
    grown = [looked_at(one)[0] for one in (rare, late)]
    monkeypatch.setattr("streaming.order.plan.plan._MANY_USES", 100)
    part, few_stretches = looked_at(orders)
    assert (few_stretches, all_stretches) == (2, 32)
    assert part <= whole <= part * 10 / 9
    assert [looked_at(one)[0] for one in (rare, late)] == grown


@pytest.mark.parametrize("lanes", [1, 8])
def test_a_plan_without_an_epoch_size_has_no_end(lanes: int) -> None:
    sources = Sources({"a": [5, 6], "b": [7]}, OrderSettings(seed=1, lanes=lanes, window=6))
    orders = MixedLanes(sources, [Weights(start=0, weights={"a": 1, "b": 1})])
    plan = Plan(orders.chunk_samples, orders.settings, orders=orders, global_batch_size=16, dp_world_size=2)
    assert plan.is_endless
    assert plan.num_batches == ENDLESS // 16
    assert len(plan.rank_batches(10**9, 10**9 + 2, 1).chunk_ids) == 16
    assert plan.live_bytes([1, 1, 1], 0) == 3
    assert plan.rank_chunks(1).tolist() == [0, 1, 2]
    assert len(next(plan.intervals_by_pass(0)).chunk_ids)
    with pytest.raises(ConfigError, match="no end: give an epoch_size"):
        plan.chunk_intervals(0)


def test_substitutes_come_from_the_chunks_own_source() -> None:
    sources = Sources({"a": [5, 6, 0], "b": [7, 8]}, OrderSettings(seed=1, lanes=2, window=6))
    weights = [Weights(start=0, weights={"a": 1})]
    for order in (MixedPasses(sources).of_pass(3), MixedLanes(sources, weights), ExactLanes(sources, weights)):
        assert [list(order.chunks_before(chunk)) for chunk in range(5)] == [[2, 1], [0, 2], [1, 0], [4], [3]]


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ([], "the first must apply from 0 on"),
        ([Weights(start=1, weights={"a": 1})], "the first must apply from 0 on"),
        ([Weights(start=0, weights={"c": 1})], "'c': no such source, got a, b"),
        ([Weights(start=0, weights={"a": 0})], "at least one must be above 0"),
        ([Weights(start=0, weights={"a": 1}), Weights(start=9, weights={"b": 1}), Weights(start=8, weights={"a": 1})],
         "ascending starts, got 8 after 9"),
    ],
)  # fmt: skip
def test_wrong_schedules_are_refused(schedule: list[Weights], words: str) -> None:
    sources = Sources({"a": [5], "b": [7]}, OrderSettings(seed=1, lanes=2, window=6))
    with pytest.raises(ConfigError, match=words):
        MixedLanes(sources, schedule)


def test_wrong_sources_and_quotas_are_refused() -> None:
    order = OrderSettings(seed=1, lanes=2, window=6)
    with pytest.raises(ConfigError, match="none are given"):
        Sources({}, order)
    with pytest.raises(ConfigError, match="source 'a': the data set is empty"):
        Sources({"a": [0]}, order)
    with pytest.raises(ConfigError, match='scope="global"'):
        Sources({"a": [1]}, replace(order, scope="lane"))
    for quotas in ({"a": 1}, {"a": 1, "b": -1}, {"a": 1, "b": 1, "c": 1}):
        with pytest.raises(ConfigError, match="expected samples of each of"):
            MixedPasses(Sources({"a": [5], "b": [7]}, order), quotas=quotas)
    with pytest.raises(ConfigError, match="a pass would be empty"):
        MixedPasses(Sources({"a": [5]}, order), quotas={"a": 0})


def golden_orders() -> dict[str, Orders]:
    tables, settings = (
        {"web": [5, 4, 6, 5] * 5, "code": [3, 0, 3], "math": [1, 1]},
        OrderSettings(seed=11, lanes=4, window=8),
    )
    sources = Sources(tables, settings)
    schedule = [
        Weights(start=0, weights={"web": 0.5, "code": 0.3, "math": 0.2}),
        Weights(start=60, weights={"web": 1, "code": 0.01}),
    ]
    return {
        "by size": MixedPasses(sources),
        "by quotas": MixedPasses(sources, quotas={"web": 50, "code": 15, "math": 2}),
        "by weights": MixedLanes(sources, schedule),
        "by weights, evenly": EvenLanes(Sources(tables, settings, even={"code": "runs", "math": "rows"}), schedule),
    }


def test_the_order_of_mixtures_is_the_same_for_ever() -> None:
    found = {}
    for name, orders in golden_orders().items():
        plan = Plan(
            orders.chunk_samples, orders.settings, orders=orders, global_batch_size=8, dp_world_size=1, epoch=1,
            epoch_size=400,
        )  # fmt: skip
        rows = plan.rank_batches(0, 20, 0)
        found[name] = [f"{chunk}:{offset}" for chunk, offset in zip(rows.chunk_ids, rows.offsets, strict=True)]
    assert found == json.loads((GOLDEN / "mixed_order.json").read_text())


def test_the_order_does_not_depend_on_how_sources_are_listed() -> None:
    tables = {"web": [5, 4, 6, 5], "code": [3, 0, 3], "math": [1, 1]}
    order = OrderSettings(seed=3, lanes=4, window=8)
    seen = []
    for names in (list(tables), list(tables)[::-1]):
        sources = Sources({name: tables[name] for name in names}, order)
        lanes = MixedLanes(sources, [Weights(start=0, weights={"web": 1, "math": 3, "code": 2})])
        for orders in (lanes, MixedPasses(sources)):
            plan = Plan(
                sources.chunk_samples, order, orders=orders, global_batch_size=8, dp_world_size=1, epoch_size=24
            )
            rows = plan.rank_batches(0, 3, 0)
            starts = np.cumsum([0, *(len(tables[name]) for name in names)])
            of = sources.source_of(rows.chunk_ids)
            seen.append(
                [(names[s], c - starts[s], o) for s, c, o in zip(of, rows.chunk_ids, rows.offsets, strict=True)]
            )
    assert seen[:2] == seen[2:]
