"""Read Hugging Face sets: folders of ``save_to_disk``, and builders of ``datasets``, which only this module imports.

Folders are read directly, as Arrow files. The only builders that are run are the library's own for tables, texts,
images and sounds: no scripts of data sets, and none that unpickle.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from shard_tools.make.convert.base.annotated import choose_part
from shard_tools.make.convert.base.arrow import ArrowColumns, count_types, plain_rows
from shard_tools.make.convert.base.files import SourceFile, find_files, identity_of, is_folder, is_local, open_stored
from shard_tools.make.convert.base.identity import EVERYWHERE, Origins, origins_of
from shard_tools.make.convert.base.records import Record, Skipped, SourceOptions, permutation
from shard_tools.make.convert.base.rows import DROP, RowMapper
from shard_tools.running.engine import ordered
from streaming.common.arrays import sums
from streaming.errors import ConfigError, DataError, NotFoundError, StorageError
from streaming.shards.schema.value import WITHIN, Schema, class_schema
from streaming.storage import Storage, join_url, local_path, redact, scheme_of

_DICT, _STATE = "dataset_dict.json", "state.json"
_END = b"\xff\xff\xff\xff\0\0\0\0"  # end mark of an Arrow stream: without it the file is truncated
_BATCH_BYTES, _BATCH_ROWS = 32 << 20, 100
_BUILDERS = ("arrow", "audiofolder", "csv", "imagefolder", "json", "parquet", "text")
_ARRAYS = frozenset({"Array2D", "Array3D", "Array4D", "Array5D"})
_log = logging.getLogger(__name__)


class _Table(Protocol):
    """Rows in batches, in one order."""

    @property
    def schema(self) -> pa.Schema:
        """The columns."""

    @property
    def where(self) -> str:
        """The table, for messages."""

    @property
    def num_rows(self) -> int | None:
        """Number of rows, if it is known."""

    @property
    def num_bytes(self) -> int:
        """Bytes, for progress."""

    def identity(self) -> dict[str, object]:
        """Return what identifies the table."""

    def file_of(self, row: int) -> int:
        """Return the number of the file that holds a row, in the table's order."""

    def full(self) -> set[str]:
        """Return the columns that are known to have a value in every row."""

    def counted(self, executor: Executor) -> _Table:
        """Return the table with its number of rows known, for reading in several processes."""

    def batches(self, start: int, seed: int | None) -> Generator[tuple[int, pa.RecordBatch], None, None]:
        """Yield batches from row ``start`` on, each with the number of its first row."""


class HfDataset:
    """Rows of a Hugging Face set, in order; columns become fields in the same way as for Parquet.

    The source is a folder of ``save_to_disk``, or an argument of ``datasets.load_dataset``: a local folder, or a name.
    The names of a ``ClassLabel`` become the classes of the set, its numbers a column of the sample table.

    Raises:
        ConfigError: There are several splits, and none is selected; or the extra ``hf`` is missing.
        DataError: A file is damaged or truncated, or refers to others in an unsupported way.
    """

    kind = "hf"

    def __init__(self, spec: str, storage: Storage, options: SourceOptions) -> None:
        self._table = table = _open(spec, storage, options)
        self._seed = options.shuffle_seed
        self._in_order = self._seed is None and table.num_rows is not None
        if self._seed is not None and table.num_rows is None:
            raise ConfigError(
                f"--shuffle: {redact(spec)} can only be read front to back; leave --shuffle out, or copy the set to "
                "this machine"
            )
        features = _features(table.schema)
        columns = ArrowColumns([column for column, _ in options.fields])
        columns.add(
            table.schema,
            table.where,
            arrays={name for name, one in features.items() if one.get("_type") in _ARRAYS},
        )
        self._mapper = RowMapper.of(options)
        self.item_types = columns.item_types
        if not options.named_only:
            self._mapper = columns.fit(self._mapper, [partial(_look, table)])
        self._fields = self._mapper.fields_of({*table.schema.names}, table.full())
        labels = _labels(features)
        self.columns = tuple(labels)[:1]
        self.class_names: Sequence[str] = next(iter(labels.values()), ())
        self.classes = {name: number for number, name in enumerate(self.class_names)}
        self.classes_from = f"the column {self.columns[0]!r}" if self.columns else ""
        if len(labels) > 1:
            _log.warning("%s: several columns of classes; %r becomes a column", table.where, self.columns[0])
        self.meaning = _meaning(labels, dict(options.fields))

    @property
    def fields(self) -> Mapping[str, bool] | None:
        """The fields of the columns; None if a list of files becomes one field per file."""
        return None if self._mapper.lists else self._fields

    @property
    def num_records(self) -> int | None:
        """Number of rows, if the files are local or counted."""
        return self._table.num_rows

    @property
    def num_bytes(self) -> int:
        """Bytes of the files."""
        return self._table.num_bytes

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Nothing is left out."""
        return ()

    def count(self, executor: Executor) -> None:
        """Count the rows of the files' batches.

        Raises:
            ConfigError: A set made by a builder is not stored in files.
        """
        self._table = self._table.counted(executor)

    def identity(self) -> dict[str, object]:
        """Return the identity of the table, and the field of each column."""
        return {**self._table.identity(), **self._mapper.identity()}

    def origins(self) -> Origins:
        """Return the table's files; none for a set made by a builder, whose fingerprint identifies its content."""
        if not isinstance(self._table, _Saved):
            return Origins()
        number = None if self._in_order else EVERYWHERE
        inputs = origins_of(self._table.files, self._table.storage, number=number)
        return Origins(inputs=inputs, store=self._table.storage)

    def records(self, start: int) -> Generator[Record, None, None]:
        """Yield the rows from number ``start`` on."""
        with contextlib.closing(self._table.batches(start, self._seed)) as batches:
            for first, batch in batches:
                where = f"{self._table.where}, rows {first} to {first + batch.num_rows - 1}"
                origin = self._table.file_of(first) if self._in_order else 0
                for number, row in enumerate(plain_rows(batch, where), first):
                    yield self._mapper.record(row, number, f"{self._table.where}, row {number}", origin=origin)


def _open(spec: str, storage: Storage, options: SourceOptions) -> _Table:
    if not (is_local(spec) and not is_folder(spec)):
        base = spec.rstrip("/")
        if (content := _document(base, _DICT, storage)) is not None:
            splits = content.get("splits")
            if not isinstance(splits, list) or not all(isinstance(one, str) and "/" not in one for one in splits):
                raise DataError(f"{redact(base)}/{_DICT}: expected a list of splits; save the set again")
            base = join_url(base, choose_part("hf", options.part, splits, redact(spec)))
        if (content := _document(base, _STATE, storage)) is not None:
            if options.config is not None:
                raise ConfigError(f"--source-config: {redact(spec)} is a saved set, which has none")
            if base == spec.rstrip("/") and options.part not in {None, content.get("_split")}:
                raise ConfigError(f"--source-split {options.part}: {redact(spec)} is one split, saved by itself")
            return _Saved.of(base, content, storage)
        if not is_local(spec):
            raise NotFoundError(f"{redact(spec)}: no {_STATE} or {_DICT} there, which save_to_disk writes")
    return _Built.of(spec, options)


def _document(base: str, name: str, storage: Storage) -> dict[str, Any] | None:
    url = join_url(base, name)
    if not storage.exists(url):
        return None
    try:
        content = json.loads(bytes(storage.read(url)))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{redact(url)}: not JSON ({error}); save the set again") from error
    if not isinstance(content, dict):
        raise DataError(f"{redact(url)}: expected a JSON object; save the set again")
    return content


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    """The Arrow files of a folder of ``save_to_disk``; ``counts``: the number of rows per batch, for local files."""

    where: str
    files: tuple[SourceFile, ...]
    storage: Storage
    schema: pa.Schema
    counts: tuple[tuple[int, ...], ...] | None
    full_columns: frozenset[str]

    @classmethod
    def of(cls, base: str, state: Mapping[str, Any], storage: Storage) -> _Saved:
        """Open the files that ``state.json`` names.

        Raises:
            DataError: It names no files, files of other folders, or an order of rows; or a file is damaged.
        """
        where = f"{redact(base)}/{_STATE}"
        if state.get("_indices_data_files") or state.get("_indices_files"):
            raise DataError(
                f"{where}: the rows are in an order of their own; save the set again after flatten_indices()"
            )
        entries = state.get("_data_files")
        names = [one.get("filename") if isinstance(one, dict) else None for one in entries or ()]
        if not names or not all(isinstance(one, str) and one and "/" not in one and one != ".." for one in names):
            raise DataError(f"{where}: expected files in this folder, got {names}; save the set again")
        files = []
        for name in names:
            found = find_files(join_url(base, str(name)), storage)
            files.append(found[0])
            if bytes(storage.read(found[0].url, max(0, found[0].size_bytes - 8), found[0].size_bytes)) != _END:
                raise DataError(f"{found[0].shown_url}: no Arrow stream, or one that ends early; fetch it again")
        schemas = []
        for file in files:
            with _stream(file, storage) as reader:
                schemas.append(reader.schema)
                if not reader.schema.equals(schemas[0]):
                    raise DataError(f"{file.shown_url}: other columns than {files[0].shown_url}; save the set again")
        counts, full = None, frozenset[str]()
        if all(is_local(file.url) for file in files):
            looked = [_looked_through(file, storage) for file in files]
            counts = tuple(tuple(rows) for rows, _ in looked)
            full = frozenset[str].intersection(*(full for _, full in looked))
        return cls(
            where=redact(base), files=tuple(files), storage=storage, schema=schemas[0], counts=counts, full_columns=full
        )

    @property
    def num_rows(self) -> int | None:
        """Number of rows of all files."""
        return None if self.counts is None else sum(map(sum, self.counts))

    @property
    def num_bytes(self) -> int:
        """Size of the files."""
        return sum(file.size_bytes for file in self.files)

    def identity(self) -> dict[str, object]:
        """Return the names of the files, and the columns."""
        return {**identity_of("hf", [file.name for file in self.files]), "schema": str(self.schema)}

    def file_of(self, row: int) -> int:
        """Return the number of the file that holds a row."""
        ends = np.cumsum([sum(rows) for rows in self.counts or ()])
        return int(np.searchsorted(ends, row, side="right"))

    def counted(self, executor: Executor) -> _Saved:
        """Count the rows of each file on the executor; identity and columns stay the same."""
        looked = ordered(executor, partial(_looked_through, storage=self.storage), self.files, len(self.files))
        return replace(self, counts=tuple(tuple(rows) for rows, _ in looked))

    def full(self) -> set[str]:
        """Return the columns that have a value in every row."""
        return {*self.full_columns}

    def batches(self, start: int, seed: int | None) -> Generator[tuple[int, pa.RecordBatch], None, None]:
        """Yield batches from row ``start`` on; earlier ones are skipped."""
        before = sums([sum(rows) for rows in self.counts or ()])
        skipped = max(0, int(np.searchsorted(before, start, side="right")) - 1) if seed is None else 0
        found = self._in_order(self.files[skipped:]) if seed is None else self._shuffled(seed, start)
        first = int(before[skipped])
        for batch in found:
            if first + batch.num_rows > start:
                skip = max(0, start - first)
                yield from _slices(batch.slice(skip), first + skip)
            first += batch.num_rows

    def _in_order(self, files: Sequence[SourceFile]) -> Iterator[pa.RecordBatch]:
        for file in files:
            with _stream(file, self.storage) as reader:
                yield from _batches(reader, file)

    def _shuffled(self, seed: int, start: int) -> Iterator[pa.RecordBatch]:
        """Yield batches, and the rows within each, in the order of a seed, as for row groups of Parquet."""
        with contextlib.ExitStack() as opened:
            there = [
                batch
                for file in self.files
                for batch in _batches(opened.enter_context(_stream(file, self.storage)), file, check=False)
            ]
            first = 0
            for place, which in enumerate(permutation(len(there), seed)):
                batch = there[which]
                first += batch.num_rows
                if first > start:
                    batch.validate(full=True)
                    batch = batch.take(pa.array(permutation(batch.num_rows, seed * 1_000_003 + place + 1)))
                yield batch


@contextlib.contextmanager
def _stream(file: SourceFile, storage: Storage) -> Iterator[pa.ipc.RecordBatchStreamReader]:
    local = is_local(file.url)
    opened = (
        pa.memory_map(local_path(file.url)) if local else pa.PythonFile(open_stored(file, storage, unzip=False), "r")
    )
    with opened, _told(file), pa.ipc.open_stream(opened) as reader:
        yield reader


@contextlib.contextmanager
def _told(file: SourceFile) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, NotImplementedError) as error:
        if isinstance(error, StorageError):
            raise
        raise DataError(
            f"{file.shown_url}: not an Arrow stream, or a damaged one: {error}; save the set again"
        ) from error


def _batches(
    reader: pa.ipc.RecordBatchStreamReader, file: SourceFile, *, check: bool = True
) -> Iterator[pa.RecordBatch]:
    while True:
        with _told(file):
            try:
                batch = reader.read_next_batch()
            except StopIteration:
                return
            if check:
                batch.validate(full=True)  # invalid offsets would be followed out of the file
        yield batch


def _looked_through(file: SourceFile, storage: Storage) -> tuple[list[int], frozenset[str]]:
    """Return the number of rows of each batch of a local file, and the columns without NULL; no value is read."""
    rows, full = list[int](), None
    with _stream(file, storage) as reader:
        names = frozenset(reader.schema.names)
        for batch in _batches(reader, file, check=False):
            rows.append(batch.num_rows)
            with _told(file):
                here = frozenset(name for name in names if not _has_null(batch.column(name)))
            full = here if full is None else full & here
    return rows, names if full is None else full


def _has_null(array: pa.Array) -> bool:
    if array.null_count:
        return True
    if pa.types.is_struct(array.type) and {one.name for one in array.type} == {"bytes", "path"}:
        return bool(array.field("bytes").null_count)
    return False


def _slices(batch: pa.RecordBatch, first: int) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield a batch in parts of bounded size."""
    rows = max(1, _BATCH_BYTES * batch.num_rows // max(1, batch.nbytes)) if batch.num_rows else 1
    for start in range(0, batch.num_rows, rows):
        yield first + start, batch.slice(start, rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Built:
    """A set made by a builder of ``datasets``, in its cache: read front to back, only on this machine."""

    where: str
    name: Mapping[str, object]
    data: Any  # a datasets.Dataset
    schema: pa.Schema

    @classmethod
    def of(cls, spec: str, options: SourceOptions) -> _Built:
        """Let ``datasets`` build a set from a folder or name.

        Raises:
            ConfigError: The extra is missing, or there is no such set, configuration or split.
        """
        library = _datasets()
        where = f"{redact(spec)} ({options.config})" if options.config else redact(spec)
        if scheme_of(spec) != "file":
            raise ConfigError(f"--from hf: {where}: expected a folder of save_to_disk, a local folder, or a name")
        trust = {"trust_remote_code": False} if int(library.__version__.split(".")[0]) < 4 else {}
        try:
            builder = library.load_dataset_builder(spec, options.config, **trust)
        except Exception as error:
            raise _refused(where, error) from error
        made_by = {one.__module__ for one in type(builder).__mro__}
        if not made_by & {f"datasets.packaged_modules.{name}.{name}" for name in _BUILDERS}:
            raise ConfigError(
                f"--from hf {where}: it is made by {type(builder).__module__}, which is not run; expected one of "
                f"{', '.join(_BUILDERS)}"
            )
        try:
            builder.download_and_prepare()
            found = builder.as_dataset()
        except Exception as error:
            raise _refused(where, error) from error
        part = choose_part("hf", options.part, list(found), where)
        data = found[part].with_format("arrow")
        name = {"kind": "hf", "name": spec, "config": options.config, "split": part, "num_rows": len(data)}
        name["fingerprint"] = str(data._fingerprint)  # of the files that it was built from
        return cls(where=f"{where}, split {part}", name=name, data=data, schema=data.features.arrow_schema)

    @property
    def num_rows(self) -> int | None:
        """None: rows are in a cache of this machine, which remote tasks may not be able to read."""
        return None

    @property
    def num_bytes(self) -> int:
        """Size of the table in the cache."""
        return int(self.data.data.nbytes)

    def counted(self, executor: Executor) -> _Cached:
        """Return the table as the files of the cache, for processes that can read them.

        Raises:
            ConfigError: It is not stored in files.
        """
        del executor
        files = tuple(str(one["filename"]) for one in self.data.cache_files)
        if not files:
            raise ConfigError(
                f"--engine: {self.where} is in this process's memory; use --engine local, or save it with save_to_disk"
            )
        return _Cached(
            where=self.where, files=files, schema=self.schema, num_rows=len(self.data), num_bytes=self.num_bytes,
            identified=self.identity(),
        )  # fmt: skip

    def identity(self) -> dict[str, object]:
        """Return name, configuration, split, and number of rows."""
        return {**self.name, "schema": str(self.schema.remove_metadata())}

    def file_of(self, row: int) -> int:
        """Return 0: files of the cache are not inputs."""
        del row
        return 0

    def full(self) -> set[str]:
        """Return no columns: they are unknown before reading."""
        return set()

    def batches(self, start: int, seed: int | None) -> Generator[tuple[int, pa.RecordBatch], None, None]:
        """Yield batches from row ``start`` on, with the bytes of files that rows name."""
        if seed is not None:
            raise ValueError("rows of a builder are read in order")  # refused before
        return _embedded(self.data, start)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cached:
    """A set made by a builder, as files that several processes read; ``identified``: its identity."""

    where: str
    files: tuple[str, ...]
    schema: pa.Schema
    num_rows: int
    num_bytes: int
    identified: Mapping[str, object]

    def identity(self) -> dict[str, object]:
        """Return the identity of the table that was built."""
        return dict(self.identified)

    def file_of(self, row: int) -> int:
        """Return 0: files of the cache are not inputs."""
        del row
        return 0

    def full(self) -> set[str]:
        """Return no columns: they are unknown before reading."""
        return set()

    def counted(self, executor: Executor) -> _Cached:
        """Return this."""
        del executor
        return self

    def batches(self, start: int, seed: int | None) -> Generator[tuple[int, pa.RecordBatch], None, None]:
        """Yield batches from row ``start`` on, with the bytes of files that rows name.

        Raises:
            ConfigError: This process cannot read the files.
        """
        del seed  # refused before
        library = _datasets()
        try:
            parts = [library.Dataset.from_file(file) for file in self.files]
        except OSError as error:
            raise ConfigError(
                f"--engine: {self.where}: {self.files[0]} is not there on the machine of a task ({error}); set "
                "HF_DATASETS_CACHE to a folder that all machines see, or use --engine local"
            ) from error
        return _embedded(library.concatenate_datasets(parts).with_format("arrow"), start)


def _embedded(data: Any, start: int) -> Generator[tuple[int, pa.RecordBatch], None, None]:
    """Yield batches of a ``datasets.Dataset`` from row ``start`` on, with the bytes of files that rows name."""
    from datasets.table import embed_table_storage

    for first in range(start, len(data), _BATCH_ROWS):
        table = embed_table_storage(data[first : first + _BATCH_ROWS]).combine_chunks()
        at = first
        for batch in table.to_batches():
            yield at, batch
            at += batch.num_rows


def _refused(where: str, error: Exception) -> ConfigError:
    return ConfigError(f"--from hf {where}: datasets cannot make it: {type(error).__name__}: {error}")


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError("--from hf: a set that is not saved by save_to_disk needs datasets: pip install "
                          "'shardstream[hf]'") from error  # fmt: skip
    return datasets


def _look(table: _Table, columns: Sequence[str]) -> dict[str, Counter[str]]:
    with contextlib.closing(table.batches(0, None)) as batches:
        return count_types((batch for _, batch in batches), columns)


def _features(schema: pa.Schema) -> dict[str, dict[str, Any]]:
    """Return the library's notes about the columns; empty if they are not readable."""
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        found = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {name: one for name, one in found.items() if isinstance(one, dict) and name in schema.names}
    return {}


def _meaning(labels: Mapping[str, Sequence[str]], fields: Mapping[str, str]) -> Schema:
    """Return the names of classes, by the separate fields of their columns, or within ``json``."""
    named = {fields.get(name, f"json{WITHIN}{name}"): names for name, names in labels.items()}
    return class_schema({name: names for name, names in named.items() if name != DROP}, dict([*labels.items()][:1]))


def _labels(features: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the names of the classes, by column."""
    labels = {name: one.get("names") for name, one in features.items() if one.get("_type") == "ClassLabel"}
    return {
        name: names
        for name, names in labels.items()
        if isinstance(names, list) and all(isinstance(one, str) for one in names) and len({*names}) == len(names)
    }
