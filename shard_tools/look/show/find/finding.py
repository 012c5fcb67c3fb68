"""Find the samples that a page requests, in one set or all sources of a mixture: by place, condition, key or text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shard_tools.look.show.base.page import Query
from shard_tools.look.show.base.samples import SampleSet, Search
from shard_tools.look.show.base.subject import Subject
from shard_tools.look.show.find.arranged import Arranged, at_random, by_column, shuffled
from shard_tools.look.show.find.texts import SearchedFields, TextSearch
from streaming.common.lru_cache import LruCache
from streaming.errors import ConfigError
from streaming.types import Int64Array

ASKS = ("source", "where", "key", "text", "order", "sample")
_KEPT_SEARCHES = 8
_KEPT_ORDER_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Hit:
    """A sample that was found: the source, its set, and its number there."""

    source: str
    within: SampleSet
    number: int


@dataclass(frozen=True, slots=True)
class Part:
    """Samples of one set that were found: the source, its set, and their numbers there, int64 [n]."""

    source: str
    within: SampleSet
    numbers: Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Hits:
    """Samples that were found.

    Attributes:
        parts: Samples of the page, by set.
        total: Total number of matches; None: not everything was searched.
        more: Whether there are, or may be, further matches.
        progress: Progress of the search in words; "": it is complete.
        searching: Whether another request would find samples that belong to this page.
        is_whole: Whether the total counts all matches of the set, not only those that are looked at.
        looked: What a search for text looked into; None: it was no such search.
    """

    parts: tuple[Part, ...]
    total: int | None
    more: bool
    progress: str = ""
    searching: bool = False
    is_whole: bool = True
    looked: SearchedFields | None = None

    @property
    def hits(self) -> tuple[Hit, ...]:
        """The samples one by one."""
        return tuple(Hit(one.source, one.within, number) for one in self.parts for number in one.numbers.tolist())

    @property
    def num(self) -> int:
        """Number of samples of the page."""
        return sum(len(one.numbers) for one in self.parts)


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


class Searches:
    """Cache of the latest searches, with their progress."""

    def __init__(self) -> None:
        self._kept: LruCache[tuple[str, str], Search] = LruCache(_KEPT_SEARCHES, lambda _: 1)
        self._texts: LruCache[tuple[str, str, str], TextSearch] = LruCache(_KEPT_SEARCHES, lambda _: 1)
        self._orders: LruCache[tuple[str, str, str], Arranged] = LruCache(_KEPT_ORDER_BYTES, lambda one: one.num_bytes)

    def of(self, source: str, within: SampleSet, where: str) -> Search:
        """Return the search for a condition in a source; a new search is begun if needed."""
        return self._kept.of((source, where), lambda: Search(within, where))

    def of_text(self, source: str, within: SampleSet, where: str, text: str) -> TextSearch:
        """Return the search for a text in the samples of a source that meet a condition."""

        def made() -> TextSearch:
            return TextSearch(within, self.of(source, within, where) if where else None, text)

        return self._texts.of((source, where, text), made)

    def order(self, source: str, where: str, named: str, make: Callable[[], Arranged]) -> Arranged:
        """Return the samples of a source that meet a condition, in an order with a name."""
        return self._orders.of((source, where, named), make)


def find(subject: Subject, query: Query, first: int, stop: int) -> Hits:
    """Return samples ``[first, stop)`` of those that a page requests.

    Raises:
        ConfigError: A parameter is invalid.
    """
    sets, where = chosen_sets(subject, query), condition_of(query)
    text, order, seed = query.text("text"), query.text("order"), query.some_number("sample")
    if sum((bool(text), bool(order), seed is not None)) > 1:
        raise ConfigError("text, order and sample: give one of them")
    searches: Searches = subject.keep("searches", Searches)
    if text:
        return _by_text(searches, sets, where, text, first, stop)
    if order or (seed is not None and where):
        return _in_order(searches, sets, where, order or f"sample {seed}", first, stop)
    if seed is not None:
        return _drawn(sets, seed, first, stop)
    if not where:
        return _by_place(sets, first, stop)
    key = query.text("key").strip()
    if key and "*" not in key and not query.text("where"):
        found = {name: np.array(one.by_key(key), np.int64) for name, one in sets.items()}
        if any(len(numbers) for numbers in found.values()):
            total = sum(map(len, found.values()))
            parts = _cut([Part(name, sets[name], numbers) for name, numbers in found.items()], first, stop)
            return Hits(parts=parts, total=total, more=stop < total)
    return _by_condition(searches, sets, where, first, stop)


def _cut(parts: list[Part], first: int, stop: int) -> tuple[Part, ...]:
    """Return samples ``[first, stop)`` of some parts one after the other."""
    found = []
    for one in parts:
        found.append(Part(one.source, one.within, one.numbers[max(first, 0) : max(stop, 0)]))
        first, stop = first - len(one.numbers), stop - len(one.numbers)
    return tuple(found)


def _by_place(sets: dict[str, SampleSet], first: int, stop: int) -> Hits:
    total = sum(one.total for one in sets.values())
    parts: list[Part] = []
    for name, one in sets.items():
        parts.append(Part(name, one, np.arange(max(first, 0), max(min(stop, one.total), first, 0))))
        first, stop = first - one.total, stop - one.total
    return Hits(parts=tuple(parts), total=total, more=stop < 0)


def _drawn(sets: dict[str, SampleSet], seed: int, first: int, stop: int) -> Hits:
    """Return samples of a random order of all."""
    total = sum(one.total for one in sets.values())
    drawn = np.array([shuffled(place, total, seed) for place in range(first, min(stop, total))], np.int64)
    parts: list[Part] = []
    before = 0
    for name, one in sets.items():
        parts.append(Part(name, one, drawn[(drawn >= before) & (drawn < before + one.total)] - before))
        before += one.total
    return Hits(parts=tuple(parts), total=total, more=stop < total, progress=f"a random sample, drawn with {seed}")


def _in_order(searches: Searches, sets: dict[str, SampleSet], where: str, named: str, first: int, stop: int) -> Hits:
    """Return samples in the order of a column, or in a random one.

    Raises:
        ConfigError: Several sources were requested, or there is no such column.
    """
    if len(sets) > 1:
        raise ConfigError("order: give source, too: samples are put in order within one")
    ((source, within),) = sets.items()

    def made() -> Arranged:
        if named.startswith("sample "):
            return at_random(within, where, int(named.removeprefix("sample ")))
        return by_column(within, where, named.removeprefix("-"), descending=named.startswith("-"))

    found = searches.order(source, where, named, made)
    total = len(found.numbers)
    is_part = not found.words.startswith("all ")
    return Hits(
        parts=(Part(source, within, found.numbers[first:stop]),), total=total, more=stop < total,
        progress=f"put in order: {found.words}" if is_part else "", is_whole=not is_part,
    )  # fmt: skip


def _by_text(searches: Searches, sets: dict[str, SampleSet], where: str, text: str, first: int, stop: int) -> Hits:
    """Return samples with a text, source by source."""
    parts: list[Part] = []
    total, wanted, progress, looked = 0, stop - first, "", SearchedFields()
    for name, one in sets.items():
        search = searches.of_text(name, one, where, text)
        numbers, known, progress = search.find(max(first, 0), max(stop, 0))
        parts.append(Part(name, one, numbers))
        looked |= search.looked
        if known is None:
            is_short = sum(len(part.numbers) for part in parts) < wanted
            return Hits(parts=tuple(parts), total=None, more=True, progress=progress, searching=is_short, looked=looked)
        total += known
        first, stop = first - known, stop - known
    return Hits(parts=tuple(parts), total=total, more=stop < 0, progress=progress, is_whole=not progress, looked=looked)


def _by_condition(searches: Searches, sets: dict[str, SampleSet], where: str, first: int, stop: int) -> Hits:
    parts: list[Part] = []
    total, looked, shards, wanted = 0, 0, sum(len(one.filled) for one in sets.values()), stop - first
    for name, one in sets.items():
        found = searches.of(name, one, where).find(max(first, 0), max(stop, 0))
        parts.append(Part(name, one, found.numbers))
        looked += found.num_looked
        if found.total is None:
            is_short = sum(len(part.numbers) for part in parts) < wanted
            progress = f"looked at {looked:,} of {shards:,} shards so far; ask again to continue"
            return Hits(parts=tuple(parts), total=None, more=True, progress=progress, searching=is_short)
        total += found.total
        first, stop = first - found.total, stop - found.total
    return Hits(parts=tuple(parts), total=total, more=stop < 0)
