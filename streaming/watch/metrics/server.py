"""Report on a Unix socket what a loader is doing, for ``shard_tools show --run``."""

from __future__ import annotations

import errno
import json
import logging
import os
import selectors
import socket
import stat
import threading
import time
import weakref
from contextlib import suppress
from typing import Any

from streaming.common.forks import Maker, in_children
from streaming.errors import ConfigError
from streaming.storage import locked
from streaming.types import VERSION
from streaming.watch.metrics.exported import Observed, check_observed, observe
from streaming.watch.metrics.waits import waits

FORMAT = 1
"""Version of the answer's format."""
_ANSWER_S = 2.0  # time-out for a client that stops reading
_LOCK_S = 10.0  # maximum wait for another process that makes the same file
_MOST_TEXT = 20_000  # characters of describe()
_log = logging.getLogger(__name__)


def told(loader: Observed, begun_s: float) -> dict[str, Any]:
    """Return the current work of a loader as JSON-serializable values; in any thread."""
    found, describe = observe(loader), getattr(loader, "describe", str)
    return {
        "format": FORMAT,
        "version": VERSION,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "rank": found.rank,
        "data_rank": found.data_rank,
        "world_size": found.world_size,
        "epoch": found.epoch,
        "samples_seen": found.samples_seen,
        "served_s": time.monotonic() - begun_s,
        "numbers": dict(found.numbers),
        "readers": {str(data_rank): dict(numbers) for data_rank, numbers in found.readers.items()},
        "headspace": waits(found.numbers).share,
        "describe": describe()[:_MOST_TEXT],
    }


class LoaderSocket:
    """A socket on which a loader answers, until ``close`` or the end of the process or of the loader.

    Attributes:
        path: The socket's file.
    """

    def __init__(self, loader: Observed, path: str) -> None:
        self.path = path
        self._maker = Maker("this socket of a loader", "Call serve() here with another path")
        self._begun_s = time.monotonic()
        self._socket = _listening(path)
        self._number = os.lstat(path).st_ino
        self._woken, self._wake = socket.socketpair()
        self._loader = weakref.ref(loader, self._lost)
        self._thread = threading.Thread(target=self._serve, name="shardstream-serve", daemon=True)
        in_children(self, LoaderSocket._leave_behind)
        self._at_end = weakref.finalize(self, _unlink, path, self._number, os.getpid())
        self._thread.start()

    def close(self) -> None:
        """Stop answering, and remove the file. May be called repeatedly."""
        if not self._maker.is_here:
            return
        self._lost()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _lost(self, _: object = None) -> None:
        """Make the thread end; the byte wakes it up."""
        with suppress(OSError):  # the thread has ended
            self._wake.send(b"\0")

    def _leave_behind(self) -> None:
        """Close the descriptors in a forked child, which would keep the socket open after the parent has ended."""
        self._at_end.detach()
        for one in (self._socket, self._woken, self._wake):
            one.close()

    def _serve(self) -> None:
        try:
            with selectors.DefaultSelector() as ready:
                ready.register(self._socket, selectors.EVENT_READ)
                ready.register(self._woken, selectors.EVENT_READ)
                while all(key.fileobj is self._socket for key, _ in ready.select()):
                    self._answer()
        finally:
            self._at_end()
            for one in (self._socket, self._woken, self._wake):
                one.close()

    def _answer(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError:  # the client is gone
            return
        with connection, suppress(OSError):
            connection.settimeout(_ANSWER_S)
            connection.sendall(self._text())

    def _text(self) -> bytes:
        loader = self._loader()
        if loader is None:
            return b""
        try:
            return json.dumps(told(loader, self._begun_s)).encode() + b"\n"
        except Exception as error:  # noqa: BLE001  a thread border; the next call is answered
            _log.exception("the loader cannot be described")
            return json.dumps({"format": FORMAT, "error": f"{type(error).__name__}: {error}"}).encode() + b"\n"


def serve(loader: Observed, path: str | os.PathLike[str] = "run/rank{rank}.sock") -> LoaderSocket:
    """Let ``shard_tools show --run PATH`` look at this loader while it trains.

    ::

        streaming.metrics.serve(loader)  # then: shard_tools show URL --run 'run/*.sock'

    A thread answers each connection to a Unix socket with one line of JSON: numbers, the work of each stage, rank and
    epoch. Only this user may connect (mode 0600), and data sent by clients is not read. The thread holds only a weak
    reference to the loader; when the loader ends, the thread ends and removes the file.

    Args:
        loader: A ``DataLoader``, a ``DeviceMeshFetcher``, or a ``DevicePrefetcher`` over one.
        path: The socket's file; its folder is made if necessary. ``{rank}`` is replaced by the current rank of this
            process, so call this after torch.distributed is initialized. A file that a killed job left is replaced.

    Returns:
        An object that can end the service before the loader ends. It need not be kept.

    Raises:
        ConfigError: Another process answers there, another kind of file has the name, or the file cannot be made.
    """
    check_observed(loader, "serve")
    return LoaderSocket(loader, os.path.abspath(os.fspath(path).replace("{rank}", str(observe(loader).rank))))


def _listening(path: str) -> socket.socket:
    """Return a socket that listens at ``path``, and that only this user may open.

    Raises:
        ConfigError: The path is taken, or the socket cannot be made.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with locked(f"{path}.lock", _LOCK_S):  # so that two processes do not replace the same file
            try:
                _make_way(path)
                made.bind(path)
                os.chmod(path, 0o600)  # before it listens: no client can connect until then
                made.listen()
            finally:
                os.unlink(f"{path}.lock")
        made.setblocking(False)  # noqa: FBT003
    except OSError as error:
        made.close()
        long = "too long" in str(error) or error.errno == errno.ENAMETOOLONG
        cure = "the system allows about 100 characters; give a shorter one" if long else "give another path"
        raise ConfigError(f"serve: {path}: {error.strerror or error}; {cure}") from error
    except BaseException:
        made.close()
        raise
    return made


def _make_way(path: str) -> None:
    """Remove the socket of a process that has ended.

    Raises:
        ConfigError: The process is alive, or the file is not a socket.
    """
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ConfigError(f"serve: {path} is there already and is no socket; give another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_ANSWER_S)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)  # left by a killed process
            return
        except (BlockingIOError, TimeoutError):
            pass  # the process is busy
    raise ConfigError(
        f"serve: another loader answers at {path}. Close that first, or give each its own path, with {{rank}} in it: "
        'serve(loader, "run/rank{rank}.sock")'
    )


def _unlink(path: str, number: int, pid: int) -> None:
    """Remove the file if it is still ours."""
    with suppress(OSError):
        if os.getpid() == pid and os.lstat(path).st_ino == number:
            os.unlink(path)
