"""Ranks of one process, each a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch.testing._internal.distributed import fake_pg  # noqa: F401  (the backend of one process)

NUM_RANKS = 64


class ThreadPeers:
    """Ranks of one process; a thread's name says which."""

    def __init__(self, world_size: int = NUM_RANKS) -> None:
        self.world_size = world_size
        self.left: dict[str, bytes] = {}
        self._turns: dict[tuple[int, str], int] = {}
        self._changed = threading.Condition()

    @property
    def rank(self) -> int:
        return int(threading.current_thread().name.split()[1])

    def turn(self, name: str) -> int:
        key = (self.rank, name)
        self._turns[key] = self._turns.get(key, 0) + 1
        return self._turns[key]

    def leave(self, name: str, data: bytes) -> None:
        with self._changed:
            self.left[name] = data
            self._changed.notify_all()

    def find(self, name: str, timeout_s: float) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: name in self.left, timeout_s)
            return self.left.get(name)


def on_ranks(call: Callable[[], Any], num_ranks: int = NUM_RANKS) -> list[Any]:
    """What ``call`` returns or raises on each rank; all at once."""
    together = threading.Barrier(num_ranks)

    def one(rank: int) -> Any:
        threading.current_thread().name = f"rank {rank}"
        together.wait(60)
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(num_ranks) as ranks:
        return list(ranks.map(one, range(num_ranks)))
