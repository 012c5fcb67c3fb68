"""``loader.trace``: who did what, and that a step follows from its chunks; and ranges in a real profiler's trace."""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from shard_tools.look.trace import merge_traces
from streaming import DataLoader, DevicePrefetcher, Mixture, Packed, StreamingDataset
from streaming.common.counters import Metrics, account_here, under_way
from streaming.errors import ConfigError, NotFoundError
from streaming.shards.fetch import read
from streaming.storage import Storage
from streaming.storage.base.adapter import TransientError
from streaming.watch.tracing import recorder
from streaming.watch.tracing.ranges import ProfilerRanges
from tests.support.code.folders import ROOT
from tests.support.contracts.loop_kinds import CLOSABLE, NUM_BATCHES, SHARD_SIZES, compress, makers
from tests.support.processes.waiting import PATIENCE_S, ended, is_timed, started, until
from tests.support.sets.data_sets import SampleSet, mesh_of, write_set
from tests.support.sets.packed_sets import write as write_documents

pytestmark = pytest.mark.usefixtures("one_fork_server")
Events = list[dict[str, Any]]


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    """64 samples in chunks of 4."""
    return write_set(tmp_path_factory.mktemp("traced") / "train", (41, 23), chunk_samples=4)


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("traced-packs")
    write_documents(folder)
    return str(folder)


class File:
    """A trace file, looked at as Perfetto does: whatever it would drop is an error here."""

    def __init__(self, path: Path) -> None:
        self.content = json.loads(path.read_text())
        self.ours, self.events = self.content["shardstream"], self.content["traceEvents"]
        assert {event["ph"] for event in self.events} <= {"X", "M", "s", "f"}
        self.lanes = {event["tid"]: event["args"]["name"] for event in self.of("M", "thread_name")}
        work: dict[int, Events] = defaultdict(list)
        for event in self.of("X"):
            assert event["pid"] == self.ours["rank"]
            assert event["tid"] in self.lanes
            assert event["dur"] > 0
            work[event["tid"]].append(event)
        for events in work.values():
            _check_nested(events)
        begins = {event["id"]: self._around(event, work) for event in self.of("s")}
        ends = {event["id"]: self._around(event, work) for event in self.of("f")}
        assert begins.keys() == ends.keys()
        assert len(begins) == len(self.of("s")) == len(self.of("f"))
        assert all(event["bp"] == "e" for event in self.of("f"))
        self.arrows = [(begins[number], ends[number]) for number in begins]

    def of(self, ph: str, name: str | None = None) -> Events:
        return [event for event in self.events if event["ph"] == ph and name in (None, event["name"])]

    def to(self, event: dict[str, Any]) -> Events:
        """Where arrows to a stretch of work come from."""
        return [source for source, target in self.arrows if target is event]

    @property
    def steps(self) -> list[tuple[int, int]]:
        return [(step["epoch"], step["samples_seen"]) for step in self.ours["steps"]]

    def lane(self, event: dict[str, Any]) -> str:
        return self.lanes[event["tid"]]

    @staticmethod
    def _around(flow: dict[str, Any], work: dict[int, Events]) -> dict[str, Any]:
        """The innermost work around a flow event, to which it is bound."""
        around = [one for one in work[flow["tid"]] if one["ts"] <= flow["ts"] <= end(one)]
        assert around, flow
        return min(around, key=lambda one: one["dur"])


def end(event: dict[str, Any]) -> float:
    return float(event["ts"] + event["dur"])


def _check_nested(events: Events) -> None:
    """Work of a lane lies inside other work, or beside it."""
    open_until: list[float] = []
    for event in sorted(events, key=lambda one: (one["ts"], -one["dur"])):
        while open_until and open_until[-1] <= event["ts"] + 1e-3:
            open_until.pop()
        assert not open_until or end(event) <= open_until[-1] + 2e-3, event
        open_until.append(end(event))


def check_chain(file: File, *, has_all: bool = True) -> None:
    """Each step's batch was built before it was handed over, of chunks that were fetched before that."""
    steps = file.of("X", "your step")
    assert len(steps) == len(file.steps)
    for step in steps:
        (build,) = file.to(step)
        assert build["name"] == "build"
        assert end(build) <= step["ts"] + 1e-3
        fetches = file.to(build)
        assert build["args"]["chunks"] == len(fetches) + build["args"]["chunks_held_before"]
        assert not has_all or build["args"]["chunks_held_before"] == 0
        assert fetches or not has_all
        for fetch in fetches:
            assert fetch["name"] == "fetch"
            assert end(fetch) <= build["ts"] + 1e-3
            assert fetch["args"]["bytes"] > 0
            assert fetch["args"]["shard"]
            assert fetch["args"]["chunk"] >= 0


def traced(loader: Any, path: Path, steps: int, *, take: int | None = None) -> File:
    """The trace of so many steps; the loop takes one batch more than that, or ``take``."""
    loader.trace(path, steps)
    batches = iter(loader)
    for _ in range(steps + 1 if take is None else take):
        next(batches)
    del batches
    return File(path)


def mixed(samples: SampleSet, _: str) -> Any:
    return Mixture({"a": samples.open(), "b": samples.open(where=None)}, weights={"a": 0.7, "b": 0.3}, seed=1)


SETS: dict[str, Callable[[SampleSet, str], Any]] = {
    "set": lambda samples, _: samples.open(seed=1),
    "storage order": lambda samples, _: samples.open(shuffle=False),
    "packs": lambda _, documents: Packed(StreamingDataset(documents), length=64),
    "mixture": mixed,
}


@pytest.mark.parametrize(
    "options", [{"num_threads": 0}, {"num_threads": 2}, {"num_workers": 1, "num_threads": 0}], ids=str
)
@pytest.mark.parametrize("kind", SETS)
def test_a_step_follows_from_its_chunks(
    samples: SampleSet, documents: str, tmp_path: Path, kind: str, options: dict[str, int]
) -> None:
    def transform(sample: Any) -> Any:
        return sample

    dataset = SETS[kind](samples, documents)
    if kind == "set":
        dataset = samples.open(seed=1, transform=transform)
    with DataLoader(dataset, batch_size=4, **options) as loader:
        file = traced(loader, tmp_path / "t.json", 5)
    check_chain(file)
    assert file.steps == [(0, 4 * step) for step in range(5)]
    lanes = set(file.lanes.values())
    assert "consumer" in lanes
    assert any(lane.startswith("fetch ") for lane in lanes)
    assert {file.lane(event) for event in file.of("X", "your step") + file.of("X", "next batch")} == {"consumer"}
    if kind == "set" and "num_workers" in options:
        built = [event for event in file.of("X", "build") if file.lane(event).startswith("worker ")]
        assert len(built) >= 5
        for event in built:  # the worker's clock is ours: it builds while its thread waits for it
            (waiting,) = (
                one for one in file.of("X", "build")
                if file.lane(one).startswith("build ") and one["args"].get("batch") == event["args"]["batch"]
            )  # fmt: skip
            assert waiting["ts"] <= event["ts"]
            assert end(event) <= end(waiting)


@pytest.mark.thorough
def test_consumer_time_is_divided_and_the_wait_is_told(samples: SampleSet, tmp_path: Path) -> None:
    def slow(sample: Any) -> Any:
        """Take time while the consumer waits, or in its thread: never ahead of it."""
        if threading.current_thread() is not consumer:
            until(lambda: is_timed("wait_for_build_s", loader._loop.metrics) or is_over.is_set(), "the consumer waits")
        time.sleep(0.004)
        return sample

    consumer, is_over = threading.current_thread(), threading.Event()

    with DataLoader(samples.open(transform=slow), batch_size=8, num_threads=1) as loader:
        file = traced(loader, tmp_path / "t.json", 4)
        is_over.set()
    for step, handed, own in zip(
        file.ours["steps"], file.of("X", "next batch"), file.of("X", "your step"), strict=True
    ):
        assert step["asked_us"] == pytest.approx(handed["ts"])
        assert step["received_us"] == pytest.approx(end(handed), abs=0.01)
        assert step["ended_us"] == pytest.approx(end(own), abs=0.01)
    inside = [event for event in file.of("X") if event["name"] in ("wait for a builder", "wait for bytes", "build")]
    assert sum(event["dur"] for event in inside if file.lane(event) == "consumer") > 4 * 8 * 4000 / 2


def test_it_begins_in_the_middle_and_after_a_resume(samples: SampleSet, tmp_path: Path) -> None:
    with DataLoader(samples.open(seed=1), batch_size=4) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        loader.trace(tmp_path / "a.json", steps=2)
        for _ in range(3):
            next(batches)
        file = File(tmp_path / "a.json")
        assert file.steps == [(0, 12), (0, 16)]
        state = loader.state_dict()
    with DataLoader(samples.open(seed=1), batch_size=4) as loader:
        loader.load_state_dict(state)
        file = traced(loader, tmp_path / "b.json", 3)
    assert file.steps == [(0, state["samples_seen"] + 4 * step) for step in range(3)]
    check_chain(file)


def test_steps_go_on_over_epochs_and_each_end_writes(samples: SampleSet, tmp_path: Path) -> None:
    path = tmp_path / "t-{rank}.json"
    with DataLoader(samples.open(subset=(0, 0.3)), batch_size=4) as loader:
        count = len(loader)
        loader.trace(path, steps=2 * count + 1)
        found = []
        for _ in range(3):
            list(loader)
            found.append(len(File(tmp_path / "t-0.json").steps))
        assert found == [count, 2 * count, 2 * count + 1]
        assert isinstance(loader._loop.metrics.observer, ProfilerRanges)
        before = (tmp_path / "t-0.json").read_bytes()
        list(loader)
        assert (tmp_path / "t-0.json").read_bytes() == before
        assert [epoch for epoch, _ in File(tmp_path / "t-0.json").steps] == [0] * count + [1] * count + [2]


def test_one_at_a_time_and_another_one_afterwards(samples: SampleSet, tmp_path: Path) -> None:
    with DataLoader(samples.open(), batch_size=4) as loader:
        loader.trace(tmp_path / "a.json", steps=2)
        batches = iter(loader)
        next(batches), next(batches)
        with pytest.raises(ConfigError, match="1 of 2 steps are over"):
            loader.trace(tmp_path / "b.json", steps=2)
        next(batches)
        file = traced(loader, tmp_path / "b.json", 2)
    assert not (tmp_path / "b.json").is_dir()
    assert len(file.steps) == 2
    assert len(File(tmp_path / "a.json").steps) == 2


@pytest.mark.parametrize("steps", [0, -1, 1.5, "3", True, None, 10**9])
def test_wrong_steps_are_refused_by_name(samples: SampleSet, tmp_path: Path, steps: Any) -> None:
    with DataLoader(samples.open(), batch_size=4) as loader:
        with pytest.raises(ConfigError, match="trace: steps"):
            loader.trace(tmp_path / "t.json", steps)
        assert list(tmp_path.iterdir()) == []
        loader.trace(tmp_path / "t.json", 1)  # nothing was begun


def test_a_wrong_path_is_refused_at_once(samples: SampleSet, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    wrong = [3, None, "", b"x", "s3://bucket/t.json", tmp_path, tmp_path / "none" / "t.json", tmp_path / "file" / "t"]
    with DataLoader(samples.open(), batch_size=4) as loader:
        for path in [*wrong, "a\0b"]:
            with pytest.raises(ConfigError, match="trace: path"):
                loader.trace(path)
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_a_disk_that_fails_later_ends_no_training(
    samples: SampleSet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    with DataLoader(samples.open(), batch_size=4) as loader:
        loader.trace(folder / "t.json", 2)
        shutil.rmtree(folder)
        with caplog.at_level(logging.WARNING):
            assert len(list(loader)) == 16
    assert "trace: cannot write" in caplog.text


def test_a_full_recording_ends_and_says_so(
    samples: SampleSet, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MOST_EVENTS", 40)
    with DataLoader(samples.open(), batch_size=4) as loader, caplog.at_level(logging.WARNING):
        loader.trace(tmp_path / "t.json", 1000)
        for _ in range(10):
            list(loader)
    file = File(tmp_path / "t.json")
    assert file.ours["is_cut_off"]
    assert len(file.of("X")) + len(file.arrows) <= 40
    assert "it ends there" in caplog.text


def test_close_and_the_collector_write_what_there_is(samples: SampleSet, tmp_path: Path) -> None:
    loader = DataLoader(samples.open(), batch_size=4)
    loader.trace(tmp_path / "a.json", 100)
    batches = iter(loader)
    next(batches), next(batches), next(batches)
    loader.close()
    file = File(tmp_path / "a.json")
    assert [step["is_over"] for step in file.ours["steps"]] == [True, True, False]
    assert [event["args"].get("over", True) for event in file.of("X", "your step")] == [True, True, False]
    loader = DataLoader(samples.open(), batch_size=4)
    loader.trace(tmp_path / "b.json", 100)
    batches = iter(loader)
    next(batches), next(batches)
    gc.disable()
    try:
        del batches, loader  # no cycle keeps them
        assert [step["is_over"] for step in File(tmp_path / "b.json").ours["steps"]] == [True, False]
    finally:
        gc.enable()


PROGRAM = """
import os, signal, sys
from streaming import DataLoader, StreamingDataset
loader = DataLoader(StreamingDataset(sys.argv[1]), batch_size=4)
loader.trace(sys.argv[2], 3)
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
batches = iter(loader)
next(batches), next(batches)
if sys.argv[3] == "writing":
    os.replace = die
elif sys.argv[3] == "recording":
    die()
elif sys.argv[3] == "fork":
    if os.fork() == 0:
        list(loader)
        os._exit(0)
    os.wait()
    die()
elif sys.argv[3] == "exit":
    sys.exit()
next(batches), next(batches)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("when", ["recording", "writing", "fork", "exit"])
def test_a_killed_process_leaves_no_half_file(samples: SampleSet, tmp_path: Path, when: str) -> None:
    path = tmp_path / "t.json"
    done = subprocess.run([sys.executable, "-c", PROGRAM, samples.url, str(path), when], cwd=ROOT, check=False)
    assert done.returncode == (0 if when == "exit" else -signal.SIGKILL)
    assert path.exists() == (when == "exit")
    if when == "exit":
        assert len(File(path).steps) == 2
    else:
        assert [one.name.startswith(".t.json.") for one in tmp_path.iterdir()] == [True] * (when == "writing")


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[], Any]]:
    folder = tmp_path_factory.mktemp("kinds")
    whole = write_set(folder / "whole", SHARD_SIZES, chunk_samples=5)
    (folder / "gz").mkdir()
    return makers(whole, compress(whole, folder / "gz"))


@pytest.mark.parametrize("kind", CLOSABLE)
def test_every_kind_of_loop_counts_its_steps(kinds: dict[str, Any], tmp_path: Path, kind: str) -> None:
    loader = kinds[kind]()
    loader.trace(tmp_path / "t.json", NUM_BATCHES + 2)
    for _ in range(2):
        list(loader)
    loader.close()
    file = File(tmp_path / "t.json")
    size = 10
    assert file.steps == [(0, size * step) for step in range(NUM_BATCHES)] + [(1, 0), (1, size)]
    assert {file.lane(event) for event in file.of("X", "your step")} == {"consumer"}
    if "prefetcher" in kind:
        assert file.of("X", "copy")
    if kind in ("indexed", "prefetcher", "deep prefetcher", "fetcher"):
        check_chain(file, has_all=False)
    if kind == "unindexed":  # of which samples a batch consists is not told, but when they were read
        assert file.of("X", "fetch")
        assert all(len(file.to(step)) == 1 for step in file.of("X", "your step"))


def test_a_prefetcher_over_a_foreign_loader_refuses(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trace: .*batches of a list"):
        DevicePrefetcher([torch.zeros(1)], "cpu").trace(tmp_path / "t.json")


def test_two_loaders_at_once_are_told_apart(samples: SampleSet, tmp_path: Path) -> None:
    other = write_set(tmp_path / "other", (33,), chunk_samples=4)
    with DataLoader(samples.open(), batch_size=4) as one, DataLoader(other.open(), batch_size=4) as two:
        one.trace(tmp_path / "one.json", 4)
        two.trace(tmp_path / "two.json", 4)
        for _ in zip(one, two, strict=False):
            pass
    for name, url in (("one", samples.url), ("two", other.url)):
        file = File(tmp_path / f"{name}.json")
        assert len(file.steps) == 4
        assert all(event["args"]["shard"].startswith(url) for event in file.of("X", "fetch"))
        check_chain(file)


def test_it_goes_on_over_a_remesh(samples: SampleSet, tmp_path: Path) -> None:
    with DataLoader(samples.open(seed=1), global_batch_size=8, device_mesh=mesh_of(2, 0)) as loader:
        loader.trace(tmp_path / "t.json", 4)
        batches = iter(loader)
        next(batches), next(batches)
        loader.remesh(0, 1, at=1)
        batches = iter(loader)
        for _ in range(4):
            next(batches)
    file = File(tmp_path / "t.json")
    assert file.steps == [(0, 0), (0, 8), (0, 8), (0, 16)]
    check_chain(file, has_all=False)


def test_what_the_cache_had_and_what_was_repeated_is_told(samples: SampleSet, tmp_path: Path) -> None:
    cached = {"cache_dir": str(tmp_path / "cache"), "shuffle": False}
    with DataLoader(samples.open(**cached), batch_size=4) as loader:
        first = traced(loader, tmp_path / "a.json", 3)
        list(loader)
    with DataLoader(samples.open(**cached), batch_size=4) as loader:
        second = traced(loader, tmp_path / "b.json", 3)

    def over(file: File) -> Events:
        return [event["args"] for event in file.of("X", "fetch") if event["args"].get("over", True)]

    assert over(first)
    assert over(second)
    assert all("cache_hits" not in args and args["requests"] for args in over(first))
    assert all(args["cache_hits"] == 1 for args in over(second))
    assert not any("requests" in event["args"] for event in second.of("X", "fetch"))


class SlowStore:
    """Fetches that begin, and wait until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int = 0) -> None:
        self.open, self.num_begun, self._free = threading.Event(), 0, free
        real = read.fetch_unit

        def fetch(*args: Any, **options: Any) -> Any:
            self.num_begun += 1
            if self.num_begun > self._free:
                assert self.open.wait(PATIENCE_S)
            return real(*args, **options)

        monkeypatch.setattr("streaming.shards.catalog.source.fetch_unit", fetch)
        monkeypatch.setattr("streaming.shards.catalog.source.ChunkSource.in_place", None)

    def wait_for(self, count: int) -> None:
        until(lambda: self.num_begun >= count, f"{count} fetches begin")


def test_fetches_under_way_at_the_call_are_entered_from_their_beginning(
    samples: SampleSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SlowStore(monkeypatch)
    with DataLoader(samples.open(shuffle=False), batch_size=4, num_threads=1) as loader:
        batches = iter(loader)
        first = started(lambda: next(batches))
        store.wait_for(1)
        before_us = time.perf_counter() * 1e6
        loader.trace(tmp_path / "t.json", steps=3)
        after_us = time.perf_counter() * 1e6
        store.open.set()
        ended(*first)
        for _ in range(4):
            next(batches)
    file = File(tmp_path / "t.json")
    early = [event for event in file.of("X", "fetch") if event["ts"] < before_us]
    assert early
    for event in early:
        assert end(event) > after_us
        assert event["args"]["bytes"] > 0
        assert event["args"]["shard"].startswith(samples.url)
        assert "over" not in event["args"]
    check_chain(file)  # none counts as held before


@pytest.mark.thorough
def test_what_is_under_way_at_the_end_is_written_as_not_over(
    samples: SampleSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SlowStore(monkeypatch, free=2)
    loader = DataLoader(samples.open(shuffle=False), batch_size=4, num_threads=1)
    batches = iter(loader)
    next(batches)
    store.wait_for(3)
    loader.trace(tmp_path / "t.json", steps=30)

    def interrupt() -> None:
        until(lambda: is_timed("wait_for_fetch_s", loader._loop.metrics), "the consumer waits for bytes")
        time.sleep(0.3)  # what has begun by now has taken as long, at least, when it is interrupted
        os.kill(os.getpid(), signal.SIGINT)

    stopper = started(interrupt)
    with pytest.raises(KeyboardInterrupt):
        for _ in batches:
            pass
    ended(*stopper)
    file = File(tmp_path / "t.json")  # written by the failure
    store.open.set()
    loader.close()
    unended = [event for event in file.of("X", "fetch") if event["args"].get("over") is False]
    assert unended
    for event in unended:
        assert file.lane(event).startswith("fetch ")
        assert event["dur"] > 300_000
        assert event["args"]["bytes"] > 0
        assert event["args"]["shard"].startswith(samples.url)
    *_, last = file.ours["steps"]
    assert not last["is_over"]
    assert last["ended_us"] == last["received_us"] > last["asked_us"] + 300_000
    (rank,) = merge_traces([str(tmp_path / "t.json")]).ranks
    assert rank.seconds["wait for bytes"] > 0.3
    assert rank.unfinished == 1


def test_work_that_is_over_is_under_way_no_more() -> None:
    metrics = Metrics()
    with metrics.timed("outer_s"):
        assert [one.name for one, _ in under_way() if one.metrics is metrics] == ["outer_s"]
        with pytest.raises(ZeroDivisionError), metrics.timed("inner_s"):
            1 / 0  # noqa: B018
    assert not [one for one, _ in under_way() if one.metrics is metrics]
    assert metrics.snapshot().keys() == {"outer_s", "inner_s"}


def test_a_forked_child_forgets_what_other_threads_were_doing() -> None:
    metrics, begun, done = Metrics(), threading.Event(), threading.Event()

    def work() -> None:
        with metrics.timed("elsewhere_s"):
            begun.set()
            done.wait(PATIENCE_S)

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(PATIENCE_S)
    with metrics.timed("here_s"):
        child = os.fork()
        if child == 0:
            os._exit([one.name for one, _ in under_way() if one.metrics is metrics] != ["here_s"])
        assert os.waitpid(child, 0)[1] == 0
        assert len([one for one, _ in under_way() if one.metrics is metrics]) == 2
    done.set()
    thread.join()


def test_retries_are_counted_in_the_thread_that_meets_them(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123")
    storage = Storage()
    adapter = storage._store.adapter(str(tmp_path / "a"))
    failing = Counter({"left": 2})
    real = adapter.info

    def info(url: str) -> Any:
        if failing["left"]:
            failing["left"] -= 1
            raise TransientError("try again")
        return real(url)

    adapter.info = info  # type: ignore[method-assign]
    account: dict[str, float] = {}
    account_here(account)
    try:
        storage.info(str(tmp_path / "a"))
    finally:
        account_here(None)
    with pytest.raises(NotFoundError):
        storage.info(str(tmp_path / "none"))
    assert account == {"requests": 3, "retries": 2}


# --- ranges for torch's profiler ---


def ranges_of(loader: DataLoader, **options: Any) -> Counter[str]:
    with profile(activities=[ProfilerActivity.CPU], **options) as profiler:
        count = len(list(loader))
    assert count == 16
    found = Counter({event.key: event.count for event in profiler.key_averages()})
    return Counter({name: number for name, number in found.items() if name.startswith("shardstream.")})


@pytest.mark.thorough
def test_a_profiler_sees_the_consumers_ranges(samples: SampleSet) -> None:
    with DataLoader(samples.open(), batch_size=4, num_threads=0) as loader:
        found = ranges_of(loader)
    assert found["shardstream.hand_over"] == 17  # and the end
    assert found["shardstream.build"] == 16
    assert found["shardstream.plan"] > 0
    assert "shardstream.fetch" not in found  # without this a profiler sees its own thread only


def test_a_profiler_of_all_threads_sees_them_all(samples: SampleSet) -> None:
    def transform(sample: Any) -> Any:
        return sample

    with DataLoader(samples.open(transform=transform), batch_size=4, num_threads=2) as loader:
        found = ranges_of(loader, experimental_config=_ExperimentalConfig(profile_all_threads=True))
        chunks = loader.metrics()["fetched_chunks"]
    assert found["shardstream.fetch"] == chunks
    assert found["shardstream.build"] == 16


def test_a_profiler_beside_workers_copies_and_a_trace(samples: SampleSet, tmp_path: Path) -> None:
    def transform(sample: Any) -> Any:
        return sample

    loader = DataLoader(samples.open(transform=transform), batch_size=4, num_workers=1)
    batches = DevicePrefetcher(loader, "cpu", depth=1)
    batches.trace(tmp_path / "t.json", 5)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        assert len(list(batches)) == 16
    batches.close()
    found = {event.key: event.count for event in profiler.key_averages()}
    assert found["shardstream.copy"] == 16
    check_chain(File(tmp_path / "t.json"))


def test_without_a_profiler_nobody_watches(samples: SampleSet) -> None:
    assert "_is_profiler_enabled" in vars(torch.autograd.profiler)  # private: if it goes, ranges go silently
    ranges = ProfilerRanges()
    assert ranges.begin("fetch_s") is None
    assert ranges.asks() is None
    with DataLoader(samples.open(), batch_size=4) as loader:
        list(loader)
        assert isinstance(loader._loop.metrics.observer, ProfilerRanges)
    assert Metrics().observer.begin("x") is None
