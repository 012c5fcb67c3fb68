"""Sum up a set: the one computation behind the command ``stats`` and the first page of ``show``.

The command reads all shards in their order. The page begins with shards that are spread over the set, and goes on each
time that it is asked. Both make the same report of what they have seen.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from shard_tools.change.sets.inspect import shards_unlike_index
from shard_tools.change.sets.open_set import OpenSet, table_of
from shard_tools.look.stats.report import StatsReport, kinds_of
from shard_tools.look.stats.shard import ShardReader, StatsPart
from shard_tools.look.stats.surprises import Facts, Group, content_field, surprises
from shard_tools.look.stats.totals import ExampleSample, Totals, shard_and_row
from shard_tools.running.progress import NoProgress
from shard_tools.running.report import Finding
from streaming.common.threads import on_threads
from streaming.errors import DataError, StorageError
from streaming.sets.filters.late_columns import LateColumn
from streaming.shards.index.selection import Selection
from streaming.storage import Storage, redact
from streaming.types import Int64Array

DEFAULT_LIMIT: Final = 2000
"""Default number of samples to read: shares are within 2 points, and a 1 in 500 case is seen with probability 98 %."""
MOST_SEEN: Final = 10_000_000
"""Samples that a page sums up at most, about ten seconds of CPU; a larger set is known by shards spread over it."""
_RUN = 4  # adjacent samples: neighbors show the order, and cost no further request
_WIDTHS = {"uint16": 2, "uint32": 4}
_THREADS = 8
_FIRST_SHARDS = 2  # of a request: of shards of any size, the first are soon read
_CHECKED_SHARDS = 256  # of which a page compares the sizes with the store, one request each
_NAMED = 3  # pairs of duplicates
_LOOKED_UP = 16  # pairs of keys that may be near-equal; some are equal
_KEPT_KEYS = 1000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SurveyedSet:
    """A set, and the samples of it that count.

    Attributes:
        urls: Its URLs, as commands name them.
        shards: Its shards.
        kept: The samples that count; None: all.
        reader: Collects the facts of a shard.
        beside: What cannot be read beside the index.
        counts: Number of these samples per shard, int64 ``[S]``.
        chosen: Ascending numbers, among them, of those whose bytes are read; None: all.
        selected: The filter in words; "": all samples.
    """

    urls: tuple[str, ...]
    shards: OpenSet
    kept: Selection | None
    reader: ShardReader
    beside: tuple[str, ...]
    counts: Int64Array
    chosen: Int64Array | None
    selected: str
    _keys: dict[int, str] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(
        cls, urls: Sequence[str], shards: OpenSet, storage: Storage, *, kept: Selection | None, limit: int | None,
        seed: int, selected: str = "",
    ) -> SurveyedSet:  # fmt: skip
        """Prepare to sum up a set.

        Args:
            urls: Its URLs, as commands name them.
            shards: Its shards.
            storage: Their store.
            kept: The samples that count; None: all.
            limit: Number of samples whose bytes are read; None: all.
            seed: Seed of their choice.
            selected: The filter in words.

        Raises:
            IndexFormatError: A schema is damaged.
        """
        late, beside = _late_columns(shards, storage)
        schemas = shards.schemas(storage)
        tokens = {home: schema.tokens for home, schema in schemas.items()}
        counts = _samples_of_shards(shards, kept)
        chosen = choose(int(counts.sum()), limit, seed)
        reader = ShardReader(
            storage=storage, index_url=shards.index_url, late=late, reads_all=chosen is None, seed=seed,
            token_bytes={
                home: {name: _WIDTHS[one.dtype] for name, one in some.items()} for home, some in tokens.items()
            },
            masks={
                home: frozenset(one.tokens.mask for one in some.values() if one.tokens is not None and one.tokens.mask)
                for home, some in tokens.items()
            },
        )  # fmt: skip
        return cls(
            urls=tuple(urls), shards=shards, kept=kept, reader=reader, beside=beside, counts=counts, chosen=chosen,
            selected=selected,
        )  # fmt: skip

    def parts(self, positions: Sequence[int]) -> Iterator[StatsPart]:
        """Yield what to read of the shards with these numbers."""
        offsets, numbers = np.concatenate(([0], np.cumsum(self.counts))), None
        for position in positions:
            if self.chosen is not None:
                low, high = np.searchsorted(self.chosen, offsets[position : position + 2])
                numbers = self.chosen[low:high] - offsets[position]
            yield StatsPart(
                position=position, url=self.shards.urls[position], chunks=self.shards.chunks.of_shard(position),
                scanned=None if self.shards.scanned is None else self.shards.scanned[position],
                rows=None if self.kept is None else np.flatnonzero(self.kept.mask(position)), numbers=numbers,
            )  # fmt: skip

    def spread(self, most_samples: int) -> list[int]:
        """Return shards with up to this number of samples, at least one, so that each beginning is spread over the set.

        Shards of which bytes are read come first.
        """
        filled = np.flatnonzero(self.counts)
        with_bytes = filled
        if self.chosen is not None:
            ends = np.cumsum(self.counts)
            with_bytes = np.unique(np.searchsorted(ends, self.chosen, side="right"))
        rest = np.setdiff1d(filled, with_bytes)
        found = [*_by_halves(with_bytes.tolist()), *_by_halves(rest.tolist())]
        before = np.cumsum(self.counts[found]) - self.counts[found]
        return found[: max(int((before < most_samples).sum()), 1)]

    def gone(self) -> tuple[Finding, ...]:
        """Return the shards that are missing, or have another size than the index says; one request per shard."""
        if self.shards.scanned is not None:
            return ()
        return tuple(shards_unlike_index(self.shards, self.urls, self.reader.storage))

    def report(self, totals: Totals, num_seen_shards: int, gone: tuple[Finding, ...] = ()) -> StatsReport:
        """Return the report of what was seen."""
        kinds = kinds_of(totals)
        shards, storage = self.shards, self.reader.storage
        rows = shards.chunks if self.kept is None else self.kept.table
        facts = Facts(
            urls=self.urls, totals=totals, kinds=kinds,
            shard_bytes=np.array([shard.size_bytes for shard in shards.chunks.shards], np.int64),
            chunk_bytes=rows.byte_end - rows.byte_start, chunk_samples=rows.num_samples,
            has_index=shards.scanned is None, unfinished=tuple(mark.state for mark in shards.marks),
            beside=(*self.beside, *totals.late_errors), unlike=tuple(shards.unlike(storage)), gone=gone,
            same_keys=self._named(totals.keys.pairs(_NAMED)), near_keys=self._near(totals),
            same_contents=self._same_contents(totals, kinds),
        )  # fmt: skip
        num_samples, seen = int(self.counts.sum()), max(totals.num_samples, 1)
        return StatsReport(
            url=" ".join(map(redact, self.urls)),
            num_samples=num_samples,
            num_bytes=int(facts.shard_bytes.sum() if self.kept is None else totals.sizes.total * num_samples // seen),
            num_shards=len(shards.urls) if self.kept is None else int((self.counts > 0).sum()),
            num_seen_shards=num_seen_shards,
            has_seen_all=num_seen_shards >= int((self.counts > 0).sum()),
            num_chunks=rows.num_chunks,
            totals=totals,
            kinds=kinds,
            found=surprises(facts),
            seed=self.reader.seed,
            selected=self.selected,
        )

    def _same_contents(self, totals: Totals, kinds: dict[str, str]) -> tuple[Group, ...]:
        name = content_field(totals, kinds)
        return () if name is None else self._named(totals.fields[name].repeats.pairs(_NAMED))

    def _near(self, totals: Totals) -> tuple[Group, ...]:
        """Return keys that are equal but for differences that people overlook."""
        named = self._named(totals.near_keys.pairs(_LOOKED_UP)) if totals.num_near_keys else ()
        return tuple(group for group in named if group[0].key != group[-1].key)[:_NAMED]

    def _named(self, pairs: Sequence[tuple[int, int]]) -> tuple[Group, ...]:
        """Return the samples at pairs of places; () if their keys cannot be read now."""
        missing: dict[int, list[int]] = {}
        for place in {place for pair in pairs for place in pair} - self._keys.keys():
            missing.setdefault(shard_and_row(place)[0], []).append(place)
        if len(self._keys) > _KEPT_KEYS:
            self._keys.clear()
            return self._named(pairs)
        try:
            for shard, places in missing.items():
                keys = table_of(self.shards, shard, self.reader.storage).keys
                self._keys.update((place, keys[shard_and_row(place)[1]]) for place in places)
        except (DataError, StorageError, IndexError):
            return ()
        return tuple(tuple(ExampleSample(*shard_and_row(place), self._keys[place]) for place in pair) for pair in pairs)


class Survey:
    """Sum up a set in parts that are spread over it, further at each request. Thread-safe; nothing is kept on disk.

    Args:
        subject: The set.
        most_samples: Samples to sum up at most.
    """

    def __init__(self, subject: SurveyedSet, most_samples: int = MOST_SEEN) -> None:
        self._subject = subject
        self._order = subject.spread(most_samples)
        self._lock = threading.Lock()  # guards _totals, _num_done, _gone
        self._totals, self._num_done = Totals(), 0
        self._gone: tuple[Finding, ...] = ()

    @property
    def is_done(self) -> bool:
        """Whether further requests see nothing new."""
        return self._num_done >= len(self._order)

    @property
    def has_begun(self) -> bool:
        """Whether a request has been answered."""
        return self._num_done > 0

    def refined(self, seconds: float) -> StatsReport:
        """Return the report after reading further shards for about this time, at least a few.

        Raises:
            AccessDeniedError, StorageError: The store refuses, or fails.
        """
        with self._lock:
            # The totals are those of the first ``_num_done`` shards of the order.
            until, size = time.monotonic() + seconds, min(_FIRST_SHARDS, _THREADS)
            while self._num_done < len(self._order):
                some = self._order[self._num_done : self._num_done + size]
                for one in on_threads(self._read, list(self._subject.parts(some)), _THREADS, name="shardstream-survey"):
                    self._totals.merge(one)
                self._num_done += len(some)
                size = min(2 * size, _THREADS)
                if self._num_done >= len(self._order) and len(self._subject.shards.urls) <= _CHECKED_SHARDS:
                    self._gone = self._subject.gone()
                if time.monotonic() >= until:
                    break
            return self._subject.report(self._totals, self._num_done, self._gone)

    def _read(self, part: StatsPart) -> Totals:
        """Return the facts of a shard; those of an unreadable one are that it is unreadable."""
        try:
            return self._subject.reader.read(part, NoProgress())
        except DataError as error:
            return Totals(num_unread=int(self._subject.counts[part.position]), unread=[str(error)])


def choose(num_samples: int, limit: int | None, seed: int) -> Int64Array | None:
    """Choose ``limit`` of ``num_samples`` samples, in runs of four, one run per equal part of the set; None: all.

    Returns:
        int64 ``[limit]``, ascending numbers.
    """
    if limit is None or limit >= num_samples:
        return None
    num_runs, num_taken = -(-num_samples // _RUN), -(-limit // _RUN)
    borders = np.arange(num_taken + 1) * num_runs // num_taken
    drawn = np.random.default_rng(seed).random(num_taken)
    runs = borders[:-1] + (drawn * np.diff(borders)).astype(np.int64)
    chosen = (runs[:, None] * _RUN + np.arange(_RUN)).ravel()
    found: Int64Array = chosen[chosen < num_samples][:limit]
    if len(found) < limit:  # the last run was shorter
        others = np.setdiff1d(np.arange(min(num_samples, limit + _RUN)), found)
        found = np.sort(np.concatenate((found, others[: limit - len(found)])))
    return found


def _by_halves(items: list[int]) -> list[int]:
    """Return items in an order whose every beginning is spread over them: by the bits of their place, reversed."""
    bits = max(len(items) - 1, 0).bit_length()
    places = sorted(range(len(items)), key=lambda at: int(f"{at:0{bits}b}"[::-1], 2) if bits else 0)
    return [items[at] for at in places]


def _late_columns(shards: OpenSet, storage: Storage) -> tuple[tuple[LateColumn, ...], tuple[str, ...]]:
    """Return the late columns, or the reasons why they cannot be read."""
    try:
        return tuple(shards.late_columns(storage).values()), ()
    except DataError as error:
        return (), (str(error),)
    except StorageError:  # a store that cannot list
        return (), ()


def _samples_of_shards(shards: OpenSet, kept: Selection | None) -> Int64Array:
    """Return the number of counted samples per shard, int64 [S]."""
    if kept is None:
        return np.array([shard.num_samples for shard in shards.chunks.shards], np.int64)
    table = kept.table
    return np.bincount(table.shard, table.num_samples, len(shards.urls)).astype(np.int64)
