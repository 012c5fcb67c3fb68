"""What looking at a loader costs: Prometheus scraped each second, OpenTelemetry read each second, a socket asked twice
a second, against none, in turns in one process.

    python benchmarks/bench_observing.py [--rounds 40] [--seconds 1]

Each turn reads for some seconds with one loader that goes on: tokens (rows of 2,048 uint16, 32 a batch) and records (a
kilobyte of text and a class, 256 a batch). The training step looks at one number of the batch: there is nothing behind
which a cost could hide. Then the CPU time of one answer, which no other process on the machine disturbs: all that an
observer costs, since the training thread does nothing for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from common import arguments, machine, made_once
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    InMemoryMetricReader,
    MetricExporter,
    MetricExportResult,
    PeriodicExportingMetricReader,
)
from prometheus_client import CollectorRegistry, generate_latest, start_http_server

import streaming.metrics
from shard_tools import ShardWriter
from streaming import DataLoader, StreamingDataset
from streaming.watch.metrics.server import told


def write_tokens(folder: str) -> None:
    generator = np.random.default_rng(0)
    with ShardWriter(os.path.join(folder, "{:06d}.tar"), max_samples=2000) as writer:
        for number in range(20_000):
            writer.write({"__key__": f"{number:06d}", "npy": generator.integers(0, 50_000, 2048, dtype=np.uint16)})


def write_records(folder: str) -> None:
    with ShardWriter(os.path.join(folder, "{:06d}.tar"), max_samples=10_000) as writer:
        for number in range(100_000):
            writer.write({"__key__": f"{number:06d}", "cls": number % 1000, "txt": f"record {number} " * 70})


@contextlib.contextmanager
def each_second(act: Callable[[], object], pause_s: float = 1.0) -> Iterator[None]:
    """Call a function in a thread, at once and then again and again."""
    stop = threading.Event()

    def go_on() -> None:
        while True:
            act()
            if stop.wait(pause_s):
                return

    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextlib.contextmanager
def scraped(loader: Any) -> Iterator[None]:
    registry = CollectorRegistry()
    end = streaming.metrics.prometheus(loader, registry)
    server, thread = start_http_server(0, "127.0.0.1", registry)
    address = f"http://127.0.0.1:{server.server_port}/metrics"
    with each_second(lambda: urllib.request.urlopen(address).read()):
        yield
    end.close()
    server.shutdown()
    server.server_close()
    thread.join()


class Nowhere(MetricExporter):
    """Takes what is exported, and keeps none of it."""

    def export(self, metrics_data: Any, *_: Any, **__: Any) -> MetricExportResult:
        assert metrics_data.resource_metrics
        return MetricExportResult.SUCCESS

    def force_flush(self, *_: Any) -> bool:
        return True

    def shutdown(self, *_: Any, **__: Any) -> None:
        pass


@contextlib.contextmanager
def collected(loader: Any) -> Iterator[None]:
    provider = MeterProvider([PeriodicExportingMetricReader(Nowhere(), export_interval_millis=1000)])
    end = streaming.metrics.opentelemetry(loader, provider)
    yield
    end.close()
    provider.shutdown()


@contextlib.contextmanager
def served(loader: Any) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        end = streaming.metrics.serve(loader, os.path.join(folder, "one.sock"))

        def ask() -> None:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(end.path)
                while connection.recv(1 << 16):
                    pass

        with each_second(ask, 0.5):
            yield
        end.close()


@contextlib.contextmanager
def alone(_: Any) -> Iterator[None]:
    yield


KINDS = {"off": alone, "prometheus, scraped each second": scraped, "opentelemetry, read each second": collected,
         "serve, asked twice a second": served}  # fmt: skip


def speeds(batches: Iterator[Any], step: Callable[[Any], object], seconds: float) -> tuple[float, float]:
    """Batches per second, and CPU milliseconds of the whole process per batch, which other processes disturb less."""
    until_s, count = time.perf_counter() + seconds, 0
    begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
    while time.perf_counter() < until_s:
        for _ in range(20):
            step(next(batches))
        count += 20
    return count / (time.perf_counter() - begun_s), 1000 * (time.process_time() - begun_cpu_s) / count


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def cost_of_asking(loader: Any) -> None:
    """CPU time of one answer, in the thread that gives it; asked once a second, that is the share of a core."""
    registry, reader = CollectorRegistry(), InMemoryMetricReader()
    provider = MeterProvider([reader])
    streaming.metrics.prometheus(loader, registry)
    streaming.metrics.opentelemetry(loader, provider)
    asks: dict[str, Callable[[], object]] = {
        "loader.metrics()": loader.metrics, "flat": lambda: streaming.metrics.flat(loader),
        "prometheus (the text)": lambda: generate_latest(registry), "opentelemetry": reader.get_metrics_data,
        "serve (the text)": lambda: json.dumps(told(loader, 0.0)),
    }  # fmt: skip
    for name, ask in asks.items():
        times = []
        for _ in range(200):
            begun_s = time.thread_time()
            ask()
            times.append(time.thread_time() - begun_s)
        middle_s = statistics.median(times)
        print(f"  one answer of {name:<22}{1e6 * middle_s:6.0f} us CPU: once a second {middle_s:.3%} of a core")
    provider.shutdown()


def main() -> None:
    torch.set_num_threads(1)
    given = arguments(__doc__ or "", seconds=1)
    print(machine())
    sets = {
        "tokens": (made_once(given.data, "observing-tokens", write_tokens), 32, lambda b: b["npy"][0, 0].item()),
        "records": (made_once(given.data, "observing-records", write_records), 256, lambda b: b["cls"][0].item()),
    }
    for name, (url, size, step) in sets.items():
        with DataLoader(StreamingDataset(url), batch_size=size) as loader:
            batches = endless(loader)
            speeds(batches, step, given.seconds)
            found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
            for number in range(given.rounds):
                for kind in list(KINDS) if number % 2 else [*reversed(KINDS)]:
                    with KINDS[kind](loader):
                        found[kind].append(speeds(batches, step, given.seconds))
            print(f"{name}, batches of {size}, medians and best of {given.rounds} rounds, against off")
            for kind in KINDS:
                shown = []
                for place, unit in ((0, "batches/s"), (1, "ms CPU/batch")):
                    mine, off = ([pair[place] for pair in found[one]] for one in (kind, "off"))
                    middle, best = statistics.median(mine), max if place == 0 else min
                    change = middle / statistics.median(off) - 1
                    peak = f"best {best(mine):.4g} {best(mine) / best(off) - 1:+.1%}"
                    shown.append(f"{middle:.4g} {unit} {change:+.1%}, {peak}")
                print(f"  {kind:<34}{'; '.join(shown)}")
            cost_of_asking(loader)
            batches.close()


if __name__ == "__main__":
    main()
