"""Lay the chunks of several sources in one order, and deal out passes over a mixture.

Each source lists its chunks without end, pass after pass, each pass shuffled by the source's name. Every listed chunk
gets a *stamp*, the time at which the source's share has grown to reach it, and the chunks of all sources are laid in
the order of their stamps. A phase per source staggers them, so that sources do not come in step. What is laid depends
on chunk sizes, weights, names and the seed alone, and memory and requests are those of one data set with as many
chunks, however many sources there are::

    web    |----|----|----|----|----|----|        stamps of web's chunks
    code      |---------|---------|------
    laid    w  c w  w   c  w  w  c w ...          one pass, or one lane (see streaming.mixing.lanes)

Stamps are 64-bit floats that single additions, multiplications and divisions make: IEEE 754 gives the same bits on
every platform, and ties go by the sources' names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from streaming.arrays import IntColumns
from streaming.errors import ConfigError
from streaming.plan.order import ENDLESS, LaidOrder, Order, OrderSettings, checked_chunk_samples, window_slice
from streaming.plan.permutation import permutations, permutations_of
from streaming.types import Int64Array

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_KEPT_FROM = 2**14  # chunks: permutations of fewer cost less than a millisecond


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts(IntColumns):
    """Chunks, or parts of chunks, in the order in which they are laid; int64[n] each.

    Attributes:
        chunk_ids: Number of the chunk in the mixture, whose chunks are those of its sources, source after source.
        firsts: First sample of the part in its chunk.
        sizes: Samples of the part, at least one.
        passes: Pass of the source in which it is listed.
    """

    chunk_ids: Int64Array
    firsts: Int64Array
    sizes: Int64Array
    passes: Int64Array


class Listing:
    """List the chunks of one source without end: pass after pass, each shuffled by (seed, name, pass).

    Chunks without samples are left out. Safe to share between threads: what it keeps is only what it would make again.

    Args:
        name: Of the source.
        chunk_samples: int64[C], samples of its chunks.
        first_chunk: Number of its first chunk in the mixture.
        seed: Of the order.
        shuffle: False: every pass in storage order.
        first_pass: Number of the first pass of this list: where a source grew, an earlier list has those before.

    Attributes:
        chunk_ids: int64[n], numbers in the mixture of the chunks that hold a sample.
        sizes: int64[n], samples of each.
        samples_per_pass: Of all.
        key: Of its orders.

    Raises:
        ConfigError: There is no sample.
    """

    def __init__(
        self, name: str, chunk_samples: npt.ArrayLike, *, first_chunk: int, seed: int, shuffle: bool = True,
        first_pass: int = 0,
    ) -> None:  # fmt: skip
        try:
            sizes = checked_chunk_samples(chunk_samples)
        except ConfigError as error:
            raise ConfigError(f"source {name!r}: {error}") from error
        self.name, self.seed, self.first_pass = name, seed, first_pass
        self.samples_per_pass = int(sizes.sum())
        full = np.flatnonzero(sizes)
        self.chunk_ids: Int64Array = full + first_chunk
        self.sizes: Int64Array = sizes[full]
        self.key = keyed_number(seed, "order", name)
        self._shuffle = shuffle
        self._passes: dict[int, Int64Array] = {}

    @property
    def num_chunks(self) -> int:
        """Chunks that hold a sample."""
        return len(self.sizes)

    @property
    def is_small(self) -> bool:
        """Whether it is shuffled, and an order takes less than a millisecond."""
        return self._shuffle and self.num_chunks < _KEPT_FROM

    @property
    def largest_chunk(self) -> int:
        """Samples of the largest chunk."""
        return int(self.sizes.max())

    @property
    def mean_chunk(self) -> int:
        """Samples of a chunk, on average, rounded up."""
        return -(-self.samples_per_pass // self.num_chunks)

    def samples(self, start: int, stop: int) -> Parts:
        """Return the parts that hold samples ``[start, stop)`` of the list; those at its ends are cut."""
        return listed([self], np.array([start]), np.array([stop]))[0]

    def orders(self, numbers: Int64Array) -> Int64Array:
        """Return the chunks in the order of each of some passes, int64[n, num_chunks].

        Those of large sources are kept.
        """
        if not self._shuffle:
            return np.broadcast_to(np.arange(self.num_chunks), (len(numbers), self.num_chunks))
        if self.is_small:
            return permutations(self.key, numbers, self.num_chunks)
        found = []
        for number in numbers.tolist():
            order = self._passes.get(number)
            if order is None:
                order = permutations(self.key, np.array([number]), self.num_chunks)[0]
                keep_latest(self._passes, number, order, 2)
            found.append(order)
        return np.array(found, np.int64).reshape(len(numbers), self.num_chunks)


def listed(listings: Sequence[Listing], starts: Int64Array, stops: Int64Array) -> tuple[Parts, Int64Array]:
    """Return the parts that hold samples ``[starts[i], stops[i])`` of each list, and how many these are.

    They stand list after list.

    Parts at the ends are cut. All lists at once: one after the other takes a dozen calls into NumPy for each.
    """
    per_pass = np.array([one.samples_per_pass for one in listings])
    chunks = np.array([one.num_chunks for one in listings])
    low = starts // per_pass
    num_passes = -(-stops // per_pass) - low
    # One row for each pass of each list that holds some of them, and then one for each chunk in it.
    owner = np.repeat(np.arange(len(listings)), num_passes)
    number = np.arange(len(owner)) + np.repeat(low - np.cumsum(num_passes) + num_passes, num_passes)
    source = np.repeat(owner, chunks[owner])
    chosen = _orders_of(listings, owner, number) + (np.cumsum(chunks) - chunks)[source]
    sizes = np.concatenate([one.sizes for one in listings])[chosen]
    laid = np.cumsum(sizes)
    passed = num_passes * per_pass
    ends = laid + (low * per_pass - np.cumsum(passed) + passed)[source]
    begins = ends - sizes
    kept = np.flatnonzero((ends > starts[source]) & (begins < stops[source]))
    lows, highs = np.maximum(begins, starts[source]), np.minimum(ends, stops[source])
    passes = number + np.array([one.first_pass for one in listings])[owner]
    parts = Parts(
        chunk_ids=np.concatenate([one.chunk_ids for one in listings])[chosen[kept]],
        firsts=(lows - begins)[kept],
        sizes=(highs - lows)[kept],
        passes=np.repeat(passes, chunks[owner])[kept],
    )
    return parts, np.bincount(source[kept], minlength=len(listings))


def _orders_of(listings: Sequence[Listing], owner: Int64Array, number: Int64Array) -> Int64Array:
    """Return places of the chunks of some passes, each of the list ``owner``, in their orders, end to end.

    Those of small sources are drawn together.
    """
    passes = number + np.array([one.first_pass for one in listings])[owner]
    drawn = np.array([one.is_small for one in listings])[owner]
    if len(listings) == 1 or not drawn.any():
        return np.concatenate(
            [one.orders(passes[owner == place]).ravel() for place, one in enumerate(listings)]
        ).astype(np.int64, copy=False)
    chunks = np.array([one.num_chunks for one in listings])[owner]
    keys = np.array([one.key for one in listings], np.uint64)[owner]
    found = np.empty(int(chunks.sum()), np.int64)
    is_drawn = np.repeat(drawn, chunks)
    found[is_drawn] = permutations_of(keys[drawn], passes[drawn], chunks[drawn])
    others = np.flatnonzero(~drawn).tolist()
    if others:
        found[~is_drawn] = np.concatenate([listings[owner[row]].orders(passes[row : row + 1])[0] for row in others])
    return found


def lay_pass(listings: Sequence[Listing], quotas: Mapping[str, int], *, number: int, seed: int) -> Parts:
    """Lay one pass over a mixture: each source gives its quota of samples, spread evenly over the pass.

    Args:
        listings: The sources.
        quotas: Samples of each source in a pass; the source's own size is one pass over it, other numbers repeat or
            leave out. Quotas of following passes follow one another in the source's list, so nothing is favoured.
        number: Of the pass over the mixture.
        seed: Of the phases.

    Returns:
        The parts in the order in which they are laid; their sizes sum to the sum of the quotas.
    """
    by_name = sorted(listings, key=lambda listing: listing.name)
    due = np.array([quotas[listing.name] for listing in by_name])
    parts, counts = listed(by_name, number * due, (number + 1) * due)
    source = np.repeat(np.arange(len(by_name)), counts)
    phases = [keyed_number(seed, "phase of a pass", listing.name, number) >> 11 for listing in by_name]
    before = np.cumsum(parts.sizes) - parts.sizes - (np.cumsum(due) - due)[source]
    stamps = (before + parts.sizes * (np.array(phases) / 2**53)[source]) / np.maximum(due, 1)[source]
    return parts.taken(np.argsort(stamps, kind="stable"))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weights:
    """Hold the weights of the sources from a time on.

    Attributes:
        start: Samples of one lane after which they apply.
        weights: Of each source; only their ratios matter. A source that is not named has none.
    """

    start: int
    weights: Mapping[str, float]


def keyed_number(seed: int, purpose: str, name: str, *numbers: int) -> int:
    """Return a 64-bit number from a seed, what it is for, a source's name, and more; the same in every release."""
    text = "\n".join([purpose, *map(str, numbers), name]).encode()
    key = seed.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, key=key).digest(), "little")


def keep_latest(kept: dict[_Key, _Value], key: _Key, value: _Value, most: int) -> None:
    """Keep a value in a dict of at most so many, from which the oldest go; other threads may do so meanwhile."""
    for old in list(kept)[: max(len(kept) - most + 1, 0)]:
        kept.pop(old, None)
    kept[key] = value


def eras_grown(eras: Sequence[tuple[int, int]], first_pass: int, num_chunks: int) -> list[tuple[int, int]]:
    """Grow the eras of a source that has more chunks from a pass on, in place of those from then on."""
    return [*(era for era in eras if era[0] < first_pass), (first_pass, num_chunks)]


class DrawnOrder(Order, Protocol):
    """An order that knows how much of each source came before a position."""

    def drawn(self, lane: int, place: int) -> Int64Array:
        """Count the samples of each source that are due at positions ``[0, place)`` of a lane, int64[sources]."""


class Laid(Order, Protocol):
    """An order that lays samples in lanes, of which a window of the lane's own moves them."""

    def given(self, lane: int, place: int) -> Int64Array:
        """Count the samples of each source on the first ``place`` positions of a lane as it is laid, int64[sources]."""


class Sources:
    """Hold the chunk tables of several sources as one: source after source, in the order in which they are named.

    Args:
        chunk_samples: int64[C_s], samples of each chunk, by the source's name.
        settings: The order settings.
        absent: Names of others that were drawn from once, and of which no chunk is known any more.
        laid: Samples of absent ones that lie in each lane, int64[L], by name, where that is known.
        eras: Of each source that grew, from which pass on its first how many chunks are listed; by pass, from 0 on.

    Attributes:
        names: Of the sources.
        every_name: Those of the absent ones behind them.
        laid: Of absent ones.
        chunk_samples: int64[C], of all.
        eras: Of each source, by name: its list of chunks, and where it grew a later one from some pass on.

    Raises:
        ConfigError: There is no source, one holds no sample, or the settings are of no use here.
    """

    def __init__(
        self, chunk_samples: Mapping[str, npt.ArrayLike], settings: OrderSettings, *, absent: Sequence[str] = (),
        laid: Mapping[str, npt.ArrayLike] | None = None, eras: Mapping[str, Sequence[tuple[int, int]]] | None = None,
    ) -> None:  # fmt: skip
        if not chunk_samples:
            raise ConfigError("sources: none are given")
        if settings.scope != "global":
            raise ConfigError(
                f'scope: a mixture permutes all chunks in each pass, scope="global"; got {settings.scope!r}'
            )
        self.settings = settings
        self.names = tuple(chunk_samples)
        self._absent = tuple(absent)
        self.every_name = self.names + self._absent
        self.laid = {name: np.asarray(counts, np.int64) for name, counts in (laid or {}).items() if name in absent}
        self._grown = {name: tuple(found) for name, found in (eras or {}).items()}
        self.eras: dict[str, tuple[Listing, ...]] = {}
        self._tables = {name: np.asarray(given, np.int64) for name, given in chunk_samples.items()}
        self._starts = [0]
        for name, table in self._tables.items():
            self.eras[name] = tuple(
                Listing(
                    name, table[:count], first_chunk=self._starts[-1], seed=settings.seed, shuffle=settings.shuffle,
                    first_pass=first,
                )
                for first, count in self._grown.get(name, ((0, len(table)),))
            )  # fmt: skip
            self._starts.append(self._starts[-1] + len(table))
        self.chunk_samples: Int64Array = np.concatenate(list(self._tables.values()))
        self.chunk_samples.setflags(write=False)

    @property
    def listings(self) -> dict[str, Listing]:
        """The chunks of each source, by name; of one that grew, all that it has now."""
        return {name: eras[-1] for name, eras in self.eras.items()}

    @property
    def sizes(self) -> dict[str, int]:
        """Samples of each source."""
        return {name: listing.samples_per_pass for name, listing in self.listings.items()}

    def source_of(self, chunk_ids: Int64Array) -> Int64Array:
        """Return the place in ``names`` of the source of each chunk; any shape."""
        return np.searchsorted(self._starts, chunk_ids, side="right") - 1

    def chunks_before(self, chunk_id: int) -> Iterator[int]:
        """Yield the other chunks of a chunk's source, backwards in storage order; the last follows the first."""
        source = int(self.source_of(np.array([chunk_id]))[0])
        first, stop = self._starts[source : source + 2]
        yield from range(chunk_id - 1, first - 1, -1)
        yield from range(stop - 1, chunk_id, -1)

    def drawn(self, order: Laid, number: int, lane: int, place: int) -> Int64Array:
        """Count the samples of each source due at positions ``[0, place)`` of a lane of a pass, int64[sources].

        All that is laid a window before the place is due, and of what comes behind, what the window brings forward.
        """
        settings = self.settings
        laid = max(place - settings.window, 0)
        start = max(place - 2 * settings.window, 0)
        behind = window_slice(settings, number, lane, start, place, order.lane_size(lane)) >= laid
        chunk_ids, _ = order.lane_samples(lane, start, place)
        return order.given(lane, laid) + np.bincount(self.source_of(chunk_ids[behind]), minlength=len(self.every_name))

    def under(self, settings: OrderSettings) -> Sources:
        """Return the same sources under other settings."""
        return Sources(self._tables, settings, absent=self._absent, laid=self.laid, eras=self._grown)


class MixedPasses:
    """The orders of a mixture that ends: in every pass each source gives its quota of samples, spread evenly.

    By default each source gives all its samples: each exactly once a pass. A pass is laid as a whole and cut into equal
    lanes like that of one data set, so all promises hold as they do there.

    Args:
        sources: The sources.
        quotas: Samples of each source in a pass; twice its size gives each sample twice, half of it each sample in
            every other pass. Default: its size. 0 leaves a source out.

    Raises:
        ConfigError: A quota is negative, or of no source, or a pass would be empty.
    """

    is_endless = False
    borders: tuple[int, ...] = ()
    stretch = ENDLESS

    def __init__(self, sources: Sources, *, quotas: Mapping[str, int] | None = None) -> None:
        self.sources, self.settings, self.chunk_samples = sources, sources.settings, sources.chunk_samples
        self.quotas = dict(sources.sizes if quotas is None else quotas)
        if set(self.quotas) != set(sources.names) or min(self.quotas.values()) < 0:
            raise ConfigError(
                f"quotas: expected samples of each of {sorted(sources.names)}, none below 0, got {self.quotas}"
            )
        self.samples_per_pass = sum(self.quotas.values())
        if not self.samples_per_pass:
            raise ConfigError("quotas: all are 0, a pass would be empty")

    def of_pass(self, number: int) -> DrawnOrder:
        """Return the order of one pass."""
        listings = list(self.sources.listings.values())
        parts = lay_pass(listings, self.quotas, number=number, seed=self.settings.seed)
        return MixedOrder(self.sources, parts, number)

    def under(self, settings: OrderSettings) -> MixedPasses:
        """Return the orders of the same mixture under other settings."""
        return MixedPasses(self.sources.under(settings), quotas=self.quotas)


class MixedOrder(LaidOrder):
    """The order of one pass over a mixture that ends."""

    def __init__(self, sources: Sources, parts: Parts, number: int) -> None:
        super().__init__(parts.chunk_ids, parts.sizes, parts.firsts, sources.settings, number)
        self._sources = sources

    def given(self, lane: int, place: int) -> Int64Array:
        """Count the samples of each source on the first ``place`` positions of a lane as it is laid, int64[sources]."""
        start, _ = self.lane_bounds(lane)
        first = int(np.searchsorted(self.chunk_starts, start, side="right")) - 1
        stop = int(np.searchsorted(self.chunk_starts, start + place, side="left"))
        bounds = np.clip(self.chunk_starts[first : max(stop, first) + 1], start, start + place)
        counts = np.zeros(len(self._sources.names), np.int64)
        np.add.at(counts, self._sources.source_of(self.chunk_order[first : max(stop, first)]), np.diff(bounds))
        return counts

    def drawn(self, lane: int, place: int) -> Int64Array:
        """Count the samples of each source that are due at positions ``[0, place)`` of a lane, int64[sources]."""
        return self._sources.drawn(self, self.epoch, lane, place)

    def chunks_before(self, chunk_id: int) -> Iterator[int]:
        """See ``Order``."""
        return self._sources.chunks_before(chunk_id)
