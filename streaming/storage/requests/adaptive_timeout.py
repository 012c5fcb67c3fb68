"""Compute how long to wait for a byte before sending a second request: a multiple of recent waits."""

from __future__ import annotations

import threading
from collections import deque

_KEPT = 128
_FEW = 8
"""Minimum number of answers for meaningful times."""
_FACTOR = 2.0
"""Multiple of the quantile. Of 1,000 ordinary reads, 64 at once on 2 busy cores, about 10 then get a second request;
15 with 1.5, and 3 with 3. Under the faults of ``bench_faults.py`` the throughput is 0.97, 1.0 and 0.92 of that without
faults (21 November 2026, medians of 8 to 15 turns)."""


class AdaptiveTimeout:
    """Recent silences of one kind, and the limit derived from them. Thread-safe.

    ``_lock`` guards ``_silences_s`` and ``_limit_s``.

    Args:
        quantile: Quantile of the silences, in (0, 1].
        least_s: Minimum of the limit.
        unknown_s: The limit while there are too few silences.
    """

    def __init__(self, *, quantile: float, least_s: float, unknown_s: float) -> None:
        self._quantile = quantile
        self._least_s = least_s
        self._unknown_s = max(least_s, unknown_s)
        self._lock = threading.Lock()
        self._silences_s: deque[float] = deque(maxlen=_KEPT)
        self._limit_s: float | None = self._unknown_s

    def note(self, silence_s: float) -> None:
        """Record a silence of this kind."""
        with self._lock:
            # The limit follows from the recorded silences: it is computed again when next read.
            self._silences_s.append(silence_s)
            self._limit_s = None

    @property
    def limit_s(self) -> float:
        """The duration above which a silence is too long."""
        with self._lock:
            # _limit_s is None, or the limit for all silences recorded so far.
            if self._limit_s is None:
                self._limit_s = self._found_limit_s()
            return self._limit_s

    def _found_limit_s(self) -> float:
        silences_s = sorted(self._silences_s)
        if len(silences_s) < _FEW:
            return self._unknown_s
        place = min(len(silences_s) - 1, int(self._quantile * len(silences_s)))
        return max(self._least_s, _FACTOR * silences_s[place])


class Patience:
    """The limits on the silences of one store's answers.

    There are two kinds of silences, because the first is often ten times the second: a store looks up the object only
    once.

    Args:
        quantile, least_s, unknown_s: See :class:`AdaptiveTimeout`.

    Attributes:
        first: Silences before answers began.
        later: The longest silences within answers.
    """

    def __init__(self, *, quantile: float, least_s: float, unknown_s: float) -> None:
        self.first = AdaptiveTimeout(quantile=quantile, least_s=least_s, unknown_s=unknown_s)
        self.later = AdaptiveTimeout(quantile=quantile, least_s=least_s, unknown_s=unknown_s)
