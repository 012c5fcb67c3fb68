"""What is delivered: the sets, their sizes, and how a sample is known again. Standard library and NumPy only.

Every contestant imports this in an environment of its own, so nothing of the project may be imported here.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

TOKENS_PER_SEQUENCE = 2048
SIDE = 224
GRID = 7
"""A decoded image is compared as means over ``GRID`` x ``GRID`` squares."""

PIXEL_TOLERANCE = 5.0
"""Mean difference of those means, of 255, that decoders and ways of resizing may have."""

PAIRS = 30_000
"""Documents are pairs of tokens, of up to this value and above it, which say together which pair of the set it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Set:
    """One kind of delivery: which data, how many samples and shards of it, and in which batches."""

    name: str
    title: str
    data: str
    field: str
    batch_size: int
    count: int
    num_shards: int
    quick_count: int
    quick_num_shards: int
    decode: bool = False
    large: bool = False
    read: bool = False
    """Who takes the batches reads every byte of them, for it could be a view of a file that nobody has read."""
    length: int = 0
    """Documents come packed in rows of so many tokens, and are counted in tokens; 0: samples come as they are."""

    @property
    def unit(self) -> str:
        """What is counted."""
        return "tokens" if self.length else "samples"

    def size(self, *, quick: bool) -> int:
        return self.quick_count if quick else self.count

    def shards(self, *, quick: bool) -> int:
        return self.quick_num_shards if quick else self.num_shards


_IMAGES: dict[str, Any] = {
    "data": "images", "field": "jpg", "batch_size": 64,
    "count": 20_000, "num_shards": 16, "quick_count": 320, "quick_num_shards": 8,
}  # fmt: skip
_DOCUMENTS: dict[str, Any] = {
    "data": "documents", "field": "bin",
    "count": 120_000_000, "num_shards": 16, "quick_count": 1_000_000, "quick_num_shards": 8,
}  # fmt: skip

SETS = {
    one.name: one
    for one in (
        Set(name="images-raw", title="D1 JPEGs of 68 KB with class and JSON, bytes", read=True, **_IMAGES),
        Set(name="images-decoded", title=f"D1 JPEGs 400x400 to {SIDE}x{SIDE} uint8", decode=True, **_IMAGES),
        Set(
            name="records", title="D2 JSON records of 430 B, bytes", data="records", field="json", batch_size=256,
            count=1_000_000, num_shards=50, quick_count=8_000, quick_num_shards=8,
        ),
        Set(
            name="tokens", title="D3 2,048 uint16 tokens to int64 [32, 2048]", data="tokens", field="bin",
            batch_size=32, count=200_000, num_shards=16, quick_count=1_600, quick_num_shards=8, decode=True,
        ),
        Set(
            name="large", title="D4 samples of 20 MB, bytes", data="large", field="bin", batch_size=2,
            count=60, num_shards=12, quick_count=8, quick_num_shards=4, large=True, read=True,
        ),
        Set(
            name="packs-2k", title="D5 documents of 570 uint16 tokens to packs, int64 [32, 2048]", length=2048,
            batch_size=32, **_DOCUMENTS,
        ),
        Set(
            name="packs-8k", title="D5 documents of 570 uint16 tokens to packs, int64 [8, 8192]", length=8192,
            batch_size=8, **_DOCUMENTS,
        ),
    )
}  # fmt: skip


def tokens_between(start: int, stop: int) -> np.ndarray:
    """Tokens ``start`` to ``stop``, both even, of all documents laid end to end, as uint16; 0 is none of them."""
    pairs = np.arange(start // 2, stop // 2)
    return np.stack([1 + pairs % PAIRS, 1 + PAIRS + pairs // PAIRS], axis=1).astype(np.uint16).ravel()


def pairs_in(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find the pairs in uint16 [R, T]: where each begins, in the rows laid end to end, and which of the set it is."""
    flat = rows.ravel()
    begins = (flat[:-1] > 0) & (flat[:-1] <= PAIRS) & (flat[1:] > PAIRS)
    begins[rows.shape[1] - 1 :: rows.shape[1]] = False  # not from one row into the next
    at = np.flatnonzero(begins)
    return at, flat[at].astype(np.int64) - 1 + PAIRS * (flat[at + 1].astype(np.int64) - 1 - PAIRS)


def fingerprint(payload: Any) -> int:
    """64 bits of a sample's bytes: all of them up to 4 KiB, beyond that 64 slices of 64 bytes and the length."""
    view = memoryview(payload).cast("B")
    digest = hashlib.blake2b(digest_size=8)
    if len(view) <= 4096:
        digest.update(view)
    else:
        step = (len(view) - 64) // 63
        digest.update(b"%d" % len(view))
        for start in range(0, 64 * step, step):
            digest.update(view[start : start + 64])
    return int.from_bytes(digest.digest(), "little")


def thumbnail(pixels: np.ndarray) -> np.ndarray:
    """Means over the squares of one image, uint8 [224, 224, 3] or [3, 224, 224], as float32 [GRID, GRID, 3]."""
    if pixels.shape == (3, SIDE, SIDE):
        pixels = pixels.transpose(1, 2, 0)
    if pixels.shape != (SIDE, SIDE, 3) or pixels.dtype != np.uint8:
        raise ValueError(
            f"expected uint8 [{SIDE}, {SIDE}, 3] or [3, {SIDE}, {SIDE}], got {pixels.dtype} {pixels.shape}"
        )
    step = SIDE // GRID
    return pixels.reshape(GRID, step, GRID, step, 3).mean((1, 3), dtype=np.float32)


def shard_files(folder: str) -> list[str]:
    """The shards in ``folder``, sorted."""
    return sorted(entry.path for entry in os.scandir(folder) if entry.name.endswith(".tar"))
