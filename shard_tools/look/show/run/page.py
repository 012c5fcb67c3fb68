"""Answer the page of a running job: time by cause, readiness of each stage, buffers, requests, for each rank."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shard_tools.look.show.base.page import Query
from shard_tools.look.show.base.subject import Subject
from shard_tools.look.show.run.attach import Told, ask, same_loader
from shard_tools.running.report import Report
from streaming.common.arguments import format_bytes
from streaming.watch.metrics.waits import CAUSES, OWN, REST, Waits, waits

ASKS: tuple[str, ...] = ()
NOW_S = 10.0
"""The period that counts as "now": long enough for some steps, short enough to see a change."""
_KEPT_S = 4 * NOW_S
_LEAST_S = 1.5
ORDER = (OWN, *CAUSES.values(), REST)
"""Causes from left to right; the position gives the number of the color."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice(Report):
    """A part of a bar: percent of its length."""

    words: str
    color: int
    x: float
    width: float
    step_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeBar(Report):
    """Division of the training thread's time by cause, over some seconds or the whole run."""

    name: str
    steps: int
    step_ms: float
    headspace: float
    slices: tuple[Slice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReady(Report):
    """A stage of the loader: how often training found it ready, and facts about it."""

    name: str
    ready: float | None
    facts: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShown(Report):
    """The display of a rank."""

    address: str
    error: str
    loader: str
    rank: int
    place: Mapping[str, Any]
    bars: tuple[TimeBar, ...]
    stages: tuple[StageReady, ...]
    trouble: tuple[tuple[str, str], ...]
    describe: str
    numbers: Mapping[str, float]
    readers: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShown(Report):
    """The display of a job."""

    asked: tuple[str, ...]
    answered: int
    causes: tuple[tuple[int, str], ...]
    headspace: float | None
    ranks: tuple[RankShown, ...]


@dataclass(slots=True, eq=False)
class History:
    """Earlier answers, so that a page can show the current rates. Thread-safe."""

    _answers: deque[list[Told]] = field(default_factory=deque)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def before(self, answers: Sequence[Told]) -> list[Told | None]:
        """Keep answers; return for each the earlier answer nearest to ``NOW_S`` old, if there is one."""
        with self._lock:
            # Answers older than _KEPT_S are dropped.
            known = [one for some in self._answers for one in some]
            self._answers.append([one for one in answers if not one.error])
            newest_s = max((one.taken_s for one in answers), default=0.0)
            while self._answers and all(one.taken_s < newest_s - _KEPT_S for one in self._answers[0]):
                self._answers.popleft()
        return [self._nearest(one, known) for one in answers]

    def _nearest(self, one: Told, known: Sequence[Told]) -> Told | None:
        found = [old for old in known if one.taken_s - old.taken_s >= _LEAST_S and same_loader(one, old)]
        return min(found, key=lambda old: abs(one.taken_s - old.taken_s - NOW_S), default=None)


def run_page(subject: Subject, query: Query) -> RunShown:  # noqa: ARG001  it takes no parameter
    """Query all ranks of the job; a rank that does not answer is shown with its error."""
    history = subject.keep("run", History)
    answers = ask(subject.run)
    ranks = tuple(_shown(one, old) for one, old in zip(answers, history.before(answers), strict=True))
    shares = [rank.bars[-1].headspace for rank in ranks if rank.bars]
    return RunShown(
        asked=tuple(sorted({one.address for one in answers})),
        answered=sum(not one.error for one in answers),
        causes=tuple(enumerate(ORDER)),
        headspace=max(shares, default=None),
        ranks=ranks,
    )


def _shown(one: Told, old: Told | None) -> RankShown:
    whole = waits(one.numbers)
    bars = [_bar("whole run", whole)] if whole.step_s else []
    if old is not None and (now := waits(one.numbers, old.numbers)).step_s:
        bars.insert(0, _bar(f"last {one.taken_s - old.taken_s:.0f} s", now))
        whole = now
    return RankShown(
        address=one.address, error=one.error, loader=one.loader, rank=one.rank, place=one.place,
        bars=tuple(bars), stages=() if one.error else _stages(one.numbers, whole),
        trouble=() if one.error else tuple(_trouble(one.numbers)), describe=one.describe, numbers=one.numbers,
        readers=one.readers,
    )  # fmt: skip


def _bar(name: str, found: Waits) -> TimeBar:
    slices, x = [], 0.0
    for color, words in enumerate(ORDER):
        width = 100 * found.by_cause[words] / found.step_s
        if width:
            slices.append(Slice(words=words, color=color, x=x, width=width, step_ms=1000 * found.by_cause[words]))
        x += width
    return TimeBar(
        name=name, steps=found.steps, step_ms=1000 * found.step_s, headspace=found.share, slices=tuple(slices)
    )


def _stages(numbers: Mapping[str, float], found: Waits) -> tuple[StageReady, ...]:
    """Return the stages of this loader, from the store to the step."""

    def ready(*names: str) -> float | None:
        if not found.step_s:
            return None
        return max(0.0, 1 - sum(found.by_cause[CAUSES[name]] for name in names) / found.step_s)

    def facts(**shown: str) -> tuple[tuple[str, str], ...]:
        return tuple((words, _value(numbers, name)) for name, words in shown.items() if name in numbers)

    stages = []
    if "fetched_ahead" in numbers:
        limit = numbers.get("arena_limit_bytes", 0)
        room = f"{format_bytes(numbers.get('arena_bytes', 0))}" + (f" of {format_bytes(limit)}" if limit else "")
        fetching = facts(
            fetched_ahead="batches ahead", requests_in_flight="requests under way", requests="requests so far",
            storage_bytes="from the store", cache_hit_bytes="from the cache", mapped_bytes="mapped",
        )  # fmt: skip
        stages.append(
            StageReady(name="Fetch", ready=ready("wait_for_fetch_s"), facts=(*fetching, ("chunks in memory", room)))
        )
        building = facts(
            built_ahead="batches ahead", ring_bytes="from workers in memory", ring_slots_in_use="of them in use",
            build_s="builders busy",
        )  # fmt: skip
        stages.append(StageReady(name="Build", ready=ready("wait_for_build_s", "build_in_consumer_s"), facts=building))
    if "wait_for_batch_s" in numbers:
        reading = facts(largest_step_bytes="largest step", discarded_batches="batches left out")
        stages.append(StageReady(name="Readers", ready=ready("wait_for_batch_s"), facts=reading))
    handed = facts(batches="batches", bad_samples="bad samples", dropped_samples="dropped by transform")
    return (*stages, StageReady(name="Hand-over", ready=1 - found.share if found.step_s else None, facts=handed))


_TROUBLE = {
    "retries": "requests repeated", "throttled": 'answers "too busy"', "hedges": "second requests for stalled reads",
    "worker_restarts": "workers restarted", "reader_restarts": "readers restarted", "bad_samples": "bad samples",
    "cache_errors": "failures of the cache's disk", "cache_damaged": "damaged cache entries",
    "cache_wait_timeouts": "waits for the cache that timed out", "batches_over_bytes": "batches exceed their memory by",
}  # fmt: skip


def _trouble(numbers: Mapping[str, float]) -> list[tuple[str, str]]:
    return [(words, _value(numbers, name)) for name, words in _TROUBLE.items() if numbers.get(name)]


def _value(numbers: Mapping[str, float], name: str) -> str:
    value = numbers[name]
    if name.endswith("_bytes"):
        return format_bytes(value)
    return f"{value:,.1f} s" if name.endswith("_s") else f"{value:,.0f}"
