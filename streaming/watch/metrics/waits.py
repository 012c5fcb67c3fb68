"""Divide the training thread's time by cause, and compute the share that a perfect loader would save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CAUSES = {
    "wait_for_fetch_s": "waits for bytes",
    "wait_for_build_s": "waits for decoding",
    "wait_for_batch_s": "waits for readers",
    "exchange_s": "exchanges packs",
    "build_in_consumer_s": "builds batches itself",
}
"""Numbers that describe the thread's time inside the loader, and a description of each."""
REST = "hands over, and the rest"
OWN = "your step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """The training thread's time between the first batch of an iteration and the last, by cause.

    Attributes:
        steps: Number of batches.
        step_s: Seconds per batch.
        by_cause: Seconds per batch, by the descriptions in ``CAUSES``, ``REST`` and ``OWN``.
        share: The share of the step spent inside the loader, which a perfect loader would save if it changed nothing
            else. 0 before the second batch.
    """

    steps: int
    step_s: float
    by_cause: Mapping[str, float]
    share: float


def waits(now: Mapping[str, float], before: Mapping[str, float] | None = None) -> Waits:
    """Return the time by cause since ``before``, or since the loader was made, given ``loader.metrics()``.

    The first batches of iterations do not count, because no step waits for them. Incomplete steps do not count, either.
    """

    def spent(name: str) -> float:
        return max(0.0, now.get(name, 0.0) - (before or {}).get(name, 0.0))

    steps = int(spent("batches"))
    inside_s, own_s = max(0.0, spent("in_loader_s") - spent("first_batch_s")), spent("consumer_s")
    left_s = inside_s
    by_cause: dict[str, float] = {}
    # Subtract the time of first batches; if their waits are known separately, subtract those from waits alone.
    first_s, known = spent("first_batch_s"), "first_batch_wait_s" in now
    first_wait_s = min(first_s, spent("first_batch_wait_s")) if known else first_s
    first = {True: first_wait_s, False: first_s - first_wait_s}
    for name, words in CAUSES.items():
        cause_s, is_wait = spent(name), name.startswith("wait_")
        gone_s = min(first[is_wait], cause_s)
        first[is_wait] -= gone_s
        by_cause[words] = min(left_s, cause_s - gone_s)
        left_s -= by_cause[words]
    by_cause[REST], by_cause[OWN] = left_s, own_s
    whole_s = inside_s + own_s
    each = 1 / max(steps, 1)
    return Waits(
        steps=steps, step_s=whole_s * each, by_cause={words: one * each for words, one in by_cause.items()},
        share=inside_s / whole_s if whole_s else 0.0,
    )  # fmt: skip
