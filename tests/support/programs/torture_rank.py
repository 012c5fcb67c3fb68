"""What a rank does in a leg of test_torture.py, and the process from which the ranks that are killed are forked.

Not a test itself. As a program it has imported all that a rank needs, gets a line of JSON per leg
(``{"port", "parts"}``), and forks a process per part; each connects to the port, says ``{"pid", "dp_rank"}``, waits for
a line, and then writes a line per batch. A rank never ends: it is killed. Orphans become children of this program,
which ends when its standard input has ended and none of them is left.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import socket
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from streaming import DataLoader, ShuffleConfig, StreamingDataset
from streaming.errors import IndexMismatchError
from streaming.run.engine.workers.fork_server import SHARED
from streaming.storage.adapters import in_place
from tests.support.processes.ready_server import have_a_server
from tests.support.sets.data_sets import mesh_of

GLOBAL_BATCH = 60
SHUFFLE = ShuffleConfig(seed=3, lanes=12, window=24)
PROBE = (0, 512)
"""A range that no chunk has: read before all others, since a store that never answered a range is refused at the first
one that it ignores."""
IN_PLACE_BYTES = 4 << 10
"""Whole chunks are read in place, and through obstore what is left of one after a break."""
_COUNTED = ("retries", "hedges", "throttled", "cache_hits", "worker_restarts")
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rank's part in a leg. After each batch in ``worker_kills`` it kills one of its own decode workers."""

    url: str
    storage_options: dict[str, Any]
    max_bad_samples: int
    cache_dir: str | None
    num_workers: int
    worker_kills: tuple[int, ...]
    world_size: int
    dp_rank: int
    num_batches: int
    state: dict[str, Any] | None
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """After a batch: its keys, the state, and the bad samples and other events so far."""

    keys: list[str]
    state: dict[str, Any]
    bad: list[dict[str, Any]]
    events: dict[str, int]


def checked_keys(batch: dict[str, Any]) -> list[str]:
    """The batch's keys; every field is that of its key."""
    keys: list[str] = batch["__key__"]
    assert batch["cls"].tolist() == [int(key) for key in keys]
    assert batch["json"] == [{"number": int(key)} for key in keys]
    return keys


def steps(part: Part) -> Iterator[Step]:
    """Perform a part; the loader is open until the generator is closed."""
    events, dice = Counter[str](), random.Random(part.seed)
    dataset = open_with_patience(part, events)
    dataset.source.storage.read(dataset.source.chunk(0).url, *PROBE)
    with DataLoader(
        dataset, global_batch_size=GLOBAL_BATCH, last_batch="partial", num_workers=part.num_workers,
        device_mesh=mesh_of(part.world_size, part.dp_rank), memory_limit=f"{400 + 2400 // part.world_size}KiB",
    ) as loader:  # fmt: skip
        if part.state is not None:
            loader.load_state_dict(part.state)
        running = iter(loader)
        for number in range(part.num_batches):
            keys = checked_keys(next(running))
            if number in part.worker_kills:
                events["killed workers"] += _kill_a_worker(dice)
            metrics = loader.metrics()
            counted = {name: int(metrics.get(name, 0)) for name in _COUNTED}
            yield Step(keys=keys, state=loader.state_dict(), bad=metrics["bad"], events=counted | events)


def as_it_is(sample: dict[str, Any]) -> dict[str, Any]:
    """With code of the user no thread stands in for a worker process that starts."""
    return sample


def open_with_patience(part: Part, events: Counter[str]) -> StreamingDataset:
    """A stale listing is a named error, and never a different dataset: try again."""
    cached = {"cache_dir": part.cache_dir, "cache_limit": "1MiB"} if part.cache_dir else {}
    while True:
        try:
            return StreamingDataset(
                part.url, shuffle=SHUFFLE, storage_options=part.storage_options,
                max_bad_samples=part.max_bad_samples, transform=as_it_is, **cached,
            )  # fmt: skip
        except IndexMismatchError as error:
            events[type(error).__name__] += 1


def _kill_a_worker(dice: random.Random) -> bool:
    """Send SIGKILL to a decode worker; return whether there was one."""
    server = SHARED._server
    assert server is not None
    with suppress(psutil.NoSuchProcess):
        workers = psutil.Process(server.pid).children()
        if workers:
            dice.choice(workers).send_signal(signal.SIGKILL)
            return True
    return False


def _live(port: int, part: Part) -> None:
    """A rank's life, in a process of its own."""
    if part.num_workers:
        have_a_server()
    with socket.create_connection(("127.0.0.1", port)) as connection, connection.makefile("rw") as lines:
        print(json.dumps({"pid": os.getpid(), "dp_rank": part.dp_rank}), file=lines, flush=True)
        lines.readline()
        try:
            playing = steps(part)
            for _ in range(part.num_batches):  # and not to its end, where the loader would be closed
                print(json.dumps(asdict(next(playing))), file=lines, flush=True)
        except BaseException:
            print(json.dumps({"error": traceback.format_exc()}), file=lines, flush=True)
        signal.pause()


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    for line in sys.stdin:
        leg = json.loads(line)
        for part in leg["parts"]:
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _live(leg["port"], Part(**part))
    with suppress(ChildProcessError):
        os.waitpid(-1, 0)  # SIGCHLD is ignored: returns when there is no child left


if __name__ == "__main__":
    in_place.LEAST_BYTES = IN_PLACE_BYTES
    main()
