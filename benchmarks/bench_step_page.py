"""Measure the step page of ``shard_tools show`` from S3 on loopback: an index of 10^8 rows, a mixture of 200.

python benchmarks/bench_step_page.py --shards 10000 --rows 10000 --sources 200 --batch 256
"""

from __future__ import annotations

import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from common import arguments

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from shard_tools.look.plan.sources import open_planned, sets_of  # noqa: E402
from shard_tools.look.show.base.page import Query  # noqa: E402
from shard_tools.look.show.order.query import asked_of  # noqa: E402
from shard_tools.look.show.order.runs import ShownRuns  # noqa: E402
from streaming.shards.index.chunk_table import ChunkTable, ShardInfo  # noqa: E402
from streaming.shards.index.sample_table import SampleTable  # noqa: E402
from streaming.storage import Storage  # noqa: E402
from tests.support.servers.on_loopback import MiniS3Server, MotoServer, fresh_name  # noqa: E402

RECORD, CHUNK = 10_240, 400  # bytes of a sample, samples of a chunk of 4 MiB
PLACES = ((0, 0), (0, 1), (0, 1000), (0, 40_000), (1, 7), (1, 8))  # epoch and step; a mixture without end has one epoch


def chunk_table(shards: int, rows: int) -> ChunkTable:
    bounds = np.append(np.arange(0, rows, CHUNK), rows)
    counts = np.diff(bounds)
    size = rows * RECORD
    return ChunkTable(
        shards=tuple(ShardInfo(name=f"{one:06d}.tar", size_bytes=size, num_samples=rows) for one in range(shards)),
        shard=np.repeat(np.arange(shards), len(counts)), first_sample=np.tile(bounds[:-1], shards),
        num_samples=np.tile(counts, shards), byte_start=np.tile(bounds[:-1] * RECORD, shards),
        byte_end=np.tile(bounds[1:] * RECORD, shards), crc32c=np.arange(shards * len(counts)),
    )  # fmt: skip


def sample_table(shard: int, rows: int) -> bytes:
    bounds, starts = np.append(np.arange(0, rows, CHUNK), rows), np.arange(rows + 1, dtype=np.int64) * RECORD
    spans = np.unique(np.concatenate([bounds, np.arange(0, rows, 7)]))
    return SampleTable.build(
        name=f"{shard:06d}.tar", size_bytes=rows * RECORD, keys=[f"{shard:06d}/{row:06d}" for row in range(rows)],
        record_starts=starts, fields={"jpg": (starts[:-1] + 512, np.full(rows, 9000, np.int64))},
        chunk_bounds=bounds, crc32c=np.arange(len(bounds) - 1) + shard * (len(bounds) - 1),
        spans=(spans, np.arange(len(spans) - 1)),
    ).to_parquet()  # fmt: skip


def filled(
    options: dict[str, str], url: str, opened: str, places: Sequence[tuple[int, int]], batch: int, rows: int
) -> None:  # fmt: skip
    """Write the sample tables that the pages will ask for, beside the chunk tables that are there."""
    storage = Storage(options)
    runs = ShownRuns(open_planned(opened, storage_options=options))
    names = [name for name, _ in sets_of(runs.planned)]
    wanted: set[tuple[str, int]] = set()
    for epoch, step in places:
        at = runs.at(asked_of(Query({"epoch": str(epoch), "step": str(step), "global_batch_size": str(batch)})))
        found = at.run.described(at.run.rows_of(at.step))
        wanted |= {(one.leaf, one.shard_number) for one in found}
    assert {name for name, _ in wanted} <= set(names)
    for name, shard in wanted:
        path = f"{url}/{name}/" if name else f"{url}/"
        storage.put(f"{path}_shardstream/samples/{shard:06d}.tar.parquet", sample_table(shard, rows))


@contextmanager
def served(opened: str, options: dict[str, str]) -> Iterator[Any]:
    """A server in a process of its own; yields what asks it: milliseconds of a page, those of its CPU, and bytes."""
    given = ["--endpoint-url", options["endpoint_url"], "--region", options["region"]]
    for name in ("key", "secret"):
        given += ["--storage-option", f"{name}={options[name]}"]
    command = [sys.executable, "-m", "shard_tools", "show", opened, *given, "--port", "0", "--no-browser"]
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    base, _, token = process.stdout.readline().strip().partition("/?token=")
    print(f"  ready after {time.perf_counter() - begun:.1f} s, with all imports", flush=True)

    def cpu() -> float:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def get(path: str) -> tuple[float, float]:
        connection = http.client.HTTPConnection("127.0.0.1", int(base.rpartition(":")[2]), timeout=120)
        before, start = cpu(), time.perf_counter()
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        body = answer.read()
        took = time.perf_counter() - start
        connection.close()
        assert answer.status == 200, body[:500]
        return 1000 * took, 1000 * (cpu() - before)

    try:
        yield get
    finally:
        process.terminate()
        process.wait()


def pages(get: Any, places: Sequence[tuple[int, int]], batch: int) -> None:
    get("/bad")  # templates and imports, once in the life of a server
    for world in (8, 1):
        found = []
        for epoch, step in places:
            path = f"/step?epoch={epoch}&step={step}&global_batch_size={batch}&world={world}&rank=0"
            found.append((get(path), get(path)))
        for at, what in enumerate(("cold", "again")):
            wall, cpu = zip(*(one[at] for one in found), strict=True)
            said = (f"{statistics.median(some):.0f} ms, most {max(some):.0f}" for some in (wall, cpu))
            print(f"  {batch // world} rows, {what}: median {next(said)}; CPU of the server {next(said)}", flush=True)


def large(server: Any, given: Any) -> None:
    """A set that is an index alone: of ten thousand shards, none is asked for its size."""
    options, storage = server.storage_options, Storage(server.storage_options)
    url = server.create_bucket(fresh_name())
    print(f"{type(server).__name__}; load {os.getloadavg()[0]:.1f}; a set of {given.shards * given.rows:,} rows")
    storage.put(f"{url}/_shardstream/chunks.parquet", chunk_table(given.shards, given.rows).to_parquet())
    opened = f"{url}/{{000000..{given.shards - 1:06d}}}.tar"
    filled(options, url, opened, PLACES, given.batch, given.rows)
    with served(opened, options) as get:
        pages(get, PLACES, given.batch)


def main() -> None:
    given = arguments(__doc__ or "", shards=10_000, rows=10_000, sources=200, batch=256, moto=1)
    with (MotoServer if given.moto else MiniS3Server)() as server, tempfile.TemporaryDirectory() as folder:
        options, storage = server.storage_options, Storage(server.storage_options)
        if given.shards:
            large(server, given)
        url, sources = server.create_bucket(fresh_name()), {}
        for number in range(given.sources):
            shards = 5 + number % 20
            storage.put(f"{url}/s{number}/_shardstream/chunks.parquet", chunk_table(shards, given.rows).to_parquet())
            here = f"{folder}/s{number}"  # shards of holes, which are only looked at
            os.makedirs(here)
            for shard in range(shards):
                with open(f"{here}/{shard:06d}.tar", "wb") as file:
                    file.truncate(given.rows * RECORD)
            sources[f"s{number}"] = {"url": f"{here}/", "index": f"{url}/s{number}/"}
        weights = {name: 1 + at % 13 for at, name in enumerate(sources)}
        for quotas in ("chunks", "exact"):
            print(f'a mixture of {len(sources)} sources, quotas="{quotas}"; load {os.getloadavg()[0]:.1f}')
            content = {"sources": sources, "weights": weights, "quotas": quotas}
            storage.put(f"{url}/{quotas}.json", json.dumps(content).encode())
            places = [place for place in PLACES if place[0] == 0]
            filled(options, url, f"{url}/{quotas}.json", places, given.batch, given.rows)
            with served(f"{url}/{quotas}.json", options) as get:
                pages(get, places, given.batch)


if __name__ == "__main__":
    main()
