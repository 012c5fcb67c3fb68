"""Read JSONL, text and CSV: one record per line (a CSV record may span lines)."""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from typing import BinaryIO

import numpy as np

from shard_tools.make.convert.base.columns_met import meet_heads
from shard_tools.make.convert.base.counts import CountedFiles, FileCount, Marker, refuse_packed
from shard_tools.make.convert.base.files import DAMAGED, PACKED, SourceFile, open_each, open_stored, table_files
from shard_tools.make.convert.base.records import Record, SourceOptions, permutation
from shard_tools.make.convert.base.rows import RowMapper, unreadable, unreadable_rest
from streaming.common.arrays import sums
from streaming.common.threads import map_threads
from streaming.errors import ConfigError, DataError, StorageError
from streaming.shards.catalog.lines import MAX_LINE_BYTES, json_line, scan_lines
from streaming.storage import Storage, split_url
from streaming.types import Int64Array

_BLOCK_BYTES = 8 << 20
SUFFIXES = {
    "jsonl": tuple(f".{name}{packed}" for packed in ("", *PACKED) for name in ("jsonl", "ndjson")),
    "text": tuple(f".txt{packed}" for packed in ("", *PACKED)),
    "csv": tuple(f".{name}{packed}" for packed in ("", *PACKED) for name in ("csv", "tsv")),
}


class LineFiles(CountedFiles):
    """JSONL or text files: every non-blank line is a record; in text also every paragraph, or every file.

    Without ``shuffle_seed`` files are read sequentially; with it, a first pass records where lines begin (8 bytes of
    memory per line), and lines are then read in permuted order.
    """

    def __init__(self, kind: str, spec: str, storage: Storage, options: SourceOptions) -> None:
        files, self._beside = table_files(kind, spec, storage, SUFFIXES[kind], options)
        super().__init__(kind, files, storage, options.num_threads)
        self._mapper = RowMapper.of(options)
        if kind == "text" and not options.fields:
            self._mapper = replace(self._mapper, fields=(("text", "txt"),))
        self._seed = options.shuffle_seed
        self.in_order = self._seed is None
        self._unit = options.unit if kind == "text" else "line"
        if self._seed is not None and self._unit != "line":
            raise ConfigError(f"--shuffle: documents that are not lines ({self._unit}) can only be read front to back")
        if kind == "jsonl" and not options.named_only:
            meet_heads(self.files, storage, options.num_threads, _json_rows, allowed=options.unlike_columns)
        zipped = next(filter(_is_packed, self.files), None)
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
        begin = self._beginning(start)
        number, at, num_lines = begin.number, begin.at, begin.num_lines
        with contextlib.closing(open_each(self.files[begin.which :], self._storage, self._num_threads)) as opened:
            for which, (file, stream) in enumerate(opened, begin.which):
                if at:
                    stream.seek(at)
                try:
                    for line_number, text in _units(read_lines(stream, file.shown_url), self._unit, num_lines):
                        if number >= start:
                            yield self._record(text, number, f"{file.shown_url}:{line_number}", file.name, which)
                        number += 1
                except DataError as error:
                    rest = unreadable_rest(number, file.shown_url, error, which, tolerant=self._mapper.tolerant)
                    if number >= start:
                        yield rest
                    number += 1
                at = num_lines = 0

    def count_file(self, file: SourceFile) -> FileCount:
        """Count the records of a file.

        Raises:
            ConfigError: It is compressed.
        """
        if self._seed is not None:
            places = _line_table(file, self._storage)
            return FileCount(num_records=len(places), marks=np.zeros((1, 3), np.int64), places=places)
        marks, at, num_lines, num_records = Marker(), 0, 0, 0

        def lines() -> Iterator[bytes]:
            nonlocal at, num_lines
            for line in read_lines(stream, file.shown_url):
                at, num_lines = at + len(line), num_lines + 1
                yield line

        with _open_to_count(file, self._storage) as stream:
            for _ in _units(lines(), self._unit):
                num_records += 1
                marks.add(num_records, at, num_lines)
        return marks.count(num_records)

    def _shuffled(self, start: int, seed: int) -> Generator[Record, None, None]:
        tables = self._places()
        first = sums([len(table) for table in tables])

        def read(item: tuple[int, int]) -> Record:
            number, source_number = item
            which = int(np.searchsorted(first, source_number, side="right")) - 1
            begin, end, line_number = (int(value) for value in tables[which][source_number - first[which]])
            url = self.files[which].url
            line = bytes(self._storage.read(url, begin, end))
            return self._record(line, number, f"{url}:{line_number}", self.files[which].name, which)

        order = permutation(int(first[-1]), seed)[start:]
        return map_threads(read, ((start + i, int(item)) for i, item in enumerate(order)), self._num_threads)

    def _record(self, line: bytes, number: int, where: str, name: str, which: int) -> Record:
        try:
            row, raw = self._parse(line, where, name)
        except DataError as error:
            if self._mapper.tolerant:
                return unreadable(number, where, error, which)
            raise
        return self._mapper.record(row, number, where, raw=raw, origin=which)

    def _parse(self, line: bytes, where: str, name: str) -> tuple[dict[str, object], bytes | None]:
        """Return the row of a line, and its JSON if the line is JSON."""
        if self.kind == "text":
            try:
                text = (line if self._unit == "file" else line.rstrip(b"\r\n")).decode()
            except UnicodeDecodeError as error:
                raise DataError(f"{where}: byte {error.start} is not UTF-8; re-encode the file") from error
            return ({"text": text} if self._unit == "line" else {"text": text, "path": name}), None
        return json_line(line, where)


def _is_packed(file: SourceFile) -> bool:
    return file.name.lower().endswith(PACKED)


def _open_to_count(file: SourceFile, storage: Storage) -> BinaryIO:
    """Open a file that several processes will read.

    Raises:
        ConfigError: It is compressed.
    """
    if _is_packed(file):
        raise refuse_packed(file)
    return open_stored(file, storage)


def _units(lines: Iterator[bytes], unit: str, num_before: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield the first line number and the text of every line, paragraph (separated by blank lines) or file.

    ``num_before`` lines came before.

    Raises:
        DataError: A text is longer than 256 MiB.
    """
    text, first = bytearray(), 1
    for number, line in enumerate(lines, 1 + num_before):
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


def _json_rows(file: SourceFile, stream: BinaryIO) -> Iterator[Mapping[str, object]]:
    lines = (text for text in read_lines(stream, file.shown_url) if text.strip())
    return (json_line(text, file.shown_url)[0] for text in lines)


def read_lines(stream: BinaryIO, url: str) -> Iterator[bytes]:
    """Yield the lines of ``stream``, including line endings.

    Raises:
        DataError: A line is longer than 256 MiB, or a compressed file is damaged.
    """
    try:
        while line := stream.readline(MAX_LINE_BYTES):
            if len(line) == MAX_LINE_BYTES:
                raise DataError(f"{url}: a line is longer than {MAX_LINE_BYTES} bytes; is this a file of lines?")
            yield line
    except EOFError as error:
        raise DataError(f"{url}: the compressed file ends early; fetch it again") from error
    except DAMAGED as error:
        raise DataError(f"{url}: the compressed file is damaged ({error}); fetch it again") from error
    except OSError as error:  # of a .zst or .bz2
        if isinstance(error, StorageError):
            raise
        raise DataError(f"{url}: the compressed file is damaged or ends early ({error}); fetch it again") from error


class _TextLines:
    """The lines of a text in UTF-8, of bounded length."""

    def __init__(self, stream: BinaryIO, url: str, errors: str) -> None:
        self._url, self._errors = url, errors
        self._text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors=errors, newline="")

    def seek(self, at: int) -> None:
        """Continue at a byte where a line begins."""
        stream = self._text.detach()
        stream.seek(at)
        self._text = io.TextIOWrapper(stream, encoding="utf-8", errors=self._errors, newline="")

    def __iter__(self) -> Iterator[str]:
        while line := self._text.readline(MAX_LINE_BYTES):
            if len(line) == MAX_LINE_BYTES:
                raise DataError(
                    f"{self._url}: a line is longer than {MAX_LINE_BYTES} characters; is this a file of rows?"
                )
            yield line


class _CountedLines(_TextLines):
    """The lines of a text, with counts of the lines and bytes read so far."""

    def __init__(self, stream: BinaryIO, url: str, errors: str) -> None:
        self.num_bytes = len(codecs.BOM_UTF8) if stream.read(3) == codecs.BOM_UTF8 else 0
        self.num_lines = 0
        stream.seek(0)
        super().__init__(stream, url, errors)

    def __iter__(self) -> Iterator[str]:
        for line in super().__iter__():
            self.num_bytes += len(line.encode("utf-8", self._errors))
            self.num_lines += 1
            yield line


def _line_table(file: SourceFile, storage: Storage) -> Int64Array:
    """Locate every non-blank line: int64 [n, 3], its begin, end and line number."""
    with open_stored(file, storage) as stream:
        found = [
            np.stack(lines, axis=1) for lines in scan_lines(iter(lambda: stream.read(_BLOCK_BYTES), b""), file.url)
        ]
    return np.concatenate([np.empty((0, 3), np.int64), *found])


class CsvFiles(CountedFiles):
    """CSV or TSV files with a header line; every row becomes a ``json`` field of text values."""

    def __init__(self, spec: str, storage: Storage, options: SourceOptions) -> None:
        files, self._beside = table_files("csv", spec, storage, SUFFIXES["csv"], options)
        super().__init__("csv", files, storage, options.num_threads)
        self._mapper = RowMapper.of(options)
        if not options.named_only:
            meet_heads(self.files, storage, options.num_threads, self._head, allowed=options.unlike_columns)

    def _head(self, file: SourceFile, stream: BinaryIO) -> Iterator[Mapping[str, object]]:
        rows = self._rows(_TextLines(stream, file.url, self._errors), file)
        return (row for row, _ in rows if not isinstance(row, DataError))

    @property
    def fields(self) -> Mapping[str, bool]:
        """The fields that are known before the header is read."""
        return self._mapper.fields_of((), ())

    def records(self, start: int) -> Generator[Record, None, None]:
        """Yield the rows from number ``start`` on."""
        begin = self._beginning(start)
        number, at, num_lines = begin.number, begin.at, begin.num_lines
        with contextlib.closing(open_each(self.files[begin.which :], self._storage, self._num_threads)) as opened:
            for which, (file, stream) in enumerate(opened, begin.which):
                try:
                    for row, where in self._rows(_TextLines(stream, file.url, self._errors), file, at, num_lines):
                        if number >= start:
                            if isinstance(row, DataError):
                                yield unreadable(number, where, row, which)
                            else:
                                yield self._mapper.record(row, number, where, origin=which)
                        number += 1
                except DataError as error:
                    rest = unreadable_rest(number, file.shown_url, error, which, tolerant=self._mapper.tolerant)
                    if number >= start:
                        yield rest
                    number += 1
                at = num_lines = 0

    def count_file(self, file: SourceFile) -> FileCount:
        """Count the rows of a file.

        Raises:
            ConfigError: It is compressed.
        """
        marks, num_records = Marker(), 0
        with _open_to_count(file, self._storage) as stream:
            lines = _CountedLines(stream, file.url, self._errors)
            for _ in self._rows(lines, file):
                num_records += 1
                marks.add(num_records, lines.num_bytes, lines.num_lines)
        return marks.count(num_records)

    @property
    def _errors(self) -> str:
        return "surrogateescape" if self._mapper.tolerant else "strict"

    def _rows(
        self, lines: _TextLines, file: SourceFile, at: int = 0, num_lines: int = 0
    ) -> Iterator[tuple[dict[str, object] | DataError, str]]:
        """Yield the rows after the header, or from byte ``at`` on, after ``before`` lines."""
        csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE_BYTES))  # Python's own 131,072 refuses longer texts
        delimiter = "\t" if ".tsv" in split_url(file.name)[1].lower() else ","
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        before = 0
        try:
            header = next(reader, None)
            if header is None or len({*header}) < len(header):
                raise DataError(f"{file.shown_url}:1: expected a header of distinct column names, got {header}")
            if at:
                lines.seek(at)
                before = num_lines - reader.line_num
            for values in reader:
                if not values:
                    continue
                where = f"{file.shown_url}:{before + reader.line_num}"
                if len(values) == len(header):
                    yield dict(zip(header, values, strict=True)), where
                    continue
                problem = DataError(f"{where}: expected {len(header)} values, got {len(values)}; correct this row")
                if not self._mapper.tolerant:
                    raise problem
                yield problem, where
        except (csv.Error, UnicodeDecodeError, EOFError, OSError, *DAMAGED) as error:
            if isinstance(error, StorageError):
                raise
            raise DataError(
                f"{file.shown_url}:{before + reader.line_num}: not readable as CSV in UTF-8: {error}; correct it there"
            ) from error
