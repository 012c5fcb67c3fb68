"""Images as bytes from an S3 server that checks signatures, against the bare client with the same ranges.

The client (obstore) fetches every chunk in the order of the epoch, with as many requests at once as the loader makes,
and throws the bytes away: no checksums, no samples, no batches. Once with a server that sends ``--mb-per-s`` (default:
5 Gbit/s), and once with one that sends as much as it can, on the cores that the loader needs, too.

Run: ``python benchmarks/bench_bare_client.py [--images 6000] [--rounds 5] [--data FOLDER]``
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import bench_images
import common
from obstore.store import S3Store

from streaming import DataLoader, StreamingDataset
from streaming.run.engine.memory.chunk_store import IN_FLIGHT_BYTES, LEAST_IN_FLIGHT
from streaming.run.loops.epoch_loop import FETCH_THREADS
from streaming.shards.fetch.read import FetchRange

BATCH_SIZE = 64


def ranges_in_order(url: str, options: dict[str, str]) -> list[FetchRange]:
    """The chunks of the first epoch, in the order in which the loader asks for them."""
    dataset = StreamingDataset(url, decode=None, storage_options=options)
    asked: list[FetchRange] = []
    fetch_unit = dataset.source.fetch_unit

    def noted(wanted: FetchRange, out: memoryview) -> object:
        asked.append(wanted)
        return fetch_unit(wanted, out)

    dataset.source.fetch_unit = noted  # type: ignore[method-assign,assignment]
    with DataLoader(dataset, BATCH_SIZE) as loader:
        for _ in loader:
            pass
    return asked


def bare(url: str, options: dict[str, str], ranges: list[FetchRange]) -> int:
    """Fetch them all; how many images were among the bytes."""
    bucket = url.split("/")[2]
    store = S3Store(
        bucket, endpoint=options["endpoint_url"], access_key_id=options["key"], secret_access_key=options["secret"],
        region=options["region"], client_options={"allow_http": True},
    )  # fmt: skip

    def fetch(wanted: FetchRange) -> int:
        path = wanted.url.split("/", 3)[3]
        assert len(store.get_range(path, start=wanted.byte_start, end=wanted.byte_end)) == wanted.num_bytes
        return wanted.num_samples

    at_once = IN_FLIGHT_BYTES // max(wanted.num_bytes for wanted in ranges)
    with ThreadPoolExecutor(min(FETCH_THREADS, max(LEAST_IN_FLIGHT, at_once))) as threads:
        return sum(threads.map(fetch, ranges))


def ours(url: str, options: dict[str, str]) -> int:
    """An epoch, from nothing; how many images were delivered."""
    with DataLoader(StreamingDataset(url, decode=None, storage_options=options), BATCH_SIZE) as loader:
        return sum(len(batch["jpg"]) for batch in loader)


def main() -> None:
    args = common.arguments(__doc__ or "", images=6_000, mb_per_s=625)
    folder = common.made_once(
        args.data, f"images-{args.images}",
        lambda target: common.write_shards(target, bench_images.samples(args.images), per_shard=bench_images.PER_SHARD),
    )  # fmt: skip
    print(common.machine())
    for mb_per_s in (args.mb_per_s, 0):
        with common.s3_copy(folder, mb_per_s) as (url, options):
            ranges = ranges_in_order(url, options)
            rates = common.take_turns(
                {
                    "bare client": partial(bare, url, options, ranges),
                    "shardstream": partial(ours, url, options),
                },
                args.rounds,
            )
        line = f"at {mb_per_s} MB/s" if mb_per_s else "as fast as it can"
        common.show(f"{args.images:,} images in {len(ranges)} ranges, server {line}", rates, against="bare client")


if __name__ == "__main__":
    main()
