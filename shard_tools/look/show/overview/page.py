"""Show what a set is: the first page, sampled first, and refined while it is open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shard_tools.change.sets.open_set import OpenSet
from shard_tools.look.plan.sources import Reads, is_mixture_file
from shard_tools.look.show.base.page import Query, address
from shard_tools.look.show.base.samples import SampleSet
from shard_tools.look.show.base.subject import Subject
from shard_tools.look.show.overview.cards import StatsShown, stats_shown
from shard_tools.look.stats.report import StatsReport
from shard_tools.look.stats.survey import DEFAULT_LIMIT, Survey, SurveyedSet
from shard_tools.look.stats.totals import ExampleSample
from shard_tools.running.report import Report
from streaming.common.arguments import counted, format_bytes
from streaming.errors import DataError, StorageError
from streaming.sets.filters.late_columns import homes_of
from streaming.shards.index.selection import Everything
from streaming.shards.versions.current import version_names
from streaming.storage import redact

ASKS = ("source", "whole")
SECONDS = 0.4
"""Time that one request spends on reading further shards; the page asks again every second."""
FIRST_SECONDS = 0.1
"""The same of the first request, whose answer opens the page."""
WHOLE_SECONDS = 30.0
"""Time limit of a request for a report that needs no refinement, such as that of ``--html``."""
_SELECTING = ("where", "view", "subset", "exclude", "version")
_SHOWN_VERSIONS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochReads(Report):
    """Estimate of the reads of one epoch of a set.

    Attributes:
        bytes: Bytes read from the store.
        ranges: Requests for them.
        shards: Shards that they come from.
    """

    bytes: int
    ranges: int
    shards: int

    @property
    def words(self) -> str:
        """The reads in words."""
        ranges, shards = counted(self.ranges, "range"), counted(self.shards, "shard")
        return f"{format_bytes(self.bytes)} in {ranges} of {shards}"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionsShown(Report):
    """The versions of a set.

    Attributes:
        read: Number of the version that is shown.
        kept: Names and numbers of the versions that can be opened beside the current one.
    """

    read: int
    kept: tuple[str, ...]

    @property
    def words(self) -> str:
        """The versions in words."""
        more = f", … ({len(self.kept):,})" if len(self.kept) > _SHOWN_VERSIONS else ""
        kept = f"; kept: {', '.join(self.kept[:_SHOWN_VERSIONS])}{more}" if self.kept else ""
        return f"{self.read}{kept}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OverviewPage:
    """The contents of a set.

    Attributes:
        source: Name of the set among the sources; "" for a single set.
        sources: All sources.
        report: The report, as of ``shard_tools stats``.
        shown: The same as the page shows it.
        is_done: Whether further requests refine nothing.
        reads: What an epoch reads; None: unknown.
        versions: Its versions; None: it has one only.
    """

    source: str
    sources: tuple[str, ...]
    report: StatsReport
    shown: StatsShown
    is_done: bool
    reads: EpochReads
    versions: VersionsShown | None

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        """Names and values of the facts about the whole set."""
        versions = () if self.versions is None else (("version", self.versions.words),)
        return (*self.shown.facts, ("an epoch reads", self.reads.words), *versions)

    @property
    def kinds(self) -> tuple[tuple[str, str], ...]:
        """Fields and their kinds of content."""
        return tuple(sorted(self.report.kinds.items()))

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON-able form: that of ``shard_tools stats``, and what belongs to the page."""
        versions = None if self.versions is None else self.versions.as_dict()
        mine = {"source": self.source, "done": self.is_done, "epoch": self.reads.as_dict(), "versions": versions}
        return {**mine, **self.report.as_dict()}


def overview(subject: Subject, query: Query) -> OverviewPage:
    """Return the contents of a set as far as they are known, after reading a little more; with ``whole``, all of it.

    Raises:
        ConfigError: A parameter is invalid.
        AccessDeniedError, StorageError: The store refuses, or fails.
    """
    source = query.text("source") or next(iter(subject.sets), "")
    within = subject.set_of(source)
    survey = subject.keep(f"survey of {source}", lambda: Survey(_surveyed(subject, within)))
    seconds = SECONDS if survey.has_begun else min(FIRST_SECONDS, SECONDS)
    report = survey.refined(WHOLE_SECONDS if query.choice("whole", "0", "1") == "1" else seconds)

    def address_of(one: ExampleSample) -> str:
        number = within.number_of(one.shard, one.row)
        return "" if number is None else address("/sample", source=source, number=str(number))

    return OverviewPage(
        source=source, sources=tuple(one for one in subject.sets if one), report=report,
        shown=stats_shown(report, address_of), is_done=survey.is_done,
        reads=subject.keep(f"reads of {source}", lambda: _reads(within)),
        versions=subject.keep(f"versions of {source}", lambda: _versions(within)),
    )  # fmt: skip


def _surveyed(subject: Subject, within: SampleSet) -> SurveyedSet:
    """Return a set of the pages as ``stats`` sums it up."""
    source = within.source
    shards = OpenSet(
        urls=tuple(source.urls), chunks=source.shards.chunks, scanned=source.shards.scanned,
        index_url=source.shards.index, marks=(),
    )  # fmt: skip
    is_single = len(subject.sets) == 1 and not is_mixture_file(subject.urls)
    folders = dict.fromkeys(url.rpartition("/")[0] + "/" for url in source.urls)
    selected = [f"{name} {subject.chosen[name]}" for name in _SELECTING if name in subject.chosen]
    return SurveyedSet.of(
        subject.urls if is_single else tuple(folders), shards, source.storage, limit=DEFAULT_LIMIT, seed=0,
        kept=None if isinstance(source.selection, Everything) else source.selection, selected=", ".join(selected),
    )  # fmt: skip


def _reads(within: SampleSet) -> EpochReads:
    reads = Reads.of_set(within.source)
    return EpochReads(
        bytes=int(reads.num_bytes.sum()), ranges=round(float(reads.num_requests.sum())), shards=len(within.filled)
    )


def _versions(within: SampleSet) -> VersionsShown | None:
    """Return the versions of a set in one directory; None: it has one only, or the store cannot list."""
    source = within.source
    homes = homes_of(source.urls, source.shards.index)
    if len(homes) != 1:
        return None
    try:
        kept = tuple(version_names(source.storage, homes[0]))
    except (DataError, StorageError):
        return None
    read = source.shards.versions.get(homes[0], 1)
    return VersionsShown(read=read, kept=tuple(map(redact, kept))) if kept or read > 1 else None
