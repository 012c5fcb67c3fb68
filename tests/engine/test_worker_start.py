"""While the first worker processes start, which takes seconds, batches come all the same, and are the same."""

from __future__ import annotations

import importlib.util
import logging
import os
import random
import signal
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from infra import DeviceMesh
from shard_tools import ShardWriter
from streaming import DataLoader, Mixture, StreamingDataset
from streaming.common.monitor import Monitor
from streaming.errors import ConfigError, DecodeError, WorkerDiedError
from streaming.run.engine.memory.chunk_store import ChunkStore, Unit
from streaming.run.engine.threads.jobs import LOOK_UP_S
from streaming.run.engine.workers import inline_builder
from streaming.run.engine.workers.processes import Processes
from streaming.shards.fetch.layout import Fetched
from tests.support.processes.held_workers import Held, pool_of
from tests.support.processes.waiting import PATIENCE_S, until

pytestmark = pytest.mark.usefixtures("one_fork_server")  # that it starts is said by each test itself

SEEN: list[int] = []
"""What a function of this module does here is seen; what it does in a process is not."""


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    with ShardWriter(f"{tmp_path}/{{:02d}}.tar", max_samples=20) as writer:
        for number in range(80):
            writer.write({"__key__": f"{number:03d}", "json": {"number": number}})
    return tmp_path


def where(sample: dict[str, Any]) -> dict[str, Any]:
    SEEN.append(sample["json"]["number"])
    return {**sample, "pid": os.getpid(), "thread": threading.get_ident()}


def pids(loader: DataLoader) -> list[int]:
    found: list[int] = pool_of(loader).pids
    return found


def everything(batches: list[dict[str, Any]]) -> list[Any]:
    return [
        {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
        for batch in batches
    ]


@pytest.mark.thorough
def test_threads_build_what_needs_no_code_of_the_user(
    numbers: Path, held: Held, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "streaming.run.engine.builders")
    with DataLoader(StreamingDataset(numbers), batch_size=4) as loader:
        expected = list(loader)
    with DataLoader(StreamingDataset(numbers), batch_size=4, num_workers=1) as loader:
        batches = iter(loader)
        found = held.first(batches, 5)
        assert pids(loader) == []
        found += held.rest(loader, batches)
        assert len(pids(loader)) == 1
        assert 5 <= loader.metrics()["batches_before_workers"] < 20
    assert everything(found) == everything(expected)
    (told,) = [record.getMessage() for record in caplog.records if "until worker processes" in record.getMessage()]
    assert int(told.split()[0]) == loader.metrics()["batches_before_workers"]


@pytest.mark.parametrize("transform", [None, "where"])
def test_what_was_built_here_is_said_run_by_run(
    numbers: Path, held: Held, caplog: pytest.LogCaptureFixture, transform: str | None
) -> None:
    caplog.set_level(logging.INFO, "streaming.run.engine.builders")
    dataset = StreamingDataset(numbers, transform=where if transform else None)
    with DataLoader(dataset, batch_size=4, num_workers=1) as loader:
        for _ in range(2):
            held.first(iter(loader), 20)
        batches = iter(loader)
        found = held.first(batches, 7)
        found += held.rest(loader, batches)
        list(loader)
        before = loader.metrics()["batches_before_workers"]
    told = [record.getMessage() for record in caplog.records if "built in this process" in record.getMessage()]
    assert [line.split(" batches ")[0] for line in told] == ["all 20", "all 20", str(before - 40)]
    assert 7 <= before - 40 < 20


def test_what_all_ranks_would_say_the_first_says(numbers: Path, held: Held, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "streaming")
    told = []
    for rank in range(2):
        caplog.clear()
        mesh = DeviceMesh.from_sizes(dp_size=2, rank=rank, environ={})
        dataset = StreamingDataset(numbers, transform=Augmenting())
        with DataLoader(dataset, batch_size=4, num_workers=1, device_mesh=mesh) as loader:
            held.first(iter(loader), 10)
            batches = iter(loader)
            held.first(batches, 3)
            held.rest(loader, batches)
        told.append([record.name for record in caplog.records])
    begun = ["streaming", "streaming.run.engine.builders"]
    assert told == [["streaming.run.loops.base", *begun, *begun, "streaming.run.engine.builders"], []]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_asking_thread_builds_what_does(numbers: Path, held: Held, num_workers: int) -> None:
    with DataLoader(StreamingDataset(numbers, transform=where), 4, num_workers=num_workers) as loader:
        batches = iter(loader)
        first = held.first(batches, 5)
        later = held.rest(loader, batches)
        assert loader.metrics()["batches_before_workers"] == 5
        again = list(loader)
        assert loader.metrics()["batches_before_workers"] == 5, "the processes are kept"
        for batch in first:
            assert set(batch["pid"].tolist()) == {os.getpid()}
            assert set(batch["thread"].tolist()) == {threading.get_ident()}
        assert {pid for batch in (*later, *again) for pid in batch["pid"].tolist()} <= set(pids(loader))


def test_the_asking_thread_waits_for_bytes_and_for_no_process(
    numbers: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In no epoch, however short: processes take over by an event."""
    limits: list[float | None] = []
    wait = Monitor.wait

    def noted(monitor: Monitor, timeout_s: float | None = None, *, when: Any = None) -> bool:
        if threading.current_thread() is threading.main_thread():
            limits.append(timeout_s)
        return wait(monitor, timeout_s, when=when)

    monkeypatch.setattr(Monitor, "wait", noted)
    with DataLoader(StreamingDataset(numbers, transform=where), 4, num_workers=1) as loader:
        for _ in range(3):
            assert len(held.first(iter(loader), 20)) == 20
        assert loader.metrics()["batches_before_workers"] == 60
        held.let_go.set()
    assert set(limits) <= {LOOK_UP_S}


def test_bytes_are_asked_for_before_processes_start(numbers: Path, held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()
    fetch, start = ChunkStore._fetched, Processes.start

    def noted(store: ChunkStore, unit: Unit) -> Fetched:
        asked.set()
        return fetch(store, unit)

    def late(processes: Processes) -> None:
        assert asked.wait(PATIENCE_S)
        start(processes)

    monkeypatch.setattr(ChunkStore, "_fetched", noted)
    monkeypatch.setattr(Processes, "start", late)
    with DataLoader(StreamingDataset(numbers, transform=where), 4, num_workers=1) as loader:
        held.first(iter(loader), 1)
        held.let_go.set()


def test_no_batch_is_built_here_if_that_is_ruled_out(numbers: Path, held: Held) -> None:
    held.let_go_when_somebody_waits()
    for options in ({"transform": where}, {"decode": {"json": lambda _: os.getpid()}}, {}):
        dataset = StreamingDataset(numbers, **options)
        with DataLoader(dataset, 4, num_workers=1, num_threads=0) as loader:
            batches = list(loader)
            assert loader.metrics()["batches_before_workers"] == 0
            if options:
                found = {int(pid) for batch in batches for pid in batch.get("pid", batch["json"])}
                assert found == set(pids(loader))


def test_what_a_function_does_to_itself_nobody_sees_here(numbers: Path, held: Held) -> None:
    class Counting:
        seen = 0

        def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
            self.seen += 1
            self.opened = threading.Lock()  # as a file would: with it, it cannot be sent any more
            return {**sample, "seen": self.seen}

    counting = Counting()
    with DataLoader(StreamingDataset(numbers, transform=counting), 4, num_workers=1) as loader:
        batches = iter(loader)
        assert [batch["seen"].tolist()[-1] for batch in held.first(batches, 2)] == [4, 8]
        held.rest(loader, batches)
        list(loader)
    assert counting.seen == 0


def seed_all() -> None:
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002  global generators are the point
    torch.manual_seed(3)


def drawn_by_all() -> list[float]:
    return [random.random(), np.random.rand(), float(torch.rand(()))]  # noqa: NPY002


class Augmenting:
    """Draws from all there is."""

    def __init__(self) -> None:
        self.own = np.random.default_rng(5)

    def __call__(self, sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        drawn = [*drawn_by_all(), self.own.random(), rng.random()]
        return {**sample, "drawn": np.array(drawn)}


@pytest.mark.parametrize("kind", ["one set", "mixture"])
def test_draws_are_the_same_and_those_of_the_training_untouched(numbers: Path, held: Held, kind: str) -> None:
    def loader() -> DataLoader:
        one = StreamingDataset(numbers, transform=Augmenting())
        return DataLoader(one if kind == "one set" else Mixture({"a": one}), 4, num_workers=1, epoch_size=80)

    held.let_go.set()
    with loader() as there:
        expected = everything(list(there))
    seed_all()
    training = drawn_by_all()
    seed_all()
    with loader() as here:
        batches = iter(here)
        found = held.first(batches, 6)
        assert drawn_by_all() == training
        found += held.rest(here, batches)
    assert everything(found) == expected


@pytest.mark.thorough
def test_a_state_and_another_epoch_begin_without_processes_too(numbers: Path, held: Held) -> None:
    def loader() -> DataLoader:
        return DataLoader(StreamingDataset(numbers, transform=Augmenting()), 4, num_workers=2)

    held.let_go.set()
    with loader() as one:
        expected = everything(list(one))
        second = everything(list(one))
    with loader() as one:
        batches = iter(one)
        found = held.first(batches, 3)
        state = one.state_dict()
        del batches
    with loader() as one:
        one.load_state_dict(state)
        batches = iter(one)
        found += held.first(batches, 4)
        found += held.rest(one, batches)
        assert everything(found) == expected
        assert everything(list(one)) == second


def failing(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["json"]["number"] in {3, 17, 40}:
        raise ValueError(f"no {sample['json']['number']}")
    return sample


def test_errors_and_bad_samples_are_the_same(numbers: Path, held: Held) -> None:
    found = []
    for count in (0, 8):
        with DataLoader(StreamingDataset(numbers, transform=failing, max_bad_samples=10), 4, num_workers=1) as loader:
            batches = iter(loader)
            got = held.first(batches, count)
            got += held.rest(loader, batches)
            now: dict[str, Any] = loader.metrics()
            bad = [{name: value for name, value in one.items() if name != "time"} for one in now["bad"]]
            found.append((everything(got), now["bad_samples"], bad))
    assert found[0] == found[1]
    assert found[0][1] == 3
    texts = []
    for is_up in (True, False):
        dataset = StreamingDataset(numbers, transform=failing, on_error="raise", shuffle=False)
        with DataLoader(dataset, 4, num_workers=1) as loader:
            if is_up:
                held.let_go.set()
            else:
                held.let_go.clear()
            with pytest.raises(DecodeError, match="no 3") as caught:
                list(loader)
            held.let_go.set()
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


@pytest.mark.thorough
def test_what_cannot_be_sent_is_refused_at_once_and_a_batch_that_cannot_is_one_here_too(
    numbers: Path, held: Held
) -> None:
    lock = threading.Lock()
    with (
        DataLoader(StreamingDataset(numbers, transform=lambda _: {"is": lock.locked()}), 4, num_workers=1) as loader,
        pytest.raises(ConfigError, match="cannot be sent to worker processes"),
    ):
        next(iter(loader))
    with (
        DataLoader(StreamingDataset(numbers), 4, num_workers=1, collate_fn=lambda _: threading.Lock()) as loader,
        pytest.raises(TypeError, match="pickle"),
    ):
        next(iter(loader))
    held.let_go.set()


def test_a_thread_beside_the_training_does_not_build(numbers: Path, held: Held) -> None:
    """It would change, under the training's hands, the generators from which that draws."""
    found: list[int] = []

    def read() -> None:
        with DataLoader(StreamingDataset(numbers, transform=where), 4, num_workers=1) as loader:
            found.extend(pid for batch in loader for pid in batch["pid"].tolist())

    held.let_go_when_somebody_waits()
    beside = threading.Thread(target=read)
    beside.start()
    beside.join()
    assert found
    assert os.getpid() not in found


def test_batches_lie_in_the_ring_and_are_no_tensors_of_inference(numbers: Path, held: Held) -> None:
    def floats(sample: dict[str, Any]) -> dict[str, Any]:
        return {"x": torch.full((300,), float(sample["json"]["number"]))}

    with DataLoader(StreamingDataset(numbers, transform=floats), 4, num_workers=1) as loader, torch.inference_mode():
        batches = iter(loader)
        kept = held.first(batches, 3)
        copies = [batch["x"].clone() for batch in kept]
        assert loader.metrics()["ring_slots_in_use"] == 3
        assert not any(batch["x"].is_inference() for batch in kept)
        kept += held.rest(loader, batches)
        for batch, copy in zip(kept, copies, strict=False):
            assert torch.equal(batch["x"], copy)


def test_a_process_that_would_have_to_be_set_up_or_hold_much_does_not_stand_in(
    numbers: Path, held: Held, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def run(**options: Any) -> set[int]:
        held.let_go_when_somebody_waits()
        with DataLoader(StreamingDataset(numbers, transform=where), 4, num_workers=1, **options) as loader:
            return {pid for batch in loader for pid in batch["pid"].tolist()}

    assert os.getpid() not in run(worker_init_fn=str)
    held.let_go.clear()
    monkeypatch.setattr(inline_builder, "_MOST_COPIED_BYTES", 100)
    caplog.set_level(logging.INFO, "streaming.run.engine.workers.inline_builder")
    assert os.getpid() not in run()
    assert "too much for another copy in this process" in caplog.text


def test_closing_while_processes_start_takes_no_time_and_a_run_may_begin_again(numbers: Path, held: Held) -> None:
    with DataLoader(StreamingDataset(numbers, transform=where), 4, num_workers=1) as loader:
        for _ in range(3):
            batches = iter(loader)
            assert len(held.first(batches, 1)) == 1
            del batches
            loader.set_epoch(0)
        (before,) = pool_of(loader)._processes.all()
        batches = iter(loader)
        next(batches)
        assert pool_of(loader)._processes.all() == [before], "they go on starting meanwhile"
        held.let_go.set()


@pytest.mark.thorough
def test_a_server_that_is_killed_while_processes_start_is_replaced(numbers: Path, held: Held) -> None:
    with DataLoader(StreamingDataset(numbers, transform=where), 4, num_workers=2) as loader:
        batches = iter(loader)
        found = held.first(batches, 2)
        server = pool_of(loader).server_pid
        os.kill(server, signal.SIGKILL)
        found += held.rest(loader, batches)
        assert pool_of(loader).server_pid != server
    assert sorted(number["number"] for batch in found for number in batch["json"]) == list(range(80))


def dies_elsewhere(pid: int) -> Any:
    if os.getpid() != pid:
        os._exit(3)
    return where


class DiesElsewhere:
    """Loads here, and ends any other process that it is sent to."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return sample

    def __reduce__(self) -> Any:
        return dies_elsewhere, (self.pid,)


def read_while_three_die(loader: DataLoader) -> None:
    for _ in loader:
        until(lambda: loader.metrics()["worker_restarts"] >= 3, "three processes have died")


def test_processes_that_never_come_up_are_an_error_after_the_batches_without_them(numbers: Path) -> None:
    with DataLoader(StreamingDataset(numbers, transform=DiesElsewhere()), 4, num_workers=1) as loader:
        with pytest.raises(WorkerDiedError, match=r"do not start: .*exited with code 3"):
            read_while_three_die(loader)
        assert loader.metrics()["worker_restarts"] >= 3


PLUGIN = "def transform(sample):\n    return dict(sample, held=1)\n"


def in_memory(tmp_path: Path, kind: str, name: str) -> Any:
    """The transform of a module that this process has loaded in a way that no other can repeat."""
    if kind == "no file":
        module = sys.modules[name] = ModuleType(name)
        exec(PLUGIN, vars(module))
        return module.transform
    file = tmp_path / "plugin.py"
    file.write_text(PLUGIN)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if kind == "named by a function":
        namespace: dict[str, Any] = {"plugin": module, "__name__": "__main__"}
        exec("def transform(sample):\n    return plugin.transform(sample)\n", namespace)
        return namespace["transform"]
    return module.transform


@pytest.mark.parametrize("name", ["plugin_of_mine", "tests.plugin_of_mine", "streaming.storage.plugin_of_mine"])
@pytest.mark.parametrize("kind", ["a file elsewhere", "no file", "named by a function"])
def test_a_transform_that_no_worker_can_import_says_so_at_the_first_batch(
    numbers: Path, held: Held, tmp_path: Path, kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once a worker is up, some short epochs later."""
    held.let_go_when_somebody_waits()
    monkeypatch.setitem(sys.modules, name, ModuleType(name))  # removed at the end
    transform = in_memory(tmp_path, kind, name)
    with DataLoader(StreamingDataset(numbers, transform=transform), 4, num_workers=1) as loader:
        with pytest.raises(ConfigError, match=f"does not load in a worker process: ModuleNotFoundError.*{name}"):
            next(iter(loader))
        assert loader.metrics()["batches_before_workers"] == 0


@pytest.mark.parametrize("name", ["json", "os.path", "numpy.linalg", "torch.nn.functional", "xml.etree.ElementTree",
                                  "torch._C._nn", "PIL.Image", "tests.support.tiers", __name__])  # fmt: skip
def test_a_module_that_workers_can_import_is_found(name: str) -> None:
    importlib.import_module(name) if name != "torch._C._nn" else None
    inline_builder._check_importable(name)
