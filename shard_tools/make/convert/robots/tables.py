"""Read the rows of an episode from Parquet, and turn columns into arrays and back."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from shard_tools.make.convert.base.arrow import open_parquet, told
from shard_tools.make.convert.base.files import SourceFile
from shard_tools.make.convert.robots.layout import Feature
from streaming.common.lru_cache import LruCache
from streaming.errors import DataError
from streaming.storage import Storage

EPISODE: Final = "episode_index"
_KEPT_BYTES: Final = 256 << 20
"""Row groups that are kept: several episodes may share one, and threads read neighboring episodes."""


class RowGroups:
    """Read row groups of stored Parquet files, each once while several episodes need it. Thread-safe and picklable."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._kept = LruCache[tuple[str, int], pa.Table](_KEPT_BYTES, _bytes_of)
        self._ranges = LruCache[str, list[tuple[int, int]]](_KEPT_BYTES >> 6, _length_of)

    def episode(self, file: SourceFile, index: int) -> pa.Table:
        """Return the rows of an episode, in their order.

        Raises:
            DataError: The file is damaged, has no column ``episode_index``, or no row of this episode.
        """
        ranges = self._ranges.of(file.url, lambda: self._ranges_of(file))
        found = []
        for group in (number for number, (low, high) in enumerate(ranges) if low <= index <= high):
            table = self.group(file, group)
            rows = np.flatnonzero(table.column(EPISODE).to_numpy() == index)
            if rows.size and rows[-1] - rows[0] + 1 == rows.size:
                found.append(table.slice(int(rows[0]), rows.size))
            elif rows.size:
                found.append(table.take(pa.array(rows)))
        if not found:
            raise DataError(f"{file.shown_url}: it has no row of episode {index}; fetch the set again")
        return pa.concat_tables(found)

    def group(self, file: SourceFile, group: int) -> pa.Table:
        """Return a row group."""
        return self._kept.of((file.url, group), lambda: self._read(file, group))

    def _read(self, file: SourceFile, group: int) -> pa.Table:
        with told(file), open_parquet(file, self._storage) as parquet:
            return parquet.read_row_group(group)

    def _ranges_of(self, file: SourceFile) -> list[tuple[int, int]]:
        """Return the smallest and the largest episode of each row group."""
        with told(file), open_parquet(file, self._storage) as parquet:
            if EPISODE not in parquet.schema_arrow.names:
                raise DataError(f"{file.shown_url}: no column {EPISODE!r}, which says whose rows they are")
            return [_range_of(parquet, group) for group in range(parquet.metadata.num_row_groups)]


def _bytes_of(table: pa.Table) -> int:
    return int(table.nbytes)


def _length_of(ranges: Sequence[object]) -> int:
    return 128 * len(ranges)


def _range_of(parquet: pq.ParquetFile, group: int) -> tuple[int, int]:
    facts = parquet.metadata.row_group(group)
    for number in range(facts.num_columns):
        column = facts.column(number)
        if column.path_in_schema == EPISODE and column.statistics is not None and column.statistics.has_min_max:
            return int(column.statistics.min), int(column.statistics.max)
    values = parquet.read_row_group(group, columns=[EPISODE]).column(EPISODE)
    low, high = pc.min_max(values).as_py().values()
    return (0, -1) if low is None else (int(low), int(high))


def array_of(column: pa.ChunkedArray, feature: Feature) -> npt.NDArray[Any]:
    """Return the values of an episode: ``[steps, *shape]``, of scalar features ``[steps]``, in the declared type.

    Raises:
        DataError: A value is missing, or has another shape than declared.
    """
    values = _plain(column.combine_chunks())
    while _is_list(values.type):
        lengths = pc.min_max(pc.list_value_length(values)).as_py()
        if values.null_count or lengths["min"] != lengths["max"]:
            raise DataError(f"feature {feature.name!r}: steps without a value, or of unlike lengths")
        values = _plain(values.flatten())
    if values.null_count:
        raise DataError(f"feature {feature.name!r}: {values.null_count} of its numbers are NULL")
    shape = (len(column),) if feature.is_scalar else (len(column), *feature.shape)
    if len(values) != math.prod(shape):
        raise DataError(
            f"feature {feature.name!r}: {len(values)} numbers in {len(column)} steps; info.json states the shape "
            f"{list(feature.shape)}"
        )
    try:
        return np.asarray(values.to_numpy(zero_copy_only=False)).astype(np.dtype(feature.dtype)).reshape(shape)
    except (ValueError, TypeError, pa.ArrowException) as error:
        raise DataError(f"feature {feature.name!r}: its {values.type} are no {feature.dtype} ({error})") from error


def type_differs(column: pa.ChunkedArray, feature: Feature) -> bool:
    """Return whether the numbers of a column have another type than declared."""
    kind = column.type
    while isinstance(kind, pa.BaseExtensionType) or _is_list(kind):
        kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind.value_type
    name = {"float": "float32", "double": "float64", "halffloat": "float16"}.get(str(kind), str(kind))
    return name != feature.dtype


def column_of(array: npt.NDArray[Any], feature: Feature) -> pa.Array:
    """Return an array as a column in the form that LeRobot writes; the inverse of :func:`array_of`."""
    values = pa.array(np.ascontiguousarray(array).reshape(-1))
    if feature.is_scalar:
        return values
    *outer, last = feature.shape or (1,)
    if not outer:
        return pa.FixedSizeListArray.from_arrays(values, last)
    for size in reversed((*outer, last)):
        starts = np.arange(0, len(values) + 1, max(size, 1), dtype=np.int32)
        values = pa.ListArray.from_arrays(pa.array(starts), values)
    return values


def type_of(feature: Feature) -> dict[str, Any]:
    """Return the type of a feature of numbers for ``datasets``, as LeRobot declares it."""
    value = {"dtype": feature.dtype, "_type": "Value"}
    if feature.is_scalar:
        return value
    if len(feature.shape) == 1:
        return {"feature": value, "length": feature.shape[0], "_type": "Sequence"}
    return {"shape": list(feature.shape), "dtype": feature.dtype, "_type": f"Array{len(feature.shape)}D"}


def packed(column: pa.ChunkedArray, name: str) -> bytes:
    """Return a column as a Parquet file by itself."""
    out = io.BytesIO()
    pq.write_table(pa.table({name: column}), out, compression="zstd")
    return out.getvalue()


def unpacked(data: bytes, what: str) -> pa.ChunkedArray:
    """Return the column of such a file.

    Raises:
        DataError: It is damaged, or has several columns.
    """
    try:
        table = pq.read_table(pa.BufferReader(data))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{what}: not a Parquet file, or a damaged one: {error}") from error
    if table.num_columns != 1:
        raise DataError(f"{what}: expected one column, got {table.num_columns}")
    return table.column(0)


def _plain(values: pa.Array) -> pa.Array:
    while isinstance(values.type, pa.BaseExtensionType):
        values = values.storage
    return values


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
