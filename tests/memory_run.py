"""A loader alone in a process tree, and what that takes: run by test_memory.py as ``memory_run.py FOLDER WORKERS``,
or ``memory_run.py FOLDER WORKERS NAME``, where ``FOLDER/NAME`` has no index unless its name begins with "objects".

Prints JSON: ``idle_bytes`` (the same processes after a tiny epoch of a batch each), ``peak_bytes`` (the most while the
data set was read by a consumer that is slower than the loader), both over all processes, and the loader's own figures.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Self

import psutil
import torch

import streaming.catalog.open
from streaming import DataLoader, ShuffleConfig, StreamingDataset

LIMIT_BYTES = 128 << 20
SAMPLE_BYTES = 256 << 10
TINY_BATCH = 8


def decode(data: bytes) -> torch.Tensor:
    """Twice the bytes that it gets, so that batches count."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).repeat(2)


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


class Meet:
    """Keep a sample of the tiny epoch until as many processes as there are workers have had one.

    A worker that has never built a batch has yet to write to pages that it shares with the others: some MiB.
    The first batch waits for nobody, since the second is begun when its size is known.
    """

    def __init__(self, folder: str, num_workers: int) -> None:
        self._folder, self._num_workers = Path(folder), num_workers

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        is_first = not list(self._folder.iterdir())
        with (self._folder / str(os.getpid())).open("a"):
            pass
        pause = threading.Event()
        until = time.monotonic() + (0 if is_first or int(sample["__key__"]) < TINY_BATCH else 20)
        while len(list(self._folder.iterdir())) < self._num_workers and time.monotonic() < until:
            pause.wait(0.01)
        return sample


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
    dataset = StreamingDataset(
        folder, decode={"bin": decode}, shuffle=ShuffleConfig(lanes=4, window=window), transform=dict
    )
    return DataLoader(dataset, batch_size=8, num_workers=num_workers, memory_limit=LIMIT_BYTES, epoch_size=epoch_size)


def main(folder: str, num_workers: int, name: str = "large") -> None:
    with tempfile.TemporaryDirectory() as met:
        dataset = StreamingDataset(f"{folder}/tiny/", shuffle=False, transform=Meet(met, num_workers))
        with DataLoader(dataset, batch_size=TINY_BATCH, num_workers=num_workers, memory_limit=LIMIT_BYTES) as tiny:
            for batch in tiny:
                del batch
            gc.collect()
            idle_bytes = memory_bytes(folder)
        assert len(os.listdir(met)) >= num_workers, "each worker has built a batch"
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
