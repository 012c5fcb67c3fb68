"""The watchdog: a loop that stands says once, and by name, what it waits for."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from streaming import DataLoader, DevicePrefetcher
from streaming.errors import ConfigError
from streaming.run.device.copiers import Copied, CpuCopier
from streaming.run.epochs import watch as watch_module
from streaming.run.epochs.watch import Watchdog
from streaming.storage.adapters.local import LocalAdapter
from tests.support.processes.waiting import PATIENCE_S
from tests.support.sets.data_sets import SampleSet, write_set

pytestmark = pytest.mark.usefixtures("one_fork_server")


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    return write_set(tmp_path_factory.mktemp("watch"), (41, 23), chunk_samples=4)


class Reports(logging.Handler):
    """Reports of the watchdog, as they come."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.came = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self.came:
            self.texts.append(record.getMessage())
            self.came.notify_all()

    def wait(self, *words: str, count: int = 1) -> str:
        """The report with that number, counted from 1, among those that hold all ``words``.

        A machine with other work makes others before: of a start that takes long.
        """

        def fitting() -> list[str]:
            return [text for text in self.texts if all(word in text for word in words)]

        with self.came:
            assert self.came.wait_for(lambda: len(fitting()) >= count, PATIENCE_S), self.texts
            return fitting()[count - 1]


@pytest.fixture
def reports() -> Iterator[Reports]:
    handler = Reports()
    logger = logging.getLogger("streaming.run.epochs.watch")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


# --- the watchdog itself ---


@pytest.mark.thorough
def test_reports_by_a_real_clock_and_no_thread_afterwards(reports: Reports) -> None:
    dog = Watchdog(0.2, "nothing", lambda: "because")
    try:
        dog.begin()
        waits = [float(re.findall(r"nothing for ([\d.]+) s\nbecause", reports.wait(count=n))[0]) for n in (1, 2, 3)]
        # Each comes when its wait is over, however late this machine lets the thread run.
        assert all(wait >= due for wait, due in zip(waits, (0.2, 0.4, 0.8), strict=True)), waits
    finally:
        dog.stop()
    assert not [one for one in threading.enumerate() if one.name == "shardstream-watch"]


def test_a_report_that_fails_is_told_and_the_next_one_comes(reports: Reports) -> None:
    def describe() -> str:
        if not reports.texts:
            raise ZeroDivisionError
        return "fine"

    dog = Watchdog(0.05, "nothing", describe)
    dog.begin()
    assert "failed" in reports.wait(count=1)
    assert reports.wait(count=2).endswith("fine")
    dog.stop()


def test_no_thread_without_a_limit_or_after_the_end() -> None:
    for dog in (Watchdog(None, "x", str), stopped := Watchdog(0.05, "x", str)):
        stopped.stop()
        dog.begin()
        assert not [one for one in threading.enumerate() if one.name == "shardstream-watch"]


@pytest.mark.parametrize("wrong", [0, -1, "60", True, float("nan")])
def test_limits_that_are_none(samples: SampleSet, wrong: Any) -> None:
    with pytest.raises(ConfigError, match="stall_report_s"):
        DataLoader(samples.open(), batch_size=4, stall_report_s=wrong)


# --- what reports say ---


def stall(loader: Any, reports: Reports, go_on: Callable[[], None], *words: str, num_batches: int = 1) -> str:
    """The report with ``words`` that comes while ``loader``'s loop stands; then it is let go on, and must end well."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(loader), name="consumer", daemon=True)
    thread.start()
    try:
        text = reports.wait(*words)
        assert text.split("\n", 1)[1].split("; ")[0] in loader.describe()
        assert "the consumer has waited" in loader.describe()
    finally:
        go_on()
        thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert len(found) == num_batches
    assert not [one for one in threading.enumerate() if one.name == "shardstream-watch"]
    return text


def test_a_fetch_that_hangs_is_named(samples: SampleSet, reports: Reports) -> None:
    gate = threading.Event()
    dataset = samples.open(shuffle=False)
    fetch = dataset.source.fetch_unit

    def hold(wanted: Any, out: memoryview) -> Any:
        assert gate.wait(PATIENCE_S)
        return fetch(wanted, out)

    dataset.source.fetch_unit = hold  # type: ignore[method-assign]
    with DataLoader(dataset, batch_size=64, stall_report_s=0.2) as loader:
        text = stall(loader, reports, gate.set, "begun")
    assert re.search(r"batch 0 of 1: waits for a fetch", text)
    assert re.search(r"fetch: \S+/000000\.tar bytes 0-\d+, requested \d+\.\d s ago, begun \d+\.\d s ago", text)


def test_a_request_that_hangs_is_named(samples: SampleSet, reports: Reports, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    open_range = LocalAdapter.open_range

    def hold(*arguments: Any) -> Any:
        assert gate.wait(PATIENCE_S)
        return open_range(*arguments)

    dataset = samples.open(shuffle=False)
    monkeypatch.setattr(LocalAdapter, "open_range", hold)
    with DataLoader(dataset, batch_size=64, stall_report_s=0.2) as loader:
        text = stall(loader, reports, gate.set, "request: ")
    assert re.search(r"request: \S+/000000\.tar bytes 0-\d+, attempt 1, 0 bytes received, for \d+\.\d s", text)


def hang_once(path: Path, number: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A transform that stands at one sample until the other end of a pipe is written to."""

    def hanging_transform(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["cls"] == number:
            with open(path, "rb") as pipe:
                pipe.read()
        return sample

    return hanging_transform


def let_go(path: Path) -> Callable[[], None]:
    def write() -> None:
        with open(path, "wb") as pipe:
            pipe.write(b".")

    return write


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


@pytest.mark.parametrize("num_threads", [0, 1])
def test_a_users_function_that_hangs_in_a_thread_is_named(
    samples: SampleSet, reports: Reports, pipe: Path, num_threads: int
) -> None:
    dataset = samples.open(shuffle=False, transform=hang_once(pipe, 37))
    with DataLoader(dataset, batch_size=16, num_threads=num_threads, stall_report_s=0.3) as loader:
        text = stall(loader, reports, let_go(pipe), "batch 2 of 4", "hanging_transform", num_batches=4)
    assert re.search(
        r"thread (consumer|shardstream-build-0) builds batch 2 for \d+\.\d s, at sample 6 of 16: '00037' of "
        r"\S+/000000\.tar; in hanging_transform, \S+test_watch.py:\d+",
        text,
    )


def test_a_users_function_that_hangs_in_a_worker_is_named(samples: SampleSet, reports: Reports, pipe: Path) -> None:
    dataset = samples.open(shuffle=False, transform=hang_once(pipe, 37))
    with DataLoader(dataset, batch_size=16, num_workers=2, num_threads=0, stall_report_s=0.3) as loader:
        text = stall(loader, reports, let_go(pipe), "batch 2 of 4", "hanging_transform", "is idle", num_batches=4)
    assert re.search(
        r"worker \d+ \(pid \d+, alive\) builds batch 2 for \d+\.\d s, at sample 6 of 16: '00037' of "
        r"\S+/000000\.tar; in hanging_transform, \S+test_watch.py:\d+",
        text,
    )
    assert re.search(r"worker \d+ \(pid \d+, alive\) is idle", text)
    assert re.search(r"ring: \d+ slots free, 1 in building, \d+ hold batches still in use", text)


def test_a_decoder_that_hangs_in_a_worker_is_named_with_its_sample(
    samples: SampleSet, reports: Reports, pipe: Path
) -> None:
    def hanging_decoder(data: bytes) -> int:
        if bytes(data) == b"37":
            with open(pipe, "rb") as stream:
                stream.read()
        return int(data)

    dataset = samples.open(shuffle=False, decode={"cls": hanging_decoder}, fields=("cls",))
    with DataLoader(dataset, batch_size=64, num_workers=1, num_threads=0, stall_report_s=0.3) as loader:
        text = stall(loader, reports, let_go(pipe), "hanging_decoder")
    where = r"at sample 38 of 64: '00037' of \S+; in hanging_decoder, \S+test_watch.py:\d+"
    assert re.search(rf"worker \d+ \(pid \d+, alive\) builds batch 0 for \d+\.\d s, {where}", text)


@pytest.mark.thorough
def test_a_worker_that_was_stopped_is_named(samples: SampleSet, reports: Reports, tmp_path: Path) -> None:
    def stopping(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["cls"] == 37:
            (tmp_path / "pid").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        return sample

    def go_on() -> None:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGCONT)

    with DataLoader(
        samples.open(shuffle=False, transform=stopping), batch_size=64, num_workers=1, num_threads=0, stall_report_s=0.3
    ) as loader:
        text = stall(loader, reports, go_on, "stopped by")
    assert re.search(r"worker \d+ \(pid \d+, stopped by a signal\) builds batch 0 .* in an unknown place", text)


def test_a_consumer_that_takes_its_time_does_not_wait(samples: SampleSet) -> None:
    with DataLoader(samples.open(), batch_size=16) as loader:
        for _ in loader:
            assert "the consumer has waited" not in loader.describe()


class Late:
    """An event that comes when it is told to."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def query(self) -> bool:
        return self.gate.is_set()

    def synchronize(self) -> None:
        assert self.gate.wait(PATIENCE_S)


class LateCopier(CpuCopier):
    """A device that does no step before it is told to."""

    def __init__(self) -> None:
        self.step = Late()

    def issue(self, batch: Any) -> Copied:
        return Copied(batch=batch, event=self.step)

    def mark(self) -> Any:
        return self.step


def test_a_device_that_hangs_is_named(samples: SampleSet, reports: Reports) -> None:
    copier = LateCopier()
    with DataLoader(samples.open(), batch_size=4, stall_report_s=0.2) as loader:
        prefetcher = DevicePrefetcher(loader, torch.device("cpu"), depth=2, copier=copier)
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.extend(prefetcher), daemon=True)
        thread.start()
        text = reports.wait("has made no progress", "waits for the device")
        copier.step.gate.set()
        thread.join(PATIENCE_S)
    assert len(found) == 16
    assert text.startswith("cpu has made no progress for ")
    assert "prefetcher to cpu: waits for the device to come within depth steps; 2 batches ahead, 5 copies" in text


def test_the_loaders_report_says_what_the_prefetcher_is_at(samples: SampleSet, reports: Reports, pipe: Path) -> None:
    dataset = samples.open(shuffle=False, transform=hang_once(pipe, 37))
    with DataLoader(dataset, batch_size=16, stall_report_s=0.3) as loader:
        prefetcher = DevicePrefetcher(loader, "cpu")
        text = stall(prefetcher, reports, let_go(pipe), "batch 2 of 4", "hanging_transform", num_batches=4)
    assert "prefetcher to cpu: waits for the loader; " in text
    assert not [one for one in reports.texts if "has made no progress" in one], "the loader alone reports"


class StillClock:
    """Time that passes only while the watchdog sleeps; its event and its clock in one."""

    def __init__(self, sleeps: int, then: Mapping[int, Callable[[], None]] | None = None) -> None:
        self.now_s = 0.0
        self._then = then or {}
        self.pauses: list[float] = []
        self.ended = threading.Event()
        self._sleeps = sleeps

    def monotonic(self) -> float:
        return self.now_s

    def is_set(self) -> bool:
        return False

    def set(self) -> None:
        pass

    def wait(self, timeout: float) -> bool:
        """Sleep; True, which is the end, after so many times."""
        self.pauses.append(timeout)
        self.now_s += max(timeout, 0.0)
        self._then.get(len(self.pauses), lambda: None)()
        if len(self.pauses) > self._sleeps:
            self.ended.set()
        return self.ended.is_set()


def watch(clock: StillClock, dog: Watchdog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin a wait, and watch it by this clock to its end."""
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Event", lambda: clock)
        dog._begin_anew()
    monkeypatch.setattr(watch_module, "time", clock)
    dog.begin()
    assert clock.ended.wait(PATIENCE_S)
    dog.stop()


def test_one_report_per_wait_and_another_when_it_has_doubled(reports: Reports, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sleeps until the next one is due."""
    clock = StillClock(sleeps=5)
    watch(clock, Watchdog(1.0, "nothing", lambda: "because"), monkeypatch)
    assert clock.pauses == [1.0, 1.0, 2.0, 4.0, 8.0, 16.0]
    assert [text.split("\n")[0] for text in reports.texts] == [f"nothing for {s:.1f} s" for s in (1, 2, 4, 8, 16)]


def test_a_new_wait_is_counted_from_its_beginning(reports: Reports, monkeypatch: pytest.MonkeyPatch) -> None:
    dog = Watchdog(1.0, "nothing", lambda: "because")

    def wait_anew() -> None:
        dog.end()
        clock.now_s += 0.25
        dog.begin()

    clock = StillClock(sleeps=5, then={3: wait_anew})
    watch(clock, dog, monkeypatch)
    assert [text.split("\n")[0] for text in reports.texts] == [f"nothing for {s:.1f} s" for s in (1, 2, 1, 2)]


def test_a_consumer_that_takes_its_time_is_no_stall(reports: Reports, monkeypatch: pytest.MonkeyPatch) -> None:
    dog = Watchdog(1.0, "nothing", str)
    watch(StillClock(sleeps=9, then={1: dog.end}), dog, monkeypatch)
    assert reports.texts == []
