"""Find what a set has beside its shards: late fields, late columns, views, tagged versions.

Commands that write samples elsewhere say in the log what they leave out. Unreadable files are left to ``verify``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from shard_tools.change.sets.open_set import OpenSet
from streaming.common.arguments import some_names
from streaming.errors import DataError, StorageError, shell_place, shell_word
from streaming.sets.filters.views import view_names
from streaming.shards.catalog.build import place_in_index
from streaming.shards.index.files import is_sealed
from streaming.shards.index.layout import field_samples_path, field_tar_path
from streaming.shards.index.sample_table import SampleTable
from streaming.shards.late.fields import read_late_table
from streaming.shards.late.table import LateTable
from streaming.shards.schema.value import Schema
from streaming.shards.versions.current import version_names
from streaming.shards.video.read import list_videos
from streaming.storage import Storage, join_url, redact

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatePart:
    """A late field of one shard.

    Attributes:
        name: The field.
        url: The tar that holds it.
        table: The sample table of the tar.
    """

    name: str
    url: str
    table: SampleTable

    def place(self, row: int) -> tuple[int, int] | None:
        """Return where in the tar the value of a sample is; None: it has none."""
        if self.name not in self.table.fields:
            return None
        starts, sizes = self.table.fields[self.name]
        start = int(starts[row])
        return None if start < 0 else (start, start + int(sizes[row]))


def _by_option(names: str) -> str:
    return f"give --columns {names} to keep their values"


def _of_all(name: str) -> bool:  # noqa: ARG001  a field or column
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Takes:
    """The things beside the shards of a set that a command takes along.

    Attributes:
        columns: Late columns whose values it writes.
        keep_columns: Says how to keep late columns, given their names, separated by commas.
        classes: Whether it keeps the names of the classes of a field or column, given its name.
        tables: Whether it keeps the columns of the sample tables.
        videos: Whether the indexes of videos, which hold places in shards and no values, are kept, or not missed where
            no set is written.
        makes_set: Whether it writes a set, to which late fields and views can be added.
    """

    columns: Collection[str] = ()
    keep_columns: Callable[[str], str] = _by_option
    classes: Callable[[str], bool] = _of_all
    tables: bool = True
    videos: bool = False
    makes_set: bool = True


def stored_schemas(shards: OpenSet, storage: Storage, takes: Takes) -> dict[str, Schema]:
    """Return what the set of each directory means, for commands that take what shards hold, without late fields.

    The log says what else they leave out.
    """
    schemas = shards.schemas(storage)
    tell_left_out(schemas, storage, takes)
    return {home: schema.without_late_fields() for home, schema in schemas.items()}


def tell_left_out(schemas: Mapping[str, Schema], storage: Storage, takes: Takes) -> None:
    """Log what a command leaves out of what it writes, by name.

    Args:
        schemas: What the set of each directory means.
        storage: The store.
        takes: What the command takes along.
    """
    for home, schema in schemas.items():
        for what, names, cure in _left_out(home, schema, storage, takes):
            if names:
                _log.warning("%s: the %s %s are left out; %s", redact(home), what, some_names(names), cure)


def _left_out(home: str, schema: Schema, storage: Storage, takes: Takes) -> Iterator[tuple[str, list[str], str]]:
    """Yield the things that a command may leave out: their kind, their names, and the cure."""
    columns = sorted(name for name, one in schema.columns.items() if one.is_late and name not in takes.columns)
    stored = [] if takes.tables else sorted(name for name, one in schema.columns.items() if not one.is_late)
    yield "columns of the sample tables", stored, "add each again: shard_tools column add TARGET NAME --lift NAME"
    yield "late columns", columns, takes.keep_columns(shell_word(",".join(columns)))
    place = shell_place(home)
    other = "shardstream alone reads them"
    add = f"add them to the new set: shard_tools field add TARGET NAME --from {place}"
    yield "late fields", sorted(schema.late_fields), add if takes.makes_set else other
    videos = [] if takes.videos else sorted({one.field for one in list_videos(storage, home)})
    yield "indexes of videos", videos, "make them: shard_tools index TARGET --video"
    save = f"save each for the new set, with the options that this shows: shard_tools view show {place} NAME"
    yield "views", view_names(storage, home), save if takes.makes_set else other
    tags = [name for name in version_names(storage, home) if not name.isdecimal()]
    yield "tagged versions", tags, "only the current version is taken"
    lost = sorted(name for name in schema.classes if not takes.classes(name))
    yield "names of the classes of", lost, "their numbers are written"


class LateParts:
    """The late fields of the shards of a set.

    Args:
        shards: The set.
        storage: Its store.
    """

    def __init__(self, shards: OpenSet, storage: Storage) -> None:
        self._shards, self._storage = shards, storage
        self._tables: Mapping[str, list[LateTable]] = {
            home: [
                read_late_table(storage, home, name, version) for name, version in schema.late_fields.items()
            ]
            for home, schema in (shards.schemas(storage).items() if shards.scanned is None else ())
        }  # fmt: skip

    def of(self, position: int) -> list[LatePart]:
        """Return the late fields of the shard at this position; of one that cannot be read there is a warning."""
        home, shard = place_in_index(self._shards.urls[position], self._shards.index_url)
        found = []
        for late in self._tables.get(home, ()):
            number = late.numbers.get(shard)
            if number is None or late.fingerprints[shard] != self._shards.chunks.of_shard(position).fingerprint:
                continue
            tar = late.chunks.shards[number].name
            url = join_url(home, field_samples_path(late.name, late.work, tar))
            try:
                table = self._storage.read_parsed(url, SampleTable.from_parquet, is_sealed)
            except (DataError, StorageError) as error:
                _log.warning("field %r is left out: %s; see `shard_tools verify`", late.name, error)
                continue
            path = field_tar_path(late.name, late.work, tar)
            found.append(LatePart(name=late.name, url=join_url(home, path), table=table))
        return found
