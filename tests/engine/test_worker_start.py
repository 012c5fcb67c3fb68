"""While the first worker processes start, which takes seconds, batches come all the same."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from shard_tools import ShardWriter
from streaming import DataLoader, StreamingDataset
from streaming.engine.workers.fork_server import ForkServer

pytestmark = pytest.mark.usefixtures("one_fork_server")  # that it starts is said by each test itself


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    with ShardWriter(f"{tmp_path}/{{:02d}}.tar", max_samples=20) as writer:
        for number in range(80):
            writer.write({"__key__": f"{number:03d}", "json": {"number": number}})
    return tmp_path


def test_batches_do_not_wait_for_processes_that_start(numbers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads build what needs no code of the user, until the fork server has imported what workers need."""
    starting = True
    monkeypatch.setattr(ForkServer, "is_starting", lambda _: starting)
    with DataLoader(StreamingDataset(numbers), batch_size=4) as loader:
        expected = list(loader)
    with DataLoader(StreamingDataset(numbers), batch_size=4, num_workers=1) as loader:
        batches = iter(loader)
        found = [next(batches) for _ in range(5)]
        assert pids(loader) == []
        starting = False
        found += batches
        assert len(pids(loader)) == 1
        del batches
    assert [batch["json"] for batch in found] == [batch["json"] for batch in expected]
    assert [batch["__key__"] for batch in found] == [batch["__key__"] for batch in expected]


def test_the_users_code_waits_for_processes(numbers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have reasons to want one, and draws its random numbers there."""
    monkeypatch.setattr(ForkServer, "is_starting", lambda _: True)

    def where(sample: dict[str, Any]) -> dict[str, Any]:
        return {"pid": os.getpid()}

    for options in ({"transform": where}, {"decode": {"json": lambda _: os.getpid()}}):
        with DataLoader(StreamingDataset(numbers, **options), batch_size=4, num_workers=1) as loader:  # type: ignore[arg-type]
            found = {int(pid) for batch in loader for pid in batch.get("pid", batch.get("json"))}
            assert found == set(pids(loader))
            assert os.getpid() not in found


def pids(loader: DataLoader) -> list[int]:
    return loader._loop._machinery.crew.builder._pool.pids
