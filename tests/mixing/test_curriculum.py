"""A curriculum as users see it: which samples are due at which row, P1 to P5, resumes, mixtures, wrong arguments."""

from __future__ import annotations

import json
import logging
import math
import pickle
import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from shard_tools import ShardWriter
from shard_tools.cli import cli
from streaming import Curriculum, DataLoader, Mixture, Schedule, StreamingDataset
from streaming.errors import ConfigError, OptionError, StateError
from streaming.order.plan.state import LoaderState
from streaming.sets.datasets.curriculum import _Metric
from streaming.sets.sources.samples import SampleSource
from streaming.shards.index.columns import count_values, plain_values
from tests.support.processes.thread_peers import ThreadPeers, on_ranks
from tests.support.servers.on_loopback import MiniS3Server
from tests.support.sets.curriculum_sets import FEW_LANES, NUM, RARITY, TOKENS, plain_world, write
from tests.support.sets.data_sets import Batches, data_gets, total, world_from

STEPS = Schedule.steps({0: 0.25, 600: 0.5, 1500: 1.0})


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """240 samples, six in each chunk."""
    return write(str(tmp_path_factory.mktemp("curriculum")))


@pytest.fixture(scope="module")
def data(url: str) -> StreamingDataset:
    return StreamingDataset(url, shuffle=FEW_LANES)


@lru_cache(maxsize=64)
def members(source: SampleSource) -> frozenset[int]:
    """Numbers of the samples that are read, which never change."""
    table = source.shards.table
    assert table is not None
    return frozenset(
        np.flatnonzero(np.concatenate([source.selection.mask(shard) for shard in range(len(table.shards))])).tolist()
    )


def pool_of(curriculum: Curriculum, row: int) -> set[int]:
    found = [members(curriculum.source.leaves[name]) for name in curriculum.pool(row)]
    assert sum(map(len, found)) == len(set().union(*found))  # no sample in two buckets
    assert [len(one) for one in found] == list(curriculum.pool(row).values())
    return set().union(*found)


def at_most(values: list[float], share: float, buckets: int) -> set[int]:
    """By the definition: samples up to the value that the share, rounded down to buckets, does not exceed."""
    whole = max(math.floor(share * buckets + 1e-9), 1)
    limit = sorted(values)[math.ceil(whole * len(values) / buckets) - 1]
    return {number for number, value in enumerate(values) if value <= limit}


# ------------------------------------------------------------------------------------------- which samples when


@pytest.mark.thorough
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shares=st.lists(st.integers(1, 20), min_size=1, max_size=4), buckets=st.integers(1, 20),
    metric=st.sampled_from(["tokens", "rarity"]), shape=st.sampled_from(["steps", "linear", "root"]),
)  # fmt: skip
def test_the_pool_at_every_row_by_percentile(
    data: StreamingDataset, shares: list[int], buckets: int, metric: str, shape: str
) -> None:
    if shape == "steps":
        schedule = Schedule.steps({500 * at: share / 20 for at, share in enumerate(shares)})
    else:
        schedule = getattr(Schedule, shape)(shares[0] / 20, shares[-1] / 20, over=2000, segments=8)
    curriculum = Curriculum(data, metric, schedule, buckets=buckets)
    values: list[Any] = TOKENS if metric == "tokens" else RARITY
    for row, share in schedule.segments():
        for at in (row, row + 1):
            assert pool_of(curriculum, at) == at_most(values, float(share), buckets)  # type: ignore[arg-type]


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(borders=[8, 1003], values=[1002])
@given(
    borders=st.lists(st.integers(0, 1100), min_size=1, max_size=6, unique=True).map(sorted),
    values=st.lists(st.integers(0, 1100), min_size=1, max_size=4),
)
def test_the_pool_by_value_is_exact_on_borders(data: StreamingDataset, borders: list[int], values: list[int]) -> None:
    schedule = Schedule.steps({100 * at: value for at, value in enumerate(values)})
    curriculum = Curriculum(data, "tokens", schedule, by="value", buckets=borders)
    uppers = borders if borders[-1] >= max(TOKENS) else [*borders, max(TOKENS)]
    for at, value in enumerate(values):
        easiest = min(upper for upper in uppers if upper >= min(TOKENS))  # always open
        limit = max([easiest, *(upper for upper in uppers if upper <= value)])
        expected = {number for number, tokens in enumerate(TOKENS) if tokens <= limit}
        assert pool_of(curriculum, 100 * at) == expected


def test_the_pool_of_several_metrics_is_what_all_of_them_open(data: StreamingDataset) -> None:
    curriculum = Curriculum(
        data,
        {"tokens": Schedule.steps({0: 66, 900: 2000}), "rarity": Schedule.linear(0.3, 1.0, over=1000)},
        by={"tokens": "value", "rarity": "percentile"},
        buckets={"tokens": [66, 514], "rarity": 10},
    )
    for row in (0, 100, 500, 899, 900, 999, 1000, 10**9):
        rarity = curriculum._grid.metrics[1].schedule.at(row)
        easy = {number for number, tokens in enumerate(TOKENS) if tokens <= (66 if row < 900 else 2000)}
        assert pool_of(curriculum, row) == easy & at_most(RARITY, float(rarity), 10)  # type: ignore[arg-type]
    assert len(pool_of(curriculum, 1000)) == NUM


def test_a_schedule_that_falls_closes_buckets(data: StreamingDataset) -> None:
    curriculum = Curriculum(data, "rarity", Schedule.steps({0: 1.0, 500: 0.5}), buckets=4)
    assert len(pool_of(curriculum, 0)) == NUM
    assert pool_of(curriculum, 500) == at_most(RARITY, 0.5, 4)


@pytest.mark.thorough
def test_three_tenths_are_three_of_ten_buckets(data: StreamingDataset) -> None:
    for tenths in (3, 6, 7, 1, 2, 4, 8, 9):
        for buckets in (10, [tenths / 10, 1.0]):
            curriculum = Curriculum(data, "rarity", Schedule.steps({0: tenths / 10}), buckets=buckets)
            assert pool_of(curriculum, 0) == at_most(RARITY, tenths / 10, 10)


@pytest.mark.parametrize(
    "choice", [{"subset": (0.1, 0.83)}, {"where": "tokens > 16"}, {"where": "rarity < 0.7", "subset": (7, 200)}]
)
def test_of_a_filtered_set_and_of_a_view(url: str, choice: dict[str, Any]) -> None:
    dataset = StreamingDataset(url, **choice)[5:80]
    kept = members(dataset.source)
    assert len(kept) == 75
    curriculum = Curriculum(dataset, "tokens", Schedule.steps({0: 0.5, 100: 1}), buckets=4)
    assert pool_of(curriculum, 100) == kept
    limit = sorted(TOKENS[number] for number in kept)[math.ceil(75 / 2) - 1]
    assert pool_of(curriculum, 0) == {number for number in kept if TOKENS[number] <= limit}
    assert {number: curriculum[number]["__key__"] for number in (0, 74, -1)} == {
        number: f"{sorted(kept)[number]:05d}" for number in (0, 74, -1)
    }


# --------------------------------------------------------------------------------------------------- what is read


def keys_from(loader: DataLoader, count: int) -> list[list[str]]:
    found = []
    for batch in loader:
        assert "__source__" not in batch
        assert [row["tokens"] for row in batch["json"]] == [TOKENS[int(key)] for key in batch["__key__"]]
        found.append(list(batch["__key__"]))
        if len(found) == count:
            break
    return found


def world(
    dataset: Any, ranks: int, count: int, state: Any = None, **options: Any
) -> tuple[Batches, dict[str, Any]]:  # fmt: skip
    options = {"global_batch_size": 12, "num_threads": 0, **options}
    return world_from(dataset, ranks, lambda loader: keys_from(loader, count), state, **options)


@pytest.mark.parametrize("quotas", ["chunks", "exact"])
def test_the_pool_is_drawn_from_evenly_and_others_not_yet(data: StreamingDataset, quotas: Any) -> None:
    curriculum = Curriculum(data, "tokens", STEPS, buckets=4, quotas=quotas)
    batches, state = world(curriculum, 1, 400)
    rows = [key for batch in batches for key in batch.elements()]
    # What API and docs allow: a window, and a chunk of each bucket, of each lane; exact quotas keep to the row.
    slack = 2 * (10 + 4 * 6 + 6) if quotas == "chunks" else 0
    for row, after in ((0, 600), (600, 1500), (1500, 4800)):
        pool = {f"{number:05d}" for number in pool_of(curriculum, row)}
        assert set(rows[row : after - slack]) <= pool, row
        assert set(rows[row + slack : after - slack]) == pool
        counts = Counter(rows[row + slack : after - slack])
        mean = (after - row - 2 * slack) / len(pool)
        assert max(counts.values()) <= mean + 2, (row, counts.most_common(3))
        assert min(counts.values()) >= mean - 2
    seen = DataLoader(curriculum, batch_size=12)
    seen.load_state_dict(state)
    for name, one in seen.seen().items():
        numbers = {f"{number:05d}" for number in members(curriculum.source.leaves[name])}
        assert one["samples"] == sum(row in numbers for row in rows)


@pytest.mark.thorough
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ranks=st.sampled_from([1, 2, 3]), others=st.sampled_from([1, 2, 5]), stop=st.integers(1, 39),
    nested=st.booleans(),
)  # fmt: skip
def test_stopped_anywhere_and_resumed_on_another_world(
    data: StreamingDataset, ranks: int, others: int, stop: int, nested: bool
) -> None:
    made: Any = Curriculum(data, "tokens", Schedule.steps({0: 0.25, 100: 0.5, 300: 1}), buckets=4)
    if nested:
        made = Mixture({"all": made}, weights={"all": 1}, shuffle=FEW_LANES)
    whole, _ = plain_world(made, 1, 40)
    before, state = plain_world(made, ranks, stop)
    after, _ = plain_world(made, others, 40 - stop, state)
    assert before + after == whole


@pytest.mark.thorough
@pytest.mark.usefixtures("one_fork_server")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_with_worker_processes_and_threads(data: StreamingDataset, num_workers: int) -> None:
    curriculum = pickle.loads(pickle.dumps(Curriculum(data, "tokens", STEPS, buckets=4)))
    expected, _ = world(curriculum, 1, 20)
    batches, _ = world(curriculum, 2, 20, num_workers=num_workers, num_threads=None)
    assert batches == expected
    with DataLoader(curriculum, batch_size=8, epoch_size=80) as loader:
        assert len(loader) == 10
        assert len([batch for _ in range(2) for batch in loader]) == 20


@pytest.mark.thorough
def test_another_schedule_at_a_resume_is_an_entry_of_the_ledger(
    data: StreamingDataset, caplog: pytest.LogCaptureFixture
) -> None:
    _, state = world(Curriculum(data, "tokens", STEPS, buckets=4), 2, 30)
    assert [entry["why"] for entry in state["ledger"]] == ["start"]
    assert state["ledger"][0]["schedule"]["steps"][0][0] == 0
    caplog.set_level(logging.INFO, "streaming")
    faster = Curriculum(data, "tokens", Schedule.steps({0: 0.25, 450: 1.0}), buckets=4)
    batches, after = world(faster, 3, 200, state)
    assert [entry["why"] for entry in after["ledger"]] == ["start", "changed at a resume"]
    assert set(total(batches)) == {f"{number:05d}" for number in range(NUM)}
    assert any("the mixture changes at row" in message for message in caplog.messages)
    whole, _ = world(faster, 1, 230, {**after, "samples_seen": 0})
    assert whole[30:] == batches  # from the ledger alone
    with pytest.raises(StateError, match="but this Curriculum has"):
        world(Curriculum(data, "tokens", STEPS, buckets=5), 1, 1, state)
    with pytest.raises(StateError, match="was saved over other samples"):
        world(Curriculum(data[:200], "tokens", STEPS, buckets=[0.5, 0.75]), 1, 1,
              world(Curriculum(data, "tokens", STEPS, buckets=[0.5, 0.75]), 1, 1)[1])  # fmt: skip


@pytest.mark.thorough
def test_a_state_holds_the_schedules_of_all_levels_and_not_their_products(data: StreamingDataset) -> None:
    """256 steps of the mixture, and what two curricula open: the products of those would take 300 KB."""
    faster = Curriculum(data, "tokens", STEPS, buckets=4)
    slower = Curriculum(data, "rarity", Schedule.linear(0.3, 1.0, over=3000), buckets=8)
    ramp = Schedule.linear({"soon": 0.9, "late": 0.1}, {"soon": 0.2, "late": 0.8}, over=4000)
    mixture = Mixture({"soon": faster, "late": slower}, weights=ramp)

    def run(count: int, state: Any = None) -> tuple[list[list[str]], dict[str, Any]]:
        with DataLoader(mixture, batch_size=8, epoch_size=8 * 60) as loader:
            if state is not None:
                loader.load_state_dict(state)
            return [batch["__key__"] for _, batch in zip(range(count), loader, strict=False)], loader.state_dict()

    before, state = run(30)
    assert len(json.dumps(state)) < 8000
    schedule = state["ledger"][0]["schedule"]
    assert (schedule["shape"], sorted(schedule["within"])) == ("nested", ["late", "soon"])
    after, last = run(30, json.loads(json.dumps(state)))
    assert before + after == run(60)[0]
    assert last["ledger"] == state["ledger"]  # so the schedule that was read is the one at hand
    schedule["within"]["soon"] = schedule
    with pytest.raises(StateError, match="a schedule of the ledger"):
        run(1, state | {"ledger_text": None})


def test_a_state_over_other_values_of_the_metric_is_refused(tmp_path: Path) -> None:
    urls = [str(tmp_path / name) for name in ("a", "same", "other")]
    for url, metric in zip(urls, ("first", "first", "second"), strict=True):
        with ShardWriter(f"{url}/{{:06d}}.tar", max_samples=10, columns={"metric": f"json.{metric}"}) as writer:
            for number in range(40):
                row = {"tokens": TOKENS[number], "first": number, "second": (7 * number) % 40}
                writer.write({"__key__": f"{number:05d}", "json": row})
    made = [Curriculum(StreamingDataset(f"{url}/"), "metric", STEPS, buckets=4) for url in urls]
    assert made[0].sizes == made[2].sizes  # the same groups, of other samples
    assert made[0].dataset.fingerprint == made[2].dataset.fingerprint
    _, state = world(made[0], 1, 3)
    world(made[1], 1, 1, state)
    with pytest.raises(StateError, match="if a column was added again since, give it back its old values"):
        world(made[2], 1, 1, state)


def test_a_late_column_that_was_added_again_with_other_values_is_refused(tmp_path: Path) -> None:
    url = write(str(tmp_path / "set"), num=40)

    def curriculum(factor: int) -> Curriculum:
        scores = pa.table({"key": [f"{n:05d}" for n in range(40)], "score": [(factor * n) % 40 for n in range(40)]})
        pq.write_table(scores, tmp_path / "scores.parquet")
        command = ["column", "add", url, "score", "--from", str(tmp_path / "scores.parquet"), "--on", "key"]
        added = CliRunner().invoke(cli, [*command, "--overwrite"])
        assert added.exit_code == 0, added.output
        return Curriculum(StreamingDataset(url), "score", STEPS, buckets=4)

    _, state = world(curriculum(3), 1, 3)
    with pytest.raises(StateError, match="if a column was added again since, give it back its old values"):
        world(curriculum(7), 1, 1, state)
    world(curriculum(3), 1, 1, state)


def test_within_a_mixture_it_is_one_source(data: StreamingDataset, url: str) -> None:
    curriculum = Curriculum(data, "tokens", STEPS, buckets=4)
    mix = Mixture({"web": curriculum, "all": StreamingDataset(url)}, weights={"web": 3, "all": 1}, shuffle=FEW_LANES)
    found = Counter[str]()
    with DataLoader(mix, batch_size=12, num_threads=0) as loader:
        for _, batch in zip(range(100), loader, strict=False):
            found.update(batch["__source__"])
        seen = loader.seen()
    assert set(found) == {"web", "all"}
    assert abs(found["web"] - 900) <= 2 * 5 * 6
    assert sum(one["samples"] for name, one in seen.items() if name.startswith("web/tokens<=")) == found["web"]
    assert mix[NUM + 3]["__source__"] == "web"
    assert data.source.max_bad_samples == 0.001
    assert mix.source.bad_limits(mix.source.begun(), 0, 121_000) == {"web": 91, "all": 31}  # of all buckets together
    named = Curriculum(data, "tokens", STEPS, buckets=4, name_sources=True)
    with DataLoader(Mixture({"web": named}, weights={"web": 1}), batch_size=12) as loader:
        assert {one.partition("<=")[0] for one in next(iter(loader))["__source__"]} == {"web/tokens"}


def keys_of_mixture(loader: DataLoader, count: int) -> list[list[str]]:
    return [list(batch["__key__"]) for _, batch in zip(range(count), loader, strict=False)]


@pytest.mark.parametrize("quotas", ["chunks", "exact"])
def test_other_weights_of_a_mixture_let_the_curriculum_within_go_on(
    data: StreamingDataset, url: str, quotas: Any
) -> None:
    steps = Schedule.steps({0: 0.25, 10_000: 0.5, 40_000: 1})
    curriculum = Curriculum(data, "tokens", steps, buckets=4)
    sources: dict[str, Any] = {"web": curriculum, "all": StreamingDataset(url)}
    mix = Mixture(sources, weights={"web": 1, "all": 9}, shuffle=FEW_LANES, quotas=quotas)
    with DataLoader(mix, batch_size=12, num_threads=0) as loader:
        loader.load_state_dict({**loader.state_dict(), "samples_seen": 15_000})
        row = loader.set_weights({"web": 3, "all": 1})
        assert 15_000 <= row < 40_000
        state = loader.state_dict()
        segments = [(at, found) for at, found in LoaderState.from_dict(state).ledger.segments() if at >= row]
        assert [at for at, _ in segments] == [row, 40_000]
        for at, found in segments:
            pool = {f"web/{name}": size for name, size in curriculum.pool(at).items()}
            shares = {name: 0.75 * size / sum(pool.values()) for name, size in pool.items()}
            assert {name: weight for name, weight in found.items() if weight} == pytest.approx({**shares, "all": 0.25})
        loader.load_state_dict({**state, "samples_seen": 45_000})
        batches = keys_of_mixture(loader, 3)
    with DataLoader(mix, batch_size=12, num_threads=0) as loader:  # what was laid meanwhile is what the ledger says
        loader.load_state_dict({**state, "samples_seen": 45_000})
        assert keys_of_mixture(loader, 3) == batches


def test_shares_by_tokens_count_those_of_the_open_buckets(tmp_path: Path) -> None:
    eight_shards = StreamingDataset(write(str(tmp_path), max_samples=30))  # the mean is of so many
    easy = Curriculum(eight_shards, "tokens", Schedule.steps({0: 66}), by="value", buckets=[66])
    mix = Mixture({"easy": easy, "all": eight_shards}, weights={"easy": 1, "all": 1}, unit="tokens")
    means = mix.source.weighing.units_per_sample
    assert means["all"] == pytest.approx(np.mean(TOKENS))
    assert means["easy/tokens<=66"] == pytest.approx(np.mean([tokens for tokens in TOKENS if tokens <= 66]))


# -------------------------------------------------------------------------------------- columns, ranks, what it costs


def test_samples_without_a_value(data: StreamingDataset, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"no value for 24 samples, some of .*000000.tar.*nulls=\"drop\""):
        Curriculum(data, "maybe", Schedule.linear(0.1, 1, over=10))
    caplog.set_level(logging.INFO, "streaming")
    curriculum = Curriculum(data, "maybe", Schedule.steps({0: 0.5, 9: 1}), buckets=2, nulls="drop")
    assert pool_of(curriculum, 9) == {number for number in range(NUM) if number % 10 != 3}
    assert any("24 samples without a value of 'maybe' are left out" in message for message in caplog.messages)
    both = {"maybe": Schedule.steps({0: 1}), "tokens": Schedule.steps({0: 1})}
    assert len(pool_of(Curriculum(data, both, buckets=2, nulls="drop"), 0)) == 216


def test_values_of_several_types_are_counted_as_numbers() -> None:
    large = plain_values(pa.array([2**63 + 2**20, None], pa.uint64())).drop_null()
    values, counts = count_values([(pa.array([3, 5]), None), (pa.array([0.5, 3.0]), None), (large, None)], "n")
    assert values.to_pylist() == [0.5, 3.0, 5.0, float(2**63 + 2**20)]
    assert counts.tolist() == [1, 2, 1, 1]
    assert plain_values(pa.array([0.5, float("nan")])).null_count == 1


def test_borders_that_look_alike_name_buckets_of_their_own() -> None:
    borders = tuple((one, one) for one in (2.5, 1e6 + 0.25, 1e6 + 0.5))
    metric = _Metric(name="x", by="value", schedule=Schedule.steps({0: 1}), borders=borders, least=0.0)
    assert [metric.name_of(bucket) for bucket in range(3)] == ["x<=2.5", "x<=1000000.25", "x<=1000000.5"]


def test_a_late_column(tmp_path: Path) -> None:
    url = write(str(tmp_path / "set"), num=40)
    scores = pa.table({"key": [f"{n:05d}" for n in range(40)], "score": [float((7 * n) % 40) for n in range(40)]})
    pq.write_table(scores, tmp_path / "scores.parquet")
    command = ["column", "add", url, "score", "--from", str(tmp_path / "scores.parquet"), "--on", "key"]
    added = CliRunner().invoke(cli, command)
    assert added.exit_code == 0, added.output
    curriculum = Curriculum(StreamingDataset(url), "score", Schedule.steps({0: 9.5}), by="value", buckets=[9.5, 20])
    assert pool_of(curriculum, 0) == {number for number in range(40) if (7 * number) % 40 <= 9.5}


def test_ranks_share_the_work(url: str, monkeypatch: pytest.MonkeyPatch, join_job: Callable[[Any], None]) -> None:
    alone = Curriculum(StreamingDataset(url), "tokens", STEPS)
    join_job(ThreadPeers(4))
    read: list[int] = []
    from streaming.sets.filters import select as filters  # noqa: PLC0415

    columns = filters._Work._columns
    monkeypatch.setattr(filters._Work, "_columns", lambda self, one: (read.append(one), columns(self, one))[1])
    found = on_ranks(lambda: Curriculum(StreamingDataset(url), "tokens", STEPS), 4)
    assert [one.fingerprint for one in found] == [alone.fingerprint] * 4
    assert sorted(read) == list(range(NUM // 6))  # one pass: each shard once, by one rank
    errors = on_ranks(lambda: Curriculum(StreamingDataset(url), "toks", STEPS), 4)
    assert all(isinstance(error, ConfigError) and "did you mean 'tokens'" in str(error) for error in errors), errors
    errors = on_ranks(lambda: Curriculum(StreamingDataset(url), "maybe", STEPS), 4)
    assert all(isinstance(error, ConfigError) and "no value for 24 samples" in str(error) for error in errors), errors


@pytest.mark.thorough
def test_what_it_reads_is_said_and_sorted_shards_cure_it(
    mini_s3: MiniS3Server, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    bucket = mini_s3.create_bucket("curriculum")
    options = {"storage_options": mini_s3.storage_options}
    mixed = StreamingDataset(write(f"{bucket}/mixed", payload=4000, max_samples=120, **options), **options)
    curriculum = Curriculum(mixed, "rarity", Schedule.steps({0: 1}), buckets=4)
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any("shard_tools reshard s3://curriculum/mixed/ SORTED/ --sort rarity" in message for message in warned)
    assert "bytes read for each one used" in repr(curriculum)
    mini_s3.clear_log()
    with DataLoader(curriculum, batch_size=24, num_threads=0) as loader:
        for _, _ in zip(range(50), loader, strict=False):
            pass
        seen = sum(one["passes"] for one in loader.seen().values()) / len(curriculum.names)
    read = sum(entry["bytes"] for entry in data_gets(mini_s3.log(), mixed.urls[0].rpartition("/")[0]))
    used = seen * mixed.source.table.total_bytes
    # Chunks are read anew in every pass of a bucket, or kept where memory allows it.
    assert read / used <= 1.3 * curriculum.source.read_amplification
    caplog.clear()
    target = f"{tmp_path}/sorted/"
    ran = CliRunner().invoke(
        cli, ["reshard", write(f"{tmp_path}/mixed"), target, "--sort", "rarity", "--max-samples", "10"]
    )
    assert ran.exit_code == 0, ran.output
    pure = Curriculum(StreamingDataset(target), "rarity", Schedule.steps({0: 1}), buckets=4)
    assert pure.source.read_amplification < 1.5
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]


def test_the_log_says_when_the_pool_grows(data: StreamingDataset, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "streaming")
    steps = Schedule.steps({0: 0.25, 300: 0.26, 600: 0.5, 1500: 1.0})  # at 300 nothing opens
    curriculum = Curriculum(data, "rarity", steps, buckets=4)
    sizes = [len(pool_of(curriculum, row)) for row in (0, 600, 1500)]
    said = ", ".join(f"{n:,} ({n / NUM:.1%}) from row {row:,} on" for n, row in zip(sizes, (0, 600, 1500), strict=True))
    assert f"Curriculum by rarity by percentile: of 240 samples in 4 buckets, {said}" in caplog.messages
    Curriculum(data, "rarity", Schedule.linear(0.1, 1, over=100, segments=20), buckets=20)
    assert re.search(r"in 20 buckets, .*, 13 more, 240 \(100\.0%\) from row \d+ on", caplog.messages[-1])
    with DataLoader(curriculum, batch_size=12) as loader:
        next(iter(loader))
    line = next(message for message in caplog.messages if message.startswith("epoch 0 begins"))
    assert re.search(r"rarity<=0\.\d+ is drawn from at step 50, ", line), line


# -------------------------------------------------------------------------------------------------- wrong arguments


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda d: Curriculum(d, "toks", STEPS), "no column 'toks' (did you mean 'tokens'?)"),
        (lambda d: Curriculum(d, "toks", STEPS), "shard_tools column add"),
        (lambda d: Curriculum(d, "lang", STEPS), "'lang' holds string, not numbers"),
        (lambda d: Curriculum(d, "tokens"), "expected a Schedule of numbers"),
        (lambda d: Curriculum(d, "tokens", 0.5), "expected a Schedule of numbers"),
        (lambda d: Curriculum(d, "tokens", Schedule.steps({0: {"a": 1}})), "got a Schedule of dicts"),
        (lambda d: Curriculum(d, "tokens", Schedule.linear(1, 100, over=9)), 'write by="value"'),
        (lambda d: Curriculum(d, "tokens", STEPS, by="rank"), "expected one of percentile, value, got 'rank'"),
        (lambda d: Curriculum(d, "tokens", STEPS, buckets=0), "expected 1 to 1024"),
        (lambda d: Curriculum(d, "tokens", STEPS, buckets=True), "expected how many, or a list of borders"),
        (lambda d: Curriculum(d, "tokens", STEPS, buckets=np.array(0.5)), "got a ndarray of shape (); write 0.5"),
        (lambda d: Curriculum(d, "tokens", STEPS, buckets=b"ab"), "expected how many, or a list of borders"),
        (lambda d: Curriculum(d, "tokens", STEPS, buckets={}), "the keys of metric=, tokens, got the keys none"),
        (lambda d: Curriculum(d, "tokens", STEPS, buckets=[0.5, 0.5]), "expected ascending borders"),
        (lambda d: Curriculum(d, "tokens", STEPS, buckets=[0.5, 2]), "at most 1, got"),
        (lambda d: Curriculum(d, "tokens", STEPS, nulls="keep"), "expected one of error, drop"),
        (lambda d: Curriculum(d, "tokens", STEPS, name_sources=1), "True or False"),
        (lambda d: Curriculum(d, {"tokens": STEPS}, STEPS), "has its own schedule"),
        (lambda d: Curriculum(d, {}), "expected at least one, got none"),
        (lambda d: Curriculum(d, {"tokens": STEPS}, by={"rarity": "value"}), "the keys of metric=, tokens"),
        (lambda d: Curriculum(d, {"tokens": STEPS, "rarity": STEPS, "maybe": STEPS}, nulls="drop"), "buckets=10"),
        (lambda d: Curriculum(d, {"tokens": Schedule.steps({0: 8}), "maybe": Schedule.steps({0: 0})}, by="value",
                              nulls="drop", buckets={"tokens": [9], "maybe": [0]}), "no sample is easy enough by"),
        (lambda d: Curriculum(Curriculum(d, "tokens", STEPS), "tokens", STEPS), "make a Curriculum of each source"),
        (lambda d: Curriculum("s3://bucket/", "tokens", STEPS), "write StreamingDataset"),
        (lambda d: Curriculum(d, "tokens", STEPS)[3:5], "dataset[a:b]"),
        (lambda d: Curriculum(d, "tokens", STEPS, min_difficulty=3), "Schedule.linear(min, max, over=…)"),
        (lambda d: Curriculum(d, "tokens", STEPS, bukets=3), "did you mean 'buckets'?"),
        (lambda d: len(Curriculum(d, "tokens", STEPS)), "epoch_size"),
    ],
)  # fmt: skip
def test_wrong_arguments_name_the_cure(data: StreamingDataset, make: Callable[[Any], Any], words: str) -> None:
    with pytest.raises((ConfigError, OptionError, TypeError)) as caught:
        make(data)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("options", "part", "names"),
    [
        ({"schedule": Schedule.linear(0.1, 1.0, over=5000), "buckets": [8, 512, 1002]}, "", ("8 to 1002", "1 at most")),
        ({"schedule": Schedule.linear(8, 64, over=5000)}, "", ("reaches 64 at most", "let it reach 1002")),
        ({"schedule": Schedule.linear(8, 2000, over=5000)}, None, ()),
        ({"schedule": Schedule.linear(0.1, 0.5, over=5000), "by": "percentile"}, None, ()),
    ],
    ids=["fractions", "low", "all", "percentile"],
)
def test_a_schedule_by_value_that_never_opens_buckets_is_a_warning(
    data: StreamingDataset, caplog: pytest.LogCaptureFixture, options: dict[str, Any], part: str | None,
    names: tuple[str, ...],
) -> None:  # fmt: skip
    caplog.set_level(logging.WARNING, "streaming")
    curriculum = Curriculum(data, "tokens", **{"by": "value", **options})
    told = [message for message in caplog.messages if "never drawn" in message]
    assert len(told) == (part is not None)
    if part is not None:
        never = 1 - sum(curriculum.pool(10**9).values()) / NUM
        assert all(words in told[0] for words in (f"{never:.1%} of the samples", 'by="percentile"', "where=", *names))


def test_a_set_that_was_indexed_without_columns_lacks_them(tmp_path: Path) -> None:
    with ShardWriter(str(tmp_path / "{:06d}.tar"), index=False) as writer:
        writer.write({"__key__": "0", "json": {"tokens": 3}})
    with pytest.raises(ConfigError, match="no column 'tokens'; there are: none"):
        Curriculum(StreamingDataset(f"{tmp_path}/"), "tokens", STEPS)


def test_transforms_are_called(data: StreamingDataset) -> None:
    curriculum = Curriculum(data, "tokens", STEPS).map(mark)
    assert isinstance(curriculum, Curriculum)
    assert curriculum[0]["marked"]
    with DataLoader(curriculum, batch_size=4, num_threads=0) as loader:
        assert next(iter(loader))["marked"].all()


def mark(sample: dict[str, Any]) -> Mapping[str, Any]:
    return {**sample, "marked": True}
