"""A mixture against one set of the same samples: 200 sources from S3, two of small records, two of tokens.

Run: ``python benchmarks/bench_mixture.py [--rounds 5] [--sources 200] [--records 60000] [--tokens 40000] [--workers 0]
[--epochs 3] [--quick] [--data FOLDER]``. Each turn is a process of its own, which opens everything, reads epochs (of
small sets one, which memory holds then) and says how long the batches took, from the first one asked for to the last,
also in seconds of its CPU (where others share the cores the wall says little), what opening took, how many requests
the batches took, and by how much its memory grew beyond that after its imports. The S3 server is a process of its own,
whose CPU is not counted. One set and mixture take turns. "one set" has all shards of the sources in one
``StreamingDataset``.

``--local`` measures two other things, without a server: the same of the sources on disk, where "opening" says what
opening takes in seconds of CPU; and how far ahead of the loop other weights begin to hold (``loader.set_weights``), in
positions of a lane, in a mixture by chunks whose loader has read ahead what it may: four sets of 20,000 samples in
chunks of 512, 16 lanes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import numpy as np
from bench_small_records import BATCH_SIZE, records

from streaming import DataLoader, Mixture, ShuffleConfig, StreamingDataset

LARGE_BATCH, LARGE_BYTES, PER_SOURCE = 64, 16 << 10, 128
"""Samples of 16 KiB, 2 MiB a source: 400 MiB in 200 of them."""
MEMORY_LIMIT = "256MiB"
CHANGED_SETS, CHANGED_SAMPLES, CHANGED_LANES = 4, 20_000, 16
"""What is measured of changes of weights; samples take 2 KiB of a tar, so that 512 of them are a chunk."""
STILL_S = 0.5
"""A loader whose threads rest for so long has read ahead all that it may."""


def large(number: int) -> Iterator[dict[str, object]]:
    """The samples of one of many sources."""
    for i in range(PER_SOURCE):
        yield {"__key__": f"{number:03d}-{i:06d}", "bin": os.urandom(LARGE_BYTES)}


def make_sources(folder: str, num_sources: int) -> None:
    for number in range(num_sources):
        os.mkdir(f"{folder}/{number:03d}")
        common.write_shards(f"{folder}/{number:03d}", large(number), per_shard=PER_SOURCE)


def make_records(folder: str, count: int) -> None:
    for number in range(2):
        os.mkdir(f"{folder}/{number:03d}")
        common.write_shards(f"{folder}/{number:03d}", records(count // 2), per_shard=count // 2)


def make_tokens(folder: str, count: int) -> None:
    for number in range(2):
        os.mkdir(f"{folder}/{number:03d}")
        drawn = np.random.default_rng(number).integers(0, 50_000, (64, 2048), np.uint16)
        rows = ({"__key__": f"{number}-{i:06d}", "bin": drawn[i % 64].tobytes()} for i in range(count // 2))
        common.write_shards(f"{folder}/{number:03d}", rows, per_shard=count // 2)


def make_changed(folder: str) -> None:
    for number in range(CHANGED_SETS):
        os.mkdir(f"{folder}/{number:03d}")
        samples = ({"__key__": f"{number}-{i:06d}", "bin": os.urandom(1100)} for i in range(CHANGED_SAMPLES))
        common.write_shards(f"{folder}/{number:03d}", samples, per_shard=CHANGED_SAMPLES)


def resident_bytes() -> int:
    """Memory of this process alone, and what it shares without a file: page tables say it, not the C library."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(rollup.split(f"\n{name}:")[1].split()[0]) << 10 for name in ("Pss_Anon", "Pss_Shmem"))


def turn(
    url: str, names: list[str], kind: str, batch_size: int, decode: str | None, options: Any, workers: int, epochs: int
) -> None:
    """One contestant's turn, printed as JSON; in a process of its own."""
    idle_bytes = resident_bytes()
    peak_bytes, ended = 0, threading.Event()

    def watch() -> None:
        nonlocal peak_bytes
        while not ended.wait(0.05):
            peak_bytes = max(peak_bytes, resident_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    choices: dict[str, Any] = {"decode": decode, "storage_options": options}
    opened_cpu_s = time.process_time()
    dataset: StreamingDataset | Mixture
    if kind == "one set":
        dataset = StreamingDataset([f"{url}{name}/{{000000..000000}}.tar" for name in names], **choices)
    else:
        dataset = Mixture({name: StreamingDataset(f"{url}{name}/", **choices) for name in names})
    opened_cpu_s = time.process_time() - opened_cpu_s
    with DataLoader(dataset, batch_size, num_workers=workers, memory_limit=MEMORY_LIMIT) as loader:
        asked = loader.metrics().get("requests", 0)
        started_s, started_cpu_s, count = time.perf_counter(), time.process_time(), 0
        for _ in range(epochs):
            count += sum(len(batch["__key__"]) for batch in loader)
        took_s, took_cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
        asked = loader.metrics().get("requests", 0) - asked
    ended.set()
    watcher.join()
    print(
        json.dumps(
            {
                "rate": count / took_s,
                "by CPU": count / took_cpu_s,
                "bytes": peak_bytes - idle_bytes,
                "count": count,
                "opening": opened_cpu_s,
                "requests": asked,
            }
        )
    )


def compare(title: str, rounds: int, *args: Any) -> None:
    """Let one set and the mixture take turns, print medians and the ratios of each round."""
    url, names, batch_size, decode, options, workers, epochs = args
    found: dict[str, list[dict[str, float]]] = {"one set": [], "mixture": []}
    for _ in range(rounds):
        for kind, seen in found.items():
            asked = json.dumps([url, names, kind, batch_size, decode, options, workers, epochs])
            ran = subprocess.run(
                [sys.executable, __file__, "--turn", asked], check=True, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            seen.append(json.loads(ran.stdout))
    assert len({one["count"] for seen in found.values() for one in seen}) == 1, "all deliver the same number of samples"
    print(f"\n{title}\n{'':8}  {'samples/s':>10}  {'a CPU s':>10}  {'peak MiB':>8}  {'opening':>8}  requests")
    for kind, seen in found.items():
        rate, per_cpu, peak, opening, requests = (
            statistics.median(one[what] for one in seen) for what in ("rate", "by CPU", "bytes", "opening", "requests")
        )
        print(f"{kind:8}  {rate:10,.0f}  {per_cpu:10,.0f}  {peak / 2**20:8.1f}  {opening:6.2f} s  {requests:.0f}")
    for what in ("rate", "by CPU", "bytes"):
        ratios = [other[what] / one[what] for one, other in zip(found["one set"], found["mixture"], strict=True)]
        print(
            f"{what}: mixture / one set {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )


def wait_until_still() -> None:
    """Wait until the loader's threads have read ahead all that they may: nothing computes any more."""
    while True:
        before_s = time.process_time()
        time.sleep(STILL_S)
        if time.process_time() - before_s < 0.02 * STILL_S:
            return


def measure_changes(folder: str, rounds: int) -> None:
    """Change weights of a running loader again and again; how many positions of a lane ahead each change begins."""
    names = [f"{number:03d}" for number in range(CHANGED_SETS)]
    sets = {name: StreamingDataset(f"{folder}/{name}/", decode=None) for name in names}
    mixture = Mixture(sets, weights=dict.fromkeys(names, 1.0), shuffle=ShuffleConfig(lanes=CHANGED_LANES))
    found = []
    with DataLoader(mixture, BATCH_SIZE) as loader:
        batches, rows = iter(loader), 0
        for number in range(rounds):
            for _ in range(20):
                rows += len(next(batches)["__key__"])
            wait_until_still()
            start = loader.set_weights({name: 1.0 + (place + number) % 2 for place, name in enumerate(names)})
            found.append((start - rows) / CHANGED_LANES)
    print(
        f"\nother weights hold {statistics.median(found):,.0f} positions of a lane ahead of the loop "
        f"({min(found):,.0f} to {max(found):,.0f} in {rounds} changes)"
    )


def main() -> None:
    if sys.argv[1:2] == ["--turn"]:
        turn(*json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sources", type=int, default=200)
    parser.add_argument("--records", type=int, default=60_000)
    parser.add_argument("--tokens", type=int, default=40_000)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=3, help="of many sources, in each turn: more than memory_limit")
    parser.add_argument("--quick", action="store_true", help="two rounds, 40 sources, 20,000 records and sequences")
    parser.add_argument("--local", action="store_true", help="the sources on disk, and changes of weights, alone")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.sources, args.records, args.tokens = 2, 40, 20_000, 20_000
    data = args.data or os.path.join("/tmp", "shardstream-bench")
    print(common.machine())
    many = common.made_once(data, f"mixture-{args.sources}", lambda target: make_sources(target, args.sources))
    names = [f"{number:03d}" for number in range(args.sources)]
    if args.local:
        compare(f"{args.sources} sources from disk", args.rounds,
                f"{many}/", names, LARGE_BATCH, None, None, args.workers, args.epochs)  # fmt: skip
        measure_changes(common.made_once(data, "mixture-changes", make_changed), args.rounds)
        return
    with common.s3_copy(many) as (url, options):
        compare(f"{args.sources} sources from S3", args.rounds,
                url, names, LARGE_BATCH, None, options, args.workers, args.epochs)  # fmt: skip
    small = common.made_once(data, f"mixture-records-{args.records}", lambda target: make_records(target, args.records))
    for name, decode in (("raw", None), ("json", "auto")):
        compare(f"{args.records:,} small records in two sets, {name}, from disk", args.rounds,
                f"{small}/", ["000", "001"], BATCH_SIZE, decode, None, args.workers, 1)  # fmt: skip
    tokens = common.made_once(data, f"mixture-tokens-{args.tokens}", lambda target: make_tokens(target, args.tokens))
    compare(f"{args.tokens:,} sequences of 2,048 tokens in two sets, from disk", args.rounds,
            f"{tokens}/", ["000", "001"], 32, {"bin": "array:uint16->int64"}, None, args.workers, 1)  # fmt: skip


if __name__ == "__main__":
    main()
