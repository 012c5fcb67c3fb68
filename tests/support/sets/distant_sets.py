"""Sets with members that are large enough to stay in the store, and a decoder that reads a few bytes of each."""

from __future__ import annotations

import io
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shard_tools import ShardWriter
from streaming import StreamingDataset
from streaming.shards.catalog.build import index_shards
from streaming.shards.catalog.urls import expand_urls
from streaming.shards.index.cutter import ChunkRule
from streaming.storage import Storage

NUM, SHARD = 30, 12
LEAST = 300_000
"""Where members begin to be distant, in tests: far below the real size."""
HEAD = b"CLIP"


def clip(number: int) -> bytes:
    """A head and words that count up: of 600 to 700 KB, every fifth of 200 KB, which is read as a whole."""
    size = 50_000 if number % 5 == 2 else 150_000 + 900 * number
    return HEAD + struct.pack("<I", number) + np.arange(number, number + size, dtype="<u4").tobytes()


def sample_of(number: int) -> dict[str, Any]:
    sample: dict[str, Any] = {"__key__": f"{number:05d}", "cls": number, "txt": f"clip {number}"}
    return sample if number % 7 == 6 else {**sample, "clip": clip(number)}  # some have none


def write_clips(url: str, storage_options: Mapping[str, Any] | None = None) -> str:
    """30 samples in 3 shards and chunks of 2 MB: here and there several of them in a chunk."""
    with ShardWriter(f"{url}/{{:06d}}.tar", max_samples=SHARD, index=False, storage_options=storage_options) as writer:
        for number in range(NUM):
            writer.write(sample_of(number))
    storage = Storage(storage_options)
    rule = ChunkRule(target_bytes=2_000_000, min_bytes=1_500_000, min_samples=3)
    index_shards(storage, expand_urls(f"{url}/", storage), rule=rule)
    return f"{url}/"


@dataclass(frozen=True)
class ThreePlaces:
    """Reads 8 bytes at the head, and 4 at two other places; of a clip, only these matter.

    Attributes:
        place: Share of the size at which to read; -1: drawn at random.
    """

    place: float = 0.5

    accepts_buffer = True
    reads_ranges = True

    def with_rng(self, rng: np.random.Generator) -> ThreePlaces:
        return self if self.place >= 0 else replace(self, place=float(rng.uniform()))

    def __call__(self, data: Any) -> tuple[int, int, int]:
        file = io.BytesIO(data) if isinstance(data, (bytes, bytearray, memoryview)) else data
        if file.read(4) != HEAD:
            raise ValueError("this is no clip")
        (number,) = struct.unpack("<I", file.read(4))
        num_words = (file.seek(0, io.SEEK_END) - 8) // 4
        return number, self._word(file, number, num_words - 1), self._word(file, number, int(num_words * self.place))

    def _word(self, file: Any, number: int, at: int) -> int:
        file.seek(8 + 4 * at)
        (word,) = struct.unpack("<I", file.read(4))
        if word != number + at:
            raise ValueError(f"word {at} is {word}, not {number + at}")
        return int(word)


class Watched:
    """What is read of shards through a dataset's storage: URL, first byte, number of bytes."""

    def __init__(self, dataset: StreamingDataset) -> None:
        self.reads: list[tuple[str, int, int]] = []
        self.before: Any = lambda url, start, out: None
        self.after: Any = lambda url, start, out: None
        self._lock, self.at_once, self.most_at_once = threading.Lock(), 0, 0
        read_into = dataset.source.storage.read_into

        def counted(url: str, start: int, out: memoryview, **how: bool) -> None:
            with self._lock:
                self.reads.append((url, start, len(out)))
                self.at_once += 1
                self.most_at_once = max(self.most_at_once, self.at_once)
            try:
                self.before(url, start, out)
                read_into(url, start, out, **how)
                self.after(url, start, out)
            finally:
                with self._lock:
                    self.at_once -= 1

        dataset.source.storage.read_into = counted  # type: ignore[method-assign]

    @property
    def num_bytes(self) -> int:
        return sum(size for *_, size in self.reads)


def flip(folder: Path, number: int, at: float) -> None:
    """Damage the clip of a sample in its shard, at a share of its size."""
    path, data = folder / f"{number // SHARD:06d}.tar", clip(number)
    content = bytearray(path.read_bytes())
    start = content.index(data[:64])
    content[start + int(len(data) * at)] ^= 0xFF
    path.write_bytes(content)
