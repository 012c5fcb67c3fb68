"""Map chunks of files on this machine's own disks into the arena, where others are copied into it.

The page cache has these bytes already. A copy costs a read, memory that nobody has touched before, and the clearing of
that memory: most of what a pass over local shards takes. What a map lacks is that the bytes stay as they were when they
were checked: who writes into the file writes into the map, and who cuts the file short makes the system kill whoever
reads behind the new end.

So files are mapped under a *read lease* of the kernel: who wants to write into such a file, or to cut it short, waits
until the lease is given back (at most ``/proc/sys/fs/lease-break-time``, 45 s). A thread that looks four times a
second copies what is mapped of the file and gives the lease back. Where there is no lease (network file systems, files
of other users, files that are open for writing), chunks are read.
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

from streaming.engine.memory.arena import PAGE_BYTES, Arena
from streaming.fetch.read import FetchRange, matches_sums
from streaming.platforms import will_need
from streaming.storage import local_path

LEAST_BYTES = 256 << 10
"""Below this size a copy costs no more than the system calls of a map."""
_DESCRIPTORS_SHARE = 4
"""Files are mapped up to this part of the limit of open files (``ulimit -n``), all loaders together; chunks of
further ones are read."""
_LOOK_EVERY_S = 0.25
_OWN_DISKS = frozenset({"ext2", "ext3", "ext4", "xfs", "f2fs", "overlay", "tmpfs"})
"""Where pages of files come from this machine. On network file systems a lost connection is an error of ``read``, and
would be a signal that kills here."""
_HAS_LEASES = hasattr(fcntl, "F_SETLEASE")

_Left = tuple[int, int, str]
"""First byte in the arena, one past the last, URL of what is mapped there."""

ReadsWhole = Callable[[FetchRange], bool]
"""Whether all bytes of a range are wanted."""


@dataclass(slots=True)
class _File:
    """A file under lease.

    Attributes:
        descriptor: Open for reading.
        mapped: Ranges that are mapped, by where in the arena their bytes lie.
        coming: Maps that are being made.
        wanted_back: Somebody waits for the lease.
    """

    descriptor: int
    mapped: dict[int, FetchRange] = field(default_factory=dict)
    coming: int = 0
    wanted_back: bool = False


class FileMaps:
    """The maps of one arena. Thread-safe.

    A range that nobody reads any more stays mapped until another takes its place, in the same system call. To undo a
    map costs the thread that does it as much as a batch, and it would wait for all pages that others have brought.

    Args:
        arena: Private memory of this process.
        reads_whole: Others are not mapped, since that would read all of them.

    Attributes:
        fail: Told of the exception that the thread ended with which gives leases back.
    """

    def __init__(self, arena: Arena, reads_whole: ReadsWhole) -> None:
        self.fail: Callable[[BaseException], None] = lambda _: None
        self._arena = arena
        self._reads_whole = reads_whole
        self._lock = threading.RLock()  # a loader may be closed by the garbage collector, in whichever thread
        self._files: dict[str, _File] = {}
        self._left: list[_Left] = []
        self._own_devices = _devices_of_own_disks() if _HAS_LEASES else frozenset()
        self._closed = threading.Event()
        self._watcher: threading.Thread | None = None

    @staticmethod
    def skew_bytes(wanted: FetchRange) -> int:
        """Return the room that is wanted before a range: it is to begin as far into a page as in the file."""
        return wanted.byte_start % PAGE_BYTES if wanted.num_bytes >= LEAST_BYTES else 0

    def map(self, wanted: FetchRange, start: int, data: memoryview) -> bool:
        """Map the bytes of a range, checked, to ``data``, byte ``start`` of the arena; not to less room than they take.

        Returns:
            False: they are to be read, into what is ordinary memory now.
        """
        first, stop = _place_of(wanted, start, len(data))
        file, was_left = self._take(wanted, first, stop, is_whole=len(data) == wanted.num_bytes)
        if file is None:
            if was_left:
                self._arena.unmap_file(first, stop - first)
            return False
        done = False
        skew = start - first
        offset, num_bytes = wanted.byte_start - skew, wanted.num_bytes + skew
        try:
            will_need(file.descriptor, offset, num_bytes)  # all of it is on its way when the first page is asked for
            self._arena.map_file(first, num_bytes, file.descriptor, offset)
            done = matches_sums(wanted, data)
        except OSError:  # the file is too short, a page cannot be read, or the system cannot do it: reading says which
            pass
        finally:
            with self._lock:
                file.coming -= 1  # from here on the range counts as mapped, or as never asked for: nothing in between
                if done:
                    file.mapped[start] = wanted
                else:
                    self._arena.unmap_file(first, num_bytes)
                self._close_unused(wanted.url, file)
        return done

    def unmap(self, wanted: FetchRange, start: int) -> None:
        """Unmap it: nobody reads there any more."""
        with self._lock:
            file = self._files.get(wanted.url)
            if file is not None and file.mapped.pop(start, None) is not None:
                # Still mapped, but nobody's: a file of which only such maps are left is closed by the next `_tidy`.
                self._left.append((*_place_of(wanted, start), wanted.url))

    def give_back(self) -> None:
        """Copy what is mapped of the files that somebody wants to change, and let him; undo what is left over."""
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
                file.mapped.clear()  # all copied: nothing shows the file any more, so its lease may go
                self._close_unused(url, file)

    def close(self) -> None:
        """Give all files back. The maps go with the arena."""
        self._closed.set()
        with self._lock:
            self._left.clear()  # no file is held for a map any more; those still coming close theirs when they come
            for url, file in list(self._files.items()):
                file.mapped.clear()
                self._close_unused(url, file)
        if self._watcher not in (None, threading.current_thread()):
            self._watcher.join()

    def _take(self, wanted: FetchRange, first: int, stop: int, *, is_whole: bool) -> tuple[_File | None, bool]:
        """Return the file to map a range of, None if it is to be read; and whether its place shows another file."""
        maps = is_whole and wanted.sums and wanted.num_bytes >= LEAST_BYTES and self._reads_whole(wanted)
        with self._lock:
            was_left = self._forget(first, stop)
            file = (self._files.get(wanted.url) or self._open(wanted.url)) if maps else None
            if file is None or file.wanted_back:
                return None, was_left
            file.coming += 1  # the file stays open, and under lease, until that range has come
        return file, was_left

    def _forget(self, first: int, stop: int) -> bool:
        """Leave nothing over in ``[first, stop)``, for which somebody has a use; tell whether anything was."""
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
            self._tidy()  # files of which nothing but left-over maps is open
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
        except BaseException as error:  # noqa: BLE001  a thread border: without it, maps are not safe to read
            self.fail(error)

    def _close_unused(self, url: str, file: _File) -> None:
        if file.mapped or file.coming or any(one[2] == url for one in self._left):
            return
        if self._files.get(url) is file:
            del self._files[url]
        with suppress(OSError):  # it was taken away; a forked process that has the file open too must not keep it
            fcntl.fcntl(file.descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        os.close(file.descriptor)
        _DESCRIPTORS.give()


class _Descriptors:
    """Count the descriptors of mapped files in this process: a share of what it may have. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_taken = 0

    def take(self) -> bool:
        """Count one more, if there is room for it; the rest of the limit is for the user and everything else."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        with self._lock:
            if soft != resource.RLIM_INFINITY and self._num_taken >= soft // _DESCRIPTORS_SHARE:
                return False
            self._num_taken += 1
            return True

    def give(self) -> None:
        """Count one less."""
        with self._lock:
            self._num_taken -= 1


_DESCRIPTORS = _Descriptors()


def _place_of(wanted: FetchRange, start: int, num_bytes: int | None = None) -> tuple[int, int]:
    """Return the pages of the arena that a range (``num_bytes`` of it) at byte ``start`` takes: first, one past all."""
    stop = -(-(start + (wanted.num_bytes if num_bytes is None else num_bytes)) // PAGE_BYTES) * PAGE_BYTES
    return start - FileMaps.skew_bytes(wanted), stop


def _leased(path: str, own_devices: frozenset[int]) -> int:
    """Return the descriptor of a file under lease.

    Raises:
        OSError: There is no file, or no lease to be had.
    """
    if os.stat(path).st_dev not in own_devices:
        raise OSError(errno.ENOLCK, "not on a disk of this machine", path)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)  # ignored by default; without it SIGIO, which kills
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _devices_of_own_disks() -> frozenset[int]:
    """Return numbers of the devices with file systems whose pages may be mapped; none where the system cannot say."""
    found = set()
    with suppress(OSError), open("/proc/self/mountinfo") as file:
        for line in file:
            head, _, tail = line.partition(" - ")
            major, _, minor = head.split()[2].partition(":")
            if tail.split()[0] in _OWN_DISKS:
                found.add(os.makedev(int(major), int(minor)))
    return frozenset(found)
