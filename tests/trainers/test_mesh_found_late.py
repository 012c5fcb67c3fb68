"""Loaders and samplers that were made before ``init_process_group`` read their own share all the same."""

from __future__ import annotations

import logging
import pickle
from collections import Counter
from typing import Any

import pytest

from infra import MeshError
from infra.frameworks import DefaultGroup
from streaming import DataLoader, DeviceMeshFetcher, DeviceMeshSampler, Mixture, OrdinaryDataset
from tests.support.sets.data_sets import SampleSet, write_set

pytestmark = pytest.mark.thorough

KINDS = ("indexed", "unindexed", "map-style", "fetcher")
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK")


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SampleSet]:
    folder = tmp_path_factory.mktemp("late")
    sizes = (12, 20, 16)
    return {
        "indexed": write_set(folder / "indexed", sizes),
        "unindexed": write_set(folder / "unindexed", sizes, indexed=False),
    }


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


def initialize(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int) -> None:
    """torch.distributed as this rank sees it, so that one process plays all."""
    for module in ("launch", "finder"):
        monkeypatch.setattr(f"infra.{module}.process_group", lambda: DefaultGroup(rank=rank, world_size=world_size))


def make(sets: dict[str, SampleSet], kind: str, batch_size: int = 4) -> DataLoader:
    if kind == "map-style":
        return DataLoader(OrdinaryDataset(list(range(48)), seed=3), batch_size)
    dataset = sets["unindexed" if kind == "unindexed" else "indexed"].open(seed=3)
    if kind == "fetcher":
        return DeviceMeshFetcher(dataset, batch_size, last_batch="partial")
    return DataLoader(dataset, batch_size, last_batch="partial", agreement_timeout=None)


def keys_of(batch: Any) -> list[str]:
    if isinstance(batch, dict):
        return list(batch["__key__"])
    return [sample["__key__"] if isinstance(sample, dict) else str(int(sample)) for sample in batch]


@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_made_first_reads_its_share(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, sets: dict[str, SampleSet], kind: str
) -> None:
    caplog.set_level(logging.INFO, "streaming.loader")
    loaders = [make(sets, kind) for _ in range(2)]
    assert [loader.global_batch_size for loader in loaders] == [4, 4]
    received = []
    for rank, loader in enumerate(loaders):
        initialize(monkeypatch, rank, 2)
        if kind != "unindexed":
            assert len(loader) == 6
        with loader:
            received.append([keys_of(batch) for batch in loader])
        assert (loader.global_batch_size, loader.device_mesh.data_rank) == (8, rank)
    assert [rank for rank in range(2) if f"rank {rank} of 2 (found by: torch.distributed)" in caplog.text] == [0, 1]
    assert not {key for batch in received[0] for key in batch} & {key for batch in received[1] for key in batch}
    counted = Counter(key for batches in received for batch in batches for key in batch)
    assert len(counted) == 48
    assert set(counted.values()) == {1}


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_set_and_loaded_before_holds_on_the_mesh_found_later(
    monkeypatch: pytest.MonkeyPatch, sets: dict[str, SampleSet], kind: str
) -> None:
    with make(sets, kind, 8) as alone:
        alone.set_epoch(2)
        batches = iter(alone)
        seen = [*keys_of(next(batches)), *keys_of(next(batches))]
        state = alone.state_dict()
        rest = {key for batch in batches for key in keys_of(batch)}
    loader, other = make(sets, kind), make(sets, kind)
    loader.load_state_dict(state)
    other.load_state_dict(state)
    received = []
    for rank, one in enumerate((loader, other)):
        initialize(monkeypatch, rank, 2)
        with one:
            assert one.epoch == 2
            received += [key for batch in one for key in keys_of(batch)]
    assert len(seen) + len(received) == 48
    assert set(received) == rest


@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_that_is_sent_to_another_process_reads_the_share_of_that(
    monkeypatch: pytest.MonkeyPatch, sets: dict[str, SampleSet], kind: str
) -> None:
    """As Lightning's ``ddp_spawn`` and ``torch.multiprocessing.spawn(train, args=(loader,))`` send it."""
    with make(sets, kind) as alone:
        new = pickle.dumps(alone)
        batches = iter(alone)
        seen = [*keys_of(next(batches)), *keys_of(next(batches))]
        begun = pickle.dumps(alone)
    for pickled, received in ((new, []), (begun, [*seen])):
        for rank in range(2):
            initialize(monkeypatch, rank, 2)
            with pickle.loads(pickled) as loader:
                assert type(loader) is type(alone)
                assert loader.device_mesh.data_rank == rank
                received += [key for batch in loader for key in keys_of(batch)]
        assert len(received) == 48
        assert len(set(received)) == 48


def test_weights_and_states_given_before_the_first_batch_go_along(
    monkeypatch: pytest.MonkeyPatch, sets: dict[str, SampleSet]
) -> None:
    """To another process, and to the mesh that is found later."""

    def mixed() -> DataLoader:
        parts = {"odd": sets["indexed"].open(seed=3), "even": sets["indexed"].open(seed=3)[:30]}
        return DataLoader(Mixture(parts, weights={"odd": 1, "even": 1}, seed=3), 8, epoch_size=48)

    with mixed() as loader:
        loader.set_weights({"odd": 1, "even": 0}, at=0)
        with pickle.loads(pickle.dumps(loader)) as other:
            assert other.state_dict() == loader.state_dict()
        initialize(monkeypatch, 1, 2)
        assert {name for batch in loader for name in batch["__source__"]} == {"odd"}
        assert loader.global_batch_size == 16
    initialize(monkeypatch, 0, 1)
    with make(sets, "indexed") as loader:
        loader.load_state_dict({**loader.state_dict(), "order": {"seed": 7, "lanes": 4, "window": 9, "shuffle": True}})
        with pickle.loads(pickle.dumps(loader)) as other:
            assert other.state_dict() == loader.state_dict()


@pytest.mark.parametrize("kind", ["indexed", "map-style"])
def test_a_seed_that_was_taken_up_goes_along(sets: dict[str, SampleSet], kind: str) -> None:
    """Also at the very beginning: of an epoch that is begun again, and where all that was read is held back."""
    with make(sets, kind) as loader:
        loader.seed(7)
        batches = iter(loader)
        first = keys_of(next(batches))
        batches.hold_back(1)
        held = pickle.dumps(loader)
        batches.hold_back(-1)
        whole = [first, *map(keys_of, batches)]
        loader.set_epoch(0)
        for pickled in (held, pickle.dumps(loader)):
            with pickle.loads(pickled) as other:
                assert [keys_of(batch) for batch in other] == whole
        state = loader.state_dict()
    if kind == "indexed":
        with make(sets, kind) as loader:
            loader.remesh(0, 1, at=state)
            with pickle.loads(pickle.dumps(loader)) as other:
                assert [keys_of(batch) for batch in other] == whole


def test_an_iteration_after_the_mesh_has_changed_is_an_error(
    monkeypatch: pytest.MonkeyPatch, sets: dict[str, SampleSet]
) -> None:
    with make(sets, "indexed") as loader:
        next(iter(loader))
        initialize(monkeypatch, 1, 2)
        assert len(loader) == 12
        with pytest.raises(MeshError, match="rank 1 of 2, but batches were read as rank 0 of 1"):
            iter(loader)


def test_a_sampler_made_first_deals_to_the_mesh_found_later(monkeypatch: pytest.MonkeyPatch) -> None:
    samplers = [DeviceMeshSampler(24, 3) for _ in range(2)]
    assert len(samplers[0]) == 8
    received = []
    for rank, sampler in enumerate(samplers):
        initialize(monkeypatch, rank, 2)
        assert len(sampler) == 4
        received += [index for batch in sampler for index in batch]
        assert sampler.mesh.data_rank == rank
    assert sorted(received) == list(range(24))
    initialize(monkeypatch, 0, 2)
    with pytest.raises(MeshError, match="rank 0 of 2, but batches were read as rank 1 of 2"):
        next(iter(samplers[1]))
