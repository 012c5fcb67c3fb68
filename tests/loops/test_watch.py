"""The watchdog: a loop that stands says once, and by name, what it waits for."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from streaming import DataLoader, DevicePrefetcher
from streaming.device.copiers import Copied, CpuCopier
from streaming.epochs.watch import Watchdog
from streaming.errors import ConfigError
from streaming.storage.adapters.local import LocalAdapter
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

    def wait(self, count: int = 1, words: str = "") -> str:
        """The report with that number, counted from 1, among those that hold ``words``."""

        def fitting() -> list[str]:
            return [text for text in self.texts if words in text]

        with self.came:
            assert self.came.wait_for(lambda: len(fitting()) >= count, 30), self.texts
            return fitting()[count - 1]


@pytest.fixture
def reports() -> Iterator[Reports]:
    handler = Reports()
    logger = logging.getLogger("streaming.epochs.watch")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


# --- the watchdog itself ---


def test_one_report_per_wait_and_another_when_it_has_doubled(reports: Reports) -> None:
    dog = Watchdog(0.2, "nothing", lambda: "because")
    try:
        dog.begin()
        waits = [float(re.findall(r"nothing for ([\d.]+) s\nbecause", reports.wait(n))[0]) for n in (1, 2, 3)]
        # Each comes when its wait is over, however late this machine lets the thread run.
        assert all(wait >= due for wait, due in zip(waits, (0.2, 0.4, 0.8), strict=True)), waits
        dog.end()
        began = time.monotonic()
        dog.begin()
        counted = float(re.findall(r"for ([\d.]+) s", reports.wait(4))[0])
        assert 0.2 <= counted <= time.monotonic() - began + 0.1  # from the new wait on
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
    assert "failed" in reports.wait(1)
    assert reports.wait(2).endswith("fine")
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


def stall(loader: Any, reports: Reports, go_on: Callable[[], None], num_batches: int = 1, words: str = "") -> str:
    """The report with ``words`` that comes while ``loader``'s loop stands; then it is let go on, and must end well."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(loader), name="consumer", daemon=True)
    thread.start()
    try:
        text = reports.wait(words=words)
        assert text.split("\n", 1)[1].split("; ")[0] in loader.describe()
        assert "the consumer has waited" in loader.describe()
    finally:
        go_on()
        thread.join(60)
    assert not thread.is_alive()
    assert len(found) == num_batches
    assert not [one for one in threading.enumerate() if one.name == "shardstream-watch"]
    return text


def test_a_fetch_that_hangs_is_named(samples: SampleSet, reports: Reports) -> None:
    gate = threading.Event()
    dataset = samples.open(shuffle=False)
    fetch = dataset.source.fetch_unit

    def hold(wanted: Any, out: memoryview) -> Any:
        assert gate.wait(60)
        return fetch(wanted, out)

    dataset.source.fetch_unit = hold  # type: ignore[method-assign]
    with DataLoader(dataset, batch_size=64, stall_report_s=0.2) as loader:
        text = stall(loader, reports, gate.set)
    assert re.search(r"batch 0 of 1: waits for a fetch", text)
    assert re.search(r"fetch: \S+/000000\.tar bytes 0-\d+, asked for \d+\.\d s ago, begun \d+\.\d s ago", text)


def test_a_request_that_hangs_is_named(samples: SampleSet, reports: Reports, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    open_range = LocalAdapter.open_range

    def hold(*arguments: Any) -> Any:
        assert gate.wait(60)
        return open_range(*arguments)

    dataset = samples.open(shuffle=False)
    monkeypatch.setattr(LocalAdapter, "open_range", hold)
    with DataLoader(dataset, batch_size=64, stall_report_s=0.2) as loader:
        text = stall(loader, reports, gate.set)
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
        text = stall(loader, reports, let_go(pipe), 4)
    assert re.search(
        r"thread (consumer|shardstream-build-0) builds batch 2 for \d+\.\d s, at sample 6 of 16: '00037' of "
        r"\S+/000000\.tar; in hanging_transform, \S+test_watch.py:\d+",
        text,
    )


def test_a_users_function_that_hangs_in_a_worker_is_named(samples: SampleSet, reports: Reports, pipe: Path) -> None:
    dataset = samples.open(shuffle=False, transform=hang_once(pipe, 37))
    with DataLoader(dataset, batch_size=16, num_workers=2, num_threads=0, stall_report_s=0.3) as loader:
        text = stall(loader, reports, let_go(pipe), 4, words="hanging_transform")
    assert re.search(
        r"worker \d+ \(pid \d+, alive\) builds batch 2 for \d+\.\d s, at sample 6 of 16: '00037' of "
        r"\S+/000000\.tar; in hanging_transform, \S+test_watch.py:\d+",
        text,
    )
    assert re.search(r"worker \d+ \(pid \d+, alive\) is idle", text)
    assert re.search(r"ring: \d+ slots free, 1 being built in, \d+ hold batches not let go of", text)


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
        text = stall(loader, reports, let_go(pipe), words="hanging_decoder")
    where = r"at sample 38 of 64: '00037' of \S+; in hanging_decoder, \S+test_watch.py:\d+"
    assert re.search(rf"worker \d+ \(pid \d+, alive\) builds batch 0 for \d+\.\d s, {where}", text)


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
        text = stall(loader, reports, go_on, words="stopped by")
    assert re.search(r"worker \d+ \(pid \d+, stopped by a signal\) builds batch 0 .* in an unknown place", text)


def test_a_consumer_that_takes_its_time_is_no_stall(samples: SampleSet, reports: Reports) -> None:
    dog = Watchdog(0.5, "nothing", str)
    dog.begin()
    dog.end()
    with reports.came:
        assert not reports.came.wait_for(lambda: reports.texts, 1.2)  # more than twice the limit
    dog.stop()
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
        assert self.gate.wait(60)


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
        text = reports.wait()
        copier.step.gate.set()
        thread.join(60)
    assert len(found) == 16
    assert text.startswith("cpu has made no progress for ")
    assert "prefetcher to cpu: waits for the device to come within depth steps; 2 batches ahead, 5 copies" in text


def test_the_loaders_report_says_what_the_prefetcher_is_at(samples: SampleSet, reports: Reports, pipe: Path) -> None:
    dataset = samples.open(shuffle=False, transform=hang_once(pipe, 37))
    with DataLoader(dataset, batch_size=16, stall_report_s=0.3) as loader:
        text = stall(DevicePrefetcher(loader, "cpu"), reports, let_go(pipe), 4)
    assert "prefetcher to cpu: waits for the loader; " in text
    assert len(reports.texts) < 3  # the loader's report alone, however slow the machine


class StillClock:
    """Time that passes only while the watchdog sleeps; its event and its clock in one."""

    def __init__(self, sleeps: int) -> None:
        self.now_s = 0.0
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
        if len(self.pauses) > self._sleeps:
            self.ended.set()
        return self.ended.is_set()


def test_it_sleeps_until_the_next_report_is_due(reports: Reports, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StillClock(sleeps=5)
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Event", lambda: clock)
        dog = Watchdog(1.0, "nothing", lambda: "because")
    monkeypatch.setattr(time, "monotonic", clock.monotonic)
    dog.begin()
    assert clock.ended.wait(30)
    dog.stop()
    assert clock.pauses == [1.0, 1.0, 2.0, 4.0, 8.0, 16.0]
    assert [text.split("\n")[0] for text in reports.texts] == [f"nothing for {s:.1f} s" for s in (1, 2, 4, 8, 16)]
