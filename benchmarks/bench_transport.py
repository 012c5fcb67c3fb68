"""How fast finished batches get from worker processes into this one: our pool beside torch's DataLoader.

Both make the same uint8 batches of ``--batch`` x 3 x 224 x 224 by copying one and the same image into each row, so that
what is measured is collating and transport; "from the arena" copies them from 19 MB of shard bytes instead.
``python benchmarks/bench_transport.py``; all take turns, the median counts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from streaming.build.batches.build import BadSample, BatchBuilder, Recipe, SourceRecipe
from streaming.build.batches.rows import FieldRange, Rows
from streaming.build.decode import resolve_decoders
from streaming.run.engine.memory.arena import Arena
from streaming.run.engine.workers.pool import WorkerPool
from streaming.run.engine.workers.ring import BatchRing

SHAPE = (3, 224, 224)
SAMPLE_BYTES = 3 * 224 * 224


class Images(torch.utils.data.Dataset):
    """The map-style data set: the same image over and over, as a tensor."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.image = torch.zeros(SHAPE, dtype=torch.uint8)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.image


def torch_loader(num_batches: int, batch: int, workers: int) -> tuple[float, float]:
    """Seconds per batch and CPU seconds of this process per batch, without the first few."""
    loader = torch.utils.data.DataLoader(
        Images(num_batches * batch), batch_size=batch, num_workers=workers, multiprocessing_context="fork"
    )
    iterator = iter(loader)
    for _ in range(2 * workers):
        next(iterator)
    return timed(iterator, num_batches - 2 * workers)


def timed(iterator: Iterator[object], num_batches: int) -> tuple[float, float]:
    started_s, cpu_s = time.perf_counter(), time.process_time()
    for _ in range(num_batches):
        consume(next(iterator))
    return (time.perf_counter() - started_s) / num_batches, (time.process_time() - cpu_s) / num_batches


def consume(batch: object) -> None:
    """A glance at it, as a copy to a device would start."""
    tensor = batch["img"] if isinstance(batch, dict) else batch
    assert tensor.shape[1:] == SHAPE
    assert not int(tensor[-1, -1, -1, -1])


def rows_of(arena: Arena, batch: int) -> Rows:
    start = arena.allocate(batch * SAMPLE_BYTES)
    assert start is not None
    starts = start + np.arange(batch) * SAMPLE_BYTES
    where = FieldRange(starts=starts, sizes=np.full(batch, SAMPLE_BYTES))
    return Rows(memory=arena.memory, view=arena.view, keys=[f"{i:08d}" for i in range(batch)],
                urls=["file:///shard.tar"] * batch, fields={"img": where}, damage={})  # fmt: skip


def none(_: int) -> Iterator[Rows]:
    return iter(())


def no_report(bad: BadSample) -> None:
    raise AssertionError(bad)


class SameImage:
    """A decoder that costs nothing, as ``Images`` costs torch nothing."""

    accepts_buffer = True

    def __init__(self) -> None:
        self.image = np.zeros(SHAPE, np.uint8)

    def __call__(self, data: object) -> np.ndarray:  # noqa: ARG002  a decoder's argument
        return self.image


class Ours:
    """The pool under builder threads, two batches ahead per worker, as the pipeline runs it."""

    def __init__(self, batch: int, workers: int, *, decode: bool) -> None:
        self.workers = workers
        self.arena = Arena(batch * SAMPLE_BYTES + (1 << 20))
        self.ring = BatchRing(3 * workers + 1)
        self.rows = rows_of(self.arena, batch)
        decoder = SameImage() if decode else "array:uint8:3x224x224"
        self.recipe = Recipe(parts=(SourceRecipe(decoders=resolve_decoders({"img": decoder})),))
        self.pool = WorkerPool(workers, self.recipe, self.arena, ring=self.ring)
        self.threads = ThreadPoolExecutor(max(1, workers))

    def batches(self) -> Iterator[object]:
        ahead = [self.threads.submit(self._build) for _ in range(2 * self.workers)]
        while True:
            yield ahead.pop(0).result()
            ahead.append(self.threads.submit(self._build))

    def run(self, num_batches: int) -> tuple[float, float]:
        iterator = self.batches()
        for _ in range(4 * self.workers):
            next(iterator)
        return timed(iterator, num_batches)

    def in_process(self, num_batches: int, *, ring: bool) -> tuple[float, float]:
        """The same batches built here, in ring slots or in fresh memory."""

        def batches() -> Iterator[object]:
            while True:
                if ring:
                    with self.ring.lease() as lease:
                        batch = BatchBuilder(self.recipe, none, no_report, lease.allocate).build(self.rows, None)
                    yield batch
                    del batch
                else:
                    yield BatchBuilder(self.recipe, none, no_report).build(self.rows, None)

        iterator = batches()
        for _ in range(3):
            next(iterator)
        return timed(iterator, num_batches)

    def _build(self) -> object:
        return self.pool.build(self.rows, None, none, no_report)

    def close(self) -> None:
        self.pool.close()
        self.threads.shutdown()
        self.ring.close()
        self.arena.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    num_bytes = args.batch * SAMPLE_BYTES
    ours, arena = (Ours(args.batch, args.workers, decode=decode) for decode in (True, False))
    results: dict[str, list[tuple[float, float]]] = {}
    for _ in range(args.rounds):
        for name, run in (
            (f"shardstream, {args.workers} workers", lambda: ours.run(args.batches)),
            (f"torch DataLoader, {args.workers} workers",
             lambda: torch_loader(args.batches + 2 * args.workers, args.batch, args.workers)),
            ("shardstream, in process, ring", lambda: ours.in_process(args.batches, ring=True)),
            ("shardstream, in process, fresh memory", lambda: ours.in_process(args.batches, ring=False)),
            (f"from the arena, {args.workers} workers", lambda: arena.run(args.batches)),
            ("from the arena, in process, ring", lambda: arena.in_process(args.batches, ring=True)),
            ("from the arena, in process, fresh memory", lambda: arena.in_process(args.batches, ring=False)),
        ):  # fmt: skip
            results.setdefault(name, []).append(run())
    ours.close()
    arena.close()
    print(f"{args.batch} x {SHAPE} uint8, {num_bytes / 1e6:.1f} MB a batch, {os.cpu_count()} CPUs, "
          f"load {os.getloadavg()[0]:.1f}, {threading.active_count()} threads left")  # fmt: skip
    for name, runs in results.items():
        wall_s, cpu_s = (statistics.median(run[i] for run in runs) for i in (0, 1))
        print(f"{name:40} {num_bytes / wall_s / 1e9:6.2f} GB/s   {cpu_s * 1e6:8.0f} us of this process per batch")


if __name__ == "__main__":
    main()
