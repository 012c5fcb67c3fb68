"""Show samples, page by page: found by number without counting, by a condition, or by key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shard_tools.look.show.base.page import Query, address
from shard_tools.look.show.base.samples import SamplePlace
from shard_tools.look.show.base.subject import Subject
from shard_tools.look.show.data import finding
from shard_tools.look.show.data.notes import notes_of
from shard_tools.look.show.data.previews import GLANCE, FieldShown, fields_of
from shard_tools.running.report import Report
from streaming.shards.index.columns import Values
from streaming.shards.index.sample_table import SampleLocation

ASKS = (*finding.ASKS, "page", "size")
PER_PAGE = 48
_MOST_PER_PAGE = 200
_SHOWN_COLUMNS = 6


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
        sources: The sources to choose from; none for a single set.
        rows: The samples.
        first: Number of the page's first sample among all matches.
    """

    total: int | None
    page: int
    more: bool
    progress: str
    sources: tuple[str, ...]
    rows: tuple[GalleryRow, ...]
    first: int
    size: int

    @property
    def last_page(self) -> int | None:
        """Number of the last page; None: unknown."""
        return None if self.total is None else max(-(-self.total // self.size) - 1, 0)


def gallery(subject: Subject, query: Query) -> Gallery:
    """Return a page of samples, with the beginnings of their texts and the addresses of their pictures.

    Raises:
        ConfigError: A parameter is invalid.
        IndexMissingError: A shard has no sample table.
    """
    size = query.number("size", PER_PAGE, least=1, most=_MOST_PER_PAGE)
    page = query.number("page", 0)
    found = finding.find(subject, query, page * size, page * size + size)
    rows: list[GalleryRow] = []
    for source in finding.chosen_sets(subject, query):
        numbers = [hit.number for hit in found.hits if hit.source == source]
        rows += rows_of(subject, source, numbers) if numbers else ()
    return Gallery(
        total=found.total, page=page, more=found.more, progress=found.progress,
        sources=tuple(name for name in subject.sets if name), rows=tuple(rows), first=page * size, size=size,
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
