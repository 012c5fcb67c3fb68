"""How fast shards are indexed, against reading and summing the same bytes, and how fast chunks are parsed.

Makes its own data in a temporary folder. Run: ``python benchmarks/bench_index.py [--mb 100] [--repeats 9]``
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np
from crc32c import crc32c

from streaming.shards.catalog.build import index_shards
from streaming.shards.catalog.scan import scan_shard
from streaming.shards.tar import parse_chunk
from streaming.storage import Storage

READ_BYTES = 16 << 20


def header(name: str, size: int) -> bytes:
    block = bytearray(512)
    block[: len(name)] = name.encode()
    block[100:124] = b"0000644\0" + b"0000000\0" * 2
    block[124:148] = b"%011o\0%011o\0" % (size, 0)
    block[148:157] = b" " * 8 + b"0"
    block[257:265] = b"ustar\x0000"
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def write_shard(path: str, num_bytes: int, fields: dict[str, int]) -> int:
    payload = np.random.default_rng(0).bytes(max(fields.values()))
    num_samples = 0
    with open(path, "wb") as out:
        while out.tell() < num_bytes:
            out.writelines(
                header(f"{num_samples:09d}.{field}", size) + payload[:size] + bytes(-size % 512)
                for field, size in fields.items()
            )
            num_samples += 1
        out.write(bytes(1024))
    return num_samples


def read_and_sum(path: str) -> int:
    buffer, crc = memoryview(bytearray(READ_BYTES)), 0
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = crc32c(buffer[:count], crc)
    return crc


def alternate(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, tuple[float, float]]:
    """Median wall and CPU seconds of each run; the runs take turns, so that load of the machine hits all alike."""
    wall: dict[str, list[float]] = {name: [] for name in runs}
    cpu: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            wall_start, cpu_start = time.perf_counter(), time.process_time()
            run()
            wall[name].append(time.perf_counter() - wall_start)
            cpu[name].append(time.process_time() - cpu_start)
    return {name: (statistics.median(wall[name]), statistics.median(cpu[name])) for name in runs}


def best(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=100, help="MB per kind of shard")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    kinds = {
        "430 B, 1 field": {"txt": 430},
        "430 B, 3 fields": {"jpg": 430, "json": 100, "cls": 1},
        "4 KB, 1 field": {"jpg": 4096},
        "68 KB, 2 fields": {"jpg": 68_000, "cls": 1},
        "200 KB, 2 fields": {"jpg": 200_000, "cls": 1},
    }
    print(f"{len(os.sched_getaffinity(0))} CPUs, load {os.getloadavg()[0]:.1f}; medians of {args.repeats}, alternating")
    print("         records     read+crc   scan/base wall, cpu   index/base wall, cpu   parse_chunk (best, cpu)")
    storage = Storage()
    with tempfile.TemporaryDirectory() as folder:
        for kind, fields in kinds.items():
            path = os.path.join(folder, "a.tar")
            write_shard(path, args.mb * 10**6, fields)
            runs = {
                "base": lambda path=path: read_and_sum(path),
                "scan": lambda path=path: scan_shard(storage, path, "a.tar"),
                "index": lambda path=path: index_shards(storage, [path], force=True),
            }
            times = alternate(runs, args.repeats)
            base = times["base"]
            ratios = {name: [b / t for b, t in zip(base, times[name], strict=True)] for name in ("scan", "index")}
            with open(path, "rb") as file:
                chunk = file.read(4 << 20)
            record_bytes = sum(512 - (-size // 512) * 512 for size in fields.values())
            chunk = chunk[: len(chunk) // record_bytes * record_bytes]
            parse = best(lambda chunk=chunk: parse_chunk(chunk), 30)
            print(
                f"{kind:>16} {os.path.getsize(path) / base[0] / 1e9:7.2f} GB/s   "
                f"{ratios['scan'][0]:13.2f} {ratios['scan'][1]:5.2f}   "
                f"{ratios['index'][0]:15.2f} {ratios['index'][1]:5.2f}   "
                f"{parse / (len(chunk) / record_bytes) * 1e6:8.3f} us/sample"
            )


if __name__ == "__main__":
    main()
