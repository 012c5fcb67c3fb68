"""A run whose batches change their size: the rest of an epoch as one plan for each size, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streaming.epochs.iterator import Run, RunOver
from streaming.epochs.position import Place


class RampedRun(RunOver):
    """Hand out the batches of an epoch in which their size changes. For one thread, but for ``describe``.

    At a row from which on batches have another size, the plan ends and another one begins behind it, as at a resume:
    the machinery stays, what the window holds is looked up again.

    Args:
        begin: Begins to produce batches of one size at a place; returns them, how many there are, and the place behind
            the last of them.
        place: Where the first one begins.
    """

    def __init__(self, begin: Callable[[Place], tuple[Run, int, Place]], place: Place) -> None:
        self._begin = begin
        run, self._left, self._behind = begin(place)
        super().__init__(run)

    def __next__(self) -> Any:
        """The next batch."""
        if not self._left:
            self._run.close()
            self._run, self._left, self._behind = self._begin(self._behind)
        self._left -= 1
        return next(self._run)
