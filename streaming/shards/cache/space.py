"""Reserve the space of a cache before it is written, count it in one file, and make room by evicting the oldest.

The files themselves are the truth: an entry takes its length, a part (an entry being written) takes the length to which
it was extended when its space was reserved. The counter in ``usage`` avoids listing all files for every entry. It is
changed only under its lock, in an order such that a process killed in the middle leaves it too high, never too low:
counted before the part is extended, discounted after the file is gone. A value that is too high is corrected by a new
count before anything is evicted. A counter that is missing, damaged or from before the machine's last start is not
trusted.
"""

from __future__ import annotations

import os
import struct
from contextlib import AbstractContextManager
from dataclasses import dataclass

import crc32c

from streaming.common.counters import Metrics
from streaming.common.platforms import boot_id
from streaming.shards.cache.entry import charged_bytes, file_bytes
from streaming.shards.cache.paths import CachePaths, try_lock_existing
from streaming.storage import Waiting, locked, try_lock, unlock

LOW_WATER = 0.9
"""Share of the limit to evict down to: one scan of the directory pays for a tenth of the cache."""
_LOCK_LIMIT_S = 10.0
"""Upper bound on the time of a lock: far above the longest hold, one scan (0.2 s for 60,000 entries)."""
_ROOM_LIMIT_S = 2.0
"""Time for which an entry may wait for room that other processes make or hold; a reader is waiting for it."""
_RECORD = struct.Struct("<8s36sQI")
_MAGIC = b"shstuse1"


@dataclass(slots=True, eq=False)
class PartFile:
    """An entry being written: an open file that this process keeps locked until it is closed.

    Attributes:
        path: Path of the file.
        fd: The open file.
    """

    path: str
    fd: int

    @property
    def reserved_bytes(self) -> int:
        """Space that is counted for the part."""
        return charged_bytes(os.fstat(self.fd).st_size)

    def close(self) -> None:
        """Release the lock. The file stays."""
        unlock(self.fd)


@dataclass(frozen=True, slots=True, order=True)
class _Resident:
    used_at_ns: int
    path: str
    num_bytes: int


class Space:
    """The space of one cache, as used by this process. Thread-safe: it holds nothing but paths.

    Args:
        layout: Paths of the files.
        limit_bytes: Limit on the total size of the files.
        metrics: Counts ``cache_evictions`` and ``cache_evicted_bytes``.
    """

    def __init__(self, layout: CachePaths, limit_bytes: int, metrics: Metrics) -> None:
        self._layout = layout
        self._limit_bytes = limit_bytes
        self._metrics = metrics

    def fits(self, num_bytes: int) -> bool:
        """Return whether an entry of ``num_bytes`` could ever be kept."""
        return charged_bytes(file_bytes(num_bytes)) <= self._limit_bytes

    def reserve(self, part: PartFile, num_bytes: int) -> None:
        """Add an entry of ``num_bytes`` to the count, and extend ``part`` to its length. Evict if necessary.

        Raises:
            TimeoutError: Another process holds a lock or all of the room, and makes no progress.
            OSError: The disk fails.
        """
        length_bytes = file_bytes(num_bytes)
        need_bytes = charged_bytes(length_bytes)
        waiting = Waiting(_ROOM_LIMIT_S)
        while True:
            with self._locked() as usage:
                used_bytes = self._used(usage)
                if used_bytes + need_bytes <= self._limit_bytes:
                    # Counted before it takes room: the counter is never below the size of the files.
                    _write(usage, used_bytes + need_bytes)
                    os.ftruncate(part.fd, length_bytes)
                    return
            if not self._make_room_alone(need_bytes) and not waiting.pause():
                raise TimeoutError(
                    f"{self._layout.root}: no room for {need_bytes} bytes after {_ROOM_LIMIT_S:g} s: other processes "
                    f"hold it, or are still freeing it. Is one of them stopped, or is the limit of {self._limit_bytes} "
                    "bytes too small?"
                )

    def drop(self, part: PartFile) -> None:
        """Delete ``part`` and discount its reservation. It stays open and locked.

        Raises:
            OSError: It cannot be deleted, or discounted. Then the counter is too high, which is harmless.
        """
        reserved_bytes = part.reserved_bytes
        if not reserved_bytes:
            os.unlink(part.path)
            return
        with self._locked() as usage:
            os.unlink(part.path)  # gone before it is discounted, for the same reason
            _discount(usage, reserved_bytes)

    def sweep(self) -> None:
        """Delete the parts of dead processes. Those of living ones are locked, and stay."""
        for path in self._layout.part_paths():
            if (fd := try_lock_existing(path)) is not None:
                part = PartFile(path, fd)
                try:
                    self.drop(part)
                finally:
                    part.close()

    def _locked(self) -> AbstractContextManager[int]:
        return locked(self._layout.usage, _LOCK_LIMIT_S)

    def _used(self, usage: int) -> int:
        used_bytes = _read(usage)
        return self._count(usage)[0] if used_bytes is None else used_bytes

    def _count(self, usage: int) -> tuple[int, list[_Resident]]:
        """Count all files again, deleting parts of dead processes: (bytes used, entries). Call with the lock held.

        Parts are listed before entries, so that a part that is renamed meanwhile counts twice rather than not at all.
        """
        used_bytes = 0
        for path in self._layout.part_paths():
            used_bytes += _live_bytes(path)
        residents = []
        for file in self._layout.entry_files():
            try:
                status = file.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            residents.append(_Resident(status.st_mtime_ns, file.path, charged_bytes(status.st_size)))
            used_bytes += residents[-1].num_bytes
        _write(usage, used_bytes)
        return used_bytes, residents

    def _make_room_alone(self, need_bytes: int) -> bool:
        """Make room like :meth:`_make_room`. Return False if another process is doing so, which may be enough."""
        evicting = try_lock(self._layout.evict)
        if evicting is None:
            return False
        try:
            return self._make_room(need_bytes)
        finally:
            unlock(evicting)

    def _make_room(self, need_bytes: int) -> bool:
        """Evict down to the low-water mark. Return whether ``need_bytes`` then fit. The evicting lock is held."""
        with self._locked() as usage:
            used_bytes, residents = self._count(usage)
        if used_bytes + need_bytes > self._limit_bytes:
            goal_bytes = min(int(LOW_WATER * self._limit_bytes), self._limit_bytes - need_bytes)
            for resident in sorted(residents):
                if used_bytes <= goal_bytes:
                    break
                used_bytes -= self._evict(resident)
        return used_bytes + need_bytes <= self._limit_bytes

    def _evict(self, resident: _Resident) -> int:
        """Delete one entry, unless it was used since it was listed. Return the freed bytes.

        A process that is reading it is not affected: an open file outlives its name.
        """
        with self._locked() as usage:
            try:
                if os.stat(resident.path, follow_symlinks=False).st_mtime_ns != resident.used_at_ns:
                    return 0
                os.unlink(resident.path)
            except FileNotFoundError:
                return 0
            _discount(usage, resident.num_bytes)
        self._metrics.add("cache_evictions")
        self._metrics.add("cache_evicted_bytes", resident.num_bytes)
        return resident.num_bytes


def _live_bytes(path: str) -> int:
    """Return the space reserved for the part at ``path``. Delete the part if its writer is dead."""
    try:
        fd = try_lock(path, create=False)
        if fd is None:
            return charged_bytes(os.stat(path, follow_symlinks=False).st_size)
    except FileNotFoundError:
        return 0
    try:
        os.unlink(path)
    finally:
        unlock(fd)
    return 0


def _read(usage: int) -> int | None:
    record = os.pread(usage, _RECORD.size, 0)
    if len(record) != _RECORD.size:
        return None
    magic, boot, used_bytes, crc = _RECORD.unpack(record)
    if magic != _MAGIC or crc != crc32c.crc32c(record[:-4]) or boot.rstrip(b"\0") != boot_id():
        return None
    return int(used_bytes)


def _write(usage: int, used_bytes: int) -> None:
    body = _RECORD.pack(_MAGIC, boot_id(), used_bytes, 0)[:-4]
    os.pwrite(usage, body + struct.pack("<I", crc32c.crc32c(body)), 0)


def _discount(usage: int, num_bytes: int) -> None:
    used_bytes = _read(usage)
    if used_bytes is not None:
        _write(usage, max(0, used_bytes - num_bytes))
