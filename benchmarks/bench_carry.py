"""Images per second: carried by packs of their documents, against the same images decoded as samples of their own.

Run: ``python benchmarks/bench_carry.py [--images 2000] [--rounds 5] [--workers 0] [--data FOLDER]``. Documents have an
image (JPEG of 384 to 416 pixels a side and about 68 KB) with 256 placeholders, and 20 to 2,000 words; a
third have words alone. Packs of 8,192 tokens carry the images; the run to compare with reads the same shards and
decodes the images alone (``fields=("jpg",)``, documents without an image left out), about as many in a batch. Images
come at their own size, or at 224 x 224: without packs, these are decoded straight into one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import common
import numpy as np
from bench_decode import photographs
from bench_images import NUM_BYTES, SIZE

from streaming import DataLoader, Packed, StreamingDataset

LENGTH, PACKS, IMAGES, PLACEHOLDER, PLACES = 8192, 4, 48, 7, 256
PHOTOGRAPHS, SIDES = 8, (384, 400, 416)


def documents(count: int) -> Iterator[dict[str, object]]:
    rng = np.random.default_rng(0)
    pictures = [one for side in SIDES for one in photographs(PHOTOGRAPHS, side, NUM_BYTES)]
    for number in range(count + count // 2):
        words = rng.integers(100, 50_000, int(rng.lognormal(5.3, 0.8)) % 2_000 + 20, np.uint16)
        sample: dict[str, object] = {"__key__": f"{number:07d}", "pictures": int(number % 3 < 2)}
        if sample["pictures"]:
            words = np.concatenate([np.full(PLACES, PLACEHOLDER, np.uint16), words])
            sample["jpg"] = pictures[number % len(pictures)]
        yield sample | {"tok": words.tobytes(), "tokens": len(words)}


def write(folder: str, count: int) -> None:
    columns = {name: (lambda sample, name=name: sample[name]) for name in ("tokens", "pictures")}
    common.write_shards(folder, documents(count), per_shard=1_250, columns=columns)


def carried(folder: str, decode: Any, workers: int) -> int:
    packed = Packed(StreamingDataset(folder, decode=decode), LENGTH, carry=("jpg",), placeholder=PLACEHOLDER)
    with DataLoader(packed, PACKS, num_workers=workers, last_batch="partial") as loader:
        return sum(len(images) for batch in loader for images in batch["jpg"])


def alone(folder: str, decode: Any, workers: int) -> int:
    dataset = StreamingDataset(folder, decode=decode, fields=("jpg",), where="pictures > 0")
    with DataLoader(dataset, IMAGES, num_workers=workers, last_batch="partial") as loader:
        return sum(len(batch["jpg"]) for batch in loader)


def main() -> None:
    args = common.arguments(__doc__ or "", images=2_000, workers=0)
    folder = common.made_once(args.data, f"carry-{args.images}", lambda target: write(target, args.images))
    print(common.machine())
    for size in ("rgb8", f"rgb8:{SIZE}x{SIZE}"):
        decode = {"jpg": size}
        runs: dict[str, common.Run] = {
            "alone": lambda decode=decode: alone(folder, decode, args.workers),
            "carried": lambda decode=decode: carried(folder, decode, args.workers),
        }
        common.show_turns(f"{args.images:,} images as {size}", runs, args.rounds, against="alone")


if __name__ == "__main__":
    main()
