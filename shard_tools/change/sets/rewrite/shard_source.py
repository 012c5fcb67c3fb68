"""Read indexed shards as a source of records, in any order, for ``reshard`` to pack."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shard_tools.change.sets.open_set import READ_THREADS
from shard_tools.change.sets.pieces import read_pieces
from shard_tools.change.sets.rewrite.selection import ShardPart, Taken, keys_of
from shard_tools.make.convert.base.identity import Origins
from shard_tools.make.convert.base.records import Record, Skipped, number_key
from streaming.common.threads import map_threads
from streaming.errors import DataError
from streaming.storage import Storage, split_url
from streaming.types import Int64Array

_WINDOW_SAMPLES = 10_000  # samples per window of outlines
_RUN_BYTES = 8 << 20  # largest request; larger ones reduce parallelism, smaller ones cost requests
_CURE = (
    "To leave out what is damaged: `shard_tools verify SOURCE --write-bad bad.jsonl`, then the same command with "
    "--drop bad.jsonl"
)
_Found: TypeAlias = "list[tuple[int, Record]]"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Run:
    """Adjacent pieces of one shard that are read in one request.

    ``positions`` are the positions of the wanted samples in their window, and ``kept`` their numbers in the part: int64
    ``[k]`` each, ``kept`` ascending.
    """

    part: ShardPart
    first_piece: int
    stop_piece: int
    positions: Int64Array
    kept: Int64Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Outline:
    """Keys of the selected samples of a shard, and sizes of their fields: int64 [m], -1 where one is missing."""

    keys: pa.Array
    sizes: Mapping[str, Int64Array]

    @classmethod
    def of(cls, part: ShardPart, fields: Collection[str] | None) -> _Outline:
        table = part.samples()
        sizes = {
            name: np.where(starts[part.rows] >= 0, lengths[part.rows], -1)
            for name, (starts, lengths) in table.fields.items()
            if fields is None or name in fields
        }
        return cls(keys=keys_of(table).take(pa.array(part.rows)) if part.keys is None else part.keys, sizes=sizes)


class SampleChanges(Protocol):
    """Changes to the samples of a set."""

    def of_fields(self, fields: dict[str, bytes], key: str) -> dict[str, bytes]:
        """Return the fields of a sample, changed."""

    def of_columns(self, values: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        """Return the values of columns, changed."""

    def of_sizes(self, sizes: Mapping[str, Int64Array]) -> dict[str, Int64Array]:
        """Return the sizes of fields after the change."""


class ShardSource:
    """Samples of indexed shards, in a given order, every byte checked against the index. Used by one thread.

    The order is cut into windows of ``window_bytes``. The pieces that hold a window's samples are read by several
    threads, each once per window, adjacent ones together, while the previous window is yielded.

    Memory: two windows, two requests of 8 MiB per thread, and 16 bytes per sample in addition to the selection's.

    Args:
        selection: The samples.
        order: int64, their numbers in the selection, each once, in the wanted order; None: the selection's order.
        storage: Store of the shards.
        fingerprint: Fingerprint of the source's chunk table.
        fields: Fields to keep; None: all.
        window_bytes: Size of a window.
        num_threads: Number of parallel requests.
        firsts: bool, True at positions of ``order`` that begin a record; the samples after one are joined to it. None:
        all.
        key_prefix: As in :class:`~shard_tools.change.sets.rewrite.reshard.ReshardOptions`.
        known_fields: The fields of the records, True for those that every record has, as recorded by a conversion.
        changes: Returns the changes to a shard's samples that bring several sets to one schema.
    """

    kind = "shards"

    def __init__(
        self,
        selection: Taken,
        order: Int64Array | None,
        storage: Storage,
        *,
        fingerprint: str,
        fields: Sequence[str] | None,
        window_bytes: int,
        num_threads: int,
        firsts: npt.NDArray[np.bool_] | None = None,
        key_prefix: str = "",
        known_fields: Mapping[str, bool] | None = None,
        changes: Callable[[str], SampleChanges] | None = None,
    ) -> None:
        self.skipped: tuple[Skipped, ...] = ()
        self.fields = known_fields
        self._selection, self._parts = selection, selection.parts
        self._storage, self._fingerprint = storage, fingerprint
        self._facts = {"kind": self.kind, "fingerprint": fingerprint, "samples": selection.digest()}
        self._fields = None if fields is None else frozenset(fields)
        self._window_bytes, self._num_threads = window_bytes, num_threads
        self._offsets = np.cumsum([0] + [part.rows.size for part in self._parts])
        self._order = np.arange(self._offsets[-1]) if order is None else order
        self._firsts = np.ones(self._order.size, np.bool_) if firsts is None else firsts
        self._key_prefix, self._changes = key_prefix, changes
        self._begins = None if firsts is None else np.append(np.flatnonzero(firsts), self._order.size)
        sizes = [part.sizes for part in self._parts]
        self._ends: Int64Array = np.cumsum(np.concatenate([np.empty(0, np.int64), *sizes])[self._order])

    @property
    def num_records(self) -> int:
        """Number of samples to be written."""
        return int(self._firsts.sum())

    @property
    def num_bytes(self) -> int:
        """Total size of their records."""
        return int(self._ends[-1]) if self._ends.size else 0

    def identity(self) -> dict[str, object]:
        """Return the identity of the shards' content and of the selection."""
        return dict(self._facts)

    def origins(self) -> Origins:
        """Return no files: the fingerprint covers the content of all shards, and every byte read is checked."""
        return Origins()

    def records(self, start: int) -> Generator[Record, None, None]:
        """Yield the records from number ``start`` on; earlier ones are not read.

        Raises:
            ChecksumError, TarError, IndexMismatchError: A sample is damaged; notes name it.
            StorageError: The store failed.
        """
        place = self._place(start)
        with closing(self._samples(place)) as samples:
            yield from self._joined(samples, place)

    def outlines(self, start: int) -> Generator[Record, None, None]:
        """Yield the records from number ``start`` on, with blank fields of the right size: only the index is read.

        Memory: per sample of each shard that is still needed, its key, and 8 bytes per field.
        """
        place = self._place(start)
        with closing(self._outlined(place)) as samples:
            yield from self._joined(samples, place)

    def part(self, start: int, stop: int) -> ShardSource:
        """Return a source of records ``[start, stop)`` alone, without the parts that only other records need."""
        low, high = self._place(start), self._place(stop)
        order = self._order[low:high]
        numbers = np.sort(order)
        bounds = np.searchsorted(numbers, self._offsets)
        parts = [
            self._parts[which].taken(numbers[bounds[which] : bounds[which + 1]] - self._offsets[which])
            for which in np.flatnonzero(np.diff(bounds)).tolist()
        ]
        return ShardSource(
            replace(self._selection, parts=tuple(parts)),
            np.searchsorted(numbers, order).astype(np.int64),
            self._storage,
            fingerprint=self._fingerprint,
            fields=None if self._fields is None else sorted(self._fields),
            window_bytes=self._window_bytes,
            num_threads=self._num_threads,
            firsts=None if self._begins is None else self._firsts[low:high],
            key_prefix=self._key_prefix,
            known_fields=self.fields,
            changes=self._changes,
        )

    def _place(self, record: int) -> int:
        """Return the position in the order at which a record begins."""
        return record if self._begins is None else int(self._begins[min(record, self._begins.size - 1)])

    def _joined(self, samples: Iterator[Record], place: int) -> Iterator[Record]:
        """Yield the records from position ``place`` on, joined from their samples."""
        current: Record | None = None
        for is_first, sample in zip(self._firsts[place:].tolist(), samples, strict=True):
            if current is None or is_first:
                if current is not None:
                    yield current
                current = sample
            else:
                current = replace(current, fields={**sample.fields, **current.fields})
        if current is not None:
            yield current

    def _samples(self, start: int) -> Generator[Record, None, None]:
        """Yield the samples from position ``start`` of the order on, each as a record."""
        pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="shard_tools-read")
        try:
            before: tuple[int, list[Future[_Found]]] | None = None
            for first, stop in self._windows(start):
                reads = [pool.submit(self._read, run) for run in self._runs(self._order[first:stop])]
                if before is not None:
                    yield from _in_order(*before)
                before = stop - first, reads
            if before is not None:
                yield from _in_order(*before)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _windows(self, start: int) -> Iterator[tuple[int, int]]:
        while start < self._order.size:
            before = int(self._ends[start - 1]) if start else 0
            stop = int(np.searchsorted(self._ends, before + self._window_bytes, side="right"))
            stop = max(stop, start + 1)
            yield start, stop
            start = stop

    def _runs(self, window: Int64Array) -> Iterator[_Run]:
        """Yield the runs that hold the samples of ``window``: int64 ``[w]``, numbers in the selection."""
        for which, positions, kept in self._by_part(window):
            yield from _part_runs(self._parts[which], positions, kept)

    def _by_part(self, window: Int64Array) -> Iterator[tuple[int, Int64Array, Int64Array]]:
        """Yield, for each part with samples in ``window``, its index, and their positions and numbers in the part."""
        by_place = np.argsort(window, kind="stable")  # int64 [w]: ascending numbers sort by part, then by row
        numbers = window[by_place]
        bounds = np.searchsorted(numbers, self._offsets)
        for which in np.flatnonzero(np.diff(bounds)).tolist():
            low, high = bounds[which], bounds[which + 1]
            yield which, by_place[low:high], numbers[low:high] - self._offsets[which]

    def _outlined(self, start: int) -> Generator[Record, None, None]:
        """Yield the samples from position ``start`` of the order on, with blank fields."""
        ahead = self._order[start:]
        left = np.bincount(np.searchsorted(self._offsets, ahead, side="right") - 1, minlength=len(self._parts))
        known: dict[int, _Outline] = {}
        for first in range(0, ahead.size, _WINDOW_SAMPLES):
            window = ahead[first : first + _WINDOW_SAMPLES]
            groups = [*self._by_part(window)]
            new = [which for which, _, _ in groups if which not in known]
            loaded = map_threads(lambda which: _Outline.of(self._parts[which], self._fields), new, READ_THREADS)
            known |= dict(zip(new, loaded, strict=True))
            found = (self._blank(self._parts[which], known[which], *numbers) for which, *numbers in groups)
            yield from _placed(window.size, found)
            for which, _, kept in groups:
                left[which] -= kept.size
                if not left[which]:
                    del known[which]

    def _blank(self, part: ShardPart, outline: _Outline, positions: Int64Array, kept: Int64Array) -> _Found:
        outlines = outline.sizes if self._changes is None else self._changes(part.pieces.url).of_sizes(outline.sizes)
        sizes = {name: column[kept].tolist() for name, column in outlines.items()}
        keys = [key.decode("utf-8", "surrogateescape") for key in outline.keys.take(pa.array(kept)).to_pylist()]
        fields = [
            {name: _blank_field(column[i]) for name, column in sizes.items() if column[i] >= 0}
            for i in range(kept.size)
        ]
        return self._records_of(part, kept, positions, keys, fields)

    def _read(self, run: _Run) -> _Found:
        part = run.part
        wanted = part.pieces.range(run.first_piece, run.stop_piece)
        rows = part.rows[run.kept].tolist()
        try:
            buffer, layout = read_pieces(self._storage, wanted, part.samples)
        except DataError as error:
            error.add_note(f"Samples {rows[0]} to {rows[-1]} of the shard were to be read. {_CURE}")
            raise
        first = int(part.pieces.bounds[run.first_piece])
        names = [
            (column, name) for column, name in enumerate(layout.fields) if self._fields is None or name in self._fields
        ]
        for row in rows if layout.damage else ():
            if row - first in layout.damage:
                damage = layout.damage[row - first]
                damage.add_note(f"Sample {layout.keys[row - first]!r} (number {row} of the shard) is damaged. {_CURE}")
                raise damage
        fields = []
        with memoryview(buffer) as view:
            for row in rows:
                starts, sizes = layout.starts[row - first].tolist(), layout.sizes[row - first].tolist()
                fields.append(
                    {
                        name: bytes(view[starts[column] : starts[column] + sizes[column]])
                        for column, name in names
                        if starts[column] >= 0
                    }
                )
        keys = [layout.keys[row - first] for row in rows]
        if self._changes is not None:
            change = self._changes(part.pieces.url)
            fields = [change.of_fields(one, key) for one, key in zip(fields, keys, strict=True)] if change else fields
        return self._records_of(part, run.kept, run.positions, keys, fields)

    def _records_of(
        self, part: ShardPart, kept: Int64Array, positions: Int64Array, keys: Sequence[str],
        fields: Sequence[Mapping[str, bytes]],
    ) -> _Found:  # fmt: skip
        """Return the records of samples of a part; ``kept`` are their numbers in it."""
        taken = pa.array(kept)
        values = {name: column.take(taken).to_pylist() for name, column in part.columns.items()}
        if self._changes is not None:
            values = self._changes(part.pieces.url).of_columns(values)
        found: _Found = []
        for i, (position, row) in enumerate(zip(positions.tolist(), part.rows[kept].tolist(), strict=True)):
            metadata: Mapping[str, object] = {name: column[i] for name, column in values.items()}
            found.append((position, Record(key=self._key(keys[i], part, row), fields=fields[i], metadata=metadata)))
        return found

    def _key(self, key: str, part: ShardPart, row: int) -> str:
        prefix = self._key_prefix
        if prefix:
            shard = split_url(part.pieces.url)[1].removesuffix(".tar").replace(".", "_")
            prefix = prefix.replace("{shard}", shard).replace("{number}", number_key(part.first + row))
        return prefix + key.removeprefix("./").lstrip("/")


def _part_runs(part: ShardPart, positions: Int64Array, kept: Int64Array) -> Iterator[_Run]:
    pieces = part.pieces.piece_of(part.rows[kept])
    ends = part.pieces.borders
    begin = 0
    for i in range(1, kept.size + 1):
        if i < kept.size:
            apart = pieces[i] > pieces[i - 1] + 1
            if not apart and (pieces[i] == pieces[i - 1] or ends[pieces[i] + 1] - ends[pieces[begin]] <= _RUN_BYTES):
                continue
        yield _Run(
            part=part,
            first_piece=int(pieces[begin]),
            stop_piece=int(pieces[i - 1]) + 1,
            positions=positions[begin:i],
            kept=kept[begin:i],
        )
        begin = i


def _blank_field(size: int) -> bytes:
    """Return a buffer of ``size`` zeros, which uses no memory until it is read."""
    return cast("bytes", np.zeros(size, np.uint8).data)


def _in_order(num_records: int, reads: Sequence[Future[_Found]]) -> Iterator[Record]:
    return _placed(num_records, (read.result() for read in reads))


def _placed(num_records: int, groups: Iterable[_Found]) -> Iterator[Record]:
    window: list[Record | None] = [None] * num_records
    for group in groups:
        for position, found in group:
            window[position] = found
    window.reverse()
    while window:
        record = window.pop()
        if record is not None:
            yield record
