"""Count the records of files in a first pass, so that several processes can each read some of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np

from shard_tools.make.convert.base.files import FileSource, SourceFile
from shard_tools.make.convert.base.records import Skipped
from shard_tools.running.engine import ordered
from streaming.common.arrays import sums
from streaming.errors import ConfigError
from streaming.storage import Storage
from streaming.types import Int64Array

_AHEAD = 256  # files in progress; an executor with fewer workers queues them
_STEP_BYTES = 4 << 20  # bytes per read


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FileCount:
    """The number of records of a file, and the positions where reading may begin.

    Attributes:
        num_records: Their number.
        marks: int64 ``[k, 3]``: number of a record within the file, its byte, and the number of lines before it; the
        first row is 0, 0, 0.
        places: Position of each record, in a form of the layout; only for a source that is read out of order.
        skipped: Entries of the file that are left out.
    """

    num_records: int
    marks: Int64Array
    places: Int64Array | None = None
    skipped: tuple[Skipped, ...] = ()


@dataclass(slots=True)
class Marker:
    """Mark a record at least every 4 MiB."""

    found: list[tuple[int, int, int]] = field(default_factory=lambda: [(0, 0, 0)])

    def add(self, number: int, at: int, num_lines: int = 0) -> None:
        """Note where record ``number`` begins, unless a mark is near."""
        if at - self.found[-1][1] >= _STEP_BYTES:
            self.found.append((number, at, num_lines))

    def count(self, num_records: int, skipped: Sequence[Skipped] = ()) -> FileCount:
        """Return the count of a file that has been read to its end."""
        return FileCount(num_records=num_records, marks=np.array(self.found, np.int64), skipped=tuple(skipped))


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """The start of reading: record ``number_in_file`` of file ``which``, which is record ``number`` of all."""

    which: int = 0
    number: int = 0
    number_in_file: int = 0
    at: int = 0
    num_lines: int = 0


class CountedFiles(FileSource, ABC):
    """Base class for sources of files whose records are counted if several processes read them."""

    def __init__(self, kind: str, files: Sequence[SourceFile], storage: Storage, num_threads: int = 1) -> None:
        super().__init__(kind, files, storage)
        self._threads = num_threads
        self._counts: tuple[FileCount, ...] = ()

    @property
    def num_records(self) -> int | None:
        """Number of records; None before they are counted."""
        return sum(count.num_records for count in self._counts) if self._counts else None

    def count(self, executor: Executor) -> None:
        """Count the records of each file on the executor.

        Raises:
            ConfigError: A file is compressed.
        """
        self._counts = tuple(ordered(executor, self.count_file, self.files, _AHEAD))

    @abstractmethod
    def count_file(self, file: SourceFile) -> FileCount:
        """Count the records of a file.

        Raises:
            ConfigError: It is compressed.
        """

    @property
    def _num_threads(self) -> int:
        """Number of threads that read ahead: one if other processes read the following files."""
        return 1 if self._counts else self._threads

    def _beginning(self, start: int) -> Beginning:
        """Return the start of reading for record ``start``: the last mark before it, or the first file."""
        if not self._counts:
            return Beginning()
        first = sums([count.num_records for count in self._counts])
        which = min(int(np.searchsorted(first, start, side="right")), len(self._counts)) - 1
        marks = self._counts[which].marks
        mark = max(0, int(np.searchsorted(marks[:, 0], start - first[which], side="right")) - 1)
        number_in_file, at, num_lines = marks[mark].tolist()
        return Beginning(
            which=which, number=int(first[which]) + number_in_file, number_in_file=number_in_file, at=at,
            num_lines=num_lines,
        )  # fmt: skip

    def _places(self) -> list[Int64Array]:
        """Return the positions of records, file by file."""
        counts = self._counts or map(self.count_file, self.files)
        return [count.places for count in counts if count.places is not None]


def refuse_packed(file: SourceFile) -> ConfigError:
    """Return the error for a compressed file that several processes would read."""
    return ConfigError(
        f"--engine: {file.shown_url} is compressed and can only be read front to back, by one process; unpack it, or "
        "use --engine local"
    )
