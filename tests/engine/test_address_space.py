"""Where the address space is limited (``ulimit -v``): a small set reserves little, and a refusal names the cure."""

from __future__ import annotations

import errno
import re
import threading
from pathlib import Path
from typing import NoReturn

import pytest

from streaming import DataLoader
from streaming.errors import MemoryLimitError
from streaming.run.engine.memory import arena
from streaming.run.engine.memory.arena import Arena
from tests.support.processes.forked import Forked
from tests.support.sets.data_sets import SampleSet, write_set

SCRIPT = """
import resource, sys
from streaming import DataLoader, StreamingDataset
dataset = StreamingDataset(sys.argv[1])
with DataLoader(dataset, batch_size=8, num_workers=0, num_threads=1) as loader:
    reserved = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (reserved + (1 << 30), resource.RLIM_INFINITY))
    print(sum(len(batch["__key__"]) for batch in loader))
"""


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    return write_set(tmp_path_factory.mktemp("samples"), (64,))


def test_a_small_set_reserves_no_more_than_it_needs(samples: SampleSet, forked: Forked, tmp_path: Path) -> None:
    """With the default memory_limit of 4 GiB, and 1 GiB of address space left."""
    output = tmp_path / "output"
    assert forked.start(SCRIPT, samples.url, output=output).wait() == 0, output.read_text()
    assert int(output.read_text()) == 64


@pytest.mark.parametrize("shared", [False, True])
def test_a_limited_address_space_gets_a_smaller_reserve(monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    def limited(fd: int, length: int, **options: int) -> object:
        if length > most:
            raise OSError(12, "Cannot allocate memory")
        return original(fd, length, **options)

    original, most = arena.mmap.mmap, 3 << 20
    monkeypatch.setattr(arena.mmap, "mmap", limited)
    made = Arena(2 << 20, shared=shared)
    try:
        start = made.allocate(2 << 20)
        assert start is not None
        made.free(start, 2 << 20)
        assert made.allocate(1 << 20) is not None
    finally:
        made.close()
    with pytest.raises(MemoryLimitError, match=r"ulimit -v.*Lower memory_limit"):
        Arena(4 << 20, shared=shared)


def test_freed_memory_is_kept_only_where_there_is_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It only saves time; under ``ulimit -v 2000000`` it ended the first epoch."""

    def full(*_: object) -> NoReturn:
        raise MemoryError

    monkeypatch.setattr(arena.np, "empty", full)
    arena.keep_freed_memory.__wrapped__()


@pytest.mark.parametrize(
    ("error", "cure"),
    [
        (RuntimeError("can't start new thread"), r"ulimit -u.*num_threads=0"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), r"ulimit -v.*lower memory_limit"),
    ],
)
def test_what_the_system_refuses_comes_with_a_cure(
    samples: SampleSet, monkeypatch: pytest.MonkeyPatch, error: Exception, cure: str
) -> None:
    def refused(thread: threading.Thread) -> NoReturn:
        raise error

    with DataLoader(samples.open(), batch_size=8, num_threads=1) as loader:
        batches = iter(loader)
        monkeypatch.setattr(threading.Thread, "start", refused)
        with pytest.raises(type(error)) as caught:
            next(batches)
        monkeypatch.undo()
    (note,) = caught.value.__notes__
    assert re.search(cure, note)
