"""Explain in words why a sample is in a batch, and why this rank gets it: the plan's decisions, in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shard_tools.look.plan.sets import Described
from shard_tools.look.plan.steps import PlannedRun
from streaming.order.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlace:
    """The origin of a rank's row, in numbers of the plan.

    Attributes:
        rank: The data rank.
        num_ranks: Number of data ranks.
        size: Rows of the global batch.
        share: The rank's part of these rows, sorted by lane: the first, and one past the last.
        number: Number of the row among the rank's.
        lane: Its lane.
        place: Its place in the lane, in its pass.
        position: Its position in the stream of the run.
        offset: Its place in the chunk.
        chunk_id: Number of the chunk in the dataset.
        pass_number: The pass over its source.
    """

    rank: int
    num_ranks: int
    size: int
    share: tuple[int, int]
    number: int
    lane: int
    place: int
    position: int
    offset: int
    chunk_id: int
    pass_number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnBefore:
    """Samples drawn from each source of a run before a row.

    Attributes:
        samples: Number of samples, by the name of the leaf.
        passes: Passes over the source, with fractions.
        shares: Its share of the following rows, from 0 to 1.
    """

    samples: Mapping[str, int]
    passes: Mapping[str, float]
    shares: Mapping[str, float]

    @classmethod
    def before(cls, run: PlannedRun, row: int) -> DrawnBefore | None:
        """Count, by the orders and the ledger of the run; None: there is a single set."""
        if run.state.ledger is None:
            return None
        counts = run.drawn_before(row)
        forecast = run.mixture.drawing.forecast(run.state.ledger)
        passes = {name: one.read(counts[name]) for name, one in forecast.passes.items()}
        drawn = forecast.drawn(row, 1)
        return cls(samples=counts, passes=passes, shares=drawn)


Why = tuple[tuple[str, str], ...]
"""Names and sentences."""


def why_here(run: PlannedRun, plan: Plan, place: RowPlace, one: Described, drawn: DrawnBefore | None) -> Why:
    """Explain a row: its source, its pass, its lane, its chunk, and why the rank gets it."""
    found = [("source", _source(run, one, drawn))] if drawn is not None else []
    found += [
        ("pass", _pass(run, plan, place, one, drawn)),
        ("lane", _lane(plan, place)),
        ("chunk", _chunk(run, plan, place, one)),
        ("rank", _rank(place)),
    ]
    return tuple(found)


def _source(run: PlannedRun, one: Described, drawn: DrawnBefore) -> str:
    kind = "group" if one.source is None else "source"
    share = drawn.shares.get(one.leaf, 0.0)
    said = f"The {kind} {one.leaf} is to give {share:.2%} of the rows at this step."
    if not run.mixture.is_endless:
        said = f"The {kind} {one.leaf} gives {share:.2%} of the samples of an epoch."
    return f"{said} {drawn.samples.get(one.leaf, 0):,} of it came before this step."


def _pass(run: PlannedRun, plan: Plan, place: RowPlace, one: Described, drawn: DrawnBefore | None) -> str:
    order = f"seed {plan.settings.seed}" if plan.settings.shuffle else "the order in which they are stored"
    if drawn is None:
        rows = "packs" if run.sets.pack_rules is not None else "samples"
        said = f"Pass {place.pass_number}: each pass holds every one of the {plan.samples_per_pass:,} {rows} once"
        return f"{said}, in {'an order of its own, by ' if plan.settings.shuffle else ''}{order}."
    size = int(run.mixture.leaves[one.leaf].chunk_samples.sum())
    return (
        f"{one.leaf} has gone through {drawn.passes[one.leaf]:.2f} passes of its {size:,} "
        f"{'packs' if run.sets.pack_rules is not None else 'samples'} before this step: it is in pass "
        f"{place.pass_number}."
    )


def _lane(plan: Plan, place: RowPlace) -> str:
    settings = plan.settings
    due = f"It is due at row {place.position:,} of the run"
    if settings.lanes == 1:
        return f"{due}; there is one lane."
    return (
        f"{due}. Rows are dealt to {settings.lanes:,} lanes in turn, which are read side by side: this is number "
        f"{place.place:,} of lane {place.lane:,}."
    )


def _chunk(run: PlannedRun, plan: Plan, place: RowPlace, one: Described) -> str:
    count = int(run.planned.chunk_samples[place.chunk_id])
    what = "group of documents" if run.sets.pack_rules is not None else "chunk"
    said = f"It is number {place.offset:,} of the {count:,} in {what} {one.chunk:,}."
    window = plan.settings.window
    if window:
        said += (
            f" Chunks follow each other in the lane in shuffled order; within it, the window moves a sample by fewer "
            f"than {window:,} places, so that neighbors of the shard do not come together."
        )
    elif not plan.settings.shuffle:
        said += " Chunks follow each other in storage order."
    return said


def _rank(place: RowPlace) -> str:
    if place.num_ranks == 1:
        return f"There is one data rank, which gets all {place.size:,} rows, sorted by lane."
    low, high = place.share
    return (
        f"The {place.size:,} rows of the batch, sorted by lane, are cut into {place.num_ranks:,} equal parts: rank "
        f"{place.rank:,} gets rows {low:,} to {high - 1:,}, and this is row {low + place.number:,}."
    )
