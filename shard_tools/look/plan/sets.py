"""Describe the rows of a plan: the set they are read from, their position in its shards, and their keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from shard_tools.look.plan.keys import Places, all_places, keys_of_all, places_by_order
from shard_tools.look.plan.sources import sets_of
from streaming.common.arrays import sums
from streaming.errors import NotFoundError
from streaming.storage import redact
from streaming.types import Int64Array

if TYPE_CHECKING:
    from streaming.order.packing.rules import PackRules
    from streaming.sets.sources.keys import KeysOfShards
    from streaming.sets.sources.mixed import AnySource


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """Rows of steps as planned; int64 [n] each.

    Attributes:
        steps: Step of each row.
        ranks: Data rank that receives it.
        chunk_ids: Chunk in the dataset.
        offsets: Number of the row in its chunk.
        passes: Pass of the stream.
        seeds: Seed of the order.
        positions: Position in the stream.
        lanes: Lane of the row.
        places: Place of the row in its lane, in that pass.
    """

    steps: Int64Array
    ranks: Int64Array
    chunk_ids: Int64Array
    offsets: Int64Array
    passes: Int64Array
    seeds: Int64Array
    positions: Int64Array
    lanes: Int64Array
    places: Int64Array

    def where(self, rows: Any) -> StepRows:
        """Return some of the rows."""
        return StepRows(**{name: getattr(self, name)[rows] for name in self.__dataclass_fields__})

    @classmethod
    def joined(cls, parts: Sequence[StepRows]) -> StepRows:
        """Concatenate the rows of several parts."""
        empty = np.zeros(0, np.int64)
        return cls(
            **{
                name: np.concatenate([empty, *(getattr(one, name) for one in parts)])
                for name in cls.__dataclass_fields__
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """Description of a row: where it is stored, and the keys of its samples.

    Attributes:
        leaf: Name of its set within the mixture; "": there is a single set.
        source: Its ``__source__`` in batches; None: batches have none.
        number: Number of the row in the dataset, or in the source.
        shard: URL of its shard.
        shard_number: Number of the shard in the set.
        chunk: Number of its chunk in the set.
        keys: Key of each of its samples; None: the index has no sample table.
        samples: Number of each sample in the shard.
        pieces: Of a document in a pack: first token, one past the last, and length of the document; else zeros.
        time: Moment of a window in its recording, in seconds; None: it is none.
    """

    leaf: str
    source: str | None
    number: int
    shard: str
    shard_number: int
    chunk: int
    keys: tuple[str | None, ...]
    samples: tuple[int, ...]
    pieces: tuple[tuple[int, int, int], ...]
    time: float | None = None


@dataclass(frozen=True, kw_only=True)
class PlannedSets:
    """The sets that a run reads, in order. Reads sample tables for keys.

    Attributes:
        planned: The dataset or mixture that the run reads.
        keys: Returns the keys of a set's shards.
    """

    planned: AnySource
    keys: Callable[[Any], KeysOfShards] = attrgetter("shard_keys")

    @cached_property
    def each(self) -> list[tuple[str, Any]]:
        """The sets by number, with their names; the name of a single set is ""."""
        return list(sets_of(self.planned))

    @cached_property
    def _shown_names(self) -> dict[str, str]:
        """The ``__source__`` in batches of each set."""
        found: dict[str, str] = getattr(self.planned, "shown_names", {"": ""})
        return found

    @property
    def names(self) -> list[str]:
        """Names of the sets, in the order of their numbers; the name of a single set is ""."""
        return [name for name, _ in self.each]

    @cached_property
    def first_chunks(self) -> Int64Array:
        """The first chunk of each set, int64 [n + 1]."""
        return sums([len(one.chunk_samples) for _, one in self.each])

    @cached_property
    def has_samples(self) -> bool:
        """Whether each row is a single sample."""
        return self.planned.items.first_numbers(self.planned.chunk_samples) is not None

    @property
    def pack_rules(self) -> PackRules | None:
        """The rules of packs; None: rows are samples."""
        found: PackRules | None = getattr(self.each[0][1], "rules", None)
        return found

    @cached_property
    def _shard_numbers(self) -> list[dict[str, int]]:
        """For each set, the number of each shard by URL."""
        return [{url: number for number, url in enumerate(one.urls)} for _, one in self.each]

    def places_of(self, chunk_ids: Int64Array, offsets: Int64Array, passes: Int64Array, seed: int) -> Places:
        """Return where the samples of rows are stored; see ``Places.of``."""

        def number_of(chunk: int, url: str) -> int:
            return self._shard_numbers[int(np.searchsorted(self.first_chunks, chunk, side="right")) - 1][url]

        return Places.of(self.planned, number_of, chunk_ids, offsets, passes, seed)

    def with_key(self, key: str, *, thorough: bool) -> tuple[list[tuple[int, int, int]], bool]:
        """Find samples with a key: set, shard, number in it; also return whether the search relied on key order.

        Raises:
            NotFoundError: No sample has the key.
        """
        once: dict[int, tuple[KeysOfShards, list[int]]] = {}
        for number, (_, one) in enumerate(self.each):
            known = one.shard_keys
            once.setdefault(id(known.home), (known, []))[1].append(number)
        for search in (all_places,) if thorough else (places_by_order, all_places):
            found = [(number, *at) for known, among in once.values() for at in search(known, key) for number in among]
            if found:
                return found, search is places_by_order and len(self.planned.urls) > 1
        what = redact(self.planned.urls[0])
        raise NotFoundError(f"--key: no sample of {what} and its neighbors has the key {key!r}")

    def why_left_out(self, number: int, shard: int, row: int) -> str:
        """Return why a sample of a set is never delivered, if the set knows; else ""."""
        return self.each[number][1].why_left_out(shard, row) or ""

    def why_key_left_out(self, key: str, places: Sequence[tuple[int, int, int]]) -> str:
        """Return why existing samples with the key are not delivered."""
        for number, shard, row in places:
            if why := self.why_left_out(number, shard, row):
                return f"--key: {key!r} {why}"
        return (
            f"--key: {key!r} is in the shards, but the set leaves it out: by where=, view=, subset= or exclude=, or "
            "because it has no value of the column that groups are made by"
        )

    def described(self, rows: StepRows) -> list[Described]:
        """Describe rows; reads the keys of their samples, in parallel over all sets."""
        descriptions: list[Described | None] = [None] * len(rows.steps)
        sources = np.searchsorted(self.first_chunks, rows.chunk_ids, side="right") - 1
        groups: list[tuple[int, Int64Array, Places]] = []  # number of the set, positions among the rows, samples
        for seed in np.unique(rows.seeds).tolist():
            for source in np.unique(sources).tolist():
                at = np.flatnonzero((sources == source) & (rows.seeds == seed))
                some = rows.where(at)
                if len(at):
                    groups.append((source, at, self.places_of(some.chunk_ids, some.offsets, some.passes, seed)))
        wanted = [(self.keys(self.each[source][1]), one.shards, one.numbers) for source, _, one in groups]
        for (source, at, places), keys in zip(groups, keys_of_all(wanted), strict=True):
            for row, found in zip(at.tolist(), self._described(source, rows.where(at), places, keys), strict=True):
                descriptions[row] = found
        return [one for one in descriptions if one is not None]

    def _described(
        self, source: int, rows: StepRows, places: Places, keys: Sequence[str | None]
    ) -> Iterator[Described]:  # fmt: skip
        """Describe rows of one set, given the places and keys of their samples."""
        name, one = self.each[source]
        shown = self._shown_names[name] or None
        owner = getattr(self.planned, "numbered", {}).get(name)
        within, splits = rows.chunk_ids - self.first_chunks[source], places.splits.tolist()
        numbers = (np.cumsum(one.chunk_samples) - one.chunk_samples)[within] + rows.offsets
        if owner is not None:
            numbers = owner.numbers_of(places.shards, places.numbers)
        samples, shards = places.numbers.tolist(), places.shards.tolist()
        pieces = list(map(tuple, places.pieces.tolist()))
        moments_of = getattr(one, "moments_of", None)  # of windows
        times = [None] * len(samples) if moments_of is None else moments_of(places.shards, places.numbers).tolist()
        for number, url, chunk, low, high in zip(
            numbers.tolist(), one.urls_of(within), within.tolist(), splits[:-1], splits[1:], strict=True
        ):  # fmt: skip
            yield Described(
                leaf=name, source=shown, number=number, shard=url, shard_number=shards[low], chunk=chunk,
                keys=tuple(keys[low:high]), samples=tuple(samples[low:high]), pieces=tuple(pieces[low:high]),
                time=times[low],
            )  # fmt: skip
