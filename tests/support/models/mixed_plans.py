"""Random mixtures under a plan, and shares by the definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from streaming.order.mixing.exact import BatchLanes, EvenLanes, ExactLanes
from streaming.order.mixing.lanes import MixedLanes
from streaming.order.mixing.passes import MixedPasses, Sources, Weights
from streaming.order.mixing.quotas import BatchPasses, ExactPasses
from streaming.order.mixing.shares import ShareTree
from streaming.order.plan.ledger import Even
from streaming.order.plan.order import Orders, OrderSettings
from streaming.order.plan.plan import Plan
from streaming.types import LastBatch

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
sizes_ = st.lists(st.integers(0, 9), min_size=1, max_size=10).filter(sum)
sources_ = st.dictionaries(st.sampled_from(["web", "code", "math", "chat"]), sizes_, min_size=1)
Row = tuple[int, int, int]


@st.composite
def weights_(draw: st.DrawFn, names: list[str]) -> dict[str, int]:
    """Of some of the sources; a source that is not named has none."""
    named = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    return draw(st.fixed_dictionaries(dict.fromkeys(named, st.integers(0, 5))).filter(lambda w: any(w.values())))


@st.composite
def schedules(draw: st.DrawFn, names: list[str]) -> list[Weights]:
    starts = sorted(draw(st.lists(st.integers(1, 300), max_size=3, unique=True)))
    return [Weights(start=start, weights=draw(weights_(names))) for start in [0, *starts]]


def even_(names: list[str], dealt: str) -> st.SearchStrategy[dict[str, Even]]:
    """Of some of the sources; of batches of one source, none is."""
    hows: list[Even] = ["runs", "rows"] if dealt == "chunks" else ["rows"]
    some = st.dictionaries(st.sampled_from(names), st.sampled_from(hows))
    return st.just({}) if dealt == "batches" else some


def lanes_dealt(dealt: str, sources: Sources, schedule: Sequence[Weights], batch_size: int) -> ExactLanes:
    """Without an end, dealt in chunks, samples or batches."""
    if dealt == "batches":
        return BatchLanes(sources, schedule, batch_size=batch_size)
    return (EvenLanes if dealt == "chunks" else ExactLanes)(sources, schedule)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A mixture and the arguments of a plan."""

    sources: dict[str, list[int]]
    settings: OrderSettings
    quotas: dict[str, int] | None
    schedule: list[Weights]
    """Empty: the mixture ends."""
    dealt: str
    """Chunks, samples or batches."""
    even: dict[str, Even]
    """Sources that are dealt by samples nevertheless, or over all lanes together."""
    global_batch_size: int
    dp_world_size: int
    last_batch: LastBatch
    epoch: int
    epoch_size: int | None
    start: int

    def orders(self) -> Orders:
        sources = Sources(self.sources, self.settings, even=self.even if self.schedule else {})
        size = self.global_batch_size
        if not self.schedule:
            if self.dealt == "batches":
                return BatchPasses(sources, quotas=self.quotas, batch_size=size)
            return (MixedPasses if self.dealt == "chunks" else ExactPasses)(sources, quotas=self.quotas)
        return lanes_dealt(self.dealt, sources, self.schedule, size)

    def laid(self) -> MixedLanes:
        """All sources in chunks."""
        return MixedLanes(Sources(self.sources, self.settings), self.schedule)

    def plan(self, **change: Any) -> Plan:
        case = replace(self, **change)
        orders = case.orders()
        return Plan(
            orders.chunk_samples, case.settings, orders=orders, global_batch_size=case.global_batch_size,
            dp_world_size=case.dp_world_size, last_batch=case.last_batch, epoch=case.epoch, epoch_size=case.epoch_size,
            start=case.start,
        )  # fmt: skip


@st.composite
def cases(draw: st.DrawFn, *, endless: bool | None = None, dealt: str | None = None) -> Case:
    sources = draw(sources_)
    is_endless = draw(st.booleans()) if endless is None else endless
    dealt = dealt or draw(st.sampled_from(["chunks", "samples", "batches"]))
    lanes, size = draw(st.integers(1, 20)), draw(st.integers(1, 30))
    size = lanes * (1 + size // lanes) if dealt == "batches" else size
    quotas = None
    if not is_endless and (dealt == "batches" or draw(st.booleans())):
        unit = size if dealt == "batches" else 1
        most = {name: 2 * sum(sizes) // unit for name, sizes in sources.items()}
        quotas = {name: unit * draw(st.integers(0, count)) for name, count in most.items()}
        quotas[min(quotas)] += unit
    per_pass = sum(quotas.values()) if quotas else sum(map(sum, sources.values()))
    epoch_size = draw(st.integers(1, 400)) if is_endless else draw(st.none() | st.integers(1, 3 * per_pass))
    return Case(
        sources=sources,
        settings=OrderSettings(seed=draw(st.integers(0, 2**64 - 1)), lanes=lanes, window=draw(st.integers(0, 20))),
        quotas=quotas,
        schedule=draw(schedules(list(sources))) if is_endless else [],
        dealt=dealt,
        even=draw(even_(list(sources), dealt)),
        global_batch_size=size,
        dp_world_size=draw(st.integers(1, 9)),
        last_batch=draw(st.sampled_from(["drop", "pad", "partial"])),
        epoch=draw(st.integers(0, 3)),
        epoch_size=epoch_size,
        start=draw(st.just(0) | st.integers(0, epoch_size or per_pass)),
    )


def batches_of(plan: Plan, dp_rank: int) -> list[list[Row]]:
    """Per batch: (stream position, chunk, offset) of one rank's valid rows."""
    rows = plan.rank_batches(0, plan.num_batches, dp_rank)
    table = list(zip(rows.positions.tolist(), rows.chunk_ids.tolist(), rows.offsets.tolist(), strict=True))
    splits = rows.row_splits.tolist()
    return [[table[i] for i in range(start, stop) if rows.valid[i]] for start, stop in pairwise(splits)]


def global_batches(plan: Plan) -> list[list[Row]]:
    """Valid rows of all ranks per global batch, sorted: what comes twice would show."""
    ranks = [batches_of(plan, dp_rank) for dp_rank in range(plan.dp_world_size)]
    return [sorted(row for rank in ranks for row in rank[k]) for k in range(plan.num_batches)]


def named(sources: dict[str, list[int]], chunk_ids: Any) -> list[tuple[str, int]]:
    """The source of each chunk, and its number in it."""
    return [[(name, number) for name, sizes in sources.items() for number in range(len(sizes))][i] for i in chunk_ids]


def oracle(tree: ShareTree, lane: int, position: int) -> list[int]:
    """Draws of each source by the definition, in Python's integers."""
    found = [0] * len(tree.names)

    def go(node: int, starts: list[int], passed: int) -> None:
        """A node that was passed so often in all, and ``starts`` times at the start of each segment."""
        if node < 0:
            found[-1 - node] = passed
            return

        def left(upto: int) -> int:
            total = int(tree.phases[node, lane])
            for index, start in enumerate(starts):
                stop = starts[index + 1] if index + 1 < len(starts) else upto
                total += int(tree.shares[node, index]) * max(min(stop, upto) - start, 0)
            return total >> 32

        lefts = [left(start) for start in starts]
        sides = tree._sides[node]
        go(sides[0], lefts, left(passed))
        go(sides[1], [s - gone for s, gone in zip(starts, lefts, strict=True)], passed - left(passed))

    go(tree.root, tree.starts.tolist(), position)
    return found
