"""Delete samples from a set: the command ``delete``."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shard_tools.change.life.prune import PruneReport, prune, refuse_tagged
from shard_tools.change.life.rewrite import Mask, without
from shard_tools.change.sets.open_set import READ_THREADS, OpenSet
from shard_tools.make.write.change import SetChange, open_head
from shard_tools.running.progress import NoProgress, Progress, Stages
from shard_tools.running.report import Report
from streaming import StreamingDataset
from streaming.common.threads import map_threads
from streaming.errors import ConfigError, NotFoundError
from streaming.sets.filters.select import NothingKeptError, excluded_keys
from streaming.shards.catalog.build import no_samples, samples_url
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.columns import KEY, Values, read_sample_columns
from streaming.shards.index.files import is_sealed
from streaming.shards.versions.history import kept_versions
from streaming.shards.versions.publish import Head
from streaming.storage import Storage, join_url, redact

_SHOWN = 5
_DIGESTS = {64: "sha256", 32: "md5"}  # by the number of hex digits


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteReport(Report):
    """The samples that were deleted.

    Attributes:
        target: The set.
        version: The version without these samples; the previous one if none was deleted.
        num_deleted: Number of samples deleted.
        num_samples: Number of samples that stay.
        num_shards: Number of shards that were rewritten or removed.
        num_bytes: Total size of the shards that held the samples.
        num_not_found: Number of keys or digests in the list that no sample has.
        first_not_found: The first of them.
        dry_run: Whether nothing was written.
        purged: Report of the prune, with ``purge``.
        seconds: Wall time.
    """

    target: str
    version: int
    num_deleted: int
    num_samples: int
    num_shards: int
    num_bytes: int
    num_not_found: int
    first_not_found: tuple[str, ...]
    dry_run: bool
    purged: PruneReport | None
    seconds: float


def delete(
    home: str,
    *,
    storage: Storage,
    keys: str | Sequence[str] | None = None,
    where: str | None = None,
    contents: str | None = None,
    purge: bool = False,
    dry_run: bool = False,
    workers: int = 4,
    progress: Progress | None = None,
) -> DeleteReport:
    """Delete samples from the set in ``home``: rewrite the shards that hold them, and publish the next version.

    Other shards are neither read nor written. Earlier versions keep the old shards until they are purged or pruned.
    ``keys`` are looked up in the sample tables of all shards, one small request each: a set may have a key twice, and
    all samples that have it go.

    Args:
        home: Directory of the set.
        storage: The store.
        keys: The keys; or path or URL of a file with one key per line.
        where: A condition that the samples match.
        contents: Path or URL of a file with one digest per line: SHA-256 or MD5, in hex, of the bytes of a field. All
        samples are read for the comparison.
        purge: Remove the old shards, and the untagged versions that hold them.
        dry_run: Only report what would be deleted.
        workers: Number of shards rewritten in parallel.
        progress: Receives the shards whose keys are read, then those that are written.

    Raises:
        ConfigError: No samples are named, none would stay, or ``purge`` is given and tagged versions hold them.
        OvertakenError: Another change of the set was published meanwhile.
        IndexMissingError, UnfinishedError: The set has no index, or is unfinished.
        StorageError: The store failed.
    """
    begun_s = time.monotonic()
    if [keys, where, contents].count(None) != 2:
        raise ConfigError("name the samples to delete by one of --keys FILE, --where CONDITION and --contents FILE")
    head, stages = open_head(storage, home), Stages(progress or NoProgress())
    wanted = None if keys is None else excluded_keys(storage, keys)
    missing: tuple[str, ...] = ()
    leaves = _by_condition(head, storage, where)
    if wanted is not None:
        leaves, missing = by_keys(head, storage, wanted, stages)
    if contents is not None:
        leaves, missing = _by_contents(head, storage, contents, workers)
    num_deleted = sum(int(mask.sum()) for mask in leaves.values())
    sizes = {shard.name: shard.size_bytes for shard in head.table.shards}
    _refuse_all(head, num_deleted)
    if purge:
        refuse_tagged(storage, home, {*leaves, *_shards_with(head, storage, wanted or ())})
    version = leave_out(head, storage, leaves, command="delete", dry_run=dry_run, workers=workers, progress=stages)
    purged = prune(home, storage=storage, drop=(), dry_run=dry_run) if purge else None
    return DeleteReport(
        target=redact(home), version=version, num_deleted=num_deleted,
        num_samples=head.table.total_samples - num_deleted, num_shards=len(leaves),
        num_bytes=sum(sizes[name] for name in leaves), num_not_found=len(missing),
        first_not_found=tuple(missing[:_SHOWN]), dry_run=dry_run, purged=purged, seconds=time.monotonic() - begun_s,
    )  # fmt: skip


def _shards_with(head: Head, storage: Storage, keys: Sequence[str]) -> set[str]:
    """Return the shards of earlier versions alone that hold samples with these keys, which were deleted before."""
    current = {shard.name for shard in head.table.shards}
    earlier: dict[str, ChunkTable] = {}
    for one in kept_versions(storage, head.home) if keys else ():
        earlier |= {name: table for name, table in one.table.by_shard().items() if name not in current}
    if not earlier:
        return set()
    return {*by_keys(replace(head, table=ChunkTable.merged(earlier)), storage, keys, NoProgress())[0]}


def _refuse_all(head: Head, num_deleted: int) -> None:
    """Refuse to delete every sample of a set.

    Raises:
        ConfigError: None would stay.
    """
    if num_deleted and num_deleted == head.table.total_samples:
        raise ConfigError(f"{redact(head.home)}: no sample would stay; to give up the set, delete its directory")


def leave_out(
    head: Head, storage: Storage, leaves: Mapping[str, Mask], *, command: str, dry_run: bool, workers: int,
    progress: Progress,
) -> int:  # fmt: skip
    """Publish a set without some samples, if any are given; return the number of the current version afterwards.

    Args:
        head: The set.
        storage: The store.
        leaves: Masks of the samples to leave out, by the name of their shard.
        command: The command, for the history.
        dry_run: Only check.
        workers: Number of shards rewritten in parallel.
        progress: Receives the shards as they are written.

    Raises:
        ConfigError: No sample would stay.
        OvertakenError: Another change of the set was published meanwhile.
    """
    num = sum(int(mask.sum()) for mask in leaves.values())
    _refuse_all(head, num)
    if not num or dry_run:
        return head.number
    identity = {name: np.flatnonzero(mask).tolist() for name, mask in leaves.items()}
    what = f"{num} samples of {redact(head.home)}"
    with SetChange(storage, head, command=command, what=what, identity=identity) as change:
        table, schema = without(change, storage, leaves, workers=workers, progress=progress)
        return change.publish(table, schema=schema)


def set_of(head: Head) -> OpenSet:
    """Return a version of a set as an open set."""
    urls = tuple(join_url(head.home, shard.name) for shard in head.table.shards)
    return OpenSet(urls=urls, chunks=head.table, scanned=None, index_url=None, marks=())


def keys_of(storage: Storage, head: Head, shard: int) -> Values:
    """Return the keys of a shard.

    Raises:
        IndexMissingError: It has no sample table.
    """
    url = join_url(head.home, head.table.shards[shard].name)
    try:
        return storage.read_parsed(
            samples_url(url, None), lambda data, source: read_sample_columns(data, [KEY], source)[0][KEY], is_sealed
        )
    except NotFoundError as error:
        raise no_samples(url) from error


def by_keys(
    head: Head, storage: Storage, keys: Sequence[str], progress: Progress
) -> tuple[dict[str, Mask], tuple[str, ...]]:  # fmt: skip
    """Return masks of the samples that have one of these keys, by shard, and the keys that no sample has.

    Reads the keys of every shard, as samples of several shards may have one key.
    """
    wanted = pa.array([key.encode("utf-8", "surrogateescape") for key in keys], pa.binary())
    found = np.zeros(len(wanted), np.bool_)
    leaves = {}
    shards = range(len(head.table.shards))
    progress.start(total_bytes=None, total=len(shards))
    for shard, values in zip(shards, map_threads(partial(keys_of, storage, head), shards, READ_THREADS), strict=True):
        progress.advance(num=1)
        places = pc.index_in(values.cast(pa.binary()), value_set=wanted).fill_null(-1).to_numpy(zero_copy_only=False)
        if (places >= 0).any():
            leaves[head.table.shards[shard].name] = places >= 0
            found[places[places >= 0]] = True
    return leaves, tuple(key for key, is_there in zip(keys, found.tolist(), strict=True) if not is_there)


def stored(head: Head, storage: Storage, fields: Sequence[str] | None) -> StreamingDataset:
    """Open a version of a set as a dataset whose fields are not decoded."""
    version = head.number if head.lives else None
    return StreamingDataset(head.home, version=version, decode=None, fields=fields, storage_options=storage._given)


def _by_contents(
    head: Head, storage: Storage, path: str, workers: int
) -> tuple[dict[str, Mask], tuple[str, ...]]:  # fmt: skip
    """Return masks of the samples with a field of one of these digests, by shard, and the digests that none has.

    Raises:
        ConfigError: A line is not a digest.
    """
    wanted = [line.lower() for line in bytes(storage.read(path)).decode(errors="replace").split()]
    for line in wanted:
        if len(line) not in _DIGESTS or not {*line} <= {*"0123456789abcdef"}:
            raise ConfigError(f"--contents {redact(path)}: expected SHA-256 or MD5 in hex, one in a line, got {line!r}")
    kinds = [_DIGESTS[length] for length in sorted({len(line) for line in wanted})]
    samples, asked, found = stored(head, storage, None), {*wanted}, set[str]()
    sizes = [shard.num_samples for shard in head.table.shards]
    stops = np.cumsum(sizes).tolist()

    def look(shard: int) -> tuple[Mask, set[str]]:
        mask, there = np.zeros(sizes[shard], np.bool_), set[str]()
        for row, sample in enumerate(samples[stops[shard] - sizes[shard] : stops[shard]]):
            values: list[Any] = [value for name, value in sample.items() if not name.startswith("__")]
            hit = {hashlib.new(kind, value).hexdigest() for kind in kinds for value in values} & asked
            mask[row], there = bool(hit), there | hit
        return mask, there

    leaves = {}
    shards = range(len(sizes))
    for shard, (mask, there) in zip(shards, map_threads(look, shards, workers), strict=True):
        found |= there
        if mask.any():
            leaves[head.table.shards[shard].name] = mask
    return leaves, tuple(line for line in dict.fromkeys(wanted) if line not in found)


def _by_condition(head: Head, storage: Storage, where: str | None) -> dict[str, Mask]:
    """Return masks of the samples that match a condition, by shard."""
    if where is None:
        return {}
    try:
        kept = set_of(head).kept(storage, where=where, view=None)
    except NothingKeptError:
        return {}
    masks = {
        shard.name: np.ones(shard.num_samples, np.bool_) if kept is None else kept.mask(number)
        for number, shard in enumerate(head.table.shards)
    }
    return {name: mask for name, mask in masks.items() if mask.any()}
