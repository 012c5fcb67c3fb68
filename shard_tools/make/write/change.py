"""Change a set that is there: new shards under names of their own, then one publication, or nothing.

A note in ``_shardstream/pending/`` says which shards belong to a change that is not published yet, so that nobody takes
them for leftovers; it goes when the change is published or given up. A run that was killed leaves it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self
from uuid import uuid4

from streaming.errors import ConfigError, ShardstreamError, StorageError, UnfinishedError, shell_place
from streaming.shards.catalog.unfinished import FINISHED
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.files import is_sealed, read_document, write_document
from streaming.shards.index.layout import (
    PENDING_DIRECTORY,
    UNFINISHED_FILE,
    column_path,
    inputs_path,
    new_version_name,
    pending_path,
    samples_path,
    without_work,
    work_of,
)
from streaming.shards.schema.joined import SchemaConflict, joined
from streaming.shards.schema.meeting import RESHARD, met
from streaming.shards.schema.value import Schema
from streaming.shards.versions.history import kept_versions
from streaming.shards.versions.publish import Head, OvertakenError, publish, read_head, revive
from streaming.storage import Storage, join_url, redact, redact_text

_FORMAT, _VERSION = "shardstream-pending", 1
_log = logging.getLogger(__name__)


def next_number(names: Iterable[str], stem: str, suffix: str) -> int:
    """Return the number of the next shard of a set, given the names of its shards, and what is around their numbers."""
    rest = suffix.removesuffix(".tar")
    plain = [without_work(name).removesuffix(".tar") for name in names]
    around = [name for name in plain if name.startswith(stem) and name.endswith(rest)]
    middle = [name.removeprefix(stem).removesuffix(rest) for name in around]
    return max((int(one) for one in middle if one.isascii() and one.isdecimal()), default=-1) + 1


def open_head(storage: Storage, home: str) -> Head:
    """Return the current version of a set that is to be changed.

    Raises:
        UnfinishedError: The set is not whole.
        IndexMissingError: There is none, or no index.
    """
    url = join_url(home, UNFINISHED_FILE)
    if storage.exists(url) and bytes(storage.read(url)) != FINISHED:
        raise UnfinishedError(
            f"{redact(home)} is not whole: it is still being written, or that was interrupted. Run the command again "
            f"that wrote it; `shard_tools info {shell_place(home)}` says which"
        )
    return read_head(storage, home)


def with_added(head: Head, meaning: Schema) -> Schema:
    """Return what a set means together with what is added to it.

    Raises:
        ConfigError: They contradict each other.
    """
    sets = {f"the set in {redact(head.home)}": head.schema, "what is added": meaning}
    for name, one in head.schema.tokens.items():
        dtype = meaning.fields[name].dtype if name in meaning.fields else ""
        if dtype not in {"", one.dtype}:
            raise ConfigError(
                f"field {name!r}: dtype is {one.dtype!r} in {redact(head.home)}, but {dtype!r} in what is added, and "
                f"the tokens of a set have one width; {RESHARD}"
            )
    both = joined(sets)
    if isinstance(both, SchemaConflict):
        return met(sets, cure="Add what means the same, or write it to a directory of its own").schema
    return both


def work_note(command: str, what: str, **more: object) -> bytes:
    """Return a note of work that is not published yet, as a file in ``pending/``."""
    return write_document(
        {"format": _FORMAT, "version": _VERSION, "command": command, "what": redact_text(what), **more}
    )


class SetChange:
    """One change of a set: entered, it begins; left by an error, it takes back what it has written.

    Its shards have names that end with ``-vWORK.tar``, where WORK follows from the version that it begins with and from
    what it does. So a run after one that was killed writes the same files, and no other change does. A run that finds
    the note of an earlier run, or whose note another run has replaced, takes nothing back: that run may be alive, and
    about to publish the same files.

    Args:
        storage: The store.
        head: The version that it begins with.
        command: The command.
        what: What it adds or leaves out, for people.
        identity: JSON-able; everything that, besides ``head``, determines what it writes.

    Attributes:
        head: The version that it begins with.
        work: See above.
    """

    def __init__(self, storage: Storage, head: Head, *, command: str, what: str, identity: object) -> None:
        self._storage, self.head = storage, head
        parts = [head.number, head.table.fingerprint, command, identity]
        self.work = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:8]
        self._note = work_note(command, what, run=uuid4().hex, begins=head.number)
        self._is_alone = True
        self._names: list[str] = []

    def __enter__(self) -> Self:
        """Let the set live, if it does not yet, and note the change.

        Raises:
            OvertakenError: Somebody else changed the set meanwhile.
        """
        self.head = revive(self._storage, self.head)
        self._is_alone = not self._storage.exists(self._url)
        self._storage.put(self._url, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Forget the change; if it failed, delete what it has written, unless another run of it may need that."""
        if kind is not None and not issubclass(kind, Exception):
            return  # a run that is stopped can be gone on with
        with suppress(ShardstreamError, OSError):
            if kind is not None:
                if not (self._is_alone and bytes(self._storage.read(self._url)) == self._note):
                    return
                self._take_back()
            self._storage.delete(self._url)

    def named(self, name: str) -> str:
        """Return a name, or a pattern of names, as this change writes it: ``7.tar`` as ``7-v1a2b3c4d.tar``."""
        return f"{name.removesuffix('.tar')}-v{self.work}.tar"

    def writes(self, names: Iterable[str]) -> None:
        """Note the names of shards that it writes."""
        self._names += names

    def new_name(self, name: str) -> str:
        """Return the name of the shard that takes the place of another one, and note it."""
        new = new_version_name(name, self.work, self._names)
        self._names.append(new)
        return new

    def publish(
        self, table: ChunkTable, *, schema: Schema | None = None, inputs: tuple[str, ...] = (),
        records: int | None = None,
    ) -> int:  # fmt: skip
        """Publish the set as the change leaves it; return the number of the version.

        Raises:
            OvertakenError: Somebody else published meanwhile, or gave up this change.
        """
        if not self._storage.exists(self._url):
            raise OvertakenError(
                f"{redact(self.head.home)}: this change was given up meanwhile (version prune --abandon {self.work}), "
                "and what it wrote may be gone; run the same command again"
            )
        return publish(self._storage, self.head, table, schema=schema, inputs=inputs, records=records)

    @property
    def _url(self) -> str:
        return join_url(self.head.home, pending_path(self.work))

    def _take_back(self) -> None:
        home = self.head.home
        tables = [read_head(self._storage, home).table, *(one.table for one in kept_versions(self._storage, home))]
        held = {shard.name for table in tables for shard in table.shards}
        with suppress(StorageError):  # what was begun is not noted yet; a store may list nothing
            below = join_url(home, "")
            self._names += [
                name for name in (info.url.removeprefix(below) for info in self._storage.list(home))
                if work_of(name) == self.work
            ]  # fmt: skip
        if held.isdisjoint(self._names):
            self._storage.delete(join_url(home, inputs_path(self.work)))
        for name in {*self._names} - held:
            for url in files_of(home, name, self.head.schema):
                self._storage.delete(url)


def files_of(home: str, name: str, schema: Schema) -> list[str]:
    """Return the URLs of a shard and of what belongs to it; the shard comes first."""
    late = [column_path(column, name) for column, one in schema.columns.items() if one.is_late]
    return [join_url(home, path) for path in (name, samples_path(name), *late)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """The note of a change that may not be published.

    Attributes:
        words: What it does.
        begins: Number of the version that it begins with; None: unknown.
    """

    words: str
    begins: int | None = None

    def may_publish(self, number: int) -> bool:
        """Return whether the change can still publish, while the current version has this number."""
        return self.begins is None or self.begins >= number


def pending(storage: Storage, home: str) -> dict[str, Pending]:
    """Return the notes of changes of a set, by the name of the change."""
    below = join_url(home, PENDING_DIRECTORY, "")
    found = {}
    for info in storage.list(below):
        one = Pending(words="a change")
        with suppress(ShardstreamError, ValueError, TypeError, KeyError):
            note = storage.read_parsed(info.url, lambda data, _: read_document(data), is_sealed)
            begins = note.get("begins")
            one = Pending(
                words=f"{note['command']} ({note['what']})", begins=begins if isinstance(begins, int) else None
            )
        found[info.url.removeprefix(below).removesuffix(".json")] = one
    return found
