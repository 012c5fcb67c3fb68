"""What storage order costs over ranks where records are small: requests, bytes and seconds at an S3 server.

Records of 1 KiB, ``shuffle=False``, the data-parallel ranks one after the other in this process. A rank reads its slice
of a batch where that and one span (64 KiB) are less than the global batch; else it reads whole chunks, and so do all
others. The cures: a larger batch, the node cache, which the ranks of a node share, or an order that is shuffled.
Requests for the index are not counted.

Run: ``python benchmarks/bench_storage_order.py [--data DIR] [--rounds 3] [--samples 16384] [--ranks 8]``.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from urllib.request import Request, urlopen

import numpy as np
from common import arguments, machine, made_once, s3_copy, write_shards

from infra import DeviceMesh
from streaming import DataLoader, StreamingDataset

RECORD_BYTES = 512  # with its tar header, 1 KiB
SMALL, LARGE = 8, 64  # samples a rank and batch: 8 and 64 KiB


def samples(count: int) -> Iterator[dict[str, object]]:
    rng = np.random.default_rng(0)
    for number in range(count):
        yield {"__key__": f"{number:08d}", "bin": rng.bytes(RECORD_BYTES)}


def requests_of_shards(endpoint: str) -> list[int]:
    """The bytes that each request for a part of a shard has brought since the last call."""
    with urlopen(f"{endpoint}/_log") as answer:
        log = json.load(answer)
    with urlopen(Request(f"{endpoint}/_log", method="DELETE")):
        pass
    return [entry["bytes"] for entry in log if entry["method"] == "GET" and entry["path"].endswith(".tar")]


def epoch(
    url: str, options: dict[str, str], ranks: int, batch_size: int, *, shuffle: bool, cache_dir: str | None
) -> int:
    """One epoch of each rank, one rank after the other; how many samples came."""
    count = 0
    for rank in range(ranks):
        mesh = DeviceMesh.from_sizes(dp_size=ranks, rank=rank, environ={})
        dataset = StreamingDataset(url, shuffle=shuffle, storage_options=options, decode=None, cache_dir=cache_dir)
        with DataLoader(dataset, batch_size=batch_size, device_mesh=mesh) as loader:
            count += sum(len(batch["__key__"]) for batch in loader)
    return count


def main() -> None:
    args = arguments(__doc__ or "", samples=16384, ranks=8)
    print(machine())
    folder = made_once(
        args.data, f"storage-order-{args.samples}", lambda to: write_shards(to, samples(args.samples), per_shard=4096)
    )
    cases = {
        f"slices of {LARGE} KiB": (LARGE, False, False),
        f"slices of {SMALL} KiB": (SMALL, False, False),
        f"slices of {SMALL} KiB, cache_dir": (SMALL, False, True),
        f"batches of {SMALL}, shuffled": (SMALL, True, False),
    }
    print(f"\n{args.samples} records of 1 KiB, {args.ranks} ranks\n{'':26}  requests        MB  seconds (median, all)")
    with s3_copy(folder) as (url, options):
        for name, (batch_size, shuffle, is_cached) in cases.items():
            seconds, brought = [], []
            for _ in range(args.rounds):
                requests_of_shards(options["endpoint_url"])
                with tempfile.TemporaryDirectory() if is_cached else nullcontext() as cache_dir:
                    start_s = time.perf_counter()
                    count = epoch(url, options, args.ranks, batch_size, shuffle=shuffle, cache_dir=cache_dir)
                    seconds.append(time.perf_counter() - start_s)
                brought = requests_of_shards(options["endpoint_url"])
                if count != args.samples:
                    raise SystemExit(f"{name}: {count} samples of {args.samples}")
            every = ", ".join(f"{second:.1f}" for second in seconds)
            print(
                f"{name:26}  {len(brought):8,}  {sum(brought) / 1e6:8.1f}  {statistics.median(seconds):.1f} ({every})"
            )


if __name__ == "__main__":
    main()
