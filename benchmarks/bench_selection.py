"""Microseconds of what is asked of a ``Selection`` for each batch, chunk or dataset, over a table of 10**6 chunks.

Run: ``python benchmarks/bench_selection.py [--chunks 1000000]``. CPU time of this process, best of five; 100 samples a
chunk, 30 % kept by the filter, four groups. Blocks are of 4,096 rows at random, which is worse than any order.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import common
import numpy as np

from streaming.shards.index.chunk_table import ChunkTable, ShardInfo
from streaming.shards.index.selection import Everything, Filtered, Kept, SampleGroups, Selection

PER_SHARD, SAMPLES, CHUNK_BYTES, BLOCK = 100, 100, 4 << 20, 4096


def table_of(num_chunks: int) -> ChunkTable:
    num_shards = num_chunks // PER_SHARD
    places = np.tile(np.arange(PER_SHARD), num_shards)
    info = {"size_bytes": PER_SHARD * CHUNK_BYTES, "num_samples": PER_SHARD * SAMPLES}
    return ChunkTable(
        shards=tuple(ShardInfo(name=f"{number}", **info) for number in range(num_shards)),
        shard=np.repeat(np.arange(num_shards), PER_SHARD), first_sample=places * SAMPLES,
        num_samples=np.full(len(places), SAMPLES), byte_start=places * CHUNK_BYTES,
        byte_end=(places + 1) * CHUNK_BYTES, crc32c=np.zeros(len(places), np.int64),
    )  # type: ignore[arg-type]  # fmt: skip


def microseconds(work: Callable[[], object], repeats: int) -> float:
    best = float("inf")
    for _ in range(5):
        started = time.process_time()
        for _ in range(repeats):
            work()
        best = min(best, (time.process_time() - started) / repeats)
    return 1e6 * best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=10**6)
    args = parser.parse_args()
    random = np.random.default_rng(0)
    table = table_of(args.chunks)
    bits = [np.packbits(random.random(s.num_samples) < 0.3, bitorder="little") for s in table.shards]
    codes = random.integers(0, 4, table.total_samples).astype(np.uint16)
    every = Everything.of(table)
    kept = Kept(table, bits)
    forms: dict[str, Selection] = {
        "everything": every,
        "a range": every.between(table.total_samples // 10, table.total_samples // 10 * 9),
        "a filter": Filtered.of(table, table, kept, "filter"),
        "a group": SampleGroups(table, codes, 4).selected(1, "group"),
    }
    print(common.machine())
    print("| | inside, a block | row of a chunk | kept, a chunk | mask, a shard | between |\n|---|---|---|---|---|---|")
    for name, one in forms.items():
        rows = random.integers(0, one.table.num_chunks, BLOCK)
        offsets = random.integers(0, 10**9, BLOCK) % one.table.num_samples[rows]
        middle = one.table.total_samples // 2
        found = (
            microseconds(lambda: one.inside(rows, offsets), 5),  # noqa: B023  called at once
            microseconds(lambda: int(one.rows[777]), 1000),  # noqa: B023
            microseconds(lambda: one.kept(7, 100, 200), 1000),  # noqa: B023
            microseconds(lambda: one.mask(len(table.shards) // 2), 20),  # noqa: B023
            microseconds(lambda: one.between(3, middle), 2),  # noqa: B023
        )
        print(f"| {name} | {' | '.join(f'{each:,.1f}' for each in found)} |")
    print(f"making the filter's rows: {microseconds(lambda: Filtered.of(table, table, kept, 'filter'), 1):,.0f}")


if __name__ == "__main__":
    main()
