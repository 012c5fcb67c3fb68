"""Samples of shards without an index on their way to a worker process: through the arena, or inline with the order.

Both gather the same samples and have one worker sum them up, so that what is measured is the way there.
``python benchmarks/bench_gather.py``; the two take turns, the median counts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from streaming.build.batches.build import BadSample, Recipe, SourceRecipe
from streaming.build.batches.rows import Rows
from streaming.build.decode import resolve_decoders
from streaming.common.counters import Metrics
from streaming.run.engine.builders import Crew
from streaming.run.engine.unindexed.gather import pack_samples
from streaming.run.engine.unindexed.samples import RawSample


def sized(sample: dict[str, Any]) -> dict[str, Any]:
    """Next to no work, and a batch of next to no bytes."""
    return {"size": len(sample["bin"])}


def no_substitutes(_: int) -> Iterator[Rows]:
    return iter(())


def no_report(bad: BadSample) -> None:
    raise AssertionError(f"not expected: {bad}")


def timed(send: Callable[[], object], num_batches: int) -> tuple[float, float]:
    """Milliseconds per batch, and of them this process's CPU."""
    started_s, cpu_s = time.perf_counter(), time.process_time()
    for _ in range(num_batches):
        send()
    return (time.perf_counter() - started_s) * 1e3 / num_batches, (time.process_time() - cpu_s) * 1e3 / num_batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    recipe = Recipe(parts=(SourceRecipe(decoders=resolve_decoders(), transform=sized),))
    for num_rows, sample_bytes in ((256, 1_000), (128, 100_000)):
        crew = Crew(1, recipe, arena_bytes=64 << 20, depth=2, batch_bytes=64 << 20, metrics=Metrics())
        arena = crew.arena
        data = os.urandom(sample_bytes)
        samples = [RawSample(key=str(i), url="a.tar", fields={"bin": bytes(data)}) for i in range(num_rows)]

        def through_arena() -> None:
            packing = pack_samples(samples, None)  # noqa: B023  called within the turn
            start = arena.allocate(packing.num_bytes)  # noqa: B023
            assert start is not None
            rows = packing.place(arena.memory, arena.view, start)  # noqa: B023
            crew.builder.build(rows, None, no_substitutes, no_report)  # noqa: B023
            arena.free(start, packing.num_bytes)  # noqa: B023

        def inline() -> None:
            rows = pack_samples(samples, None).place_alone()  # noqa: B023
            crew.builder.build(rows, None, no_substitutes, no_report)  # noqa: B023

        ways: dict[str, Callable[[], None]] = {"arena": through_arena, "inline": inline}
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for way in ways.values():
            way()
        for _ in range(args.rounds):
            for name, way in ways.items():
                found[name].append(timed(way, args.batches))
        for name, rounds in found.items():
            wall, cpu = (statistics.median(column) for column in zip(*rounds, strict=True))
            print(f"{num_rows} samples of {sample_bytes} bytes, {name}: {wall:.2f} ms a batch, {cpu:.2f} ms CPU here")
        crew.close()
        arena.close()


if __name__ == "__main__":
    main()
