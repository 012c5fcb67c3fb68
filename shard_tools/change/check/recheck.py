"""Check whether the samples in a list are still bad (``verify --bad``), reading only their bytes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import click
import numpy as np

from shard_tools.change.check.shard_check import undecodable
from shard_tools.change.sets.bad_list import BadList, rows_of, shards_by_shown_url
from shard_tools.change.sets.open_set import load_samples
from shard_tools.change.sets.pieces import ShardPieces, read_pieces
from shard_tools.running.engine import DEFAULT_WORKERS, Calls
from shard_tools.running.progress import NoProgress, Progress
from shard_tools.running.report import Finding, Report
from streaming.build.batches.bad_file import BadRecord
from streaming.build.decode import FieldDecoder, resolve_decoders
from streaming.common.arguments import counted, format_bytes
from streaming.errors import ChecksumError, DataError, IndexMismatchError, StorageError
from streaming.shards.catalog.build import no_samples, samples_url
from streaming.shards.catalog.listing import StorageAhead
from streaming.shards.catalog.unfinished import Marks
from streaming.shards.catalog.urls import expand_urls
from streaming.shards.index.sample_table import SampleTable
from streaming.storage import Storage

_CURE = "restore the shard, or write the set without it: `shard_tools reshard --drop`"

_KINDS = ((ChecksumError, "checksum"), (IndexMismatchError, "size"), (DataError, "tar"), (StorageError, "read"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecheckReport(Report):
    """The result of checking the samples in a list.

    Attributes:
        findings: Samples that are still bad, each with its reason.
        num_listed: Records in the list.
        num_samples: Samples read.
        num_good: Samples that can now be read and decoded; user transforms are not run.
        num_elsewhere: Records that refer to other shards than those checked.
        num_unreadable: Lines of the list that are not records.
        num_bytes: Bytes read.
        seconds: Wall time.
    """

    findings: tuple[Finding, ...]
    num_listed: int
    num_samples: int
    num_good: int
    num_elsewhere: int
    num_unreadable: int
    num_bytes: int
    seconds: float


def recheck(
    urls: Sequence[str],
    bad: BadList,
    *,
    storage: Storage,
    index_url: str | None = None,
    allow_unfinished: bool = False,
    workers: int = DEFAULT_WORKERS["local"],
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> RecheckReport:
    """Read the samples in a list again, check their bytes against the index, and decode every field.

    Args:
        urls: Shards to check, as for ``StreamingDataset``; none: those of the list.
        bad: The list.
        storage: Store of the shards.
        index_url: Location of the index, if not beside the shards.
        allow_unfinished: Accept an unfinished set.
        workers: Shards checked in parallel.
        executor: Executor on which to check them, such as a cluster, instead of on threads.
        progress: Receives the number of shards.

    Raises:
        NotFoundError: Nothing matches ``urls``.
        ConfigError: Two shards have the same URL once secrets are removed, or the executor is on a machine that does
            not see these files.
    """
    started = time.monotonic()
    progress = progress or NoProgress()
    shards = {url: url for url in bad.by_shard}
    if urls:
        shards = shards_by_shown_url(expand_urls(list(urls), storage))
        with closing(StorageAhead(storage)) as ahead:
            Marks(ahead, [], list(shards.values())).check(allow_unfinished=allow_unfinished)
    todo = [(shards[shown], records) for shown, records in bad.by_shard.items() if shown in shards]
    progress.start(total_bytes=None, total=len(todo))
    totals = [0, 0, 0]
    findings: list[Finding] = []
    calls = Calls(workers=workers, executor=executor, progress=progress)
    shared = [(storage, place) for url, _ in todo[:1] for place in (url, samples_url(url, index_url))]
    call = partial(_check, storage, resolve_decoders("auto"), index_url)
    for found, *numbers in calls.map(call, todo, shared=shared):
        findings += found
        totals = [a + b for a, b in zip(totals, numbers, strict=True)]
    return RecheckReport(
        findings=tuple(findings),
        num_listed=bad.num_records,
        num_samples=totals[0],
        num_good=totals[1],
        num_elsewhere=bad.num_records - sum(len(records) for _, records in todo),
        num_unreadable=bad.num_unreadable,
        num_bytes=totals[2],
        seconds=time.monotonic() - started,
    )


def _check(
    storage: Storage, decoder: FieldDecoder, index_url: str | None, item: tuple[str, Sequence[BadRecord]],
    progress: Progress,
) -> tuple[list[Finding], int, int, int]:  # fmt: skip
    """Check the listed samples of one shard; return findings, samples, good ones and bytes."""
    url, records = item
    shard = _Shard(url, storage, decoder)
    shard.check(records, index_url)
    progress.advance(num=1)
    return shard.findings, shard.num_samples, shard.num_good, shard.num_bytes


class _Shard:
    """One shard's part of a list; used once, by one thread."""

    def __init__(self, url: str, storage: Storage, decoder: FieldDecoder) -> None:
        self.findings: list[Finding] = []
        self.num_samples = self.num_good = self.num_bytes = 0
        self._url, self._storage, self._decoder = url, storage, decoder

    def check(self, records: Sequence[BadRecord], index_url: str | None) -> None:
        """Check the samples of all records."""
        try:
            table = load_samples(self._storage, self._url, index_url)
        except DataError as error:
            self._find("index", f"the sample table is damaged: {error}")
            return
        if table is None:
            raise no_samples(self._url)
        keys = {key: row for row, key in enumerate(table.keys)} if any(record.key for record in records) else {}
        rows: dict[int, None] = {}
        for record in records:
            found = rows_of(record, table, keys)
            rows.update(dict.fromkeys(found))
            if not found:
                self._find("samples", "the index has no such sample", key=record.key or None)
        pieces = ShardPieces.of(self._url, table)
        for row in sorted(rows):
            self.num_samples += 1
            self.num_good += self._check_sample(row, table, pieces)

    def _find(self, kind: str, what: str, **facts: object) -> None:
        self.findings.append(Finding(kind=kind, shard=self._url, what=what, cure=_CURE, **facts))  # type: ignore[arg-type]

    def _check_sample(self, row: int, table: SampleTable, pieces: ShardPieces) -> bool:
        piece = int(pieces.piece_of(np.array([row]))[0])
        wanted = pieces.range(piece, piece + 1)
        key = table.keys[row]
        begin, end = table.record_starts[row : row + 2].tolist()
        self.num_bytes += wanted.num_bytes
        number = row - int(pieces.bounds[piece])
        try:
            buffer, layout = read_pieces(self._storage, wanted, lambda: table)
            if number in layout.damage:
                raise layout.damage[number]
        except (DataError, StorageError) as error:
            kind = next(kind for type_, kind in _KINDS if isinstance(error, type_))
            self._find(kind, f"cannot be read: {error}", key=key, byte_start=begin, byte_end=end)
            return False
        wrong = list(undecodable(self._decoder, layout, memoryview(buffer), [number], self._url, set()))
        for _, _, what in wrong:
            self._find("decode", what, key=key, byte_start=begin, byte_end=end)
        return not wrong


def show_recheck(report: RecheckReport) -> None:
    """Print every sample that is still bad, and the total."""
    for finding in report.findings:
        click.echo(str(finding))
    if report.num_unreadable:
        click.echo(f"cut off or no record: {counted(report.num_unreadable, 'line')} of the list", err=True)
    if report.num_elsewhere:
        click.echo(f"of other shards than those named: {counted(report.num_elsewhere, 'record')}", err=True)
    click.echo(
        f"{counted(report.num_listed, 'record')}, {counted(report.num_samples, 'sample')} read "
        f"({format_bytes(report.num_bytes)}) in {report.seconds:.1f} s: {report.num_good:,} good now, "
        f"{counted(len(report.findings), 'finding')}"
    )
