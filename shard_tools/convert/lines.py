"""Read JSONL, text and CSV: one record per line (a CSV record may span lines)."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import zlib
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from typing import BinaryIO

import numpy as np

from shard_tools.convert.base.files import FileSource, SourceFile, find_files, open_each, open_stored
from shard_tools.convert.base.records import Record, SourceOptions, permutation
from shard_tools.convert.base.rows import RowMapper, unreadable
from shard_tools.running.engine import map_ordered
from streaming.arrays import sums
from streaming.catalog.lines import MAX_LINE_BYTES, json_line, scan_lines
from streaming.errors import ConfigError, DataError, StorageError
from streaming.storage import Storage, split_url
from streaming.types import Int64Array

_BLOCK_BYTES = 8 << 20
PACKED = (".gz", ".zst")
SUFFIXES = {
    "jsonl": tuple(f".{name}{packed}" for packed in ("", *PACKED) for name in ("jsonl", "ndjson")),
    "text": tuple(f".txt{packed}" for packed in ("", *PACKED)),
    "csv": tuple(f".{name}{packed}" for packed in ("", *PACKED) for name in ("csv", "tsv")),
}


class LineFiles(FileSource):
    """JSONL or text files: every non-blank line is a record; in text also every paragraph, or every file.

    Without ``shuffle_seed`` files are read sequentially; with it, a first pass records where lines begin (8 bytes of
    memory per line), and lines are then read in permuted order.
    """

    def __init__(self, kind: str, spec: str, storage: Storage, options: SourceOptions) -> None:
        super().__init__(
            kind, find_files(spec, storage, SUFFIXES[kind], exclude=options.exclude, more=options.more), storage
        )
        self._mapper = RowMapper.of(options)
        if kind == "text" and not options.fields:
            self._mapper = replace(self._mapper, fields=(("text", "txt"),))
        self._seed, self._num_threads = options.shuffle_seed, options.num_threads
        self._unit = options.unit if kind == "text" else "line"
        if self._seed is not None and self._unit != "line":
            raise ConfigError(f"--shuffle: documents that are not lines ({self._unit}) can only be read front to back")
        zipped = next((file for file in self.files if file.name.lower().endswith(PACKED)), None)
        if self._seed is not None and zipped is not None:
            raise ConfigError(f"--shuffle: {zipped.shown_url} is compressed and cannot be read out of order; unpack it")

    @property
    def fields(self) -> Mapping[str, bool]:
        """The fields that are known before reading: lines of JSON may have any columns."""
        columns = {"text"} if self._unit == "line" else {"text", "path"}
        known = columns if self.kind == "text" else ()
        return self._mapper.fields_of(known, known)

    def records(self, start: int) -> Generator[Record, None, None]:
        """Return the records from number ``start`` on."""
        return self._in_order(start) if self._seed is None else self._shuffled(start, self._seed)

    def _in_order(self, start: int) -> Generator[Record, None, None]:
        number = 0
        with contextlib.closing(open_each(self.files, self._storage, self._num_threads)) as opened:
            for file, stream in opened:
                for line_number, text in _units(read_lines(stream, file.shown_url), self._unit):
                    if number >= start:
                        yield self._record(text, number, f"{file.shown_url}:{line_number}", file.name)
                    number += 1

    def _shuffled(self, start: int, seed: int) -> Generator[Record, None, None]:
        tables = [_line_table(file, self._storage) for file in self.files]
        first = sums([len(table) for table in tables])

        def read(item: tuple[int, int]) -> Record:
            number, source_number = item
            which = int(np.searchsorted(first, source_number, side="right")) - 1
            begin, end, line_number = (int(value) for value in tables[which][source_number - first[which]])
            url = self.files[which].url
            line = bytes(self._storage.read(url, begin, end))
            return self._record(line, number, f"{url}:{line_number}", self.files[which].name)

        order = permutation(int(first[-1]), seed)[start:]
        return map_ordered(read, ((start + i, int(item)) for i, item in enumerate(order)), self._num_threads)

    def _record(self, line: bytes, number: int, where: str, name: str) -> Record:
        try:
            row, raw = self._parse(line, where, name)
        except DataError as error:
            if self._mapper.tolerant:
                return unreadable(number, where, error)
            raise
        return self._mapper.record(row, number, where, raw=raw)

    def _parse(self, line: bytes, where: str, name: str) -> tuple[dict[str, object], bytes | None]:
        """Return the row of a line, and its JSON if the line is JSON."""
        if self.kind == "text":
            try:
                text = (line if self._unit == "file" else line.rstrip(b"\r\n")).decode()
            except UnicodeDecodeError as error:
                raise DataError(f"{where}: byte {error.start} is not UTF-8; re-encode the file") from error
            return ({"text": text} if self._unit == "line" else {"text": text, "path": name}), None
        return json_line(line, where)


def _units(lines: Iterator[bytes], unit: str) -> Iterator[tuple[int, bytes]]:
    """Yield the first line number and the text of every line, paragraph (separated by blank lines) or file.

    Raises:
        DataError: A text is longer than 256 MiB.
    """
    text, first = bytearray(), 1
    for number, line in enumerate(lines, 1):
        blank = not line.strip()
        if unit == "line":
            if not blank:
                yield number, line
            continue
        if unit == "file" or not blank:
            first = first if text else number
            text += line
            if len(text) > MAX_LINE_BYTES:
                raise DataError(f"line {number}: a text is longer than {MAX_LINE_BYTES} bytes; split it")
        elif text:
            yield first, bytes(text)
            text.clear()
    if text:
        yield first, bytes(text)


def read_lines(stream: BinaryIO, url: str) -> Iterator[bytes]:
    """Yield the lines of ``stream``, including line endings.

    Raises:
        DataError: A line is longer than 256 MiB, or a ``.gz`` is damaged.
    """
    try:
        while line := stream.readline(MAX_LINE_BYTES):
            if len(line) == MAX_LINE_BYTES:
                raise DataError(f"{url}: a line is longer than {MAX_LINE_BYTES} bytes; is this a file of lines?")
            yield line
    except EOFError as error:
        raise DataError(f"{url}: the compressed file ends early; fetch it again") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{url}: the compressed file is damaged ({error}); fetch it again") from error
    except OSError as error:  # pyarrow's, of a .zst
        if isinstance(error, StorageError):
            raise
        raise DataError(f"{url}: the compressed file is damaged or ends early ({error}); fetch it again") from error


def _bounded_lines(text: io.TextIOWrapper, url: str) -> Iterator[str]:
    while line := text.readline(MAX_LINE_BYTES):
        if len(line) == MAX_LINE_BYTES:
            raise DataError(f"{url}: a line is longer than {MAX_LINE_BYTES} characters; is this a file of rows?")
        yield line


def _line_table(file: SourceFile, storage: Storage) -> Int64Array:
    """Locate every non-blank line: int64 [n, 3], its begin, end and line number."""
    with open_stored(file, storage) as stream:
        found = [
            np.stack(lines, axis=1) for lines in scan_lines(iter(lambda: stream.read(_BLOCK_BYTES), b""), file.url)
        ]
    return np.concatenate([np.empty((0, 3), np.int64), *found])


class CsvFiles(FileSource):
    """CSV or TSV files with a header line; every row becomes a ``json`` field of text values."""

    def __init__(self, spec: str, storage: Storage, options: SourceOptions) -> None:
        super().__init__(
            "csv", find_files(spec, storage, SUFFIXES["csv"], exclude=options.exclude, more=options.more), storage
        )
        self._mapper, self._num_threads = RowMapper.of(options), options.num_threads

    @property
    def fields(self) -> Mapping[str, bool]:
        """The fields that are known before the header is read."""
        return self._mapper.fields_of((), ())

    def records(self, start: int) -> Generator[Record, None, None]:
        """Yield the rows from number ``start`` on."""
        number = 0
        with contextlib.closing(open_each(self.files, self._storage, self._num_threads)) as opened:
            for file, stream in opened:
                for row, where in self._rows(stream, file):
                    if number < start:
                        pass
                    elif isinstance(row, DataError):
                        yield unreadable(number, where, row)
                    else:
                        yield self._mapper.record(row, number, where)
                    number += 1

    def _rows(self, stream: BinaryIO, file: SourceFile) -> Iterator[tuple[dict[str, object] | DataError, str]]:
        errors = "surrogateescape" if self._mapper.tolerant else "strict"
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors=errors, newline="")
        csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE_BYTES))  # Python's own 131,072 refuses longer texts
        delimiter = "\t" if ".tsv" in split_url(file.name)[1].lower() else ","
        reader = csv.reader(_bounded_lines(text, file.url), delimiter=delimiter, strict=True)
        try:
            header = next(reader, None)
            if header is None or len({*header}) < len(header):
                raise DataError(f"{file.shown_url}:1: expected a header of distinct column names, got {header}")
            for values in reader:
                if not values:
                    continue
                where = f"{file.shown_url}:{reader.line_num}"
                if len(values) == len(header):
                    yield dict(zip(header, values, strict=True)), where
                    continue
                problem = DataError(f"{where}: expected {len(header)} values, got {len(values)}; correct this row")
                if not self._mapper.tolerant:
                    raise problem
                yield problem, where
        except (csv.Error, UnicodeDecodeError, EOFError, OSError, zlib.error) as error:
            if isinstance(error, StorageError):
                raise
            raise DataError(
                f"{file.shown_url}:{reader.line_num}: not readable as CSV in UTF-8: {error}; correct it there"
            ) from error
