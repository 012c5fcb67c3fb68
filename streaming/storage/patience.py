"""How long to wait for a byte before asking a second time: a multiple of what answers took lately."""

from __future__ import annotations

import threading
from collections import deque

_KEPT = 128
_FEW = 8
"""Answers from which on their times say something."""
_FACTOR = 3.0
"""How much longer than the quantile: then ordinary variation seldom brings a second request."""


class Patience:
    """The longest silences of recent answers, and the bound that follows from them. Thread-safe.

    Args:
        quantile: Of the silences, in (0, 1].
        least_s: Never less than this.
        unknown_s: While there are too few answers to go by.
    """

    def __init__(self, *, quantile: float, least_s: float, unknown_s: float) -> None:
        self._quantile = quantile
        self._least_s = least_s
        self._unknown_s = max(least_s, unknown_s)
        self._lock = threading.Lock()
        self._silences_s: deque[float] = deque(maxlen=_KEPT)

    def note(self, silence_s: float) -> None:
        """An answer was silent for so long at most."""
        with self._lock:
            self._silences_s.append(silence_s)

    @property
    def limit_s(self) -> float:
        """Silence from which on a request counts as stalled."""
        with self._lock:
            silences_s = sorted(self._silences_s)
        if len(silences_s) < _FEW:
            return self._unknown_s
        place = min(len(silences_s) - 1, int(self._quantile * len(silences_s)))
        return max(self._least_s, _FACTOR * silences_s[place])
