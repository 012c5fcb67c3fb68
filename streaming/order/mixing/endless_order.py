"""Share what the orders of endless mixtures have: sources, weights by time, and where these may still change."""

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
    """Track what is drawn from each source by time, and how far it is planned. A single pass, number 0, without an end.

    Thread-safe except ``append``, which is thread-safe with a ``lock``. What has been planned never changes: weights
    are only appended after it.

    Args:
        sources: The sources.
        schedule: Weights by time, counted in samples of one lane: L times as many over all lanes. The first apply from
            0 on; a source that is not named has no share.
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
        """Recompute what depends on the schedule, which has changed only beyond the frontier."""

    def of_pass(self, number: int) -> Self:
        """Return the order itself: there is one pass.

        Raises:
            ConfigError: Another pass than 0 is asked for.
        """
        if number:
            raise ConfigError(f"a mixture without end has one pass, number 0; got {number}")
        return self

    def apart(self) -> Self:
        """Return the same order with nothing planned: it shares what is laid, and may get other weights than this."""
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
        """Count the samples of each source among the first ``row``, over all lanes, int64 [``Sources.every_name``]."""

    @property
    @abstractmethod
    def known_from(self) -> int:
        """A time, in samples of a lane, from which no position needs an absent source; not necessarily the first."""

    def check_from(self, place: int) -> None:
        """Check that no lane position from ``place`` on needs an absent source.

        Raises:
            StateError: One does; the message says from which row none does.
        """
        self.lane_samples(0, place, place + 1)  # later positions need no source that this one does not

    @abstractmethod
    def free_pass(self, name: str) -> int:
        """Return the first pass over a source of which nothing is planned; it and later ones may have more chunks."""

    def chunks_before(self, chunk_id: int) -> Iterator[int]:
        """See ``Order``."""
        return self.sources.chunks_before(chunk_id)

    # --- weights that change ---

    def settle(self, place: int) -> None:
        """Move the frontier beyond everything that positions before ``place`` depend on, in every lane."""
        for lane in range(self.settings.lanes if place else 0):
            self.lane_samples(lane, max(place - 2 * self.settings.window - 1, 0), place)

    def first_free_row(self, row: int) -> int:
        """Return the first row from which other weights may apply if rows before ``row`` are to stay as they are.

        It is some chunks after ``row``, because the window mixes neighboring rows and chunks are used whole.
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
            # Grows only: what was below it once stays planned.
            return self._frontier

    def append(self, *weights: Weights) -> None:
        """Apply other weights from a time on, in place of those scheduled for then or later.

        Raises:
            ConfigError: Something is already planned there, or the weights are invalid.
        """
        with self._lock:
            # Nothing planned is touched: check and change are one step, and the frontier cannot pass between them.
            start = weights[0].start
            self._check_free(start)
            self.reschedule((*(entry for entry in self.schedule if entry.start < start), *weights))

    def reschedule(self, schedule: Sequence[Weights]) -> None:
        """Replace the schedule by one that is the same up to the frontier.

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
            # Nothing stamped at or after the start has been handed out, and what comes before does not depend on it.
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
    """Validate and return weights by time; of several at one time, the last.

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
