"""What random transforms draw depends on seed, epoch and the sample's position: on no ranks, workers or threads."""

from __future__ import annotations

import gzip
import logging
import random
import sys
import threading
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from infra import DeviceMesh
from streaming import Broadcast, DataLoader, StreamingDataset
from streaming.build.batches.draw_watch import generator_states
from tests.support.processes.played_ranks import played as play_ranks
from tests.support.processes.waiting import PATIENCE_S, until
from tests.support.sets.data_sets import SMALL_WINDOW, SampleSet, mesh_of, write_set

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


@pytest.mark.thorough
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
    assert played(dataset, 2, num_threads=0) == expected
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


def test_a_rank_that_reads_for_others_draws_on_the_thread_that_asks(
    samples: SampleSet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where it waits for the batch, the training does not draw from the same generators."""
    threads: set[int] = set()

    def noted(sample: dict[str, Any]) -> dict[str, Any]:
        threads.add(threading.get_ident())
        return from_globals(sample)

    dataset = samples.open(transform=with_rng).map(noted)

    def rank(mesh: DeviceMesh) -> tuple[int, Drawn]:
        options: dict[str, Any] = {"replicate": Broadcast(timeout_s=PATIENCE_S), "num_threads": 2}
        with DataLoader(dataset, global_batch_size=12, last_batch="partial", device_mesh=mesh, **options) as loader:
            return threading.get_ident(), drawn(loader)

    (reader, first), (_, second) = play_ranks(monkeypatch)(rank, dp_size=1, tp_size=2)
    assert threads == {reader}
    assert "process-wide random generators" in caplog.text
    assert first == second == played(dataset, 1, num_threads=0)[0]


# --- libraries: what counts is what is drawn ---


class NoiseKernel:
    """Random, but nobody calls it."""

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return image + torch.randn_like(image)


KERNELS: dict[str, Any] = {"noise": NoiseKernel(), "identity": lambda image: image}


class Resize:
    """As transforms of torchvision's v2 do, finds its kernel in a table that holds random ones, too."""

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        kernel = KERNELS["identity" if random is not None else "noise"]
        return {**sample, "drawn": str(int(kernel(torch.ones(2)).sum()))}


def mentions(sample: dict[str, Any], jitter: float = 0.0) -> dict[str, Any]:
    """Deterministic as it is called."""
    return {**sample, "drawn": str(random.random() + float(torch.rand(())) if jitter else 0)}


@pytest.mark.parametrize("transform", [Resize(), mentions], ids=["table", "mentions"])
def test_code_that_names_draws_but_draws_nothing_is_built_in_threads(
    samples: SampleSet, caplog: pytest.LogCaptureFixture, transform: Any
) -> None:
    mesh = mesh_of(1, 0)
    with DataLoader(samples.open(transform=transform), batch_size=6, device_mesh=mesh, num_threads=2) as loader:
        batches = iter(loader)
        next(batches)
        until(lambda: loader.metrics().get("build_s", 0) > 0, "builder threads build ahead")
        assert sum(len(batch["drawn"]) for batch in batches) == 84
        assert "batches_in_turn" not in loader.metrics()
    assert not caplog.records


def rarely_from_python(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "drawn": str(random.gauss(0, 1) if sample["cls"] == 67 else 0)}


def rarely_from_numpy(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "drawn": str(np.random.normal() if sample["cls"] == 67 else 0)}  # noqa: NPY002


def rarely_from_torch(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "drawn": str(float(torch.empty(()).normal_()) if sample["cls"] == 67 else 0)}


@pytest.mark.parametrize(
    "transform", [rarely_from_python, rarely_from_numpy, rarely_from_torch], ids=lambda f: f.__name__
)
def test_a_draw_for_one_sample_is_seen_by_whoever_is_alone(
    samples: SampleSet, caplog: pytest.LogCaptureFixture, transform: Any
) -> None:
    """It comes in the twelfth batch of an ordered set; the training's generators are not touched by it."""
    dataset = samples.open(transform=transform, shuffle=False)
    expected = played(dataset, 1, num_workers=1)
    caplog.clear()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1)
    before = [str(state) for state in generator_states()]
    assert played(dataset, 1, num_threads=0) == expected
    assert [str(state) for state in generator_states()] == before
    assert "process-wide random generators" in caplog.text


def test_a_draw_for_one_sample_is_seen_without_an_index(compressed: SampleSet) -> None:
    found = []
    for hands in ({"num_threads": 0}, {"num_workers": 1}):
        dataset = compressed.open(transform=sometimes, shuffle=False)
        with DataLoader(dataset, batch_size=6, epoch_size=60, device_mesh=mesh_of(1, 0), **hands) as loader:
            found.append(drawn(loader))
    assert found[0] == found[1]


def sometimes(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "drawn": str(random.random() if sample["cls"] % 20 == 19 else 0)}


class Holds:
    """Holds generators of its own, as Albumentations' ``Compose`` does."""

    def __init__(self, seed: int | None) -> None:
        self.steps = [{"rng": np.random.default_rng(seed)}, {"rng": np.random.default_rng(seed)}]
        self.python, self.legacy = random.Random(seed), np.random.RandomState(seed)
        self.torch = torch.Generator()
        self.made_late: np.random.Generator | None = None

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        self.made_late = self.made_late or np.random.default_rng(3)
        numbers = [*(step["rng"].random() for step in self.steps), self.python.random(), self.legacy.random()]
        numbers += [float(torch.rand((), generator=self.torch)), self.made_late.random()]
        return {**sample, "drawn": " ".join(map(str, numbers))}


OF_MODULE = np.random.default_rng(0)


def helper() -> float:
    return OF_MODULE.random()


def by_a_global(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "drawn": f"{helper()}"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "make", [lambda: Holds(7), lambda: Holds(None), lambda: by_a_global], ids=["seeded", "unseeded", "global"]
)
def test_generators_that_objects_hold_make_no_twins(
    samples: SampleSet, caplog: pytest.LogCaptureFixture, make: Any
) -> None:
    """The same on any ranks, threads and workers, though each has a copy of the object."""
    caplog.set_level(logging.INFO, logger="streaming.run.loops.base")
    expected = played(samples.open(transform=make(), seed=5), 1, num_threads=0)
    numbers = [number for epoch in expected for one in epoch.values() for number in one.split()]
    assert len(set(numbers)) == len(numbers), "no two samples, and no two generators, draw the same"
    for ranks, hands in ((1, {"num_workers": 2}), (2, {"num_workers": 1}), (2, {"num_threads": 2})):
        assert played(samples.open(transform=make(), seed=5), ranks, **hands) == expected, (ranks, hands)
    assert played(samples.open(transform=make(), seed=6), 1)[0] != expected[0]
    told = [record for record in caplog.records if "random generators of its own" in record.getMessage()]
    assert len(told) == 1 + 1 + 1 + 1 + 1, "once a job"
    assert all(record.levelno == logging.INFO for record in caplog.records)
    assert ("Holds.python" if "Holds" in told[0].getMessage() else "OF_MODULE") in told[0].getMessage()


# --- what changes in a later cell of a notebook ---


def test_globals_that_change_reach_the_workers(
    samples: SampleSet, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defined in ``__main__``, as in a notebook, where they are sent by value."""
    caplog.set_level(logging.INFO, logger="streaming.run.loops.base")
    cell = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", cell)
    exec(
        "size = 1\ndef helper(): return size\ndef transform(sample): return {**sample, 'drawn': str(helper())}",
        vars(cell),
    )
    found = []
    dataset = samples.open(transform=vars(cell)["transform"])
    with (
        DataLoader(dataset, batch_size=45, device_mesh=mesh_of(1, 0), num_workers=2) as loader,
        DataLoader(dataset, batch_size=45, device_mesh=mesh_of(1, 0)) as in_threads,
    ):
        later = ("", "size = 5", "def helper(): return 7", "", "def transform(sample): return {}")
        for code in later:
            exec(code, vars(cell))
            found.append(tuple(set(drawn(one).values()) for one in (loader, in_threads)))
    assert found == [({number}, {number}) for number in ("1", "5", "7", "7", "7")]
    told = [record.getMessage() for record in caplog.records]
    assert [("restart with" in one, "transform was redefined" in one) for one in told] == [
        (True, False), (True, False), (False, True), (False, True),
    ]  # fmt: skip
