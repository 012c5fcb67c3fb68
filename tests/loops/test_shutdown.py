"""Every way to end a loop: each is prompt, and leaves nothing but users' functions that hang on threads."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from itertools import count, product
from pathlib import Path
from typing import Any

import psutil
import pytest

from streaming import DataLoader, DevicePrefetcher
from streaming.errors import IteratorEndedError
from streaming.run.engine.memory.row_table import RowTable
from tests.support.contracts.loop_kinds import compress
from tests.support.processes import hanging_functions as hanging
from tests.support.processes.hanging_functions import BATCH, GOOD_BATCHES, Hung, until_it_stands
from tests.support.processes.leftovers import leftovers
from tests.support.processes.waiting import PATIENCE_S, ended
from tests.support.sets.data_sets import SampleSet, write_set

pytestmark = pytest.mark.usefixtures("one_fork_server")


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
        self.bad = loader._loop._account.bad
        self.keeps_threads = not num_workers
        self.loader: Any = DevicePrefetcher(loader, "cpu", depth=1) if prefetch else loader

    def check(self, caplog: pytest.LogCaptureFixture) -> None:
        """It has ended, while samples hang. Then the loader goes, and nothing is left but threads that cannot end."""
        if self.loader is not None:
            self.loader.close()
        told = [one.getMessage() for one in caplog.records if "a run has ended" in one.getMessage()]
        if self.keeps_threads:
            assert len(told) == 1
            assert f", {hanging.__file__}:" in told[0]
            assert self.hung.left_behind()
        else:
            assert told == []
            assert self.hung.left_behind() == []
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
    return compress(samples, tmp_path_factory.mktemp("compressed"))


@pytest.fixture
def case(request: pytest.FixtureRequest, hung: Hung, kind: str, num_workers: int, prefetch: bool) -> Case:
    return Case(request.getfixturevalue(kind), hung, num_workers, prefetch=prefetch)


def cell(kind: str, num_workers: int, prefetch: bool) -> Any:
    """Each waits a second for what hangs. In four of eight every two choices meet; all run under ``--matrix``."""
    is_odd = (kind == "compressed") ^ (num_workers > 0) ^ prefetch
    name = f"{kind}-{num_workers}-{'prefetcher' if prefetch else 'loader'}"
    return pytest.param(kind, num_workers, prefetch, marks=[pytest.mark.matrix] if is_odd else [], id=name)


cells = pytest.mark.parametrize(
    ("kind", "num_workers", "prefetch"),
    [cell(*one) for one in product(("samples", "compressed"), (0, 2), (False, True))],
)


@pytest.mark.thorough
@cells
def test_loop_left_by_break_ends_promptly(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    for _ in case.loader:
        case.hung.wait()
        break
    del _  # the batch keeps its slot
    case.check(caplog)


@pytest.mark.thorough
@cells
def test_an_exception_in_the_loop(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    def train() -> None:
        with closing(case.loader):
            for _ in case.loader:
                case.hung.wait()
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    case.check(caplog)


@pytest.mark.thorough
@cells
def test_loop_interrupted_ends_promptly(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    def interrupt() -> None:
        case.hung.wait()
        until_it_stands(threading.main_thread())
        os.kill(os.getpid(), signal.SIGINT)

    def train() -> None:
        for number, _ in enumerate(case.loader):
            case.hung.transform.step(number)

    if case.keeps_threads:
        case.hung.transform.spares = threading.main_thread()
    helper = threading.Thread(target=interrupt, daemon=True)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        train()
    helper.join()
    case.check(caplog)


@pytest.mark.thorough
@cells
def test_close_from_another_thread(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    found: list[int] = []
    told: list[str] = []
    somebody_hangs = threading.Event()

    def consume() -> None:
        try:
            for _ in case.loader:
                if not found:  # now it is a builder that hangs: the thread that asks for a batch may build it itself
                    case.hung.wait()
                    somebody_hangs.set()
                found.append(1)
        except IteratorEndedError as error:
            told.append(str(error))

    consumer = threading.Thread(target=consume, daemon=True)
    consumer.start()
    assert somebody_hangs.wait(PATIENCE_S)
    case.loader.close()
    ended(consumer)
    assert len(found) <= GOOD_BATCHES
    assert "the loader was closed by" in told[0]
    case.check(caplog)


# --- nothing hangs ---


class Calm:
    """The same loaders without anything that hangs, and what there was before them."""

    def __init__(self, samples: SampleSet, num_workers: int, *, prefetch: bool) -> None:
        self.before, self.processes = leftovers(), processes()
        self._samples, self._prefetch = samples, prefetch
        self._options: dict[str, Any] = {"num_workers": num_workers, "num_threads": 2, "epoch_size": 160}

    def loader(self) -> Any:
        loader = DataLoader(self._samples.open(shuffle=False), batch_size=BATCH, **self._options)
        return DevicePrefetcher(loader, "cpu", depth=1) if self._prefetch else loader

    def check(self) -> None:
        """Nothing is left, and nobody had to be killed."""
        assert leftovers() - self.before == {}
        assert processes() <= self.processes


@pytest.fixture(params=["samples", "compressed"])
def calm(request: pytest.FixtureRequest, num_workers: int, prefetch: bool) -> Calm:
    return Calm(request.getfixturevalue(request.param), num_workers, prefetch=prefetch)


@every_way
@workers
def test_dropped_in_mid_epoch(calm: Calm) -> None:
    """Loop and loader, of which nobody calls ``close``. A batch outlives them."""
    loader = calm.loader()
    batches = iter(loader)
    batch = next(batches)
    del batches, loader
    assert batch["cls"].tolist() == list(range(BATCH))
    del batch
    calm.check()


@every_way
@workers
def test_collected_in_mid_epoch(calm: Calm) -> None:
    """As part of a cycle, as in a trainer that keeps its loop and that its loader's function refers to."""
    gc.disable()
    try:
        trainer: dict[str, Any] = {"loader": calm.loader()}
        trainer["batches"] = iter(trainer["loader"])
        trainer["self"] = trainer
        next(trainer["batches"])
        del trainer
    finally:
        gc.enable()
    calm.check()


@every_way
@workers
def test_the_next_loop_begins_at_once(calm: Calm) -> None:
    with closing(calm.loader()) as loader:
        for number in range(4):
            for batch in loader:
                assert batch["cls"].tolist() == list(range(BATCH))
                if number == 3:
                    batches = iter(loader)  # the loop above is still there
                break
        assert [row for batch in batches for row in batch["cls"].tolist()] == list(range(160))
    del batch, batches
    calm.check()


@every_way
@workers
def test_an_exception_and_nobody_closes(calm: Calm) -> None:
    def train() -> None:
        for _ in calm.loader():
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    calm.check()


def test_an_interrupt_in_the_middle_of_our_own_work(samples: SampleSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is raised at once, not kept for the batch in whose chunk it came; the next loop finds everything in order."""
    add, num_added = RowTable.add, count(1)

    def interrupted(*args: Any) -> int:
        if next(num_added) == 20:  # the chunk of the last of 20 batches
            raise KeyboardInterrupt
        return add(*args)

    monkeypatch.setattr(RowTable, "add", interrupted)
    before = leftovers()
    with DataLoader(samples.open(shuffle=False), batch_size=BATCH, num_threads=0) as loader:
        with pytest.raises(KeyboardInterrupt):
            sum(1 for _ in loader)
        assert loader.metrics().get("batches", 0) < 19
        assert [row for batch in loader for row in batch["cls"].tolist()] == list(range(160))
    assert leftovers() - before == {}
