"""What the benchmarks share: data made once, contestants that take turns, a table, the machine."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from shard_tools import ShardWriter
from streaming.storage import Storage

Run = Callable[[], int]
"""Delivers one epoch to this process, everything opened anew, and returns how many samples came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Samples per second of one contestant, one number a round."""

    name: str
    per_second: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.per_second)


def arguments(description: str, **defaults: int) -> argparse.Namespace:
    """The command line: ``--data``, ``--rounds`` and an integer option for each of ``defaults``."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--data", default=os.path.join(tempfile.gettempdir(), "shardstream-bench"),
                        help="folder in which the data is made once and kept")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3, help="turns of every contestant")
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    return parser.parse_args()


def made_once(data: str, name: str, make: Callable[[str], None]) -> str:
    """The folder ``data/name``, filled by ``make`` if it is not there yet; a killed run leaves none half full."""
    folder = os.path.join(data, name)
    if not os.path.isdir(folder):
        print(f"making {folder} …", file=sys.stderr)
        unfinished = f"{folder}.{os.getpid()}.unfinished"
        os.makedirs(unfinished)
        try:
            make(unfinished)
            os.rename(unfinished, folder)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
    return folder


def write_shards(folder: str, samples: Iterable[Mapping[str, object]], *, per_shard: int, columns: Any = None) -> None:
    """Shards of so many samples each, with their index and, if asked for, columns lifted from the samples."""
    with ShardWriter(f"{folder}/{{:06d}}.tar", max_samples=per_shard, max_bytes="4GB", columns=columns) as writer:
        for sample in samples:
            writer.write(sample)


def read_all(folder: str) -> None:
    """Bring every file below ``folder`` into the page cache: all contestants' data together may not fit."""
    for parent, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(parent, name), "rb", buffering=0) as file:
                while file.read(16 << 20):
                    pass


def shard_files(folder: str) -> list[str]:
    """The shards in ``folder``, sorted."""
    return sorted(entry.path for entry in os.scandir(folder) if entry.name.endswith(".tar"))


def webdataset(folder: str, *steps: Callable[[Any], Any], batch_size: int) -> Iterator[Any]:
    """webdataset as its documentation has it: shards shuffled, a buffer of 1,000 samples, batches."""
    import webdataset as wds  # noqa: PLC0415  most benchmarks do without

    pipeline = wds.WebDataset(shard_files(folder), shardshuffle=1000, empty_check=False).shuffle(1000)
    for step in steps:
        pipeline = step(pipeline)
    return iter(pipeline.batched(batch_size, partial=False))


def take_turns(contestants: Mapping[str, Run], rounds: int) -> list[Rates]:
    """Each contestant once per round, in turns, so that a noisy machine is unfair to all of them alike."""
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            start_s = time.perf_counter()
            count = run()
            rates[name].append(count / (time.perf_counter() - start_s))
    return [Rates(name=name, per_second=tuple(found)) for name, found in rates.items()]


CLOCKS = {"CPU time": time.process_time, "CPU time of the thread that asks": time.thread_time}
"""Clocks that say more than the one on the wall where others use the machine."""


def show_turns(title: str, contestants: Mapping[str, Run], rounds: int, *, against: str) -> None:
    """Let contestants take turns, and show their rates by the clock and by each of ``CLOCKS``."""
    by_cpu: dict[str, dict[str, list[float]]] = {clock: defaultdict(list) for clock in CLOCKS}

    def counted(name: str, run: Run) -> Run:
        def timed() -> int:
            starts_s = {clock: now() for clock, now in CLOCKS.items()}
            count = run()
            for clock, now in CLOCKS.items():
                by_cpu[clock][name].append(count / (now() - starts_s[clock]))
            return count

        return timed

    rates = take_turns({name: counted(name, run) for name, run in contestants.items()}, rounds)
    show(f"{title}, by the clock", rates, against=against)
    for clock, known in by_cpu.items():
        cpu_rates = [Rates(name=name, per_second=tuple(found)) for name, found in known.items()]
        show(f"{title}, by {clock}", cpu_rates, against=against)


def show(title: str, rates: list[Rates], *, against: str) -> None:
    """Medians, spread, and the ratio to the contestant called ``against``."""
    base = next(found.median for found in rates if found.name == against)
    width = max(len(found.name) for found in rates)
    print(f"\n{title}\n{'':{width}}  {'samples/s':>11}  {'lowest':>11}  {'highest':>11}  against {against}")
    for found in rates:
        low, high = min(found.per_second), max(found.per_second)
        ratio = found.median / base
        print(f"{found.name:{width}}  {found.median:11,.0f}  {low:11,.0f}  {high:11,.0f}  {ratio:8.2f} x", flush=True)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def machine() -> str:
    """One line about where the numbers come from."""
    model = platform.processor() or platform.machine()
    with open("/proc/cpuinfo") as file:
        model = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), model)
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores, load = num_cores(), os.getloadavg()[0]
    packages = ", ".join(installed("torch", "numpy", "webdataset"))
    return (
        f"{time.strftime('%Y-%m-%d')}, {cores} cores of {model}, {memory_bytes / 2**30:.0f} GiB, load {load:.1f}, "
        f"Python {platform.python_version()}, {packages}"
    )


def commit() -> str:
    """The commit of the tree that is measured; empty: there is no history."""
    command = ["git", "-C", os.path.dirname(os.path.abspath(__file__)), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def installed(*names: str) -> Iterator[str]:
    """Those of the packages that are there, with their versions."""
    for name in names:
        with suppress(PackageNotFoundError):
            yield f"{name} {version(name)}"


@contextmanager
def s3_copy(folder: str, mb_per_s: float = 0.0, round_trip_ms: float = 0.0) -> Iterator[tuple[str, dict[str, str]]]:
    """``folder`` in a bucket of an S3 server on loopback: its URL and storage options.

    ``mb_per_s`` is what the server sends at most; 0: as much as the machine can. Each object is ``round_trip_ms`` late.
    """
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from tests.support.servers.on_loopback import MiniS3Server  # noqa: PLC0415  tests are not installed

    with MiniS3Server(buckets=("bench",), mb_per_s=mb_per_s, round_trip_ms=round_trip_ms) as server:
        storage = Storage(server.storage_options)
        for directory, _, names in os.walk(folder):
            for name in names:
                path = os.path.join(directory, name)
                with open(path, "rb") as file:
                    storage.put(f"s3://bench/{os.path.relpath(path, folder)}", file.read())
        yield "s3://bench/", server.storage_options
