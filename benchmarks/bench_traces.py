"""What it costs to be watched: ranges for torch's profiler, a trace that is over, and one that is running.

Run: ``python benchmarks/bench_traces.py [--rounds 12] [--data FOLDER]``. Tokens (2,048 uint16 as int64 [32, 2048]) and
JSON records of 430 bytes (256 a batch), built in the consumer's thread. The watcher changes with every batch, at
random: nobody; the ranges without a profiler, as every loader has them; a trace that is over; one that runs. Figures
are of the CPU time that the consumer's thread takes for a batch, so that a noisy machine is unfair to all alike: the
median, and the quarter that was disturbed least. Then what a batch costs more, alone: the calls that a batch makes
while nobody watches, against those of before; and a range in torch's ways, without a profiler.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
import time
import timeit
from collections.abc import Callable
from functools import partial
from typing import Any

import common
import numpy as np
from torch._C._profiler import _RecordFunctionFast
from torch.profiler import record_function

from streaming import DataLoader, StreamingDataset
from streaming.common.counters import Metrics, Observer
from streaming.watch.tracing.ranges import ProfilerRanges

TOKENS, RECORDS = 40_000, 200_000


def make_tokens(folder: str) -> None:
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 50_000, 2048, np.uint16).tobytes() for _ in range(64)]
    common.write_shards(folder, ({"__key__": f"{i:09d}", "bin": rows[i % 64]} for i in range(TOKENS)), per_shard=5000)


def make_records(folder: str) -> None:
    rows = [json.dumps({"text": "word " * 76, "number": number}).encode() for number in range(64)]
    common.write_shards(
        folder, ({"__key__": f"{i:09d}", "json": rows[i % 64]} for i in range(RECORDS)), per_shard=50_000
    )


def watchers(loader: DataLoader[Any], beside: str) -> dict[str, Observer]:
    """Who may watch, by name. The trace that is over stays, as if nothing had taken it away."""
    metrics = loader._loop.metrics
    ranges = metrics.observer
    loader.trace(beside, steps=1)
    over = loader._tracing
    loader.close()
    loader.trace(beside, steps=10_000)
    assert over is not None
    assert loader._tracing is not None
    return {"nobody": Observer(), "ranges": ranges, "trace, over": over, "trace, running": loader._tracing}


def batches_of(folder: str, size: int, decode: Any, found: dict[str, list[float]], seed: int) -> None:
    """Enter µs of CPU of each batch of a pass, by who watched it."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as beside:
        loader = DataLoader(StreamingDataset(folder, decode=decode, seed=seed), size, num_threads=0)
        watching = watchers(loader, os.path.join(beside, "trace.json"))
        metrics, batches = loader._loop.metrics, iter(loader)
        metrics.observer = watching["nobody"]
        next(batches)
        for _ in range((len(loader) - 1) // len(watching)):
            for who in chance.sample([*watching], len(watching)):
                metrics.observer = watching[who]
                begun_s = time.thread_time()
                next(batches)
                found.setdefault(who, []).append((time.thread_time() - begun_s) * 1e6)
        metrics.observer = watching["ranges"]
        del batches
        loader.close()


class _Before:
    """What ``Metrics.timed`` returned before it could be watched."""

    __slots__ = ("_metrics", "_name", "_start_s")

    def __init__(self, metrics: Metrics, name: str) -> None:
        self._metrics, self._name = metrics, name

    def __enter__(self) -> None:
        self._start_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._metrics.add(self._name, time.perf_counter() - self._start_s)


def calls_of_a_batch() -> tuple[float, float]:
    """µs of the calls that a batch makes for being counted, before and now."""
    metrics = Metrics(ProfilerRanges())

    def before() -> None:
        with _Before(metrics, "build_in_consumer_s"):
            pass

    def now() -> None:
        asked = metrics.observer.asks()
        if asked is None:
            with metrics.timed("build_in_consumer_s", metrics.get, 1):
                pass

    found = [least_us(call) for call in (before, now)]
    return found[0], found[1]


def least_us(call: Callable[[], Any], number: int = 2_000) -> float:
    """The least CPU time of a call, in µs."""
    return min(timeit.repeat(call, timer=time.thread_time, number=number, repeat=200)) / number * 1e6


def ranges_without_a_profiler() -> dict[str, float]:
    """µs of one range, in torch's ways and ours."""

    def with_range(make: Callable[[str], Any]) -> None:
        with make("name"):
            pass

    calls: dict[str, Callable[[], Any]] = {
        "record_function": lambda: with_range(record_function),
        "_RecordFunctionFast": lambda: with_range(_RecordFunctionFast),
        "ProfilerRanges.begin": partial(ProfilerRanges().begin, "fetch_s"),
    }
    return {name: least_us(call) for name, call in calls.items()}


def main() -> None:
    args = common.arguments(__doc__ or "")
    print(common.machine())
    sets = {
        "tokens": (common.made_once(args.data, "traced-tokens", make_tokens), 32, {"bin": "array:uint16->int64"}),
        "records": (common.made_once(args.data, "traced-records", make_records), 256, None),
    }
    for name, (folder, size, decode) in sets.items():
        found: dict[str, list[float]] = {}
        for turn in range(args.rounds):
            batches_of(folder, size, decode, found, turn)
        alone = statistics.quantiles(found["nobody"], n=4)
        for who, each in sorted(found.items()):
            low, middle, _ = statistics.quantiles(each, n=4)
            print(
                f"{name:8} {who:15} {middle:8.1f} µs of CPU a batch ({middle / alone[1] - 1:+.1%}), a quarter of "
                f"{len(each)} up to {low:.1f} ({low / alone[0] - 1:+.1%})",
                flush=True,
            )
    before, now_us = calls_of_a_batch()
    print(f"calls of a batch: {before:.2f} µs before, {now_us:.2f} µs now, {now_us - before:+.2f} µs")
    for name, us in ranges_without_a_profiler().items():
        print(f"{name}, without a profiler: {us * 1000:,.0f} ns")


if __name__ == "__main__":
    main()
