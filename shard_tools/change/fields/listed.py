"""List the late fields of a set, and drop one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from shard_tools.make.write.change import open_head
from shard_tools.running.report import Report
from streaming.common.threads import map_threads
from streaming.errors import ConfigError
from streaming.shards.index.layout import field_samples_path, field_table_path, field_tar_path, fields_directory
from streaming.shards.late.fields import read_late_table
from streaming.shards.late.table import LateTable
from streaming.shards.schema.value import Schema
from streaming.shards.versions.publish import change_schema, publish, read_head
from streaming.storage import Storage, join_url, redact

_DELETES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldsReport(Report):
    """The late fields of a set.

    Attributes:
        target: The set.
        fields: Each with its version, where it is from, its samples and bytes, and the shards that lack it.
    """

    target: str
    fields: tuple[dict[str, object], ...]


def list_fields(home: str, *, storage: Storage) -> FieldsReport:
    """Return the late fields of the set in a directory."""
    head = open_head(storage, home)
    told = []
    for name, version in sorted(head.schema.late_fields.items()):
        late = read_late_table(storage, home, name, version)
        told.append({
            "name": name, "version": version, "made_from": late.made_from, "num_samples": late.chunks.total_samples,
            "num_missing": late.num_missing, "num_bytes": late.num_bytes, "lacking": late.lacking(head.table),
        })  # fmt: skip
    return FieldsReport(target=redact(home), fields=tuple(told))


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldDropReport(Report):
    """A field that was dropped.

    Attributes:
        name: The field.
        version: Its version.
        num_files: Files that were deleted; 0 of a set that lives, whose other versions may have the field.
    """

    name: str
    version: str
    num_files: int


def drop_field(home: str, name: str, *, storage: Storage) -> FieldDropReport:
    """Take a late field from the set in a directory; of one that lives, as its next version.

    Raises:
        ConfigError: There is none of this name.
        OvertakenError: Somebody else changed the set meanwhile.
    """
    head = open_head(storage, home)
    late = head.schema.late_fields
    if name not in late:
        there = ", ".join(sorted(late)) or "none"
        raise ConfigError(f"field {name!r}: {redact(home)} has no late field of this name; there are: {there}")
    schema = without(head.schema, name)
    if head.lives:
        publish(storage, head, head.table, schema=schema)
        return FieldDropReport(name=name, version=late[name], num_files=0)
    change_schema(storage, home, schema)
    below = join_url(home, fields_directory(), name)
    # Somebody may have named a version meanwhile, which has the field.
    files = [] if read_head(storage, home).lives else [info.url for info in storage.list(below)]
    list(map_threads(storage.delete, files, _DELETES))
    return FieldDropReport(name=name, version=late[name], num_files=len(files))


def without(schema: Schema, name: str) -> Schema:
    """Return what a set means without a field."""
    return replace(schema, fields={other: one for other, one in schema.fields.items() if other != name})


def files_held(storage: Storage, home: str, schemas: Iterable[Schema]) -> set[str]:
    """Return the URLs of all files of the late fields that these versions of a set have."""
    found: set[str] = set()
    for name, version in {one for schema in schemas for one in schema.late_fields.items()}:
        late = read_late_table(storage, home, name, version)
        found |= {join_url(home, field_table_path(name, version)), *files_of_table(home, late)}
    return found


def files_of_table(home: str, late: LateTable) -> list[str]:
    """Return the URLs of the tars of a late field, and of their sample tables."""
    paths = (field_tar_path, field_samples_path)
    return [join_url(home, path(late.name, late.work, tar.name)) for tar in late.chunks.shards for path in paths]
