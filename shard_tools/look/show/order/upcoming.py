"""Find the steps in which a sample comes, and the ranks that receive it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shard_tools.look.plan.steps import PlannedRun
from shard_tools.look.show.order.query import RunAsked
from shard_tools.look.show.order.runs import ShownRuns
from shard_tools.running.report import Report
from streaming.errors import ConfigError

_MOST = 200  # steps per page


@dataclass(frozen=True, slots=True, kw_only=True)
class Coming(Report):
    """A step in which a sample comes.

    Attributes:
        epoch: The epoch.
        step: Batch of the epoch.
        rank: Data rank that receives it.
    """

    epoch: int
    step: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comings:
    """The steps in which a sample comes.

    Attributes:
        found: These steps, in order.
        searched: The steps that were searched, in words.
        why_none: Why none was found; "": one was found, or the reason is unknown.
        is_cut: There are more than listed.
    """

    found: tuple[Coming, ...]
    searched: str
    why_none: str = ""
    is_cut: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        return {"found": [one.as_dict() for one in self.found], "searched": self.searched, "why_none": self.why_none}


def comings(runs: ShownRuns, asked: RunAsked, epoch: int | None, name: str, shard: int, row: int) -> Comings:
    """Find the steps in which a sample comes: in an epoch and the next; in a run without end, around the state.

    Args:
        runs: The runs of the set.
        asked: The run.
        epoch: The first of the two epochs; None: that of the state, or the first.
        name: Name of the sample's set, as on other pages; "": the only one.
        shard: Number of its shard in the set.
        row: Its number in the shard.

    Raises:
        ConfigError: There is no such run.
        StateError: The state belongs to another set.
    """
    run = runs.of(asked)
    sets = [at for at, one in enumerate(run.sets.names) if not name or one == name or one.startswith(f"{name}/")]
    steps, searched = _searched(run, epoch, sets)
    rows = run.rows_at([(number, shard, row) for number in sets], steps)
    if rows is None:
        why = next(filter(None, (run.sets.why_left_out(number, shard, row) for number in sets)), "no row is made of it")
        return Comings(found=(), searched=searched, why_none=why)
    found = []
    for step, rank in sorted(set(zip(rows.steps.tolist(), rows.ranks.tolist(), strict=True)))[: _MOST + 1]:
        number, first = run.steps.epoch_at(step)
        found.append(Coming(epoch=number, step=step - first, rank=rank))
    why = "" if found else "it is left out with the tail of the epoch, or comes in a later pass"
    return Comings(found=tuple(found[:_MOST]), searched=searched, why_none=why, is_cut=len(found) > _MOST)


def _searched(run: PlannedRun, epoch: int | None, sets: list[int]) -> tuple[range, str]:
    """Return the steps to search, and their description."""
    if run.is_endless:
        if epoch:
            raise ConfigError(f"epoch: the run is one epoch without an end, number 0; got {epoch}; leave it out")
        steps = run.searched(sets, is_whole=False)
        return steps, f"steps {steps.start:,} to {max(steps.stop - 1, steps.start):,}"
    chosen = run.state.epoch if epoch is None else epoch
    if epoch in (None, run.state.epoch):
        steps = run.searched(sets)
    else:
        steps = range(run.steps.first(chosen), run.steps.first(chosen + 2))
    return steps, f"epochs {chosen:,} and {chosen + 1:,}"
