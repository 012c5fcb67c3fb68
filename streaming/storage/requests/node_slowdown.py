"""Share a slowdown among a user's processes on a node: two numbers in a file that only a refusal creates.

There are no locks to clean up, and no process owns the file: flock ends with its holder. A file that is damaged, from
another boot, or older than a recovery counts as missing. If there can be no file, each process is on its own.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from streaming.storage.base.locks import lock_open
from streaming.storage.requests.throttle import LEAST_SHARE, RECOVERY_S, Slowdown, SlowdownState
from streaming.types import override

_LAYOUT = struct.Struct("<ddI")  # share, seconds of the monotonic clock, CRC32 of the two
_BOOT = "/proc/sys/kernel/random/boot_id"


class NodeSlowdown(SlowdownState):
    """The slowdown of one store on this node.

    Args:
        store: Identifies endpoint and bucket.
        folder: Parent of this user's directory; default: the system's temporary one.
    """

    def __init__(self, store: str, folder: str | None = None) -> None:
        super().__init__()
        self._store = store
        self._parent = folder
        self._name: str | None = None

    @override
    def read(self) -> Slowdown:
        with suppress(OSError), self._open(os.O_RDONLY) as file:
            return _later(_parse(os.pread(file, _LAYOUT.size, 0)), self._state)
        return self._state

    @override
    def change(self, how: Callable[[Slowdown], Slowdown]) -> Slowdown:
        """See :class:`SlowdownState`. If the file is locked, the change is made in this process only."""
        with suppress(OSError), self._open(os.O_RDWR | os.O_CREAT) as file:
            if not lock_open(file, 0):
                return super().change(how)
            self._state = _later(_parse(os.pread(file, _LAYOUT.size, 0)), self._state)
            changed = how(self._state)
            numbers = _LAYOUT.pack(changed.share, changed.at_s, 0)[:16]
            os.pwrite(file, numbers + struct.pack("<I", zlib.crc32(numbers)), 0)
            self._state = changed
            return changed
        return super().change(how)

    @contextmanager
    def _open(self, flags: int) -> Iterator[int]:
        """Open the file, in a directory that no other user can access.

        Raises:
            OSError: There is no such file, or others can access it.
        """
        user = os.getuid()
        parent = self._parent or tempfile.gettempdir()
        path = os.path.join(parent, f"shardstream-of-{user}")
        if flags & os.O_CREAT:
            with suppress(FileExistsError):
                os.mkdir(path, 0o700)
        if self._name is None:
            self._name = f"busy-{_digest(self._store)}"
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _check_private(os.fstat(folder), user, stat.S_IFDIR)
            file = os.open(self._name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=folder)
        finally:
            os.close(folder)
        try:
            _check_private(os.fstat(file), user, stat.S_IFREG)
            yield file
        finally:
            os.close(file)


def _check_private(found: os.stat_result, user: int, kind: int) -> None:
    if stat.S_IFMT(found.st_mode) != kind or found.st_uid != user or found.st_mode & 0o077:
        raise PermissionError("not this user's alone")


def _digest(store: str) -> str:
    """Return a digest of the store and this boot of the machine; it contains no secret."""
    boot = b""
    with suppress(OSError), open(_BOOT, "rb") as file:
        boot = file.read().strip()
    return hashlib.blake2b(boot + store.encode(), digest_size=16).hexdigest()


def _parse(data: bytes) -> Slowdown:
    """Parse the content of the file, if it is valid."""
    if len(data) == _LAYOUT.size:
        share, at_s, crc = _LAYOUT.unpack(data)
        age_s = time.monotonic() - at_s
        if zlib.crc32(data[:16]) == crc and LEAST_SHARE <= share <= 1 and 0 <= age_s <= RECOVERY_S:
            return Slowdown(share, at_s)
    return Slowdown()


def _later(one: Slowdown, other: Slowdown) -> Slowdown:
    return one if one.at_s >= other.at_s else other
