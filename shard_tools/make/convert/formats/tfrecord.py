"""Read TFRecord files: ``tf.train.Example`` and ``SequenceExample``, or records of any content, unchanged.

A record consists of its size (uint64), the masked CRC-32C of the size, its bytes, and their masked CRC-32C
(tensorflow.org/tutorials/load_data). Files may be compressed as a whole with gzip or zlib, as their first bytes show.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import struct
from collections import Counter
from collections.abc import Generator
from dataclasses import astuple, dataclass, field, replace
from typing import BinaryIO, cast

import crc32c
import numpy as np

from shard_tools.make.convert.base.counts import CountedFiles, FileCount, Marker, refuse_packed
from shard_tools.make.convert.base.files import SourceFile, find_files, is_folder, once, open_each, open_stored
from shard_tools.make.convert.base.identity import ChangedInputError
from shard_tools.make.convert.base.records import Record, SourceOptions, permutation
from shard_tools.make.convert.base.rows import (
    DROP,
    RowMapper,
    choose_content_type,
    content_type,
    safe_extension,
    unreadable,
    unreadable_rest,
    with_lists,
)  # fmt: skip
from shard_tools.make.convert.base.unpack import InflatedStream
from shard_tools.make.convert.formats.example import Values, parse_example
from streaming.common.arguments import checked_ratio
from streaming.common.arrays import sums
from streaming.common.threads import map_threads
from streaming.errors import ConfigError, DataError, NotFoundError, shell_word
from streaming.storage import Storage, redact

NAMES = re.compile(r"\.(tfrecords?|tfrec)([-_]\d+-of-\d+)?(\.(gz|gzip|zlib))?$|-\d{5}-of-\d{5}(\.gz)?$")
RECORD = "record"  # the column of raw records
_HEADER, _SUM = struct.Struct("<QI"), struct.Struct("<I")
_MAX_RECORD_BYTES = 2**31 - 1  # limit of protocol buffers
_LOOKED_AT, _LOOKED_AT_BYTES = 10_000, 64 << 20  # records read to decide the types of features


class TfRecords(CountedFiles):
    """Records of TFRecord files, in the order of the files' names.

    Examples: bytes become fields by their type, or text; numbers become ``.npy``, or ``json`` if each of the first
    10,000 records has one. The field of a feature is decided once, by these records.

    Without ``shuffle_seed`` files are read sequentially; with it, a first pass over the sizes of records finds their
    positions.

    Args:
        spec: Files, a folder or a pattern; in a folder, files with the usual names are taken.
        storage: The store.
        options: Options for reading.
        raw: Store records unchanged.
    """

    def __init__(self, spec: str, storage: Storage, options: SourceOptions, *, raw: bool = False) -> None:
        each = [_find(one, storage, options.exclude) for one in (spec, *options.more)]
        kind = "tfrecord-raw" if raw else "tfrecord"
        super().__init__(kind, once([*itertools.chain(*each)]), storage, options.num_threads)
        self._max_ratio = checked_ratio("max_gzip_ratio", options.max_gzip_ratio)
        self._seed, self._raw = options.shuffle_seed, raw
        self.in_order = self._seed is None
        self._key_field = options.key_field
        self._mapper = RowMapper.of(options)
        self._columns: dict[str, _Column] = {}
        self._decide(tolerant=options.named_only)

    def identity(self) -> dict[str, object]:
        """Return the names of the files, and the field of each feature."""
        features = {name: " ".join(map(str, astuple(column))) for name, column in sorted(self._columns.items())}
        return {**super().identity(), **self._mapper.identity(), "features": features}

    def records(self, start: int) -> Generator[Record, None, None]:
        """Return the records from number ``start`` on."""
        return self._in_order(start) if self._seed is None else self._shuffled(start, self._seed)

    def _in_order(self, start: int) -> Generator[Record, None, None]:
        with contextlib.closing(self._stored(start)) as stored:
            for number, data, where, which in stored:
                yield self._record(number, data, where, which)

    def _stored(self, start: int) -> Generator[tuple[int, bytes | DataError, str, int], None, None]:
        """Yield number, bytes, place and file of the records from number ``start`` on; earlier ones are passed over.

        An error takes the place of what cannot be read of a file, if that is allowed.
        """
        begin = self._beginning(start)
        number, at, number_in_file = begin.number, begin.at, begin.number_in_file
        files = self.files[begin.which :]
        with contextlib.closing(open_each(files, self._storage, self._num_threads, unzip=False)) as opened:
            for which, (file, stream) in enumerate(opened, begin.which):
                reader = _RecordReader(file, stream, self._max_ratio, at, number_in_file)
                for place in itertools.count(number_in_file):
                    data = self._next(reader, skip=number < start)
                    if data is None:
                        break
                    if number >= start:
                        yield number, data, f"{file.shown_url}, record {place}", which
                    number += 1
                    if isinstance(data, DataError):
                        break
                at = number_in_file = 0

    def _next(self, reader: _RecordReader, *, skip: bool) -> bytes | DataError | None:
        try:
            return reader.read(skip=skip)
        except DataError as error:
            if not self._mapper.tolerant or isinstance(error, ChangedInputError):
                raise
            return error

    def count_file(self, file: SourceFile) -> FileCount:
        """Count the records of a file by their sizes.

        Raises:
            ConfigError: It is compressed.
        """
        marks, places, num_records = Marker(), [0], 0
        with open_stored(file, self._storage, unzip=False) as stream:
            reader = _RecordReader(file, stream, self._max_ratio)
            if reader.is_packed:
                raise self._refuse_packed(file)
            while reader.read(skip=True) is not None:
                num_records += 1
                marks.add(num_records, reader.at)
                if self._seed is not None:
                    places.append(reader.at)
        count = marks.count(num_records)
        if self._seed is None:
            return count
        return replace(count, places=np.array([places[:-1], places[1:]], np.int64).T)

    def _refuse_packed(self, file: SourceFile) -> ConfigError:
        if self._seed is None:
            return refuse_packed(file)
        return ConfigError(f"--shuffle: {file.shown_url} is compressed and cannot be read out of order; unpack it")

    def _shuffled(self, start: int, seed: int) -> Generator[Record, None, None]:
        tables = self._places()
        first = sums([len(table) for table in tables])

        def read(item: tuple[int, int]) -> Record:
            number, source_number = item
            which = int(np.searchsorted(first, source_number, side="right")) - 1
            file, at = self.files[which], source_number - int(first[which])
            begin, end = tables[which][at].tolist()
            stream = io.BytesIO(bytes(self._storage.read(file.url, begin, end)))
            data = self._next(_RecordReader(replace(file, size_bytes=end - begin), stream, self._max_ratio), skip=False)
            where = f"{file.shown_url}, record {at}"
            if isinstance(data, DataError):
                return unreadable(number, where, data, which)
            return self._record(number, data or b"", where, which)

        order = permutation(int(first[-1]), seed)[start:]
        return map_threads(read, ((start + i, int(item)) for i, item in enumerate(order)), self._num_threads)

    def _record(self, number: int, data: bytes | DataError, where: str, which: int) -> Record:
        if isinstance(data, DataError):
            return unreadable_rest(number, where, data, which, tolerant=True)
        try:
            row = self._row(data, where)
        except DataError as error:
            if self._mapper.tolerant:
                return unreadable(number, where, error, which)
            raise
        return self._mapper.record(row, number, where, origin=which)

    def _row(self, data: bytes, where: str) -> dict[str, object]:
        row: dict[str, object] = {}
        for name, steps in self._features(data, where).items():
            column = self._columns.get(name)
            if column is None and steps.kind:
                raise DataError(
                    f"{where}: feature {name!r} is not in the first {_LOOKED_AT:,} records: say what it becomes with "
                    f"--field {shell_word(name)}=EXT, or leave it out with --field {shell_word(name)}=-"
                )
            try:
                row[name] = None if column is None else column.value(steps, is_key=name == self._key_field)
            except ValueError as error:
                raise DataError(f"{where}: feature {name!r}: {str(error).replace('NAME', name)}") from error
        return row

    def _features(self, data: bytes, where: str) -> dict[str, _Feature]:
        if self._raw:
            return {RECORD: _Feature([data])}
        try:
            example = parse_example(data)
        except (ValueError, UnicodeDecodeError) as error:
            raise DataError(
                f"{where}: not a tf.train.Example ({error}); --from tfrecord-raw --field {RECORD}=EXT stores records "
                "as they are"
            ) from error
        found = {name: _Feature(values) for name, values in example.features.items()}
        for name, steps in (example.lists or {}).items():
            if name in found:
                raise DataError(f"{where}: {name!r} is a feature of the context and one of the steps; rename one")
            try:
                found[name] = _Feature.of_steps(steps)
            except ValueError as error:
                raise DataError(f"{where}: feature {name!r}: {error}") from error
        return found

    # ------------------------------------------------------------------- the field of each feature

    def _decide(self, *, tolerant: bool) -> None:
        """Decide the field of each feature, by the first records and the options."""
        seen: dict[str, _Seen] = {}
        num_bytes = 0
        with contextlib.closing(self._stored(0)) as stored:
            for _, data, where, _ in itertools.islice(stored, _LOOKED_AT):
                if isinstance(data, DataError):
                    continue
                try:
                    features = self._features(data, where)
                except DataError:
                    if not tolerant:
                        raise
                    features = {}
                for name, one in features.items():
                    seen.setdefault(name, _Seen()).add(one)
                num_bytes += len(data)
                if num_bytes > _LOOKED_AT_BYTES:
                    break
        named = dict(self._mapper.fields)
        for name in (*seen, *(name for name in named if name not in seen)):
            extension = named.get(name)
            self._columns[name] = seen.get(name, _Seen()).column(name, extension, tolerant=tolerant)
        if self._raw and not self._mapper.named_only and RECORD not in named:  # text, too, becomes a separate field
            self._columns[RECORD] = _Column(
                "file", "bytes", choose_content_type(RECORD, seen.get(RECORD, _Seen()).types)
            )
        own = {name: column for name, column in self._columns.items() if name not in named}
        files = [name for name, column in own.items() if column.kind == "file"]
        binary = {
            name: own[name].extension if len(files) == 1 else f"{safe_extension(name)}.{own[name].extension}"
            for name in files
        }
        arrays = {name: f"{safe_extension(name)}.npy" for name, column in own.items() if column.kind == "numbers"}
        lists = {
            name: named.get(name) or f"{safe_extension(name)}.{column.extension}"
            for name, column in self._columns.items()
            if column.kind == "files" and named.get(name) != DROP
        }
        if not self._mapper.named_only:
            self._mapper = replace(self._mapper, binary=binary, arrays=arrays)
        self._mapper = with_lists(self._mapper, lists, self._columns)


def _find(spec: str, storage: Storage, exclude: str | None) -> list[SourceFile]:
    """Return the files of ``spec`` with the usual names, or the files that it names itself.

    Raises:
        NotFoundError: There is none.
    """
    found = find_files(spec, storage, exclude=exclude)
    files = [file for file in found if NAMES.search(file.name.lower())]
    if not files and (spec.endswith("/") or is_folder(spec)):
        raise NotFoundError(f"{redact(spec)}: no file is called *.tfrecord or *-00000-of-00010; name them")
    return files or found


@dataclass(frozen=True, slots=True)
class _Feature:
    """The values of a feature; for a SequenceExample's list, also the number of values per step."""

    values: Values | None
    steps: tuple[int, ...] | None = None

    @classmethod
    def of_steps(cls, steps: list[Values | None]) -> _Feature:
        """Join the values of all steps."""
        lengths = tuple(0 if values is None else len(values) for values in steps)
        there = [values for values in steps if values is not None]
        if len({str(getattr(values, "dtype", "")) for values in there}) > 1:
            raise ValueError("its steps hold values of several types")
        if there and isinstance(there[0], list):
            return cls([item for values in there for item in values], lengths)
        return cls(np.concatenate(cast("list[np.ndarray]", there)) if there else None, lengths)

    def nested(self, *, flat: bool) -> object:
        """Return the values by step; with ``flat``, each step must have one value, and the list is not nested.

        Raises:
            ValueError: ``flat`` is given, and a step has more or fewer values.
        """
        if self.steps is None:
            return self.values if self.values is not None else []
        if flat:
            if set(self.steps) - {1}:
                raise ValueError("a step has not one value here, as all have in the first records; leave it out")
            return self.values if self.values is not None else []
        if isinstance(self.values, np.ndarray) and len({*self.steps}) == 1:
            return self.values.reshape(len(self.steps), -1)
        values = self.values if self.values is not None else []
        rest = iter(values if isinstance(values, list) else values.tolist())
        return [list(itertools.islice(rest, length)) for length in self.steps]

    @property
    def kind(self) -> str:
        """``bytes``, ``float32`` or ``int64``; ``""`` without values."""
        if self.values is None or not len(self.values):
            return ""
        if isinstance(self.values, list):
            return "bytes"
        return "float32" if self.values.dtype.kind == "f" else "int64"


@dataclass(slots=True)
class _Seen:
    """Statistics of a feature over the first records."""

    kinds: set[str] = field(default_factory=set)
    longest: int = 0
    in_steps: bool = False
    flat: bool = True  # steps have one value each
    types: Counter[str] = field(default_factory=Counter)

    def add(self, one: _Feature) -> None:
        """Count the values of one record."""
        if one.kind:
            self.kinds.add(one.kind)
        self.in_steps |= one.steps is not None
        self.flat &= not set(one.steps or ()) - {1}
        if one.values is not None:
            self.longest = max(self.longest, len(one.values))
            if isinstance(one.values, list):
                self.types.update(content_type(value) for value in one.values if value)

    def column(self, name: str, extension: str | None, *, tolerant: bool) -> _Column:
        """Decide the column of a feature, or use the extension that an option gives."""
        last = (extension or "").rpartition(".")[2]
        dtype = next(iter(self.kinds), "")
        several = self.longest > 1 or self.in_steps
        if len(self.kinds) > 1:
            if extension != DROP:
                raise ConfigError(
                    f"feature {name!r} holds {' and '.join(sorted(self.kinds))}; leave it out with --field "
                    f"{shell_word(name)}=-, "
                    "or convert these records apart"
                )
            return _Column("any", extension=last)
        if last == "npy" and dtype != "bytes":
            return _Column("numbers", dtype=dtype, flat=self.flat)
        if not dtype:
            return _Column("any" if extension else "none", extension=last)
        if dtype != "bytes":
            return _Column("numbers" if several else "number", dtype=dtype, flat=self.flat)
        found = last or self._type(name, tolerant=tolerant)
        if found in {"txt", "json"} and (extension is None or (last == "json" and not self.types["json"])):
            kind = "texts" if several or extension else "text"
            return _Column(kind, dtype=dtype, extension=found, flat=self.flat)
        return _Column("files" if several else "file", dtype=dtype, extension=found)

    def _type(self, name: str, *, tolerant: bool) -> str:
        try:
            return choose_content_type(name, self.types)
        except ConfigError:
            if tolerant:
                return "bin"
            raise


@dataclass(frozen=True, slots=True)
class _Column:
    """The column of a feature: ``text``, ``number`` or ``file``, or with ``s`` a list of these.

    ``none``: the first records have no value, so no record may have one; ``any``: unknown, but an option names its
    field.
    """

    kind: str
    dtype: str = ""
    extension: str = ""
    flat: bool = True

    def value(self, one: _Feature, *, is_key: bool) -> object:
        """Return the value of a row.

        Raises:
            ValueError: A record has other values than the first ones, and no option covers them.
        """
        values = one.values if one.values is not None else []
        if one.kind and self.dtype not in {"", one.kind}:
            raise ValueError(f"it holds {one.kind} here, and {self.dtype} in the first records; leave it out")
        if self.kind == "numbers":
            return one.nested(flat=self.flat) if isinstance(one.values, np.ndarray) else None
        if self.kind in {"texts", "files"}:
            nested = one.nested(flat=self.flat)
            return _texts(nested) if self.kind == "texts" else nested
        if self.kind == "none" and len(values):
            raise ValueError("the first records have no value of it; say what it becomes with --field NAME=EXT")
        if len(values) > 1:
            cure = {"number": "NAME=NAME.npy", "text": "NAME=NAME.json"}.get(self.kind, "NAME=-, which leaves it out")
            raise ValueError(f"{len(values)} values here, and at most one in the first records; see --field {cure}")
        if not len(values):
            return None
        value = values[0]
        if isinstance(value, bytes):
            return _texts(value) if self.kind == "text" or is_key else value
        return value.item()


def _texts(value: object) -> object:
    """Decode bytes within lists."""
    if isinstance(value, list):
        return [_texts(item) for item in value]
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError as error:
        raise ValueError("bytes that are no text here; --field NAME=bin stores all as they are") from error


class _RecordReader:
    """Read the records of a file in order.

    Args:
        file: The file.
        stream: Its bytes, as stored.
        max_ratio: Maximum ratio by which a compressed file may inflate.
        at: Byte at which to begin.
        number: Number of the record there.

    Raises:
        DataError: It is damaged, truncated, or not a TFRecord file.
    """

    def __init__(self, file: SourceFile, stream: BinaryIO, max_ratio: float, at: int = 0, number: int = 0) -> None:
        self._file, self._stream, self.at, self._number = file, stream, at, number
        stream.seek(at)
        head = stream.read(_HEADER.size)
        stream.seek(at)
        gzip, zlib = head[:2] == b"\x1f\x8b", len(head) > 2 and head[0] & 15 == 8 and not (head[0] << 8 | head[1]) % 31
        self.is_packed = bool(head) and not _is_header(head) and (gzip or zlib)
        if self.is_packed:
            inflated = InflatedStream(stream, file.shown_url, max_ratio, wbits=31 if gzip else 15)
            self._stream = io.BufferedReader(inflated, 1 << 20)

    def read(self, *, skip: bool = False) -> bytes | None:
        """Return the next record, ``b""`` for a skipped one, or None at the end."""
        where = f"{self._file.shown_url}, record {self._number} at byte {self.at}"
        head = self._stream.read(_HEADER.size)
        if not head:
            return None
        if not _is_header(head):
            what = "ends early" if len(head) < _HEADER.size else "has a wrong checksum of its size"
            other = "; not a TFRecord file?" if not self._number else "; fetch the file again"
            raise DataError(f"{where}: it {what}{other}")
        size, _ = _HEADER.unpack(head)
        end = self.at + _HEADER.size + size + _SUM.size
        if size > _MAX_RECORD_BYTES or (not self.is_packed and end > self._file.size_bytes):
            raise DataError(f"{where}: {size} bytes, which the file does not hold; truncated? Fetch it again")
        data = b""
        if skip and not self.is_packed:
            self._stream.seek(end)
        else:
            data = self._take(size)
            tail = self._stream.read(_SUM.size)
            if len(data) < size or len(tail) < _SUM.size:
                raise DataError(f"{where}: it ends early; fetch the file again")
            if not skip and _SUM.unpack(tail)[0] != _masked(data):
                raise DataError(f"{where}: a wrong checksum of its {size} bytes; damaged? Fetch the file again")
        self.at, self._number = end, self._number + 1
        return b"" if skip else data

    def _take(self, size: int) -> bytes:
        """Return ``size`` bytes; memory is bounded by the bytes that the file really has."""
        if not self.is_packed:
            return self._stream.read(size)
        pieces = []
        while size and (piece := self._stream.read(min(size, 16 << 20))):
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)


def _is_header(head: bytes) -> bool:
    return len(head) == _HEADER.size and _HEADER.unpack(head)[1] == _masked(head[:8])


def _masked(data: bytes) -> int:
    """Return the CRC-32C as TFRecord stores it: rotated, plus a constant."""
    crc = int(crc32c.crc32c(data))
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
