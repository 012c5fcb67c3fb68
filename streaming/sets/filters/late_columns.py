"""Read late columns: values added after the shards were written, in files beside the index (``docs/format.md``)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from streaming.common.threads import on_threads
from streaming.errors import IndexFormatError, IndexMismatchError, NotFoundError, shell_place, shell_word
from streaming.shards.catalog.build import home_of, shard_name
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.columns import Values, read_column, type_named
from streaming.shards.index.files import ADD_AGAIN, is_sealed, read_document, write_document
from streaming.shards.index.layout import (
    checked_name,
    column_document_path,
    column_of_document_path,
    column_path,
    columns_directory,
)
from streaming.storage import Storage, join_url, redact
from streaming.types import ReadBuffer

_REQUESTS = 16
_MAJOR = "1"
_VERSION = f"{_MAJOR}.0"
_KIND = "late column"
_OPTIONAL = frozenset(("after", "recipe"))
"""Members of the document that are left out if they are empty."""


def document_bytes(kind: str, content: Mapping[str, Any]) -> bytes:
    """Serialize a document that is stored beside an index as JSON, with its kind, version and seal."""
    return write_document({"kind": kind, "version": _VERSION, **content})


def document_of_kind(data: ReadBuffer, kind: str) -> Any:
    """Parse the output of :func:`document_bytes`.

    Raises:
        ValueError, TypeError, KeyError, RecursionError: The document is damaged, not of this kind, or has a newer major
            version.
    """
    content = read_document(data)
    if content["kind"] != kind or str(content["version"]).partition(".")[0] != _MAJOR:
        raise ValueError(f"kind {content['kind']!r}, version {content['version']!r}")
    return content


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnDocument:
    """The metadata of a late column for the shards of one index; ``column.json``.

    Attributes:
        name: Name of the column.
        type: Arrow's name of the values' type, such as ``double``.
        column_version: Distinguishes the column from every other one that ever had this name.
        made_from: Origin of the values, in words.
        num_shards: Number of shards that have values or NULLs.
        num_samples: Number of samples in these shards.
        num_missing: Number of samples without a value.
        after: Identity of the transform after which the values, lengths, were measured; "": none.
        recipe: Digest of what the values are made from, whatever the shards; "": of an older release.
    """

    name: str
    type: str
    column_version: str
    made_from: str
    num_shards: int
    num_samples: int
    num_missing: int
    after: str = ""
    recipe: str = ""

    def to_bytes(self) -> bytes:
        """Return JSON, with kind and version."""
        return document_bytes(_KIND, {name: one for name, one in asdict(self).items() if name not in _OPTIONAL or one})

    @classmethod
    def from_bytes(cls, data: ReadBuffer, source: str) -> ColumnDocument:
        """Parse the output of :meth:`to_bytes`; members unknown to this release are ignored.

        Raises:
            IndexFormatError: The document is damaged, of another kind, or of a newer major version.
        """
        try:
            content = document_of_kind(data, _KIND)
            document = cls(**{name: content[name] for name in cls.__dataclass_fields__ if name in content})
            type_named(document.type)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise IndexFormatError(
                f"{redact(source)}: not the document of a late column that this release reads ({error}); {ADD_AGAIN}"
            ) from error
        return document


@dataclass(frozen=True, kw_only=True)
class LateColumn:
    """A late column of a dataset, whose shards may have several indexes.

    Attributes:
        name: Name of the column.
        documents: Its metadata by directory of the index.
    """

    name: str
    documents: Mapping[str, ColumnDocument]

    @cached_property
    def version(self) -> str:
        """Distinguishes the column from every other one of this name."""
        versions = [document.column_version for document in self.documents.values()]
        return versions[0] if len(versions) == 1 else hashlib.sha256("\n".join(versions).encode()).hexdigest()[:16]

    @property
    def type(self) -> str:
        """Arrow's name of the values' type, in the first index."""
        return next(iter(self.documents.values())).type


def homes_of(urls: Sequence[str], index: str | None) -> list[str]:
    """Return the directories that hold the indexes of some shards."""
    if index is not None:
        return [index]
    # Shards are many and directories few: one URL of each is looked at. A query may hold slashes of its own.
    one_of_each = {url if "?" in url else url.rpartition("/")[0]: url for url in urls}
    return list(dict.fromkeys(home_of(url, None) for url in one_of_each.values()))


def find_columns(storage: Storage, homes: Sequence[str], names: Iterable[str]) -> dict[str, LateColumn]:
    """Return the late columns among ``names``.

    Raises:
        IndexMismatchError: A column exists for only some of the shards' directories.
    """
    wanted = [(name, home) for name in sorted(set(names)) if _is_name(name) for home in homes]
    documents = on_threads(lambda one: _document(storage, *one), wanted, _REQUESTS, name="shardstream-columns")
    found: dict[str, dict[str, ColumnDocument]] = {}
    for (name, home), document in zip(wanted, documents, strict=True):
        if document is not None:
            found.setdefault(name, {})[home] = document
    for name, there in found.items():
        lacking = [home for home in homes if home not in there]
        if lacking:
            raise IndexMismatchError(
                f"column {name!r} is missing in {redact(lacking[0])} (in {len(lacking)} of {len(homes)} directories), "
                f"but present in {redact(next(iter(there)))}. Add it to all of them: shard_tools column add URL… "
                f"{shell_word(name)} --from FILE --on KEY"
            )
    return {name: LateColumn(name=name, documents=there) for name, there in found.items()}


def _is_name(name: str) -> bool:
    try:
        checked_name(name, "column")
    except ValueError:
        return False
    return True


def _document(storage: Storage, name: str, home: str) -> ColumnDocument | None:
    url = join_url(home, column_document_path(name))
    try:
        return storage.read_parsed(url, ColumnDocument.from_bytes, is_sealed)
    except NotFoundError:
        return None


def list_columns(storage: Storage, home: str) -> list[ColumnDocument]:
    """Return all late columns beside one index, sorted by name."""
    below = home.rstrip("/") + "/" if home else ""
    paths = (info.url.removeprefix(below) for info in storage.list(join_url(home, columns_directory())))
    names = [name for name in map(column_of_document_path, paths) if name is not None]
    found = (_document(storage, name, home) for name in sorted(names))
    return [document for document in found if document is not None]


def read_values(storage: Storage, url: str, index: str | None, rows: ChunkTable, column: LateColumn) -> Values:
    """Return the values of a late column for the shard at ``url``.

    Args:
        storage: Store of the column.
        url: The shard.
        index: Location of the index, if not beside the shard.
        rows: The chunk table of this shard alone.
        column: The column.

    Raises:
        IndexMismatchError: This shard has no values, or values of another version of the shard or column.
    """
    home = home_of(url, index)
    name = shard_name(url, index)
    source = join_url(home, column_path(column.name, name))
    again = f"rerun the command that added it: shard_tools column add {shell_place(home)} {shell_word(column.name)} …"
    try:
        values, facts = storage.read_parsed(source, read_column, is_sealed)
    except NotFoundError as error:
        raise IndexMismatchError(
            f"column {column.name!r} has no values for shard {redact(url)}, which was added after it; {again}"
        ) from error
    if facts["fingerprint"] != rows.fingerprint:
        raise IndexMismatchError(
            f"column {column.name!r}: its values for shard {redact(url)} belong to another shard, which was in its "
            f"place when the column was added; {again}"
        )
    if facts["column_version"] != column.documents[home].column_version:
        raise IndexMismatchError(
            f"column {column.name!r}: its values for shard {redact(url)} are of another version "
            f"({facts['column_version']}) than the column ({column.documents[home].column_version}): adding it again "
            f"was interrupted; {again}"
        )
    return values


def documents_as_json(columns: Mapping[str, LateColumn]) -> dict[str, Any]:
    """Return late columns as JSON-serializable values, to send to other ranks."""
    return {
        name: {home: document.to_bytes().decode() for home, document in column.documents.items()}
        for name, column in columns.items()
    }


def documents_of_json(content: Mapping[str, Mapping[str, str]]) -> dict[str, LateColumn]:
    """Parse the output of :func:`documents_as_json`."""
    return {
        name: LateColumn(
            name=name,
            documents={home: ColumnDocument.from_bytes(text.encode(), home) for home, text in documents.items()},
        )
        for name, documents in content.items()
    }
