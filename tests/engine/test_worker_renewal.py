"""Worker processes begin again only if something has changed, and none of the earlier ones serves after that."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shard_tools import ShardWriter
from streaming import DataLoader, Packed, StreamingDataset
from streaming.run.engine.memory.arena import Arena
from streaming.run.engine.workers.portable import dumps, fingerprint
from streaming.run.engine.workers.processes import Processes, Worker
from tests.support.contracts.option_kinds import KINDS, Places, run
from tests.support.processes.waiting import until
from tests.support.tiers import first_here

pytestmark = pytest.mark.usefixtures("one_fork_server")

IMAGE = 7


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    return Places.write(tmp_path_factory.mktemp("sets"))


@pytest.mark.parametrize("late", [0, 1])
def test_a_worker_that_comes_up_during_a_renewal_serves_nobody(monkeypatch: pytest.MonkeyPatch, late: int) -> None:
    """It says hello while the others are ended. Later it would be taken, and die once more, without a place."""
    let_go, met = threading.Event(), threading.Event()
    meet, retire = Processes._meet, Processes.retire
    earlier = set[int]()

    def meet_late(self: Processes, worker: Worker) -> None:
        if worker.place == late and len(earlier) < 2:
            let_go.wait(3600)
            meet(self, worker)
            met.set()
        else:
            meet(self, worker)

    def retire_slowly(self: Processes, worker: Worker) -> None:
        if worker.place != late:
            retire(self, worker)
        let_go.set()
        met.wait(3600)
        if worker.place == late:
            retire(self, worker)

    monkeypatch.setattr(Processes, "_meet", meet_late)
    arena = Arena(1 << 20)
    pool = Processes(2, dumps(None), arena.fd, len(arena.memory))
    try:
        pool.start()
        until(lambda: pool.num_up() == 1, "one of two is up")
        earlier = {worker.number for worker in pool.all()}
        monkeypatch.setattr(Processes, "retire", retire_slowly)
        pool.renew(dumps(None))
        taken = [worker for worker in (pool.take(), pool.take()) if worker is not None]
        numbers = {worker.number for worker in taken}
        for worker in taken:
            pool.give_back(worker)
        assert len(numbers - earlier) == 2
    finally:
        let_go.set()
        pool.close()
        arena.close()


def carried(folder: Path) -> Packed:
    """Packs of documents with a value for each of their placeholders."""
    with ShardWriter(f"{folder}/{{:06d}}.tar", max_samples=12, columns={"tokens": lambda _: 8}) as writer:
        for number in range(24):
            tokens = np.full(8, 100 + number, "<u2")
            tokens[:2] = IMAGE
            writer.write({"__key__": f"{number:05d}", "tok": tokens.tobytes(), "bin": bytes(1 + number % 9)})
    return Packed(StreamingDataset(folder), 24, carry=("bin",), placeholder=IMAGE)


@pytest.mark.parametrize(
    "kind", first_here([*(name for name, one in KINDS.items() if one.is_streamed and name != "remote"), "carried"], 5)
)
def test_what_a_run_remembers_changes_nothing_that_workers_have(places: Places, tmp_path: Path, kind: str) -> None:
    """A recipe that looked changed after a run would end all processes at each epoch's start."""
    prints = list[bytes]()

    def note(loader: DataLoader, _: Any = None) -> None:
        prints.append(fingerprint(replace(loader._loop.config.recipe)))  # as a pool does

    if kind == "carried":
        with DataLoader(carried(tmp_path), batch_size=2, num_threads=0) as loader:
            note(loader)
            assert len(list(loader)) == 4
            note(loader)
    else:
        for epochs in (0, 2):
            found = run(kind, places, {}, note, epochs)
            assert found.error is None
            assert bool(found.batches) == bool(epochs)
    before, after = prints
    assert before == after
