"""Check the other files of an index: late columns, views, notes of conversions, the journal; and indexes of others."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from shard_tools.change.sets.open_set import load_samples
from shard_tools.make.convert.journal import NAME, SOURCES, load_journal, load_sources
from shard_tools.running.report import Finding, Report
from streaming.common.threads import map_threads
from streaming.errors import (
    AccessDeniedError,
    DataError,
    IndexFormatError,
    IndexMismatchError,
    IndexMissingError,
    NotFoundError,
    StorageError,
)
from streaming.sets.filters.late_columns import ColumnDocument, LateColumn, read_values
from streaming.sets.filters.views import View
from streaming.shards.catalog.build import home_of, read_schema, shard_name
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.files import is_sealed
from streaming.shards.index.layout import (
    SCHEMA_FILE,
    column_document_path,
    column_of_document_path,
    columns_directory,
    video_path,
    views_directory,
)
from streaming.shards.video.read import list_videos, read_video_table
from streaming.storage import Storage, join_url, redact, split_url

_SUFFIX = ".json"  # of webshart's index, beside a tar of the same name
_SHOWN = 3
_FILES = 16  # read in parallel; they are small
_Check = Callable[[], object]


def check_beside(
    rows_of: Mapping[str, ChunkTable], *, storage: Storage, index_url: str | None, damage_only: bool = False,
    with_videos: bool = True,
) -> list[Finding]:  # fmt: skip
    """Read every file beside the chunk tables and sample tables of some shards, and return the findings.

    In a store that cannot list, only files with fixed names are read.

    Args:
        rows_of: A chunk table of each shard alone, by URL.
        storage: Store of the index.
        index_url: Location of the index, if not beside the shards.
        damage_only: Report damage only, not intact files that belong to other shards or another version.
        with_videos: Read the indexes of videos, too.
    """
    homes = dict.fromkeys(home_of(url, index_url) for url in rows_of)
    folders = dict.fromkeys([*homes, *(split_url(url)[0] for url in rows_of)])  # a journal is beside the shards
    checks = [one for folder in folders for one in _documents(storage, folder)]
    for home in homes:
        mine = {url: rows for url, rows in rows_of.items() if home_of(url, index_url) == home}
        checks += [one for name in _columns(storage, home) for one in _values(storage, home, name, mine, index_url)]
        checks += _videos(storage, home, mine, index_url) if with_videos else ()

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


def _videos(
    storage: Storage, home: str, rows_of: Mapping[str, ChunkTable], index_url: str | None
) -> list[tuple[str, _Check]]:  # fmt: skip
    """Return the checks of the index of videos, of each shard, for each field that some shard of the set has."""
    fields = dict.fromkeys(one.field for one in list_videos(storage, home))
    found = list[tuple[str, _Check]]()
    for url, rows in rows_of.items():
        name, folder = shard_name(url, index_url), split_url(url)[0]
        for field in fields:
            found.append(
                (join_url(home, video_path(field, name)), partial(_check_video, storage, home, rows, field, folder))
            )
    return found


def _check_video(storage: Storage, home: str, rows: ChunkTable, name: str, folder: str) -> None:
    try:
        read_video_table(storage, home, rows, name, folder=folder)
    except IndexMissingError as error:  # the shard came after the others were indexed
        raise IndexMismatchError(str(error)) from error


def _fail(error: Exception) -> None:
    raise error


def _listed(storage: Storage, folder: str) -> list[str]:
    try:
        return [info.url for info in storage.list(folder)]
    except StorageError:  # the store cannot list, or has no such folder
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Webshart(Report):
    """Indexes of webshart beside shards: ``NAME.json`` has size and place of each file in ``NAME.tar``.

    They have no checksums, so shards are read all the same, and compared with them.

    Attributes:
        num: Number of shards that have one.
        unlike: What contradicts the shards, one line for each of the first indexes that do.
        num_unlike: Number of these indexes.
    """

    num: int = 0
    unlike: tuple[str, ...] = ()
    num_unlike: int = 0


def webshart_beside(urls: Sequence[str], storage: Storage, index_url: str | None) -> Webshart:
    """Compare indexes of webshart with the shards beside them, once these are indexed.

    If the first shard has none, no other is looked for.
    """
    if not urls or _places_by_webshart(storage, urls[0]) is None:
        return Webshart()

    def compared(url: str) -> str | None:
        said = _places_by_webshart(storage, url)
        return None if said is None else _unlike(url, said, storage, index_url)

    found = [one for one in map_threads(compared, urls, _FILES) if one is not None]
    unlike = [one for one in found if one]
    return Webshart(num=len(found), unlike=tuple(unlike[:_SHOWN]), num_unlike=len(unlike))


def _places_by_webshart(storage: Storage, url: str) -> tuple[int | None, dict[str, tuple[int, int]]] | None:
    """Return the size of a shard and the offset and length of each of its files, by webshart's index of it."""
    try:
        said: Any = json.loads(bytes(storage.read(url.removesuffix(".tar") + _SUFFIX)))
        files = said["files"]
        entries = files.items() if isinstance(files, dict) else [(one.get("path"), one) for one in files]
        places = {str(name): (int(one["offset"]), int(one.get("length", one.get("size")))) for name, one in entries}
        return said.get("filesize"), places
    except (StorageError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None  # there is none, or the file is of another program


def _unlike(
    url: str, said: tuple[int | None, dict[str, tuple[int, int]]], storage: Storage, index_url: str | None
) -> str:  # fmt: skip
    """Return what webshart's index says that is not so; "" if all of it is."""
    table = load_samples(storage, url, index_url)
    if table is None:
        return ""
    size_bytes, places = said
    where = redact(url.removesuffix(".tar") + _SUFFIX)
    if size_bytes not in {None, 0, table.shard.size_bytes}:
        return f"{where}: its shard has {size_bytes:,} bytes, got {table.shard.size_bytes:,}"
    there = {
        place for starts, sizes in table.fields.values() for place in zip(starts.tolist(), sizes.tolist(), strict=True)
    }  # fmt: skip
    wrong = next((name for name, place in places.items() if place not in there), None)
    if wrong is None:
        return ""
    offset, length = places[wrong]
    return f"{where}: {wrong!r} has {length:,} bytes at {offset:,}, where the shard has no such file"
