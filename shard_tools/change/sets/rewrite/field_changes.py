"""Rename, leave out and add fields of samples while they are rewritten."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TypeVar

from shard_tools.change.sets.rewrite.shard_source import ShardSource
from shard_tools.make.convert.base.identity import Origins
from shard_tools.make.convert.base.records import Record, Skipped
from shard_tools.make.convert.base.rows import encode_value
from streaming.build import decode
from streaming.build.decode import resolve_decoders
from streaming.common.arguments import did_you_mean
from streaming.errors import ConfigError, DataError, shell_word
from streaming.shards.index.where import unknown_column

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldChanges:
    """Fields to rename, to leave out, and to make from columns.

    Attributes:
        rename: (field, new name) pairs.
        drop: Fields to leave out.
        add: (field, column) pairs: fields made from the values of columns; a sample without a value gets no field.
    """

    rename: tuple[tuple[str, str], ...] = ()
    drop: tuple[str, ...] = ()
    add: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        """Reject changes that contradict each other.

        Raises:
            ConfigError: A field is named twice.
        """
        targets = [name for _, name in self.rename] + [name for name, _ in self.add]
        sources = [name for name, _ in self.rename] + list(self.drop)
        for names, what in ((targets, "is made twice"), (sources, "is changed twice")):
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise ConfigError(f"--rename, --drop-fields, --add: the field {twice!r} {what}; name it once")

    def __bool__(self) -> bool:
        return bool(self.rename or self.drop or self.add)

    def identity(self) -> dict[str, object]:
        """Return the facts that determine the bytes of the result."""
        pairs = {"rename": self.rename, "add": self.add}
        given: dict[str, object] = {name: sorted(map(list, some)) for name, some in pairs.items() if some}
        return given | ({"drop_fields": sorted(self.drop)} if self.drop else {})

    def check(self, fields: Sequence[str], columns: Sequence[str]) -> None:
        """Refuse changes of missing fields or columns, and new names that are in use.

        Raises:
            ConfigError: A field or column does not exist, or a field that stays has a new name already.
        """
        gone = {*self.drop, *(name for name, _ in self.rename)}
        for option, named in (("--rename", [name for name, _ in self.rename]), ("--drop-fields", self.drop)):
            for name in named:
                if name not in fields:
                    there = ", ".join(fields)
                    raise ConfigError(
                        f"{option}: no sample has a field {name!r}{did_you_mean(name, fields)}; there are: {there}"
                    )
        self._check_added(columns)
        for name in [new for _, new in self.rename] + [new for new, _ in self.add]:
            if name in fields and name not in gone:
                raise ConfigError(
                    f"--rename, --add: there is a field {name!r}, too; leave that one out with --drop-fields "
                    f"{shell_word(name)}, or choose another name"
                )
        if not self.add and {*fields} <= {*self.drop}:
            raise ConfigError(f"--drop-fields: no field is left of {', '.join(fields)}; leave out fewer")

    def _check_added(self, columns: Sequence[str]) -> None:
        for name, column in self.add:
            if column not in columns:
                raise unknown_column(column, set(columns), "--add")
            if not is_of_characters(name):
                raise ConfigError(
                    f"--add {name}: values of columns are stored as text, which training does not read from a field "
                    "of this name; expected one such as txt, json, cls or float"
                )

    def of(self, names: Mapping[str, _T]) -> dict[str, _T]:
        """Return values by field under their new names, without those that are left out."""
        new = dict(self.rename)
        return {new.get(name, name): value for name, value in names.items() if name not in self.drop}

    def applied(self, record: Record) -> Record:
        """Return a record with its fields changed.

        Raises:
            DataError: A value cannot be stored in its field.
        """
        fields, remarks = self.of(record.fields), record.remarks
        for name, column in self.add:
            value = record.metadata.get(column)
            if value is None:
                continue
            try:
                fields[name], remark = encode_value(value, name, column)
                decode.decode_field(
                    _DECODERS.decoder_for(name), fields[name], url=record.where, key=record.key, field=name
                )
            except DataError as error:
                error.add_note(f"sample {record.key!r}, --add {name}={column}")
                raise
            remarks += (remark,) if remark else ()
        if not fields:
            raise DataError(f"sample {record.key!r}: no field is left of it; leave out fewer with --drop-fields")
        return replace(record, fields=fields, remarks=remarks)


_DECODERS = resolve_decoders("auto")
_OF_CHARACTERS = frozenset({decode.text, decode.integer, decode.number, decode.json, decode.raw})


def is_of_characters(field: str) -> bool:
    """Return whether training reads a field of this name as text, JSON, a number, or raw bytes.

    Raises:
        ConfigError: Training refuses such a field.
    """
    return _DECODERS.decoder_for(field) in _OF_CHARACTERS


class ChangedSource:
    """A source whose records are changed."""

    def __init__(self, source: ShardSource, changes: FieldChanges) -> None:
        self._source, self._changes = source, changes
        self.kind = source.kind

    @property
    def num_records(self) -> int:
        """Number of records of the source."""
        return self._source.num_records

    @property
    def num_bytes(self) -> int:
        """Total size of the source's records."""
        return self._source.num_bytes

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Files that the source skipped."""
        return self._source.skipped

    @property
    def fields(self) -> Mapping[str, bool] | None:
        """The fields of the source, changed; unknown whether every sample has a field that is made from a column."""
        known = self._source.fields
        return None if known is None else self._changes.of(known) | dict.fromkeys(dict(self._changes.add), False)

    def identity(self) -> dict[str, object]:
        """Return the identity of the source; the changes belong to the options."""
        return self._source.identity()

    def origins(self) -> Origins:
        """Return the files of the source."""
        return self._source.origins()

    def outlines(self, start: int) -> Generator[Record, None, None]:
        """Return the changed records from number ``start`` on, with blank fields in place of copied ones."""
        with closing(self._source.outlines(start)) as records:
            yield from map(self._changes.applied, records)

    def part(self, start: int, stop: int) -> ChangedSource:
        """Return a source of records ``[start, stop)`` alone."""
        return ChangedSource(self._source.part(start, stop), self._changes)

    def records(self, start: int) -> Generator[Record, None, None]:
        """Return the changed records from number ``start`` on."""
        with closing(self._source.records(start)) as records:
            yield from map(self._changes.applied, records)
