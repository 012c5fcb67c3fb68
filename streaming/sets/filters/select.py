"""Select the samples that a filter keeps: once, from sample tables and late columns, by all ranks together.

A sample is kept if it lies in the ``subset``, satisfies ``where``, and its key is not excluded. All three refer to
samples as stored, so the order in which they are applied does not matter.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import threading
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike, fspath
from typing import Any, TypeAlias

import numpy as np

from streaming.common.arguments import is_list
from streaming.common.job.shared_results import Peers, framed, part_of, shared, shared_parts, unframed
from streaming.common.lru_cache import LruCache
from streaming.common.platforms import num_cores
from streaming.common.threads import on_threads
from streaming.errors import (
    ConfigError,
    DataError,
    IndexMismatchError,
    IndexMissingError,
    NotFoundError,
    StorageError,
    shell_place,
)
from streaming.order.plan.ledger import filter_fingerprint
from streaming.sets.filters.late_columns import (
    LateColumn,
    documents_as_json,
    documents_of_json,
    find_columns,
    homes_of,
    list_columns,
    read_values,
)
from streaming.shards.catalog.build import no_samples, samples_url
from streaming.shards.catalog.open import OpenShards, digest_of
from streaming.shards.index import where as conditions
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.columns import (
    KEY,
    Bits,
    Values,
    fitting,
    names_of,
    no_values,
    places_in,
    read_sample_columns,
    sample_columns,
    type_named,
)
from streaming.shards.index.files import is_sealed
from streaming.shards.index.keys import key_array
from streaming.shards.index.layout import samples_directory
from streaming.shards.index.selection import Everything, Filtered, Kept, Selection
from streaming.shards.index.where import Where, unknown_column
from streaming.shards.schema.value import late_origin
from streaming.storage import Storage, join_url, redact, scheme_of
from streaming.types import Int64Array, ReadBuffer

Condition: TypeAlias = conditions.Condition
Subset: TypeAlias = tuple[float, float]
_Found: TypeAlias = tuple[Bits, list[str], list[str], Int64Array]
"""Kept bits of a shard, the requested columns it has, all columns it has, and the places of excluded keys it has."""
_log = logging.getLogger(__name__)
_REQUESTS = 16
_FEW_SHARDS = 16
"""Maximum number of shards for which sample tables are looked up one by one; for more shards, whole directories are
listed."""
_NO_PLACES = np.zeros(0, np.int64)
_KEPT_BYTES = 64 << 20
"""Memory for the bits of recently evaluated filters: half a billion samples."""


class NothingKeptError(ConfigError):
    """A filter keeps no sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """A user's filter.

    Attributes:
        where: A condition, or None.
        subset: Two shares (floats) or two sample numbers (ints), or None.
        excluded: Keys to leave out; sorted, without duplicates.
        keys_file: Path or URL of the file that the keys came from, whose content messages do not show; "": no file.
        versions: Required versions of late columns by name, from a saved view.
        view: Name and hash of the view, or "".
    """

    where: Where | None = None
    subset: Subset | None = None
    excluded: tuple[str, ...] = field(default=(), repr=False)
    keys_file: str = field(default="", repr=False, compare=False)
    versions: Mapping[str, str] = field(default_factory=dict)
    view: str = ""

    @property
    def is_range(self) -> bool:
        """Whether the filter is only a range, which needs no sample table."""
        return self.where is None and not self.excluded

    @property
    def keeps_all(self) -> bool:
        """Whether the filter keeps all samples."""
        return self.is_range and self.subset is None

    def bounds(self, num_samples: int) -> tuple[int, int]:
        """Return the range of samples in the subset, ``[first, stop)``.

        Raises:
            ConfigError: The dataset has fewer samples than the subset names, or the subset is empty.
        """
        if self.subset is None:
            return 0, num_samples
        low, high = self.subset
        if any(isinstance(one, float) for one in self.subset):
            low, high = (math.floor(share * num_samples + 0.5) for share in (low, high))
        if high > num_samples or low >= high:
            raise ConfigError(f"subset={self.subset}: no such samples; the data set has {num_samples:,} of them")
        return int(low), int(high)

    @property
    def words(self) -> str:
        """The filter in words, for messages."""
        said = [f'view "{self.view.partition("@")[0]}"'] if self.view else []
        said += [f"where={str(self.where)!r}"] if self.where is not None else []
        said += [f"subset={self.subset}"] if self.subset is not None else []
        said += [f"exclude= of {len(self.excluded):,} keys"] if self.excluded else []
        return ", ".join(said)

    def parts(self, columns: Mapping[str, LateColumn], kept: Kept) -> dict[str, str]:
        """Return the filter's contribution to the fingerprint."""
        found = {"view": self.view} if self.view else {}
        found |= {} if self.where is None else {"where": self.where.text}
        found |= {} if self.subset is None else {"subset": f"{self.subset[0]!r} to {self.subset[1]!r}"}
        if self.excluded:
            found["exclude"] = f"{len(self.excluded)} keys, {digest_of(list(self.excluded))[:16]}"
        found |= {f"column {name}": column.version for name, column in sorted(columns.items())}
        return {**found, "kept": kept.digest}


def checked_subset(subset: Any) -> Subset | None:
    """Return ``subset`` as two floats or two ints.

    Raises:
        ConfigError: It is not a range.
    """
    if subset is None:
        return None
    wrong = ConfigError(
        "subset: expected two ascending shares, such as (0.0, 0.8), or sample numbers, such as (1000, 2000), got "
        f"{subset!r}"
    )
    if not is_list(subset) or len(subset) != 2:
        raise wrong
    numbers = [one.item() if isinstance(one, np.generic) else one for one in subset]
    if any(isinstance(one, bool) or not isinstance(one, (int, float)) for one in numbers):
        raise wrong
    low, high = numbers
    if isinstance(low, float) or isinstance(high, float):
        low, high = float(low), float(high)
        if not 0 <= low < high <= 1:
            raise wrong
    elif not 0 <= low < high:
        raise wrong
    return low, high


def parse_subset(text: str | None) -> Subset | None:
    """Parse ``0%..80%`` as two shares, ``1000..2000`` as two sample numbers.

    Raises:
        ConfigError: The text is neither.
    """
    if text is None:
        return None
    parts = text.split("..")
    try:
        if len(parts) == 2 and all(part.endswith("%") for part in parts):
            low, high = (float(part[:-1]) / 100 for part in parts)
            return checked_subset((low, high))
        first, stop = (int(part) for part in parts)
    except ValueError as error:
        raise ConfigError(f"--subset: expected a range such as 0%..80% or 1000..2000, got {text!r}") from error
    return checked_subset((first, stop))


def excluded_keys(storage: Storage, exclude: str | PathLike[str] | Iterable[str]) -> tuple[str, ...]:
    """Return the keys to leave out; sorted, without duplicates.

    Args:
        storage: Reads the file.
        exclude: Keys; or the path or URL of a text file with one key per line, either as plain text or as a JSON object
            with the member ``key`` (the format of ``bad_samples_file``; its shard is ignored).

    Raises:
        ConfigError: A line or an entry is not a key.
        NotFoundError: The file does not exist.
    """
    if not isinstance(exclude, (str, PathLike)):
        keys: list[Any] = [exclude]
        if not isinstance(exclude, (bytes, Mapping)):
            with suppress(TypeError):  # an array without dimensions has __iter__ but cannot be iterated
                keys = list(exclude)
        odd = [key for key in keys if not isinstance(key, str)]
        if odd:
            raise ConfigError(f"exclude: expected keys (str), or the path of a file of them, got {odd[0]!r}")
        return tuple(sorted(set(keys)))
    lines = bytes(storage.read(fspath(exclude))).splitlines()  # bytes: text also splits at, e.g., U+2028
    found = set()
    for number, raw in enumerate(lines, start=1):
        line = (raw.removeprefix(BOM_UTF8) if number == 1 else raw).decode("utf-8", "surrogateescape")
        if line.startswith("{"):
            try:
                key = json.loads(line)["key"]
            except (ValueError, KeyError, RecursionError) as error:
                raise ConfigError(
                    f"exclude: {redact(fspath(exclude))}, line {number}: not a sample key: {error}"
                ) from error
            found.add(str(key))
        elif line:
            found.add(line)
    return tuple(sorted(found))


def narrowed(
    storage: Storage, shards: OpenShards, asked: Filter | None, peers: Peers | None = None, *, tells: bool = True
) -> Selection | None:
    """Return the samples that a filter keeps; None: there is nothing to filter and no index.

    With ``tells``, one INFO line logs their number, which is the same on all ranks.

    Raises:
        IndexMissingError, ConfigError, IndexMismatchError: As for :func:`select`.
    """
    if asked is not None and not asked.is_range:
        return select(storage, shards, asked, peers, tells=tells)
    if asked is not None and not asked.keeps_all:
        if shards.table is None:
            raise IndexMissingError(f"{asked.words} needs an index; {shards.missing_index}")
        return Everything.of(shards.table).between(*asked.bounds(shards.table.total_samples))
    return None if shards.table is None else Everything.of(shards.table)


def select(
    storage: Storage, shards: OpenShards, asked: Filter, peers: Peers | None = None, *, tells: bool = True
) -> Filtered:
    """Return the samples that a filter keeps; with peers, each rank evaluates a part of the shards.

    Raises:
        IndexMissingError: There is no index, or a shard has no sample table.
        ConfigError: The condition cannot be evaluated, or keeps nothing.
        IndexMismatchError: A late column does not belong to these shards, or its version is not the one of the view.
    """
    table = shards.table
    if table is None:
        raise IndexMissingError(f"{asked.words} needs an index; {shards.missing_index}")

    def look() -> bytes:
        return json.dumps({**_needed(storage, shards, asked), "seen": _seen(storage, shards, asked)}).encode()

    name = digest_of([list(shards.urls), shards.index, asked.words, list(asked.excluded)])
    needed = json.loads(shared(peers, f"filter/{name}", look))
    columns = documents_of_json(needed["columns"])
    seen = needed["seen"] and digest_of([needed, table.fingerprint, str(asked.where), list(asked.excluded)])
    work = _Work(storage, shards, table, asked, frozenset(needed["names"]), columns, seen)
    kept = work.joined(shared_parts(peers, f"kept/{name}", work.part))
    selected = Filtered.of(table, table, kept, filter_fingerprint(table.fingerprint, asked.parts(columns, kept)))
    if not kept.total:
        raise NothingKeptError(
            f"{asked.words} keeps none of the {table.total_samples:,} samples of {redact(shards.urls[0])}"
            f"{f' and {len(shards.urls) - 1} other shards' if len(shards.urls) > 1 else ''}. Look at the values with "
            f"`shard_tools ls URL`"
        )
    _log.log(
        logging.INFO if tells else logging.DEBUG,
        "%s keeps %s of %s samples (%.2f %%), in %s of %s chunks",
        asked.words, f"{kept.total:,}", f"{table.total_samples:,}", 100 * kept.total / table.total_samples,
        f"{selected.table.num_chunks:,}", f"{table.num_chunks:,}",
    )  # fmt: skip
    return selected


def _needed(storage: Storage, shards: OpenShards, asked: Filter) -> dict[str, Any]:
    """Return the columns that the condition uses, and the late ones among them."""
    homes = homes_of(shards.urls, shards.index)
    late: dict[str, LateColumn] = {}
    names: frozenset[str] = frozenset()
    if asked.where is not None:
        first = _Lifted(storage, shards, 0) if asked.where.names is None else None

        def type_of(name: str) -> Any:
            """Return the type, in the first shard, of a column that a pyarrow expression uses."""
            late.update(find_columns(storage, homes, [name]))
            if name in late:
                return type_named(late[name].type)
            values = {} if first is None else first.columns([name])[0]
            if name not in values:
                raise unknown_column(name, {*([] if first is None else first.there), *_late_names(storage, homes)})
            return values[name].type

        names = names_of(asked.where, type_of)
        late.update(find_columns(storage, homes, names - late.keys() - {KEY}))
    _check_once(storage, shards, sorted(late))
    for name, version in asked.versions.items():
        now = f"version {late[name].version}" if name in late else "it is no longer a late column"
        if name not in late or late[name].version != version:
            raise IndexMismatchError(
                f"column {name!r} is newer than {asked.words}: {now}, the view was saved with version {version}. Save "
                "the view again under a new name: shard_tools view save"
            )
    return {"names": sorted(names), "columns": documents_as_json(late)}


def _seen(storage: Storage, shards: OpenShards, asked: Filter) -> str:
    """Return a digest of the versions of the sample tables that a filter reads; "" if they are unknown.

    The same condition on the same tables yields the same bits, so they can be cached under this digest.
    """
    if shards.scanned is not None or asked.is_range or (asked.where is not None and asked.where.names is None):
        return ""  # a pyarrow expression's text may show only a part of it
    homes = homes_of(shards.urls, shards.index)
    try:
        if len(shards.urls) <= _FEW_SHARDS:
            urls = [samples_url(url, shards.index) for url in shards.urls]
            found = on_threads(storage.info, urls, _REQUESTS, name="shardstream-filter")
        else:
            found = [info for home in homes for info in storage.list(join_url(home, samples_directory()))]
    except StorageError:
        return ""  # a table is missing, which the read will report; or this store cannot list
    seen = [[info.url, info.size_bytes, info.version] for info in found]
    return "" if any(version is None for *_, version in seen) else digest_of(seen)


def versions_of(storage: Storage, shards: OpenShards, asked: Filter) -> dict[str, str]:
    """Return the version of each late column that a filter uses."""
    columns = documents_of_json(_needed(storage, shards, asked)["columns"])
    return {name: column.version for name, column in sorted(columns.items())}


def _check_once(storage: Storage, shards: OpenShards, late: Sequence[str]) -> None:
    """Reject a late column whose name also exists in the sample table of the first shard.

    Raises:
        DataError: There is such a column.
    """
    twice = sorted(_Lifted(storage, shards, 0).columns(late)[0]) if late and shards.urls else []
    if twice:
        raise DataError(
            f"column {twice[0]!r} is both a late column and one of the sample table of {redact(shards.urls[0])}; drop "
            f"the late one (shard_tools column drop), or lift the other under another name"
        )


def _late_names(storage: Storage, homes: Sequence[str]) -> list[str]:
    """List the names of late columns for messages; empty for stores that cannot list."""
    try:
        return [document.name for document in list_columns(storage, homes[0])]
    except StorageError:
        return []


def key_column(
    storage: Storage, shards: OpenShards, shard: int, only: tuple[int, int] | None = None,
    turns: AbstractContextManager[Any] | None = None,
) -> Values:  # fmt: skip
    """Return the keys of one shard's samples, in order.

    Args:
        storage: Reads the sample table.
        shards: The shards of the dataset.
        shard: Number of the shard.
        only: Range of samples, [first, stop); None: all.
        turns: Held while keys are unpacked (see :class:`_Work`).

    Raises:
        IndexMissingError: The shard has no sample table.
        IndexMismatchError: The sample table belongs to another shard.
    """
    found, facts = _Lifted(storage, shards, shard, turns).columns([KEY], only=only)
    check_is_of(facts, shards.chunks, shard, shards.urls[shard])
    return found[KEY]


def check_is_of(facts: Mapping[str, Any], table: ChunkTable, shard: int, url: str) -> None:
    """Reject a sample table, by the metadata of its file, that does not match the shard in the chunk table.

    Raises:
        IndexMismatchError: The table belongs to another shard, or to another version of this one.
    """
    if not facts:
        return
    low, high = table.rows_of(shard)
    info, chunks = table.shards[shard], facts.get("chunks") or {}
    if facts.get("shard", [])[1:] != [info.size_bytes, info.num_samples] or (
        chunks.get("crc32c") != table.crc32c[low:high].tolist()
    ):
        raise IndexMismatchError(
            f"{redact(url)}: its sample table does not match the shard that the chunk table describes; one of them is "
            f"out of date. Rebuild both: shard_tools index --force {shell_place(url)}"
        )


def reading_threads(shards: OpenShards) -> int:
    """Return the number of threads that read sample tables: few for local files, as each thread has its own heap."""
    homes = shards.urls if shards.index is None else (shards.index,)
    is_local = all(scheme_of(url) == "file" for url in homes)
    return min(_REQUESTS, num_cores() + 1) if is_local else _REQUESTS


class _Lifted:
    """The columns in the sample table of one shard."""

    def __init__(
        self, storage: Storage, shards: OpenShards, shard: int, turns: AbstractContextManager[Any] | None = None
    ) -> None:
        self._storage, self._shards, self._shard = storage, shards, shard
        self._turns = turns or nullcontext()
        self.there: list[str] = []

    def columns(
        self, names: Iterable[str], *, coded: bool = False, only: tuple[int, int] | None = None
    ) -> tuple[dict[str, Values], Mapping[str, Any]]:
        """Return the columns among ``names`` that exist, and the metadata of the file.

        Args:
            names: Names of columns.
            coded: Return columns of text dictionary-encoded.
            only: Range of samples, [first, stop), for keys alone; None: all.

        Raises:
            IndexMissingError: The shard has no sample table.
        """
        wanted = list(names)
        if self._shards.scanned is not None:
            samples = self._shards.scanned[self._shard]
            self.there = list(samples.columns)
            found = sample_columns(samples, wanted)
            return found if only is None else {name: one[slice(*only)] for name, one in found.items()}, {}
        url = self._shards.urls[self._shard]
        path = samples_url(url, self._shards.index)

        def parsed(data: ReadBuffer, source: str) -> tuple[dict[str, Values], Mapping[str, Any]]:
            with self._turns:
                return read_sample_columns(data, wanted, source, coded=coded, only=only)

        try:
            found, facts = self._storage.read_parsed(path, parsed, is_sealed)
        except NotFoundError as error:
            raise no_samples(url, ", which where= and exclude= need") from error
        self.there = list(facts.get("columns", ()))
        return found, facts


def _size_of(found: _Found) -> int:
    return found[0].nbytes + found[3].nbytes + 500  # including its names and its entry


_kept = LruCache[tuple[str, str], _Found](_KEPT_BYTES, _size_of)


@dataclass(frozen=True)
class _Work:
    """Compute the bits of kept samples, shard by shard; ranks exchange their parts as bytes.

    Attributes:
        seen: Digest of the tables from which the bits are computed; "": unknown, so they are never cached.
        turns: Held by the thread that unpacks and compares. Many requests are in progress at once, but threads beyond
            the number of cores contend for the interpreter lock: 16 on two cores took twice the CPU in total.
    """

    storage: Storage
    shards: OpenShards
    table: ChunkTable
    asked: Filter
    names: frozenset[str]
    late: Mapping[str, LateColumn]
    seen: str = ""
    turns: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(num_cores()), compare=False)

    @cached_property
    def _samples(self) -> tuple[int, int]:
        return self.asked.bounds(self.table.total_samples)

    @cached_property
    def _excluded(self) -> Values:
        return key_array(self.asked.excluded)

    @cached_property
    def _sizes(self) -> list[int]:
        return [shard.num_samples for shard in self.table.shards]

    @cached_property
    def _firsts(self) -> list[int]:
        sizes = np.array(self._sizes, np.int64)
        firsts: list[int] = (np.cumsum(sizes) - sizes).tolist()
        return firsts

    def part(self, rank: int, world_size: int) -> bytes:
        """Return the bits of the ``rank``-th range of shards, and the columns found in them."""
        mine = part_of(len(self._sizes), rank, world_size)
        found = on_threads(self._shard, mine, reading_threads(self.shards), name="shardstream-filter")
        head = {
            "found": sorted({name for _, names, _, _ in found for name in names}),
            "there": sorted({name for _, _, there, _ in found for name in there}),
        }
        left_out = np.zeros(len(self.asked.excluded), np.bool_)
        for _, _, _, places in found:
            left_out[places] = True
        return framed(head, *(bits.tobytes() for bits, _, _, _ in found), np.packbits(left_out).tobytes())

    def joined(self, parts: Sequence[bytes]) -> Kept:
        """Combine all parts.

        Raises:
            ConfigError: No shard has one of the columns.
        """
        found, there, bits = set[str](), set[str](), list[Bits]()
        left_out = np.zeros(-(-len(self.asked.excluded) // 8), np.uint8)
        for rank, part in enumerate(parts):
            head, at = unframed(part)
            found, there = found | set(head["found"]), there | set(head["there"])
            for shard in part_of(len(self._sizes), rank, len(parts)):
                num_bytes = -(-self._sizes[shard] // 8)
                bits.append(np.frombuffer(part, np.uint8, num_bytes, at))
                at += num_bytes
            left_out |= np.frombuffer(part, np.uint8, len(left_out), at)
        self._warn_of_unknown(left_out)
        missing = sorted(self.names - found - self.late.keys())
        if missing and any(self._is_asked(shard) for shard in range(len(self._sizes))):
            raise unknown_column(missing[0], {*there, KEY, *_late_names(self.storage, self._homes())})
        return Kept(self.table, bits)

    def _warn_of_unknown(self, left_out: Bits) -> None:
        """Warn about excluded keys that no shard has, if all shards were read; ``left_out`` marks the keys found."""
        excluded = self.asked.excluded
        unknown = np.flatnonzero(np.unpackbits(left_out, count=len(excluded)) == 0).tolist()
        if not unknown or not all(self._is_asked(shard) or not size for shard, size in enumerate(self._sizes)):
            return
        shown = f"they stand in {redact(self.asked.keys_file)}"  # a stranger may have named any file
        if not self.asked.keys_file:
            shown = ", ".join(repr(excluded[place]) for place in unknown[:3]) + (", …" if len(unknown) > 3 else "")
        _log.warning(
            "exclude: %s of %s keys are in none of the shards, which leaves nothing out: %s. A key is the whole "
            '"__key__" of a sample, without its extension; `shard_tools ls` shows them',
            f"{len(unknown):,}", f"{len(excluded):,}", shown,
        )  # fmt: skip

    def _homes(self) -> list[str]:
        return homes_of(self.shards.urls, self.shards.index)

    def _is_asked(self, shard: int) -> bool:
        """Return whether a shard has samples in the subset."""
        first, (low, high) = self._firsts[shard], self._samples
        return bool(self._sizes[shard]) and first < high and first + self._sizes[shard] > low

    def _shard(self, shard: int) -> _Found:
        """Return the bits of one shard, the requested columns that it has, and all columns that it has."""
        count = self._sizes[shard]
        if not self._is_asked(shard):
            return np.zeros(-(-count // 8), np.uint8), [], [], _NO_PLACES
        first, (low, high) = self._firsts[shard], self._samples
        inside = np.zeros(count, np.bool_)
        inside[max(0, low - first) : high - first] = True  # high > first: the shard overlaps the subset
        if self.seen:
            bits, names, there, places = _kept.of((self.seen, self.shards.urls[shard]), lambda: self._fitting(shard))
        else:
            bits, names, there, places = self._fitting(shard)
        return bits & np.packbits(inside, bitorder="little"), names, there, places

    def _fitting(self, shard: int) -> _Found:
        """Return what :meth:`_shard` does, but for all samples of a shard, ignoring the subset."""
        count = self._sizes[shard]
        bits: Bits = np.packbits(np.ones(count, np.bool_), bitorder="little")
        columns, there = self._columns(shard)
        with self.turns:
            if self.asked.where is not None:
                found = {**self._lacking(columns, shard), **columns}
                bits = bits & fitting(self.asked.where, {name: found[name] for name in self.names}, count)
            places = _NO_PLACES
            if self.asked.excluded:
                places = places_in(columns[KEY], self._excluded)
                bits = bits & np.packbits(places < 0, bitorder="little")
        return bits, sorted(columns), there, np.unique(places[places >= 0])

    def _lacking(self, columns: Mapping[str, Values], shard: int) -> dict[str, Values]:
        """Return columns that only other shards have, as NULLs.

        Raises:
            ConfigError: The condition is a pyarrow expression, which needs the type of every column.
        """
        lacking = sorted(self.names - columns.keys())
        if lacking and self.asked.where is not None and self.asked.where.names is None:
            raise ConfigError(
                f"where: column {lacking[0]!r} is missing in the sample table of {redact(self.shards.urls[shard])}; a "
                f"condition written as text would treat it as NULL there"
            )
        return {name: no_values(self._sizes[shard]) for name in lacking}

    def _columns(self, shard: int) -> tuple[dict[str, Values], list[str]]:
        lifted = _Lifted(self.storage, self.shards, shard, self.turns)
        asked = {*(self.names - self.late.keys()), *([KEY] if self.asked.excluded else [])}
        found: dict[str, Values] = {}
        if asked:
            coded = self.asked.where is not None and self.asked.where.names is not None
            found, facts = lifted.columns(asked, coded=coded)
            check_is_of(facts, self.table, shard, self.shards.urls[shard])
        url = self.shards.urls[shard]
        for name, column in self.late.items():
            found[name] = read_values(self.storage, url, self.shards.index, self.table.of_shard(shard), column)
        return found, lifted.there


def late_columns_of(
    storage: Storage, shards: OpenShards, names: Iterable[str], peers: Peers | None
) -> dict[str, LateColumn]:
    """Return the late columns among ``names``; with peers, rank 0 reads them for all.

    Raises:
        IndexMismatchError: A column exists for only some of the shards' directories.
        DataError: A name also exists in the sample tables.
    """

    def look() -> bytes:
        late = find_columns(storage, homes_of(shards.urls, shards.index), names)
        _check_once(storage, shards, sorted(late))
        _tell_of_others(shards, late)
        return json.dumps(documents_as_json(late)).encode()

    place = f"columns/{digest_of([list(shards.urls), shards.index, sorted(names)])}"
    return documents_of_json(json.loads(shared(peers, place, look)))


def _tell_of_others(shards: OpenShards, late: Mapping[str, LateColumn]) -> None:
    """Log late columns that are not those of the version of a set that is read: they were added again since."""
    for name, column in late.items():
        for home, document in column.documents.items():
            said = shards.schemas[home].columns.get(name) if home in shards.versions else None
            if said is not None and not said.origin.startswith(late_origin(document.column_version, "")):
                _log.warning(
                    "%s: column %r was added again since version %d of this set; its values may differ from those then",
                    redact(home), name, shards.versions[home],
                )  # fmt: skip


def column_reader(
    storage: Storage, shards: OpenShards, table: ChunkTable, names: Iterable[str], late: Mapping[str, LateColumn]
) -> Callable[[int], tuple[dict[str, Values], list[str]]]:
    """Return a thread-safe function from a shard number to the columns among ``names`` that the shard has.

    The function also returns the names of all columns in the shard's sample table. It raises ``IndexMissingError`` if
    the shard has no sample table, and ``IndexMismatchError`` if the files belong to another version of the shard or
    column.
    """
    return _Work(storage, shards, table, Filter(), frozenset(names), late)._columns


def late_names(storage: Storage, shards: OpenShards) -> list[str]:
    """Return the late columns beside the first shard, for messages."""
    return _late_names(storage, homes_of(shards.urls, shards.index))


def filter_hash(content: Mapping[str, Any]) -> str:
    """Return the hash that identifies a saved view."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
