"""Index shards: scan those that are not indexed yet, write the index files, and load existing ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TypeVar

import crc32c

from streaming.common.platforms import num_cores
from streaming.common.threads import on_threads
from streaming.errors import (
    AccessDeniedError,
    ConfigError,
    DataError,
    IndexFormatError,
    IndexMismatchError,
    IndexMissingError,
    NotFoundError,
    StorageError,
    first_of,
    shell_place,
)
from streaming.shards.catalog.scan import Progress, compressed_error, scan_shard, tell_passed_over
from streaming.shards.index.chunk_table import ChunkTable, VersionFacts
from streaming.shards.index.cutter import DEFAULT_RULE, ChunkRule
from streaming.shards.index.files import is_sealed, read_footer
from streaming.shards.index.layout import SCHEMA_FILE, chunks_path, samples_path
from streaming.shards.index.sample_table import SampleTable, chunk_rows_from_footer, columns_from_footer
from streaming.shards.schema.value import Schema
from streaming.shards.tar.passed_over import OnPassedOver, PassedOver
from streaming.shards.versions.current import read_current
from streaming.shards.versions.history import kept_versions, number_of
from streaming.shards.versions.publish import schema_of, write_index
from streaming.storage import Reader, Storage, WrongBytesError, join_url, redact, split_url
from streaming.types import DuplicateKeys

_T = TypeVar("_T")
_Indexed = tuple[ChunkTable, PassedOver]
"""The chunk rows of a shard, and its files that belong to no sample, as far as it was scanned."""
_log = logging.getLogger(__name__)
_COMPRESSED = (".gz", ".tgz", ".bz2", ".xz", ".zst")
_MAX_PARALLEL_REQUESTS = 32
_ASKED = 4
"""Number of other shards whose column names are read if the shard's own sample file is damaged."""


def place_in_index(url: str, index_url: str | None) -> tuple[str, str]:
    """Return the directory that holds the index of a shard, and the shard's name there: see :func:`shard_name`."""
    directory, name = split_url(url)
    if index_url is None:
        return directory, name
    above = index_url.rstrip("/") + "/"
    return index_url, f"{directory[len(above) :]}/{name}" if directory.startswith(above) else name


def shard_name(url: str, index_url: str | None = None) -> str:
    """Return the name of a shard in the index at ``index_url``: its path below that directory, or its file name."""
    return place_in_index(url, index_url)[1]


def home_of(url: str, index_url: str | None) -> str:
    """Return the directory that holds the index of the shard at ``url``."""
    return place_in_index(url, index_url)[0]


def samples_url(url: str, index_url: str | None) -> str:
    """Return the URL of the sample table of the shard at ``url``."""
    home, name = place_in_index(url, index_url)
    return join_url(home, samples_path(name))


def read_chunks(storage: Storage, home: str) -> ChunkTable:
    """Return the chunk table of the index in ``home``.

    Raises:
        NotFoundError: There is no index.
        IndexMismatchError: The set has versions, and its chunk table is missing or damaged.
        IndexFormatError: The index is damaged, or too new.
    """
    return read_current(storage, home)


def read_schema(storage: Storage, home: str) -> Schema:
    """Return the schema of the set whose index is in ``home``; an empty schema if the set states nothing.

    Raises:
        IndexFormatError: The ``schema.json`` is damaged, or of another version.
        StorageError: The store failed.
    """
    return schema_of(storage, home)


def write_schema(storage: Storage, home: str, schema: Schema) -> None:
    """Write the schema of the set whose index is in ``home``, unless it is empty."""
    if schema:
        storage.put(join_url(home, SCHEMA_FILE), schema.to_bytes())


def no_samples(url: str, why: str = "") -> IndexMissingError:
    """Return the error for a shard without a sample table; ``why`` names its purpose."""
    return IndexMissingError(
        f"{redact(url)}: the index has no sample table for this shard{why}; run `shard_tools index --force "
        f"{shell_place(url)}`"
    )


def index_shards(
    storage: Storage,
    urls: Sequence[str],
    index_url: str | None = None,
    *,
    parallel: int | None = None,
    force: bool = False,
    executor: Executor | None = None,
    rule: ChunkRule = DEFAULT_RULE,
    duplicate_keys: DuplicateKeys = "error",
    progress: Progress | None = None,
    on_passed_over: OnPassedOver | None = None,
) -> ChunkTable:
    """Index the shards at ``urls`` and write the index files. Return the chunk table of these shards, in this order.

    Each shard's sample file is written as soon as the shard is scanned, and ``chunks.parquet`` last, so an interrupted
    call continues where it stopped: a shard is not read again if it has a sample file whose chunk rows match its
    current size. All of that file is checked, and a damaged one is rebuilt, with its lifted columns. Other shards that
    the index already holds are kept. If shards are damaged, the others are still scanned, ``chunks.parquet`` is not
    changed, and the first error is raised with the others as notes.

    Args:
        storage: The store.
        urls: Shards.
        index_url: Directory in which ``_shardstream/`` is written; default: each shard's own directory.
        parallel: Number of shards scanned in parallel; default: the number of CPUs that this process may use.
        force: Scan every shard again. The lifted columns of its old sample table stay, if that is readable and has the
            same keys.
        executor: Executor on which to scan instead of threads, such as a cluster, or processes: faster for small
            records. The caller shuts it down.
        rule: Rule for cutting chunks.
        duplicate_keys: As for :func:`streaming.shards.catalog.scan.scan_shard`.
        progress: Called with scanned bytes, from any thread; with ``executor`` once per shard.
        on_passed_over: Called once if scanned shards hold files that belong to no sample; default: log a warning.

    Raises:
        ConfigError: A shard is compressed, or two shards, perhaps of different calls, have the same name in one index;
            or only earlier versions of its set have a shard.
        IndexMismatchError: The set has versions, and its chunk table is missing or damaged.
        DataError: A shard is damaged; see :func:`streaming.shards.catalog.scan.scan_shard`. Or a sample file is damaged
            and its lifted columns are lost.
        StorageError: A shard cannot be read, or the index cannot be written.
    """
    for url in urls:
        if split_url(url)[1].lower().endswith(_COMPRESSED):
            raise compressed_error(redact(url))
    known: dict[str, ChunkTable | None] = {}
    homes = _homes(urls, index_url)
    for home in homes:
        known[home] = None
        with suppress(NotFoundError, IndexFormatError):
            known[home] = read_chunks(storage, home)
    rows_of = {home: table.by_shard() if table else {} for home, table in known.items()}
    _refuse_replaced(storage, urls, {} if index_url is not None else known)
    todo = _to_do(homes, rows_of)
    if index_url is not None and not force:
        _check_same_folder(storage, todo, rows_of)
    workers = min(parallel or num_cores(), max(1, len(todo)))
    with ExitStack() as closing:
        told = None
        if executor is None:
            executor = closing.enter_context(ThreadPoolExecutor(workers, thread_name_prefix="index"))
            told = progress
        index = partial(_index_shard, storage, force=force, rule=rule, duplicate_keys=duplicate_keys, progress=told)
        futures = [executor.submit(index, one, None if force else rows_of[one.home].get(one.name)) for one in todo]
        indexed = _gather(futures, todo, progress if told is None else None)
    fresh: dict[str, dict[str, ChunkTable]] = {}
    for one, (table, _) in zip(todo, indexed, strict=True):
        fresh.setdefault(one.home, {})[one.name] = table
    merged = {home: ChunkTable.merged(rows_of[home], by_name) for home, by_name in fresh.items()}
    for home, table in merged.items():
        if table != known[home]:
            write_index(storage, home, table, known[home])
    _tell_of_all(indexed, on_passed_over or tell_passed_over)
    return in_order(urls, index_url, merged)


def _refuse_replaced(storage: Storage, urls: Sequence[str], known: Mapping[str, ChunkTable | None]) -> None:
    """Refuse shards that only earlier versions of a set have: their samples were deleted, or lie in others now.

    Args:
        storage: The store.
        urls: Shards.
        known: The chunk tables that were read already, by directory. Those of other sets are read: a set also lives if
            its shards are indexed elsewhere.

    Raises:
        ConfigError: There is such a shard.
        IndexMismatchError: A set has versions, and its chunk table is missing or damaged.
    """
    names: dict[str, set[str]] = {}
    for url in urls:
        directory, name = split_url(url)
        names.setdefault(directory, set()).add(name)

    def table_of(home: str) -> ChunkTable | None:
        if home in known:
            return known[home]
        with suppress(NotFoundError, AccessDeniedError, IndexFormatError):  # there may be no index of its own
            return read_chunks(storage, home)
        return None

    tables = on_threads(table_of, list(names), _MAX_PARALLEL_REQUESTS, name="shardstream-versions")
    for home, table in zip(names, tables, strict=True):
        if table is None or number_of(table) == 1:
            continue
        added = names[home] - {shard.name for shard in table.shards}
        for one in reversed(kept_versions(storage, home)) if added else ():
            replaced = one.table.by_shard().keys() & added
            if replaced:
                version = repr(one.name) if one.is_tag else one.number
                raise ConfigError(
                    f"{redact(join_url(home, min(replaced)))}: version {one.name} was the last one with this shard; "
                    "its samples were deleted since, or written anew, and indexing it would bring them back. Index "
                    f"the set: shard_tools index {shell_place(home)}; or open that version: version={version}"
                )


def _tell_of_all(indexed: Sequence[_Indexed], tell: OnPassedOver) -> None:
    passed_over = sum((one for _, one in indexed), PassedOver())
    if passed_over.num_files:
        tell(passed_over)


def _homes(urls: Sequence[str], index_url: str | None) -> dict[str, dict[str, str]]:
    """Return the shards by the directory that holds their index, and by their name there."""
    homes: dict[str, dict[str, str]] = {}
    for url in urls:
        home, name = place_in_index(url, index_url)
        other = homes.setdefault(home, {}).setdefault(name, url)
        if other != url:
            raise ConfigError(
                f"{redact(url)} and {redact(other)} would have the same name in the index at {redact(home)}; "
                "give each folder an index directory of its own"
            )
    return homes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Todo:
    """A shard, the directory that holds its index, its name there, and those of some other shards."""

    url: str
    home: str
    name: str
    others: tuple[str, ...]


def _to_do(homes: Mapping[str, Mapping[str, str]], rows_of: Mapping[str, Mapping[str, ChunkTable]]) -> list[_Todo]:
    found = []
    for home, group in homes.items():
        some = [*islice(group, _ASKED + 1), *islice(rows_of[home], _ASKED + 1)]
        for name, url in group.items():
            others = tuple(dict.fromkeys(other for other in some if other != name))
            found.append(_Todo(url=url, home=home, name=name, others=others))
    return found


def _check_same_folder(
    storage: Storage, todo: Sequence[_Todo], rows_of: Mapping[str, Mapping[str, ChunkTable]]
) -> None:
    """Check, for the first shard that an index elsewhere names, that the first chunk is that of this very shard.

    Raises:
        ConfigError: It belongs to another shard, perhaps of the same size, as shards of tokens often are.
    """
    for one in todo:
        rows = rows_of[one.home].get(one.name)
        if rows is not None and rows.num_chunks:
            start, end = int(rows.byte_start[0]), int(rows.byte_end[0])
            is_long = storage.info(one.url).size_bytes >= end
            if not is_long or crc32c.crc32c(storage.read(one.url, start, end)) != rows.crc32c[0]:
                raise ConfigError(
                    f"{redact(one.url)}: the index in {redact(one.home)} describes another shard of this name, of "
                    "another folder or from before it was replaced; give each folder an index directory of its own, "
                    "or, if shards were replaced, add --force"
                )
            return


def _index_shard(
    storage: Storage, todo: _Todo, rows: ChunkTable | None, *, force: bool, rule: ChunkRule,
    duplicate_keys: DuplicateKeys, progress: Progress | None,
) -> _Indexed:  # fmt: skip
    """Return the chunk rows of one shard: those of its sample file and of the chunk table, or those of a scan."""
    url, name = todo.url, todo.name
    stored_url = join_url(todo.home, samples_path(name))
    damaged = None
    if not force:
        size_bytes = storage.info(url).size_bytes
        with suppress(NotFoundError):
            try:
                found = storage.read_parsed(stored_url, partial(chunk_rows_from_footer, whole=True), is_sealed)
            except IndexFormatError:
                damaged = storage.read(stored_url)
            else:
                shard = found.shards[0]
                if (shard.size_bytes, shard.name) == (size_bytes, name) and rows in (None, found):
                    return found, PassedOver()
    passed_over: list[PassedOver] = []
    table = scan_shard(
        storage, url, name, rule=rule, duplicate_keys=duplicate_keys, progress=progress,
        on_passed_over=passed_over.append,
    )  # fmt: skip
    if force:
        data = _with_columns(storage, table, stored_url, url)
    else:
        data = table.to_parquet() if damaged is None else _restored(storage, table, damaged, todo)
    storage.put(stored_url, data)
    return table.chunks, sum(passed_over, PassedOver())


def _with_columns(storage: Storage, table: SampleTable, stored_url: str, url: str) -> bytes:
    """Return the sample file of a shard that was scanned again, with the columns of the old file if the keys agree."""
    try:
        old = storage.read_parsed(stored_url, SampleTable.from_parquet, is_sealed)
    except NotFoundError:
        return table.to_parquet()
    except IndexFormatError:
        return table.restored(storage.read(stored_url)) or table.to_parquet()
    if not old.columns or list(old.keys) != list(table.keys):
        if old.columns:
            _log.warning(
                "%s: its keys changed since it was indexed, so its columns are dropped: %s",
                redact(url), ", ".join(old.columns),
            )  # fmt: skip
        return table.to_parquet()
    if (old.shard.size_bytes, *old.span_crc32c) != (table.shard.size_bytes, *table.span_crc32c):
        _log.warning(
            "%s: its bytes changed since it was indexed, its keys did not; its columns stay as they were: %s",
            redact(url), ", ".join(old.columns),
        )  # fmt: skip
    return replace(table, columns=old.columns).to_parquet()


def _restored(storage: Storage, table: SampleTable, damaged: memoryview, todo: _Todo) -> bytes:
    """Return the sample file of a shard that replaces a damaged one.

    Raises:
        IndexFormatError: It had columns that a scan cannot give, and they cannot be distinguished from damaged ones.
    """
    original = table.restored(damaged)
    if original is not None:
        return original
    lost = _lost_columns(storage, todo)
    if lost:
        folder = shell_place(split_url(todo.url)[0])
        raise IndexFormatError(
            f"{redact(join_url(todo.home, samples_path(todo.name)))}: damaged, with its columns {', '.join(lost)}, "
            f"which the shard does not hold. Restore the file from a copy of the data set; or repeat the command that "
            f"wrote the set: `shard_tools convert` writes this shard and those after it again. Or rebuild this sample "
            f"table without them, `shard_tools index --force {shell_place(todo.url)}`, and add them under other names, "
            f"`shard_tools column add {folder} NAME …`"
        )
    return table.to_parquet()


def _lost_columns(storage: Storage, todo: _Todo) -> list[str]:
    """Return the columns of a damaged sample file by its own footer, or by that of the first other shard with one."""
    for name in (todo.name, *todo.others):
        url = join_url(todo.home, samples_path(name))
        with suppress(IndexFormatError):
            names = read_footer_of(storage, url, columns_from_footer)
            if names is not None:
                return names
    return []


def _gather(futures: Sequence[Future[_Indexed]], todo: Sequence[_Todo], progress: Progress | None) -> list[_Indexed]:
    """Return the results.

    After a damaged shard the others continue. After any other error, calls that have not begun are canceled.
    """
    indexed: list[_Indexed] = []
    errors: list[DataError] = []
    for future, one in zip(futures, todo, strict=True):
        try:
            indexed.append(future.result())
        except DataError as error:
            errors.append(error)
        except BaseException:
            for other in futures:
                other.cancel()
            raise
        if progress is not None and indexed:
            progress(one.url, indexed[-1][0].shards[0].size_bytes)
    if errors:
        raise first_of(errors, "shards are damaged")
    return indexed


def in_order(urls: Sequence[str], index_url: str | None, tables: Mapping[str, ChunkTable]) -> ChunkTable:
    """Return the rows of ``urls``, in their order, from the tables of their homes."""
    names = [(home, shard.name) for home, table in tables.items() for shard in table.shards]
    position = {name: place for place, name in enumerate(names)}
    wanted = [position[place_in_index(url, index_url)] for url in urls]
    whole = joined(list(tables.values()))
    return whole if wanted == list(range(len(names))) else whole.take(wanted)


def joined(tables: Sequence[ChunkTable]) -> ChunkTable:
    """Return several tables as one; return a single table unchanged."""
    return tables[0] if len(tables) == 1 else ChunkTable.concat(tables)


def load_index(storage: Storage, urls: Sequence[str], index_url: str | None = None) -> ChunkTable:
    """Load the chunk table of the shards at ``urls``, in this order, from their index: see :func:`load_tables`."""
    return in_order(urls, index_url, load_tables(storage, urls, index_url))


def load_tables(storage: Storage, urls: Sequence[str], index_url: str | None = None) -> dict[str, ChunkTable]:
    """Return the chunk tables of the index of the shards at ``urls``, by directory. They may include other shards.

    Each directory's ``chunks.parquet`` is read once. A shard that is not in it but has a sample file (from an
    unfinished writer or indexer) is taken from that file's footer. The shards themselves are not checked: see
    :func:`check_sizes`.

    Raises:
        IndexMissingError: A shard is in no index; the message names the command that makes one.
        IndexMismatchError: The set lives, and a shard is not in its current version.
        IndexFormatError: An index file is damaged or too new.
        ConfigError: Two shards have the same name in one index.
    """
    tables: dict[str, ChunkTable] = {}
    for home, group in _homes(urls, index_url).items():
        beside = next(iter(group.values())) if index_url is None else None
        known = if_there(partial(read_chunks, storage, home), storage, beside, tell=True)
        present = {shard.name for shard in known.shards} if known else set()
        rest = {name: url for name, url in group.items() if name not in present}
        if rest and known is not None and known.version is not None:
            raise _of_another_version(next(iter(rest.values())), home, known.version)
        parts = [known] if known else []
        if rest:
            parts += _footers(storage, home, rest, beside)
        tables[home] = joined(parts)
    return tables


def _of_another_version(url: str, home: str, version: VersionFacts) -> IndexMismatchError:
    return IndexMismatchError(
        f"{redact(url)}: not in version {version.number} of this set: it was replaced or deleted, or is being added. "
        f"Name the folder, {shell_place(home)}, for the shards of that version; earlier ones: shard_tools version list "
        f"{shell_place(home)}"
    )


def if_there(ask: Callable[[], _T | None], storage: Storage, shard: str | None, *, tell: bool = False) -> _T | None:
    """Return the result of ``ask`` for an index file; None if there is no such file.

    Without permission to list a bucket, S3 answers 403 for objects that do not exist. So a refusal means "none" if
    ``shard``, which is beside the index, can be read; None for an index elsewhere. ``tell``: log it.

    Raises:
        AccessDeniedError: The shard cannot be read either.
    """
    try:
        return ask()
    except NotFoundError:
        return None
    except AccessDeniedError:
        if shard is None:
            raise
        with suppress(StorageError):
            storage.read(shard, 0, 1)
            if tell:
                _log.warning(
                    "%s: the store denies access to the index but not to the shards, as S3 does when there is no index "
                    "and s3:ListBucket is not granted: reading the set without an index. Pass one that is stored "
                    "elsewhere as index=, or make one with `shard_tools index URL --index DIRECTORY`",
                    redact(split_url(shard)[0]),
                )
            return None
        raise


def _footers(storage: Storage, home: str, names: dict[str, str], beside: str | None) -> list[ChunkTable]:
    """Return the chunk rows of shards from their sample files; ``names`` maps names to URLs."""
    tables = []
    first, *others = names
    found = [if_there(lambda: _read_footer(storage, join_url(home, samples_path(first))), storage, beside)]
    if found[0] is not None:
        found += on_threads(
            lambda name: _read_footer(storage, join_url(home, samples_path(name))), others, _MAX_PARALLEL_REQUESTS,
            name="shardstream-footers",
        )  # fmt: skip
    for name, rows in zip(names, found, strict=False):
        if rows is None:
            target = shell_place(home)
            raise IndexMissingError(
                f"{redact(names[name])}: not in the index at {redact(join_url(home, chunks_path()))}; run "
                f"`shard_tools index {target}`, or, if you may not write there, `shard_tools index {target} --index "
                "DIRECTORY`, and pass that as index="
            )
        tables.append(rows)
    return tables


def _read_footer(storage: Storage, url: str) -> ChunkTable | None:
    """Return the chunk rows from the end of a sample file; None if there is no such file."""
    return read_footer_of(storage, url, chunk_rows_from_footer)


def read_footer_of(
    storage: Storage, url: str, parse: Callable[[bytes, str], _T], num_bytes: int | None = None
) -> _T | None:
    """Return the result of ``parse`` for the end of an index file, which holds its footer; None if there is no file.

    Wrong bytes are requested again. ``num_bytes``: the size of the file, if known.
    """
    try:
        size_bytes = storage.info(url).size_bytes if num_bytes is None else num_bytes
    except NotFoundError:
        return None

    def attempt(reader: Reader) -> _T:
        tail = b""
        try:
            tail = read_footer(partial(reader.read, url), size_bytes, redact(url))
            return parse(tail, redact(url))
        except IndexFormatError as error:
            if is_sealed(tail, whole=False):
                raise
            raise WrongBytesError(error) from error

    return storage.until_right(url, attempt)


def check_sizes(storage: Storage, urls: Sequence[str], table: ChunkTable) -> None:
    """Check that each shard at ``urls`` still has the size recorded in ``table``, which is in the same order.

    The shards are requested one by one: let ``StorageAhead`` prefetch the answers.

    Raises:
        IndexMismatchError: A shard has another size; the message names the first one.
        NotFoundError: A shard no longer exists.
    """
    for url, shard in zip(urls, table.shards, strict=True):
        size_bytes = storage.info(url).size_bytes
        if size_bytes != shard.size_bytes:
            raise IndexMismatchError(
                f"{redact(url)} has {size_bytes} bytes, but the index says {shard.size_bytes}: it was replaced or "
                f"truncated since it was indexed; run `shard_tools index {shell_place(url)}`"
            )
