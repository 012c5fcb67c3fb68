"""Continue an epoch with another plan: where the batch size changes, and where the weights of a mixture do.

The machinery of the loop is kept. Only the plan, and the batches built ahead, are given up. That loses nothing,
because batches are a function of the plan.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, Self, TypeAlias

from streaming.order.plan.plan import Plan
from streaming.order.plan.schedule import value_at
from streaming.order.plan.sizes import Sizes
from streaming.run.epochs.position import Place
from streaming.run.epochs.run import Run, RunOver

Begin: TypeAlias = Callable[[], tuple[Run, Plan]]
"""Begins to read. Returns the run, and the plan that it follows."""
_log = logging.getLogger(__name__)


class SegmentedRun(RunOver):
    """Deliver the batches of an epoch, segment after segment. For one thread, except ``describe``.

    A segment ends with the epoch, or where the size of batches changes. Then another plan begins, as at a resume: the
    machinery is kept, and the contents of the window are looked up again.

    Args:
        begin: Starts producing the batches of the segment that begins at a place. Returns the run, and its plan.
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


class NotedRun(RunOver):
    """Log, as batches are delivered, what the rows are from certain rows of the run on. For one thread.

    Args:
        run: Produces the batches of the rest of an epoch.
        row: Row of the run at which the first of them begins.
        sizes: Batch sizes of the run.
        changes: See ``RowKind.changes``.
    """

    def __init__(self, run: Run, row: int, sizes: Sizes, changes: Sequence[tuple[int, str]]) -> None:
        super().__init__(run)
        self._row, self._sizes = row, sizes
        self._was = value_at(changes, row)
        self._coming = deque(change for change in changes if change[0] > row)

    def __next__(self) -> Any:
        """Return the next batch."""
        batch = next(self._run)
        while self._coming and self._coming[0][0] <= self._row:
            _, now = self._coming.popleft()
            _log.info("from row %d batches have %s; before they had %s", self._row, now, self._was)
            self._was = now
        self._row += self._sizes.at(self._row)
        return batch


def what_changes(changes: Sequence[tuple[int, str]], row: int) -> str:
    """Describe what the rows are at a row of the run, and the changes that follow it; see ``RowKind.changes``."""
    if not changes:
        return ""
    coming = [f"{words} from row {at:,} on" for at, words in changes if at > row]
    return ", ".join([value_at(changes, row), *coming])


class PausedRun(Protocol):
    """A run that delivers no batch while it is paused.

    Attributes:
        place: The place after the last delivered batch.
    """

    @property
    def place(self) -> Place: ...  # noqa: D102

    def prepared(self, plan_anew: Callable[[], Begin]) -> Begin | None:
        """Return a function that reads the batches after ``place`` again by another plan; None if there are none."""

    def replace(self, begin: Begin | None) -> None:
        """Give up the batches that were not delivered, and deliver those that ``begin`` begins to read."""


class NoRun:
    """Represent the absence of a run."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def prepared(self, plan_anew: Callable[[], Begin]) -> Begin | None:
        """See ``PausedRun``."""

    def replace(self, begin: Begin | None) -> None:
        """See ``PausedRun``."""


class ReplannedRun(RunOver):
    """Deliver the batches of a plan. The batches that were not delivered can be planned again.

    One thread requests batches, another one may pause the run and plan again. Any thread may close it. ``_asked``
    guards ``_run``, ``_plan`` and ``_num_taken``.

    Args:
        run: Produces the batches.
        plan: Their plan.
    """

    def __init__(self, run: Run, plan: Plan) -> None:
        super().__init__(run)
        self._plan, self._num_taken = plan, 0
        self._asked = threading.Lock()
        self.is_closed = False

    def __next__(self) -> Any:
        """Return the next batch."""
        with self._asked:
            batch = next(self._run)
            # Invariant: this number of batches of the plan was delivered, in its order.
            self._num_taken += 1
        return batch

    @property
    def place(self) -> Place:
        """See ``PausedRun``."""
        plan = self._plan
        seen = min(plan.start + self._num_taken * plan.global_batch_size, plan.num_samples)
        return Place(epoch=plan.epoch, samples_seen=seen)

    @contextmanager
    def held(self) -> Iterator[Self]:
        """Deliver nothing until the ``with`` block ends."""
        with self._asked:
            yield self

    def prepared(self, plan_anew: Callable[[], Begin]) -> Begin | None:
        """See ``PausedRun``."""
        return plan_anew() if self._num_taken < self._plan.num_batches else None

    def replace(self, begin: Begin | None) -> None:
        """See ``PausedRun``."""
        if begin is None:
            return
        self._run.close()
        self._run, self._plan = begin()
        self._num_taken = 0
        if self.is_closed:  # by another thread, which may have closed the earlier run
            self._run.close()

    def close(self) -> None:
        """Stop producing."""
        self.is_closed = True
        super().close()
