"""``remesh``: the world changes in a running job, and global batches stay what they are; what is kept and refused."""

from __future__ import annotations

import json
import logging
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from infra import DeviceMesh
from streaming import (
    Balanced,
    Curriculum,
    DataLoader,
    DeviceMeshFetcher,
    DevicePrefetcher,
    Mixture,
    OrdinaryDataset,
    Packed,
    Schedule,
    ShuffleConfig,
    StreamingDataset,
    TorchIterable,
)
from streaming.common.counters import Metrics
from streaming.common.job import store as job_store_module
from streaming.errors import ConfigError, IteratorSupersededError, StateError
from streaming.run.engine.memory.arena import Arena
from streaming.run.engine.memory.chunk_store import ChunkStore
from streaming.run.engine.memory.mapped import NoMaps
from streaming.run.loops import base
from streaming.run.replicas import start_check
from tests.support.contracts.loop_kinds import compress
from tests.support.processes.waiting import until
from tests.support.servers.on_loopback import MiniS3Server
from tests.support.sets.curriculum_sets import write as write_graded
from tests.support.sets.data_sets import Batches, SampleSet, data_gets, merged, mesh_of, play, valid_keys, write_set
from tests.support.sets.packed_sets import write as write_documents

pytestmark = pytest.mark.usefixtures("one_fork_server")

SIZE = 24
MOST_RANKS = 5
KeysOf = Callable[[Any], list[str]]
FEW = ShuffleConfig(lanes=2, window=8)  # of an order without end some 2,000 samples of each lane are laid ahead


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    """202 samples in 7 shards and 28 chunks."""
    return write_set(tmp_path_factory.mktemp("remesh") / "train")


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    return write_set(tmp_path_factory.mktemp("remesh") / "more", (30, 17, 40), first=1000)


class World:
    """All ranks of a job in this process; each with its loader, iterator, and batches that nobody has committed.

    Args:
        make: Makes the loader of a rank.
        dice: Says who stays, and how far each runs ahead.
        keys_of: What a batch holds.
    """

    def __init__(
        self, make: Callable[[DeviceMesh], DataLoader], size: int, dice: random.Random, keys_of: KeysOf = valid_keys
    ) -> None:
        self._make, self._dice, self._keys_of = make, dice, keys_of
        self.loaders = [make(mesh_of(size, rank)) for rank in range(size)]
        self.running = [iter(loader) for loader in self.loaders]
        self.committed: Batches = []

    def commit(self, count: int) -> None:
        """Take so many steps together, over the ends of epochs."""
        for _ in range(count):
            step = []
            for rank, loader in enumerate(self.loaders):
                batch = next(self.running[rank], None)
                if batch is None:
                    self.running[rank] = iter(loader)
                    batch = next(self.running[rank])
                step.append([self._keys_of(batch)])
            self.committed += merged(step)

    def change(self, size: int, *, by_state: bool) -> None:
        """Some go, some stay under other numbers, some join; those that stay were some batches ahead."""
        assert len({json.dumps(loader.state_dict()) for loader in self.loaders}) == 1
        at: Any = self.loaders[0].state_dict() if by_state else len(self.committed)
        for running in self.running:
            for _ in range(self._dice.randint(0, 2)):
                next(running, None)
        self._dice.shuffle(self.loaders)
        for gone in self.loaders[size:]:
            gone.close()
        stay = self.loaders[:size]
        self.loaders = stay + [self._make(mesh_of(size, rank)) for rank in range(len(stay), size)]
        for rank, loader in enumerate(self.loaders):
            loader.remesh(rank, size, at=json.loads(json.dumps(at)))
        self.running = [iter(loader) for loader in self.loaders]

    def close(self) -> None:
        for loader in self.loaders:
            loader.close()


def truth(make: Callable[[DeviceMesh], DataLoader], count: int, keys_of: KeysOf = valid_keys) -> Batches:
    """So many global batches of one rank that is left alone."""
    alone = World(make, 1, random.Random(0), keys_of)
    alone.commit(count)
    alone.close()
    return alone.committed


def kinds(samples: SampleSet, more: SampleSet) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Data sets, and options of their loaders."""
    mixed = {"a": samples.open(), "b": more.open()}
    return {
        "indexed": (samples.open(seed=5), {"last_batch": "partial"}),
        "padded": (samples.open(shuffle=ShuffleConfig(lanes=3, window=8)), {"last_batch": "pad"}),
        "in order": (samples.open(shuffle=False), {"last_batch": "drop"}),
        "filtered": (samples.open(where="hash(__key__) % 3 < 2"), {"last_batch": "partial"}),
        "by size": (Mixture(mixed, seed=2), {"last_batch": "partial"}),
        "by weight": (Mixture(mixed, weights={"a": 1, "b": 3}, shuffle=FEW), {}),
        "virtual epochs": (Mixture(mixed, weights={"a": 1, "b": 3}, shuffle=FEW), {"epoch_size": 200}),
    }  # fmt: skip


@pytest.mark.parametrize(
    "kind", ["indexed", "padded", "in order", "filtered", "by size", "by weight", "virtual epochs"]
)
def test_global_batches_stay_what_they_are(kind: str, samples: SampleSet, more: SampleSet) -> None:
    dataset, options = kinds(samples, more)[kind]
    dice = random.Random(kind)

    def make(mesh: DeviceMesh) -> DataLoader:
        threads = dice.choice((0, 0, 2))
        return DataLoader(dataset, global_batch_size=SIZE, device_mesh=mesh, num_threads=threads, **options)

    world = World(make, 2, dice)
    for number in range(8):
        world.commit(dice.randint(0, 3))
        world.change(dice.randint(1, MOST_RANKS), by_state=number % 2 == 0)
    world.commit(2)
    world.close()
    assert world.committed == truth(make, len(world.committed))


def plain_keys(batch: Any) -> list[str]:
    return list(batch["__key__"])


def token_keys(batch: Any) -> list[str]:
    """All tokens of a batch of packs, of which no two are equal."""
    if isinstance(batch, list):
        return [key for pack in batch for key in token_keys(pack)]
    real = batch["document_ids"] >= 0 if "document_ids" in batch else batch["attention_mask"] > 0
    return [str(token) for token in batch["input_ids"][real].tolist()]


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> StreamingDataset:
    """60 samples with columns of numbers, six in a chunk."""
    return StreamingDataset(write_graded(str(tmp_path_factory.mktemp("graded")), num=60), shuffle=FEW)


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, StreamingDataset]:
    """Some 7,000 tokens each."""
    folder = tmp_path_factory.mktemp("documents")
    for number, name in enumerate("ab"):
        write_documents(folder / name, first=10**6 * number, num_docs=300, seed=number)
    return {name: StreamingDataset(folder / name, seed=3) for name in "ab"}


def derived(graded: StreamingDataset, documents: dict[str, StreamingDataset], kind: str) -> tuple[Any, KeysOf]:
    """A data set made of others, and what its batches hold."""
    if "pack" in kind:
        packs = {name: Packed(one, 32) for name, one in documents.items()}
        padded = Packed(documents["a"], 64, padded=True)
        made: Any = {"packs": packs["a"], "padded packs": padded}.get(kind)
        return made or Mixture(packs, weights={"a": 1, "b": 1}, quotas="exact", shuffle=FEW), token_keys
    halves = {"a": graded[:40], "b": graded[40:]}
    rise = Schedule.steps({0: 0.25, 5 * SIZE: 0.5, 10 * SIZE: 1.0})
    makers: dict[str, Callable[[], Any]] = {
        "curriculum": lambda: Curriculum(graded, "tokens", rise, buckets=4),
        "exact curriculum": lambda: Curriculum(graded, "tokens", rise, buckets=4, quotas="exact"),
        "balanced": lambda: Balanced(graded, by="lang"),
        "exact quotas": lambda: Mixture(halves, weights={"a": 2, "b": 1}, quotas="exact", shuffle=FEW),
        "exact quotas with an end": lambda: Mixture(halves, repeats={"a": 3, "b": 5}, quotas="exact", shuffle=FEW),
        "batches of one source": lambda: Mixture(halves, weights={"a": 2, "b": 1}, batches="one_source", shuffle=FEW),
        "filters in a schedule": lambda: Mixture(
            {name: StreamingDataset(graded.urls, where=f"hash(__key__) % 2 = {at}") for at, name in enumerate("ab")},
            weights=Schedule.steps({0: {"a": 1, "b": 0}, 6 * SIZE: {"a": 1, "b": 1}}), shuffle=FEW,
        ),
    }  # fmt: skip
    return makers[kind](), plain_keys


@pytest.mark.parametrize(
    "kind",
    ["packs", "padded packs", "packs in exact quotas", "curriculum", "exact curriculum", "balanced", "exact quotas",
     "exact quotas with an end", "batches of one source", "filters in a schedule"],
)  # fmt: skip
def test_what_is_made_of_data_sets_goes_through_changes_too(
    kind: str, graded: StreamingDataset, documents: dict[str, StreamingDataset]
) -> None:
    """Global batches stay what they are, whoever leaves or joins, by states and by numbers of batches."""
    dataset, keys_of = derived(graded, documents, kind)
    dice = random.Random(kind)

    def make(mesh: DeviceMesh) -> DataLoader:
        collate_fn = list if kind == "padded packs" else None  # a padded pack is a batch, and ranks get several
        return DataLoader(dataset, global_batch_size=SIZE, device_mesh=mesh, num_threads=0, collate_fn=collate_fn)

    world = World(make, 2, dice, keys_of)
    for number in range(5):
        world.commit(dice.randint(1, 3))
        world.change(dice.randint(1, 4), by_state=number % 2 == 0)
    world.commit(2)
    world.close()
    assert world.committed == truth(make, len(world.committed), keys_of)


def as_it_is(sample: dict[str, Any]) -> dict[str, Any]:
    return sample


def test_worker_processes_stay_and_the_next_batches_are_built_by_them(samples: SampleSet) -> None:
    dataset = samples.open(transform=as_it_is)  # else threads build what needs no code of the user
    options: dict[str, Any] = {"global_batch_size": SIZE, "num_workers": 2, "prefetch_factor": 1}
    whole = merged(play(dataset, 1, **options))
    with DataLoader(dataset, device_mesh=mesh_of(3, 0), **options) as loader:
        running = iter(loader)
        for _ in range(3):
            next(running)
        until(lambda: len(worker_pids(loader)) == 2, "both worker processes have answered")
        pids = worker_pids(loader)
        for number, (rank, size) in enumerate([(1, 2), (0, 1), (3, 5), (0, 1), (2, 3), (0, 1)]):
            loader.remesh(rank, size, at=number)
            running = iter(loader)
            keys = valid_keys(next(running))
            assert Counter(keys) <= whole[number]
            assert len(keys) in (SIZE // size, -(-SIZE // size))
            next(running)
        assert worker_pids(loader) == pids


def worker_pids(loader: DataLoader) -> list[int]:
    crew: Any = loader._loop._machinery.crew  # type: ignore[union-attr]
    return sorted(crew.builder._pool.pids)


def test_chunks_of_lanes_that_stay_are_not_fetched_again(mini_s3: MiniS3Server, s3_bucket: str) -> None:
    samples = write_set(f"{s3_bucket}/train", storage_options=mini_s3.storage_options)
    dataset = samples.open(shuffle=ShuffleConfig(lanes=6, window=8))
    loader = DataLoader(dataset, global_batch_size=SIZE, device_mesh=mesh_of(3, 1))
    alone = DataLoader(dataset, global_batch_size=SIZE, device_mesh=mesh_of(2, 1))
    needed = []
    for one in (alone, loader):  # rank 1 of 2 has lanes 3 to 5, rank 1 of 3 lanes 2 and 3
        mini_s3.clear_log()
        running = iter(one)
        next(running)
        wait_until_read(one)
        needed.append({(get["path"], get["range"]) for get in data_gets(mini_s3.log(), f"{s3_bucket}/train")})
        alone.close()
    assert 0 < len(needed[1] & needed[0]) < len(needed[0])
    held = needed[1]
    for rank, size, needs in ((1, 2, needed[0]), (0, 1, None), (4, 6, set())):
        mini_s3.clear_log()
        loader.remesh(rank, size, at=0)
        for _ in loader:
            pass
        gets = {(get["path"], get["range"]) for get in data_gets(mini_s3.log(), f"{s3_bucket}/train")}
        assert not gets & held
        assert needs is None or gets == needs - held
        held = gets | held if needs is None else needs  # what no lane of its own has is let go
    loader.close()


def wait_until_read(loader: DataLoader) -> None:
    """Until all fetches that memory has room for have ended."""
    store: Any = loader._loop._machinery.contents  # type: ignore[union-attr]
    with store.changed:
        assert store.changed.wait_for(lambda: not store.pending(), 60)


def test_a_change_to_the_same_world_fetches_nothing_anew(samples: SampleSet) -> None:
    """However little memory there is: what is in it is needed first. (Of batches built ahead chunks may be gone.)"""
    dataset = samples.open(shuffle=ShuffleConfig(lanes=2, window=4))
    options: dict[str, Any] = {"global_batch_size": SIZE, "memory_limit": "232KiB", "num_threads": 0}
    fetched = []
    for changes in (False, True):
        with DataLoader(dataset, device_mesh=mesh_of(2, 0), **options) as loader:
            running = iter(loader)
            for number in range(len(loader)):
                next(running)
                wait_until_read(loader)
                if changes:
                    loader.remesh(0, 2, at=number + 1)
                    running = iter(loader)
            fetched.append(loader.metrics()["fetched_chunks"])
            assert 0 < loader.metrics()["arena_peak_bytes"] < dataset.source.chunk_bytes.sum() // 2
    assert fetched[0] == fetched[1]


def test_iterators_of_an_older_world_are_refused(samples: SampleSet) -> None:
    dataset = samples.open(seed=5)
    with DataLoader(dataset, batch_size=8, device_mesh=mesh_of(3, 2)) as loader:
        begun = iter(loader)
        first = valid_keys(next(begun))
        loader.remesh(0, 1, at=0)
        assert (loader.generation, loader.global_batch_size, loader.batch_size) == (1, 24, 24)
        assert (loader.device_mesh.data_rank, loader.device_mesh.data_world_size) == (0, 1)
        for _ in range(2):
            with pytest.raises(
                IteratorSupersededError, match=r"remesh\(\) to data-parallel rank 0 of 1, generation 1, was"
            ):
                next(begun)
        early = iter(loader)
        loader.remesh(2, 3, at=0)  # nothing was planned for one that has not begun
        assert valid_keys(next(early)) == first


@pytest.mark.parametrize("through", ["loader", "prefetcher"])
def test_a_prefetcher_drops_what_it_holds(through: str, samples: SampleSet) -> None:
    options: dict[str, Any] = {"global_batch_size": SIZE, "num_threads": 0}
    dataset = samples.open(seed=5)
    whole = merged(play(dataset, 1, **options))
    with DevicePrefetcher(DataLoader(dataset, device_mesh=mesh_of(2, 0), **options), "cpu", depth=3) as prefetcher:
        running = iter(prefetcher)
        for _ in range(3):
            next(running)
        (prefetcher if through == "prefetcher" else prefetcher.loader).remesh(0, 1, at=2)
        with pytest.raises(IteratorSupersededError, match=r"remesh\(\)"):
            next(running)
        assert prefetcher.state_dict()["samples_seen"] == 2 * SIZE
        assert [Counter(valid_keys(batch)) for batch in prefetcher] == whole[2:]


def test_what_cannot_be_is_refused_and_changes_nothing(samples: SampleSet, tmp_path: Path) -> None:
    dataset = samples.open(seed=5)
    with DataLoader(dataset, global_batch_size=4, device_mesh=mesh_of(2, 0)) as loader:
        running, state = iter(loader), loader.state_dict()
        next(running)
        refused: tuple[tuple[str, type[Exception], dict[str, Any]], ...] = (
            ("dp_rank: expected an integer in .0, 2., got 3", ConfigError, {"dp_rank": 3, "dp_size": 3}),
            ("dp_size", ConfigError, {"dp_rank": 0, "dp_size": 0}),
            ("4 samples cannot be dealt to 5", ConfigError, {"dp_rank": 0, "dp_size": 5}),
            ("at: expected", ConfigError, {"at": -1}),
            (r"at: expected an integer in \[0, 281474976710656\]", ConfigError, {"at": 10**18}),
            (r"at: expected a state_dict\(\) or a number", ConfigError, {"at": "12"}),
            ("state", StateError, {"at": {"epoch": 0}}),
            ("another data set", StateError, {"at": {**state, "fingerprint": "other"}}),
        )
        for match, error, given in refused:
            with pytest.raises(error, match=match):
                loader.remesh(**({"dp_rank": 0, "dp_size": 1, "at": 0} | given))
        next(running)
        assert (loader.generation, loader.state_dict()["samples_seen"]) == (0, 8)
    falling = Schedule.steps({0: 8, 64: 4})  # later batches have no row for some of five ranks
    with DataLoader(dataset, global_batch_size=falling, device_mesh=mesh_of(2, 0)) as loader:
        with pytest.raises(ConfigError, match="4 samples cannot be dealt to 5"):
            loader.remesh(0, 5, at=0)
        assert loader.device_mesh.data_world_size == 2


def test_loops_that_cannot_change_their_world_say_what_to_do(samples: SampleSet, tmp_path: Path) -> None:
    options: dict[str, Any] = {"global_batch_size": 4, "device_mesh": mesh_of(2, 0)}
    tensors = torch.utils.data.TensorDataset(torch.arange(20))
    loose = compress(samples, tmp_path).open()
    for match, made in (
        ("load_state_dict", DataLoader(tensors, **options)),
        ('sharding="dispatch"', DataLoader(OrdinaryDataset(Numbers(20)), epoch_size=20, **options)),
        ("shard_tools index", DataLoader(loose, epoch_size=20, **options)),
        ("streaming.DataLoader", TorchIterable(samples.open(), device_mesh=mesh_of(2, 0))),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=match):
            made.remesh(0, 1, at=0)
    mesh = DeviceMesh.from_sizes(dp_size=2, tp_size=2, rank=0, environ={})
    with pytest.raises(ConfigError, match='replicate="read"'):
        DataLoader(samples.open(), batch_size=4, device_mesh=mesh, replicate="broadcast").remesh(0, 1, at=0)


class Numbers(torch.utils.data.IterableDataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


def test_replicas_go_together(samples: SampleSet) -> None:
    """Tensor-parallel peers call it with the same numbers, and get the same batches."""
    dataset, found = samples.open(seed=5), []
    whole = merged(play(dataset, 1, global_batch_size=SIZE))
    for tp_rank in range(2):
        mesh = DeviceMesh.from_sizes(dp_size=3, tp_size=2, rank=2 * 2 + tp_rank, environ={})
        with DataLoader(dataset, global_batch_size=SIZE, device_mesh=mesh) as loader:
            next(iter(loader))
            loader.remesh(1, 2, at=1)
            assert (loader.device_mesh.rank, loader.device_mesh.world_size) == (2 + tp_rank, 4)
            found.append(valid_keys(next(iter(loader))))
    assert found[0] == found[1]
    assert Counter(found[0]) < whole[1]


def test_meshes_of_another_size() -> None:
    """The first data axis changes; each rank is where ``from_sizes`` puts it."""
    shapes: tuple[dict[str, Any], ...] = (
        {"dp_size": 3},
        {"dp_size": 3, "tp_size": 2, "pp_size": 2},
        {"dp_size": 3, "fsdp_size": 2, "cp_size": 2},
    )
    for sizes in shapes:
        inner = sizes.get("fsdp_size", 1)
        new = {**sizes, "dp_size": 2}
        old = DeviceMesh.from_sizes(**sizes, rank=0, environ={})
        wanted = DeviceMesh.from_sizes(**new, rank=0, environ={})
        replicas = {old.with_rank(rank).replica_rank: old.with_rank(rank) for rank in old.ranks}
        for rank in wanted.ranks:
            one = wanted.with_rank(rank)
            assert replicas[one.replica_rank].with_data_rank(one.data_rank, 2 * inner) == one
    odd = DeviceMesh.from_sizes(dp_size=3, fsdp_size=2, rank=0, environ={}).with_data_rank(4, 5)
    assert (odd.data_rank, odd.data_world_size, odd.axis_sizes["dp"], odd.axis_sizes["fsdp"]) == (4, 5, 5, 1)


def test_a_number_of_batches_counts_whole_epochs(samples: SampleSet) -> None:
    with DataLoader(samples.open(seed=5), global_batch_size=SIZE, device_mesh=mesh_of(1, 0)) as loader:
        size = len(loader)
        epochs = [[Counter(valid_keys(batch)) for batch in loader] for _ in range(2)]
        for at in (2 * size - 1, size, size - 1, 0):  # back over the ends of epochs, too
            loader.remesh(0, 1, at=at)
            assert (loader.epoch, Counter(valid_keys(next(iter(loader))))) == (
                at // size,
                epochs[at // size][at % size],
            )
        loader.remesh(0, 1, at=size)
        state = loader.state_dict()
        loader.seed(9)
        for number in (size + 1, 2 * size + 1):  # epoch 1 is the next to begin, with that seed
            with pytest.raises(ConfigError, match=r"past the start of an epoch for which seed\(\) sets another"):
                loader.remesh(0, 1, at=number)
        loader.load_state_dict({**state, "epoch": 0})
        next(iter(loader))
        loader.seed(9)  # which waits for epoch 1
        loader.remesh(0, 1, at=0)
        assert [Counter(valid_keys(batch)) for batch in loader] == epochs[0]
        next(iter(loader))
        with pytest.raises(ConfigError, match=r"before epoch 1, from which seed\(\) set .* Give the state_dict"):
            loader.remesh(0, 1, at=size - 1)
        loader.remesh(0, 1, at={**state, "epoch": 0, "samples_seen": (size - 1) * SIZE})
        assert [Counter(valid_keys(batch)) for batch in loader] == epochs[0][-1:]
        loader.load_state_dict({**state, "samples_seen": 7})
        with pytest.raises(ConfigError, match="begin at sample 7"):
            loader.remesh(0, 1, at=size + 1)


def test_the_ledger_goes_along(samples: SampleSet, more: SampleSet) -> None:
    """Weights given in the running job hold in every world; who joins gets them with the state."""
    mix = Mixture({"a": samples.open(), "b": more.open()}, weights={"a": 1, "b": 1}, shuffle=ShuffleConfig(lanes=2))

    def make(mesh: DeviceMesh) -> DataLoader:
        return DataLoader(mix, global_batch_size=SIZE, device_mesh=mesh)

    world = World(make, 1, random.Random(1))
    world.commit(2)
    row = world.loaders[0].set_weights({"a": 0, "b": 1})
    world.change(3, by_state=True)
    world.commit(-(-row // SIZE) + 20)
    states = [loader.state_dict() for loader in world.loaders]
    assert states[0] == states[1] == states[2]
    assert world.loaders[1].seen() == world.loaders[2].seen()
    assert sum(one["samples"] for one in world.loaders[0].seen().values()) == len(world.committed) * SIZE
    replay = make(mesh_of(1, 0))
    replay.load_state_dict({**states[0], "epoch": 0, "samples_seen": 0})
    running = iter(replay)
    assert world.committed == [Counter(valid_keys(next(running))) for _ in world.committed]
    assert all(int(key) >= 1000 for key in world.committed[-1])
    others = {**states[0], "samples_seen": 7, "ledger": [{**states[0]["ledger"][0], "sources": {"a": "x", "b": "y"}}]}
    with pytest.raises(StateError, match="the source 'a' is not the one of this state"):
        replay.remesh(0, 1, at={**others, "ledger_text": None})
    next(running)
    replay.remesh(0, 1, at=1)  # of that state nothing is left
    assert Counter(valid_keys(next(iter(replay)))) == world.committed[1]
    replay.close()
    world.close()


def test_bad_samples_are_counted_on(samples: SampleSet, tmp_path: Path) -> None:
    """Substitutes and limits work in the new world; the account is that of the rest of the epoch."""
    whole = play_bad(samples, max_bad_samples=1.0)
    with DataLoader(bad_set(samples, max_bad_samples=1.0), global_batch_size=SIZE, device_mesh=mesh_of(3, 0)) as loader:
        next(iter(loader))
        loader.remesh(0, 1, at=1)
        assert [Counter(valid_keys(batch)) for batch in loader] == whole[1:]
        assert loader.metrics()["bad"]


def bad_set(samples: SampleSet, **options: Any) -> Any:
    return samples.open(seed=5, decode={"cls": no_sevens}, **options)


def no_sevens(data: bytes) -> int:
    number = int(bytes(data))
    if number % 7 == 0:
        raise ValueError("a seven")
    return number


def play_bad(samples: SampleSet, **options: Any) -> Batches:
    return merged(play(bad_set(samples, **options), 1, global_batch_size=SIZE))


def test_the_log_says_what_changes(samples: SampleSet, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "streaming")
    with DeviceMeshFetcher(samples.open(seed=5), 8, device_mesh=mesh_of(3, 1)) as fetcher:
        running = iter(fetcher)
        for _ in range(3):
            next(running)
        fetcher.remesh(1, 2, at=1)
        assert (
            "remesh: data-parallel rank 1 of 2 (it was 1 of 3), generation 1: continues in epoch 0 after 24 samples; 2 "
            "of the batches delivered come again"
        ) in caplog.text
        next(iter(fetcher))
        assert "chunks of the old plan are still in memory" in caplog.text


def test_nobody_of_the_older_process_group_is_asked(samples: SampleSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of its ranks may be gone. In one that was set up anew for this world, ranks compare and count again."""
    distributed: Any = dist
    dataset, group = samples.open(seed=5), {"store": distributed.HashStore()}
    asked: list[str] = []
    monkeypatch.setattr(job_store_module, "_is_set_up", lambda: True)
    for module in (job_store_module, start_check):
        monkeypatch.setattr(module, "job_store", lambda _: (0, group["store"]))
    monkeypatch.setattr(start_check, "job_world_size", lambda: 3)
    monkeypatch.setattr(job_store_module, "job_world_size", lambda: 1)  # nobody joins who is to be told of going on
    monkeypatch.setattr(start_check, "agree", lambda *_, **__: asked.append("compared"))
    monkeypatch.setattr(base, "open_tally", lambda *_, **__: asked.append("counts"))
    with DataLoader(dataset, global_batch_size=SIZE, device_mesh=mesh_of(3, 0)) as loader:

        def asks() -> list[str]:
            asked.clear()
            next(iter(loader))
            return asked

        assert asks() == ["compared", "counts"]
        for size in (2, 3):  # a rank died; another one came
            loader.remesh(0, size, at=0)
            assert asks() == []
        group["store"] = distributed.HashStore()
        loader.remesh(0, 3, at=0)
        assert asks() == ["compared", "counts"]
        group["store"] = distributed.HashStore()
        loader.remesh(0, 2, at=0)  # of three processes in the group
        assert asks() == ["counts"]


def test_what_is_needed_last_makes_room_first(samples: SampleSet) -> None:
    dataset = samples.open()
    wanted = [dataset.source.chunk(number) for number in range(5)]
    budget = sum(-(-one.num_bytes // 4096) * 4096 for one in wanted)
    store = ChunkStore(
        fetch=dataset.source.fetch_unit, arena=Arena(budget, shared=False), num_threads=1, metrics=Metrics(),
        changed=threading.Condition(), maps=NoMaps(),
    )  # fmt: skip
    store.retain = True
    with store.changed:
        units = [store.admit(one) for one in wanted[:4]]
        assert store.changed.wait_for(lambda: not store.pending(), 60)
        for unit in units:
            assert unit is not None
            store.release(unit)
        assert store.keep_first([wanted[2], wanted[0], wanted[4], wanted[1]]) == 3
        store.limit_bytes = store.arena.used_bytes
        assert store.admit(wanted[4]) is not None
        assert [store.holds(one) for one in wanted] == [True, False, True, False, True]
    store.close()
