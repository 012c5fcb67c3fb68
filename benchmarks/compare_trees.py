"""This tree beside another one, such as an older commit's: the same work in turns, medians and ratios.

Run: ``git worktree add ../base COMMIT``, then ``python benchmarks/compare_trees.py ../base [--rounds 3]``. Small
records, tokens, decoded images and the first batch, from disk, each in a process of its own with one tree on its path.
``where`` and the keys of a step are of an index of 10**8 rows without tars, whose sample files are one, linked: rows
and keys per second, and the seconds to open it. The data is written by this tree: a release reads indexes of every
minor version. Rates are over a whole pass, opening included, imports not; above 1.00 this tree is the faster one.
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

MAKE = """
import json, sys
from pathlib import Path
import numpy as np
from bench_decode import photographs
from bench_where import SHARD_ROWS, write_index
from shard_tools import ShardWriter

folder, scale = sys.argv[1], float(sys.argv[2])
num_shards = max(int(1000 * scale), 1)
write_index(Path(folder) / "index", num_shards, linked=True)
for shard in range(num_shards):
    with open(f"{folder}/index/{shard:06d}.tar", "wb") as tar:  # nobody looks inside
        tar.truncate(SHARD_ROWS * 4096 + 1024)
rng = np.random.default_rng(0)
pictures = photographs(8, 400, 68_000)
tokens = rng.integers(0, 50_000, (64, 2048), np.uint16)
records = [json.dumps({"text": "word " * 76, "number": number}).encode() for number in range(64)]
for name, count, field, values in (
    ("records", 200_000, "json", records), ("tokens", 40_000, "bin", [bytes(row) for row in tokens]),
    ("images", 3_000, "jpg", pictures),
):
    with ShardWriter(f"{folder}/{name}/{{:04d}}.tar", max_bytes="128MB") as writer:
        for number in range(int(count * scale)):
            writer.write({"__key__": f"{number:08d}", field: values[number % len(values)]})
"""

READ = """
import sys, time
from streaming import DataLoader, StreamingDataset

folder, name, workers = sys.argv[1], sys.argv[2], int(sys.argv[3])
decode = {"records": None, "tokens": {"bin": "array:uint16->int64"}, "images": {"jpg": "rgb8:224x224"}}[name]
field, size = {"records": ("json", 256), "tokens": ("bin", 32), "images": ("jpg", 64)}[name]
begun_s, count, first_s = time.perf_counter(), 0, 0.0
with DataLoader(StreamingDataset(f"{folder}/{name}/", decode=decode), size, num_workers=workers) as loader:
    for batch in loader:
        first_s = first_s or time.perf_counter() - begun_s
        count += len(batch[field])
    print(count / (time.perf_counter() - begun_s), first_s)
"""

SEARCH = """
import sys, time
import numpy as np
from bench_where import CHUNK_ROWS, CONDITIONS, SHARD_ROWS
from streaming import StreamingDataset
try:
    from shard_tools.look.plan.keys import keys_at
except ModuleNotFoundError:  # a tree of before it had wings
    from shard_tools.plan.keys import keys_at

folder, name = f"{sys.argv[1]}/index", sys.argv[2]
begun_s = time.perf_counter()
dataset = StreamingDataset(folder)
dataset = getattr(dataset, "source", dataset)  # older trees had none
opened_s, count = time.perf_counter() - begun_s, dataset.table.total_samples
if name == "where":
    StreamingDataset(folder, where=CONDITIONS[1])
else:
    count = len(dataset.table.shards)
    rows = np.arange(count) * SHARD_ROWS + np.random.default_rng(0).integers(0, SHARD_ROWS, count)
    assert None not in keys_at(dataset, rows // CHUNK_ROWS, rows % CHUNK_ROWS)
print(count / (time.perf_counter() - begun_s - opened_s), opened_s)
"""

CASES = {
    **dict.fromkeys((("records", 0), ("tokens", 0), ("images", 0), ("images", 2)), READ),
    ("where", 0): SEARCH,
    ("keys of a step", 0): SEARCH,
}


def ran(tree: str, code: str, *arguments: str) -> str:
    paths = (tree, os.path.join(tree, "benchmarks"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-P", "-c", code, *arguments]
    return subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", help="folder of the other tree")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--scale", type=float, default=1.0, help="of the data: 1: 200,000 records, 3,000 images, 10**8 rows"
    )
    options = parser.parse_args(arguments)
    trees = {"other": os.path.abspath(options.other), "this": ROOT}
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        ran(trees["this"], MAKE, folder, str(options.scale))
        for _ in range(options.rounds):
            for (name, workers), code in CASES.items():
                for tree, path in trees.items():
                    rate, first_s = map(float, ran(path, code, folder, name, str(workers)).split())
                    found.setdefault((f"{name}, {workers} workers", tree), []).append((rate, first_s))
    print(
        f"{common.machine()}\n{options.rounds} rounds\n\n{'':20} {'other/s':>11} {'this/s':>11}  ratio  first batch, s"
    )
    for name, workers in CASES:
        case = f"{name}, {workers} workers"
        (theirs, their_first), (ours, our_first) = (
            [statistics.median(column) for column in zip(*found[case, tree], strict=True)] for tree in trees
        )
        print(f"{case:20} {theirs:11,.0f} {ours:11,.0f}  {ours / theirs:5.2f}  {their_first:.2f} and {our_first:.2f}")


if __name__ == "__main__":
    main()
