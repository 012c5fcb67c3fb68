"""Copy values out of the samples of existing shards, such as ``json.similarity``, into a late column."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pyarrow as pa

from shard_tools.change.columns.target import AddReport, ColumnShard, ColumnTarget, Filled
from shard_tools.change.sets.pieces import ShardPieces
from shard_tools.make.write.columns import ColumnValue, column_array, column_value
from shard_tools.running.engine import Calls
from shard_tools.running.progress import NoProgress, Progress
from streaming.build.decode import raw, resolve_decoders
from streaming.errors import ConfigError, DataError
from streaming.shards.fetch.read import ShardFacts, fetch_range
from streaming.shards.index.sample_table import SampleTable
from streaming.storage import Storage, redact

_DECODERS = resolve_decoders("auto")
_GAP_BYTES = 128 << 10  # the same as for filtered reads: many shards are read in parallel
_PIECE_BYTES = 8 << 20


def lift_column(
    target: ColumnTarget, path: str, *, workers: int = 8, executor: Executor | None = None,
    progress: Progress | None = None,
) -> AddReport:  # fmt: skip
    """Add the late column ``target`` with the value at ``path`` in each sample, such as ``json.similarity`` or ``cls``.

    A whole field has the type that its decoder gives: ``cls`` holds integers; a field without a decoder, text. Only the
    field is read (other large ones are skipped), and every byte read is checked. Samples without the field or the entry
    have no value.

    Args:
        target: The column.
        path: Path of the value in a sample.
        workers: Shards read in parallel.
        executor: Executor on which to read them, such as a cluster, instead of on threads.
        progress: Receives every shard.

    Raises:
        ConfigError: No sample has the field, or a value there; values have types that cannot be compared; or the
        executor is on a machine that cannot access these files.
        DataError: A field cannot be read.
    """
    begun = time.monotonic()
    version = target.version_of(lift=path)
    if (done := target.finished(version)) is not None:
        return done
    if not any(_field_of(target.shard(number).table(), path) for number in range(len(target.urls))):
        raise ConfigError(f"{path}: no sample has such a field; `shard_tools cat URL KEY` shows a sample")

    calls = Calls(workers=workers, executor=executor, progress=progress or NoProgress())

    def check(filled: Sequence[Filled]) -> None:
        if sum(one.num_missing for one in filled) == sum(target.sizes):
            raise ConfigError(f"{path}: no sample has a value there; `shard_tools cat URL KEY` shows a sample")

    filled = target.replace(version, partial(_lifted, path), check, calls=calls)
    return target.finish(filled, version=version, made_from=path, begun_s=begun)


def lift_all(
    urls: Sequence[str], paths: Sequence[str], *, storage: Storage, index_url: str | None, workers: int,
    allow_unfinished: bool = False, executor: Executor | None = None, progress: Progress | None = None,
) -> list[AddReport]:  # fmt: skip
    """Lift one late column per path, named after it; values that already exist for these shards are kept.

    Raises:
        ConfigError, DataError: As for :func:`lift_column`.
    """
    reports = []
    for path in paths:
        target = ColumnTarget(
            urls, path, storage=storage, index_url=index_url, overwrite=True, keeps=True,
            allow_unfinished=allow_unfinished,
        )  # fmt: skip
        report = lift_column(target, path, workers=workers, executor=executor, progress=progress)
        reports += [] if report.was_complete else [report]
    return reports


def as_array(values: Sequence[ColumnValue], shard: ColumnShard) -> pa.Array:
    """Return the values of a shard's samples as an array.

    Raises:
        ConfigError: A column cannot hold them.
    """
    return column_array(values, shard.column, redact(shard.url), lambda: shard.table().keys)


def _lifted(path: str, shard: ColumnShard) -> pa.Array:
    return as_array(_values(path, shard), shard)


def _values(path: str, shard: ColumnShard) -> list[ColumnValue]:
    """Return the value of each sample of a shard."""
    table = shard.table()
    field = _field_of(table, path)
    if field is None:
        return [None] * table.num_samples
    values = list[ColumnValue]()
    source = _Decoded(field) if field == path and _DECODERS.decoder_for(field) is not raw else path
    for key, fields in samples_of(shard, table, (field,)):
        try:
            values.append(column_value(fields, shard.column, source, key) if fields else None)
        except (ValueError, UnicodeDecodeError, RecursionError) as error:
            if isinstance(error, ConfigError):
                raise
            raise DataError(f"{redact(shard.url)}: sample {key!r}, field {field!r}: {error}") from error
    return values


@dataclass(frozen=True, slots=True)
class _Decoded:
    """Decode a field as ``decode="auto"`` does."""

    field: str

    def __call__(self, sample: Mapping[str, object]) -> object:
        value = _DECODERS.decoder_for(self.field)(sample[self.field])  # type: ignore[arg-type]  # bytes of a shard
        return value[()] if isinstance(value, np.ndarray) and not value.ndim else value


def samples_of(
    shard: ColumnShard, table: SampleTable, fields: tuple[str, ...] | None
) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield the key of each sample of a shard, in order, and the bytes of those ``fields`` (None: all) that it has.

    Raises:
        DataError: A sample cannot be read.
    """
    return samples_in(shard.storage, shard.url, table, fields)


def samples_in(
    storage: Storage, url: str, table: SampleTable, fields: tuple[str, ...] | None
) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield the key of each sample of a tar, in its order, and the bytes of those ``fields`` (None: all) that it has.

    Every byte read is checked; large fields that are not wanted are not read.

    Raises:
        DataError: A sample cannot be read.
    """
    for key, buffer, places in places_in(storage, url, table, fields):
        with memoryview(buffer) as view:
            found = {name: bytes(view[start:stop]) for name, (start, stop) in places.items()}
        yield key, found


def places_in(
    storage: Storage, url: str, table: SampleTable, fields: tuple[str, ...] | None
) -> Iterator[tuple[str, bytearray, dict[str, tuple[int, int]]]]:
    """Yield what :func:`samples_in` does without copies: key, buffer, and where in it the fields begin and end.

    The next sample may overwrite the buffer.
    """
    pieces = ShardPieces.of(url, table)
    known = ShardFacts(samples=lambda: table, gap_bytes=_GAP_BYTES)
    buffer = bytearray()
    for first, stop in _runs(pieces):
        wanted = replace(pieces.range(first, stop), fields=fields)
        if len(buffer) < wanted.num_bytes:  # new memory costs more than the copy into it
            buffer = bytearray(wanted.num_bytes)
        with memoryview(buffer)[: wanted.num_bytes] as out:
            layout = fetch_range(storage, wanted, out, known=known)
        for row, key in enumerate(layout.keys):
            if row in layout.damage:
                raise layout.damage[row]
            ranges = zip(layout.fields, layout.starts[row].tolist(), layout.sizes[row].tolist(), strict=True)
            wanted_here = [(name, start, size) for name, start, size in ranges if fields is None or name in fields]
            yield key, buffer, {name: (start, start + size) for name, start, size in wanted_here if start >= 0}


def _field_of(table: SampleTable, path: str) -> str | None:
    """Return the longest field name that begins the path."""
    parts = path.split(".")
    names = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next((name for name in names if name in table.fields), None)


def _runs(pieces: ShardPieces) -> list[tuple[int, int]]:
    """Return runs of pieces, of about 8 MiB each, as ranges ``[first, stop)``."""
    starts = pieces.borders
    runs, first = [], 0
    for piece in range(1, len(starts)):
        if piece == len(starts) - 1 or starts[piece + 1] - starts[first] > _PIECE_BYTES:
            runs.append((first, piece))
            first = piece
    return runs
