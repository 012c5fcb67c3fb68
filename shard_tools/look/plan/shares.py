"""Report the share of each source of a mixture under a plan: passes, requests, memory, cost of exact quotas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from shard_tools.look.plan.loads import Loads, RankLoad
from shard_tools.look.plan.sources import Floats, Reads, sets_of
from shard_tools.running.report import Report
from streaming.order.mixing.forecast import Forecast, drawn_before
from streaming.order.plan.ledger import Ledger
from streaming.order.plan.plan import Plan
from streaming.sets.sources.fetch_units import divided, fitting_total
from streaming.types import SPAN_BYTES, Int64Array

if TYPE_CHECKING:
    from streaming.sets.sources.mixed import MixedSource

_POINTS = 16
"""Number of equal parts of the plan; shares are counted at their ends."""
_PASSES_TOLD = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceShare(Report):
    """Planned use of one source. Requests and bytes are those of all data ranks.

    Attributes:
        name: Name of the source.
        num_samples: Samples of the source.
        kept: Fraction of its stored samples that a filter keeps.
        drawn: Samples that the plan draws.
        target: Its target share of all samples, by the weights, repeats or sizes.
        realised: Its actual share of all samples.
        strayed: Maximum deviation of the count from the target, in samples, at the rows checked.
        passes: Number of passes over its samples, with fractions.
        begins: Step at which each pass begins, by the number of the pass from 1 on; only the first few.
        num_requests: Ranged GETs.
        read_bytes: Bytes of these requests.
        amplification: Bytes read per byte of samples drawn.
        live_bytes: Its bytes in memory at once, on the rank that needs most.
        exact_unit_bytes: Size of its fetch units with ``quotas="exact"`` and ``exact_fetch_bytes``.
    """

    name: str
    num_samples: int
    kept: float
    drawn: int
    target: float
    realised: float
    strayed: int
    passes: float
    begins: Mapping[int, int]
    num_requests: int
    read_bytes: int
    amplification: float
    live_bytes: int
    exact_unit_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureShares(Report):
    """Planned use of all sources of a mixture.

    Attributes:
        sources: Each source, by name.
        rows: Rows of the plan at which the sources were counted.
        counts: Samples of each source up to each of these rows, in the order of ``sources``.
        targets: Target number of samples at each of these rows.
        by_chunks: Shares hold to within about a chunk, because quotas are not exact and the mixture has no end.
        exact_live_bytes: Bytes that ``quotas="exact"`` needs at once on the first rank without ``fetch_bytes``.
        exact_fits: Whether that fits.
        can_be_cut: Whether ``fetch_bytes`` can cut the chunks of all sources.
        exact_fetch_bytes: A ``fetch_bytes`` with which it fits into ``memory_limit``; None: there is none.
        exact_num_requests: Requests of all ranks with this ``fetch_bytes``, or with the smallest units if none fits.
    """

    sources: tuple[SourceShare, ...]
    rows: tuple[int, ...]
    counts: tuple[tuple[int, ...], ...]
    targets: tuple[tuple[float, ...], ...]
    by_chunks: bool
    exact_live_bytes: int
    exact_fits: bool
    can_be_cut: bool
    exact_fetch_bytes: int | None
    exact_num_requests: int


def shares_of(
    mixture: MixedSource, ledger: Ledger, loads: Loads, found: Sequence[RankLoad], factor: float
) -> MixtureShares:
    """Compute the shares from a plan and the loads of its ranks.

    Args:
        mixture: The mixture.
        ledger: Ledger of the run; the ledger of a plan begins with the weights of the mixture.
        loads: Loads of the plan.
        found: The loads of some or all ranks.
        factor: Ratio of the reads of all ranks to the reads of these ranks.
    """
    plan, covered = loads.plan, loads.num_rows
    begin = plan.epoch * plan.num_samples
    rows = sorted({covered * part // _POINTS for part in range(1, _POINTS + 1)})
    counts = _counted(loads, mixture, [begin, *(begin + row for row in rows)])
    forecast = mixture.drawing.forecast(ledger)
    targets = _targets(forecast, mixture.names, [begin, *(begin + row for row in rows)])
    drawn, wanted = counts[-1], targets[-1]
    strayed = np.ceil(np.abs(counts - targets).max(axis=0)).astype(np.int64)
    by_source = _Fetched.of(mixture, loads, found)
    begins = forecast.pass_rows(begin, _PASSES_TOLD)
    exact = _exact(mixture, loads, drawn)
    live_bytes = _exact_live_bytes(mixture, loads)
    sources = tuple(
        SourceShare(
            name=name,
            num_samples=mixture.sizes[name],
            kept=int(one.used_samples.sum()) / max(int(one.stored_samples.sum()), 1),
            drawn=int(drawn[at]),
            target=float(wanted[at]) / covered,
            realised=int(drawn[at]) / covered,
            strayed=int(strayed[at]),
            passes=int(drawn[at]) / mixture.sizes[name],
            begins={number + 1: loads.step_of(row - begin) for row, number in begins[name] if row <= begin + covered},
            num_requests=round(factor * by_source.num_requests[at]),
            read_bytes=round(factor * by_source.read_bytes[at]),
            amplification=factor * by_source.read_bytes[at] / max(int(drawn[at]) * Reads.of_set(one).sample_bytes, 1),
            live_bytes=by_source.live_bytes[at],
            exact_unit_bytes=exact.unit_bytes[at],
        )
        for at, (name, one) in enumerate(sets_of(mixture))
    )
    return MixtureShares(
        sources=sources, rows=tuple(rows), counts=tuple(map(tuple, counts[1:].tolist())),
        targets=tuple(map(tuple, targets[1:].tolist())),
        by_chunks=mixture.is_endless and mixture.deal != mixture.deal.exact,
        exact_live_bytes=live_bytes, exact_fits=live_bytes <= loads.rooms.memory.chunks_bytes,
        can_be_cut=exact.can_be_cut, exact_fetch_bytes=exact.fetch_bytes, exact_num_requests=exact.num_requests,
    )  # fmt: skip


def _counted(loads: Loads, mixture: MixedSource, rows: Sequence[int]) -> Int64Array:
    """Count the samples of each source between the plan's first row and each of ``rows``; int64 [rows, S]."""
    counts = [drawn_before(loads.plan.orders, row) for row in rows]  # type: ignore[arg-type]  # of a mixture
    table: Int64Array = np.array([[count[name] for name in mixture.names] for count in counts], np.int64)
    table -= table[0].copy()
    return table


def _targets(forecast: Forecast, names: Sequence[str], rows: Sequence[int]) -> Floats:
    """Return the number of samples that each source should have contributed; float64 [rows, S]."""
    shares = [forecast.drawn(rows[0], row - rows[0]) for row in rows]
    return np.array([[share[name] for name in names] for share in shares])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fetched:
    """Reads of some ranks by source, and the most memory that one of them holds for each source."""

    num_requests: list[float]
    read_bytes: list[float]
    live_bytes: list[int]

    @classmethod
    def of(cls, mixture: MixedSource, loads: Loads, found: Sequence[RankLoad]) -> _Fetched:
        count = len(mixture.names)
        requests, read = np.zeros(count), np.zeros(count)
        whole = np.bincount(mixture.source_of(np.arange(len(loads.chunk_bytes))), loads.chunk_bytes, count)
        for load in found:
            if load.fetched is None:  # slices in storage order
                requests += load.num_requests * whole / whole.sum()
                read += load.read_bytes * whole / whole.sum()
            else:
                source = mixture.source_of(load.fetched)
                requests += np.bincount(source, loads.reads.num_requests[load.fetched], count)
                read += np.bincount(source, loads.reads.num_bytes[load.fetched], count)
        dp_rank = max(found, key=lambda load: load.live_bytes).dp_rank
        live = loads.neediest(dp_rank).chunk_intervals(dp_rank)
        source = mixture.source_of(live.chunk_ids)
        return cls(
            num_requests=requests.tolist(),
            read_bytes=read.tolist(),
            live_bytes=[live.taken(source == number).live_bytes(loads.rooms.room_bytes) for number in range(count)],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exact:
    can_be_cut: bool
    fetch_bytes: int | None
    unit_bytes: list[int]
    num_requests: int


def _exact_live_bytes(mixture: MixedSource, loads: Loads) -> int:
    """Return the bytes that the first rank would need at once with exact quotas, computed as in training."""
    plan = (*loads.held, loads.plan)[0]
    deal = mixture.deal.exact if mixture.is_endless else mixture.deal
    made = replace(mixture.drawing, deal=deal)
    orders = made.orders(plan.settings, made.begun(plan.settings, plan.global_batch_size))
    exact = Plan.of(plan.shape, plan.chunk_samples, plan.settings, epoch=plan.epoch, start=plan.start, orders=orders)
    return loads.rooms.demand(exact, 0).live_bytes


def _exact(mixture: MixedSource, loads: Loads, drawn: Int64Array) -> _Exact:
    """Compute the cost of lanes that draw single samples of every source, in units that fit."""
    settings = loads.plan.settings
    lanes = -(-settings.lanes // loads.plan.dp_world_size)
    sets = [one for _, one in sets_of(mixture)]
    chunk = np.array([one.chunk_bytes.mean() for one in sets])
    wanted = drawn * np.array([Reads.of_set(one).sample_bytes for one in sets])
    room_bytes = loads.rooms.memory.recommended_bytes
    can_cut = all(one.can_be_cut for one in mixture.leaves.values())
    total = fitting_total(room_bytes, lanes, len(sets)) if can_cut else None
    shares = dict(zip(mixture.names, (wanted / max(wanted.sum(), 1)).tolist(), strict=True))
    sizes = divided(total or 0, shares)
    units = np.minimum(np.array([sizes[name] for name in mixture.names]), np.maximum(chunk, SPAN_BYTES))
    return _Exact(
        can_be_cut=can_cut,
        fetch_bytes=total,
        unit_bytes=np.round(units).astype(np.int64).tolist(),
        num_requests=round((wanted / units).sum()),
    )
