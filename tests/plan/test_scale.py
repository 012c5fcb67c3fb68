"""4,096 data ranks and a billion samples in a million chunks, in one process: partition, balance, reads, start-up.

A rank has one reader however many workers decode for it (they take whole batches of its plan), so 16 workers a rank
change nothing below. The figures are printed by ``benchmarks/bench_scale.py``.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
import pytest

from infra import DeviceMesh
from shard_tools.look.plan.report import PlanOptions, PlanReport, plan_table
from streaming.order.plan.plan import Plan
from streaming.order.plan.settings import order_settings
from streaming.shards.index.chunk_table import ChunkTable, ShardInfo

RANKS = 4096
CHUNKS = 1_000_000
BATCH = 256  # samples per rank: the global batch is a million samples
CHUNKS_PER_SHARD = 1000
CHUNK_BYTES = 4 << 20


@cache
def billion() -> ChunkTable:
    """A million chunks of 750 to 1,250 samples in 3 to 5 MiB, in 1,000 shards."""
    spread = np.arange(CHUNKS, dtype=np.int64) * 7919 % 501
    num_samples = 750 + spread
    sizes = CHUNK_BYTES * num_samples // 1000
    ends = sizes.reshape(-1, CHUNKS_PER_SHARD).cumsum(axis=1)
    firsts = num_samples.reshape(-1, CHUNKS_PER_SHARD).cumsum(axis=1)
    shards = tuple(
        ShardInfo(name=f"{i:06d}.tar", size_bytes=int(ends[i, -1]) + 1024, num_samples=int(firsts[i, -1]))
        for i in range(len(ends))
    )
    return ChunkTable(
        shards=shards,
        shard=np.repeat(np.arange(len(ends)), CHUNKS_PER_SHARD),
        first_sample=firsts.ravel() - num_samples,
        num_samples=num_samples,
        byte_start=ends.ravel() - sizes,
        byte_end=ends.ravel(),
        crc32c=np.zeros(CHUNKS),
    )


@cache
def report(ranks: int, *, global_batch_size: int = RANKS * BATCH, lanes: int | None = None) -> PlanReport:
    mesh = DeviceMesh.from_sizes(dp_size=ranks, rank=0, world_size=ranks)
    return plan_table(
        billion(), options=PlanOptions(mesh=mesh, global_batch_size=global_batch_size, lanes=lanes, seed=7)
    )


@cache
def firsts() -> npt.NDArray[np.int64]:
    """Data-set number of the first sample of each chunk."""
    counts = billion().num_samples
    return np.cumsum(counts) - counts


def epoch_plan(ranks: int, *, lanes: int | None = None, global_batch_size: int = RANKS * BATCH) -> Plan:
    table = billion()
    order = order_settings(
        shuffle=True, seed=7, lanes=lanes, window=None, global_batch_size=global_batch_size,
        num_samples=table.total_samples, num_chunks=table.num_chunks,
    )  # fmt: skip
    return Plan(table.num_samples, order, global_batch_size=global_batch_size, dp_world_size=ranks)


def sample_ids(plan: Plan, batch: int, dp_rank: int) -> npt.NDArray[np.int64]:
    """Data-set sample numbers of one rank in one batch."""
    rows = plan.rank_batches(batch, batch + 1, dp_rank)
    assert rows.valid.all()
    return firsts()[rows.chunk_ids] + rows.offsets


def test_the_data_set_is_what_it_is_said_to_be() -> None:
    table = billion()
    assert (table.num_chunks, len(table.shards)) == (CHUNKS, 1000)
    assert table.total_samples == pytest.approx(1e9, rel=0.001)
    assert table.total_bytes == pytest.approx(CHUNKS * CHUNK_BYTES, rel=0.001)


def test_ranks_partition_the_samples_by_lanes() -> None:
    """With lanes for all, a rank gets exactly what its own lanes hold at these batches: disjoint and complete."""
    plan = epoch_plan(RANKS)
    lanes, size = plan.settings.lanes, plan.global_batch_size
    assert lanes % RANKS == 0
    per_lane = size // lanes
    batches = 24
    for dp_rank in (0, 1, 2047, RANKS - 1):
        rows = plan.rank_batches(0, batches, dp_rank)
        low, high = plan.rank_lanes(dp_rank)
        assert (low, high) == (dp_rank * lanes // RANKS, (dp_rank + 1) * lanes // RANKS)
        got = firsts()[rows.chunk_ids] + rows.offsets
        linear = [plan.order(0).lane_slice(lane, 0, batches * per_lane) for lane in range(low, high)]
        chunk_ids, offsets = plan.order(0).locate(np.concatenate(linear))
        expected = firsts()[chunk_ids] + offsets
        assert len(np.unique(got)) == len(got) == batches * BATCH
        assert np.array_equal(np.sort(got), np.sort(expected))


@pytest.mark.thorough
def test_every_rank_of_a_batch_gets_its_own_samples(request: pytest.FixtureRequest) -> None:
    """Of a whole global batch, which holds no sample twice, each rank gets its own part, row by row (P3).

    Asked are the first and the last of the 4,096 ranks, and every 16th; ``--matrix``: all of them.
    """
    plan = epoch_plan(RANKS, lanes=RANKS)
    batch = plan.num_batches - 1
    whole = sample_ids(epoch_plan(1, lanes=RANKS), batch, 0)
    assert len(np.unique(whole)) == len(whole) == RANKS * BATCH
    parts = whole.reshape(RANKS, BATCH)
    for dp_rank in range(RANKS) if request.config.getoption("--matrix") else [*range(0, RANKS, 16), RANKS - 1]:
        assert np.array_equal(sample_ids(plan, batch, dp_rank), parts[dp_rank]), dp_rank


@pytest.mark.thorough
def test_balance_bytes_and_requests_per_rank() -> None:
    found = report(RANKS)
    assert (found.sampled, len(found.loads)) == (False, RANKS)
    samples, read, requests = (found.spread(name) for name in ("num_samples", "read_bytes", "num_requests"))
    assert samples.least == samples.most == found.num_batches * BATCH
    assert sum(load.num_samples for load in found.loads) == found.epoch_samples
    assert found.epoch_samples > found.num_samples - found.global_batch_size
    # Nobody reads much more than the others, and all together little more than there is.
    assert read.most < 1.05 * read.mean
    assert requests.most < 1.05 * requests.mean
    assert 1.0 <= found.amplification < 1.2
    # Memory is that of the lanes of a rank, not of the cluster.
    assert found.spread("live_bytes").most < 1 << 30
    assert not any("refuse" in warning for warning in found.warnings)


def test_start_up_load_on_the_store() -> None:
    """The first batch waits for some chunks per lane and rank, not for more with the size of the data set."""
    found = report(RANKS)
    per_rank = found.spread("start_requests")
    lanes_per_rank = found.lanes // RANKS
    assert lanes_per_rank <= per_rank.least
    assert per_rank.most <= 4 * lanes_per_rank
    assert found.total("start_requests") == sum(load.start_requests for load in found.loads)


# 12 shows what 24, 1000 and 3000 do: fewer ranks than lanes, which they do not divide; 96 are more.
@pytest.mark.thorough
@pytest.mark.parametrize(
    "ranks", [12, 96, *(pytest.param(ranks, marks=pytest.mark.matrix) for ranks in (24, 1000, 3000))]
)
def test_world_sizes_that_do_not_divide_the_lanes_stay_under_a_bound(ranks: int) -> None:
    """Only lanes at a border are read twice: at most R - 1 lanes more than L, where L divides the global batch."""
    size, lanes = (4096 * 375, 4096) if ranks >= 1000 else (96 * 64, 64)
    found = report(ranks, global_batch_size=size, lanes=lanes)
    lanes_read = sum(load.lanes[1] - load.lanes[0] for load in found.loads)
    assert lanes <= lanes_read <= lanes + ranks - 1
    lane_bytes = found.num_bytes / lanes
    # Chunks across a lane's border belong to both: two chunks a lane at most.
    bound = lanes_read * (lane_bytes + 2 * 1.25 * CHUNK_BYTES)
    assert found.total("read_bytes") <= bound
    assert found.amplification <= 1.01 * lanes_read / lanes + 2.5 * lanes_read * CHUNK_BYTES / found.num_bytes
    assert sum(load.num_samples for load in found.loads) == found.epoch_samples
    samples = found.spread("num_samples")
    assert samples.most - samples.least <= found.num_batches


def test_one_more_rank_changes_no_global_batch() -> None:
    """A world size that divides nothing deals out the same global batch."""
    batch = 31
    odd, whole = epoch_plan(37, global_batch_size=9472, lanes=64), epoch_plan(1, global_batch_size=9472, lanes=64)
    dealt = np.concatenate([sample_ids(odd, batch, dp_rank) for dp_rank in range(37)])
    assert len(np.unique(dealt)) == len(dealt) == 9472
    assert np.array_equal(np.sort(dealt), np.sort(sample_ids(whole, batch, 0)))
