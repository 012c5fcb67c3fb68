"""Describe the state of a pipeline: what the next batch waits for, and the oldest fetches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from streaming.common.arguments import format_bytes
from streaming.run.engine.memory.chunk_store import Unit
from streaming.run.engine.threads.stacks import thread_named, where_is
from streaming.storage import ActiveRequest, redact

_LISTED_UNITS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStatus:
    """State of a pipeline at one moment.

    Attributes:
        batch: Number of the next batch to deliver.
        num_batches: Number of batches in the epoch.
        frontier: Batches below this number have all their units in the arena.
        num_started: Number of batches that have been begun.
        num_built: Batches below this number are built.
        num_waiting: Number of built batches, or errors, that wait for delivery.
        pending: Units whose fetch has not ended, in the order of their first use.
        arena_used_bytes: Memory that the units take.
        arena_limit_bytes: Memory that they may take.
        closed: Whether it is closed.
    """

    batch: int
    num_batches: int
    frontier: int
    num_started: int
    num_built: int
    num_waiting: int
    pending: Sequence[Unit]
    arena_used_bytes: int
    arena_limit_bytes: int
    closed: bool


def status_lines(now: PipelineStatus) -> list[str]:
    """Return one line for the next batch, one for the arena, and one for each of the oldest fetches."""
    batch = (
        f"batch {now.batch} of {now.num_batches}: {_waits_for(now)}; units are here up to batch {now.frontier}, "
        f"{now.num_started} batches started, {now.num_built} built, {now.num_waiting} wait for delivery"
    )
    arena = (
        f"arena: {format_bytes(now.arena_used_bytes)} of {format_bytes(now.arena_limit_bytes)} in use, "
        f"{len(now.pending)} fetches under way"
    )
    oldest = sorted(now.pending, key=lambda unit: unit.asked_at_s)[:_LISTED_UNITS]
    return [batch, arena, *map(_unit_line, oldest)]


def thread_lines(prefix: str) -> list[str]:
    """Describe the position of each thread whose name begins with ``prefix``."""
    return [f"thread {thread.name} in {where_is(thread.ident)}" for thread in thread_named(prefix)]


def request_line(request: ActiveRequest) -> str:
    """Describe one storage request in progress."""
    end = "" if request.byte_end is None else request.byte_end
    return (
        f"request: {request.url} bytes {request.byte_start}-{end}, attempt {request.attempt}, "
        f"{request.num_bytes_received} bytes received, for {request.age_s:.1f} s"
    )


def _waits_for(now: PipelineStatus) -> str:
    if now.closed or now.batch >= now.num_batches:
        return "the epoch is over"
    if now.batch >= now.frontier:
        return "waits for a fetch"
    if now.batch < now.num_built:
        return "is built"
    return "is being built" if now.batch < now.num_started else "can be built"


def _unit_line(unit: Unit) -> str:
    wanted, now_s = unit.wanted, time.monotonic()
    begun = f"begun {now_s - unit.begun_at_s:.1f} s ago" if unit.begun_at_s else "waits for a fetch thread"
    return (
        f"fetch: {redact(wanted.url)} bytes {wanted.byte_start}-{wanted.byte_end}, requested "
        f"{now_s - unit.asked_at_s:.1f} s ago, {begun}"
    )
