"""Sum up all of a set, shard by shard in order, so that a long run can be stopped: the command ``stats``."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass

from shard_tools.change.sets.open_set import open_set
from shard_tools.look.stats.journal import TotalsJournal
from shard_tools.look.stats.report import StatsReport
from shard_tools.look.stats.survey import DEFAULT_LIMIT, SurveyedSet
from shard_tools.look.stats.totals import Totals
from shard_tools.running.engine import Calls
from shard_tools.running.progress import NoProgress, Progress
from streaming.errors import ConfigError
from streaming.sets.filters.select import Subset
from streaming.shards.index.layout import chunks_path
from streaming.storage import Storage, join_url, redact

JOURNALS = "~/.cache/shardstream/stats"


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
    filters = {"where": options.where, "view": options.view, "subset": options.subset}
    subject = SurveyedSet.of(
        urls, shards, storage, kept=kept, limit=options.limit, seed=options.seed,
        selected=", ".join(f"{name} {value}" for name, value in filters.items() if value is not None),
    )  # fmt: skip
    progress.start(total_bytes=None, total=len(shards.urls))
    calls = Calls(workers=options.workers, executor=executor, progress=progress)
    totals = _sum_up(subject, options, calls)
    return subject.report(totals, int((subject.counts > 0).sum()), subject.gone())


def _refuse_mixtures(urls: Sequence[str]) -> None:
    for url in urls:
        if url.partition("?")[0].endswith(".json"):
            raise ConfigError(
                f"{redact(url)}: expected shards, got what looks like the file of a mixture; run `shard_tools stats` "
                "for the url of each of its sources, with the where, view and subset that the file gives it"
            )


def _sum_up(subject: SurveyedSet, options: StatsOptions, calls: Calls) -> Totals:
    """Return the totals of all shards, continuing after those in a journal."""
    journal, shards, reader = None, subject.shards, subject.reader
    done, totals = 0, Totals()
    if options.journal and reader.reads_all:
        kept = "" if subject.kept is None else subject.kept.identity
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
    with closing(calls.map(reader.read, subject.parts(range(done, num_shards)), shared=shared)) as found:
        for number, one in enumerate(found, start=done + 1):
            totals.merge(one)
            if journal is not None and number < num_shards:
                journal.note(number, totals)
    if journal is not None:
        journal.close()
    return totals
