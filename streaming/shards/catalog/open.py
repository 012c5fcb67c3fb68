"""Open a dataset: from the user's URLs to shards with an index."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from os import PathLike
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from streaming.common.arguments import did_you_mean, format_bytes, some_names
from streaming.common.job.shared_results import PEER_WAIT_S, Peers, shared
from streaming.common.threads import on_threads
from streaming.errors import (
    ConfigError,
    IndexFormatError,
    IndexMismatchError,
    IndexMissingError,
    NotFoundError,
    StorageError,
    shell_place,
)
from streaming.shards.catalog.build import (
    check_sizes,
    if_there,
    in_order,
    joined,
    load_index,
    load_tables,
    read_footer_of,
    read_schema,
    samples_url,
    shard_name,
)
from streaming.shards.catalog.listing import FoundShards, StorageAhead
from streaming.shards.catalog.scan import scan_shard
from streaming.shards.catalog.unfinished import expand_ahead
from streaming.shards.catalog.urls import folders_of
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.files import is_sealed, read_facts
from streaming.shards.index.layout import SCHEMA_FILE, chunks_path
from streaming.shards.index.sample_table import Records, SampleTable, Spans
from streaming.shards.schema.value import Schema
from streaming.shards.versions.history import VersionName, number_of, read_version
from streaming.shards.versions.publish import schema_of
from streaming.storage import ReadBuffer, Storage, as_url, join_url, redact, scheme_of, split_url
from streaming.types import DuplicateKeys

_log = logging.getLogger(__name__)
_Samples = TypeVar("_Samples", SampleTable, Records, Spans)
_REQUESTS = 16
SCAN_LIMIT_BYTES = 1 << 30
"""Sets up to this size are indexed at every start: a second of reading from disk, several from a bucket."""

CHECKED_AT_OPEN = 256
"""For sets of up to this number of shards, every shard's size is checked at the start. In larger sets, a shard of the
wrong size is noticed at its first damaged or failing read."""


@dataclass(frozen=True, kw_only=True)
class OpenShards(FoundShards):
    """Shards in the order of the dataset, with the result of scanning those without an index.

    Attributes:
        index: Location of the index, if not beside the shards.
        scanned: Sample tables of a set that was indexed on the fly, one per shard; otherwise None.
    """

    index: str | None
    scanned: tuple[SampleTable, ...] | None

    @property
    def chunks(self) -> ChunkTable:
        """The chunk table.

        Raises:
            IndexMissingError: There is no index, and the set is too large to index on the fly.
        """
        if self.table is None:
            raise IndexMissingError(self.missing_index)
        return self.table

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        """The number of each shard, by its URL."""
        return {url: number for number, url in enumerate(self.urls)}

    @cached_property
    def shown_urls(self) -> npt.NDArray[np.object_]:
        """The URL of each shard as shown in samples and messages, without secrets."""
        return np.array([redact(url) for url in self.urls], object)


def open_shards(
    storage: Storage,
    urls: str | PathLike[str] | Sequence[str | PathLike[str]],
    index: str | None,
    peers: Peers | None = None,
    *,
    duplicate_keys: DuplicateKeys = "error",
    allow_unfinished: bool = False,
    version: VersionName = None,
) -> OpenShards:
    """Return the shards at ``urls`` with their index. Small sets without an index are indexed in memory.

    Args:
        storage: The store.
        urls: URLs as written by the user.
        index: Location of the index, if not beside the shards.
        peers: Other processes that open the same set: rank 0 searches for all; each scans a share of a set without an
            index.
        duplicate_keys: As for :func:`streaming.shards.catalog.scan.scan_shard`, if shards are scanned.
        allow_unfinished: Read what is there of a set that is still being written, and log it.
        version: Number or name of the version to open of each set; None: the current one.

    Raises:
        UnfinishedError: The set is incomplete (:mod:`streaming.shards.catalog.unfinished`).
        NotFoundError: Nothing matches, or a shard is missing.
        IndexMismatchError: The index does not cover or match these shards.
    """

    def find() -> FoundShards:
        if version is None:
            return _find(storage, urls, index, allow_unfinished=allow_unfinished)
        return _find_version(storage, urls, index, version)

    if peers is None:
        found = find()  # not serialized: for a large table the round trip takes a second
    else:
        spelt = str(urls) if isinstance(urls, (str, PathLike)) else list(map(str, urls))
        name = digest_of([spelt, index, allow_unfinished, version])
        found = FoundShards.from_bytes(shared(peers, f"open/{name}", lambda: find().to_bytes()))
    if not found.sizes:
        return OpenShards(
            urls=found.urls, table=found.table, missing_index=found.missing_index, index=index, scanned=None,
            schemas=found.schemas, versions=found.versions,
        )  # fmt: skip
    scanned = tuple(_scan(storage, found.urls, list(found.sizes), peers, duplicate_keys))
    table = ChunkTable.concat([samples.chunks for samples in scanned])
    return OpenShards(
        urls=found.urls, table=table, missing_index="", index=index, scanned=scanned, schemas=found.schemas
    )


def digest_of(value: Any) -> str:
    """Return a digest of a JSON-able value, the same on every rank."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _find(
    lasting: Storage, urls: str | PathLike[str] | Sequence[str | PathLike[str]], index: str | None, *,
    allow_unfinished: bool,
) -> FoundShards:  # fmt: skip
    """List the shards and read their index. Include ``sizes`` if they must be scanned."""
    with closing(StorageAhead(lasting)) as storage:
        folders = folders_of(urls)
        _read_ahead(storage, folders if index is None else [index])
        shards, marks = expand_ahead(urls, storage)
        homes = _homes(shards, index)
        _read_ahead(storage, homes)  # together with the marks: one round trip for both
        telling = _telling(storage, homes, folders)
        marks.check(allow_unfinished=allow_unfinished)
        if len(shards) <= CHECKED_AT_OPEN:
            for url in shards:  # that no listing has
                storage.will_ask(url)
        try:
            tables = load_tables(storage, shards, index)
        except IndexMissingError as missing:
            _check_no_index(storage, shards, index, missing)
            return replace(_without_index(lasting, shards, missing), schemas=_schemas(storage, homes, telling))
        table = in_order(shards, index, tables)
        if index is None and folders:
            _check_all_listed(tables, folders, shards)
        if len(shards) <= CHECKED_AT_OPEN:
            try:
                check_sizes(storage, shards, table)
            except NotFoundError as error:
                raise IndexMismatchError(
                    f"the index lists a shard that the store does not have: {error}. Restore it, leave it out of "
                    f"the URLs, or rebuild the index: shard_tools index <urls of the shards that exist>"
                ) from error
        lives = {home: one for home, one in tables.items() if one.version is not None}
        schemas = _schemas(storage, homes, [home for home in telling if home not in lives])
        return FoundShards(
            urls=shards, table=table, versions={home: number_of(one) for home, one in lives.items()},
            schemas=schemas | {home: schema_of(storage, home, one) for home, one in lives.items()},
        )  # fmt: skip


def _find_version(
    storage: Storage, urls: str | PathLike[str] | Sequence[str | PathLike[str]], index: str | None, version: int | str
) -> FoundShards:  # fmt: skip
    """Return the shards of a version of the sets in these directories, by its chunk table; nothing is listed.

    Raises:
        ConfigError: One of the places is no directory of a set, or has no such version.
        IndexMismatchError: A shard of it is not what it was.
    """
    homes = folders_of(urls)
    specs = [urls] if isinstance(urls, (str, PathLike)) else list(urls)
    if index is not None or len(homes) != sum(len(str(spec).split("::")) for spec in specs):
        raise ConfigError(
            f"version={version!r}: a version is one of a set in a directory, with its index there; give the directory "
            "of each set, and leave index= out"
        )
    tables = {home: read_version(storage, home, version) for home in dict.fromkeys(map(as_url, homes))}
    shards = tuple(join_url(home, shard.name) for home, table in tables.items() for shard in table.shards)
    table = joined(list(tables.values()))
    if len(shards) <= CHECKED_AT_OPEN:
        with closing(StorageAhead(storage)) as ahead:
            for url in shards:
                ahead.will_ask(url)
            try:
                check_sizes(ahead, shards, table)
            except NotFoundError as error:
                raise IndexMismatchError(
                    f"version {version} of {redact(homes[0])}: one of its shards was purged: {error}; choose another "
                    f"one: shard_tools version list {shell_place(homes[0])}"
                ) from error
    return FoundShards(
        urls=shards, table=table, versions={home: number_of(one) for home, one in tables.items()},
        schemas={home: schema_of(storage, home, one) for home, one in tables.items()},
    )  # fmt: skip


def _homes(shards: Sequence[str], index: str | None) -> list[str]:
    """Return the directories of the index of these shards."""
    return [index] if index is not None else list(dict.fromkeys(split_url(url)[0] for url in shards))


def _read_ahead(storage: StorageAhead, homes: Sequence[str]) -> None:
    """Request the chunk tables in the background, each of which takes a round trip."""
    for home in homes:
        if scheme_of(home) != "file" and "{" not in home:
            storage.will_read(join_url(home, chunks_path()))


def _telling(storage: StorageAhead, homes: Sequence[str], folders: Sequence[str]) -> list[str]:
    """Return the directories that may have a schema, and begin to read it.

    Listed directories are known to have one or not; others take one request each.
    """
    urls = {home: join_url(home, SCHEMA_FILE) for home in homes}
    seen = {home: any(f"{url}/".startswith(f"{folder}/") for folder in folders) for home, url in urls.items()}
    telling = [home for home, url in urls.items() if storage.was_listed(url) or not seen[home]]
    for home in telling:
        if scheme_of(home) != "file":
            storage.will_read(urls[home])
    return telling


def _schemas(storage: StorageAhead, homes: Sequence[str], telling: Sequence[str]) -> dict[str, Schema]:
    """Return the schema of each directory's set. Log a warning if the store fails.

    Raises:
        IndexFormatError: A schema is damaged.
    """
    found = dict.fromkeys(homes, Schema())
    for home in telling:
        try:
            found[home] = read_schema(storage, home)
        except StorageError as error:
            _log.warning(
                "%s: cannot be read (%s), so nothing is known of what this set means: token fields are left as bytes",
                redact(join_url(home, SCHEMA_FILE)), error,
            )  # fmt: skip
    return found


def sample_table(storage: Storage, shards: OpenShards, shard: int) -> SampleTable | None:
    """Return the sample table of one shard; None if there is none."""
    if shards.scanned is not None:
        return shards.scanned[shard]
    return _read_samples(storage, shards, shard, SampleTable.from_parquet)


def sample_records(storage: Storage, shards: OpenShards, shard: int, fields: Sequence[str]) -> Records | None:
    """Return the locations of some fields of one shard; None if there is no sample table."""
    if shards.scanned is not None:
        return Records.of_table(shards.scanned[shard], fields)
    return _read_samples(storage, shards, shard, lambda data, source: Records.from_parquet(data, fields, source))


def spans_of_shard(storage: Storage, shards: OpenShards, shard: int) -> Spans | None:
    """Return the spans of one shard; None if there is no sample table."""
    if shards.scanned is not None:
        return Spans.of_table(shards.scanned[shard])
    return _read_samples(storage, shards, shard, Spans.from_parquet)


def _read_samples(
    storage: Storage, shards: OpenShards, shard: int, parse: Callable[[ReadBuffer, str], _Samples]
) -> _Samples | None:
    """Return the result of ``parse`` for the sample file of one shard; None if there is none."""
    url = shards.urls[shard]
    path = samples_url(url, shards.index)
    found = if_there(
        lambda: storage.read_parsed(path, parse, is_sealed), storage, url if shards.index is None else None
    )
    if found is not None:
        _check_is_of(found.chunks, shards, shard, path)
    return found


def _check_is_of(chunks: ChunkTable, shards: OpenShards, shard: int, path: str) -> None:
    """Refuse a sample table of another shard.

    Raises:
        IndexMismatchError: Its chunks are not those of the chunk table.
    """
    if shards.table is not None and chunks != shards.table.of_shard(shard):
        raise IndexMismatchError(
            f"{redact(path)}: this sample table does not match the shard that the chunk table beside it describes; one "
            f"of them is out of date. Rebuild both: shard_tools index --force {shell_place(shards.urls[shard])}"
        )


_PROBED = 8
_MOST_FOOTERS = 1024
"""Maximum number of shards searched for a field that the first ones lack: takes seconds, but the name is probably
wrong."""


_OF_FIELDS = {
    "fields": ", or leave it out to read all",
    "mask_field": ", or leave it out: then every token counts",
}
"""What a user can do instead of correcting an option that names a field."""


def check_fields(
    storage: Storage, shards: OpenShards, fields: Mapping[str, str], peers: Peers | None = None
) -> None:  # fmt: skip
    """Check that fields exist in the shards: one small request if the first shard has them all.

    With peers, rank 0 checks.

    Args:
        storage: Reads the shards' index.
        shards: The shards.
        fields: The user's option that names each field, by field.
        peers: The ranks of the job.

    Sets that can only be streamed, or whose index has no sample tables, are not checked.

    Raises:
        ConfigError: No shard has one of the fields (of at most 1,024 evenly spaced shards).
    """

    def look() -> bytes:
        _look_for(storage, shards, fields)
        return b""

    shared(peers, f"fields/{digest_of([shards.urls, shards.index, dict(fields)])}", look)


def check_decoded(
    storage: Storage, shards: OpenShards, names: Sequence[str], peers: Peers | None = None, option: str = "decode"
) -> None:
    """Warn about ``names`` in an ``option`` that match no field of the first shard; with peers, on rank 0.

    Names with ``*`` are patterns. This is not an error, because one mapping may serve several sets. Of ``decode``, also
    warn about an extension that does not reach the numbered fields with it.
    """
    plain = [name for name in names if "*" not in name]

    def look() -> bytes:
        there = _fields_of(storage, shards, 0) if plain and shards.table is not None and shards.urls else None
        if there is None:
            return b""
        reached = {*there, *(name.lower() for name in there)}
        for name in plain:
            if name not in reached:
                _log.warning(
                    "%s: no sample of %s has a field %r%s; its fields are %s", option, redact(shards.urls[0]), name,
                    did_you_mean(name.lower(), there), ", ".join(sorted(there)),
                )  # fmt: skip
            if option == "decode" and f"*.{name}" not in names and (others := numbered(name, there, names)):
                _log.warning(
                    "decode: %r does not reach %s of %s, which are decoded as if it were not given; for all of "
                    'them write decode={"*.%s": …}',
                    name, some_names(others), redact(shards.urls[0]), name,
                )  # fmt: skip
        return b""

    shared(peers if plain else None, f"decode/{digest_of([shards.urls, shards.index, plain])}", look)


def numbered(name: str, there: Iterable[str], named: Collection[str]) -> list[str]:
    """Return the fields ``0.name``, ``1.name``, … that are there and not among those named, in order."""
    if "." in name:
        return []
    found = [one for one in there if one.lower().endswith(f".{name.lower()}") and one not in named]
    return sorted((one for one in found if one.partition(".")[0].isdecimal() and one.count(".") == 1),
                  key=lambda one: int(one.partition(".")[0]))  # fmt: skip


def left_beside(
    storage: Storage, shards: OpenShards, names: Collection[str], peers: Peers | None = None
) -> tuple[str, ...]:
    """Return the numbered fields of the first shard that have an extension among ``names``, but are not named.

    With peers, rank 0 looks.
    """

    def look() -> bytes:
        there = _fields_of(storage, shards, 0) if shards.table is not None and shards.urls else None
        return json.dumps([one for name in names for one in numbered(name, there or (), names)]).encode()

    if not any("." not in name for name in names):
        return ()
    found = shared(peers, f"beside/{digest_of([shards.urls, shards.index, list(names)])}", look)
    return tuple(json.loads(found))


def _look_for(storage: Storage, shards: OpenShards, fields: Mapping[str, str]) -> None:
    count = len(shards.urls) if shards.table is not None else 0
    step = max(1, count // _MOST_FOOTERS)
    places = range(0, count, step)
    known: dict[str, None] = {}
    for some in (places[:1], places[1:]):
        for names in on_threads(partial(_fields_of, storage, shards), some, _REQUESTS, name="shardstream-fields"):
            if names is None:
                return
            known.update(dict.fromkeys(names))
        if known.keys() >= set(fields):
            return
    if not count:
        return
    missing = next(name for name in fields if name not in known)
    option = fields[missing]
    raise ConfigError(
        f"{option}: no sample of {redact(shards.urls[0])}"
        f"{f' and the {len(places) - 1} other shards looked at' if len(places) > 1 else ''} has a field "
        f"{missing!r}{did_you_mean(missing, known)}; there are {', '.join(sorted(known))}. "
        f"Correct {option}={_OF_FIELDS.get(option, '')}"
    )


def _fields_of(storage: Storage, shards: OpenShards, shard: int) -> tuple[str, ...] | None:
    """Return the fields that any sample of a shard has; None if the shard has no sample table."""
    if shards.scanned is not None:
        return tuple(shards.scanned[shard].fields)
    url = shards.urls[shard]
    facts = _footer_facts(storage, samples_url(url, shards.index), "samples")
    fields = None if facts is None else facts.get("fields", [])
    if fields is not None and not isinstance(fields, list):
        raise IndexFormatError(f"{redact(url)}: its sample table names no fields; run `shard_tools index --force`")
    return None if fields is None else tuple(map(str, fields))


def _footer_facts(storage: Storage, url: str, kind: str) -> dict[str, Any] | None:
    """Return the facts in the footer of an index file about the whole file; None if there is no such file."""
    return read_footer_of(storage, url, lambda tail, source: read_facts(tail, kind, source))


def _check_no_index(storage: Storage, urls: Sequence[str], index: str | None, missing: IndexMissingError) -> None:
    """Refuse an index that lacks some of its shards, and so is out of date. Shards without any index are accepted.

    Raises:
        NotFoundError: A shard that the index lacks does not exist.
        IndexMissingError: The directory named by ``index`` holds no index.
        IndexMismatchError: There is an index, but not of all these shards.
    """
    for home in _homes(urls, index):
        group = [url for url in urls if index is not None or split_url(url)[0] == home]
        beside = group[0] if index is None else None
        if if_there(lambda home=home: storage.info(join_url(home, chunks_path())), storage, beside) is None:  # type: ignore[misc]
            continue
        try:
            load_index(storage, group, index)
        except IndexMissingError as error:
            _check_some_exist(storage, home, group, index)
            raise IndexMismatchError(
                f"{error}. There is an index, but this shard is not in it: it was added after the others were indexed. "
                f"Index it with the command above, or leave the shard out of the URLs"
            ) from error
    if index is not None:
        raise IndexMissingError(
            f"index={redact(index)!r}: no index of these shards there ({missing}). Build one with `shard_tools index "
            f"--index {shell_place(index)} URL`, or leave index= out"
        ) from missing


def _check_some_exist(storage: Storage, home: str, urls: Sequence[str], index: str | None) -> None:
    """Request the first few shards that the index does not have: a mistyped URL is not a stale index."""
    facts = _footer_facts(storage, join_url(home, chunks_path()), "chunks") or {}
    known = {name for name, *_ in facts.get("shards", ())}
    unknown = [url for url in urls if shard_name(url, index) not in known]
    for url in unknown[:_PROBED]:
        storage.info(url)


def _check_all_listed(tables: Mapping[str, ChunkTable], folders: Sequence[str], shards: Sequence[str]) -> None:
    """Check that no shard has vanished: a directory or prefix stands for every shard that its index has.

    Raises:
        IndexMismatchError: A shard no longer exists.
    """
    found = set(shards)
    for home, table in tables.items():
        if not any(f"{home}/".startswith(f"{folder}/") for folder in folders):
            continue
        gone = [shard.name for shard in table.shards if join_url(home, shard.name) not in found]
        if gone:
            raise IndexMismatchError(
                f"{redact(join_url(home, gone[0]))}: the index lists this shard, but the store does not have it "
                f"({len(gone)} of its shards are missing). Restore it, or remove it from the index: "
                f"shard_tools index --prune {shell_place(home)}"
            )


def _without_index(storage: Storage, urls: tuple[str, ...], missing: IndexMissingError) -> FoundShards:
    sizes = tuple(on_threads(lambda url: storage.info(url).size_bytes, urls, _REQUESTS, name="shardstream-open"))
    compressed = [url for url in urls if url.partition("?")[0].endswith((".gz", ".tgz"))]
    total_bytes = sum(sizes)
    if total_bytes <= SCAN_LIMIT_BYTES and not compressed:
        return FoundShards(urls=urls, table=None, sizes=sizes)
    why = (
        f"{compressed[0]} is compressed, and compressed shards cannot be indexed until they are unpacked (`gunzip`)"
        if compressed
        else f"{missing}; its {format_bytes(total_bytes)} are too much to index at every start"
    )
    return FoundShards(urls=urls, table=None, missing_index=why)


def _scan(
    storage: Storage,
    urls: tuple[str, ...],
    sizes: list[int],
    peers: Peers | None,
    duplicate_keys: DuplicateKeys,
) -> list[SampleTable]:
    """Return the sample tables of all shards. With peers, scan every R-th here and wait for the others."""

    def scan(place: int) -> SampleTable:
        return scan_shard(storage, urls[place], split_url(urls[place])[1], duplicate_keys=duplicate_keys)

    def scan_all(places: Sequence[int]) -> list[SampleTable]:
        return on_threads(scan, places, _REQUESTS, name="shardstream-open")

    if peers is None:
        return scan_all(range(len(urls)))
    digest = digest_of([urls, sizes, duplicate_keys])
    mine = range(peers.rank, len(urls), peers.world_size)
    found = dict(zip(mine, scan_all(mine), strict=True))
    for place, table in found.items():
        peers.leave(f"{digest}/{place}", table.to_parquet())
    missing: list[int] = []
    for place in range(len(urls)):
        if place not in found:
            data = None if missing else peers.find(f"{digest}/{place}", PEER_WAIT_S)
            if data is None:
                missing.append(place)
            else:
                found[place] = SampleTable.from_parquet(data, f"{redact(urls[place])} (by a peer)")
    found.update(zip(missing, scan_all(missing), strict=True))
    return [found[place] for place in range(len(urls))]
