"""Locate the files of a cache, and remove those of other releases.

::

    <cache_dir>/                     the user's; nothing except our own directory is ever touched in it
        shardstream-cache-v1/        one directory per layout version
            LAYOUT                   marks the directory as ours
            entries/3f/<key>         whole entries
            parts/<key>.part         entries being fetched, each locked by its writer
            usage                    lock of the accounting, and its counter
            evict                    lock of the one process that makes room
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from streaming.shards.cache.key import EntryKey, is_entry_name, is_part_name
from streaming.storage import try_lock, unlock

LAYOUT_VERSION = 1
_MARKER = "shardstream node cache, layout "
_FOLDER = re.compile(r"shardstream-cache-v([0-9]{1,6})")


@dataclass(frozen=True, slots=True)
class CachePaths:
    """Paths of one cache. Making one touches nothing.

    Attributes:
        directory: The directory that the user named.
        version: Layout version; this release writes ``LAYOUT_VERSION``.
    """

    directory: str
    version: int = LAYOUT_VERSION

    @property
    def root(self) -> str:
        """Our own directory."""
        return os.path.join(self.directory, f"shardstream-cache-v{self.version}")

    @property
    def marker(self) -> str:
        """The file that marks the directory as ours."""
        return os.path.join(self.root, "LAYOUT")

    @property
    def usage(self) -> str:
        """The file that counts the space used, and is locked to change it."""
        return os.path.join(self.root, "usage")

    @property
    def evict(self) -> str:
        """The file that is locked by the process that makes room."""
        return os.path.join(self.root, "evict")

    @property
    def parts(self) -> str:
        """The directory of entries being fetched."""
        return os.path.join(self.root, "parts")

    @property
    def entries(self) -> str:
        """The directory of whole entries, in subdirectories by the first two digits."""
        return os.path.join(self.root, "entries")

    def entry(self, key: EntryKey) -> str:
        """Return the path of the entry of ``key``."""
        name = key.name
        return os.path.join(self.entries, name[:2], name)

    def part(self, key: EntryKey, suffix: str = "") -> str:
        """Return the path of the unfinished entry of ``key``; a ``suffix`` of 16 digits makes it private."""
        return os.path.join(self.parts, f"{key.name}.{suffix}.part" if suffix else f"{key.name}.part")

    def check_owner(self) -> None:
        """Check that our directory is missing, or that only this user can write to it: others could plant bytes there.

        A user who may rename it could replace it, so its parent directory must belong to this user or root too. Others
        may write to the parent only if it is sticky, as /tmp is.

        Raises:
            PermissionError: One of them belongs to another user (except root), or others may write into it.
        """
        for folder, follows in ((self.directory, True), (self.root, False)):
            try:
                status = os.stat(folder, follow_symlinks=follows)
            except FileNotFoundError:
                return
            is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid in {os.geteuid(), 0}
            keeps = follows and status.st_mode & stat.S_ISVTX
            if not is_ours or (status.st_mode & 0o022 and not keeps):
                raise PermissionError(
                    f"{folder}: expected a folder owned by this user that nobody else can write to, got mode "
                    f"{stat.filemode(status.st_mode)} of user {status.st_uid}; choose another cache_dir, such as a new "
                    "folder in it, or remove the rights of others (chmod go-w)"
                )

    def make(self) -> None:
        """Make the directories and the marker, unless they exist. They are private to the user, since the data may be.

        Raises:
            OSError: They cannot be made, or the directory belongs to something else.
        """
        os.makedirs(os.path.dirname(self.directory), exist_ok=True)
        os.makedirs(self.directory, mode=0o700, exist_ok=True)
        self.check_owner()  # before anything is made there
        for folder in (self.root, self.entries, self.parts):
            os.makedirs(folder, mode=0o700, exist_ok=True)
        self.check_owner()
        marker = f"{_MARKER}{self.version}\n"
        found = _text(self.marker)
        if not found:  # new, or its maker was killed before the first byte
            fd = os.open(self.marker, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                os.write(fd, marker.encode())
            finally:
                os.close(fd)
        elif found != marker:
            raise OSError(f"{self.marker}: expected {marker!r}, got {found!r}; not a cache of this release")

    def part_paths(self) -> Iterator[str]:
        """List unfinished entries, recognized as ours by name."""
        return (entry.path for entry in _scan(self.parts) if is_part_name(entry.name))

    def entry_files(self) -> Iterator[os.DirEntry[str]]:
        """List whole entries, recognized as ours by name."""
        for folder in _scan(self.entries):
            if folder.is_dir(follow_symlinks=False):
                yield from (entry for entry in _scan(folder.path) if is_entry_name(entry.name))

    def older(self) -> list[CachePaths]:
        """Return the caches of earlier releases in the same directory, by name and marker."""
        found = []
        for entry in _scan(self.directory):
            match = _FOLDER.fullmatch(entry.name)
            if match and int(match[1]) < self.version and entry.is_dir(follow_symlinks=False):
                layout = CachePaths(self.directory, int(match[1]))
                if _text(layout.marker).startswith(_MARKER):
                    found.append(layout)
        return found

    def remove(self) -> None:
        """Delete all files of this cache except those that a process is writing, then the directories left empty.

        A file whose name is not one of ours stays, and so do the directories around it.

        Raises:
            OSError: Something cannot be deleted.
        """
        for path in self.part_paths():
            if (fd := try_lock_existing(path)) is not None:
                try:
                    _unlink(path)
                finally:
                    unlock(fd)
        for file in self.entry_files():
            _unlink(file.path)
        folders = [entry.path for entry in _scan(self.entries) if entry.is_dir(follow_symlinks=False)]
        for folder in (*folders, self.entries, self.parts):
            _rmdir(folder)
        for path in (self.usage, self.evict, self.marker):
            _unlink(path)
        _rmdir(self.root)


def try_lock_existing(path: str) -> int | None:
    """Lock like :func:`try_lock`, without creating the file; None also if the file does not exist."""
    try:
        return try_lock(path, create=False)
    except FileNotFoundError:
        return None


def _scan(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(100).decode("ascii", "replace")
    except FileNotFoundError:
        return ""


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return


def _rmdir(folder: str) -> None:
    try:
        os.rmdir(folder)
    except OSError:  # missing, or it holds a file that is not ours
        return
