"""Run a long work in processes of this machine: single calls of our own functions, or the parts of a user's work.

``ProcessExecutor`` makes calls. ``ProcessRunner`` yields the results of parts in the order of their inputs: the
caller's function runs in separate interpreters that never import the main script; definitions of the main script are
sent by value. Contents come through shared memory, everything else through a socket. A process that dies is replaced,
and its replacement continues where it stopped; an input that kills two processes is reported.
"""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import connection, get_context
from types import TracebackType
from typing import Any

from shard_tools.running import process_main
from shard_tools.running.functions import dumps
from shard_tools.running.parts import Item, Pace, Work
from streaming.common.platforms import how_it_ended, unnamed_file, working_folder
from streaming.errors import ConfigError, WorkerError

DEFAULT_MEMORY_BYTES = 512 << 20
_MIN_RING_BYTES = 8 << 20
_PART_S, _PART_BYTES = 0.1, 4 << 20  # target time and result size of a part
_AHEAD = 64  # finished parts of one process that may wait for another process
_TASKS = 2  # per process at once, so that it need not wait for the next
_DEATHS = 2  # deaths at one input before it is blamed
_END_S = 2.0
_STDERR = 2  # processes print here: standard output is for results
_START = "import sys; sys.path[:] = {path!r}; from shard_tools.running.process_main import main; main({numbers!r})"


@dataclass(slots=True, eq=False)
class _Task:
    """A part of the inputs, in progress or waiting to be yielded."""

    number: int
    start: int
    num_inputs: int
    body: bytes
    skip: int
    num_items: int = 0  # number received so far
    num_bytes: int = 0
    pieces: deque[tuple[_Process, list[tuple[Any, int, list[int]]]]] = field(default_factory=deque)
    error: BaseException | None = None
    ended: bool = False


class _File:
    """An open file that is closed when nothing uses it any more."""

    def __init__(self, name: str) -> None:
        self.fd = unnamed_file(name)
        weakref.finalize(self, os.close, self.fd)


@dataclass(slots=True, eq=False)
class _Process:
    """A process as its parent sees it."""

    popen: subprocess.Popen[bytes]
    channel: connection.Connection
    ring: _File
    place: mmap.mmap
    tasks: dict[int, _Task] = field(default_factory=dict)
    memory: mmap.mmap | None = None
    ready: bool = False
    open: bool = True

    def view(self, end: int) -> memoryview:
        """Return its shared memory, at least ``end`` bytes of it."""
        if self.memory is None or len(self.memory) < end:
            self.memory = mmap.mmap(self.ring.fd, os.fstat(self.ring.fd).st_size, prot=mmap.PROT_READ)
        return memoryview(self.memory)

    def at(self) -> int:
        """Return the input that it works on, or worked on when it died; -1: none yet."""
        return int(struct.unpack_from("q", self.place)[0])


class ProcessExecutor(ProcessPoolExecutor):
    """Run calls in processes of this machine, each started when it is first needed.

    They are spawned rather than forked, since this process has threads. They leave Ctrl-C to this process, and end when
    this process ends for any reason.

    Args:
        num_processes: Number of processes.
    """

    def __init__(self, num_processes: int) -> None:
        working_folder()  # multiprocessing needs it
        super().__init__(num_processes, mp_context=get_context("spawn"), initializer=process_main.serve_calls)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        """End the processes: after their calls, or immediately after an error or Ctrl-C.

        Raises:
            WorkerError: A process had died.
        """
        if error is not None:
            for process in [*(self._processes or {}).values()]:
                process.terminate()
        suppressed = super().__exit__(kind, error, trace)
        if isinstance(error, BrokenProcessPool):
            raise WorkerError(
                "a worker process died; perhaps the system killed it for its memory. What is written stays: repeat "
                "the command, with fewer --workers if memory is short"
            ) from error
        return suppressed


class ProcessRunner:
    """Run ``work`` in ``num_workers`` processes. Used by one thread; the owner must close it.

    Memory: the processes hold at most ``memory_bytes`` of results that are not yet yielded, or one result each if that
        is
    larger; then they wait.

    Args:
        work: The work; definitions of the main script are sent by value.
        num_workers: Number of processes, started when first needed.
        memory_bytes: Memory for results that are not yet yielded.

    Raises:
        ConfigError: The work cannot be pickled; or this process is a worker that is importing a module.
    """

    def __init__(self, work: Work, num_workers: int, *, memory_bytes: int = DEFAULT_MEMORY_BYTES) -> None:
        if process_main.importing:
            raise ConfigError(
                "this call is in a module that worker processes import, and would start workers in each of them: "
                "put it under `if __name__ == '__main__':`, or into a function"
            )
        self._body = dumps(work)
        self._num_workers = num_workers
        self._ring_bytes = max(_MIN_RING_BYTES, memory_bytes // num_workers)
        self._processes: list[_Process] = []
        self._pending: deque[_Task] = deque()  # sent, in the order of inputs
        self._waiting: deque[_Task] = deque()  # tasks of dead processes, to be sent again
        self._deaths: Counter[int] = Counter()
        self._avoid: frozenset[int] = frozenset()
        self._pace = Pace(_PART_S, _PART_BYTES)
        self._count = 0

    def items(
        self, part: Callable[[int, int], Any], start: int, stop: int, skip: int = 0
    ) -> Generator[Item, None, None]:
        """Yield the items of inputs ``start`` to ``stop``, in order.

        Args:
            part: Describes a range of inputs for the processes; the description is pickled.
            start: The first input.
            stop: The end of the inputs.
            skip: Number of items of the first input to leave out.

        Raises:
            Exception: Any exception of the work, after all items before it were yielded.
            WorkerError: Processes fail to start.
        """
        self._part, self._next, self._stop, self._skip = part, start, stop, skip
        try:
            while True:
                self._feed()
                if not self._pending:
                    return
                task = self._pending[0]
                if task.pieces:
                    yield from self._handed_out(*task.pieces.popleft())
                    self._poll(0)
                elif task.error is not None:
                    raise task.error
                elif task.ended:
                    self._pending.popleft()
                else:
                    self._poll(None)
        finally:
            self.close()

    def close(self) -> None:
        """End all processes, even if they are working."""
        processes, self._processes = self._processes, []
        self._pending.clear()
        for process in processes:
            _shut(process)
            process.popen.terminate()
        _end(processes)

    def _handed_out(self, process: _Process, piece: list[tuple[Any, int, list[int]]]) -> Generator[Item, None, None]:
        for meta, offset, sizes in piece:
            view = process.view(offset + sum(sizes))
            buffers = []
            at = offset
            for size in sizes:
                buffers.append(view[at : at + size])
                at += size
            yield Item(meta, buffers)
        if process.open:
            self._send(process, (process_main.FREE, len(piece)))

    def _feed(self) -> None:
        """Start processes, and send each its share of the next parts."""
        num_left = self._stop - self._next + len(self._waiting)
        while len(self._processes) < min(self._num_workers, num_left):
            self._processes.append(_started(self._body, self._ring_bytes))
        for _ in range(_TASKS):
            for process in self._processes:
                if len(process.tasks) < _TASKS and len(self._pending) < _AHEAD * self._num_workers:
                    task = self._waiting.popleft() if self._waiting else self._cut()
                    if task is None:
                        return
                    process.tasks[task.number] = task
                    skip = task.skip + task.num_items
                    message = (process_main.TASK, task.number, task.start, task.body, skip, self._avoid)
                    self._send(process, message)

    def _cut(self) -> _Task | None:
        if self._next >= self._stop:
            return None
        start, stop = self._next, min(self._stop, self._next + self._pace.size)
        task = _Task(
            number=self._count, start=start, num_inputs=stop - start, skip=self._skip,
            body=dumps(self._part(start, stop), f"one of the inputs {start} to {stop - 1}"),
        )  # fmt: skip
        self._next, self._skip, self._count = stop, 0, self._count + 1
        self._pending.append(task)
        return task

    def _send(self, process: _Process, message: tuple[Any, ...]) -> None:
        with suppress(OSError):  # it has died, which is detected when its channel is read
            process.channel.send_bytes(pickle.dumps(message))

    def _poll(self, timeout: float | None) -> None:
        channels: dict[Any, _Process] = {process.channel: process for process in self._processes}
        for channel in connection.wait(list(channels), timeout):
            process = channels[channel]
            try:
                message = pickle.loads(process.channel.recv_bytes())  # noqa: S301  from our child
            except (EOFError, OSError):
                self._replace(process)
                continue
            self._take(process, message)

    def _take(self, process: _Process, message: tuple[Any, ...]) -> None:
        kind, *rest = message
        if kind == process_main.READY:
            process.ready = True
            return
        if kind == process_main.BROKEN:
            raise _unpickled(rest[0])
        number, content = rest
        task = process.tasks[number]
        if kind == process_main.ITEMS:
            task.pieces.append((process, content))
            task.num_items += len(content)
            task.num_bytes += sum(sum(sizes) for _, _, sizes in content)
            return
        del process.tasks[number]
        if kind == process_main.ERROR:
            task.error = _unpickled(content)
            return
        task.ended = True
        self._pace.note(task.num_inputs, content, task.num_bytes)

    def _replace(self, process: _Process) -> None:
        """Pass the parts of a dead process to others; its memory stays until its results are yielded."""
        _shut(process)
        _end([process])
        self._processes.remove(process)
        at = process.at()
        self._deaths[at] += 1
        if self._deaths[at] >= _DEATHS:
            if at < 0:
                ended = how_it_ended("a worker process", process.popen.returncode)
                raise WorkerError(
                    f"worker processes end before their first input: {ended}; see their output on standard error"
                )
            self._avoid |= {at}
        self._waiting.extendleft(reversed([*process.tasks.values()]))


def _started(body: bytes, ring_bytes: int) -> _Process:
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.settimeout(None)  # the main script may have set another default
    ring, place_file = _File("shard_tools-results"), _File("shard_tools-place")
    os.ftruncate(place_file.fd, mmap.PAGESIZE)
    place = mmap.mmap(place_file.fd, mmap.PAGESIZE)
    struct.pack_into("q", place, 0, -1)
    numbers = (theirs.fileno(), ring.fd, place_file.fd, ring_bytes)
    code = _START.format(path=sys.path, numbers=numbers)
    with theirs, ours:
        popen = subprocess.Popen(  # noqa: S603  our own interpreter
            [sys.executable, "-c", code], stdin=subprocess.DEVNULL, stdout=_STDERR, pass_fds=numbers[:3]
        )
        channel = connection.Connection(os.dup(ours.fileno()))
    with suppress(OSError):  # it has already died
        channel.send_bytes(pickle.dumps((process_main.WORK, body)))
    return _Process(popen=popen, channel=channel, ring=ring, place=place)


def _shut(process: _Process) -> None:
    """Close the connection to a process; messages that it has written can still be read."""
    if process.open:
        process.open = False
        process.channel.close()


def _end(processes: Sequence[_Process]) -> None:
    """Wait for processes that are about to end, and kill those that do not end."""
    until_s = time.monotonic() + _END_S
    for process in processes:
        try:
            process.popen.wait(max(0.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.popen.kill()
            process.popen.wait()


def _unpickled(body: bytes) -> BaseException:
    error: BaseException = pickle.loads(body)  # noqa: S301  from our child
    return error
