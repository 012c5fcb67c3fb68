"""How often each sample of a small source came after some passes over it, in endless mixtures of every kind."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, floor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shard_tools import ShardWriter
from streaming import Balanced, Curriculum, DataLoader, Mixture, Schedule, ShuffleConfig, StreamingDataset
from streaming.errors import ConfigError, StateError
from streaming.order.mixing.exact import ExactLanes
from streaming.order.mixing.forecast import drawn_before
from streaming.order.mixing.granularity import ByBatches, ByChunks, BySamples
from streaming.order.mixing.passes import Sources, Weights
from streaming.order.plan.ledger import Dealt
from streaming.order.plan.order import OrderSettings, default_window
from streaming.order.plan.plan import Plan
from tests.support.models.mixed_plans import Case, cases, lanes_dealt, named, sizes_, unhurried, weights_
from tests.support.sets.data_sets import SampleSet, loaders, make_sample, write_set
from tests.support.tiers import first_here

LARGE = [100] * 120
DEALT: list[Dealt] = ["chunks", "samples", "batches"]


def chunks_of(samples: int, chunks: int) -> list[int]:
    return [samples * (at + 1) // chunks - samples * at // chunks for at in range(chunks)]


def orders_of(
    tables: Mapping[str, Sequence[int]], schedule: Sequence[Weights], lanes: int, dealt: Dealt, seed: int = 5
) -> ExactLanes:
    """As a mixture makes them, with the default window."""
    sizes = {name: sum(table) for name, table in tables.items()}
    num_chunks = sum(map(len, tables.values()))
    settings = OrderSettings(seed=seed, lanes=lanes, window=default_window(sum(sizes.values()), num_chunks))
    shares = {
        name: max(entry.weights.get(name, 0) / sum(entry.weights.values()) for entry in schedule) for name in tables
    }
    forms = {form.dealt: form for form in (ByChunks(), BySamples(), ByBatches(4 * lanes))}
    sources = Sources(tables, settings, even=forms[dealt].even(tables, shares, settings))
    return lanes_dealt(dealt, sources, schedule, 4 * lanes)


def apart(orders: Any, rows: int, step: int = 1) -> dict[str, float]:
    """Of each source: by how much the count of a sample is ever beyond the passes drawn, or short of them, in wholes.

    At the end of each row of all lanes, or of every ``step`` of them.
    """
    lanes, starts = orders.settings.lanes, np.cumsum(orders.chunk_samples) - orders.chunk_samples
    drawn = np.empty((rows, lanes), np.int64)
    for lane in range(lanes):
        ids, offsets = orders.lane_samples(lane, 0, rows)
        drawn[:, lane] = starts[ids] + offsets
    of = orders.sources.source_of(np.repeat(np.arange(len(starts)), orders.chunk_samples))
    often, found = np.zeros(len(of), np.int64), dict.fromkeys(orders.sources.names, 0.0)
    for row in range(step, rows + 1, step):
        often += np.bincount(drawn[row - step : row].ravel(), minlength=len(of))
        for number, name in enumerate(orders.sources.names):
            some = often[of == number]
            passes = float(some.mean())
            found[name] = max(found[name], some.max() - ceil(passes), floor(passes) - some.min())
    return found


@pytest.mark.parametrize("dealt", DEALT)
@pytest.mark.parametrize(
    ("samples", "chunks", "lanes"),
    [(1, 1, 16), (3, 1, 64), (20, 7, 64), (120, 60, 16), (900, 1, 64), (900, 12, 16), (900, 60, 64), (1500, 4, 1)],
)
def test_each_sample_comes_once_before_any_comes_again(samples: int, chunks: int, lanes: int, dealt: Dealt) -> None:
    """To within one, at every row: laid in rounds, some of 900 came 28 times before others came once."""
    tables = {"few": chunks_of(samples, chunks), "large": LARGE}
    orders = orders_of(tables, [Weights(start=0, weights={"few": 0.3, "large": 0.7})], lanes, dealt)
    rows = -(-max(4 * samples, 400) * 10 // 3 // lanes // 4) * 4
    assert apart(orders, rows, 4 if dealt == "batches" else 16 // lanes or 1)["few"] <= 1


@unhurried
@given(
    st.dictionaries(st.sampled_from("abcdef"), sizes_, min_size=1, max_size=5), st.integers(1, 40),
    st.sampled_from(DEALT), st.integers(0, 99), st.data(),
)  # fmt: skip
def test_passes_are_even_for_every_size_and_every_weight(
    tables: dict[str, list[int]], lanes: int, dealt: Dealt, seed: int, data: st.DataObject
) -> None:
    """Also where weights change, and of all sources together: to within one, and another one where a window ends."""
    tables["large"] = [50] * data.draw(st.integers(1, 90))
    schedule = [
        Weights(start=20 * at, weights=data.draw(weights_(sorted(tables))))
        for at in range(data.draw(st.integers(1, 4)))
    ]
    orders = orders_of(tables, schedule, lanes, dealt, seed)
    found = apart(orders, 120, 4 if dealt == "batches" else 1)
    rows = [name for name in tables if orders.sources.even.get(name) == "rows"]
    assert all(found[name] <= 0 for name in rows), found  # to the sample, whatever the weights do
    assert max(found.values()) <= 2, (found, orders.sources.even)


@pytest.mark.parametrize("dealt", ["chunks", "samples"])
def test_every_lane_draws_from_every_source(dealt: Dealt) -> None:
    """Sixteen sources in sixteen lanes must not come in step: else a rank would never see some."""
    tables = {f"{number:02}": [20] for number in range(16)}
    orders = orders_of(tables, [Weights(start=0, weights=dict.fromkeys(tables, 1))], 16, dealt)
    assert set(orders.sources.even.values()) == {"rows"}
    for lane in range(16):
        drawn = np.bincount(orders.lane_samples(lane, 0, 400)[0], minlength=16)
        assert drawn.min() > 5
        assert drawn.max() < 60


@unhurried
@given(cases(endless=True), st.integers(0, 2000) | st.integers(0, 10**9), st.data())
def test_what_was_drawn_is_counted_at_every_row(case: Case, row: int, data: st.DataObject) -> None:
    """Of all sources, however they are dealt; and growth is behind it."""
    orders: Any = case.orders()
    lanes = case.settings.lanes
    before, behind = drawn_before(orders, row), drawn_before(orders, row + 5 * lanes)
    got: Counter[str] = Counter()
    for at in range(row, row + 5 * lanes):
        ids, _ = orders.lane_samples(at % lanes, at // lanes, at // lanes + 1)
        got[orders.sources.names[int(orders.sources.source_of(ids)[0])]] += 1
    assert {name: behind[name] - before[name] for name in before} == {name: got[name] for name in before}
    assert sum(before.values()) == row
    for name, count in behind.items():
        size = sum(case.sources[name])
        assert size * orders.free_pass(name) >= count - 2 * lanes * case.settings.window - lanes


@pytest.mark.thorough
@settings(unhurried, max_examples=20)
@given(cases(endless=True, dealt="chunks"), st.integers(0, 60), st.integers(0, 200), st.data())
def test_appended_weights_are_those_that_were_there_from_the_start(
    case: Case, planned: int, behind: int, data: st.DataObject
) -> None:
    """What is planned stays, and a replay from the ledger gives the same; also where nothing is laid for a while."""
    case = replace(case, schedule=case.schedule[:1])
    names, lanes = sorted(case.sources), sorted({0, case.settings.lanes - 1})
    orders: Any = case.orders()
    schedule, seen = list(case.schedule), []
    for _ in range(3):
        first = max(planned - 60, 0)
        seen += [(lane, first, planned, orders.lane_samples(lane, first, planned)) for lane in lanes if planned]
        if planned:
            orders.lane_parts(0, lanes[-1] + 1, first, planned)
        start = orders.frontier + data.draw(st.integers(0, 30))
        later = Weights(start=start, weights=data.draw(weights_(names)))
        if orders.frontier:
            with pytest.raises(ConfigError, match=f"planned up to {orders.frontier}"):
                orders.append(replace(later, start=orders.frontier - 1))
        orders.append(later)
        schedule.append(later)
        planned = start + behind
    seen += [(lane, max(planned - 60, 0), planned, orders.lane_samples(lane, max(planned - 60, 0), planned))
             for lane in lanes if planned]  # fmt: skip
    whole: Any = replace(case, schedule=schedule).orders()
    for lane, first, stop, found in seen:
        for one, other in zip(found, whole.lane_samples(lane, first, stop), strict=True):
            assert one.tolist() == other.tolist()


@settings(unhurried, max_examples=40)
@given(cases(endless=True), st.data())
def test_the_others_stand_where_they_do_when_sources_are_gone(case: Case, data: st.DataObject) -> None:
    """Whichever way each was dealt."""
    names = sorted(case.sources)
    kept = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    dropped = sorted(set(names) - set(kept))
    until = case.schedule[-1].start + data.draw(st.integers(1, 300))
    schedule = [*case.schedule, Weights(start=until, weights=dict.fromkeys(kept, 1))]
    whole: Any = replace(case, schedule=schedule).orders()
    found = {name: whole.laid_at_the_end(name) for name in dropped} if case.dealt == "chunks" else {}
    laid = {name: counts.tolist() for name, counts in found.items() if counts is not None}
    if case.dealt == "chunks" and not set(dropped) <= laid.keys() | case.even.keys():
        return  # none is laid any more, so what was laid ahead is not told yet
    left = {name: case.sources[name] for name in case.sources if name in kept}
    sources = Sources(left, case.settings, absent=dropped, laid=json.loads(json.dumps(laid)), even=case.even)
    size = case.global_batch_size if case.dealt == "batches" else None
    cut: Any = lanes_dealt(case.dealt, sources, schedule, case.global_batch_size)
    start = max(cut.known_from, until + (size or 0)) + data.draw(st.integers(0, 50))
    if start > 10**6:
        return  # a source whose numbers are missing is needed for ever
    for lane in {0, case.settings.lanes - 1}:
        (chunks, offsets), (others, other_offsets) = (one.lane_samples(lane, start, start + 40) for one in (whole, cut))
        assert named(case.sources, chunks) == named(left, others)
        assert offsets.tolist() == other_offsets.tolist()
    row = start * case.settings.lanes
    assert drawn_before(cut, row) == {name: drawn_before(whole, row)[name] for name in cut.sources.every_name}
    drawn = drawn_before(whole, until * case.settings.lanes)
    if any(drawn[name] for name in dropped):
        with pytest.raises(StateError, match=r"which (it|this mixture) lacks"):
            drawn_in_full(cut, until + 1)


def drawn_in_full(orders: Any, stop: int) -> None:
    for lane in range(orders.settings.lanes):
        orders.lane_samples(lane, 0, stop)


def test_chunks_of_small_sources_count_in_the_memory() -> None:
    """They are needed all the time, on every rank, beside those of the others."""
    for dealt in ("chunks", "samples"):
        orders = orders_of(
            {"few": [900], "large": LARGE, "one": [1]},
            [Weights(start=0, weights={"few": 0.3, "large": 0.6, "one": 0.1})], 16, dealt,
        )  # fmt: skip
        sizes = np.array([10**9, *[1] * 120, 10**6])
        for dp_rank in range(4):
            plan = Plan(orders.chunk_samples, orders.settings, orders=orders, global_batch_size=64, dp_world_size=4,
                        epoch_size=64 * 2000)  # fmt: skip
            assert plan.live_bytes(sizes, dp_rank) >= 10**9 + 10**6
            live = plan.chunk_intervals(dp_rank)
            assert int((live.chunk_ids == 0).sum()) == 1  # fetched once
            assert live.last_batches[live.chunk_ids == 0].tolist() == [1999]


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SampleSet]:
    root = tmp_path_factory.mktemp("passes")
    return {
        "few": write_set(root / "few", (60,), first=10_000), "tiny": write_set(root / "tiny", (5,), first=20_000),
        "large": write_set(root / "large", (300, 300), chunk_samples=8),
    }  # fmt: skip


WEIGHTS = {"few": 3, "tiny": 2, "large": 5}


def kinds(sets: dict[str, SampleSet], kind: str) -> Mixture:
    few_lanes = ShuffleConfig(lanes=16)
    here = {name: one.open() for name, one in sets.items()}
    if kind == "nested":
        inner = Mixture({name: here.pop(name) for name in ("few", "tiny")}, weights={"few": 3, "tiny": 2})
        return Mixture({"text": inner, **here}, weights={"text": 1, "large": 1}, shuffle=few_lanes)
    options: dict[str, dict[str, Any]] = {
        "chunks": {"weights": WEIGHTS},
        "exact": {"weights": WEIGHTS, "quotas": "exact"},
        "one source": {"weights": WEIGHTS, "batches": "one_source"},
        "schedule": {"weights": Schedule.linear(WEIGHTS, {"few": 1, "tiny": 5, "large": 4}, over=900)},
    }
    return Mixture(here, shuffle=few_lanes, **options[kind])


@pytest.mark.thorough
@pytest.mark.usefixtures("one_fork_server")
@pytest.mark.parametrize("kind", ["chunks", "exact", "one source", "schedule", "nested"])
def test_passes_that_a_loader_reports_are_those_that_came(sets: dict[str, SampleSet], kind: str) -> None:
    """And they go on evenly after a resume, on other ranks."""
    mix = kinds(sets, kind)
    got: Counter[str] = Counter()
    state, seen = None, dict[str, dict[str, float]]()
    for world in (1, 3):
        after = None
        for loader in loaders(mix, world, global_batch_size=48):
            if state is not None:
                loader.load_state_dict(state)
            got.update(key for _, batch in zip(range(12), loader, strict=False) for key in batch["__key__"])
            after, seen = loader.state_dict(), loader.seen()
        state = after
        for name, counts in seen.items():
            often = [got[key] for key in sets[name.rpartition("/")[2]].keys]
            assert sum(often) == counts["samples"]
            assert sum(often) / len(often) == pytest.approx(counts["passes"])
            assert max(often) - ceil(counts["passes"]) <= 1
            assert floor(counts["passes"]) - min(often) <= 1


@pytest.mark.usefixtures("one_fork_server")
@pytest.mark.parametrize("quotas", ["chunks", "exact"])
@pytest.mark.parametrize("kind", ["balanced", "curriculum"])
def test_groups_of_unlike_sizes_pass_evenly(tmp_path: Path, kind: str, quotas: Any) -> None:
    sizes = {0: 3, 1: 7, 2: 40, 3: 150}
    groups = [name for name, size in sizes.items() for _ in range(size)]
    with ShardWriter(f"{tmp_path}/{{:06d}}.tar", columns=["cls"], max_samples=60) as writer:
        for number, group in enumerate(groups):
            writer.write({**make_sample(number), "cls": group})
    data = StreamingDataset(f"{tmp_path}/", shuffle=ShuffleConfig(lanes=16))
    mix = (
        Balanced(data, by="cls", quotas=quotas)
        if kind == "balanced"
        else Curriculum(data, "cls", Schedule.linear(1, 3, over=600), by="value", buckets=[1, 2, 3], quotas=quotas)
    )
    with DataLoader(mix, batch_size=32, num_threads=0) as loader:
        got = Counter(key for _, batch in zip(range(40), loader, strict=False) for key in batch["__key__"])
    for some in [{0}, {1}] if kind == "balanced" else [{0, 1}]:
        often = [got[f"{number:05d}"] for number, group in enumerate(groups) if group in some]
        assert min(often) > 2
        assert max(often) - min(often) <= 1  # of hundreds, the less even they are if chunks are laid in rounds
    for some in [{2}, {3}]:
        often = [got[f"{number:05d}"] for number, group in enumerate(groups) if group in some]
        assert max(often) - min(often) <= 2


@pytest.mark.parametrize("dealt", ["chunks", "samples", "batches"])
@pytest.mark.parametrize(("chunks", "times", "is_laid"), [
    (1, 2**24, True), (1, 2**24 + 1, False), (10, 10**9, False), (2**20, 100, True), (2**20, 101, False),
])  # fmt: skip
def test_chunks_of_a_pass_are_counted_before_they_are_laid(
    dealt: Dealt, chunks: int, times: int, is_laid: bool
) -> None:
    """However often a source is read: a number in a file of some bytes costs no more than the page of security says."""
    dealing = {"chunks": ByChunks(), "samples": BySamples(), "batches": ByBatches(batch_size=8)}[dealt]
    settings = OrderSettings(seed=1, lanes=8, window=0)
    sources = Sources({"a": np.full(chunks, 8)}, settings)
    if is_laid:
        assert dealing.passes(sources, {"a": 8 * chunks * times}).samples_per_pass == 8 * chunks * times
        return
    with pytest.raises(
        ConfigError, match=r"chunks, at most [0-9,]+ can be laid out: 'a' is read .* times\. Give smaller"
    ):
        dealing.passes(sources, {"a": 8 * chunks * times})


ODD = (5e-324, 1e-300, 1e-20, 1e20, 1e300, 1.7e308, 2**63, 3)
"""Weights at the ends of what floats are, and whole ones beyond 64 bits."""
WAYS: dict[str, dict[str, Any]] = {
    "chunks": {}, "exact": {"quotas": "exact"}, "batches": {"batches": "one_source"}, "in order": {"shuffle": False},
    "bytes": {"unit": "bytes"}, "first": {"ends": "first"}, "all": {"ends": "all"},
    "units": {"quotas": "exact", "fetch_bytes": "1MiB"},
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("other", first_here([5e-324, 1, 1e300], 1))
def test_any_weights_work_or_are_refused_by_name(sets: dict[str, SampleSet], way: str, other: float) -> None:
    """Only ratios count; a share too small to come is never drawn."""
    names = sorted(sets)[:2]
    of = {name: StreamingDataset(sets[name].url) for name in names}
    refused: list[str] = []
    for odd in ODD:
        try:
            mixture = Mixture(of, weights=dict(zip(names, (odd, other), strict=True)), **WAYS[way])
            with DataLoader(mixture, batch_size=8, num_threads=0, epoch_size=64) as loader:
                next(iter(loader))
                loader.state_dict()
        except ConfigError as error:
            refused.append(str(error))
    assert way in {"first", "all"} or not refused
    assert all("weights" in text for text in refused)


@pytest.mark.parametrize("odd", ODD)
def test_any_weights_are_a_step_of_a_schedule_and_the_share_of_a_mixture_within(
    sets: dict[str, SampleSet], odd: float
) -> None:
    names = sorted(sets)[:2]
    of = {name: StreamingDataset(sets[name].url) for name in names}
    steps = Schedule.steps({0: dict(zip(names, (odd, 1), strict=True)), 8: dict(zip(names, (1, odd), strict=True))})
    inner = Mixture(of, weights=dict(zip(names, (odd, 1), strict=True)))
    for mixture in (Mixture(of, weights=steps), Mixture({"in": inner, "a": of[names[0]]}, weights={"in": 1, "a": odd})):
        with DataLoader(mixture, batch_size=8, num_threads=0, epoch_size=64) as loader:
            assert len([*loader]) == 8
