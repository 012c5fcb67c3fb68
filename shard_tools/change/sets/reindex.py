"""Index shards made by other programs, or shards that changed: the command ``index``."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from threading import Lock

import click
import numpy as np
import pyarrow as pa

from shard_tools.change.sets.index_files import Webshart, check_beside, webshart_beside
from shard_tools.change.sets.open_set import READ_THREADS, keys_again, place_of, sizes_of, unlike_sets
from shard_tools.make.write.mark import unmark
from shard_tools.running.engine import DEFAULT_WORKERS
from shard_tools.running.printing import rate, show_findings, show_passed_over
from shard_tools.running.processes import ProcessExecutor
from shard_tools.running.progress import NoProgress, Progress
from shard_tools.running.report import Finding, Report, plain, plain_place
from streaming.common.arguments import counted, format_bytes
from streaming.common.platforms import num_cores
from streaming.common.threads import map_threads
from streaming.errors import IndexFormatError
from streaming.shards.catalog.build import (
    home_of,
    index_shards,
    read_chunks,
    read_footer_of,
    read_schema,
    samples_url,
    shard_name,
    write_schema,
)
from streaming.shards.catalog.unfinished import Mark, expand_whole
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.columns import KEY, Values, read_sample_columns, stable_hash
from streaming.shards.index.files import is_sealed
from streaming.shards.index.layout import chunks_path, samples_path
from streaming.shards.index.sample_table import columns_from_footer
from streaming.shards.schema.meeting import RESHARD, met
from streaming.shards.schema.value import Schema
from streaming.shards.tar.passed_over import PassedOver
from streaming.shards.versions.publish import write_index
from streaming.shards.video.read import list_videos
from streaming.storage import Storage, join_url, redact, split_url
from streaming.types import DuplicateKeys, Int64Array

_log = logging.getLogger(__name__)
_MAX_KEYS = 1 << 28  # compared by hashes, which take 16 bytes each
_SHOWN = 5
_ASKED = 32  # maximum number of other shards per index whose column names are read
_PROCESSES_FROM_BYTES = 2 << 30  # below this, starting processes (about a second) costs more than they save


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexReport(Report):
    """The result of indexing.

    Attributes:
        num_shards: Number of shards named by the arguments.
        num_samples: Number of their samples.
        num_chunks: Number of their chunks.
        num_bytes: Total size of these shards.
        num_scanned_bytes: Bytes read by this run; the rest was already indexed.
        num_pruned: Number of shards removed from the index because they no longer exist.
        index_urls: URLs of the chunk tables.
        num_keys_again: Number of keys that an earlier shard has, too; None: too many samples to compare.
        first_keys_again: The first of them, each with both shards.
        lacking: Columns that the sample table of a shard lacks and others have, by shard.
        num_passed_over: Number of files that belong to no sample, in the shards that this run read.
        first_passed_over: The first of them, each with its shard and the reason.
        columns: Late columns that were added afterwards.
        video: Videos that were indexed afterwards; None: none.
        webshart: Indexes of webshart beside the shards, if this run read some: their number, and what is wrong in them.
        findings: Damaged files of the index that cannot be rebuilt from shards, such as late columns and views.
        fingerprint: Fingerprint of all these shards, in order.
        declared_whole: Directories whose mark as unfinished was removed.
        seconds: Wall time.
    """

    num_shards: int
    num_samples: int
    num_chunks: int
    num_bytes: int
    num_scanned_bytes: int
    num_pruned: int
    index_urls: tuple[str, ...]
    fingerprint: str
    declared_whole: tuple[str, ...]
    seconds: float
    num_keys_again: int | None = 0
    first_keys_again: tuple[str, ...] = ()
    lacking: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    num_passed_over: int = 0
    first_passed_over: tuple[str, ...] = ()
    columns: tuple[Report, ...] = ()
    video: Report | None = None
    webshart: Webshart = field(default_factory=Webshart)

    def as_dict(self) -> dict[str, object]:
        """Return the JSON-able form."""
        return Report.as_dict(self) | {"bytes_per_s": round(self.num_scanned_bytes / max(self.seconds, 1e-9))}


class _ScanTally:
    """Forward a scan's progress, and add up its counts. Thread-safe.

    The lock guards ``_begun``, ``num_bytes`` and ``passed_over``.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._lock = Lock()
        self._begun: set[str] = set()
        self.num_bytes = 0
        self.passed_over = PassedOver()

    def __call__(self, url: str, num_bytes: int) -> None:
        with self._lock:
            new = url not in self._begun
            self._begun.add(url)  # each shard counts once, however many of its pieces are reported
            self.num_bytes += num_bytes
        self._progress.advance(num_bytes=num_bytes, num=int(new))

    def add_passed_over(self, found: PassedOver) -> None:
        """Add files that belong to no sample."""
        with self._lock:
            self.passed_over += found  # each scanned shard reports once, from any thread


def scanning_on(
    executor: Executor | None, workers: int, total_bytes: int
) -> contextlib.AbstractContextManager[Executor | None]:
    """Return a context manager of the executor on which to scan; of None for threads."""
    if executor is None and workers > 1 and total_bytes >= _PROCESSES_FROM_BYTES:
        return ProcessExecutor(workers)
    return contextlib.nullcontext(executor)


def index(
    urls: Sequence[str],
    *,
    storage: Storage,
    index_url: str | None = None,
    workers: int = DEFAULT_WORKERS["local"],
    force: bool = False,
    prune: bool = False,
    duplicate_keys: DuplicateKeys = "error",
    allow_unfinished: bool = False,
    remakes_videos: bool = False,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> IndexReport:
    """Index shards. A shard whose index matches its size is not read again.

    All of the index is read. Damaged files are rebuilt, or listed if they cannot be rebuilt from the shards.

    Args:
        urls: Shards, as for ``StreamingDataset``.
        storage: The store.
        index_url: Where to write the index; default: beside the shards.
        workers: Shards scanned in parallel.
        force: Read every shard again; the columns of a sample table are kept if its keys are unchanged.
        prune: Remove shards from the index that are no longer in the store.
        duplicate_keys: How to treat a key that occurs twice in a shard; as for ``StreamingDataset``.
        allow_unfinished: Accept an unfinished set, index the shards that are there, and declare the set complete: the
        marks of its writers are deleted, unless the index is written to another place.
        remakes_videos: Leave damaged indexes of videos to ``index_video``, which makes them again.
        executor: Executor on which to scan, such as a cluster, instead of this machine.
        progress: Receives the bytes read and the shards begun.

    Raises:
        UnfinishedError: The set is unfinished.
        DataError: A shard is damaged; the others are indexed, and the next run reads only the missing ones.
        ConfigError: A shard is compressed; the schemas of sets that share one index contradict each other; or the
        index at ``index_url`` belongs to another folder.
        StorageError: A store failed.
    """
    started = time.monotonic()
    progress = progress or NoProgress()
    shards, marks = expand_whole(urls, storage, allow_unfinished=allow_unfinished)
    schema = _meet(shards, storage, index_url)
    total_bytes = sum(sizes_of(storage, shards))
    progress.start(total_bytes=total_bytes, total=len(shards))
    tally = _ScanTally(progress)
    with scanning_on(executor, min(workers or num_cores(), len(shards)), total_bytes) as scanning:
        table = index_shards(
            storage,
            shards,
            index_url,
            parallel=workers,
            force=force,
            executor=scanning,
            duplicate_keys=duplicate_keys,
            progress=tally,
            on_passed_over=tally.add_passed_over,
        )
    homes = tuple(dict.fromkeys(home_of(url, index_url) for url in shards))
    findings = check_beside(
        {url: table.of_shard(number) for number, url in enumerate(shards)}, storage=storage, index_url=index_url,
        damage_only=True, with_videos=not remakes_videos,
    )  # fmt: skip
    _declare(storage, index_url, schema, marks)
    with_keys = duplicate_keys == "error"
    columns, num_again, first_again = _compare_tables(shards, table, storage, index_url, with_keys=with_keys)
    return IndexReport(
        num_shards=len(shards),
        num_samples=table.total_samples,
        num_chunks=table.num_chunks,
        num_bytes=sum(shard.size_bytes for shard in table.shards),
        num_scanned_bytes=tally.num_bytes,
        num_pruned=sum(_prune(storage, home, shards, index_url) for home in homes) if prune else 0,
        index_urls=tuple(redact(join_url(home, chunks_path())) for home in homes),
        fingerprint=table.fingerprint,
        declared_whole=tuple(redact(mark.directory) for mark in marks) if index_url is None else (),
        seconds=time.monotonic() - started,
        num_keys_again=num_again,
        first_keys_again=first_again,
        lacking=_lacking(shards, columns, _other_columns(shards, homes, storage, index_url)),
        findings=tuple(findings),
        num_passed_over=tally.passed_over.num_files,
        first_passed_over=tally.passed_over.first,
        webshart=webshart_beside(shards, storage, index_url) if tally.num_bytes else Webshart(),
    )


def _declare(storage: Storage, index_url: str | None, schema: Schema, marks: Sequence[Mark]) -> None:
    """Write the schema of an index at another place; an index beside its shards declares them complete."""
    if index_url is None:
        for mark in marks:
            unmark(storage, mark.directory, also_writers=True)
    elif schema != read_schema(storage, index_url):
        write_schema(storage, index_url, schema)


def _meet(shards: Sequence[str], storage: Storage, index_url: str | None) -> Schema:
    """Merge the schemas of sets that share one index, and the index's own; warn about sets with their own index.

    Raises:
        ConfigError: The schemas of sets that share one index contradict each other.
    """
    folders = [*dict.fromkeys(split_url(url)[0] for url in shards)]
    if index_url is None:
        for finding in unlike_sets(folders, storage):
            _log.warning("%s; %s", finding.what, finding.cure)
        return Schema()
    sets = {redact(folder): read_schema(storage, folder) for folder in [index_url, *folders]}
    said = {place: schema for place, schema in sets.items() if schema}
    return met(said, cure=RESHARD).schema


def _compare_tables(
    shards: Sequence[str], table: ChunkTable, storage: Storage, index_url: str | None, *, with_keys: bool
) -> tuple[list[tuple[str, ...]], int | None, tuple[str, ...]]:
    """Return the columns of each sample table, the number of keys that occur in two shards, and the first of them."""
    is_small = table.total_samples <= _MAX_KEYS

    def keys_of(number: int) -> tuple[Values, tuple[str, ...]]:
        url = samples_url(shards[number], index_url)
        found, facts = storage.read_parsed(
            url, lambda data, source: read_sample_columns(data, [KEY], source), is_sealed
        )
        return found[KEY], tuple(facts.get("columns", ()))

    def hashed(number: int) -> tuple[Int64Array, tuple[str, ...]]:
        keys, columns = keys_of(number)
        hashes = stable_hash(keys).to_numpy(zero_copy_only=False) if with_keys and is_small else np.empty(0, np.int64)
        return hashes, columns

    found = list(map_threads(hashed, range(len(shards)), READ_THREADS))

    def keys_at(number: int, rows: Sequence[int]) -> list[str]:
        keys = keys_of(number)[0].take(pa.array(rows, pa.int64())).cast(pa.binary()).to_pylist()
        return [key.decode("utf-8", "surrogateescape") for key in keys]

    num_again = 0
    first: list[str] = []
    for number, key, before in keys_again([hashes for hashes, _ in found], keys_at):
        num_again += 1
        if num_again <= _SHOWN:
            first.append(f"{key!r} in {redact(shards[before])} and {redact(shards[number])}")
    return [columns for _, columns in found], num_again if is_small or not with_keys else None, tuple(first)


def _other_columns(shards: Sequence[str], homes: Sequence[str], storage: Storage, index_url: str | None) -> set[str]:
    """Return the columns of other shards in the same indexes.

    At most ``_ASKED`` shards per index are read, evenly spread, as a set of many shards may be indexed one by one.
    """
    urls = list[str]()
    for home in homes:
        named = {shard_name(url, index_url) for url in shards if home_of(url, index_url) == home}
        others = [shard.name for shard in read_chunks(storage, home).shards if shard.name not in named]
        urls += [join_url(home, samples_path(name)) for name in others[:: -(-len(others) // _ASKED) or 1]]

    def columns_at(url: str) -> list[str]:
        with contextlib.suppress(IndexFormatError):
            return read_footer_of(storage, url, columns_from_footer) or []
        return []

    return {name for names in map_threads(columns_at, urls, READ_THREADS) for name in names}


def _lacking(
    shards: Sequence[str], columns: Sequence[tuple[str, ...]], others: Collection[str]
) -> dict[str, tuple[str, ...]]:
    """Return the columns that each shard lacks, by shard: columns of the other shards, or in ``others``."""
    all_columns = {name for names in columns for name in names} | {*others}
    lacks = {redact(url): tuple(sorted(all_columns - {*names})) for url, names in zip(shards, columns, strict=True)}
    return {url: names for url, names in lacks.items() if names}


def _prune(storage: Storage, home: str, shards: Sequence[str], index_url: str | None) -> int:
    """Remove shards that no longer exist from the index at ``home``; return their number."""
    table = read_chunks(storage, home)
    named = {shard_name(shard, index_url): shard for shard in shards}
    folder = split_url(shards[0])[0]
    places = {shard.name: named.get(shard.name, place_of(shard.name, folder, index_url)) for shard in table.shards}
    gone = [name for name, place in places.items() if name not in named and not storage.exists(place)]
    if gone:
        left = [shard.name for shard in table.shards if shard.name not in set(gone)]
        for name in gone:  # before the chunk table that lists them, so that the next run can continue after a kill
            storage.delete(join_url(home, samples_path(name)))
        for one in list_videos(storage, home):
            if one.shard in {*gone}:
                storage.delete(one.url)
        write_index(storage, home, table.select(left), table)
    return len(gone)


def show_index(report: IndexReport) -> None:
    """Print the outcome of indexing, and damaged files that it could not rebuild."""
    show_findings(report.findings)
    click.echo(
        f"{counted(report.num_shards, 'shard')}, {counted(report.num_samples, 'sample')}, "
        f"{counted(report.num_chunks, 'chunk')}, {format_bytes(report.num_bytes)}; read "
        f"{format_bytes(report.num_scanned_bytes)} in {report.seconds:.1f} s "
        f"({rate(report.num_scanned_bytes, report.seconds)})"
    )
    for line in _oddities(report):
        click.echo(line, err=True)
    show_passed_over(report.num_passed_over, report.first_passed_over)
    if report.num_pruned:
        click.echo(f"removed from the index: {counted(report.num_pruned, 'shard')} no longer there")
    click.echo(f"index: {', '.join(map(plain_place, report.index_urls))}")
    for directory in report.declared_whole:
        click.echo(f"{plain_place(directory)} counts as a whole set from now on")


def _oddities(report: IndexReport) -> Iterator[str]:
    """Yield warnings about valid content that may be unintended."""
    if report.num_keys_again is None:
        yield "keys of different shards are not compared in a set of this size; `shard_tools verify` compares them"
    elif report.num_keys_again:
        yield (
            f"in two shards: {counted(report.num_keys_again, 'key')}, first "
            f"{plain(', '.join(report.first_keys_again))}. Training reads each of these samples, but exclude=, late "
            "columns joined by key, `cat` and --when take them for one another. `shard_tools reshard SOURCE TARGET "
            "--key-prefix '{shard}/'` tells them apart; if it is intended, give --duplicate-keys keep"
        )
    if report.webshart.num:
        yield (
            f"beside {counted(report.webshart.num, 'shard')}: an index of webshart. It has no checksums, which this "
            "index needs, so the shards were read. Its captions and sizes of images are not taken; `column add --from` "
            "takes a table of them, by key"
        )
    for line in report.webshart.unlike:
        yield f"{plain(line)}; readers of that index get other bytes: write it again, or remove it"
    if report.lacking:
        url, names = next(iter(report.lacking.items()))
        yield (
            f"without columns that other shards have, and so NULL there: {counted(len(report.lacking), 'shard')}, "
            f"first {url}: {plain(', '.join(names))}. `index` cannot know their values: repeat the command that wrote "
            "the set, with --overwrite; or add them under other names with `shard_tools column add`, --lift or --from"
        )
