"""Account for the batches between a loader that runs ahead and the training that consumes them."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any, Protocol

from streaming.common.counters import Metrics
from streaming.errors import ConfigError
from streaming.run.epochs.iterator import Batches


class BatchAccount(Protocol):
    """Track the consumer's position while the loader is ahead of it.

    Attributes:
        metrics: Counts the work on batches: the loader's own metrics, if it is one of ours.
    """

    metrics: Metrics

    def pulled(self) -> None:
        """Note that the loader has delivered a batch."""

    def handed_out(self) -> None:
        """Note that the consumer gets the oldest batch held back.

        Raises:
            IteratorEndedError: The loader was moved or closed meanwhile.
        """

    def hold_back(self, change: int) -> None:
        """See ``Batches.hold_back``; on behalf of a wrapper that keeps what the consumer got.

        Raises:
            ConfigError: The loader is not one of ours.
        """


class HeldBack:
    """Report the batches held back to our own loader's iterator, so that the loader knows the consumer's position."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self.metrics = batches.metrics

    def pulled(self) -> None:
        """See ``BatchAccount``."""
        self._batches.hold_back(1)

    def handed_out(self) -> None:
        """See ``BatchAccount``."""
        self._batches.hold_back(-1)

    def hold_back(self, change: int) -> None:
        """See ``BatchAccount``."""
        self._batches.hold_back(change)


class Noted:
    """The state of another library's loader after each batch.

    Attributes:
        state: Its ``state_dict()`` at the last delivered batch; None: it has none.
        epoch: Its epoch at that time; None: it has none.
        metrics: Numbers that are not read.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.metrics = Metrics()
        self._ahead: deque[tuple[Any, Any]] = deque()
        self.state, self.epoch = self._now()

    def pulled(self) -> None:
        """See ``BatchAccount``."""
        self._ahead.append(self._now())

    def handed_out(self) -> None:
        """See ``BatchAccount``."""
        self.state, self.epoch = self._ahead.popleft()

    def hold_back(self, change: int) -> None:  # noqa: ARG002  as those of ours have it
        """See ``BatchAccount``."""
        raise ConfigError(
            f"hold_back: this DevicePrefetcher copies the batches of a {type(self._loader).__name__}, whose position "
            "nobody can hold back; iterate prefetcher.with_state(), which yields each batch with the state after it"
        )

    def seed(self, seed: Any) -> None:
        """Note a new seed, set on the loader while it was ahead."""
        for state in (self.state, *(state for state, _ in self._ahead)):
            if state is not None and "next_seed" in state:
                state["next_seed"] = seed

    def _now(self) -> tuple[Any, Any]:
        loader = self._loader
        state = copy.deepcopy(loader.state_dict()) if hasattr(loader, "state_dict") else None
        return state, getattr(loader, "epoch", None)
