"""Join a table of values to the samples of a dataset by their keys, once; no shard is read.

The file is read once for each group of shards whose keys fit into memory, batch by batch::

    keys of a group of shards  -> hashes, sorted           (about 60 bytes per sample)
    a batch of rows of the file -> hashes -> places among them -> keys compared -> values stored

Memory is bounded by ``memory_bytes``, whatever the size of the file. Hashes only narrow the search; keys decide.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shard_tools.change.columns.table import TableRows, open_rows
from shard_tools.change.columns.target import THREADS, AddReport, ColumnTarget, Filled
from shard_tools.make.write.columns import stored_array
from shard_tools.running.engine import DEFAULT_MEMORY
from shard_tools.running.progress import NoProgress, Progress
from streaming.common.arguments import counted, parse_bytes
from streaming.common.arrays import sums
from streaming.common.threads import map_threads
from streaming.errors import DataError
from streaming.shards.index.columns import KEY, stable_hash
from streaming.storage import Storage, redact
from streaming.types import Int64Array

Missing = Literal["null", "error"]
_BYTES_A_SAMPLE = 96  # a key of 20 bytes, its hash, its position in the order, a value, and the memory for sorting
_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOptions:
    """Options for joining values.

    Attributes:
        on: Column of the file that holds the samples' keys.
        value: Column that holds the values; None: the one named like the late column, or the only other one.
        missing: Treatment of samples without a row or value: no value (``"null"``), or an error.
        memory_bytes: Memory for keys and values.
    """

    on: str
    value: str | None = None
    missing: Missing = "null"
    memory_bytes: int = parse_bytes(DEFAULT_MEMORY)


def join_column(
    target: ColumnTarget, source: str, *, storage: Storage, options: JoinOptions, progress: Progress | None = None
) -> AddReport:
    """Add the late column ``target`` from the table at ``source``: Parquet, JSONL or CSV, a file or a pattern.

    Raises:
        ConfigError: The table lacks a column, or it has no values that conditions support.
        DataError: A key occurs twice in the table, no row matches a sample, or a sample has no value and ``missing``
        forbids it. Nothing is written then if all keys fit into ``memory_bytes``.
    """
    begun, progress = time.monotonic(), progress or NoProgress()
    rows, digest = open_rows(source, storage, name=target.name, on=options.on, value=options.value)
    version = target.version_of(file=digest, on=options.on, value=rows.value, missing=options.missing)
    if (done := target.finished(version)) is not None:
        return done
    groups = _groups(target.sizes, max(1, options.memory_bytes // _BYTES_A_SAMPLE))
    progress.start(total_bytes=None, total=len(target.urls))
    found, types = _Found(), dict[int, str]()
    for number, group in enumerate(groups):
        values = _joined(target, group, rows, found, is_last=number == len(groups) - 1)
        if options.missing == "error" and found.missing:
            raise DataError(
                f"without a value in {redact(source)}: {counted(sum(found.missing.values()), 'sample')}, first "
                f"{', '.join(map(repr, found.first_missing))}. Add them, or give --missing null"
            )
        if number == len(groups) - 1 and not found.num_matched:
            raise DataError(_no_match(source, rows, options.on, sum(target.sizes), found))
        if number == 0:
            target.begin()
        starts = sums([target.sizes[shard] for shard in group])
        parts = [(shard, stored_array(values.slice(starts[at], target.sizes[shard]))) for at, shard in enumerate(group)]
        types |= {shard: str(part.type) for shard, part in parts}
        for _ in map_threads(lambda part: target.shard(part[0]).write(part[1], version), parts, THREADS):
            progress.advance(num=1)
    filled = [Filled(types[shard], found.missing.get(shard, 0)) for shard in range(len(target.sizes))]
    return target.finish(
        filled, version=version, made_from=source, begun_s=begun, first_missing=tuple(found.first_missing),
        num_rows=rows.num_rows, num_unmatched=rows.num_rows - found.num_matched,
        first_unmatched=tuple(found.first_unmatched), num_shared=found.num_shared,
    )  # fmt: skip


@dataclass(slots=True, kw_only=True)
class _Found:
    """The result of the groups of shards so far.

    Attributes:
        matched: One bit per row, packed, for each batch: whether it matched a sample of any group so far.
        missing: Number of samples without a value, by shard.
    """

    matched: list[Any] = field(default_factory=list)
    missing: dict[int, int] = field(default_factory=dict)
    first_missing: list[str] = field(default_factory=list)
    first_unmatched: list[str] = field(default_factory=list)
    num_matched: int = 0
    num_shared: int = 0


def _groups(sizes: Sequence[int], most_samples: int) -> list[list[int]]:
    """Return runs of shards with at most ``most_samples`` samples; a single shard is always allowed."""
    groups: list[list[int]] = [[]]
    held = 0
    for shard, size in enumerate(sizes):
        if groups[-1] and held + size > most_samples:
            groups.append([])
            held = 0
        groups[-1].append(shard)
        held += size
    return groups


def _joined(target: ColumnTarget, group: Sequence[int], rows: TableRows, found: _Found, *, is_last: bool) -> pa.Array:
    """Return the concatenated values of the samples of some shards."""
    keys = _keys_of(target, group)
    hashes = stable_hash(keys).to_numpy(zero_copy_only=False)
    order = np.argsort(hashes, kind="stable")
    hashes = hashes[order]
    same = np.flatnonzero(hashes[1:] == hashes[:-1])
    if same.size:
        alike = pc.equal(keys.take(pa.array(order[same])), keys.take(pa.array(order[same + 1])))
        found.num_shared += int(pc.sum(alike).as_py() or 0)
    row_of = np.full(len(keys), -1, np.int64)
    chunks: list[pa.Array] = []
    num_values = 0
    for number, (row_keys, values) in enumerate(rows.batches()):
        samples, matches = _matches(keys, hashes, order, row_keys)
        _refuse_twice(row_of, samples, matches, row_keys)
        wanted = np.zeros(len(row_keys), np.bool_)
        wanted[matches] = True
        # Only matching rows are kept, so `row_of` counts positions among the kept values of all batches.
        row_of[samples] = num_values + (np.cumsum(wanted) - 1)[matches]
        chunks.append(values.filter(pa.array(wanted)))
        num_values += len(chunks[-1])
        _note_matched(found, number, wanted, row_keys, is_last=is_last)
    there = pa.chunked_array(chunks, rows.kind).combine_chunks() if chunks else pa.array([], rows.kind)
    taken = there.take(pa.array(row_of, mask=row_of < 0))
    _note_missing(target, group, taken.is_null().to_numpy(zero_copy_only=False), keys, found)
    return taken


def _keys_of(target: ColumnTarget, group: Sequence[int]) -> pa.Array:
    """Return the keys of some shards, as bytes."""

    def read(shard: int) -> pa.Array:
        return target.columns_of(shard, [KEY])[KEY].cast(pa.large_binary())

    return pa.concat_arrays([*map_threads(read, group, THREADS)] or [pa.array([], pa.large_binary())])


def _matches(
    keys: pa.Array, hashes: Int64Array, order: Int64Array, row_keys: pa.Array
) -> tuple[Int64Array, Int64Array]:
    """Match the rows of a batch to samples by key: return samples and rows, int64 ``[M]`` each, one pair per match.

    Args:
        keys: Keys of ``N`` samples.
        hashes: Their hashes, ascending, ``[N]``.
        order: Number of the sample with each of these hashes, int64 ``[N]``.
        row_keys: Keys of ``R`` rows; NULL matches no sample.
    """
    # Search for the hashes of all rows in ascending order, without rows that have no key.
    hashed = stable_hash(row_keys)
    valid = np.flatnonzero(hashed.is_valid().to_numpy(zero_copy_only=False))
    wanted = hashed.fill_null(0).to_numpy(zero_copy_only=False)[valid]
    by_hash = np.argsort(wanted)  # searching in ascending order is several times faster
    wanted, valid = wanted[by_hash], valid[by_hash]
    low, high = (np.searchsorted(hashes, wanted, side=side) for side in ("left", "right"))
    # Expand each range [low, high) of equal hashes to one (sample, row) pair per element.
    counts = high - low
    matches = np.repeat(valid, counts)
    places = np.repeat(low - np.cumsum(counts) + counts, counts) + np.arange(int(counts.sum()))
    samples = order[places]
    # Equal hashes are candidates only: keep the pairs whose keys are equal.
    there = keys.take(pa.array(samples))
    equal = pc.equal(there, row_keys.take(pa.array(matches)).cast(there.type)).to_numpy(zero_copy_only=False)
    return samples[equal], matches[equal]


def _refuse_twice(row_of: Int64Array, samples: Int64Array, matches: Int64Array, row_keys: pa.Array) -> None:
    """Refuse a second row for a sample, from an earlier batch or this one.

    Raises:
        DataError: There is one; the message lists the first few keys.
    """
    _, first = np.unique(samples, return_index=True)
    again = np.ones(samples.size, np.bool_)
    again[first] = False
    again |= row_of[samples] >= 0
    if again.any():
        names = row_keys.take(pa.array(np.sort(np.unique(matches[again]))[:_SHOWN])).to_pylist()
        raise DataError(
            f"keys appear twice in the file, first {', '.join(repr(_text(name)) for name in dict.fromkeys(names))}: "
            f"it is not known which value counts. Keep one row per key"
        )


def _no_match(source: str, rows: TableRows, on: str, num_samples: int, found: _Found) -> str:
    here, there = (f", such as {some[0]!r}" if some else "" for some in (found.first_unmatched, found.first_missing))
    return (
        f"{redact(source)}: no row matches a sample: {counted(rows.num_rows, 'row')}, column {on!r}{here}; "
        f"{counted(num_samples, 'sample')}{there}. Keys are compared letter by letter, with their folders and without "
        "an extension: write them so (`shard_tools ls` lists those of the samples), or name another column with --on"
    )


def _note_matched(found: _Found, number: int, wanted: Any, row_keys: pa.Array, *, is_last: bool) -> None:
    packed = np.packbits(wanted)
    if number == len(found.matched):
        found.matched.append(packed)
    else:
        found.matched[number] |= packed
    if is_last:
        matched = np.unpackbits(found.matched[number], count=len(row_keys)).view(np.bool_)
        found.num_matched += int(matched.sum())
        left = np.flatnonzero(~matched)[: _SHOWN - len(found.first_unmatched)]
        found.first_unmatched += [_text(key) for key in row_keys.take(pa.array(left)).to_pylist()]


def _note_missing(target: ColumnTarget, group: Sequence[int], missing: Any, keys: pa.Array, found: _Found) -> None:
    start = 0
    for shard in group:
        count = int(missing[start : start + target.sizes[shard]].sum())
        if count:
            found.missing[shard] = count
        start += target.sizes[shard]
    left = np.flatnonzero(missing)[: _SHOWN - len(found.first_missing)]
    found.first_missing += [_text(key) for key in keys.take(pa.array(left)).to_pylist()]


def _text(key: bytes | None) -> str:
    return "NULL" if key is None else key.decode("utf-8", "surrogateescape")
