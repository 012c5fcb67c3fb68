"""Sidecars that other tools left beside a shard: Energon's and DALI's ``.idx`` and the JSON of wids.

All of them say where things are, none says that the bytes are right: a CRC32C still needs every byte, so they save no
reading when a shard is indexed. What they can do: split one big shard at known record borders so that several
workers scan it, cross-check a scan (a sidecar that disagrees means that shard and sidecar are not of one make), and
tell the number of samples before any read. Pure: bytes in, values out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from streaming.errors import IndexFormatError
from streaming.types import Int64Array

_BLOCK_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class DaliField:
    """One field in a DALI index."""

    extension: str
    start: int
    size: int
    name: str | None
    """The member's name; None in indexes before v1.2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WidsShard:
    """One shard in a wids description."""

    url: str
    num_samples: int
    size_bytes: int | None


def parse_energon_idx(data: bytes, source: str, shard_bytes: int | None = None) -> Int64Array:
    """Borders of the ``n`` samples of a shard from Energon's ``X.tar.idx``: int64 ``[n + 1]``.

    Gives the offset of each sample's first header (PAX and long-name headers included) and where the last sample
    ends. Gives no keys, no fields, no sizes.

    Args:
        data: The whole file: native (here: little-endian) uint64.
        source: Its URL, for messages.
        shard_bytes: The shard's size, if known, to check against.

    Raises:
        IndexFormatError: If the numbers are no rising block offsets, or leave the shard.
    """
    if len(data) % 8 or not data:
        raise IndexFormatError(f"{source}: {len(data)} bytes are no Energon index (uint64 offsets)")
    words = np.frombuffer(data, "<u8")
    borders = words.astype(np.int64)
    if (words >> np.uint64(62)).any() or (borders % _BLOCK_BYTES).any() or (np.diff(borders) <= 0).any():
        raise IndexFormatError(f"{source}: no Energon index: the offsets do not rise in blocks of {_BLOCK_BYTES}")
    if shard_bytes is not None and borders[-1] > shard_bytes:
        raise IndexFormatError(f"{source}: ends at byte {borders[-1]}, the shard has {shard_bytes}; stale sidecar?")
    return borders


def parse_dali_idx(data: bytes, source: str) -> list[tuple[DaliField, ...]]:
    """Fields of each sample from a DALI ``X.idx`` of version 1.0 to 1.2.

    Gives offsets and sizes of the fields' bytes; since 1.2 the names, from which the keys follow. A name that holds
    blanks is ambiguous in this format and refused.

    Raises:
        IndexFormatError: If the text does not follow the format.
    """
    lines = data.decode("utf-8", "replace").splitlines()
    head = lines[0].split(" ") if lines else []
    if len(head) != 2 or head[0] not in {"v1.0", "v1.1", "v1.2"} or not _is_number(head[1]):
        raise IndexFormatError(f"{source}: no DALI index: the first line is {lines[:1]!r}, expected 'v1.2 COUNT'")
    if len(lines) - 1 != int(head[1]):
        raise IndexFormatError(f"{source}: {len(lines) - 1} samples listed, {head[1]} announced; cut off?")
    width = 4 if head[0] == "v1.2" else 3
    return [_dali_sample(line, width, f"{source}, line {number}") for number, line in enumerate(lines[1:], 2)]


def _dali_sample(line: str, width: int, source: str) -> tuple[DaliField, ...]:
    words = line.split(" ")
    if len(words) % width:
        raise IndexFormatError(f"{source}: {len(words)} words are not fields of {width} (a name with blanks?)")
    fields = []
    for at in range(0, len(words), width):
        extension, start, size, *name = words[at : at + width]
        if not _is_number(start) or not _is_number(size):
            raise IndexFormatError(f"{source}: offset {start!r} or size {size!r} is not a number (a name with blanks?)")
        fields.append(DaliField(extension=extension, start=int(start), size=int(size), name=name[0] if name else None))
    return tuple(fields)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 19


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def parse_wids(data: bytes, source: str) -> list[WidsShard]:
    """Shards, their numbers of samples and (where given) sizes from a wids JSON description.

    Gives nothing about what is inside a shard.

    Raises:
        IndexFormatError: If the text is no such description.
    """
    try:
        document: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise IndexFormatError(f"{source}: no JSON ({error})") from error
    rows = document.get("shardlist") if isinstance(document, Mapping) else None
    if not isinstance(rows, Sequence) or isinstance(rows, str):
        raise IndexFormatError(f"{source}: no wids description: no list 'shardlist'")
    return [_wids_shard(row, f"{source}, shard {number}") for number, row in enumerate(rows)]


def _wids_shard(row: Any, source: str) -> WidsShard:
    url, num_samples, size = (
        row.get(name) if isinstance(row, Mapping) else None for name in ("url", "nsamples", "filesize")
    )
    sizes_fit = size is None or _is_count(size)
    if not isinstance(url, str) or not isinstance(num_samples, int) or not _is_count(num_samples) or not sizes_fit:
        raise IndexFormatError(f"{source}: expected 'url' and 'nsamples', got {str(row)[:80]!r}")
    return WidsShard(url=url, num_samples=num_samples, size_bytes=size)
