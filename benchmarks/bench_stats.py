"""Measure ``shard_tools stats``: summing up the rows of an index, and looking at the values of a set.

python benchmarks/bench_stats.py --shards 200 --rows 50000 --images 20000
"""

from __future__ import annotations

import argparse
import io
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
from PIL import Image

from shard_tools import ShardWriter
from shard_tools.look.stats.run import StatsOptions, stats
from shard_tools.look.stats.totals import ColumnTotals, FieldTotals, Totals
from streaming.storage import Storage


def peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def part(shard: int, rows: int) -> tuple[list[str], pa.Array, np.random.Generator]:
    draw = np.random.default_rng((0, shard))
    return [f"{shard:05d}/{row:06d}" for row in range(rows)], pa.array(draw.integers(0, 1000, rows)), draw


def sum_up_rows(shards: int, rows: int) -> None:
    """Keys, sizes, checksums, a class and a score of each row, all different."""
    before, spent, totals = peak_mib(), 0.0, Totals()
    for shard in range(shards):
        keys, classes, draw = part(shard, rows)
        begun = time.process_time()
        one = Totals()
        sizes = draw.integers(1000, 100_000, rows)
        one.sizes.add(sizes, draw)
        one.add_keys(keys)
        field = one.fields["jpg"] = FieldTotals()
        field.sizes.add(sizes, draw)
        field.add_checksums(sizes, draw.integers(0, 2**32, rows))
        for name, values in (("cls", classes), ("score", pa.array(draw.random(rows)))):
            one.columns[name] = ColumnTotals()
            one.columns[name].add(name, values, draw)
        totals.merge(one)
        spent += time.process_time() - begun
    num = shards * rows
    print(f"{num:,} rows: {1e6 * spent / num:.2f} us of CPU a row, peak {peak_mib() - before:,} MiB more", flush=True)
    print(f"  of {num:,} different keys about {totals.keys.num_again:,} occur again")


def look_at_images(num: int) -> None:
    draw = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        with ShardWriter(f"{Path(folder)}/{{:06d}}.tar", max_samples=1000) as writer:
            for number in range(num):
                out = io.BytesIO()
                Image.fromarray(draw.integers(0, 255, (64, 64, 3), np.uint8)).save(out, "JPEG")
                writer.write({"__key__": f"{number:06d}", "jpg": out.getvalue(), "cls": number % 10})
        for limit in (2000, None):
            begun, cpu = time.perf_counter(), time.process_time()
            report = stats([folder], storage=Storage(), options=StatsOptions(limit=limit))
            wall_s, cpu_s = time.perf_counter() - begun, time.process_time() - cpu
            print(
                f"{report.totals.num_read:,} of {num:,} images: {wall_s:.2f} s, {cpu_s:.2f} s of CPU, "
                f"{report.totals.num_bytes_read / 2**20:.1f} MiB read",
                flush=True,
            )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--shards", type=int, default=200)
    options.add_argument("--rows", type=int, default=50_000)
    options.add_argument("--images", type=int, default=20_000)
    given = options.parse_args()
    sum_up_rows(given.shards, given.rows)
    look_at_images(given.images)


if __name__ == "__main__":
    main()
