"""Read Parquet files: batches of rows, streamed row group by row group."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq

from shard_tools.make.convert.base.arrow import ArrowColumns, count_types, open_parquet, plain_rows, told
from shard_tools.make.convert.base.columns_met import FileColumns, meet_columns
from shard_tools.make.convert.base.files import FileSource, SourceFile, table_files
from shard_tools.make.convert.base.records import Record, SourceOptions, permutation
from shard_tools.make.convert.base.rows import RowMapper, unreadable_rest
from streaming.errors import DataError
from streaming.storage import Storage

SUFFIXES = (".parquet", ".pq")
_BATCH_BYTES = 32 << 20  # Arrow memory of one batch of rows
_MAX_BATCH_ROWS = 8192


class ParquetFiles(FileSource):
    """Rows of Parquet files, in order.

    Binary columns and Hugging Face's ``{"bytes", "path"}`` structs become fields named by their file type, lists of
    numbers ``column.npy`` of the same type, and everything else the ``json`` field. Which field a column becomes is
    decided once, for all rows of all files. Memory is bounded by one batch of rows; with ``shuffle_seed`` row groups
    are permuted, and rows within each, which needs memory for one row group.
    """

    def __init__(self, spec: str, storage: Storage, options: SourceOptions) -> None:
        files, self._beside = table_files("parquet", spec, storage, SUFFIXES, options)
        super().__init__("parquet", files, storage)
        self._seed = options.shuffle_seed
        self.in_order = self._seed is None
        self._numbers = {file.url: number for number, file in enumerate(self.files)}
        self._groups: list[tuple[SourceFile, int, int]] = []  # file, row group, rows
        columns = ArrowColumns([column for column, _ in options.fields])
        met: list[FileColumns] = []
        everywhere: list[set[str]] = []
        always: list[set[str]] = []  # by file, as above: columns that have a value in every row
        for file in self.files:
            with self._open(file) as parquet:
                metadata = parquet.metadata
                counts = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
                self._groups += [(file, group, num_rows) for group, num_rows in enumerate(counts)]
                columns.add(parquet.schema_arrow, file.shown_url)
                everywhere.append({*parquet.schema_arrow.names})
                kinds = {one.name: _kind_of(one.type) for one in parquet.schema_arrow}
                met.append(FileColumns(where=file.shown_url, always=kinds))
                always.append(_columns_without_null(parquet) & everywhere[-1])
        if not options.named_only:
            meet_columns(met, allowed=options.unlike_columns)
        if self._seed is not None:
            self._groups = [self._groups[i] for i in permutation(len(self._groups), self._seed)]
        self.item_types = columns.item_types
        self._mapper = RowMapper.of(options)
        if not options.named_only:
            self._mapper = columns.fit(self._mapper, (partial(self._look, file) for file in self.files))
        self._fields = self._mapper.fields_of(
            *(set[str]().union(*some).intersection(*some) for some in (everywhere, always))
        )

    @property
    def fields(self) -> Mapping[str, bool] | None:
        """The fields that the columns become; None if a list of files becomes a field for each."""
        return None if self._mapper.lists else self._fields

    def _look(self, file: SourceFile, columns: Sequence[str]) -> dict[str, Counter[str]]:
        with self._open(file) as parquet, told(file):
            return _look_at(parquet, [column for column in columns if column in parquet.schema_arrow.names])

    @property
    def num_records(self) -> int:
        """Rows of all files."""
        return sum(num_rows for _, _, num_rows in self._groups)

    def identity(self) -> dict[str, object]:
        """Return the names of the files, and which field each column becomes."""
        return {**super().identity(), **self._mapper.identity()}

    def records(self, start: int) -> Generator[Record, None, None]:
        """Yield the rows from number ``start`` on; row groups before it are not read."""
        ends = list(itertools.accumulate(num_rows for _, _, num_rows in self._groups))
        for which in range(bisect.bisect_right(ends, start), len(self._groups)):
            file, group, num_rows = self._groups[which]
            first = ends[which] - num_rows
            skip, origin = max(0, start - first), self._numbers[file.url]
            place, done = f"{file.shown_url}, row group {group}", skip
            try:
                for row_number, row in self._group_rows(file, group, skip, salt=which):
                    where = f"{place}, row {row_number}"
                    yield self._mapper.record(row, first + row_number, where, origin=origin)
                    done = row_number + 1
            except DataError as error:
                for number in range(done, num_rows):  # one for each row, so that later ones keep their numbers
                    where = f"{place}, row {number}"
                    yield unreadable_rest(first + number, where, error, origin, tolerant=self._mapper.tolerant)

    def _group_rows(
        self, file: SourceFile, group: int, skip: int, *, salt: int
    ) -> Iterator[tuple[int, dict[str, object]]]:
        """Yield (number within the group, row) from row ``skip`` on."""
        with self._open(file) as parquet, told(file):
            if self._seed is not None:
                table = parquet.read_row_group(group)
                order = permutation(table.num_rows, self._seed * 1_000_003 + salt + 1)
                batches = table.take(pa.array(order)).to_batches(max_chunksize=_batch_rows(parquet, group))
            else:
                batches = parquet.iter_batches(batch_size=_batch_rows(parquet, group), row_groups=[group])
            number = 0
            for batch in batches:
                keep = batch.slice(max(0, skip - number))
                number += batch.num_rows - keep.num_rows
                for row in plain_rows(keep, f"{file.shown_url}, row group {group}"):
                    yield number, row
                    number += 1

    def _open(self, file: SourceFile) -> pq.ParquetFile:
        return open_parquet(file, self._storage)


def _kind_of(kind: pa.DataType) -> str:
    """Return the kind of a column, to compare files; "" if its values become bytes of a field, or are all NULL."""
    kinds = {
        "number": (pa.types.is_integer, pa.types.is_floating), "boolean": (pa.types.is_boolean,),
        "text": (pa.types.is_string, pa.types.is_large_string), "list": (pa.types.is_list, pa.types.is_large_list),
    }  # fmt: skip
    return next((name for name, checks in kinds.items() if any(check(kind) for check in checks)), "")


def _batch_rows(parquet: pq.ParquetFile, group: int) -> int:
    facts = parquet.metadata.row_group(group)
    mean_bytes = max(1, facts.total_byte_size // max(1, facts.num_rows))
    return int(min(_MAX_BATCH_ROWS, max(1, _BATCH_BYTES // mean_bytes)))


def _look_at(parquet: pq.ParquetFile, columns: Sequence[str]) -> dict[str, Counter[str]]:
    """Count the types of the first values of binary columns, in the first row group that has any."""
    found: dict[str, Counter[str]] = {}
    for group in range(parquet.metadata.num_row_groups if columns else 0):
        found = count_types(
            parquet.iter_batches(_batch_rows(parquet, group), row_groups=[group], columns=list(columns)), columns
        )
        if all(found.values()):
            break
    return found


def _columns_without_null(parquet: pq.ParquetFile) -> set[str]:
    """Return the columns that have a value in every row, by the file's statistics."""
    schema, facts = parquet.schema_arrow, parquet.metadata
    leaves = [facts.schema.column(i).path.removesuffix(".bytes") for i in range(facts.num_columns)]
    full = {field.name for field in schema if not field.nullable}
    for number, path in enumerate(leaves):
        columns = (facts.row_group(group).column(number).statistics for group in range(facts.num_row_groups))
        if all(one is not None and one.has_null_count and one.null_count == 0 for one in columns):
            full.add(path.removesuffix(".list.element").removesuffix(".list.item"))
    return full
