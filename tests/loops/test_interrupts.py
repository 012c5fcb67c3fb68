"""What a signal's handler throws, at any moment: nothing stays locked or behind, and the loader goes on exactly."""

from __future__ import annotations

import _thread
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import streaming
from streaming import DataLoader
from streaming.common.monitor import Monitor
from streaming.run.engine.delivery import Delivery
from streaming.run.engine.memory.row_table import RowTable
from streaming.run.epochs.interrupts import is_interrupt
from streaming.run.epochs.iterator import Batches
from streaming.run.epochs.position import Position
from streaming.storage.adapters.local import LocalAdapter
from tests.support.processes.leftovers import leftovers
from tests.support.processes.waiting import PATIENCE_S
from tests.support.sets.data_sets import SampleSet, write_set

pytestmark = pytest.mark.thorough

OURS = str(Path(streaming.__file__).parent)
STEPS: dict[str, Callable[[Monitor], object]] = {
    "with": lambda monitor: None,
    "wait": lambda monitor: monitor.wait(1e-5),
    "wake": Monitor.notify_all,
}
ENDS = {one.__code__ for one in (Batches._let_go, Delivery.close, Delivery._begin_to_close)}
STARTS_THREAD = getattr(_thread, "start_joinable_thread", _thread.start_new_thread)  # the first is Python 3.13's
PLACES: dict[str, Callable[[FrameType, Any], bool]] = {
    "anywhere": lambda frame, _: frame.f_code.co_filename.startswith(OURS),
    "rows get room": lambda frame, _: frame.f_back is not None and frame.f_back.f_code is RowTable._grow.__code__,
    "a batch counts": lambda frame, _: frame.f_code is Position.advance.__code__,
    "the run ends": lambda frame, _: frame.f_code in ENDS or (frame.f_back is not None and frame.f_back.f_code in ENDS),
    "threads have started": lambda _, called: called is STARTS_THREAD,
}
"""By the frame, and the function of C that has returned to it."""


class ThrownError(Exception):
    """What a time limit throws."""


def throw(*_: Any) -> None:
    raise ThrownError


def ctrl_c() -> None:
    raise KeyboardInterrupt


@pytest.fixture
def alarmed() -> Iterator[Callable[[], None]]:
    """``SIGALRM`` throws a ``ThrownError``; what is given throws it here."""
    before = signal.signal(signal.SIGALRM, throw)
    yield lambda: signal.raise_signal(signal.SIGALRM)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def use_until_thrown(monitor: Monitor, step: Callable[[Monitor], object], after_s: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, after_s)
    while True:
        with monitor:
            step(monitor)


@pytest.mark.usefixtures("alarmed")
@pytest.mark.parametrize("step", STEPS)
def test_no_lock_stays_taken_and_no_thread_waits_in_vain(step: str) -> None:
    dice = random.Random(step)
    for _ in range(150):
        monitor, began, told = Monitor(), threading.Event(), threading.Event()

        def listen(monitor: Monitor = monitor, began: threading.Event = began, told: threading.Event = told) -> None:
            with monitor:
                began.set()
                monitor.wait()
                told.set()

        listener = threading.Thread(target=listen, daemon=True)
        with pytest.raises(ThrownError):  # in place of a RuntimeError about a lock that is not taken
            use_until_thrown(monitor, STEPS[step], dice.uniform(2e-5, 2e-4))
        listener.start()
        assert began.wait(PATIENCE_S)
        assert monitor.acquire(timeout=PATIENCE_S)
        monitor.notify()  # it alone is left to be told
        monitor.release()
        assert told.wait(PATIENCE_S)
        listener.join()


def test_a_notification_wakes_those_that_it_concerns() -> None:
    monitor, state, woken = Monitor(), list[str](), list[str]()
    is_woken = threading.Semaphore(0)

    def listen(name: str, **options: Any) -> None:
        with monitor:
            began.set()
            monitor.wait(**options)
            woken.append(name)
        is_woken.release()

    for name, options in (("state", {"when": lambda: state}), ("anything", {})):
        began = threading.Event()
        threading.Thread(target=listen, args=(name,), kwargs=options, daemon=True).start()
        assert began.wait(PATIENCE_S)
    with monitor:
        monitor.notify()  # the first of them waits for something else
    assert is_woken.acquire(timeout=PATIENCE_S)
    with monitor:
        assert woken == ["anything"]
        state.append("changed")
        monitor.notify_all()
    assert is_woken.acquire(timeout=PATIENCE_S)
    assert woken == ["anything", "state"]


@contextmanager
def thrown(at: int, throws: Callable[[], None], within: Callable[[FrameType, Any], bool]) -> Iterator[list[int]]:
    """Have ``throws`` called at moment ``at`` of those at which Python looks for signals in some code; tells how many.

    They are the beginning of a function, and what follows a call of C.
    """
    seen = [0]

    def look(frame: FrameType, event: str, called: Any) -> None:
        if event in ("call", "c_return") and within(frame, called):
            seen[0] += 1
            if seen[0] == at:
                sys.setprofile(None)
                throws()

    sys.setprofile(look)
    try:
        yield seen
    finally:
        sys.setprofile(None)


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    return write_set(tmp_path_factory.mktemp("interrupts"), (30, 30), chunk_samples=4)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # finalizers throw to nobody
@pytest.mark.parametrize(
    ("kind", "place"),
    [
        *product(("Ctrl-C", "time limit"), ("anywhere", "rows get room")),
        *product(("Ctrl-C",), ("a batch counts", "the run ends")),
        ("Ctrl-C", "threads have started"),  # what else is thrown there, Python takes for a start that has failed
    ],
)
def test_thrown_at_any_moment(samples: SampleSet, kind: str, place: str, alarmed: Callable[[], None]) -> None:
    dataset, error = samples.open(), {"Ctrl-C": KeyboardInterrupt, "time limit": ThrownError}[kind]

    def opened() -> DataLoader:
        return DataLoader(dataset, batch_size=4, num_threads=1)

    def read(loader: DataLoader, into: list[list[str]]) -> list[list[str]]:
        into.extend(batch["__key__"] for batch in loader)
        return into

    with opened() as loader:
        with thrown(0, ctrl_c, PLACES[place]) as seen:
            first = read(loader, [])
        second = read(loader, [])
    dice, before, num_thrown = random.Random(kind), leftovers(), 0
    moments = range(1, seen[0] + 1)
    num_tried, num_expected = min(30 if place == "anywhere" else 80, len(moments)), min(21, len(moments) // 2 + 1)
    for number, at in enumerate(dice.sample(moments, len(moments))):
        if number >= num_tried and num_thrown >= num_expected:
            break  # runs differ in their length, so some moments do not come, and finalizers throw to nobody
        received: list[list[str]] = []
        loader = opened()
        try:
            with thrown(at, ctrl_c if kind == "Ctrl-C" else alarmed, PLACES[place]):
                read(loader, received)
        except error:
            num_thrown += 1
        with opened() as resumed:  # the batch that was on its way may count as received
            resumed.load_state_dict(loader.state_dict())
            rest = read(resumed, [])
        assert rest in (first[len(received) :], first[len(received) + 1 :] or second), at
        assert read(loader, []) in (first, second), at
        loader.close()
    assert leftovers() - before == {}  # what earlier tests left may end meanwhile
    assert num_thrown >= num_expected


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # finalizers throw to nobody
def test_a_file_that_is_written_is_whole_or_leaves_nothing_at_any_moment(tmp_path: Path) -> None:
    def write(at: int) -> int:
        with suppress(KeyboardInterrupt), thrown(at, ctrl_c, lambda *_: True) as seen:
            LocalAdapter().put(f"{tmp_path}/a", memoryview(b"abc"))
        return seen[0]

    moments = write(0)
    assert moments > 30
    for at in range(1, moments + 1):
        (tmp_path / "a").unlink(missing_ok=True)
        write(at)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} in ({}, {"a": b"abc"}), at


def test_what_an_interrupt_is(alarmed: Callable[[], None]) -> None:
    def caught(call: Callable[[], object]) -> BaseException:
        with pytest.raises(BaseException) as found:  # noqa: PT011  any
            call()
        return found.value

    def followed() -> None:
        try:
            alarmed()
        except ThrownError:
            raise RuntimeError("a lock that is not taken") from None

    def raised_again() -> None:
        error, other = ValueError("its own cause, by way of another"), RuntimeError()
        error.__cause__, other.__cause__ = other, error
        raise error

    class Limit:
        def __call__(self, *_: Any) -> None:
            throw()

    assert is_interrupt(caught(ctrl_c))
    assert is_interrupt(caught(alarmed))
    assert is_interrupt(caught(followed))
    assert not is_interrupt(caught(raised_again))
    signal.signal(signal.SIGALRM, Limit())
    assert is_interrupt(caught(alarmed))
    assert not is_interrupt(caught(throw))  # the same error, by another's call
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    assert not is_interrupt(caught(lambda: signal.Signals(0)))
