"""Hold worker processes back while they start, so that this process builds the first batches of a loader."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from streaming import DataLoader
from streaming.run.engine.workers.processes import Processes, Worker
from tests.support.processes.waiting import is_timed, started, until


class Held:
    """Worker processes start, but say nothing until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.let_go = threading.Event()
        meet = Processes._meet

        def wait_and_meet(processes: Processes, worker: Worker) -> None:
            self.let_go.wait(3600)
            meet(processes, worker)

        monkeypatch.setattr(Processes, "_meet", wait_and_meet)

    def first(self, batches: Iterator[Any], count: int) -> list[Any]:
        """The first batches, built without a process."""
        self.let_go.clear()
        return [next(batches) for _ in range(count)]

    def let_go_when_somebody_waits(self) -> None:
        """Let processes go once a consumer waits for a batch that it does not build itself."""

        def let_go() -> None:
            until(lambda: is_timed("wait_for_build_s"), "a consumer waits")
            self.let_go.set()

        started(let_go)

    def rest(self, loader: DataLoader, batches: Iterator[Any]) -> list[Any]:
        """The rest, once a process is up."""
        self.let_go.set()
        if loader.batches_left < len(loader):
            until(pool_of(loader).is_up, "a process is up")
        return list(batches)


def pool_of(loader: Any) -> Any:
    """The pool of a loader's worker processes."""
    return loader._loop._machinery.crew.builder._pool
