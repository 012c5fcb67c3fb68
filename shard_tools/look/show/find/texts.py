"""Search the texts and JSON of samples in storage order, further at each request, so that the first hit comes soon."""

from __future__ import annotations

import functools
import json
import threading
import time
from dataclasses import dataclass
from typing import Final

import numpy as np

from shard_tools.look.show.base.reading import Wanted, read_all
from shard_tools.look.show.base.samples import SampleSet, Search
from shard_tools.look.stats.kinds import kind_of
from streaming.build.decode.values import unpacked_head
from streaming.common.arguments import format_bytes, some_names, unpacked_name
from streaming.errors import ConfigError, shell_word
from streaming.types import Int64Array

TEXT_BYTES: Final = 64 << 10
"""Bytes of a value that are searched, as many as a sample's page shows."""
SECONDS: Final = 0.5
"""Time that one request spends on searching; the page asks again every second."""
MOST_HITS: Final = 10_000
"""Hits that are kept; the search ends there."""
_FIRST_SAMPLES, _MOST_SAMPLES = 32, 4096  # of a batch
_BATCH_BYTES = 8 << 20
_GAP_BYTES = 32 << 20  # between texts, that a batch reads rather than making further requests, the smallest gaps first
_SEARCHED: Final = frozenset({"text", "json"})
_TOKENS: Final = "tokens"


@dataclass(frozen=True, slots=True)
class SearchedFields:
    """Fields of the samples that a search went through: those that it looked into, and the others, with their kinds."""

    into: frozenset[str] = frozenset()
    past: frozenset[tuple[str, str]] = frozenset()

    def __or__(self, other: SearchedFields) -> SearchedFields:
        return SearchedFields(self.into | other.into, self.past | other.past)

    @property
    def words(self) -> str:
        """Which fields were searched, and which were not."""
        into = f"{some_names(sorted(self.into))}, the first {format_bytes(TEXT_BYTES)} of each value"
        past = some_names([f"{name} ({kind})" for name, kind in sorted(self.past)])
        searched = into if self.into else "nothing, since no field holds text or JSON"
        past = f"{past}, and " if self.past else ""
        return f"Searched: {searched}. Not searched: {past}columns (for those, give a condition)."

    @property
    def cures(self) -> tuple[str, ...]:
        """What to do so that more is found."""
        tokens = [name for name, kind in sorted(self.past) if kind == _TOKENS]
        if not tokens:
            return ()
        cure = (
            f"Text that is stored as tokens ({some_names(tokens)}) is not searched. To search it, keep it beside the "
            "tokens when they are made: `shard_tools convert SOURCE TARGET --tokenizer FILE --field text=txt`; or make "
            "a column of it: `shard_tools column add URL words --compute MODULE:FUNCTION --fields "
            f"{shell_word(tokens[0])}`, and give the condition words LIKE '%word%'."
        )
        return (cure,)


class TextSearch:
    """Find the samples with a text in one of their fields of text or JSON, whatever the case. Thread-safe.

    Args:
        within: The set.
        where: Restricts the search; None: all samples.
        text: The text.

    Raises:
        ConfigError: The text is empty.
    """

    def __init__(self, within: SampleSet, where: Search | None, text: str) -> None:
        if not text.strip():
            raise ConfigError("text: expected a word to search for")
        self._within, self._where = within, where
        self._needles = (text.casefold(), json.dumps(text)[1:-1].casefold())
        self._lock = threading.Lock()  # guards _hits, _next, _is_done, _looked
        self._hits: list[int] = []
        self._next, self._is_done = 0, False
        self._looked = SearchedFields()

    @property
    def looked(self) -> SearchedFields:
        """The fields of the samples searched so far."""
        with self._lock:
            # They grow, and never shrink.
            return self._looked

    def find(self, first: int, stop: int) -> tuple[Int64Array, int | None, str]:
        """Return hits ``[first, stop)`` as far as they are known after a limited time, and their total.

        Returns:
            The hits, int64 ``[n]``; their total, or None if the search goes on; its progress in words, "" at its end.
        """
        with self._lock:
            # The first ``_next`` candidates are searched; a thread that waits here most likely needs the same ones.
            until, size = time.monotonic() + SECONDS, _FIRST_SAMPLES
            while not self._is_done and len(self._hits) < stop:
                self._search(size)
                size = min(2 * size, _MOST_SAMPLES)
                if time.monotonic() >= until:
                    break
            hits = np.array(self._hits[first:stop], np.int64)
            if self._is_done:
                is_cut = len(self._hits) >= MOST_HITS
                return hits, len(self._hits), f"the first {MOST_HITS:,} hits; the search ends there" if is_cut else ""
            of = "" if self._where is not None else f" of {self._within.total:,}"
            return hits, None, f"searched {self._next:,}{of} samples so far; ask again to continue"

    def _search(self, size: int) -> None:
        numbers, is_last = self._candidates(size)
        taken, wanted, owners = self._wanted(numbers)
        found: set[int] = set()
        for (at, is_packed), data in zip(owners, read_all(self._within, wanted, 4 * _GAP_BYTES), strict=True):
            if at not in found and self._fits(data, is_packed=is_packed):
                found.add(at)
        self._hits += [int(numbers[at]) for at in sorted(found)]
        self._next += taken
        self._is_done = (is_last and taken == len(numbers)) or len(self._hits) >= MOST_HITS
        del self._hits[MOST_HITS:]

    def _candidates(self, size: int) -> tuple[Int64Array, bool]:
        """Return the numbers of the next samples to search, and whether they are the last."""
        if self._where is None:
            stop = min(self._next + size, self._within.total)
            return np.arange(self._next, stop), stop == self._within.total
        found = self._where.find(self._next, self._next + size)
        return found.numbers, found.total is not None and self._next + len(found.numbers) >= found.total

    def _wanted(self, numbers: Int64Array) -> tuple[int, list[Wanted], list[tuple[int, bool]]]:
        """Return how many of these samples are read at once, the bytes to read, and the sample of each range."""
        shards, rows = self._within.located(numbers)
        found: list[tuple[int, bool, Wanted]] = []
        for shard in np.unique(shards).tolist():
            places = np.flatnonzero(shards == shard)
            fields = self._within.table(shard).fields
            self._looked |= _looked(tuple(fields))
            for name, (all_starts, all_sizes) in fields.items():
                if kind_of(name) not in _SEARCHED:
                    continue
                starts, sizes = all_starts[rows[places]], np.minimum(all_sizes[rows[places]], TEXT_BYTES)
                there, is_packed = (starts >= 0) & (sizes > 0), unpacked_name(name) is not None
                spans = zip(places[there].tolist(), starts[there].tolist(), sizes[there].tolist(), strict=True)
                found += [(at, is_packed, Wanted(shard, start, start + size)) for at, start, size in spans]
        found.sort(key=lambda one: one[0])
        ends = np.cumsum([one.stop - one.start for _, _, one in found])
        fitting = int(np.searchsorted(ends, _BATCH_BYTES, side="right"))
        taken = len(numbers)
        if fitting < len(found):  # at least one sample, and all values of each
            taken = max(found[fitting][0], found[0][0] + 1)
            found = [one for one in found if one[0] < taken]
        return taken, [one for _, _, one in found], [(at, is_packed) for at, is_packed, _ in found]

    def _fits(self, data: bytes, *, is_packed: bool) -> bool:
        if is_packed:
            try:
                data, _ = unpacked_head(data, TEXT_BYTES)
            except ValueError:  # damaged: the sample's page says so
                return False
        text = data.decode("utf-8", "replace").casefold()
        return any(needle in text for needle in self._needles)


@functools.cache
def _looked(fields: tuple[str, ...]) -> SearchedFields:
    kinds = {name: kind_of(name) for name in fields}
    return SearchedFields(
        into=frozenset(name for name, kind in kinds.items() if kind in _SEARCHED),
        past=frozenset((name, kind) for name, kind in kinds.items() if kind not in _SEARCHED),
    )
