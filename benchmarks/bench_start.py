"""How long after a loop begins its first batch comes, with workers, in a program that has imported heavy packages.

Run: ``python benchmarks/bench_start.py [--images 2000] [--sources 200] [--rounds 5] [--data FOLDER]``. Each turn is a
process of its own that imports torch and the module of the transform (``start_transform.py``), opens its dataset on an
S3 server on loopback, and makes the loader; then the clock starts. "batch" is the first one; "tenth" the tenth, with 20
ms of training after each; CPU is that of the process and its workers, from the clock's start until the tenth batch. One
set of images, the same as a mixture of 200 sets, and both resumed at step 10^6 of an endless epoch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import bench_images
import common
from bench_decode import photographs

BATCH_SIZE, STEP, MANY, TRAINING_S, PER_SOURCE, PICTURES = 16, 10**6, 10**9, 0.02, 32, 8
KINDS = ("one set", "one set, resumed", "mixture", "mixture, resumed")


def make_images(folder: str, num_images: int, num_sources: int) -> None:
    """One set, and beside it many small ones."""
    pictures = photographs(PICTURES, bench_images.SIDE, bench_images.NUM_BYTES)
    for name, count in (("one", num_images), *((f"{number:03d}", PER_SOURCE) for number in range(num_sources))):
        os.mkdir(f"{folder}/{name}")
        samples = ({"__key__": f"{name}-{i:06d}", "jpg": pictures[i % PICTURES]} for i in range(count))
        common.write_shards(f"{folder}/{name}", samples, per_shard=bench_images.PER_SHARD)


def turn(url: str, num_sources: int, kind: str, workers: int, storage_options: dict[str, str]) -> None:
    """One turn, printed as JSON; in a process of its own."""
    import psutil  # type: ignore[import-untyped]  # noqa: PLC0415
    import start_transform  # noqa: PLC0415  what the program has imported

    from streaming import DataLoader, Mixture, StreamingDataset  # noqa: PLC0415

    def cpu_s() -> float:
        me = psutil.Process()
        return sum(sum(one.cpu_times()[:2]) for one in (me, *me.children(recursive=True)))

    choices: dict[str, Any] = {"decode": None, "transform": start_transform.crop, "storage_options": storage_options}
    made_s = time.perf_counter()
    dataset: Any
    if kind.startswith("one set"):
        dataset = StreamingDataset(f"{url}one/", **choices)
    else:
        dataset = Mixture({f"{n:03d}": StreamingDataset(f"{url}{n:03d}/", **choices) for n in range(num_sources)})
    with DataLoader(dataset, BATCH_SIZE, num_workers=workers, epoch_size=MANY, memory_limit="512MiB") as loader:
        if kind.endswith("resumed"):
            state = loader.state_dict()
            loader.load_state_dict({**state, "samples_seen": STEP * BATCH_SIZE})
        start_s, start_cpu_s, start_thread_s = time.perf_counter(), cpu_s(), time.thread_time()
        batches = iter(loader)
        next(batches)
        found = {"made": start_s - made_s, "batch": time.perf_counter() - start_s}
        found |= {"thread": time.thread_time() - start_thread_s, "first CPU": cpu_s() - start_cpu_s}
        for _ in range(9):
            time.sleep(TRAINING_S)
            next(batches)
        found |= {"tenth": time.perf_counter() - start_s, "CPU": cpu_s() - start_cpu_s}
        found["before"] = loader.metrics().get("batches_before_workers", 0)
        del batches
    print(json.dumps(found))


def main() -> None:
    if sys.argv[1:2] == ["--turn"]:
        turn(*json.loads(sys.argv[2]))
        return
    args: argparse.Namespace = common.arguments(__doc__ or "", images=2_000, sources=200)
    folder = common.made_once(
        args.data, f"start-{args.images}-{args.sources}", lambda target: make_images(target, args.images, args.sources)
    )
    print(common.machine())
    with common.s3_copy(folder) as (url, options):
        for kind in KINDS:
            for workers in (1, 2):
                found: list[dict[str, float]] = []
                for _ in range(args.rounds):
                    asked = json.dumps([url, args.sources, kind, workers, options])
                    ran = subprocess.run(
                        [sys.executable, __file__, "--turn", asked], check=True, stdout=subprocess.PIPE, text=True
                    )
                    found.append(json.loads(ran.stdout))
                said = ", ".join(
                    f"{name} {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
                    for name, values in ((name, [one[name] for one in found]) for name in found[0])
                )
                print(f"{kind}, {workers} workers: {said}", flush=True)


if __name__ == "__main__":
    main()
