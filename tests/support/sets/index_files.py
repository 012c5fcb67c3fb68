"""Files of an index, changed on purpose: written anew with checksums that are right, or with one flipped bit."""

from __future__ import annotations

import io
import json
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from streaming.shards.index.files import read_document, sealed, write_document

_TICKS = count(1)


def write_parquet(path: str | os.PathLike[str], table: Any, **options: Any) -> None:
    """Write an index file of these rows and this metadata, sealed."""
    Path(path).write_bytes(parquet_bytes(table, **options))


def parquet_bytes(table: Any, **options: Any) -> bytes:
    """Bytes of an index file of these rows and this metadata, sealed."""
    out = io.BytesIO()
    pq.write_table(table, out, **options)
    return sealed(out.getvalue())


def with_facts(path: str | os.PathLike[str], facts: Mapping[str, Any]) -> None:
    """Replace the metadata of an index file, sealed."""
    table = pq.read_table(path)
    write_parquet(path, table.replace_schema_metadata({b"shardstream": json.dumps(facts).encode()}))


def change_document(path: Path, **values: Any) -> None:
    """Replace members of a JSON document, sealed."""
    path.write_bytes(write_document(read_document(path.read_bytes()) | values))


@contextmanager
def flipped_bit(path: Path, draw: random.Random) -> Iterator[int]:
    """Flip one bit of a file for the duration; yields its number. No two contents have the same time."""
    original = path.read_bytes()
    bit = draw.randrange(8 * len(original))
    data = bytearray(original)
    data[bit // 8] ^= 1 << bit % 8
    try:
        _put(path, bytes(data))
        yield bit
    finally:
        _put(path, original)


def _put(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    touch(path)


def touch(path: Path) -> None:
    """Give a file a time of its own; what a process keeps of conditions is of sample tables of one time."""
    os.utime(path, ns=(next(_TICKS) * 10**9,) * 2)
