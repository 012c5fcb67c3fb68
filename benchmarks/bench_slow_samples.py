"""Use of a device while 1 % of the samples cost 50 times the others, in order, at 90 % of what the threads can build.

Run: ``python benchmarks/bench_slow_samples.py [--tree ../base] [--rounds 3] [--batches 4,16,64]``. A ``transform``
sleeps: 2 ms for a sample, 100 ms for a slow one. A step sleeps for as long as the threads need for a batch on average,
divided by 0.9. A loader whose samples overtake each other would keep such a device busy all the time: use 1.00.
``--tree`` is another tree, such as an older commit's, in turns. The first 20 steps do not count.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence

import common

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
NUM_SAMPLES, THREADS, COST_S, TIMES = 6400, 4, 0.002, 50

MAKE = """
import sys
from shard_tools import ShardWriter

with ShardWriter(sys.argv[1] + "/{:04d}.tar", max_samples=1600) as writer:
    for number in range(int(sys.argv[2])):
        writer.write({"__key__": f"{number:06d}", "txt": str(number)})
"""

READ = """
import random, sys, time
from streaming import DataLoader, StreamingDataset

folder, size, num_samples, threads, cost_s, times = sys.argv[1], *map(float, sys.argv[2:])
slow = set(random.Random(0).sample(range(int(num_samples)), int(num_samples) // 100))

def transform(sample):
    time.sleep(cost_s * times if int(sample["txt"]) in slow else cost_s)
    return sample

step_s = size * cost_s * (0.99 + 0.01 * times) / threads / 0.9
with DataLoader(StreamingDataset(folder, transform=transform), int(size), num_threads=int(threads)) as loader:
    for number, _ in enumerate(loader):
        if number == 20:
            begun_s = time.perf_counter()
        time.sleep(step_s)
    print((number - 19) * step_s / (time.perf_counter() - begun_s))
"""


def ran(tree: str, code: str, *arguments: object) -> str:
    command = [sys.executable, "-P", "-c", code, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": tree}
    return subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", help="folder of another tree")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", default="4,16,64", help="samples of a batch")
    options = parser.parse_args(arguments)
    trees = {"this": ROOT, **({"other": os.path.abspath(options.tree)} if options.tree else {})}
    sizes = [int(size) for size in options.batches.split(",")]
    found: dict[tuple[int, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        ran(ROOT, MAKE, folder, NUM_SAMPLES)
        for _ in range(options.rounds):
            for size in sizes:
                for tree, path in trees.items():
                    use = float(ran(path, READ, folder, size, NUM_SAMPLES, THREADS, COST_S, TIMES))
                    found.setdefault((size, tree), []).append(use)
    print(
        f"{common.machine()}\n{options.rounds} rounds; medians\n\n{'samples of a batch':20}",
        *(f"{one:>8}" for one in trees),
    )
    for size in sizes:
        print(f"{size:<20}", *(f"{statistics.median(found[size, tree]):8.3f}" for tree in trees))


if __name__ == "__main__":
    main()
