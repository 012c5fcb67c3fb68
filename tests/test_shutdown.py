"""Every way to end a loop while a user's function hangs: each is prompt, and leaves only what cannot be ended."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from data_sets import SampleSet, write_set
from leftovers import leftovers

from streaming import DataLoader, DevicePrefetcher
from streaming.engine.grace import GRACE_S

pytestmark = [pytest.mark.usefixtures("one_fork_server"), pytest.mark.timeout(60)]

ROOT = Path(__file__).parent.parent
BATCH = 8
GOOD_BATCHES = 3
"""Batches before the first in which every sample hangs; a prefetcher pulls two before it hands out the first."""
LIMIT_S = 4 * GRACE_S + 2
"""For what takes twice the grace at most, on a machine that does other things."""


class Hang:
    """A transform that hangs from batch ``GOOD_BATCHES`` on, in whatever process, until it is let go.

    It says so in one pipe, and reads from another that nobody writes to.
    """

    def __init__(self, folder: Path) -> None:
        self.here, self.gate = str(folder / "here"), str(folder / "gate")
        self.first = GOOD_BATCHES * BATCH
        os.mkfifo(self.here)
        os.mkfifo(self.gate)

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        if sample["cls"] >= self.first:
            with open(self.here, "wb", buffering=0) as here:
                here.write(b"!")
            with open(self.gate, "rb", buffering=0) as gate:
                gate.read(1)
            raise ValueError("a bad sample, if anybody asked")
        return sample


class Hung:
    """The test's end of a ``Hang``."""

    def __init__(self, folder: Path) -> None:
        self.transform = Hang(folder)
        self._here = os.open(self.transform.here, os.O_RDWR)

    def wait(self) -> None:
        """Until a sample hangs."""
        assert os.read(self._here, 1) == b"!"

    def let_go(self) -> None:
        """What hangs returns, when another sample comes to the pipe it is let through; returns when all have ended."""
        writer = os.open(self.transform.gate, os.O_RDWR | os.O_NONBLOCK)
        for thread in left_behind():
            while thread.is_alive():
                with suppress(BlockingIOError):
                    os.write(writer, b"!")
                thread.join(0.01)
        os.close(writer)

    def close(self) -> None:
        os.close(self._here)


def left_behind() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith(("shardstream-build", "shardstream-stream"))]


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[Hung]:
    one = Hung(tmp_path)
    yield one
    one.let_go()
    one.close()


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    return write_set(tmp_path_factory.mktemp("shutdown"), (80, 80))


def processes() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


class Case:
    """A loader, or a prefetcher over one, whose fourth batch hangs, and what there was before it."""

    def __init__(self, samples: SampleSet, hung: Hung, num_workers: int, *, prefetch: bool, **options: Any) -> None:
        self.before, self.processes = leftovers(), processes()
        self.hung = hung
        dataset = samples.open(transform=hung.transform, shuffle=False, on_error="substitute")
        given = {"num_workers": num_workers, "num_threads": 2, "epoch_size": 160, **options}
        loader = DataLoader(dataset, batch_size=BATCH, **given)
        self.metrics = loader._loop.metrics
        self.bad = loader._loop._bad
        self.keeps_threads = not num_workers
        self.loader: Any = DevicePrefetcher(loader, "cpu", depth=1) if prefetch else loader

    def check(self, caplog: pytest.LogCaptureFixture, begun_s: float) -> None:
        """It has ended in time. Then the loader goes, and nothing is left but threads that cannot be ended."""
        assert time.monotonic() - begun_s < LIMIT_S
        begun_s = time.monotonic()
        if self.loader is not None:
            self.loader.close()
        assert time.monotonic() - begun_s < LIMIT_S
        told = [one.getMessage() for one in caplog.records if "a run was ended" in one.getMessage()]
        if self.keeps_threads:
            assert len(told) == 1
            assert f"in __call__, {__file__}:" in told[0]
            assert left_behind()
        else:
            assert told == []
            assert left_behind() == []
        kept = ("thread shardstream-build", "thread shardstream-stream", f"descriptor {self.hung.transform.gate}")
        assert [name for name in leftovers() - self.before if not name.startswith(kept)] == []
        self.hung.let_go()
        assert leftovers() - self.before == {}
        assert processes() <= self.processes
        assert self.metrics.snapshot().get("worker_restarts", 0) == 0
        assert self.bad.listing() == []


every_way = pytest.mark.parametrize("prefetch", [False, True], ids=["loader", "prefetcher"])
workers = pytest.mark.parametrize("num_workers", [0, 2])


@pytest.fixture(scope="module")
def compressed(samples: SampleSet, tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    """The same, without an index and never to have one."""
    folder = tmp_path_factory.mktemp("compressed")
    for path in Path(samples.url).glob("*.tar"):
        (folder / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    return SampleSet(url=f"{folder}/", keys=samples.keys)


@pytest.fixture(params=["samples", "compressed"])
def case(request: pytest.FixtureRequest, hung: Hung, num_workers: int, prefetch: bool) -> Case:
    return Case(request.getfixturevalue(request.param), hung, num_workers, prefetch=prefetch)


@every_way
@workers
def test_break(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    for _ in case.loader:
        case.hung.wait()
        begun_s = time.monotonic()
        break
    del _  # the batch keeps its slot
    case.check(caplog, begun_s)


@every_way
@workers
def test_an_exception_in_the_loop(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    def train() -> None:
        with closing(case.loader):
            for _ in case.loader:
                case.hung.wait()
                begun_s.append(time.monotonic())
                raise ZeroDivisionError

    begun_s: list[float] = []
    with pytest.raises(ZeroDivisionError):
        train()
    case.check(caplog, begun_s[0])


@every_way
@workers
def test_close_from_another_thread(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    found: list[int] = []
    somebody_hangs = threading.Event()

    def consume() -> None:
        for _ in case.loader:
            if not found:  # now it is a builder that hangs: the thread that asks for a batch may build it itself
                case.hung.wait()
                somebody_hangs.set()
            found.append(1)

    consumer = threading.Thread(target=consume)
    consumer.start()
    assert somebody_hangs.wait(60)
    begun_s = time.monotonic()
    case.loader.close()
    consumer.join(60)
    assert not consumer.is_alive()
    assert len(found) <= GOOD_BATCHES
    case.check(caplog, begun_s)


# --- the interpreter's end ---

SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_shutdown import BATCH, Hang
from streaming import DataLoader, DevicePrefetcher, StreamingDataset
hang = Hang.__new__(Hang)
hang.here, hang.gate, hang.first = {here!r}, {gate!r}, {first!r}
dataset = StreamingDataset({url!r}, transform=hang, shuffle=False)
loader = DataLoader(dataset, batch_size=BATCH, num_workers={num_workers}, epoch_size=160)
loader = DevicePrefetcher(loader, "cpu", depth=1) if {prefetch} else loader
batches = iter(loader)
next(batches)
print("ready", flush=True)
sys.stdin.readline()
{tail}
"""


@every_way
@workers
@pytest.mark.parametrize(("tail", "code"), [("", 0), ("sys.exit(3)", 3)])
def test_the_interpreter_ends(
    samples: SampleSet, hung: Hung, num_workers: int, prefetch: bool, tail: str, code: int
) -> None:
    given = {"here": hung.transform.here, "gate": hung.transform.gate, "first": hung.transform.first}
    script = SCRIPT.format(tests=str(ROOT / "tests"), url=samples.url, num_workers=num_workers, prefetch=prefetch,
                           tail=tail, **given)  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        hung.wait()
        children = psutil.Process(process.pid).children(recursive=True)
        begun_s = time.monotonic()
        _, errors = process.communicate("\n", timeout=30)
        took_s = time.monotonic() - begun_s
    assert took_s < LIMIT_S
    assert process.returncode == code
    assert "Fatal" not in errors
    assert psutil.wait_procs(children, 10)[1] == []
