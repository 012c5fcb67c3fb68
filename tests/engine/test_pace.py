"""That worker processes are slower than threads is said once, with figures, and only where it is clear and matters."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streaming import DataLoader, StreamingDataset
from streaming.build.batches.build import Recipe, SourceRecipe
from streaming.build.batches.rows import FieldRange, Rows
from streaming.build.decode import resolve_decoders
from streaming.common.counters import Metrics
from streaming.run.engine.builders import is_parallel
from streaming.run.engine.threads import pace
from streaming.run.engine.threads.pace import WorkerPace
from streaming.run.engine.workers.pool import WorkerPool
from streaming.run.engine.workers.processes import Processes, Worker
from tests.support.processes.waiting import until
from tests.support.sets.data_sets import write_set

pytestmark = pytest.mark.thorough

SAMPLES = 100


class Clocks:
    """Time that passes as batches are built, one after the other."""

    def __init__(self) -> None:
        self.wall_s = self.thread_s = 0.0

    def perf_counter(self) -> float:
        return self.wall_s

    def thread_time(self) -> float:
        return self.thread_s


class Run:
    """Batches of 100 samples."""

    def __init__(
        self, clocks: Clocks, num_workers: int, num_threads: int = 2, num_cores: int = 2, *, acts: bool = False
    ) -> None:
        self.clocks, self.metrics = clocks, Metrics()
        self.pace = WorkerPace(self.metrics, num_workers, num_threads, num_cores, acts=acts)

    def _pass(self, wall_s: float, cpu_s: float) -> None:
        self.clocks.wall_s += wall_s
        self.clocks.thread_s += cpu_s

    def here(self, count: int, wall_s: float, cpu_s: float, *, in_parallel: bool = True) -> None:
        for _ in range(count):
            lap = self.pace.begin()
            self._pass(wall_s, cpu_s)
            self.pace.here(lap, SAMPLES, in_parallel=in_parallel)

    def there(self, count: int, wall_s: float, cpu_s: float, *, waits: float = 1.0) -> None:
        for _ in range(count):
            lap = self.pace.begin()
            self._pass(wall_s, 0.1 * cpu_s)
            self.metrics.add("wait_for_build_s", waits * wall_s)
            self.pace.there(lap, SAMPLES, 0.9 * cpu_s)


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks()
    monkeypatch.setattr(pace, "time", clocks)
    return clocks


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if "is slower here than num_workers=0" in one.getMessage()]


def test_one_process_where_two_threads_would_have_a_core_each(clocks: Clocks, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(clocks, num_workers=1)
    run.here(1, 9.0, 9.0)  # loads libraries
    run.here(3, 0.2, 0.2)
    run.there(1, 9.0, 9.0)
    run.there(8, 0.2, 0.2)
    assert told(caplog) == []
    run.there(1, 0.2, 0.2)
    (message,) = told(caplog)
    assert message == (
        "num_workers=1 is slower here than num_workers=0: worker processes (1) build 500 samples/s, and threads of "
        "this process (2), at the pace of the first batches, 1,000/s. This process may use 2 cores"
    )
    assert not run.pace.is_open
    run.here(5, 0.1, 0.1)
    run.there(50, 0.5, 0.5)
    assert len(told(caplog)) == 1


def test_hand_over_may_cost_more_than_the_other_core_brings(clocks: Clocks, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(clocks, num_workers=2)
    run.here(4, 0.02, 0.02, in_parallel=False)
    run.there(200, 0.06, 0.06)
    assert "(2) build 3,333 samples/s, and threads of this process (1)" in told(caplog)[0]
    assert "5,000/s" in told(caplog)[0]


@pytest.mark.parametrize(
    "case",
    ["as fast", "clock only", "CPU time only", "margin", "another limit", "lock", "few", "nothing here", "one core"],
)
def test_nothing_is_said_where_it_is_not_clear_or_does_not_matter(
    clocks: Clocks, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    cores, threads, workers = (1, 4, 1) if case == "one core" else (2, 2, 1)
    run = Run(clocks, workers, 0 if case == "nothing here" else threads, cores)
    cpu_s, wall_s, waits = 0.2, 0.2, 1.0
    if case == "as fast":
        cpu_s = wall_s = 0.1
    elif case == "clock only":
        cpu_s = 0.1
    elif case == "CPU time only":
        wall_s = 0.1
    elif case == "margin":
        cpu_s = wall_s = 0.12
    elif case == "another limit":
        waits = 0.4
    run.here(1 if case == "few" else 9, 0.2, 0.2, in_parallel=case != "lock")
    run.there(100, wall_s, cpu_s, waits=waits)
    assert told(caplog) == []
    assert not run.pace.is_open, "it is decided"


@pytest.mark.parametrize(
    ("there_s", "num_workers", "waits", "in_parallel", "goes_on"),
    [
        (0.2, 1, 1.0, True, False), (0.2, 2, 1.0, True, False), (0.24, 2, 1.0, True, False), (0.3, 2, 1.0, True, True),
        (0.3, 1, 1.0, True, True), (0.3, 2, 0.4, True, False), (0.3, 1, 1.0, False, False),
    ],
)  # fmt: skip
def test_threads_go_on_where_a_process_is_slower_than_a_thread(
    clocks: Clocks, caplog: pytest.LogCaptureFixture, there_s: float, num_workers: int, waits: float,
    in_parallel: bool, goes_on: bool,
) -> None:  # fmt: skip
    """One by one: what more threads would bring, they bring beside processes anyway."""
    caplog.set_level("INFO", pace.__name__)
    run = Run(clocks, num_workers, acts=True)
    run.here(9, 0.2, 0.2, in_parallel=in_parallel)
    run.there(100, there_s, there_s, waits=waits)
    assert run.pace.threads_first == goes_on
    expected = "INFO" if goes_on else "" if in_parallel else "WARNING"
    assert [one.levelname for one in caplog.records] == [expected] * bool(expected)
    if goes_on:
        assert "builds 333 samples per second of CPU time" in caplog.text
        assert "at the pace of the first batches, 500: threads of this process (2) continue to build" in caplog.text


def recipe_of(decode: Any, transform: Any = None) -> Recipe:
    return Recipe(parts=(SourceRecipe(decoders=resolve_decoders(decode), transform=transform),))


def rows_of(**sizes: list[int]) -> Rows:
    fields = {name: FieldRange(starts=np.zeros(len(each), np.int64), sizes=np.array(each))
              for name, each in sizes.items()}  # fmt: skip
    return Rows(memory=b"", view=memoryview(b""), keys=["a", "b"], urls=["", ""], fields=fields, damage={})


def test_threads_do_not_wait_for_each_other_where_nearly_all_is_images() -> None:
    images = {"jpg": "rgb8:8x8", "json": "json"}
    assert is_parallel(recipe_of(images), rows_of(jpg=[60_000, 70_000], json=[400, -1]))
    assert not is_parallel(recipe_of(images), rows_of(jpg=[6_000, -1], json=[400, 400]))
    assert not is_parallel(recipe_of(images, lambda sample: sample), rows_of(jpg=[60_000, 70_000]))
    assert not is_parallel(recipe_of({"jpg": lambda data: data}), rows_of(jpg=[60_000, 70_000]))
    assert not is_parallel(recipe_of({"json": "json"}), rows_of(json=[60_000, 70_000]))


class OwnClocks(threading.local):
    """Time that passes, for each thread, as it says that it works."""

    passed_s = 0.0

    def perf_counter(self) -> float:
        return self.passed_s

    def thread_time(self) -> float:
        return self.passed_s


CLOCKS = OwnClocks()
SAMPLE_S = 1 / 256
"""What a sample costs, here and in a worker process: exact in binary, as are its multiples."""


def slowly(sample: dict[str, Any]) -> dict[str, Any]:
    CLOCKS.passed_s += SAMPLE_S
    return sample


@pytest.fixture
def batches_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Worker processes start, but say nothing until this is set; a few batches suffice to know how fast they are.

    No clock runs but that of the work: a worker process takes as long for a sample as a thread, and who hands a batch
    over waits for it. Whether the consumer waits is left to the cases above.
    """
    let_go, meet = threading.Event(), Processes._meet

    def wait_and_meet(processes: Processes, worker: Worker) -> None:
        let_go.wait(60)
        meet(processes, worker)

    monkeypatch.setattr(Processes, "_meet", wait_and_meet)
    there = WorkerPace.there

    def waits_for_it(one: WorkerPace, lap: pace.Lap, samples: int, worker_cpu_s: float) -> None:
        assert worker_cpu_s > 0
        CLOCKS.passed_s += samples * SAMPLE_S
        there(one, lap, samples, 0.0)  # its thread's time has passed

    monkeypatch.setattr(WorkerPace, "there", waits_for_it)
    monkeypatch.setattr(pace, "time", CLOCKS)
    monkeypatch.setattr(pace, "WAITS", 0.0)
    monkeypatch.setattr(pace, "LEAST_THERE_S", 0.0)
    monkeypatch.setattr(pace, "LEAST_HERE_S", 0.01)
    yield let_go
    let_go.set()


def read(loader: Any, let_go: threading.Event, epochs: int) -> None:
    """Six batches before processes are up, and then the rest of so many epochs."""
    batches = iter(loader)
    for _ in range(6):
        next(batches)
    let_go.set()
    until(loader._loop._machinery.crew.builder._pool.is_up, "a process is up")
    assert sum(1 for _ in batches) == 4
    for _ in range(1, epochs):
        assert sum(1 for _ in loader) == 10
    assert loader.metrics()["batches_before_workers"] == 6
    assert not loader._loop._pace.is_open, "it is decided"


@pytest.mark.usefixtures("one_fork_server")
def test_a_loader_whose_processes_are_fed_too_slowly(
    tmp_path: Path, batches_before: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    send = WorkerPool._send_order

    def costly(pool: WorkerPool, worker: Any, job: Any, slot: Any) -> None:
        CLOCKS.passed_s += 24 * SAMPLE_S
        send(pool, worker, job, slot)

    monkeypatch.setattr(WorkerPool, "_send_order", costly)
    url = write_set(tmp_path, (80,)).url
    with DataLoader(StreamingDataset(url, transform=slowly), 8, num_workers=1) as loader:
        read(loader, batches_before, epochs=2)
    (message,) = told(caplog)
    assert message.startswith(
        "num_workers=1 is slower here than num_workers=0: worker processes (1) build 64 samples/s, and threads of this "
        "process (1), at the pace of the first batches, 256/s."
    ), "a batch of 8 takes as long as 32 samples"


@pytest.mark.usefixtures("one_fork_server")
def test_a_loader_whose_processes_help(
    tmp_path: Path, batches_before: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    url = write_set(tmp_path, (80,)).url
    with DataLoader(StreamingDataset(url, transform=slowly), 8, num_workers=2) as loader:
        read(loader, batches_before, epochs=3)
    assert told(caplog) == []
