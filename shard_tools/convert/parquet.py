"""Read Parquet files: batches of rows, streamed row group by row group."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Generator, Iterator
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq

from shard_tools.convert.files import FileSource, SourceFile, find_files, open_stored
from shard_tools.convert.records import Record, SourceOptions, permutation
from shard_tools.convert.rows import RowMapper
from streaming.errors import DataError, StorageError
from streaming.storage import Storage, redact

SUFFIXES = (".parquet", ".pq")
_BATCH_BYTES = 32 << 20  # Arrow memory of one batch of rows
_MAX_BATCH_ROWS = 8192


class ParquetFiles(FileSource):
    """Rows of Parquet files, in order.

    Binary columns and Hugging Face's ``{"bytes", "path"}`` structs become fields named by their file type, lists of
    numbers become ``column.npy``, and everything else the ``json`` field. Memory is bounded by one batch of rows; with
    ``shuffle_seed`` row groups are permuted, and rows within each, which needs memory for one row group.
    """

    def __init__(self, spec: str, storage: Storage, options: SourceOptions) -> None:
        super().__init__("parquet", find_files(spec, storage, SUFFIXES, exclude=options.exclude), storage)
        self._seed = options.shuffle_seed
        self._groups: list[tuple[SourceFile, int, int]] = []  # file, row group, rows
        schema: pa.Schema | None = None
        for file in self.files:
            with self._open(file) as parquet:
                schema = schema or parquet.schema_arrow
                metadata = parquet.metadata
                counts = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
                self._groups += [(file, group, num_rows) for group, num_rows in enumerate(counts)]
        if self._seed is not None:
            self._groups = [self._groups[i] for i in permutation(len(self._groups), self._seed)]
        mapper = RowMapper.of(options)
        self._mapper = _fit_mapper(mapper, schema) if schema is not None else mapper

    @property
    def num_records(self) -> int:
        """Rows of all files."""
        return sum(num_rows for _, _, num_rows in self._groups)

    def identity(self) -> dict[str, object]:
        """Return the names and sizes of the files, and the number of rows."""
        return {**super().identity(), "num_rows": self.num_records}

    def records(self, start: int) -> Generator[Record, None, None]:
        """Yield the rows from number ``start`` on; row groups before it are not read."""
        ends = list(itertools.accumulate(num_rows for _, _, num_rows in self._groups))
        for which in range(bisect.bisect_right(ends, start), len(self._groups)):
            file, group, num_rows = self._groups[which]
            first = ends[which] - num_rows
            rows = self._group_rows(file, group, max(0, start - first), salt=which)
            for row_number, row in rows:
                yield self._mapper.record(
                    row, first + row_number, f"{file.shown_url}, row group {group}, row {row_number}"
                )

    def _group_rows(
        self, file: SourceFile, group: int, skip: int, *, salt: int
    ) -> Iterator[tuple[int, dict[str, object]]]:
        """Yield (number within the group, row) from row ``skip`` on."""
        with self._open(file) as parquet:
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
                for row in keep.to_pylist():
                    yield number, row
                    number += 1

    def _open(self, file: SourceFile) -> pq.ParquetFile:
        return open_parquet(file, self._storage)


def open_parquet(file: SourceFile, storage: Storage) -> pq.ParquetFile:
    """Open a stored Parquet file; close it with ``close(force=True)``, which also releases what was read.

    Raises:
        DataError: It is not a Parquet file, or is damaged.
    """
    stream = open_stored(file, storage, unzip=False)
    try:
        return pq.ParquetFile(pa.PythonFile(stream, mode="r"))
    except (pa.ArrowException, OSError) as error:
        stream.close()
        if isinstance(error, StorageError):
            raise
        raise DataError(f"{redact(file.url)}: not a Parquet file, or a damaged one: {error}") from error


def _batch_rows(parquet: pq.ParquetFile, group: int) -> int:
    facts = parquet.metadata.row_group(group)
    mean_bytes = max(1, facts.total_byte_size // max(1, facts.num_rows))
    return int(min(_MAX_BATCH_ROWS, max(1, _BATCH_BYTES // mean_bytes)))


def _fit_mapper(mapper: RowMapper, schema: pa.Schema) -> RowMapper:
    """Configure ``mapper`` from the column types: which columns are binary, and which are lists of numbers."""
    named = {column for column, _ in mapper.fields}
    free = [column for column in schema if column.name not in named]
    return replace(
        mapper,
        num_binary=sum(_is_binary(column.type) for column in free),
        arrays={column.name: kind for column in schema if (kind := _kind_of_items(column.type)) is not None},
    )


def _is_binary(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return {kind.field(i).name for i in range(kind.num_fields)} == {"bytes", "path"}
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind))


def _kind_of_items(kind: pa.DataType) -> str | None:
    """Return the type in which to store the items of a list of numbers; None for anything else."""
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        return None
    inner = kind.value_type
    if pa.types.is_integer(inner):
        return "uint64" if inner == pa.uint64() else "int64"
    return "float64" if pa.types.is_floating(inner) else "bool" if pa.types.is_boolean(inner) else None
