"""How long after the start the first batch comes, in round trips: an S3 server whose every answer is a round trip late.

Run: ``python benchmarks/bench_first_batch.py [--images 3000] [--round-trip-ms 300] [--data FOLDER]``. Images of 68 KB
in a bucket, shuffled, as bytes; opened by prefix and by names. Connecting is not counted as a round trip.
"""

from __future__ import annotations

import os
import sys
import time

import bench_images
import common

from streaming import DataLoader, StreamingDataset

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from tests.support.servers.fault_proxy import FaultProxy


class FarAway(FaultProxy):
    """Every answer comes a round trip late."""

    round_trip_s = 0.0

    def _next(self, method: str, path: str, span: str | None) -> None:
        with self._lock:
            self.log.append((method, path, span))
        self._stopping.wait(self.round_trip_s)


def first_batch_s(urls: str | list[str], options: dict[str, str]) -> float:
    """Seconds from nothing to the first batch of 64."""
    start_s = time.perf_counter()
    with DataLoader(StreamingDataset(urls, decode=None, storage_options=options), 64) as loader:
        next(iter(loader))
        return time.perf_counter() - start_s


def main() -> None:
    args = common.arguments(__doc__ or "", images=3_000, round_trip_ms=300)
    folder = common.made_once(
        args.data, f"images-{args.images}",
        lambda target: common.write_shards(target, bench_images.samples(args.images), per_shard=bench_images.PER_SHARD),
    )  # fmt: skip
    print(common.machine())
    with common.s3_copy(folder) as (url, options), FarAway(int(options["endpoint_url"].rpartition(":")[2])) as proxy:
        names = [f"{url}{os.path.basename(path)}" for path in common.shard_files(folder)]
        far = {**options, "endpoint_url": proxy.url}
        for _ in range(args.rounds):
            for title, urls in (("by prefix", url), ("by names", names)):
                FarAway.round_trip_s = 0.0
                near_s = first_batch_s(urls, far)
                FarAway.round_trip_s = args.round_trip_ms / 1e3
                proxy.log.clear()
                far_s = first_batch_s(urls, far)
                trips = (far_s - near_s) / FarAway.round_trip_s
                asked = len(proxy.log)
                print(f"{title:10} near {near_s:.3f} s, far {far_s:.3f} s: {trips:.1f} round trips, {asked} requests")


if __name__ == "__main__":
    main()
