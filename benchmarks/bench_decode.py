"""Images per second: 400 x 400 JPEGs of about 68 KB to 224 x 224, ours against Pillow, on one thread and two.

Run: ``python benchmarks/bench_decode.py [--seconds 2]``. Also prints how fast a batch of 128 is collated.
"""

from __future__ import annotations

import argparse
import io
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from PIL import Image

from streaming import decode
from streaming.build.batches.collate import default_collate
from streaming.build.decode import images

DEFAULT_LINEAR_UP_TO = images.LINEAR_UP_TO


def photographs(count: int, side: int, num_bytes: int) -> list[bytes]:
    """JPEGs of noise that is smooth at several scales, at the quality that comes closest to ``num_bytes``."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(count):
        pixels = np.zeros((side, side, 3))
        for scale in (2, 4, 8, 16, 32, 64):
            coarse = rng.normal(0, scale**0.7, (side // scale + 2, side // scale + 2, 3))
            plane = [
                Image.fromarray(coarse[:, :, c].astype(np.float32)).resize((side, side), Image.Resampling.BICUBIC)
                for c in range(3)
            ]
            pixels += 0.3 * np.stack([np.asarray(one) for one in plane], -1) + 0.7 * np.asarray(plane[0])[..., None]
        picture = Image.fromarray(np.clip(128 + pixels * 3.6, 0, 255).astype(np.uint8))
        made.append(min((saved(picture, q) for q in range(70, 99, 2)), key=lambda data: abs(len(data) - num_bytes)))
    return made


def saved(picture: Image.Image, quality: int) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, "JPEG", quality=quality)
    return stream.getvalue()


def by_pillow(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB").resize((224, 224), Image.Resampling.BILINEAR))


def by_pillow_draft(data: bytes) -> np.ndarray:
    picture = Image.open(io.BytesIO(data))
    picture.draft("RGB", (224, 224))
    return np.asarray(picture.convert("RGB").resize((224, 224), Image.Resampling.BILINEAR))


def rate(function: Callable[[bytes], object], inputs: list[bytes], threads: int, seconds: float) -> tuple[float, float]:
    """Calls per second of the clock, all threads together, and per second of CPU time of one thread."""

    def work(deadline: float) -> tuple[int, float]:
        done, start_cpu = 0, time.thread_time()
        while time.perf_counter() < deadline:
            for data in inputs:
                function(data)
            done += len(inputs)
        return done, time.thread_time() - start_cpu

    with ThreadPoolExecutor(threads) as pool:
        start = time.perf_counter()
        results = list(pool.map(work, [start + seconds] * threads))
        elapsed = time.perf_counter() - start
    done = sum(one for one, _ in results)
    return done / elapsed, done / sum(cpu for _, cpu in results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0)
    seconds = parser.parse_args().seconds
    images.use_one_thread()
    torch.set_num_threads(1)
    inputs = photographs(16, 400, 68_000)
    mean = sum(map(len, inputs)) / len(inputs)
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}; JPEGs of {mean:.0f} bytes")
    sized = decode.image("rgb8", (224, 224))
    candidates: dict[str, Callable[[bytes], object]] = {
        "rgb8 (400x400)": decode.image("rgb8"),
        "rgb8:224x224": sized,
        "rgb8:224x224 by area": sized,
        "Pillow to 224x224": by_pillow,
        "Pillow draft to 224x224": by_pillow_draft,
    }
    for name, function in candidates.items():
        images.LINEAR_UP_TO = 0.0 if "area" in name else DEFAULT_LINEAR_UP_TO
        (one, per_core), (two, _) = (rate(function, inputs, threads, seconds) for threads in (1, 2))
        print(f"{name:24} {per_core:6.0f} images per CPU s; {one:6.0f} images/s on 1 thread, {two:6.0f} on 2")
    images.LINEAR_UP_TO = DEFAULT_LINEAR_UP_TO
    samples = [{"__key__": str(i), "jpg": sized(inputs[i % 16]), "cls": i, "txt": b"x"} for i in range(128)]
    slot = torch.empty((128, 224, 224, 3), dtype=torch.uint8)
    for name, allocate in (
        ("fresh memory", None),
        ("a given slot", lambda shape, dtype: slot if len(shape) == 4 else torch.empty(shape, dtype=dtype)),
    ):
        start, count = time.perf_counter(), 0
        while time.perf_counter() < start + seconds / 2:
            default_collate(samples, allocate=allocate)
            count += 1
        each = (time.perf_counter() - start) / count
        print(f"collate 128 x 224x224x3 into {name}: {each * 1e3:.2f} ms, {slot.nbytes / each / 1e9:.1f} GB/s")
    start = time.perf_counter()
    fields = [{"bin": b"x"} for _ in range(4096)]
    default_collate(fields)
    print(f"collate 4096 bytes objects: {(time.perf_counter() - start) * 1e6 / 4096:.3f} us each")


if __name__ == "__main__":
    main()
