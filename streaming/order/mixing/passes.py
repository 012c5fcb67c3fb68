"""Lay the chunks of several sources in one order, and deal passes over a mixture.

Each source lists its chunks without end, pass after pass, each pass shuffled by the source's name. Every listed chunk
gets a *stamp*: the time at which the source's share reaches it. The chunks of all sources are laid in the order of
their stamps. A phase per source staggers them, so that sources do not come in step. The result depends only on chunk
sizes, weights, names and the seed. Memory and requests are those of one dataset with the same number of chunks,
regardless of the number of sources::

    web    |----|----|----|----|----|----|        stamps of web's chunks
    code      |---------|---------|------
    laid    w  c w  w   c  w  w  c w ...          one pass, or one lane (see streaming.order.mixing.lanes)

Stamps are 64-bit floats computed by single additions, multiplications and divisions: IEEE 754 gives the same bits on
every platform, and ties are broken by the sources' names.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from streaming.common.arrays import IntColumns
from streaming.errors import ConfigError
from streaming.order.plan.ledger import Even
from streaming.order.plan.order import ENDLESS, LaidOrder, Order, OrderSettings, checked_chunk_samples, window_slice
from streaming.order.plan.permutation import permutations, permutations_of
from streaming.types import Int64Array

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_MOST_PARTS, _MOST_TIMES = 2**24, 100
"""One pass lays at most this number of chunks, or this multiple of the sources' chunks: 2 GiB for a few seconds."""
_KEPT_FROM = 2**14  # chunks: a permutation of fewer takes less than a millisecond


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts(IntColumns):
    """Chunks, or parts of chunks, in the order in which they are laid; int64 [n] each.

    Attributes:
        chunk_ids: Number of the chunk in the mixture, which numbers the chunks of its sources, source after source.
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

    Empty chunks are left out. Thread-safe; at worst, two threads compute the same orders.

    Args:
        name: Name of the source.
        chunk_samples: int64 [C], samples of its chunks.
        first_chunk: Number of its first chunk in the mixture.
        seed: Seed of the order.
        shuffle: False: every pass in storage order.
        first_pass: Number of the first pass of this list; if the source grew, an earlier list has the earlier passes.

    Attributes:
        chunk_ids: int64 [n], numbers in the mixture of the non-empty chunks; in pieces, of the chunk of each piece.
        firsts: int64 [n], the first sample of each in its chunk: 0, except for pieces.
        sizes: int64 [n], samples of each.
        samples_per_pass: Their sum.
        key: Key of its orders.

    Raises:
        ConfigError: The source has no sample.
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
        self.firsts: Int64Array = np.zeros(len(full), np.int64)
        self.sizes: Int64Array = sizes[full]
        self.key = keyed_number(seed, "order", name)
        self._shuffle = shuffle
        self._passes: dict[int, Int64Array] = {}

    @property
    def num_chunks(self) -> int:
        """Chunks that hold a sample, or their pieces."""
        return len(self.sizes)

    @property
    def is_small(self) -> bool:
        """Whether it is shuffled, and so small that computing an order takes less than a millisecond."""
        return self._shuffle and self.num_chunks < _KEPT_FROM

    @property
    def largest_chunk(self) -> int:
        """Samples of the largest chunk."""
        return int(self.sizes.max())

    @property
    def mean_chunk(self) -> int:
        """Mean number of samples of a chunk, rounded up."""
        return -(-self.samples_per_pass // self.num_chunks)

    def in_pieces(self, lanes: int) -> Listing:
        """Return the same list by pieces of chunks, each at most a lane's share of a pass.

        Every pass then shuffles pieces, so that a lane does not get the same samples of a large chunk in every pass. A
        list with at least as many chunks as lanes is returned unchanged.
        """
        if self.num_chunks >= lanes:
            return self
        counts = -(-self.sizes // max(self.samples_per_pass // lanes, 1))
        row = np.repeat(np.arange(self.num_chunks), counts)
        index = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        begins, ends = (self.sizes[row] * at // counts[row] for at in (index, index + 1))
        made = copy.copy(self)
        made.chunk_ids, made.firsts, made.sizes, made._passes = self.chunk_ids[row], begins, ends - begins, {}
        return made

    def samples(self, start: int, stop: int) -> Parts:
        """Return the parts that hold samples ``[start, stop)`` of the list; those at the ends are cut."""
        return listed([self], np.array([start]), np.array([stop]))[0]

    def orders(self, numbers: Int64Array) -> Int64Array:
        """Return the order of the chunks in each of the given passes, int64 [n, num_chunks].

        The orders of large sources are cached.
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
    """Return the parts that hold samples ``[starts[i], stops[i])`` of each list, list after list, and their counts.

    Parts at the ends are cut. All lists are handled at once, since each alone would take a dozen calls into NumPy.
    """
    # 1. Per list, int64 [S]: its samples and chunks per pass, the first pass needed, and the number of passes.
    per_pass = np.array([one.samples_per_pass for one in listings])
    chunks = np.array([one.num_chunks for one in listings])
    low = starts // per_pass
    num_passes = -(-stops // per_pass) - low
    # 2. Per needed pass of each list, int64 [P]: its list and number; then per chunk of each pass, int64 [N].
    owner = np.repeat(np.arange(len(listings)), num_passes)
    number = np.arange(len(owner)) + np.repeat(low - np.cumsum(num_passes) + num_passes, num_passes)
    source = np.repeat(owner, chunks[owner])
    chosen = orders_of(listings, owner, number) + (np.cumsum(chunks) - chunks)[source]
    # 3. Where each chunk begins and ends in its list, counted in samples, int64 [N].
    sizes = np.concatenate([one.sizes for one in listings])[chosen]
    laid = np.cumsum(sizes)
    passed = num_passes * per_pass
    ends = laid + (low * per_pass - np.cumsum(passed) + passed)[source]
    begins = ends - sizes
    # 4. Keep the chunks that hold some of the samples, and cut them, int64 [kept].
    kept = np.flatnonzero((ends > starts[source]) & (begins < stops[source]))
    lows, highs = np.maximum(begins, starts[source]), np.minimum(ends, stops[source])
    passes = number + np.array([one.first_pass for one in listings])[owner]
    parts = Parts(
        chunk_ids=np.concatenate([one.chunk_ids for one in listings])[chosen[kept]],
        firsts=(lows - begins + np.concatenate([one.firsts for one in listings])[chosen])[kept],
        sizes=(highs - lows)[kept],
        passes=np.repeat(passes, chunks[owner])[kept],
    )
    return parts, np.bincount(source[kept], minlength=len(listings))


def orders_of(listings: Sequence[Listing], owner: Int64Array, number: Int64Array) -> Int64Array:
    """Return the order of the chunks in each of some passes, end to end, int64 [chunks of all these passes].

    Pass ``i`` is pass ``number[i]`` of the list ``owner[i]``, counted from the list's first pass. The orders of small
    sources are computed together.
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
        quotas: Samples of each source in a pass. The source's size is one pass over it; other numbers repeat or omit
            samples. The quotas of successive passes are consecutive in the source's list, so that no sample is favored.
        number: Number of the pass over the mixture.
        seed: Seed of the phases.

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
    """The weights of the sources from a time on.

    Attributes:
        start: Samples of one lane after which they apply.
        weights: Weight of each source; only ratios matter. A source that is not named has no weight.
    """

    start: int
    weights: Mapping[str, float]


def keyed_number(seed: int, purpose: str, name: str, *numbers: int) -> int:
    """Return a 64-bit number keyed by a seed, a purpose, a source's name, and numbers; the same in every release."""
    text = "\n".join([purpose, *map(str, numbers), name]).encode()
    key = seed.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, key=key).digest(), "little")


def keep_latest(kept: dict[_Key, _Value], key: _Key, value: _Value, most: int) -> None:
    """Store a value in a dict of at most ``most`` entries, dropping the oldest; safe among threads."""
    for old in list(kept)[: max(len(kept) - most + 1, 0)]:
        kept.pop(old, None)
    kept[key] = value


def eras_grown(eras: Sequence[tuple[int, int]], first_pass: int, num_chunks: int) -> list[tuple[int, int]]:
    """Record that a source has more chunks from a pass on, replacing its eras from then on."""
    return [*(era for era in eras if era[0] < first_pass), (first_pass, num_chunks)]


class DrawnOrder(Order, Protocol):
    """An order that knows how many samples of each source come before a row."""

    def drawn_before(self, row: int) -> Int64Array:
        """Count the samples of each source in the first ``row`` rows of the pass, over all lanes, int64 [sources]."""


def drawn_in_lanes(drawn: Callable[[int, int], Int64Array], lanes: int, row: int) -> Int64Array:
    """Return the sum over all lanes of the draws before a row, given ``drawn(lane, place)`` of each lane."""
    whole, rest = divmod(row, lanes)
    found: Int64Array = np.sum([drawn(lane, whole + (lane < rest)) for lane in range(lanes)], axis=0)
    return found


class Laid(Order, Protocol):
    """An order that lays samples in lanes, within which a window moves them."""

    def given(self, lane: int, place: int) -> Int64Array:
        """Count the samples of each source in the first ``place`` laid positions of a lane, int64 [sources]."""


class Sources:
    """The chunk tables of several sources as one: source after source, in the order in which they are named.

    Args:
        chunk_samples: int64 [C_s], samples of each chunk, by the source's name.
        settings: The order settings.
        absent: Names of sources that were drawn from earlier, and whose chunks are no longer known.
        laid: Samples of absent sources in each lane, int64 [L], by name, if known.
        even: The sources dealt by samples, and how, by name; see ``Entry.even``.
        eras: For each source that grew, pairs of a pass, from 0 on, and the number of its first chunks that are listed
            from then on.

    Attributes:
        names: Names of the sources.
        every_name: The same, followed by the names of absent sources.
        laid: Samples of absent sources in each lane.
        even: As given.
        chunk_samples: int64 [C], samples of the chunks of all sources.
        eras: For each source, by name, its lists of chunks: the first one, and another one for each time it grew.

    Raises:
        ConfigError: There is no source, a source has no sample, or the settings are unsuitable for mixtures.
    """

    def __init__(
        self, chunk_samples: Mapping[str, npt.ArrayLike], settings: OrderSettings, *, absent: Sequence[str] = (),
        laid: Mapping[str, npt.ArrayLike] | None = None, eras: Mapping[str, Sequence[tuple[int, int]]] | None = None,
        even: Mapping[str, Even] | None = None,
    ) -> None:  # fmt: skip
        if not chunk_samples:
            raise ConfigError("sources: none are given")
        if settings.scope != "global":
            raise ConfigError(
                f'scope: a mixture permutes all chunks in each pass, scope="global"; got {settings.scope!r}'
            )
        self.settings, self.even = settings, dict(even or {})
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
        """The list of chunks of each source, by name; for a source that grew, all its current chunks."""
        return {name: eras[-1] for name, eras in self.eras.items()}

    @property
    def sizes(self) -> dict[str, int]:
        """Samples of each source."""
        return {name: listing.samples_per_pass for name, listing in self.listings.items()}

    def source_of(self, chunk_ids: Int64Array) -> Int64Array:
        """Return the index in ``names`` of the source of each chunk; any shape."""
        return np.searchsorted(self._starts, chunk_ids, side="right") - 1

    def chunks_before(self, chunk_id: int) -> Iterator[int]:
        """Yield the other chunks of a chunk's source, backwards in storage order, wrapping around after the first."""
        source = int(self.source_of(np.array([chunk_id]))[0])
        first, stop = self._starts[source : source + 2]
        yield from range(chunk_id - 1, first - 1, -1)
        yield from range(stop - 1, chunk_id, -1)

    def drawn(self, order: Laid, number: int, lane: int, place: int) -> Int64Array:
        """Count the samples of each source due at positions ``[0, place)`` of a lane of a pass, int64 [sources].

        These are all samples laid at least a window before the place, and later ones that the window has moved forward.
        """
        settings = self.settings
        laid = max(place - settings.window, 0)
        start = max(place - 2 * settings.window, 0)
        behind = window_slice(settings, number, lane, start, place, order.lane_size(lane)) >= laid
        chunk_ids, _ = order.lane_samples(lane, start, place)
        return order.given(lane, laid) + np.bincount(self.source_of(chunk_ids[behind]), minlength=len(self.every_name))

    def under(self, settings: OrderSettings) -> Sources:
        """Return the same sources with other settings."""
        return Sources(self._tables, settings, absent=self._absent, laid=self.laid, eras=self._grown, even=self.even)


class MixedPasses:
    """The orders of a mixture that ends: in every pass each source gives its quota of samples, spread evenly.

    By default, each source gives each of its samples exactly once per pass. A pass is laid as a whole and cut into
    equal lanes like a pass over a single dataset, so the same guarantees hold.

    Args:
        sources: The sources.
        quotas: Samples of each source in a pass. Twice its size gives each sample twice; half of its size gives each
            sample in every other pass. Default: its size. 0 leaves a source out.

    Raises:
        ConfigError: A quota is negative or names an unknown source, or a pass would be empty or lay too many chunks.
    """

    is_endless = False
    borders: tuple[int, ...] = ()
    stretch = mixed_after = ENDLESS

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
        self._check_parts()

    def _check_parts(self) -> None:
        """Check that a pass is small enough to be laid: it lists the chunks of a source as often as it reads them.

        Raises:
            ConfigError: It lists too many chunks.
        """
        listings = self.sources.listings
        parts = {name: -(-self.quotas[name] // one.samples_per_pass) * one.num_chunks for name, one in listings.items()}
        most = max(_MOST_PARTS, _MOST_TIMES * sum(one.num_chunks for one in listings.values()))
        if sum(parts.values()) > most:
            name = max(parts, key=parts.__getitem__)
            raise ConfigError(
                f"an epoch of this mixture reads {sum(parts.values()):,} chunks, at most {most:,} can be laid out: "
                f"{name!r} is read {self.quotas[name] / self.sources.sizes[name]:,.6g} times. Give smaller repeats= "
                "(weights= that differ less, with ends=), or a mixture without end: weights= without ends=, and "
                "DataLoader(mixture, epoch_size=…)"
            )

    def of_pass(self, number: int) -> DrawnOrder:
        """Return the order of one pass."""
        listings = list(self.sources.listings.values())
        parts = lay_pass(listings, self.quotas, number=number, seed=self.settings.seed)
        return MixedOrder(self.sources, parts, number)

    def drawn_before(self, row: int) -> Int64Array:
        """Count the samples of each source in the first ``row`` rows of all passes, int64 [sources]."""
        number, rest = divmod(row, self.samples_per_pass)
        drawn = self.drawn_by(number)
        whole = np.array([drawn[name] for name in self.sources.names], np.int64)
        return whole + self.of_pass(number).drawn_before(rest)

    def drawn_by(self, number: int) -> dict[str, int]:
        """Count the samples of each source in all passes before a pass."""
        return {name: number * quota for name, quota in self.quotas.items()}

    def under(self, settings: OrderSettings) -> Self:
        """Return the orders of the same mixture with other settings."""
        return type(self)(self.sources.under(settings), quotas=self.quotas)


class MixedOrder(LaidOrder):
    """The order of one pass over a mixture that ends."""

    def __init__(self, sources: Sources, parts: Parts, number: int) -> None:
        super().__init__(parts.chunk_ids, parts.sizes, parts.firsts, sources.settings, number)
        self._sources = sources

    def given(self, lane: int, place: int) -> Int64Array:
        """See ``Laid``."""
        start, _ = self.lane_bounds(lane)
        first = int(np.searchsorted(self.chunk_starts, start, side="right")) - 1
        stop = int(np.searchsorted(self.chunk_starts, start + place, side="left"))
        bounds = np.clip(self.chunk_starts[first : max(stop, first) + 1], start, start + place)
        counts = np.zeros(len(self._sources.names), np.int64)
        np.add.at(counts, self._sources.source_of(self.chunk_order[first : max(stop, first)]), np.diff(bounds))
        return counts

    def drawn_before(self, row: int) -> Int64Array:
        """See ``DrawnOrder``."""
        return drawn_in_lanes(partial(self._sources.drawn, self, self.epoch), self.settings.lanes, row)

    def chunks_before(self, chunk_id: int) -> Iterator[int]:
        """See ``Order``."""
        return self._sources.chunks_before(chunk_id)
