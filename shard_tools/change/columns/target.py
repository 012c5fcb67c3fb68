"""Locate where a late column is stored: shards with their indexes, and the files written beside these."""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from shard_tools.change.sets.open_set import needed_samples, open_set
from shard_tools.running.engine import Calls
from shard_tools.running.progress import Progress
from shard_tools.running.report import Report
from streaming.common.threads import map_threads
from streaming.errors import ConfigError, IndexFormatError, IndexMissingError, NotFoundError
from streaming.sets.filters.late_columns import ColumnDocument, homes_of, list_columns
from streaming.shards.catalog.build import home_of, no_samples, read_schema, samples_url, shard_name
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.columns import joined_type, read_column, read_sample_columns, write_column
from streaming.shards.index.files import is_sealed
from streaming.shards.index.layout import (
    checked_name,
    column_document_path,
    column_path,
    columns_directory,
)
from streaming.shards.index.sample_table import SampleTable
from streaming.shards.schema.value import Schema, SchemaColumn, late_origin
from streaming.shards.versions.publish import change_schema
from streaming.storage import Storage, join_url, redact

_log = logging.getLogger(__name__)
THREADS = 16  # index files are small: their requests wait for the store, not for the CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class AddReport(Report):
    """What was added.

    Attributes:
        name: The column.
        type: Type of its values.
        column_version: Identifies it among all columns of this name.
        num_shards: Shards of the dataset.
        num_samples: Their samples.
        num_missing: Samples without a value.
        first_missing: Keys of the first of them.
        num_rows: Rows of the file.
        num_unmatched: Rows that match no sample.
        first_unmatched: Keys of the first of them.
        num_shared: Samples that share their key with another one; each gets the value of that key.
        was_complete: Whether an earlier run had written everything, so that this one wrote nothing.
        seconds: Wall time.
    """

    name: str
    type: str
    column_version: str
    num_shards: int
    num_samples: int
    num_missing: int
    first_missing: tuple[str, ...] = ()
    num_rows: int = 0
    num_unmatched: int = 0
    first_unmatched: tuple[str, ...] = ()
    num_shared: int = 0
    was_complete: bool = False
    seconds: float = 0.0


class Filled(NamedTuple):
    """What the values of one shard are.

    Attributes:
        type: Their type.
        num_missing: Number of samples without a value.
        num_other: Number of values that are different if they are made again.
    """

    type: str
    num_missing: int
    num_other: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnShard:
    """One shard of a column's target: everything that a call needs to write its values, in any process.

    Attributes:
        column: The column's name.
        url: The shard.
        index_url: Location of its index, if not beside it.
        rows: Its rows of the chunk table.
        storage: The store.
    """

    column: str
    url: str
    index_url: str | None
    rows: ChunkTable
    storage: Storage

    @property
    def home(self) -> str:
        """Directory of the index."""
        return home_of(self.url, self.index_url)

    @property
    def path(self) -> str:
        """Location of the values."""
        return join_url(self.home, column_path(self.column, shard_name(self.url, self.index_url)))

    def table(self) -> SampleTable:
        """Return the sample table.

        Raises:
            IndexMissingError: There is none.
        """
        return needed_samples(self.storage, self.url, self.index_url)

    def written(self, version: str) -> pa.Array | None:
        """Return values written earlier, if they are of this version of the column, and of this shard."""
        try:
            values, facts = self.storage.read_parsed(self.path, read_column, is_sealed)
        except (NotFoundError, IndexFormatError):
            return None
        return values if (facts["column_version"], facts["fingerprint"]) == (version, self.rows.fingerprint) else None

    def write(self, values: pa.Array, version: str) -> None:
        """Write the values, replacing earlier ones."""
        self.storage.put(self.path, self.file(values, version))

    def file(self, values: pa.Array, version: str) -> bytes:
        """Return the values as the bytes of a file."""
        shard, fingerprint = self.rows.shards[0], self.rows.fingerprint
        return write_column(values, name=self.column, shard=shard, fingerprint=fingerprint, version=version)


ShardValues = Callable[[ColumnShard], pa.Array]
"""Returns a shard's values. It must be picklable to run in another process."""


class ColumnTarget:
    """A late column to be added to the shards at ``urls``.

    If the set has grown since a column was added in the same way, the column keeps its version and its values, and only
    the values of new shards are made: states and views that name the column stay as they are. The values of one earlier
    shard are made again and compared, since code that a function calls is no part of the version.

    Args:
        urls: Shards with an index.
        name: Name of the column.
        storage: The store.
        index_url: Location of the index, if not beside the shards.
        overwrite: Replace a column of this name, and make every value again.
        keeps: With ``overwrite``: complete a column that was made in the same way, instead of replacing it.
        allow_unfinished: Accept an unfinished set.

    Raises:
        ConfigError: The name is invalid or taken, or the shards have no index.
        NotFoundError: There are no shards.
    """

    def __init__(
        self, urls: Sequence[str], name: str, *, storage: Storage, index_url: str | None, overwrite: bool,
        keeps: bool = False, allow_unfinished: bool = False,
    ) -> None:  # fmt: skip
        self.name = checked_name(name, "column")
        self.storage = storage
        shards = open_set(urls, storage, index_url, allow_unfinished=allow_unfinished)
        if shards.scanned is not None:
            raise IndexMissingError(
                f"{redact(shards.urls[0])}: a late column is stored beside an index, but there is none; run "
                f"`shard_tools index` first"
            )
        self.urls, self.table, self.index_url = shards.urls, shards.chunks, index_url
        self.sizes = [shard.num_samples for shard in self.table.shards]
        if self.urls and self.columns_of(0, [name]):
            raise ConfigError(
                f"column {name!r}: the sample tables have a column of this name; choose another for the late one"
            )
        self._taken = [home for home in self.homes if storage.exists(join_url(home, column_document_path(name)))]
        self._overwrite, self._keeps = overwrite, keeps or not overwrite
        self._recipe = ""
        self.grows = False
        """Whether a column that was made in the same way, for other shards, is completed."""

    @cached_property
    def homes(self) -> list[str]:
        """Directories of the indexes."""
        return homes_of(self.urls, self.index_url)

    @property
    def schemas(self) -> dict[str, Schema]:
        """Schema of the set, by directory of the index."""
        return {home: read_schema(self.storage, home) for home in self.homes}

    def columns_of(self, shard: int, names: Sequence[str]) -> dict[str, pa.Array]:
        """Return the columns of one sample table."""
        url = self.urls[shard]
        path = samples_url(url, self.index_url)
        try:
            return self.storage.read_parsed(
                path, lambda data, source: read_sample_columns(data, names, source)[0], is_sealed
            )
        except NotFoundError as error:
            raise no_samples(url) from error

    def version_of(self, **made_of: object) -> str:
        """Return the version of this column, which depends on what it is made from; 16 hex digits.

        Raises:
            ConfigError: Some of the directories have another column of this name.
        """
        self._recipe = _digest({"name": self.name, **made_of})
        version = _digest({"name": self.name, "shards": self.table.fingerprint, **made_of})
        there = [self._document(home) for home in self._taken]
        alike = {one.column_version for one in there if one is not None and one.recipe == self._recipe}
        if self._keeps and len(alike) == 1 and all(one is not None and one.column_version in alike for one in there):
            self.grows = alike != {version}
            return alike.pop()
        self._refuse_taken([home for home in self._taken if not self._is_of(version, home)])
        return version

    def finished(self, version: str) -> AddReport | None:
        """Return the report of this version of the column if it is there; None: it is to be made.

        ``overwrite`` makes every value again.
        """
        there = [self._document(home) for home in self._taken]
        known = [one for one in there if one is not None and one.column_version == version]
        if not self._keeps or len(known) < len(self.homes):
            return None
        num_missing = sum(one.num_missing for one in known)
        if self.grows:
            found = [*map_threads(partial(_written, version), map(self.shard, range(len(self.urls))), THREADS)]
            if any(one is None for one in found):
                return None
            num_missing = sum(one.num_missing for one in found if one is not None)
        return AddReport(
            name=self.name, type=known[0].type, column_version=version, num_shards=len(self.urls),
            num_samples=sum(self.sizes), num_missing=num_missing, was_complete=True,
        )  # fmt: skip

    def _is_of(self, version: str, home: str) -> bool:
        document = self._document(home)
        return document is not None and document.column_version == version

    def _document(self, home: str) -> ColumnDocument | None:
        url = join_url(home, column_document_path(self.name))
        try:
            return self.storage.read_parsed(url, ColumnDocument.from_bytes, is_sealed)
        except IndexFormatError:
            return None

    def _refuse_taken(self, homes: Sequence[str]) -> None:
        if homes and not self._overwrite:
            raise self.taken(homes[0])

    def taken(self, home: str | None = None) -> ConfigError:
        """Return the error for a name that another column has, in this directory of an index; None: in the first."""
        home = self.homes[0] if home is None else home
        document = self._document(home)
        made = "" if document is None else f", made from {document.made_from} as it was then"
        return ConfigError(
            f"column {self.name!r} already exists beside the index in {redact(home) or '.'}{made}. Runs may have "
            f"been trained with it: choose another name, or give --overwrite, which makes all its values again; views "
            f"and states that name the column then refer to values that are gone"
        )

    def begin(self) -> None:
        """Withdraw an older column of this name: until everything is written, the column does not exist.

        A column that grows stays: the values of its earlier shards are read meanwhile.
        """
        if self.grows:
            return
        for home in self._taken:
            self.storage.delete(join_url(home, column_document_path(self.name)))

    def shard(self, number: int) -> ColumnShard:
        """Return the shard of this number."""
        return ColumnShard(
            column=self.name, url=self.urls[number], index_url=self.index_url, rows=self.table.of_shard(number),
            storage=self.storage,
        )  # fmt: skip

    def fill(self, version: str, values: ShardValues, *, calls: Calls, again: bool = True) -> list[Filled]:
        """Write the values of every shard, and return a summary of each. The caller must call ``finish``.

        Args:
            version: Version of the column.
            values: Returns the values of a shard.
            calls: Runs the calls; its progress receives every shard.
            again: False: values of this version written before an interruption are not computed again. A finished
                column that is being overwritten is always recomputed.
        """
        again = again and not self.grows
        if not again:
            self._forget()
        self.begin()
        calls.progress.start(total_bytes=None, total=len(self.urls))
        shared = [(self.storage, at) for url in self.urls[:1] for at in (url, samples_url(url, self.index_url))]
        shards = map(self.shard, range(len(self.urls)))
        fill = partial(_fill, version, values, again, self._compared(version))
        filled = list(calls.map(fill, shards, shared=shared))
        self._tell_of_other_values(filled)
        return filled

    def fill_in_order(
        self, version: str, values: Callable[[Sequence[ColumnShard]], Generator[pa.Array, None, None]], *,
        progress: Progress,
    ) -> list[Filled]:  # fmt: skip
        """Write the values of all shards as :meth:`fill` does, those of an interrupted run excepted.

        Args:
            version: Version of the column.
            values: Yields the values of the shards that are left, in their order.
            progress: Receives every shard.
        """
        self._forget()
        self.begin()
        progress.start(total_bytes=None, total=len(self.urls))
        shards = [self.shard(number) for number in range(len(self.urls))]
        there = list(map_threads(partial(_written, version), shards, THREADS))
        progress.advance(num=sum(one is not None for one in there))
        filled, compared = list[Filled](), self._compared(version)
        wanted = [one is None or shard.url == compared for shard, one in zip(shards, there, strict=True)]
        with closing(values([shard for shard, is_wanted in zip(shards, wanted, strict=True) if is_wanted])) as made:
            for shard, one in zip(shards, there, strict=True):
                if one is None:
                    shard.write(array := next(made), version)
                    progress.advance(num=1)
                    filled.append(Filled(str(array.type), array.null_count))
                else:
                    num_other = _num_other(shard.written(version), next(made)) if shard.url == compared else 0
                    filled.append(one._replace(num_other=num_other))
        self._tell_of_other_values(filled)
        return filled

    def _compared(self, version: str) -> str | None:
        """Return the shard whose values are made again, to be compared: the first one of a column that grows."""
        shards = map(self.shard, range(len(self.urls) if self.grows else 0))
        return next((shard.url for shard in shards if shard.written(version) is not None), None)

    def _tell_of_other_values(self, filled: Sequence[Filled]) -> None:
        """Log that values of earlier shards are kept which would be different today."""
        for number, one in enumerate(filled):
            if one.num_other:
                _log.warning(
                    "column %r: of %s values of %s, which the column had before the set grew, %s are different when "
                    "they are made again: code that the function calls has changed, or its values are random. Earlier "
                    "shards keep their values, new shards have new ones. To make all values again: the same command "
                    "with --overwrite",
                    self.name, f"{self.sizes[number]:,}", redact(self.urls[number]), f"{one.num_other:,}",
                )  # fmt: skip

    def _forget(self) -> None:
        """Delete the values of a finished column: they may be of older versions of code that a function calls."""
        if self.grows:
            return
        gone = _files_of(self.storage, self._taken, self.name)
        documents = {join_url(home, column_document_path(self.name)) for home in self._taken}
        # Before the documents: without these, files count as written by an interrupted run of the same work.
        list(map_threads(self.storage.delete, [url for url in gone if url not in documents], THREADS))

    def replace(
        self, version: str, values: ShardValues, check: Callable[[Sequence[Filled]], None], *, calls: Calls
    ) -> list[Filled]:
        """Write the values as :meth:`fill` does, but withdraw an older column only once all values are known.

        An older column stays intact if a value cannot be read: until then, values are kept in files on this machine.

        Args:
            version: Version of the column.
            values: Returns the values of a shard.
            check: Checks the summaries before an older column is withdrawn; raises if they cannot be a column.
            calls: Runs the calls; its progress receives every shard.
        """
        if self.grows or not self._taken:
            filled = self.fill(version, values, calls=calls)
            check(filled)
            return filled
        calls.progress.start(total_bytes=None, total=len(self.urls))
        shared = [(self.storage, at) for url in self.urls[:1] for at in (url, samples_url(url, self.index_url))]
        shards = [self.shard(number) for number in range(len(self.urls))]
        filled = list[Filled]()
        with tempfile.TemporaryDirectory(prefix="shardstream-column-") as folder:
            files = [Path(folder, str(number)) for number in range(len(shards))]
            made = calls.map(partial(_made, version, values), shards, shared=shared)
            for file, (data, one) in zip(files, made, strict=True):
                file.write_bytes(data)
                filled.append(one)
            check(filled)
            _joined_kind(self.name, filled)
            self.begin()
            places = [(shard.path, file) for shard, file in zip(shards, files, strict=True)]
            list(map_threads(lambda place: self.storage.put(place[0], place[1].read_bytes()), places, THREADS))
        return filled

    def finish(
        self, filled: Sequence[Filled], *, version: str, made_from: str, begun_s: float, after: str = "",
        **more: Any,
    ) -> AddReport:  # fmt: skip
        """Write the description of the column, last, and return it as the report, with the fields in ``more``.

        Args:
            filled: Summary of each shard.
            version: Version of the column, as written with the values.
            made_from: Description of the origin.
            begun_s: When the work began, by ``time.monotonic``.
            after: Identity of the transform after which lengths were measured; "": none was.
            more: Further fields of the report.

        Raises:
            ConfigError: Shards hold values that cannot be compared.
        """
        missing = [one.num_missing for one in filled]
        kind = _joined_kind(self.name, filled)
        homes = np.array([self.homes.index(home_of(url, self.index_url)) for url in self.urls])
        for number, home in enumerate(self.homes):
            mine = np.flatnonzero(homes == number).tolist()
            document = ColumnDocument(
                name=self.name, type=kind, column_version=version, made_from=redact(made_from), num_shards=len(mine),
                num_samples=sum(self.sizes[shard] for shard in mine), num_missing=sum(missing[shard] for shard in mine),
                after=after, recipe=self._recipe,
            )  # fmt: skip
            told = SchemaColumn(type=kind, origin=late_origin(version, redact(made_from)))
            _note_column(self.storage, home, self.name, told)
            self.storage.put(join_url(home, column_document_path(self.name)), document.to_bytes())
        num_samples, num_missing = sum(self.sizes), sum(missing)
        return AddReport(
            name=self.name, type=kind, column_version=version, num_shards=len(self.urls), num_samples=num_samples,
            num_missing=num_missing, seconds=time.monotonic() - begun_s,
            **{"num_rows": num_samples - num_missing, **more},
        )  # fmt: skip


def _digest(content: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _joined_kind(name: str, filled: Sequence[Filled]) -> str:
    """Return the type of the values of all shards.

    Raises:
        ConfigError: Shards hold values that cannot be compared.
    """
    found = sorted({one.type for one in filled} - {"null"})
    joined = joined_type(map(pa.type_for_alias, found))
    if joined is None:
        raise ConfigError(
            f"column {name!r}: shards hold values of different types: {', '.join(found)}; a column "
            f"has numbers, or text, or booleans"
        )
    return str(joined)


def _written(version: str, shard: ColumnShard) -> Filled | None:
    array = shard.written(version)
    return None if array is None else Filled(str(array.type), array.null_count)


def _made(version: str, values: ShardValues, shard: ColumnShard, progress: Progress) -> tuple[bytes, Filled]:
    array = values(shard)
    progress.advance(num=1)
    return shard.file(array, version), Filled(str(array.type), array.null_count)


def _fill(
    version: str, values: ShardValues, again: bool, compared: str | None, shard: ColumnShard, progress: Progress  # noqa: FBT001
) -> Filled:  # fmt: skip
    array, num_other = None if again else shard.written(version), 0
    if array is None:
        array = values(shard)
        shard.write(array, version)
    elif shard.url == compared:
        num_other = _num_other(array, values(shard))
    progress.advance(num=1)
    return Filled(str(array.type), array.null_count, num_other)


def _num_other(values: pa.Array, again: pa.Array) -> int:
    """Count the values that are different if they are made again; NaN is like NaN."""
    pairs = zip(values.to_pylist(), again.to_pylist(), strict=True)
    return sum(one != other and (one == one or other == other) for one, other in pairs)  # noqa: PLR0124


@dataclass(frozen=True, slots=True, kw_only=True)
class ListReport(Report):
    """Late columns beside the indexes of some shards.

    Attributes:
        columns: Every late column, with its directory.
    """

    columns: tuple[dict[str, object], ...]


def list_all(
    urls: Sequence[str], *, storage: Storage, index_url: str | None, allow_unfinished: bool = False
) -> ListReport:
    """Return all late columns of some shards."""
    shards = open_set(urls, storage, index_url, allow_unfinished=allow_unfinished)
    found = [(home, column) for home in homes_of(shards.urls, index_url) for column in list_columns(storage, home)]
    names = ColumnDocument.__dataclass_fields__
    return ListReport(
        columns=tuple(
            {"index": redact(home), **{name: getattr(column, name) for name in names}} for home, column in found
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DropReport(Report):
    """A deleted column, and the number of its files."""

    name: str
    num_files: int


def drop_column(
    urls: Sequence[str], name: str, *, storage: Storage, index_url: str | None, allow_unfinished: bool = False
) -> DropReport:
    """Delete a late column.

    Raises:
        ConfigError: There is none of this name.
    """
    shards = open_set(urls, storage, index_url, allow_unfinished=allow_unfinished)
    homes = homes_of(shards.urls, index_url)
    document = [join_url(home, column_document_path(checked_name(name, "column"))) for home in homes]
    files = _files_of(storage, homes, name)
    if not files:
        there = sorted({column.name for home in homes for column in list_columns(storage, home)})
        raise ConfigError(f"column {name!r}: there is no such late column; there are: {', '.join(there) or 'none'}")
    for url in document:  # first: a column without its document does not exist
        storage.delete(url)
    list(map_threads(storage.delete, [url for url in files if url not in document], THREADS))
    for home in homes:
        _note_column(storage, home, name, None)
    return DropReport(name=name, num_files=len(files))


def _note_column(storage: Storage, home: str, name: str, column: SchemaColumn | None) -> None:
    """Write the entry of a column into the set's schema; None removes it."""
    known = read_schema(storage, home)
    columns = {other: one for other, one in known.columns.items() if other != name}
    new = replace(known, columns=columns if column is None else {**columns, name: column})
    if new != known:
        change_schema(storage, home, new)


def _files_of(storage: Storage, homes: Sequence[str], name: str) -> list[str]:
    """List all files of a late column."""
    below = [join_url(home, f"{columns_directory()}/{name}") for home in homes]
    return [info.url for folder in below for info in storage.list(folder)]
