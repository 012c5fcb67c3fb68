"""Read files of JSON that are no lines: an array of objects, or objects one after the other, in pieces."""

from __future__ import annotations

import codecs
import contextlib
import json
import re
from collections.abc import Generator, Iterator, Mapping
from typing import BinaryIO

from shard_tools.make.convert.base.columns_met import meet_heads
from shard_tools.make.convert.base.counts import CountedFiles, FileCount, Marker, refuse_packed
from shard_tools.make.convert.base.files import DAMAGED, PACKED, SourceFile, open_each, open_stored, table_files
from shard_tools.make.convert.base.records import Record, SourceOptions
from shard_tools.make.convert.base.rows import RowMapper, unreadable, unreadable_rest
from streaming.errors import DataError, StorageError
from streaming.shards.catalog.lines import MAX_LINE_BYTES
from streaming.storage import Storage

SUFFIXES = tuple(f".json{packed}" for packed in ("", *PACKED))
_BLOCK_BYTES = 1 << 20
_SPACE = re.compile(r"[ \t\r\n]*")
_AFTER = frozenset(", ]\t\r\n")
_decoder = json.JSONDecoder()


class JsonFiles(CountedFiles):
    """The objects of files that hold an array of them, or one after the other, each a record.

    A file is read in blocks, and an object at a time is in memory, whatever the length of the array.
    """

    def __init__(self, spec: str, storage: Storage, options: SourceOptions) -> None:
        files, self._beside = table_files("json", spec, storage, SUFFIXES, options)
        super().__init__("json", files, storage, options.num_threads)
        self._mapper = RowMapper.of(options)
        if not options.named_only:
            meet_heads(self.files, storage, options.num_threads, _rows, allowed=options.unlike_columns)

    @property
    def fields(self) -> Mapping[str, bool]:
        """The fields that are known before reading: objects may have any columns."""
        return self._mapper.fields_of((), ())

    def records(self, start: int) -> Generator[Record, None, None]:
        """Yield the objects from number ``start`` on."""
        begin = self._beginning(start)
        number = begin.number
        with contextlib.closing(open_each(self.files[begin.which :], self._storage, self._num_threads)) as opened:
            for which, (file, stream) in enumerate(opened, begin.which):
                try:
                    for place, (row, raw) in enumerate(objects_of(stream, file.shown_url)):
                        if number >= start:
                            yield self._record(row, raw, number, f"{file.shown_url}, item {place}", which)
                        number += 1
                except DataError as error:
                    rest = unreadable_rest(number, file.shown_url, error, which, tolerant=self._mapper.tolerant)
                    if number >= start:
                        yield rest
                    number += 1

    def count_file(self, file: SourceFile) -> FileCount:
        """Count the objects of a file, which is read from its beginning each time.

        Raises:
            ConfigError: It is compressed.
        """
        if file.name.lower().endswith(PACKED):
            raise refuse_packed(file)
        with open_stored(file, self._storage) as stream:
            return Marker().count(sum(1 for _ in objects_of(stream, file.shown_url)))

    def _record(self, row: object, raw: bytes, number: int, where: str, which: int) -> Record:
        if isinstance(row, dict):
            return self._mapper.record(row, number, where, raw=raw, origin=which)
        problem = DataError(f"{where}: expected a JSON object, got {raw[:60]!r}")
        if self._mapper.tolerant:
            return unreadable(number, where, problem, which)
        raise problem


def _rows(file: SourceFile, stream: BinaryIO) -> Iterator[Mapping[str, object]]:
    return (row for row, _ in objects_of(stream, file.shown_url) if isinstance(row, dict))


def objects_of(stream: BinaryIO, url: str) -> Iterator[tuple[object, bytes]]:
    """Yield the values of an array, or of a file of values one after the other, each with its text.

    Raises:
        DataError: The file is no JSON in UTF-8, ends early, or is damaged; or a value is longer than 256 MiB.
    """
    text = _Text(stream, url)
    is_array = text.take("[")
    number = 0
    while not text.is_at("]" if is_array else ""):
        if number and is_array:
            text.need(",", f"after item {number - 1}")
        yield text.value(number)
        number += 1
    if is_array:
        text.need("]", f"after item {number - 1}")
        if not text.is_at(""):
            raise DataError(f"{url}: more follows the array; keep one array a file, or one object a line")


class _Text:
    """The text of a file, read as it is needed: a block ahead, or up to the end of the current value."""

    def __init__(self, stream: BinaryIO, url: str) -> None:
        self._stream, self._url = stream, url
        self._decode = codecs.getincrementaldecoder("utf-8-sig")("strict").decode
        self._text, self._at, self._is_whole = "", 0, False

    def take(self, mark: str) -> bool:
        """Step over a mark if it comes next."""
        found = self.is_at(mark)
        self._at += found
        return found

    def need(self, mark: str, where: str) -> None:
        """Step over a mark.

        Raises:
            DataError: Something else comes next.
        """
        if not self.take(mark):
            got = repr(self._text[self._at : self._at + 20]) if self._at < len(self._text) else "the end of the file"
            raise DataError(f"{self._url}: {where}: expected {mark!r}, got {got}; correct it, or fetch it again")

    def is_at(self, mark: str) -> bool:
        """Tell whether a mark comes next, after white space; ``""``: the end of the file."""
        while True:
            self._at = _end_of_space(self._text, self._at)
            if self._at < len(self._text):
                return bool(mark) and self._text.startswith(mark, self._at)
            if self._is_whole:
                return not mark
            self._more(_BLOCK_BYTES)

    def value(self, number: int) -> tuple[object, bytes]:
        """Return the value that comes next, and its text.

        Raises:
            DataError: It is no JSON, or too long.
        """
        size = _BLOCK_BYTES
        self.is_at("")  # steps over white space
        while True:
            try:
                value, end = _decoder.raw_decode(self._text, self._at)
            except (ValueError, RecursionError) as error:
                if self._is_whole or isinstance(error, RecursionError):
                    raise DataError(
                        f"{self._url}: item {number} is not JSON: {error}; correct it, or fetch the file again"
                    ) from error
            else:
                is_closed = isinstance(value, (dict, list, str)) or self._text[end : end + 1] in _AFTER
                if (end < len(self._text) and is_closed) or self._is_whole:  # a number may go on
                    raw, self._at = self._text[self._at : end], end
                    return value, raw.encode()
            if len(self._text) - self._at > MAX_LINE_BYTES:
                raise DataError(
                    f"{self._url}: item {number} is not JSON, or longer than {MAX_LINE_BYTES} characters; is this an "
                    "array of objects?"
                )
            self._more(size)
            size *= 2  # so that a value is read a few times, whatever its length

    def _more(self, size: int) -> None:
        try:
            data = self._stream.read(size)
            text = self._decode(data, not data)
        except EOFError as error:
            raise DataError(f"{self._url}: the compressed file ends early; fetch it again") from error
        except UnicodeDecodeError as error:
            raise DataError(f"{self._url}: not UTF-8 ({error}); re-encode the file") from error
        except (OSError, *DAMAGED) as error:
            if isinstance(error, StorageError):
                raise
            raise DataError(f"{self._url}: the compressed file is damaged ({error}); fetch it again") from error
        self._text, self._at, self._is_whole = self._text[self._at :] + text, 0, not data


def _end_of_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()
