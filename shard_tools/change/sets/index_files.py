"""Check the other files of an index: late columns, views, notes of conversions, the journal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from shard_tools.make.convert.journal import NAME, SOURCES, load_journal, load_sources
from shard_tools.running.report import Finding
from streaming.common.threads import map_threads
from streaming.errors import AccessDeniedError, DataError, IndexFormatError, NotFoundError, StorageError
from streaming.sets.filters.late_columns import ColumnDocument, LateColumn, read_values
from streaming.sets.filters.views import View
from streaming.shards.catalog.build import home_of, read_schema
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.files import is_sealed
from streaming.shards.index.layout import (
    SCHEMA_FILE,
    column_document_path,
    column_of_document_path,
    columns_directory,
    views_directory,
)
from streaming.storage import Storage, join_url, redact, split_url

_FILES = 16  # read in parallel; they are small
_Check = Callable[[], object]


def check_beside(
    rows_of: Mapping[str, ChunkTable], *, storage: Storage, index_url: str | None, damage_only: bool = False
) -> list[Finding]:
    """Read every file beside the chunk tables and sample tables of some shards, and return the findings.

    In a store that cannot list, only files with fixed names are read.

    Args:
        rows_of: A chunk table of each shard alone, by URL.
        storage: Store of the index.
        index_url: Location of the index, if not beside the shards.
        damage_only: Report damage only, not intact files that belong to other shards or another version.
    """
    homes = dict.fromkeys(home_of(url, index_url) for url in rows_of)
    folders = dict.fromkeys([*homes, *(split_url(url)[0] for url in rows_of)])  # a journal is beside the shards
    checks = [one for folder in folders for one in _documents(storage, folder)]
    for home in homes:
        mine = {url: rows for url, rows in rows_of.items() if home_of(url, index_url) == home}
        checks += [one for name in _columns(storage, home) for one in _values(storage, home, name, mine, index_url)]

    def found(one: tuple[str, _Check]) -> Finding | None:
        url, check = one
        try:
            check()
        except (NotFoundError, AccessDeniedError):  # S3 denies access to a missing object if listing is not allowed
            return None
        except DataError as error:
            is_meant = isinstance(error, IndexFormatError) or not damage_only
            return _finding("index", url, error) if is_meant else None
        except StorageError as error:
            return _finding("read", url, error)
        return None

    return [one for one in map_threads(found, checks, _FILES) if one is not None]


def _finding(kind: str, url: str, error: Exception) -> Finding:
    what = str(error).removeprefix(f"{redact(url)}: ")
    return Finding(kind=kind, shard=url, what=what, cure="see the message; then verify again")


def _documents(storage: Storage, home: str) -> list[tuple[str, _Check]]:
    """Return the checks of all JSON documents except those of late columns."""
    checks: list[tuple[str, _Check]] = [(join_url(home, SCHEMA_FILE), partial(read_schema, storage, home))]
    checks.append((join_url(home, NAME), partial(load_journal, home, storage)))
    checks.append((join_url(home, SOURCES), partial(load_sources, home, storage)))
    views = [url for url in _listed(storage, join_url(home, views_directory())) if url.endswith(".json")]
    return checks + [(url, partial(_check_view, storage, url)) for url in views]


def _check_view(storage: Storage, url: str) -> None:
    storage.read_parsed(url, View.from_bytes, is_sealed)


def _columns(storage: Storage, home: str) -> list[str]:
    """Return the names of the late columns of an index."""
    below = f"{home.rstrip('/')}/" if home else ""
    paths = (url.removeprefix(below) for url in _listed(storage, join_url(home, columns_directory())))
    return sorted(name for name in map(column_of_document_path, paths) if name is not None)


def _values(
    storage: Storage, home: str, name: str, rows_of: Mapping[str, ChunkTable], index_url: str | None
) -> list[tuple[str, _Check]]:
    """Return the checks of one late column: of its document, or, if that is intact, of its values for each shard."""
    url = join_url(home, column_document_path(name))
    try:
        document = storage.read_parsed(url, ColumnDocument.from_bytes, is_sealed)
    except (DataError, StorageError) as error:
        return [(url, partial(_fail, error))]
    column = LateColumn(name=name, documents={home: document})
    return [(shard, partial(read_values, storage, shard, index_url, rows, column)) for shard, rows in rows_of.items()]


def _fail(error: Exception) -> None:
    raise error


def _listed(storage: Storage, folder: str) -> list[str]:
    try:
        return [info.url for info in storage.list(folder)]
    except StorageError:  # the store cannot list, or has no such folder
        return []
