"""Find the samples that a page requests, in one set or all sources of a mixture: by place, condition or key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shard_tools.look.show.base.page import Query
from shard_tools.look.show.base.samples import Found, SampleSet, Search
from shard_tools.look.show.base.subject import Subject

ASKS = ("source", "where", "key")
_KEPT_SEARCHES = 8


@dataclass(frozen=True, slots=True)
class Hit:
    """A sample that was found: the source, its set, and its number there."""

    source: str
    within: SampleSet
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Hits:
    """Samples that were found.

    Attributes:
        hits: Samples of the page.
        total: Total number of matches; None: not everything was searched.
        more: Whether there are, or may be, further matches.
        progress: Progress of the search in words; "": it is complete.
    """

    hits: tuple[Hit, ...]
    total: int | None
    more: bool
    progress: str


def chosen_sets(subject: Subject, query: Query) -> dict[str, SampleSet]:
    """Return the sets that a page is about: the source that it names, or all.

    Raises:
        ConfigError: There is no such source.
    """
    source = query.text("source")
    return {source: subject.set_of(source)} if source else subject.sets


def condition_of(query: Query) -> str:
    """Return the condition of ``where`` and ``key`` together; "": none. A ``*`` in a key matches anything."""
    where, key = query.text("where").strip(), query.text("key").strip()
    if key:
        text = "'" + key.replace("'", "''") + "'"
        by_key = f"__key__ = {text}"
        if "*" in key:
            by_key = f"__key__ LIKE {text.replace('*', '%')}"
        where = f"({where}) AND {by_key}" if where else by_key
    return where


def search_of(subject: Subject, source: str, within: SampleSet, where: str) -> Search:
    """Return a search, with its progress from earlier requests.

    Raises:
        ConfigError: The condition cannot be evaluated.
    """
    searches: Searches = subject.keep("searches", Searches)
    return searches.of(source, within, where)


class Searches:
    """Cache of the latest searches, with their progress."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], Search] = {}

    def of(self, source: str, within: SampleSet, where: str) -> Search:
        """Return the search for a condition in a source; a new search is begun if needed."""
        found = self._kept.get((source, where))
        if found is None:
            found = Search(within, where)
            self._kept[source, where] = found
            while len(self._kept) > _KEPT_SEARCHES:
                self._kept.pop(next(iter(list(self._kept))), None)
        return found


def find(subject: Subject, query: Query, first: int, stop: int) -> Hits:
    """Return samples ``[first, stop)`` of those that a page requests.

    Raises:
        ConfigError: A parameter is invalid.
    """
    sets, where = chosen_sets(subject, query), condition_of(query)
    if not where:
        return _by_place(sets, first, stop)
    key = query.text("key").strip()
    if key and "*" not in key and not query.text("where"):
        hits = tuple(Hit(name, one, number) for name, one in sets.items() for number in one.by_key(key))
        if hits:
            return Hits(hits=hits[first:stop], total=len(hits), more=stop < len(hits), progress="")
    return _by_condition(subject, sets, where, first, stop)


def _by_place(sets: dict[str, SampleSet], first: int, stop: int) -> Hits:
    total = sum(one.total for one in sets.values())
    hits: list[Hit] = []
    for name, one in sets.items():
        hits += [Hit(name, one, number) for number in range(max(first, 0), min(stop, one.total))]
        first, stop = first - one.total, stop - one.total
    return Hits(hits=tuple(hits), total=total, more=stop < 0, progress="")


def _by_condition(subject: Subject, sets: dict[str, SampleSet], where: str, first: int, stop: int) -> Hits:
    hits: list[Hit] = []
    total, looked, shards = 0, 0, sum(len(one.filled) for one in sets.values())
    is_done = True
    for name, one, found in _searched(subject, sets, where, first, stop):
        hits += [Hit(name, one, number) for number in found.numbers.tolist()]
        looked += found.num_looked
        if found.total is None:
            is_done = False
            break
        total += found.total
    progress = "" if is_done else f"looked at {looked:,} of {shards:,} shards so far; ask again to continue"
    return Hits(hits=tuple(hits), total=total if is_done else None, more=not is_done or stop < total, progress=progress)


def _searched(
    subject: Subject, sets: dict[str, SampleSet], where: str, first: int, stop: int
) -> Iterator[tuple[str, SampleSet, Found]]:
    """Yield each set's share of the matches ``[first, stop)``, as long as the number of preceding ones is known."""
    for name, one in sets.items():
        found = search_of(subject, name, one, where).find(max(first, 0), max(stop, 0))
        yield name, one, found
        if found.total is None:
            return
        first, stop = first - found.total, stop - found.total
