"""Join the traces of several ranks into one file, with clocks aligned by their common steps."""

from __future__ import annotations

import json
import os
import secrets
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from shard_tools.look.trace.read import Key, Trace, read_trace
from shard_tools.look.trace.summary import by_cause, slowest, total
from shard_tools.running.report import Report
from streaming.errors import ConfigError
from streaming.watch.tracing.chrome import FORMAT

MOST_FILES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport(Report):
    """One rank of a merged trace.

    Attributes:
        rank: The rank.
        steps: Number of its steps.
        unfinished: Steps that had not ended at a failure, or when the file was written.
        shift_us: Shift that was added to its times.
        is_same_clock: Whether its clock is that of the first rank, so that no shift is needed.
        spread_us: Maximum difference between the ends of common steps after the shift; None: nothing to compare.
        seconds: The consumer's time by cause.
        is_cut_off: More events occurred than a trace holds.
    """

    rank: int
    steps: int
    unfinished: int
    shift_us: float
    is_same_clock: bool
    spread_us: float | None
    seconds: dict[str, float]
    is_cut_off: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestWait(Report):
    """The longest wait of a step.

    Attributes:
        epoch: Epoch of the step.
        samples_seen: Samples of the epoch before the step.
        rank: The rank that waited longest.
        cause: What it waited for.
        seconds: Duration of the wait.
    """

    epoch: int
    samples_seen: int
    rank: int
    cause: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeReport(Report):
    """Result of merging.

    Attributes:
        path: The merged file; None: none was requested.
        world_size: Ranks of the job.
        ranks: Ranks whose traces were given.
        steps: Steps that all of these ranks took.
    """

    path: str | None
    world_size: int
    ranks: tuple[RankReport, ...]
    steps: tuple[LongestWait, ...]

    @property
    def worst(self) -> tuple[int, str, int] | None:
        """The rank and cause with the longest total wait, and the number of its steps; None without steps."""
        found = {(step.rank, step.cause): 0.0 for step in self.steps}
        for step in self.steps:
            found[step.rank, step.cause] += step.seconds
        worst = max(found, key=lambda one: found[one], default=None)
        return worst and (*worst, sum((step.rank, step.cause) == worst for step in self.steps))


def merge_traces(paths: Sequence[str], out: str | None = None) -> MergeReport:
    """Join the traces of ranks of one job.

    Times of a rank on another machine are shifted by a constant, so that its steps end when those of the lowest rank
    end (the median over their common steps): ranks of a job wait for each other in every step.

    Args:
        paths: Files of ``loader.trace``, one per rank.
        out: The file to write; it gets its name when it is complete. None: write nothing.

    Raises:
        ConfigError: A file is not a trace, two files are from one rank, or they belong to different jobs or steps.
        DataError: A file is damaged.
    """
    if not paths or len(paths) > MOST_FILES:
        raise ConfigError(f"trace merge: expected 1 to {MOST_FILES} files, got {len(paths)}")
    if out is not None and os.path.realpath(out) in {os.path.realpath(path) for path in paths}:
        raise ConfigError(f"trace merge: {out} is one of the files to merge; give the result another name")
    traces = sorted(map(read_trace, paths), key=lambda trace: trace.rank)
    _check_together(traces)
    first = traces[0]
    shifted = [(trace, _shift_us(first, trace)) for trace in traces]
    causes = {trace.rank: by_cause(trace) for trace in traces}
    ranks = tuple(_rank_report(first, trace, shift_us, causes[trace.rank]) for trace, shift_us in shifted)
    report = MergeReport(path=out, world_size=first.world_size, ranks=ranks, steps=_steps(traces, causes))
    if out is not None:
        _write(out, shifted, report)
    return report


def _check_together(traces: Sequence[Trace]) -> None:
    first = traces[0]
    for before, trace in pairwise(traces):
        if trace.rank == before.rank:
            raise ConfigError(f"{before.path} and {trace.path} are both of rank {trace.rank}; give one file of each")
        if trace.world_size != first.world_size:
            raise ConfigError(
                f"{first.path} is of a job of {first.world_size} ranks, {trace.path} of one of {trace.world_size}; "
                "give files of one job"
            )
        if not _aligned_by(first, trace):
            raise ConfigError(
                f"{trace.path} has no step in common with {first.path}, so nothing aligns them; call loader.trace at "
                "the same step on all ranks"
            )


def _ends(trace: Trace) -> dict[Key, float]:
    return {step.key: step.ended_us for step in trace.steps if step.is_over}


def _aligned_by(first: Trace, trace: Trace) -> set[Key]:
    """Return the common steps that prove the traces to be of the same time; with another clock, their ends decide."""
    if _is_same_clock(first, trace):
        return {step.key for step in first.steps} & {step.key for step in trace.steps}
    return _ends(first).keys() & _ends(trace).keys()


def _is_same_clock(first: Trace, trace: Trace) -> bool:
    return trace is first or (bool(trace.clock) and trace.clock == first.clock)


def _differences(first: Trace, trace: Trace) -> list[float]:
    """Return how much later each common step ended by the first rank's clock."""
    own = _ends(trace)
    return [ended_us - own[key] for key, ended_us in _ends(first).items() if key in own]


def _shift_us(first: Trace, trace: Trace) -> float:
    return 0.0 if _is_same_clock(first, trace) else round(statistics.median(_differences(first, trace)), 3)


def _rank_report(first: Trace, trace: Trace, shift_us: float, causes: list[dict[str, float]]) -> RankReport:
    differences = [] if trace is first else _differences(first, trace)
    apart = max((abs(one - shift_us) for one in differences), default=None)
    return RankReport(
        rank=trace.rank, steps=len(trace.steps), unfinished=sum(not step.is_over for step in trace.steps),
        shift_us=shift_us, is_same_clock=_is_same_clock(first, trace),
        spread_us=None if apart is None else round(apart, 3),
        seconds={cause: round(seconds, 6) for cause, seconds in total(causes).items()}, is_cut_off=trace.is_cut_off,
    )  # fmt: skip


def _steps(traces: Sequence[Trace], causes: dict[int, list[dict[str, float]]]) -> tuple[LongestWait, ...]:
    """Return, for each step that all ranks took, the rank that waited longest, and the cause."""
    of = {trace.rank: _by_key(trace, causes[trace.rank]) for trace in traces}
    found = []
    for key in of[traces[0].rank]:
        if not all(key in steps for steps in of.values()):
            continue
        waits = [(*slowest(steps[key]), rank) for rank, steps in of.items()]
        cause, seconds, rank = max(waits, key=lambda one: one[1])
        found.append(
            LongestWait(epoch=key[0], samples_seen=key[1], rank=rank, cause=cause, seconds=round(seconds, 6))
        )  # fmt: skip
    return tuple(found)


def _by_key(trace: Trace, causes: Sequence[dict[str, float]]) -> dict[Key, dict[str, float]]:
    """Return what the consumer waited for in each step, in all of its micro-batches."""
    found: dict[Key, dict[str, float]] = {}
    for step, one in zip(trace.steps, causes, strict=True):
        sums = found.setdefault(step.key, {})
        for cause, seconds in one.items():
            sums[cause] = sums.get(cause, 0.0) + seconds
    return found


def _write(out: str, shifted: Sequence[tuple[Trace, float]], report: MergeReport) -> None:
    events: list[dict[str, Any]] = []
    for trace, shift_us in shifted:
        for event in trace.events:
            ts = event["ts"] if event["ph"] == "M" else round(event["ts"] + shift_us, 3)
            events.append({**event, "pid": trace.rank, "ts": ts})
    ours = {"format": FORMAT, **replace(report, path=None).as_dict()}
    beside = f"{out}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
    try:
        with open(beside, "x", encoding="ascii") as file:
            json.dump({"displayTimeUnit": "ms", "shardstream": ours, "traceEvents": events}, file,
                      separators=(",", ":"))  # fmt: skip
        os.replace(beside, out)
    except OSError as error:
        with suppress(OSError):
            os.unlink(beside)
        raise ConfigError(
            f"trace merge: cannot write {out}: {error.strerror or error}; make its folder, or give another path with "
            "--out"
        ) from error
