"""Compare the index with every byte of the shards: the command ``verify``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import click

from shard_tools.change.check.shard_check import ShardCheck, ShardOutcome, ShardTask
from shard_tools.change.fields.check import check_fields
from shard_tools.change.sets.index_files import check_beside
from shard_tools.change.sets.open_set import keys_again, load_samples, names_shards, place_of, unfinished, unlike_sets
from shard_tools.make.convert.journal import whole_journal
from shard_tools.running.engine import DEFAULT_WORKERS, Calls
from shard_tools.running.printing import rate, show_findings, show_passed_over
from shard_tools.running.progress import NoProgress, Progress
from shard_tools.running.report import Finding, Report, plain
from streaming.build.decode import FieldDecoder, resolve_decoders
from streaming.common.arguments import counted, format_bytes
from streaming.errors import IndexFormatError, IndexMissingError, NotFoundError, shell_place
from streaming.shards.catalog.build import home_of, read_chunks, shard_name
from streaming.shards.catalog.unfinished import expand_whole
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.layout import chunks_path
from streaming.shards.tar.passed_over import PassedOver
from streaming.storage import Storage, join_url, split_url
from streaming.types import DuplicateKeys

_MAX_DUPLICATES = 1000  # findings; beyond that only their number is reported


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport(Report):
    """The findings, in the order of the shards, and the fields that have no safe decoder.

    Files that belong to no sample are not a finding: they are counted, and the first ones named.
    """

    findings: tuple[Finding, ...]
    num_shards: int
    num_samples: int
    num_bytes: int
    seconds: float
    not_decoded: tuple[str, ...] = ()
    num_passed_over: int = 0
    first_passed_over: tuple[str, ...] = ()


def verify(
    urls: Sequence[str],
    *,
    storage: Storage,
    index_url: str | None = None,
    decode: bool = False,
    duplicate_keys: DuplicateKeys = "error",
    allow_unfinished: bool = False,
    workers: int = DEFAULT_WORKERS["local"],
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Read every byte of the shards once, and compare it with the index.

    This checks the sizes, the CRC32C of every chunk, the checksum of every member header, that members and samples fill
    the chunks exactly, the number of samples, the sample tables' keys and byte ranges, that keys are unique in the data
    set, that samples of a converted set have the fields that the conversion writes, that nothing follows the archive's
    end, that no shard is missing, and (for a folder or prefix) that the index lists every shard; with ``decode`` also
    that every field can be decoded. Every file of the index is read whole: values that are not in the shards, such as
    columns, are compared with the checksum in each file. The tars of late fields are read as well. Sets whose schemas
    contradict each other are a finding.

    Args:
        urls: Shards, as for ``StreamingDataset``.
        storage: Store of the shards.
        index_url: Location of the index, if not beside the shards.
        decode: Whether to decode every field.
        duplicate_keys: ``"keep"``: a key that occurs twice is not a finding.
        allow_unfinished: An unfinished set is not a finding.
        workers: Shards checked in parallel; each holds one chunk in memory.
        executor: Executor on which to check them, such as a cluster, instead of on threads.
        progress: Receives the number of shards and bytes.

    Raises:
        NotFoundError: Nothing matches ``urls``.
        IndexMissingError: There is no index to check against.
        IndexFormatError: The chunk table itself cannot be read.
        AccessDeniedError: The store refuses access.
        ConfigError: The executor is on a machine that does not see these files.
    """
    started = time.monotonic()
    progress = progress or NoProgress()
    shards, marks = expand_whole(urls, storage, allow_unfinished=True)
    whole = not names_shards(urls)
    tasks, findings = _plan(shards, storage, index_url, whole=whole, marked=[mark.directory for mark in marks])
    if not allow_unfinished:
        findings = unfinished(marks) + findings
    progress.start(total_bytes=sum(task.chunks.shards[0].size_bytes for task in tasks), total=len(tasks))
    call = partial(_check, storage, resolve_decoders("auto") if decode else None)
    shared = [(storage, at) for url in shards[:1] for at in (url, join_url(home_of(url, index_url), chunks_path()))]
    outcomes = list(Calls(workers=workers, executor=executor, progress=progress).map(call, tasks, shared=shared))
    owners = {
        (int(task.chunks.crc32c[0]), int(task.chunks.byte_end[0])): task.url for task in tasks if task.chunks.num_chunks
    }
    for outcome in outcomes:
        findings += _named(outcome, owners)
    rows_of = {task.url: task.chunks for task in tasks}
    findings += check_beside(rows_of, storage=storage, index_url=index_url)
    findings += check_fields(rows_of, storage=storage, index_url=index_url, workers=workers)
    with suppress(IndexFormatError):  # check_beside reports it
        findings += unlike_sets([*dict.fromkeys(home_of(url, index_url) for url in shards)], storage)
    if duplicate_keys == "error":
        findings += repeated_keys(tasks, outcomes, storage)
    passed_over = sum((outcome.passed_over for outcome in outcomes), PassedOver())
    return VerifyReport(
        findings=tuple(findings),
        num_shards=len(tasks),
        num_samples=sum(outcome.key_hashes.size for outcome in outcomes),
        num_bytes=sum(outcome.num_bytes for outcome in outcomes),
        seconds=time.monotonic() - started,
        not_decoded=tuple(sorted({name for outcome in outcomes for name in outcome.not_decoded})),
        num_passed_over=passed_over.num_files,
        first_passed_over=passed_over.first,
    )


def _plan(
    shards: Sequence[str], storage: Storage, index_url: str | None, *, whole: bool, marked: Sequence[str]
) -> tuple[list[ShardTask], list[Finding]]:
    """Return the tasks, and the findings that need no shard to be read."""
    findings: list[Finding] = []
    promised: dict[str, ChunkTable] = {}  # by URL, each a table of one shard
    named = {(home_of(url, index_url), shard_name(url, index_url)): url for url in shards}
    folders = {home_of(url, index_url): split_url(url)[0] for url in reversed(shards)}
    fields: dict[str, Mapping[str, bool] | None] = {}  # by URL
    versions: dict[str, int] = {}  # of sets that live, by the directory of the index
    for home, folder in folders.items():
        group = [url for url in shards if home_of(url, index_url) == home]
        table = _chunk_table(storage, home, folder, group, index_url, is_marked=folder in marked)
        converted = _converted_fields(storage, home, table)
        if table.version is not None:
            versions[home] = table.version.number
        for shard in table.shards:
            url = named.get((home, shard.name), place_of(shard.name, folder, index_url))
            promised[url] = table.select([shard.name])
            fields[url] = converted
    tasks: list[ShardTask] = []
    for url in sorted({*shards, *promised}) if whole else shards:
        if url in promised:
            tasks.append(ShardTask(url=url, chunks=promised[url], index_url=index_url, fields=fields[url]))
        else:
            findings.append(_unindexed(url, home_of(url, index_url), versions, marked))
    return tasks, findings


def _unindexed(url: str, home: str, versions: Mapping[str, int], marked: Sequence[str]) -> Finding:
    """Return the finding for a shard that the index does not list."""
    what = "the shard is in the store but not in the index"
    cure = "run `shard_tools index` to add it, or remove it"
    if split_url(url)[0] in marked:
        cure = "run the command again that writes this set"
    elif home in versions:
        what = f"not in version {versions[home]} of this set: it was replaced or deleted, or is being added"
        place = shell_place(home)
        cure = f"check the set: shard_tools verify {place}; earlier versions go: shard_tools version prune {place}"
    return Finding(kind="unindexed", shard=url, what=what, cure=cure)


def _chunk_table(
    storage: Storage, home: str, folder: str, shards: Sequence[str], index_url: str | None, *, is_marked: bool
) -> ChunkTable:
    """Return the chunk table; for an unfinished set, the rows of the shards that have a sample table."""
    try:
        return read_chunks(storage, home)
    except NotFoundError as error:
        if is_marked:
            tables = (load_samples(storage, url, index_url) for url in shards)
            known = [table.chunks for table in tables if table is not None]
            return ChunkTable.concat(known)
        if not storage.exists(shards[0]):
            raise NotFoundError(f"{shards[0]}: no such shard, and no index that promises it; check the URL") from error
        raise IndexMissingError(
            f"{join_url(home, chunks_path())}: the shards in {folder or '.'} have no index to check against; "
            "make one with `shard_tools index`, or say where it lies with --index"
        ) from error


def _converted_fields(storage: Storage, home: str, table: ChunkTable) -> Mapping[str, bool] | None:
    """Return the fields that ``convert`` wrote in a directory; None if another program has written there since."""
    with suppress(IndexFormatError):  # check_beside reports it
        journal = whole_journal(home, storage, table.total_samples)
        return None if journal is None else journal.fields
    return None


def _check(storage: Storage, decoder: FieldDecoder | None, task: ShardTask, progress: Progress) -> ShardOutcome:
    """Check one shard, in this process or another."""
    outcome = ShardCheck(task=task, storage=storage, decoder=decoder, progress=progress).run()
    progress.advance(num=1)
    return outcome


def _named(outcome: ShardOutcome, owners: Mapping[tuple[int, int], str]) -> Sequence[Finding]:
    """Return the findings; for a wrong first chunk, name the shard that begins with these bytes, if there is one."""
    other = None if outcome.first is None else owners.get(outcome.first)
    if other is None:
        return outcome.findings
    at = next(number for number, finding in enumerate(outcome.findings) if finding.kind == "checksum")
    swapped = replace(outcome.findings[at], what=f"the bytes are those of {other}: swapped?")
    return (*outcome.findings[:at], swapped, *outcome.findings[at + 1 :])


def repeated_keys(tasks: Sequence[ShardTask], outcomes: Sequence[ShardOutcome], storage: Storage) -> list[Finding]:
    """Find every key that occurs again, in its shard or a later one; return the first thousand, and the total.

    Keys are compared by a 64-bit hash first, then as text. The text comes from the sample tables of the shards
    concerned; a shard without a sample table already has a finding for that.
    """
    findings: list[Finding] = []
    total = 0
    for number, key, before in keys_again(
        [outcome.key_hashes for outcome in outcomes],
        lambda number, rows: _keys_at(tasks[number], outcomes[number], storage, rows),
    ):
        total += 1
        if total <= _MAX_DUPLICATES:
            findings.append(_duplicate(key, tasks[number].url, tasks[before].url))
    if total > len(findings):
        findings[-1] = replace(findings[-1], what=f"{findings[-1].what}, and so do {total - len(findings):,} more")
    return findings


def _keys_at(task: ShardTask, outcome: ShardOutcome, storage: Storage, rows: Sequence[int]) -> list[str]:
    try:
        table = load_samples(storage, task.url, task.index_url) if rows else None
    except IndexFormatError:
        return []
    if table is None or table.num_samples != outcome.key_hashes.size:
        return []
    return [table.keys[row] for row in rows]


def _duplicate(key: str, url: str, before: str) -> Finding:
    return Finding(
        kind="duplicate",
        shard=url,
        key=key,
        what="the key occurs twice in this shard" if url == before else f"the key occurs in {before} too",
        cure="rewrite the shards: `shard_tools reshard SOURCE TARGET --dedupe`, or `--key-prefix {number}-`; or, if it "
        "is intended, `shard_tools verify --duplicate-keys keep`",
    )


def show_verify(report: VerifyReport) -> None:
    """Print every finding, and the total."""
    show_findings(report.findings)
    if report.not_decoded:
        click.echo(f"not decoded, for want of a safe decoder: {plain(', '.join(report.not_decoded))}", err=True)
    show_passed_over(report.num_passed_over, report.first_passed_over)
    found = counted(len(report.findings), "finding") if report.findings else "all as the index says"
    num_unindexed = sum(finding.kind == "unindexed" for finding in report.findings)
    if num_unindexed:
        found += f", {counted(num_unindexed, 'shard')} not in the index and not read"
    click.echo(
        f"{counted(report.num_shards, 'shard')}, {counted(report.num_samples, 'sample')}, "
        f"{format_bytes(report.num_bytes)} in {report.seconds:.1f} s ({rate(report.num_bytes, report.seconds)}): "
        f"{found}"
    )
