"""Fork decode workers from a small process: both ends of it.

Why not fork the training process: a child inherits locks held by threads that it does not have, and hangs in the thread
pools of torch or OpenMP. Why not ``multiprocessing``'s fork server: it runs the user's script again in every worker,
which breaks scripts without an ``if __name__ == "__main__"`` guard, and it hides how its children ended.

Life cycle of the server::

    importing -> ready -> lingering, without users -> ended

- The server has one thread, imports the modules that workers need, and never uses torch. Once ready, it forks workers
  on request; requests sent while it imports wait in its control socket.
- ``SharedServer.borrow`` starts a server, or returns the one in use or lingering. Each borrower calls ``give_back``
  once. After the last one the server lingers for ``LINGER_S``, then ends.
- The server ends, and all its workers with it, when its control socket is closed or its parent is gone, whichever is
  first. A server that has ended is replaced when the next worker is started or the next user borrows.
- Signals to the process group end neither server nor workers; only the training process handles them.
- A worker ends when its own socket ends. ``status`` collects it, and kills it if it does not end in time.
- A forked child of the training process closes its copy of the control socket, so that the parent's is the only one.
"""

from __future__ import annotations

import atexit
import gc
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import import_module
from itertools import count

from streaming.build.decode.images import opencv
from streaming.common.forks import (
    JOB_SIGNALS,
    hear_signals_in_children,
    in_children,
    leave_signals_to_the_job,
    renew_lock,
    signals_held_back,
)
from streaming.common.platforms import working_folder
from streaming.run.engine.workers import main as worker_main

_REQUEST = struct.Struct("<cQ")  # kind of request, number of the worker
_SPAWN, _SPAWN_PROCESS, _STATUS, _KILL, _KILL_UNHEARD = b"+", b"*", b"?", b"!", b"-"
NUMBERS = count()
"""Numbers of workers; unique in this process, since all users share one server."""
_MAX_REQUEST_BYTES = 256
_REPLY = struct.Struct("<?i")  # known, its wait status
_READY = b"ready"
LINGER_S = 60.0
"""Time to keep a server without users, in seconds: starting one takes 1.3 s of CPU and 160 MB (2026-11)."""
_GRACE_S = 0.5
"""Time for workers to end after their sockets: idle ones take milliseconds, busy ones are killed."""
_EXIT_WAIT_S = 2.0
"""Time for a worker whose socket has ended to end with its own exit status."""
_START = (
    "import gc, sys; gc.disable(); sys.path[:] = sys.argv[3:]; "  # garbage collection takes a sixth of the import time
    "from streaming.run.engine.workers.fork_server import serve; serve(int(sys.argv[1]), int(sys.argv[2]))"
)


class ServerClosedError(Exception):
    """The server has ended."""


class ForkServer:
    """The parent's end: starts a server process at once, which is ready after about a second. Thread-safe.

    ``_lock`` guards the control socket: one request at a time, and each reply goes to the request that it answers.
    """

    _is_over = False

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_ready = False
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(None)  # the script may have set another default
        with theirs:
            theirs.settimeout(None)
            paths = [str(path) or working_folder() for path in sys.path]
            command = [sys.executable, *_flags(), "-P", "-X", "faulthandler", "-c", _START]
            try:
                with signals_held_back():  # until it has its own settings
                    self._process = subprocess.Popen(  # noqa: S603  our own interpreter and code
                        [*command, str(theirs.fileno()), str(os.getpid()), *paths],
                        stdin=subprocess.DEVNULL,
                        pass_fds=[theirs.fileno()],
                    )
            except BaseException:
                self._control.close()
                raise

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Return whether the process is running, and takes requests."""
        return not self._is_over and self._process.poll() is None

    def is_starting(self) -> bool:
        """Return whether the server is still importing modules; no worker can be up before that ends."""
        with self._lock:
            if self._is_ready:
                return False
            try:
                self._is_ready = bool(self._control.recv(_REPLY.size, socket.MSG_DONTWAIT))
            except BlockingIOError:
                return True
            except OSError:  # the server has ended
                pass
            return False

    def spawn(self, number: int, sock: socket.socket) -> None:
        """Fork a decode worker that serves ``sock``, without waiting for it.

        Raises:
            ServerClosedError: The server has ended.
        """
        self._fork(_SPAWN, number, sock)

    def spawn_process(self, sock: socket.socket, preload: str) -> int:
        """Fork a process that receives over ``sock`` what to run (see ``context``), and return its number.

        The server first imports the module ``preload``, once for all processes.

        Raises:
            ServerClosedError: The server has ended.
        """
        number = next(NUMBERS)
        self._fork(_SPAWN_PROCESS, number, sock, preload)
        return number

    def _fork(self, what: bytes, number: int, sock: socket.socket, preload: str = "") -> None:
        with self._lock:
            # One message at a time on the control socket: requests do not mix.
            try:
                socket.send_fds(self._control, [_REQUEST.pack(what, number) + preload.encode()], [sock.fileno()])
            except OSError as error:
                self._is_over = True  # the socket ends before the process: the next user needs another server
                raise ServerClosedError(str(error)) from error

    def status(self, number: int, *, kill: bool = False) -> int | None:
        """Return a worker's wait status, as ``os.waitpid`` gives it; None if unknown. The worker is dead on return.

        Args:
            number: The worker, whose socket has ended.
            kill: Kill it at once, without waiting for its end.
        """
        with self._lock:
            try:
                self._control.send(_REQUEST.pack(_KILL if kill else _STATUS, number))
                reply = self._control.recv(_REPLY.size)
                if reply == _READY:
                    self._is_ready = True  # sent once, before all replies: skip it, so that replies match requests
                    reply = self._control.recv(_REPLY.size)
            except OSError:
                return None
        if len(reply) < _REPLY.size:
            return None
        known, status = _REPLY.unpack(reply)
        return status if known else None

    def kill(self, number: int) -> None:
        """Have the server kill a worker once it reads the request. Does not wait for a server that is importing."""
        with self._lock, suppress(OSError):  # the workers of an ended server are gone too
            self._control.send(_REQUEST.pack(_KILL_UNHEARD, number))

    def leave_behind(self) -> None:
        """Close this end in a forked child, so that the parent's is the only one."""
        self._control.close()
        self._process.returncode = 0  # not a child of this process, which may neither wait for it nor report it missing

    def close(self) -> None:
        """End the server and all its workers. They are gone on return."""
        if self.is_starting():  # it has no workers to wait for
            self._process.kill()
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with self._lock:
            # No request is in progress; later ones fail with an OSError.
            self._control.close()


def _flags() -> list[str]:
    """Return this interpreter's flags that change how code behaves, for the workers."""
    flags = ["-O"] * sys.flags.optimize + ["-b"] * sys.flags.bytes_warning
    return [*flags, "-X", f"utf8={sys.flags.utf8_mode}"]


# --- the server process ---


class SharedServer:
    """One fork server for all pools of this process, because importing torch dominates its start. Thread-safe.

    A server without users is kept for a while, so that workers of the next loader start in milliseconds.

    ``_lock`` guards ``_server``, ``_users`` and ``_lingering``.

    Attributes:
        linger_s: Seconds to keep it; None: until this process ends. Read when the last user returns the server.
    """

    def __init__(self) -> None:
        self.linger_s: float | None = LINGER_S
        self._lock = threading.Lock()
        self._lingering: threading.Timer | None = None
        self._exits = False
        self._server: ForkServer | None = None
        self._users = 0
        self._knows_forks = False

    def borrow(self) -> ForkServer:
        """Return the server. Start one if there is none, or if it has died.

        Raises:
            ConfigError: The working directory was deleted. Workers would not start, or would work in another one.
        """
        working_folder()
        if not self._knows_forks:
            self._knows_forks = True
            in_children(self, SharedServer._leave_behind)
            atexit.register(self._exit)
        with self._lock:
            lingering, self._lingering = self._lingering, None  # its timer must not end a server in use
            before, is_over = self._server, self._server is not None and not self._server.is_alive()
            if before is None or is_over:
                server = self._server = ForkServer()
                self._users = 0
            else:
                server = before
            self._users += 1  # the server lives while it has users; the last `give_back` ends it
        if lingering is not None:
            lingering.cancel()
        if before is not None and is_over:
            before.close()
        return server

    def is_up(self) -> bool:
        """Return whether there is a server that has finished its imports."""
        server = self._server
        return server is not None and server.is_alive() and not server.is_starting()

    def give_back(self, server: ForkServer) -> bool:
        """Remove one user. After the last one the server lingers. A replaced server is ended at once.

        Returns:
            Whether the server keeps running.
        """
        with self._lock:
            is_shared = server is self._server
            if is_shared:
                self._users -= 1  # at 0 it lingers, and can be borrowed again
                if self._users:
                    return True
        if not is_shared:
            server.close()
            return False
        return self._lingers() or not self.close()

    def _lingers(self) -> bool:
        """Keep a server without users for a while. Return whether it is kept."""
        if self._exits or self.linger_s == 0:
            return False
        if self.linger_s is None:
            return True
        timer = threading.Timer(self.linger_s, self._end_lingering)
        timer.name, timer.daemon = "shardstream-fork-server", True
        with self._lock:
            # Only the timer recorded here ends the server.
            before, self._lingering = self._lingering, timer
        if before is not None:
            before.cancel()
        try:
            timer.start()
        except RuntimeError:  # the interpreter is shutting down, or no thread can be started
            return False
        return True

    def _end_lingering(self) -> None:
        if self._lingering is threading.current_thread():
            self.close()

    def _exit(self) -> None:
        """End the server when this process exits, even if it has users."""
        self._exits = True
        self.close()

    def _leave_behind(self) -> None:
        """Drop the server in a forked child: it belongs to the parent, and would take requests from both.

        The child's next user starts another one.
        """
        renew_lock(self)
        server, self._server, self._users, self._lingering = self._server, None, 0, None
        if server is not None:
            server.leave_behind()

    def close(self) -> bool:
        """End the server if it has no users. Return whether there is none now."""
        with self._lock:
            if self._users or self._server is None:
                return self._server is None
            server, self._server = self._server, None  # the next borrower starts another one
            lingering, self._lingering = self._lingering, None
        if lingering is not None:
            lingering.cancel()
        server.close()
        return True


SHARED = SharedServer()


def serve(control_fd: int, parent_pid: int) -> None:
    """Run the server's main loop: the child's end."""
    leave_signals_to_the_job()  # workers inherit it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, JOB_SIGNALS)
    opencv()
    gc.collect()
    gc.freeze()
    gc.enable()
    children: dict[int, int] = {}
    with socket.socket(fileno=control_fd) as control:
        parent_fd = _pidfd(parent_pid)
        if os.getppid() == parent_pid:
            watched = [control.fileno()] if parent_fd is None else [control.fileno(), parent_fd]
            with suppress(OSError):
                control.send(_READY)
            while _wait(watched) == control.fileno() and _handle(control, parent_fd, children):
                pass
    _end(children.values())
    os._exit(0)  # nothing to clean up: unloading torch's modules would take longer than everything else


def _handle(control: socket.socket, parent_fd: int | None, children: dict[int, int]) -> bool:
    """Serve one request. Return False if there will be no more."""
    try:
        data, fds, _, _ = socket.recv_fds(control, _MAX_REQUEST_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    except ConnectionError:
        return False
    if len(data) < _REQUEST.size:
        return False
    what, number = _REQUEST.unpack_from(data)
    if len(data) > _REQUEST.size:
        import_module(data[_REQUEST.size :].decode())
        gc.freeze()  # workers neither scan nor copy imported objects
    if what in {_SPAWN, _SPAWN_PROCESS}:
        not_for_it = [control.fileno(), *([] if parent_fd is None else [parent_fd])]
        children[number] = _fork(fds[0], not_for_it, worker_main.run if what == _SPAWN else worker_main.run_process)
        return True
    pid = children.pop(number, None)
    status = 0 if pid is None else _reap(pid, _EXIT_WAIT_S if what == _STATUS else 0.0)
    if what == _KILL_UNHEARD:
        return True
    try:
        control.send(_REPLY.pack(pid is not None, status))
    except ConnectionError:
        return False
    return True


def _fork(fd: int, not_for_it: Iterable[int], be: Callable[[socket.socket, int], int]) -> int:
    server_pid = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about BLAS threads, which handle forks
        pid = os.fork()
    if pid:
        os.close(fd)
        return pid
    code = 1
    try:
        hear_signals_in_children()
        for other in not_for_it:
            os.close(other)
        with socket.socket(fileno=fd) as sock:
            code = be(sock, server_pid)
    except BaseException:  # noqa: BLE001  process boundary: nothing may return to the server's loop
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(code)


def _end(pids: Iterable[int]) -> None:
    """End the workers whose sockets have ended: give them a moment, then kill the rest."""
    deadline_s = time.monotonic() + _GRACE_S
    for pid in pids:
        _reap(pid, max(0.0, deadline_s - time.monotonic()))


def _reap(pid: int, patience_s: float) -> int:
    """Return the wait status of a child that is about to end. Kill it after ``patience_s``."""
    fd = _pidfd(pid)
    ended = fd is not None and bool(select.select([fd], [], [], patience_s)[0])
    if fd is not None:
        os.close(fd)
    if not ended:
        os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _pidfd(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process ends; None on kernels before 5.3."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _wait(fds: list[int]) -> int:
    """Return the last of ``fds`` that is readable: the parent's end takes precedence over requests."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    ready = {fd for fd, _ in poll.poll()}
    return [fd for fd in fds if fd in ready][-1]
