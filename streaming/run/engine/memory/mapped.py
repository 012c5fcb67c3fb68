"""Map chunks of files on this machine's own disks into the arena instead of copying them.

The page cache has these bytes already. Copying costs a read, page faults on untouched memory, and the zeroing of that
memory: most of the time of a pass over local shards. But a map does not guarantee that the bytes remain the checked
ones: writes to the file show up in the map, and if the file is truncated, the system kills a process that reads past
the new end.

Therefore files are mapped under a *read lease* of the kernel: a process that wants to write to such a file, or to
truncate it, blocks until the lease is released (at most ``/proc/sys/fs/lease-break-time``, 45 s). A thread that checks
four times a second copies the mapped parts of the file and releases the lease. If no lease is available (network file
systems, files of other users, files open for writing), chunks are read instead.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from streaming.errors import ChecksumError
from streaming.order.plan.memory import LEAST_MAPPED_BYTES
from streaming.run.engine.memory.arena import PAGE_BYTES, Arena
from streaming.shards.fetch.read import FetchRange, checked_range
from streaming.storage import Checked, local_path

LEAST_BYTES = LEAST_MAPPED_BYTES
_DESCRIPTORS_SHARE = 4
"""All loaders together map files up to this fraction of the open file limit (``ulimit -n``). Chunks of other files are
read."""
_LOOK_EVERY_S = 0.25
_OWN_DISKS = frozenset({"ext2", "ext3", "ext4", "xfs", "f2fs", "overlay", "tmpfs"})
"""File systems whose pages come from this machine. On a network file system, a lost connection is an error of
``read``, but a fatal signal in a map."""
_HAS_LEASES = hasattr(fcntl, "F_SETLEASE")

_Left = tuple[int, int, str]
"""First byte in the arena, end (exclusive), URL of the mapped file."""

ReadsWhole = Callable[[FetchRange], bool]
"""Returns whether all bytes of a range are read."""


@dataclass(slots=True)
class _File:
    """A file under lease.

    Attributes:
        descriptor: Open for reading.
        mapped: Mapped ranges, by the place of their bytes in the arena.
        coming: Number of maps being made.
        wanted_back: Another process is waiting for the lease.
    """

    descriptor: int
    mapped: dict[int, FetchRange] = field(default_factory=dict)
    coming: int = 0
    wanted_back: bool = False


class NoMaps:
    """Map no chunk: all are read."""

    fail: Callable[[BaseException], None]

    def skew_bytes(self, wanted: FetchRange) -> int:  # noqa: ARG002
        """See ``FileMaps``."""
        return 0

    def map(self, wanted: FetchRange, start: int, data: memoryview) -> Checked | None:  # noqa: ARG002
        """See ``FileMaps``."""
        return None

    def unmap(self, wanted: FetchRange, start: int) -> None:
        """See ``FileMaps``."""

    def close(self) -> None:
        """See ``FileMaps``."""


class FileMaps:
    """The maps of one arena. Thread-safe. ``_lock`` guards ``_files`` and ``_left``.

    A range that is no longer read stays mapped until another takes its place, in the same system call: unmapping costs
    the calling thread as much as a batch, and would wait for all pages that others are reading.

    Args:
        arena: Private memory of this process.
        reads_whole: Returns whether a range is read completely; others are not mapped, since that would read all of
            them.

    Attributes:
        fail: Called with the exception that ended the thread that releases leases.
    """

    def __init__(self, arena: Arena, reads_whole: ReadsWhole) -> None:
        self.fail: Callable[[BaseException], None] = lambda _: None
        self._arena = arena
        self._reads_whole = reads_whole
        self._lock = threading.RLock()  # the garbage collector may close a loader in any thread
        self._files: dict[str, _File] = {}
        self._left: list[_Left] = []
        self._own_devices = _devices_of_own_disks() if _HAS_LEASES else frozenset()
        self._closed = threading.Event()
        self._watcher: threading.Thread | None = None

    @staticmethod
    def skew_bytes(wanted: FetchRange) -> int:
        """Return the padding before a range, so that it begins at the same offset within a page as in the file."""
        return wanted.skew_bytes

    def map(self, wanted: FetchRange, start: int, data: memoryview) -> Checked | None:
        """Map a range, one alone, to ``data``, at byte ``start`` of the arena, and check its bytes.

        A range with less room than it needs is never mapped.

        Returns:
            The check that its bytes match; None if the range must be read instead: its memory is then ordinary memory.
        """
        first, stop = _place_of(wanted, start, len(data))
        file, was_left = self._take(wanted, first, stop, is_whole=len(data) == wanted.num_bytes)
        if file is None:
            if was_left:
                self._arena.unmap_file(first, stop - first)
            return None
        checked: Checked | None = None
        skew = start - first
        offset, num_bytes = wanted.byte_start - skew, wanted.num_bytes + skew
        try:
            self._arena.map_file(first, num_bytes, file.descriptor, offset)
            found = checked_range(wanted, data)
            checked = found if found.is_summed else None
        except ChecksumError:  # reading it reports damage, after a second look
            pass
        except OSError:  # the file is too short, a page cannot be read, or no support: reading it reports which
            pass
        finally:
            with self._lock:
                file.coming -= 1  # Invariant: from here on the range counts as mapped or as never requested
                if checked is not None:
                    file.mapped[start] = wanted
                else:
                    self._arena.unmap_file(first, num_bytes)
                self._close_unused(wanted.url, file)
        return checked

    def unmap(self, wanted: FetchRange, start: int) -> None:
        """Unmap a range that is no longer read, with those beside it."""
        with self._lock:
            for place, part in wanted.parts:
                file = self._files.get(part.url)
                if file is not None and file.mapped.pop(start + place, None) is not None:
                    # Still mapped but unused: the next `_tidy` closes a file with only such maps.
                    self._left.append((*_place_of(part, start + place), part.url))

    def give_back(self) -> None:
        """Copy the mapped parts of files that other processes want to change, and release them; undo left-over maps."""
        with self._lock:
            self._tidy()
            for url, file in list(self._files.items()):
                if self._closed.is_set():
                    return
                if fcntl.fcntl(file.descriptor, fcntl.F_GETLEASE) == fcntl.F_RDLCK:
                    continue
                file.wanted_back = True
                for start, wanted in file.mapped.items():
                    first, stop = _place_of(wanted, start)
                    self._arena.copy_file(first, stop - first)
                file.mapped.clear()  # all copied: nothing refers to the file any more, so its lease may be released
                self._close_unused(url, file)

    def close(self) -> None:
        """Release all files. The maps are freed with the arena."""
        self._closed.set()
        with self._lock:
            self._left.clear()  # no map keeps a file any more; maps still being made close theirs when done
            for url, file in list(self._files.items()):
                file.mapped.clear()
                self._close_unused(url, file)
        if self._watcher not in (None, threading.current_thread()):
            self._watcher.join()

    def _take(self, wanted: FetchRange, first: int, stop: int, *, is_whole: bool) -> tuple[_File | None, bool]:
        """Return the file to map a range from (None: read it), and whether another file is mapped at its place."""
        maps = is_whole and wanted.num_bytes >= LEAST_BYTES and self._reads_whole(wanted)
        with self._lock:
            was_left = self._forget(first, stop)
            file = (self._files.get(wanted.url) or self._open(wanted.url)) if maps else None
            if file is None or file.wanted_back:
                return None, was_left
            file.coming += 1  # the file stays open, and under lease, until that range is mapped
        return file, was_left

    def _forget(self, first: int, stop: int) -> bool:
        """Remove all left-over maps in ``[first, stop)``, whose room is needed; return whether there were any."""
        found = [one for one in self._left if one[0] < stop and first < one[1]]
        for one in found:
            self._left.remove(one)
            for a, b in ((one[0], first), (stop, one[1])):
                if a < b:
                    self._left.append((a, b, one[2]))
        for url in {url for _, _, url in found} & self._files.keys():
            self._close_unused(url, self._files[url])
        return bool(found)

    def _tidy(self) -> None:
        left, self._left = self._left, []
        for first, stop, _ in left:
            self._arena.unmap_file(first, stop - first)
        for url in {url for _, _, url in left} & self._files.keys():
            self._close_unused(url, self._files[url])

    def _open(self, url: str) -> _File | None:
        if self._closed.is_set():
            return None
        if not _DESCRIPTORS.take():
            self._tidy()  # closes files that have only left-over maps
            if not _DESCRIPTORS.take():
                return None
        try:
            descriptor = _leased(local_path(url), self._own_devices)
        except OSError:
            _DESCRIPTORS.give()
            return None
        file = self._files[url] = _File(descriptor)
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="shardstream-leases", daemon=True)
            self._watcher.start()
        return file

    def _watch(self) -> None:
        try:
            while not self._closed.wait(_LOOK_EVERY_S):
                self.give_back()
        except BaseException as error:  # noqa: BLE001  thread boundary: without it, maps are not safe to read
            self.fail(error)

    def _close_unused(self, url: str, file: _File) -> None:
        if file.mapped or file.coming or any(one[2] == url for one in self._left):
            return
        if self._files.get(url) is file:
            del self._files[url]
        with suppress(OSError):  # the lease was broken; a forked process with the same open file must not keep it
            fcntl.fcntl(file.descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        os.close(file.descriptor)
        _DESCRIPTORS.give()


class _Descriptors:
    """Count the descriptors of mapped files in this process, up to a fraction of the limit. Thread-safe.

    The lock guards the count.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_taken = 0

    def take(self) -> bool:
        """Count one more descriptor if there is room; the rest of the limit belongs to the user and everything else."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        with self._lock:
            # _num_taken descriptors are open or about to be, never more than their share of the limit.
            if soft != resource.RLIM_INFINITY and self._num_taken >= soft // _DESCRIPTORS_SHARE:
                return False
            self._num_taken += 1
            return True

    def give(self) -> None:
        """Count one descriptor less."""
        with self._lock:
            # Only for a descriptor that take() counted.
            self._num_taken -= 1


_DESCRIPTORS = _Descriptors()


def _place_of(wanted: FetchRange, start: int, num_bytes: int | None = None) -> tuple[int, int]:
    """Return the arena's pages that ``num_bytes`` of a range at byte ``start`` take: first page, end (exclusive)."""
    stop = -(-(start + (wanted.num_bytes if num_bytes is None else num_bytes)) // PAGE_BYTES) * PAGE_BYTES
    return start - FileMaps.skew_bytes(wanted), stop


def _leased(path: str, own_devices: frozenset[int]) -> int:
    """Open a file under a lease and return its descriptor.

    Raises:
        OSError: The file does not exist, or no lease is available.
    """
    if os.stat(path).st_dev not in own_devices:
        raise OSError(errno.ENOLCK, "not on a disk of this machine", path)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # ignored by default; SIGIO, the default, would kill the process
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _devices_of_own_disks() -> frozenset[int]:
    """Return the device numbers of file systems whose pages may be mapped; empty if the system does not report them."""
    found = set()
    with suppress(OSError), open("/proc/self/mountinfo") as file:
        for line in file:
            head, _, tail = line.partition(" - ")
            major, _, minor = head.split()[2].partition(":")
            if tail.split()[0] in _OWN_DISKS:
                found.add(os.makedev(int(major), int(minor)))
    return frozenset(found)
