"""The node cache among real processes: kills at random moments, a tight limit, and who fetches what."""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from streaming.common.counters import Metrics
from streaming.shards.cache import NodeCache, space
from streaming.shards.cache.entry import charged_bytes, file_bytes
from streaming.shards.cache.paths import CachePaths
from streaming.storage import Checked
from streaming.storage.base.locks import locked
from tests.support.processes.waiting import PATIENCE_S, ended, started, until

FORKED = multiprocessing.get_context("forkserver")
NUM_PROCESSES = 8
NUM_CHUNKS = 120
CHUNK_BYTES = 256 * 1024 - 64
CHARGE = charged_bytes(file_bytes(CHUNK_BYTES))
DATA_BYTES = NUM_CHUNKS * CHARGE
PATTERN = np.random.Generator(np.random.PCG64(1)).integers(0, 256, 2 * CHUNK_BYTES, dtype=np.uint8)


@pytest.fixture(scope="module", autouse=True)
def _one_process_imports_it_all() -> Iterator[None]:
    """Where the fork server does not find a module to preload, as without our import path, it says nothing."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  one of an earlier file
    FORKED.set_forkserver_preload([__name__])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()
    yield
    FORKED.set_forkserver_preload(["__main__"])  # as it is by itself


def content(number: int, version: int) -> np.ndarray:
    """Bytes of one chunk: no two chunks or versions agree in any stretch that could be mixed up."""
    first = 1009 * number + 31 * version
    return PATTERN[first : first + CHUNK_BYTES]


def read_one(cache: NodeCache, number: int, version: int, log: int, out: np.ndarray, latency_s: float = 0) -> bool:
    def fetch(view: memoryview) -> Checked:
        time.sleep(latency_s)  # of the store
        os.write(log, b"%d %d\n" % (number, version))  # one write in append mode: never torn
        right = content(number, version)
        half = CHUNK_BYTES // 2
        view[:half] = right[:half].data
        view[half:] = right[half:].data
        return Checked.comparing(len(view), ())

    out[:] = 0
    _, hit = cache.read_into(f"s3://b/{number // 10}", f"v{version}", number, out.data, fetch, crc32c=None)
    if not np.array_equal(out, content(number, version)):
        os._exit(3)
    return hit


def hammer(directory: str, limit_bytes: int, log_path: str, seed: int, num_reads: int, num_versions: int) -> None:
    """One rank with two fetch threads, reading chunks at random."""
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    cache = NodeCache(directory, limit_bytes)

    def run(thread: int) -> None:
        order = random.Random(1000 * seed + thread)
        out = np.empty(CHUNK_BYTES, np.uint8)
        for _ in range(num_reads // 2):
            read_one(cache, order.randrange(NUM_CHUNKS), order.randrange(num_versions), log, out)

    threads = [threading.Thread(target=run, args=(thread,), daemon=True) for thread in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def epoch(directory: str, limit_bytes: int, log_path: str, seed: int, latency_s: float) -> None:
    """One rank that reads every chunk once, in an order of its own."""
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    cache = NodeCache(directory, limit_bytes)
    out = np.empty(CHUNK_BYTES, np.uint8)
    numbers = list(range(NUM_CHUNKS))
    random.Random(seed).shuffle(numbers)
    for number in numbers:
        read_one(cache, number, 0, log, out, latency_s)


def hold(directory: str, reached: Connection, stage: str) -> None:
    """Stop for good inside the fetch of chunk 0, or between reserving its space and renaming it."""

    def stop(*_: object) -> NoReturn:
        reached.send(stage)
        time.sleep(3600)
        raise AssertionError

    def fetch(view: memoryview) -> Checked:
        view[:] = content(0, 0).data
        return Checked.comparing(len(view), ())

    cache = NodeCache(directory, DATA_BYTES * 2)
    if stage == "writing":
        os.rename = stop  # type: ignore[assignment]
    out = np.empty(CHUNK_BYTES, np.uint8).data
    cache.read_into("s3://b/0", "v0", 0, out, stop if stage == "fetching" else fetch, crc32c=None)


def used_bytes(directory: Path) -> int:
    """What all files take. A file that moves while we look is found once, in either place."""
    root = Path(CachePaths(str(directory)).root)
    sizes: dict[int, int] = {}
    for pattern in ("parts/*", "entries/*/*"):
        for path in root.glob(pattern):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            sizes[status.st_ino] = charged_bytes(status.st_size)
    return sum(sizes.values())


@contextmanager
def watched_size(directory: Path) -> Iterator[list[int]]:
    """Sizes of the cache, seen all the while at moments when nothing is reserved or evicted (files may be renamed)."""
    seen, stop = [0], threading.Event()
    layout = CachePaths(str(directory))

    def watch() -> None:
        while not stop.wait(0.005):
            if os.path.exists(layout.usage):
                with locked(layout.usage, 30):
                    seen.append(used_bytes(directory))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()
        seen.append(used_bytes(directory))


def fetched(log: Path) -> Counter[str]:
    return Counter(log.read_text().split("\n")[:-1])


def run_with_kills(target: object, make_args: object, *, num_kills: int) -> int:
    """Run ``NUM_PROCESSES`` at once, kill some at random moments and replace them; how many kills hit."""
    order = random.Random(7)
    num_started = 0

    def start() -> multiprocessing.process.BaseProcess:
        nonlocal num_started
        process = FORKED.Process(target=target, args=make_args(num_started))  # type: ignore[operator, arg-type]
        process.start()
        num_started += 1
        return process

    running = [start() for _ in range(NUM_PROCESSES)]
    killed = 0
    try:
        while running:
            running[0].join(0.05 + 0.2 * order.random())
            for process in [one for one in running if one.exitcode is not None]:
                assert process.exitcode == 0, f"exit code {process.exitcode} (3: wrong bytes)"
                running.remove(process)
            if running and killed < num_kills:
                victim = running.pop(order.randrange(len(running)))
                victim.kill()
                victim.join(PATIENCE_S)
                killed += victim.exitcode == -9
                running.append(start())
    finally:
        for process in running:
            process.kill()
            process.join(PATIENCE_S)
    return killed


def check_afterwards(directory: Path, limit_bytes: int, log: Path) -> None:
    """The next start works without cleaning up by hand, and every byte in there is right."""
    metrics = Metrics()
    cache = NodeCache(directory, limit_bytes, metrics=metrics)
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    out = np.empty(CHUNK_BYTES, np.uint8)
    for number in range(NUM_CHUNKS):
        read_one(cache, number, 0, descriptor, out)
    cache.read_into("s3://b/new", "v", 0, memoryview(bytearray(5)), lambda _: Checked.comparing(5, ()), crc32c=None)
    os.close(descriptor)
    assert os.listdir(CachePaths(str(directory)).parts) == []
    assert metrics.get("cache_damaged") == 0
    assert metrics.get("cache_errors") == 0
    assert used_bytes(directory) <= limit_bytes


@pytest.mark.thorough
@pytest.mark.parametrize(("num_reads", "num_kills"), [(120, 8), pytest.param(600, 25, marks=pytest.mark.matrix)])
def test_eight_processes_a_tenth_of_the_data_and_random_kills(tmp_path: Path, num_reads: int, num_kills: int) -> None:
    limit_bytes = DATA_BYTES // 10
    directory, log = tmp_path / "cache", tmp_path / "log"
    with watched_size(directory) as sizes:
        killed = run_with_kills(
            hammer,
            lambda seed: (str(directory), limit_bytes, str(log), seed, num_reads, 2),
            num_kills=num_kills,
        )
    assert killed >= 0.6 * num_kills
    assert max(sizes) <= limit_bytes  # promised: one chunk per process more
    assert max(sizes) > limit_bytes // 2
    usage = os.open(CachePaths(str(directory)).usage, os.O_RDONLY)
    counted = space._read(usage)
    os.close(usage)
    assert counted is not None
    assert counted >= used_bytes(directory), "after all the kills the counter may be too high, never too low"
    check_afterwards(directory, limit_bytes, log)


@pytest.mark.thorough
def test_when_everything_fits_every_chunk_is_fetched_once_per_node(tmp_path: Path) -> None:
    directory, log = tmp_path / "cache", tmp_path / "log"
    run_with_kills(epoch, lambda seed: (str(directory), DATA_BYTES, str(log), seed, 0.0), num_kills=0)
    assert fetched(log) == {f"{number} 0": 1 for number in range(NUM_CHUNKS)}
    assert used_bytes(directory) == DATA_BYTES


@pytest.mark.thorough
def test_a_kill_costs_at_most_the_fetch_that_it_hits(tmp_path: Path) -> None:
    directory, log = tmp_path / "cache", tmp_path / "log"
    killed = run_with_kills(epoch, lambda seed: (str(directory), DATA_BYTES, str(log), seed, 0.1), num_kills=10)
    assert set(fetched(log)) == {f"{number} 0" for number in range(NUM_CHUNKS)}
    assert fetched(log).total() <= NUM_CHUNKS + killed
    check_afterwards(directory, 2 * DATA_BYTES, log)


@pytest.mark.parametrize("stage", ["fetching", "writing"])
def test_whoever_waits_takes_over_when_the_holder_is_killed(tmp_path: Path, stage: str) -> None:
    here, there = FORKED.Pipe()
    holder = FORKED.Process(target=hold, args=(str(tmp_path), there, stage), daemon=True)  # ends with this process
    holder.start()
    assert here.poll(PATIENCE_S)
    assert here.recv() == stage
    metrics = Metrics()
    cache = NodeCache(tmp_path, 2 * DATA_BYTES, metrics=metrics, wait_s=100)
    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    out = np.empty(CHUNK_BYTES, np.uint8)
    hits: list[bool] = []
    threads = started(lambda: hits.append(read_one(cache, 0, 0, log, out)))
    until(lambda: metrics.get("cache_wait_s"), "the other one waits")
    assert (tmp_path / "log").stat().st_size == 0
    holder.kill()
    holder.join(PATIENCE_S)
    ended(*threads)
    os.close(log)
    here.close()
    there.close()
    assert hits == [False]
    assert np.array_equal(out, content(0, 0))
    assert metrics.get("cache_wait_timeouts") == 0
    assert used_bytes(tmp_path) == CHARGE
    assert os.listdir(CachePaths(str(tmp_path)).parts) == []
