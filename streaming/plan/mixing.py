"""Lay the chunks of several sources in one order: finite passes over a mixture, and endless lanes by weight.

Both regimes are one idea. Each source lists its chunks without end, pass after pass, each pass shuffled by the source's
name. Every listed chunk gets a *stamp*, the time at which the source's share has grown to reach it, and the chunks of
all sources are laid in the order of their stamps. A phase per source (and lane) staggers them, so that sources do not
come in step. What is laid depends on chunk sizes, weights, names and the seed alone, and memory and requests are those
of one data set with as many chunks, however many sources there are::

    web    |----|----|----|----|----|----|        stamps of web's chunks
    code      |---------|---------|------
    laid    w  c w  w   c  w  w  c w ...          one lane, or one pass

Stamps are 64-bit floats that single additions, multiplications and divisions make: IEEE 754 gives the same bits on
every platform, and ties go by the sources' names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from streaming.errors import ConfigError
from streaming.plan.order import EpochOrder, OrderSettings, checked_chunk_samples
from streaming.types import Int64Array

_Floats = npt.NDArray[np.float64]
_KEPT_CHUNKS = 2**20  # of permuted passes, per source: 8 MiB


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
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

    def __len__(self) -> int:
        return len(self.chunk_ids)

    def taken(self, rows: npt.NDArray[np.intp] | slice) -> Parts:
        """Some of the parts, in another order."""
        return Parts(
            chunk_ids=self.chunk_ids[rows],
            firsts=self.firsts[rows],
            sizes=self.sizes[rows],
            passes=self.passes[rows],
        )

    @classmethod
    def joined(cls, parts: Sequence[Parts]) -> Parts:
        """The parts of several lists, one after the other."""
        empty = np.empty(0, np.int64)
        return cls(
            chunk_ids=np.concatenate([empty, *(each.chunk_ids for each in parts)]),
            firsts=np.concatenate([empty, *(each.firsts for each in parts)]),
            sizes=np.concatenate([empty, *(each.sizes for each in parts)]),
            passes=np.concatenate([empty, *(each.passes for each in parts)]),
        )


class Listing:
    """List the chunks of one source without end: pass after pass, each shuffled by (seed, name, pass).

    Chunks without samples are left out. Safe to share between threads: what it keeps is only what it would make again.

    Args:
        name: Of the source.
        chunk_samples: int64[C], samples of its chunks.
        first_chunk: Number of its first chunk in the mixture.
        seed: Of the order.
        shuffle: False: every pass in storage order.
    """

    def __init__(
        self, name: str, chunk_samples: npt.ArrayLike, *, first_chunk: int, seed: int, shuffle: bool = True
    ) -> None:
        sizes = checked_chunk_samples(chunk_samples)
        self.name = name
        self.samples_per_pass = int(sizes.sum())
        self._full = np.flatnonzero(sizes)
        self._sizes = sizes[self._full]
        self._first_chunk = first_chunk
        self._key = _number(seed, "order", name)
        self._shuffle = shuffle
        self._passes: dict[int, Int64Array] = {}

    @property
    def num_chunks(self) -> int:
        """Chunks that hold a sample."""
        return len(self._full)

    def at(self, indices: Int64Array) -> Parts:
        """The chunks at some places of the list, in any order; the list has no end."""
        passes, places = np.divmod(indices, self.num_chunks)
        chosen = np.empty_like(indices)
        for number in np.unique(passes).tolist():
            rows = passes == number
            chosen[rows] = self._permuted(number)[places[rows]]
        return Parts(
            chunk_ids=self._full[chosen] + self._first_chunk,
            firsts=np.zeros_like(indices),
            sizes=self._sizes[chosen],
            passes=passes,
        )

    def samples(self, start: int, stop: int) -> Parts:
        """The parts that hold samples ``[start, stop)`` of the list; those at its ends are cut."""
        numbers = range(start // self.samples_per_pass, -(-stop // self.samples_per_pass))
        indices = np.arange(numbers.start * self.num_chunks, numbers.stop * self.num_chunks, dtype=np.int64)
        whole = self.at(indices)
        ends = np.cumsum(whole.sizes) + numbers.start * self.samples_per_pass
        begins = ends - whole.sizes
        kept = (ends > start) & (begins < stop)
        lows, highs = np.maximum(begins, start), np.minimum(ends, stop)
        cut = Parts(chunk_ids=whole.chunk_ids, firsts=lows - begins, sizes=highs - lows, passes=whole.passes)
        return cut.taken(np.flatnonzero(kept))

    def _permuted(self, number: int) -> Int64Array:
        order = self._passes.get(number)
        if order is None:
            order = np.arange(self.num_chunks)
            if self._shuffle:
                settings = OrderSettings(seed=self._key, lanes=1, window=0)
                order = EpochOrder(np.ones(self.num_chunks, np.int64), settings, number).chunk_order
            most = max(_KEPT_CHUNKS // self.num_chunks, 2)
            for old in sorted(self._passes)[: max(len(self._passes) - most + 1, 0)]:
                self._passes.pop(old, None)
            self._passes[number] = order
        return order


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
    drawn, stamps = [], []
    for listing in sorted(listings, key=lambda listing: listing.name):
        quota = quotas[listing.name]
        parts = listing.samples(number * quota, (number + 1) * quota)
        drawn.append(parts)
        phase = _number(seed, "phase of a pass", listing.name, number) >> 11
        before = np.cumsum(parts.sizes) - parts.sizes
        stamps.append((before + parts.sizes * (phase / 2**53)) / max(quota, 1))
    order = np.argsort(np.concatenate(stamps), kind="stable")
    return Parts.joined(drawn).taken(order)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weights:
    """Hold the weights of the sources from a time on.

    Attributes:
        start: Samples of one lane after which they apply.
        weights: Of each source; only their ratios matter. A source that is not named has none.
    """

    start: int
    weights: Mapping[str, float]


class Lane:
    """Lay the chunks of one lane by weight, without end.

    The lane's chunk ``k`` of a source is entry ``k * L + lane`` of the source's list: the lanes share out every pass.
    After ``n`` samples of the lane a source has given ``n`` times its share, give or take one of its chunks, and its
    share of one chunk of every source.

    Args:
        listings: The sources.
        schedule: Weights by time, the first from 0 on.
        lane: Number of the lane.
        lanes: L.
        seed: Of the phases.
    """

    def __init__(
        self, listings: Sequence[Listing], schedule: Sequence[Weights], *, lane: int, lanes: int, seed: int
    ) -> None:
        self._draws = [
            _Draws(listing, schedule, lane=lane, lanes=lanes, seed=seed)
            for listing in sorted(listings, key=lambda listing: listing.name)
        ]
        self._step = 4 * max(1, *(draws.mean_chunk for draws in self._draws)) * len(self._draws)
        self._reached = 0.0
        self._laid = Parts.joined([])
        self._ends: Int64Array = np.empty(0, np.int64)

    def parts(self, start: int, stop: int) -> tuple[Parts, Int64Array]:
        """The parts that hold lane positions ``[start, stop)``, and the lane positions at which they begin."""
        while not len(self._ends) or self._ends[-1] < stop:
            self._extend(stop)
        low = int(np.searchsorted(self._ends, start, side="right"))
        high = int(np.searchsorted(self._ends, stop, side="left")) + 1
        found = self._laid.taken(slice(low, high))
        return found, self._ends[low:high] - found.sizes

    def _extend(self, stop: int) -> None:
        """Lay all chunks stamped up to a later time; what is laid already stays."""
        laid = int(self._ends[-1]) if len(self._ends) else 0
        time = max(self._reached, float(stop)) + max(self._step, (stop - laid) // 8)
        drawn = [draws.until(time) for draws in self._draws]
        order = np.argsort(np.concatenate([stamps for _, stamps in drawn]), kind="stable")
        more = Parts.joined([parts for parts, _ in drawn]).taken(order)
        self._reached = time
        self._laid = Parts.joined([self._laid, more])
        self._ends = np.concatenate([self._ends, laid + np.cumsum(more.sizes)])


class _Draws:
    """The chunks that one lane draws from one source, stamped."""

    def __init__(self, listing: Listing, schedule: Sequence[Weights], *, lane: int, lanes: int, seed: int) -> None:
        self._listing, self._lane, self._lanes = listing, lane, lanes
        self._phase = _phase(listing.name, lane, lanes, seed)
        self._times, self._shares, self._dues = _target(listing.name, schedule)
        self._next, self._given = 0, 0
        self.mean_chunk = -(-listing.samples_per_pass // listing.num_chunks)

    def until(self, time: float) -> tuple[Parts, _Floats]:
        """The chunks stamped from where the last call ended up to ``time``, and their stamps."""
        drawn, stamped = [], []
        due = self._due(time)
        while self._given <= due:
            count = int((due - self._given) // self.mean_chunk) + 2
            parts = self._listing.at(np.arange(self._next, self._next + count) * self._lanes + self._lane)
            before = self._given + np.cumsum(parts.sizes) - parts.sizes
            stamps = self._stamps(before + parts.sizes * self._phase)
            kept = int(np.searchsorted(stamps, time, side="right"))
            drawn.append(parts.taken(slice(kept)))
            stamped.append(stamps[:kept])
            self._next += kept
            self._given += int(parts.sizes[:kept].sum())
            if kept < count:
                break
        return Parts.joined(drawn), np.concatenate([np.empty(0), *stamped])

    def _due(self, time: float) -> float:
        """Samples that the source's share of the lane's first ``time`` samples comes to."""
        segment = int(np.searchsorted(self._times, time, side="right")) - 1
        return float(self._dues[segment] + (time - self._times[segment]) * self._shares[segment])

    def _stamps(self, samples: _Floats) -> _Floats:
        """The times at which the source's share reaches so many samples; infinity where it never does."""
        # Segments in which the share is 0 add nothing: the last segment that begins at or below has a share, if any.
        segment = np.searchsorted(self._dues, samples, side="right") - 1
        share = self._shares[segment]
        after = np.full(len(samples), np.inf)
        np.divide(samples - self._dues[segment], share, out=after, where=share > 0)
        stamps: _Floats = self._times[segment] + after
        return stamps


def _target(name: str, schedule: Sequence[Weights]) -> tuple[_Floats, _Floats, _Floats]:
    """How a source's share grows: times of the segments' starts, share in each, samples due at each start."""
    times: list[float] = []
    shares: list[float] = []
    dues: list[float] = []
    due = Fraction()
    for index, entry in enumerate(schedule):
        weights = checked_weights(entry.weights)
        share = weights.get(name, Fraction()) / sum(weights.values())
        if index:
            due += Fraction(shares[-1]) * (entry.start - schedule[index - 1].start)
        times.append(float(entry.start))
        shares.append(float(share))
        dues.append(float(due))
    return np.array(times), np.array(shares), np.array(dues)


def checked_weights(weights: Mapping[str, float]) -> dict[str, Fraction]:
    """Weights as exact numbers.

    Raises:
        ConfigError: One is negative or no number, or none is above 0.
    """
    exact = {}
    for name, weight in weights.items():
        number = isinstance(weight, (int, float, np.number, Fraction)) and not isinstance(weight, bool)
        if not number or not 0 <= weight < float("inf"):
            raise ConfigError(f"weights: {name!r}: expected a number from 0 on, got {weight!r}")
        exact[name] = Fraction(weight if isinstance(weight, (int, Fraction)) else float(weight))
    if not any(exact.values()):
        raise ConfigError(f"weights: at least one must be above 0, got {dict(weights)}")
    return exact


def _phase(name: str, lane: int, lanes: int, seed: int) -> float:
    """Where in a chunk's length a source begins in one lane: ``(i + 1/2) / lanes``, permuted over the lanes."""
    settings = OrderSettings(seed=_number(seed, "phases", name), lanes=1, window=0)
    places = EpochOrder(np.ones(lanes, np.int64), settings, 0).chunk_order
    return (2 * int(places[lane]) + 1) / (2 * lanes)


def _number(seed: int, purpose: str, name: str, *numbers: int) -> int:
    """A 64-bit number from a seed, what it is for, a source's name, and more; the same in every release."""
    text = "\n".join([purpose, *map(str, numbers), name]).encode()
    key = seed.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, key=key).digest(), "little")
