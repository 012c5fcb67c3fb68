"""Be a worker process: call the work for one part after another until the parent is gone.

``main`` is the whole program of a process of ``ProcessRunner``; one of ``ProcessExecutor`` begins with ``serve_calls``.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from mmap import PAGESIZE, mmap
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import Any

from shard_tools.running.functions import traceback_of
from streaming.errors import WorkerError

WORK, TASK, FREE = "work", "task", "free"  # from the parent
READY, ITEMS, END, ERROR, BROKEN = "ready", "items", "end", "error", "broken"  # to it
_PIECE_BYTES, _PIECE_ITEMS, _PIECE_S = 1 << 20, 1024, 0.2
_MAX_BUFFERS = 512  # of one call that writes several; the system takes 1,024
importing = False
"""Whether this process is a worker that is just importing what its work needs."""


def main(numbers: tuple[int, int, int, int]) -> None:
    """Run until the parent closes its end of the channel.

    Args:
        numbers: File descriptors of the channel, of the memory for results, and of the place; size of the memory.
    """
    global importing  # noqa: PLW0603  asked by whoever would start workers
    channel_fd, ring_fd, place_fd, ring_bytes = numbers
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    channel = Connection(channel_fd)
    place = mmap(place_fd, PAGESIZE)
    _, body = pickle.loads(channel.recv_bytes())  # noqa: S301  our parent's
    importing = True
    try:
        work = pickle.loads(body)  # noqa: S301  our parent's
    except BaseException as error:  # noqa: BLE001  of anybody's modules; the parent raises it
        told = f"a worker process cannot load the function: {type(error).__name__}: {error}"
        channel.send_bytes(pickle.dumps((BROKEN, dump_error(error, told))))
        return
    importing = False
    parent = _Parent(channel, Ring(ring_fd, ring_bytes))
    threading.Thread(target=parent.listen, daemon=True, name="shard_tools-parent").start()
    parent.send((READY,))

    def note(number: int) -> None:
        struct.pack_into("q", place, 0, number)

    while True:
        number, start, part, skip, avoid = parent.next_task()
        begun_s = time.perf_counter()
        try:
            items = work(start, pickle.loads(part), skip=skip, avoid=avoid, note=note)  # noqa: S301  our parent's
            parent.send_items(number, items)
        except BaseException as error:  # noqa: BLE001  the consumer gets it
            parent.send((ERROR, number, dump_error(error)))
        else:
            parent.send((END, number, time.perf_counter() - begun_s))


def serve_calls() -> None:
    """Prepare a process for the calls of others: it leaves Ctrl-C to its parent, and ends when that has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per processor, one thread per process
    threading.Thread(target=_end_with_parent, daemon=True, name="shard_tools-parent").start()


def _end_with_parent() -> None:
    """Wait for the end of the parent process: its queue would stay open, with nobody to fill it."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


class Ring:
    """Memory shared with the parent, filled in a circle: it is freed in the order in which it is filled.

    Args:
        fd: The file.
        num_bytes: Its size; a result that is larger enlarges it, when it is empty.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        self._fd, self._num_bytes = fd, num_bytes
        self._regions: deque[tuple[int, int]] = deque()
        self._changed = threading.Condition()
        os.ftruncate(fd, num_bytes)

    def free(self, count: int) -> None:
        """Free the oldest regions."""
        with self._changed:
            for _ in range(count):
                self._regions.popleft()
            self._changed.notify()  # the regions left are those that the parent may still read

    def has_room(self, size: int) -> bool:
        """Tell whether so many bytes could be put without waiting."""
        with self._changed:
            # More may be free at once: only this thread fills.
            return self._room(size) >= 0

    def put(self, buffers: Sequence[Any], size: int) -> int:
        """Copy buffers, ``size`` bytes together, into one region, waiting for room; return where it begins."""
        offset = self._region(size)
        at = offset
        for first in range(0, len(buffers), _MAX_BUFFERS):
            at = self._write(list(buffers[first : first + _MAX_BUFFERS]), at)
        return offset

    def _write(self, buffers: list[Any], at: int) -> int:
        views = [memoryview(buffer) for buffer in buffers if len(buffer)]
        while views:
            done = os.pwritev(self._fd, views, at)
            at += done
            while views and done >= len(views[0]):
                done -= len(views.pop(0))
            if done:
                views[0] = views[0][done:]
        return at

    def _region(self, size: int) -> int:
        with self._changed:
            while (offset := self._room(size)) < 0:
                self._changed.wait()
            self._regions.append((offset, size))  # no other region overlaps it
            return offset

    def _room(self, size: int) -> int:
        """Return where so many bytes are free; -1: nowhere."""
        if not self._regions:
            if size > self._num_bytes:
                self._num_bytes = -(-size // PAGESIZE) * PAGESIZE
                os.ftruncate(self._fd, self._num_bytes)
            return 0
        first, (last, last_size) = self._regions[0][0], self._regions[-1]
        end = last + last_size
        if last >= first:  # not gone around, or all regions are empty
            if end + size <= self._num_bytes:
                return end
            return 0 if size < first else -1
        return end if end + size < first else -1


class _Parent:
    """The connection to the parent: a thread listens, the main thread tells."""

    def __init__(self, channel: Connection, ring: Ring) -> None:
        self._channel, self._ring = channel, ring
        self._tasks: deque[tuple[Any, ...]] = deque()
        self._changed = threading.Condition()

    def listen(self) -> None:
        """Take what the parent says; end this process when it is gone."""
        while True:
            try:
                kind, *content = pickle.loads(self._channel.recv_bytes())  # noqa: S301  our parent's
            except (EOFError, OSError):
                os._exit(1)
            if kind == FREE:
                self._ring.free(content[0])
                continue
            with self._changed:
                self._tasks.append(tuple(content))
                self._changed.notify()  # a task waits only while the main thread has others

    def next_task(self) -> tuple[Any, ...]:
        """Wait for a task."""
        with self._changed:
            while not self._tasks:
                self._changed.wait()
            return self._tasks.popleft()  # each task is taken once

    def send(self, message: tuple[Any, ...]) -> None:
        """Tell the parent."""
        try:
            self._channel.send_bytes(pickle.dumps(message))
        except OSError:  # it is gone
            os._exit(1)

    def send_items(self, number: int, items: Iterable[tuple[Any, Sequence[Any]]]) -> None:
        """Pass on the items of a task, in pieces."""
        piece: list[tuple[Any, int, list[int]]] = []
        num_bytes, since_s = 0, time.monotonic()
        try:
            for meta, buffers in items:
                sizes = [len(buffer) for buffer in buffers]
                size = sum(sizes)
                late = piece and time.monotonic() - since_s > _PIECE_S
                if late or num_bytes >= _PIECE_BYTES or len(piece) >= _PIECE_ITEMS or not self._ring.has_room(size):
                    # What waits for room must not hold back what would make room.
                    self.send((ITEMS, number, piece))
                    piece, num_bytes, since_s = [], 0, time.monotonic()
                piece.append((meta, self._ring.put(buffers, size), sizes))
                num_bytes += size
        finally:
            if piece:
                self.send((ITEMS, number, piece))


def dump_error(error: BaseException, told: str = "") -> bytes:
    """Pickle an exception with its traceback as a note; one that cannot be, as a ``WorkerError`` that says the same."""
    text = traceback_of(error)
    if not told:
        try:
            error.add_note(f"In the worker process:\n{text}")
            body = pickle.dumps(error)
            pickle.loads(body)  # noqa: S301  our own: it may need arguments that are not there
        except Exception:  # noqa: BLE001  of anybody's __reduce__
            told = f"{type(error).__name__}: {error}"
        else:
            return body
    failed = WorkerError(told)
    failed.add_note(f"In the worker process:\n{text}")
    return pickle.dumps(failed)
