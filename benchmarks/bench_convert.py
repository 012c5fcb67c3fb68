"""Images per second from a folder into shards: ``convert`` against ``tar cf``, in turns.

20,000 JPEGs of about 20 KB lie in 100 class folders. ``tar cf`` writes them into one archive; ``convert`` reads their
headers, writes shards with class, number and path of each image, their index and sample tables, and checksums of all
bytes. Both read from the page cache and write to the same file system; neither waits for the disk.

Measured 2026-11-27 on 2 cores under a load of 13 to 23, best of three, of the rate of ``tar cf``: 51 % by clock, 41 %
by processor time (80 us an image against 33); ``--from files`` 58 % and 51 %; images written one by one had 23 % and
26 %. Of the 80 us the kernel takes 30 (opening and copying files, as for ``tar``), and Python 14 to list and sort, 14
to read and look at headers, 22 to write: half of that for tar headers, columns and checksums, the rest for keys, tables
and copies. Cold, before: 55 to 72 %.

Run: ``python benchmarks/bench_convert.py [--images 20000] [--kilobytes 20] [--workers 8] [--rounds 3]``. Linux.
"""

from __future__ import annotations

import io
import logging
import os
import resource
import shutil
import subprocess
import tempfile
import time

import common
import numpy as np
from PIL import Image

from shard_tools.make.convert import ConvertOptions, ImageOptions, convert


def make(folder: str, num_images: int, kilobytes: int) -> None:
    """Write the images: noise of a size that gives about so many bytes."""
    side = round((kilobytes * 1000 / 0.36) ** 0.5)
    pixels = np.random.default_rng(0).integers(0, 255, (64, side, side, 3), dtype=np.uint8)
    bodies = []
    for one in pixels:
        out = io.BytesIO()
        Image.fromarray(one).resize((side // 2, side // 2)).resize((side, side)).save(out, "JPEG", quality=80)
        bodies.append(out.getvalue())
    print(f"images of {side} x {side} pixels, {sum(map(len, bodies)) / len(bodies) / 1000:.1f} KB")
    for number in range(num_images):
        below = os.path.join(folder, f"class{number % 100:03d}")
        os.makedirs(below, exist_ok=True)
        with open(os.path.join(below, f"{number:06d}.jpg"), "wb") as file:
            file.write(bodies[number % len(bodies)])


def main() -> None:
    options = common.arguments(__doc__ or "", images=20_000, kilobytes=20, workers=8)
    logging.disable(logging.WARNING)
    name = f"jpegs-{options.images}-{options.kilobytes}"
    source = common.made_once(options.data, name, lambda folder: make(folder, options.images, options.kilobytes))
    turns = {
        "tar cf": lambda target: subprocess.run(["tar", "cf", f"{target}/all.tar", "-C", source, "."], check=True),
        "convert": lambda target: convert(source, target, options=ConvertOptions(workers=options.workers)),
        "convert --from files": lambda target: convert(
            source, target, options=ConvertOptions(workers=options.workers, kind="files")
        ),
        "convert, one thread": lambda target: convert(source, target, options=ConvertOptions(workers=1)),
        "convert, half the size": lambda target: convert(
            source, target, options=ConvertOptions(workers=options.workers, images=ImageOptions(max_side=100))
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    cpu: dict[str, list[float]] = {name: [] for name in turns}
    for turn in range(options.rounds + 1):
        for name, run in turns.items():
            target = tempfile.mkdtemp(dir=options.data)
            cpu_before_s, started_s = cpu_s(), time.perf_counter()
            run(target)
            if turn:  # the first one fills the cache
                seconds[name].append(time.perf_counter() - started_s)
                cpu[name].append(cpu_s() - cpu_before_s)
            shutil.rmtree(target)
    for name in turns:
        wall, used = min(seconds[name]), min(cpu[name])
        print(
            f"{name:24} {options.images / wall:8,.0f} images/s, {min(seconds['tar cf']) / wall:5.0%} of tar by clock, "
            f"{min(cpu['tar cf']) / used:5.0%} by processor time, {used / options.images * 1e6:5.0f} us an image"
        )


def cpu_s() -> float:
    """Processor time of this process and those that it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


if __name__ == "__main__":
    main()
