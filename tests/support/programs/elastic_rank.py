"""One rank of an elastic job: trains step by step, commits each step, goes on from the last commit after a restart.

Not a test itself; see test_hosts.py and test_distributed.py. Started by torchrun it is a rank. By itself it is
torchrun, with its arguments, whose agent forks the ranks: an interpreter of its own takes each three seconds of a
core, after every change of the world anew. A step is committed by rank 0 when every rank has said what it got: one
line of ``commits.jsonl`` with the step's keys, where the step was taken, and the loader's state.

When torchrun begins, and with how many, depends on who comes first. ``worlds`` says how many ranks train from a number
of commits on: a world of another size stands by until torchrun replaces it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

from streaming import DataLoader, StreamingDataset
from tests.support.processes.waiting import PATIENCE_S
from tests.support.sets.data_sets import check_batch


def commits(path: str) -> list[dict[str, Any]]:
    if not os.path.exists(path):
        return []
    with open(path) as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


def stand_by(config: dict[str, Any], num_committed: int, world_size: int) -> None:
    """Return where ranks of this number are to train."""
    sizes = {int(first): size for first, size in config.get("worlds", {}).items() if int(first) <= num_committed}
    while sizes and sizes[max(sizes)] != world_size:
        signal.pause()  # torchrun ends this process


def train(config_path: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # and not as the agent, which ends its ranks by it
    with open(config_path) as file:
        config = json.load(file)
    log = os.path.join(config["folder"], "commits.jsonl")
    gate = os.path.join(config["folder"], "gate")
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_S))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with open(os.path.join(config["folder"], f"pid-{rank}"), "w") as file:
        file.write(str(os.getpid()))
    known = [commits(log)]
    dist.broadcast_object_list(known)
    stand_by(config, len(known[0]), world_size)
    dataset = StreamingDataset(config["url"], storage_options=config["storage_options"], **config["dataset"])
    with DataLoader(dataset, **config["loader"]) as loader:
        if known[0]:
            loader.load_state_dict(known[0][-1]["state"])
        step = len(known[0])
        for _ in range(loader.epoch, config["epochs"]):
            for batch in loader:
                keys = check_batch(batch)
                valid = batch["__valid__"].tolist()
                mine = [key for key, real in zip(keys, valid, strict=True) if real]
                everybodys: list[Any] = [None] * world_size
                dist.all_gather_object(everybodys, (mine, loader.state_dict()))
                if rank == 0:
                    if any(state != everybodys[0][1] for _, state in everybodys):
                        raise RuntimeError("ranks disagree on the state")
                    line = {"world_size": world_size, "keys": [keys for keys, _ in everybodys]}
                    with open(log, "a") as file:
                        file.write(json.dumps({**line, "state": loader.state_dict()}) + "\n")
                step += 1
                if str(step) in config["gates"] and world_size == config["gates"][str(step)]:
                    while not os.path.exists(f"{gate}-{step}"):
                        time.sleep(0.05)  # the test changes the hosts now; this process may be killed here
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ:  # a rank, which torchrun started
        train(sys.argv[1])
        return
    config, _, words = config_from_args(parse_args(sys.argv[1:]))
    config.start_method = "fork"
    elastic_launch(config, train)(words[-1])


if __name__ == "__main__":
    main()
