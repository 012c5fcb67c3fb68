"""A training process is ended in every state: it is gone soon, with its children, and leaves no file."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.code.folders import PROGRAMS, ROOT
from tests.support.processes.hanging_functions import Hung
from tests.support.processes.waiting import PATIENCE_S
from tests.support.servers.fault_proxy import Fault, FaultProxy
from tests.support.servers.on_loopback import MiniS3Server, fresh_name
from tests.support.sets.data_sets import SampleSet, write_set
from tests.support.tiers import first_here

TRUE_SERVERS = {"SIGINT", "SIGKILL"}
"""How processes with the state "workers" end whose fork server is an interpreter of its own; others fork it."""
ENDED_BY = {"return": 0, "sys.exit": 3, "os._exit": 4, "SIGINT": -signal.SIGINT, "SIGKILL": -signal.SIGKILL}


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Where a process is when it is ended.

    Attributes:
        options: Of ``shutdown_run.train``.
        silent: Whether the store gives no answer.
        waits: Whether the main thread waits for a batch, else it is between two.
        left: How the names of threads begin that nobody can end: they are in a user's function, or wait for the store.
    """

    options: dict[str, Any]
    silent: bool = False
    waits: bool = True
    left: tuple[str, ...] = ()


STORE = ("shardstream-fetch", "shardstream-request")
BUILD = ("shardstream-build",)
WAITING = {
    "the-first-batch": State(options={}, silent=True, left=STORE),
    "the-first-batch-streamed": State(options={"streamed": True}, silent=True, left=("shardstream-",)),
    "the-first-batch-prefetched": State(options={"prefetch": True}, silent=True, left=STORE),
    "the-consumer-hangs": State(options={"transform": "hangs", "num_threads": 0}),
    "a-builder-hangs": State(options={"transform": "hangs", "num_threads": 2}, left=BUILD),
    "a-worker-hangs": State(options={"transform": "hangs", "num_workers": 2, "num_threads": 0}),
    "a-worker-computes": State(options={"transform": "computes", "num_workers": 1, "num_threads": 0}),
}
BETWEEN = {
    "threads": State(options={}, waits=False),
    "threads-prefetched": State(options={"prefetch": True}, waits=False),
    "threads-streamed": State(options={"streamed": True}, waits=False),
    "workers": State(options={"num_workers": 2}, waits=False),
    "a-thread-hangs": State(options={"transform": "hangs", "num_threads": 2}, waits=False, left=BUILD),
    "a-worker-hangs-prefetched": State(
        options={"transform": "hangs", "num_workers": 2, "num_threads": 0, "prefetch": True}, waits=False
    ),
}  # fmt: skip


Sets = dict[bool, SampleSet]
"""Without and with an index."""


def write_sets(folder: str, storage_options: Mapping[str, Any] | None = None) -> Sets:
    return {
        indexed: write_set(f"{folder}/{indexed}", (80, 80), indexed=indexed, storage_options=storage_options)
        for indexed in (False, True)
    }


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Sets:
    return write_sets(str(tmp_path_factory.mktemp("shutdown")))


@dataclass(slots=True)
class SilentStore:
    """An S3 server that answers everything but requests for shards.

    Attributes:
        options: To read it with.
        sets: What is in it.
        asked: Set when somebody asked for a shard.
    """

    options: dict[str, Any]
    sets: Sets
    asked: threading.Event


@pytest.fixture(scope="module")
def silent_store(mini_s3: MiniS3Server) -> Iterator[SilentStore]:
    def choose(method: str, path: str, span: str | None) -> Fault | None:
        if method != "GET" or not path.partition("?")[0].endswith(".tar"):
            return None
        asked.set()
        return Fault(kind="silent")

    asked, options = threading.Event(), mini_s3.storage_options
    sets = write_sets(mini_s3.create_bucket(fresh_name()), options)
    for_hours = {"read_timeout_s": 7200.0, "deadline_s": 7200.0}  # who waits for it is not gone in time
    with FaultProxy(mini_s3.port, choose=choose) as proxy:
        yield SilentStore({**options, **for_hours, "endpoint_url": proxy.url}, sets, asked)


@dataclass(slots=True)
class Trainer:
    """Forks processes that train.

    Attributes:
        temporary: Their folder for temporary files.
    """

    process: subprocess.Popen[str]
    temporary: Path

    def start(self, **arguments: Any) -> int:
        """The pid."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(arguments) + "\n")
        self.process.stdin.flush()
        return int(self._line())

    def code(self) -> int:
        """How it has ended; waits for that."""
        return int(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    temporary = tmp_path_factory.mktemp("temporary")
    with subprocess.Popen(
        [sys.executable, str(PROGRAMS / "shutdown_run.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)},
    ) as process:  # fmt: skip
        yield Trainer(process, temporary)
        assert process.stdin is not None
        process.stdin.close()


@dataclass(slots=True, kw_only=True)
class Play:
    """One process from its start to its end."""

    local: Sets
    silent_store: SilentStore
    trainer: Trainer
    folder: Path

    def ended(self, state: State, end: str) -> list[str]:
        """What it printed. It is gone, and all its children, and no file is left; this is checked, as its exit code."""
        hung = Hung(self.folder)
        for name in ("go", "stands"):
            os.mkfifo(self.folder / name)
        self.silent_store.asked.clear()
        sets = self.silent_store.sets if state.silent else self.local
        pid = self.trainer.start(
            url=sets["streamed" not in state.options].url, storage=self.silent_store.options,
            folder=str(self.folder), end="" if state.waits else end, **state.options,
            ready=state is not BETWEEN["workers"] or end not in TRUE_SERVERS,
        )  # fmt: skip
        try:
            self._end(pid, hung, state, end)
        finally:
            with suppress(psutil.NoSuchProcess):  # that is as it should be
                psutil.Process(pid).kill()
                self.trainer.code()
        hung.close()
        assert os.listdir(self.trainer.temporary) == []
        assert not [name for name in os.listdir("/dev/shm") if "shardstream" in name]
        return (self.folder / "output").read_text().splitlines()

    def _until_it_stands(self) -> None:
        """Until the main thread does; what it told before is of no interest."""
        stands = os.open(self.folder / "stands", os.O_RDWR | os.O_NONBLOCK)
        with suppress(BlockingIOError):
            os.read(stands, 1 << 16)
        for _ in range(2):  # the first may have been on its way
            assert select.select([stands], [], [], PATIENCE_S)[0]
            os.read(stands, 1)
        os.close(stands)

    def _end(self, pid: int, hung: Hung, state: State, end: str) -> None:
        if state.silent:
            assert self.silent_store.asked.wait(PATIENCE_S)
        else:
            hung.wait()
        self._until_it_stands()
        children = psutil.Process(pid).children(recursive=True)
        assert bool(children) == ("num_workers" in state.options)
        if end.startswith("SIG"):
            os.kill(pid, signal.Signals[end])
        else:
            (self.folder / "go").write_bytes(b"!")
        assert self.trainer.code() == ENDED_BY[end]
        assert psutil.wait_procs(children, PATIENCE_S)[1] == []


@pytest.fixture
def play(local: Sets, silent_store: SilentStore, trainer: Trainer, tmp_path: Path) -> Play:
    return Play(local=local, silent_store=silent_store, trainer=trainer, folder=tmp_path)


def check(lines: list[str], state: State) -> None:
    """Only threads live that nobody can end; if they are in a user's function, one warning names it. That is all."""
    left = [line.removeprefix("left: ") for line in lines if line.startswith("left: ")]
    assert [name for name in left if not name.startswith(state.left)] == []
    assert bool(left) == bool(state.left)
    told = [line for line in lines if not line.startswith("left: ")]
    if state.left == BUILD:
        (warning,) = told
        assert warning.startswith(
            "a run has ended, but a function that it called has not returned: thread shardstream-"
        )
        assert "hanging_functions.py:" in warning
    else:
        assert told == []


STATES = {**WAITING, **BETWEEN}


@pytest.mark.thorough
@pytest.mark.parametrize("name", STATES)
def test_interrupted_process_ends_with_one_traceback(play: Play, name: str) -> None:
    lines = play.ended(STATES[name], "SIGINT")
    begin, end = lines.index("Traceback (most recent call last):"), lines.index("KeyboardInterrupt")
    assert all(line.startswith("  ") for line in lines[begin + 1 : end]), "no other exception on the way"
    check(lines[:begin] + lines[end + 1 :], STATES[name])


@pytest.mark.thorough
@pytest.mark.parametrize("name", first_here(sorted(STATES, key="workers".__ne__), 1))
def test_killed_process_leaves_nothing(play: Play, name: str) -> None:
    assert play.ended(STATES[name], "SIGKILL") == []


@pytest.mark.thorough
@pytest.mark.parametrize("end", ["return", "sys.exit"])
@pytest.mark.parametrize("name", BETWEEN)
def test_the_interpreter_ends(play: Play, name: str, end: str) -> None:
    """In the middle of a loop. Threads are joined before it takes them away, with the locks that they hold."""
    check(play.ended(BETWEEN[name], end), BETWEEN[name])


@pytest.mark.thorough
def test_the_process_ends_at_once(play: Play) -> None:
    assert play.ended(BETWEEN["workers"], "os._exit") == []
