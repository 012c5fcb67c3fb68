"""Lock between processes with flock, which ends with its holder, and with a time limit for waits.

Any user who can open a file, even read-only, can lock it forever. So every wait has a limit, and only the owner of lock
files can open them.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

_FIRST_DELAY_S = 0.0005
_LAST_DELAY_S = 0.02


class Waiting:
    """Growing, jittered pauses up to a time limit, because flock has no timed wait.

    Args:
        limit_s: Seconds from now on after which :meth:`pause` returns False.
    """

    def __init__(self, limit_s: float) -> None:
        self._end_s = time.monotonic() + limit_s
        self._delay_s = _FIRST_DELAY_S

    def pause(self) -> bool:
        """Sleep briefly and return True; once the limit has passed, return False at once."""
        if time.monotonic() >= self._end_s:
            return False
        jitter = time.monotonic_ns() % 1000 / 2000  # does not consume the user's random numbers
        time.sleep(self._delay_s * (0.5 + jitter))
        self._delay_s = min(1.5 * self._delay_s, _LAST_DELAY_S)
        return True


def try_lock(path: str, *, create: bool = True) -> int | None:
    """Return an open descriptor of the file at ``path`` that holds its lock; None if another process holds it.

    The file is the one that has this name now, not one that was unlinked or renamed meanwhile. Release it with
    :func:`unlock`.

    Raises:
        FileNotFoundError: There is no such file and ``create`` is False, or no such directory.
        OSError: It cannot be opened, or the file system has no locks.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
    while True:
        fd = os.open(path, flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_at(fd, path):
                return fd
        except BlockingIOError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def lock_open(fd: int, limit_s: float) -> bool:
    """Lock an open file until its last descriptor is closed; False: another process held it for ``limit_s``.

    Raises:
        OSError: The file system has no locks.
    """
    waiting = Waiting(limit_s)
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not waiting.pause():
                return False
        else:
            return True


def unlock(fd: int) -> None:
    """Release the lock, even if a forked child has inherited the descriptor, and close it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


@contextmanager
def locked(path: str, limit_s: float) -> Iterator[int]:
    """Hold the lock of the file at ``path``, created if necessary; yields its descriptor.

    Raises:
        TimeoutError: Another process held it for ``limit_s`` seconds.
        PermissionError: Other users can open it, so they could hold it.
        OSError: See :func:`try_lock`.
    """
    waiting = Waiting(limit_s)
    while (fd := try_lock(path)) is None:
        if not waiting.pause():
            raise TimeoutError(f"{path}: another process has held this lock for {limit_s:g} s; is it stopped?")
    try:
        _check_private(fd, path)
        yield fd
    finally:
        unlock(fd)


def _check_private(fd: int, path: str) -> None:
    found = os.fstat(fd)
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(f"{path}: other users can open this lock; remove it, or choose a folder of your own")


def is_at(fd: int, path: str) -> bool:
    """Return whether ``path`` is the open file."""
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), there)
