"""What ``fields=`` saves where samples are large: captions without their videos, from files and from an S3 server.

2 MB videos with captions of 200 bytes. ``before`` reads whole chunks (no hole is ever worth a request), as releases
before index format 1.2 did. Also: what one more read of a file costs, from the page cache.

Run: ``python benchmarks/bench_fields.py [--data DIR] [--rounds 3] [--samples 256]``.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from common import arguments, machine, made_once, s3_copy, show, take_turns, write_shards

import streaming.shards.catalog.source as source_module
from infra import DeviceMesh
from streaming import DataLoader, StreamingDataset
from streaming.storage import Storage

VIDEO_BYTES = 2_000_000
CAPTION_BYTES = 200
NO_GAP = 1 << 60


def samples(count: int) -> Iterator[dict[str, object]]:
    video = np.random.default_rng(0).bytes(VIDEO_BYTES)
    for number in range(count):
        yield {"__key__": f"{number:06d}", "mp4": video, "txt": f"{number:0{CAPTION_BYTES}d}"}


def epoch(url: str, fields: tuple[str, ...], *, partial: bool, options: dict[str, str] | None = None) -> int:
    """One epoch; how many samples came."""
    kept = source_module.LOCAL_GAP_BYTES, source_module.REMOTE_GAP_BYTES
    if not partial:
        source_module.LOCAL_GAP_BYTES = source_module.REMOTE_GAP_BYTES = NO_GAP
    try:
        dataset = StreamingDataset(url, fields=fields, storage_options=options, decode=None)
        mesh = DeviceMesh.from_sizes(dp_size=1, rank=0, environ={})
        with DataLoader(dataset, batch_size=32, num_workers=0, device_mesh=mesh, last_batch="partial") as loader:
            return sum(len(batch["__key__"]) for batch in loader)
    finally:
        source_module.LOCAL_GAP_BYTES, source_module.REMOTE_GAP_BYTES = kept


def contestants(url: str, options: dict[str, str] | None = None) -> dict[str, Any]:
    return {
        "txt, before": lambda: epoch(url, ("txt",), partial=False, options=options),
        "txt": lambda: epoch(url, ("txt",), partial=True, options=options),
        "mp4, before": lambda: epoch(url, ("mp4",), partial=False, options=options),
        "mp4": lambda: epoch(url, ("mp4",), partial=True, options=options),
    }


def read_costs() -> None:
    """Seconds per read of a cached file, by size: a constant and a slope."""
    storage, found = Storage(), []
    with tempfile.NamedTemporaryFile() as file:
        file.write(os.urandom(64 << 20))
        file.flush()
        buffer = memoryview(bytearray(1 << 20))
        for size in (512, 4096, 64 << 10, 256 << 10, 1 << 20):
            best = float("inf")
            for _ in range(7):
                start_s = time.perf_counter()
                for number in range(32):
                    storage.read_into(file.name, number * size, buffer[:size])
                best = min(best, (time.perf_counter() - start_s) / 32)
            found.append(f"{size >> 10 or 0.5:g} KiB {best * 1e6:.0f} us")
    print("one read of a cached file:", ", ".join(found))


def main() -> None:
    args = arguments(__doc__ or "", samples=256)
    print(machine())
    read_costs()
    folder = made_once(
        args.data, f"videos-{args.samples}", lambda to: write_shards(to, samples(args.samples), per_shard=128)
    )
    show("files", take_turns(contestants(f"{folder}/"), args.rounds), against="txt, before")
    with s3_copy(folder) as (url, options):
        show("S3 server on loopback", take_turns(contestants(url, options), args.rounds), against="txt, before")


if __name__ == "__main__":
    main()
