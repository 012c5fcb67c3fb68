"""Read tars from any other program, front to back."""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Generator, Iterator
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial

from shard_tools.make.convert.base.counts import CountedFiles, FileCount, Marker, refuse_packed
from shard_tools.make.convert.base.files import SourceFile, find_files, is_folder
from shard_tools.make.convert.base.identity import SourceStorage
from shard_tools.make.convert.base.records import NUMBER_KEYS, Record, Skipped, SourceOptions, number_key
from shard_tools.make.convert.base.rows import unreadable_rest
from streaming.common.arguments import checked_ratio
from streaming.errors import ConfigError, DataError
from streaming.shards.catalog.build import read_schema
from streaming.shards.catalog.listing import StorageAhead
from streaming.shards.catalog.unfinished import Marks
from streaming.shards.catalog.urls import folders_of
from streaming.shards.schema.meeting import RESHARD, met
from streaming.shards.schema.value import Schema
from streaming.shards.tar.passed_over import is_note, why_no_sample
from streaming.shards.tar.samples import iter_samples
from streaming.shards.tar.scanner import TarScanner
from streaming.storage import Storage, redact, split_url
from streaming.types import SHARD_SUFFIXES

_PIECE_BYTES = 8 << 20  # one request
_GZIP = b"\x1f\x8b"
_MAX_SKIPPED = 10_000  # entries kept for the report


class TarFiles(CountedFiles):
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
                collections.deque(ahead.list(folder), 0)  # registers the marks below it
            marks = Marks(ahead, (), [file.url for file in files], exclude=options.exclude)
            marks.check(allow_unfinished=options.allow_unfinished)
        if options.known is not None:
            files = options.known.new(files, SourceStorage.of(storage))
        super().__init__("tars", files, storage)
        self._max_gzip_ratio = checked_ratio("max_gzip_ratio", options.max_gzip_ratio)
        self._tolerant = options.tolerant
        self._numbered = options.key_field == NUMBER_KEYS
        self._skipped: dict[str, Skipped] = {}

    @property
    def meaning(self) -> Schema:
        """The common schema of the sets whose shards are read; bytes are copied, so the schemas must agree.

        Raises:
            ConfigError: They contradict each other.
        """
        homes = dict.fromkeys(split_url(file.url)[0] for file in self.files)
        found = {redact(home): read_schema(self._storage, home).without_late() for home in homes}
        return replace(met(found, cure=RESHARD).schema, columns={})

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Members left out so far."""
        return tuple(self._skipped.values())

    def records(self, start: int) -> Generator[Record, None, None]:
        """Yield the samples from number ``start`` on; earlier ones are skipped by reading past them."""
        begin = self._beginning(start)
        number, at = begin.number, begin.at
        for which, file in enumerate(self.files[begin.which :], begin.which):
            try:
                for own, fields in self._samples(file, at):
                    if number >= start:
                        key = number_key(number) if self._numbered else own
                        yield Record(key=key, fields=fields, where=file.url, origin=which)
                    number += 1
            except DataError as error:
                rest = unreadable_rest(number, file.shown_url, error, which, tolerant=self._tolerant)
                if number >= start:
                    yield rest
                number += 1
            at = 0

    def count(self, executor: Executor) -> None:
        """Count the samples of each tar on the executor, and note the members that are left out.

        Raises:
            ConfigError: A tar is compressed.
        """
        super().count(executor)
        for one in itertools.chain.from_iterable(count.skipped for count in self._counts):
            if len(self._skipped) < _MAX_SKIPPED:
                self._skipped[one.path] = one

    def count_file(self, file: SourceFile) -> FileCount:
        """Count the samples of a tar, and check the names of all members.

        Raises:
            ConfigError: It is compressed.
        """
        scanner = TarScanner(file.url, repeats=self._numbered)
        marks, num_records, skipped = Marker(), 0, list[Skipped]()
        for piece in self._pieces(file, 0):
            if not scanner.num_bytes and bytes(piece[:2]) == _GZIP:
                raise refuse_packed(file)
            layout = scanner.feed(piece)
            for name in scanner.passed_over:
                skipped += _left_out(file, name)
            num_records += len(layout.keys)
            marks.add(num_records, scanner.record_start)
        num_records += len(scanner.finish().keys)
        return marks.count(num_records, skipped[:_MAX_SKIPPED])

    def _samples(self, file: SourceFile, at: int) -> Iterator[tuple[str, dict[str, bytes]]]:
        pieces = self._pieces(file, at)
        samples = iter_samples(
            pieces, file.url, max_gzip_ratio=self._max_gzip_ratio, repeats=self._numbered,
            left_out=partial(self._leave_out, file),
        )  # fmt: skip
        for key, fields in samples:
            yield key.removeprefix("./").lstrip("/"), fields

    def _leave_out(self, file: SourceFile, name: str) -> None:
        for one in _left_out(file, name) if len(self._skipped) < _MAX_SKIPPED else ():
            self._skipped[one.path] = one

    def _pieces(self, file: SourceFile, at: int) -> Iterator[bytes | memoryview]:
        for start in range(at, file.size_bytes, _PIECE_BYTES):
            yield self._storage.read(file.url, start, min(file.size_bytes, start + _PIECE_BYTES))


def _left_out(file: SourceFile, name: str) -> list[Skipped]:
    """Return the report of a member that is left out; nothing for notes to readers."""
    if is_note(name):
        return []
    path = f"{file.name}:{name}".encode(errors="backslashreplace").decode()
    return [Skipped(path=path, reason=why_no_sample(name))]
