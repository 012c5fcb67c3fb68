"""Measure what a late field costs: CPU time of an epoch beside the same bytes in one tar, alternating in one process.

    python benchmarks/bench_late_fields.py [--samples 20000] [--image 30000] [--late 8192] [--rounds 7]

Both sets have the same samples, with the same fields; in one of them the field ``lat`` is late. Batches are lists of
bytes (``decode=None``), of chunks that are mapped from files and of chunks that are read into memory. Reported is the
ratio of CPU seconds (all threads): the median over rounds of adjacent epochs, the first of which takes turns, and that
of the least of each; user and system, and user alone, which other programs disturb less. ``--profile`` prints where an
epoch of each spends its time.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np

from shard_tools import ShardWriter
from shard_tools.change.fields.join import FromSet, join_field
from streaming import DataLoader, StreamingDataset
from streaming.run.engine.memory.mapped import FileMaps, NoMaps
from streaming.run.loops import epoch_loop
from streaming.storage import Storage

BATCH = 64


def write(folder: Path, samples: Iterator[dict[str, object]]) -> None:
    """Write a set."""
    with ShardWriter(f"{folder}/{{:05d}}.tar") as writer:
        for sample in samples:
            writer.write(sample)


def make(folder: Path, num: int, image_bytes: int, late_bytes: int) -> tuple[str, str]:
    """Return the set with all in one tar, and the one with a late field."""
    rng = np.random.default_rng(0)
    pool = rng.bytes(image_bytes + late_bytes + 4096)

    def sample(number: int, *, has_base: bool, has_late: bool) -> dict[str, object]:
        found: dict[str, object] = {"__key__": f"{number:08d}"}
        at = number % 4096
        if has_base:
            found |= {"bin": pool[at : at + image_bytes], "cls": number % 10}
        return found | ({"lat": pool[at : at + late_bytes]} if has_late else {})

    write(folder / "one", (sample(number, has_base=True, has_late=True) for number in range(num)))
    write(folder / "two", (sample(number, has_base=True, has_late=False) for number in range(num)))
    write(folder / "from", (sample(number, has_base=False, has_late=True) for number in range(num)))
    join_field(str(folder / "two"), "lat", FromSet(url=str(folder / "from"), field="lat"), storage=Storage(None))
    return str(folder / "one"), str(folder / "two")


def epoch_s(url: str) -> tuple[float, float]:
    """Return the CPU seconds of an epoch: user and system, and user alone."""
    loader = DataLoader(StreamingDataset(url, shuffle=True, decode=None), batch_size=BATCH, num_workers=0)
    total = 0
    before = resource.getrusage(resource.RUSAGE_SELF)
    for batch in loader:
        total += len(batch["lat"])
    after = resource.getrusage(resource.RUSAGE_SELF)
    user_s = after.ru_utime - before.ru_utime
    return user_s + after.ru_stime - before.ru_stime, user_s


def compared(one: str, two: str, rounds: int) -> Iterator[str]:
    """Measure, and yield what is to be said of user and system time together, and of user time."""
    times: list[list[tuple[float, float]]] = [[], []]
    for number in range(rounds + 1):
        for side in (0, 1) if number % 2 else (1, 0):
            times[side].append(epoch_s((one, two)[side]))
    for place, what in enumerate(("CPU", "user")):
        firsts, seconds = ([each[place] for each in side[1:]] for side in times)
        ratios = sorted(second / first for first, second in zip(firsts, seconds, strict=True))
        yield (
            f"{what}: one tar {min(firsts):.3f} s, late field {min(seconds):.3f} s, ratio of these "
            f"{min(seconds) / min(firsts):.3f}, median {statistics.median(ratios):.3f} ({ratios[0]:.3f} to "
            f"{ratios[-1]:.3f})"
        )


def profile(url: str) -> None:
    """Print where an epoch spends its time, on the consumer's thread."""
    profiler = cProfile.Profile(time.thread_time)
    profiler.enable()
    epoch_s(url)
    profiler.disable()
    pstats.Stats(profiler, stream=sys.stdout).sort_stats("tottime").print_stats(35)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("samples", 20_000), ("image", 30_000), ("late", 8192), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="late-fields-"))
    try:
        one, two = make(folder, options.samples, options.image, options.late)
        for what, maps in (("mapped", FileMaps), ("read", lambda *_: NoMaps())):
            with mock.patch.object(epoch_loop, "FileMaps", maps):
                for said in compared(one, two, options.rounds):
                    sys.stdout.write(f"{what}, {said}\n")
                for url in (one, two) if options.profile else ():
                    profile(url)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
