"""Show samples, page by page: found by number without counting, by a condition, or by key."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from shard_tools.look.show.base.page import Query, address
from shard_tools.look.show.base.samples import SamplePlace
from shard_tools.look.show.base.subject import Subject
from shard_tools.look.show.data.notes import notes_of
from shard_tools.look.show.data.previews import GLANCE, FieldShown, fields_of
from shard_tools.look.show.find import finding
from shard_tools.look.show.find.texts import SearchedFields
from shard_tools.running.report import Report
from streaming.errors import ConfigError
from streaming.shards.index.columns import Values
from streaming.shards.index.sample_table import SampleLocation
from streaming.storage import redact_text

ASKS = (*finding.ASKS, "page", "size", "view")
PER_PAGE = 48
_MOST_PER_PAGE = 200
_LISTED_COLUMNS = 200  # that a page offers to order by
_SEEDS = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class GalleryRow(Report):
    """One sample of the gallery.

    Attributes:
        number: Its number in its set.
        key: Its key.
        shard: URL of its shard, without secrets.
        source: Name of its set in a mixture; "" for a single set.
        fields: The display of each field, by name.
        columns: Its columns.
    """

    number: int
    key: str
    shard: str
    source: str
    fields: Mapping[str, FieldShown]
    columns: Mapping[str, Any]

    @property
    def place(self) -> tuple[str, int]:
        """The set that holds it, and its number there."""
        return self.source, self.number

    @property
    def address(self) -> str:
        """Address of its own page."""
        return address("/sample", source=self.source, number=self.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gallery(Report):
    """A page of samples.

    Attributes:
        total: Number of samples that match; None: not all of the set was searched.
        page: Number of the page.
        more: Whether there are, or may be, further samples.
        progress: Progress of a search, in words.
        searching: Whether another request would find samples that belong to this page.
        sources: The sources to choose from; none for a single set.
        rows: The samples.
        first: Number of the page's first sample among all matches.
        size: Number of samples of a full page.
        names: Columns to order by; none if several sources are shown.
        looked: What a search for text looked into; None: it was no such search.
        problem: Why the condition cannot be evaluated; "": it can.
    """

    total: int | None
    page: int
    more: bool
    progress: str
    searching: bool
    sources: tuple[str, ...]
    rows: tuple[GalleryRow, ...]
    first: int
    size: int
    names: tuple[str, ...] = ()
    looked: SearchedFields | None = None
    problem: str = ""

    @property
    def last_page(self) -> int | None:
        """Number of the last page; None: unknown."""
        return None if self.total is None else max(-(-self.total // self.size) - 1, 0)

    @property
    def status(self) -> HTTPStatus:
        """Status of the response."""
        return HTTPStatus.BAD_REQUEST if self.problem else HTTPStatus.OK

    @property
    def listed_columns(self) -> tuple[str, ...]:
        """Columns of a table of these samples."""
        return tuple(dict.fromkeys(name for row in self.rows for name in row.columns))

    @property
    def listed_fields(self) -> tuple[str, ...]:
        """Fields of a table of these samples that are not columns, too."""
        names = dict.fromkeys(name for row in self.rows for name in row.fields)
        return tuple(name for name in names if name not in self.listed_columns)

    @property
    def next_seed(self) -> int:
        """A number that draws another random sample."""
        return secrets.randbelow(_SEEDS)

    def as_dict(self) -> dict[str, object]:
        """Return the JSON-able form."""
        values = Report.as_dict(self)
        for name in ("problem", "names", "looked"):
            del values[name]
        return values | ({} if self.looked is None else {"searched": self.looked.words})


def gallery(subject: Subject, query: Query) -> Gallery:
    """Return a page of samples, with the beginnings of their texts and the addresses of their pictures.

    Raises:
        ConfigError: A parameter is invalid.
        IndexMissingError: A shard has no sample table.
    """
    sets = finding.chosen_sets(subject, query)
    found, problem, page, size = finding.Hits(parts=(), total=None, more=False), "", 0, PER_PAGE
    try:
        size = query.number("size", PER_PAGE, least=1, most=_MOST_PER_PAGE)
        page = query.number("page", 0)
        query.choice("view", "tiles", "table")
        found = finding.find(subject, query, page * size, page * size + size)
    except ConfigError as error:
        if query.text("format") == "json":
            raise
        problem = redact_text(str(error))
    rows = [
        row for one in found.parts if len(one.numbers) for row in rows_of(subject, one.source, one.numbers.tolist())
    ]
    return Gallery(
        total=found.total, page=page, more=found.more, progress=found.progress, searching=found.searching,
        sources=tuple(name for name in subject.sets if name), rows=tuple(rows), first=page * size, size=size,
        names=next(iter(sets.values())).column_names[:_LISTED_COLUMNS] if len(sets) == 1 else (),
        looked=found.looked, problem=problem,
    )  # fmt: skip


def rows_of(subject: Subject, source: str, numbers: list[int]) -> list[GalleryRow]:
    """Return samples of a set by their numbers, with the beginnings of their texts."""
    within = subject.set_of(source)
    places = [within.place(number) for number in numbers]
    located = [(place, within.locate(place)) for place in places]
    shown = fields_of(within, source, located, notes_of(subject, source), GLANCE)
    values = {shard: within.columns(shard, within.column_names) for shard in dict.fromkeys(one.shard for one in places)}
    return [
        _row(place, one, source, str(within.source.shards.shown_urls[place.shard]), fields, values[place.shard])
        for (place, one), fields in zip(located, shown, strict=True)
    ]


def _row(
    place: SamplePlace, located: SampleLocation, source: str, shard: str, fields: tuple[FieldShown, ...],
    values: Mapping[str, Values],
) -> GalleryRow:  # fmt: skip
    return GalleryRow(
        number=place.number, key=located.key, shard=shard, source=source, fields={one.name: one for one in fields},
        columns={name: column[place.row].as_py() for name, column in values.items()},
    )  # fmt: skip
