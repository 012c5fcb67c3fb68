"""Sets whose bytes are a function of key, field and size, as ``tarfile`` reads them; nothing of ours is imported."""

from __future__ import annotations

import random
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from zlib import crc32

FIELDS = ("bin", "cls", "mask", "tok", "txt")
SPAN_BYTES, CHUNK_BYTES = 1 << 16, 1 << 22


def content(key: str, name: str, size: int) -> bytes:
    """The bytes of a field: a function of key, field and size. Every 11th size of ``txt`` does not decode."""
    if name == "cls":
        return b"%d" % (crc32(key.encode()) % 5)
    data = random.Random(f"{key}.{name}.{size}").randbytes(size)
    if name == "txt":
        return (b"\xff" if size % 11 == 10 else b"t") + data.hex()[1:size].encode()
    return bytes(one & 1 for one in data) if name == "mask" else data


@dataclass(eq=False)
class Sample:
    """A sample by tarfile: its record's bytes in the shard, its fields and where they begin."""

    key: str
    shard: str
    start: int
    stop: int
    fields: dict[str, bytes]
    places: dict[str, int]

    @cached_property
    def columns(self) -> dict[str, Any]:
        dice = crc32(self.key.encode()) >> 8
        score, lang = dice % 100, ("en", "de", None)[dice % 3]
        sizes = {"tokens": len(self.fields["tok"]) // 2, "size": len(self.fields["bin"])}
        return {**sizes, "cls": int(self.fields["cls"]), "lang": lang, "score": score if score >= 10 else None}


def read(folder: Path) -> list[Sample]:
    """The samples of a set, in storage order, after a check that their bytes are those of their keys."""
    found = []
    for path in sorted(folder.glob("*.tar")):
        by_key: dict[str, Sample] = {}
        with tarfile.open(path) as tar:
            for one in tar:
                (key, _, name), file = one.name.partition("."), tar.extractfile(one)
                data = file.read() if file else b""
                assert data == content(key, name, len(data))
                stop = one.offset_data + -(-one.size // 512) * 512
                known = by_key.get(key, Sample(key, path.name, one.offset, stop, {}, {}))
                fields, places = {**known.fields, name: data}, {**known.places, name: one.offset_data}
                by_key[key] = Sample(key, path.name, known.start, stop, fields, places)
        found += by_key.values()
    return found


CONDITIONS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "tokens >= 40": lambda one: one["tokens"] >= 40,
    "cls != 2 and tokens < 250": lambda one: one["cls"] != 2 and one["tokens"] < 250,
    "lang = 'en' or cls IN (1, 3)": lambda one: one["lang"] == "en" or one["cls"] in (1, 3),
    "not (lang = 'de')": lambda one: one["lang"] == "en",  # neither NULL
    "lang IS NULL": lambda one: one["lang"] is None,
    "size % 3 = 0 or size / 1000 BETWEEN 4 AND 99": lambda one: one["size"] % 3 == 0 or 4 <= one["size"] // 1000 <= 99,
    "score >= 30": lambda one: one["score"] is not None and one["score"] >= 30,
    "not score < 60": lambda one: one["score"] is not None and one["score"] >= 60,
    "score IS NOT NULL and lang LIKE 'e%'": lambda one: one["score"] is not None and one["lang"] == "en",
}  # fmt: skip
VIEW = "score >= 30"


def select(
    samples: list[Sample], where: str | None, subset: tuple[float, float] | None, exclude: Iterable[str] = ()
) -> list[Sample]:
    """The samples that pass all, in storage order."""
    first, stop = (round(one * len(samples)) if isinstance(one, float) else one for one in subset or (0, len(samples)))
    left_out = set(exclude)
    kept = [one for one in samples[int(first) : int(stop)] if one.key not in left_out]
    return [one for one in kept if where is None or CONDITIONS[where](one.columns)]


def under_one_checksum(samples: list[Sample], shard: str, at: int, least: tuple[int, int]) -> set[str]:
    """Keys of the span that holds a byte; a chunk ends at 4 MiB, or at ``least`` bytes and samples."""
    span: list[Sample] = []
    chunk: list[Sample] = []
    for one in (one for one in samples if one.shard == shard):
        span, chunk = [*span, one], [*chunk, one]
        chunk_bytes = one.stop - chunk[0].start
        is_chunk = chunk_bytes >= CHUNK_BYTES or (chunk_bytes >= least[0] and len(chunk) >= least[1])
        if at < one.stop and (is_chunk or one.stop - span[0].start >= SPAN_BYTES):
            break
        if is_chunk or one.stop - span[0].start >= SPAN_BYTES:
            span, chunk = [], [] if is_chunk else chunk
    return {one.key for one in span}
