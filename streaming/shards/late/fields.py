"""Find late fields, and give the ranges of their tars that go with chunks: ``LateField``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from streaming.common.arguments import counted
from streaming.errors import IndexFormatError, IndexMismatchError, NotFoundError, shell_place, shell_word
from streaming.shards.fetch.read import FetchRange
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.files import is_sealed
from streaming.shards.index.layout import field_samples_path, field_table_path, field_tar_path
from streaming.shards.index.sample_table import SampleTable
from streaming.shards.late.table import LateTable
from streaming.shards.schema.value import Schema
from streaming.storage import Storage, join_url, redact
from streaming.types import Int64Array

_REQUESTS = 16


@dataclass(frozen=True, kw_only=True, eq=False)
class LateField:
    """A late field of a dataset, some of whose sets may lack it.

    Attributes:
        name: The field.
        chunks: The chunks of its tars, of all sets.
        urls: The tars.
        samples: Their sample tables' URLs.
        rows: int64 [C], for each chunk of the dataset the chunk here that goes with it; -1: its set lacks the field.
        shards: int64 [S], for each shard of the dataset the tar that goes with it; -1: likewise.
    """

    name: str
    chunks: ChunkTable
    urls: tuple[str, ...]
    samples: tuple[str, ...]
    rows: Int64Array = field(repr=False)
    shards: Int64Array = field(repr=False)

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        """The number of each tar, by its URL."""
        return {url: number for number, url in enumerate(self.urls)}

    @cached_property
    def of_tar(self) -> Int64Array:
        """The shard of the dataset that each tar goes with, int64."""
        found = np.zeros(len(self.urls), np.int64)
        there = np.flatnonzero(self.shards >= 0)
        found[self.shards[there]] = there
        return found

    def run(self, first: int, stop: int, kept: str, version_of: Callable[[int], str]) -> FetchRange | None:
        """Return the range that goes with chunks ``[first, stop)`` of one shard; None: their set lacks the field.

        Args:
            first: The first chunk.
            stop: The chunk after the last one.
            kept: As in ``FetchRange``.
            version_of: Returns the version of a tar, by its number.
        """
        low, high = int(self.rows[first]), int(self.rows[stop - 1]) + 1
        if low < 0:
            return None
        table, tar = self.chunks, int(self.chunks.shard[low])
        start = int(table.byte_start[low])
        ends, sums = (table.byte_end[low:high] - start).tolist(), table.crc32c[low:high].tolist()
        return FetchRange(
            url=self.urls[tar], byte_start=start, byte_end=start + ends[-1],
            first_sample=int(table.first_sample[low]), num_samples=int(table.num_samples[low:high].sum()),
            crc32c=sums[0] if high - low == 1 else None, shard_bytes=table.shards[tar].size_bytes,
            spans=() if high - low == 1 else tuple(zip(ends, sums, strict=True)), late=self.name, kept=kept,
            version=version_of(tar),
        )  # fmt: skip

    def sample_table(self, storage: Storage, tar: int) -> SampleTable:
        """Return the sample table of a tar.

        Raises:
            IndexMismatchError: It is gone, or of another tar.
        """
        url = self.samples[tar]
        again = f"Add the field again: shard_tools field add {shell_place(url)} {shell_word(self.name)} … --overwrite"
        try:
            found = storage.read_parsed(url, SampleTable.from_parquet, is_sealed)
        except NotFoundError as error:
            raise IndexMismatchError(f"{redact(url)}: this sample table of a late field is gone. {again}") from error
        if found.chunks != self.chunks.of_shard(tar):
            raise IndexMismatchError(f"{redact(url)}: this sample table is of another tar. {again}")
        return found


def read_late_table(storage: Storage, home: str, name: str, version: str) -> LateTable:
    """Return a version of a late field of the set in a directory.

    Raises:
        IndexMismatchError: It is gone.
        IndexFormatError: It is damaged.
    """
    url = join_url(home, field_table_path(name, version))
    again = f"shard_tools field add {shell_place(home)} {shell_word(name)} … --overwrite"
    try:
        found = storage.read_parsed(url, LateTable.from_parquet, is_sealed)
    except NotFoundError as error:
        raise IndexMismatchError(
            f"field {name!r}: version {version} of this late field is gone ({redact(url)}); it was replaced or dropped "
            f"after the set was opened, or the set was copied without it. Open the set again, or add it again: {again}"
        ) from error
    if (found.name, found.version) != (name, version):
        raise IndexFormatError(f"{redact(url)}: holds version {found.version} of field {found.name!r}; {again}")
    return found


def late_names(schemas: Mapping[str, Schema]) -> set[str]:
    """Return the late fields of sets."""
    return {name for schema in schemas.values() for name in schema.late_fields}


def late_fields(
    storage: Storage, table: ChunkTable, places: Sequence[tuple[str, str]], schemas: Mapping[str, Schema],
    fields: Collection[str] | None,
) -> tuple[LateField, ...]:  # fmt: skip
    """Return the late fields that are read of a dataset.

    Args:
        storage: The store of their tars.
        table: The chunk table of the dataset.
        places: For each of its shards the directory of its index, and its name there.
        schemas: What the set of each directory means.
        fields: Fields that are read; None: all.

    Raises:
        IndexMismatchError: A late field has no values for some of the shards, or those of other ones.
    """
    homes = dict.fromkeys(home for home, _ in places)
    asked = [
        (home, name, version) for home in homes for name, version in schemas.get(home, Schema()).late_fields.items()
        if fields is None or name in fields
    ]  # fmt: skip
    if not asked:
        return ()
    with ThreadPoolExecutor(min(_REQUESTS, len(asked)), "shardstream-fields") as threads:
        found = dict(zip(asked, threads.map(lambda one: read_late_table(storage, *one), asked), strict=True))
    by_name: dict[str, dict[str, LateTable]] = {}
    for (home, name, _), late in found.items():
        by_name.setdefault(name, {})[home] = late
    return tuple(_of_dataset(name, table, places, by_home) for name, by_home in sorted(by_name.items()))


def _of_dataset(
    name: str, table: ChunkTable, places: Sequence[tuple[str, str]], by_home: Mapping[str, LateTable]
) -> LateField:  # fmt: skip
    """Return a late field of a dataset, given its tables by directory."""
    firsts, num_tars = {}, 0
    for home, late in by_home.items():
        firsts[home] = num_tars
        num_tars += len(late.shards)
    chunks = ChunkTable.concat([late.chunks for late in by_home.values()])
    shards = np.full(len(places), -1, np.int64)
    rows = np.full(table.num_chunks, -1, np.int64)
    lacking, changed = [], []
    for shard, (home, shard_name) in enumerate(places):
        if home not in by_home:
            continue
        late = by_home[home]
        number = late.numbers.get(shard_name)
        low, high = table.rows_of(shard)
        if number is None:
            lacking.append((home, shard_name))
            continue
        tar = firsts[home] + number
        first, stop = chunks.rows_of(tar)
        shards[shard], rows[low:high] = tar, np.arange(first, first + high - low)
        if late.shards[number].fingerprint != table.of_shard(shard).fingerprint or stop - first != high - low:
            changed.append((home, shard_name))
    for what, some in (("which were added after it", lacking), ("whose content was another one then", changed)):
        if some:
            raise lacks(name, some, len(places), what)
    tars = [(home, late.work, tar.name) for home, late in by_home.items() for tar in late.chunks.shards]
    return LateField(
        name=name, chunks=chunks, rows=rows, shards=shards,
        urls=tuple(join_url(home, field_tar_path(name, work, tar)) for home, work, tar in tars),
        samples=tuple(join_url(home, field_samples_path(name, work, tar)) for home, work, tar in tars),
    )  # fmt: skip


def lacks(name: str, shards: Sequence[tuple[str, str]], num_shards: int, what: str) -> IndexMismatchError:
    """Make the error for shards of which a late field has no values."""
    home, shard = shards[0]
    return IndexMismatchError(
        f"field {name!r} has no values for {counted(len(shards), 'shard')} of {num_shards}, {what}, first "
        f"{redact(join_url(home, shard))}. Run the command again that added it, which makes what is missing: "
        f"shard_tools field add {shell_place(home)} {shell_word(name)} …; or name the fields to read without it: "
        f"fields=…"
    )
