"""Collect the facts of one shard: from its sample table, and from the bytes of some samples."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from shard_tools.change.sets.open_set import needed_samples
from shard_tools.look.stats.field_stats import CutError, head_bytes, look
from shard_tools.look.stats.kinds import MASK, is_class, kind_of
from shard_tools.look.stats.sketches import WORD_CHARACTERS, Distribution
from shard_tools.look.stats.totals import EXAMPLES, ColumnTotals, ExampleSample, FieldTotals, Looked, Totals, places_of
from shard_tools.running.progress import Progress
from streaming.errors import AccessDeniedError, DataError, NotFoundError, StorageError
from streaming.sets.filters.late_columns import LateColumn, read_values
from streaming.shards.catalog.build import home_of
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.columns import Values
from streaming.shards.index.sample_table import SampleTable
from streaming.storage import Storage, redact
from streaming.types import Int64Array

_GAP_BYTES = 64 << 10  # a gap up to this size costs less to read than another request
_REQUEST_BYTES = 8 << 20
_MOST_BYTES = 16 << 20  # of one value, if its beginning does not suffice
_REASON = 300  # characters of an error
_NOT_COMPARED = ("class", "number", MASK)
_WITH_EXAMPLES = frozenset(
    {"mode", "format", "orientation", "too_large", "rate", "channels", "codec", "unsupervised", "value"}
)  # facts in words of which a sample is named


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StatsPart:
    """The samples of one shard that count, and those to read.

    Attributes:
        position: Number of the shard in its set.
        url: The shard.
        chunks: Its rows of the chunk table.
        scanned: Its sample table, if it was read because there is no index.
        rows: Ascending rows of the counted samples; None: all.
        numbers: Ascending numbers, among the counted samples, of those whose bytes are read; None: all.
    """

    position: int
    url: str
    chunks: ChunkTable
    scanned: SampleTable | None
    rows: Int64Array | None
    numbers: Int64Array | None

    @property
    def is_empty(self) -> bool:
        """Whether no sample of the shard counts."""
        return not (self.chunks.total_samples if self.rows is None else self.rows.size)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardReader:
    """Collect the facts of shards, on any thread or machine; equal arguments give equal facts.

    Attributes:
        storage: Store of the set.
        index_url: Location of its index, if not beside the shards.
        late: Late columns.
        token_bytes: Width of the tokens of a field, where the set states it, by directory of the index.
        masks: Fields that mark the tokens that count, where the set states them, by directory of the index.
        reads_all: Whether the bytes of all samples are read, so that small values are compared too.
        seed: Seed of everything random.
    """

    storage: Storage
    index_url: str | None
    late: Sequence[LateColumn]
    token_bytes: Mapping[str, Mapping[str, int]]
    masks: Mapping[str, frozenset[str]]
    reads_all: bool
    seed: int

    def read(self, part: StatsPart, progress: Progress) -> Totals:
        """Collect the facts of one shard.

        Raises:
            IndexMissingError, IndexFormatError: Its sample table is missing or damaged.
            AccessDeniedError, StorageError: The store refuses, or fails for a reason other than missing bytes.
        """
        totals = Totals()
        if not part.is_empty:
            table = part.scanned
            if table is None:
                table = needed_samples(self.storage, part.url, self.index_url)
            rows = np.arange(table.num_samples) if part.rows is None else part.rows
            draw = np.random.default_rng((self.seed, part.position))
            columns = self._add_table(totals, part, table, rows, draw)
            numbers = np.arange(len(rows)) if part.numbers is None else part.numbers
            if numbers.size:
                looked = Looked(part.position)
                self._look(_Values(self, totals, looked, part.position, part.url, table, progress), rows, numbers)
                looked.sum_up(totals, draw)
                totals.add_classes(_classes_of(columns, rows, numbers) | looked.class_of)
        progress.advance(num=1)
        return totals

    def _add_table(
        self, totals: Totals, part: StatsPart, table: SampleTable, rows: Int64Array, draw: np.random.Generator
    ) -> dict[str, Values]:
        """Add the facts that the sample table and late columns have for some rows, and return these columns."""
        sizes = np.diff(table.record_starts)[rows]
        totals.sizes.add(sizes, draw)
        largest = int(np.argmax(sizes))
        row = int(rows[largest])
        totals.largest_bytes = int(sizes[largest])
        totals.largest = ExampleSample(part.position, row, table.keys[row], redact(part.url))
        whole = len(rows) == table.num_samples
        keys = table.keys if whole else [table.keys[row] for row in rows.tolist()]
        totals.add_keys(keys, part.position, rows)
        late: dict[str, Values] = {}
        for late_column in self.late:
            try:
                late[late_column.name] = read_values(self.storage, part.url, self.index_url, part.chunks, late_column)
            except DataError as error:
                totals.late_errors = [*totals.late_errors, str(error)][:EXAMPLES]
        taken = pa.array(rows)
        columns = {**table.columns, **late}
        for name, values in columns.items():
            column = totals.columns[name] = ColumnTotals(is_late=name in late)
            column.add(name, values if whole else values.take(taken), draw)
        for name, (starts, all_sizes) in table.fields.items():
            there = rows[starts[rows] >= 0]
            if not there.size:
                continue
            one = totals.fields[name] = FieldTotals()
            of_field = all_sizes[there]
            one.sizes.add(of_field, draw)
            is_empty = of_field == 0
            one.num_empty = int(is_empty.sum())
            some = there[is_empty][:EXAMPLES].tolist()
            one.empty = [ExampleSample(part.position, row, table.keys[row]) for row in some]
            sums = table.large.fields.get(name)
            if sums is not None:
                known = there[sums[there] >= 0]
                one.add_checksums(all_sizes[known], sums[known], places_of(part.position, known))
            width = self._token_bytes(name, part.url, table, there)
            if width:
                one.numbers.setdefault("tokens", Distribution()).add(of_field // width, draw)
        return columns

    def _token_bytes(self, field: str, url: str, table: SampleTable, rows: Int64Array) -> int:
        """Return the width of the tokens of a field; 0: the field has no tokens, or their width is unknown."""
        said = self.token_bytes.get(home_of(url, self.index_url), {})
        if field in said or kind_of(field) != "tokens" or "tokens" not in table.columns:
            return said.get(field, 0)
        counts = table.columns["tokens"].take(pa.array(rows)).fill_null(0).to_numpy(zero_copy_only=False)
        some = int(np.argmax(counts))
        width = int(table.fields[field][1][rows[some]]) // int(counts[some]) if counts[some] > 0 else 0
        return width if width in {2, 4} else 0

    def _look(self, values: _Values, rows: Int64Array, numbers: Int64Array) -> None:
        """Read the values of rows ``rows[numbers]`` as far as needed, and add their facts."""
        values.totals.num_read = len(numbers)
        for first, stop, wanted in _requests(list(self._wanted(values, rows, numbers))):
            data = values.bytes_of(first, stop, len({one.row for one in wanted}))
            if data is None:
                if values.is_gone:
                    break
                continue
            for one in wanted:
                values.take(one, bytes(data[one.start - first : one.stop - first]))

    def _wanted(self, values: _Values, rows: Int64Array, numbers: Int64Array) -> Iterator[_Wanted]:
        """Yield the bytes to read of each value."""
        table, masks = values.table, self.masks.get(home_of(values.url, self.index_url), frozenset())
        columns = {*table.columns, *(column.name for column in self.late)}
        for name, (all_starts, all_sizes) in table.fields.items():
            kind = MASK if name in masks else kind_of(name)
            if kind == "class" and name in columns:
                continue
            starts, sizes = all_starts[rows[numbers]], all_sizes[rows[numbers]]
            sums = table.large.fields.get(name)
            known = np.zeros(len(numbers), np.bool_) if sums is None else sums[rows[numbers]] >= 0
            compared = self.reads_all and kind not in _NOT_COMPARED
            read = np.minimum(sizes, head_bytes(kind))
            whole = ~known & (sizes <= _REQUEST_BYTES) if compared else np.zeros(len(numbers), np.bool_)
            read[whole] = sizes[whole]
            for i in np.flatnonzero((starts >= 0) & (read > 0)).tolist():
                start = int(starts[i])
                stop = start + int(read[i])
                row = int(rows[numbers[i]])
                yield _Wanted(start, stop, name, kind, row, int(numbers[i]), int(sizes[i]), bool(whole[i]))


def _classes_of(columns: Mapping[str, Values], rows: Int64Array, numbers: Int64Array) -> dict[str, dict[int, str]]:
    """Return the classes of samples ``rows[numbers]``, by column."""
    taken, found = pa.array(rows[numbers]), dict[str, dict[int, str]]()
    for name, values in columns.items():
        if is_class(name):
            known = zip(numbers.tolist(), values.take(taken).to_pylist(), strict=True)
            found[name] = {number: str(word)[:WORD_CHARACTERS] for number, word in known if word is not None}
    return found


class _Wanted(NamedTuple):
    """The beginning of one value: its bytes in the shard, its row there and its number among the counted samples."""

    start: int
    stop: int
    field: str
    kind: str
    row: int
    number: int
    size: int
    is_compared: bool


def _requests(wanted: list[_Wanted]) -> Iterator[tuple[int, int, list[_Wanted]]]:
    """Yield runs of bytes to read with one request, and the wanted bytes in each."""
    wanted.sort()
    first = stop = 0
    some: list[_Wanted] = []
    for one in wanted:
        if some and (one.start > stop + _GAP_BYTES or max(one.stop, stop) - first > _REQUEST_BYTES):
            yield first, stop, some
            some = []
        if not some:
            first = stop = one.start
        some.append(one)
        stop = max(stop, one.stop)
    if some:
        yield first, stop, some


@dataclass(slots=True)
class _Values:
    """Inspect values of one shard, one by one."""

    reader: ShardReader
    totals: Totals
    looked: Looked
    position: int
    url: str
    table: SampleTable
    progress: Progress
    is_gone: bool = False

    def bytes_of(self, first: int, stop: int, num_samples: int) -> memoryview | None:
        """Return bytes of the shard; None if it lacks them, which is counted."""
        try:
            data = self.reader.storage.read(self.url, first, stop)
        except AccessDeniedError:
            raise
        except (StorageError, DataError) as error:
            if isinstance(error, NotFoundError):
                self.is_gone = True
                num_samples = self.totals.num_read
            elif self.table.shard.size_bytes == _size_of(self.reader.storage, self.url):
                raise
            self.totals.num_unread += num_samples
            self.totals.unread = [*self.totals.unread, str(error)][:1]
            return None
        self.totals.num_bytes_read += stop - first
        self.progress.advance(num_bytes=stop - first)
        return data

    def take(self, one: _Wanted, data: bytes) -> None:
        """Inspect a value, completely if its beginning does not suffice."""
        field = self.totals.fields[one.field]
        field.num_read += 1
        if one.is_compared:
            digest = hashlib.blake2b(data, digest_size=8).digest()
            self.looked.hashes[one.field].append((int.from_bytes(digest, "little") >> 1, one.row))
        try:
            try:
                seen = look(one.kind, one.field, data, one.size, partial(self._more, one))
            except CutError:
                more = self.bytes_of(one.start, one.start + min(one.size, _MOST_BYTES), 1)
                seen = look(one.kind, one.field, b"" if more is None else bytes(more), one.size)
        except (StorageError, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001  any library may fail on untrusted bytes: counted
            field.add_broken(self._example(one, f"{type(error).__name__}: {error}"[:_REASON]))
            return
        for name, number in seen.numbers.items():
            self.looked.numbers[one.field, name].append(number)
        for name, word in seen.words.items():
            self.looked.words[one.field, name].append(word)
            if name in _WITH_EXAMPLES and (name != "value" or isinstance(word, str)):
                field.show(name, str(word), self._example(one))
        for name, words in seen.many.items():
            self.looked.words[one.field, name] += words
        if one.kind == "class":
            self.looked.classes[one.field].append((one.number, str(seen.words["value"])))

    def _example(self, one: _Wanted, what: str = "") -> ExampleSample:
        return ExampleSample(self.position, one.row, self.table.keys[one.row], what)

    def _more(self, one: _Wanted, start: int, stop: int) -> bytes:
        """Return further bytes of a value, b"" if the shard lacks them."""
        found = self.bytes_of(one.start + start, one.start + stop, 1)
        return b"" if found is None else bytes(found)


def _size_of(storage: Storage, url: str) -> int | None:
    try:
        return storage.info(url).size_bytes
    except NotFoundError:
        return None
