"""Divide the consumer's time of each step by cause of waiting."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from shard_tools.look.trace.read import Trace, TracedStep
from streaming.watch.tracing.recorder import CONSUMER

STEP, OTHER = "your step", "other"
CAUSES = (
    STEP, "wait for bytes", "wait for a builder", "wait for a batch", "wait for the device", "build", "exchange",
    "copy", "plan", OTHER,
)  # fmt: skip
"""Names of the consumer's activities, as in the file."""


def by_cause(trace: Trace) -> list[dict[str, float]]:
    """Return the seconds by cause of each step."""
    begins = [step.asked_us for step in trace.steps]
    found: list[dict[str, float]] = [{STEP: (step.ended_us - step.received_us) / 1e6} for step in trace.steps]
    lanes = {event["tid"] for event in trace.events if _names_consumer(event)}
    for event in trace.events:
        place = bisect_right(begins, event["ts"]) - 1
        if event["ph"] != "X" or event["tid"] not in lanes or event["name"] not in CAUSES[1:-1] or place < 0:
            continue
        if event["ts"] < trace.steps[place].received_us:
            found[place][event["name"]] = found[place].get(event["name"], 0) + event["dur"] / 1e6
    for step, causes in zip(trace.steps, found, strict=True):
        causes[OTHER] = max(0.0, _whole_s(step) - sum(causes.values()))
    return found


def total(found: list[dict[str, float]]) -> dict[str, float]:
    """Return the sums over all steps, largest first."""
    sums = {cause: sum(one.get(cause, 0.0) for one in found) for cause in CAUSES}
    return dict(sorted(((cause, seconds) for cause, seconds in sums.items() if seconds), key=lambda one: -one[1]))


def slowest(causes: dict[str, float]) -> tuple[str, float]:
    """Return the cause that the consumer waited for longest in a step, and the duration."""
    return max(((cause, seconds) for cause, seconds in causes.items() if cause != STEP), key=lambda one: one[1])


def _whole_s(step: TracedStep) -> float:
    return (step.ended_us - step.asked_us) / 1e6


def _names_consumer(event: dict[str, Any]) -> bool:
    args = event.get("args")
    return event["ph"] == "M" and event["name"] == "thread_name" and isinstance(args, dict) and (
        args.get("name") == CONSUMER
    )  # fmt: skip
