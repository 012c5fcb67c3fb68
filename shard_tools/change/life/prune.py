"""Drop versions, and remove the shards that no version lists any more: the command ``version prune``."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shard_tools.change.fields.listed import files_held
from shard_tools.make.write.change import open_head, pending
from shard_tools.running.report import Report
from streaming.errors import ConfigError, shell_place, shell_word
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.files import is_sealed, read_document, write_document
from streaming.shards.index.layout import (
    INPUTS_DIRECTORY,
    columns_directory,
    fields_directory,
    pending_path,
    samples_directory,
    samples_path,
    version_path,
    video_directory,
    work_of,
)
from streaming.shards.schema.value import Schema
from streaming.shards.versions.history import KeptVersion, kept_versions
from streaming.shards.versions.publish import Head, read_head
from streaming.storage import Storage, join_url, redact

_log = logging.getLogger(__name__)
_NOTE = "prune"
"""Note of a prune in progress: the names of shards that it may remove. No version lists them once it is dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneReport(Report):
    """The versions and shards that a prune removed.

    Attributes:
        target: The set.
        dropped: The versions that were dropped.
        kept: The versions that stay, except the current one.
        num_shards: Number of shards removed.
        num_bytes: Total size of these shards.
        pending: Unpublished changes (running or killed), by name, each with a description; their shards stay.
        dry_run: Whether nothing was removed.
    """

    target: str
    dropped: tuple[str, ...]
    kept: tuple[str, ...]
    num_shards: int
    num_bytes: int
    pending: dict[str, str]
    dry_run: bool


def refuse_tagged(storage: Storage, home: str, names: Collection[str]) -> None:
    """Refuse to purge shards that tagged versions hold.

    Raises:
        ConfigError: A tagged version holds one of them.
    """
    tagged = [one.name for one in kept_versions(storage, home) if one.is_tag and _names([one.table]) & {*names}]
    if tagged:
        drops = " ".join(f"--drop {shell_word(name)}" for name in tagged)
        raise ConfigError(
            f"{redact(home)}: the versions {', '.join(tagged)} hold these samples; drop them first: shard_tools "
            f"version prune {shell_place(home)} {drops}"
        )


def prune(
    home: str, *, storage: Storage, drop: Sequence[str] = (), keep: int = 0, abandon: Sequence[str] = (),
    dry_run: bool = False,
) -> PruneReport:  # fmt: skip
    """Drop versions of a set, and remove the shards, sample tables and columns that no other version holds.

    The current version stays, and so do tagged versions that ``drop`` does not name. Shards that no version has ever
    listed are left alone, except those of a change that is no longer pending.

    Args:
        home: Directory of the set.
        storage: The store.
        drop: Names of tagged versions to drop.
        keep: Number of the latest untagged versions to keep.
        abandon: Names of killed changes that will not be run again.
        dry_run: Only report what would be removed.

    Raises:
        ConfigError: No version has a name in ``drop``, or no pending change has a name in ``abandon``.
    """
    head = open_head(storage, home)
    if not head.lives:
        return PruneReport(
            target=redact(home), dropped=(), kept=(), num_shards=0, num_bytes=0, pending={}, dry_run=dry_run
        )
    versions = kept_versions(storage, home)
    noted = _noted(storage, home)
    there = {one.name for one in versions}
    drop = [name for name in drop if name in there or name not in noted.get("dropped", ())]  # again after a kill
    stays, goes = _parted([one for one in versions if one.name != str(head.number)], drop, keep, home)
    unknown = {*abandon} - pending(storage, home).keys()
    if unknown:
        raise ConfigError(f"--abandon {min(unknown)}: no change of this name is pending in {redact(home)}")
    suspects = _names(one.table for one in goes) | {*noted.get("names", ())}
    if not dry_run and (goes or suspects):
        _drop(storage, head, goes, suspects)
    # List shards first, then notes, then versions: a change writes its note before its shards, and deletes the note
    # only after it has published them.
    sizes = {info.url: info.size_bytes for info in storage.list(home)}
    left = {work: one for work, one in pending(storage, home).items() if work != _NOTE}
    gone = {one.name for one in goes}
    kept = (one.table for one in kept_versions(storage, home) if one.name not in gone)
    current = read_head(storage, home)
    now = [current.table, *kept]
    held = _names(now)
    published = {work_of(name) for name in held}  # a run may be killed between publishing and deleting its note
    waits = {work for work, one in left.items() if one.may_publish(current.number)} - {*abandon} - published
    removed = [
        name for name in _shards_among(sizes, home)
        if name not in held and (name in suspects or (work_of(name) is not None and work_of(name) not in waits))
    ]  # fmt: skip
    if not dry_run:
        _remove(storage, home, {*removed}, sizes, held | {*_inputs(now)}, waits)
        if not waits:  # which may write tars of late fields that no version names yet
            for url in _unheld_fields(storage, home, sizes, now):
                storage.delete(url)
        for work in [*(left.keys() - waits), _NOTE]:
            storage.delete(join_url(home, pending_path(work)))
    for work in sorted(waits):
        _log.warning(
            "%s: %s is not published: it is running, or was killed, so its shards stay; run it again, or give it up: "
            "shard_tools version prune %s --abandon %s",
            work, left[work], shell_place(home), shell_word(work),
        )  # fmt: skip
    shards = [url for url in (join_url(home, name) for name in removed) if url in sizes]
    return PruneReport(
        target=redact(home), dropped=tuple(one.name for one in goes), kept=tuple(one.name for one in stays),
        num_shards=len(shards), num_bytes=sum(sizes[url] for url in shards),
        pending={work: left[work].words for work in sorted(waits)}, dry_run=dry_run,
    )  # fmt: skip


def _drop(storage: Storage, head: Head, goes: Sequence[KeptVersion], suspects: Collection[str]) -> None:
    """Delete the tables of versions, after a note of the shards that may go with them, so that a kill loses none."""
    names = [one.name for one in goes]
    note = {
        "format": "shardstream-pending", "version": 1, "command": "prune", "what": ", ".join(names) or "shards",
        "names": sorted(suspects), "dropped": names,
    }  # fmt: skip
    storage.put(join_url(head.home, pending_path(_NOTE)), write_document(note))
    # Any file in this folder tells listings that the set has versions.
    storage.put(join_url(head.home, version_path(str(head.number))), head.data)
    for name in names:  # first: nobody can tag them from now on, and a concurrent `tag` sees that they are gone
        storage.delete(join_url(head.home, version_path(name)))


def _parted(
    versions: Sequence[KeptVersion], drop: Sequence[str], keep: int, home: str
) -> tuple[list[KeptVersion], list[KeptVersion]]:
    """Return the versions that stay, and those that are dropped."""
    unknown = [name for name in drop if name not in {one.name for one in versions}]
    if unknown:
        raise ConfigError(
            f"--drop {unknown[0]}: {redact(home)} has no version of this name; there are "
            f"{', '.join(one.name for one in versions) or 'none'}"
        )
    numbers = [one for one in versions if not one.is_tag]
    latest = {one.name for one in numbers[len(numbers) - keep :]} if keep else set()
    goes = [one for one in versions if one.name in drop or (not one.is_tag and one.name not in latest)]
    return [one for one in versions if one not in goes], goes


def _names(tables: Iterable[ChunkTable]) -> set[str]:
    return {shard.name for table in tables for shard in table.shards}


def _inputs(now: Sequence[ChunkTable]) -> Iterable[str]:
    for table in now:
        yield from () if table.version is None else table.version.inputs


def _unheld_fields(
    storage: Storage, home: str, there: Collection[str], now: Iterable[ChunkTable]
) -> list[str]:  # fmt: skip
    """Return the files of late fields that no version has."""
    below = join_url(home, fields_directory(), "")
    files = [url for url in there if url.startswith(below)]
    if not files:
        return []
    schemas = [Schema.from_dict(table.version.schema) for table in now if table.version is not None]
    held = files_held(storage, home, schemas)
    return [url for url in files if url not in held]


def _noted(storage: Storage, home: str) -> dict[str, Any]:
    """Return the note that a killed prune left; empty if there is none."""
    url = join_url(home, pending_path(_NOTE))
    return storage.read_parsed(url, lambda data, _: read_document(data), is_sealed) if storage.exists(url) else {}


def _shards_among(there: Collection[str], home: str) -> list[str]:
    """Return the names of shards in a directory that exist, or that left a sample table behind."""
    below, tables = join_url(home, ""), join_url(home, samples_directory(), "")
    names = {url.removeprefix(below) for url in there if url.endswith(".tar") and "/" not in url.removeprefix(below)}
    names |= {url.removeprefix(tables).removesuffix(".parquet") for url in there if url.startswith(tables)}
    return sorted(names)


def _remove(
    storage: Storage, home: str, names: Collection[str], there: Collection[str], held: Collection[str],
    waits: Collection[str],
) -> None:  # fmt: skip
    """Delete shards, then what the index has of them, then lists of inputs that no version names."""
    inputs = join_url(home, INPUTS_DIRECTORY, "")
    beside = tuple(join_url(home, one, "") for one in (columns_directory(), video_directory()))
    tables = {join_url(home, samples_path(name)) for name in names}
    shards = {join_url(home, name) for name in names}

    def is_gone(url: str) -> bool:
        for folder in beside:
            if url.startswith(folder):
                return url.removeprefix(folder).partition("/")[2].removesuffix(".parquet") in names
        name = url.removeprefix(inputs).removesuffix(".parquet")
        return url in tables or (url.startswith(inputs) and name not in held and name not in waits)

    gone = [url for url in there if url not in shards and is_gone(url)]
    for url in [*shards & {*there}, *gone]:
        storage.delete(url)
