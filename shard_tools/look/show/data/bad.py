"""Show bad samples from a run's ``bad_samples_file`` or from ``verify``, and how to leave them out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shard_tools.change.sets.bad_list import BadList, load_bad_list
from shard_tools.look.show.base.page import Query, address
from shard_tools.look.show.base.plots import Row, rows
from shard_tools.look.show.base.subject import Subject
from shard_tools.running.report import Report
from streaming.build.batches.bad_file import BadRecord, shown_url
from streaming.errors import shell_place
from streaming.storage import redact, redact_text

ASKS = ("page", "stage")
PER_PAGE = 100
_WORDS = 90


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow(Report):
    """A sample, or a range of a shard, that could not be delivered.

    Attributes:
        key: Key of the sample; "" if unknown.
        shard: Its shard, without secrets.
        sample_in_shard: Its number there; -1 if unknown.
        bytes: Its record: first byte, and one past the last; -1 if unknown.
        stage: ``fetch``, ``decode`` or ``transform``.
        reason: The error.
        epoch: Epoch in which it was found; -1 if unknown.
        rank: Rank that found it.
        time: Time when it was found.
        address: Its page, if it belongs to a set on display.
    """

    key: str
    shard: str
    sample_in_shard: int
    bytes: tuple[int, int]
    stage: str
    reason: str
    epoch: int
    rank: int
    time: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BadPage(Report):
    """A page of bad samples.

    Attributes:
        total: Number of bad samples in the list, or in the requested stage.
        page: Number of the page.
        last_page: Number of the last page.
        files: The lists.
        unreadable: Number of invalid lines in the lists.
        reasons: Number of samples per reason.
        stages: Number of samples per stage.
        rows: The samples.
        commands: Commands that leave them out, or that find them.
    """

    total: int
    page: int
    last_page: int
    files: tuple[str, ...]
    unreadable: int
    reasons: tuple[tuple[str, int], ...]
    stages: tuple[tuple[str, int], ...]
    rows: tuple[BadRow, ...]
    commands: tuple[str, ...]

    @property
    def shares(self) -> tuple[Row, ...]:
        """The reasons, as bars."""
        return rows(self.reasons, max(sum(count for _, count in self.stages), 1))


def has_list(subject: Subject) -> bool:
    """Return whether there is a list of bad samples."""
    return bool(subject.bad_lists)


def bad_samples(subject: Subject, query: Query) -> BadPage:
    """Return a page of bad samples; without a list, the commands that make one.

    Raises:
        NotFoundError: A list does not exist.
        DataError: A file is not such a list.
    """
    files = subject.bad_lists
    found = load_bad_list(files, subject.storage) if files else BadList(by_shard={})
    records = [record for some in found.by_shard.values() for record in some]
    stages = Counter(record.stage for record in records)
    stage = query.text("stage")
    listed = [record for record in records if not stage or record.stage == stage]
    last = max(-(-len(listed) // PER_PAGE) - 1, 0)
    page = query.number("page", 0, most=last)
    known = {shown_url(url): name for name, one in subject.sets.items() for url in one.source.urls} if listed else {}
    shown = listed[page * PER_PAGE : (page + 1) * PER_PAGE]
    return BadPage(
        total=len(listed), page=page, last_page=last, files=tuple(redact(one) for one in files),
        unreadable=found.num_unreadable, stages=tuple(sorted(stages.items())),
        reasons=tuple(Counter(_short(record) for record in records).most_common(12)),
        rows=tuple(_row(record, known) for record in shown), commands=_commands(subject, files),
    )  # fmt: skip


def _short(record: BadRecord) -> str:
    """Return the reason without the parts that differ from sample to sample."""
    reason = redact_text(record.reason)
    for part in (record.url, record.key):
        reason = reason.replace(part, "…") if part else reason
    return f"{record.stage}: {reason[:_WORDS]}"


def _row(record: BadRecord, known: dict[str, str]) -> BadRow:
    place = address("/sample", source=known[record.url], key=record.key) if record.url in known and record.key else ""
    return BadRow(
        key=record.key, shard=redact(record.url), sample_in_shard=record.sample_in_shard,
        bytes=(record.byte_start, record.byte_end), stage=record.stage, reason=redact_text(record.reason),
        epoch=record.epoch, rank=record.rank, time=record.time, address=place,
    )  # fmt: skip


def _commands(subject: Subject, files: Sequence[str]) -> tuple[str, ...]:
    """Return the commands to copy, one per set."""
    lists = " ".join(f"--drop {shell_place(one)}" for one in files)
    folders = dict.fromkeys(
        redact(url.rpartition("/")[0] + "/") for one in subject.sets.values() for url in one.source.urls[:1]
    )
    if files:
        return tuple(f"shard_tools reshard {shell_place(one)} TARGET/ {lists}" for one in folders)
    return tuple(f"shard_tools verify {shell_place(one)} --decode --write-bad bad.jsonl" for one in folders)
