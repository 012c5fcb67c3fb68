"""A fork server of this process's that is forked, not started: an interpreter of its own imports for two seconds.

For processes that were forked themselves and begin with all that a fork server needs. True ones, with their own
interpreters, are started by test_workers.py, test_shutdown_processes.py and every test that uses workers in pytest's
own processes.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress

from streaming.common.forks import signals_held_back
from streaming.run.engine.workers.fork_server import SHARED, ForkServer, serve


class _Process:
    """What ``ForkServer`` knows of a ``subprocess.Popen``, for a process that was forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            with suppress(ChildProcessError):
                found, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if found else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        descriptor = os.pidfd_open(self.pid)
        try:
            if not select.select([descriptor], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("the fork server", timeout or 0)
        finally:
            os.close(descriptor)
        return self.poll() or 0

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def have_a_server() -> None:
    """Fork the server that the first loaders of this process share. To be called while it has one thread."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    with signals_held_back():  # until it has its own settings, as with ``ForkServer``
        pid = os.fork()
        if not pid:
            ours.close()
            serve(theirs.detach(), parent)
    theirs.close()
    server = ForkServer.__new__(ForkServer)
    server._lock, server._is_ready, server._control = threading.Lock(), False, ours
    server._process = _Process(pid)  # type: ignore[assignment]
    SHARED._server, SHARED._path = server, list(sys.path)
