"""A set with all kinds of damage, and the verbs that read many shards at a time: what each reports and writes."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from PIL import Image

from shard_tools import ShardWriter
from shard_tools.change.check.recheck import recheck
from shard_tools.change.check.verify import verify
from shard_tools.change.columns.compute import ComputeOptions, compute_column
from shard_tools.change.columns.lift import lift_all
from shard_tools.change.columns.target import ColumnTarget
from shard_tools.change.sets.bad_list import load_bad_list, records_of
from shard_tools.change.sets.copy import copy
from shard_tools.look.stats.run import StatsOptions, stats
from streaming.storage import Storage

NUM_SHARDS = 8
PER_SHARD = 6
LENGTH = "tests.support.contracts.verb_cases:length"
"""A function below, as users name it for ``column add --compute``."""


def picture(width: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, 8), (width, 2, 3)).save(out, "PNG")
    return out.getvalue()


def write_good(base: str, storage: Storage, broken: bytes | None = None) -> str:
    """A set of eight shards with images, texts, numbers and a column; ``broken`` in place of some images."""
    with ShardWriter(
        f"{base}/{{:03d}}.tar", max_samples=PER_SHARD, columns=["json.n"], storage_options=storage._given
    ) as writer:
        for n in range(NUM_SHARDS * PER_SHARD):
            sample = {"__key__": f"{n:03d}", "txt": "word " * (n % 7), "cls": n % 3, "json": {"n": n, "half": n / 2}}
            writer.write(sample | {"png": broken if broken and n % 6 == 5 else picture(8 + n % 5)} if n % 4 else sample)
    return f"{base}/"


def write_damaged(base: str, storage: Storage) -> str:
    """Shards swapped, changed, cut off, missing, not in the index; keys that occur twice; images that are none."""
    write_good(base, storage, b"no image")
    shards = [f"{base}/{number:03d}.tar" for number in range(NUM_SHARDS)]
    one, two = bytes(storage.read(shards[1])), bytes(storage.read(shards[2]))
    storage.put(shards[1], two)
    storage.put(shards[2], one)
    changed = bytearray(storage.read(shards[3]))
    changed[changed.find(b"word word") + 3] ^= 1
    storage.put(shards[3], changed)
    storage.put(shards[4], bytes(storage.read(shards[4]))[:-3000])
    storage.delete(shards[5])
    storage.put(f"{base}/900.tar", one)
    with ShardWriter(f"{base}/{{:03d}}.tar", start_shard=NUM_SHARDS, storage_options=storage._given) as writer:
        writer.write({"__key__": "000", "txt": "again"})
    return f"{base}/"


def told(report: Any) -> dict[str, Any]:
    """A report without its seconds."""
    found: dict[str, Any] = report.as_dict()
    found.pop("seconds", None)
    return found


def length(sample: Any) -> int:
    return len(sample["txt"])


Run = Callable[..., Any]
"""A verb over the sets in a folder or prefix: it gets this, the store, and what says where its calls run."""


def run_verify(base: str, storage: Storage, **how: Any) -> Any:
    reports = [told(verify([f"{base}/{name}/"], storage=storage, decode=True, **how)) for name in ("good", "damaged")]
    assert reports[0]["ok"]
    assert not reports[1]["ok"]
    return reports


def run_recheck(base: str, storage: Storage, **how: Any) -> Any:
    found = verify([f"{base}/damaged/"], storage=storage, decode=True).findings
    storage.put(f"{base}/bad.jsonl", b"".join(record.to_line() for record in records_of(found)))
    report = told(recheck([], load_bad_list([f"{base}/bad.jsonl"], storage), storage=storage, **how))
    assert report["findings"]
    return report


def run_stats(base: str, storage: Storage, **how: Any) -> Any:
    workers, asked = how.pop("workers"), ({"limit": None}, {"limit": 9}, {"limit": None, "where": '"json.n" > 20'})
    found = [
        told(stats([f"{base}/good/"], storage=storage, options=StatsOptions(workers=workers, **one), **how))
        for one in asked
    ]  # fmt: skip
    for number in range(3):  # a set without an index
        storage.put(f"{base}/bare/{number}.tar", bytes(storage.read(f"{base}/good/{number:03d}.tar")))
    options = StatsOptions(workers=workers, subset=(4, 15))
    found.append(told(stats([f"{base}/bare/"], storage=storage, options=options, **how)))
    assert [one["samples"] for one in (found[0], found[-1])] == [NUM_SHARDS * PER_SHARD, 11]
    return found


def run_copy(base: str, storage: Storage, **how: Any) -> Any:
    report = told(copy(f"{base}/good/", f"{base}/copied/", storage_options=storage._given, **how))
    assert report.pop("target")
    return report, files(f"{base}/copied", storage)


def run_columns(base: str, storage: Storage, **how: Any) -> Any:
    target = ColumnTarget([f"{base}/good/"], "length", storage=storage, index_url=None, overwrite=True)
    workers = how.pop("workers")
    options = ComputeOptions(fields=("txt",), workers=workers)
    computed = compute_column(target, LENGTH, options=options, **how)
    lifted = lift_all([f"{base}/good/"], ["json.half"], storage=storage, index_url=None, workers=workers, **how)
    found = files(f"{base}/good/_shardstream/columns", storage)
    assert len(found) == 2 * (NUM_SHARDS + 1)
    return told(computed), [told(one) for one in lifted], found


VERBS: dict[str, Run] = {
    "verify": run_verify, "verify --bad": run_recheck, "stats": run_stats, "copy": run_copy, "column add": run_columns,
}  # fmt: skip


def files(base: str, storage: Storage) -> dict[str, bytes]:
    """Every file below a folder or prefix, by its path there."""
    urls = (info.url for info in storage.list(base) if "/copied-" not in info.url)  # which is of one place
    return {url.removeprefix(base): bytes(storage.read(url)) for url in urls}
