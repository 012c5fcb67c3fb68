"""Fork the processes of ``multiprocessing`` from our server: a context for torch's ``DataLoader``.

The start method "fork" copies the training process with the unfinished work of all its threads: a child that reads from
an object store, or copies a large tensor, may hang forever. "forkserver" and "spawn" run the user's script again in
every worker and pickle the dataset once per worker. Here a worker starts in milliseconds from a process without
threads, never runs the script (see ``portable``) and shares the dataset's memory with all others. It ends with its
parent, and ignores signals that the parent handles. Its failures reach the parent as errors: a dataset that does not
load, a batch that cannot be sent.

This is the parent's end; the child's is ``main.run_process``.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import socket
import tempfile
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from multiprocessing import connection, queues, resource_tracker, spawn, util
from multiprocessing.context import BaseContext, set_spawning_popen
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

from torch._utils import ExceptionWrapper  # torch's loader raises it when it arrives instead of a batch

from streaming.common.forks import signals_held_back
from streaming.common.platforms import how_it_ended
from streaming.errors import ConfigError, WorkerDiedError, WorkerError
from streaming.run.engine.workers import portable
from streaming.run.engine.workers.channel import Channel, ChannelClosedError
from streaming.run.engine.workers.fork_server import SHARED, ForkServer
from streaming.run.engine.workers.main import Descriptor
from streaming.run.engine.workers.portable import SentOnce, cure_of
from streaming.run.engine.workers.surroundings import Surroundings
from streaming.run.engine.workers.transport import error_from_wire

_SHM = "/dev/shm"  # noqa: S108  used only in messages
_PICKLED = (
    "The data set or collate_fn puts an object into it that cannot be pickled: return tensors, arrays, numbers and "
    "text, or use num_workers=0"
)


class ServerContext(BaseContext):
    """Start processes from the fork server that all loaders of this process share. Close it after them.

    Args:
        shared: Objects that several processes receive, such as a dataset: each is pickled once.
        preload: Name of a module of ours that all processes need.
        surroundings: Settings with which processes start; None: those of the thread that starts one.

    Raises:
        Exception: Pickling one of them raised it.
    """

    _name = "forkserver"  # locks and queues read it: another process must find them by name

    def __init__(
        self, shared: Iterable[object] = (), *, preload: str = "", surroundings: Surroundings | None = None
    ) -> None:  # fmt: skip
        self.preload, self.surroundings = preload, surroundings
        self.sent: list[SentOnce] = []
        self._server: ForkServer | None = None
        self._started: list[weakref.ref[_Popen]] = []
        with signals_held_back():  # multiprocessing's resource tracker handles only two; others would end it
            resource_tracker.ensure_running()
        try:
            for thing in shared:
                self.sent.append(SentOnce(thing))
        except BaseException:
            self.close()
            raise

    @property
    def server(self) -> ForkServer:
        """The server, started if necessary. The first start in a process takes a second or two, in the background."""
        if self._server is None or not self._server.is_alive():
            self._give_back()
            self._server = SHARED.borrow()
        return self._server

    def close(self) -> None:
        """Return the server, and free the memory of the shared objects."""
        for one in self.sent:
            one.close()
        self._give_back()

    def get_context(self, method: str | None = None) -> Any:
        """Return this context, for the queues and locks that it makes."""
        return self if method is None else super().get_context(method)

    def Process(self, *args: Any, **options: Any) -> BaseProcess:  # noqa: N802  multiprocessing's name
        """Return a process, like ``multiprocessing.Process``."""
        return _Process(self, *args, **options)

    def Queue(self, maxsize: int = 0) -> _Queue:  # noqa: N802  multiprocessing's name
        """Return a queue of batches, like ``multiprocessing.Queue``; see ``_Queue``."""
        return _Queue(maxsize, ctx=self.get_context())

    def started(self, popen: _Popen) -> None:
        """Note that a process was started."""
        self._started = [one for one in self._started if one() is not None] + [weakref.ref(popen)]

    def why_ended(self) -> Exception | None:
        """Return an error that reports how processes have ended unasked; None: none has."""
        ended = [popen for one in self._started if (popen := one()) is not None and popen.poll()]
        for popen in ended:
            error = popen.said()
            if error is not None:
                return error
        if not ended:
            return None
        return WorkerDiedError(
            f"{'; '.join(how_it_ended(f'worker process {popen.pid}', popen.returncode or 0) for popen in ended)}. If "
            f"killed by SIGKILL, lower num_workers, prefetch_factor or the batch size, or give the job more memory; if "
            f"by SIGBUS, {_SHM} is full (docker run --shm-size=8g). Otherwise the data set or collate_fn crashes or "
            f"exits: num_workers=0 shows where"
        )

    def _give_back(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            SHARED.give_back(server)


class _Process(BaseProcess):
    """See ``multiprocessing.Process``."""

    _start_method = "forkserver"

    def __init__(self, context: ServerContext, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._context: ServerContext | None = context

    def _Popen(self, _: object) -> _Popen:  # noqa: N802  multiprocessing's name
        context, self._context = self._context, None
        if context is None:
            raise AssertionError("a process is started once")
        return _Popen(self, context)


class _Queue(queues.Queue):  # type: ignore[type-arg]  # at run time it takes no argument
    """A queue of batches. If a batch cannot be sent, the receiver gets the cause; otherwise it would wait forever."""

    @property
    def _on_queue_feeder_error(self) -> Callable[[Exception, Any], None]:
        return partial(_send_error, weakref.ref(self), super()._on_queue_feeder_error)  # type: ignore[misc]


def _send_error(
    of: weakref.ref[_Queue], otherwise: Callable[[Exception, Any], None], error: Exception, sent: Any
) -> None:
    """Send ``error`` instead of a numbered batch, first in line: torch drops batches after an iterable's end.

    Runs in the queue's own thread, which sends the first item next.
    """
    queue = of()
    if queue is None or not isinstance(sent, tuple):
        otherwise(error, sent)
        return
    why = _Unsent(f"{type(error).__name__}: {error}. {cure_of_refusal(error) or _PICKLED}")
    inner: Any = queue
    inner._sem.acquire()  # as ``put`` does
    inner._buffer.appendleft((sent[0], why))


class _Unsent(ExceptionWrapper):
    """Represent a batch that cannot be sent; torch's loader calls ``reraise`` when it is due."""

    def __init__(self, why: str) -> None:
        self._why = why

    def reraise(self) -> NoReturn:
        """Raise the error."""
        raise WorkerError(f"a worker process cannot send its batch: {self._why}")


def cure_of_refusal(error: Exception) -> str:
    """Return a cure if the operating system refused to send a batch; "" for other errors."""
    said = str(error)
    if "path too long" in said:
        folder = tempfile.gettempdir()
        return f"TMPDIR ({folder}, {len(folder)} characters) is too long for sockets in it: export TMPDIR=/tmp"
    if "unable to allocate shared memory" in said or getattr(error, "errno", None) == errno.ENOSPC:
        return f"{_SHM}, through which batches go, is full: docker run --shm-size=8g, or lower num_workers"
    if "Too many open files" in said:
        return 'Run `ulimit -n 65536` before the program, or torch.multiprocessing.set_sharing_strategy("file_system")'
    return ""


class _Pickler(portable.Pickler):
    """Pickle queues, locks and connections too, and refer to objects that are sent once."""

    def __init__(self, file: Any, sent: list[SentOnce]) -> None:
        # Before super().__init__: the interpreter looks it up there.
        self.dispatch_table = ChainMap(ForkingPickler(io.BytesIO()).dispatch_table, portable.Pickler.dispatch_table)
        super().__init__(file)
        self._sent = {id(one.thing): number for number, one in enumerate(sent)}

    def persistent_id(self, obj: Any) -> int | None:
        """Return the number of an object that is sent once."""
        return self._sent.get(id(obj))


class _Popen:
    """The parent's end of one process, with the interface that ``multiprocessing.Process`` expects."""

    method = "forkserver"
    DupFd = Descriptor

    def __init__(self, started: BaseProcess, context: ServerContext) -> None:
        util._flush_std_streams()  # type: ignore[attr-defined]  # as all start methods do
        self.returncode: int | None = None
        tracker: Any = resource_tracker.getfd()
        self._fds = [*(one.fd for one in context.sent), tracker]
        preparation = spawn.get_preparation_data(started.name)
        for name in ("init_main_from_path", "init_main_from_name"):  # the child never runs the script again
            preparation.pop(name, None)
        begin, rest = io.BytesIO(), io.BytesIO()
        set_spawning_popen(self)  # type: ignore[arg-type]  # same interface, but not a subclass
        try:
            _Pickler(begin, []).dump(preparation)
            _Pickler(rest, context.sent).dump(started)
        finally:
            set_spawning_popen(None)
        sent = [(one.body, one.places) for one in context.sent]
        self._server = context.server
        self._socket, theirs = socket.socketpair()
        self._channel = Channel(self._socket)
        try:
            with theirs:
                self._number = self._server.spawn_process(theirs, context.preload)
            settings, _ = (context.surroundings or Surroundings.taken()).to_lay()
            self._channel.send((settings, sent, begin.getvalue(), rest.getvalue()), self._fds)
            (self.pid,), _ = self._channel.receive()
            self.sentinel = os.pidfd_open(self.pid)
        except BaseException:
            self._channel.close()
            raise
        self._end = weakref.finalize(self, _let_go, self._channel, self.sentinel)
        context.started(self)

    def duplicate_for_child(self, fd: int) -> int:
        """Send ``fd`` to the child."""
        self._fds.append(fd)
        return len(self._fds) - 1

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Return the exit code, or None while the process runs."""
        return self.wait(0.0 if flag == os.WNOHANG else None)

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for at most this long, and return the same as ``poll``."""
        if self.returncode is None and connection.wait([self.sentinel], timeout):
            status = self._server.status(self._number)
            self.returncode = 255 if status is None else os.waitstatus_to_exitcode(status)
        return self.returncode

    def said(self) -> ConfigError | None:
        """Return why the ended process could not begin; None: it could."""
        if not self._end.alive or not connection.wait([self._socket], 0):
            return None
        try:
            (blobs,), _ = self._channel.receive()
        except ChannelClosedError:
            return None
        cause = error_from_wire(blobs)
        error = ConfigError(
            f"the data set, collate_fn or worker_init_fn does not load in a worker process: {type(cause).__name__}: "
            f"{cause}. {cure_of(cause)}"
        )
        error.__cause__ = cause
        return error

    def terminate(self) -> None:
        """Send SIGKILL, since SIGTERM does not end the process."""
        self._send(signal.SIGKILL)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._send(signal.SIGKILL)

    def close(self) -> None:
        """Close this end."""
        self._end()

    def _send(self, number: int) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _let_go(channel: Channel, sentinel: int) -> None:
    channel.close()
    os.close(sentinel)
