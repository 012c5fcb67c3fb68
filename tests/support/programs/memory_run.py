"""A loader alone in a process tree, and its memory; forked by test_memory.py with ``FOUND FOLDER WORKERS [NAME]``.

``FOLDER/NAME`` has no index, unless its name begins with "objects". Writes JSON to the file ``FOUND``: ``idle_bytes``
(the same processes after a tiny epoch), ``peak_bytes`` (the most while the data set was read by a consumer that is
slower than the loader), both over all processes, and the loader's own figures.

A worker takes ``FIRST_BATCH_BYTES`` for its first batch, whatever it contains. ``idle_bytes`` includes this for as many
workers as built any of the large batches: few, since the most recently used idle worker is taken first.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import psutil
import torch

import streaming.shards.catalog.open
from streaming import DataLoader, ShuffleConfig, StreamingDataset
from streaming.run.engine.workers.fork_server import SHARED
from tests.support.processes.waiting import until

LIMIT_BYTES = 128 << 20
SAMPLE_BYTES = 256 << 10
_TIMES = {"large": 2, "streamed": 2, "mixed": 3}
NUM_SAMPLES = {name: times * LIMIT_BYTES // SAMPLE_BYTES for name, times in _TIMES.items()}
"""What is decoded of them is twice as large. Of mixed sizes, fewer rarely have several of the largest at once."""
BATCH_SIZE = 8
FIRST_BATCH_BYTES = 3 << 20
"""At least: 3.2 MiB of 8 workers, which share the rest; pages that are its own from then on."""


def decode(data: bytes) -> torch.Tensor:
    """Double the bytes, so that batches are large."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).repeat(2)


def forget(data: bytes) -> int:
    """Ignore the bytes, which fill chunks beside objects that are expensive to decode."""
    return len(data)


class Counted:
    """A decoder that counts the worker processes in which it was called.

    Args:
        decoder: The actual decoder.
        waits_for: Number of workers: none builds its second batch (the very first one comes alone, to be weighed), or
            its first, before all are up.
    """

    def __init__(self, decoder: Callable[[bytes], Any], waits_for: int = 0) -> None:
        self._decoder, self._waits_for = decoder, waits_for
        self._folder = tempfile.mkdtemp(prefix="built-")
        self._num_calls = self._wait_at = 0

    def __call__(self, data: bytes) -> Any:
        if self._num_calls == 0:
            self._wait_at = 0 if self.count() else BATCH_SIZE
            open(f"{self._folder}/{os.getpid()}", "w").close()
        if self._num_calls == self._wait_at:
            until(lambda: self.count() >= self._waits_for, "all workers have a batch; of those that do:",
                  details=self.count)  # fmt: skip
        self._num_calls += 1
        return self._decoder(data)

    def count(self) -> int:
        return len(os.listdir(self._folder))


def memory_bytes(folder: str) -> int:
    """Memory of this process and its descendants; shared memory counts once.

    Mapped files count as a whole if they lie in ``folder``, and not at all otherwise: the part of a library's pages
    that is attributed to a process depends on who else has them mapped at that moment.
    """
    total = 0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        try:
            shares = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            maps = Path(f"/proc/{process.pid}/maps").read_text()
        except (FileNotFoundError, ProcessLookupError):  # has just ended
            continue
        # Only this process was forked from one that is not counted; all its pages are attributed to it.
        anonymous = "Anonymous" if process.pid == os.getpid() else "Pss_Anon"
        total += sum(int(shares.split(f"\n{kind}:")[1].split()[0]) << 10 for kind in (anonymous, "Pss_Shmem"))
        for line in maps.splitlines():
            if folder in line:
                start, stop = line.split()[0].split("-")
                total += int(stop, 16) - int(start, 16)
    return total


class Sampler:
    """The maximum seen, sampled five times a second."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.peak_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(0.2):
            self.peak_bytes = max(self.peak_bytes, memory_bytes(self._folder))


def loader_of(
    folder: str, decoder: Counted, num_workers: int, epoch_size: int | None = None, prefetch_factor: int = 2
) -> DataLoader:
    window = 16 if epoch_size is None else 4096  # streamed: the window is bounded by its bytes
    dataset = StreamingDataset(
        folder, decode={"bin": decoder}, shuffle=ShuffleConfig(lanes=4, window=window), transform=dict
    )
    return DataLoader(
        dataset, BATCH_SIZE, num_workers=num_workers, memory_limit=LIMIT_BYTES, epoch_size=epoch_size,
        prefetch_factor=prefetch_factor, num_threads=0 if num_workers else None,  # who counts waits for all workers
    )  # fmt: skip


def main(found_path: str, folder: str, num_workers: int, name: str = "large") -> None:
    SHARED.linger_s = None  # one process forks the workers of both loaders
    with loader_of(f"{folder}/tiny/", Counted(decode, num_workers), num_workers) as tiny:
        for batch in tiny:
            del batch
        gc.collect()
        idle_bytes = memory_bytes(folder)
    epoch_size = None
    if name != "large" and not name.startswith("objects"):
        streaming.shards.catalog.open.SCAN_LIMIT_BYTES = 0  # too large to be indexed at start
        epoch_size = NUM_SAMPLES[name]
    # Decoded JSON: so many batches may be ahead that they would exceed the limit if they were not weighed.
    ahead = 32 if name == "objects-json" else 2
    decoder = Counted(forget if name.startswith("objects") else decode)
    with (
        loader_of(f"{folder}/{name}/", decoder, num_workers, epoch_size, ahead) as loader,
        Sampler(folder) as sampler,
    ):
        slow = threading.Event()
        for _ in loader:
            slow.wait(0.03)  # the consumer is the bottleneck, so that buffers fill
        found = loader.metrics()
    if num_workers:
        idle_bytes -= (num_workers - decoder.count()) * FIRST_BATCH_BYTES
    SHARED.close()
    found = {name: found[name] for name in ("arena_peak_bytes", "ring_peak_bytes", "batches")}
    Path(found_path).write_text(json.dumps({"idle_bytes": idle_bytes, "peak_bytes": sampler.peak_bytes, **found}))


if __name__ == "__main__":
    main(*sys.argv[1:3], int(sys.argv[3]), *sys.argv[4:])
