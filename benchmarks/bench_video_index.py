"""Measure `shard_tools index --video`: bytes of shards per second, by the size of frames and the number of workers.

    python benchmarks/bench_video_index.py [--shards 4] [--seconds 20] [--workers 1 2]

Each shard holds recordings of H.264 with a key frame every two seconds, three cameras a sample, as robot sets do.
The shards are read before, so that the figure is that of the work, not of the disk.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from common import machine

from shard_tools import ShardWriter
from shard_tools.change.columns.video import index_video
from streaming.storage import Storage

RATE = 30
SIZES = ((480, 640), (1080, 1920))


def recording(height: int, width: int, seconds: int, bit_rate: int) -> bytes:
    """Return an MP4 of noise that moves, which takes about ``bit_rate`` bits a second."""
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 255, (height, 2 * width, 3), np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "made.mp4"))
        with av.open(path, "w") as container:
            stream = container.add_stream("libx264", rate=RATE, options={"g": str(2 * RATE), "preset": "ultrafast"})
            stream.height, stream.width, stream.pix_fmt, stream.bit_rate = height, width, "yuv420p", bit_rate
            for number in range(seconds * RATE):
                at = 4 * number % width
                frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(noise[:, at : at + width]))
                frame.pts, frame.time_base = number, Fraction(1, RATE)
                container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
        return Path(path).read_bytes()


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--shard-mb", type=int, default=256)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(machine())
    print("| frames | bytes of a member | frames a member | workers | MB/s | CPU s per GB |\n|---|---|---|---|---|---|")
    for height, width in SIZES:
        data = recording(height, width, options.seconds, 12 * height * width)
        with tempfile.TemporaryDirectory() as folder:
            num = max(1, options.shard_mb * 10**6 // (3 * len(data))) * options.shards
            with ShardWriter(f"{folder}/{{:06d}}.tar", max_samples=num // options.shards) as writer:
                for number in range(num):
                    cameras = {f"{name}.mp4": data for name in ("front", "left", "wrist")}
                    writer.write({"__key__": f"{number:06d}", **cameras})
            for workers in options.workers:
                best, cpu = 0.0, 0.0
                for _ in range(options.rounds):
                    begun, used = time.perf_counter(), time.process_time()
                    report = index_video([folder], storage=Storage(), workers=workers, force=True)
                    rate = report.num_read_bytes / (time.perf_counter() - begun) / 1e6
                    if rate > best:
                        best, cpu = rate, (time.process_time() - used) / report.num_read_bytes * 1e9
                frames = options.seconds * RATE
                print(f"| {width} x {height} | {len(data):,} | {frames} | {workers} | {best:,.0f} | {cpu:.2f} |")


if __name__ == "__main__":
    main()
