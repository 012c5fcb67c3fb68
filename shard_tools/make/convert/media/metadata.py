"""Read folders of files of one medium that a metadata file describes, as ``imagefolder`` and ``audiofolder`` do."""

from __future__ import annotations

import csv
import io
import json
import logging
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.parquet as pq

from shard_tools.make.convert.base.arrow import plain_rows
from shard_tools.make.convert.base.class_folders import ClassFolders, KeyedFile
from shard_tools.make.convert.base.files import SourceFile, is_aside
from shard_tools.make.convert.base.records import Skipped, SourceOptions
from shard_tools.make.convert.base.rows import safe_extension
from streaming.errors import ConfigError, DataError
from streaming.shards.catalog.lines import MAX_LINE_BYTES, json_line
from streaming.storage import Storage

STATS = re.compile(r"(?:.*/)?(\d+)_stats\.json")
"""What img2dataset writes beside each of its shards or folders."""
NAMES = frozenset({"metadata.jsonl", "metadata.csv", "metadata.parquet"})
_ONE, _SEVERAL = "file_name", "file_names"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A row of a metadata file: its place, the folder that names are relative to, and its values."""

    where: str
    folder: str
    values: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Link:
    """A column of names: what its files are called in a sample, and whether a row has several of them."""

    column: str
    stem: str
    is_list: bool

    @classmethod
    def of(cls, column: str) -> _Link | None:
        """Return what a column links to; None: it is no column of names."""
        for last, is_list in ((_ONE, False), (_SEVERAL, True)):
            if column == last or column.endswith(f"_{last}"):
                stem = column.removesuffix(last).removesuffix("_")
                return cls(column=column, stem=safe_extension(stem) if stem else "", is_list=is_list)
        return None

    def names(self, value: object, where: str) -> Iterator[tuple[str, str]]:
        """Yield (what comes before the extension in the name of the field, name of the file).

        Raises:
            DataError: The value holds anything but names.
        """
        items = value if self.is_list and isinstance(value, list) else [value]
        for number, name in enumerate(items if value is not None else ()):
            if not isinstance(name, str) or (self.is_list and not isinstance(value, list)):
                expected = "a list of names" if self.is_list else "a name"
                raise DataError(f"{where}: {self.column} is {json.dumps(value, default=str)}, expected {expected}")
            parts = [self.stem] if self.stem else []
            yield ".".join([*parts, *([str(number)] if self.is_list else [])]), name


class MediaFolder(ClassFolders):
    """Files under folders of classes; or, where there is a metadata file, what its rows name.

    ``metadata.jsonl``, ``.csv`` or ``.parquet`` names files relative to its own folder. A row is a sample: its
    ``file_name`` becomes the field of the medium, ``X_file_name`` the field ``x.EXT``, items of lists of names
    ``0.EXT``, …; all else joins ``json``. As in ``datasets``, folders are then no classes.

    Raises:
        DataError: A metadata file is damaged.
    """

    def __init__(self, spec: str, storage: Storage, options: SourceOptions) -> None:
        self._classes_given = options.classes
        self._stem = ""
        super().__init__(spec, storage, options)
        if self._stem:
            self._field = f"{self._stem}.{self._field}"

    def _sorted_out(self, found: Sequence[SourceFile]) -> tuple[list[KeyedFile], list[Skipped]]:
        noted = [file for file in found if is_metadata(file.name)]
        parts = {match[1] for file in found if (match := STATS.fullmatch(file.name)) is not None}
        files, skipped = super()._sorted_out([file for file in found if file not in noted] if noted else found)
        if parts:  # folders of img2dataset, which are no classes; their tables list what could not be fetched, too
            files = [replace(one, class_name=None) if one.class_name in parts else one for one in files]
            tables = {f"{part}.parquet" for part in parts}
            skipped = [replace(one, is_lost=False) if one.path in tables else one for one in skipped]
        if not noted:
            return files, skipped
        if self._classes_given is not None:
            raise ConfigError(
                f"--classes numbers folders of classes; here {noted[0].name} says what each file is. Leave --classes "
                f"out, or move {noted[0].name} elsewhere"
            )
        self.common = noted
        rows = list[_Row]()
        for file in noted:
            rows += self._rows(file, skipped)
        return self._named(rows, files, skipped)

    def _rows(self, file: SourceFile, skipped: list[Skipped]) -> Iterator[_Row]:
        """Yield the rows of a metadata file; lines that are no rows are left out, if that is allowed."""
        read = {".jsonl": _jsonl_rows, ".csv": _csv_rows, ".parquet": _parquet_rows}[posixpath.splitext(file.name)[1]]
        folder = file.name.rpartition("/")[0]
        for where, values in read(bytes(self._storage.read(file.url)), file):
            if not isinstance(values, DataError):
                yield _Row(where=where, folder=folder, values=values)
                continue
            if not self._tolerant:
                raise values
            skipped.append(_lost(where, values))

    def _named(
        self, rows: Sequence[_Row], files: Sequence[KeyedFile], skipped: list[Skipped]
    ) -> tuple[list[KeyedFile], list[Skipped]]:
        """Return a file for each row, which has those of its other names beside it."""
        links = {name: link for row in rows for name in row.values if (link := _Link.of(name)) is not None}
        if not links:
            raise DataError(
                f"{self.common[0].shown_url}: no column {_ONE}, X_{_ONE} or {_SEVERAL}, which would name the "
                f"{self.kind}; its columns: {', '.join(rows[0].values) if rows else 'none'}"
            )
        order = sorted(links.values(), key=lambda link: link.column != _ONE)
        by_name = {one.file.name: one for one in files}
        chosen, used = list[KeyedFile](), set[str]()
        for row in rows:
            try:
                there, missing = self._files_of(row, order, by_name)
            except DataError as error:
                if not self._tolerant:
                    raise
                skipped.append(_lost(row.where, error))
                continue
            if missing or not there:
                reason = f"no such file: {', '.join(missing)}" if missing else f"a row without {order[0].column}"
                skipped.append(Skipped(path=row.where, reason=reason, is_lost=True))
                continue
            used.update(one.file.name for one in there.values())
            (stem, first), *others = there.items()
            self._stem = stem if not chosen else self._stem
            beside = {f"{name}.{one.extension}": one.file for name, one in others}
            note = {name: value for name, value in row.values.items() if name not in links}
            chosen.append(replace(first, class_name=None, beside={**first.beside, **beside}, note=note))
        skipped += [
            Skipped(path=name, reason="named by no row of the metadata", is_lost=not is_aside(name))
            for name in sorted(by_name.keys() - used)
        ]
        return chosen, skipped

    def _files_of(
        self, row: _Row, links: Sequence[_Link], by_name: Mapping[str, KeyedFile]
    ) -> tuple[dict[str, KeyedFile], list[str]]:
        """Return the files of a row by what begins the names of their fields, and names of files that are not there."""
        there, missing = dict[str, KeyedFile](), list[str]()
        for link in links:
            for stem, name in link.names(row.values.get(link.column), row.where):
                # Only what lies in the folder is looked up, so no name leads out of it.
                place = posixpath.normpath(posixpath.join(row.folder, name.replace("\\", "/")))
                if place in by_name:
                    there[stem] = by_name[place]
                else:
                    missing.append(name)
        return there, missing


def _lost(where: str, error: DataError) -> Skipped:
    return Skipped(path=where, reason=str(error).removeprefix(f"{where}: "), is_lost=True)


def is_metadata(name: str) -> bool:
    """Tell whether a file of this name describes the files beside it."""
    return name.rpartition("/")[2] in NAMES and not is_aside(name)


_Rows = Iterator[tuple[str, Mapping[str, object] | DataError]]
"""Place and values of each row, or why there are none."""


def _jsonl_rows(data: bytes, file: SourceFile) -> _Rows:
    for number, line in enumerate(io.BytesIO(data), 1):
        where = f"{file.shown_url}:{number}"
        if line.strip():
            try:
                yield where, json_line(line, where)[0]
            except DataError as error:
                yield where, error


def _csv_rows(data: bytes, file: SourceFile) -> _Rows:
    csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE_BYTES))
    reader = csv.reader(io.TextIOWrapper(io.BytesIO(data), "utf-8-sig", newline=""), strict=True)
    try:
        header = next(reader, [])
        for values in filter(None, reader):
            where = f"{file.shown_url}:{reader.line_num}"
            if len(values) == len(header):
                yield where, dict(zip(header, values, strict=True))
            else:
                yield where, DataError(f"{where}: expected {len(header)} values, got {len(values)}; correct this row")
    except (csv.Error, UnicodeDecodeError) as error:
        where = f"{file.shown_url}:{reader.line_num}"
        yield where, DataError(f"{where}: not readable as CSV in UTF-8: {error}; correct it there")


def _parquet_rows(data: bytes, file: SourceFile) -> _Rows:
    try:
        number = 0
        for batch in pq.ParquetFile(io.BytesIO(data)).iter_batches():
            for row in plain_rows(batch, file.shown_url):
                yield f"{file.shown_url}, row {number}", row
                number += 1
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file.shown_url}: not a Parquet file, or a damaged one: {error}; fetch it again") from error
