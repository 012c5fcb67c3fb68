"""Runs programs of docs/trainers.md as ranks of a job, as torchrun does, without importing the trainers for each anew.

Reads lines of JSON: ``{"script", "ranks", "errors", "environ"}``. For each it forks the ranks, which run the
script as their main program, and writes a line: the exit status of each. When one fails, the others are killed.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import accelerate  # noqa: F401  for the forked
import lightning  # noqa: F401
import torch.distributed.checkpoint  # noqa: F401
import transformers.trainer  # noqa: F401

import streaming  # noqa: F401


def become_rank(job: dict[str, Any], number: int) -> None:
    """Run the script as one rank. Never returns."""
    status = 1
    try:
        errors = os.open(job["errors"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(errors, 1)
        os.dup2(errors, 2)
        os.environ |= job["environ"]
        os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "GROUP_RANK": "0"}
        os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(job["ranks"]))
        # What the program makes stays alive: some objects of torch's, dying late, wait for others for ever.
        alive = runpy.run_path(job["script"], run_name="__main__")
        status = int(not alive)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def play(job: dict[str, Any]) -> list[int]:
    """The exit statuses of all ranks; -9 for those that were killed."""
    pids = []
    for number in range(job["ranks"]):
        pid = os.fork()
        if not pid:
            become_rank(job, number)
        pids.append(pid)
    statuses: dict[int, int] = {}
    while len(statuses) < len(pids):
        pid, status = os.wait()
        statuses[pid] = os.waitstatus_to_exitcode(status)
        if statuses[pid]:
            for other in set(pids) - set(statuses):
                os.kill(other, signal.SIGKILL)
    return [statuses[pid] for pid in pids]


def main() -> None:
    tasks = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    others = [name for name in tasks[1:] if name != "jemalloc_bg_thd"]  # which jemalloc starts anew
    assert others == [], "imports have started threads, which a fork would lose"
    for line in sys.stdin:
        print(json.dumps(play(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
