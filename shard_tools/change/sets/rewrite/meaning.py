"""Bring samples of several sets to one schema: the same class numbers and the same token width."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from shard_tools.change.sets.late import Takes, stored_schemas
from shard_tools.change.sets.open_set import OpenSet
from shard_tools.change.sets.rewrite.field_changes import FieldChanges
from shard_tools.make.convert.base.rows import json_of
from streaming.build.decode.by_set import renumbered
from streaming.build.decode.values import packed, unpacked
from streaming.common.arguments import unpacked_name
from streaming.errors import DataError
from streaming.sets.filters.views import asked_filter
from streaming.shards.catalog.build import home_of
from streaming.shards.schema.joined import Classes, translation, unknown_fields
from streaming.shards.schema.meeting import Meaning, met
from streaming.shards.schema.value import WITHIN, Schema, SchemaColumn, SchemaField
from streaming.storage import Storage, redact
from streaming.types import Int64Array

CURE = "Give --classes union, which writes the numbers by name: the first set's classes keep theirs, new ones follow"
Table = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetChanges:
    """Changes that bring the samples of one set to the common schema of all sets.

    Attributes:
        numbers: Tables of new class numbers, by field and path in its value; ``""``: the value itself.
        columns: Tables of new class numbers, by column.
        widened: Fields of uint16 tokens that become uint32.
    """

    numbers: Mapping[str, Mapping[str, Table]] = field(default_factory=dict)
    columns: Mapping[str, Table] = field(default_factory=dict)
    widened: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.numbers or self.columns or self.widened)

    @property
    def are_foreseen(self) -> bool:
        """Whether the index determines the sizes of fields after the change."""
        return not any(path for paths in self.numbers.values() for path in paths)

    def of_fields(self, fields: dict[str, bytes], key: str) -> dict[str, bytes]:
        """Return the fields of a sample, changed.

        Raises:
            DataError: A value does not fit the set's schema.
        """
        found = dict(fields)
        try:
            for name in self.widened & found.keys():
                found[name] = np.frombuffer(found[name], "<u2").astype("<u4").tobytes()
            for name, tables in self.numbers.items():
                if name in found:
                    found[name] = _renumbered_field(name, found[name], tables)
        except ValueError as error:
            raise DataError(f"sample {key!r}, field {name!r}: not what schema.json says of it: {error}") from error
        return found

    def of_columns(self, values: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        """Return the values of columns, changed."""
        return {
            name: column if name not in self.columns else renumbered(column, [], self.columns[name])
            for name, column in values.items()
        }

    def of_sizes(self, sizes: Mapping[str, Int64Array]) -> dict[str, Int64Array]:
        """Return the sizes of fields after the change; -1 where a sample lacks the field."""
        return {name: np.where(size >= 0, 2 * size, size) if name in self.widened else size
                for name, size in sizes.items()}  # fmt: skip


def _renumbered_field(name: str, data: bytes, tables: Mapping[str, Table]) -> bytes:
    if unpacked_name(name) is None:
        return _renumbered(data, tables)
    before = unpacked(data)
    after = _renumbered(before, tables)
    return data if after == before else packed(after)


def _renumbered(data: bytes, tables: Mapping[str, Table]) -> bytes:
    """Return a field with its class numbers replaced; a field without such numbers keeps its bytes."""
    if list(tables) == [""]:
        return str(renumbered(int(data), [], tables[""])).encode()
    before = json.loads(data)
    value: Any = json.loads(data)
    for path, table in tables.items():
        value = renumbered(value, path.split("."), table)
    return data if value == before else json_of(value)[0]


_UNCHANGED = SetChanges()


@dataclass(frozen=True, slots=True, kw_only=True)
class Retold:
    """The common schema of several sets, and the changes to the samples of each.

    Attributes:
        meaning: The common schema.
        index_url: Location of the index, if not beside the shards.
        by_home: The changes, by directory of the index; sets without changes are left out.
    """

    meaning: Meaning = field(default_factory=Meaning)
    index_url: str | None = None
    by_home: Mapping[str, SetChanges] = field(default_factory=dict)

    @classmethod
    def of(
        cls, shards: OpenSet, storage: Storage, *, classes: Classes, fields: Sequence[str] | None, takes: Takes
    ) -> Retold:  # fmt: skip
        """Return the schema and changes by which the samples of ``shards`` become one set.

        The log names things beside their shards that are left out.

        Raises:
            ConfigError: The schemas contradict each other in a way that changes cannot resolve.
        """
        whole = stored_schemas(shards, storage, takes)
        by_home = {home: schema.of_fields(fields) for home, schema in whole.items()}
        unknown = {redact(home): fields if unknown_fields(one) is None else () for home, one in whole.items()}
        meaning = met({redact(home): one for home, one in by_home.items()}, classes=classes, cure=CURE, unknown=unknown)
        changes = {home: _changes(schema, meaning.schema) for home, schema in by_home.items()}
        return cls(
            meaning=meaning, index_url=shards.index_url,
            by_home={home: one for home, one in changes.items() if one},
        )  # fmt: skip

    def of_shard(self, url: str) -> SetChanges:
        """Return the changes to the samples of a shard."""
        return self.by_home.get(home_of(url, self.index_url), _UNCHANGED) if self.by_home else _UNCHANGED

    @property
    def are_foreseen(self) -> bool:
        """Whether the index determines the sizes of fields after all changes."""
        return all(one.are_foreseen for one in self.by_home.values())

    def check_selected(self, shards: OpenSet, storage: Storage, *, where: str | None, view: str | None) -> None:
        """Refuse a selection by class numbers that differ between the sets.

        Raises:
            ConfigError: The selection uses such numbers.
        """
        if self.meaning.unlike and (where or view):
            asked = asked_filter(
                storage, shards.as_opened, where=where, view=view, subset=None, exclude=None, peers=None
            )  # fmt: skip
            if asked is not None and asked.where is not None:
                self.meaning.check_condition(asked.where.names, asked.where.text)

    def identity(self) -> dict[str, object]:
        """Return the facts that determine the bytes of the result: none if no sample changes."""
        return {"meaning": self.meaning.schema.stamp} if self.by_home else {}

    def schema(self, columns: Sequence[str], changes: FieldChanges | None = None) -> Schema:
        """Return the schema of the result, for fields under their new names, and for these columns."""
        said = self.meaning.schema
        named = changes or FieldChanges()
        fields = {}
        for part, one in said.fields.items():
            name, colon, path = part.partition(WITHIN)
            for new in named.of({name: None}):
                mask = "" if one.tokens is None else next(iter(named.of({one.tokens.mask: None})), "")
                fields[new + colon + path] = replace(
                    one, tokens=None if one.tokens is None else replace(one.tokens, mask=mask)
                )
        for name, column in named.add:
            if column in said.columns and said.columns[column].classes:
                fields[name] = replace(said.fields.get(name) or _INTEGER, classes=said.columns[column].classes)
        kept = {name: one for name, one in said.columns.items() if name in columns}
        told = {name: replace(one, type="", origin=one.made_from) for name, one in kept.items()}
        return Schema(fields=fields, columns=told)


def _changes(own: Schema, wanted: Schema) -> SetChanges:
    """Return the changes that bring a set from schema ``own`` to ``wanted``."""
    numbers: dict[str, dict[str, Table]] = {}
    for part, names in own.classes.items():
        table = translation(names, wanted.classes.get(part, names))
        if table is not None:
            name, _, path = part.partition(WITHIN)
            numbers.setdefault(name, {})[path] = table
    columns: dict[str, Table] = {}
    for name, column in own.columns.items():
        table = translation(column.classes, wanted.columns.get(name, _COLUMN).classes or column.classes)
        if table is not None:
            columns[name] = table
    widened = frozenset(name for name, one in own.tokens.items() if one.dtype != wanted.tokens[name].dtype)
    return SetChanges(numbers=numbers, columns=columns, widened=widened)


_COLUMN = SchemaColumn()
_INTEGER = SchemaField(kind="integer")
