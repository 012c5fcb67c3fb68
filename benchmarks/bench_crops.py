"""Random parts of JPEGs to 224 x 224: decoded alone, against decoding all, cropping and resizing; and batches of them.

Run: ``python benchmarks/bench_crops.py [--rounds 9]``. CPU milliseconds of one thread per image, the ways in turns:
medians and lowest. PSNR compares the part decoded alone with the same part of all pixels, resized by the same filter.
"""

from __future__ import annotations

import argparse
import io
import os
import platform
import statistics
import time
from collections.abc import Callable
from unittest import mock

import numpy as np
import torch
from bench_decode import photographs, saved
from PIL import Image

from streaming import decode
from streaming.build.batches import columns
from streaming.build.batches.build import BatchBuilder, Recipe, SourceRecipe
from streaming.build.batches.rows import FieldRange, Rows
from streaming.build.decode import images

SIZE = (224, 224)
PARTS = 60
KINDS = {"400 x 400": (400, 400, 68_000), "375 x 500": (375, 500, 85_000), "768 x 1024": (768, 1024, 300_000)}


def pictures(height: int, width: int, num_bytes: int) -> list[bytes]:
    """Five JPEGs of a size, cut out of square ones, at the quality that comes closest to ``num_bytes``."""
    side = max(height, width)
    if height == width:
        return photographs(5, side, num_bytes)
    made = []
    for data in photographs(5, side, num_bytes * side * side // (height * width)):
        picture = Image.open(io.BytesIO(data)).crop((0, 0, width, height))
        made.append(min((saved(picture, q) for q in range(70, 99, 2)), key=lambda one: abs(len(one) - num_bytes)))
    return made


def in_turns(ways: dict[str, Callable[[int], object]], rounds: int) -> dict[str, tuple[float, float]]:
    """Median and lowest CPU milliseconds per call of each way; a round calls each for every part."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.thread_time()
            for number in range(PARTS):
                way(number)
            found[name].append((time.thread_time() - start) / PARTS * 1e3)
    return {name: (statistics.median(times), min(times)) for name, times in found.items()}


def of_crops(name: str, inputs: list[bytes], rounds: int) -> None:
    decoder, whole = decode.random_crop("rgb8", SIZE), decode.image("rgb8")
    crops = [decoder.with_rng(np.random.default_rng(number)) for number in range(PARTS)]
    center = decode.center_crop("rgb8", SIZE)

    def data(number: int) -> bytes:
        return inputs[number % len(inputs)]

    def part(number: int) -> np.ndarray:
        pixels = whole(data(number))
        box = crops[number].part(*pixels.shape[:2]).on_grid(SIZE)
        return box.of(pixels)

    def by_pillow(number: int) -> np.ndarray:
        picture = Image.open(io.BytesIO(data(number))).convert("RGB")
        y, x, height, width = crops[number].part(picture.height, picture.width)
        box = (x, y, x + width, y + height)
        return np.asarray(picture.resize(SIZE[::-1], Image.Resampling.BILINEAR, box=box))

    ways: dict[str, Callable[[int], object]] = {
        "rgb8:crop224x224": lambda number: crops[number](data(number)),
        "all, cropped, same filter": lambda number: images.resample(part(number), SIZE),
        "all, cropped, area averages": lambda number: images.resize(part(number), SIZE),
        "all, cropped, by Pillow": by_pillow,
        "all, cropped, not resized": part,
        "rgb8:center224x224": lambda number: center(data(number)),
    }
    print(f"{name}, {sum(map(len, inputs)) / len(inputs):.0f} bytes")
    for way, (median, lowest) in in_turns(ways, rounds).items():
        print(f"  {way:30} {median:6.2f} ms ({lowest:.2f})")
    ratios = []
    for number in range(PARTS):
        error = np.mean((crops[number](data(number)).astype(float) - images.resample(part(number), SIZE)) ** 2)
        ratios.append(10 * np.log10(255**2 / error) if error else np.inf)
    print(f"  PSNR: lowest {min(ratios):.1f} dB, median {np.median(ratios):.1f}; {np.isinf(ratios).sum()} equal")


def of_batches(inputs: list[bytes], rounds: int) -> None:
    """Batches of 60: images decoded into their rows, and decoded first, then stacked."""
    memory = b"".join(inputs[number % len(inputs)] for number in range(PARTS))
    sizes = np.array([len(inputs[number % len(inputs)]) for number in range(PARTS)], np.int64)
    where = FieldRange(starts=np.cumsum(sizes) - sizes, sizes=sizes)
    keys = [str(number) for number in range(PARTS)]
    rows = Rows(memory=memory, view=memoryview(memory), keys=keys, urls=keys, fields={"jpg": where}, damage={})
    slot = torch.empty((PARTS, *SIZE, 3), dtype=torch.uint8)
    for spec in ("rgb8:crop224x224", "rgb8:224x224"):
        recipe = Recipe(parts=(SourceRecipe(decoders=decode.resolve_decoders(spec)),))

        def built(recipe: Recipe = recipe) -> object:
            return BatchBuilder(recipe, lambda _: iter(()), print, lambda *_: slot).build(rows, None)

        found: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(rounds):
            for placed in (True, False):
                with mock.patch.object(
                    columns, "has_one_shape", (lambda _: False) if not placed else decode.has_one_shape
                ):
                    start = time.thread_time()
                    built()
                    found[placed].append((time.thread_time() - start) / PARTS * 1e3)
        into, stacked = (statistics.median(found[placed]) for placed in (True, False))
        print(f"batch of {PARTS}, {spec}: into rows {into:.3f} ms an image, stacked {stacked:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    images.use_one_thread()
    torch.set_num_threads(1)
    print(
        f"{platform.machine()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.0f}, "
        f"Python {platform.python_version()}"
    )
    for name, kind in KINDS.items():
        of_crops(name, pictures(*kind), rounds)
    of_batches(pictures(*KINDS["400 x 400"]), 3 * rounds)


if __name__ == "__main__":
    main()
