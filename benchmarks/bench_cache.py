"""The node cache: hits and misses against plain files, by pread and by mmap, and what a large cache costs to scan.

Run: ``python benchmarks/bench_cache.py [--rounds 3] [--chunks 24] [--entries 60000] [--data FOLDER]``. Contestants take
turns chunk by chunk. Chunks are 8 MiB and lie in the page cache, as after writing; the fetch is a copy in memory.
"""

from __future__ import annotations

import mmap
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import common
import crc32c
import numpy as np

from streaming.common.counters import Metrics
from streaming.shards.cache import NodeCache
from streaming.shards.cache.entry import HEADER_BYTES, file_bytes
from streaming.shards.cache.key import EntryKey
from streaming.shards.cache.paths import CachePaths
from streaming.shards.cache.space import Space
from streaming.storage import Checked

CHUNK_BYTES = 8 << 20
URL = "s3://bucket/train/000000.tar"


class Bench:
    """One folder, one chunk of memory, and ways to get ``num_chunks`` chunks into it."""

    def __init__(self, folder: str, num_chunks: int) -> None:
        self.folder = folder
        self.starts = [number * CHUNK_BYTES for number in range(num_chunks)]
        self.source = np.random.default_rng(0).integers(0, 256, CHUNK_BYTES, dtype=np.uint8)
        self.source_crc = crc32c.crc32c(self.source)
        self.out = np.zeros(CHUNK_BYTES, np.uint8)
        self.cache = NodeCache(folder, 1 << 40)
        self.layout = CachePaths(folder)

    def fetch(self, view: memoryview) -> Checked:
        view[:] = self.source.data
        return Checked.comparing(len(view), ())

    def read(self, start: int, *, known_crc: bool = False) -> None:
        crc = self.source_crc if known_crc else None
        self.cache.read_into(URL, "v1", start, self.out.data, self.fetch, crc32c=crc)

    def forget(self, start: int) -> None:
        self.cache.invalidate(URL, "v1", start, CHUNK_BYTES)
        with suppress(FileNotFoundError):
            os.unlink(self.plain(start))

    def plain(self, start: int) -> str:
        return f"{self.folder}/{start}"

    def entry(self, start: int) -> str:
        return self.layout.entry(EntryKey.of(URL, "v1", start, CHUNK_BYTES))

    def plain_write(self, start: int, *, checked: bool) -> None:
        """Fetch, and write a file; ``checked`` computes the CRC32C that its readers will rely on."""
        self.fetch(self.out.data)
        if checked:
            crc32c.crc32c(self.out)
        fd = os.open(self.plain(start), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.write(fd, self.out.data)
        os.close(fd)

    def plain_read(self, start: int) -> None:
        fd = os.open(self.entry(start), os.O_RDONLY)
        os.preadv(fd, [self.out.data], HEADER_BYTES)
        os.close(fd)

    def mmap_read(self, start: int) -> None:
        """The same contract with mmap: the reader's own memory filled, and checked there."""
        fd = os.open(self.entry(start), os.O_RDONLY)
        with mmap.mmap(fd, file_bytes(CHUNK_BYTES), prot=mmap.PROT_READ) as mapped, memoryview(mapped) as view:
            self.out.data[:] = view[HEADER_BYTES:]
        os.close(fd)
        crc32c.crc32c(self.out)


def nothing(start: int) -> None:
    """Leave everything as it is."""


def no_fetch(view: memoryview) -> Checked:
    """Leave the memory as it is."""
    return Checked.comparing(len(view), ())


def in_turns(
    bench: Bench, contestants: dict[str, Callable[[int], None]], after: Callable[[int], None], rounds: int
) -> None:
    """Median over all chunks; the contestants take turns chunk by chunk, so that noise meets all of them alike."""
    found: dict[str, list[float]] = {name: [] for name in contestants}
    order = random.Random(0)
    for _ in range(rounds):
        for start in bench.starts:
            for name in order.sample(list(contestants), len(contestants)):  # nobody is always first on cold memory
                started_s = time.perf_counter()
                contestants[name](start)
                found[name].append(time.perf_counter() - started_s)
                after(start)
    base_s = statistics.median(next(iter(found.values())))
    for name, times_s in found.items():
        median_s = statistics.median(times_s)
        print(f"  {name:34} {CHUNK_BYTES / median_s / 1e9:7.2f} GB/s  time x {median_s / base_s:.2f}")


def large_cache(folder: str, num_entries: int) -> None:
    """Scan and eviction with many entries of no content: what counting them costs."""
    layout = CachePaths(folder)
    layout.make()
    for number in range(num_entries):
        path = layout.entry(EntryKey.of(URL, "v1", number, 4000))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.ftruncate(fd, 4064)
        os.close(fd)
    metrics = Metrics()
    space = Space(layout, num_entries * 4096, metrics)
    usage = os.open(layout.usage, os.O_RDWR | os.O_CREAT)
    started_s = time.perf_counter()
    space._count(usage)
    print(f"  scan of {num_entries} entries              {time.perf_counter() - started_s:7.2f} s")
    os.close(usage)
    started_s = time.perf_counter()
    NodeCache(folder, num_entries * 4096, metrics=metrics).read_into(
        URL, "v2", 0, memoryview(bytearray(4000)), no_fetch, crc32c=None
    )
    evicted = metrics.get("cache_evictions")
    print(f"  making room: {evicted:.0f} evicted        {time.perf_counter() - started_s:7.2f} s")


def small_entries(bench: Bench) -> None:
    out = memoryview(bytearray(4000))
    names = {False: "miss of 4 kB", True: "hit of 4 kB"}
    for hit, name in names.items():
        started_s = time.perf_counter()
        for start in range(1000):
            assert bench.cache.read_into(URL, "small", start, out, no_fetch, crc32c=None)[1] is hit
        print(f"  {name:34} {1e3 * (time.perf_counter() - started_s):7.0f} µs")


def bench_in(parent: str, num_chunks: int, rounds: int, num_entries: int) -> None:
    os.makedirs(parent, exist_ok=True)
    folder = tempfile.mkdtemp(prefix="bench-cache-", dir=parent)
    try:
        bench = Bench(folder, num_chunks)
        print(f"in {parent}, misses:")
        writes = {
            "fetch and plain write": partial(bench.plain_write, checked=False),
            "cache: miss, CRC32C in the index": partial(bench.read, known_crc=True),
            "fetch, CRC32C and plain write": partial(bench.plain_write, checked=True),
            "cache: miss, no CRC32C known": bench.read,
        }
        in_turns(bench, writes, bench.forget, rounds)
        for start in bench.starts:
            bench.read(start)
        print("hits:")
        reads = {
            "plain pread, unchecked": bench.plain_read,
            "mmap, copy and CRC32C": bench.mmap_read,
            "cache: hit": bench.read,
        }
        in_turns(bench, reads, nothing, rounds)
        small_entries(bench)
        shutil.rmtree(bench.layout.root)
        large_cache(folder, num_entries)
    finally:
        shutil.rmtree(folder)


def main() -> None:
    args = common.arguments(__doc__ or "", chunks=24, entries=60_000)
    print(common.machine())
    for parent in ("/dev/shm", args.data):
        bench_in(parent, args.chunks, args.rounds, args.entries)


if __name__ == "__main__":
    main()
