"""What goes wrong in torch's worker processes arrives as an error that says why: nobody waits for a batch in vain."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from streaming import DataLoader, OrdinaryDataset, StreamingDataset
from streaming.errors import ConfigError, ShardstreamError, WorkerDiedError, WorkerError
from tests.support.processes.forked import Forked
from tests.support.processes.waiting import PATIENCE_S
from tests.support.sets.data_sets import write_set
from tests.support.tiers import first_here

pytestmark = pytest.mark.usefixtures("one_fork_server")

KINDS = ("map", "iterable", "dispatch")
Sample = Callable[[int], Any]


class Mapped(Dataset[Any]):
    def __init__(self, sample: Sample) -> None:
        self.sample = sample

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return self.sample(index)


class Iterated(IterableDataset[Any]):
    def __init__(self, sample: Sample) -> None:
        self.sample = sample

    def __iter__(self) -> Iterator[Any]:
        yield from map(self.sample, range(16))


def as_it_is(samples: list[Any]) -> list[Any]:
    return samples


def read(kind: str, sample: Sample, **options: Any) -> list[Any]:
    dataset = Mapped(sample) if kind == "map" else Iterated(sample)
    own = OrdinaryDataset(dataset, sharding="dispatch" if kind == "dispatch" else None,
                          worker_init_fn=options.pop("worker_init_fn", None))  # fmt: skip
    with DataLoader(own, 4, **{"num_workers": 2, "collate_fn": as_it_is, **options}) as loader:
        return list(loader)


def cause_of(kind: str, sample: Sample, **options: Any) -> ShardstreamError:
    with pytest.raises(ShardstreamError) as caught:
        read(kind, sample, **options)
    return caught.value


class Stubborn:
    def __reduce__(self) -> Any:
        raise ZeroDivisionError("not today")


class RaisesWhatCannotBeSent:
    def __reduce__(self) -> Any:
        class LocalError(Exception):
            lock = threading.Lock()

        raise LocalError("of a class that nobody else has")


NOT_PICKLED: dict[str, tuple[Sample, str]] = {
    "lock": (lambda _: threading.Lock(), r"TypeError: cannot pickle '_thread.lock' object\. The data set"),
    "lambda": (lambda number: {"f": lambda: number}, "cannot be pickled: return tensors, arrays, numbers and text"),
    "own error": (lambda _: [Stubborn()], "ZeroDivisionError: not today"),
    "an error that cannot be sent": (lambda _: RaisesWhatCannotBeSent(), "LocalError: of a class that nobody else"),
    "only the last": (lambda number: threading.Lock() if number == 15 else number, "cannot pickle"),
}


@pytest.mark.parametrize("name", NOT_PICKLED)
@pytest.mark.parametrize("kind", first_here(KINDS, 1))
def test_a_batch_that_cannot_be_pickled(kind: str, name: str) -> None:
    sample, said = NOT_PICKLED[name]
    error = cause_of(kind, sample)
    assert type(error) is WorkerError
    assert str(error).startswith("a worker process cannot send its batch: ")
    with pytest.raises(WorkerError, match=said):
        raise error


def tensor(number: int) -> torch.Tensor:
    return torch.full((5000,), float(number))


PROGRAM = """
import ctypes, subprocess, sys
from tests.torch_datasets.test_worker_causes import read, tensor
from tests.support.processes.ready_server import have_a_server
kind, collates, shm = sys.argv[1:]
if shm:
    assert ctypes.CDLL(None).unshare(0x00020000) == 0  # mounts of its own
    subprocess.check_call(f"mount --make-rprivate / && mount -t tmpfs -o size={shm} tmpfs /dev/shm", shell=True)
have_a_server()
try:
    read(kind, tensor, **({} if collates == "ours" else {"collate_fn": None}))
except (RuntimeError, OSError) as error:
    print(type(error).__name__, error, *getattr(error, "__notes__", []))
"""


def told_under(forked: Forked, folder: Path, *arguments: str, **environ: str) -> str:
    """What is said where the system is short of something."""
    job = forked.start(PROGRAM, *arguments, output=folder / "output", environ=environ, leads=True)
    assert job.wait(PATIENCE_S) == 0, job.output.read_text()
    return job.output.read_text()


@pytest.mark.parametrize("kind", first_here(KINDS, 2))
def test_a_long_path_of_temporary_files(forked: Forked, kind: str, tmp_path: Path) -> None:
    long = tmp_path / ("long" * 20)
    long.mkdir()
    told = told_under(forked, tmp_path, kind, "ours", "", TMPDIR=str(long))
    assert f"AF_UNIX path too long. TMPDIR ({long}, {len(str(long))} characters)" in told
    assert "export TMPDIR=/tmp" in told
    assert os.listdir(long) == []
    (tmp_path / "output").unlink()
    assert "Error" not in told_under(forked, tmp_path, kind, "ours", "", TMPDIR="/tmp")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount another /dev/shm")
@pytest.mark.parametrize(("collates", "shm"), first_here([
    pytest.param("ours", "64k"), pytest.param("torch", "64k"), pytest.param("ours", "16k"),
], 1))  # fmt: skip
@pytest.mark.parametrize("kind", first_here(KINDS, 1))
def test_shared_memory_is_full(forked: Forked, tmp_path: Path, kind: str, collates: str, shm: str) -> None:
    """For batches, or even for the locks of queues."""
    told = told_under(forked, tmp_path, kind, collates, shm)
    assert "No space left on device" in told
    assert "/dev/shm, through which batches go, is full: docker run --shm-size=8g" in told
    assert "different sizes" not in told
    assert "cannot be pickled" not in told


# --- ends ---


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch looks for dead workers every five seconds."""
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))


ENDS: dict[str, tuple[Callable[[], object], str]] = {
    "SIGKILL": (lambda: os.kill(os.getpid(), signal.SIGKILL), r"was killed by SIGKILL.*lower num_workers"),
    "SIGBUS": (lambda: os.kill(os.getpid(), signal.SIGBUS), r"was killed by SIGBUS.*SIGBUS, /dev/shm is full"),
    "exit": (lambda: os._exit(7), r"exited with code 7.*num_workers=0 shows where"),
}


def at_five(end: Callable[[], object], number: int) -> int:
    if number == 5:
        end()
    return number


@pytest.mark.usefixtures("looks_often")
@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("kind", first_here(KINDS, 1))
def test_a_worker_process_ends(kind: str, name: str) -> None:
    end, said = ENDS[name]
    with pytest.raises(WorkerDiedError, match=said) as caught:
        raise cause_of(kind, partial(at_five, end))
    assert "exited unexpectedly" in str(caught.value.__cause__)


class Elsewhere:
    """Loads here only."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    def __call__(self, number: int) -> int:
        return number

    def __reduce__(self) -> Any:
        return loaded, (self.pid,)


def loaded(pid: int) -> Elsewhere:
    if os.getpid() != pid:
        raise ModuleNotFoundError("No module named 'plugins_of_mine'")
    return Elsewhere()


@pytest.mark.usefixtures("looks_often")
@pytest.mark.parametrize("kind", first_here(KINDS, 1))
def test_a_set_does_not_load(kind: str) -> None:
    error = cause_of(kind, Elsewhere())
    assert type(error) is ConfigError
    assert "does not load in a worker process: ModuleNotFoundError: No module named 'plugins_of_mine'" in str(error)
    assert "in worker process" in error.__cause__.__notes__[0]  # type: ignore[union-attr]


# --- what the script sets ---


def strategy(_: int) -> str:
    return torch.multiprocessing.get_sharing_strategy()


@pytest.mark.parametrize("chosen", ["file_system", "file_descriptor"])
@pytest.mark.parametrize("kind", first_here(KINDS, 1))
def test_workers_share_tensors_as_the_script_says(kind: str, chosen: str) -> None:
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(chosen)
    try:
        assert {one for batch in read(kind, strategy) for one in batch} == {chosen}
        assert len(read(kind, tensor)) == 4
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def ends_of_children(_: int) -> tuple[int, int]:
    """How a program and a fork end that get SIGTERM."""
    program = subprocess.Popen(["sleep", "3600"])
    program.terminate()
    pid = os.fork()
    if not pid:
        signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    return program.wait(), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("kind", first_here(KINDS, 1))
def test_what_a_function_starts_ends_at_signals_as_elsewhere(kind: str) -> None:
    """Though its worker process does not: ``terminate`` and ``wait`` would take forever."""
    assert {one for batch in read(kind, ends_of_children) for one in batch} == {(-signal.SIGTERM, -signal.SIGTERM)}


def test_what_a_transform_starts_does_so_too(tmp_path: Path) -> None:
    url = write_set(tmp_path, (8,)).url
    dataset = StreamingDataset(url, transform=lambda _: {"ends": ends_of_children(0)})
    with DataLoader(dataset, 4, num_workers=1, num_threads=0) as loader:
        ends = [end for batch in loader for end in batch["ends"]]
    assert np.unique(np.array(ends)).tolist() == [-signal.SIGTERM]
