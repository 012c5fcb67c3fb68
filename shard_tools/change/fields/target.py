"""Add a late field to a set: what is written already, what is missing, and the publication at the end."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

from shard_tools.change.fields.tar import LateTar, missing_in
from shard_tools.make.write.change import open_head, work_note
from shard_tools.make.write.keys import check_field
from shard_tools.running.report import Report
from streaming.common.arguments import counted, some_names
from streaming.common.threads import map_threads
from streaming.errors import ConfigError, DataError, StorageError, shell_place, shell_word
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.layout import checked_name, field_table_path, pending_path
from streaming.shards.index.sample_table import SampleTable
from streaming.shards.late.fields import read_late_table
from streaming.shards.late.table import ABSENT, LateTable, OfShard
from streaming.shards.schema.kinds import kind_by_name
from streaming.shards.schema.value import Schema, SchemaField, late_origin
from streaming.shards.versions.publish import OvertakenError, change_schema, publish, read_head
from streaming.storage import Storage, join_url, redact

OnMissing = Literal["error", "skip"]
PENDING = "field-"
"""How the name of the note in ``pending/`` begins of a late field that is being added to a set that lives."""
_SHOWN = 5
_READERS = 16
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldReport(Report):
    """What was added.

    Attributes:
        name: The field.
        version: Identifies its content.
        made_from: Where its values came from.
        num_shards: Shards of the set.
        num_written: Tars that this run wrote; the others were there.
        num_samples: Samples of the set.
        num_missing: Samples without a value.
        first_missing: Keys of the first of them.
        num_bytes: Bytes of all tars.
        set_version: The version of the set that has the field; 0: it does not live.
        seconds: Wall time.
    """

    name: str
    version: str
    made_from: str
    num_shards: int
    num_written: int
    num_samples: int
    num_missing: int
    first_missing: tuple[str, ...]
    num_bytes: int
    set_version: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """What the table of a late field says of one tar.

    Attributes:
        shard: The shard that it goes with.
        chunks: Its chunk table.
    """

    shard: OfShard
    chunks: ChunkTable

    @classmethod
    def of(cls, tar: LateTar, table: SampleTable) -> _Entry:
        """Return the entry of a tar, given its sample table."""
        return cls(shard=tar.of_shard(table), chunks=table.chunks)


class FieldTarget:
    """A late field that is added to the set in the directory ``home``.

    Args:
        home: The directory of the shards, with their index.
        name: The field.
        storage: The store.
        made_from: Where its values come from, for people.
        how: JSON-able: everything that determines its values. Tars of other values have other paths.
        on_missing: Samples without a value are an error, or are left without the field.
        overwrite: Replace a late field of this name, and make all values again.

    Attributes:
        name, storage: As given.
        tars: The tars, one for each shard.

    Raises:
        ConfigError: The name is invalid or taken.
        IndexMissingError, UnfinishedError: There is no whole set with an index.
    """

    def __init__(
        self, home: str, name: str, *, storage: Storage, made_from: str, how: object, on_missing: OnMissing = "error",
        overwrite: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.storage, self._made_from = checked_field_name(name), storage, redact(made_from)
        self._on_missing = on_missing
        self.head = open_head(storage, home)
        self.home = home
        self._begun_s = time.monotonic()
        self._how = _digest([self.name, how, on_missing])
        version = self.head.schema.late_fields.get(name)
        known = None if version is None else read_late_table(storage, home, name, version)
        if known is None and name in self.head.schema.fields:
            raise ConfigError(
                f"field {name!r}: the samples of {redact(home)} have a field of this name; choose another one"
            )
        if known is not None and not overwrite and known.how != self._how:
            raise ConfigError(
                f"field {name!r}: {redact(home)} has a late field of this name, from {known.made_from}, made in "
                "another way (other values, function, fields or options); replace it with --overwrite, or choose "
                "another name"
            )
        self._known = known
        self.work = self._how
        if known is not None:
            self.work = _digest([self._how, known.version]) if overwrite else known.work
        self.tars = [
            LateTar(field=name, work=self.work, home=home, rows=rows, storage=storage)
            for rows in map(self.head.table.of_shard, range(len(self.head.table.shards)))
        ]  # fmt: skip

    def fill(self, write: Callable[[Sequence[LateTar]], Iterable[SampleTable]]) -> FieldReport:
        """Write the tars that are missing, by ``write``, in their order, and publish the field.

        Raises:
            DataError: Samples have no value, and that is an error.
            OvertakenError: The set got other shards meanwhile.
        """
        with self._noted():
            listed = self._listed()
            there = list(map_threads(lambda tar: self._there(tar, listed), self.tars, _READERS))
            left = [tar for tar, one in zip(self.tars, there, strict=True) if one is None]
            made = [_Entry.of(tar, table) for tar, table in zip(left, write(left) if left else (), strict=True)]
            waiting = iter(made)
            entries = [one or next(waiting) for one in there]
            late = self._table(entries)
            self.storage.put(join_url(self.home, field_table_path(self.name, late.version)), late.to_parquet())
            set_version = self._publish(late)
        missing = self._first_missing(late)
        if missing:
            self._tell(late.num_missing, missing)
        return FieldReport(
            name=self.name, version=late.version, made_from=late.made_from, num_shards=len(entries),
            num_written=len(left), num_samples=late.chunks.total_samples, num_missing=late.num_missing,
            first_missing=missing, num_bytes=late.num_bytes, set_version=set_version,
            seconds=time.monotonic() - self._begun_s,
        )  # fmt: skip

    def _table(self, entries: Sequence[_Entry]) -> LateTable:
        """Return the table of the field; the one that the set has, if these are its tars.

        The same values may come from another place, such as a copy of the set that they came from: then the origin in
        that table stays.
        """
        late = LateTable(
            name=self.name, work=self.work, how=self._how, made_from=self._made_from,
            chunks=ChunkTable.concat([one.chunks for one in entries]), shards=tuple(one.shard for one in entries),
        )  # fmt: skip
        known = self._known
        if known is not None and replace(late, made_from=known.made_from).version == known.version:
            return known
        return late

    def _listed(self) -> frozenset[str] | None:
        """Return the URLs of the files of this field that exist, by one listing; None: the store lists nothing."""
        if not self.tars:
            return None
        folder = self.tars[0].url.rpartition("/")[0]
        try:
            return frozenset(info.url for info in self.storage.list(folder))
        except StorageError:
            return None

    def _there(self, tar: LateTar, listed: frozenset[str] | None) -> _Entry | None:
        """Return the entry of a tar that is written already; None: it is not.

        For those that the set has, its table of the field has the entry, so an addition costs only what is new. A tar
        that is lost is not there.
        """
        known = self._known
        is_listed = listed is None or {tar.url, tar.samples_url} <= listed
        if known is not None and known.work == self.work and is_listed:
            number = known.numbers.get(tar.shard)
            if number is not None and known.shards[number].fingerprint == tar.rows.fingerprint:
                return _Entry(shard=known.shards[number], chunks=known.chunks.of_shard(number))
        table = tar.written()
        return None if table is None else _Entry.of(tar, table)

    def _first_missing(self, late: LateTable) -> tuple[str, ...]:
        """Return the keys of the first samples without a value."""
        found = list[str]()
        for tar, shard in zip(self.tars, late.shards, strict=True):
            if len(found) >= _SHOWN:
                break
            found += missing_in(tar.samples()) if shard.num_missing else ()
        return tuple(found[:_SHOWN])

    def refuse_missing(self, keys: Sequence[str], where: str) -> None:
        """Refuse samples without a value, if that is an error.

        Raises:
            DataError: It is.
        """
        if keys and self._on_missing == "error":
            raise DataError(
                f"field {self.name!r}: {where} has no value for {counted(len(keys), 'sample')}, "
                f"{some_names([*map(repr, keys[:_SHOWN])])}. Add them, or leave these samples without the field: "
                "--on-missing skip"
            )

    def _tell(self, num: int, first: Sequence[str]) -> None:
        _log.warning(
            "field %r: %s of %s have no value, first %s; batches get them without the field, as on_error= and "
            "the collate function say",
            self.name, counted(num, "sample"), redact(self.home), some_names([*map(repr, first)]),
        )  # fmt: skip

    def _publish(self, late: LateTable) -> int:
        """Let the set have the field; return the number of its version, 0 if it does not live."""
        now = read_head(self.storage, self.home)
        there = now.schema.late_fields.get(self.name)
        if there not in {self.head.schema.late_fields.get(self.name), late.version}:
            raise OvertakenError(
                f"{redact(self.home)}: somebody else has changed field {self.name!r} meanwhile, so this one is not "
                f"published; see shard_tools field list {shell_place(self.home)}, and run the same command again"
            )
        if not now.lives:
            return change_schema(self.storage, self.home, with_late(now.schema, late))
        new = late.lacking(now.table)
        if new or not self.head.lives:  # without a note, a prune may have taken tars for leftovers
            what = (
                f"{counted(len(new), 'shard')}, first {new[0]!r}, came into this set" if new else "the set has changed"
            )
            raise OvertakenError(
                f"{redact(self.home)}: {what} since version {self.head.number} was read, so {self.name!r} is not "
                "published; run the same command again: it goes on with the tars that are there"
            )
        schema = with_late(now.schema, late)
        return now.number if schema == now.schema else publish(self.storage, now, now.table, schema=schema)

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Note in a set that lives that tars are written which no version holds yet; a run that is killed leaves it."""
        url = join_url(self.home, pending_path(f"{PENDING}{self.name}"))
        if self.head.lives:
            self.storage.put(url, work_note("field add", f"{self.name} from {self._made_from}"))
        yield
        if self.head.lives:
            self.storage.delete(url)


def with_late(schema: Schema, late: LateTable) -> Schema:
    """Return what a set means that has a version of a late field."""
    made = SchemaField(kind=kind_by_name(late.name), origin=late_origin(late.version, late.made_from))
    return replace(schema, fields={**schema.fields, late.name: made})


def checked_field_name(name: str) -> str:
    """Return the name of a late field.

    Raises:
        ConfigError: It is none.
    """
    if name == ABSENT:
        raise ConfigError(f"field {name!r}: this name marks samples without a value; choose another one")
    return check_field(checked_name(name, "field"), "of every shard")


def again(home: str, name: str) -> str:
    """Return the command that adds a late field again."""
    return f"shard_tools field add {shell_place(home)} {shell_word(name)} … --overwrite"


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
