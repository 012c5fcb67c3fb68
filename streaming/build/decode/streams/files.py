"""Read encoded streams from bytes or from a file, for libraries that read through callbacks.

An exception in a callback would be printed or lost, so ``WatchedFile`` keeps it for the caller of the library.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol, TypeAlias

from streaming.types import ReadBuffer

_SEARCHED_BYTES: Final = 4 << 20
"""Size of each read while a file is searched."""


class SeekableFile(Protocol):
    """A seekable file of bytes, open for reading."""

    def read(self, size: int = -1, /) -> bytes:
        """Return up to ``size`` bytes, none only at the end."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Move to ``offset`` from the start, from the current position or from the end; return the new position."""

    def tell(self) -> int:
        """Return the position of the next byte."""


Encoded: TypeAlias = ReadBuffer | SeekableFile
"""Input of stream decoders: bytes, or a file from which they read the ranges that they need."""


class WatchedFile:
    """Read bytes as a file, and keep the errors of reads: the caller of the library raises them, see :func:`opened`."""

    def __init__(self, data: Encoded) -> None:
        self._file = None if isinstance(data, bytes | bytearray | memoryview) else data
        self._view = memoryview(b"" if self._file is not None else data).cast("B")  # type: ignore[arg-type]
        self._at = 0
        self.failure: BaseException | None = None
        self.num_bytes = len(self._view) if self._file is None else self._file.seek(0, io.SEEK_END)
        if self._file is not None:
            self._file.seek(0)

    def __repr__(self) -> str:
        return "the stream"  # libraries show this in their errors

    @property
    def in_memory(self) -> bool:
        """Whether all bytes are in memory, so that scanning them is cheap."""
        return self._file is None

    def read(self, size: int = -1) -> bytes:
        """Return up to ``size`` bytes; none at the end, and after a failure."""
        if self.failure is not None:
            return b""
        try:
            if self._file is None:
                stop = len(self._view) if size < 0 else self._at + size
                found = bytes(self._view[self._at : stop])
                self._at += len(found)
            else:
                found = bytes(self._file.read(size))
                self._at = self._file.tell()
        except BaseException as error:  # noqa: BLE001  raised by ``opened``; C code would drop it here
            self.failure = error
            return b""
        return found

    def readinto(self, room: bytearray | memoryview) -> int:
        """Read into ``room``; return the number of bytes."""
        out = memoryview(room).cast("B")
        found: bytes | memoryview
        if self._file is None:  # libraries call this thousands of times
            found = self._view[self._at : self._at + len(out)]
            self._at += len(found)
        else:
            found = self.read(len(out))
        out[: len(found)] = found
        return len(found)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position; return it."""
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.num_bytes}[whence]
        self._at = max(0, origin + offset)
        if self._file is not None and self.failure is None:
            try:
                self._file.seek(self._at)
            except BaseException as error:  # noqa: BLE001  as in ``read``
                self.failure = error
        return self._at

    def tell(self) -> int:
        """Return the position of the next byte."""
        return self._at

    def peek(self, start: int, size: int) -> bytes:
        """Return up to ``size`` bytes from ``start`` on, without moving.

        Raises:
            BaseException: The error of a read.
        """
        at = self._at
        self.seek(start)
        found = self.read(size)
        self.seek(at)
        if self.failure is not None:
            raise self.failure
        return found

    def part(self, start: int, stop: int, head: bytes = b"") -> Encoded:
        """Return ``head`` followed by bytes ``[start, stop)``, as a stream for :func:`opened`."""
        if self._file is None and not head:
            return self._view[start:stop]
        return _Window(self, start, stop, head)

    def places_of(self, pattern: re.Pattern[bytes], longest: int) -> list[int]:
        """Return all positions of ``pattern``, whose matches have at most ``longest`` bytes; reads a file completely.

        Raises:
            BaseException: The error of a read.
        """
        if self._file is None:
            return [match.start() for match in pattern.finditer(self._view)]
        found: set[int] = set()
        for first in range(0, self.num_bytes, _SEARCHED_BYTES):
            block = self.peek(first, _SEARCHED_BYTES + longest)
            found.update(first + match.start() for match in pattern.finditer(block))
        return sorted(found)


class _Window:
    """A part of a watched file as a file, after extra bytes that begin it."""

    def __init__(self, whole: WatchedFile, start: int, stop: int, head: bytes) -> None:
        self._whole, self._start, self._head, self._at = whole, start - len(head), head, 0
        self._num_bytes = stop - self._start

    def read(self, size: int = -1, /) -> bytes:
        """Return up to ``size`` bytes."""
        left = max(0, self._num_bytes - self._at)
        left = left if size < 0 else min(size, left)
        found = self._head[self._at : self._at + left]
        if len(found) < left:
            self._whole.seek(self._start + self._at + len(found))
            found += self._whole.read(left - len(found))
        self._at += len(found)
        return found

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move to a position in the part; return it."""
        self._at = max(0, {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._num_bytes}[whence] + offset)
        return self._at

    def tell(self) -> int:
        """Return the position of the next byte."""
        return self._at


@contextmanager
def opened(data: Encoded) -> Iterator[WatchedFile]:
    """Yield ``data`` as a file for a library, and raise errors of its reads, even if the library ignored them.

    Raises:
        ValueError: There are no bytes.
        BaseException: The error of a read.
    """
    stream = WatchedFile(data)
    if not stream.num_bytes:
        raise ValueError("it has no bytes")
    try:
        yield stream
    except Exception:
        if stream.failure is not None:
            raise stream.failure from None
        raise
    if stream.failure is not None:
        raise stream.failure
