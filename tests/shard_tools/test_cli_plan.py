"""`shard_tools plan`: equal to what training's planner says and what training fetches; warnings, usage, JSON."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import example, given, settings
from hypothesis import strategies as st

from infra import DeviceMesh
from shard_tools import ShardWriter
from shard_tools.cli import cli
from shard_tools.look.plan import report
from shard_tools.look.plan.report import PlanOptions, _epoch_plan, plan, plan_table, replica_ranks
from streaming import DataLoader, ShuffleConfig, StreamingDataset
from streaming.errors import ConfigError, MemoryLimitError, NotFoundError
from streaming.order.plan import memory as budget
from streaming.order.plan.plan import FIRST_ROWS
from streaming.run.epochs.position import Place
from streaming.shards.index.chunk_table import ChunkTable, ShardInfo

pytestmark = pytest.mark.thorough


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["plan", *map(str, arguments)], prog_name="shard_tools")


def planned(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def table_of(chunk_samples: list[int], chunk_bytes: list[int]) -> ChunkTable:
    """One shard per chunk: only counts and sizes matter here."""
    count = len(chunk_samples)
    return ChunkTable(
        shards=tuple(
            ShardInfo(name=f"{i}.tar", size_bytes=size + 1024, num_samples=num)
            for i, (num, size) in enumerate(zip(chunk_samples, chunk_bytes, strict=True))
        ),
        shard=np.arange(count),
        first_sample=np.zeros(count),
        num_samples=np.array(chunk_samples),
        byte_start=np.zeros(count),
        byte_end=np.array(chunk_bytes),
        crc32c=np.zeros(count),
    )


def flat(dp: int) -> DeviceMesh:
    return DeviceMesh.from_sizes(dp_size=dp, rank=0, world_size=dp)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    rng = np.random.default_rng(0)
    with ShardWriter(str(folder / "{:06d}.tar"), max_samples=20) as writer:
        for i in range(1000):
            writer.write({"__key__": f"{i:06d}", "bin": rng.bytes(700), "cls": i % 7})
    return folder


# ------------------------------------------------------------------------------- equal to training's own planner


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("last_batch", ["drop", "pad", "partial"])
def test_it_says_what_the_plan_of_training_says(shards: Path, ranks: int, last_batch: str) -> None:
    said = planned(shards, "--dp", ranks, "--global-batch-size", 48, "--seed", 5, "--last-batch", last_batch)
    for dp_rank in range(ranks):
        loader = DataLoader(
            StreamingDataset(str(shards), seed=5),
            global_batch_size=48,
            last_batch=last_batch,
            device_mesh=flat(ranks).with_rank(dp_rank),
        )
        with loader:
            loop = loader._loop
            training = loop._plan(Place(epoch=0, samples_seen=0), loop.course)
            load = said["data_ranks"][dp_rank]
            table = loop.course.source.table
            assert load["live_bytes"] == training.live_bytes(
                budget.whole_pages(table.byte_end - table.byte_start), dp_rank
            )
            assert said["num_batches"] == len(loader)
            assert (said["lanes"], said["window"]) == (training.settings.lanes, training.settings.window)
            assert load["lanes"] == list(training.rank_lanes(dp_rank))
            rows = training.rank_batches(0, training.num_batches, dp_rank)
            assert load["num_samples"] == int(rows.valid.sum())


@pytest.mark.parametrize(
    ("ranks", "options", "config"),
    [
        (3, ("--lanes", 16), ShuffleConfig(lanes=16)),
        (4, ("--lanes", 4, "--window", 3), ShuffleConfig(lanes=4, window=3)),
        (4, ("--no-shuffle",), False),
    ],
)
def test_training_fetches_no_more_than_it_says(
    shards: Path, ranks: int, options: tuple[object, ...], config: ShuffleConfig | bool
) -> None:
    said = planned(shards, "--dp", ranks, "--global-batch-size", 48, "--last-batch", "partial", *options)
    fetched = 0
    for dp_rank in range(ranks):
        dataset = StreamingDataset(str(shards), shuffle=config, decode=None)
        with DataLoader(
            dataset, global_batch_size=48, last_batch="partial", device_mesh=flat(ranks).with_rank(dp_rank)
        ) as loader:
            for _ in loader:
                pass
            got = loader.metrics()
        load = said["data_ranks"][dp_rank]
        assert got["fetched_bytes"] <= load["read_bytes"] * 1.0001 + 512
        assert got["fetched_chunks"] <= load["num_requests"]
        # The bound is not empty talk: with room for everything, it is what happens.
        assert got["fetched_bytes"] >= load["read_bytes"] * 0.95
        fetched += got["fetched_bytes"]
    assert fetched <= said["total"]["read_bytes"] * 1.0001 + 512 * ranks


chunk_lists = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20_000)), min_size=1, max_size=60)


@settings(deadline=None)
@example(chunks=[(5, 4097)], ranks=1, per_rank=2, lanes=1, window=0, last_batch="drop", epoch_size=40, limit=1 << 14)
@given(
    chunks=chunk_lists,
    ranks=st.integers(1, 9),
    per_rank=st.integers(1, 4),
    lanes=st.integers(1, 12),
    window=st.integers(0, 12),
    last_batch=st.sampled_from(["drop", "pad", "partial"]),
    epoch_size=st.none() | st.integers(40, 200),
    limit=st.integers(1 << 14, 1 << 22),
)
def test_loads_agree_with_the_plan_for_any_topology(
    chunks: list[tuple[int, int]], ranks: int, per_rank: int, lanes: int, window: int, last_batch: Any,
    epoch_size: int | None, limit: int,
) -> None:  # fmt: skip
    table = table_of(*map(list, zip(*chunks, strict=True)))
    options = PlanOptions(
        mesh=flat(ranks), global_batch_size=ranks * per_rank, lanes=lanes, window=window, last_batch=last_batch,
        epoch_size=epoch_size, memory_limit_bytes=limit, epoch=1,
    )  # fmt: skip
    total = epoch_size or table.total_samples
    if total < {"drop": ranks * per_rank, "partial": ranks, "pad": 1}[last_batch]:
        with pytest.raises(ConfigError, match="training would refuse"):
            plan_table(table, options=options)
        return
    report = plan_table(table, options=options)
    training = _epoch_plan(table, options)
    sizes = table.byte_end - table.byte_start
    for load in report.loads:
        rows = training.rank_batches(0, training.num_batches, load.dp_rank)
        used = np.unique(rows.chunk_ids)
        assert load.num_samples == int(rows.valid.sum())
        assert load.live_bytes == training.live_bytes(budget.whole_pages(sizes), load.dp_rank)
        # Everything used is read at least once, and never more than the planner's own count.
        planned = sum(int(sizes[live.chunk_ids].sum()) for live in training.needs_by_pass(load.dp_rank))
        assert int(sizes[used].sum()) <= load.read_bytes <= planned
        if not load.keeps_all:
            assert load.read_bytes == planned
        first = rows.chunk_ids[: rows.row_splits[1]]
        assert load.start_bytes >= int(sizes[np.unique(first)].sum())
        assert load.start_requests <= load.num_requests
    assert sum(load.num_samples for load in report.loads) == report.epoch_samples
    # Whether it is refused depends on no epoch and rank. A set that is kept whole fits, whatever is used at once.
    first, rooms = training.from_the_start(), budget.whole_pages(sizes)
    live_bytes = max(first.live_bytes(rooms, rank) for rank in range(ranks))
    least = max(live_bytes, budget.most_of_a_batch(first, rooms))
    fits = min(budget.Budget(limit).chunks_bytes, budget.READ_AHEAD_BYTES) >= rooms.sum()
    fits |= least <= budget.Budget(limit).chunks_bytes
    assert fits == (not any("refuse" in warning for warning in report.warnings))


@settings(deadline=None)
@given(
    chunks=chunk_lists,
    ranks=st.integers(2, 9),
    size=st.integers(9, 40),
    last_batch=st.sampled_from(["drop", "pad", "partial"]),
    epoch=st.integers(0, 2),
    epoch_size=st.none() | st.integers(60, 700),
)
def test_slices_are_counted_as_training_cuts_them(
    chunks: list[tuple[int, int]], ranks: int, size: int, last_batch: Any, epoch: int, epoch_size: int | None
) -> None:
    # Equal records in every chunk, so that the estimate of a slice's bytes is exact: four of 20 KiB make a span.
    table = table_of([num for num, _ in chunks], [num * 20_480 for num, _ in chunks])
    options = PlanOptions(
        mesh=flat(ranks), global_batch_size=size, shuffle=False, last_batch=last_batch, epoch=epoch,
        epoch_size=epoch_size,
    )  # fmt: skip
    if (epoch_size or table.total_samples) < (size if last_batch == "drop" else ranks):
        return
    report = plan_table(table, options=options, sliced=True)
    training = _epoch_plan(table, options)
    for load in report.loads:
        requests = read = 0
        seen: set[int] = set()
        for batch in range(training.num_batches):
            rows = training.rank_batches(batch, batch + 1, load.dp_rank)
            pairs = sorted({(int(p), int(c), int(o)) for p, c, o in zip(rows.passes, rows.chunk_ids, rows.offsets)})  # noqa: B905
            requests += len({pair[:2] for pair in pairs})
            spans = {(pass_, chunk, offset // 4) for pass_, chunk, offset in pairs}
            read += sum(min(4, chunks[chunk][0] - 4 * span) for _, chunk, span in spans)
            seen |= {pair[1] for pair in pairs}
        assert load.num_requests == requests
        assert load.read_bytes == read * 20_480
        assert load.num_chunks == len(seen)


# ---------------------------------------------------------------------------------------------- the topology


@given(st.permutations(("pp", "dp", "fsdp", "tp", "cp")), st.lists(st.integers(1, 3), min_size=5, max_size=5))
def test_processes_of_a_share_are_the_replicas_of_the_mesh(order: list[str], sizes: list[int]) -> None:
    given_sizes: dict[str, Any] = {f"{name}_size": size for name, size in zip(order, sizes, strict=True)}
    mesh = DeviceMesh.from_sizes(**given_sizes, rank=0, world_size=int(np.prod(sizes)), order=order)
    assert replica_ranks(mesh) == tuple(mesh.replicas_of(share) for share in range(mesh.data_world_size))


def test_replicas_share_one_plan(shards: Path) -> None:
    said = planned(shards, "--dp", 2, "--fsdp", 2, "--tp", 2, "--pp", 2, "--batch-size", 8)
    assert (said["data_world_size"], said["replica_world_size"]) == (4, 4)
    assert [load["ranks"] for load in said["data_ranks"]] == [
        [0, 1, 8, 9],
        [2, 3, 10, 11],
        [4, 5, 12, 13],
        [6, 7, 14, 15],
    ]
    assert said["total"]["read_bytes_if_every_replica_reads"] == 4 * said["total"]["read_bytes"]
    assert said["axes"]["tp"] == said["axes"]["pp"] == 2


def test_many_ranks_are_swept_and_very_many_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    table = table_of([8] * 600, [4096] * 600)
    whole = plan_table(table, options=PlanOptions(mesh=flat(100), global_batch_size=400))
    assert not whole.sampled
    assert [load.dp_rank for load in whole.loads] == list(range(100))
    monkeypatch.setattr(report, "MAX_SWEPT_RANKS", 34)
    some = plan_table(table, options=PlanOptions(mesh=flat(100), global_batch_size=400))
    assert some.sampled
    assert [load.dp_rank for load in some.loads] == list(range(0, 100, 3))
    assert [whole.loads[load.dp_rank] for load in some.loads] == list(some.loads)
    assert some.total("read_bytes") == pytest.approx(whole.total("read_bytes"), rel=0.05)


# ------------------------------------------------------------------------------------------ warnings and errors


def test_a_plan_beyond_memory_warns_with_the_message_of_training(shards: Path) -> None:
    arguments = ("--dp", 2, "--batch-size", 64, "--memory-limit", "256KiB")
    result = run(shards, *arguments)
    assert result.exit_code == 0
    dataset = StreamingDataset(str(shards))
    with (
        DataLoader(dataset, batch_size=64, device_mesh=flat(2), memory_limit="256KiB") as loader,
        pytest.raises(MemoryLimitError) as refused,
    ):
        next(iter(loader))
    (warning,) = [one for one in planned(shards, *arguments)["warnings"] if "refuse" in one]
    # The same sentence, but for the rank: training speaks of its own, the tool of the worst.
    assert warning.split("Rank")[0] == f"training would refuse this: {str(refused.value).split('Rank')[0]}"
    assert 'Use memory_limit="' in warning
    assert f"Warning: {warning}" in result.stderr
    # The cure cures.
    cured = re.findall(r'memory_limit="(\w+)"', warning)[0]
    assert not any("refuse" in one for one in planned(shards, *arguments[:-1], cured)["warnings"])


def test_lanes_that_the_ranks_do_not_divide_warn_and_the_cure_cures() -> None:
    table = table_of([10] * 4000, [10_000] * 4000)
    odd = plan_table(table, options=PlanOptions(mesh=flat(48), global_batch_size=960, lanes=64))
    (warning,) = odd.warnings
    assert "48 data ranks do not divide 64 lanes" in warning
    lanes = int(warning.split("lanes=")[1].split(":")[0])
    assert (lanes % 48, 960 % lanes) == (0, 0)
    better = plan_table(table, options=PlanOptions(mesh=flat(48), global_batch_size=960, lanes=lanes))
    assert better.amplification < 1.2 < odd.amplification
    uneven = plan_table(table, options=PlanOptions(mesh=flat(48), global_batch_size=961, lanes=31))
    assert "a global batch size that is a multiple of 48: 1008" in uneven.warnings[0]


def test_storage_order_without_sample_tables_says_what_it_costs() -> None:
    table = table_of([10] * 40_000, [1000] * 40_000)
    report = plan_table(table, options=PlanOptions(mesh=flat(4), global_batch_size=40, shuffle=False))
    looked_at = FIRST_ROWS // 10 / 10_000  # in these batches each rank finds that it needs one chunk of four
    assert report.amplification == pytest.approx(looked_at + 4 * (1 - looked_at), rel=0.001)
    assert "shard_tools index" in report.warnings[0]
    assert plan_table(table, options=PlanOptions(mesh=flat(1), global_batch_size=40, shuffle=False)).warnings == ()


@pytest.mark.parametrize(
    "arguments",
    [(), ("--batch-size", 4, "--global-batch-size", 8), ("--batch-size", 0), ("--dp", 0, "--batch-size", 4),
     ("--batch-size", 4, "--last-batch", "keep"), ("--batch-size", 600, "--dp", 2),
     ("--global-batch-size", 2, "--dp", 4), ("--batch-size", 4, "--memory-limit", "much")],
)  # fmt: skip
def test_wrong_usage(shards: Path, arguments: tuple[object, ...]) -> None:
    result = run(shards, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr


def test_no_such_data(tmp_path: Path) -> None:
    assert run(tmp_path / "none.tar", "--batch-size", 4).exit_code == 1
    with pytest.raises(NotFoundError):
        plan(str(tmp_path / "none"), options=PlanOptions(mesh=flat(1), global_batch_size=1))


# --------------------------------------------------------------------------------------------------- the output


def test_text_for_people(shards: Path) -> None:
    result = run(shards, "--dp", 20, "--tp", 2, "--batch-size", 8)
    assert result.exit_code == 0
    text = result.stdout
    assert "1,000 samples" in text
    assert "dp 20 x tp 2: 20 data ranks, 2 processes each" in text
    assert "requests before the first batch" in text
    assert "… 4 more; --json lists all" in text
    assert "38,39" not in text
    assert "amplification" in text


def test_plot_without_matplotlib_names_the_cure(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    result = run(shards, "--batch-size", 8, "--plot", tmp_path / "plan.png")
    assert result.exit_code == 2
    assert "pip install matplotlib" in result.stderr
    assert list(tmp_path.iterdir()) == []
