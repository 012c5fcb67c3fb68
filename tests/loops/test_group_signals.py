"""Signals that reach all processes of a job, as SLURM sends them before it takes the machine, are for the job alone.

Its worker processes, their fork server and the tracker of semaphores go on until it ends, and end with it.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from shard_tools import ShardWriter
from streaming.common.forks import JOB_SIGNALS
from tests.support.code.folders import PROGRAMS
from tests.support.processes.forked import Forked, ForkedProcess
from tests.support.processes.waiting import PATIENCE_S, until
from tests.support.programs.signalled_rank import NUM_SAMPLES
from tests.support.tiers import first_here

PROGRAM = PROGRAMS / "signalled_rank.py"
SCHEDULERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU)
KINDS = ("shards", "map", "iterable", "dispatch")
Start = Callable[..., ForkedProcess]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("signalled")
    with ShardWriter(f"{folder}/{{:02d}}.tar", max_samples=16) as writer:
        for number in range(NUM_SAMPLES):
            writer.write({"__key__": f"{number:03d}", "cls": b"1"})
    return str(folder)


def given(url: str, folder: Path, **changed: Any) -> str:
    found = {"kind": "map", "num_workers": 2, "ready": True, "stands": False, "sharing_strategy": "file_descriptor"}
    return json.dumps({**found, "url": url, "folder": str(folder), "signals": SCHEDULERS, **changed})


def check(folder: Path, output: Path, signals: tuple[int, ...] = SCHEDULERS, num_ranks: int = 1) -> None:
    """All signals were heard, by the job alone, and every sample came; nothing was said about it."""
    told = output.read_text()
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]
    for rank in found:
        assert rank["heard"] == sorted(signals)
        assert not any(rank["ended_by"].values()), rank["ended_by"]
    for epoch in range(2):
        assert sorted(number for rank in found for number in rank["epochs"][epoch]) == list(range(NUM_SAMPLES)), told
    for word in ("Traceback", "Error", "exited", "died", "unexpected", "a run has ended", "resource_tracker"):
        assert word not in told, told


def runs(process: psutil.Process) -> bool:
    """Whether it has not ended, even if nobody has asked yet how it did."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", first_here([2, 1, 0], 1))
@pytest.mark.parametrize("kind", KINDS)
def test_a_job_goes_on_that_handles_them(forked: Forked, url: str, tmp_path: Path, kind: str, num_workers: int) -> None:
    asked = given(url, tmp_path, kind=kind, num_workers=num_workers)
    job = forked.start(PROGRAM, asked, output=tmp_path / "output", leads=True)
    assert job.wait_for_all() == 0, job.output.read_text()
    check(tmp_path, job.output)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [*SCHEDULERS, signal.SIGQUIT, signal.SIGALRM, signal.SIGRTMIN + 3])
def test_each_alone(forked: Forked, url: str, tmp_path: Path, kind: str, number: int) -> None:
    asked = given(url, tmp_path, kind=kind, signals=[number])
    job = forked.start(PROGRAM, asked, output=tmp_path / "output", leads=True)
    assert job.wait_for_all() == 0, job.output.read_text()
    check(tmp_path, job.output, (number,))


@pytest.mark.thorough
@pytest.mark.parametrize("sharing_strategy", ["file_descriptor", "file_system"])
@pytest.mark.parametrize("kind", KINDS)
def test_while_a_true_server_starts(forked: Forked, url: str, tmp_path: Path, kind: str, sharing_strategy: str) -> None:
    """The first signals come as soon as there is any process of ours, which imports for seconds."""
    asked = given(url, tmp_path, kind=kind, ready=False, sharing_strategy=sharing_strategy)
    job = forked.start(PROGRAM, asked, output=tmp_path / "output", leads=True)
    assert job.wait_for_all() == 0, job.output.read_text()
    check(tmp_path, job.output)


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["shards", "map", "dispatch"])
def test_under_torchrun(forked: Forked, url: str, tmp_path: Path, kind: str) -> None:
    """Each rank leads a group of its own, which gets them."""
    words = ["--standalone", "--nproc-per-node", "2", str(PROGRAM), given(url, tmp_path, kind=kind, ready=False)]
    agent = forked.start(
        "from torch.distributed.run import main; main()", *words, output=tmp_path / "output", leads=True
    )
    assert agent.wait_for_all() == 0, agent.output.read_text()
    check(tmp_path, agent.output, num_ranks=2)


@pytest.mark.thorough
@pytest.mark.parametrize("end", first_here([signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1], 1))
@pytest.mark.parametrize("kind", first_here(KINDS[:3], 2))
def test_what_ends_the_job_ends_what_it_has_started(
    forked: Forked, url: str, tmp_path: Path, kind: str, end: signal.Signals
) -> None:
    """Whatever they did not heed before; SIGKILL reaches the job alone, and what it does not handle the whole group."""
    handled = [number for number in SCHEDULERS if number != end]
    asked = given(url, tmp_path, kind=kind, signals=handled, stands=True)
    (tmp_path / "output").touch()
    job = forked.start(PROGRAM, asked, output=tmp_path / "output", leads=True)
    told = until(lambda: '"pids"' in job.output.read_text() or job.poll(), "it stands", details=job.output.read_text)
    assert told is True, job.output.read_text()
    (line,) = [line for line in job.output.read_text().splitlines() if '"pids"' in line]
    processes = [psutil.Process(pid) for pid in json.loads(line)["pids"]]
    assert len(processes) >= 3
    if end == signal.SIGKILL:
        os.kill(job.pid, end)
    else:
        os.killpg(job.pid, end)
    assert job.wait(PATIENCE_S) == -end
    until(lambda: not any(map(runs, processes)), "what it has started ends")


def test_signals_of_a_job_are_those_that_end_a_process_and_are_no_fault() -> None:
    assert set(SCHEDULERS) <= JOB_SIGNALS
    assert not JOB_SIGNALS & {signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGABRT, signal.SIGCHLD}
