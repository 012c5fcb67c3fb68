"""Show one sample."""

from __future__ import annotations

from dataclasses import dataclass

from shard_tools.running.report import Report
from shard_tools.show.base.page import Query
from shard_tools.show.base.subject import Subject
from streaming.errors import NotFoundError

ASKS = ("source", "number", "key")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePage(Report):
    """One sample.

    Attributes:
        source: Name of its set among the sources; "" for a single set.
        number: Its number there.
        key: Its key.
        shard: URL of its shard, without secrets.
    """

    source: str
    number: int
    key: str
    shard: str


def sample(subject: Subject, query: Query) -> SamplePage:
    """Return one sample, by number or by key.

    Raises:
        NotFoundError: There is none.
    """
    source, key = query.text("source"), query.text("key")
    one = subject.set_of(source)
    number = query.some_number("number")
    if number is None:
        found = one.by_key(key)
        if not found:
            raise NotFoundError(f"key: no sample has the key {key!r}")
        number = found[0]
    place = one.place(number)
    located = one.locate(place)
    shown = str(one.source.shards.shown_urls[place.shard])
    return SamplePage(source=source, number=number, key=located.key, shard=shown)
