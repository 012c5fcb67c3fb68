"""Provide the base of the orders of endless mixtures: sources, weights by time, and where weights may still change."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import zip_longest
from typing import Any, Self

from streaming.errors import ConfigError
from streaming.order.mixing.passes import Sources, Weights
from streaming.order.plan.order import ENDLESS, LEAST_STRETCH, OrderSettings
from streaming.order.plan.schedule import checked_weights
from streaming.types import Int64Array


class EndlessOrder(ABC):
    """Order an endless mixture, and track how far it is planned. It is a single pass, number 0, without an end.

    Thread-safe; ``append`` only if a ``lock`` is given. Planned positions never change: weights are only appended after
    them.

    ``lock`` guards ``schedule``, ``_frontier`` and everything that ``_weigh`` computes.

    Args:
        sources: The sources.
        schedule: Weights by time, counted in samples of one lane: L times as many over all lanes. The first apply from
            0 on. A source that no entry names has no share.
        lock: A ``threading.RLock``, needed if one thread appends weights while another plans.

    Attributes:
        schedule: Weights by time, including appended ones.

    Raises:
        ConfigError: The weights are invalid.
    """

    is_endless = True
    samples_per_pass = ENDLESS
    mixed_after = ENDLESS  # not known

    def __init__(
        self, sources: Sources, schedule: Sequence[Weights], *, lock: AbstractContextManager[Any] | None = None
    ) -> None:
        self.sources, self.settings, self.chunk_samples = sources, sources.settings, sources.chunk_samples
        self.schedule = checked_schedule(sources.every_name, schedule)
        self._frontier = 0
        self._lock = lock or nullcontext()
        self._weigh()

    @abstractmethod
    def _weigh(self) -> None:
        """Recompute everything that depends on the schedule, which has changed only beyond the frontier."""

    def of_pass(self, number: int) -> Self:
        """Return the order itself: there is one pass.

        Raises:
            ConfigError: ``number`` is not 0.
        """
        if number:
            raise ConfigError(f"a mixture without end has one pass, number 0; got {number}")
        return self

    def apart(self) -> Self:
        """Return the same order with nothing planned: it shares the layout caches, and its weights may differ later."""
        made = copy.copy(self)
        made._frontier = 0
        return made

    def under(self, settings: OrderSettings) -> Self:
        """Return the same mixture under other settings."""
        return type(self)(self.sources.under(settings), self.schedule)

    @property
    def stretch(self) -> int:
        """See ``Orders``."""
        return max(2 * self.settings.window, LEAST_STRETCH)

    def lane_size(self, lane: int) -> int:  # noqa: ARG002  all are the same
        """See ``Order``."""
        return ENDLESS // self.settings.lanes

    @abstractmethod
    def drawn_before(self, row: int) -> Int64Array:
        """Count the samples of each source in the first ``row`` rows, int64 [``Sources.every_name``]."""

    @property
    @abstractmethod
    def known_from(self) -> int:
        """A time, in samples of a lane, from which no position needs an absent source; not necessarily the earliest."""

    def check_from(self, place: int) -> None:
        """Check that no lane position from ``place`` on needs an absent source.

        Raises:
            StateError: One does; the message names the row from which none does.
        """
        self.lane_samples(0, place, place + 1)  # later positions need no source that this one does not

    @abstractmethod
    def free_pass(self, name: str) -> int:
        """Return the first pass over a source without a planned sample; it and later passes may have more chunks."""

    def chunks_before(self, chunk_id: int) -> Iterator[int]:
        """See ``Order``."""
        return self.sources.chunks_before(chunk_id)

    # --- weights that change ---

    def settle(self, place: int) -> None:
        """Move the frontier beyond everything that positions before ``place`` depend on, in every lane."""
        for lane in range(self.settings.lanes if place else 0):
            self.lane_samples(lane, max(place - 2 * self.settings.window - 1, 0), place)

    def first_free_row(self, row: int) -> int:
        """Return the first row from which other weights may apply without changing rows before ``row``.

        It comes some chunks after ``row``, because the window mixes neighboring rows and chunks are laid whole.
        """
        lanes = self.settings.lanes
        self.settle(-(-row // lanes))
        return max(self.frontier * lanes, row)

    @abstractmethod
    def lane_samples(self, lane: int, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        """See ``Order``."""

    @property
    def borders(self) -> tuple[int, ...]:
        """See ``Orders``."""
        return tuple(entry.start * self.settings.lanes for entry in self.schedule[1:])

    @property
    def frontier(self) -> int:
        """The first time, in samples of a lane, from which nothing is planned: other weights may still apply."""
        with self._lock:
            # It only grows: a planned position stays planned.
            return self._frontier

    def append(self, *weights: Weights) -> None:
        """Apply other weights from a time on, replacing those scheduled for then or later.

        Raises:
            ConfigError: Something is already planned there, or the weights are invalid.
        """
        with self._lock:
            # Check and change are one step, so the frontier cannot pass between them and no planned position changes.
            start = weights[0].start
            self._check_free(start)
            self.reschedule((*(entry for entry in self.schedule if entry.start < start), *weights))

    def reschedule(self, schedule: Sequence[Weights]) -> None:
        """Replace the schedule with one that is equal up to the frontier.

        Raises:
            ConfigError: It is not, or the weights are invalid.
        """
        made = checked_schedule(self.sources.every_name, schedule)
        with self._lock:
            pairs = zip_longest(self.schedule, made)
            changed = [entry.start for pair in pairs if not _are_equal(*pair) for entry in pair if entry is not None]
            if not changed:
                return
            self._check_free(min(changed))
            # No position stamped at or after the start has been returned, and earlier positions do not depend on it.
            self.schedule = made
            self._weigh()

    def _check_free(self, start: int) -> None:
        if start < self.frontier:
            raise ConfigError(
                f"weights from {start} on: planned up to {self.frontier}; give a start that is not before"
            )


def _are_equal(one: Weights | None, other: Weights | None) -> bool:
    return (
        one is not None and other is not None and (one.start, dict(one.weights)) == (other.start, dict(other.weights))
    )


def checked_schedule(names: Sequence[str], schedule: Sequence[Weights]) -> tuple[Weights, ...]:
    """Validate and return weights by time; of several entries at one time, keep the last.

    Raises:
        ConfigError: The first do not apply from 0 on, times decrease, or an unknown source is named.
    """
    kept: list[Weights] = []
    for entry in schedule:
        unknown = sorted(set(entry.weights) - set(names))
        if unknown:
            raise ConfigError(f"weights: {', '.join(map(repr, unknown))}: no such source, got {', '.join(names)}")
        checked_weights(entry.weights)
        if kept and entry.start < kept[-1].start:
            raise ConfigError(f"weights: expected ascending starts, got {entry.start} after {kept[-1].start}")
        if kept and entry.start == kept[-1].start:
            kept.pop()
        kept.append(entry)
    if not kept or kept[0].start != 0:
        raise ConfigError("weights: the first must apply from 0 on")
    return tuple(kept)
