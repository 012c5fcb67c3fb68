"""Record bad samples on disk, one JSON object per line; ``shard_tools verify`` and ``reshard`` read these files."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias

from streaming.common.forks import in_children, renew_lock
from streaming.errors import DataError
from streaming.storage import local_path, lock_open, redact, scheme_of

_log = logging.getLogger(__name__)
_LOCK_S = 1.0

Name: TypeAlias = tuple[str, str, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRecord:
    """One sample (or a range of a shard) that could not be delivered. Unknown values are -1 or ``""``.

    Attributes:
        url: The shard, by :func:`shown_url`.
        key: Key of the sample.
        number: Number of the sample in the dataset that was read.
        sample_in_shard: Number of the sample in its shard.
        byte_start: First byte of its record in the shard.
        byte_end: End of the record (exclusive).
        stage: ``"fetch"``, ``"decode"`` or ``"transform"``.
        reason: Reason of the failure.
        epoch: Epoch in which it was found.
        rank: Global rank of the process that found it.
        time: Time in UTC, such as ``"2026-01-31T23:59:59Z"``.
    """

    url: str
    key: str = ""
    number: int = -1
    sample_in_shard: int = -1
    byte_start: int = -1
    byte_end: int = -1
    stage: str
    reason: str
    epoch: int = -1
    rank: int = -1
    time: str = ""

    @property
    def name(self) -> Name:
        """Identifies the sample, equal in every run."""
        return self.url, self.key, self.sample_in_shard, -1 if self.key else self.byte_start

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dict."""
        return asdict(self)

    def to_line(self) -> bytes:
        """Return one line, ASCII, with its newline."""
        return json.dumps(asdict(self)).encode("ascii") + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> BadRecord:
        """Parse the result of :meth:`to_line`; unknown names are ignored.

        Raises:
            DataError: The line is malformed.
        """
        try:
            content = json.loads(line)
            record = cls(**{name: content[name] for name in _TYPES if name in content})
        except (ValueError, TypeError, RecursionError) as error:
            raise DataError(f"not a record of a bad sample ({error}): {line[:80]!r}") from error
        for name, kind in _TYPES.items():
            if type(getattr(record, name)) is not kind:
                raise DataError(f"not a record of a bad sample: {name!r} is not of type {kind.__name__}: {line[:80]!r}")
        return record


_TYPES = {item.name: str if item.type == "str" else int for item in fields(BadRecord)}


def shown_url(url: str) -> str:
    """Return the name of a shard in records: without secrets, and absolute if it is a local path."""
    return os.path.abspath(local_path(url)) if scheme_of(url) == "file" else redact(url)


def iter_records(content: bytes) -> Iterator[BadRecord | DataError]:
    """Yield the records of a whole file.

    Yields an error instead for a malformed line (truncated by a full disk, for example).
    """
    for line in content.splitlines():
        if line.strip():
            try:
                yield BadRecord.from_line(line)
            except DataError as error:
                yield error


class BadFile:
    """Append records to a file that several processes of one machine may share. Thread-safe.

    A record is one ``write`` with O_APPEND, under a lock (flock, if the file system supports it), so that lines never
    interleave. Any user who can read the file can hold its lock, so the wait is short; after it, lines are added
    without the lock. A sample that the file already lists for the same epoch is not added again, so restarts and
    replicas add nothing. A failing disk loses the record and logs one warning; it never stops the run.

    ``_lock`` guards ``_epoch``, ``_listed``, ``_read_bytes``, ``_warned`` and ``_goes_without``, and the appending.

    Args:
        path: The file; ``{rank}`` in it is replaced by ``rank``. It and its folder are made when first needed.
        rank: Global rank of this process.
    """

    def __init__(self, path: str, rank: int) -> None:
        self.path = path.replace("{rank}", str(rank))
        self._lock = threading.Lock()
        in_children(self, renew_lock)
        self._epoch = -1
        self._listed: set[Name] = set()
        self._read_bytes = 0
        self._warned = self._goes_without = False

    def add(self, record: BadRecord) -> None:
        """Append ``record`` unless the file already lists its sample for its epoch."""
        with self._lock:
            # Records are appended one at a time, each only if the file lacks it, so the file ends with a whole line.
            try:
                self._append(record)
            except OSError as error:
                if not self._warned:
                    _log.warning("bad_samples_file: %s: %s; samples may be missing from it", self.path, error.strerror)
                self._warned = True

    def _append(self, record: BadRecord) -> None:
        os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            locked = self._locks(file)
            size_bytes = self._catch_up(file, record.epoch)
            if record.name in self._listed:
                return
            # Begin a new line after a truncated line of another process, so that this record can be parsed.
            line = b"\n" * (size_bytes != self._read_bytes) + record.to_line()
            if os.write(file, line) < len(line):
                if locked:
                    os.ftruncate(file, size_bytes)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._listed.add(record.name)
        finally:
            os.close(file)

    def _locks(self, file: int) -> bool:
        """Lock the file if possible, and return whether it is locked; closing it unlocks."""
        try:
            locked = lock_open(file, 0 if self._goes_without else _LOCK_S)
        except OSError:  # a file system without locks
            return False
        if not locked and not self._goes_without:
            _log.warning(
                "bad_samples_file: %s: another process has held its lock for %g s; lines are added without it, and a "
                "sample may be listed twice. Keep the file where others cannot read it",
                self.path, _LOCK_S,
            )  # fmt: skip
        self._goes_without = not locked
        return locked

    def _catch_up(self, file: int, epoch: int) -> int:
        """Read the lines appended since the last call, and return the size of the file.

        ``_read_bytes`` counts only whole lines.
        """
        size_bytes = os.fstat(file).st_size
        if epoch != self._epoch or size_bytes < self._read_bytes:
            self._epoch, self._read_bytes = epoch, 0
            self._listed.clear()
        content = b""
        while self._read_bytes + len(content) < size_bytes:
            piece = os.pread(file, size_bytes - self._read_bytes - len(content), self._read_bytes + len(content))
            if not piece:
                break
            content += piece
        whole = content[: content.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        self._listed |= {
            found.name for found in iter_records(whole) if isinstance(found, BadRecord) and found.epoch == epoch
        }
        return size_bytes
