"""Images: JPEGs of 400 x 400 and about 68 KB with class and JSON; as bytes, and as uint8 [64, 224, 224, 3].

Run: ``python benchmarks/bench_images.py [--images 3000] [--rounds 3] [--data FOLDER]``. Ours against webdataset (with
Pillow, as its users decode), and for decoding against the bare decoder: a loop over bytes in memory on the same cores.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import common
import numpy as np
from bench_decode import photographs
from PIL import Image

from streaming import DataLoader, StreamingDataset
from streaming.build.decode import resolve_decoders

SIDE, NUM_BYTES, SIZE, BATCH_SIZE, PER_SHARD = 400, 68_000, 224, 64, 1_250
MODE = f"rgb8:{SIZE}x{SIZE}"
PHOTOGRAPHS = 24  # different ones; they are repeated


def samples(count: int) -> Iterator[dict[str, object]]:
    pictures = photographs(PHOTOGRAPHS, SIDE, NUM_BYTES)
    for i in range(count):
        yield {"__key__": f"{i:07d}", "jpg": pictures[i % PHOTOGRAPHS], "cls": i % 1000, "json": {"w": SIDE, "h": SIDE}}


def ours(folder: str, decode: Any, workers: int) -> int:
    with DataLoader(StreamingDataset(folder, decode=decode), BATCH_SIZE, num_workers=workers) as loader:
        return sum(len(batch["jpg"]) for batch in loader)


def by_pillow(sample: dict[str, Any]) -> dict[str, Any]:
    picture = Image.open(io.BytesIO(sample["jpg"])).convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    return {**sample, "jpg": np.asarray(picture)}


def theirs(folder: str, *, decode: bool) -> int:
    steps = [lambda pipeline: pipeline.map(by_pillow)] if decode else []
    return sum(len(batch["jpg"]) for batch in common.webdataset(folder, *steps, batch_size=BATCH_SIZE))


def bare(pictures: list[bytes], count: int) -> int:
    """The decoder alone, on as many threads as there are cores."""
    decoder = resolve_decoders({"jpg": MODE}).decoder_for("jpg")
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        return sum(1 for _ in threads.map(lambda i: decoder(pictures[i % len(pictures)]), range(count)))


def main() -> None:
    args = common.arguments(__doc__ or "", images=3_000, workers=0)
    folder = common.made_once(
        args.data, f"images-{args.images}",
        lambda target: common.write_shards(target, samples(args.images), per_shard=PER_SHARD),
    )  # fmt: skip
    dataset = StreamingDataset(folder, decode=None)
    pictures = [dataset[i]["jpg"] for i in range(min(PHOTOGRAPHS, len(dataset)))]
    print(common.machine())
    raw = {"webdataset": lambda: theirs(folder, decode=False), "shardstream": lambda: ours(folder, None, args.workers)}
    common.show(f"{args.images:,} images, raw", common.take_turns(raw, args.rounds), against="webdataset")
    decoded = {
        "webdataset": lambda: theirs(folder, decode=True),
        "shardstream": lambda: ours(folder, {"jpg": MODE}, args.workers),
        "bare decoder": lambda: bare([bytes(one) for one in pictures if isinstance(one, bytes)], args.images),
    }
    rates = common.take_turns(decoded, args.rounds)
    common.show(f"{args.images:,} images, decoded to {SIZE} x {SIZE}", rates, against="webdataset")


if __name__ == "__main__":
    main()
