"""DevicePrefetcher on a CUDA device: bytes per second, and what it costs a training step.

Run: ``python benchmarks/bench_device.py [--megabytes 19.3] [--batches 200] [--step-ms 20]``. Three questions:

1. How near does the prefetcher come to the copy engine: batches from page-locked memory and from pageable memory,
   handed out one after the other with no work between, against ``copy_`` between one buffer on either side.
2. What does a step cost: matrix products of about ``--step-ms``, each after a reduction of its batch, with the
   prefetcher over page-locked batches, and on one batch that stays on the device.
3. The same with a ``streaming.DataLoader`` over shards in a temporary folder behind it.

Medians of five rounds; the aims are 90 % of the bare copy and 3 % of the step. Without CUDA it says so and ends.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from shard_tools import ShardWriter
from streaming import DataLoader, StreamingDataset
from streaming.device.prefetcher import DevicePrefetcher

ROUNDS = 5
ROWS = 128


def timed(work: Callable[[], object]) -> float:
    """Seconds of ``work``, all it left on the device included."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def median(work: Callable[[], object]) -> float:
    """Median seconds over the rounds, after one that does not count."""
    work()
    return statistics.median(timed(work) for _ in range(ROUNDS))


def bare_copies(source: torch.Tensor, num_batches: int) -> None:
    target = torch.empty_like(source, device="cuda")
    for _ in range(num_batches):
        target.copy_(source, non_blocking=True)


def drain(batches: Iterable[Any]) -> None:
    for _ in batches:
        pass


def bandwidth(row_bytes: int, num_batches: int) -> None:
    """Print question 1."""
    pageable = [torch.randint(0, 255, (ROWS, row_bytes), dtype=torch.uint8) for _ in range(4)]
    pinned = [batch.pin_memory() for batch in pageable]
    total = pageable[0].nbytes * num_batches
    bare = total / median(lambda: bare_copies(pinned[0], num_batches))
    print(f"bare page-locked copy        {bare / 1e9:7.2f} GB/s")
    for name, source in (("page-locked", pinned), ("pageable", pageable)):
        batches = list(itertools.islice(itertools.cycle(source), num_batches))
        for depth in (1, 2, 4):
            rate = total / median(lambda batches=batches, depth=depth: drain(DevicePrefetcher(batches, depth=depth)))
            print(f"{name + f' batches, depth {depth}':28} {rate / 1e9:7.2f} GB/s  {rate / bare:6.1%} of the bare copy")


class Step:
    """A step of matrix products that first reads every byte of its batch."""

    def __init__(self, step_s: float) -> None:
        self._matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) / 64
        self._products = 1
        one = median(lambda: self(torch.zeros(1, device="cuda", dtype=torch.uint8)))
        self._products = max(1, round(step_s / one))

    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        value = self._matrix + batch.amax().to(torch.bfloat16) * 0
        for _ in range(self._products):
            value = value @ self._matrix
        return value


def in_the_same_stream(pinned: torch.Tensor, num_batches: int) -> Iterator[torch.Tensor]:
    return (pinned.to("cuda", non_blocking=True) for _ in range(num_batches))


def steps_over(step: Step, batches: Iterable[torch.Tensor]) -> None:
    for batch in batches:
        step(batch)


def step_times(step: Step, row_bytes: int, num_batches: int) -> float:
    """Print question 2 and return the seconds of a step on a resident batch."""
    pinned = torch.zeros((ROWS, row_bytes), dtype=torch.uint8).pin_memory()
    resident = pinned.cuda()
    alone = median(lambda: steps_over(step, itertools.repeat(resident, num_batches))) / num_batches
    ahead = median(lambda: steps_over(step, DevicePrefetcher([pinned] * num_batches))) / num_batches
    copied = median(lambda: steps_over(step, in_the_same_stream(pinned, num_batches))) / num_batches
    print(f"step on a resident batch     {alone * 1e3:7.2f} ms")
    print(f"step, prefetched             {ahead * 1e3:7.2f} ms   {ahead / alone - 1:+6.1%}")
    print(f"step, copied in its stream   {copied * 1e3:7.2f} ms   {copied / alone - 1:+6.1%}")
    return alone


def with_loader(step: Step, alone_s: float, row_bytes: int, num_batches: int) -> None:
    """Print question 3."""
    with tempfile.TemporaryDirectory() as folder:
        write_rows(folder, row_bytes, min(num_batches, 24) * ROWS)
        for workers in (2, 8):
            loader = DataLoader(
                StreamingDataset(f"{folder}/", fields=("npy",)), ROWS, num_workers=workers, pin_memory=True,
                epoch_size=num_batches * ROWS, memory_limit="8GiB",
            )  # fmt: skip
            with DevicePrefetcher(loader) as batches:
                seconds = median(lambda batches=batches: steps_over(step, tensors(batches))) / num_batches
            print(f"step, {workers} workers' batches     {seconds * 1e3:7.2f} ms   {seconds / alone_s - 1:+6.1%}")


def tensors(batches: Iterable[dict[str, Any]]) -> Iterator[torch.Tensor]:
    return (batch["npy"] for batch in batches)


def write_rows(folder: str, row_bytes: int, num_rows: int) -> None:
    rng = np.random.default_rng(0)
    with ShardWriter(f"{folder}/{{:06d}}.tar", max_bytes="256MB") as writer:
        for number in range(num_rows):
            writer.write({"__key__": f"{number:08d}", "npy": rng.integers(0, 255, row_bytes, dtype=np.uint8)})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=19.3, help="of a batch; 19.3: 128 x 3 x 224 x 224 bytes")
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=20.0)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no CUDA device: nothing measured. The prefetcher's CPU path copies nothing, so it has no rate")
        return
    row_bytes = max(1, int(options.megabytes * 1e6 / ROWS))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, batches of {ROWS} x {row_bytes} bytes")
    bandwidth(row_bytes, options.batches)
    step = Step(options.step_ms / 1e3)
    alone_s = step_times(step, row_bytes, options.batches)
    with_loader(step, alone_s, row_bytes, options.batches)


if __name__ == "__main__":
    main()
