"""Publish versions of a set: one conditional write of its chunk table, which alone says what the set is.

Shards are written once, under names that no other change uses, and are no part of the set until the table lists them.
So readers see the version before or the one after, and of two writers that began with one version one wins.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from streaming.errors import (
    AccessDeniedError,
    IndexMissingError,
    NotFoundError,
    ShardstreamError,
    StorageError,
    shell_place,
)
from streaming.shards.index.chunk_table import KIND, ChunkTable, VersionFacts
from streaming.shards.index.files import content_errors, damaged, is_sealed, read_facts
from streaming.shards.index.layout import SCHEMA_FILE, chunks_path, version_path
from streaming.shards.schema.value import Schema, is_copy
from streaming.shards.versions.current import noticing_loss
from streaming.storage import ChangedError, ReadBuffer, Storage, join_url, redact

_log = logging.getLogger(__name__)


class OvertakenError(ShardstreamError):
    """Somebody else has published another version of the set meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The current version of a set, as it was read.

    Attributes:
        home: The directory.
        table: Its chunk table.
        schema: What it means.
        seen: What the store says of the version of the chunk table's file.
        data: The bytes of that file.
    """

    home: str
    table: ChunkTable
    schema: Schema
    seen: str | None
    data: bytes

    @property
    def lives(self) -> bool:
        """Whether its chunk table alone says what the set is."""
        return self.table.version is not None

    @property
    def number(self) -> int:
        """Number of the version; 1 of a set that does not live yet."""
        return 1 if self.table.version is None else self.table.version.number

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the lists of inputs of what was appended."""
        return () if self.table.version is None else self.table.version.inputs

    @property
    def records(self) -> int:
        """Number of the next record, where keys are numbers; 0: nothing was appended yet."""
        return 0 if self.table.version is None else self.table.version.records


def read_head(storage: Storage, home: str) -> Head:
    """Return the current version of the set in a directory.

    Raises:
        IndexMissingError: There is no index.
        IndexMismatchError: The set has versions, and its chunk table is missing or damaged.
        IndexFormatError: It is damaged, or too new.
    """
    url = join_url(home, chunks_path())
    try:
        with noticing_loss(storage, home):
            seen = storage.info(url).version  # before the bytes: if they are newer, nothing can be published
            table, data = storage.read_parsed(url, _table_and_bytes, is_sealed)
    except NotFoundError as error:
        raise IndexMissingError(
            f"{redact(home)}: no set with an index is there ({redact(url)} is missing); name the directory of the "
            f"shards, or index them: shard_tools index {shell_place(home)}"
        ) from error
    return Head(home=home, table=table, schema=schema_of(storage, home, table), seen=seen, data=data)


def _table_and_bytes(data: ReadBuffer, source: str) -> tuple[ChunkTable, bytes]:
    return ChunkTable.from_parquet(data, source), bytes(data)


def schema_of(storage: Storage, home: str, table: ChunkTable | None = None) -> Schema:
    """Return what a set means: of one that lives, what its chunk table says.

    Args:
        storage: The store.
        home: The directory of the index.
        table: Its chunk table, if it is known.

    Raises:
        IndexFormatError: What says it is damaged.
    """
    url = join_url(home, SCHEMA_FILE)
    if table is not None and table.version is not None:
        return _schema_in(table.version, home)
    try:
        schema, copies = storage.read_parsed(url, _schema_and_kind, is_sealed)
    except (NotFoundError, AccessDeniedError):  # S3 says the latter of what is not there, to who may not list
        return Schema()
    if copies and table is None:
        version = _version_of(storage, home)
        return schema if version is None else _schema_in(version, home)
    return schema


def _schema_in(version: VersionFacts, home: str) -> Schema:
    source = redact(join_url(home, chunks_path()))
    try:
        with content_errors(source, "what it says of the schema"):
            return Schema.from_dict(version.schema)
    except AttributeError as error:
        raise damaged(source, str(error)) from error


def _schema_and_kind(data: ReadBuffer, source: str) -> tuple[Schema, bool]:
    return Schema.from_bytes(data, source), is_copy(data)


def _version_of(storage: Storage, home: str) -> VersionFacts | None:
    """Return what the footer of a chunk table says of its version."""

    def parsed(data: ReadBuffer, source: str) -> VersionFacts | None:
        facts = read_facts(data, KIND, source, whole=True)
        with content_errors(source, "not a chunk table"):
            return VersionFacts.of_facts(facts)

    try:
        with noticing_loss(storage, home):
            return storage.read_parsed(join_url(home, chunks_path()), parsed, is_sealed)
    except NotFoundError:
        return None


def revive(storage: Storage, head: Head) -> Head:
    """Return the same version of a set, which lives from now on: its chunk table says so and what the set means.

    The copy in ``versions/`` comes first: by it, listings tell that shards count only if the table lists them.

    Raises:
        OvertakenError: Somebody else changed the set meanwhile.
    """
    if head.lives:
        return head
    said = _SchemaFile.read(storage, head.home)
    if said.schema != head.schema:
        raise _overtaken(head)
    table = replace(head.table, version=VersionFacts(number=1, schema=head.schema.as_dict()))
    data = table.to_parquet()
    try:  # who changes what a set means that does not live replaces this file, too
        said.replace(storage, head.schema.to_bytes(lives=True))
    except ChangedError as error:
        raise _overtaken(head) from error
    storage.put(join_url(head.home, version_path("1")), data)
    _replace(storage, head, data)
    found = read_head(storage, head.home)
    if found.data != data:
        raise _overtaken(head)
    return found


def publish(
    storage: Storage, head: Head, table: ChunkTable, *, schema: Schema | None = None, inputs: tuple[str, ...] = (),
    records: int | None = None,
) -> int:  # fmt: skip
    """Publish the next version of a set that lives, all that it lists being written already; return its number.

    Args:
        storage: The store.
        head: The version that it follows.
        table: Its chunk table.
        schema: What it means; None: as before.
        inputs: Names of further lists of inputs.
        records: Number of the next record; None: as before.

    Raises:
        OvertakenError: Somebody else published a version after ``head`` was read.
    """
    schema = head.schema if schema is None else schema
    facts = VersionFacts(
        number=head.number + 1, schema=schema.as_dict(), inputs=(*head.inputs, *inputs),
        records=head.records if records is None else records,
    )  # fmt: skip
    table = replace(table, version=facts)
    data = table.to_parquet()
    _refuse_overtaken(storage, head, data)  # before it brings back a version that is pruned
    storage.put(join_url(head.home, version_path(str(head.number))), head.data)  # all writers write the same bytes
    _replace(storage, head, data)
    try:
        storage.put(join_url(head.home, SCHEMA_FILE), schema.to_bytes(lives=True))
    except (StorageError, OSError) as error:  # the version is published, and the table says what it means
        _log.warning("%s: the copy of the schema of version %d is not written: %s", redact(head.home),
                     facts.number, error)  # fmt: skip
    return facts.number


def _refuse_overtaken(storage: Storage, head: Head, data: bytes) -> None:
    """Refuse to publish after somebody else has, unless that was another run of the same change.

    Raises:
        OvertakenError: Somebody else has.
    """
    url = join_url(head.home, chunks_path())
    is_changed = head.seen is not None and storage.info(url).version != head.seen
    if is_changed and bytes(storage.read(url)) not in (head.data, data):
        raise _overtaken(head)


def _replace(storage: Storage, head: Head, data: bytes) -> None:
    try:
        _put_over(storage, join_url(head.home, chunks_path()), data, head.seen, head.data)
    except ChangedError as error:
        raise _overtaken(head) from error


def _put_over(storage: Storage, url: str, data: bytes, seen: str | None, before: bytes | None) -> None:
    """Replace a file that was read as ``before``, with the version ``seen``; None: there was none.

    Raises:
        ChangedError: It is another one now.
    """
    if before is None or seen is not None:
        storage.put_if(url, data, seen)
        return
    if bytes(storage.read(url)) != before:  # of a store that tells no versions, the bytes are compared
        raise ChangedError(f"writing {redact(url)}: somebody else has written it meanwhile; nothing was replaced")
    storage.put(url, data)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SchemaFile:
    """What ``schema.json`` says, as it was read.

    Attributes:
        url: Where it is.
        schema: What it says.
        is_copy: Whether it says that the chunk table counts.
        seen: What the store says of its version.
        data: Its bytes; None: there is none.
    """

    url: str
    schema: Schema
    is_copy: bool
    seen: str | None
    data: bytes | None

    @classmethod
    def read(cls, storage: Storage, home: str) -> _SchemaFile:
        """Read it.

        Raises:
            IndexFormatError: It is damaged.
        """
        url = join_url(home, SCHEMA_FILE)
        try:
            seen = storage.info(url).version  # before the bytes: if they are newer, they are not replaced
            (schema, copies), data = storage.read_parsed(
                url, lambda data, source: (_schema_and_kind(data, source), bytes(data)), is_sealed
            )
        except (NotFoundError, AccessDeniedError):  # S3 says the latter of what is not there, to who may not list
            return cls(url=url, schema=Schema(), is_copy=False, seen=None, data=None)
        return cls(url=url, schema=schema, is_copy=copies, seen=seen, data=data)

    def replace(self, storage: Storage, data: bytes) -> None:
        """Write other bytes.

        Raises:
            ChangedError: Somebody else has written it meanwhile.
        """
        _put_over(storage, self.url, data, self.seen, self.data)


def _overtaken(head: Head) -> OvertakenError:
    return OvertakenError(
        f"{redact(head.home)}: somebody else has changed this set since version {head.number} was read; nothing of "
        "this change is in it. Run the same command again: it begins with what is there now"
    )


def write_index(
    storage: Storage, home: str, table: ChunkTable, before: ChunkTable | None, schema: Schema | None = None
) -> None:  # fmt: skip
    """Write the chunk table of a directory, and first what the set means; of a set that lives, as its next version.

    Args:
        storage: The store.
        home: The directory of the index.
        table: The table.
        before: The table that it was made of.
        schema: What the set means; None: as before.

    Raises:
        OvertakenError: The set lives, and somebody else changed it since ``before`` was read.
    """
    if before is None or before.version is None:
        if schema:  # first: readers of the shards know what they mean
            storage.put(join_url(home, SCHEMA_FILE), schema.to_bytes())
        storage.put(join_url(home, chunks_path()), table.to_parquet())
        return
    head = read_head(storage, home)
    if head.table.version != before.version:
        raise _overtaken(head)
    publish(storage, head, table, schema=schema)


def change_schema(storage: Storage, home: str, schema: Schema) -> int:
    """Write what a set means that is there already; of one that lives, as its next version.

    One that somebody has begun to let live counts as such, for else one of both changes would be lost unseen.

    Returns:
        Number of the version that means this; 0 of a set that does not live.

    Raises:
        OvertakenError: Somebody else changed the set meanwhile.
    """
    said = _SchemaFile.read(storage, home)
    if not said.is_copy:
        try:
            said.replace(storage, schema.to_bytes())
        except ChangedError as error:
            raise OvertakenError(
                f"{redact(home)}: somebody else has changed what this set means meanwhile; nothing of this change is "
                "in it. Run the same command again: it begins with what is there now"
            ) from error
        return 0
    head = revive(storage, read_head(storage, home))  # else its first version would mean what later ones do
    return head.number if head.schema == schema else publish(storage, head, head.table, schema=schema)
