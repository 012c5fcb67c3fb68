"""What a rank does in test_remesh_processes.py. Not a test itself.

``remesh_rank.py commands PORT SET`` does what its connection tells it, line by line: who it is from now on, or how many
batches to take; it answers with their keys. ``remesh_rank.py train STORE SET ID`` runs the loop of docs/remesh.md over
torch.distributed, which is set up anew for every world.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from streaming import DataLoader, Mixture, ShuffleConfig, StreamingDataset
from tests.support.code.folders import ROOT
from tests.support.sets.data_sets import check_batch, mesh_of

GLOBAL_BATCH = 24
_PAGE = ROOT / "docs" / "remesh.md"
_distributed: Any = dist
_WAIT = timedelta(seconds=120)


def open_set(made: dict[str, Any]) -> StreamingDataset | Mixture:
    """One set, or a mixture of several by weight; lanes that most worlds do not divide."""
    shuffle = ShuffleConfig(seed=3, lanes=8, window=12)
    sets = {
        name: StreamingDataset(url, storage_options=made["storage_options"], shuffle=shuffle, cache_dir=None)
        for name, url in made["urls"].items()
    }
    if len(sets) == 1:
        return next(iter(sets.values()))
    return Mixture(sets, weights=dict.fromkeys(sets, 1), shuffle=shuffle)


def obey(port: int, made: dict[str, Any]) -> None:
    """Do what the connection says until it ends."""
    dataset = open_set(made)
    with socket.create_connection(("127.0.0.1", port)) as connection, connection.makefile("rw") as lines:
        loader: DataLoader | None = None
        print(json.dumps({"pid": os.getpid()}), file=lines, flush=True)
        for line in lines:
            job = json.loads(line)
            if "world" in job:
                rank, size, at = job["world"]
                if loader is None:
                    mesh = mesh_of(size, rank)
                    loader = DataLoader(dataset, global_batch_size=GLOBAL_BATCH, device_mesh=mesh, **made["loader"])
                begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
                loader.remesh(rank, size, at=at)
                running = iter(loader)
            assert loader is not None
            found = []
            for _ in range(job["batches"]):
                batch = next(running, None)
                if batch is None:
                    running = iter(loader)
                    batch = next(running)
                found.append([check_batch(batch), time.perf_counter() - begun_s, time.process_time() - begun_cpu_s])
            told = {
                "batches": found,
                "state": loader.state_dict(),
                "fetched": loader.metrics().get("fetched_chunks", 0),
            }
            print(json.dumps(told), file=lines, flush=True)


class Quorum:
    """Stands for torchft's ``Manager`` in a training program: who takes part, and what is committed.

    The test says so, through a store that outlives the ranks; ranks train together over gloo.
    """

    def __init__(self, address: str, own: str) -> None:
        host, port = address.split(":")
        self._store = _distributed.TCPStore(host, int(port), is_master=False, timeout=_WAIT)
        self._own, self._number = own, -1
        self._keys: list[str] = []
        self._said: dict[str, Any] = {}

    @property
    def steps(self) -> int:
        """The number of ranks that train."""
        return int(self._said["steps"]) if self._said else 1

    committed = rank = size = 0

    def changed(self) -> bool:
        """Tell whether there is another world; torch.distributed is then set up for it."""
        number = int(self._store.get("world"))
        if number == self._number:
            return False
        if dist.is_initialized():
            dist.destroy_process_group()
        self._number, self._said = number, json.loads(self._store.get(f"world/{number}"))
        ids = self._said["ids"]
        if self._own not in ids:
            raise SystemExit
        self.rank, self.size, self.committed = ids.index(self._own), len(ids), self._said["committed"]
        store = _distributed.PrefixStore(f"gloo/{number}", self._store)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size, timeout=_WAIT)
        return True

    def step(self, batch: Any) -> None:
        """Train: a rank that is to die does so, and the others lose their connection to it."""
        self._keys = check_batch(batch)
        if self._said["dies"].get(self._own) == self.committed:
            os.kill(os.getpid(), signal.SIGKILL)
        count = torch.tensor([len(self._keys)])
        try:
            dist.all_reduce(count)
        except RuntimeError:
            self._keys = []
        else:
            assert int(count) == GLOBAL_BATCH, count

    def commit(self, batch: Any) -> None:
        """Report what was trained on, and wait for the decision."""
        place = f"{self._number}/{self.committed}"
        self._store.set(f"said/{place}/{self._own}", json.dumps(self._keys))
        self.committed += self._store.get(f"verdict/{place}") == b"committed"


def train(address: str, made: dict[str, Any], own: str) -> None:
    """Run the loop of the page."""
    code = re.search(r"```python\n(def train.*?)```", _PAGE.read_text(), re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {}
    exec(code[1], names)
    quorum = Quorum(address, own)
    quorum.changed()
    mesh = mesh_of(quorum.size, quorum.rank)
    with DataLoader(open_set(made), global_batch_size=GLOBAL_BATCH, device_mesh=mesh, **made["loader"]) as loader:
        if quorum.committed:  # it has come later
            loader.remesh(quorum.rank, quorum.size, at=quorum.committed)
        names["train"](loader, quorum, quorum.step)
        assert loader._core.check is not None
        loader.check_agreement(60)  # in the last world
    dist.destroy_process_group()


if __name__ == "__main__":
    kind, place, made_of, *rest = sys.argv[1:]
    if kind == "commands":
        obey(int(place), json.loads(made_of))
    else:
        train(place, json.loads(made_of), *rest)
