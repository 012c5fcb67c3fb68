"""metrics(): every number is in the table of the code (and docs/metrics.md), and the waits add up."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from streaming import DataLoader
from streaming.common.counters import WAITS, Metrics, waited_here_s
from streaming.watch.metrics.table import NUMBERS, OF_EXPORTS
from streaming.watch.metrics.waits import CAUSES
from tests.support.code.folders import ROOT
from tests.support.processes.waiting import PATIENCE_S, ended, is_timed, started, until
from tests.support.sets.data_sets import SampleSet, write_set

pytestmark = pytest.mark.usefixtures("one_fork_server")
TABLE = set(NUMBERS) - {one.name for one in OF_EXPORTS}
_COUNTED = re.compile(r'metrics\.(?:add|count|peak|timed)\(\s*"([a-z_]+)"(?: if \w+ else "([a-z_]+)")?')


def counted() -> set[str]:
    """The names that the code counts under."""
    found = set()
    for path in (ROOT / "streaming").rglob("*.py"):
        for names in _COUNTED.findall(path.read_text()):
            found.update(filter(None, names))
    return found


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    return write_set(tmp_path_factory.mktemp("metrics"), (41, 23), chunk_samples=4)


def test_every_name_in_the_code_is_in_the_table() -> None:
    assert counted() - TABLE == set()


def test_every_number_of_a_run_is_in_the_table_and_the_table_has_no_other(samples: SampleSet, tmp_path: Path) -> None:
    seen: set[str] = set()
    for options in ({}, {"num_workers": 1}):
        dataset = samples.open(cache_dir=str(tmp_path / "cache"), transform=dict)
        with DataLoader(dataset, batch_size=4, **options) as loader:
            for _ in loader:
                pass
            numbers = loader.metrics()
        assert all(isinstance(value, (int, float)) for name, value in numbers.items() if name != "bad")
        seen.update(set(numbers) - {"bad"})
    assert seen - TABLE == set()
    assert TABLE - seen - counted() == set()


class Ticks(threading.local):
    """A clock that moves on when it is looked at; each thread has its own."""

    count = 0

    def __call__(self) -> float:
        self.count += 1
        return float(self.count)


def test_the_consumers_time_adds_up(samples: SampleSet, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("perf_counter", "thread_time"):
        monkeypatch.setattr(time, name, Ticks())
    with DataLoader(samples.open(transform=dict), batch_size=4) as loader:
        began_s = time.perf_counter()
        for _ in loader:
            pass
        whole_s = time.perf_counter() - began_s
        now: dict[str, Any] = loader.metrics()
    monkeypatch.undo()
    parts = ("wait_for_fetch_s", "wait_for_build_s", "build_in_consumer_s", "consumer_s")
    assert 0 < sum(now.get(name, 0) for name in parts) <= whole_s
    assert sum(now.get(name, 0) for name in parts[:3]) <= now["in_loader_s"]
    assert 0.9 * whole_s < now["in_loader_s"] + now["consumer_s"] <= whole_s
    assert 0 < now["consumer_thread_s"] <= whole_s
    for name in ("consumer_thread_s", "unhidden_s"):
        assert now[f"{name}_per_batch"] == now[name] / now["batches"]
    assert 0 < now["unhidden_s"] <= now["in_loader_s"] - now["first_batch_s"]


BUILDS = threading.Event()
"""A builder is at work on a batch."""
IS_OVER = threading.Event()
"""Nobody waits for a builder any more."""


def built_while_the_consumer_waits(sample: dict[str, Any]) -> dict[str, Any]:
    """In a builder thread, last until the consumer waits for it."""
    if threading.current_thread() is not threading.main_thread():
        BUILDS.set()
        until(lambda: IS_OVER.is_set() or is_timed("wait_for_build_s"), "the consumer waits")
        BUILDS.clear()
    return sample


KINDS: dict[str, dict[str, Any]] = {
    "the consumer builds": {"num_threads": 0},
    "a thread builds": {"num_threads": 1},
    "a process builds": {"num_workers": 1, "num_threads": 0},
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_no_wait_is_unhidden(samples: SampleSet, kind: str) -> None:
    """Time in the loader is that of first batches, waits of the consumer, and what it did itself."""
    by_thread = kind == "a thread builds"
    BUILDS.clear()
    IS_OVER.clear()
    transform = built_while_the_consumer_waits if by_thread else dict
    with DataLoader(samples.open(transform=transform), batch_size=4, **KINDS[kind]) as loader:
        for number, _ in enumerate(loader):
            if by_thread and number == 3:  # it built none of the next batch: the consumer waits for it
                assert BUILDS.wait(PATIENCE_S)
            if number == 4:
                IS_OVER.set()
        now: dict[str, Any] = loader.metrics()
    waits_s = sum(now.get(name, 0.0) for name in WAITS) - now.get("first_batch_wait_s", 0.0)
    assert waits_s > 0 or not by_thread
    assert now["unhidden_s"] == pytest.approx(now["in_loader_s"] - now["first_batch_s"] - waits_s)
    if kind == "the consumer builds":
        assert now["unhidden_s"] + now["first_batch_s"] >= now["build_in_consumer_s"] > 0


def test_waits_of_other_threads_are_not_the_consumers() -> None:
    metrics, before_s = Metrics(), waited_here_s()
    for name in (*CAUSES, "build_s", "wait_for_device_s"):
        with metrics.timed(name):
            pass
    mine_s = waited_here_s() - before_s
    assert mine_s == pytest.approx(sum(metrics.get(name) for name in WAITS))
    assert set(CAUSES) - WAITS == {"build_in_consumer_s"}
    other, there = Metrics(), []

    def wait() -> None:
        with other.timed("wait_for_fetch_s"):
            pass
        there.append(waited_here_s())

    ended(*started(wait))
    assert there == [other.get("wait_for_fetch_s")]
    assert waited_here_s() - before_s == mine_s


def test_workers_and_ring_are_counted(samples: SampleSet, tmp_path: Path) -> None:
    flag = tmp_path / "flag"

    def dying(sample: dict[str, Any]) -> dict[str, Any]:
        if not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return sample

    with DataLoader(samples.open(transform=dying), batch_size=16, num_workers=1, num_threads=0) as loader:
        kept = list(loader)
        now = loader.metrics()
        assert now["worker_restarts"] == 1
        assert now["ring_slots_in_use"] == len(kept) == 4
        assert now["ring_peak_bytes"] >= now["ring_bytes"] >= 4 * 4096
        kept.clear()
        assert loader.metrics()["ring_slots_in_use"] == 0
        peak_bytes = now["ring_peak_bytes"]
    assert loader.metrics()["ring_peak_bytes"] == peak_bytes
    assert loader.metrics()["ring_bytes"] == 0
