"""A loader alone in a process tree, and what that takes: run by test_memory.py as ``memory_run.py FOLDER WORKERS``,
or ``memory_run.py FOLDER WORKERS NAME``, where ``FOLDER/NAME`` has no index unless its name begins with "objects".

Prints JSON: ``idle_bytes`` (the same processes after a tiny epoch), ``peak_bytes`` (the most while the data set was
read by a consumer that is slower than the loader), both over all processes, and the loader's own figures.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
from pathlib import Path
from typing import Self

import psutil
import torch

import streaming.catalog.open
from streaming import DataLoader, ShuffleConfig, StreamingDataset

LIMIT_BYTES = 128 << 20
SAMPLE_BYTES = 256 << 10


def decode(data: bytes) -> torch.Tensor:
    """Twice the bytes that it gets, so that batches count."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).repeat(2)


def forget(data: bytes) -> int:
    """Make nothing of the bytes, which fill chunks beside objects that are dear to decode."""
    return len(data)


def memory_bytes(folder: str) -> int:
    """Of this process and all below it; what they share counts once.

    Files that are mapped count as a whole if they lie in ``folder``, and not at all otherwise: which part of a
    library's pages counts for a process depends on who else has them mapped at that moment.
    """
    total = 0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        try:
            shares = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            maps = Path(f"/proc/{process.pid}/maps").read_text()
        except (FileNotFoundError, ProcessLookupError):  # has just ended
            continue
        total += sum(int(shares.split(f"\n{kind}:")[1].split()[0]) << 10 for kind in ("Pss_Anon", "Pss_Shmem"))
        for line in maps.splitlines():
            if folder in line:
                start, stop = line.split()[0].split("-")
                total += int(stop, 16) - int(start, 16)
    return total


class Sampler:
    """The most that was seen, looked at ten times a second."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.peak_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(0.1):
            self.peak_bytes = max(self.peak_bytes, memory_bytes(self._folder))


def loader_of(folder: str, num_workers: int, epoch_size: int | None = None) -> DataLoader:
    window = 16 if epoch_size is None else 4096  # streamed: the window is bounded by its bytes
    decoder = forget if "objects" in folder else decode
    dataset = StreamingDataset(
        folder, decode={"bin": decoder}, shuffle=ShuffleConfig(lanes=4, window=window), transform=dict
    )
    return DataLoader(dataset, batch_size=8, num_workers=num_workers, memory_limit=LIMIT_BYTES, epoch_size=epoch_size)


def main(folder: str, num_workers: int, name: str = "large") -> None:
    with loader_of(f"{folder}/tiny/", num_workers) as tiny:
        for batch in tiny:
            del batch
        gc.collect()
        idle_bytes = memory_bytes(folder)
    epoch_size = None
    if name != "large" and not name.startswith("objects"):
        streaming.catalog.open.SCAN_LIMIT_BYTES = 0  # too large to be indexed at start
        epoch_size = 3 * LIMIT_BYTES // SAMPLE_BYTES
    with loader_of(f"{folder}/{name}/", num_workers, epoch_size) as loader, Sampler(folder) as sampler:
        slow = threading.Event()
        for _ in loader:
            slow.wait(0.03)  # the consumer is what everything waits for, so that buffers fill
        found = loader.metrics()
    print(
        json.dumps(
            {
                "idle_bytes": idle_bytes,
                "peak_bytes": sampler.peak_bytes,
                **{name: found[name] for name in ("arena_peak_bytes", "ring_peak_bytes", "batches")},
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
