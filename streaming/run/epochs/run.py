"""Produce the batches of an epoch: ``Run``, ``RunOver``, which wraps one, and ``Stage``, which wraps many runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

from streaming.run.epochs.position import Place


class Run(Protocol):
    """The remaining batches of one epoch, produced in the background."""

    def __next__(self) -> Any:
        """Return the next batch."""

    def close(self) -> None:
        """Stop producing."""

    def describe(self) -> str:
        """Describe the current activity, for reports."""


class RunOver:
    """Base class of runs that wrap another run: it closes and describes that run; subclasses transform its batches."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def close(self) -> None:
        """Stop producing."""
        self._run.close()

    def describe(self) -> str:
        """Describe the current activity, for reports."""
        return self._run.describe()


class Stage(Protocol):
    """A part of the way from what a rank reads to what it hands out, over many runs. For one thread."""

    def run(self, read: Callable[[], Run], place: Place) -> Run:
        """Return batches from ``place`` on; ``read`` begins the run below, if this rank needs one."""

    def page_lock(self, locker: Any) -> Any:
        """Return what page-locks the batches of the run below, where this stage makes none itself; None: nothing."""

    def drop(self) -> None:
        """Drop the connections to other ranks; the next run makes new ones."""


def staged(stages: Iterable[Stage], read: Callable[[], Run], place: Place) -> Run:
    """Return the run that ``read`` begins, through stages of which each knows only the run below it."""
    for stage in stages:
        read = partial(stage.run, read, place)
    return read()
