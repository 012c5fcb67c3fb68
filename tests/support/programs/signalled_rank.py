"""One rank of a job whose processes all get signals that it handles; see test_group_signals.py. Not a test itself."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset

from streaming import DataLoader, OrdinaryDataset, StreamingDataset
from streaming.common.forks import JOB_SIGNALS
from tests.support.processes.ready_server import have_a_server
from tests.support.processes.waiting import ended, started, until

NUM_SAMPLES = 64


def sample(number: int) -> dict[str, int]:
    return {"number": number, "pid": os.getpid()}


class Mapped(Dataset[dict[str, int]]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, int]:
        return sample(index)


class Iterated(IterableDataset[dict[str, int]]):
    def __iter__(self) -> Iterator[dict[str, int]]:
        yield from map(sample, range(NUM_SAMPLES))


def loader_of(kind: str, url: str, num_workers: int) -> DataLoader:
    if kind == "shards":
        dataset: Any = StreamingDataset(url, transform=lambda found: sample(int(found["__key__"])))
        return DataLoader(dataset, 4, num_workers=num_workers, num_threads=0)
    made = Mapped() if kind == "map" else Iterated()
    return DataLoader(OrdinaryDataset(made, sharding="dispatch" if kind == "dispatch" else None), 4,
                      num_workers=num_workers)  # fmt: skip


def numbers(batches: list[Any]) -> list[int]:
    return sorted(number for batch in batches for number in batch["number"].tolist())


def served_by() -> list[psutil.Process]:
    """Processes that this one has started, itself or by others, and that get what is sent to its group."""
    children = psutil.Process().children(recursive=True)
    return [one for one in children if one.is_running() and os.getpgid(one.pid) == os.getpgid(0)]


def ended_by(pid: int) -> list[int]:
    """Signals of a job that would end a process."""
    lines = (line.split(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    masks = [int(value, 16) for name, value in lines if name in {"SigBlk", "SigIgn", "SigCgt"}]
    return [number for number in sorted(JOB_SIGNALS) if not any(mask >> (number - 1) & 1 for mask in masks)]


class Group:
    """The processes of this one, all of which get the signals at once, as from SLURM."""

    def __init__(self, given: list[int]) -> None:
        self.given = given
        self.heard: list[int] = []
        for number in given:
            signal.signal(number, lambda number, _: self.heard.append(number))

    def signal(self) -> None:
        for number in self.given:
            os.killpg(0, number)

    def signal_those_that_start(self) -> None:
        until(served_by, "a process is started")
        self.signal()


def main() -> None:
    given = json.loads(sys.argv[1])
    if given["ready"]:
        have_a_server()
    torch.multiprocessing.set_sharing_strategy(given["sharing_strategy"])
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    group = Group(given["signals"])
    found: dict[str, Any] = {"epochs": []}
    with loader_of(given["kind"], given["url"], given["num_workers"]) as loader:
        reads = given["kind"] != "dispatch" or os.environ.get("RANK", "0") == "0"
        early = started(group.signal_those_that_start) if reads and given["num_workers"] else []
        batches = iter(loader)
        first = next(batches)
        ended(*early)
        group.signal()
        found["ended_by"] = {one.pid: ended_by(one.pid) for one in served_by()}
        if given["stands"]:
            until(lambda: len(served_by()) > given["num_workers"], "a server and all workers are up")
            print(json.dumps({"pids": [one.pid for one in served_by()]}), flush=True)
            threading.Event().wait()
        found["epochs"] = [numbers([first, *batches]), numbers(list(loader))]
    found["heard"] = sorted(set(group.heard))
    Path(given["folder"], f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
