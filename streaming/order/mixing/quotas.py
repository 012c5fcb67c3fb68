"""Lay a finite mixture by single samples or by whole batches: every source gives its quota, evenly at every row.

The tree of integer splits (:mod:`streaming.order.mixing.shares`) deals the positions of each lane as in an endless
mixture. In addition, the number of samples that a node sends to each side is fixed for every lane before the first one
is dealt, so that all lanes together draw exactly its quota from each source. If a lane's split would draw one sample
more or fewer, it is clipped, which moves a sample near the lane's end::

    passages      0  1  2  3  4  5  6  7
    by the share  0  0  1  1  1  2  2  2  3      three to the left
    two are due   0  0  1  1  1  2  2  2  2      the last one goes to the right

The samples of each source in the pass are then laid end to end, in the source's own order, and cut into lanes of these
sizes. A window of the source's own moves samples within each lane.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from streaming.common.arrays import sums
from streaming.errors import ConfigError
from streaming.order.mixing.exact import check_lanes, located
from streaming.order.mixing.passes import MixedPasses, Parts, Sources, Weights, drawn_in_lanes, keyed_number
from streaming.order.mixing.shares import UNIT_BITS, BatchShares, ShareTree, product, steps_to
from streaming.order.mixing.streams import DrawsAhead, own_settings
from streaming.order.plan.blend import in_whole_batches
from streaming.order.plan.order import ENDLESS, LaidOrder, LaneParts, OrderSettings
from streaming.types import Int64Array, override


class PassShares(Protocol):
    """Determine which source each position of a lane of one pass draws from. Thread-safe.

    Attributes:
        sizes: int64 [sources, L], draws of each source in each lane; they sum to its quota.
    """

    sizes: Int64Array

    def draws(self, lane: int, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        """See ``streaming.order.mixing.shares.LaneShares``."""

    def counts(self, lane: int, position: int) -> Int64Array:
        """See ``streaming.order.mixing.shares.LaneShares``."""

    def places(self, source: int, lanes: Int64Array, draws: Int64Array) -> Int64Array:
        """Return the lane positions of some draws of a source, each in its lane, int64 [n]."""


class QuotaTree(ShareTree):
    """The shares of a pass in which each source gives its quota: those of ``ShareTree``, clipped to the quotas.

    A count deviates from its share of a lane by less than two per node above the source. This holds up to 2**32 samples
    per lane, because shares are rounded to multiples of 2**-32.

    Args:
        quotas: Samples of each source in the pass, in the order in which methods count them.
        lanes: L.
        seed: Seed of the phases.

    Raises:
        ConfigError: All quotas are 0.
    """

    def __init__(self, quotas: Mapping[str, int], *, lanes: int, seed: int) -> None:
        super().__init__(list(quotas), [Weights(start=0, weights=quotas)], lanes=lanes, seed=seed)
        whole, more = divmod(sum(quotas.values()), lanes)
        self.sizes: Int64Array = np.zeros((len(quotas), lanes), np.int64)
        # Per node: the number of its passages in each lane, and the number of them that go left; int64 [nodes, L].
        self._ends: Int64Array = np.zeros((len(self._sides), lanes), np.int64)
        self._lefts: Int64Array = np.zeros_like(self._ends)
        self._put(self.root, whole + (np.arange(lanes) < more))
        for node in (node for nodes in self._levels for node in nodes.tolist()):
            left, right = self._sides[node]
            due = sum(quotas[name] for name in self._names_below(left))
            self._lefts[node] = _dealt(self._ends[node], due, self.phases[node])
            self._put(left, self._lefts[node])
            self._put(right, self._ends[node] - self._lefts[node])

    def _names_below(self, side: int) -> frozenset[str]:
        return self._below[side] if side >= 0 else frozenset([self.names[-1 - side]])

    def _put(self, side: int, passages: Int64Array) -> None:
        (self._ends if side >= 0 else self.sizes)[side if side >= 0 else -1 - side] = passages

    @override
    def _went(
        self, lane: int, segment: int, nodes: Int64Array, passed: Int64Array
    ) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
        share, phase = self.shares[nodes, segment], self.phases[nodes, lane]
        lefts, ends = self._lefts[nodes, lane], self._ends[nodes, lane]

        def left(passages: Int64Array) -> Int64Array:
            high, low = product(share, passages)
            by_share = high + ((low + phase) >> UNIT_BITS)
            # At most the number due in the lane, and at least the number that must go now so that the rest fits.
            clipped: Int64Array = np.maximum(np.minimum(by_share, lefts), lefts - ends + passages)
            return clipped

        went = left(passed)
        return went, left(passed + 1) > went

    def places(self, source: int, lanes: Int64Array, draws: Int64Array) -> Int64Array:
        """See ``PassShares``."""
        found = np.array(draws, np.int64)
        for node, side in reversed(self.path(source)):
            share, phase = self.shares[node, 0], self.phases[node, lanes]
            dues, ends = self._lefts[node, lanes], self._ends[node, lanes]
            if side:  # the right side is the same kind of function, with the complements of the share and the phase
                share, phase, dues = (1 << UNIT_BITS) - share, (1 << UNIT_BITS) - 1 - phase, ends - dues
            by_share = steps_to(share, found, phase)
            found = np.minimum(by_share, ends - dues + found)
        return found


class QuotaBatches(BatchShares):
    """The shares of a pass of whole batches, each of one source.

    Args:
        quotas: Batches of each source in the pass.
        lanes: L.
        batch_rows: Positions of a batch in each lane.
        seed: Seed of the phases.
    """

    def __init__(self, quotas: Mapping[str, int], *, lanes: int, batch_rows: int, seed: int) -> None:
        self._tree: QuotaTree = QuotaTree(quotas, lanes=1, seed=seed)
        self._rows = batch_rows
        self.sizes: Int64Array = np.repeat(self._tree.sizes * batch_rows, lanes, axis=1)

    def places(self, source: int, lanes: Int64Array, draws: Int64Array) -> Int64Array:
        """See ``PassShares``."""
        batch, place = np.divmod(draws, self._rows)
        return self._tree.places(source, np.zeros_like(lanes), batch) * self._rows + place


class SourcePass(LaidOrder):
    """The samples of one source in one pass: laid end to end, and cut into lanes of given sizes.

    Args:
        parts: Parts of the source, in its order.
        settings: The source's own settings.
        number: Number of the pass.
        sizes: int64 [L], samples of each lane; they sum to those of the parts.
    """

    def __init__(self, parts: Parts, settings: OrderSettings, number: int, sizes: Int64Array) -> None:
        super().__init__(parts.chunk_ids, parts.sizes, parts.firsts, settings, number)
        self._borders = sums(sizes)
        self._ahead = DrawsAhead(self.lane_samples)

    def lane_bounds(self, lane: int) -> tuple[int, int]:
        """Return the linear positions ``[start, stop)`` of a lane."""
        return int(self._borders[lane]), int(self._borders[lane + 1])

    @override
    def lane_size(self, lane: int) -> int:
        return int(self._borders[lane + 1] - self._borders[lane])

    @override
    def lane_starts(self, lanes: Int64Array) -> Int64Array:
        return self._borders[lanes]

    @override
    def lanes_of(self, linear: Int64Array) -> Int64Array:
        """See ``LaidOrder``; lanes without a sample of the source are skipped."""
        return np.searchsorted(self._borders, linear, side="right") - 1

    def draws(self, lane: int, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        """Return the chunk ids and the offsets in them of draws ``[start, stop)`` of a lane, int64 [n] each."""
        return self._ahead.draws(lane, start, stop, self.lane_size(lane))


class ExactPasses(MixedPasses):
    """The orders of a finite mixture whose shares are exact at every row."""

    @override
    def of_pass(self, number: int) -> ExactPass:
        starts, stops = self.drawn_by(number), self.drawn_by(number + 1)
        quotas = {name: stops[name] - starts[name] for name in self.sources.names}
        return ExactPass(self.sources, starts, stops, number, self._shares(quotas, _phases(self.settings, number)))

    def _shares(self, quotas: Mapping[str, int], seed: int) -> PassShares:
        """Return the shares of a pass with these quotas: the source that each of its positions draws from."""
        return QuotaTree(quotas, lanes=self.settings.lanes, seed=seed)


class BatchPasses(ExactPasses):
    """The orders of a finite mixture in which each global batch comes from one source.

    All passes have the same number of batches: those of all quotas together, rounded up. Quotas that are no whole
    number of batches are averages: see ``batches_by``. At the end of any pass, fewer than G samples of each source
    wait, compared to as many passes of its quota.

    Args:
        sources: See ``MixedPasses``.
        batch_size: G.
        quotas: See ``MixedPasses``.

    Raises:
        ConfigError: See ``MixedPasses``; or a quota is less than a batch, or the lanes do not divide a batch.
    """

    def __init__(self, sources: Sources, *, batch_size: int, quotas: Mapping[str, int] | None = None) -> None:
        super().__init__(sources, quotas=quotas)
        self.batch_size = batch_size
        check_lanes(self.settings, batch_size)
        few = {name: quota for name, quota in self.quotas.items() if 0 < quota < batch_size}
        if few:
            raise ConfigError(f"quotas: expected at least a batch of {batch_size} samples of each source, got {few}")
        self.samples_per_pass = in_whole_batches(sum(self.quotas.values()), batch_size)

    @override
    def drawn_by(self, number: int) -> dict[str, int]:
        found = batches_by(self.quotas, number * (self.samples_per_pass // self.batch_size))
        return {name: batches * self.batch_size for name, batches in found.items()}

    @override
    def _shares(self, quotas: Mapping[str, int], seed: int) -> PassShares:
        batches = {name: quota // self.batch_size for name, quota in quotas.items()}
        lanes = self.settings.lanes
        return QuotaBatches(batches, lanes=lanes, batch_rows=self.batch_size // lanes, seed=seed)

    @override
    def under(self, settings: OrderSettings) -> Self:
        return type(self)(self.sources.under(settings), quotas=self.quotas, batch_size=self.batch_size)


def batches_by(quotas: Mapping[str, int], num_batches: int) -> dict[str, int]:
    """Divide a number of batches among sources in proportion to their quotas, each to within less than one batch.

    Shares are rounded down, and up for the largest remainders; ties go to the first name. Counts never fall from one
    pass to the next: a pass adds at least one whole batch to the share of a source whose quota is at least a batch, so
    the next share rounded down is no less than the last one rounded up. Any pass is found without its predecessors.
    """
    names, total = sorted(quotas), sum(quotas.values())
    found = {name: num_batches * quotas[name] // total for name in names}
    missing = num_batches - sum(found.values())
    for name in sorted(names, key=lambda name: -(num_batches * quotas[name] % total))[:missing]:
        found[name] += 1
    return found


class ExactPass:
    """The order of one pass over a mixture whose shares are exact at every row.

    Args:
        sources: The sources.
        starts: Samples of each source in all passes before this one.
        stops: The same, with this pass.
        number: Number of the pass.
        shares: The source that each position draws from.
    """

    def __init__(
        self, sources: Sources, starts: Mapping[str, int], stops: Mapping[str, int], number: int, shares: PassShares
    ) -> None:
        settings = sources.settings
        self._sources, self._lanes, self._shares = sources, settings.lanes, shares
        self._passes = [
            SourcePass(
                listing.samples(starts[name], stops[name]),
                own_settings(listing, settings), number, sizes,
            )
            for (name, listing), sizes in zip(sources.listings.items(), self._shares.sizes, strict=True)
        ]  # fmt: skip
        self._lane_sizes: Int64Array = self._shares.sizes.sum(axis=0)

    def lane_size(self, lane: int) -> int:
        """See ``Order``."""
        return int(self._lane_sizes[lane])

    def lane_samples(self, lane: int, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        """See ``Order``."""
        sources, draws = self._shares.draws(lane, start, stop)
        return located(sources, draws, lambda source, first, last: self._passes[source].draws(lane, first, last))

    def lane_parts(self, low: int, high: int, start: int, stop: int) -> LaneParts:  # noqa: ARG002  all of the pass
        """See ``Order``: all runs of these lanes."""
        found = []
        for source, one in enumerate(self._passes):
            parts = one.lane_parts(low, high, 0, ENDLESS)
            begins = self._shares.places(source, parts.lanes, parts.begins)
            ends = self._shares.places(source, parts.lanes, parts.ends - 1) + 1
            found.append(replace(parts, begins=begins, ends=ends))
        return LaneParts.joined(found)

    def chunks_before(self, chunk_id: int) -> Iterator[int]:
        """See ``Order``."""
        return self._sources.chunks_before(chunk_id)

    def find(self, chunk_id: int, offset: int, start: int, stop: int) -> list[tuple[int, int]]:
        """See ``Order``."""
        source = int(self._sources.source_of(np.array([chunk_id]))[0])
        drawn = np.array(self._passes[source].find(chunk_id, offset, 0, ENDLESS), np.int64).reshape(-1, 2)
        places = self._shares.places(source, drawn[:, 0], drawn[:, 1])
        due = (places >= start) & (places < stop)
        return sorted(zip(drawn[due, 0].tolist(), places[due].tolist(), strict=True))

    def drawn_before(self, row: int) -> Int64Array:
        """See ``DrawnOrder``."""
        return drawn_in_lanes(self._shares.counts, self._lanes, row)


def _phases(settings: OrderSettings, number: int) -> int:
    """Return the seed of the phases of a pass."""
    return keyed_number(settings.seed, "phases of a pass", "", number)


def _dealt(passages: Int64Array, due: int, phases: Int64Array) -> Int64Array:
    """Return the number of a node's passages in each lane that go left, ``due`` in total; int64 [L].

    Each lane's number is the share of its passages, rounded down or up. It is rounded up in the lanes whose phase comes
    closest to rounding up.
    """
    exact = passages.astype(object)  # products of counts take more than 64 bits
    total = int(passages.sum())
    if not total:
        return np.zeros_like(passages)
    whole, rest = exact * due // total, exact * due % total
    missing = due - int(whole.sum())
    # Round up only lanes that were rounded down, so that no side gets more than its passages. There are enough of them.
    wish = np.where(rest > 0, (rest << UNIT_BITS) // total + phases, -1)
    whole[np.argsort(-wish, kind="stable")[:missing]] += 1
    return whole.astype(np.int64)
