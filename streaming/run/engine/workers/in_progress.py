"""Record what is being built where at this moment, for reports of stalls."""

from __future__ import annotations

import mmap
import os
import signal
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

from streaming.common.platforms import unnamed_file
from streaming.run.engine.threads.stacks import where_in

_ROW = struct.Struct("q")
_DUMP_AT = 64
_CELL_BYTES = mmap.PAGESIZE * 2
_ANSWER_S = 0.3
"""Time for a worker to write its stack. It takes a millisecond, unless the process is stopped."""
STACK_SIGNAL = signal.SIGURG
"""Signal that requests a worker's stack. Other processes ignore it, in case the pid was reused."""


@dataclass(slots=True, eq=False)
class BatchWork:
    """One batch that is being built.

    Attributes:
        batch: Number of the batch; -1 if unknown.
        keys: Keys of its rows.
        urls: URLs of its rows.
        row: Item 0: the row being decoded, if this process decodes it.
        since_s: Start of the work, by ``time.monotonic``.
    """

    batch: int
    keys: list[str]
    urls: list[str]
    row: list[int] = field(default_factory=lambda: [-1])
    since_s: float = field(default_factory=time.monotonic)

    def describe(self, row: int | None = None) -> str:
        """Describe the batch, its age, and the sample in progress, if any: ``row``, by default the row known here."""
        text = f"builds batch {self.batch} for {time.monotonic() - self.since_s:.1f} s"
        at = self.row[0] if row is None else row
        if 0 <= at < len(self.keys):
            text += f", at sample {at + 1} of {len(self.keys)}: {self.keys[at]!r} of {self.urls[at]}"
        return text


class SharedProgress:
    """A few bytes shared by a worker and its parent: the row being decoded and, on demand, its stack. The parent's end.

    Thread-safe. It has no name in any file system. The lock guards ``fd``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.fd = unnamed_file("shardstream-cell")
        os.ftruncate(self.fd, _CELL_BYTES)

    def row(self) -> int:
        """Return the row that the worker is decoding; -1: none."""
        with self._lock:
            # fd is open while it is read: close() takes the same lock.
            if self.fd < 0:
                return -1
            return int(_ROW.unpack(os.pread(self.fd, _ROW.size, 0))[0])

    def where(self, pid: int) -> str:
        """Return the worker's stack; "" if it does not answer. Waits up to a third of a second."""
        with self._lock:
            if self.fd < 0:
                return ""
            os.lseek(self.fd, _DUMP_AT, os.SEEK_SET)  # the worker's descriptor shares the position
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, STACK_SIGNAL)
            deadline_s = time.monotonic() + _ANSWER_S
            end, last = _DUMP_AT, -1
            while (end == _DUMP_AT or end != last) and time.monotonic() < deadline_s:
                last = end
                time.sleep(0.01)
                end = os.lseek(self.fd, 0, os.SEEK_CUR)
            return where_in(os.pread(self.fd, end - _DUMP_AT, _DUMP_AT).decode(errors="replace"))

    def close(self) -> None:
        """Close the parent's end."""
        with self._lock:
            fd, self.fd = self.fd, -1  # from here on no reader uses it: its number may now name another file
        if fd >= 0:
            os.close(fd)
