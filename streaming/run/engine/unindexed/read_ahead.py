"""Read shards from beginning to end, a few pieces ahead, on threads that block no other thread."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from streaming.common.counters import Metrics
from streaming.common.monitor import Monitor
from streaming.run.engine.threads.jobs import JobThreads
from streaming.storage import Storage, redact

PIECE_BYTES = 8 << 20
PIECES_AHEAD = 4
_STOP_S = 1.0
"""Time for which closing waits for requests in progress. Slower requests are left to end later."""

_T = TypeVar("_T")


class StreamClosedError(Exception):
    """The reader was closed."""


def piece_bytes_of(memory_limit_bytes: int) -> int:
    """Return the size of one request such that all pieces in memory take a sixteenth of the limit.

    ``PIECES_AHEAD`` pieces are in flight or waiting, and one is being parsed. The parser holds up to three more: a copy
    of that piece, the rest of the previous one, and the two joined.
    """
    return max(64 << 10, min(PIECE_BYTES, memory_limit_bytes // 16 // (PIECES_AHEAD + 4)))


@dataclass(slots=True, eq=False)
class _Answer(Generic[_T]):
    """The result of a call on a thread, once the call has ended."""

    value: _T | None = None
    error: BaseException | None = None
    is_there: bool = False


class ReadAhead:
    """Read whole objects, one after another. For one thread, except ``close``.

    Args:
        storage: Store of the objects.
        piece_bytes: Size of one request in bytes.
        metrics: Counts the time of its threads; None: no count.
    """

    def __init__(self, storage: Storage, piece_bytes: int, metrics: Metrics | None = None) -> None:
        self._metrics = metrics or Metrics()
        self._storage = storage
        self._piece_bytes = piece_bytes
        self._changed = Monitor()
        self._closed = False
        self._room = memoryview(mmap.mmap(-1, (PIECES_AHEAD + 1) * piece_bytes))
        self._threads = JobThreads(PIECES_AHEAD, "shardstream-read")

    def pieces(self, url: str) -> Iterator[memoryview]:
        """Yield the bytes of ``url``, all of one version. A piece is valid until the next one is requested.

        Raises:
            StreamClosedError: The reader was closed.
            StorageError: The store failed.
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
        """Release the threads that wait for a piece. May be called from any thread, any number of times."""
        with self._changed:
            self._closed = True  # from here on every waiter raises, and none begins to wait
            self._changed.notify_all()
        self._threads.stop(_STOP_S)

    def _read(self, url: str, start: int, stop: int) -> memoryview:
        place = start // self._piece_bytes % (PIECES_AHEAD + 1) * self._piece_bytes
        out = self._room[place : place + stop - start]
        with self._metrics.timed("fetch_s", _told, url, start, stop):
            self._storage.read_into(url, start, out)
        return out

    def _ask(self, work: Callable[[], _T]) -> _Answer[_T]:
        answer: _Answer[_T] = _Answer()
        self._threads.submit(partial(self._answer, answer, work))
        return answer

    def _answer(self, answer: _Answer[_T], work: Callable[[], _T]) -> None:
        try:
            answer.value = work()
        except BaseException as error:  # noqa: BLE001  thread boundary: the thread that waits for the piece raises it
            answer.error = error
        with self._changed:
            answer.is_there = True  # its value or error is complete and final
            self._changed.notify_all()

    def _result(self, answer: _Answer[_T]) -> _T:
        with self._changed:
            # Either the answer is final, or the stream is closed for good.
            self._changed.wait_for(lambda: answer.is_there or self._closed)
            if self._closed:
                raise StreamClosedError
        if answer.error is not None:
            raise answer.error
        return answer.value  # type: ignore[return-value]  # it is there


def _told(url: str, start: int, stop: int) -> dict[str, Any]:
    return {"shard": redact(url), "byte_start": start, "bytes": stop - start}
