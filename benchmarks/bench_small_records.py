"""Small records: JSON of about 430 bytes, shuffled, in this process, in batches of 256; ours against webdataset.

Run: ``python benchmarks/bench_small_records.py [--records 200000] [--rounds 3] [--data FOLDER]``. All contestants take
turns in one run. "raw" delivers bytes, "json" dicts. Ours reads from disk and from an S3 server on loopback; webdataset
reads from disk.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import common

from streaming import DataLoader, StreamingDataset

BATCH_SIZE = 256
PER_SHARD = 20_000


def records(count: int) -> Iterator[dict[str, object]]:
    """JSON documents of 400 to 460 bytes."""
    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz     "
    for i in range(count):
        text = "".join(rng.choices(letters, k=rng.randrange(290, 350)))
        row = {"id": i, "score": rng.random(), "lang": "en", "tokens": rng.randrange(10, 2000), "text": text,
               "source": f"https://example.org/{i:09d}"}  # fmt: skip
        yield {"__key__": f"{i:09d}", "json": json.dumps(row).encode()}


def ours(urls: str, decode: str | None, workers: int, options: dict[str, str] | None = None) -> int:
    dataset = StreamingDataset(urls, decode=decode, storage_options=options)
    with DataLoader(dataset, BATCH_SIZE, num_workers=workers) as loader:
        return sum(len(batch["json"]) for batch in loader)


def theirs(folder: str, decode: str | None) -> int:
    steps = [] if decode is None else [lambda pipeline: pipeline.decode()]
    delivered: Iterator[Any] = common.webdataset(folder, *steps, batch_size=BATCH_SIZE)
    return sum(len(batch["json"]) for batch in delivered)


def main() -> None:
    args = common.arguments(__doc__ or "", records=200_000, workers=0)
    folder = common.made_once(
        args.data, f"records-{args.records}",
        lambda target: common.write_shards(target, records(args.records), per_shard=PER_SHARD),
    )  # fmt: skip
    print(common.machine())
    with common.s3_copy(folder) as (url, options):
        for name, decode in (("raw", None), ("json", "auto")):
            rates = common.take_turns(
                {
                    "webdataset": lambda decode=decode: theirs(folder, decode),
                    "shardstream": lambda decode=decode: ours(folder, decode, args.workers),
                    "shardstream from S3": lambda decode=decode: ours(url, decode, args.workers, options),
                },
                args.rounds,
            )
            common.show(f"{args.records:,} records, {name}", rates, against="webdataset")


if __name__ == "__main__":
    main()
