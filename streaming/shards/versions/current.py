"""Read the chunk table that says what a set is now.

A set that lives cannot do without it: no other file says which of the shards in its directory belong to the current
version. So if it is lost, nothing falls back to the shards that are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from streaming.errors import IndexFormatError, IndexMismatchError, NotFoundError, StorageError
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.files import is_sealed
from streaming.shards.index.layout import VERSIONS_DIRECTORY, chunks_path, version_path
from streaming.storage import Storage, join_url, redact


def read_table(storage: Storage, url: str) -> ChunkTable:
    """Return the chunk table in a file.

    Raises:
        NotFoundError: There is none.
        IndexFormatError: It is damaged, or too new.
    """
    return storage.read_parsed(url, ChunkTable.from_parquet, is_sealed)


def version_names(storage: Storage, home: str) -> list[str]:
    """Return the names of all versions that are kept, numbers first; of a store that lists nothing, none."""
    below = join_url(home, VERSIONS_DIRECTORY, "")
    try:
        found = [info.url.removeprefix(below).removesuffix(".parquet") for info in storage.list(below)]
    except StorageError:
        return []
    return sorted(found, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name))


def read_current(storage: Storage, home: str) -> ChunkTable:
    """Return the chunk table of the current version of the set in a directory.

    Raises:
        NotFoundError: There is no chunk table, and there are no versions.
        IndexMismatchError: There are versions, and their chunk table is missing or damaged.
        IndexFormatError: It is damaged, or too new.
    """
    with noticing_loss(storage, home):
        return read_table(storage, join_url(home, chunks_path()))


@contextmanager
def noticing_loss(storage: Storage, home: str) -> Iterator[None]:
    """Read the chunk table of the set in a directory within this context; say so if it is lost, and with it the set.

    Raises:
        IndexMismatchError: It cannot be read, and the set has versions. Other sets, and tables that are only too new,
            keep their error.
    """
    try:
        yield
    except (NotFoundError, IndexFormatError) as error:
        lost = _lost_table(storage, home, error)
        if lost is None:
            raise
        raise lost from error


def _lost_table(
    storage: Storage, home: str, error: NotFoundError | IndexFormatError
) -> IndexMismatchError | None:  # fmt: skip
    """Return the error for a set with versions whose chunk table cannot be read; None for other sets."""
    url = join_url(home, chunks_path())
    names = version_names(storage, home)
    is_missing = isinstance(error, NotFoundError)
    if not names or not (is_missing or not is_sealed(storage.read(url))):
        return None
    last = max((name for name in names if name.isdecimal()), key=int, default=names[-1])
    version = f"version {last}" if last.isdecimal() else repr(last)
    return IndexMismatchError(
        f"{redact(url)}: {'missing' if is_missing else 'damaged'}, and the set has versions: no other file says which "
        "shards there belong to the current one, and reading all would bring back deleted samples. Restore this file "
        f"from a backup; or put a copy of {version_path(last)} in its place: {version} is the current one again, and "
        "changes after it, such as deletions, must be made again"
    )
