"""Start the worker processes of a pool together, lend each to one thread, replace those that die.

Life cycle of a worker::

    spawned -> waiting for HELLO -> idle <-> taken -> ended

- ``_spawn`` has the fork server fork it. A thread of its own sends the setup and waits for its first answer.
- An idle worker has no work. ``take`` gives it to one thread, the only one to talk to it until ``give_back``.
- A worker that dies while it is taken is replaced by its thread (``replace``); one that dies before it is up, by the
  thread that waits for it. After ``MAX_DEATHS`` deaths in a row before ``HELLO`` the next ``take`` raises the cause.
- ``retire`` ends a worker that was given up; the next ``take`` starts another one.
- ``close`` ends all. From then on none is spawned or taken.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from streaming.common.monitor import Monitor
from streaming.common.platforms import check_open_files, how_it_ended, oom_kills
from streaming.errors import WorkerDiedError, redact_text
from streaming.run.engine.threads.jobs import still_alive
from streaming.run.engine.workers.channel import Channel, ChannelClosedError
from streaming.run.engine.workers.fork_server import NUMBERS, SHARED, ForkServer, ServerClosedError
from streaming.run.engine.workers.in_progress import BatchWork, SharedProgress
from streaming.run.engine.workers.main import HELLO, LAY, SETUP
from streaming.run.engine.workers.surroundings import Surroundings

_log = logging.getLogger(__name__)

MAX_DEATHS = 3
"""Number of workers in a row that may die from one batch, or before they are up: allows for a stray kill and a moment
of low memory, but not for a repeated cause."""
_OWN_FILES = 2
"""Number of files that this process opens per worker: its connection, and its progress."""
_FILES_OF_SLOT = 2
"""Number of files that this process opens per slot: the slot's own, and a duplicate that ``mmap`` keeps."""


@dataclass(slots=True, eq=False)
class Worker:
    """One worker process, as the parent sees it. Used only by the thread that has taken it.

    Attributes:
        number: Its number at the fork server.
        channel: The connection to it.
        slots: Ring slots that it has mapped.
        place: Number in the pool, in [0, num_workers). A replacement has the number of the worker that it replaces.
        surroundings: Settings that the worker has.
        pid: Process id; None until its first answer.
        work: The batch that it builds; None while it is free.
        progress: Shared memory in which it reports its progress.
        before: How its predecessors ended that were never up, in words.
        waiting: The thread that waits until it is up.
    """

    number: int
    channel: Channel
    place: int
    surroundings: Surroundings
    slots: set[int] = field(default_factory=set)
    pid: int | None = None
    work: BatchWork | None = None
    progress: SharedProgress = field(default_factory=SharedProgress)
    before: tuple[str, ...] = ()
    waiting: threading.Thread | None = None

    def close(self) -> None:
        """Release the resources that this process holds for it."""
        self.channel.close()
        self.progress.close()


class Processes:
    """Run ``num_workers`` processes behind one fork server. Thread-safe.

    ``_changed`` guards ``_workers``, ``_idle``, ``_server``, ``_closed``, ``_failure``, ``_tell``, ``_told`` and the
    counts.

    Args:
        num_workers: Number of processes.
        recipe: The pickled recipe, for each of them.
        arena_fd: File descriptor of the arena.
        arena_bytes: Size of its address range.
        server: A fork server shared with others, which the caller closes; None: the one that all pools share.
        replaced: Called, in any thread, for each worker that is replaced.
        num_slots: Number of ring slots that this process will open: an equal number for each worker, and one.

    Attributes:
        surroundings: Settings that workers will have.
    """

    def __init__(
        self, num_workers: int, recipe: bytes, arena_fd: int, arena_bytes: int, server: ForkServer | None = None, *,
        replaced: Callable[[], None] = lambda: None, num_slots: int = 1,
    ) -> None:  # fmt: skip
        self._num_workers = num_workers
        self._num_files = _OWN_FILES + -(-_FILES_OF_SLOT * (num_slots - 1) // num_workers)
        self._arena_bytes = arena_bytes
        self._recipe = recipe
        self.surroundings = Surroundings.taken()
        self._told: set[str] = set()
        self._arena_fd = arena_fd
        self._changed = Monitor()  # reentrant
        self._workers: dict[int, Worker] = {}
        self._idle: list[Worker] = []
        self._server = server
        self._owns_server = server is None
        self._closed = False
        self._owner_pid = os.getpid()
        self._replaced = replaced
        self._failure: WorkerDiedError | None = None
        self._tell: Callable[[], None] | None = None
        self._num_deaths = self._most_up = 0
        self._oom_kills: int | None = None

    @property
    def server_pid(self) -> int | None:
        """Process id of the fork server; None while there is none."""
        server = self._server
        return None if server is None else server.pid

    def all(self) -> list[Worker]:
        """Return all workers, oldest first."""
        with self._changed:
            # A copy: workers may start and end while the caller iterates over it.
            return list(self._workers.values())

    def start(self) -> None:
        """Start all workers that are not running, without waiting until they are ready.

        Raises:
            ConfigError: This process may not open enough files for them.
            RuntimeError: The pool is closed.
        """
        with self._changed:
            self._check_open()
            self._check_files()
            if self._oom_kills is None:
                self._oom_kills = oom_kills()
            while len(self._workers) < self._num_workers:  # afterwards each of num_workers is starting, idle or in use
                self._spawn()

    def check_files(self) -> None:
        """Check that this process may open the files of all workers; once, since afterwards some of them are open.

        Raises:
            ConfigError: It may not.
        """
        with self._changed:
            # Nobody checks a second time.
            self._check_files()

    def _check_files(self) -> None:
        if self._num_files and not self._workers:
            check_open_files("num_workers", self._num_workers, self._num_files, beside=_FILES_OF_SLOT)
            self._num_files = 0

    def renew(self, recipe: bytes) -> None:
        """End all workers, none of which may be in use, and give later workers another recipe."""
        with self._changed:
            # From here on no worker starts with the earlier recipe. One that did, and comes up later, is gone: it
            # never becomes idle.
            self._recipe, self._most_up = recipe, 0
            earlier, self._workers, self._idle = list(self._workers.values()), {}, []
        for worker in earlier:
            self.retire(worker)

    def surround(self, surroundings: Surroundings) -> None:
        """Set the settings under which workers build, from their next batch on."""
        with self._changed:
            # Workers that start from here on get them at once; others get them in ``follow``.
            self.surroundings = surroundings

    def follow(self, worker: Worker) -> None:
        """Apply the settings in a taken worker, if its own differ.

        Raises:
            ChannelClosedError: The worker has died.
        """
        now = self.surroundings
        if worker.surroundings is now:
            return
        laid, lost = now.to_lay(but=worker.surroundings)
        worker.surroundings = now
        if laid:
            worker.channel.send((LAY, laid))
            (_, problems), _ = worker.channel.receive()
            lost += problems
        self._tell_of(lost)

    def when_up(self, tell: Callable[[], None] | None) -> bool:
        """Have ``tell`` called, in any thread, once a worker is up, or none will ever be, instead of earlier ones.

        Returns:
            Whether that is so already; then ``tell`` is not called.
        """
        with self._changed:
            # The thread that brings the first worker up calls the function stored here.
            self._tell = None if self._is_up() else tell
            return self._is_up()

    def is_up(self) -> bool:
        """Return whether a worker is up, or none will ever be."""
        with self._changed:
            # The answer was true under the lock; a worker may die at any time after that.
            return self._is_up()

    def starts_quickly(self) -> bool:
        """Return whether a worker would start in milliseconds, because the fork server is up."""
        server = self._server
        return SHARED.is_up() if server is None else not server.is_starting()

    def num_up(self) -> int:
        """Return the number of workers that take batches: the most that were up together; all if none can start.

        So a dead worker that is being replaced counts: a request waits for its replacement.
        """
        with self._changed:
            # It only grows, until `renew`, or until the failure is raised.
            return self._num_workers if self._failure is not None else self._most_up

    def take(self, is_wanted: Callable[[], bool] = lambda: True) -> Worker | None:
        """Take a free worker for this caller alone. Follow with ``give_back`` or ``replace``.

        Blocks until one is free. Returns None once ``is_wanted`` returns False: see ``wake``.

        Raises:
            RuntimeError: The pool is closed, or was closed while waiting.
            WorkerDiedError: ``MAX_DEATHS`` workers in a row died before they were up.
        """
        with self._changed:
            while is_wanted():
                failure, self._failure = self._failure, None  # raised once: the next caller starts others
                if failure is not None:
                    raise failure
                self.start()
                if self._idle:
                    return self._idle.pop()  # the most recently used: its caches are warm
                self._changed.wait()
            return None

    def wake(self) -> None:
        """Have all threads that wait in ``take`` check again whether they need a worker."""
        with self._changed:
            # Waiting threads check, after this, the change that made the worker unnecessary.
            self._changed.notify_all()

    def give_back(self, worker: Worker) -> None:
        """Return a worker, which is free again."""
        with self._changed:
            worker.work = None
            if self._closed:
                worker.close()
                return
            self._idle.append(worker)  # an idle worker has no work: only the thread that takes it talks to it
            self._changed.notify()

    def replace(self, worker: Worker, *, kill: bool = False) -> str:
        """Replace a worker that died, or that has to be killed. Return how it ended.

        Raises:
            RuntimeError: The pool is closed.
        """
        worker.channel.shut()
        server = self._server
        status = None if server is None else server.status(worker.number, kill=kill)
        doing = "" if worker.work is None else worker.work.describe(worker.progress.row())
        worker.close()
        with self._changed:
            self._workers.pop(worker.number, None)
            self._check_open()
            self._spawn()  # the same number as before; a pool closed meanwhile gets none
        self._replaced()
        ended = self._how_it_ended(worker.pid, status)
        if not kill:
            self._warn(ended, f"It {doing}; that batch is built again" if doing else "It had nothing to do")
        return ended

    def retire(self, worker: Worker) -> None:
        """Kill a worker without replacing it until one is needed. It is dead on return, if the server is up."""
        with self._changed:
            self._workers.pop(worker.number, None)  # one too few, until the next `take` starts another
            self._changed.notify()
        worker.channel.shut()
        server = self._server
        if server is not None:
            _end(server, worker, kill=True)
        if worker.pid is not None:  # otherwise the thread that waits for it does
            worker.close()

    def close(self) -> None:
        """End all workers, even in the middle of a batch. Threads that talk to one get ChannelClosedError."""
        if os.getpid() != self._owner_pid:  # a fork of the owner has nothing to end
            return
        with self._changed:
            self._closed = True  # from here on no worker is spawned or taken
            workers, self._workers = list(self._workers.values()), {}
            idle, self._idle = self._idle, []
            server, self._server = self._server, None
            self._tell = None
            self._changed.notify_all()
        for worker in workers:
            worker.channel.shut()
        for worker in idle:
            worker.close()
        still_alive([worker.waiting for worker in workers if worker.waiting is not None])
        if server is None or (self._owns_server and not SHARED.give_back(server)):
            return
        for worker in workers:
            _end(server, worker, kill=worker not in idle)

    def _is_up(self) -> bool:
        return self._failure is not None or any(worker.pid is not None for worker in self._workers.values())

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the worker pool is closed")

    def _spawn(self, before: tuple[str, ...] = ()) -> None:
        """Start one more worker, in a new server if there is none or it has ended. Call with the lock held."""
        server = self._server or self._start_server()
        ours, theirs = socket.socketpair()
        place = min(set(range(self._num_workers)) - {one.place for one in self._workers.values()})
        worker = Worker(
            number=next(NUMBERS), channel=Channel(ours), place=place, surroundings=self.surroundings, before=before
        )
        try:
            with theirs:
                try:
                    server.spawn(worker.number, theirs)
                except ServerClosedError:
                    with suppress(ServerClosedError):  # then the worker's socket ends, and its thread notices
                        self._start_server().spawn(worker.number, theirs)
            name = f"shardstream-worker-{worker.number}"
            worker.waiting = threading.Thread(target=self._meet, args=(worker,), name=name, daemon=True)
            worker.waiting.start()
        except BaseException:
            worker.close()
            raise
        self._workers[worker.number] = worker

    def _meet(self, worker: Worker) -> None:
        """Send a new worker its setup, and wait until it is up. Replace it if it dies before that."""
        laid, lost = worker.surroundings.to_lay()
        try:
            setup = (SETUP, self._recipe, self._arena_bytes, worker.place, laid)
            worker.channel.send(setup, [self._arena_fd, worker.progress.fd])
            (kind, pid, problems), _ = worker.channel.receive()
        except ChannelClosedError:
            self._start_again(worker)
            return
        if kind != HELLO:
            raise AssertionError(f"expected {HELLO!r}, got {kind!r}")
        self._tell_of(lost + problems)
        with self._changed:
            if self._is_gone(worker):
                worker.close()
                return
            # From here on only the thread that takes it talks to it.
            worker.pid = pid
            self._most_up = max(self._most_up, sum(one.pid is not None for one in self._workers.values()))
            self._idle.append(worker)
            tell, self._tell = self._tell, None
            self._changed.notify_all()
        if tell is not None:
            tell()

    def _start_again(self, worker: Worker) -> None:
        with self._changed:
            # A worker that was given up, or whose pool is closed, is not replaced, and not waited for.
            is_gone, server = self._is_gone(worker), self._server
        status = None if is_gone or server is None else server.status(worker.number)
        worker.close()
        tell = None
        with self._changed:
            if self._is_gone(worker):
                return
            del self._workers[worker.number]
            before = (*worker.before, self._how_it_ended(None, status))
            if len(before) < MAX_DEATHS:
                self._spawn(before)  # the same number as before
            else:
                self._failure = _not_starting(before)  # one too few; the next `take` raises this
                tell, self._tell = self._tell, None
                self._changed.notify_all()
        self._replaced()
        self._warn(before[-1], "It had no batch yet")
        if tell is not None:
            tell()

    def _tell_of(self, lost: list[str]) -> None:
        """Log, once each, the settings that workers lack."""
        with self._changed:
            # The thread that adds a problem logs it.
            new = sorted(set(lost) - self._told)
            self._told |= set(new)
        for one in new:
            _log.warning(
                "this process has a setting that cannot be laid in its worker processes: %s. Batches that it concerns "
                "may differ from those that are built here: set it in each of them with worker_init_fn=", one,
            )  # fmt: skip

    def _warn(self, ended: str, doing: str) -> None:
        """Log that a worker has died unasked: the first time, and whenever the number of deaths has doubled."""
        with self._changed:
            self._num_deaths += 1  # each death has its own number
            count = self._num_deaths
        if count & (count - 1) == 0:
            _log.warning(
                "%s. %s. Another replaces it. Worker processes of this loader that have died: %d (logged at 1, 2, 4, "
                "8, …). %s", ended, redact_text(doing), count,
                "Lower num_workers, batch_size or memory_limit, or give the job more memory" if "SIGKILL" in ended
                else "num_workers=0 shows where a decoder or transform crashes or exits",
            )  # fmt: skip

    def _how_it_ended(self, pid: int | None, status: int | None) -> str:
        name = "a worker that was starting" if pid is None else f"worker process {pid}"
        if status is None:
            return f"{name} ended together with the process it was forked from"
        before, self._oom_kills = self._oom_kills, oom_kills()
        return how_it_ended(name, os.waitstatus_to_exitcode(status), before)

    def _is_gone(self, worker: Worker) -> bool:
        return self._closed or worker.number not in self._workers

    def _start_server(self) -> ForkServer:
        if self._owns_server and self._server is not None:
            SHARED.give_back(self._server)
        self._server, self._owns_server = SHARED.borrow(), True
        return self._server


def _not_starting(deaths: tuple[str, ...]) -> WorkerDiedError:
    return WorkerDiedError(
        f"decode workers do not start: {'; '.join(deaths)}. Their output on stderr says why; "
        f"num_workers=0 works without them"
    )


def _end(server: ForkServer, worker: Worker, *, kill: bool) -> None:
    """End a worker whose channel is shut, and wait for its end unless the server is still importing."""
    if worker.pid is None and server.is_starting():
        server.kill(worker.number)
    else:
        server.status(worker.number, kill=kill)
