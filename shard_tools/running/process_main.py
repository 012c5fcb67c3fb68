"""Run a worker process: call the work for each part that the parent sends, until the parent is gone.

``main`` is the whole program of a process of ``ProcessRunner``; a process of ``ProcessExecutor`` begins with
``serve_calls``.

The life of a worker of ``ProcessRunner``:

1. The parent sends the pickled work. The worker loads it and answers READY, or BROKEN with the error.
2. The parent sends parts as TASK. The worker takes them in order, copies the bytes of their items into its ring, and
   sends the items' places as ITEMS, then END, or ERROR with the exception.
3. The parent sends FREE when it no longer reads the oldest regions of the ring; a full ring makes the worker wait.
4. The parent closes the channel. The worker exits at once, whatever it is doing.
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
from streaming.errors import DataError, StorageError, WorkerError

WORK, TASK, FREE = "work", "task", "free"  # messages from the parent
READY, ITEMS, END, ERROR, BROKEN = "ready", "items", "end", "error", "broken"  # messages to the parent
_PIECE_BYTES, _PIECE_ITEMS, _PIECE_S = 1 << 20, 1024, 0.2
_MAX_BUFFERS = 512  # most buffers per pwritev call; the system accepts 1,024
importing = False
"""Whether this process is a worker that is importing the modules of its work."""


def main(numbers: tuple[int, int, int, int]) -> None:
    """Run until the parent closes its end of the channel.

    Args:
        numbers: File descriptors of the channel, of the memory for results, and of the place; size of the memory.
    """
    global importing  # noqa: PLW0603  read by code that would start workers
    channel_fd, ring_fd, place_fd, ring_bytes = numbers
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends this process
    channel = Connection(channel_fd)
    place = mmap(place_fd, PAGESIZE)
    _, body = pickle.loads(channel.recv_bytes())  # noqa: S301  from our parent
    importing = True
    try:
        work = pickle.loads(body)  # noqa: S301  from our parent
    except BaseException as error:  # noqa: BLE001  from users' modules; raised in the parent
        message = f"a worker process cannot load the function: {type(error).__name__}: {error}"
        channel.send_bytes(pickle.dumps((BROKEN, dump_error(error, message))))
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
            items = work(start, pickle.loads(part), skip=skip, avoid=avoid, note=note)  # noqa: S301  from our parent
            parent.send_items(number, items)
        except BaseException as error:  # noqa: BLE001  raised in the consumer
            parent.send((ERROR, number, dump_error(error)))
        else:
            parent.send((END, number, time.perf_counter() - begun_s))


def serve_calls() -> None:
    """Prepare a process for calls: it leaves Ctrl-C to its parent, and ends when its parent has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per processor, one thread per process
    threading.Thread(target=_end_with_parent, daemon=True, name="shard_tools-parent").start()


def _end_with_parent() -> None:
    """Wait for the end of the parent process; without this the process would wait on its queue forever."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


class Ring:
    """Memory shared with the parent, filled in a circle and freed in the order in which it is filled.

    Args:
        fd: The file of the memory.
        num_bytes: Its size; a larger result enlarges it while it is empty.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        self._fd, self._num_bytes = fd, num_bytes
        self._regions: deque[tuple[int, int]] = deque()
        self._changed = threading.Condition()  # guards _regions, _num_bytes
        os.ftruncate(fd, num_bytes)

    def free(self, count: int) -> None:
        """Free the oldest regions."""
        with self._changed:
            for _ in range(count):
                self._regions.popleft()
            self._changed.notify()  # the remaining regions are those that the parent may still read

    def has_room(self, size: int) -> bool:
        """Return whether ``size`` bytes fit without waiting."""
        with self._changed:
            # The answer stays valid: only this thread fills the ring, and others only free.
            return self._room(size) >= 0

    def put(self, buffers: Sequence[Any], size: int) -> int:
        """Copy buffers of ``size`` bytes in total into one region, waiting for room; return its offset."""
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
        """Return the offset of ``size`` free bytes; -1: there are none."""
        if not self._regions:
            if size > self._num_bytes:
                self._num_bytes = -(-size // PAGESIZE) * PAGESIZE
                os.ftruncate(self._fd, self._num_bytes)
            return 0
        first, (last, last_size) = self._regions[0][0], self._regions[-1]
        end = last + last_size
        if last >= first:  # not wrapped around, or all regions are empty
            if end + size <= self._num_bytes:
                return end
            return 0 if size < first else -1
        return end if end + size < first else -1


class _Parent:
    """The connection to the parent: one thread receives, the main thread sends."""

    def __init__(self, channel: Connection, ring: Ring) -> None:
        self._channel, self._ring = channel, ring
        self._tasks: deque[tuple[Any, ...]] = deque()
        self._changed = threading.Condition()  # guards _tasks

    def listen(self) -> None:
        """Receive messages of the parent; end this process when the parent is gone."""
        while True:
            try:
                kind, *content = pickle.loads(self._channel.recv_bytes())  # noqa: S301  from our parent
            except (EOFError, OSError):
                os._exit(1)
            if kind == FREE:
                self._ring.free(content[0])
                continue
            with self._changed:
                self._tasks.append(tuple(content))
                self._changed.notify()  # a task waits only while the main thread works on others

    def next_task(self) -> tuple[Any, ...]:
        """Wait for a task."""
        with self._changed:
            while not self._tasks:
                self._changed.wait()
            return self._tasks.popleft()  # each task is taken once

    def send(self, message: tuple[Any, ...]) -> None:
        """Send a message to the parent."""
        try:
            self._channel.send_bytes(pickle.dumps(message))
        except OSError:  # the parent is gone
            os._exit(1)

    def send_items(self, number: int, items: Iterable[tuple[Any, Sequence[Any]]]) -> None:
        """Send the items of a task, in pieces."""
        piece: list[tuple[Any, int, list[int]]] = []
        num_bytes, since_s = 0, time.monotonic()
        try:
            for meta, buffers in items:
                sizes = [len(buffer) for buffer in buffers]
                size = sum(sizes)
                late = piece and time.monotonic() - since_s > _PIECE_S
                if late or num_bytes >= _PIECE_BYTES or len(piece) >= _PIECE_ITEMS or not self._ring.has_room(size):
                    # Send the piece before waiting for room, since the parent frees room only after receiving it.
                    self.send((ITEMS, number, piece))
                    piece, num_bytes, since_s = [], 0, time.monotonic()
                piece.append((meta, self._ring.put(buffers, size), sizes))
                num_bytes += size
        finally:
            if piece:
                self.send((ITEMS, number, piece))


def dump_error(error: BaseException, message: str = "", *, of_user: bool = False) -> bytes:
    """Pickle an exception with its traceback as a note, or a ``WorkerError`` with its message if that fails.

    Errors of reading get no traceback: they name the place and the cure.

    Args:
        error: The exception.
        message: The message of a ``WorkerError`` that is raised in its place; "": none is.
        of_user: Whether a user's function raised it; then its traceback is kept in any case.
    """
    is_of_reading = isinstance(error, (DataError, StorageError)) and not of_user
    text = f"In the worker process:\n{traceback_of(error)}"
    if not message:
        try:
            if not is_of_reading:
                error.add_note(text)
            body = pickle.dumps(error)
            pickle.loads(body)  # noqa: S301  our own; fails if its class needs other arguments
        except Exception:  # noqa: BLE001  a user's __reduce__ may raise anything
            message = f"{type(error).__name__}: {error}"
        else:
            return body
    failed = WorkerError(message)
    failed.add_note(text)
    return pickle.dumps(failed)
