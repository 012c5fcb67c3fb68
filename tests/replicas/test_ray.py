"""Ray: the remote loader, Ray Train's workers and the tools, on a cluster of two nodes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import socket
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from click.testing import CliRunner
from ray.util import placement_group, remove_placement_group
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import infra
from infra import DeviceMesh
from shard_tools.cli import cli
from shard_tools.running import ray_engine
from shard_tools.running.engine import ordered
from shard_tools.running.ray_engine import RayExecutor
from streaming import DataLoader, Mixture, OrdinaryDataset, RemoteBatch, RemoteGroup, StreamingDataset
from streaming.errors import ConfigError, IteratorSupersededError, NotFoundError, StateError, WorkerDiedError
from streaming.others.remote import cluster, wire
from streaming.others.remote.loop import _Lives
from streaming.others.remote.reader import Note, RemoteReader
from tests.support.clusters.ray_cluster import TwoNodes, locations, wait_for_end
from tests.support.code.folders import EXAMPLES, ROOT
from tests.support.code.page_blocks import blocks
from tests.support.processes.forked import Forked
from tests.support.processes.played_ranks import read_here
from tests.support.processes.waiting import until
from tests.support.sets.data_sets import SampleSet, mesh_of, play, valid_keys, write_set
from tests.support.sets.torch_sets import ITERABLES, MAPS
from tests.support.sources.conversions import contents, parquet_source

pytestmark = [pytest.mark.thorough, pytest.mark.ray, pytest.mark.timeout(900)]

AWAY = RemoteGroup(name="readers", num_cpus=0.5, resources={"away": 0.01})
QUICK_TRAIN = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
}
"""What Ray Train waits for and starts beside its workers, less."""


@pytest.fixture(autouse=True)
def _ctrl_c_stays_pythons() -> Iterator[None]:
    """Ray Train takes SIGINT over and keeps it behind its run: later tests of this process interrupt themselves."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.fixture(scope="module")
def nodes(forked: Forked) -> Iterator[TwoNodes]:  # what ``forked`` starts is no child that the cluster leaves behind
    with TwoNodes(forked) as nodes:
        yield nodes


class WarmReaders:
    """Actors that were readers before and become others: each new one takes three seconds of a core for its imports.

    All but who starts them, and that they end, is the product's; the tests of deaths, places and ends start their own.
    """

    def __init__(self) -> None:
        class Warm(RemoteReader):
            """Defined here, so that it travels as it is: the actors do not import this file."""

            def __init__(self) -> None:
                self._loaders = ()

            def become(self, *given: Any) -> None:
                for loader in self._loaders:
                    loader.close()
                RemoteReader.__init__(self, *given)

        warm = ray.remote(concurrency_groups=cluster.GROUPS)(Warm)
        self.free = [warm.options(num_cpus=0, resources={node: 0.01}).remote() for node in ("away", "home")]
        self.all = list(self.free)

    def start(self, reader: type, arguments: Sequence[tuple[Any, ...]], group: RemoteGroup) -> list[Any]:
        """As ``cluster.start``."""
        actors = [self.free.pop(0) for _ in arguments]
        ray.get([actor.become.remote(*given) for actor, given in zip(actors, arguments, strict=True)])
        return actors


@pytest.fixture(scope="module")
def _warm_readers(nodes: TwoNodes) -> Iterator[WarmReaders]:
    readers = WarmReaders()
    yield readers
    for actor in readers.all:
        ray.kill(actor)


@pytest.fixture
def warm_readers(_warm_readers: WarmReaders, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Loaders take their readers from those that are there, and give them back."""
    monkeypatch.setattr(cluster, "start", _warm_readers.start)
    monkeypatch.setattr(cluster, "kill", _warm_readers.free.append)
    yield
    assert len(_warm_readers.free) == len(_warm_readers.all), "a loader was not closed"


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    return write_set(tmp_path_factory.mktemp("set"))


def opener(samples: SampleSet, **options: Any) -> Callable[[], StreamingDataset]:
    """A data set's function that carries a URL and nothing else."""
    url = samples.url
    return lambda: StreamingDataset(url, **options)


def remote(samples: SampleSet, world_size: int = 2, *, group: RemoteGroup | str = AWAY, **options: Any) -> DataLoader:
    options.setdefault("batch_size", 8)
    return DataLoader(opener(samples), device_mesh=mesh_of(world_size, 0), remote_group=group, **options)


def keys_of(batch: RemoteBatch) -> list[list[str]]:
    """Valid keys by data rank, every field checked."""
    return [valid_keys(handle.get()) for handle in batch.handles]


def steps(ranks: list[list[list[str]]]) -> list[list[list[str]]]:
    """What ``play`` gives, by step and rank."""
    return [list(step) for step in zip(*ranks, strict=True)]


# ------------------------------------------------------------------------------------------------- without a cluster


def test_only_a_small_function_travels(samples: SampleSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match=r"expected a function that makes the data set.*got StreamingDataset"):
        DataLoader(samples.open(), batch_size=8, remote_group="readers")
    table = np.zeros(1 << 20, np.uint8)
    with pytest.raises(ConfigError, match=r"take 1\.0 MiB.*holds data"):
        DataLoader(lambda: table, batch_size=8, remote_group="readers")
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="cannot be sent"):
        DataLoader(lambda: lock, batch_size=8, remote_group="readers")


def test_ray_has_to_be_started(samples: SampleSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ConfigError, match=r"call ray\.init\(\) first"):
        remote(samples)


@pytest.mark.parametrize("known", [None, "first"])
def test_deaths_from_one_call_are_counted(known: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process counts when it answers for the first time; one may answer often."""
    answers = iter(["first", "first", "second", "second", "third", "fourth", "fourth", "fifth"])
    monkeypatch.setattr(cluster, "process_of", lambda _: next(answers))
    monkeypatch.setattr(cluster, "wait", lambda refs, timeout_s: True)
    monkeypatch.setattr(cluster, "get", lambda ref: ref)
    lives = _Lives(None, known)

    def look_on() -> None:
        while True:
            lives.look()

    with pytest.raises(WorkerDiedError, match="died 4 times on one batch"):
        look_on()
    assert list(answers) == []


@contextlib.contextmanager
def listening(answer: bytes | None) -> Iterator[str]:
    """A server that sends this to all that connect; None: it never accepts."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError), server.accept()[0] as connection:
                connection.sendall(answer or b"")
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 10):
                    pass

        thread = threading.Thread(target=serve)
        if answer is not None:
            thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        if answer is not None:
            thread.join()


ANSWERS = {
    "nothing": (None, "timed out"),
    "the end": (b"", "it closes the connection"),
    "another protocol": (b"HTTP/1.1 400 Bad Request\r\n\r\n", "what answers is not Ray"),
}


@pytest.mark.parametrize("what", ANSWERS)
@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_at_which_no_cluster_answers_is_named(
    what: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would wait for two and a half minutes, and say nothing meanwhile."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray would wait"))
    monkeypatch.setattr(ray_engine, "_ANSWER_S", 0.2)
    answer, why = ANSWERS[what]
    with listening(answer) as address:
        monkeypatch.setenv("RAY_ADDRESS", f"{scheme}{address}")
        with pytest.raises(ConfigError, match=rf"RAY_ADDRESS='{scheme}{address}': no server answers there.*{why}"):
            RayExecutor(1)
    with pytest.raises(ConfigError, match=r"no server answers there.*refused.*RAY_ADDRESS=HOST:6379"):
        RayExecutor(1)


@pytest.mark.parametrize("address", ["garbage", "host:port", "http://host:1", "host:99999", "[::1", "host:1/path", " "])
def test_what_is_no_address_is_named(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS=.*expected HOST:PORT"):
        RayExecutor(1)


def test_what_ray_says_of_an_address_becomes_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise ConnectionError("no running instance")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS='auto': Ray cannot connect \(no running instance\)"):
        RayExecutor(1)


@pytest.mark.parametrize(
    "options",
    [{"name": ""}, {"name": "a", "num_actors": 0}, {"name": "a", "num_cpus": -1}, {"name": "a", "memory": "much"}],
)
def test_a_group_is_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        RemoteGroup(**options)


def test_packing_keeps_every_value_and_gives_memory_of_its_own() -> None:
    batch = {
        "image": torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4).transpose(0, 2),
        "half": torch.tensor([1.5, -2], dtype=torch.bfloat16),
        "eighth": torch.tensor([1.5, -2]).to(torch.float8_e4m3fn),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "imaginary": torch.tensor([1 + 2j]).conj().imag,
        "scalar": torch.tensor(3),
        "pair": (torch.ones(2), ["text", b"bytes"]),
        "none": None,
    }
    packed = wire.pack(batch)
    for one in (packed["image"], packed["half"], packed["scalar"], packed["pair"][0]):
        one.array.flags.writeable = False  # as it comes out of the object store
    found = wire.unpack(packed)
    assert torch.equal(found["eighth"].float(), torch.tensor([1.5, -2]))
    for name in ("image", "half", "scalar", "conjugate", "imaginary"):
        assert torch.equal(found[name], batch[name])
        assert found[name].dtype == batch[name].dtype
        found[name].zero_()
    assert torch.equal(batch["scalar"], torch.tensor(3))
    assert found["pair"][1] == ["text", b"bytes"]
    assert wire.num_bytes(packed) == 24 + 4 + 2 + 8 + 4 + 8 + 8 + 9
    assert wire.num_rows(packed) == 4


class _Counting(IterableDataset[int]):
    """A pass of 24 numbers."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(24))


@pytest.mark.parametrize("leaves_early", [False, True])
def test_a_new_seed_begins_a_stream_anew_as_in_a_local_loader(
    monkeypatch: pytest.MonkeyPatch, *, leaves_early: bool
) -> None:
    read_here(monkeypatch)

    def create() -> _Counting:
        return _Counting()

    def tale(loader: DataLoader, numbers: Callable[[Any], list[int]]) -> list[Any]:
        found: list[Any] = []
        for batch in loader:
            found.append(numbers(batch))
            if leaves_early:
                break
        loader.seed(7)
        found.append([numbers(batch) for batch in loader])
        found += [numbers(next(iter(loader))), loader.state_dict()]
        return found

    options: dict[str, Any] = {"batch_size": 4, "epoch_size": 16, "device_mesh": mesh_of(1, 0)}
    with DataLoader(create(), **options) as local:
        expected = tale(local, torch.Tensor.tolist)
    assert [0, 1, 2, 3] in expected[-3]  # not where the epoch before ended, in the middle of a pass
    with DataLoader(create, remote_group=AWAY, **options) as loader:
        assert tale(loader, lambda batch: batch.handles[0].get().tolist()) == expected


@pytest.mark.parametrize("kind", ["map", "counting", "stateless", "keeper", "both", "own torch, state"])
def test_kinds_of_torch_sets_give_in_actors_the_rows_that_they_give_here(nodes: TwoNodes, kind: str) -> None:
    options: dict[str, Any] = {"batch_size": 4, "device_mesh": mesh_of(1, 0)}
    if kind in MAPS:
        options["shuffle"] = False

    def make() -> Any:
        return (MAPS | ITERABLES)[kind]()

    def away(batch: RemoteBatch) -> list[int]:
        return [int(row) for row in batch.handles[0].get()]

    with DataLoader(make, **options) as loader:
        expected = [[[int(row) for row in batch] for batch in loader] for _ in range(2)]
    with DataLoader(make, remote_group=AWAY, **options) as loader:
        assert [[away(batch) for batch in loader] for _ in range(2)] == expected
    with DataLoader(make, remote_group=AWAY, **options) as loader:
        begun = [away(batch) for batch in itertools.islice(loader, 2)]
        state = loader.state_dict()
    with DataLoader(make, remote_group=AWAY, **options) as loader:
        loader.load_state_dict(state)
        assert begun + [away(batch) for batch in loader] == expected[0]


def test_a_seed_outlasts_a_first_step_that_fails_and_an_epoch_that_starts_again(
    samples: SampleSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = [WorkerDiedError("died")]

    def get(refs: Any, **_: Any) -> Any:
        if isinstance(refs, list) and isinstance(refs[0], Note) and fails:
            raise fails.pop()
        return refs

    read_here(monkeypatch)
    monkeypatch.setattr(cluster, "get", get)
    (expected,) = play(samples.open(seed=5), 1, batch_size=16)
    with remote(samples, 1, batch_size=16) as loader:
        loader.seed(5)
        with pytest.raises(WorkerDiedError):
            next(iter(loader))
        state = loader.state_dict()
        assert [keys_of(batch)[0] for batch, _ in zip(loader, expected[:3], strict=False)] == expected[:3]
        loader.set_epoch(0)
        assert [keys_of(batch)[0] for batch in loader] == expected
    assert play(samples.open(), 1, batch_size=16, state=state) == [expected]


def test_a_step_takes_what_all_readers_of_it_made(samples: SampleSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """By that, as many are asked for as ``ahead_limit`` has room for."""
    read_here(monkeypatch)
    with remote(samples, 4, group=RemoteGroup(name="two", num_actors=2), batch_size=4) as loader:
        batch = next(iter(loader))
        assert loader.metrics()["largest_step_bytes"] == sum(handle.num_bytes for handle in batch.handles)


def test_another_seed_given_behind_a_loaded_one_is_for_the_same_epoch_as_in_a_local_loader(
    samples: SampleSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state says that its epoch had begun when a seed was given, which was for the next one."""
    read_here(monkeypatch)
    local = DataLoader(samples.open(), batch_size=16, device_mesh=mesh_of(1, 0))
    with local, remote(samples, 1, batch_size=16) as loader:
        batches = iter(local)
        next(batches)
        batches.hold_back(1)
        local.seed(7)
        state = local.state_dict()
        for one in (local, loader):
            one.load_state_dict(state)
            one.seed(5)
        assert loader.state_dict() == local.state_dict()
        assert [keys_of(batch)[0] for batch in loader] == [valid_keys(batch) for batch in local]


def test_a_mixture_without_end_goes_on_where_it_was_as_in_a_local_loader(
    samples: SampleSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_here(monkeypatch)

    def create() -> Mixture:
        parts = {"whole": samples.open(), "part": samples.open()[:50]}
        return Mixture(parts, weights={"whole": 2, "part": 1}, seed=3)

    def refuse_a_seed(loader: DataLoader) -> None:
        with pytest.raises(ConfigError, match="a mixture without end has one order"):
            loader.seed(7)

    def tale(loader: DataLoader, keys: Callable[[Any], list[str]]) -> Iterator[Any]:
        loader.set_epoch(1)  # of trainers, which count epochs of their own
        yield loader.epoch
        for _ in range(3):
            yield [keys(batch) for batch in itertools.islice(loader, 2)], loader.state_dict()
            loader.set_epoch(2)
        refuse_a_seed(loader)
        with pytest.raises(TypeError, match="no len"):
            len(loader)

    options: dict[str, Any] = {"batch_size": 16, "device_mesh": mesh_of(1, 0)}
    with DataLoader(create(), **options) as local:
        expected = list(tale(local, valid_keys))
    with DataLoader(create, remote_group=AWAY, **options) as loader:
        assert list(tale(loader, lambda batch: keys_of(batch)[0])) == expected
    with DataLoader(create, remote_group=AWAY, epoch_size=48, **options) as loader:
        refuse_a_seed(loader)  # epochs are parts of the one order


# ------------------------------------------------------------------------------------------------- handles


def test_the_driver_sees_handles_and_only_who_uses_a_slice_receives_it(
    nodes: TwoNodes, tmp_path: Path, samples: SampleSet
) -> None:
    """Batches of 256 KiB, beyond what Ray puts into messages: they stay on the reader's node, where trainers are."""
    url = samples.url
    away = nodes.node_id("away")

    def create() -> StreamingDataset:
        def widen(sample: dict[str, Any]) -> dict[str, Any]:
            return {**sample, "big": np.full(32 << 10, sample["cls"] % 251, np.uint8)}

        return StreamingDataset(url, transform=widen)

    @ray.remote(num_cpus=0, resources={"away": 0.01})
    class Trainer:
        def use(self, handle: Any) -> tuple[list[str], int, str]:
            batch = handle.get()
            assert (batch["big"][:, 5] == batch["cls"] % 251).all()
            return batch["__key__"], batch["big"].nbytes, ray.get_runtime_context().get_node_id()

    mesh = DeviceMesh.from_sizes(dp_size=2, tp_size=2, rank=0, environ={})
    trainers = [Trainer.remote() for _ in range(2)]  # the tensor ranks of each data rank, in different processes
    got: list[list[str]] = []
    with DataLoader(create, batch_size=8, device_mesh=mesh, remote_group=AWAY) as loader:
        for batch in loader:
            assert [handle.data_rank for handle in batch.handles] == [0, 1]
            assert [handle.num_samples for handle in batch.handles] == [8, 8]
            assert (batch.epoch, batch.number) == (0, len(got))
            assert batch.of(0) is batch.of(1)  # replicas share one object
            used = ray.get([trainers[rank % 2].use.remote(batch.of(rank)) for rank in range(4)])
            assert [node for _, _, node in used] == [away] * 4
            assert used[0][0] == used[1][0]
            assert used[2][0] == used[3][0]
            assert batch.handles[0].num_bytes > used[0][1] == 256 << 10
            assert locations([handle.ref for handle in batch.handles]) == {away}
            got.append([used[0][0], used[2][0]])
            assert len(got) <= loader.metrics()["batches"]
    for trainer in trainers:
        ray.kill(trainer)
    assert got == steps(play(samples.open(), 2, batch_size=8))


def test_several_readers_serve_the_ranks_as_local_loaders_do(warm_readers: None, samples: SampleSet) -> None:
    group = RemoteGroup(name="readers", num_actors=2, num_cpus=0.3)
    with remote(samples, 3, group=group, batch_size=11, last_batch="pad") as loader:
        got = [keys_of(batch) for batch in loader]
        assert loader.epoch == 1
        assert len(loader) == len(got)
    assert got == steps(play(samples.open(), 3, batch_size=11, last_batch="pad"))


def test_readers_join_a_placement_group_of_that_name(nodes: TwoNodes, samples: SampleSet, tmp_path: Path) -> None:
    bundles = placement_group([{"CPU": 0.5, "away": 0.01}], name="actor")
    ray.get(bundles.ready())
    url, place = samples.url, tmp_path / "node"

    def create() -> StreamingDataset:
        place.write_text(ray.get_runtime_context().get_node_id())
        return StreamingDataset(url)

    group = RemoteGroup(name="actor", num_cpus=0.5)
    with DataLoader(create, batch_size=8, device_mesh=mesh_of(1, 0), remote_group=group) as loader:
        assert len(loader) == 25
    assert place.read_text() == nodes.node_id("away")
    remove_placement_group(bundles)


def test_an_ordinary_data_set_too(warm_readers: None) -> None:
    def create() -> OrdinaryDataset:
        return OrdinaryDataset(list(range(40)), seed=3)

    with DataLoader(create, batch_size=8, device_mesh=mesh_of(2, 0), remote_group=AWAY, shuffle=True) as loader:
        got = [[handle.get().tolist() for handle in batch.handles] for batch in loader]
    ranks = []
    for rank in range(2):
        with DataLoader(create, batch_size=8, device_mesh=mesh_of(2, rank), shuffle=True) as local:
            ranks.append([batch.tolist() for batch in local])
    assert got == steps(ranks)


def test_workers_of_readers_set_up_their_own_set(warm_readers: None) -> None:
    class Own(Dataset[Any]):
        begun: Any = None

        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> Any:
            info: Any = get_worker_info()
            return index, info.dataset is self, self.begun

    def create() -> Own:
        return Own()

    def set_up(number: int) -> None:
        info: Any = get_worker_info()
        info.dataset.begun = number

    with DataLoader(
        create, batch_size=8, device_mesh=mesh_of(1, 0), remote_group=AWAY, shuffle=False, num_workers=2,
        worker_init_fn=set_up, collate_fn=torch.utils.data.default_collate,
    ) as loader:  # fmt: skip
        got = [[column.tolist() for column in batch.get()] for batch in loader]
    assert got == [[list(range(8)), [True] * 8, [0] * 8], [list(range(8, 16)), [True] * 8, [1] * 8]]


# ------------------------------------------------------------------------------------------------- position


def story(loader: DataLoader, keys: Callable[[Any], list[str]]) -> Iterator[Any]:
    """Everything that a loop's position goes through."""
    yield loader.epoch, loader.state_dict(), len(loader)
    for number, batch in enumerate(loader):
        yield keys(batch)
        if number == 2:
            loader.seed(5)
            yield (middle := loader.state_dict())
        if number == 4:
            break
    yield loader.epoch, loader.state_dict()
    yield [keys(batch) for batch in loader], loader.epoch, loader.state_dict()
    loader.set_epoch(7)
    yield loader.state_dict()
    batches = iter(loader)
    yield keys(next(batches))
    loader.set_epoch(7)
    yield keys(next(batches))
    loader.set_epoch(7)
    yield loader.state_dict(), keys(next(iter(loader))), loader.state_dict()
    loader.load_state_dict(json.loads(json.dumps(middle)))
    with pytest.raises(IteratorSupersededError, match="superseded"):
        next(batches)
    loader.set_epoch(0)
    yield loader.state_dict()
    batches = iter(loader)
    yield [keys(next(batches)) for _ in range(len(loader) - 3)], loader.epoch, loader.state_dict()
    yield [keys(batch) for batch, _ in zip(loader, range(2), strict=False)], loader.epoch, loader.state_dict()
    loader.set_epoch(1)
    yield loader.epoch, loader.state_dict(), [keys(batch) for batch in loader]
    loader.close()
    yield [keys(batch) for batch in loader], loader.state_dict()
    with pytest.raises(StateError, match="belongs to another data set"):
        loader.load_state_dict({**middle, "fingerprint": "other"})
    with pytest.raises(ConfigError, match="seed"):
        loader.seed(-1)
    yield loader.state_dict()


def test_the_position_moves_as_that_of_a_local_loader(warm_readers: None, samples: SampleSet) -> None:
    with DataLoader(samples.open(), batch_size=16, device_mesh=mesh_of(1, 0)) as local:
        expected = list(story(local, valid_keys))
    with remote(samples, 1, batch_size=16) as loader:
        assert list(story(loader, lambda batch: keys_of(batch)[0])) == expected


def test_states_go_between_local_and_remote_loaders_of_any_size(warm_readers: None, samples: SampleSet) -> None:
    whole = play(samples.open(), 1, batch_size=16)[0]
    with remote(samples, 2) as loader:
        batches = iter(loader)
        for _ in range(4):
            next(batches)
        state = loader.state_dict()
        assert play(samples.open(), 1, batch_size=16, state=state) == [whole[4:]]
    with remote(samples, 4, batch_size=4) as loader:
        loader.load_state_dict(state)
        assert [sorted(itertools.chain(*keys_of(batch))) for batch in loader] == [sorted(keys) for keys in whole[4:]]


def test_only_so_much_is_asked_for_ahead(
    warm_readers: None, samples: SampleSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    read = cluster.read
    monkeypatch.setattr(cluster, "read", lambda actor, step, n: asked.append(step.number) or read(actor, step, n))
    with remote(samples, 2, prefetch_factor=3) as loader:
        most = len(loader) + 2  # behind the last step nothing more is asked for
        for number, _ in enumerate(loader):
            assert asked == list(range(min(number + 4, most)))
        asked.clear()
    with remote(samples, 2, group=RemoteGroup(name="one", num_cpus=0.5, ahead_limit=1)) as loader:
        for number, _ in enumerate(loader):
            assert asked == list(range(number + 1))


# ------------------------------------------------------------------------------------------------- errors and deaths


def test_an_error_in_the_actor_arrives_as_it_is(warm_readers: None, samples: SampleSet, tmp_path: Path) -> None:
    missing = f"{tmp_path}/nothing/"

    def create_nothing() -> StreamingDataset:
        return StreamingDataset(missing)

    with pytest.raises(NotFoundError) as expected:
        create_nothing()
    loader = DataLoader(create_nothing, batch_size=8, device_mesh=mesh_of(1, 0), remote_group=AWAY)
    with loader, pytest.raises(NotFoundError) as found:
        len(loader)
    assert (type(found.value), str(found.value)) == (type(expected.value), str(expected.value))
    assert "raised in a remote reader" in found.value.__notes__[0]

    url = samples.url

    def create_broken() -> StreamingDataset:
        def fail(sample: dict[str, Any]) -> dict[str, Any]:
            if sample["cls"] == 100:
                raise LookupError("sample 100 is not to my liking")
            return sample

        return StreamingDataset(url, transform=fail, on_error="raise")

    expected_keys, expected_error = until_error(
        DataLoader(create_broken(), batch_size=8, device_mesh=mesh_of(1, 0)), lambda batch: batch["__key__"]
    )
    got_keys, error = until_error(
        DataLoader(create_broken, batch_size=8, device_mesh=mesh_of(1, 0), remote_group=AWAY),
        lambda batch: batch.get()["__key__"],
    )
    assert got_keys == expected_keys
    assert (type(error), str(error)) == (type(expected_error), str(expected_error))


def until_error(loader: DataLoader, keys: Callable[[Any], list[str]]) -> tuple[list[list[str]], Exception]:
    got = []
    with loader:
        try:
            got.extend(keys(batch) for batch in loader)
        except Exception as error:
            return got, error
    raise AssertionError("no error came")


def widened(url: str, place: Path) -> Callable[[], StreamingDataset]:
    """Return what makes a set with samples of 32 KiB more, and writes there in which process."""

    def create() -> StreamingDataset:
        def widen(sample: dict[str, Any]) -> dict[str, Any]:
            return {**sample, "big": np.zeros(32 << 10, np.uint8)}

        place.write_text(str(os.getpid()))
        return StreamingDataset(url, transform=widen)

    return create


def test_a_killed_reader_is_replaced_and_nothing_is_lost_or_doubled(
    nodes: TwoNodes, samples: SampleSet, tmp_path: Path
) -> None:
    place = tmp_path / "pid"
    create = widened(samples.url, place)
    kept = []
    with DataLoader(create, batch_size=8, device_mesh=mesh_of(2, 0), remote_group=AWAY) as loader:
        for number, batch in enumerate(loader):
            kept.append(batch)
            if number == 3:
                first = int(place.read_text())
                os.kill(first, signal.SIGKILL)
                assert wait_for_end(first)
        assert loader.metrics()["reader_restarts"] == 1
        # Also what lay in the object store when its reader died is there.
        got = [[handle.get()["__key__"] for handle in batch.handles] for batch in kept]
    assert got == steps(play(samples.open(), 2, batch_size=8))


def test_a_node_that_dies_with_its_reader_costs_nothing_but_time(
    nodes: TwoNodes, samples: SampleSet, tmp_path: Path
) -> None:
    """Ray repeats the call many times before it knows of the death. Another node with the same resource comes."""
    place = tmp_path / "pid"
    create = widened(samples.url, place)
    kept, mortal = [], RemoteGroup(name="readers", num_cpus=0.5, resources={"mortal": 0.01})
    node = nodes.add("mortal")
    with DataLoader(create, batch_size=8, device_mesh=mesh_of(2, 0), remote_group=mortal) as loader:
        for number, batch in enumerate(loader):
            kept.append(batch)
            if number == 3:
                first = int(place.read_text())
                nodes.kill(node)
                os.kill(first, signal.SIGKILL)  # a node dies at once, with its workers
                assert wait_for_end(first)
                node = nodes.add("mortal")
        assert loader.metrics()["reader_restarts"] == 1
        # Also what lay in the object store of the node is there.
        got = [[handle.get()["__key__"] for handle in batch.handles] for batch in kept]
    nodes.kill(node)
    assert got == steps(play(samples.open(), 2, batch_size=8))


def test_a_batch_that_kills_every_reader_is_an_error(
    nodes: TwoNodes, samples: SampleSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "MAX_RETRIES", 0)
    url = samples.url

    def create() -> StreamingDataset:
        def die(sample: dict[str, Any]) -> dict[str, Any]:
            if sample["cls"] == 100:
                os.kill(os.getpid(), signal.SIGKILL)
            return sample

        return StreamingDataset(url, transform=die)

    loader = DataLoader(create, batch_size=8, device_mesh=mesh_of(1, 0), remote_group=AWAY)
    with loader, pytest.raises(WorkerDiedError, match="died 1 times on one batch"):
        list(loader)


DRIVER = """
import os, signal, sys
import ray
from streaming import DataLoader, RemoteGroup, StreamingDataset

address, url, place = sys.argv[1:]

def create():
    with open(place, "w") as file:
        file.write(str(os.getpid()))
    return StreamingDataset(url)

ray.init(address=address, log_to_driver=False)
loader = DataLoader(create, batch_size=8, remote_group=RemoteGroup(name="orphan", num_cpus=0.5))
next(iter(loader))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_readers_end_with_their_driver(nodes: TwoNodes, samples: SampleSet, tmp_path: Path, forked: Forked) -> None:
    place, output = tmp_path / "pid", tmp_path / "output"
    driver = forked.start(DRIVER, nodes.address, samples.url, str(place), output=output)
    assert driver.wait(120) == -signal.SIGKILL, output.read_text()
    assert wait_for_end(int(place.read_text()))


def test_close_ends_the_actors_and_keeps_what_was_handed_out(nodes: TwoNodes, samples: SampleSet) -> None:
    with remote(samples, 1) as loader:
        batches = iter(loader)
        batch = next(batches)
        (actor,) = loader._loop._actors
        said = re.compile(r"^(reader 0: )?batch \d+ of 25", re.MULTILINE)
        until(lambda: said.search(loader.describe()), "the reader describes itself, for which it has a second")

    with pytest.raises(ray.exceptions.RayActorError):  # a kill is under way when it was asked for, not done
        until(lambda: ray.get(actor.length.remote()) is None, "the actor is gone")
    assert len(keys_of(batch)[0]) == 8


# ------------------------------------------------------------------------------------------------- Ray Train


def fake_train(monkeypatch: pytest.MonkeyPatch, context: Callable[[], Any]) -> None:
    module = types.ModuleType("ray.train")
    module.get_context = context  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray.train", module)


def test_a_ray_train_worker_is_found_before_what_its_node_was_started_with(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {"world_rank": 5, "world_size": 8, "local_rank": 1, "local_world_size": 4, "node_rank": 1}
    context = types.SimpleNamespace(**{f"get_{name}": lambda value=value: value for name, value in numbers.items()})
    fake_train(monkeypatch, lambda: context)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    launch = infra.discover()
    assert (launch.launcher, launch.rank, launch.world_size) == ("ray", 5, 8)
    assert (launch.local_rank, launch.local_world_size, launch.node_rank) == (1, 4, 1)
    mesh = DeviceMesh.from_sizes(tp_size=2)
    assert (mesh.data_rank, mesh.data_world_size) == (2, 4)
    assert infra.discover({}).launcher == "single"


def test_a_driver_that_knows_ray_train_is_no_worker_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Any:
        raise RuntimeError("`get_context` cannot be used outside of a Ray Train training function")

    fake_train(monkeypatch, refuse)
    monkeypatch.delenv("RANK", raising=False)
    assert infra.discover().launcher == "single"


def test_a_trial_of_ray_tune_is_no_worker_of_ray_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """There Ray raises its DeprecationWarning as an error."""
    monkeypatch.setattr("ray.tune.trainable.trainable_fn_utils._in_tune_session", lambda: True)
    monkeypatch.delenv("RANK", raising=False)
    import_module("ray.train")
    assert infra.discover().launcher == "single"


def mortal(log: str, kill_at: int | None) -> Callable[[None, dict[str, Any]], None]:
    """A ``train_step`` that notes what each rank received, and kills rank 0 at one of its batches."""
    count = iter(range(1, 1_000_000))  # Python 3.14 does not pickle what itertools makes

    def train_step(model: None, batch: dict[str, Any]) -> None:
        launch = infra.discover()
        with open(f"{log}-{launch.rank}", "a") as file:
            file.write(json.dumps([launch.launcher, batch["__key__"]]) + "\n")
        dies = next(count) == kill_at and launch.rank == 0
        if launch.launcher == "single":  # in this process, which goes on
            if dies:
                raise InterruptedError
            return
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.distributed.barrier()  # as gradients are reduced: no rank is a step behind

    return train_step


class Here:
    """What stands for a ``TorchTrainer`` of one worker: this process."""

    def __init__(self, train: Callable[[], None], **_: Any) -> None:
        self.fit = train


# ray.data sets its own deprecated options when its context is made.
@pytest.mark.filterwarnings("ignore:`use_:DeprecationWarning:ray.data.context")
@pytest.mark.parametrize(
    "legs",
    [
        # Ray's workers go on where this process was, and this process where they were killed.
        (("single", 1, 0.7), ("ray", 2, 1.3), ("single", 1, None)),
        # Each leg on Ray is five processes. That a border of epochs is as good a moment, and that ranks may be more
        # than before, is shown for every program of the page without Ray in trainers/test_trainers.py.
        pytest.param((("ray", 2, 1.3), ("ray", 1, 2), ("ray", 2, None)), marks=pytest.mark.matrix),
    ],
    ids=["middle", "border"],
)
def test_ray_train_killed_and_resumed_as_docs_trainers_has_it(
    nodes: TwoNodes,
    samples: SampleSet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    legs: tuple[tuple[str, int, float | None], ...],
) -> None:
    """Each worker finds its place and reads its own share; rank 0 dies by SIGKILL, another number of ranks goes on.

    A leg: who starts the ranks, how many, and how many epochs have been trained on when the next batch kills rank 0.
    """
    from ray.train import WorkerGroupError  # noqa: PLC0415  once loaded, infra asks it: only for this test

    for name, value in QUICK_TRAIN.items():
        monkeypatch.setenv(name, value)
    page = ROOT / "docs/trainers.md"
    (block,) = blocks(page.read_text().split("\n## Ray Train\n")[1].partition("\n## ")[0])
    names = {"URL": samples.url, "FOLDER": str(tmp_path / "runs"), "CHECKPOINT": str(tmp_path / "state.pt")}
    at = 0
    for number, (launcher, ranks, epochs) in enumerate(legs):
        expected = play(samples.open(), ranks, epochs=3, global_batch_size=12)
        stop = epochs and int(epochs * len(expected[0]) / 3)
        log, end = tmp_path / f"leg{number}", stop or len(expected[0])
        own = {"EPOCHS": 3, "RANKS": ranks, "model": None, "train_step": mortal(str(log), stop and stop + 1 - at)}
        death = WorkerGroupError if launcher == "ray" else InterruptedError
        with monkeypatch.context() as patch, pytest.raises(death) if stop else contextlib.nullcontext():
            if launcher == "single":
                patch.setattr("ray.train.torch.TorchTrainer", Here)
            exec(compile(block.code, str(page), "exec"), {"__name__": "__main__", **names, **own})
        for rank in range(ranks):
            received = [json.loads(line) for line in Path(f"{log}-{rank}").read_text().splitlines()]
            assert {found for found, _ in received} == {launcher}
            assert [keys for _, keys in received][: end - at] == expected[rank][at:end], (number, rank)
        at = end


# ------------------------------------------------------------------------------------------------- docs and the tools


def test_the_page_about_ray_runs(nodes: TwoNodes, tmp_path: Path) -> None:
    page = ROOT / "docs/ray.md"
    names: dict[str, Any] = {"__name__": "__main__"}
    code = [block.code for block in blocks(page.read_text()) if block.language == "python" and block.excuse is None]
    assert len(code) == 2
    for block in code:
        exec(compile(block.replace("/tmp/shardstream-ray", str(tmp_path)), str(page), "exec"), names)
    for trainer in names["trainers"]:
        ray.kill(trainer)


def test_the_example_is_fed_by_readers_on_both_nodes(nodes: TwoNodes, forked: Forked, tmp_path: Path) -> None:
    words, environ = ("--out", str(tmp_path / "out"), "--epochs", "2"), {"RAY_ADDRESS": nodes.address}
    example = forked.start(EXAMPLES / "ray_readers.py", *words, output=tmp_path / "output", environ=environ)
    assert example.wait(200) == 0, (tmp_path / "output").read_text()
    said = (tmp_path / "output").read_text()
    assert "two readers and two trainers on 2 node(s)" in said
    assert "3,584 samples in 2 epochs of 1,797 (whole batches), doubled: 0" in said
    losses = [float(found) for found in re.findall(r"epoch \d: loss ([\d.]+)", said)]
    assert losses[-1] < 1.5  # by chance 2.3
    assert (tmp_path / "out" / "loss.png").stat().st_size > 5000


def run_tool(*words: str) -> dict[str, Any]:
    result = CliRunner().invoke(cli, [*words, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def test_the_tools_give_the_same_bytes_on_ray(nodes: TwoNodes, tmp_path: Path) -> None:
    source = parquet_source(tmp_path / "source")
    words = ["convert", source, "--max-bytes", "100kB", "--columns", "tokens"]
    for engine in ("local", "ray"):
        run_tool(*words[:2], str(tmp_path / engine), *words[2:], "--engine", engine)
    expected = contents(tmp_path / "local")
    assert len(expected) > 10
    assert contents(tmp_path / "ray") == expected
    for engine in ("local", "ray"):
        shutil.rmtree(tmp_path / engine / "_shardstream")
        run_tool("index", f"{tmp_path / engine}/", "--engine", engine)
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")


def test_tokens_are_the_same_bytes_on_ray(nodes: TwoNodes, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"line {i}\n" * (i % 3) for i in range(90)))
    for engine in ("local", "ray"):
        words = ("--tokenizer", "bytes", "--split", "val=20%", "--engine", engine, "--workers", "1")
        run_tool("convert", str(tmp_path / "a.txt"), str(tmp_path / engine), *words)
    assert contents(tmp_path / "local" / "val")
    for name in ("train", "val"):
        assert contents(tmp_path / "ray" / name) == contents(tmp_path / "local" / name)


def test_a_killed_task_is_done_again_and_errors_are_as_raised(nodes: TwoNodes, tmp_path: Path) -> None:
    def die_once(path: Path) -> str:
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            return "done"
        os.kill(os.getpid(), signal.SIGKILL)
        return "never"

    def fail(number: int) -> None:
        raise NotFoundError(f"no number {number}")

    with RayExecutor(2) as executor:
        assert executor.submit(die_once, tmp_path / "mark").result() == "done"
        with pytest.raises(NotFoundError, match=r"^no number 7$"):
            executor.submit(fail, 7).result()
        assert list(ordered(executor, lambda number: number + 1, range(5), ahead=3)) == [1, 2, 3, 4, 5]
    assert ray.is_initialized()  # it was not the executor's
