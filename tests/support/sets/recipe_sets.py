"""Small sets with the fields that other people's programs train on, for the recipes of docs/recipes."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from shard_tools import ShardWriter
from streaming.shards.catalog.build import index_shards
from streaming.shards.catalog.urls import expand_urls
from streaming.shards.index.cutter import ChunkRule
from streaming.storage import Storage

SIDE, RATE = 16, 8_000


def jpg(number: int) -> bytes:
    """An image of its own color and pattern."""
    pixels = np.random.default_rng(number).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=95)
    return file.getvalue()


def flac(number: int) -> bytes:
    """A sound of its own length, 50 to 90 ms."""
    import soundfile  # noqa: PLC0415  an extra

    wave = np.random.default_rng(number).uniform(-0.5, 0.5, RATE // 20 + 40 * (number % 9)).astype(np.float32)
    file = io.BytesIO()
    soundfile.write(file, wave, RATE, format="FLAC")
    return file.getvalue()


MAKERS: dict[str, Callable[[int], Any]] = {
    "boxes": lambda _: b"0 0.5 0.5 0.25 0.75",
    "cls": lambda number: number,
    "flac": flac,
    "jpg": jpg,
    "json": lambda number: [{"user": f"question {number}", "assistant": f"answer {number}"}],
    "txt": lambda number: f"number {number}",
}


def write_rows(folder: Path, fields: tuple[str, ...], shard_sizes: tuple[int, ...] = (30, 18, 24)) -> None:
    """Write shards of samples with these fields, in chunks of eight."""
    first = 0
    for shard, size in enumerate(shard_sizes):
        with ShardWriter(f"{folder}/{{:06d}}.tar", start_shard=shard, index=False) as writer:
            for number in range(first, first + size):
                made = {name: MAKERS[name](number) for name in fields}
                made |= {name: json.dumps(value) for name, value in made.items() if name == "json"}
                if "boxes" in made:  # a file of text, whatever is in it
                    made["txt"] = made.pop("boxes")
                writer.write({"__key__": f"{number:05d}", **made})
        first += size
    storage = Storage(None)
    index_shards(storage, expand_urls(f"{folder}/", storage), rule=ChunkRule(min_bytes=1, min_samples=8))
