"""Divide the training thread's time by what it was spent on, and say what a perfect loader would save at most."""

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
"""Numbers that say what the thread did inside the loader, and what each means, in words."""
REST = "hands over, and the rest"
OWN = "your step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """How the training thread's time was spent between the first batch of an iteration and the last.

    Attributes:
        steps: Number of batches.
        step_s: Seconds per batch.
        by_cause: Seconds per batch, by words of ``CAUSES``, ``REST`` and ``OWN``.
        share: The part of the step that was spent inside the loader: what a perfect one would save, if it changed
            nothing else. 0 before the second batch.
    """

    steps: int
    step_s: float
    by_cause: Mapping[str, float]
    share: float


def waits(now: Mapping[str, float], before: Mapping[str, float] | None = None) -> Waits:
    """Return how time was spent since ``before``, or since the loader was made, by ``loader.metrics()``.

    The first batches of iterations do not count: a step does not wait for them. Nor do steps of less than a batch.
    """

    def spent(name: str) -> float:
        return max(0.0, now.get(name, 0.0) - (before or {}).get(name, 0.0))

    steps = int(spent("batches"))
    inside_s, own_s = max(0.0, spent("in_loader_s") - spent("first_batch_s")), spent("consumer_s")
    left_s = inside_s
    by_cause: dict[str, float] = {}
    # What belongs to first batches is taken off: their waits, as far as these are known apart, off waits alone.
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
