"""Read LMDB: the values of a database, in the order of their keys.

This reader does not use LMDB's library, which maps the file and trusts it, so that a truncated or damaged file crashes
the process (bus errors, failed assertions). Here every page is read and checked.

The format is that of LMDB 0.9 (``lmdb.h``, ``mdb.c``): the first page gives the size of pages; pages 0 and 1 describe
two states, and the one with the greater transaction number is valid; branch pages lead to leaf pages, and values too
long for a leaf page have separate pages.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import logging
import os
import re
import struct
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Self

import numpy as np

from shard_tools.make.convert.base.files import FileSource, SourceFile, find_files, is_folder, is_local, once
from shard_tools.make.convert.base.records import NUMBER_KEYS, Record, Skipped, SourceOptions, permutation
from shard_tools.make.convert.base.rows import (
    DROP,
    RowMapper,
    choose_content_type,
    content_type,
    is_text,
    safe_extension,
    unreadable,
)
from streaming.common.arguments import counted
from streaming.common.arrays import sums
from streaming.errors import ConfigError, DataError, NotFoundError
from streaming.storage import Storage, local_path, redact
from streaming.types import Int64Array

SUFFIXES = (".mdb", ".lmdb")
KEY, VALUE = "key", "value"  # columns
DATA = "data.mdb"
_PAGE = struct.Struct("<QHHHH")  # number, unused, flags, begin and end of the free space
_META = struct.Struct("<IIQQ48s48sQQ")  # mark, version, address, size, free pages, database, last page, transaction
_DATABASE = struct.Struct("<IHHQQQQQ")  # size of pages, flags, depth, pages of three kinds, entries, root
_NODE = struct.Struct("<HHHH")  # size (in two parts) or page (in three), flags, size of the key
_MARK, _VERSION = 0xBEEFC0DE, 1
_BRANCH, _LEAF, _OVERFLOW = 1, 2, 4  # flags of pages
_KINDS = _BRANCH | _LEAF | _OVERFLOW | 8 | 0x20 | 0x40
_BIG, _NAMED, _SEVERAL = 1, 2, 4  # flags of nodes
_NO_PAGE = 2**64 - 1
_DEEPEST = 32  # as in the library
_LOOKED_AT, _LOOKED_AT_BYTES = 10_000, 64 << 20
_PICKLE = re.compile(rb"\x80[\x02-\x05].*\.\Z", re.DOTALL)
_NOTE = b"__"  # prefix of keys for notes of the program that wrote the database
_COUNT = b"num-samples"  # a key of databases whose entries are joined
_NUMBERED = re.compile(rb"(.*)-([0-9]{1,18})", re.DOTALL)
_MAX_SKIPPED = 10_000
_log = logging.getLogger(__name__)


class LmdbFiles(FileSource):
    """Entries of LMDB databases, on this machine's disk: the key is the sample's, the value becomes one field.

    The field is named by the type of the first 10,000 values: a file type, ``json``, ``txt`` or ``bin``. Keys that
    begin with ``__`` are notes of the program that wrote the database, such as ``__len__``: they are left out and
    reported. Files are only read, without LMDB's lock: no program may write to them meanwhile.

    Sets for text recognition have a key ``num-samples``, and keys of names and numbers (``image-000000001``,
    ``label-000000001``): entries of one number form one sample, whose key is the number, and the names are columns.
    ``--field value=EXT`` reads each entry by itself.
    """

    def __init__(self, spec: str, storage: Storage, options: SourceOptions) -> None:
        specs = (spec, *options.more)
        if (far := next((one for one in specs if not is_local(one)), None)) is not None:
            raise ConfigError(
                f"{redact(far)}: LMDB is read from this machine's disk; fetch the file {DATA}, and name its folder"
            )
        if options.key_field not in {None, NUMBER_KEYS, KEY}:
            raise ConfigError(f"--key: LMDB has keys of its own, or 'number'; got {options.key_field!r}")
        files = once([file for one in specs for file in _find(one, storage, options.exclude)])
        super().__init__("lmdb", files, storage)
        self._seed, self._numbered = options.shuffle_seed, options.key_field == NUMBER_KEYS
        self.in_order = self._seed is None
        self._numbers = {file.url: number for number, file in enumerate(self.files)}
        named = dict(options.fields)
        self._stores_pickles = VALUE in named
        fields = options.fields if KEY in named else (*options.fields, (KEY, DROP))
        self._mapper = RowMapper.of(replace(options, fields=fields, key_field=NUMBER_KEYS if self._numbered else KEY))
        self._skipped: dict[str, Skipped] = {}
        self._joins = [None if VALUE in named else _joins_of(file) for file in self.files]
        self._columns = _columns_of(self._joins, self.files)
        self._num_records = sum(map(self._count, self.files, self._joins))
        if VALUE not in named:
            self._mapper = self._typed(tolerant=options.named_only)

    @property
    def num_records(self) -> int:
        """Number of entries of all databases, without notes."""
        return self._num_records

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """The notes."""
        return tuple(self._skipped.values())

    @property
    def fields(self) -> Mapping[str, bool]:
        """The fields of the values."""
        return self._mapper.fields_of((KEY, *self._columns), (KEY, *self._columns))

    def identity(self) -> dict[str, object]:
        """Return the names of the files, and the field of the values."""
        return {**super().identity(), **self._mapper.identity()}

    def records(self, start: int) -> Generator[Record, None, None]:
        """Yield the entries from number ``start`` on; the values of earlier ones are not read."""
        with contextlib.closing(self._entries(start)) as entries:
            for number, file, key, values in entries:
                yield self._record(number, file, key, values)

    def _entries(self, start: int) -> Generator[tuple[int, SourceFile, bytes, tuple[bytes, ...]], None, None]:
        """Yield number, file, key and values of the samples."""
        if self._seed is not None:
            yield from self._shuffled(start, self._seed)
            return
        number = 0
        for file, joins in zip(self.files, self._joins, strict=True):
            with _Database(file) as database:
                if joins is not None:
                    for at in range(max(0, start - number), len(joins)):
                        yield number + at, file, *_sample_at(database, joins[at].tolist(), joined=True)
                    number += len(joins)
                    continue
                for key, place in database.places():
                    if not key.startswith(_NOTE):
                        if number >= start:
                            yield number, file, key, (database.value(place),)
                        number += 1

    def _shuffled(
        self, start: int, seed: int
    ) -> Generator[tuple[int, SourceFile, bytes, tuple[bytes, ...]], None, None]:
        with contextlib.ExitStack() as stack:
            databases = [stack.enter_context(_Database(file)) for file in self.files]
            tables = [
                _alone(database) if joins is None else joins
                for database, joins in zip(databases, self._joins, strict=True)
            ]
            first = sums([len(table) for table in tables])
            for number, item in enumerate(permutation(int(first[-1]), seed)[start:].tolist(), start):
                which = int(np.searchsorted(first, item, side="right")) - 1
                places = tables[which][item - int(first[which])].tolist()
                joined = self._joins[which] is not None
                yield number, self.files[which], *_sample_at(databases[which], places, joined=joined)

    def _count(self, file: SourceFile, joins: Int64Array | None) -> int:
        """Return the number of samples, and keep the keys of notes for the report."""
        with _Database(file) as database:
            notes = 0
            for key, _ in database.places(_NOTE):
                if not key.startswith(_NOTE):
                    break
                notes += 1
                path = f"{file.name}:{_shown(key)}"
                if len(self._skipped) < _MAX_SKIPPED:
                    self._skipped[path] = Skipped(path=path, reason="a note of the program that wrote the database")
            if joins is None:
                return database.num_entries - notes
            path = f"{file.name}:{_COUNT.decode()}"
            self._skipped[path] = Skipped(path=path, reason="the number of samples")
            return len(joins)

    def _record(self, number: int, file: SourceFile, key: bytes, values: tuple[bytes, ...]) -> Record:
        where = f"{file.shown_url}, key {_shown(key)!r}"
        try:
            text = key.decode(errors="backslashreplace" if self._numbered else "strict")
            for value in values:
                self._refuse_pickle(value, where)
        except UnicodeDecodeError as error:
            told = DataError(f"{where}: the key is no text; number the samples with --key number")
            told.__cause__ = error
        except DataError as error:
            told = error
        else:
            row = dict(zip(self._columns, map(self._value, values), strict=True))
            return self._mapper.record({KEY: text, **row}, number, where, origin=self._numbers[file.url])
        if self._mapper.tolerant:
            return unreadable(number, where, told, self._numbers[file.url])
        raise told

    def _refuse_pickle(self, value: bytes, where: str) -> None:
        if not self._stores_pickles and _PICKLE.match(value):
            raise DataError(
                f"{where}: the value is pickled, and reading pickles can run code; write the database again with files "
                f"or JSON as values, or store the bytes as they are with --field {VALUE}=bin"
            )

    def _value(self, value: bytes) -> object:
        return value.decode() if self._mapper.named_only and is_text(value) else value

    def _typed(self, *, tolerant: bool) -> RowMapper:
        """Decide the field of the values by the first ones."""
        types, num_bytes = [Counter[str]() for _ in self._columns], 0
        with contextlib.closing(self._entries(0)) as entries:
            for _, file, key, values in itertools.islice(entries, 1 if tolerant else _LOOKED_AT):
                for counter, value in zip(types, values, strict=True):
                    if not tolerant:
                        self._refuse_pickle(value, f"{file.shown_url}, key {_shown(key)!r}")
                    if value:
                        counter[content_type(value)] += 1
                    num_bytes += len(value)
                if num_bytes > _LOOKED_AT_BYTES:
                    break
        if tolerant:
            return self._mapper
        found = zip(self._columns, types, strict=True)
        named = {name for name, _ in self._mapper.fields}
        binary = {name: choose_content_type(name, counter) for name, counter in found if name not in named}
        shared = {one for one, count in Counter(binary.values()).items() if count > 1}
        return replace(
            self._mapper,
            binary={name: f"{safe_extension(name)}.{one}" if one in shared else one for name, one in binary.items()},
        )


def _shown(key: bytes) -> str:
    return key.decode(errors="backslashreplace")


def _joins_of(file: SourceFile) -> Int64Array | None:
    """Return the position of each sample's entries: int64 ``[samples, names, 2]``, in the order of numbers.

    Returns:
        None if each entry is a sample: there is no ``num-samples``, or the first key has no number.

    Raises:
        DataError: A sample lacks one of the names, or the number of samples is not the declared one.
    """
    with _Database(file) as database:
        key, place = next(database.places(_COUNT), (b"", (0, 0)))
        if key != _COUNT or not (said := database.value(place)).isdigit():
            return None
        found: dict[bytes, dict[int, tuple[int, int]]] = {}
        for key, place in database.places():
            if key.startswith(_NOTE) or key == _COUNT:
                continue
            match = _NUMBERED.fullmatch(key)
            if match is None and not found:
                return None
            if match is None:
                raise _unmatched(file, f"the key {_shown(key)!r} has no number")
            if found.setdefault(match[1], {}).setdefault(int(match[2]), place) != place:
                raise _unmatched(file, f"the key {_shown(key)!r} has the number of another")
        numbers = sorted({number for places in found.values() for number in places})
        for name, places in found.items():
            if (lost := next((number for number in numbers if number not in places), None)) is not None:
                raise _unmatched(file, f"number {lost} has no {_shown(name)!r}, as others have")
        if len(numbers) != int(said):
            raise _unmatched(file, f"there are {counted(len(numbers), 'sample')}, but {_shown(_COUNT)} is {int(said)}")
        return np.array([[found[name][number] for name in sorted(found)] for number in numbers], np.int64)


def _unmatched(file: SourceFile, what: str) -> DataError:
    return DataError(
        f"{file.shown_url}: entries of one number, such as image-1 and label-1, are one sample, but {what}; mend the "
        f"database, or read each entry by itself with --field {VALUE}=bin"
    )


def _columns_of(joins: Sequence[Int64Array | None], files: Sequence[SourceFile]) -> tuple[str, ...]:
    """Return the names of a sample's values, and log it if they are joined.

    Raises:
        ConfigError: They differ between databases.
    """
    names: dict[tuple[str, ...], SourceFile] = {}
    for file, places in zip(files, joins, strict=True):
        names.setdefault((VALUE,) if places is None else _names_of(file, places), file)
    if len(names) > 1:
        told = "; ".join(f"{file.shown_url}: {', '.join(one)}" for one, file in names.items())
        raise ConfigError(f"databases of different entries ({told}); convert them apart, with one target each")
    columns = next(iter(names), (VALUE,))
    for file, places in zip(files, joins, strict=True):
        if places is not None:
            _log.warning(
                "%s: entries of one number (%s) are one sample: %s. --field %s=bin reads each by itself",
                file.shown_url, ", ".join(f"{name}-…" for name in columns), counted(len(places), "sample"), VALUE,
            )  # fmt: skip
    return columns


def _names_of(file: SourceFile, places: Int64Array) -> tuple[str, ...]:
    with _Database(file) as database:
        keys = [database.key((page, node)) for page, node in places[0].tolist()] if len(places) else []
    return tuple(_shown(key.rpartition(b"-")[0]) for key in keys)


def _alone(database: _Database) -> Int64Array:
    """Return the position of each entry except notes: int64 ``[entries, 1, 2]``."""
    places = [place for key, place in database.places() if not key.startswith(_NOTE)]
    return np.array(places, np.int64).reshape(-1, 1, 2)


def _sample_at(database: _Database, places: list[list[int]], *, joined: bool) -> tuple[bytes, tuple[bytes, ...]]:
    """Return key and values of the sample at these positions; the key of joined entries is their number."""
    values = tuple(database.value((page, node)) for page, node in places)
    page, node = places[0]
    key = database.key((page, node))
    return key.rpartition(b"-")[2] if joined else key, values


def _find(spec: str, storage: Storage, exclude: str | None) -> list[SourceFile]:
    """Return the files of databases: a named file, or the files of a folder with the usual names.

    Raises:
        NotFoundError: There is none.
    """
    found = find_files(spec, storage, exclude=exclude)
    if len(found) == 1 and not is_folder(spec):
        return found
    files = [file for file in found if file.name.lower().endswith(SUFFIXES) and not file.name.endswith("lock.mdb")]
    if not files:
        raise NotFoundError(f"{redact(spec)}: no file ends in {' or '.join(SUFFIXES)}, as {DATA} does; name the file")
    return files


class _Database:
    """The main database of a file, read page by page."""

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self._descriptor = os.open(local_path(file.url), os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._page_bytes, self.num_entries, self._root, self._depth = self._read_state()
        except BaseException:
            os.close(self._descriptor)
            raise
        self._page: tuple[int, bytes, list[int]] = (-1, b"", [])  # the latest page

    def __enter__(self) -> Self:
        """Return this."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def places(self, low: bytes = b"") -> Iterator[tuple[bytes, tuple[int, int]]]:
        """Yield each key from ``low`` on, with the page and node that hold it, in ascending order.

        Raises:
            DataError: The pages are not a tree with the declared number of entries.
        """
        count, last = 0, b""
        if self._root != _NO_PAGE:
            for key, place in self._below(self._root, 1, low):
                if count and key <= last:
                    raise self._damaged(place[0], "its keys do not ascend")
                count, last = count + 1, key
                if count > self.num_entries:
                    raise self._damaged(place[0], f"the database holds more than {self.num_entries} entries")
                yield key, place
        if not low and count != self.num_entries:
            raise self._damaged(self._root, f"the database holds {count} entries, expected {self.num_entries}")

    def key(self, place: tuple[int, int]) -> bytes:
        """Return a key."""
        page, nodes = self._nodes(place[0])
        return _key_of(page, nodes[place[1]])

    def value(self, place: tuple[int, int]) -> bytes:
        """Return a value."""
        number, which = place
        page, nodes = self._nodes(number)
        at = nodes[which]
        low, high, flags, key_bytes = _NODE.unpack_from(page, at)
        begin, size = at + _NODE.size + key_bytes, low | high << 16
        if flags & (_NAMED | _SEVERAL):
            what = "is a database within it" if flags & _NAMED else "has several values"
            raise DataError(
                f"{self._file.shown_url}: the key {_key_of(page, at).decode(errors='backslashreplace')!r} {what}; only "
                "one value for each key of the main database is read: copy these into a database of their own"
            )
        if not flags & _BIG:
            if begin + size > len(page):
                raise self._damaged(number, "a value ends after it")
            return page[begin : begin + size]
        if begin + 8 > len(page):
            raise self._damaged(number, "a value's place ends after it")
        first = int.from_bytes(page[begin : begin + 8], "little")
        head = self._read(first, 0, _PAGE.size)
        said, _, kind, pages_low, pages_high = _PAGE.unpack(head)
        room = (pages_low | pages_high << 16) * self._page_bytes - _PAGE.size
        if said != first or kind & _KINDS != _OVERFLOW or size > room:
            raise self._damaged(first, f"it holds no value of {size} bytes")
        return self._read(first, _PAGE.size, size)

    def _below(self, number: int, depth: int, low: bytes) -> Iterator[tuple[bytes, tuple[int, int]]]:
        page, nodes = self._nodes(number)
        is_leaf = _PAGE.unpack_from(page)[2] & _LEAF
        if depth > self._depth or bool(is_leaf) != (depth == self._depth):
            raise self._damaged(number, f"it is at depth {depth} of {self._depth}")
        keys = [_key_of(page, at) for at in nodes]
        if is_leaf:
            for which in range(bisect.bisect_left(keys, low), len(keys)):
                yield keys[which], (number, which)
            return
        for which in range(max(0, bisect.bisect_right(keys, low, lo=1) - 1), len(keys)):
            first, second, third, _ = _NODE.unpack_from(page, nodes[which])
            yield from self._below(first | second << 16 | third << 32, depth + 1, low)

    def _nodes(self, number: int) -> tuple[bytes, list[int]]:
        """Return a branch or leaf page, and the starts of its nodes."""
        if self._page[0] == number:
            return self._page[1:]
        page = self._read(number, 0, self._page_bytes)
        said, _, kind, lower, _ = _PAGE.unpack_from(page)
        if said != number or kind & _KINDS not in {_BRANCH, _LEAF} or not _PAGE.size < lower <= len(page):
            raise self._damaged(number, "it is no page of keys")
        nodes = list(struct.unpack_from(f"<{(lower - _PAGE.size) // 2}H", page, _PAGE.size))
        for at in nodes:
            end = at + _NODE.size
            if not lower <= at <= end <= len(page) or end + _NODE.unpack_from(page, at)[3] > len(page):
                raise self._damaged(number, "a key lies outside of it")
        self._page = number, page, nodes
        return page, nodes

    def _read_state(self) -> tuple[int, int, int, int]:
        """Return the page size, and the number of entries, root and depth of the newer state."""
        first = self._state_at(0)
        second = self._state_at(first[1]) if first is not None else None
        if first is None or second is None or first[1] != second[1]:
            raise DataError(f"{self._file.shown_url}: not an LMDB file, or a damaged one; fetch it again")
        return max(first, second)[1:]

    def _state_at(self, at: int) -> tuple[int, int, int, int, int] | None:
        """Return the state in a page: transaction, page size, entries, root, depth; None: the page has no state."""
        raw = os.pread(self._descriptor, _PAGE.size + _META.size, at)
        if len(raw) < _PAGE.size + _META.size:
            return None
        mark, version, _, _, free, main, _, transaction = _META.unpack_from(raw, _PAGE.size)
        page_bytes = int(_DATABASE.unpack(free)[0])
        if mark != _MARK or version != _VERSION or page_bytes & (page_bytes - 1) or not 1 << 9 <= page_bytes <= 1 << 16:
            return None
        _, flags, depth, _, _, _, num_entries, root = _DATABASE.unpack(main)
        if flags & 0x7FFF:
            raise ConfigError(
                f"{self._file.shown_url}: a database of several values for a key, or of keys that are numbers; copy it "
                "into one without these flags"
            )
        if depth > _DEEPEST or num_entries > self._file.size_bytes or (root == _NO_PAGE) != (num_entries == 0):
            return None
        return transaction, page_bytes, num_entries, root, depth

    def _read(self, number: int, skip: int, size: int) -> bytes:
        at = number * self._page_bytes + skip
        if at + size > self._file.size_bytes:
            raise self._damaged(number, "it ends after the file: truncated")
        data = os.pread(self._descriptor, size, at)
        while len(data) < size and (more := os.pread(self._descriptor, size - len(data), at + len(data))):
            data += more
        if len(data) < size:
            raise self._damaged(number, "it ends after the file: truncated")
        return data

    def _damaged(self, number: int, what: str) -> DataError:
        return DataError(f"{self._file.shown_url}, page {number}: {what}; damaged? Fetch the file again")


def _key_of(page: bytes, at: int) -> bytes:
    begin = at + _NODE.size
    return page[begin : begin + _NODE.unpack_from(page, at)[3]]
