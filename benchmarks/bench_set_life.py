"""Measure what it costs to change a large set: calls of the store, bytes, wall and CPU seconds of each operation.

    python benchmarks/bench_set_life.py [--samples 200000] [--field-samples 20000] [--data FOLDER]

The set has shards of 2,500 samples of a row of JSON, in chunks of 40, as a set of images of 100 KB has shards of 256 MB
and chunks of 4 MB; its index is that of all its samples, but of its tars only those are written that something reads: a
hundred, with one deleted sample in each. Calls and bytes are those of the local store's adapter, one for each request
that an object store would get. Measured are appending 1,000 rows, deleting 100 keys, tagging, opening the tag, listing
the versions and pruning; and of a set that is all there (``--field-samples``) a late field joined by key, and the same
command after 1,000 rows more.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

from shard_tools import ShardWriter
from shard_tools.change.fields.join import FromSet, join_field
from shard_tools.change.life.delete import delete
from shard_tools.change.life.prune import prune
from shard_tools.change.life.versions import history, tag
from shard_tools.make.convert import ConvertOptions, convert
from shard_tools.make.convert.append import append
from streaming import StreamingDataset
from streaming.shards.catalog.scan import scan_shard
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.cutter import ChunkRule
from streaming.shards.index.layout import chunks_path, samples_path
from streaming.shards.index.sample_table import SampleTable
from streaming.storage import Storage
from streaming.storage.adapters.local import LocalAdapter

PER_SHARD, NUM_REAL, NUM_NEW = 2500, 100, 1000
RULE = ChunkRule(min_bytes=1, min_samples=40, target_bytes=1 << 20)
OPTIONS = ConvertOptions(kind="jsonl", key_field="id", columns=("n",), max_samples=PER_SHARD)
CALLS = ("info", "open_range", "list", "put", "put_if", "open_write", "delete")


@dataclass
class Account:
    """What an operation asks of a store."""

    num_calls: dict[str, int] = field(default_factory=dict)
    read_bytes: int = 0
    written_bytes: int = 0

    def __str__(self) -> str:
        calls = ", ".join(f"{num:,} {name}" for name, num in sorted(self.num_calls.items()))
        return f"read {self.read_bytes / 1e6:.2f} MB, wrote {self.written_bytes / 1e6:.2f} MB, calls: {calls}"


@contextmanager
def counted() -> Iterator[Account]:
    """Count the calls of the local store's adapter; those that it makes itself are parts of these."""
    account, lock, inside = Account(), threading.Lock(), threading.local()

    def call(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def counting(self: Any, url: str, *args: Any) -> Any:
            if getattr(inside, "call", False):
                return real(self, url, *args)
            inside.call = True
            try:
                found = real(self, url, *args)
            finally:
                inside.call = False
            with lock:
                account.num_calls[name] = account.num_calls.get(name, 0) + 1
                account.read_bytes += found.num_bytes if name == "open_range" else 0
                account.written_bytes += len(args[0]) if name in {"put", "put_if"} else 0
            return closing(found) if name == "open_write" else found

        return counting

    def closing(writer: Any) -> Any:
        real = writer.close

        def close() -> None:
            inside.call = True
            try:
                real()
            finally:
                inside.call = False
            with lock:
                account.written_bytes += writer.num_bytes

        writer.close = close
        return writer

    with mock.patch.multiple(LocalAdapter, **{name: call(name, getattr(LocalAdapter, name)) for name in CALLS}):
        yield account


def measured(what: str, run: Callable[[], Any]) -> Any:
    """Run an operation, and print what it costs."""
    with counted() as account:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        found = run()
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    sys.stdout.write(f"{what}: {wall_s:.2f} s, CPU {cpu_s:.2f} s; {account}\n")
    sys.stdout.flush()
    return found


def rows(first: int, num: int) -> bytes:
    """Return lines of JSON."""
    numbers = range(first, first + num)
    return b"".join(json.dumps({"id": f"{n:09d}", "n": n % 100, "t": "x" * 40}).encode() + b"\n" for n in numbers)


def table_of(first: SampleTable, number: int) -> SampleTable:
    """Return the sample table of a shard like the first one, with its own keys and name."""
    info = replace(first.chunks.shards[0], name=f"{number:06d}.tar")
    keys = [f"{n:09d}" for n in range(number * PER_SHARD, (number + 1) * PER_SHARD)]
    return replace(first, keys=keys, chunks=replace(first.chunks, shards=(info,)))


def make(folder: Path, num_samples: int) -> list[str]:
    """Make a set whose index is whole; return a key in each of the shards that have a tar."""
    home, storage, days = folder / "set", Storage(None), folder / "days"
    num_shards = max(1, num_samples // PER_SHARD)
    real = sorted({number * num_shards // NUM_REAL for number in range(NUM_REAL)})
    days.mkdir()
    (days / "0.jsonl").write_bytes(rows(0, PER_SHARD))
    convert(str(days), str(home), options=OPTIONS)
    first = scan_shard(storage, f"{home}/000000.tar", "000000.tar", rule=RULE)
    columns = SampleTable.from_parquet((home / samples_path("000000.tar")).read_bytes(), "first").columns
    first, tables = replace(first, columns=columns), []
    for number in range(num_shards):
        name = f"{number:06d}.tar"
        if number in real and number:
            (folder / "day.jsonl").write_bytes(rows(number * PER_SHARD, PER_SHARD))
            convert(str(folder / "day.jsonl"), str(folder / "one"), options=OPTIONS)
            (folder / "one/000000.tar").rename(home / name)
            shutil.rmtree(folder / "one")
            table = replace(scan_shard(storage, f"{home}/{name}", name, rule=RULE), columns=columns)
        else:
            table = table_of(first, number)
        (home / samples_path(name)).write_bytes(table.to_parquet())
        tables.append(table.chunks)
    (home / chunks_path()).write_bytes(ChunkTable.concat(tables).to_parquet())
    return [f"{number * PER_SHARD + 7:09d}" for number in real]


def measure_life(folder: Path, num_samples: int) -> None:
    """Measure the operations on a set of ``num_samples``."""
    keys, home, storage = make(folder, num_samples), str(folder / "set"), Storage(None)
    size = (folder / "set" / chunks_path()).stat().st_size
    tables = sum(path.stat().st_size for path in (folder / "set/_shardstream/samples").iterdir())
    sys.stdout.write(f"{num_samples:,} samples: chunk table {size / 1e6:.2f} MB, sample tables {tables / 1e6:.1f} MB\n")
    measured("first tag", lambda: tag(home, "v1", storage=storage))
    (folder / "days/1.jsonl").write_bytes(rows(num_samples, NUM_NEW))
    measured(f"append of {NUM_NEW:,}", lambda: append(str(folder / "days"), home))
    measured("append, nothing new", lambda: append(str(folder / "days"), home))
    measured(f"delete of {len(keys)} keys", lambda: delete(home, storage=storage, keys=keys))
    measured("delete where n = 200 (none)", lambda: delete(home, storage=storage, where="n = 200"))
    measured("tag", lambda: tag(home, "v2", storage=storage))
    measured("open of a version", lambda: StreamingDataset(home, version="v1", fields=("json",)))
    measured("version list", lambda: history(home, storage=storage))
    measured("version prune", lambda: prune(home, storage=storage, drop=["v1"]))


def measure_field(folder: Path, num_samples: int) -> None:
    """Measure a late field of ``num_samples``, and the same after an append."""
    home, other, days, storage = str(folder / "small"), str(folder / "other"), folder / "small-days", Storage(None)
    days.mkdir()
    with open(days / "0.jsonl", "wb") as out:
        out.writelines(rows(first, min(PER_SHARD, num_samples - first)) for first in range(0, num_samples, PER_SHARD))
    convert(str(days), home, options=OPTIONS)
    with ShardWriter(f"{other}/{{:06d}}.tar", max_samples=PER_SHARD) as writer:
        for number in range(num_samples + NUM_NEW):
            writer.write({"__key__": f"{number:09d}", "score.txt": f"{number % 1000}"})
    tag(home, "v1", storage=storage)

    def add() -> Any:
        return join_field(home, "score.txt", FromSet(url=other, field="score.txt"), storage=storage)

    measured(f"field add, {num_samples:,} samples", add)
    (days / "1.jsonl").write_bytes(rows(num_samples, NUM_NEW))
    append(str(days), home)
    measured(f"field add again after an append of {NUM_NEW:,}", add)
    measured("field add again, nothing to do", add)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--field-samples", type=int, default=20_000)
    parser.add_argument("--data", default=None, help="where to write")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="set-life-", dir=options.data))
    try:
        measure_life(folder, options.samples)
        shutil.rmtree(folder / "set")
        measure_field(folder, options.field_samples)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
