"""The data of all contestants, as shards by the project's own writer; the peers' formats are made from these."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import numpy as np
from sets import TOKENS_PER_SEQUENCE, Set, fingerprint, thumbnail, tokens_between

sys.path.insert(1, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import common
from bench_decode import by_pillow, photographs
from bench_small_records import records

PHOTOGRAPHS = 24
LARGE_BYTES = 20_000_000


def images(count: int) -> Iterator[dict[str, object]]:
    """Different photographs in turn, each copy made distinct by a JPEG comment that holds its number."""
    pictures = photographs(PHOTOGRAPHS, 400, 68_000)
    for i in range(count):
        picture = pictures[i % PHOTOGRAPHS]
        jpg = picture[:2] + b"\xff\xfe\x00\x0a%08d" % i + picture[2:]
        yield {"__key__": f"{i:07d}", "jpg": jpg, "cls": i % 1000, "json": {"w": 400, "h": 400}}


def tokens(count: int) -> Iterator[dict[str, object]]:
    rng = np.random.default_rng(0)
    for i in range(count):
        yield {"__key__": f"{i:09d}", "bin": rng.integers(0, 50_000, TOKENS_PER_SEQUENCE, np.uint16).tobytes()}


def large(count: int) -> Iterator[dict[str, object]]:
    rng = np.random.default_rng(0)
    for i in range(count):
        yield {"__key__": f"{i:06d}", "bin": rng.bytes(LARGE_BYTES)}


MAKERS = {"images": images, "records": records, "tokens": tokens, "large": large}


def borders(num_tokens: int) -> np.ndarray:
    """Where documents begin in all tokens laid end to end, and the end.

    10 to 100,000 tokens, log-normal, 570 on average; all lengths are even, so that no pair of tokens is parted.
    """
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(5.5, 1.3, num_tokens // 100).astype(np.int64).clip(10, 100_000) & ~1
    stops = np.cumsum(lengths)
    return np.concatenate([[0], stops[stops < num_tokens], [num_tokens]])


def documents(edges: np.ndarray) -> Iterator[dict[str, object]]:
    for number, (start, stop) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
        yield {"__key__": f"{number:09d}", "bin": tokens_between(start, stop).tobytes()}


def make_documents(folder: str, one: Set, *, quick: bool) -> None:
    """Shards with the number of each document's tokens in their index, and the borders that the check goes by."""
    edges = borders(one.size(quick=quick))
    common.write_shards(folder, documents(edges), per_shard=-(-(len(edges) - 1) // one.shards(quick=quick)),
                        columns={"tokens": lambda sample: len(sample["bin"]) // 2})  # fmt: skip
    np.save(os.path.join(folder, "borders.npy"), edges)


def make(folder: str, one: Set, *, quick: bool) -> None:
    """Shards, their index, and what tells right samples from wrong ones."""
    if one.length:
        make_documents(folder, one, quick=quick)
        return
    marks = []

    def watched() -> Iterator[dict[str, object]]:
        for sample in MAKERS[one.data](one.size(quick=quick)):
            marks.append(fingerprint(sample[one.field]))
            yield sample

    common.write_shards(folder, watched(), per_shard=-(-one.size(quick=quick) // one.shards(quick=quick)))
    known = np.array(marks, np.uint64)
    if len(np.unique(known)) != len(known):
        raise ValueError(f"{one.data}: two samples have the same fingerprint")
    np.save(os.path.join(folder, "fingerprints.npy"), known)
    if one.data == "images":
        pictures = [by_pillow(picture) for picture in photographs(PHOTOGRAPHS, 400, 68_000)]
        np.save(os.path.join(folder, "thumbnails.npy"), np.stack([thumbnail(picture) for picture in pictures]))
