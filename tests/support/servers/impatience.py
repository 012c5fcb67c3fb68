"""Decide in a test, without the clock, when a silent answer gets a second request."""

from __future__ import annotations

from collections.abc import Callable

from streaming.storage import Storage
from streaming.storage.requests.adaptive_timeout import AdaptiveTimeout


class Impatience(AdaptiveTimeout):
    """Count every silence as too long while a condition holds, and none otherwise."""

    def __init__(self, holds: Callable[[], bool] = lambda: True) -> None:
        super().__init__(quantile=1, least_s=0, unknown_s=0)
        self._holds = holds

    @property
    def limit_s(self) -> float:
        return 0.0 if self._holds() else 3600.0


def make_impatient(storage: Storage, url: str, holds: Callable[[], bool] = lambda: True) -> None:
    """Let silent answers to requests for ``url`` get second requests while a condition holds, and at no other time."""
    patience = storage._store.traffic_of(url).patience
    patience.first = patience.later = Impatience(holds)
