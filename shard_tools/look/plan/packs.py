"""Sum up how packed sets use their documents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from itertools import pairwise
from operator import add
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shard_tools.look.plan.sources import sets_of
from shard_tools.running.report import Report
from streaming.common.arguments import format_bytes
from streaming.order.packing.balance import exchange
from streaming.order.plan.plan import Plan
from streaming.order.plan.sizes import Sizes

if TYPE_CHECKING:
    from streaming.sets.sources.packs import PackCounts


_STEPS = 16
"""Maximum number of steps for which loads are computed, evenly spaced over the epoch."""
_ROWS = 2**16
"""Maximum number of packs for which loads are computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetUse(Report):
    """The use that packs make of one budget, and how it spreads over the ranks of a step.

    Attributes:
        name: Name of the budget; of the tokens, or sizes, that ``length`` limits, their unit.
        limit: Maximum per pack.
        fill: Fraction of the limit that packs use on average, 0 to 1.
        imbalance: The most that a rank has in a step, over the mean of the ranks, minus 1; the mean of some steps.
            None: there is one rank.
        exchanged: The same with ``balance="exchange"`` by this budget; None: such packs are not exchanged.
    """

    name: str
    limit: int
    fill: float
    imbalance: float | None = None
    exchanged: float | None = None

    @property
    def in_words(self) -> str:
        """Describe the use in a few words."""
        said = f"{self.name} {self.fill:.1%} of {self.limit:,}"
        if self.imbalance is not None:
            said += f", over the ranks of a step max/mean - 1 {self.imbalance:.1%}"
        if self.exchanged is not None:
            said += f" ({self.exchanged:.1%} exchanged by it)"
        return said


@dataclass(frozen=True, slots=True, kw_only=True)
class PackTotals(Report):
    """The packs of a packed set, or of all sources of a mixture, which share the same rules.

    Attributes:
        length: Tokens per pack, or the token budget of a padded one.
        padded: Packs are batches of documents of similar length.
        unit: Unit of lengths: ``"tokens"``, or the column that measures whole samples.
        packs: Number of packs.
        rows: If rows grow over a run, one entry per phase: its first row, tokens per row, and rows per global batch.
        counts: Counts of used and dropped documents.
        budgets: Use of each budget, if there are further ones than the length: the length first.
    """

    length: int
    padded: bool
    unit: str
    packs: int
    counts: PackCounts
    rows: tuple[Mapping[str, int], ...] = ()
    budgets: tuple[BudgetUse, ...] = ()

    @classmethod
    def of(cls, planned: Any, sizes: Sizes, plan: Plan | None = None) -> PackTotals:
        """Sum up all sets of a packed dataset, for global batches of these sizes, dealt by a plan."""
        sets, items = [one for _, one in sets_of(planned)], planned.items
        changes = sorted({row for row, _ in (*items.changes, *sizes.steps)}) if items.changes else []
        each = {row: items.rows_each(row) for row in changes}
        return cls(
            rows=tuple(
                {"from": row, "length": sets[0].rules.length // count, "rows": count * sizes.at(row)}
                for row, count in each.items()
            ),
            length=sets[0].rules.length, padded=sets[0].rules.padded, unit=sets[0].unit,
            packs=sum(one.num_readable for one in sets),
            counts=reduce(add, (replace(one.counts, amounts=()) for one in sets)),
            budgets=tuple(budgets_of(planned, sets, plan)),
        )  # fmt: skip

    @property
    def fill(self) -> float:
        """Fraction of all places that hold tokens, 0 to 1."""
        return self.counts.packed / self.counts.places

    def as_dict(self) -> dict[str, object]:
        """Return the JSON-able form, with the counts merged in."""
        found = {**asdict(self), "fill": round(self.fill, 3)}
        rows, uses, counts = (found.pop(name) for name in ("rows", "budgets", "counts"))
        del counts["amounts"]
        more = {"rows": rows, "budgets": [use.as_dict() for use in self.budgets] if uses else ()}
        return {**found, **counts, **{name: value for name, value in more.items() if value}}

    @property
    def rows_in_words(self) -> str:
        """Describe the rows of a global batch by row of the run; "" if all are as long as a pack."""
        return ", ".join(
            f"{one['rows']:,} of {one['length']:,} {self.unit} from row {one['from']:,} on" for one in self.rows
        )

    def warnings(self, sizes: Mapping[int, int], num_ranks: int) -> list[str]:
        """Return why training would refuse global batches of these sizes, by row."""
        most = max(sizes.values())
        if not self.padded or most <= num_ranks:
            return []
        return [
            (
                f"a padded pack is already a batch; a rank gets up to {-(-most // num_ranks)} of them: "
                "training would refuse this without collate_fn=list; use --batch-size 1"
            )
        ]

    def in_words(self, sample_bytes: float) -> str:
        """Describe the packs in one line, given the mean size of their samples."""
        left_out = {name: getattr(self.counts, name) for name in ("split", "truncated", "dropped", "empty")}
        dropped = "".join(f", {count:,} {what}" for what, count in left_out.items() if count)
        kind = "padded packs of at most" if self.padded else "packs of"
        what = "samples" if self.unit != "tokens" else "documents"
        return (
            f"{self.packs:,} {kind} {self.length:,} {self.unit} ({format_bytes(sample_bytes)}), "
            f"{self.fill:.1%} filled, of {self.counts.documents:,} {what}{dropped}"
        )


def budgets_of(planned: Any, sets: Sequence[Any], plan: Plan | None) -> Iterator[BudgetUse]:
    """Yield the use of each budget, the length first; nothing if the length is the only one, or sets differ."""
    first = sets[0]
    names = tuple(first.budgets)
    if not names or any(tuple(one.budgets) != names or one.rules != first.rules for one in sets):
        return
    packs = sum(one.num_readable for one in sets)
    amounts = np.sum([(one.counts.packed, *one.counts.amounts) for one in sets], axis=0)
    limits = (first.rules.length, *first.rules.budgets)
    spread = _spread(planned, names, plan)
    for number, (name, limit) in enumerate(zip((first.unit, *names), limits, strict=True)):
        dealt, exchanged = spread[number]
        yield BudgetUse(
            name=name, limit=limit, fill=round(float(amounts[number] / (packs * max(limit, 1))), 4), imbalance=dealt,
            exchanged=exchanged if first.items.fields and not first.rules.padded else None,
        )  # fmt: skip


def _spread(
    planned: Any, names: tuple[str, ...], plan: Plan | None
) -> list[tuple[float | None, float | None]]:  # fmt: skip
    """Return the imbalance of each budget over the ranks of some steps: as dealt, and exchanged by it."""
    if plan is None or plan.dp_world_size == 1 or plan.num_batches == 0:
        return [(None, None)] * (1 + len(names))
    most = max(1, min(_STEPS, _ROWS // plan.global_batch_size))
    steps = np.unique(np.linspace(0, plan.num_batches - 1, min(most, plan.num_batches)).astype(np.int64))
    found = [_spread_of(planned, names, plan, step) for step in steps.tolist()]
    return [tuple(np.round(one, 4).tolist()) for one in np.mean(found, axis=0)]


def _spread_of(planned: Any, names: tuple[str, ...], plan: Plan, step: int) -> npt.NDArray[np.float64]:
    """Return the imbalances of one step, float64 [1 + len(names), 2]."""
    ranks = [plan.rank_batches(step, step + 1, rank) for rank in range(plan.dp_world_size)]
    shares = [len(one.chunk_ids) for one in ranks]
    chunk_ids, offsets, passes = (
        np.concatenate([getattr(one, name) for one in ranks]) for name in ("chunk_ids", "offsets", "passes")
    )
    packs = planned.rows.packs(chunk_ids, offsets, passes, plan.settings.seed)
    measured = planned.rows.measured(names, chunk_ids[packs.packs], packs)
    pieces = np.column_stack([packs.stops - packs.starts, measured])
    borders, found = np.cumsum([0, *shares]), []
    for amounts in pieces.T:
        costs = np.bincount(packs.packs, amounts, packs.num_packs)
        dealt = [float(costs[low:high].sum()) for low, high in pairwise(borders.tolist())]
        found.append((_imbalance(dealt), _imbalance([float(costs[one].sum()) for one in exchange(costs, shares)])))
    return np.array(found)


def _imbalance(loads: Sequence[float]) -> float:
    """Return max / mean - 1."""
    mean = sum(loads) / len(loads)
    return max(loads) / mean - 1 if mean else 0.0
