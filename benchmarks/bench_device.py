"""DevicePrefetcher on a CUDA device: bytes per second, and what it costs a training step.

Run: ``python benchmarks/bench_device.py [--megabytes 19.3] [--batches 100] [--step-ms 20]``. Three questions:

1. How near does the prefetcher come to the copy engine: batches from page-locked memory and from pageable memory,
   handed out one after the other with no work between, against ``copy_`` between one buffer on either side.
2. What does a step cost: matrix products of about ``--step-ms``, each after a reduction of its batch, with the
   prefetcher over page-locked batches, and on one batch that stays on the device.
3. The same with a ``streaming.DataLoader`` over shards in a temporary folder behind it.

Contestants take turns, since a hot device slows down; medians of the rounds. A step's time is the mean over the last
three quarters of an epoch, by the device's clock; what the epoch's start takes beyond that is told beside it. The aims
are 90 % of the bare copy and 3 % of the step. Without CUDA it says so and ends.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shard_tools import ShardWriter
from streaming import DataLoader, DevicePrefetcher, StreamingDataset

ROUNDS = 5
ROWS = 128
LEAST_OF_COPY, MOST_OF_STEP = 0.90, 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of a table: ``aim`` is empty where there is none, else says whether it was met."""

    what: str
    value: str
    against: str = ""
    aim: str = ""

    def __str__(self) -> str:
        return f"{self.what:44} {self.value:>16}  {self.against:32} {self.aim}"


def aim(words: str, *, met: bool) -> str:
    return f"{words}: {'met' if met else 'MISSED'}"


def timed(work: Callable[[], object]) -> float:
    """Seconds of ``work``, all it left on the device included."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def in_turns(contestants: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """What each contestant measures in each round; a turn before the first does not count."""
    found: dict[str, list[Any]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, run in contestants.items():
            result = run()
            if number:
                found[name].append(result)
    return found


def drain(batches: Iterable[Any]) -> None:
    for _ in batches:
        pass


def bare_copies(source: torch.Tensor, num_batches: int) -> None:
    target = torch.empty_like(source, device="cuda")
    for _ in range(num_batches):
        target.copy_(source, non_blocking=True)


def bandwidth(row_bytes: int, num_batches: int) -> list[Figure]:
    """Question 1."""
    pageable = [torch.randint(0, 255, (ROWS, row_bytes), dtype=torch.uint8) for _ in range(4)]
    pinned = [batch.pin_memory() for batch in pageable]
    contestants = {"bare page-locked copy": lambda: timed(lambda: bare_copies(pinned[0], num_batches))}
    for name, source in (("page-locked", pinned), ("pageable", pageable)):
        batches = list(itertools.islice(itertools.cycle(source), num_batches))
        for depth in (1, 2, 4):
            contestants[f"{name} batches, depth {depth}"] = lambda batches=batches, depth=depth: timed(
                lambda: drain(DevicePrefetcher(batches, depth=depth))
            )
    found = in_turns(contestants, ROUNDS)
    rates = {name: pageable[0].nbytes * num_batches / statistics.median(times) for name, times in found.items()}
    bare = rates["bare page-locked copy"]
    return [
        Figure(
            what=name,
            value=f"{rate / 1e9:.2f} GB/s",
            against="" if rate == bare else f"{rate / bare:.1%} of the bare copy",
            aim=aim(f"{LEAST_OF_COPY:.0%}", met=rate >= LEAST_OF_COPY * bare) if name.startswith("page-locked") else "",
        )
        for name, rate in rates.items()
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Seconds of one step where the loop has settled, and of all that the epoch took beyond that."""

    step_s: float
    start_s: float


def steps_over(step: Callable[[Any], object], batches: Iterable[Any]) -> Steps:
    """Run ``step`` on each batch, with nobody waiting for the device in between."""
    torch.cuda.synchronize()
    begun_s = time.perf_counter()
    done: list[Any] = []
    for batch in batches:
        step(batch)
        done.append(torch.cuda.Event(enable_timing=True))
        done[-1].record()
    torch.cuda.synchronize()
    total_s = time.perf_counter() - begun_s
    first = len(done) // 4
    step_s = done[first].elapsed_time(done[-1]) / 1e3 / (len(done) - 1 - first)
    return Steps(step_s=step_s, start_s=max(0.0, total_s - step_s * len(done)))


def step_figures(found: Mapping[str, Sequence[Steps]], resident: str, *, aims: Sequence[str]) -> list[Figure]:
    """Medians, against the step called ``resident``; the aim counts for the names in ``aims``."""
    alone = statistics.median(one.step_s for one in found[resident])
    figures = []
    for name, rounds in found.items():
        step_s = statistics.median(one.step_s for one in rounds)
        start_ms = statistics.median(one.start_s for one in rounds) * 1e3
        more = step_s / alone - 1
        figures.append(
            Figure(
                what=name,
                value=f"{step_s * 1e3:.2f} ms",
                against="" if name == resident else f"{more:+.1%}, epoch's start {start_ms:.0f} ms",
                aim=aim(f"{MOST_OF_STEP:.0%}", met=more <= MOST_OF_STEP) if name in aims else "",
            )
        )
    return figures


class Products:
    """A step of matrix products that first reads every byte of its batch."""

    def __init__(self, step_s: float) -> None:
        self._matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) / 64
        self._products = 200
        batch = torch.zeros(1, device="cuda", dtype=torch.uint8)
        self(batch)
        self._products = max(1, round(step_s / timed(lambda: self(batch)) * self._products))

    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        value = self._matrix + batch.amax().to(torch.bfloat16) * 0
        for _ in range(self._products):
            value = value @ self._matrix
        return value


def step_times(step_ms: float, row_bytes: int, num_batches: int) -> list[Figure]:
    """Questions 2 and 3."""
    step = Products(step_ms / 1e3)
    pinned = torch.randint(0, 255, (ROWS, row_bytes), dtype=torch.uint8).pin_memory()
    resident = pinned.cuda()
    contestants: dict[str, Callable[[], Steps]] = {
        "step on a resident batch": lambda: steps_over(step, itertools.repeat(resident, num_batches)),
        "step, prefetched": lambda: steps_over(step, DevicePrefetcher([pinned] * num_batches)),
        "step, copied in its stream": lambda: steps_over(
            step, (pinned.to("cuda", non_blocking=True) for _ in range(num_batches))
        ),
    }
    with ExitStack() as closing:
        folder = closing.enter_context(tempfile.TemporaryDirectory())
        write_rows(folder, row_bytes, min(num_batches, 24) * ROWS)
        for workers in (0, 2, 8):
            loader = DataLoader(
                StreamingDataset(f"{folder}/", fields=("npy",)), ROWS, num_workers=workers,
                epoch_size=num_batches * ROWS, memory_limit="8GiB",
            )  # fmt: skip
            batches = closing.enter_context(DevicePrefetcher(loader))
            contestants[f"step, loader, {workers} workers"] = lambda batches=batches: steps_over(step, tensors(batches))
        found = in_turns(contestants, ROUNDS - 2)
    names = list(contestants)
    return step_figures(found, names[0], aims=[names[1], *names[3:]])


def tensors(batches: Iterable[dict[str, Any]]) -> Iterator[torch.Tensor]:
    return (batch["npy"] for batch in batches)


def write_rows(folder: str, row_bytes: int, num_rows: int) -> None:
    rng = np.random.default_rng(0)
    with ShardWriter(f"{folder}/{{:06d}}.tar", max_bytes="256MB") as writer:
        for number in range(num_rows):
            writer.write({"__key__": f"{number:08d}", "npy": rng.integers(0, 255, row_bytes, dtype=np.uint8)})


def measure(*, megabytes: float = 19.3, batches: int = 100, step_ms: float = 20.0) -> list[Figure]:
    """All three questions."""
    row_bytes = max(1, int(megabytes * 1e6 / ROWS))
    return bandwidth(row_bytes, batches * 2) + step_times(step_ms, row_bytes, batches)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=19.3, help="of a batch; 19.3: 128 x 3 x 224 x 224 bytes")
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--step-ms", type=float, default=20.0)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no CUDA device: nothing measured. The prefetcher's CPU path copies nothing, so it has no rate")
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, batches of {options.megabytes} MB")
    for figure in measure(megabytes=options.megabytes, batches=options.batches, step_ms=options.step_ms):
        print(figure, flush=True)


if __name__ == "__main__":
    main()
