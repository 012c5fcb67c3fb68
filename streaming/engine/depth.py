"""How many batches may be built ahead: as many as were asked for, and as fit beside those that are with the user."""

from __future__ import annotations

from typing import Any

from streaming.batches.build import size_of

_WITH_USER = 2
"""Batches that a loop holds in the usual case: while it asks for the next one, the last one is still in use."""


class Depth:
    """A bound that follows the largest batch seen. For use under the caller's lock.

    Args:
        most: Batches that may be built but not handed out.
        batch_bytes: Bound on these, in bytes; one is always allowed.
        num_builders: Threads that build at the same time.

    Attributes:
        now: The bound at this moment; 1 until the first batch says how large they are.
    """

    def __init__(self, most: int, batch_bytes: int, num_builders: int) -> None:
        self._most = most
        self._batch_bytes = batch_bytes
        self._num_builders = num_builders
        self._largest_bytes = 0
        self.now = 1

    def saw(self, batch: Any, *, is_local: bool) -> None:
        """Take note of a batch that was built, here or (not ``is_local``) in another process.

        One that is being built takes its room twice: as samples, and as the batch that is made of them. In this process
        it does so three times: the C library keeps memory that a thread has freed.
        """
        self._largest_bytes = max(self._largest_bytes, size_of(batch))
        fitting = self._batch_bytes // max(1, self._largest_bytes) - _WITH_USER
        more = 2 if is_local else 1
        fitting = max(fitting // (1 + more), fitting - more * self._num_builders)
        self.now = max(1, min(self._most, fitting))
