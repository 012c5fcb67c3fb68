"""Read a trace file and validate it fully: a file from any source is untrusted."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from typing import Any, NoReturn

from streaming.errors import ConfigError, DataError
from streaming.watch.tracing.chrome import FORMAT

MOST_BYTES = 512 << 20
"""A trace with the maximum number of events takes about 60 MB."""
MOST_RANK = 1 << 20

Key = tuple[int, int]
"""Epoch and samples seen: identify a step on all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """A step of one rank, in microseconds of its clock.

    Attributes:
        key: Its identity on all ranks.
        asked_us: Time when its batch was requested.
        received_us: Time when the batch was delivered.
        ended_us: Time when the next batch was requested.
        is_over: Whether the step ended before a failure or the end of the file.
    """

    key: Key
    asked_us: float
    received_us: float
    ended_us: float
    is_over: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The trace of one rank.

    Attributes:
        path: The file.
        rank: The rank.
        world_size: Ranks of the job.
        clock: Identifies machines with separate clocks; "": unknown.
        is_cut_off: More events occurred than a trace holds.
        steps: Its steps, in order.
        events: All events.
    """

    path: str
    rank: int
    world_size: int
    clock: str
    is_cut_off: bool
    steps: tuple[TracedStep, ...]
    events: list[dict[str, Any]]


def read_trace(path: str) -> Trace:
    """Read one file.

    Raises:
        ConfigError: The file cannot be opened, is too large, or is not the trace of a rank.
        DataError: The file is damaged.
    """
    try:
        size = os.path.getsize(path)
        if size > MOST_BYTES:
            raise ConfigError(f"{path}: {size:,} bytes, more than the {MOST_BYTES:,} of any trace that a loader writes")
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: damaged, or no trace: {error}") from error
    ours = found.get("shardstream") if isinstance(found, dict) else None
    if not isinstance(ours, dict):
        raise ConfigError(f"{path}: not a trace of a loader; give files that loader.trace(path) wrote")
    if "ranks" in ours:
        raise ConfigError(f"{path}: a trace that was merged before; give the files that the ranks wrote")
    if ours.get("format") != FORMAT:
        raise ConfigError(
            f"{path}: a trace of format {ours.get('format')!r}, this release reads {FORMAT}; use the release that "
            "wrote it"
        )
    return _checked(path, ours, found.get("traceEvents"))


def _checked(path: str, ours: dict[str, Any], events: Any) -> Trace:
    rank, world_size = (_number(path, ours, name) for name in ("rank", "world_size"))
    if not 0 <= rank < min(max(world_size, 1), MOST_RANK) or rank % 1:
        _damaged(path, f"rank {rank} of {world_size}")
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        _damaged(path, "traceEvents is no list of objects")
    for event in events:
        for name in ("ts", "pid", "tid", *(("dur",) if event.get("ph") == "X" else ())):
            _number(path, event, name)
        if not isinstance(event.get("ph"), str) or not isinstance(event.get("name"), str):
            _damaged(path, "an event without ph or name")
    steps = ours.get("steps")
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        _damaged(path, "steps is no list of objects")
    clock = ours.get("clock")
    return Trace(
        path=path, rank=int(rank), world_size=int(world_size), clock=clock if isinstance(clock, str) else "",
        is_cut_off=bool(ours.get("is_cut_off")), steps=tuple(_step(path, step) for step in steps), events=events,
    )  # fmt: skip


def _step(path: str, step: dict[str, Any]) -> TracedStep:
    epoch, seen, asked_us, received_us, ended_us = (
        _number(path, step, name) for name in ("epoch", "samples_seen", "asked_us", "received_us", "ended_us")
    )
    if not asked_us <= received_us <= ended_us:
        _damaged(path, f"a step whose times do not follow each other: {step}")
    return TracedStep(
        key=(int(epoch), int(seen)), asked_us=asked_us, received_us=received_us, ended_us=ended_us,
        is_over=bool(step.get("is_over", True)),  # older releases wrote only steps that had ended
    )  # fmt: skip


def _number(path: str, values: dict[str, Any], name: str) -> float:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        _damaged(path, f"{name} is {value!r}")
    return value


def _damaged(path: str, what: str) -> NoReturn:
    raise DataError(f"{path}: damaged: {what[:200]}")
