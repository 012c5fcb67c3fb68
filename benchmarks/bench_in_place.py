"""CPU seconds per GB of reading 256 MB of samples of 400 KB from an S3 server over plain HTTP, and GB per second.

Chunks are read into one arena, in the order of an epoch, by 4 threads and by as many as the loader has: by the standard
library's ``readinto`` (the least that a client in Python can do), through obstore, and in place. Then whole epochs of
bytes. With ``--round-trip-ms``, the same once more with a server whose every answer is late. At last the same chunks
from local files (as where files are not mapped): by ``readinto``, by the storage, and with their checksums compared.

Run: ``python benchmarks/bench_in_place.py [--rounds 7] [--samples 640] [--round-trip-ms 20] [--data FOLDER]``
"""

from __future__ import annotations

import http.client
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from urllib.parse import urlsplit

import common
import numpy as np
import obstore
from bench_bare_client import ranges_in_order
from obstore.store import S3Store

from streaming import DataLoader, StreamingDataset
from streaming.run.engine.memory.arena import Arena
from streaming.run.loops.epoch_loop import FETCH_THREADS
from streaming.shards.fetch.read import FetchRange, fetch_unit
from streaming.storage import Storage, local_path

SAMPLE_BYTES = 400_000
PER_SHARD = 160
Fetch = Callable[[FetchRange, memoryview], object]


def samples(num: int) -> Iterator[dict[str, object]]:
    dice = np.random.default_rng(0)
    for number in range(num):
        yield {"__key__": f"{number:06d}", "bin": dice.integers(0, 256, SAMPLE_BYTES, np.uint8).tobytes()}


def into_an_arena(fetch: Fetch, ranges: list[FetchRange], num_threads: int) -> int:
    """Read all ranges into an arena as the loader's; how many bytes."""
    lock, arena = threading.Lock(), Arena(sum(one.num_bytes + 4096 for one in ranges), shared=False)

    def read(wanted: FetchRange) -> int:
        with lock:
            start = arena.allocate(wanted.num_bytes)
        assert start is not None
        with arena.view[start : start + wanted.num_bytes] as out:
            fetch(wanted, out)
        return wanted.num_bytes

    with ThreadPoolExecutor(num_threads) as threads:
        num_bytes = sum(threads.map(read, ranges))
    arena.close()
    return num_bytes


def by_readinto(options: Mapping[str, str], ranges: list[FetchRange], num_threads: int) -> int:
    bucket = urlsplit(ranges[0].url).netloc
    store = S3Store(
        bucket, endpoint=options["endpoint_url"], access_key_id=options["key"], secret_access_key=options["secret"],
        region=options["region"], client_options={"allow_http": True},
    )  # fmt: skip
    keys = {urlsplit(one.url).path.lstrip("/") for one in ranges}
    signed = {f"s3://{bucket}/{key}": obstore.sign(store, "GET", key, timedelta(hours=1)) for key in keys}
    kept = threading.local()

    def fetch(wanted: FetchRange, out: memoryview) -> None:
        url = urlsplit(signed[wanted.url])
        if not hasattr(kept, "connection"):
            kept.connection = http.client.HTTPConnection(url.netloc)
        span = {"Range": f"bytes={wanted.byte_start}-{wanted.byte_end - 1}"}
        kept.connection.request("GET", f"{url.path}?{url.query}", headers=span)
        answer = kept.connection.getresponse()
        assert answer.readinto(out) == len(out)
        answer.read()

    return into_an_arena(fetch, ranges, num_threads)


def from_files(ranges: list[FetchRange], num_threads: int) -> int:
    def fetch(wanted: FetchRange, out: memoryview) -> None:
        with open(local_path(wanted.url), "rb", buffering=0) as file:
            file.seek(wanted.byte_start)
            assert file.readinto(out) == len(out)

    return into_an_arena(fetch, ranges, num_threads)


def with_checks(ranges: list[FetchRange], num_threads: int) -> int:
    storage = Storage()
    return into_an_arena(lambda one, out: fetch_unit(storage, one, out), ranges, num_threads)


def by_storage(client: str | None, options: Mapping[str, str], ranges: list[FetchRange], num_threads: int) -> int:
    storage = Storage({**options, "client": client})
    return into_an_arena(lambda one, out: storage.read_into(one.url, one.byte_start, out), ranges, num_threads)


def by_loader(client: str | None, options: Mapping[str, str], url: str) -> int:
    dataset = StreamingDataset(url, decode=None, storage_options={**options, "client": client})
    with DataLoader(dataset, 16) as loader:
        return sum(sum(map(len, batch["bin"])) for batch in loader)


def measure(contestants: Mapping[str, Callable[[], int]], rounds: int) -> None:
    """Print medians (lowest to highest) of CPU seconds of this process per GB, and of GB per second."""
    found: dict[str, list[tuple[float, ...]]] = {}
    for _ in range(rounds):
        for name, run in contestants.items():
            before, began_s = os.times(), time.perf_counter()
            num_gb = run() / 1e9
            taken_s, after = time.perf_counter() - began_s, os.times()
            user_s, system_s = after.user - before.user, after.system - before.system
            found.setdefault(name, []).append(((user_s + system_s) / num_gb, user_s / num_gb, num_gb / taken_s))
    for name, figures in found.items():
        cpu, user, rate = (statistics.median(one[column] for one in figures) for column in range(3))
        low, high = min(one[0] for one in figures), max(one[0] for one in figures)
        print(f"{name:28} {cpu:5.2f} CPU s/GB ({low:.2f} to {high:.2f}; {user:.2f} of it user)  {rate:5.2f} GB/s")


def main() -> None:
    args = common.arguments(__doc__ or "", samples=640, round_trip_ms=0)
    folder = common.made_once(
        args.data, f"in-place-{args.samples}",
        lambda target: common.write_shards(target, samples(args.samples), per_shard=PER_SHARD),
    )  # fmt: skip
    print(common.machine())
    for round_trip_ms in sorted({0, args.round_trip_ms}):
        with common.s3_copy(folder, round_trip_ms=round_trip_ms) as (url, options):
            ranges = ranges_in_order(url, options)
            contestants: dict[str, Callable[[], int]] = {}
            for num_threads in (4, FETCH_THREADS):
                by = f"{num_threads} threads"
                contestants[f"{by}, readinto"] = partial(by_readinto, options, ranges, num_threads)
                contestants[f"{by}, obstore"] = partial(by_storage, "obstore", options, ranges, num_threads)
                contestants[f"{by}, in place"] = partial(by_storage, None, options, ranges, num_threads)
            contestants["loader, obstore"] = partial(by_loader, "obstore", options, url)
            contestants["loader, in place"] = partial(by_loader, None, options, url)
            print(
                f"{len(ranges)} ranges of up to {max(one.num_bytes for one in ranges):,} bytes, {round_trip_ms} ms away"
            )
            measure(contestants, args.rounds)
    ranges = [replace(one, url=f"{folder}/{os.path.basename(one.url)}") for one in ranges]
    print("the same ranges of local files")
    local = {
        "readinto": partial(from_files, ranges, 4), "storage": partial(by_storage, None, {}, ranges, 4),
        "storage, checked": partial(with_checks, ranges, 4),
    }  # fmt: skip
    measure({f"4 threads, {name}": run for name, run in local.items()}, args.rounds)
    print(f"load {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
