"""Tag, list, show and compare the versions of a set: the command ``version``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import pyarrow as pa

from shard_tools.change.life.delete import keys_of
from shard_tools.change.sets.open_set import READ_THREADS
from shard_tools.make.write.change import open_head, pending
from shard_tools.running.report import Report
from streaming.common.threads import map_threads
from streaming.errors import ConfigError
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.schema.value import Schema
from streaming.shards.versions.history import VersionName, kept_versions, number_of, read_version
from streaming.shards.versions.history import tag as keep
from streaming.shards.versions.publish import Head, revive, schema_of
from streaming.storage import Storage, redact

_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionReport(Report):
    """One version of a set.

    Attributes:
        target: The set.
        number: Its number.
        names: Its tags.
        is_current: Whether it is the current one.
        num_samples: Number of its samples.
        num_shards: Number of its shards.
        num_bytes: Total size of these shards.
        fingerprint: Digest of the bytes of all its samples.
        classes: Names of classes in the order of their numbers, by field.
        columns: Types of its columns by name.
    """

    target: str
    number: int
    names: tuple[str, ...]
    is_current: bool
    num_samples: int
    num_shards: int
    num_bytes: int
    fingerprint: str
    classes: dict[str, tuple[str, ...]]
    columns: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryReport(Report):
    """The versions of a set, and its unpublished changes.

    Attributes:
        target: The set.
        versions: The versions that can be opened, oldest first; the last one is the current version.
        pending: Changes that are running or were killed: their descriptions by name.
    """

    target: str
    versions: tuple[VersionReport, ...]
    pending: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionDiff(Report):
    """The difference between two versions.

    Attributes:
        target: The set.
        old: Number of the older version.
        new: Number of the newer one.
        num_added: Number of samples, by key, that only the newer one has.
        num_removed: Number of samples, by key, that only the older one has.
        first_added: The first keys added.
        first_removed: The first keys removed.
        shards_added: Shards that only the newer one has.
        shards_removed: Shards that only the older one has.
        num_same: Number of samples in shards that both have.
        schema: Differences between their schemas, as text.
    """

    target: str
    old: int
    new: int
    num_added: int
    num_removed: int
    first_added: tuple[str, ...]
    first_removed: tuple[str, ...]
    shards_added: tuple[str, ...]
    shards_removed: tuple[str, ...]
    num_same: int
    schema: tuple[str, ...]


def tag(home: str, name: str, *, storage: Storage, version: VersionName = None) -> VersionReport:
    """Tag a version of the set in ``home``, so that it is kept under this name.

    Args:
        home: Directory of the set.
        name: The name.
        storage: The store.
        version: Number or name of the version; None: the current one.

    Raises:
        ConfigError: Another version has this name, or there is no such version.
        OvertakenError: Another change of the set was published meanwhile.
    """
    head = revive(storage, open_head(storage, home))
    table = None if version in {None, head.number} else _version(storage, head, version)
    keep(storage, head, name, table)
    return show(home, name, storage=storage)


def history(home: str, *, storage: Storage) -> HistoryReport:
    """Return all versions of the set in ``home``."""
    head = open_head(storage, home)
    kept = kept_versions(storage, home)
    tables = {one.number: one.table for one in kept} | {head.number: head.table}
    names = {number: tuple(one.name for one in kept if one.is_tag and one.number == number) for number in tables}
    versions = [_report(storage, head, table, names[number]) for number, table in sorted(tables.items())]
    waits = {
        work: one.words for work, one in pending(storage, home).items() if one.may_publish(head.number)
    }  # fmt: skip
    return HistoryReport(target=redact(home), versions=tuple(versions), pending=waits)


def show(home: str, version: VersionName, *, storage: Storage) -> VersionReport:
    """Return the report of a version; None: the current one."""
    head = open_head(storage, home)
    table = _version(storage, head, version)
    names = (one.name for one in kept_versions(storage, home) if one.is_tag and one.number == number_of(table))
    return _report(storage, head, table, tuple(names))


def compare(home: str, old: VersionName, new: VersionName, *, storage: Storage) -> VersionDiff:
    """Return the difference between two versions, by the keys in the shards that only one of them has.

    Raises:
        IndexMissingError: One of these shards has no sample table.
    """
    head = open_head(storage, home)
    before, after = _version(storage, head, old), _version(storage, head, new)
    there, here = ({shard.name for shard in table.shards} for table in (before, after))
    removed, added = _keys(storage, home, before, there - here), _keys(storage, home, after, here - there)
    gone, fresh = removed - added, added - removed
    return VersionDiff(
        target=redact(home), old=number_of(before), new=number_of(after), num_added=fresh.total(),
        num_removed=gone.total(), first_added=tuple(sorted(fresh)[:_SHOWN]), first_removed=tuple(sorted(gone)[:_SHOWN]),
        shards_added=tuple(sorted(here - there)), shards_removed=tuple(sorted(there - here)),
        num_same=sum(shard.num_samples for shard in after.shards if shard.name in there),
        schema=tuple(_unlike(schema_of(storage, home, before), schema_of(storage, home, after))),
    )  # fmt: skip


def _version(storage: Storage, head: Head, version: VersionName) -> ChunkTable:
    return head.table if version in {None, head.number} else read_version(storage, head.home, _named(version))


def _named(version: VersionName) -> int | str:
    if version is None:
        raise ConfigError("version: expected a number or a name")
    return version


def _report(storage: Storage, head: Head, table: ChunkTable, names: tuple[str, ...]) -> VersionReport:
    schema = schema_of(storage, head.home, table)
    return VersionReport(
        target=redact(head.home), number=number_of(table), names=names, is_current=number_of(table) == head.number,
        num_samples=table.total_samples, num_shards=len(table.shards),
        num_bytes=sum(shard.size_bytes for shard in table.shards), fingerprint=table.fingerprint,
        classes=schema.classes, columns={name: one.type for name, one in schema.columns.items()},
    )  # fmt: skip


def _keys(storage: Storage, home: str, table: ChunkTable, names: Collection[str]) -> Counter[str]:
    """Count the keys of some shards of a version."""
    head = Head(home=home, table=table, schema=Schema(), seen=None, data=b"")
    numbers = [number for number, shard in enumerate(table.shards) if shard.name in names]
    found = map_threads(partial(keys_of, storage, head), numbers, READ_THREADS)
    texts = (values.cast(pa.binary()).to_pylist() for values in found)
    return Counter(key.decode("utf-8", "surrogateescape") for key in chain.from_iterable(texts))


def _unlike(old: Schema, new: Schema) -> Sequence[str]:
    """Return a line for each field or column that the two schemas describe differently."""
    told = []
    for what, before, after in (("field", old.fields, new.fields), ("column", old.columns, new.columns)):
        for name in sorted({*before, *after}):
            if before.get(name) != after.get(name):
                how = "is new" if name not in before else "is gone" if name not in after else "differs"
                told.append(f"{what} {name!r} {how}{_classes_added(before.get(name), after.get(name))}")
    return told


def _classes_added(before: object, after: object) -> str:
    known, now = getattr(before, "classes", ()), getattr(after, "classes", ())
    more = [name for name in now if name not in known]
    return f": new classes {', '.join(more[:_SHOWN])}" if before is not None and more else ""
