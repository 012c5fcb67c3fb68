"""A pass of a few seconds over JPEGs with 0, 1 and 2 worker processes in turns: images per second, and CPU seconds.

Run: ``python benchmarks/bench_short_pass.py [--images 3000] [--rounds 3] [--passes 1] [--loaders 1] [--tree OTHER]``.
Each turn is a process of its own that has imported torch; the clock runs over the making of the loaders and all their
passes. CPU is that of the process, and of the fork server with its workers, from the clock's start to its end. Another
tree, such as an older commit's, takes turns with this: ``git worktree add ../base COMMIT``, then ``--tree ../base``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence

import common
from bench_decode import photographs

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WORKERS = (0, 1, 2)
TURN = """
import json, resource, sys, time
import torch
from streaming import DataLoader, StreamingDataset
from streaming.run.engine.workers.fork_server import SHARED

def cpu_s():
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return [one.ru_utime + one.ru_stime for one in usages]

url, workers, passes, loaders = sys.argv[1], *map(int, sys.argv[2:])
begun_s, begun_cpu_s, count = time.perf_counter(), cpu_s(), 0
for _ in range(loaders):
    with DataLoader(StreamingDataset(url, decode={"jpg": "rgb8:224x224"}), 64, num_workers=workers) as loader:
        for _ in range(passes):
            count += sum(len(batch["jpg"]) for batch in loader)
ended_s = time.perf_counter()
SHARED.close()  # children count once they have ended
cpu = [now - before for now, before in zip(cpu_s(), begun_cpu_s)]
print(json.dumps([count / (ended_s - begun_s), *cpu]))
"""


def turn(tree: str, url: str, *counts: int) -> list[float]:
    """Return images per second, and CPU seconds of the process and of its children."""
    command = [sys.executable, "-P", "-c", TURN, url, *map(str, counts)]
    environment = {**os.environ, "PYTHONPATH": tree}
    out = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    found: list[float] = json.loads(out)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--passes", type=int, default=1, help="of each loader")
    parser.add_argument("--loaders", type=int, default=1, help="one after the other")
    parser.add_argument("--tree", help="folder of another tree that takes turns with this one")
    options = parser.parse_args(arguments)
    trees = {"this": ROOT, **({"other": os.path.abspath(options.tree)} if options.tree else {})}
    found: dict[tuple[str, int], list[list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        pictures = photographs(8, 400, 68_000)
        samples = ({"__key__": f"{i:08d}", "jpg": pictures[i % len(pictures)]} for i in range(options.images))
        common.write_shards(folder, samples, per_shard=1500)
        for _ in range(options.rounds):
            for workers in WORKERS:
                for name, tree in trees.items():
                    one = turn(tree, f"{folder}/", workers, options.passes, options.loaders)
                    found.setdefault((name, workers), []).append(one)
    print(f"{common.machine()}\n{options.rounds} rounds; medians\n\ntree   workers  images/s  CPU s  of children")
    for (name, workers), rounds in found.items():
        rate, own_s, children_s = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"{name:6} {workers:7} {rate:9,.0f} {own_s:6.2f} {children_s:12.2f}")


if __name__ == "__main__":
    main()
