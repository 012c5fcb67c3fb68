"""``optimize`` against a plain ``multiprocessing.Pool`` that writes the same shards, and LitData's, in turns.

Three works: JPEGs of 640 x 480 resized to 256 x 256; samples of 100 KB that cost nothing to make; texts of 200 bytes.

- ``pool``: ``Pool(workers).imap`` with chunks, and the samples go through ``ShardWriter`` in the main process, in
  order: the same bytes as ours, without resume, named failures or a bound on memory.
- ``pool, own shards``: each process of a pool writes shards of its own part of the inputs. Nothing passes between
  processes, and the shards depend on the number of processes: what order and equal bytes cost.
- ``litdata``: its ``optimize`` with chunks of the same size, each process its own, in the environment of ``--litdata``
  (``python3.11 -m venv DIR && DIR/bin/pip install torch==2.13.0 litdata pillow``).

Each turn is a fresh process and includes the start and end of its workers, not what is imported before. Shown are
samples per second by the clock, and by processor time of all processes together, which is what a machine that does
nothing else would say.

Run: ``python benchmarks/bench_optimize.py [--work resize|trivial|tiny] [--num N] [--workers 2] [--rounds 3] [--litdata
PYTHON]``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import Pool
from typing import Any

import common
import optimize_work
from optimize_work import WORKS, cpu_s, inputs_of

import shard_tools

_NUM = {"resize": 4000, "trivial": 20_000, "tiny": 200_000}
_MAX_BYTES = "64MB"


def ours(work: str, inputs: list[Any], target: str, workers: int) -> None:
    """``optimize``."""
    shard_tools.optimize(
        WORKS[work], inputs, target, workers=workers, max_bytes=_MAX_BYTES, progress=False
    )  # fmt: skip


def pool(work: str, inputs: list[Any], target: str, workers: int) -> None:
    """A pool, and the writer here."""
    chunk = {"resize": 8, "trivial": 16, "tiny": 512}[work]
    with Pool(workers) as processes, shard_tools.ShardWriter(f"{target}/{{:06d}}.tar", max_bytes=_MAX_BYTES) as writer:
        for number, sample in enumerate(processes.imap(WORKS[work], inputs, chunk)):
            writer.write({"__key__": f"{number:09d}", **sample})


def own_shards(work: str, inputs: list[Any], target: str, workers: int) -> None:
    """A pool whose processes write."""
    share = -(-len(inputs) // workers)
    starts = range(0, len(inputs), share)
    parts = [(work, inputs[start : start + share], start, f"{target}/{start}") for start in starts]
    with Pool(workers) as processes:
        processes.map(_write_part, parts, 1)


def _write_part(part: tuple[str, list[Any], int, str]) -> None:
    work, inputs, start, target = part
    with shard_tools.ShardWriter(f"{target}/{{:06d}}.tar", max_bytes=_MAX_BYTES) as writer:
        for number, value in enumerate(inputs, start):
            writer.write({"__key__": f"{number:09d}", **WORKS[work](value)})


CONTESTANTS: dict[str, Callable[[str, list[Any], str, int], None]] = {
    "ours": ours, "pool": pool, "pool, own shards": own_shards,
}  # fmt: skip


def turn(name: str, work: str, folder: str, target: str, num: int, workers: int) -> None:
    """One turn, in a process of its own."""
    inputs = inputs_of(work, folder, num)
    shard_tools.optimize, shard_tools.ShardWriter  # noqa: B018  imported on first use
    begun_s, begun_cpu_s = time.perf_counter(), cpu_s()
    CONTESTANTS[name](work, inputs, target, workers)
    print("took", time.perf_counter() - begun_s, cpu_s() - begun_cpu_s)


def images(folder: str) -> None:
    """200 JPEGs of 640 x 480."""
    import numpy as np  # noqa: PLC0415
    from PIL import Image  # noqa: PLC0415

    rng = np.random.default_rng(0)
    for number in range(200):
        coarse = Image.fromarray(rng.integers(0, 256, (30, 40, 3), np.uint8))
        coarse.resize((640, 480), Image.Resampling.BICUBIC).save(f"{folder}/{number:04d}.jpg", quality=92)


def main() -> None:
    """Run all contestants in turns."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", default=os.path.join(tempfile.gettempdir(), "shardstream-bench"))
    parser.add_argument("--work", choices=WORKS, default="resize")
    parser.add_argument("--num", type=int)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--litdata", metavar="PYTHON", help="interpreter of an environment with litdata")
    parser.add_argument("--turn", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    num = chosen.num or _NUM[chosen.work]
    folder = common.made_once(chosen.data, "jpegs-640", images)
    if chosen.turn:
        turn(chosen.turn[0], chosen.work, folder, chosen.turn[1], num, chosen.workers)
        return
    names = [*CONTESTANTS, *(["litdata"] if chosen.litdata else [])]
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(chosen.rounds):
        for name in names:
            with tempfile.TemporaryDirectory(dir=chosen.data) as target:
                if name == "litdata":
                    given = [chosen.work, folder, target, str(num), str(chosen.workers)]
                    command = [chosen.litdata, optimize_work.__file__, *given]
                else:
                    command = [sys.executable, __file__, *sys.argv[1:], "--turn", name, target]
                told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                seconds, cpu = told.stdout.rpartition("took")[2].split()
                took[name].append((float(seconds), float(cpu)))
    print(f"\n{chosen.work}, {num:,} samples, {chosen.workers} workers, {chosen.rounds} rounds; {common.machine()}")
    base = [statistics.median(values) for values in zip(*took["pool"], strict=True)]
    for name, found in took.items():
        wall, cpu = (statistics.median(values) for values in zip(*found, strict=True))
        spread = " to ".join(f"{num / seconds:,.0f}" for seconds in (max(found)[0], min(found)[0]))
        print(
            f"{name:17} {num / wall:9,.0f}/s ({spread}), {base[0] / wall:5.0%} of pool; by processor time "
            f"{num / cpu:9,.0f}/s, {base[1] / cpu:5.0%}"
        )


if __name__ == "__main__":
    main()
