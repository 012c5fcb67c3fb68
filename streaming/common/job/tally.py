"""Count over all ranks of a job: each rank adds when it has something to add, and no rank waits for another.

The ranks use the key-value store of torch.distributed, over a separate connection with a short time-out. So neither a
rank that is gone, nor one that waits in a collective, nor a store that does not answer stops the other ranks.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

from streaming.common.job.store import job_store, job_world_size

_TIMEOUT_S = 10.0
LOOK_S = 5.0
"""Interval between queries of the total: a thousand ranks query the store 200 times per second."""

_log = logging.getLogger(__name__)


class Counters(Protocol):
    """The part of ``torch.distributed.Store`` that is used."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter and return the new number."""

    def delete_key(self, key: str, /) -> bool:
        """Remove an entry."""


class Tally:
    """One number per round; the n-th round of a rank is matched with the n-th of the others. For one thread.

    Args:
        store: Shared by the ranks.
        subject: Name of the count; tallies of different subjects are independent.
        rank: This rank.
        ranks: All participants.
        adds: Whether the counts of this rank are added; a replica of another rank only reads the total.
    """

    def __init__(self, store: Counters, subject: str, rank: int, ranks: Sequence[int], *, adds: bool) -> None:
        digest = hashlib.sha256(json.dumps([subject, list(ranks)]).encode()).hexdigest()[:32]
        self._store: Counters | None = store
        self._home = f"shardstream/tally/{digest}"
        self._rank, self._adds, self._is_first = rank, adds, rank == ranks[0]
        self._round, self._own, self._total, self._look_at_s = "", 0, 0, 0.0

    def begin(self) -> None:
        """Begin the next round, at 0."""
        self._own = self._total = 0
        self._look_at_s = time.monotonic() + LOOK_S
        turn = self._count(f"{self._home}/turn/{self._rank}", 1)
        self._round = f"{self._home}/{turn}"
        if self._store is not None and self._is_first and turn > 2:
            self._store.delete_key(f"{self._home}/{turn - 2}")  # no rank is two rounds behind for long

    def total(self, own: int) -> int:
        """Return the known total of all ranks in this round; query the store if ``own`` changed or time has passed.

        Args:
            own: This rank's count in this round.
        """
        now_s = time.monotonic()
        if own != self._own or now_s >= self._look_at_s:
            added, self._own = (own - self._own) * self._adds, own
            self._look_at_s = now_s + LOOK_S
            self._total = self._count(self._round, added)
        return max(own, self._total)

    def _count(self, key: str, amount: int) -> int:
        if self._store is None:
            return 0
        try:
            return int(self._store.add(key, amount))
        except RuntimeError as error:  # torch.distributed.DistStoreError is one
            _log.warning("the job's store does not answer (%s): from now on this rank counts for itself", error)
            self._store = None
            return 0


def open_tally(subject: str, rank: int, ranks: Sequence[int], *, adds: bool) -> Tally | None:
    """Open a tally over torch.distributed; None if it is not initialized, or numbers its ranks differently."""
    if not 1 < len(ranks) <= job_world_size():
        return None
    own, store = job_store("")
    if own != rank:
        return None  # a mesh simulated in one process, or a mesh of other processes
    store = store.clone() if hasattr(store, "clone") else store  # by torch 2.4 and later
    store.set_timeout(timedelta(seconds=_TIMEOUT_S))
    return Tally(store, subject, rank, ranks, adds=adds)
