"""Open shards with their index, for commands that read a dataset; locate its files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shard_tools.running.report import Finding
from streaming.build.batches.bad_file import shown_url
from streaming.common.arguments import format_bytes
from streaming.common.threads import map_threads
from streaming.errors import ConfigError, IndexMissingError, NotFoundError
from streaming.sets.filters.late_columns import LateColumn, homes_of, read_values
from streaming.sets.filters.select import Subset, late_columns_of, late_names, narrowed
from streaming.sets.filters.views import asked_filter
from streaming.shards.catalog.build import load_index, no_samples, read_schema, samples_url
from streaming.shards.catalog.open import OpenShards
from streaming.shards.catalog.scan import scan_shard
from streaming.shards.catalog.unfinished import Mark, expand_whole
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.columns import Values
from streaming.shards.index.files import is_sealed
from streaming.shards.index.sample_table import SampleTable
from streaming.shards.index.selection import Selection
from streaming.shards.schema.meeting import RESHARD, contradiction, cure_of
from streaming.shards.schema.value import Schema
from streaming.storage import Storage, join_url, redact, split_query, split_url
from streaming.types import SHARD_SUFFIXES, DuplicateKeys, Int64Array

_log = logging.getLogger(__name__)
READ_THREADS = 16  # sample tables are small files: their requests wait for the store, not for the CPU
_REQUESTS = 32  # for sizes; they wait for the store, not for the CPU
_MAX_READ_BYTES = 1 << 30  # sets without an index are read up to this size; larger ones must be indexed


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSet:
    """Shards with their chunk table.

    Attributes:
        urls: The shards.
        chunks: Their chunk table.
        scanned: Their sample tables, if the shards were scanned because there is no index.
        index_url: Location of the index, if not beside the shards.
        marks: Marks of an unfinished set, if it is allowed.
    """

    urls: tuple[str, ...]
    chunks: ChunkTable
    scanned: tuple[SampleTable, ...] | None
    index_url: str | None
    marks: tuple[Mark, ...]

    @property
    def as_opened(self) -> OpenShards:
        """The shards in the form that a dataset opens, for its filters."""
        return OpenShards(
            urls=self.urls, table=self.chunks, missing_index="", index=self.index_url, scanned=self.scanned
        )

    @property
    def homes(self) -> list[str]:
        """Directories of the indexes."""
        return homes_of(self.urls, self.index_url)

    def schemas(self, storage: Storage) -> dict[str, Schema]:
        """Return the schema of the set in each directory.

        Raises:
            IndexFormatError: A schema is damaged.
        """
        return {home: read_schema(storage, home) for home in self.homes}

    def unlike(self, storage: Storage) -> list[Finding]:
        """See :func:`unlike_sets`."""
        return unlike_sets(self.homes, storage)

    def kept(
        self, storage: Storage, *, where: str | None, view: str | None, subset: Subset | None = None,
        exclude: str | None = None,
    ) -> Selection | None:  # fmt: skip
        """Return the samples that a condition, a view, a range and a list of keys keep, as in a dataset; None: all.

        Raises:
            ConfigError: A column or the view does not exist, or no sample is kept.
            IndexMismatchError: A late column does not belong to these shards.
        """
        asked = asked_filter(
            storage, self.as_opened, where=where, view=view, subset=subset, exclude=exclude, peers=None
        )
        return None if asked is None or asked.keeps_all else narrowed(storage, self.as_opened, asked)

    def late_columns(self, storage: Storage, names: Iterable[str] | None = None) -> dict[str, LateColumn]:
        """Return the late columns among ``names``; None: all of the first directory."""
        if names is None:
            names = late_names(storage, self.as_opened)
        return late_columns_of(storage, self.as_opened, names, None)

    def late_values(self, storage: Storage, position: int, columns: Iterable[LateColumn]) -> dict[str, Values]:
        """Return the values of late columns for the shard at this position.

        Raises:
            IndexMismatchError: The values are missing, or belong to another version of the shard or column.
        """
        url, rows = self.urls[position], self.chunks.of_shard(position)
        return {column.name: read_values(storage, url, self.index_url, rows, column) for column in columns}


def open_set(
    urls: Sequence[str],
    storage: Storage,
    index_url: str | None,
    *,
    exclude: str | None = None,
    duplicate_keys: DuplicateKeys = "keep",
    allow_unfinished: bool = False,
    meets: bool = True,
) -> OpenSet:
    """Open the shards at ``urls``, except those below ``exclude``, with their index.

    Small sets without an index are scanned.

    Differences between the schemas of several sets are logged, unless the caller merges the schemas itself.

    Duplicate keys are kept unless ``duplicate_keys`` says otherwise, so that inspection shows them.

    Raises:
        UnfinishedError: The set is unfinished, and ``allow_unfinished`` is False.
        IndexMissingError: There is no index, and the set is too large to scan for this.
        NotFoundError: Nothing matches ``urls``.
    """
    shards, marks = shards_beside(urls, storage, exclude, allow_unfinished=allow_unfinished)
    try:
        chunks, scanned = load_index(storage, shards, index_url), None
    except IndexMissingError as missing:
        scanned = _read_all(shards, storage, missing, duplicate_keys)
        chunks = ChunkTable.concat([table.chunks for table in scanned])
    opened = OpenSet(urls=shards, chunks=chunks, scanned=scanned, index_url=index_url, marks=marks)
    for finding in opened.unlike(storage) if meets else ():
        _log.warning("%s; %s", finding.what, finding.cure)
    return opened


def unlike_sets(homes: Sequence[str], storage: Storage) -> list[Finding]:
    """Return a finding if the schemas of sets, given by the directories of their indexes, contradict each other.

    An entry that one of them lacks is logged.
    """
    if len(homes) < 2:
        return []
    found = map_threads(lambda home: read_schema(storage, home), homes, READ_THREADS)
    conflict = contradiction({redact(home): schema for home, schema in zip(homes, found, strict=True)})
    if conflict is None:
        return []
    what = f"these sets do not mean the same: {conflict}"
    return [Finding(kind="schema", shard=homes[0], what=what, cure=cure_of(conflict, RESHARD))]


def shards_beside(
    urls: Sequence[str], storage: Storage, exclude: str | None, *, allow_unfinished: bool
) -> tuple[tuple[str, ...], tuple[Mark, ...]]:
    """Return the shards at ``urls`` that are not below ``exclude``, such as a target inside a source.

    With ``allow_unfinished``, also return the marks of unfinished directories.

    Raises:
        UnfinishedError: A directory is marked as unfinished, and ``allow_unfinished`` is False.
        NotFoundError: There is no shard.
    """
    below = None if exclude is None else shown_url(exclude).rstrip("/") + "/"
    found, marks = expand_whole(urls, storage, exclude=exclude, allow_unfinished=allow_unfinished)
    shards = tuple(url for url in found if not below or not shown_url(url).startswith(below))
    if not shards:
        raise NotFoundError(f"{', '.join(map(redact, urls))}: no shard but those in the target {exclude}")
    return shards, marks


def unfinished(marks: Sequence[Mark]) -> list[Finding]:
    """Return a finding for each directory that is marked as unfinished."""
    return [Finding(kind="unfinished", shard=mark.directory, what=mark.state, cure=mark.cure) for mark in marks]


def _read_all(
    shards: Sequence[str], storage: Storage, missing: IndexMissingError, duplicate_keys: DuplicateKeys
) -> tuple[SampleTable, ...]:
    total_bytes = sum(sizes_of(storage, shards))
    if total_bytes > _MAX_READ_BYTES:
        raise IndexMissingError(
            f"{missing}; without an index all {format_bytes(total_bytes)} would have to be read"
        ) from missing

    def scan(url: str) -> SampleTable:
        return scan_shard(storage, url, split_url(url)[1], duplicate_keys=duplicate_keys)

    return tuple(map_threads(scan, shards, READ_THREADS))


def tables_of(
    shards: OpenSet, storage: Storage, num_threads: int = 1
) -> Generator[tuple[int, str, SampleTable], None, None]:
    """Yield (number of the first sample, URL, sample table) of every shard; several threads read ahead."""

    def load(position: int) -> SampleTable:
        return table_of(shards, position, storage)

    first = 0
    for url, table in zip(shards.urls, map_threads(load, range(len(shards.urls)), num_threads), strict=True):
        yield first, url, table
        first += table.num_samples


def table_of(shards: OpenSet, position: int, storage: Storage) -> SampleTable:
    """Return the sample table of the shard at this position.

    Raises:
        IndexMissingError: The index has no sample table of it.
    """
    if shards.scanned is not None:
        return shards.scanned[position]
    return needed_samples(storage, shards.urls[position], shards.index_url)


def table_of_shard(storage: Storage, url: str, index_url: str | None, *, scanned: bool) -> SampleTable:
    """Return the sample table of the shard at ``url``: from the index, or by scanning the shard with ``scanned``.

    Raises:
        IndexMissingError: The index has no sample table of it.
    """
    if scanned:
        return scan_shard(storage, url, split_url(url)[1], duplicate_keys="keep")
    return needed_samples(storage, url, index_url)


def place_of(name: str, folder: str, index_url: str | None) -> str:
    """Return the URL of the shard that an index calls ``name``; its neighbors lie in ``folder``."""
    return join_url(index_url, name) if index_url is not None and "/" in name else join_url(folder, name)


def names_shards(urls: Sequence[str]) -> bool:
    """Return whether ``urls`` name shards, and not directories or prefixes, which stand for everything below them."""
    return any(url.partition("?")[0].endswith(SHARD_SUFFIXES) for url in urls)


def relative_names(urls: Sequence[str]) -> list[str]:
    """Return the paths below the innermost directory that holds all shards; plain names if there is none.

    Raises:
        ConfigError: Two shards have the same name.
    """
    parts = [split_query(url)[0].split("/") for url in urls]
    depth = 0
    while parts and all(len(part) > depth + 1 and part[depth] == parts[0][depth] for part in parts):
        depth += 1
    if any("://" in url for url in urls) and depth < len(("scheme:", "", "bucket")):
        depth = 0
    names = ["/".join(part[depth:]) if depth else part[-1] for part in parts]
    for i, name in enumerate(names if len({*names}) < len(names) else ()):
        if name in names[:i]:
            raise ConfigError(
                f"two of the shards are called {name!r}; write them to folders of their own, one at a time"
            )
    return names


def sizes_of(storage: Storage, urls: Sequence[str]) -> list[int]:
    """Return the size of each shard in bytes.

    Raises:
        NotFoundError: A shard is missing.
    """
    return list(map_threads(lambda url: storage.info(url).size_bytes, urls, min(_REQUESTS, len(urls))))


def load_samples(storage: Storage, url: str, index_url: str | None) -> SampleTable | None:
    """Return the sample table of the shard at ``url``, or None if there is none.

    Raises:
        IndexFormatError: It is damaged.
    """
    source = samples_url(url, index_url)
    try:
        return storage.read_parsed(source, SampleTable.from_parquet, is_sealed)
    except NotFoundError:
        return None


def needed_samples(storage: Storage, url: str, index_url: str | None) -> SampleTable:
    """Return the sample table of the shard at ``url``, which must exist.

    Raises:
        IndexMissingError: There is none.
    """
    table = load_samples(storage, url, index_url)
    if table is None:
        raise no_samples(url)
    return table


def keys_again(
    hashes: Sequence[Int64Array], keys_of: Callable[[int, Sequence[int]], Sequence[str]]
) -> Iterator[tuple[int, str, int]]:
    """Yield every repeated key: number of its shard, the key, and number of the earlier shard that has it.

    Args:
        hashes: Hashes of the keys of each shard, int64.
        keys_of: Returns the keys of some rows of a shard; called only for rows whose hash occurs again.
    """
    values, counts = np.unique(np.concatenate([np.empty(0, np.int64), *hashes]), return_counts=True)
    repeated = values[counts > 1]
    first: dict[str, int] = {}
    for number, some in enumerate(hashes) if repeated.size else ():
        for key in keys_of(number, np.flatnonzero(np.isin(some, repeated)).tolist()):
            if key in first:
                yield number, key, first[key]
            first.setdefault(key, number)
