"""Select samples for ``reshard``: those that match a condition and are not in a list."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from shard_tools.change.sets.bad_list import BadList, rows_of, shards_by_shown_url
from shard_tools.change.sets.open_set import READ_THREADS, OpenSet, table_of_shard, tables_of
from shard_tools.change.sets.pieces import ShardPieces
from shard_tools.running.progress import Progress
from streaming.build.batches.bad_file import BadRecord, shown_url
from streaming.common.threads import map_threads
from streaming.errors import ConfigError
from streaming.sets.filters.late_columns import LateColumn
from streaming.shards.index.columns import KEY
from streaming.shards.index.sample_table import SampleTable
from streaming.shards.index.selection import Selection
from streaming.storage import Storage
from streaming.types import Int64Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardPart:
    """The selected samples of one shard.

    Attributes:
        pieces: The verified pieces to read.
        rows: int64 ``[m]``, numbers of the selected samples in the shard, ascending.
        sizes: int64 ``[m]``, bytes of their records.
        columns: The columns of these samples, Arrow arrays of ``m``.
        keys: Their keys as UTF-8, an Arrow array of ``m``; None unless requested.
        present: For each field, bool ``[m]``: which of these samples have it; None unless keys are requested.
        first: Number of the shard's first sample in the source.
        samples: Loads the whole sample table.
    """

    pieces: ShardPieces
    rows: Int64Array
    sizes: Int64Array
    columns: Mapping[str, pa.Array]
    keys: pa.Array | None
    present: Mapping[str, npt.NDArray[np.bool_]] | None
    first: int
    samples: Callable[[], SampleTable]

    def taken(self, which: Int64Array) -> ShardPart:
        """Keep the samples at these positions in ``rows`` (ascending); drop the pieces of all others."""
        some, rows = pa.array(which), self.rows[which]
        return replace(
            self,
            pieces=self.pieces.around(rows),
            rows=rows,
            sizes=self.sizes[which],
            columns={name: column.take(some) for name, column in self.columns.items()},
            keys=None if self.keys is None else self.keys.take(some),
            present=None if self.present is None else {name: there[which] for name, there in self.present.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Samples:
    """Load the sample table of a shard, or keep a scanned one; in another process, scan the shard again."""

    storage: Storage
    url: str
    index_url: str | None
    scanned: SampleTable | None

    def __call__(self) -> SampleTable:
        return self.scanned or table_of_shard(self.storage, self.url, self.index_url, scanned=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return _samples_anew, (self.storage, self.url, self.index_url, self.scanned is not None)


def _samples_anew(storage: Storage, url: str, index_url: str | None, scanned: bool) -> Callable[[], SampleTable]:  # noqa: FBT001
    return partial(table_of_shard, storage, url, index_url, scanned=scanned)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Taken:
    """The selected samples of a dataset.

    Attributes:
        parts: Shard by shard.
        columns: Names of all columns of the sample tables, sorted.
        fields: Names of all fields, sorted.
        num_source: Number of samples of the source.
        num_dropped: Samples left out because they are on the list.
        num_filtered: Samples left out because they do not match the condition or the view.
        not_found: Records of the list that match no sample of the source.
        num_lacking: Samples left out because they lack a field.
        num_bare: Selected samples that have none of the fields to be kept.
        first_bare: Key of the first of them.
    """

    parts: tuple[ShardPart, ...]
    columns: tuple[str, ...]
    fields: tuple[str, ...]
    num_source: int
    num_dropped: int
    num_filtered: int
    not_found: tuple[BadRecord, ...]
    num_lacking: int = 0
    num_bare: int = 0
    first_bare: str = ""

    @property
    def num_samples(self) -> int:
        """Number of selected samples."""
        return sum(part.rows.size for part in self.parts)

    def digest(self) -> str:
        """Return a digest that identifies this selection among all of the same source."""
        sha = hashlib.sha256()
        for part in self.parts:
            sha.update(np.int64(part.rows.size).tobytes() + part.rows.astype("<i8").tobytes())
        return sha.hexdigest()


def select(
    shards: OpenSet,
    storage: Storage,
    *,
    kept: Selection | None,
    late: Sequence[LateColumn],
    drop: BadList,
    needed: Sequence[str],
    fields: Sequence[str] | None,
    with_keys: bool,
    progress: Progress,
) -> Taken:
    """Read all sample tables, shard by shard, and keep the values that are needed to read the samples.

    Memory: 16 bytes per selected sample, and its columns (and its key if ``with_keys``).

    Args:
        shards: The shards.
        storage: Their store.
        kept: The samples that a filter keeps; None: all.
        late: Late columns to read, too.
        drop: The list of samples to leave out.
        needed: Fields that a sample must have; others are left out.
        fields: Fields to keep; None: all.
        with_keys: Keep the keys, too.
        progress: Receives every shard.

    Raises:
        IndexMissingError: A shard has no sample table.
        IndexMismatchError: A late column does not belong to a shard.
    """
    shards_by_shown_url(shards.urls)  # refuse ambiguous names before samples are dropped by them
    progress.start(total_bytes=None, total=len(shards.urls))
    parts: list[ShardPart] = []
    columns: set[str] = set()
    there: set[str] = set()
    num_bare, first_bare = 0, ""
    not_found = [record for url, records in drop.by_shard.items() for record in records if url not in _shown(shards)]
    num_source = num_dropped = num_filtered = num_lacking = 0
    values_of = map_threads(partial(_late_values, shards, storage, late), range(len(shards.urls)), READ_THREADS)
    tables = zip(tables_of(shards, storage, READ_THREADS), values_of, strict=True)
    for position, ((first, url, table), values) in enumerate(tables):
        dropped, missing = _dropped(table, drop.by_shard.get(shown_url(url), ()))
        wanted = np.ones(table.num_samples, np.bool_) if kept is None else kept.mask(position)
        whole = _with_fields(table, needed)
        rows = np.flatnonzero(wanted & ~dropped & whole)
        not_found += missing
        num_source += table.num_samples
        num_dropped += int(dropped.sum())
        num_filtered += int((~wanted & ~dropped).sum())
        num_lacking += int((~whole & wanted & ~dropped).sum())
        columns.update(table.columns)
        there.update(table.fields)
        bare = rows[~_with_any(table, fields)[rows]] if fields is not None else rows[:0]
        first_bare = first_bare or (table.keys[int(bare[0])] if bare.size else "")
        num_bare += bare.size
        scanned = None if shards.scanned is None else shards.scanned[position]
        samples = _Samples(storage=storage, url=url, index_url=shards.index_url, scanned=scanned)
        parts.append(_part(url, table, values, rows, samples, first=first, with_keys=with_keys))
        progress.advance(num=1)
    return Taken(
        parts=tuple(parts),
        columns=tuple(sorted(columns)),
        fields=tuple(sorted(there)),
        num_source=num_source,
        num_dropped=num_dropped,
        num_filtered=num_filtered,
        num_lacking=num_lacking,
        num_bare=num_bare,
        first_bare=first_bare,
        not_found=tuple(not_found),
    )


def _shown(shards: OpenSet) -> set[str]:
    return {shown_url(url) for url in shards.urls}


def _dropped(table: SampleTable, records: Sequence[BadRecord]) -> tuple[npt.NDArray[np.bool_], list[BadRecord]]:
    """Return a mask of the samples on the list, and the records that match no sample."""
    dropped = np.zeros(table.num_samples, np.bool_)
    keys = {key: row for row, key in enumerate(table.keys)} if any(record.key for record in records) else {}
    missing = []
    for record in records:
        rows = rows_of(record, table, keys)
        dropped[rows] = True
        if not rows:
            missing.append(record)
    return dropped, missing


def _with_fields(table: SampleTable, needed: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Return a mask of the samples that have all of these fields."""
    there = np.ones(table.num_samples, np.bool_)
    for name in needed:
        there &= table.fields[name][0] >= 0 if name in table.fields else False
    return there


def _with_any(table: SampleTable, fields: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Return a mask of the samples that have at least one of these fields."""
    there = np.zeros(table.num_samples, np.bool_)
    for name in fields:
        there |= table.fields[name][0] >= 0 if name in table.fields else False
    return there


def _late_values(shards: OpenSet, storage: Storage, late: Sequence[LateColumn], position: int) -> dict[str, pa.Array]:
    return shards.late_values(storage, position, late)


def _part(
    url: str, table: SampleTable, late: Mapping[str, pa.Array], rows: Int64Array, samples: Callable[[], SampleTable], *,
    first: int, with_keys: bool,
) -> ShardPart:  # fmt: skip
    taken = pa.array(rows)
    return ShardPart(
        pieces=ShardPieces.of(url, table),
        rows=rows,
        sizes=np.diff(table.record_starts)[rows],
        columns={name: column.take(taken) for name, column in {**table.columns, **late}.items()},
        keys=keys_of(table).take(taken) if with_keys else None,
        present={name: starts[rows] >= 0 for name, (starts, _) in table.fields.items()} if with_keys else None,
        first=first,
        samples=samples,
    )


def keys_of(table: SampleTable) -> pa.Array:
    """Return the keys of a shard as an Arrow array of UTF-8."""
    return pa.array([key.encode("utf-8", "surrogateescape") for key in table.keys], pa.binary())


def sorted_order(selection: Taken, column: str, *, descending: bool) -> Int64Array:
    """Sort the selection by the values of a column or by ``__key__``; equal values keep their order.

    NaNs come after all numbers, and missing values last. Returns int64 ``[n]``, numbers in the selection.

    Raises:
        ConfigError: The column's values cannot be compared.
    """
    values = [
        part.keys if column == KEY else part.columns.get(column, pa.nulls(part.rows.size)) for part in selection.parts
    ]
    try:
        tables = [pa.table({"value": array}) for array in values]
        joined = pa.concat_tables(tables, promote_options="permissive")["value"].combine_chunks()
        if pa.types.is_boolean(joined.type):
            joined = joined.cast(pa.int8())
        order = "descending" if descending else "ascending"
        return pc.array_sort_indices(joined, order=order).to_numpy().astype(np.int64)  # type: ignore[no-any-return]
    except pa.ArrowException as error:
        raise ConfigError(f"--sort: the values of column {column!r} cannot be compared: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Deduplicated:
    """A selection whose samples of one key are merged.

    Attributes:
        order: int64 ``[k]``, numbers of the samples to read: those of one key are adjacent, in their original order.
        firsts: bool ``[k]``, True where a merged sample begins; the others are joined to the one before.
        num_joined: Number of samples that are joined to another one.
        num_duplicates: Number of samples left out, because earlier samples of their key have all their fields.
    """

    order: Int64Array
    firsts: npt.NDArray[np.bool_]
    num_joined: int
    num_duplicates: int


def deduplicated(selection: Taken, order: Int64Array | None) -> Deduplicated:
    """Merge samples of one key, in the ``order`` of their first ones; if a field occurs twice, the first one stays.

    Needs a selection with keys. Contents are not compared.
    """
    # int64 [n]: a code per sample, equal for equal keys
    codes = (
        pa.chunked_array([part.keys for part in selection.parts], pa.binary())
        .combine_chunks()
        .dictionary_encode()
        .indices.to_numpy()
    )
    _, first_of, code = np.unique(codes, return_index=True, return_inverse=True)
    first_of = first_of[code]  # int64 [n]: the first sample with each sample's key
    # bool [n]: the samples that have at least one field which no earlier sample of their key has
    useful = np.zeros(codes.size, np.bool_)
    for name in selection.fields:
        none = [np.zeros(part.rows.size, np.bool_) for part in selection.parts]
        there = [(part.present or {}).get(name, lacks) for part, lacks in zip(selection.parts, none, strict=True)]
        having = np.flatnonzero(np.concatenate(there))
        useful[having[np.unique(codes[having], return_index=True)[1]]] = True
    # Sort the useful samples by the position of their key's first sample, then by their own number.
    kept = np.flatnonzero(useful)
    rank = first_of[kept]
    if order is not None:
        place = np.empty(order.size, np.int64)
        place[order] = np.arange(order.size)
        rank = place[rank]
    kept = kept[np.lexsort((kept, rank))]
    firsts = first_of[kept] == kept
    return Deduplicated(
        order=kept,
        firsts=firsts,
        num_joined=int(kept.size - firsts.sum()),
        num_duplicates=int(codes.size - kept.size),
    )
