"""Read tars from any other program, front to back."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Generator, Iterator
from functools import partial

from shard_tools.convert.base.files import FileSource, SourceFile, find_files, is_folder
from shard_tools.convert.base.records import NUMBER_KEYS, Record, Skipped, SourceOptions, number_key
from streaming.arguments import checked_ratio
from streaming.catalog.listing import StorageAhead
from streaming.catalog.unfinished import Marks
from streaming.catalog.urls import folders_of
from streaming.errors import ConfigError
from streaming.storage import Storage
from streaming.tar.samples import iter_samples
from streaming.types import SHARD_SUFFIXES

_PIECE_BYTES = 8 << 20  # one request
_MAX_SKIPPED = 10_000  # entries kept for the report


class TarFiles(FileSource):
    """Samples of tars (``.gz`` too), in the order of their names and members.

    Adjacent members with the same key form one sample; extensions are converted to lower case; a leading ``./`` is
    removed. Directories, links and names that start with ``__`` are left out; so are dot-files and names without an
    extension, which are reported. A damaged or truncated tar is an error, never a shorter dataset. With numbers as
    keys, a repeated field starts another sample.
    """

    def __init__(self, spec: str, storage: Storage, options: SourceOptions) -> None:
        if options.key_field not in {None, NUMBER_KEYS}:
            raise ConfigError(f"--key: tars keep their keys, or get numbers with 'number'; got {options.key_field!r}")
        with contextlib.closing(StorageAhead(storage)) as ahead:
            files = find_files(spec, ahead, SHARD_SUFFIXES, exclude=options.exclude, more=options.more)
            for folder in filter(is_folder, (one for part in (spec, *options.more) for one in folders_of(part))):
                collections.deque(ahead.list(folder), 0)  # which makes known what is marked below it
            marks = Marks(ahead, (), [file.url for file in files], exclude=options.exclude)
            marks.check(allow_unfinished=options.allow_unfinished)
        super().__init__("tars", files, storage)
        self._max_gzip_ratio = checked_ratio("max_gzip_ratio", options.max_gzip_ratio)
        self._numbered = options.key_field == NUMBER_KEYS
        self._skipped: dict[str, Skipped] = {}

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Members left out so far."""
        return tuple(self._skipped.values())

    def records(self, start: int) -> Generator[Record, None, None]:
        """Yield the samples from number ``start`` on; earlier ones are skipped by reading past them."""
        number = 0
        for file in self.files:
            for key, fields in self._samples(file):
                if number >= start:
                    yield Record(key=number_key(number) if self._numbered else key, fields=fields, where=file.url)
                number += 1

    def _samples(self, file: SourceFile) -> Iterator[tuple[str, dict[str, bytes]]]:
        pieces = self._pieces(file)
        samples = iter_samples(
            pieces, file.url, max_gzip_ratio=self._max_gzip_ratio, repeats=self._numbered,
            left_out=partial(self._leave_out, file),
        )  # fmt: skip
        for key, fields in samples:
            name = key.removeprefix("./").lstrip("/")
            if name and not name.endswith("/"):
                yield name, fields
            else:
                self._leave_out(file, f"{key}.{next(iter(fields))}")

    def _leave_out(self, file: SourceFile, name: str) -> None:
        last = name.rpartition("/")[2]
        if name.startswith("__") or len(self._skipped) >= _MAX_SKIPPED:
            return
        path = f"{file.name}:{name}".encode(errors="backslashreplace").decode()
        reason = "a dot-file, which has no key" if last.startswith(".") else "no extension, which names the field"
        self._skipped[path] = Skipped(path=path, reason=reason)

    def _pieces(self, file: SourceFile) -> Iterator[bytes | memoryview]:
        for start in range(0, file.size_bytes, _PIECE_BYTES):
            yield self._storage.read(file.url, start, min(file.size_bytes, start + _PIECE_BYTES))
