"""Decide from measurements which stage limits, why, and which settings would help. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shard_tools.look.bench.decoding import Decoding
from shard_tools.look.bench.delivery import LoopRun
from shard_tools.look.bench.requests import Probe
from streaming.common.arguments import format_bytes

Limit = Literal["latency", "bandwidth", "errors", "decode", "delivery", "memory"]
ERROR_SHARE = 0.04
"""Share of failed requests above which failures matter: stores refuse 2 % on a good day (docs/design/0008)."""
_GAIN = 1.5
"""Gain above which four times as many (or four times larger) requests show that the resource is not used up."""
_OVERHEAD = 4
"""Factor by which decoding alone must exceed delivery to show that something else takes most of the time."""
_IS_WAITING = 0.25
"""Share of its time that a loop must wait for bytes before the store is to blame."""
_SMALL_CHUNK_BYTES = 2 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All measurements.

    Attributes:
        probes: Reads: small ones alone, chunks at growing concurrency, then small and large ones at the best one.
        decoding: Decoding alone; None: nothing to decode.
        delivery: The loop with the given settings.
        sample_bytes: Mean bytes per sample.
        chunk_bytes: Bytes that a loader reads per request.
        is_local: Whether the shards are local files.
    """

    probes: Sequence[Probe]
    decoding: Decoding | None
    delivery: LoopRun
    sample_bytes: float
    chunk_bytes: int
    is_local: bool

    @property
    def sweep(self) -> list[Probe]:
        """Reads of one size at growing concurrency."""
        return list(self.probes[1:-2])

    @property
    def best(self) -> Probe:
        """The fastest read of the sweep."""
        return max(self.sweep, key=lambda one: one.bytes_per_s)

    @property
    def most_bytes_per_s(self) -> float:
        """The highest rate measured for reads of at least a chunk."""
        return max(self.best.bytes_per_s, self.probes[-1].bytes_per_s)

    @property
    def error_share(self) -> float:
        """Share of requests that failed and were repeated."""
        failed = sum(one.retries for one in self.probes) + self.delivery.retries
        answered = sum(one.num_reads for one in self.probes) + max(0, self.delivery.requests - self.delivery.retries)
        return failed / max(1, failed + answered)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Name which stage limits, and why, in words."""

    limit: Limit
    why: str


def judge(found: Measured) -> Verdict:
    """Decide which stage limits."""
    if found.delivery.refused:
        return Verdict(limit="memory", why=f"the loader does not start: {found.delivery.refused}")
    waits, builds = found.delivery.fetch_share, found.delivery.build_share
    if waits >= max(_IS_WAITING, builds):
        return _store(found)
    said = f"the loop waits {builds:.0%} of its time for batches to be built, and {waits:.0%} for bytes"
    rate = found.delivery.samples_per_s
    if found.decoding is not None and builds >= _IS_WAITING:
        alone = max(found.decoding.threads, found.decoding.processes or 0.0)
        if alone < _OVERHEAD * rate:
            return Verdict(
                limit="decode",
                why=f"{said}; decoding alone, nothing read, does {alone:,.0f} samples/s on {found.decoding.num} cores",
            )
        said += f"; decoding alone would do {alone:,.0f} samples/s"
    return Verdict(
        limit="delivery",
        why=f"{said}: putting batches together and handing them over takes the rest, at {rate:,.0f} samples/s",
    )


def _store(found: Measured) -> Verdict:
    said = f"the loop waits {found.delivery.fetch_share:.0%} of its time for bytes"
    if found.error_share >= ERROR_SHARE:
        return Verdict(
            limit="errors",
            why=f"{said}, and {found.error_share:.0%} of the requests fail and are repeated, later and fewer at a time",
        )
    best, room = found.best, found.delivery.chunks_bytes // max(1, found.chunk_bytes)
    by_latency = _latency(found)
    if by_latency and 0 < room < best.at_once / 2:
        return Verdict(
            limit="memory",
            why=f"{said}; {best.at_once} requests at a time bring {format_bytes(best.bytes_per_s)}/s, but the memory "
            f"for chunks, {format_bytes(found.delivery.chunks_bytes)}, holds {room} chunks of "
            f"{format_bytes(found.chunk_bytes)}",
        )
    if by_latency:
        return Verdict(limit="latency", why=f"{said}; {by_latency}")
    return Verdict(
        limit="bandwidth",
        why=f"{said}; neither more nor larger requests bring more than {format_bytes(found.most_bytes_per_s)}/s "
        f"({len(found.sweep)} numbers of requests at a time tried, up to {found.sweep[-1].at_once})",
    )


def _latency(found: Measured) -> str:
    """Explain why round trips limit; "": they do not."""
    sweep, small, large, best = found.sweep, found.probes[-2], found.probes[-1], found.best
    first = found.probes[0]
    trip = f"a request takes {first.read_s * 1000:,.0f} ms however small it is"
    if len(sweep) > 1 and sweep[-1] is best and best.bytes_per_s > _GAIN * sweep[-2].bytes_per_s:
        gain = best.bytes_per_s / sweep[-2].bytes_per_s
        return f"{trip}, and {best.at_once} at a time instead of {sweep[-2].at_once} bring {gain:.1f} times as much"
    is_larger = large.size_bytes > 2 * best.size_bytes and found.chunk_bytes < large.size_bytes
    if is_larger and large.bytes_per_s > _GAIN * best.bytes_per_s:
        gain = large.bytes_per_s / best.bytes_per_s
        return f"{trip}, and requests of {format_bytes(large.size_bytes)} bring {gain:.1f} times as much as chunks"
    rates = [one.bytes_per_s / max(1, one.size_bytes) for one in (small, best)]
    if best.size_bytes > 2 * small.size_bytes and rates[0] < _GAIN * rates[1]:
        return f"{trip}, and the store answers {rates[1]:,.0f} per second, small ones or chunks"
    return ""


def candidates(limit: Limit, settings: Mapping[str, Any], *, cores: int, memory_bytes: int) -> list[dict[str, Any]]:
    """Return other loader settings to try, which may be faster given what limits.

    Args:
        limit: The stage that limits.
        settings: The settings that were measured.
        cores: Cores of this machine.
        memory_bytes: Upper bound of a loader's memory limit.
    """
    if limit == "memory":
        limits = [min(memory_bytes, settings["memory_limit"] * factor) for factor in (4, 64)]
        return [{**settings, "memory_limit": one} for one in dict.fromkeys(limits) if one > settings["memory_limit"]]
    if limit in {"decode", "delivery"}:
        others = {"num_workers": cores} if cores > 1 else {}
        return [{**settings, **one} for one in (others, {"num_threads": cores} if cores > 4 else {}) if one]
    return []


def convert_advice(found: Measured, limit: Limit) -> dict[str, Any]:
    """Return options of the next ``convert`` or ``reshard`` that would help."""
    if limit in {"latency", "errors"} and found.chunk_bytes < _SMALL_CHUNK_BYTES:
        return {"max_bytes": "256MB"}  # a chunk ends with its shard
    return {}
