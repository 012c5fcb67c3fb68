"""Find the shards that an earlier run of the same work has finished, and those that are still valid."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from shard_tools.make.convert.base.identity import (
    EVERYWHERE,
    ChangedInputs,
    Origins,
    SourceIdentity,
    SourceStorage,
    compared,
)
from shard_tools.make.convert.base.records import Skipped
from shard_tools.make.convert.journal import Journal, Waypoint
from streaming.common.threads import map_threads
from streaming.errors import IndexFormatError
from streaming.shards.index.files import is_sealed
from streaming.shards.index.layout import samples_path
from streaming.shards.index.sample_table import SampleTable
from streaming.storage import Storage, join_url, redact

_THREADS = 16  # for reading inputs again
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierWork:
    """The shards of an earlier run that are kept.

    Attributes:
        complete: Whether all work is done.
        num_shards: Number of shards that are kept: the first ones.
        num_records: Number of records of the source up to the last one in these shards.
        num_samples: Number of their samples.
        num_bytes: Total size of these shards.
        keys: Their keys.
        position: Position of the source after them.
        changes: Inputs that changed since; shards made from them are not kept.
        skipped: What is no sample of the source, as far as it was read.
    """

    complete: bool = False
    num_shards: int = 0
    num_records: int = 0
    num_samples: int = 0
    num_bytes: int = 0
    keys: frozenset[str] = frozenset()
    position: Waypoint = field(default_factory=Waypoint)
    changes: ChangedInputs = field(default_factory=ChangedInputs)
    skipped: Mapping[str, Skipped] = field(default_factory=dict)


def changes_since(journal: Journal, noted: Sequence[SourceIdentity], origins: Origins) -> ChangedInputs:
    """Return the inputs of the shards that changed since they were written.

    An input that may have changed by its version is read and compared, if its checksum is known and its size unchanged.
    """
    if origins.inputs and not noted:
        return ChangedInputs(first=EVERYWHERE)
    store = SourceStorage.of(origins.store)
    last = max((one.through for one in journal.positions.values()), default=EVERYWHERE)
    asked: list[SourceIdentity] = []
    compared(noted, origins.inputs, asked.append, last=last)
    sums = dict(zip((one.place for one in asked), map_threads(store.checksum, asked, _THREADS), strict=True))
    return compared(noted, origins.inputs, lambda one: sums[one.place], last=last)


def earlier_work(
    directory: str, name: str, storage: Storage, journal: Journal, changes: ChangedInputs, *, column: str | None,
    columns: Collection[str] = (),
) -> EarlierWork:  # fmt: skip
    """Return the finished shards: numbered from 0 without a gap, each with an intact sample table of its size.

    That table has the ``columns`` of the work: `index` cannot rebuild them from a shard alone.

    Everything is done if the journal says so, the shards hold that many samples, and no input changed. Otherwise the
    last shard is dropped and written again: it may hold fewer samples than fit, and there must be a shard to write,
    since the writer publishes the chunk table with it, which the interrupted run may not have done.

    Args:
        directory: Directory of the shards.
        name: Pattern of their names.
        storage: Their store.
        journal: The journal of the earlier run.
        changes: The inputs that changed since.
        column: Column of the sample table with the number of each sample's record, if not every record becomes one.
        columns: Columns that the work writes into every sample table.
    """
    sizes = {info.url: info.size_bytes for info in storage.list(directory)}
    tables: list[SampleTable] = []
    while (table := _finished_shard(directory, name.format(len(tables)), sizes, storage, columns)) is not None:
        tables.append(table)
    complete = journal.complete and sum(table.num_samples for table in tables) == journal.num_samples
    complete = complete and changes.first is None
    if not complete:
        tables = tables[:-1]
        while tables and not _holds(journal.positions.get(len(tables)), changes):
            tables.pop()
    num_samples = sum(table.num_samples for table in tables)
    return EarlierWork(
        complete=complete,
        num_shards=len(tables),
        num_records=int(tables[-1].columns[column][-1].as_py()) + 1 if column and tables else num_samples,
        num_samples=num_samples,
        num_bytes=sum(table.shard.size_bytes for table in tables),
        keys=frozenset(key for table in tables for key in table.keys),
        position=journal.positions.get(len(tables), Waypoint()),
        changes=changes,
        skipped={} if changes.first is not None else journal.skipped,
    )


def _holds(position: Waypoint | None, changes: ChangedInputs) -> bool:
    """Return whether the source's position after some shards is known, and no input up to it changed."""
    return position is not None and (changes.first is None or position.through < changes.first)


def _finished_shard(
    directory: str, name: str, sizes: Mapping[str, int], storage: Storage, columns: Collection[str]
) -> SampleTable | None:
    url = join_url(directory, samples_path(name))
    size_bytes = sizes.get(join_url(directory, name))
    if size_bytes is None or url not in sizes:
        return None
    try:
        table = storage.read_parsed(url, SampleTable.from_parquet, is_sealed)
    except IndexFormatError as error:
        _log.warning("%s; this shard and those after it are written again", error)
        return None
    lacking = sorted({*columns} - {*table.columns})
    if lacking:
        _log.warning(
            "%s: lacks columns that this work writes: %s; this shard and those after it are written again",
            redact(url), ", ".join(lacking),
        )  # fmt: skip
        return None
    return table if table.shard.size_bytes == size_bytes else None
