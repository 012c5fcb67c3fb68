"""What random transforms draw depends on seed, epoch and the sample's position: on no ranks, workers or threads."""

from __future__ import annotations

import gzip
import logging
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from data_sets import SMALL_WINDOW, SampleSet, mesh_of, write_set

from infra import DeviceMesh
from streaming import DataLoader, StreamingDataset
from streaming.batches.build import Part, Recipe
from streaming.batches.draw_watch import generator_states
from streaming.decode import resolve_decoders
from streaming.loops.base import LoopConfig, open_sharing
from streaming.plan.settings import Shape
from streaming.replicas.options import Replicas

pytestmark = pytest.mark.usefixtures("one_fork_server")

Drawn = dict[str, str]
"""Key to what was drawn for it."""


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    """90 samples in 3 shards."""
    return write_set(tmp_path_factory.mktemp("draws"), (41, 19, 30))


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    """60 samples in 4 compressed shards, which have no index."""
    directory = tmp_path_factory.mktemp("gz")
    plain = write_set(directory, (15, 15, 15, 15), indexed=False)
    for path in sorted(directory.glob("*.tar")):
        path.with_suffix(".tar.gz").write_bytes(gzip.compress(path.read_bytes(), 1))
        path.unlink()
    return replace(plain, options=SMALL_WINDOW)


def with_rng(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**sample, "drawn": f"{rng.random()} {rng.integers(1 << 40)}"}


def from_globals(sample: dict[str, Any]) -> dict[str, Any]:
    more = f" {random.random()} {np.random.rand()} {torch.rand(())}"  # noqa: NPY002
    return {**sample, "drawn": sample["drawn"] + more + sample["txt"]}


def rarely(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "drawn": str(int(torch.randint(1 << 40, ())) if sample["cls"] % 19 == 7 else 0)}


def decoded(data: bytes) -> str:
    return f"{random.random()} {data!r}"


def everything(samples: SampleSet, **options: Any) -> StreamingDataset:
    """Draws in a decoder, from ``rng``, and from all generators of the process."""
    return samples.open(decode={"txt": decoded}, transform=with_rng, **options).map(from_globals)


def drawn(loader: DataLoader) -> Drawn:
    """What was drawn for each key in the rest of the epoch."""
    return {key: one for batch in loader for key, one in zip(batch["__key__"], batch["drawn"], strict=True)}


def played(dataset: StreamingDataset, ranks: int, **options: Any) -> list[Drawn]:
    """Two epochs over all ranks."""
    found: list[Drawn] = [{}, {}]
    for rank in range(ranks):
        mesh = mesh_of(ranks, rank)
        with DataLoader(dataset, global_batch_size=12, last_batch="partial", device_mesh=mesh, **options) as loader:
            for one in found:
                own = drawn(loader)
                assert not set(one) & set(own)
                one.update(own)
    return found


def test_the_same_on_any_ranks_threads_and_workers(samples: SampleSet) -> None:
    dataset = everything(samples, seed=5)
    expected = played(dataset, 1, num_threads=0)
    assert set(expected[0]) == set(expected[1]) == set(samples.keys)
    numbers = [one.split() for epoch in expected for one in epoch.values()]
    for column in range(5):
        assert len({one[column] for one in numbers}) == 180, "every sample of every epoch draws numbers of its own"
    assert played(everything(samples, seed=6), 1)[0] != expected[0]
    for ranks in (1, 2, 3, 4):
        assert played(dataset, ranks, num_threads=2) == expected, ranks
    for workers in (1, 2, 3):
        assert played(dataset, 1, num_workers=workers) == expected, workers


def test_functions_that_draw_rarely_are_not_missed(samples: SampleSet) -> None:
    dataset = samples.open(transform=rarely)
    expected = played(dataset, 1, num_threads=0)
    assert len(set(expected[0].values())) == 6
    assert played(dataset, 2, num_threads=2) == expected
    assert played(dataset, 1, num_workers=2) == expected


def test_tensor_parallel_peers_get_the_same(samples: SampleSet) -> None:
    dataset = everything(samples)
    found = []
    for rank in range(4):
        mesh = DeviceMesh.from_sizes(dp_size=2, tp_size=2, rank=rank, environ={})
        with DataLoader(dataset, batch_size=6, device_mesh=mesh, num_threads=rank % 2) as loader:
            found.append((mesh.data_rank, drawn(loader)))
    by_share = {share: [one for of, one in found if of == share] for share in (0, 1)}
    assert all(one == other for one, other in by_share.values())
    assert by_share[0][0] != by_share[1][0]


@pytest.mark.parametrize("hands", [{"num_threads": 2}, {"num_workers": 1}], ids=["threads", "worker"])
def test_a_resume_goes_on_with_the_same(samples: SampleSet, hands: dict[str, Any]) -> None:
    dataset = everything(samples)
    (first, expected) = played(dataset, 1, num_threads=0)
    options: dict[str, Any] = {"global_batch_size": 12, "last_batch": "partial"}
    with DataLoader(dataset, device_mesh=mesh_of(1, 0), **options) as loader:
        drawn(loader)
        batches = iter(loader)
        before = [one for _ in range(3) for one in next(batches)["__key__"]]
        state = loader.state_dict()
    rest: Drawn = {}
    for rank in range(3):
        with DataLoader(dataset, device_mesh=mesh_of(3, rank), **options, **hands) as loader:
            loader.load_state_dict(state)
            rest.update(drawn(loader))
    assert rest == {key: one for key, one in expected.items() if key not in before}
    assert set(first) == set(expected)


def test_without_an_index_the_same_on_any_threads_and_workers_and_after_a_resume(compressed: SampleSet) -> None:
    dataset = everything(compressed)
    found = []
    for hands in ({"num_threads": 0}, {"num_threads": 2}, {"num_workers": 2}):
        loader = DataLoader(dataset, batch_size=7, epoch_size=70, device_mesh=mesh_of(2, 1), **hands)
        with loader:
            batches = [batch["drawn"] for _ in range(2) for batch in loader]
            loader.set_epoch(0)
            one = iter(loader)
            next(one)
            state = loader.state_dict()
        found.append(batches)
        assert len({number for batch in batches for one in batch for number in [one.split()[0]]}) == 70
    assert found[0] == found[1] == found[2]
    with DataLoader(dataset, batch_size=7, epoch_size=70, device_mesh=mesh_of(2, 1)) as loader:
        loader.load_state_dict(state)
        assert [batch["drawn"] for batch in loader] == found[0][1:5]


def test_what_the_training_draws_is_not_touched(samples: SampleSet) -> None:
    def training(loader: Any) -> tuple[list[Any], Any]:
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        torch.manual_seed(1)
        steps = [(random.random(), np.random.rand(), torch.rand(2).tolist()) for _ in loader]  # noqa: NPY002
        return steps, [str(state) for state in generator_states()]

    expected = training(range(15))
    dataset = everything(samples)
    for hands in ({"num_threads": 0}, {"num_threads": 3}, {"num_workers": 1}):
        with DataLoader(dataset, batch_size=6, device_mesh=mesh_of(1, 0), **hands) as loader:
            assert training(loader) == expected, hands
    with DataLoader(samples.open(), batch_size=6, device_mesh=mesh_of(1, 0), collate_fn=collated) as loader:
        assert training(loader) == expected


def collated(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"drawn": (samples[0]["__key__"], random.random(), torch.rand(2).tolist())}


def test_collate_functions_draw_the_same(samples: SampleSet) -> None:
    found = []
    for hands in ({"num_threads": 0}, {"num_threads": 2}, {"num_workers": 2}):
        with DataLoader(
            samples.open(), batch_size=6, device_mesh=mesh_of(2, 1), collate_fn=collated, **hands
        ) as loader:
            found.append([batch["drawn"] for _ in range(2) for batch in loader])
    assert found[0] == found[1] == found[2]
    assert len({one[1] for one in found[0]}) == 14


def fails_now_and_then(sample: dict[str, Any]) -> dict[str, Any] | None:
    if random.random() < 0.2:
        raise ValueError("unlucky")
    return {**sample, "drawn": f"{random.random()} {torch.rand(())}"} if random.random() > 0.2 else None


def test_random_failures_and_drops_are_the_same_too(samples: SampleSet) -> None:
    """A sample that stands in gets the random numbers of the place it takes."""
    dataset = samples.open(transform=fails_now_and_then, max_bad_samples=90)
    found = []
    for ranks, hands in ((1, {"num_threads": 0}), (2, {"num_threads": 2}), (2, {"num_workers": 1})):
        rows: list[tuple[str, str]] = []
        counts = np.zeros(2)
        for rank in range(ranks):
            options: dict[str, Any] = {"global_batch_size": 12, "device_mesh": mesh_of(ranks, rank), **hands}
            with DataLoader(dataset, **options) as loader:
                rows += [one for batch in loader for one in zip(batch["__key__"], batch["drawn"], strict=True)]
                counts += [loader.metrics()["dropped_samples"], len(loader.metrics()["bad"]) > 0]
        found.append((sorted(rows), counts[0], counts[1] > 0))
    assert found[0] == found[1] == found[2]
    assert found[0][1:] > (5, False)


def hidden(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "drawn": str(vars(random)["gauss"](0, 1))}


@pytest.mark.parametrize("transform", [from_globals, hidden, with_rng], ids=["named", "hidden", "rng"])
def test_one_warning_names_the_faster_ways(
    samples: SampleSet, caplog: pytest.LogCaptureFixture, transform: Any
) -> None:
    dataset = samples.open(transform=with_rng)
    if transform is not with_rng:
        dataset = dataset.map(transform)
    with caplog.at_level(logging.WARNING), DataLoader(dataset, batch_size=6, device_mesh=mesh_of(1, 0)) as loader:
        for _ in range(2):
            drawn(loader)
        loader.close()
        drawn(loader)
    told = [record.getMessage() for record in caplog.records if "process-wide random generators" in record.getMessage()]
    assert len(told) == (transform is not with_rng)
    if told:
        assert "random" in told[0]
        assert "transform(sample, rng)" in told[0]
        assert "num_workers=" in told[0]


@pytest.mark.parametrize(("transform", "num_workers"), [(from_globals, 1), (with_rng, 0)], ids=["globals", "rng"])
def test_a_rank_that_reads_for_others_draws_in_a_process(
    caplog: pytest.LogCaptureFixture, transform: Any, num_workers: int
) -> None:
    """It reads on a thread beside the training, which draws from the same generators."""
    mesh = DeviceMesh.from_sizes(dp_size=1, tp_size=2, rank=0, environ={})
    recipe = Recipe(parts=(Part(decoders=resolve_decoders(None), transform=transform),))
    config = LoopConfig(
        shape=Shape(global_batch_size=4, num_ranks=1), mesh=mesh, memory_limit_bytes=1 << 20, num_workers=0,
        num_threads=1, depth=1, recipe=recipe, replicas=Replicas(replicate="broadcast"),
    )  # fmt: skip
    changed, sharing = open_sharing(config)
    assert sharing is not None
    assert changed.num_workers == num_workers
    assert ("called in a worker process" in caplog.text) == bool(num_workers)
