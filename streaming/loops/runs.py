"""Continue an epoch with another plan: where the batch size changes, and where the weights of a mixture do.

The machinery of the loop is kept; only what was planned, and built ahead, is given up. That loses nothing, because
batches are a function of the plan.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from streaming.epochs.iterator import Run, RunOver
from streaming.epochs.position import Place
from streaming.plan.plan import Plan

_log = logging.getLogger(__name__)


class SegmentedRun(RunOver):
    """Hand out the batches of an epoch, segment after segment. For one thread, except ``describe``.

    A segment ends with the epoch, or where the size of batches changes. Then another plan begins after it, as at a
    resume: the machinery is kept, and the contents of the window are looked up again.

    Args:
        begin: Starts producing the batches of the segment that begins at a place; returns the run, and its plan.
        place: Place of the first batch.
        tells: Whether to log changes of the size.
    """

    def __init__(self, begin: Callable[[Place], tuple[Run, Plan]], place: Place, *, tells: bool) -> None:
        self._begin, self._tells = begin, tells
        run, self._plan = begin(place)
        super().__init__(run)
        self._num_left = self._plan.num_batches

    def __next__(self) -> Any:
        """Return the next batch."""
        if not self._num_left:
            self._run.close()
            was = self._plan
            behind = was.start + was.num_batches * was.global_batch_size
            self._run, self._plan = self._begin(Place(epoch=was.epoch, samples_seen=behind))
            self._num_left = self._plan.num_batches
            if self._tells:
                _log.info(
                    "from row %d batches have %d samples; before they had %d",
                    self._plan.first_row, self._plan.global_batch_size, was.global_batch_size,
                )  # fmt: skip
        self._num_left -= 1
        return next(self._run)


class ReplannedRun(RunOver):
    """Hand out the batches of a plan; what it has not handed out can be planned anew.

    One thread asks for batches, another one may hold the run and plan anew; any thread may close it.

    Args:
        run: Produces the batches.
        num_batches: Number of them.
        place: Place of the first batch.
        after: Returns the place after the batch that follows a place.
    """

    def __init__(self, run: Run, num_batches: int, place: Place, after: Callable[[Place], Place]) -> None:
        super().__init__(run)
        self._num_left, self._place, self._after = num_batches, place, after
        self._asked = threading.Lock()
        self._is_closed = False

    def __next__(self) -> Any:
        """Return the next batch."""
        with self._asked:
            batch = next(self._run)
            # Invariant: every batch before the place was handed out, and none from there on.
            self._place, self._num_left = self._after(self._place), self._num_left - 1
        return batch

    @property
    def is_over(self) -> bool:
        """Whether all batches of the plan have been handed out."""
        return self._num_left <= 0

    @contextmanager
    def held(self) -> Iterator[Place]:
        """Hand out nothing until the ``with`` block ends; yield the place after the last batch handed out."""
        with self._asked:
            yield self._place

    def replace(self, begin: Callable[[], Run]) -> None:
        """Give up the batches that were not handed out, and hand out those of another run; while it is held."""
        self._run.close()
        self._run = begin()
        if self._is_closed:  # by another thread, which may have closed the run before this one
            self._run.close()

    def close(self) -> None:
        """Stop producing."""
        self._is_closed = True
        super().close()
