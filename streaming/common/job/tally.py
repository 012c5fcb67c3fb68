"""Count over all ranks of a job: each adds when it has something to add; nobody waits for anybody.

Through the key-value store of torch.distributed, over a connection of its own with a short time-out: neither a rank
that is gone, nor one that waits in a collective, nor a store that does not answer stops the others.
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
"""Between two looks at what the others added: a thousand ranks ask the store 200 times a second."""

_log = logging.getLogger(__name__)


class Counters(Protocol):
    """What is used of ``torch.distributed.Store``."""

    def add(self, key: str, amount: int, /) -> int:
        """Count up; the new number."""

    def delete_key(self, key: str, /) -> bool:
        """Remove an entry."""


class Tally:
    """One number a round; the n-th round of a rank is the n-th of the others. For one thread.

    Args:
        store: Shared by the ranks.
        subject: What is counted: tallies of different subjects do not meet.
        rank: This one.
        ranks: All that take part.
        adds: Whether what this rank counts is added; a replica of another one only looks.
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
            self._store.delete_key(f"{self._home}/{turn - 2}")  # nobody is two rounds behind for long

    def total(self, own: int) -> int:
        """Sum what all ranks have counted in this round, as far as is known; ask where ``own`` or time went on.

        Args:
            own: What this rank has counted in this round.
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
    """Open a tally over torch.distributed; None where it is not set up, or numbers its ranks otherwise."""
    if not 1 < len(ranks) <= job_world_size():
        return None
    own, store = job_store("")
    if own != rank:
        return None  # a mesh that is played in one process, or of other processes
    store = store.clone() if hasattr(store, "clone") else store  # by torch 2.4 and later
    store.set_timeout(timedelta(seconds=_TIMEOUT_S))
    return Tally(store, subject, rank, ranks, adds=adds)
