"""Write a recording in the Trace Event format, which Perfetto (ui.perfetto.dev) and chrome://tracing read.

There is one process per rank, and one thread per lane. Work is complete events (``ph: "X"``), arrows are pairs of flow
events (``"s"`` and ``"f"``, bound to the work that encloses them), names are metadata (``"M"``). Times are in
microseconds of the machine's monotonic clock, which its processes share. ``shard_tools trace merge`` needs the object
``shardstream`` beside the events. Format: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from streaming.watch.tracing.recorder import CONSUMER, RANGES, Recording, Span, StepTimes

FORMAT = 1
"""Version of the layout of ``shardstream``."""
FLOW_IDS = 1 << 32
"""Range of arrow ids per rank: rank r numbers its arrows from r times this, so that traces can be joined."""
_LANES = (
    (re.compile(rf"{CONSUMER}$"), CONSUMER),
    (re.compile(r"shardstream-build-(\d+)"), r"build \1"),
    (re.compile(r"worker (\d+)"), r"worker \1"),
    (re.compile(r"shardstream-fetch-(\d+)"), r"fetch \1"),
    (re.compile(r"shardstream-read-(\d+)"), r"fetch \1"),
    (re.compile(r"copies to (.*)"), r"copies to \1"),
)
"""Threads and their lanes, in the order in which they are shown; others come last, under their own names."""
_KINDS = {"hand_over": "consumer", "step": "consumer", "build_in_worker": "build", "copies": "copy"}
_SHOWN = {
    "build_in_worker": "build", "hand_over": "next batch", "step": "your step", "wait_for_fetch": "wait for bytes",
    "wait_for_build": "wait for a builder", "wait_for_batch": "wait for a batch", "copies": "copy",
    "wait_for_device": "wait for the device",
}  # fmt: skip


def trace_of(recording: Recording, about: dict[str, Any], rank: int) -> dict[str, Any]:
    """Return the whole file of one rank; ``about`` goes into ``shardstream``, with the steps."""
    lanes = _lanes(recording.spans)
    events = [
        *_names(lanes, rank, str(about.get("process", ""))),
        *(_work(span, rank, lanes) for span in recording.spans),
        *_arrows(recording.arrows, rank, lanes),
    ]
    steps = [_step(number, step) for number, step in enumerate(recording.steps)]
    ours = {"format": FORMAT, "rank": rank, **about, "is_cut_off": recording.is_full, "steps": steps}
    return {"displayTimeUnit": "ms", "shardstream": ours, "traceEvents": events}


def _lanes(spans: Iterable[Span]) -> dict[str, tuple[int, str]]:
    """Return the number and the shown name of each lane, in the order in which they are shown."""
    found = []
    for lane in {span.lane for span in spans}:
        for place, (pattern, name) in enumerate(_LANES):
            if match := pattern.match(lane):
                number = match[1] if pattern.groups else ""
                found.append((place, int(number) if number.isdigit() else 0, match.expand(name), lane))
                break
        else:
            found.append((len(_LANES), 0, lane, lane))
    return {lane: (number, name) for number, (_, _, name, lane) in enumerate(sorted(found), 1)}


def _names(lanes: dict[str, tuple[int, str]], rank: int, process: str) -> Iterator[dict[str, Any]]:
    at = {"ph": "M", "ts": 0, "pid": rank}
    yield {**at, "tid": 0, "name": "process_name", "args": {"name": f"rank {rank}"}}
    yield {**at, "tid": 0, "name": "process_sort_index", "args": {"sort_index": rank}}
    yield {**at, "tid": 0, "name": "process_labels", "args": {"labels": process}}
    for number, name in lanes.values():
        yield {**at, "tid": number, "name": "thread_name", "args": {"name": name}}
        yield {**at, "tid": number, "name": "thread_sort_index", "args": {"sort_index": number}}


def _work(span: Span, rank: int, lanes: dict[str, tuple[int, str]]) -> dict[str, Any]:
    name = RANGES.get(span.name, span.name)
    return {
        "ph": "X", "name": _SHOWN.get(name, name), "cat": _KINDS.get(name, name), "ts": _us(span.start_s),
        "dur": max(round(_us(span.end_s) - _us(span.start_s), 3), 0.001), "pid": rank, "tid": lanes[span.lane][0],
        "args": {key: value for key, value in span.facts.items() if value is not None},
    }  # fmt: skip


def _arrows(
    arrows: Iterable[tuple[Span, Span]], rank: int, lanes: dict[str, tuple[int, str]]
) -> Iterator[dict[str, Any]]:
    """Yield a pair of events per arrow: from the end of the first work to the beginning of the work made from it."""
    for number, (source, target) in enumerate(arrows, 1):
        kind = "batch" if target.name == "step" else "chunk"
        both = {"name": kind, "cat": "flow", "id": rank * FLOW_IDS + number, "pid": rank}
        inside_s = min(1e-6, (source.end_s - source.start_s) / 2)
        yield {**both, "ph": "s", "ts": _us(source.end_s - inside_s), "tid": lanes[source.lane][0]}
        inside_s = min(1e-6, (target.end_s - target.start_s) / 2)
        yield {**both, "ph": "f", "bp": "e", "ts": _us(target.start_s + inside_s), "tid": lanes[target.lane][0]}


def _step(number: int, step: StepTimes) -> dict[str, Any]:
    return {
        "step": number, "epoch": step.epoch, "samples_seen": step.samples_seen, "asked_us": _us(step.asked_s),
        "received_us": _us(step.received_s), "ended_us": _us(step.ended_s),
        "is_over": step.is_over,
    }  # fmt: skip


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
