"""Locate the files of an index, relative to the index's directory (``docs/format.md``)."""

from __future__ import annotations

import re
from collections.abc import Collection

from streaming.errors import ConfigError

INDEX_DIRECTORY = "_shardstream"
CHUNKS_FILE = f"{INDEX_DIRECTORY}/chunks.parquet"
SCHEMA_FILE = f"{INDEX_DIRECTORY}/schema.json"
"""File that describes the meaning of fields and columns: ``streaming.shards.schema``."""
UNFINISHED_FILE = f"{INDEX_DIRECTORY}/unfinished.json"
"""File that marks shards in this directory as being written; a copy of one writer's file (``writer_path``)."""
WRITERS_DIRECTORY = f"{INDEX_DIRECTORY}/writers"
_SAMPLES_DIRECTORY = f"{INDEX_DIRECTORY}/samples"
_COLUMNS_DIRECTORY = f"{INDEX_DIRECTORY}/columns"
_COLUMN_DOCUMENT = "column.json"
_VIEWS_DIRECTORY = f"{INDEX_DIRECTORY}/views"
VERSIONS_DIRECTORY = f"{INDEX_DIRECTORY}/versions"
"""Chunk tables of versions, by number or name; only a set that lives has any."""
INPUTS_DIRECTORY = f"{INDEX_DIRECTORY}/inputs"
"""The inputs of what was appended; which of these files count is up to the chunk table."""
PENDING_DIRECTORY = f"{INDEX_DIRECTORY}/pending"
"""Notes of changes that are not published yet."""
COPIED_FILES = f"{INDEX_DIRECTORY}/copied-"
"""How the paths of notes of ``copy`` begin: the shards that it has brought to this directory."""
_FIELDS_DIRECTORY = f"{INDEX_DIRECTORY}/fields"
_VIDEO_DIRECTORY = f"{INDEX_DIRECTORY}/video"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*")
_MAX_NAME = 100
_OF_CHANGE = re.compile(r"(?P<stem>.*)-v(?P<work>[0-9a-f]{8})\.tar")


def work_of(name: str) -> str | None:
    """Return which change has written a shard, by its name; None: it was not written by a change."""
    found = _OF_CHANGE.fullmatch(name)
    return None if found is None else found["work"]


def without_work(name: str) -> str:
    """Return the name of a shard without the part that names the change that wrote it."""
    found = _OF_CHANGE.fullmatch(name)
    return name if found is None else f"{found['stem']}.tar"


def new_version_name(name: str, work: str, taken: Collection[str]) -> str:
    """Return the name under which a change writes a shard that takes the place of another one."""
    stems = dict.fromkeys(one.removesuffix(".tar") for one in (without_work(name), name))
    return next(one for stem in stems if (one := f"{stem}-v{work}.tar") not in taken)


def chunks_path() -> str:
    """Return the path of the chunk table of a directory of shards."""
    return CHUNKS_FILE


def samples_directory() -> str:
    """Return the path of the directory of all sample tables."""
    return _SAMPLES_DIRECTORY


def samples_path(shard_name: str) -> str:
    """Return the path of the sample table of one shard.

    ``shard_name`` is relative to the directory of shards; a name such as ``part-0/000.tar`` keeps its directories, so
    that no two shards share a file.
    """
    return f"{_SAMPLES_DIRECTORY}/{shard_name}.parquet"


def checked_name(name: str, what: str) -> str:
    """Return ``name``, which becomes a part of paths and of conditions.

    Raises:
        ConfigError: It is not made of letters, digits, ``_``, ``-`` and single dots, or exceeds 100 characters.
    """
    if not isinstance(name, str) or len(name) > _MAX_NAME or _NAME.fullmatch(name) is None:
        raise ConfigError(
            f"{what} {str(name)[:120]!r}: expected letters, digits, '_', '-' and single dots between them, at most "
            f"{_MAX_NAME} in all, and a letter at the beginning"
        )
    return name


def writer_path(writer: str) -> str:
    """Return the path of the file of one unfinished writer of a directory."""
    return f"{WRITERS_DIRECTORY}/{writer}.json"


def columns_directory() -> str:
    """Return the path of the directory of all late columns."""
    return _COLUMNS_DIRECTORY


def column_document_path(name: str) -> str:
    """Return the path of the metadata of a late column as a whole, which is written last."""
    return f"{_COLUMNS_DIRECTORY}/{name}/{_COLUMN_DOCUMENT}"


def column_of_document_path(path: str) -> str | None:
    """Return the inverse of :func:`column_document_path`; None for any other path."""
    prefix, suffix = f"{_COLUMNS_DIRECTORY}/", f"/{_COLUMN_DOCUMENT}"
    name = path[len(prefix) : -len(suffix)] if path.startswith(prefix) and path.endswith(suffix) else ""
    return name if name and "/" not in name else None


def column_path(name: str, shard_name: str) -> str:
    """Return the path of the values of a late column for one shard."""
    return f"{_COLUMNS_DIRECTORY}/{name}/{shard_name}.parquet"


def fields_directory() -> str:
    """Return the path of the directory of all late fields."""
    return _FIELDS_DIRECTORY


def field_table_path(name: str, version: str) -> str:
    """Return the path of the table of one version of a late field."""
    return f"{_FIELDS_DIRECTORY}/{name}/{version}.parquet"


def field_tar_path(name: str, work: str, tar: str) -> str:
    """Return the path of one tar of a late field; ``work`` says how its values were made."""
    return f"{_FIELDS_DIRECTORY}/{name}/{work}/{tar}"


def field_samples_path(name: str, work: str, tar: str) -> str:
    """Return the path of the sample table of one tar of a late field."""
    return f"{field_tar_path(name, work, tar)}.parquet"


def video_directory() -> str:
    """Return the path of the directory of all indexes of videos."""
    return _VIDEO_DIRECTORY


def video_path(field: str, shard_name: str) -> str:
    """Return the path of the index of the videos in one field of one shard."""
    return f"{_VIDEO_DIRECTORY}/{field}/{shard_name}.parquet"


def views_directory() -> str:
    """Return the path of the directory of all saved views."""
    return _VIEWS_DIRECTORY


def view_path(name: str) -> str:
    """Return the path of a saved view."""
    return f"{_VIEWS_DIRECTORY}/{name}.json"


def version_path(name: str) -> str:
    """Return the path of the chunk table of a version, given its number or its name."""
    return f"{VERSIONS_DIRECTORY}/{name}.parquet"


def inputs_path(name: str) -> str:
    """Return the path of the list of inputs of one change."""
    return f"{INPUTS_DIRECTORY}/{name}.parquet"


def pending_path(name: str) -> str:
    """Return the path of the note of one change that is not published yet."""
    return f"{PENDING_DIRECTORY}/{name}.json"
