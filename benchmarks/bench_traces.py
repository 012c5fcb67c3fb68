"""What it costs to be watched: ranges for torch's profiler, a trace that is over, and one that is running.

Run: ``python benchmarks/bench_traces.py [--rounds 15] [--data FOLDER]``. Tokens (2,048 uint16 as int64 [32, 2048]) and
JSON records of 430 bytes (256 a batch), whole passes in this process, in turns: with nobody watching, with the ranges
and no profiler (as every loader is), with a trace that ended after its first step, and with one that runs. Shares are
medians over rounds of the CPU time of all threads, and of the wall time, against nobody in the same round. Then what a
batch costs more, alone: the calls that a batch makes while nobody watches, against those of before, in µs.
"""

from __future__ import annotations

import json
import os
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
from streaming.metrics import Metrics, Observer
from streaming.tracing.ranges import ProfilerRanges

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


def nobody(loader: DataLoader[Any]) -> None:
    loader._loop.metrics.observer = Observer()


def over(loader: DataLoader[Any]) -> None:
    loader.trace(os.path.join(tempfile.gettempdir(), "shardstream-bench-over.json"), steps=1)


def running(loader: DataLoader[Any]) -> None:
    loader.trace(os.path.join(tempfile.gettempdir(), "shardstream-bench-running.json"), steps=10_000)


WATCHED: dict[str, Callable[[DataLoader[Any]], None]] = {
    "nobody": nobody, "ranges": lambda _: None, "trace, over": over, "trace, running": running,
}  # fmt: skip


def seconds(folder: str, size: int, decode: Any, watch: Callable[[DataLoader[Any]], None]) -> tuple[float, float]:
    """µs of CPU and of wall time per batch, from the first batches to the last: nothing is written in that time."""
    with DataLoader(StreamingDataset(folder, decode=decode), size, num_threads=0) as loader:
        watch(loader)
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        count, begun = len(loader) - 3, (time.process_time(), time.perf_counter())
        for _ in range(count):
            next(batches)
        ended = time.process_time(), time.perf_counter()
        return (ended[0] - begun[0]) / count * 1e6, (ended[1] - begun[1]) / count * 1e6


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

    number = 20_000
    found = [[timeit.timeit(call, number=number) / number * 1e6 for call in (before, now)] for _ in range(25)]
    return min(one[0] for one in found), min(one[1] for one in found)


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
    return {name: min(timeit.repeat(call, number=20_000, repeat=9)) / 20_000 * 1e6 for name, call in calls.items()}


def main() -> None:
    args = common.arguments(__doc__ or "")
    print(common.machine())
    sets = {
        "tokens": (common.made_once(args.data, "traced-tokens", make_tokens), 32, {"bin": "array:uint16->int64"}),
        "records": (common.made_once(args.data, "traced-records", make_records), 256, None),
    }
    for name, (folder, size, decode) in sets.items():
        found: dict[str, list[tuple[float, float]]] = {who: [] for who in WATCHED}
        for turn in range(args.rounds + 1):
            order = [*WATCHED][turn % len(WATCHED) :] + [*WATCHED][: turn % len(WATCHED)]
            now = {who: seconds(folder, size, decode, WATCHED[who]) for who in order}
            if turn:  # the first is for the page cache
                for who in WATCHED:
                    found[who].append(now[who])
        for who, each in found.items():
            told = []
            for kind, what in enumerate(("CPU", "wall")):
                own, base = ([one[kind] for one in some] for some in (each, found["nobody"]))
                share = statistics.median(one / alone - 1 for one, alone in zip(own, base, strict=True))
                told.append(f"{what} {statistics.median(own):6.1f} µs ({share:+.1%}, least {min(own):6.1f})")
            print(f"{name:8} {who:15} a batch: {'; '.join(told)}", flush=True)
    before, now_us = calls_of_a_batch()
    print(f"calls of a batch: {before:.2f} µs before, {now_us:.2f} µs now, {now_us - before:+.2f} µs")
    for name, us in ranges_without_a_profiler().items():
        print(f"{name}, without a profiler: {us * 1000:,.0f} ns")


if __name__ == "__main__":
    main()
