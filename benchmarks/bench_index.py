"""How fast shards are indexed, against reading and summing the same bytes, and how fast chunks are parsed.

Makes its own data in a temporary folder. Run: ``python benchmarks/bench_index.py [--mb 300] [--processes]``
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable

import numpy as np
from crc32c import crc32c

from streaming.indexing import index_shards
from streaming.scan import scan_shard
from streaming.storage import Storage
from streaming.tar import parse_chunk

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


def best(run: Callable[[], object], repeats: int = 3) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def read_and_sum(path: str) -> int:
    buffer, crc = memoryview(bytearray(READ_BYTES)), 0
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = crc32c(buffer[:count], crc)
    return crc


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=300, help="MB per kind of shard")
    parser.add_argument("--processes", action="store_true", help="index four shards in processes, not threads")
    args = parser.parse_args()
    kinds = {
        "430 B, 1 field": {"txt": 430},
        "430 B, 3 fields": {"jpg": 430, "json": 100, "cls": 1},
        "4 KB, 1 field": {"jpg": 4096},
        "68 KB, 2 fields": {"jpg": 68_000, "cls": 1},
    }
    print(f"{len(os.sched_getaffinity(0))} CPUs; best of 3")
    print("         records     read+crc       scan  ratio   samples/s   parse_chunk   4 shards")
    storage = Storage()
    with tempfile.TemporaryDirectory() as folder:
        for kind, fields in kinds.items():
            path = os.path.join(folder, "a.tar")
            num_samples = write_shard(path, args.mb * 10**6, fields)
            size = os.path.getsize(path)
            base = best(lambda path=path: read_and_sum(path))
            scan = best(lambda path=path: scan_shard(storage, path, "a.tar"))
            with open(path, "rb") as file:
                chunk = file.read(4 << 20)
            record_bytes = sum(512 - (-size // 512) * 512 for size in fields.values())
            chunk = chunk[: len(chunk) // record_bytes * record_bytes]
            parse = best(lambda chunk=chunk: parse_chunk(chunk), 20)
            quarters = [os.path.join(folder, f"q{part}.tar") for part in range(4)]
            for quarter in quarters:
                write_shard(quarter, args.mb * 10**6 // 4, fields)
            four = best(lambda q=quarters: index_shards(storage, q, force=True, processes=args.processes))
            print(
                f"{kind:>16} {size / base / 1e9:7.2f} GB/s {size / scan / 1e9:5.2f} GB/s {base / scan:6.2f} "
                f"{num_samples / scan:11,.0f} {len(chunk) / record_bytes / parse:11,.0f}/s "
                f"{size / four / 1e9:5.2f} GB/s"
            )


if __name__ == "__main__":
    main()
