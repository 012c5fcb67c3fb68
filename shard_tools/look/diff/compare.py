"""Compare two sets: first shards, then samples by what the indexes know, then the bytes of the undecided samples."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from shard_tools.look.diff.match import Matched, match
from shard_tools.look.diff.read import exact_rows
from shard_tools.look.diff.rows import AT, KEY, SUM, Mask, is_exact, numbers_of, shown_key, without_columns
from shard_tools.look.diff.runs import Partners, equal_runs
from shard_tools.look.diff.shards import (
    ColumnChanges,
    ColumnTally,
    ShardChanges,
    equal_shards,
    late_to_read,
    shard_changes,
    tally_columns,
)
from shard_tools.look.diff.sides import IndexedSide, Side, open_side
from shard_tools.look.diff.spill import KeyedRows
from shard_tools.running.progress import NoProgress, Progress
from shard_tools.running.report import Report
from streaming.shards.schema.meeting import contradiction
from streaming.storage import Storage
from streaming.types import Int64Array

DEFAULT_MEMORY_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedSample(Report):
    """A sample that both sets have, and the fields that differ in content or exist in one set only."""

    key: str
    fields: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffReport(Report):
    """The differences of two sets. Lists hold the first ``limit`` entries; numbers count all.

    Attributes:
        equal: Whether samples and columns are the same, regardless of shards and order.
        only_a: Keys that only A has, in its order. A key is listed once per sample that A has more of than B.
        only_b: Keys that only B has.
        changed: Samples whose content differs.
        same: Number of samples with the same content.
        num_only_a: Number of samples that only A has.
        num_only_b: Number of samples that only B has.
        num_changed: Number of samples whose content differs.
        fields: Number of changed samples by field.
        schema: Differences in the meaning of the sets; their bytes may be the same.
        columns: Differences of columns; None: a set without an index has no columns to compare.
        shards: Differences of shards, which do not make the sets unequal.
        repeated: Number of samples of A and of B, among those compared, whose key occurs more than once in their set.
        unindexed: The sets, ``"A"`` or ``"B"``, that were read entirely because they have no index.
        num_read_bytes: Bytes read from shards.
        seconds: Duration of the comparison.
    """

    equal: bool
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    changed: tuple[ChangedSample, ...]
    same: int
    num_only_a: int
    num_only_b: int
    num_changed: int
    fields: Mapping[str, int]
    columns: ColumnChanges | None
    shards: ShardChanges
    repeated: tuple[int, int]
    unindexed: tuple[str, ...]
    num_read_bytes: int
    seconds: float
    schema: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffOptions:
    """Options of a comparison.

    Attributes:
        index_a: Location of A's index, if not beside its shards.
        index_b: Location of B's index.
        limit: Maximum number of entries in each list of keys.
        memory_bytes: Memory for keys and what is known about them; the rest goes to temporary files.
        allow_unfinished: Compare the finished part of unfinished sets.
    """

    index_a: str | None = None
    index_b: str | None = None
    limit: int = 100_000
    memory_bytes: int = DEFAULT_MEMORY_BYTES
    allow_unfinished: bool = False


def diff(
    a: str, b: str, *, storage: Storage, storage_b: Storage | None = None, options: DiffOptions | None = None,
    progress: Progress | None = None,
) -> DiffReport:  # fmt: skip
    """Compare the samples of two sets by key and content, and their columns.

    Shards with equal checksums are equal; so are samples covered by equal checksums. The bytes of the others are read,
    verified and compared by checksum, field by field.

    Memory: ``options.memory_bytes``, two bytes per sample, the sample tables of 32 shards, and one request of 8 MiB (or
    one sample, if that is larger) for each of eight threads.

    Args:
        a: Shards of the first set, as for ``StreamingDataset``.
        b: Shards of the second set.
        storage: Store of A.
        storage_b: Store of B; default: that of A.
        options: Options of the comparison.
        progress: Receives the shards of both sets, and the bytes read from them.

    Raises:
        NotFoundError: There is no such set.
        UnfinishedError: A set is unfinished.
        DataError: The index or the shards are damaged.
    """
    options = options or DiffOptions()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shardstream-diff-") as folder:
        sides = (
            open_side(a, storage, options.index_a, allow_unfinished=options.allow_unfinished),
            open_side(b, storage_b or storage, options.index_b, allow_unfinished=options.allow_unfinished),
        )
        work = _Comparison(sides, options, folder, progress or NoProgress())
        work.run()
    return work.report(time.monotonic() - began_s)


@dataclass(slots=True)
class _Listed:
    """The first entries of a list in the order of the set, and the number of all entries."""

    limit: int
    total: int = 0
    entries: list[tuple[int, Any]] = field(default_factory=list)

    def add(self, table: pa.Table, rows: Int64Array, more: Mapping[str, Mask] | None = None) -> None:
        """Add the keys of some rows of a table; with each key go the names of the masks that are True there."""
        self.total += rows.size
        ats = numbers_of(table, AT, rows)
        first = np.argsort(ats, kind="stable")[: self.limit]
        keys = table.column(KEY).take(pa.array(rows[first])).to_pylist()
        for place, at, key in zip(first.tolist(), ats[first].tolist(), keys, strict=True):
            names = tuple(name for name, mask in (more or {}).items() if mask[place])
            self.entries.append((at, (shown_key(key), names)))
        self.entries.sort(key=lambda entry: entry[0])
        del self.entries[self.limit :]


class _Comparison:
    """Run one comparison, step by step."""

    def __init__(self, sides: tuple[Side, Side], options: DiffOptions, folder: str, progress: Progress) -> None:
        self._sides, self._options, self._folder, self._progress = sides, options, folder, progress
        self._only = (_Listed(options.limit), _Listed(options.limit))
        self._changed = _Listed(options.limit)
        self._fields: Counter[str] = Counter()
        self._repeated = [0, 0]
        self._columns = ColumnTally()
        self._same = self._num_read_bytes = self._num_equal = 0
        self._wanted = tuple(np.zeros(side.num_samples, np.bool_) for side in sides)
        self._indexed: tuple[IndexedSide, IndexedSide] | None = None
        self._late: tuple[list[str], list[str]] = ([], [])
        if isinstance(sides[0], IndexedSide) and isinstance(sides[1], IndexedSide):
            self._indexed = sides[0], sides[1]
            self._late = late_to_read(*self._indexed)
        self._partners = Partners(sides[0].num_samples, memory_bytes=options.memory_bytes // 8, folder=folder)

    def run(self) -> None:
        """Compare the sets."""
        a, b = self._sides
        self._progress.start(total_bytes=None, total=len(a.urls) + len(b.urls))
        rows = self._all_rows(self._equal_shards())
        unsure = self._matched(rows, is_first=True)
        self._compare_runs()
        self._add_bytes(unsure)
        self._matched(unsure, is_first=False)

    def _equal_shards(self) -> list[tuple[int, int]]:
        """Compare the columns of shards with the same bytes, then return these pairs of shards."""
        if self._indexed is None:
            return []
        pairs = equal_shards(*self._indexed)
        self._num_equal = len(pairs)
        self._same += self._sides[0].num_samples_of([position for position, _ in pairs])
        for names, side, late in zip(self._columns.names, self._indexed, self._late, strict=True):
            names.update(side.late.keys() - set(late))
        tally_columns(self._indexed, pairs, self._late, self._columns, lambda: self._progress.advance(num=2))
        return pairs

    def _rows(self, num_rows: int, name: str) -> KeyedRows:
        return KeyedRows(num_rows, memory_bytes=self._options.memory_bytes, folder=self._folder, name=name)

    def _all_rows(self, pairs: Sequence[tuple[int, int]]) -> KeyedRows:
        """Return the rows of all samples outside equal shards."""
        done = [{pair[number] for pair in pairs} for number in (0, 1)]
        left = [
            [position for position in range(len(side.urls)) if position not in equal]
            for side, equal in zip(self._sides, done, strict=True)
        ]
        rows = self._rows(sum(side.num_samples_of(some) for side, some in zip(self._sides, left, strict=True)), "rows")
        for number, (side, positions) in enumerate(zip(self._sides, left, strict=True)):
            for shard in side.rows(positions, self._late[number]):
                rows.add(number, shard.rows)
                self._columns.names[number].update(shard.columns)
                self._read_bytes(shard.num_bytes)
                self._progress.advance(num=1)
        return rows

    def _read_bytes(self, num_bytes: int) -> None:
        self._num_read_bytes += num_bytes
        self._progress.advance(num_bytes=num_bytes)

    def _matched(self, rows: KeyedRows, *, is_first: bool) -> KeyedRows:
        """Compare rows, part by part; mark undecided samples for reading, and return their rows if already exact."""
        unsure = self._rows(0 if not is_first else rows.num_rows, "unsure")
        for number in range(rows.num_parts):
            a, b = rows.part(number)
            found = match(a, b)
            self._take(found, a, b, is_first=is_first)
            for side, (table, chosen) in enumerate(zip((a, b), found.unknown, strict=True)):
                known = self._known(table, chosen)
                unsure.add(side, without_columns(table).take(pa.array(chosen[known])))
                self._wanted[side][numbers_of(table, AT, chosen[~known])] = True
        return unsure

    def _compare_runs(self) -> None:
        """Count samples that joined checksums prove equal, so that they are not read."""
        if self._indexed is None:
            return
        for found in equal_runs(self._indexed, self._partners, self._options.memory_bytes):
            self._same += found[0].size
            for wanted, samples in zip(self._wanted, found, strict=True):
                wanted[samples] = False

    def _known(self, table: pa.Table, rows: Int64Array) -> Mask:
        """Return a mask of the rows that have checksums of all fields."""
        sums = [numbers_of(table, name, rows) for name in table.column_names if name.startswith(SUM)]
        return np.asarray(np.logical_and.reduce([*map(is_exact, sums), np.ones(rows.size, np.bool_)]), np.bool_)

    def _take(self, found: Matched, a: pa.Table, b: pa.Table, *, is_first: bool) -> None:
        self._same += found.num_same
        self._only[0].add(a, found.only[0])
        self._only[1].add(b, found.only[1])
        self._changed.add(a, found.changes.rows, found.changes.fields)
        self._fields.update({name: int(mask.sum()) for name, mask in found.changes.fields.items()})
        if is_first:
            if self._indexed is not None:
                samples = (numbers_of(table, AT, rows) for table, rows in zip((a, b), found.pairs, strict=True))
                self._partners.add(*samples)
            self._columns.differing.update(found.columns)
            self._repeated = [sum(pair) for pair in zip(self._repeated, found.num_repeated, strict=True)]

    def _add_bytes(self, rows: KeyedRows) -> None:
        """Add the rows of the samples that must be read."""
        for number, (side, wanted) in enumerate(zip(self._sides, self._wanted, strict=True)):
            if isinstance(side, IndexedSide):
                for table, num_bytes in exact_rows(side, wanted):
                    rows.add(number, table)
                    self._read_bytes(num_bytes)

    def report(self, seconds: float) -> DiffReport:
        """Return the report of the comparison."""
        a, b = self._sides
        columns = None if self._indexed is None else ColumnChanges.of(self._columns)
        only_a, only_b = self._only
        schema = _unlike(a, b)
        is_same = not (only_a.total or only_b.total or self._changed.total)
        return DiffReport(
            equal=is_same and (columns is None or columns.is_none) and not schema,
            schema=schema,
            only_a=tuple(_keys(only_a)),
            only_b=tuple(_keys(only_b)),
            changed=tuple(ChangedSample(key=key, fields=names) for _, (key, names) in self._changed.entries),
            same=self._same,
            num_only_a=only_a.total,
            num_only_b=only_b.total,
            num_changed=self._changed.total,
            fields={name: count for name, count in sorted(self._fields.items()) if count},
            columns=columns,
            shards=shard_changes(a, b, self._num_equal),
            repeated=(self._repeated[0], self._repeated[1]),
            unindexed=tuple(
                name for name, side in zip("AB", self._sides, strict=True) if not isinstance(side, IndexedSide)
            ),
            num_read_bytes=self._num_read_bytes,
            seconds=seconds,
        )


def _unlike(a: Side, b: Side) -> tuple[str, ...]:
    """Describe the differences in meaning of two sets."""
    sets = {f"{name} ({home})": schema for name, side in (("A", a), ("B", b)) for home, schema in side.schemas.items()}
    conflict = contradiction(sets)
    return () if conflict is None else tuple(map(str, conflict.differences))


def _keys(listed: _Listed) -> Iterator[str]:
    return (key for _, (key, _) in listed.entries)
