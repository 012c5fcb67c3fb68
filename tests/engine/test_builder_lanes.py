"""Threads of the training process build beside worker processes what these are no faster at: the same batches."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from shard_tools import ShardWriter
from streaming import DataLoader, StreamingDataset
from streaming.build.decode import images, resolve_decoders
from streaming.run.engine import builders
from streaming.run.engine.memory.batch_memory import LEAST_BYTES, BatchMemory
from streaming.run.engine.threads.lanes import Lanes
from streaming.run.engine.workers import fork_server
from streaming.run.engine.workers.fork_server import SharedServer
from streaming.run.engine.workers.pool import WorkerPool
from streaming.run.engine.workers.portable import fingerprint
from streaming.run.engine.workers.processes import Processes
from tests.support.processes.held_workers import Held, pool_of
from tests.support.processes.waiting import until

IMAGES = {"jpg": "rgb8:16x16"}


def enter(lanes: Lanes, stack: ExitStack, count: int, num_up: int, **kind: bool) -> list[bool]:
    """Have this many threads begin a batch, one after the other; tell which of them build it themselves."""
    return [stack.enter_context(lanes.one(num_up, **kind)) for _ in range(count)]


@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_as_many_lanes_as_without_processes_or_more(num_workers: int, num_threads: int, data: st.DataObject) -> None:
    lanes, most = Lanes(num_workers, num_threads), max(num_workers, num_threads)
    for _ in range(2):  # whoever has built a batch leaves its lane as it was
        num_up = data.draw(st.integers(0, num_workers))
        for threads_first in (False, True):
            with ExitStack() as stack:
                here = sum(enter(lanes, stack, most, num_up, in_parallel=True, threads_first=threads_first))
                assert here == (num_threads if threads_first else most - num_up)
            with ExitStack() as stack:
                here = sum(enter(lanes, stack, most, num_up, in_parallel=False, threads_first=threads_first))
                assert here == (0 if num_up else most), "they would only wait for the interpreter"
    with ExitStack() as stack:
        assert not enter(lanes, stack, 1, num_workers, in_parallel=True, threads_first=False)[0], "processes first"
    assert lanes.all_up
    share = lanes.share_here(in_parallel=True, threads_first=False)
    assert share == (most - num_workers) / most
    assert lanes.share_here(in_parallel=False, threads_first=False) == 0


def picture(number: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(number).integers(0, 256, (24, 24, 3), np.uint8)).save(out, "JPEG")
    return out.getvalue()


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    with ShardWriter(f"{tmp_path}/{{:02d}}.tar", max_samples=40) as writer:
        for number in range(80):
            writer.write({"__key__": f"{number:03d}", "jpg": picture(number), "cls": number})
    return tmp_path


def shown(batches: list[dict[str, Any]]) -> list[Any]:
    return [(batch["__key__"], batch["cls"].tolist(), batch["jpg"].numpy().tobytes()) for batch in batches]


@pytest.mark.usefixtures("one_fork_server")
@pytest.mark.parametrize(("num_workers", "num_threads"), [(1, 3), (1, 1), (2, 3), (1, 0)])
def test_batches_are_the_same_whoever_builds_them(
    pictures: Path, held: Held, num_workers: int, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before processes are up, beside them, and by them."""
    helps = num_threads > num_workers
    build, beside = WorkerPool.build, [-1.0]

    def build_after_a_thread(pool: WorkerPool, *args: Any, batch: int, **options: Any) -> Any:
        if helps and batch:  # after the first one, as many are begun as there are threads
            until(lambda: pool._metrics.get("batches_beside_workers") > beside[0], "a thread builds beside them")
        return build(pool, *args, batch=batch, **options)

    monkeypatch.setattr(WorkerPool, "build", build_after_a_thread)
    with DataLoader(StreamingDataset(pictures, decode=IMAGES), 4, num_threads=0) as loader:
        expected = [shown(list(loader)) for _ in range(2)]
    options: dict[str, Any] = {"num_workers": num_workers, "num_threads": num_threads, "prefetch_factor": 4}
    with DataLoader(StreamingDataset(pictures, decode=IMAGES), 4, **options) as loader:
        if not num_threads:
            held.let_go_when_somebody_waits()
        batches = iter(loader)
        found = held.first(batches, 3) if num_threads else []
        found += held.rest(loader, batches)
        until(lambda: len(pool_of(loader).pids) == num_workers, "all processes are up")
        before = pool_of(loader).pids
        begun: dict[str, float] = loader.metrics()
        beside[0] = begun["batches_beside_workers"]
        assert [shown(found), shown(list(loader))] == expected
        ended: dict[str, float] = loader.metrics()
        assert pool_of(loader).pids == before, "the processes are kept from epoch to epoch"
    assert (begun["batches_before_workers"] >= 3) == (num_threads > 0)
    assert ended["batches_before_workers"] == begun["batches_before_workers"]
    assert (ended["batches_beside_workers"] > begun["batches_beside_workers"]) == helps


@pytest.mark.usefixtures("one_fork_server")
@pytest.mark.parametrize("kind", ["images", "images after a while", "images, server up", "numbers", "transform"])
def test_a_server_is_started_at_once_only_where_threads_are_slower(
    pictures: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Processes, "starts_quickly", lambda _: kind == "images, server up")
    if kind != "images after a while":
        monkeypatch.setattr(builders, "START_AFTER_S", 3600.0)
    options: dict[str, Any] = {"decode": IMAGES}
    if kind == "numbers":
        options = {"decode": {"jpg": "pil", "cls": "json"}, "fields": ("cls",)}
    if kind == "transform":
        options["transform"] = dict
    with DataLoader(StreamingDataset(pictures, **options), 4, num_workers=1) as loader:
        assert sum(1 for _ in loader) == 20
        assert pool_of(loader).has_started == (kind != "images")


DECODERS: tuple[Any, ...] = (
    "auto", "view", None, "rgb8:16x16", "rgb8:crop16x16", {"jpg": "rgb8"}, {"*": int}, {"*.jpg": lambda data: data},
)  # fmt: skip


@pytest.mark.parametrize("spec", DECODERS, ids=lambda spec: re.sub(r"<.*>", "function", str(spec)))
def test_use_does_not_change_what_processes_are_sent(spec: Any) -> None:
    """Otherwise they would start anew at the second epoch."""
    decoders = resolve_decoders(spec)
    sent = fingerprint(decoders)
    found = [decoders.decoder_for(name) for name in ("jpg", "a.jpg", "png")]
    assert fingerprint(decoders) == sent
    assert [decoders.decoder_for(name) for name in ("jpg", "a.jpg", "png")] == found


def test_a_lower_limit_returns_what_is_free_and_another_one_lends_again() -> None:
    memory = BatchMemory(8 * LEAST_BYTES)
    kept = [memory.allocate((LEAST_BYTES,), torch.uint8) for _ in range(4)]
    kept[2:] = []
    assert memory.num_free == 2
    memory.limit(3 * LEAST_BYTES)
    assert (memory.num_free, memory.held_bytes) == (1, 3 * LEAST_BYTES)
    memory.limit(0)
    assert (memory.num_free, memory.held_bytes) == (0, 2 * LEAST_BYTES), "what is lent stays"
    assert memory.allocate((LEAST_BYTES,), torch.uint8).nbytes == LEAST_BYTES
    memory.limit(8 * LEAST_BYTES)
    kept.append(memory.allocate((LEAST_BYTES,), torch.uint8))
    assert memory.held_bytes == 3 * LEAST_BYTES


class Server:
    """A fork server that only knows whether it has ended."""

    def __init__(self) -> None:
        self.has_ended = threading.Event()

    def is_alive(self) -> bool:
        return not self.has_ended.is_set()

    def close(self) -> None:
        self.has_ended.set()


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedServer]:
    monkeypatch.setattr(fork_server, "ForkServer", Server)
    monkeypatch.setattr(fork_server.atexit, "register", lambda _: None)
    shared = SharedServer()
    yield shared
    shared.close()


@pytest.mark.parametrize("linger_s", [3600.0, None])
def test_the_next_loader_finds_the_server_of_the_last_one(shared: SharedServer, linger_s: float | None) -> None:
    shared.linger_s = linger_s
    one = shared.borrow()
    assert shared.give_back(one), "it is still there"
    for _ in range(2):
        assert shared.borrow() is one
        assert shared._lingering is None, "nothing ends it while it has a user"
        assert shared.give_back(one)
    assert (shared._lingering is None) == (linger_s is None)
    shared._exit()
    assert not one.is_alive(), "it ends with the process"
    last = shared.borrow()
    assert not shared.give_back(last)
    assert not last.is_alive()


def no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def end_later(shared: SharedServer, _: pytest.MonkeyPatch) -> None:
    shared.linger_s = 0.001


def end_now(shared: SharedServer, _: pytest.MonkeyPatch) -> None:
    shared.linger_s = 0


def end_without_a_thread(shared: SharedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    shared.linger_s = 3600.0
    monkeypatch.setattr(threading.Thread, "start", no_thread)


@pytest.mark.parametrize("how", [end_later, end_now, end_without_a_thread])
def test_a_server_that_nobody_uses_ends(
    shared: SharedServer, how: Callable[[SharedServer, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    how(shared, monkeypatch)
    first: Any = shared.borrow()
    shared.borrow()
    shared.give_back(first)
    assert first.is_alive(), "it has another user"
    shared.give_back(first)
    monkeypatch.undo()
    until(lambda: not first.is_alive(), "the server has ended")
    assert shared._server is None


def test_a_timer_that_was_too_late_ends_no_server(shared: SharedServer) -> None:
    shared.linger_s = 3600.0
    one = shared.borrow()
    shared.give_back(one)
    timer = shared._lingering
    assert timer is not None
    shared.borrow()
    shared.give_back(one)
    timer.function()
    assert one.is_alive(), "another one has begun to wait since"


def test_cv2_leaves_the_library_path_of_other_programs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def imported(_: str) -> None:
        images.os.environ["LD_LIBRARY_PATH"] = "/somewhere"

    monkeypatch.setattr(images.importlib, "import_module", imported)
    for before in (None, "/mine"):
        if before is None:
            monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
        else:
            monkeypatch.setenv("LD_LIBRARY_PATH", before)
        images.opencv.__wrapped__()
        assert images.os.environ.get("LD_LIBRARY_PATH") == before
