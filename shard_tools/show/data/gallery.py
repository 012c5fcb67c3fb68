"""Show samples, page by page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shard_tools.running.report import Report
from shard_tools.show.base.page import Query
from shard_tools.show.base.subject import Subject
from shard_tools.stats.kinds import kind_of

ASKS = ("source", "page")
PER_PAGE = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class GalleryRow(Report):
    """One sample of the gallery."""

    number: int
    key: str
    shard: str
    source: str
    fields: Mapping[str, Mapping[str, object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gallery(Report):
    """A page of samples."""

    total: int | None
    rows: tuple[GalleryRow, ...]


def gallery(subject: Subject, query: Query) -> Gallery:
    """Return a page of samples.

    Raises:
        ConfigError: A parameter is invalid.
    """
    source = query.text("source")
    one = subject.set_of(source)
    first = query.number("page", 0) * PER_PAGE
    rows = []
    for place in one.places(np.arange(first, min(first + PER_PAGE, one.total))):
        found = one.locate(place)
        fields = {name: {"bytes": stop - start, "kind": kind_of(name)} for name, (start, stop) in found.fields.items()}
        shown = str(one.source.shards.shown_urls[place.shard])
        rows.append(GalleryRow(number=place.number, key=found.key, shard=shown, source=source, fields=fields))
    return Gallery(total=one.total, rows=tuple(rows))
