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
from streaming.metrics.table import NUMBERS, OF_EXPORTS
from tests.support.code.folders import ROOT
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
    assert now["consumer_thread_s_per_batch"] == now["consumer_thread_s"] / now["batches"]


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
