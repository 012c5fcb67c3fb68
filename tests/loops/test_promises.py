"""The promises P1 to P3 and P5 of the loader, every rank of a mesh played in one process."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from infra import DeviceMesh
from streaming import DataLoader, DeviceMeshFetcher, ShuffleConfig, StreamingDataset
from streaming.errors import MemoryLimitError
from streaming.order.plan.plan import Plan
from streaming.shards.index.spans import SPAN_BYTES
from tests.support.servers.on_loopback import MiniS3Server
from tests.support.sets.data_sets import (
    WORLD_SIZES,
    JitteryStorage,
    SampleSet,
    check_batch,
    chunk_pages,
    data_gets,
    loaders,
    merged,
    mesh_of,
    play,
    same_batch,
    total,
    write_set,
)  # fmt: skip
from tests.support.tiers import first_here

pytestmark = pytest.mark.usefixtures("one_fork_server")

LAST_BATCH = ("drop", "pad", "partial")


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    """202 samples in 7 shards and 28 chunks."""
    return write_set(tmp_path_factory.mktemp("promises") / "train")


@pytest.fixture(scope="module")
def shuffled(samples: SampleSet) -> StreamingDataset:
    return samples.open(seed=5)


@pytest.fixture(scope="module")
def ordered(samples: SampleSet) -> StreamingDataset:
    return samples.open(shuffle=False)


ORDERS = ("shuffled", "ordered")


def turns(request: pytest.FixtureRequest, *halves: Any) -> Any:
    """What the order in use plays of choices whose arithmetic test_plan.py has exactly; ``--matrix``: all of them."""
    if request.config.getoption("--matrix"):
        return tuple(itertools.chain.from_iterable(halves))
    return halves[ORDERS.index(request.node.callspec.params["dataset"])]


@pytest.fixture(params=first_here(ORDERS, 1))
def dataset(request: pytest.FixtureRequest) -> StreamingDataset:
    found: StreamingDataset = request.getfixturevalue(request.param)
    return found


def tail_size(num_samples: int, size: int, last_batch: str) -> list[int]:
    """Samples of each global batch of an epoch."""
    whole, tail = divmod(num_samples, size)
    return [size] * whole + ([tail] if tail and last_batch != "drop" else [])


def pairs(sizes: tuple[int, ...], *, whole: int) -> list[Any]:
    """Each size with each ``last_batch``; but for the size ``whole``, all but one of each under ``--matrix`` alone."""
    others = [size for size in sizes if size != whole]
    return [
        pytest.param(size, last_batch, marks=[] if size == whole or others.index(size) == place else pytest.mark.matrix)
        for size in sizes
        for place, last_batch in enumerate(LAST_BATCH)
    ]


# P1, P2, P3


@pytest.mark.parametrize(("size", "last_batch"), pairs((8, 13, 24, 64), whole=24))
def test_exactly_once_same_end_and_elastic(
    dataset: StreamingDataset, size: int, last_batch: str, request: pytest.FixtureRequest
) -> None:
    options: dict[str, Any] = {"global_batch_size": size, "last_batch": last_batch, "epochs": 2}
    reference = merged(play(dataset, 1, **options))
    sizes = tail_size(len(dataset), size, last_batch)
    assert [batch.total() for batch in reference] == sizes * 2
    for epoch in (reference[: len(sizes)], reference[len(sizes) :]):
        counts = total(epoch)
        assert set(counts.values()) == {1}
        assert counts.total() == (len(dataset) if last_batch != "drop" else len(dataset) // size * size)
    # All of them at one size: test_plan.py has the shares of any number of ranks and any size, exactly.
    for world_size in turns(request, (2, 4, 8), (3, 6)) if size == 24 else turns(request, (3,), (8,)):
        ranks = play(dataset, world_size, **options)
        assert merged(ranks) == reference, world_size
        for batch, batch_size in enumerate(sizes):
            share = [len(rank[batch]) for rank in ranks]
            assert max(share) - min(share) <= 1, (world_size, batch_size, share)


def test_epochs_differ_when_shuffled_and_repeat_when_not(
    samples: SampleSet, shuffled: StreamingDataset, ordered: StreamingDataset
) -> None:
    def epochs(dataset: StreamingDataset) -> list[list[list[str]]]:
        (batches,) = play(dataset, 1, global_batch_size=20, last_batch="partial", epochs=2)
        return [batches[:11], batches[11:]]

    first, second = epochs(shuffled)
    assert first != second
    assert epochs(shuffled) == [first, second]
    assert epochs(samples.open(seed=6))[0] != first
    assert epochs(samples.open(shuffle=ShuffleConfig(seed=5)))[0] == first
    first, second = epochs(ordered)
    assert first == second


@pytest.mark.parametrize("last_batch", LAST_BATCH)
def test_batch_size_is_per_rank(dataset: StreamingDataset, last_batch: str, request: pytest.FixtureRequest) -> None:
    for world_size in turns(request, (1, 8), (3,)):
        by_rank = play(dataset, world_size, batch_size=5, last_batch=last_batch)
        assert by_rank == play(dataset, world_size, global_batch_size=5 * world_size, last_batch=last_batch)
        assert {len(rank[0]) for rank in by_rank} == {5}


@pytest.mark.parametrize(("epoch_size", "last_batch"), pairs((50, 150, 202, 500), whole=150))
def test_virtual_epochs(
    dataset: StreamingDataset, epoch_size: int, last_batch: str, request: pytest.FixtureRequest
) -> None:
    options: dict[str, Any] = {"global_batch_size": 24, "last_batch": last_batch, "epoch_size": epoch_size, "epochs": 3}
    reference = merged(play(dataset, 1, **options))
    assert [batch.total() for batch in reference] == tail_size(epoch_size, 24, last_batch) * 3
    counts = total(reference)
    if (
        last_batch != "drop"
    ):  # three epochs in a row are a stretch of the endless repetition: at most a pass in progress
        seen = [counts[key] for key in (f"{number:05d}" for number in range(len(dataset)))]
        assert max(seen) - min(seen) <= 1
        assert sum(seen) == 3 * epoch_size
    # All of them where a pass ends within an epoch and an epoch within a pass: test_plan.py has the rest, exactly.
    for world_size in turns(request, (3, 8), (2,)) if epoch_size == 150 else (3,):
        assert merged(play(dataset, world_size, **options)) == reference, world_size


def test_threads_and_prefetching_change_nothing(dataset: StreamingDataset, request: pytest.FixtureRequest) -> None:
    plain: dict[str, Any] = {"global_batch_size": 24, "last_batch": "partial"}
    one, three = {"num_workers": 1}, {"num_workers": 3}
    short, long = {"prefetch_factor": 1}, {"prefetch_factor": 5}
    means = turns(
        request, [(1, one), (3, three | long), (3, short)], [(3, one | short), (1, three), (1, short), (3, three)]
    )
    for world_size in (1, 3):
        expected = play(dataset, world_size, **plain)
        for _, options in (one for one in means if one[0] == world_size):
            assert play(dataset, world_size, **plain, **options) == expected, options  # rank by rank and row by row


@pytest.mark.parametrize("num_workers", [0, 3])
def test_timing_changes_nothing(samples: SampleSet, num_workers: int) -> None:
    options = {"global_batch_size": 24, "last_batch": "pad"}
    expected = {size: play(samples.open(seed=5), size, **options) for size in (1, 4)}
    for seed in range(3):
        dataset = samples.open(seed=5)
        dataset.source.storage = JitteryStorage(dataset.source.storage, seed)  # type: ignore[assignment]
        for world_size, ranks in expected.items():
            assert play(dataset, world_size, num_workers=num_workers, **options) == ranks


@pytest.mark.parametrize(
    "world_size", [size if size in {1, 3, 8} else pytest.param(size, marks=pytest.mark.matrix) for size in WORLD_SIZES]
)
def test_the_memory_limit_changes_nothing_and_holds(world_size: int, tmp_path: Path) -> None:
    """At the least that the neediest rank needs all run, and keep to it; below that all refuse at the start."""
    shuffled = write_set(tmp_path, chunk_samples=4).open(seed=5, shuffle=ShuffleConfig(lanes=24, window=4))
    options = {"global_batch_size": 24, "last_batch": "partial"}
    expected = play(shuffled, world_size, **options)
    with DataLoader(shuffled, device_mesh=mesh_of(world_size, 0), **options) as loader:
        order = loader._loop.order
    plan = Plan(
        shuffled.source.table.num_samples, order, global_batch_size=24, dp_world_size=world_size, last_batch="partial"
    )
    limit = math.ceil(max(plan.live_bytes(chunk_pages(shuffled), rank) for rank in range(world_size)) / 0.75)
    for rank in range(world_size):
        with DataLoader(shuffled, device_mesh=mesh_of(world_size, rank), memory_limit=limit, **options) as loader:
            assert [check_batch(batch) for batch in loader] == expected[rank]
            assert loader.metrics()["arena_peak_bytes"] <= limit * 3 // 4
        with (
            DataLoader(shuffled, device_mesh=mesh_of(world_size, rank), memory_limit=limit - 8, **options) as loader,
            pytest.raises(MemoryLimitError, match=r"memory_limit=.*or fewer lanes"),
        ):
            next(iter(loader))


def test_the_fetcher_hands_out_what_the_loader_does(dataset: StreamingDataset) -> None:
    for world_size, last_batch in itertools.product((1, 3), LAST_BATCH):
        for rank, expected in enumerate(play(dataset, world_size, global_batch_size=24, last_batch=last_batch)):
            mesh = mesh_of(world_size, rank)
            with DeviceMeshFetcher(dataset, device_mesh=mesh, global_batch_size=24, last_batch=last_batch) as fetcher:
                found = [[one["__key__"] for one in samples if one.get("__valid__", True)] for samples in fetcher]
            assert found == expected


# The tail


def test_pad_marks_exactly_the_real_samples(dataset: StreamingDataset, request: pytest.FixtureRequest) -> None:
    # Pairs: test_plan.py has the padding of any number of ranks and any size, exactly.
    for world_size, size in turns(request, ((1, 25), (3, 24), (4, 25), (8, 64)), ((2, 64), (3, 25), (8, 25))):
        counts: Counter[str] = Counter()
        per_rank = -(-size // world_size)
        for loader in loaders(dataset, world_size, global_batch_size=size, last_batch="pad"):
            batches = list(loader)
            assert len(batches) == len(loader) == -(-len(dataset) // size)
            for batch in batches:
                keys, valid = check_batch(batch), batch["__valid__"].tolist()
                assert len(keys) == len(valid) == per_rank
                counts.update(itertools.compress(keys, valid))
        assert counts == Counter(f"{number:05d}" for number in range(len(dataset)))


def test_partial_gives_empty_batches_where_there_are_fewer_samples_than_ranks(samples: SampleSet) -> None:
    dataset = samples.open(shuffle=False)
    num_rows = []
    for loader in loaders(dataset, 8, global_batch_size=100, last_batch="partial"):
        *_, last = loader
        num_rows.append(len(check_batch(last)))
        assert last["cls"].shape == (num_rows[-1],)
        assert last["cls"].dtype == torch.int64
        assert last["vec.npy"].shape == (num_rows[-1], 4)
        assert last["vec.npy"].dtype == torch.float32
    assert sorted(num_rows) == [0] * 6 + [1] * 2


# Order off


def test_unshuffled_batches_are_slices_of_the_data_set(samples: SampleSet, ordered: StreamingDataset) -> None:
    for world_size, size in ((1, 64), (3, 8), (3, 13), (8, 13)):
        for number, batch in enumerate(merged(play(ordered, world_size, global_batch_size=size, last_batch="partial"))):
            assert batch == Counter(samples.keys[number * size : (number + 1) * size])


def test_one_rank_unshuffled_is_the_storage_order(samples: SampleSet, ordered: StreamingDataset) -> None:
    (batches,) = play(ordered, 1, global_batch_size=13, last_batch="partial")
    assert tuple(key for batch in batches for key in batch) == samples.keys


# P5


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshLikeTorchs:
    """The part of torch's mesh that is looked at; test_distributed.py uses a real one."""

    mesh: Any
    mesh_dim_names: tuple[str, ...]


def check_replicas(dataset: StreamingDataset, meshes: list[DeviceMesh]) -> None:
    by_share: dict[int, list[Any]] = {}
    sharing: Counter[int] = Counter()
    for mesh in meshes:
        sharing[mesh.data_rank] += 1
        with DataLoader(dataset, device_mesh=mesh, global_batch_size=24, last_batch="pad") as loader:
            batches = list(loader)
        expected = by_share.setdefault(mesh.data_rank, batches)
        assert len(batches) == len(expected)
        assert all(map(same_batch, batches, expected)), mesh
    num_shares = meshes[0].data_world_size
    assert sorted(by_share) == list(range(num_shares))
    assert set(sharing.values()) == {len(meshes) // num_shares}
    shares = [[check_batch(batch) for batch in by_share[share]] for share in range(num_shares)]
    reference = [[check_batch(batch) for batch in loader] for loader in
                 loaders(dataset, num_shares, global_batch_size=24, last_batch="pad")]  # fmt: skip
    assert shares == reference


@pytest.mark.parametrize("order", [
    ("pp", "dp", "fsdp", "cp", "tp"), ("tp", "cp", "pp", "fsdp", "dp"),
    *(pytest.param(order, marks=pytest.mark.matrix)  # test_infra.py has the coordinates of any order, exactly
      for order in (("dp", "tp", "fsdp", "pp", "cp"), ("cp", "fsdp", "tp", "dp", "pp"))),
])  # fmt: skip
def test_replicas_agree(shuffled: StreamingDataset, order: tuple[str, ...]) -> None:
    sizes = {"dp_size": 2, "tp_size": 2, "pp_size": 2, "cp_size": 2}
    meshes = [DeviceMesh.from_sizes(**sizes, order=order, rank=rank, environ={}) for rank in range(16)]
    check_replicas(shuffled, meshes)


def test_replicas_agree_with_two_data_axes(shuffled: StreamingDataset) -> None:
    for order in (("dp", "tp", "fsdp"), ("fsdp", "dp", "tp")):
        sizes = {"dp_size": 3, "fsdp_size": 2, "tp_size": 2}
        check_replicas(
            shuffled, [DeviceMesh.from_sizes(**sizes, order=order, rank=rank, environ={}) for rank in range(12)]
        )


@pytest.mark.parametrize("names", [("pp", "dp", "tp"), ("tp", "pp", "dp"), ("dp", "cp", "pp")])
def test_replicas_agree_on_a_torch_mesh(shuffled: StreamingDataset, names: tuple[str, ...]) -> None:
    grid = np.arange(12).reshape(2, 3, 2)
    mesh = MeshLikeTorchs(mesh=grid, mesh_dim_names=names)
    check_replicas(
        shuffled,
        [DeviceMesh.from_torch(mesh, data_axes=("dp",), rank=rank, environ={}) for rank in range(12)],
    )


# What is read


@pytest.fixture(scope="module")
def s3_samples(mini_s3: MiniS3Server) -> SampleSet:
    """400 samples in 100 chunks, in a bucket."""
    bucket = mini_s3.create_bucket("promises")
    return write_set(f"{bucket}/train", (100,) * 4, chunk_samples=4, storage_options=mini_s3.storage_options)


def bytes_read(mini_s3: MiniS3Server, samples: SampleSet, world_size: int, **options: Any) -> int:
    """Bytes of shards that all ranks got from the server, each having opened the data set for itself."""
    shuffle = options.pop("shuffle", True)
    num_bytes = 0
    for rank in range(world_size):
        dataset = samples.open(shuffle=shuffle)
        with DataLoader(dataset, device_mesh=mesh_of(world_size, rank), **options) as loader:
            mini_s3.clear_log()
            for batch in loader:
                check_batch(batch)
        num_bytes += sum(int(entry["bytes"]) for entry in data_gets(mini_s3.log(), samples.url))
    return num_bytes


@pytest.mark.thorough
def test_unshuffled_ranks_read_twice_only_what_shares_a_checksum(mini_s3: MiniS3Server, s3_samples: SampleSet) -> None:
    """Chunks here are below 64 KiB, so each is one span: read by every rank that needs a sample of it, and no other."""
    dataset = s3_samples.open(shuffle=False)
    sizes = dataset.source.table.byte_end - dataset.source.table.byte_start
    assert int(sizes.max()) < SPAN_BYTES
    chunk_ends = np.cumsum(dataset.source.table.num_samples)
    options: dict[str, Any] = {"global_batch_size": 48, "last_batch": "partial"}
    for world_size in (1, 2, 3, 8):
        expected = sum(
            int(sizes[np.unique(np.searchsorted(chunk_ends, [int(key) for key in keys], side="right"))].sum())
            for rank in play(dataset, world_size, **options)
            for keys in rank
        )
        found = bytes_read(mini_s3, s3_samples, world_size, shuffle=False, **options)
        assert found == expected, world_size
        if world_size < 3:  # whose slices begin and end with chunks
            assert found == int(sizes.sum())


def test_shuffled_ranks_of_whole_lanes_share_only_boundary_chunks(mini_s3: MiniS3Server, s3_samples: SampleSet) -> None:
    """The chunk across the border of two lanes is read by both; nothing else is read twice."""
    dataset = s3_samples.open()
    sizes = dataset.source.table.byte_end - dataset.source.table.byte_start
    lanes, data = 8, int(sizes.sum())
    shuffle = ShuffleConfig(lanes=lanes, window=4)
    for world_size in (1, 2, 4, 8):
        found = bytes_read(mini_s3, s3_samples, world_size, shuffle=shuffle, global_batch_size=48, last_batch="partial")
        borders = world_size - 1  # those between lanes of one rank stay in memory
        assert data <= found <= data + borders * int(sizes.max()), world_size
        assert found <= 1.08 * data
