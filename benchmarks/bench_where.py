"""``where`` over a synthetic index of many rows, and a late column joined to one: seconds and memory; no tars.

    python benchmarks/bench_where.py --rows 100000000
    python benchmarks/bench_where.py --rows 10000000 --join

Each measurement runs in a process of its own, which tells its time and its peak memory. All shards have the same sample
file (linked, not copied), so of a large index the page cache holds one shard: the time is that of the work.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shard_tools.change.columns.join import JoinOptions, join_column
from shard_tools.change.columns.target import ColumnTarget
from streaming.sets.filters.select import Filter, select
from streaming.shards.catalog.open import OpenShards
from streaming.shards.index.chunk_table import ChunkTable, ShardInfo
from streaming.shards.index.sample_table import SampleTable
from streaming.shards.index.where import parse_where
from streaming.storage import Storage

SHARD_ROWS = 100_000
CHUNK_ROWS = 1_000
CONDITIONS = (
    "tokens >= 512",
    "tokens >= 512 and lang = 'en' and score > 0.25",
    "hash(lang) % 100 < 50 or tokens % 7 = 0",
    "hash(__key__) % 100 < 10",
)


def sample_file(first: int) -> SampleTable:
    """One shard's table: keys, three lifted columns, records of 4 KB."""
    draw = np.random.default_rng(first)
    langs = pa.DictionaryArray.from_arrays(
        pa.array(draw.integers(0, 5, SHARD_ROWS), pa.int8()), ["de", "en", "fr", "it", "pl"]
    )
    bounds = np.arange(0, SHARD_ROWS + 1, CHUNK_ROWS)
    return SampleTable.build(
        name="000000.tar",
        size_bytes=SHARD_ROWS * 4096 + 1024,
        keys=[f"{number:09d}" for number in range(first, first + SHARD_ROWS)],
        record_starts=np.arange(SHARD_ROWS + 1) * 4096,
        fields={"txt": (np.arange(SHARD_ROWS) * 4096 + 512, np.full(SHARD_ROWS, 3000))},
        chunk_bounds=bounds,
        crc32c=draw.integers(0, 2**32, bounds.size - 1).astype(np.uint32),
        columns={
            "tokens": pa.array(draw.integers(1, 4096, SHARD_ROWS)),
            "lang": langs.cast(pa.string()),
            "score": pa.array(draw.random(SHARD_ROWS)),
        },
    )


def write_index(folder: Path, num_shards: int, *, linked: bool) -> None:
    samples = folder / "_shardstream/samples"
    samples.mkdir(parents=True)
    tables = []
    table = sample_file(0)
    for shard in range(num_shards):
        name = f"{shard:06d}.tar"
        path = samples / f"{name}.parquet"
        if shard and linked:
            os.link(samples / "000000.tar.parquet", path)
        else:
            table = sample_file(shard * SHARD_ROWS)
            path.write_bytes(table.to_parquet())
        info = ShardInfo(name=name, size_bytes=table.shard.size_bytes, num_samples=SHARD_ROWS)
        tables.append(ChunkTable(shards=(info,), **{
            column: getattr(table.chunks, column)
            for column in ("shard", "first_sample", "num_samples", "byte_start", "byte_end", "crc32c")
        }))  # fmt: skip
    (folder / "_shardstream/chunks.parquet").write_bytes(ChunkTable.concat(tables).to_parquet())


def measure_where(folder: Path, condition: str) -> None:
    data = (folder / "_shardstream/chunks.parquet").read_bytes()
    table = ChunkTable.from_parquet(data, "chunks")
    urls = tuple(str(folder / shard.name) for shard in table.shards)
    shards = OpenShards(urls=urls, table=table, missing_index="", index=None, scanned=None)
    before = peak_mib()
    begun, cpu_begun = time.perf_counter(), time.process_time()
    selected = select(Storage(), shards, Filter(where=parse_where(condition)))
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu_begun
    print(
        f"{condition:50}  {seconds:6.2f} s ({cpu:.1f} s of CPU)  peak {peak_mib():5.0f} MiB ({before:.0f} before)  "
        f"keeps {selected.total:,} of {table.total_samples:,}",
        flush=True,
    )


def measure_join(folder: Path, source: Path) -> None:
    storage = Storage()
    for shard in range(len(list((folder / "_shardstream/samples").iterdir()))):
        (folder / f"{shard:06d}.tar").touch()  # the listing finds them; nobody looks inside
    before = peak_mib()
    target = ColumnTarget([f"{folder}/"], "late", storage=storage, index_url=None, overwrite=True)
    report = join_column(target, str(source), storage=storage, options=JoinOptions(on="key"))
    print(
        f"joined {report.num_rows:,} rows to {report.num_samples:,} samples ({report.num_missing:,} without a value): "
        f"{report.seconds:.1f} s  peak {peak_mib():.0f} MiB ({before:.0f} before)"
    )


def write_scores(path: Path, num_rows: int) -> None:
    """Keys in another order than the samples'."""
    order = np.random.default_rng(0).permutation(num_rows)
    schema = pa.schema([("key", pa.string()), ("late", pa.float32())])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, num_rows, 1 << 20):
            numbers = order[start : start + (1 << 20)]
            keys = [f"{number:09d}" for number in numbers.tolist()]
            writer.write_table(pa.table([pa.array(keys), pa.array(numbers, pa.float32())], schema=schema))


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--join", action="store_true", help="Join a late column instead.")
    parser.add_argument("--measure", nargs=2, metavar=("FOLDER", "WHAT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        folder, what = arguments.measure
        if arguments.join:
            measure_join(Path(folder), Path(what))
        else:
            measure_where(Path(folder), what)
        return
    num_shards = max(1, arguments.rows // SHARD_ROWS)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        write_index(data, num_shards, linked=not arguments.join)
        jobs = [str(Path(folder) / "scores.parquet")] if arguments.join else list(CONDITIONS)
        if arguments.join:
            write_scores(Path(jobs[0]), num_shards * SHARD_ROWS)
        for job in jobs:
            command = [sys.executable, __file__, *(["--join"] if arguments.join else []), "--measure", str(data), job]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
