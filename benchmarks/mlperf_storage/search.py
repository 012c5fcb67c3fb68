"""Find the shortest step at which the accelerator is busy for 90 % of the time. Pure: no clock, no loader.

The storage benchmark emulates an accelerator by a sleep for each step, and asks that it compute for 90 % of the time.
The shorter the step at which that holds, the more accelerators (or the faster ones) a loader can feed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Generator
from dataclasses import dataclass

GOAL = 0.90
PRECISION = 1.04
"""Two steps of which one reaches the goal and the other does not are as close as this."""
STRIDE = 2.0
"""Until there are two such steps."""
LEAST_S, MOST_S = 2e-4, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Some epochs with one step time: the part of the time computed, and CPU seconds of all processes for a batch."""

    step_s: float
    utilization: float
    cpu_s: float = 0.0
    whole_s: float = 0.0
    """Seconds for a batch, by the benchmark's own throughput: with the start of epochs."""

    @property
    def batches_per_s(self) -> float:
        """Batches a second from the second one of an epoch on, as utilization is defined."""
        return self.utilization / self.step_s if self.step_s else 0.0


def search(*, goal: float = GOAL, confirmations: int = 3) -> Generator[float, Trial, Trial]:
    """Yield step times to try, take what each gave, and return the fastest that holds.

    Raises:
        ValueError: No step is long enough.
    """
    found = yield 0.0
    step_s = min(max(found.whole_s, LEAST_S), MOST_S)
    reached_s = missed_s = 0.0
    while not (reached_s and missed_s) or reached_s / missed_s > PRECISION:
        found = yield step_s
        if found.utilization >= goal:
            reached_s = step_s
            if step_s <= LEAST_S:
                break
        else:
            missed_s = step_s
            if step_s >= MOST_S:
                raise ValueError(f"{found.utilization:.0%} with a step of {MOST_S:.0f} s")
        if not reached_s:
            step_s *= STRIDE
        elif not missed_s:
            step_s /= STRIDE
        else:
            step_s = math.sqrt(reached_s * missed_s)
        step_s = min(max(step_s, LEAST_S), MOST_S)
    return (yield from _confirmed(reached_s, goal, confirmations))


def _confirmed(step_s: float, goal: float, confirmations: int) -> Generator[float, Trial, Trial]:
    """Try again: what was reached by luck is reached with a longer step."""
    while True:
        trials: list[Trial] = []
        while len(trials) < confirmations:
            trials.append((yield step_s))
        mean = Trial(
            step_s=step_s,
            utilization=statistics.fmean(one.utilization for one in trials),
            cpu_s=statistics.fmean(one.cpu_s for one in trials),
            whole_s=statistics.fmean(one.whole_s for one in trials),
        )
        if mean.utilization >= goal:
            return mean
        if step_s >= MOST_S:
            raise ValueError(f"{mean.utilization:.0%} with a step of {MOST_S:.0f} s")
        step_s = min(step_s * PRECISION, MOST_S)
