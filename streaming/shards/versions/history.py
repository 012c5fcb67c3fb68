"""Find the versions of a set: each is a chunk table, under its number or under a name that somebody gave it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from streaming.common.arguments import did_you_mean, some_names
from streaming.errors import (
    ConfigError,
    IndexFormatError,
    NotFoundError,
    StorageError,
    shell_place,
    shell_word,
)
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.layout import checked_name, chunks_path, version_path
from streaming.shards.versions.current import read_table, version_names
from streaming.shards.versions.publish import Head
from streaming.storage import ChangedError, Storage, join_url, redact

VersionName: TypeAlias = int | str | None
"""A version as users name it: its number, or a name that it was given; None: the current one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptVersion:
    """A version that can be opened.

    Attributes:
        name: What it is called: a name that it was given, or its number.
        number: Its number.
        table: Its chunk table.
    """

    name: str
    number: int
    table: ChunkTable

    @property
    def is_tag(self) -> bool:
        """Whether somebody gave it a name."""
        return not self.name.isdecimal()


def checked_version(option: str, value: object) -> VersionName:
    """Return the value of an option that names a version.

    Raises:
        ConfigError: It is none.
    """
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    if isinstance(value, str) and value.isascii() and value.isdecimal() and int(value) >= 1:
        return int(value)
    if not isinstance(value, str):
        raise ConfigError(f"{option}: expected the number or the name of a version, such as 3 or 'v3', got {value!r}")
    return checked_name(value, f"{option}: version")


def number_of(table: ChunkTable) -> int:
    """Return the number of a version, given its chunk table."""
    return 1 if table.version is None else table.version.number


def read_version(storage: Storage, home: str, name: int | str) -> ChunkTable:
    """Return the chunk table of a version.

    Raises:
        ConfigError: There is no such version; the message names those that there are.
        IndexFormatError: Its table is damaged.
    """
    try:
        return read_table(storage, join_url(home, version_path(str(name))))
    except NotFoundError:
        pass
    try:
        current = read_table(storage, join_url(home, chunks_path()))
    except NotFoundError as error:
        raise ConfigError(
            f"version {name!r}: there is no set in {redact(home)}; give the directory that holds its _shardstream/"
        ) from error
    now = number_of(current)
    if name == now:
        return current
    kept = kept_versions(storage, home)
    for one in kept:
        if one.number == name:  # it is kept under a name alone
            return one.table
    raise _no_version(home, name, now, kept)


def _no_version(home: str, name: int | str, now: int, kept: Sequence[KeptVersion]) -> ConfigError:
    """Return the error for a version that is not there; it names what can be opened instead."""
    tags = [one.name for one in kept if one.is_tag]
    others = [repr(one.name) if one.is_tag else one.name for one in kept if one.is_tag or one.number != now]
    there = some_names([*others, f"{now} (the current one)"])
    more = f"To see what each holds: shard_tools version list {shell_place(home)}"
    if isinstance(name, str):
        why = f"has no version of this name{did_you_mean(name, tags)}"
        more = (
            "A name that was dropped does not come back. To give the current version this name: shard_tools version "
            f"tag {shell_place(home)} {shell_word(name)}"
        )
    elif name > now:
        why = "has no version of this number yet"
    elif kept:
        why = "has this version no longer: it was pruned, and does not come back"
    else:  # a store that lists nothing
        why = "has no file of this version"
    return ConfigError(
        f"version {name!r}: {redact(home)} {why}. Give another, such as version={now}; there are {there}. {more}"
    )


def refuse_tags(storage: Storage, home: str) -> None:
    """Refuse to overwrite a set that has tagged versions, which would not be the same any more.

    Raises:
        ConfigError: It has some.
    """
    tags = [name for name in version_names(storage, home) if not name.isdecimal()]
    if tags:
        drops = " ".join(f"--drop {shell_word(name)}" for name in tags)
        raise ConfigError(
            f"{redact(home)} has the tagged versions {', '.join(tags)}, which overwriting would destroy; give another "
            f"target, or drop them first: shard_tools version prune {shell_place(home)} {drops}"
        )


def kept_versions(storage: Storage, home: str) -> list[KeptVersion]:
    """Return all versions that are kept beside the current one, in their order.

    Raises:
        IndexFormatError: A table is damaged.
    """
    found = []
    for name in version_names(storage, home):
        try:
            table = read_table(storage, join_url(home, version_path(name)))
        except NotFoundError:  # it was dropped meanwhile
            continue
        found.append(KeptVersion(name=name, number=number_of(table), table=table))
    return sorted(found, key=lambda one: (one.number, one.is_tag, one.name))


def shown_versions(opened: Mapping[str, Sequence[int]]) -> str:
    """Describe the versions of sets that were opened, by the name of their source; ``""`` is that of a single set."""
    found = []
    for name, numbers in opened.items():
        words = f"version{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
        found.append(f"{name} {words}" if name else words)
    return "; ".join(found)


def which_version(storage: Storage, home: str, now: int, fingerprint: str, numbers: Sequence[int]) -> str:
    """Say which version of a set to open for a state of it; "" if that is not known.

    Args:
        storage: The store.
        home: The directory of the set.
        now: Number of the version that is open.
        fingerprint: Fingerprint of the chunk table that the state was saved with; "" if the state does not tell.
        numbers: The number of the version that the state names; empty: it names none.
    """
    try:
        kept = kept_versions(storage, home)
    except (StorageError, IndexFormatError):
        return ""
    found = next((one for one in kept if one.table.fingerprint == fingerprint), None)
    if found is None and numbers and numbers[0] != now:
        found = next((one for one in kept if one.number == numbers[0]), None)
        if found is None:
            return f"They are those of version {numbers[0]} of this set, {_gone(home, now)}"
    if found is None and not numbers and now > 1:  # it was saved before the set had versions, or it is of another set
        if all(one.number != 1 for one in kept):
            return (
                f"If the state was saved before this set had versions, they are those of version 1, {_gone(home, now)}"
            )
        if not fingerprint:
            return (
                f"Of this set, version {now} is open; if the state was saved before it had versions, open it with "
                "version=1"
            )
    if found is None or found.number == now:
        return ""
    name = repr(found.name) if found.is_tag else found.number
    return (
        f"They are those of version {found.number} of this set, and version {now} is open: open it with version={name}"
    )


def which_versions(storage: Storage, opened: Mapping[str, int | None], numbers: Sequence[int]) -> str:
    """Say which versions of several sets that are read as one to open for a state of them; "" if that is not known.

    Args:
        storage: The store.
        opened: The number of the version that is open, by the directory of the set; None: the set does not live.
        numbers: The numbers of the versions that the state names, of the sets that lived then.
    """
    living = {home: now for home, now in opened.items() if now is not None}
    if len(numbers) != len(living) or [*numbers] == [*living.values()]:  # else it is not known which set began to live
        return ""
    named, tags = dict(zip(living, numbers, strict=True)), []
    for home in opened:
        then = named.get(home)
        if then is not None and then != living[home]:
            try:
                kept = kept_versions(storage, home)
            except (StorageError, IndexFormatError):
                return ""
            if all(one.number != then for one in kept):
                return f"They are those of version {then} of {redact(home)}, {_gone(home, living[home])}"
        of = "" if then is None else f" --of {then}"
        tags.append(f"shard_tools version tag {shell_place(home)} NAME{of}")
    return (
        f"They are those of versions {some_names([*map(str, numbers)])} of these sets, and versions "
        f"{some_names([*map(str, living.values())])} are open. Give those of the state one name, and open the sets "
        f"with version='NAME': {'; '.join(tags)}"
    )


def _gone(home: str, now: int) -> str:
    """Say what can be done for a state of a version that is pruned."""
    return (
        f"which is pruned and does not come back, and version {now} is open. So begin a new run, without this state, "
        f"over a version that is there: shard_tools version list {shell_place(home)}"
    )


def tag(storage: Storage, head: Head, name: str, table: ChunkTable | None = None) -> None:
    """Keep a version under a name, for good. A version that has the name already keeps it.

    Args:
        storage: The store.
        head: The current version of the set, which lives.
        name: The name.
        table: The chunk table of an earlier version; None: the current one.

    Raises:
        ConfigError: Another version has this name, or the one that was to get it is dropped meanwhile.
    """
    url = join_url(head.home, version_path(checked_name(name, "version")))
    kept = head.table if table is None else table
    data = kept.to_parquet()
    number = number_of(kept)
    try:
        storage.put_if(url, data, None)
    except ChangedError as error:
        other = read_table(storage, url)
        if (number_of(other), other.fingerprint) == (number, kept.fingerprint):
            return
        raise ConfigError(
            f"version {name!r} exists already: it is number {number_of(other)}. Choose another name, or give it up: "
            f"shard_tools version prune {shell_place(head.home)} --drop {shell_word(name)}"
        ) from error
    # Whoever prunes deletes tables first, then looks which versions are there: what is seen now stays, by this name.
    is_current = number == number_of(read_table(storage, join_url(head.home, chunks_path())))
    others = () if is_current else kept_versions(storage, head.home)
    if not is_current and not any(one.number == number and one.name != name for one in others):
        storage.delete(url)
        raise ConfigError(f"version {number} was dropped meanwhile; shard_tools version list {shell_place(head.home)}")
