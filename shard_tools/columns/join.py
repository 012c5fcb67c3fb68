"""Join a file of values to the samples of a dataset by their keys, once; no shard is read.

The file is read once for each group of shards whose keys fit into memory, batch by batch::

    keys of a group of shards  -> hashes, sorted           (about 60 bytes per sample)
    a batch of rows of the file -> hashes -> places among them -> keys compared -> values stored

So memory is bounded by ``memory_bytes``, whatever the size of the file. Hashes only narrow the search; keys decide.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shard_tools.columns.target import THREADS, AddReport, ColumnTarget, Filled
from shard_tools.convert.files import SourceFile
from shard_tools.convert.parquet import open_parquet
from shard_tools.running.engine import map_ordered
from shard_tools.running.progress import NoProgress, Progress
from streaming.arguments import counted
from streaming.arrays import sums
from streaming.errors import ConfigError, DataError
from streaming.index.columns import KEY, stable_hash
from streaming.index.where import is_comparable
from streaming.storage import Storage, redact
from streaming.types import Int64Array

Missing = Literal["null", "error"]
_BYTES_A_SAMPLE = 96  # a key of 20 bytes, its hash, its place in the order, and a value, with what sorting takes
_BATCH_ROWS = 1 << 18
_SHOWN = 5
_HASH_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOptions:
    """How to join values.

    Attributes:
        on: Column of the file that holds the samples' keys.
        value: Column that holds the values; None: the one named like the late column, or the only other one.
        missing: Samples without a row get no value (``"null"``), or are an error.
        memory_bytes: Memory for keys and values.
    """

    on: str
    value: str | None = None
    missing: Missing = "null"
    memory_bytes: int = 1 << 30


def join_column(
    target: ColumnTarget, source: str, *, storage: Storage, options: JoinOptions, progress: Progress | None = None
) -> AddReport:
    """Add the late column ``target`` from the Parquet file at ``source``.

    Raises:
        ConfigError: The file lacks a column, or it has no values that conditions support.
        DataError: A key occurs twice in the file, or a sample has no row and that is an error; then nothing is written
            if all keys fit into ``memory_bytes``.
    """
    begun, progress = time.monotonic(), progress or NoProgress()
    file = SourceFile(url=source, name=source, size_bytes=storage.info(source).size_bytes)
    with closing(_Rows(file, storage, target.name, options)) as rows:
        version = target.version_of(
            file=_digest(file, storage), on=options.on, value=rows.value, missing=options.missing
        )
        groups = _groups(target.sizes, max(1, options.memory_bytes // _BYTES_A_SAMPLE))
        progress.start(total_bytes=None, total=len(target.urls))
        found = _Found()
        for number, group in enumerate(groups):
            values = _joined(target, group, rows, found, is_last=number == len(groups) - 1)
            if options.missing == "error" and found.missing:
                raise DataError(
                    f"without a row in {redact(source)}: {counted(sum(found.missing.values()), 'sample')}, first "
                    f"{', '.join(map(repr, found.first_missing))}. Add them, or give --missing null"
                )
            if number == 0:
                target.begin()
            starts = sums([target.sizes[shard] for shard in group])
            parts = [(shard, values.slice(starts[at], target.sizes[shard])) for at, shard in enumerate(group)]
            for _ in map_ordered(lambda part: target.write(*part, version), parts, THREADS):
                progress.advance(num=1)
        filled = [Filled(str(rows.kind), found.missing.get(shard, 0)) for shard in range(len(target.sizes))]
        return target.finish(
            filled, version=version, made_from=source, begun_s=begun, first_missing=tuple(found.first_missing),
            num_rows=rows.num_rows, num_unmatched=rows.num_rows - found.num_matched,
            first_unmatched=tuple(found.first_unmatched), num_shared=found.num_shared,
        )  # fmt: skip


@dataclass(slots=True, kw_only=True)
class _Found:
    """The state after some groups.

    Attributes:
        matched: For each batch, packed bits: rows that matched a sample of any group so far.
        missing: Samples without a row, by shard.
    """

    matched: list[Any] = field(default_factory=list)
    missing: dict[int, int] = field(default_factory=dict)
    first_missing: list[str] = field(default_factory=list)
    first_unmatched: list[str] = field(default_factory=list)
    num_matched: int = 0
    num_shared: int = 0


class _Rows:
    """Keys and values of a Parquet file, batch by batch, as often as needed.

    Raises:
        DataError: It is not a Parquet file.
        ConfigError: A column does not exist, or has an unsupported type.
    """

    def __init__(self, file: SourceFile, storage: Storage, name: str, options: JoinOptions) -> None:
        self._file, self._on = file, options.on
        self._parquet = open_parquet(file, storage)
        schema = self._parquet.schema_arrow
        self.value = options.value or _value_column(schema.names, name, options.on)
        for column in (self._on, self.value):
            if column not in schema.names:
                raise ConfigError(
                    f"{redact(file.url)}: no column {column!r}; there are: {', '.join(schema.names)}. The samples' "
                    f"keys are in --on, the values in --value"
                )
        self.num_rows = self._parquet.metadata.num_rows
        self.kind = _plain_type(schema.field(self.value).type)
        if not is_comparable(self.kind) or pa.types.is_binary(self.kind):
            raise ConfigError(
                f"{redact(file.url)}: column {self.value!r} holds {self.kind}; late columns hold numbers, text or "
                f"booleans"
            )
        key = _plain_type(schema.field(self._on).type)
        if not _is_text(key):
            raise ConfigError(
                f"{redact(file.url)}: column {self._on!r} holds {key}; keys of samples are text, such as '000017'. "
                f"Write them as text"
            )

    def batches(self) -> Iterator[tuple[pa.Array, pa.Array]]:
        """Yield the keys and values."""
        columns = list(dict.fromkeys([self._on, self.value]))
        for batch in self._parquet.iter_batches(batch_size=_BATCH_ROWS, columns=columns, use_threads=False):
            keys, values = (batch.column(batch.schema.get_field_index(name)) for name in (self._on, self.value))
            yield keys.cast(pa.binary()), values.cast(self.kind)

    def close(self) -> None:
        self._parquet.close(force=True)


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """Remove dictionary encoding; give text 32-bit offsets."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.string() if pa.types.is_large_string(kind) else kind


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _value_column(names: Sequence[str], name: str, on: str) -> str:
    others = [one for one in names if one != on]
    if name in others or len(others) != 1:
        return name
    return others[0]


def _digest(file: SourceFile, storage: Storage) -> str:
    """Return a digest of the file's bytes, so that the same file gives the same column version."""
    digest = hashlib.sha256()
    for start in range(0, file.size_bytes, _HASH_BYTES):
        digest.update(storage.read(file.url, start, min(start + _HASH_BYTES, file.size_bytes)))
    return digest.hexdigest()


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


def _joined(target: ColumnTarget, group: Sequence[int], rows: _Rows, found: _Found, *, is_last: bool) -> pa.Array:
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
        # Only values that match a sample are held: rows of a batch are numbered among these.
        row_of[samples] = num_values + (np.cumsum(wanted) - 1)[matches]
        chunks.append(values.filter(pa.array(wanted)))
        num_values += len(chunks[-1])
        _note_matched(found, number, wanted, row_keys, is_last=is_last)
    _note_missing(target, group, row_of < 0, keys, found)
    taken = pa.chunked_array(chunks, rows.kind).combine_chunks() if chunks else pa.array([], rows.kind)
    return taken.take(pa.array(row_of, mask=row_of < 0))


def _keys_of(target: ColumnTarget, group: Sequence[int]) -> pa.Array:
    """Return the keys of some shards, as bytes."""

    def read(shard: int) -> pa.Array:
        return target.columns_of(shard, [KEY])[KEY].cast(pa.large_binary())

    return pa.concat_arrays([*map_ordered(read, group, THREADS)] or [pa.array([], pa.large_binary())])


def _matches(
    keys: pa.Array, hashes: Int64Array, order: Int64Array, row_keys: pa.Array
) -> tuple[Int64Array, Int64Array]:
    """Return the matched samples, and the row of the batch for each, int64 [n] each."""
    hashed = stable_hash(row_keys)
    valid = np.flatnonzero(hashed.is_valid().to_numpy(zero_copy_only=False))
    wanted = hashed.fill_null(0).to_numpy(zero_copy_only=False)[valid]
    by_hash = np.argsort(wanted)  # searching in order is several times faster
    wanted, valid = wanted[by_hash], valid[by_hash]
    low, high = (np.searchsorted(hashes, wanted, side=side) for side in ("left", "right"))
    counts = high - low
    matches = np.repeat(valid, counts)
    places = np.repeat(low - np.cumsum(counts) + counts, counts) + np.arange(int(counts.sum()))
    samples = order[places]
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
