"""Order one pass over a dataset: a pure function of (chunk sizes, settings, pass number).

Three maps, each with a closed form, lead from a *global position* (when a sample is due) to a sample of the
dataset::

    global position p  ->  lane p % L, lane position p // L    (deal: every lane advances at the same pace)
    lane position      ->  linear position                     (window: sort i + W * u(i) inside the lane)
    linear position    ->  chunk, offset inside it             (chunks laid end to end in shuffled order)

Nothing is stored per sample, so an order takes memory in proportion to the chunks, and any position can be
evaluated without its predecessors.

The random numbers come from the counter-based hash of :mod:`streaming.order.plan.permutation`: the order is a contract
with every checkpoint, and ``tests/golden/order.json`` pins it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt

from streaming.common.arguments import check_choice, checked_count, checked_flag, checked_int, checked_seed
from streaming.common.arrays import sums
from streaming.errors import ConfigError, StateError
from streaming.order.plan.permutation import CHUNKS, UInt64Array, hash_range, stream_key
from streaming.types import Int64Array

MAX_WINDOW = 2**28  # window * 32 random bits stay below 2**60; a lane slice has room above them in 64 bits
MAX_SLICE = 2**30  # lane positions evaluated at once
MAX_LANES = 2**20
_MANY_LANES = 2**14
ENDLESS = 2**50
"""Nominal number of samples of an endless pass: more than any run reads, and exact in 64-bit floats."""
LEAST_STRETCH = 2048
"""Minimum number of lane positions evaluated at once, to amortize NumPy calls."""
_MAX_INT32 = 2**31 - 1
_WINDOW, _HOMES = 2, 3  # purposes: each has its own stream of random numbers

Scope = Literal["global", "lane"]


def _argsort_stable(keys: UInt64Array, key_limit: int) -> Int64Array:
    """Return ``keys.argsort(kind="stable")`` for keys below ``key_limit``, with NumPy's faster sorts if possible.

    Keys of short ranges carry their index in the low bits, so that sorting the values (vectorized in NumPy) sorts the
    indices, too. Longer ranges use the unstable argsort, which gives the same result if no two keys are equal.
    """
    index_bits = np.uint64(max(len(keys) - 1, 1).bit_length())
    if key_limit << int(index_bits) <= 2**64:
        packed = (keys << index_bits) | np.arange(len(keys), dtype=np.uint64)
        packed.sort()
        packed &= (np.uint64(1) << index_bits) - np.uint64(1)
        return packed.view(np.int64)
    order = np.argsort(keys)
    ordered = keys[order]
    if np.any(ordered[1:] == ordered[:-1]):
        order = np.argsort(keys, kind="stable")
    return order


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderSettings:
    """All settings that determine the order of a pass over a dataset. Part of every checkpoint.

    Attributes:
        seed: Any number in ``[0, 2**64)``.
        lanes: Number of equal parts of the shuffled dataset that are read side by side.
        window: How far a sample may move inside its lane, in samples; 0 keeps the order inside lanes.
        shuffle: False means the dataset's own order; ``lanes`` must then be 1 and ``window`` 0 (see
            :meth:`unshuffled`).
        scope: ``"global"``: each pass permutes all chunks. ``"lane"``: each lane keeps its samples in all passes, and a
            pass permutes the chunks inside each lane.
    """

    seed: int
    lanes: int
    window: int
    shuffle: bool = True
    scope: Scope = "global"

    def __post_init__(self) -> None:
        check_choice("scope", self.scope, get_args(Scope))
        set_ = object.__setattr__
        set_(self, "seed", checked_seed("seed", self.seed))
        set_(self, "lanes", checked_int("lanes", self.lanes, 1, MAX_LANES))
        set_(self, "window", checked_int("window", self.window, 0, MAX_WINDOW))
        if not checked_flag("shuffle", self.shuffle) and (self.lanes, self.window) != (1, 0):
            raise ConfigError(
                f"shuffle=False reads in data-set order and needs lanes=1 and window=0, "
                f"got lanes={self.lanes} and window={self.window}; use OrderSettings.unshuffled()"
            )

    @classmethod
    def unshuffled(cls) -> OrderSettings:
        """Return the settings of the dataset's own order."""
        return cls(seed=0, lanes=1, window=0, shuffle=False)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dict that :meth:`from_dict` reads.

        ``scope`` is included only if it is not ``"global"``.
        """
        plain = {"seed": self.seed, "lanes": self.lanes, "window": self.window, "shuffle": self.shuffle}
        return plain if self.scope == "global" else {**plain, "scope": self.scope}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> OrderSettings:
        """Rebuild settings from the dict of :meth:`to_dict`.

        Raises:
            StateError: A key is missing or unknown, or has an invalid value.
        """
        names = ("seed", "lanes", "window", "shuffle", "scope")
        if isinstance(data, Mapping) and "scope" not in data:
            data = {**data, "scope": "global"}
        if not isinstance(data, Mapping) or set(data) != set(names):
            got = sorted(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
            raise StateError(f"order settings of a state: expected the keys {sorted(names)}, got {got}")
        try:
            return cls(**{name: data[name] for name in names})
        except ConfigError as error:
            raise StateError(f"order settings of a state: {error}") from error


def default_lanes(global_batch_size: int) -> int:
    """Return the default number of lanes: the largest divisor of the batch size up to ``max(16, size // 8)``.

    The default must not depend on the world size, or the order would change with it. If the lanes divide the global
    batch, every lane gives the same number of samples to every batch, so with a world size that divides the lanes, each
    rank owns whole lanes. A batch size whose divisors are all less than half of the bound (257, 254, 1018) gets the
    bound itself: ranks then share lanes at their borders, but batches mix as well as those of 256. With a single lane,
    a batch would hold neighbors.

    A number above 16,384 is halved while it is even: each lane is filled before the first batch, and in a mixture each
    source is dealt to all lanes.
    """
    size = checked_int("global_batch_size", global_batch_size, 1, _MAX_INT32)
    most = min(size, max(16, size // 8), MAX_LANES)
    lanes = next(lanes for lanes in range(most, 0, -1) if size % lanes == 0)
    lanes = lanes if 2 * lanes >= most else most
    while lanes > _MANY_LANES and lanes % 2 == 0:
        lanes //= 2
    return lanes


def default_window(num_samples: int, num_chunks: int) -> int:
    """Return the default window: twice the mean samples per chunk, so that about five chunks per lane are live."""
    checked_count("num_samples", num_samples)
    checked_int("num_chunks", num_chunks, 1, _MAX_INT32)
    return min(max(-(-2 * num_samples // num_chunks), 1), MAX_WINDOW)


def checked_chunk_samples(chunk_samples: npt.ArrayLike) -> Int64Array:
    """Validate the numbers of samples per chunk, and return them as a read-only int64 [C].

    Raises:
        ConfigError: They are not one row of non-negative integers below 2**31, or all are 0.
    """
    given = np.asarray(chunk_samples)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise ConfigError(
            f"chunk_samples: expected one row of integers, got shape {given.shape} of dtype {given.dtype}"
        )
    if given.size > _MAX_INT32 or (given.size and (given.min() < 0 or given.max() > _MAX_INT32)):
        raise ConfigError("chunk_samples: each chunk must hold between 0 and 2**31 - 1 samples")
    sizes = given.astype(np.int64)
    if not sizes.sum():
        raise ConfigError(f"the data set is empty: its {len(sizes)} chunks hold no sample")
    sizes.setflags(write=False)
    return sizes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LaneParts:
    """Runs of samples of one chunk in one lane, and the positions at which they may be due; int64 [n] each.

    Attributes:
        chunk_ids: The chunk of each run.
        lanes: The lane.
        begins: The first lane position at which a sample of the run may be due.
        ends: End (exclusive) of these positions.
        goes_on: bool [n], whether a run may also be due after the requested positions. Its end is not known yet, and a
            query about later positions returns it again. None: no run continues, and ``ends`` are final.
    """

    chunk_ids: Int64Array
    lanes: Int64Array
    begins: Int64Array
    ends: Int64Array
    goes_on: npt.NDArray[np.bool_] | None = None

    @classmethod
    def joined(cls, some: Sequence[LaneParts]) -> LaneParts:
        """Merge several lists into one, by chunk id, then by lane."""
        empty = np.empty(0, np.int64)
        columns = {name: np.concatenate([empty, *(getattr(one, name) for one in some)]) for name in
                   ("chunk_ids", "lanes", "begins", "ends")}  # fmt: skip
        order = np.lexsort((columns["lanes"], columns["chunk_ids"]))
        going = [one.goes_on for one in some if one.goes_on is not None]
        return cls(
            **{name: column[order] for name, column in columns.items()},
            goes_on=np.concatenate(going)[order] if going else None,
        )


class Order(Protocol):
    """The order of one pass, as a plan uses it. Thread-safe, and a pure function of its constructor's arguments."""

    def lane_size(self, lane: int) -> int:
        """Return the number of samples of a lane in this pass."""

    def lane_samples(self, lane: int, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        """Return chunk ids and offsets in them, int64 [n] each, at positions ``[start, stop)`` of a lane."""

    def lane_parts(self, low: int, high: int, start: int, stop: int) -> LaneParts:
        """Return all runs in lanes ``[low, high)`` that may be due at positions ``[start, stop)``, and perhaps others.

        A chunk may have several runs, also within one lane. They are sorted by chunk id, then by lane.
        """

    def chunks_before(self, chunk_id: int) -> Iterator[int]:
        """Yield the other chunks of the chunk's source, nearest first; their samples may replace its own."""

    def find(self, chunk_id: int, offset: int, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the lanes and lane positions in ``[start, stop)`` at which a sample is due."""


class Orders(Protocol):
    """The orders of all passes over a dataset. Thread-safe.

    Attributes:
        settings: The order settings.
        chunk_samples: int64 [C], samples of each chunk.
        samples_per_pass: Samples of one pass of the stream; :data:`ENDLESS` if pass 0 has no end.
        is_endless: Whether pass 0 has no end.
        borders: Ascending stream positions at which the mix changes; usually ().
        stretch: Number of lane positions of an endless pass that are planned at once; the mix may change after them.
        mixed_after: Number of lane positions of an endless pass, after its start or a change of the mix, by which every
            source of the mix has begun in every lane.
    """

    @property
    def settings(self) -> OrderSettings: ...  # noqa: D102

    @property
    def chunk_samples(self) -> Int64Array: ...  # noqa: D102

    @property
    def samples_per_pass(self) -> int: ...  # noqa: D102

    @property
    def is_endless(self) -> bool: ...  # noqa: D102

    @property
    def borders(self) -> Sequence[int]: ...  # noqa: D102

    @property
    def stretch(self) -> int: ...  # noqa: D102

    @property
    def mixed_after(self) -> int: ...  # noqa: D102

    def of_pass(self, number: int) -> Order:
        """Return the order of one pass."""

    def under(self, settings: OrderSettings) -> Orders:
        """Return the orders of the same data under other settings."""


class EpochOrders:
    """The orders of one dataset: an :class:`EpochOrder` for each pass.

    Args:
        chunk_samples: int64 [C], samples of each chunk in dataset order.
        settings: The order settings.

    Raises:
        ConfigError: The dataset has no sample.
    """

    is_endless = False
    borders: tuple[int, ...] = ()
    stretch = mixed_after = ENDLESS

    def __init__(self, chunk_samples: npt.ArrayLike, settings: OrderSettings) -> None:
        self.chunk_samples = checked_chunk_samples(chunk_samples)
        self.settings = settings
        self.samples_per_pass = int(self.chunk_samples.sum())

    def of_pass(self, number: int) -> EpochOrder:
        """Return the order of one pass."""
        return EpochOrder(self.chunk_samples, self.settings, number)

    def under(self, settings: OrderSettings) -> EpochOrders:
        """Return the orders of the same dataset under other settings."""
        return EpochOrders(self.chunk_samples, settings)


class LaidOrder:
    """An order laid end to end: a sequence of parts of chunks, cut into lanes of equal size.

    Immutable and thread-safe. Array attributes must not be written to.

    Args:
        chunk_ids: int64 [P], the chunk of each part; a chunk may occur several times.
        sizes: int64 [P], samples of each part.
        firsts: int64 [P], first sample of each part in its chunk; None: parts are whole chunks.
        settings: The order settings.
        epoch: Number of the pass; each has an order of its own.

    Attributes:
        num_samples: D, the samples of the pass.
        chunk_order: int64 [P], the chunk of each part.
        chunk_starts: int64 [P + 1], linear position of the first sample of each part.
    """

    def __init__(
        self, chunk_ids: Int64Array, sizes: Int64Array, firsts: Int64Array | None, settings: OrderSettings, epoch: int
    ) -> None:
        self.settings = settings
        self.epoch = checked_count("epoch", epoch)
        self.chunk_order = chunk_ids
        self.chunk_starts = sums(sizes)
        self.num_samples = int(self.chunk_starts[-1])
        self._firsts = firsts
        self._lane_size, self._long_lanes = divmod(self.num_samples, settings.lanes)

    def lane_bounds(self, lane: int) -> tuple[int, int]:
        """Return the linear positions ``[start, stop)`` of a lane; the first D % L lanes are one sample longer."""
        checked_int("lane", lane, 0, self.settings.lanes - 1)
        start = lane * self._lane_size + min(lane, self._long_lanes)
        return start, start + self._lane_size + (lane < self._long_lanes)

    def lane_size(self, lane: int) -> int:
        """See ``Order``."""
        return self._lane_size + (lane < self._long_lanes)

    def lane_starts(self, lanes: Int64Array) -> Int64Array:
        """Return the linear position at which each of ``lanes`` starts; L itself starts at D. Any shape."""
        return lanes * self._lane_size + np.minimum(lanes, self._long_lanes)

    def lanes_of(self, linear: Int64Array) -> Int64Array:
        """Return the lane that holds each linear position in ``[0, D)``. Any shape."""
        border = self._long_lanes * (self._lane_size + 1)
        in_short = self._long_lanes + (linear - border) // max(self._lane_size, 1)
        return np.where(linear < border, linear // (self._lane_size + 1), in_short)

    def lane_slice(self, lane: int, start: int, stop: int) -> Int64Array:
        """Return the linear positions of the samples at lane positions ``[start, stop)`` of a lane, in that order.

        See :func:`window_slice`.

        Raises:
            ConfigError: The range is not within the lane, or holds more than 2**30 positions.
        """
        lane_start, lane_stop = self.lane_bounds(lane)
        if not 0 <= start <= stop <= lane_stop - lane_start or stop - start > MAX_SLICE:
            raise ConfigError(
                f"lane positions [{start}, {stop}): expected a range of at most {MAX_SLICE} within "
                f"[0, {lane_stop - lane_start}) of lane {lane}"
            )
        laid = window_slice(self.settings, self.epoch, lane, start, stop, lane_stop - lane_start)
        laid += lane_start
        return laid

    def locate(self, linear: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the chunk id and the sample offset inside the chunk for each linear position.

        Args:
            linear: int64 [n] in ``[0, D)``; fast if the positions are close together.

        Returns:
            ``(chunk_ids, offsets)``, each int64 [n].
        """
        if not len(linear):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        span = np.array([linear.min(), linear.max()])
        if span[0] < 0 or span[1] >= self.num_samples:
            raise ConfigError(f"linear positions: expected [0, {self.num_samples}), got {span.tolist()}")
        # An empty chunk starts where the next chunk starts; side="right" finds the one that holds the sample.
        first, last = np.searchsorted(self.chunk_starts, span, side="right") - 1
        starts = self.chunk_starts[first : last + 1]
        within = np.searchsorted(starts, linear, side="right") - 1
        if self._firsts is not None:
            starts = starts - self._firsts[first : last + 1]
        return self.chunk_order[first : last + 1][within], linear - starts[within]

    def lane_samples(self, lane: int, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        """See ``Order``."""
        return self.locate(self.lane_slice(lane, start, stop))

    def lane_parts(self, low: int, high: int, start: int, stop: int) -> LaneParts:  # noqa: ARG002  all of the pass
        """See ``Order``: all runs of these lanes.

        Samples at linear positions [a, b) of a lane are due only while the lane is in (a - W, b + W).
        """
        row, lanes, starts, stops = self.cut_parts(low, high)
        reach = max(self.settings.window - 1, 0)
        lane_starts, lane_stops = self.lane_starts(lanes), self.lane_starts(lanes + 1)
        return LaneParts(
            chunk_ids=self.chunk_order[row],
            lanes=lanes,
            begins=np.maximum(starts - lane_starts - reach, 0),
            ends=np.minimum(stops + reach, lane_stops) - lane_starts,
        )

    def find(self, chunk_id: int, offset: int, start: int, stop: int) -> list[tuple[int, int]]:
        """See ``Order``."""
        parts = np.flatnonzero(self.chunk_order == chunk_id)
        firsts = np.zeros_like(parts) if self._firsts is None else self._firsts[parts]
        linear = self.chunk_starts[parts] + offset - firsts
        linear = linear[(offset >= firsts) & (linear < self.chunk_starts[parts + 1])]
        found = []
        for lane, place in zip(self.lanes_of(linear).tolist(), linear.tolist(), strict=True):
            laid = place - self.lane_bounds(lane)[0]
            due = window_place(self.settings, self.epoch, lane, laid, self.lane_size(lane))
            if start <= due < stop:
                found.append((lane, due))
        return found

    def cut_parts(self, low: int, high: int) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
        """Cut the parts at the borders of lanes ``[low, high)``.

        Returns:
            Part, lane, linear start and stop, int64 [n] each: one row per part and lane, sorted by chunk, then by
            position.
        """
        limits = self.lane_starts(np.array([low, high]))
        # 1. The run of parts in these lanes, which is short for one of many ranks, cut to the lanes; int64 [parts].
        first, stop = np.searchsorted(self.chunk_starts, [limits[0] + 1, limits[1]]).tolist()
        parts = np.argsort(self.chunk_order[first - 1 : stop], kind="stable") + (first - 1)
        starts = np.maximum(self.chunk_starts[parts], limits[0])
        stops = np.minimum(self.chunk_starts[parts + 1], limits[1])
        here = stops > starts
        parts, starts, stops = parts[here], starts[here], stops[here]
        # 2. One row per part and lane, int64 [n].
        first_lanes = self.lanes_of(starts)
        spans = self.lanes_of(stops - 1) - first_lanes + 1
        row = np.repeat(np.arange(len(parts)), spans)
        lanes = first_lanes[row] + np.arange(len(row)) - (np.cumsum(spans) - spans)[row]
        starts = np.maximum(starts[row], self.lane_starts(lanes))
        stops = np.minimum(stops[row], self.lane_starts(lanes + 1))
        return parts[row], lanes, starts, stops


class EpochOrder(LaidOrder):
    """The order of one pass over one dataset."""

    def __init__(self, chunk_samples: npt.ArrayLike, settings: OrderSettings, epoch: int) -> None:
        """Permute the chunks.

        Args:
            chunk_samples: int64 [C], samples of each chunk in dataset order; 0 is allowed.
            settings: The order settings.
            epoch: Number of the pass; each has an order of its own.

        Raises:
            ConfigError: An argument is out of range, or there is no sample.
        """
        sizes = checked_chunk_samples(chunk_samples)
        checked_count("epoch", epoch)
        chunk_order = _permuted(sizes, settings, epoch) if settings.shuffle else np.arange(len(sizes), dtype=np.int64)
        super().__init__(chunk_order, sizes[chunk_order], None, settings, epoch)

    @cached_property
    def chunk_ranks(self) -> Int64Array:
        """int64 [C], place of each dataset chunk in ``chunk_order`` (its inverse)."""
        ranks = np.empty_like(self.chunk_order)
        ranks[self.chunk_order] = np.arange(len(ranks), dtype=np.int64)
        return ranks

    def chunks_before(self, chunk_id: int) -> Iterator[int]:
        """See ``Order``: backwards from the chunk in the order of laying, wrapping around."""
        place = int(self.chunk_ranks[chunk_id])
        for back in range(1, len(self.chunk_order)):
            yield int(self.chunk_order[place - back])


def _permuted(sizes: Int64Array, settings: OrderSettings, epoch: int) -> Int64Array:
    """Return the chunks in the order in which they are laid end to end."""
    of_pass = hash_range(stream_key(settings.seed, epoch, CHUNKS), 0, len(sizes))
    if settings.scope == "global":
        return np.argsort(of_pass, kind="stable")
    homes = np.argsort(hash_range(stream_key(settings.seed, _HOMES), 0, len(sizes)), kind="stable")
    laid = LaidOrder(homes, sizes[homes], None, settings, epoch)
    starts, last_sample = laid.chunk_starts, laid.num_samples - 1
    first = laid.lanes_of(np.minimum(starts[:-1], last_sample))
    last = laid.lanes_of(np.maximum(starts[1:] - 1, starts[:-1]).clip(max=last_sample))
    inside = np.flatnonzero(first == last)
    # A chunk across a lane border keeps its place. The other chunks of a lane lie between two such chunks and stay
    # there.
    movable = homes[inside]
    homes[inside] = movable[np.lexsort((of_pass[movable], first[inside]))]
    return homes


def window_slice(
    settings: OrderSettings, epoch: int, lane: int, start: int, stop: int, lane_size: int,
    part_of: Callable[[Int64Array], Int64Array] | None = None,
) -> Int64Array:  # fmt: skip
    """Return the samples of a lane that are due at its positions ``[start, stop)``, as places in the laid lane.

    The lane's samples are sorted by ``i + W * u(i)``, u in [0, 1). The r-th smallest of these keys is in ``[r, r +
    W)``. So the slice needs only the keys of ``[start - W, stop + W)``, and no sample moves by W or more.

    Args:
        settings: The order settings.
        epoch: Number of the pass.
        lane: Number of the lane.
        start: First lane position.
        stop: End (exclusive), at most ``lane_size``.
        lane_size: Samples of the lane.
        part_of: Returns the part of the lane that holds each place, ascending; no sample leaves its part. None: the
            lane is one part.

    Returns:
        int64 [stop - start], a new array.
    """
    window = settings.window
    if window == 0 or start == stop:
        return np.arange(start, stop, dtype=np.int64)
    low, high = max(start - window, 0), min(stop + window, lane_size)
    keys = hash_range(stream_key(settings.seed, epoch, _WINDOW, lane), low, high)
    keys >>= np.uint64(32)
    keys *= np.uint64(window)
    places = np.arange(high - low)
    if part_of is not None:
        parts = part_of(places + low)
        places += window * (parts - parts[0])  # far enough apart that no key reaches the next part
    keys += places.astype(np.uint64) << np.uint64(32)
    order = _argsort_stable(keys, (int(places[-1]) + 1 + window) << 32)
    return order[start - low : stop - low] + low


def window_place(
    settings: OrderSettings, epoch: int, lane: int, laid: int, lane_size: int,
    part_of: Callable[[Int64Array], Int64Array] | None = None,
) -> int:  # fmt: skip
    """Return the lane position at which the sample at place ``laid`` is due; see :func:`window_slice`."""
    low, high = max(laid - settings.window, 0), min(laid + settings.window + 1, lane_size)
    places = window_slice(settings, epoch, lane, low, high, lane_size, part_of)
    return low + int(np.flatnonzero(places == laid)[0])


def deal_by_lane(
    begins: Int64Array, ends: Int64Array, batch: Int64Array, slots: Int64Array, num_lanes: int
) -> tuple[Int64Array, Int64Array]:
    """Return lane and lane position at ``slots`` of positions ``[begin, end)`` ordered by lane, in closed form.

    The positions begin in row ``a`` of lanes at lane ``x``, and end in row ``b`` before lane ``y``. Lanes below min(x,
    y) and from max(x, y) on hold ``b - a`` positions; lanes in between hold one more (x < y) or one less.

    Args:
        begins: int64 [B], first global position of each batch.
        ends: int64 [B], end of each (exclusive).
        batch: int64 [n], batch of each row.
        slots: int64 [n], index among the batch's positions ordered by lane.
        num_lanes: L.

    Returns:
        ``(lanes, places)``, int64 [n] each.
    """
    # 1. Per batch, int64 [B]: rows and lanes at both ends; positions per lane, outside and between the two lanes.
    row, enter = np.divmod(begins, num_lanes)
    last_row, leave = np.divmod(ends, num_lanes)
    outer = last_row - row
    lower, upper = np.minimum(enter, leave), np.maximum(enter, leave)
    middle = outer + np.sign(leave - enter)
    first_slot = outer * lower  # of lane `lower`
    second_slot = first_slot + middle * (upper - lower)  # of lane `upper`
    # 2. Per row, int64 [n]: the lane that holds the slot, and the slot's index within the lane.
    if len(outer) and not np.any(enter != leave) and not np.any(outer != outer[0]):
        lanes, within = np.divmod(slots, outer[0])  # the usual case: the lanes divide the batches
    else:
        in_lower, in_middle = slots < first_slot[batch], slots < second_slot[batch]
        base_slot = np.where(in_lower, 0, np.where(in_middle, first_slot[batch], second_slot[batch]))
        base_lane = np.where(in_lower, 0, np.where(in_middle, lower[batch], upper[batch]))
        count = np.where(in_middle & ~in_lower, middle[batch], outer[batch])
        lanes, within = np.divmod(slots - base_slot, np.maximum(count, 1))
        lanes += base_lane
    return lanes, row[batch] + (lanes < enter[batch]) + within
