"""Read shards from beginning to end, a few pieces ahead, on threads that nobody has to wait for."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from streaming.engine.threads.jobs import JobThreads
from streaming.monitor import Monitor
from streaming.storage import Storage

PIECE_BYTES = 8 << 20
PIECES_AHEAD = 4
_STOP_S = 1.0
"""How long closing waits for requests under way; those that take longer end by themselves."""

_T = TypeVar("_T")


class StreamClosedError(Exception):
    """Nobody wants what is read any more."""


def piece_bytes_of(memory_limit_bytes: int) -> int:
    """Return the bytes of one request, such that all pieces in memory take a sixteenth of the limit.

    ``PIECES_AHEAD`` are under way or wait, one is being parsed; the parser holds up to three more: a copy of that one,
    what is left of the one before, and the two joined.
    """
    return max(64 << 10, min(PIECE_BYTES, memory_limit_bytes // 16 // (PIECES_AHEAD + 4)))


@dataclass(slots=True, eq=False)
class _Answer(Generic[_T]):
    """What a thread was asked for."""

    value: _T | None = None
    error: BaseException | None = None
    is_there: bool = False


class ReadAhead:
    """Read whole objects, one after the other. For one thread, but for ``close``.

    Args:
        storage: Where they are.
        piece_bytes: Bytes of one request.
    """

    def __init__(self, storage: Storage, piece_bytes: int) -> None:
        self._storage = storage
        self._piece_bytes = piece_bytes
        self._changed = Monitor()
        self._closed = False
        self._room = memoryview(mmap.mmap(-1, (PIECES_AHEAD + 1) * piece_bytes))
        self._threads = JobThreads(PIECES_AHEAD, "shardstream-read")

    def pieces(self, url: str) -> Iterator[memoryview]:
        """Yield the bytes of ``url``, of one version of it; a piece counts until the next one is asked for.

        Raises:
            StreamClosedError: This was closed.
            StorageError: The store did not deliver.
        """
        num_bytes = self._result(self._ask(lambda: self._storage.info(url).size_bytes))
        starts = iter(range(0, num_bytes, self._piece_bytes))
        coming: deque[_Answer[memoryview]] = deque()
        while True:
            while len(coming) < PIECES_AHEAD and (start := next(starts, None)) is not None:
                coming.append(self._ask(partial(self._read, url, start, min(start + self._piece_bytes, num_bytes))))
            if not coming:
                return
            yield self._result(coming.popleft())

    def close(self) -> None:
        """Let go whoever waits for a piece. From any thread, more than once."""
        with self._changed:
            self._closed = True  # who waits raises, and nobody waits any more, whatever still comes
            self._changed.notify_all()
        self._threads.stop(_STOP_S)

    def _read(self, url: str, start: int, stop: int) -> memoryview:
        place = start // self._piece_bytes % (PIECES_AHEAD + 1) * self._piece_bytes
        out = self._room[place : place + stop - start]
        self._storage.read_into(url, start, out)
        return out

    def _ask(self, work: Callable[[], _T]) -> _Answer[_T]:
        answer: _Answer[_T] = _Answer()
        self._threads.submit(partial(self._answer, answer, work))
        return answer

    def _answer(self, answer: _Answer[_T], work: Callable[[], _T]) -> None:
        try:
            answer.value = work()
        except BaseException as error:  # noqa: BLE001  a thread border: whoever waits for the piece gets it
            answer.error = error
        with self._changed:
            answer.is_there = True  # its value, or error, is complete and does not change
            self._changed.notify_all()

    def _result(self, answer: _Answer[_T]) -> _T:
        with self._changed:
            self._changed.wait_for(lambda: answer.is_there or self._closed)
            if self._closed:
                raise StreamClosedError
        if answer.error is not None:
            raise answer.error
        return answer.value  # type: ignore[return-value]  # it is there
