"""``remesh`` in processes that die by SIGKILL and that join: nothing is lost, nothing comes twice; docs/remesh.md runs.

The normal run changes the world 16 times; ``--torture-changes`` (``make torture``) as often as you like. All that is
random is drawn from ``--torture-seed``.
"""

from __future__ import annotations

import json
import random
import socket
import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self

import pytest
import torch.distributed as dist

from streaming import DataLoader
from tests.support.code.folders import PROGRAMS
from tests.support.processes.forked import Forked, ForkedProcess, all_end
from tests.support.programs.remesh_rank import GLOBAL_BATCH, open_set
from tests.support.servers.on_loopback import MiniS3Server
from tests.support.sets.data_sets import Batches, mesh_of, valid_keys, write_set

pytestmark = pytest.mark.thorough

RANK = PROGRAMS / "remesh_rank.py"
MOST_RANKS = 6
_WAIT_S = 120.0
_distributed: Any = dist


@pytest.fixture(scope="module")
def urls(mini_s3: MiniS3Server) -> dict[str, str]:
    """Two sets of 202 and 87 samples, in a bucket."""
    bucket = mini_s3.create_bucket("remesh")
    write_set(f"{bucket}/a", storage_options=mini_s3.storage_options)
    write_set(f"{bucket}/b", (30, 17, 40), storage_options=mini_s3.storage_options, first=1000)
    return {"a": f"{bucket}/a/", "b": f"{bucket}/b/"}


@dataclass(slots=True, kw_only=True)
class Rank:
    """A process that does what it is told."""

    process: ForkedProcess
    connection: socket.socket
    lines: IO[str]
    has_trained: bool = False

    def ask(self, **job: Any) -> None:
        print(json.dumps(job), file=self.lines, flush=True)

    def answer(self) -> dict[str, Any]:
        said: dict[str, Any] = json.loads(self.lines.readline() or "null") or {}
        assert said, self.process.output.read_text()[-4000:]
        return said

    def end(self) -> None:
        """SIGKILL, in the middle of whatever it does."""
        self.process.kill()
        self.lines.close()
        self.connection.close()
        self.process.wait()


@dataclass(slots=True, kw_only=True)
class Job:
    """A job whose world changes: what all its ranks have committed, and how long the first batches took."""

    forked: Forked
    made: dict[str, Any]
    folder: Path
    dice: random.Random
    ranks: list[Rank] = field(default_factory=list)
    committed: Batches = field(default_factory=list)
    state: dict[str, Any] | None = None
    waits_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    kills: int = 0
    joined: int = 0

    def change(self) -> None:
        """Let some ranks die, in the middle of a step that nobody commits, and others come; then commit some steps."""
        dice = self.dice
        for rank in self.ranks:
            rank.ask(batches=dice.randint(0, 2))  # ahead of what is committed; some die while they read
        dice.shuffle(self.ranks)
        dead = [self.ranks.pop() for _ in range(min(len(self.ranks), dice.choice((0, 1, 1, 1, 2, 6))))]
        for rank in dead:
            rank.end()
        self.kills += len(dead)
        for rank in self.ranks:
            rank.answer()
        size = min(max(1, len(self.ranks) + dice.choice((0, 0, 1, 1, 2, 6))), MOST_RANKS)
        self._join(size - len(self.ranks))
        at = self.state if self.state is not None and dice.random() < 0.5 else len(self.committed)
        self._step([{"world": (number, size, at)} for number in range(size)], dice.randint(1, 3))

    def _step(self, jobs: list[dict[str, Any]], batches: int) -> None:
        """Take so many steps together, and commit them."""
        for rank, job in zip(self.ranks, jobs, strict=True):
            rank.ask(batches=batches, **job)
        told = [rank.answer() for rank in self.ranks]
        assert all(one["state"] == told[0]["state"] for one in told)
        self.state = told[0]["state"]
        for number in range(batches):
            self.committed.append(Counter(key for one in told for key in one["batches"][number][0]))
        firsts = [one["batches"][0] for rank, one in zip(self.ranks, told, strict=True) if rank.has_trained]
        self.waits_s += [wait_s for _, wait_s, _ in firsts]
        self.cpu_s += [cpu_s for _, _, cpu_s in firsts]
        for rank in self.ranks:
            rank.has_trained = True

    def _join(self, count: int) -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=MOST_RANKS) as listener:
            listener.settimeout(_WAIT_S)
            port, output = str(listener.getsockname()[1]), self.folder / "ranks.log"
            given = json.dumps(self.made)
            started = [self.forked.start(RANK, "commands", port, given, output=output) for _ in range(count)]
            by_pid = {process.pid: process for process in started}
            for _ in started:
                connection, _ = listener.accept()
                lines = connection.makefile("rw")
                process = by_pid[json.loads(lines.readline())["pid"]]
                self.ranks.append(Rank(process=process, connection=connection, lines=lines))
        self.joined += count

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.end()


def truth(made: dict[str, Any], count: int) -> Batches:
    """So many global batches of one rank that is left alone."""
    found: Batches = []
    with DataLoader(open_set(made), global_batch_size=GLOBAL_BATCH, device_mesh=mesh_of(1, 0), **made["loader"]) as one:
        while len(found) < count:
            found += [Counter(valid_keys(batch)) for _, batch in zip(range(count - len(found)), one, strict=False)]
    return found


@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", ["one set", "mixture"])
def test_nothing_is_lost_or_doubled_over_random_changes_with_kills(
    kind: str,
    urls: dict[str, str],
    mini_s3: MiniS3Server,
    forked: Forked,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    changes = -(-request.config.getoption("--torture-changes") // 2)
    dice = random.Random(f"{kind} {request.config.getoption('--torture-seed')}")
    made = {
        "urls": urls if kind == "mixture" else {"a": urls["a"]},
        "storage_options": mini_s3.storage_options,
        "loader": {"num_threads": 1} if kind == "mixture" else {"num_threads": 0, "last_batch": "partial"},
    }
    with Job(forked=forked, made=made, folder=tmp_path, dice=dice) as job:
        for _ in range(changes):
            job.change()
        waits_s = sorted(job.waits_s)
        print(
            f"\n{kind}: {changes} changes, {job.kills} killed, {job.joined} joined, {len(job.committed)} steps; first "
            f"batches after a change: median {statistics.median(waits_s):.3f} s, 99 % within "
            f"{waits_s[len(waits_s) * 99 // 100]:.3f} s, longest {waits_s[-1]:.3f} s of {len(waits_s)}; "
            f"{statistics.median(job.cpu_s):.3f} s of one core, at most {max(job.cpu_s):.3f} s"
        )
        assert job.kills > changes // 2
        assert job.committed == truth(made, len(job.committed))


def test_the_loop_of_the_page(urls: dict[str, str], mini_s3: MiniS3Server, forked: Forked, tmp_path: Path) -> None:
    """Of three ranks one dies in its fourth step, two go on, another one joins; gloo is set up for each world."""
    made = {"urls": urls, "storage_options": mini_s3.storage_options, "loader": {"num_threads": 1}}
    store = _distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address, given, output = f"127.0.0.1:{store.port}", json.dumps(made), tmp_path / "ranks.log"

    def world(number: int, ids: str, committed: int, steps: int, dies: dict[str, int]) -> None:
        said = {"ids": list(ids), "committed": committed, "steps": steps, "dies": dies}
        store.set(f"world/{number}", json.dumps(said))
        store.set("world", str(number))

    def verdict(number: int, step: int, ids: str, said: str) -> Counter[str]:
        found = [json.loads(store.get(f"said/{number}/{step}/{own}")) for own in ids]
        if said == "changed":
            assert found == [[]] * len(ids)  # the step failed for all
        return Counter(key for keys in found for key in keys)

    def start(ids: str) -> list[ForkedProcess]:
        return [forked.start(RANK, "train", address, given, own, output=output) for own in ids]

    committed: Batches = []
    world(0, "abc", 0, 99, {"b": 3})
    first = start("abc")
    for step in range(3):
        committed.append(verdict(0, step, "abc", "committed"))
        store.set(f"verdict/0/{step}", "committed")
    verdict(0, 3, "ac", "changed")
    world(1, "ca", 3, 99, {})
    store.set("verdict/0/3", "changed")
    committed += [verdict(1, 3, "ca", "committed")]
    world(2, "cda", 4, 8, {})  # the next step is asked for in a larger world
    more = start("d")
    store.set("verdict/1/3", "committed")
    for step in range(4, 8):
        committed.append(verdict(2, step, "cda", "committed"))
        store.set(f"verdict/2/{step}", "committed")
    assert all_end([first[0], first[2], *more]) == [0, 0, 0], output.read_text()[-4000:]
    assert first[1].wait() == -9
    assert "opens it instead" not in output.read_text(), "who joins waits for nobody to open its sets"
    assert committed == truth(made, 8)
