"""Sum up a set: the command ``stats``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from shard_tools.change.sets.inspect import shards_unlike_index
from shard_tools.change.sets.open_set import OpenSet, open_set
from shard_tools.look.stats.journal import TotalsJournal
from shard_tools.look.stats.report import StatsReport, kinds_of
from shard_tools.look.stats.shard import ShardReader, StatsPart
from shard_tools.look.stats.surprises import Facts, surprises
from shard_tools.look.stats.totals import Totals
from shard_tools.running.engine import Calls
from shard_tools.running.progress import NoProgress, Progress
from streaming.errors import ConfigError, DataError, StorageError
from streaming.sets.filters.late_columns import LateColumn
from streaming.sets.filters.select import Subset
from streaming.shards.index.layout import chunks_path
from streaming.shards.index.selection import Selection
from streaming.storage import Storage, join_url, redact
from streaming.types import Int64Array

DEFAULT_LIMIT = 2000
"""Default number of samples to read: shares are within 2 points, and a 1 in 500 case is seen with probability 98 %."""
JOURNALS = "~/.cache/shardstream/stats"
_RUN = 4  # adjacent samples: neighbors show the order, and cost no further request
_WIDTHS = {"uint16": 2, "uint32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsOptions:
    """Options of the command ``stats``.

    Attributes:
        where: Only samples that meet this condition.
        view: Only samples of this saved view.
        subset: A range of the stored samples.
        limit: Number of samples whose bytes are read; None: all.
        seed: Seed of their choice.
        journal: Folder or prefix in which a run over all bytes keeps its progress; "": none is kept.
        save_every_s: Seconds between two writes of the progress.
        workers: Number of shards read in parallel.
    """

    where: str | None = None
    view: str | None = None
    subset: Subset | None = None
    limit: int | None = DEFAULT_LIMIT
    seed: int = 0
    journal: str = ""
    save_every_s: float = 30.0
    workers: int = 8


def stats(
    urls: Sequence[str],
    *,
    storage: Storage,
    index_url: str | None = None,
    options: StatsOptions | None = None,
    allow_unfinished: bool = False,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> StatsReport:
    """Return the contents of a set, and what will surprise in training.

    Sizes, keys and columns cover all samples, from the index; a small set without an index is read for them. Facts that
    only bytes show (modes of images, lengths of texts, classes without a column, repeated contents) come from ``limit``
    samples in runs of four: the set is divided into equal parts, and each part gives one run.

    Memory: the sample tables and requests of ``2 * workers`` shards, and summaries that do not grow with the set.

    Args:
        urls: Shards, as for ``StreamingDataset``.
        storage: Their store.
        index_url: Location of the index, if not beside the shards.
        options: Options of the command.
        allow_unfinished: Use the finished part of an unfinished set.
        executor: Executor that reads the shards, such as a cluster, instead of threads.
        progress: Receives shards and bytes.

    Raises:
        ConfigError: A mixture is given; a column or the view does not exist; no sample is kept; or the executor is on a
            machine that cannot see these files.
        IndexMissingError: There is no index and the set is too large to read for this.
        IndexFormatError: A sample table is damaged.
        NotFoundError: Nothing matches ``urls``.
    """
    options = options or StatsOptions()
    progress = progress or NoProgress()
    _refuse_mixtures(urls)
    shards = open_set(urls, storage, index_url, allow_unfinished=allow_unfinished, meets=False)
    kept = shards.kept(storage, where=options.where, view=options.view, subset=options.subset)
    late, beside = _late_columns(shards, storage)
    counts = _samples_of_shards(shards, kept)
    chosen = choose(int(counts.sum()), options.limit, options.seed)
    reader = ShardReader(
        storage=storage, index_url=index_url, late=late, token_bytes=_token_bytes(shards, storage),
        reads_all=chosen is None, seed=options.seed,
    )  # fmt: skip
    progress.start(total_bytes=None, total=len(shards.urls))
    calls = Calls(workers=options.workers, executor=executor, progress=progress)
    totals = _sum_up(reader, _Parts(shards, kept, counts, chosen), options, calls)
    kinds = kinds_of(totals)
    rows = shards.chunks if kept is None else kept.table
    facts = Facts(
        urls=tuple(urls), totals=totals, kinds=kinds,
        shard_bytes=np.array([shard.size_bytes for shard in shards.chunks.shards], np.int64),
        chunk_bytes=rows.byte_end - rows.byte_start, chunk_samples=rows.num_samples,
        has_index=shards.scanned is None, unfinished=tuple(mark.state for mark in shards.marks),
        beside=(*beside, *totals.late_errors),
        unlike=tuple(shards.unlike(storage)),
        gone=tuple(shards_unlike_index(shards, urls, storage)) if shards.scanned is None else (),
    )  # fmt: skip
    filters = {"where": options.where, "view": options.view, "subset": options.subset}
    return StatsReport(
        url=" ".join(map(redact, urls)),
        num_bytes=int(facts.shard_bytes.sum()) if kept is None else int(totals.sizes.total),
        num_shards=len(shards.urls) if kept is None else int((counts > 0).sum()),
        num_chunks=rows.num_chunks,
        totals=totals,
        kinds=kinds,
        found=surprises(facts),
        seed=options.seed,
        selected=", ".join(f"{name} {value}" for name, value in filters.items() if value is not None),
    )


def choose(num_samples: int, limit: int | None, seed: int) -> Int64Array | None:
    """Choose ``limit`` of ``num_samples`` samples, in runs of four, one run per equal part of the set; None: all.

    Returns:
        int64 ``[limit]``, ascending numbers.
    """
    if limit is None or limit >= num_samples:
        return None
    num_runs, num_taken = -(-num_samples // _RUN), -(-limit // _RUN)
    borders = np.arange(num_taken + 1) * num_runs // num_taken
    drawn = np.random.default_rng(seed).random(num_taken)
    runs = borders[:-1] + (drawn * np.diff(borders)).astype(np.int64)
    chosen = (runs[:, None] * _RUN + np.arange(_RUN)).ravel()
    found: Int64Array = chosen[chosen < num_samples][:limit]
    if len(found) < limit:  # the last run was shorter
        others = np.setdiff1d(np.arange(min(num_samples, limit + _RUN)), found)
        found = np.sort(np.concatenate((found, others[: limit - len(found)])))
    return found


def _refuse_mixtures(urls: Sequence[str]) -> None:
    for url in urls:
        if url.partition("?")[0].endswith(".json"):
            raise ConfigError(
                f"{redact(url)}: expected shards, got what looks like the file of a mixture; run `shard_tools stats` "
                "for the url of each of its sources, with the where, view and subset that the file gives it"
            )


def _late_columns(shards: OpenSet, storage: Storage) -> tuple[list[LateColumn], tuple[str, ...]]:
    """Return the late columns, or the reasons why they cannot be read."""
    try:
        return list(shards.late_columns(storage).values()), ()
    except DataError as error:
        return [], (str(error),)
    except StorageError:  # a store that cannot list
        return [], ()


def _token_bytes(shards: OpenSet, storage: Storage) -> Mapping[str, Mapping[str, int]]:
    """Return the width of the tokens of each field, by directory of the index."""
    return {
        home: {name: _WIDTHS[one.dtype] for name, one in schema.tokens.items()}
        for home, schema in shards.schemas(storage).items()
    }


def _samples_of_shards(shards: OpenSet, kept: Selection | None) -> Int64Array:
    """Return the number of counted samples per shard, int64 [S]."""
    if kept is None:
        return np.array([shard.num_samples for shard in shards.chunks.shards], np.int64)
    table = kept.table
    return np.bincount(table.shard, table.num_samples, len(shards.urls)).astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """The parts of shards to read.

    Attributes:
        shards: The set.
        kept: The samples to count; None: all.
        counts: Number of counted samples per shard, int64 ``[S]``.
        chosen: Ascending numbers, among the counted samples, of those whose bytes are read; None: all.
    """

    shards: OpenSet
    kept: Selection | None
    counts: Int64Array
    chosen: Int64Array | None

    def behind(self, num_done: int) -> Iterator[StatsPart]:
        """Yield the parts of all shards after the first ``num_done``."""
        offsets, numbers = np.concatenate(([0], np.cumsum(self.counts))), None
        for position in range(num_done, len(self.counts)):
            if self.chosen is not None:
                low, high = np.searchsorted(self.chosen, offsets[position : position + 2])
                numbers = self.chosen[low:high] - offsets[position]
            yield StatsPart(
                position=position, url=self.shards.urls[position], chunks=self.shards.chunks.of_shard(position),
                scanned=None if self.shards.scanned is None else self.shards.scanned[position],
                rows=None if self.kept is None else np.flatnonzero(self.kept.mask(position)), numbers=numbers,
            )  # fmt: skip


def _sum_up(reader: ShardReader, parts: _Parts, options: StatsOptions, calls: Calls) -> Totals:
    """Return the totals of all shards, continuing after those in a journal."""
    journal, shards = None, parts.shards
    done, totals = 0, Totals()
    if options.journal and reader.reads_all:
        kept = "" if parts.kept is None else parts.kept.identity
        columns = {column.name: column.version for column in reader.late}
        work = {"set": shards.chunks.fingerprint, "kept": kept, "columns": columns, "seed": options.seed}
        journal = TotalsJournal(
            folder=options.journal,
            storage=reader.storage,
            work=work,
            every_s=options.save_every_s,
            is_needed=options.journal != JOURNALS,
        )
        done, totals = journal.load()
        calls.progress.advance(num=done)
    num_shards = len(shards.urls)
    shared = [(reader.storage, url) for url in (shards.urls[0], join_url(shards.homes[0], chunks_path()))]
    with closing(calls.map(reader.read, parts.behind(done), shared=shared)) as found:
        for number, one in enumerate(found, start=done + 1):
            totals.merge(one)
            if journal is not None and number < num_shards:
                journal.note(number, totals)
    if journal is not None:
        journal.close()
    return totals
