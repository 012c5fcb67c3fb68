"""Read sets of binary sample files that an ``index.json`` lists: the shared part of MDS and LitData.

Every file begins with the number of its samples and the positions where they begin and end (uint32). A
``SampleFormat`` parses the bytes between two positions. All numbers are checked against the sizes of the files before
they are used.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import struct
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, Protocol

import numpy as np

from shard_tools.make.convert.base.files import FileSource, SourceFile, find_files, is_local, once, open_stored
from shard_tools.make.convert.base.records import Record, SourceOptions, permutation
from shard_tools.make.convert.base.rows import (
    DROP,
    RowMapper,
    choose_type,
    safe_extension,
    unreadable,
    unreadable_rest,
    with_lists,
)
from shard_tools.make.convert.base.unpack import IN_MEMORY, open_unpacked, refuse_bomb
from shard_tools.make.write.filetypes import is_alike
from streaming.common.arguments import checked_ratio
from streaming.common.threads import map_threads
from streaming.errors import ConfigError, DataError, NotFoundError, shell_word
from streaming.storage import Storage, redact
from streaming.types import Int64Array

INDEX = "index.json"
_MAX_INDEX_BYTES = 1 << 30
_MAX_FILE_BYTES = 2**32  # positions are uint32
_LOOKED_AT, _LOOKED_AT_BYTES = 10_000, 64 << 20  # samples read to decide the types of bytes
_AHEAD_BYTES = 256 << 20  # limit for unpacked files that are read ahead
# Number, number of its file, file, number within it, its bytes or row.
_Sample = tuple[int, int, "BinaryFile", int, "bytes | dict[str, object]"]
_WRONG_VALUE = (ValueError, ArithmeticError, LookupError, RecursionError, struct.error)  # DataError is a ValueError


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleColumn:
    """One value of each sample: its kind, and the conversion from bytes to a value of a row.

    Attributes:
        name: Its name, for ``--field``.
        decode: Converts bytes to the value; may raise ``ValueError`` and the like.
        kind: ``"value"`` (for JSON), ``"array"``, ``"file"`` (content of a file), or ``"files"`` (a list of these).
        type_of: Returns the type of a file from its bytes, if ``extension`` is unknown.
        extension: Extension of its files, if all have the same.
        dtype: NumPy's name of the type of an array's items, if all have the same.
        refused: The reason why it cannot be read; the user must leave it out.
        nullable: Whether a value may be None.
        slow: Whether decoding takes much longer than reading.
    """

    name: str
    decode: Callable[[bytes], object]
    kind: str = "value"
    type_of: Callable[[bytes], str] | None = None
    extension: str = ""
    dtype: str = ""
    refused: str = ""
    nullable: bool = False
    slow: bool = False


class SampleFormat(Protocol):
    """A parser for the bytes of a sample; immutable, and sent to other processes."""

    @property
    def columns(self) -> tuple[SampleColumn, ...]:
        """The columns of each sample."""

    def open(self, stream: BinaryIO, part: BinaryFile) -> Callable[[int], bytes | dict[str, object]]:
        """Return a function of a sample's number that returns its bytes or its whole row; raises ``DataError``."""

    def split(self, data: bytes) -> list[bytes]:
        """Return the bytes of each column; raise ``ValueError`` and the like if ``data`` is too short."""

    def row(self, values: Mapping[str, object]) -> dict[str, object]:
        """Return the row of the values by column, without refused columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BinaryFile:
    """A file of samples, as described by its index.

    Attributes:
        file: The file.
        codec: Its compression; ``""``: none.
        num_bytes: Its decompressed size.
        num_samples: Number of its samples.
        samples: Parser of the samples.
        packed_bytes: Size of the compressed file, if the index has it.
        packed_sums: Checksums of the file, by algorithm.
        sums: Checksums of the decompressed content, by algorithm.
    """

    file: SourceFile
    codec: str
    num_bytes: int
    num_samples: int
    samples: SampleFormat
    packed_bytes: int | None = None
    packed_sums: Mapping[str, str] = field(default_factory=dict)
    sums: Mapping[str, str] = field(default_factory=dict)

    def checked(self, max_ratio: float) -> BinaryFile:
        """Return this file after checking that its numbers are possible.

        Raises:
            DataError: They are impossible.
        """
        where, size_bytes = self.file.shown_url, self.file.size_bytes
        if self.num_bytes > _MAX_FILE_BYTES or 4 * (self.num_samples + 2) > self.num_bytes:
            raise DataError(
                f"{where}: {INDEX} says {self.num_samples} samples in {self.num_bytes} bytes, which no such file holds"
            )
        expected = self.packed_bytes if self.codec else self.num_bytes
        if expected not in {None, size_bytes}:
            raise DataError(f"{where}: it has {size_bytes} bytes, and {expected} by {INDEX}; truncated? Fetch it again")
        refuse_bomb(self.num_bytes, size_bytes, max_ratio, where)
        return self


class Folder:
    """The files below a folder with an index.

    Args:
        index: The index.
        files: Files of the source by URL.
    """

    def __init__(self, index: SourceFile, files: Mapping[str, SourceFile]) -> None:
        self.index, self._files = index, files
        self._root = _root_of(index)

    def find(self, name: object) -> SourceFile | None:
        """Return the file that an index calls ``name``, or None.

        Raises:
            DataError: The name leads out of the folder.
        """
        parts = name.split("/") if isinstance(name, str) else [""]
        if not isinstance(name, str) or {"", ".", ".."} & {*parts} or "\\" in name or "\0" in name:
            raise DataError(f"{self.index.shown_url}: it names a file {name!r}, which is no name within its folder")
        return self._files.get(self._root + name)

    def get(self, *names: object) -> SourceFile:
        """Return the first of these files that exists.

        Raises:
            NotFoundError: None does.
            DataError: A name leads out of the folder.
        """
        found = [file for name in names if (file := self.find(name)) is not None]
        if not found:
            raise NotFoundError(
                f"{self.index.shown_url} lists {' or '.join(map(str, names))}, which is not there; fetch it, or "
                "make the set again"
            )
        return found[0]


def read_index(index: SourceFile, storage: Storage) -> dict[str, Any]:
    """Return the content of an index.

    Raises:
        DataError: It is not a JSON object.
    """
    if index.size_bytes > _MAX_INDEX_BYTES:
        raise DataError(f"{index.shown_url}: {index.size_bytes} bytes are too many for an index")
    try:
        content = json.loads(bytes(storage.read(index.url)))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{index.shown_url}: not JSON: {error}; damaged? Fetch it again") from error
    if not isinstance(content, dict):
        raise DataError(f"{index.shown_url}: expected a JSON object, got a {type(content).__name__}")
    return content


def kind_of_index(content: Mapping[str, Any]) -> str | None:
    """Return the format of an index, or None."""
    if isinstance(content.get("chunks"), list):
        return "litdata"
    return "mds" if isinstance(content.get("shards"), list) else None


def _find_folders(spec: str, storage: Storage, exclude: str | None) -> list[Folder]:
    """Return the folders with an index, except those below another: an index of parts lists their files itself.

    Raises:
        NotFoundError: There is none.
    """
    found = find_files(spec, storage, exclude=exclude)
    indexes = [file for file in found if file.url.rpartition("/")[2] == INDEX]
    if not indexes:
        raise NotFoundError(f"{redact(spec)}: no {INDEX} there, nor in a folder below; name the folder that holds it")
    roots = {_root_of(file) for file in indexes}
    top = [file for file in indexes if roots.isdisjoint(_folders_above(file))]
    if len(indexes) == len(found):  # the indexes are named, not their folders
        found = [file for index in top for file in find_files(_root_of(index), storage)]
    return [Folder(index, {file.url: file for file in found}) for index in top]


def _root_of(index: SourceFile) -> str:
    return index.url[: -len(INDEX)] or "./"


def _folders_above(index: SourceFile) -> list[str]:
    parts = _root_of(index).split("/")[:-1]
    return ["/".join(parts[:count]) + "/" for count in range(1, len(parts))]


class IndexedFiles(FileSource):
    """Samples of all files that the indexes list, in their order; several indexes in the order of their folders' names.

    Files that are compressed or have checksums are read whole, several ahead on threads. With ``shuffle_seed`` files
    are permuted, and samples within each file.

    Args:
        kind: Value of ``--from``.
        spec: A folder with an index, or with subfolders that have one; or the indexes themselves.
        storage: The store.
        options: Options for reading.
        list_files: Returns the files of an index; raises ``LookupError``, ``TypeError`` or ``ValueError`` if the index
        has another form than expected.

    Raises:
        DataError: An index is damaged, or its numbers do not match the files.
        ConfigError: An index is of another format, or a column needs an option.
        NotFoundError: There is no index, or a file that one lists is missing.
    """

    def __init__(
        self,
        kind: str,
        spec: str,
        storage: Storage,
        options: SourceOptions,
        list_files: Callable[[dict[str, Any], Folder], Iterator[BinaryFile]],
    ) -> None:
        self._seed, self._num_threads = options.shuffle_seed, options.num_threads
        max_ratio = checked_ratio("max_gzip_ratio", options.max_gzip_ratio)
        parts: list[BinaryFile] = []
        indexes: list[SourceFile] = []
        specs = (spec, *options.more)
        for folder in itertools.chain.from_iterable(_find_folders(one, storage, options.exclude) for one in specs):
            indexes.append(folder.index)
            content, where = read_index(folder.index, storage), folder.index.shown_url
            other = kind_of_index(content)
            if other not in {None, kind}:
                raise ConfigError(f"{where}: an index of {other}, not of {kind}; use --from {other}")
            try:
                parts += [part.checked(max_ratio) for part in list_files(content, folder)]
            except (ConfigError, DataError):
                raise
            except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
                told = f"{type(error).__name__}: {error}"
                raise DataError(f"{where}: not an index of {kind} that can be read here ({told}); damaged?") from error
        super().__init__(kind, once([part.file for part in parts]), storage)
        self.common, self.in_order = indexes, self._seed is None
        if self._seed is not None:
            parts = [parts[i] for i in permutation(len(parts), self._seed)]
        self._parts = parts
        columns = self._join_columns(options)
        self.item_types = {name: column.dtype for name, column in columns.items() if column.dtype}
        self._mapper = RowMapper.of(options)
        if not options.named_only:
            self._mapper = self._fit(self._mapper, columns)
        self._columns = columns

    @property
    def num_records(self) -> int:
        """Number of samples of all files."""
        return sum(part.num_samples for part in self._parts)

    @property
    def fields(self) -> Mapping[str, bool] | None:
        """The fields of the columns; None if a list of images becomes one field per image."""
        if self._mapper.lists:
            return None
        formats = {id(part.samples): part.samples for part in self._parts}.values()
        read = [{one.name: one for one in samples.columns if not one.refused} for samples in formats]
        everywhere = set[str]().union(*read).intersection(*read)
        return self._mapper.fields_of(everywhere, {name for name in everywhere if not self._columns[name].nullable})

    def identity(self) -> dict[str, object]:
        """Return the names of the files, and the field of each column."""
        return {**super().identity(), **self._mapper.identity()}

    def records(self, start: int) -> Generator[Record, None, None]:
        """Yield the samples from number ``start`` on; files before it are not read."""
        slow = any(column.slow for column in self._columns.values())
        threads = self._num_threads if slow and not self._mapper.tolerant else 1  # so that all before a damage come
        ends = list(itertools.accumulate(part.num_samples for part in self._parts))
        while start < ends[-1]:
            try:
                with contextlib.closing(self._samples(start)) as samples:
                    for record in map_threads(self._record, samples, threads):
                        yield record
                        start += 1
            except DataError as error:
                which = bisect.bisect_right(ends, start)
                place = self._parts[which].file.shown_url
                for number in range(start, ends[which]):
                    where = f"{place}, sample {number - ends[which] + self._parts[which].num_samples}"
                    yield unreadable_rest(number, where, error, which, tolerant=self._mapper.tolerant)
                start = ends[which]

    def _record(self, sample: _Sample) -> Record:
        number, which, part, at, data = sample
        where = f"{part.file.shown_url}, sample {at}"
        try:
            row = self._row(part.samples, data, where) if isinstance(data, bytes) else data
        except DataError as error:
            if self._mapper.tolerant:
                return unreadable(number, where, error, which)
            raise
        return self._mapper.record(row, number, where, origin=which)

    def _row(self, samples: SampleFormat, data: bytes, where: str) -> dict[str, object]:
        name = ""
        try:
            values: dict[str, object] = {}
            for column, raw in zip(samples.columns, samples.split(data), strict=True):
                name = column.name
                if not column.refused:
                    values[name] = column.decode(raw)
            row = samples.row(values)
        except _WRONG_VALUE as error:
            raise DataError(f"{where}{f', column {name!r}' if name else ''}: {error}; damaged?") from error
        row |= {column.name: None for column in samples.columns if column.refused}  # the user left these out
        return row

    def _samples(self, start: int) -> Generator[_Sample, None, None]:
        """Yield (number, number of its file, file, number within it, bytes) of each sample."""
        ends = list(itertools.accumulate(part.num_samples for part in self._parts))
        first = bisect.bisect_right(ends, start)
        with contextlib.closing(self._opened(first)) as opened:
            for which, stream in zip(range(first, len(self._parts)), opened, strict=True):
                part = self._parts[which]
                begin = ends[which] - part.num_samples
                read = part.samples.open(stream, part)
                order: Sequence[int] = range(part.num_samples)
                if self._seed is not None:
                    order = permutation(part.num_samples, self._seed * 1_000_003 + which + 1).tolist()
                for number in range(max(0, start - begin), part.num_samples):
                    yield begin + number, which, part, order[number], read(order[number])

    def _opened(self, first: int) -> Generator[BinaryIO, None, None]:
        """Yield the files from number ``first`` on, each open until the next one is requested."""
        held: dict[int, BinaryIO] = {}

        def opened(which: int) -> int:
            held[which] = self._open(self._parts[which])
            return which

        largest = max((part.num_bytes for part in self._parts[first:]), default=0)
        ahead = min(self._num_threads, _AHEAD_BYTES // max(1, 2 * largest))  # each thread reads two ahead
        try:
            with contextlib.closing(map_threads(opened, range(first, len(self._parts)), ahead)) as numbers:
                for which in numbers:
                    with held.pop(which) as stream:
                        yield stream
        finally:
            for stream in held.values():
                stream.close()

    def _open(self, part: BinaryFile) -> BinaryIO:
        small = part.num_bytes <= IN_MEMORY and not is_local(part.file.url)  # one request for the whole file
        if not (part.codec or part.sums or part.packed_sums or small) and self._seed is None:
            return open_stored(part.file, self._storage, unzip=False)
        return open_unpacked(
            part.file, self._storage, codec=part.codec, num_bytes=part.num_bytes, packed_sums=part.packed_sums,
            sums=part.sums,
        )  # fmt: skip

    # -------------------------------------------------------------------- the field of each column

    def _join_columns(self, options: SourceOptions) -> dict[str, SampleColumn]:
        """Return the columns of all files by name; each must be the same in all files.

        Raises:
            ConfigError: A column differs, or cannot be read and is not left out.
        """
        named = dict(options.fields)
        columns: dict[str, SampleColumn] = {}
        seen: set[int] = set()
        for part in self._parts:
            if id(part.samples) in seen:
                continue
            seen.add(id(part.samples))
            for column in part.samples.columns:
                if column.refused and named.get(column.name) != DROP and not options.named_only:
                    raise ConfigError(
                        f"{part.file.shown_url}: column {column.name!r} {column.refused}; leave it out with --field "
                        f"{shell_word(column.name)}=-, or write it again in another form with the library that wrote it"
                    )
                there = columns.setdefault(column.name, column)
                if not _is_same(there, column) and column.name not in named:
                    raise ConfigError(
                        f"{part.file.shown_url}: column {column.name!r} is of another type than in "
                        f"{self._parts[0].file.shown_url} or after it; a column becomes one field: say which with "
                        f"--field {shell_word(column.name)}=EXT, leave it out with --field "
                        f"{shell_word(column.name)}=-, or convert these apart"
                    )
        return columns

    def _fit(self, mapper: RowMapper, columns: Mapping[str, SampleColumn]) -> RowMapper:
        """Decide the field of each column once, for all samples of all files."""
        named = dict(mapper.fields)
        own = {name: column for name, column in columns.items() if name not in named and not column.refused}
        files = [name for name, column in own.items() if column.kind == "file"]
        types = self._types([own[name] for name in files if not own[name].extension])
        kinds = {name: own[name].extension or choose_type(name, types[name]) for name in files}
        binary: Mapping[str, str] = {
            name: kind if len(files) == 1 else f"{safe_extension(name)}.{kind}" for name, kind in kinds.items()
        }
        lists = {
            name: named.get(name) or f"{safe_extension(name)}.{column.extension}"
            for name, column in columns.items()
            if column.kind == "files" and named.get(name) != DROP and not column.refused
        }
        arrays = {name: f"{safe_extension(name)}.npy" for name, column in own.items() if column.kind == "array"}
        return with_lists(replace(mapper, binary=binary, arrays=arrays, items=self.item_types), lists, columns)

    def _types(self, columns: Sequence[SampleColumn]) -> dict[str, Counter[str]]:
        """Count the types of the first values of columns of bytes."""
        found = {column.name: Counter[str]() for column in columns}
        if not columns:
            return found
        num_bytes = 0
        with contextlib.closing(self._samples(0)) as samples:
            for _, _, part, at, data in itertools.islice(samples, _LOOKED_AT):
                try:
                    raws = _raw_values(part.samples, data)
                    for column in columns:
                        if (raw := raws.get(column.name)) and column.type_of is not None:
                            found[column.name][column.type_of(raw)] += 1
                except _WRONG_VALUE as error:
                    raise DataError(f"{part.file.shown_url}, sample {at}: {error}; damaged?") from error
                num_bytes += sum(map(len, raws.values()))
                if num_bytes > _LOOKED_AT_BYTES:
                    break
        return found


def _is_same(one: SampleColumn, other: SampleColumn) -> bool:
    """Return whether columns of two files become the same field."""
    alike = one.extension == other.extension or is_alike(one.extension, other.extension)
    return one.kind == other.kind and alike and one.dtype == other.dtype


def _raw_values(samples: SampleFormat, data: bytes | dict[str, object]) -> dict[str, bytes]:
    if isinstance(data, dict):
        return {name: value for name, value in data.items() if isinstance(value, bytes)}
    return dict(zip((column.name for column in samples.columns), samples.split(data), strict=True))


class PlacedSamples:
    """Return the bytes of samples of a file that begins with the table of their positions.

    Raises:
        DataError: The positions are not those of consecutive samples that fill the file.
    """

    def __init__(self, stream: BinaryIO, part: BinaryFile) -> None:
        self._stream, self._part = stream, part
        self._places = self._read_places()

    def __call__(self, number: int) -> bytes:
        """Return a sample."""
        begin, end = self._places[number : number + 2].tolist()
        self._stream.seek(begin)
        data = self._stream.read(end - begin)
        if len(data) != end - begin:
            raise DataError(f"{self._part.file.shown_url}, sample {number}: the file ends early; fetch it again")
        return data

    def _read_places(self) -> Int64Array:
        """Return the starts of samples and the end of the last one: int64 ``[n + 1]``."""
        where, num_samples, num_bytes = self._part.file.shown_url, self._part.num_samples, self._part.num_bytes
        self._stream.seek(0)
        said = int.from_bytes(self._stream.read(4), "little")
        if said != num_samples:
            raise DataError(f"{where}: it says that it holds {said} samples, and {INDEX} says {num_samples}; damaged?")
        table = self._stream.read(4 * (num_samples + 1))
        if len(table) != 4 * (num_samples + 1):
            raise DataError(f"{where}: the table of its samples ends early; fetch it again")
        places = np.frombuffer(table, "<u4").astype(np.int64)
        check_places(places, where)
        if places[0] < 4 + len(table) or places[-1] != num_bytes:
            raise DataError(
                f"{where}: its samples begin at byte {places[0]} and end at {places[-1]}; expected {4 + len(table)} or "
                f"later, and {num_bytes}; damaged? Fetch it again"
            )
        return places


def check_places(places: Int64Array, where: str) -> None:
    """Refuse positions that do not ascend.

    Raises:
        DataError: They do not ascend.
    """
    wrong = np.flatnonzero(np.diff(places) < 0)
    if wrong.size:
        raise DataError(f"{where}: sample {int(wrong[0])} ends before it begins; damaged? Fetch it again")
