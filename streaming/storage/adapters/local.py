"""Read files by position directly into the caller's memory; write them through a temporary file and a rename."""

from __future__ import annotations

import itertools
import os
import platform
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from urllib.parse import quote

from streaming.errors import AccessDeniedError, NotFoundError, StorageError
from streaming.storage.base.adapter import (
    ChangedError,
    ObjectInfo,
    Sink,
    StoreWriter,
    Target,
    check_version,
    maker_of_writer,
)
from streaming.storage.base.locks import Waiting, is_at, lock_open, try_lock, unlock
from streaming.storage.base.urls import join_url, local_path, looked_for, scheme_of
from streaming.types import override

_TEMPORARY = ".~shardstream-"  # not listed: such files belong to running or killed writers
_NAME_CHARACTERS, _HOST_CHARACTERS = 80, 40  # of the file's and the machine's name, in the name of a temporary file
_READ_BYTES = 1 << 30  # Linux moves at most 0x7ffff000 bytes per call
_LOCK_S = 60.0  # a holder compares and renames one small file
_HELD_BYTES = 256 << 10  # of small pieces that are written together


@contextmanager
def _os_errors(url: str, doing: str) -> Iterator[None]:
    """Translate the operating system's errors; the only place that does so."""
    try:
        yield
    except StorageError:
        raise
    except FileNotFoundError as error:
        raise NotFoundError(
            f"{doing} {url}: no such file{looked_for(url)}; check the path, and that the file system is mounted"
        ) from error
    except PermissionError as error:
        message = f"{doing} {url}: permission denied for this user; change the file's mode or owner"
        raise AccessDeniedError(message) from error
    except (IsADirectoryError, NotADirectoryError) as error:
        message = f"{doing} {url}: {error.strerror}; give a file, or the directory alone to list it"
        raise NotFoundError(message) from error
    except OSError as error:
        raise StorageError(f"{doing} {url}: {error.strerror or error}") from error


def _make_directory(url: str, directory: str) -> None:
    """Make the directory of a file that is to be written, and those above it."""
    try:
        os.makedirs(directory, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise StorageError(
            f"creating {url}: {error.filename} is a file, where a directory is needed; give another path, or move the "
            "file away"
        ) from error


def _file_status(url: str, file: str | int) -> os.stat_result:
    """Return the status of a file, given by path or descriptor; directories are not files."""
    with _os_errors(url, "looking at"):
        status = os.stat(file)
    if stat.S_ISDIR(status.st_mode):
        raise NotFoundError(f"looking at {url}: it is a directory, not a file; list it instead")
    if not stat.S_ISREG(status.st_mode):
        kind = "a FIFO (named pipe)" if stat.S_ISFIFO(status.st_mode) else "a socket or device"
        raise StorageError(f"looking at {url}: it is {kind}, which has no byte ranges; write its content into a file")
    return status


def _version(status: os.stat_result) -> str:
    return f"{status.st_mtime_ns}-{status.st_ino}-{status.st_size}"


class _FileRange:
    """An open file and the range to read; owns the descriptor."""

    def __init__(self, url: str, descriptor: int, start: int, num_bytes: int, version: str) -> None:
        self._url = url
        self._descriptor = descriptor
        self._start = start
        self.num_bytes = num_bytes
        self.version = version
        self._done = 0

    def fill(self, sink: Sink) -> None:
        """See :meth:`RangeBody.fill`; the bytes are read directly into the memory."""
        before = -1
        while before < self._done < self.num_bytes:
            before = self._done
            with _os_errors(self._url, "reading"):
                sink.take(self._read)

    def _read(self, room: memoryview) -> int:
        count = os.preadv(self._descriptor, [room[:_READ_BYTES]], self._start + self._done)
        self._done += count
        return count

    def close(self) -> None:
        """See :meth:`RangeBody.close`."""
        os.close(self._descriptor)


class LocalAdapter:
    """Plain paths and ``file:`` URLs."""

    in_pieces = True
    keeps_versions = True

    def way(self, url: str) -> Target:  # noqa: ARG002
        """See :class:`Adapter`."""
        return Target(client="files")

    def info(self, url: str) -> ObjectInfo:
        """See :class:`Adapter`."""
        status = _file_status(url, local_path(url))
        return ObjectInfo(url=url, size_bytes=status.st_size, version=_version(status))

    def open_range(self, url: str, start: int, stop: int | None, version: str | None) -> _FileRange:
        """See :class:`Adapter`."""
        with _os_errors(url, "opening"):
            # Without O_NONBLOCK, opening a FIFO would wait for a writer. For files, it makes no difference.
            descriptor = os.open(local_path(url), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = _file_status(url, descriptor)
            found = _version(status)
            _check_version(url, found, version)
        except BaseException:
            os.close(descriptor)
            raise
        num_bytes = max(0, (status.st_size if stop is None else min(stop, status.st_size)) - start)
        return _FileRange(url, descriptor, start, num_bytes, found)

    def list(self, url: str) -> list[ObjectInfo]:
        """See :class:`Adapter`."""
        root = local_path(url)
        base = url.rstrip("/") or "/"
        shown = quote if not url.startswith("~") and root != url else str  # of a URL
        found: list[ObjectInfo] = []
        with _os_errors(url, "listing"):
            for directory, _, names in os.walk(root, onerror=_unless_missing, followlinks=True):
                below = os.path.relpath(directory, root)
                above = join_url(base, *([] if below == "." else [shown(below)]), "")
                for name in names:
                    if name.startswith(_TEMPORARY):
                        continue
                    try:
                        status = os.stat(os.path.join(directory, name))
                    except FileNotFoundError:  # a dangling link, or removed since the directory was read
                        continue
                    if not stat.S_ISREG(status.st_mode):
                        continue
                    url = above + shown(name)
                    found.append(ObjectInfo(url=url, size_bytes=status.st_size, version=_version(status)))
        return found

    def put(self, url: str, data: memoryview) -> None:
        """See :class:`Adapter`."""
        with self.open_write(url, 0) as writer:
            writer.write(data)

    def put_if(self, url: str, data: memoryview, version: str | None) -> None:
        """See :class:`Adapter`: compared and renamed under a lock, which ends with its holder."""
        directory, name = os.path.split(local_path(url))
        with _os_errors(url, "writing"), _one_at_a_time(os.path.join(directory or ".", f"{_TEMPORARY}{name}.lock")):
            check_version(version, partial(self.info, url), url)
            self.put(url, data)

    def open_write(self, url: str, part_bytes: int) -> StoreWriter:  # noqa: ARG002 (parts are for object stores)
        """See :class:`Adapter`."""
        return _FileWriter(url)

    def delete(self, url: str) -> None:
        """See :class:`Adapter`."""
        with suppress(FileNotFoundError), _os_errors(url, "deleting"):
            os.unlink(local_path(url))


@contextmanager
def _one_at_a_time(path: str) -> Iterator[None]:
    """Hold the lock of the file at ``path``, which is there only meanwhile; a file system without locks has none.

    Raises:
        StorageError: Another process holds it for too long.
    """
    os.makedirs(os.path.dirname(path), exist_ok=True)
    waiting, held, has_locks = Waiting(_LOCK_S), None, True
    try:
        while (held := try_lock(path)) is None and waiting.pause():
            pass
    except OSError:
        has_locks = False
    if held is None and has_locks:
        raise StorageError(f"another process has held the lock {path} for {_LOCK_S:g} s; is it stopped?")
    try:
        yield
    finally:
        if held is not None:
            with suppress(OSError):
                os.unlink(path)
            unlock(held)


def _check_version(url: str, found: str, wanted: str | None) -> None:
    if wanted is not None and wanted != found:
        raise ChangedError(f"reading {url}: the file changed while it was read; write shards under new names")


def _unless_missing(error: OSError) -> None:
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise error


class _FileWriter(StoreWriter):
    """Write beside the target, then rename over it.

    A killed process leaves at most a hidden temporary file, which the next writer of the same file removes.

    A writer that is dropped before it is closed aborts: Ctrl-C can come before ``with`` has begun, or after its body.

    Small pieces are collected and written together, because a system call takes as long as copying 20 kB. They are kept
    in our own buffer: a forked child would also write out the buffer of a file object when it drops the object.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._maker = maker_of_writer(url)
        self._path = local_path(url)
        self.num_bytes = 0
        self._held = bytearray()
        self._descriptor: int | None = None
        self._is_done = True  # nothing to remove
        self._directory = os.path.dirname(self._path) or "."
        with _os_errors(url, "creating"):
            _make_directory(url, self._directory)
            if os.path.isdir(self._path):
                raise StorageError(f"creating {url}: a directory has this name; choose another name")
            self._create()

    def _create(self) -> None:
        """Create a temporary file, and lock it; its name has the smallest number that no other writer uses.

        The system releases the lock with the process, so an unlocked file was left by a killed process, and is removed.
        Only files of this machine are removed, because some network file systems keep separate locks on each machine.
        """
        name = os.path.basename(self._path)[:_NAME_CHARACTERS]
        host = platform.node().replace("/", "_")[:_HOST_CHARACTERS]
        for number in itertools.count():
            self._temporary = os.path.join(self._directory, f"{_TEMPORARY}{name}.{host}-{number}.tmp")
            self._is_done = False
            while (descriptor := self._try_to_create()) is not None:
                if _lock(descriptor) is not False and is_at(descriptor, self._temporary):
                    return  # from here on, no other process removes or replaces this file
                self._release()  # another writer found the file before it was locked, and removes it

    def _try_to_create(self) -> int | None:
        """Create the file, and return its descriptor; None if another writer is using it."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        while True:
            try:
                self._descriptor = os.open(self._temporary, flags, 0o666)
            except FileNotFoundError:  # the directory was empty, and was removed just now
                os.makedirs(self._directory, exist_ok=True)
            except FileExistsError:
                if not remove_left(self._temporary):
                    return None
            else:
                return self._descriptor

    @override
    def write(self, data: bytes | bytearray | memoryview) -> int:
        if self._descriptor is None:
            raise StorageError(f"writing {self._url}: this writer is closed")
        self._maker.check()
        view = memoryview(data).cast("B")
        if len(self._held) + len(view) > _HELD_BYTES:
            self._flush(self._descriptor)
        if len(view) > _HELD_BYTES:
            self._write_out(self._descriptor, view)
        else:
            self._held += view
        self.num_bytes += len(view)
        return len(view)

    def _flush(self, descriptor: int) -> None:
        held, self._held = self._held, bytearray()
        self._write_out(descriptor, memoryview(held))

    def _write_out(self, descriptor: int, view: memoryview) -> None:
        done = 0
        with _os_errors(self._url, "writing"):
            while done < len(view):
                done += os.write(descriptor, view[done : done + _READ_BYTES])

    @override
    def close(self) -> None:
        if self._descriptor is None:
            return
        self._maker.check()
        try:
            self._flush(self._descriptor)
            with _os_errors(self._url, "publishing"):
                os.fsync(self._descriptor)
                os.replace(self._temporary, self._path)
                _sync_directory(self._directory)
        except BaseException:
            self.abort()
            raise
        self._release()
        self._is_done = True

    @override
    def abort(self) -> None:
        if self._is_done or not self._maker.is_here:
            return
        try:
            with suppress(FileNotFoundError), _os_errors(self._url, "aborting"):
                if self._descriptor is None:  # interrupted: the file may or may not have been made
                    remove_left(self._temporary)
                elif is_at(self._descriptor, self._temporary):  # not if the file was published
                    os.unlink(self._temporary)
        finally:
            self._release()
            self._is_done = True

    def __del__(self) -> None:
        with suppress(AttributeError, StorageError):  # a writer not fully made; an error that nothing could handle here
            self.abort()

    def _release(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)


def files_left(folder: str) -> Iterator[str]:
    """Yield the temporary files of running or killed writers below a folder."""
    for directory, _, names in os.walk(folder):
        yield from (os.path.join(directory, name) for name in sorted(names) if name.startswith(_TEMPORARY))


def remove_left(path: str, *, only_look: bool = False) -> bool:
    """Remove a temporary file that no writer has locked; return whether it is gone, or would be with ``only_look``."""
    try:
        # O_WRONLY: locks of network file systems need it. O_NOFOLLOW: otherwise, a link could name any file.
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:  # another user's file, or not a regular file
        return False
    try:
        if not _lock(descriptor):
            return False
        if not only_look and is_at(descriptor, path):
            os.unlink(path)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    """Lock a file until its last descriptor is closed; False if it is already locked, None if it cannot be locked."""
    try:
        return lock_open(descriptor, 0)
    except OSError:  # a file system without locks
        return None


def _sync_directory(path: str) -> None:
    """Sync a directory, so that a rename survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_directory(url: str) -> bool:
    """Return whether ``url`` is a local directory."""
    return scheme_of(url) == "file" and os.path.isdir(local_path(url))
