"""Know which shards at a copy's target are right already, by what an earlier copy noted of them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from shard_tools.change.sets.target import TargetContents
from streaming.errors import AccessDeniedError, IndexFormatError, NotFoundError
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.files import is_sealed, read_document, write_document
from streaming.shards.index.layout import COPIED_FILES, INDEX_DIRECTORY
from streaming.storage import Storage, join_url, split_url

CHECKS = ("recorded", "full")
"""``recorded``: a shard that a copy noted, and that is the same since, is right; ``full``: all are read."""
_FORMAT, _PREFIX = "shardstream-copied", COPIED_FILES.rpartition("/")[2]
_SHARE = 16  # the note is written when this part of its shards is new


class BroughtShard(Protocol):
    """A shard of a copy."""

    @property
    def target(self) -> str:
        """Its URL at the target."""

    @property
    def chunks(self) -> ChunkTable:
        """Its rows of the chunk table."""


def _digest(chunks: ChunkTable) -> str:
    """Return a digest of the content of a shard: the places of its chunks, and their checksums."""
    found = hashlib.sha256()
    for column in (chunks.byte_start, chunks.byte_end, chunks.crc32c):
        found.update(column.tobytes())
    return found.hexdigest()[:32]


@dataclass(slots=True, kw_only=True)
class CopyNote:
    """The shards that a copy has brought or found, with the version that the target's store gives each.

    It lies beside the shards, is written as the copy goes, and is read by those that come after. Used by one thread.

    Attributes:
        url: Where it is.
        base: The copy's target, below which all shards are.
        here: The store of the target.
        entries: Version and digest by name below ``base``.
    """

    url: str
    base: str
    here: Storage
    entries: dict[str, tuple[str, str]] = field(default_factory=dict)
    _num_new: int = 0

    @classmethod
    def of(cls, base: str, directory: str, writer: str, here: Storage) -> CopyNote:
        """Return the note of a copy to ``base``, in a directory of shards, of this ``writer``."""
        return cls(url=join_url(directory, f"{COPIED_FILES}{writer}.json"), base=base, here=here)

    def earlier(self) -> dict[str, str]:
        """Return the shards that earlier runs of this copy noted: their versions by URL."""
        return {join_url(self.base, name): version for name, (version, _) in _read(self.url, self.here).items()}

    def keep(self, urls: Collection[str]) -> None:
        """Keep the entries of earlier runs for these shards, which the source has no longer, until :meth:`forget`."""
        there = _read(self.url, self.here) if urls else {}
        self.entries |= {name: one for name, one in there.items() if join_url(self.base, name) in urls}

    def forget(self, urls: Collection[str]) -> None:
        """Drop the entries of shards that are deleted, and write the note."""
        left = {name: one for name, one in self.entries.items() if join_url(self.base, name) not in urls}
        self._num_new += len(self.entries) - len(left)
        self.entries = left
        self.write()

    def add(self, shard: BroughtShard, version: str | None, *, is_new: bool = True) -> None:
        """Note a shard that is right; from time to time, write the note."""
        if version is None:
            return
        self.entries[_name(shard, self.base)] = version, _digest(shard.chunks)
        self._num_new += is_new
        if self._num_new > max(1, len(self.entries) // _SHARE):
            self.write()

    def write(self) -> None:
        """Write the note if it has new entries."""
        if self._num_new:
            self.here.put(self.url, write_document({"format": _FORMAT, "shards": self.entries}))
            self._num_new = 0


def _name(shard: BroughtShard, base: str) -> str:
    return shard.target.removeprefix(base.rstrip("/") + "/")


def recorded(shards: Iterable[BroughtShard], base: str, contents: TargetContents, here: Storage) -> set[str]:
    """Return the targets that a copy has noted with these checksums, and whose version in the store is the same."""
    noted = dict[str, tuple[str, str]]()
    for url in contents.sizes:
        directory, name = split_url(url)
        if name.startswith(_PREFIX) and directory.endswith(INDEX_DIRECTORY):
            noted |= _read(url, here)
    versions = contents.versions
    return {
        shard.target
        for shard in shards
        if noted.get(_name(shard, base)) == (versions.get(shard.target), _digest(shard.chunks))
    }


def _read(url: str, here: Storage) -> dict[str, tuple[str, str]]:
    """Return the entries of a note; none of one that cannot be read, so that shards are read instead."""
    try:
        return here.read_parsed(url, lambda data, _: _parsed(data), is_sealed)
    except (AccessDeniedError, NotFoundError, IndexFormatError):  # many stores deny access to a missing file
        return {}


def _parsed(data: Any) -> dict[str, tuple[str, str]]:
    try:
        content = read_document(data)
        return {str(name): (str(version), str(digest)) for name, (version, digest) in content["shards"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise IndexFormatError(f"not a note of a copy ({error})") from error
