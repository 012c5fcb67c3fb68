"""Start the worker processes of a pool together, lend each to one thread, replace those that die."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass, field

from streaming.engine.workers.channel import Channel, ChannelClosedError
from streaming.engine.workers.fork_server import NUMBERS, SHARED, ForkServer, ServerClosedError
from streaming.engine.workers.in_progress import BatchWork, SharedProgress
from streaming.engine.workers.main import HELLO, SETUP
from streaming.monitor import Monitor
from streaming.platforms import how_it_ended


@dataclass(slots=True, eq=False)
class Worker:
    """One worker process, as the parent sees it. Used only by the thread that took it.

    Attributes:
        number: Its number at the fork server.
        channel: The connection to it.
        slots: Ring slots that it has mapped.
        pid: None until its first answer.
        work: The batch it builds; None while it is free.
        progress: Shared memory in which it reports its progress.
    """

    number: int
    channel: Channel
    slots: set[int] = field(default_factory=set)
    pid: int | None = None
    work: BatchWork | None = None
    progress: SharedProgress = field(default_factory=SharedProgress)

    def close(self) -> None:
        """Release the resources that this process holds for it."""
        self.channel.close()
        self.progress.close()


class Processes:
    """``num_workers`` processes behind one fork server. Thread-safe.

    Args:
        num_workers: Number of processes.
        recipe: The pickled recipe, for each of them.
        arena_fd: File descriptor of the arena.
        arena_bytes: Size of its address range.
        server: A fork server shared with others, which the caller closes; None: the one that all pools share.
    """

    def __init__(
        self, num_workers: int, recipe: bytes, arena_fd: int, arena_bytes: int, server: ForkServer | None = None
    ) -> None:
        self._num_workers = num_workers
        self._arena_bytes = arena_bytes
        self._setup = (SETUP, recipe, arena_bytes)
        self._arena_fd = arena_fd
        self._changed = Monitor()  # reentrant
        self._workers: dict[int, Worker] = {}
        self._idle: list[Worker] = []
        self._server = server
        self._owns_server = server is None
        self._closed = False
        self._owner_pid = os.getpid()

    @property
    def server_pid(self) -> int | None:
        """Process id of the fork server; None while there is none."""
        server = self._server
        return None if server is None else server.pid

    def all(self) -> list[Worker]:
        """Return all workers, oldest first."""
        with self._changed:
            # A copy: workers may start and end while the caller goes through it.
            return list(self._workers.values())

    def start(self) -> None:
        """Start all workers that are not running, without waiting until they are ready.

        Raises:
            RuntimeError: The pool is closed.
        """
        with self._changed:
            self._check_open()
            while len(self._workers) < self._num_workers:  # afterwards each of num_workers is idle or one caller's
                self._spawn()

    def renew(self, recipe: bytes) -> None:
        """End all workers, none of which may be in use, and give another recipe to those that start from now on."""
        with self._changed:
            self._setup = (SETUP, recipe, self._arena_bytes)
            idle, self._idle = self._idle, []  # nobody can take a worker that has the earlier recipe
        for worker in idle:
            self.retire(worker)

    def are_starting(self) -> bool:
        """Tell whether no worker can be up yet, because the server is still importing what they need."""
        server = self._server
        return server is not None and server.is_starting()

    def take(self) -> Worker:
        """Take a free worker for this caller alone; follow with ``give_back`` or ``replace``.

        Blocks until one is free.

        Raises:
            RuntimeError: The pool is closed, or was closed while waiting.
        """
        with self._changed:
            while True:
                self.start()
                if self._idle:
                    break
                self._changed.wait()
            return self._idle.pop()  # the most recently used: its caches are warm

    def meet(self, worker: Worker) -> None:
        """Send a new worker what it needs, and wait until it is up.

        Raises:
            ChannelClosedError: It has died.
        """
        worker.channel.send(self._setup, [self._arena_fd, worker.progress.fd])
        (kind, pid), _ = worker.channel.receive()
        if kind != HELLO:
            raise ChannelClosedError(f"expected {HELLO!r}, got {kind!r}")
        worker.pid = pid

    def give_back(self, worker: Worker) -> None:
        """Put back a worker, which is free again."""
        with self._changed:
            worker.work = None
            if self._closed:
                worker.close()
                return
            self._idle.append(worker)  # an idle worker has no work, so whoever takes it is the only one to talk to it
            self._changed.notify()

    def replace(self, worker: Worker, *, kill: bool = False) -> str:
        """Replace a worker that died, or that is to be killed; return how it ended.

        Raises:
            RuntimeError: The pool is closed.
        """
        worker.channel.shut()
        server = self._server
        status = None if server is None else server.status(worker.number, kill=kill)
        worker.close()
        with self._changed:
            self._workers.pop(worker.number, None)
            self._check_open()
            self._spawn()  # as many as before, the new one idle; a pool closed meanwhile gets none
            self._changed.notify()
        return _how_it_ended(worker.pid, status)

    def retire(self, worker: Worker) -> None:
        """Kill a worker without replacing it until one is needed. It is dead when this returns, if it was up."""
        worker.channel.shut()
        server = self._server
        if server is not None:
            _end(server, worker, kill=True)
        worker.close()
        with self._changed:
            self._workers.pop(worker.number, None)  # one too few until the next `take`, which starts another
            self._changed.notify()

    def close(self) -> None:
        """End all workers, even in the middle of a batch. Whoever talks to one gets ChannelClosedError."""
        if os.getpid() != self._owner_pid:  # a fork of the owner has nothing to end
            return
        with self._changed:
            self._closed = True  # no worker is spawned or taken from here on: these are the last ones
            workers, self._workers = list(self._workers.values()), {}
            idle, self._idle = self._idle, []
            server, self._server = self._server, None
            self._changed.notify_all()
        for worker in workers:
            worker.channel.shut()
        for worker in idle:
            worker.close()
        if server is None or (self._owns_server and not SHARED.give_back(server)):
            return
        for worker in workers:
            _end(server, worker, kill=worker not in idle)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the worker pool is closed")

    def _spawn(self) -> None:
        """Start one more worker, in a new server if there is none or it has ended; call with the lock held."""
        server = self._server or self._start_server()
        ours, theirs = socket.socketpair()
        worker = Worker(number=next(NUMBERS), channel=Channel(ours))
        try:
            with theirs:
                try:
                    server.spawn(worker.number, theirs)
                except ServerClosedError:
                    with suppress(ServerClosedError):  # then the worker's socket ends, which whoever takes it notices
                        self._start_server().spawn(worker.number, theirs)
        except BaseException:
            worker.close()
            raise
        self._workers[worker.number] = worker
        self._idle.append(worker)

    def _start_server(self) -> ForkServer:
        if self._owns_server and self._server is not None:
            SHARED.give_back(self._server)
        self._server, self._owns_server = SHARED.borrow(), True
        return self._server


def _end(server: ForkServer, worker: Worker, *, kill: bool) -> None:
    """End a worker whose channel is shut; waits only if it was up, since otherwise the server may not be up either."""
    if worker.pid is None:
        server.kill(worker.number)
    else:
        server.status(worker.number, kill=kill)


def _how_it_ended(pid: int | None, status: int | None) -> str:
    name = "a worker that was starting" if pid is None else f"worker process {pid}"
    if status is None:
        return f"{name} ended together with the process it was forked from"
    return how_it_ended(name, os.waitstatus_to_exitcode(status))
