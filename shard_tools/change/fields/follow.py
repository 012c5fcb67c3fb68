"""Let late fields follow a change of their set: tars for shards that are written anew without some samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress

import numpy as np
import numpy.typing as npt

from shard_tools.change.fields.tar import LateTar
from shard_tools.change.fields.target import with_late
from streaming.common.threads import map_threads
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.layout import field_table_path
from streaming.shards.late.fields import read_late_table
from streaming.shards.late.table import LateTable, OfShard
from streaming.shards.schema.value import Schema
from streaming.shards.versions.publish import Head
from streaming.storage import Storage, join_url

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewritten:
    """A shard that takes the place of another one.

    Attributes:
        old: The other one's rows of the chunk table.
        new: Its own.
        stays: Which samples of the other one it has.
    """

    old: ChunkTable
    new: ChunkTable
    stays: Mask


def followed(
    storage: Storage, head: Head, shards: Sequence[Rewritten], gone: Mapping[str, Mask], *, workers: int
) -> Schema:  # fmt: skip
    """Write the tars of late fields that go with new shards; return what the set means that has these.

    Shards that a late field lacks, or has another content of, it lacks afterwards, too.

    Args:
        storage: The store.
        head: The set as it was.
        shards: The new shards.
        gone: Which samples are left out, by the name of their old shard.
        workers: Tars at a time; each takes the memory of 8 MiB, or of a chunk.
    """
    schema = head.schema
    for name, version in head.schema.late_fields.items():
        late = read_late_table(storage, head.home, name, version)

        def write(one: Rewritten, late: LateTable = late) -> tuple[OfShard, ChunkTable]:
            old, new = (
                LateTar(field=late.name, work=late.work, home=head.home, rows=rows, storage=storage)
                for rows in (one.old, one.new)
            )
            table = new.write(compress(old.values(), one.stays.tolist()), new.base().keys)
            return new.of_shard(table), table.chunks

        known = [one for one in shards if late.fingerprints.get(one.old.shards[0].name) == one.old.fingerprint]
        stay = [(one, late.chunks.of_shard(number)) for number, one in enumerate(late.shards) if one.name not in gone]
        both = sorted([*stay, *map_threads(write, known, workers)], key=lambda one: one[0])
        late = replace(late, chunks=ChunkTable.concat([rows for _, rows in both]), shards=tuple(one for one, _ in both))
        storage.put(join_url(head.home, field_table_path(name, late.version)), late.to_parquet())
        schema = with_late(schema, late)
    return schema
