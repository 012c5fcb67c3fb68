"""Find the late fields of shards, for commands that look into samples; what cannot be read is left to ``verify``."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shard_tools.change.sets.open_set import OpenSet
from streaming.common.arguments import some_names
from streaming.errors import DataError, StorageError, shell_place
from streaming.shards.catalog.build import place_in_index
from streaming.shards.index.files import is_sealed
from streaming.shards.index.layout import field_samples_path, field_tar_path
from streaming.shards.index.sample_table import SampleTable
from streaming.shards.late.fields import read_late_table
from streaming.shards.late.table import LateTable
from streaming.shards.schema.value import Schema
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


def stored_schemas(shards: OpenSet, storage: Storage) -> dict[str, Schema]:
    """Return what the set of each directory means, for commands that take what shards hold, without late fields.

    These are named in the log.
    """
    schemas = shards.schemas(storage)
    tell_left_out(schemas)
    tell_videos_left_out(shards.homes, storage)
    return {home: schema.without_late_fields() for home, schema in schemas.items()}


def tell_left_out(schemas: Mapping[str, Schema]) -> None:
    """Log which late fields are left out of what is written, given what the set of each directory means."""
    for home, schema in schemas.items():
        if schema.late_fields:
            cure = f"shard_tools field add TARGET NAME --from {shell_place(home)}"
            _log.warning(
                "%s: the late fields %s are left out, which lie beside the shards; add them to the new set: %s",
                redact(home), some_names(sorted(schema.late_fields)), cure,
            )  # fmt: skip


def tell_videos_left_out(homes: Iterable[str], storage: Storage) -> None:
    """Log which indexes of videos are left out of what is written: their places would be others there."""
    for home in homes:
        fields = sorted({one.field for one in list_videos(storage, home)})
        if fields:
            _log.warning(
                "%s: the index of the videos %s is left out; a set of tars gets it by: "
                "shard_tools index TARGET --video",
                redact(home), some_names(fields),
            )  # fmt: skip


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
