"""Measure ``shard_tools show``: opening an index of 10^8 rows, pages of it, and galleries from S3 on loopback.

python benchmarks/bench_show.py --shards 10000 --rows 10000 --images 2000
"""

from __future__ import annotations

import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from common import arguments, made_once
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from shard_tools import ShardWriter  # noqa: E402
from shard_tools.change.sets.open_set import open_set  # noqa: E402
from shard_tools.look.stats.survey import DEFAULT_LIMIT, MOST_SEEN, SurveyedSet  # noqa: E402
from streaming.shards.index.chunk_table import ChunkTable, ShardInfo  # noqa: E402
from streaming.shards.index.layout import chunks_path, samples_path  # noqa: E402
from streaming.shards.index.sample_table import SampleTable  # noqa: E402
from streaming.storage import Storage  # noqa: E402
from tests.support.servers.on_loopback import MiniS3Server, fresh_name  # noqa: E402
from tests.support.servers.show_pages import Shown  # noqa: E402

OPENED = """
import json, time
begun = time.perf_counter(), time.process_time()
from shard_tools.look.show.base.subject import open_subject
import streaming.sets.datasets.mixture
ready = time.perf_counter(), time.process_time()
open_subject((sys.argv[1],)).sets[""].total
done = time.perf_counter(), time.process_time()
print(json.dumps([[b - a for a, b in zip(ready, done)], [done[0] - begun[0], done[1]]]))
"""
RECORD = 2048  # bytes of a sample that is made up: a text of 500
CHUNK = 1000  # samples
SURVEYED, SEARCHED = 240, 40  # shards of which an overview, and a search of texts, is measured


def made_up(folder: str, shards: int, rows: int) -> None:
    """An index of so many rows, beside shards of holes; sample tables only of the shards that are asked for."""
    bounds = np.append(np.arange(0, rows, CHUNK), rows)
    counts, size = np.diff(bounds), rows * RECORD + 1024
    chunks = len(counts)
    table = ChunkTable(
        shards=tuple(ShardInfo(name=f"{one:06d}.tar", size_bytes=size, num_samples=rows) for one in range(shards)),
        shard=np.repeat(np.arange(shards), chunks), first_sample=np.tile(bounds[:-1], shards),
        num_samples=np.tile(counts, shards), byte_start=np.tile(bounds[:-1] * RECORD, shards),
        byte_end=np.tile(bounds[1:] * RECORD, shards), crc32c=np.arange(shards * chunks),
    )  # fmt: skip
    os.makedirs(f"{folder}/_shardstream/samples")
    Path(f"{folder}/{chunks_path()}").write_bytes(table.to_parquet())
    for one in range(shards):
        with open(f"{folder}/{one:06d}.tar", "wb") as file:
            file.truncate(size)
    wanted = {
        0,
        shards // 2,
        shards // 2 - 1,
        shards // 2 + 1,
        shards - 1,
        *searched(shards, shards // 3),
        *range(SEARCHED),
    }
    wanted |= set(surveyed(folder)[:SURVEYED])
    for one in sorted(wanted):
        starts = np.arange(rows + 1, dtype=np.int64) * RECORD
        crc = np.arange(one * chunks, (one + 1) * chunks)
        made = SampleTable.build(
            name=f"{one:06d}.tar", size_bytes=size, keys=[f"{one:06d}/{row:06d}" for row in range(rows)],
            record_starts=starts, fields={"txt": (starts[:-1] + 512, np.full(rows, 500, np.int64))},
            chunk_bounds=bounds, crc32c=crc, columns={"tokens": pa.array(np.arange(rows) % 977)},
        )  # fmt: skip
        Path(f"{folder}/{samples_path(f'{one:06d}.tar')}").write_bytes(made.to_parquet())


def surveyed(folder: str) -> list[int]:
    """The shards that an overview begins with."""
    shards = open_set([folder], Storage(), None)
    return SurveyedSet.of([folder], shards, Storage(), kept=None, limit=DEFAULT_LIMIT, seed=0).spread(MOST_SEEN)


def searched(shards: int, wanted: int) -> list[int]:
    """The shards that a search by halves looks at."""
    low, high, found = 0, shards, []
    while low < high:
        middle = (low + high) // 2
        found.append(middle)
        low, high = (middle + 1, high) if middle <= wanted else (low, middle)
    return [*found, wanted]


def seconds(work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def large(folder: str, shards: int, rows: int, rounds: int) -> None:
    print(f"index of {shards * rows:,} rows, {os.path.getsize(f'{folder}/{chunks_path()}') / 2**20:.1f} MiB")
    opened = [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(ROOT)!r}]; {OPENED}", folder]
    alone = [json.loads(subprocess.check_output(opened)) for _ in range(rounds)]
    for what, at in (("open", 0), ("with all imports", 1)):
        print(f"  {what}: {told([one[at][0] for one in alone])}, of CPU {told([one[at][1] for one in alone])}")
    middle = shards // 2 * rows // 48
    with Shown((folder,)) as shown:
        asked = {
            "first page": "/", "a page in the middle": f"/?page={middle}", "a key": f"/?key={shards // 3:06d}/000777",
            "the last sample": f"/sample?number={shards * rows - 1}", "the same page again": f"/?page={middle}",
            "the overview": "/overview", "the overview again": "/overview",
        }  # fmt: skip
        for name, path in asked.items():
            took = seconds(lambda path=path: check(shown.get(path)))
            print(f"  {name}: {1000 * took:.0f} ms", flush=True)


def told(found: list[float]) -> str:
    return f"{statistics.median(found):.2f} s (lowest {min(found):.2f}, highest {max(found):.2f})"


def check(answer: Any) -> None:
    assert answer.status == 200, answer.text


def images(folder: str, num: int) -> None:
    draw = np.random.default_rng(0)
    with ShardWriter(f"{folder}/{{:06d}}.tar", max_samples=250, columns=("tokens",)) as writer:
        for number in range(num):
            out = io.BytesIO()
            small = Image.fromarray(draw.integers(0, 255, (12, 16, 3), np.uint8))
            small.resize((640, 480), Image.Resampling.BICUBIC).save(out, "JPEG", quality=90)
            body = {"jpg": out.getvalue(), "txt": "some words " * 40, "cls": number % 10, "tokens": number % 977}
            writer.write({"__key__": f"{number:06d}", **body, "json": {"number": number, "tags": ["a", "b"]}})


def galleries(folder: str, num: int) -> None:
    with MiniS3Server() as server:
        url, storage = server.create_bucket(fresh_name()), Storage(server.storage_options)
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                storage.put(f"{url}/{path.relative_to(folder)}", path.read_bytes())
        with Shown((url,), {"storage_options": server.storage_options}) as shown:
            check(shown.get("/"))
            pages = range(1, num // 48)
            cpu = time.process_time()
            html = [seconds(lambda page=page: check(shown.get(f"/?page={page}"))) for page in pages]
            cpu_ms = 1000 * (time.process_time() - cpu) / len(html)
            server.clear_log()
            rows = [row for page in (0, 1, 2) for row in shown.json("/", page=page)["rows"]]
            small = [seconds(lambda row=row: check(shown.get(
                "/value", number=row["number"], field="jpg", view="small"))) for row in rows]  # fmt: skip
            told_bytes = sum(one["bytes"] for row in rows for one in row["fields"].values())
            log = server.log()
            read = sum(int(entry["bytes"]) for entry in log if str(entry["path"]).endswith(".tar"))
            methods = sorted({str(entry["method"]) for entry in log})
    times = sorted(1000 * one for one in html)
    print(f"gallery of 48 from S3 on loopback, {len(times)} pages: median {statistics.median(times):.0f} ms, "
          f"slowest {times[-1]:.0f} ms, {cpu_ms:.0f} ms of CPU with the client; a picture: median "
          f"{1000 * statistics.median(small):.0f} ms")  # fmt: skip
    print(f"  {len(rows)} samples shown: {told_bytes:,} bytes of values, {read:,} read of shards: "
          f"{read / told_bytes:.3f} a byte; {', '.join(methods)} only")  # fmt: skip


def many(folder: str, num: int) -> None:
    """Small images with texts; the last has a text that no other has."""
    out = io.BytesIO()
    Image.new("RGB", (64, 48), (90, 30, 200)).save(out, "JPEG")
    with ShardWriter(f"{folder}/{{:06d}}.tar", max_samples=3000, columns=("n",)) as writer:
        for number in range(num):
            text = f"an image with the number {number} and the sum {number * 7}"
            writer.write({"__key__": f"{number:07d}", "jpg": out.getvalue(), "txt": text, "n": number * 31 % 977})


def first_answers(folder: str, num: int) -> None:
    """The first answer of an overview, of a search in texts, and of an order, on a store."""
    with MiniS3Server() as server:
        url, storage = server.create_bucket(fresh_name()), Storage(server.storage_options)
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                storage.put(f"{url}/{path.relative_to(folder)}", path.read_bytes())
        print(f"{num:,} images on S3 on loopback")
        for name, path in {
            "overview": "/overview", "a text that all have": "/?text=image",
            "a text of the middle": f"/?text=number+{num // 2}+and",
            "order of a column": "/?order=-n", "a random sample": "/?sample=1",
            "keys of a condition": "/keys?where=n+%3C+100",
        }.items():  # fmt: skip
            with Shown((url,), {"storage_options": server.storage_options}) as shown:
                took = seconds(lambda shown=shown, path=path: check(shown.get(path)))
                print(f"  {name}: {1000 * took:.0f} ms", flush=True)
        with Shown((url,), {"storage_options": server.storage_options}) as shown:
            begun, requests = time.perf_counter(), 0
            while not shown.json("/overview")["done"]:
                requests += 1
            print(f"  overview, seen to the end: {time.perf_counter() - begun:.1f} s, {requests + 1} requests")


def main() -> None:
    given = arguments(__doc__ or "", shards=10_000, rows=10_000, images=2_000, many=300_000)
    name = f"show2-{given.shards}-{given.rows}"
    large(
        made_once(given.data, name, lambda to: made_up(to, given.shards, given.rows)),
        given.shards,
        given.rows,
        given.rounds,
    )
    with tempfile.TemporaryDirectory() as folder:
        images(folder, given.images)
        galleries(folder, given.images)
    many_name = f"show-many-{given.many}"
    first_answers(made_once(given.data, many_name, lambda to: many(to, given.many)), given.many)


if __name__ == "__main__":
    main()
