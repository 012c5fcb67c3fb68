"""Write samples as Parquet: one file per shard; a column per field, and per column of the sample tables."""

from __future__ import annotations

import hashlib
import io
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from shard_tools.change.export.job import ExportJob
from shard_tools.change.sets.bad_list import BadList
from shard_tools.change.sets.rewrite.selection import ShardPart, Taken, select
from shard_tools.change.sets.rewrite.shard_source import ShardSource
from shard_tools.make.convert.base.annotated import IMAGE_EXTENSIONS
from shard_tools.make.convert.base.arrow import open_parquet
from shard_tools.make.convert.base.files import SourceFile
from shard_tools.make.convert.base.records import Record
from shard_tools.running.progress import NoProgress
from streaming.build.decode import values
from streaming.build.decode.registry import BY_EXTENSION
from streaming.errors import ConfigError, DataError, NotFoundError
from streaming.shards.index.columns import type_of_all
from streaming.shards.index.where import unknown_column
from streaming.shards.schema.value import WITHIN
from streaming.storage import StoreWriter, join_url, redact

Kind = Literal["image", "audio", "text", "integer", "bytes"]
KEY = "__key__"
FACTS = b"shardstream-export"  # metadata key of each file: a digest of its source
_AUDIO = frozenset({"wav", "flac", "mp3", "ogg", "opus", "m4a"})
_GROUP_BYTES = 64 << 20  # memory of a row group that is being collected
_WINDOW_BYTES = 32 << 20
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportColumns:
    """The columns of the files.

    Attributes:
        fields: Kind of each field.
        columns: Type of each other column.
        files: Write images and sounds as structs of ``bytes`` and ``path``, as ``datasets`` does, not as plain bytes.
        classes: Names of classes in the order of their numbers, by field and column, for ``datasets``.
    """

    fields: Mapping[str, Kind]
    columns: Mapping[str, pa.DataType]
    files: bool
    classes: Mapping[str, tuple[str, ...]]

    @property
    def schema(self) -> pa.Schema:
        """The schema of every file."""
        struct = pa.struct({"bytes": pa.binary(), "path": pa.string()})
        types = {"text": pa.string(), "integer": pa.int64(), "bytes": pa.binary()}
        fields = {
            name: types.get(kind, struct if self.files else pa.binary()) for name, kind in self.fields.items()
        }  # fmt: skip
        return pa.schema({KEY: pa.string(), **fields, **self.columns}).with_metadata(self._metadata())

    def _metadata(self) -> dict[bytes, bytes]:
        """Return the metadata that marks images, sounds and classes for ``datasets``."""
        if not self.files:
            return {}
        types: dict[str, dict[str, Any]] = {KEY: {"dtype": "string", "_type": "Value"}}
        kinds = {"text": "string", "integer": "int64", "bytes": "binary"}
        for name, kind in self.fields.items():
            value = {"dtype": kinds.get(kind, ""), "_type": "Value"}
            types[name] = value if kind in kinds else {"_type": kind.capitalize()}
        for name, arrow in self.columns.items():
            types[name] = {"dtype": "float64" if arrow == pa.float64() else str(arrow), "_type": "Value"}
        numbers = {name for name, value in types.items() if value.get("dtype") == "int64"}
        types |= {
            name: {"names": list(self.classes[name]), "_type": "ClassLabel"} for name in numbers & self.classes.keys()
        }
        return {b"huggingface": json.dumps({"info": {"features": types}}).encode()}

    def values(self, record: Record) -> dict[str, Any]:
        """Return the row of a sample.

        Raises:
            DataError: A field's content does not fit its name.
        """
        row: dict[str, Any] = {KEY: record.key}
        for name, how in self.fields.items():
            data = record.fields.get(name)
            row[name] = None if data is None else self._value(how, data, record.key, name)
        for name, kind in self.columns.items():
            value = record.metadata.get(name)
            # Arrow rejects whole numbers beyond 2^53 as floats, though type_of_all has checked that each is exact.
            row[name] = float(value) if isinstance(value, int) and pa.types.is_floating(kind) else value
        return row

    def _value(self, kind: Kind, data: bytes, key: str, name: str) -> Any:
        if kind == "bytes" or (kind in {"image", "audio"} and not self.files):
            return data
        if kind in {"image", "audio"}:
            return {"bytes": data, "path": f"{key.replace('/', '_')}.{name}"}
        try:
            return data.decode() if kind == "text" else int(data)
        except ValueError as error:
            what = "UTF-8" if kind == "text" else "a whole number"
            raise DataError(
                f"sample {key!r}, field {name!r}: expected {what}, got {data[:40]!r}; leave the field out with "
                "--fields, or the sample: `shard_tools verify URL --decode --write-bad bad.jsonl`, then "
                "`shard_tools reshard … --drop bad.jsonl`"
            ) from error


def can_name_classes(part: str) -> bool:
    """Return whether files for ``datasets`` can hold the names of the classes of a field: not if it is within JSON."""
    return WITHIN not in part


def kind_of(field: str) -> Kind:
    """Return the kind of a field of this name, by this library's decoders."""
    last = field.rpartition(".")[2]
    if last in IMAGE_EXTENSIONS or last in _AUDIO:
        return "image" if last in IMAGE_EXTENSIONS else "audio"
    decoder = BY_EXTENSION.get(last)
    return "integer" if decoder is values.integer else "text" if decoder in {values.text, values.json} else "bytes"


class _Sink(io.RawIOBase):
    """A file for Arrow whose ``close`` publishes nothing: otherwise a truncated file would look complete."""

    def __init__(self, out: StoreWriter) -> None:
        super().__init__()
        self._out = out

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any) -> int:
        """Append ``data``."""
        return self._out.write(memoryview(data).cast("B"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetExport:
    """Samples to be written, and their target.

    Attributes:
        job: The export.
        taken: The selected samples, by shard.
        columns: The columns.
    """

    job: ExportJob
    taken: Taken
    columns: ExportColumns

    @classmethod
    def of(cls, job: ExportJob, *, files: bool) -> ParquetExport:
        """Select samples by the options of the job.

        Raises:
            ConfigError: A field or a column does not exist, or no sample is left.
        """
        options, opened = job.options, job.opened
        late = opened.late_columns(job.storage, options.columns)
        taken = select(
            opened, job.storage, kept=opened.kept(job.storage, where=options.where, view=options.view),
            late=list(late.values()), drop=BadList(by_shard={}, num_unreadable=0), needed=(), fields=None,
            with_keys=False, progress=NoProgress(),
        )  # fmt: skip
        for name in sorted({*(options.fields or ())} - {*taken.fields}):
            raise ConfigError(f"--fields: no sample has a field {name!r}; there are: {', '.join(taken.fields)}")
        for name in sorted({*options.columns} - {*taken.columns, *late}):
            raise unknown_column(name, {*taken.columns, *late}, "--columns")
        fields = {
            name: kind_of(name) for name in taken.fields if options.fields is None or name in options.fields
        }  # fmt: skip
        columns = {
            name: _type_of(taken, name)
            for name in dict.fromkeys((*taken.columns, *options.columns))
            if name not in fields
        }
        hidden = sorted({*taken.columns, *options.columns} & {*fields})
        if hidden:
            _log.warning("columns %s are left out: fields of the same name are written", ", ".join(hidden))
        made = ExportColumns(fields=fields, columns=columns, files=files, classes=job.classes)
        return cls(job=job, taken=taken, columns=made)

    def write(self, position: int, name: str) -> int:
        """Write the samples of a shard to a file of this name; return the bytes read, or 0 if the file was complete.

        Raises:
            DataError: A sample is damaged, or a field's content does not fit its name.
            StorageError: The store failed.
        """
        part, url = self.taken.parts[position], join_url(self.job.target, name)
        facts = self._facts(part)
        if self._is_there(url, facts):
            return 0
        schema = self.columns.schema
        schema = schema.with_metadata({**(schema.metadata or {}), FACTS: facts})
        one = replace(self.taken, parts=(part,))
        source = ShardSource(
            one, None, self.job.storage, fingerprint="", fields=list(self.columns.fields), window_bytes=_WINDOW_BYTES,
            num_threads=2,
        )  # fmt: skip
        out = self.job.storage.open_write(url)
        try:
            with pq.ParquetWriter(pa.PythonFile(_Sink(out), mode="w"), schema, compression="zstd") as writer:
                for batch in self._batches(source, schema):
                    writer.write_batch(batch)
        except BaseException:
            out.abort()
            raise
        out.close()
        return source.num_bytes

    def _batches(self, source: ShardSource, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield row groups."""
        rows: list[dict[str, Any]] = []
        num_bytes = 0
        with closing(source.records(0)) as records:
            for record in records:
                rows.append(self.columns.values(record))
                num_bytes += sum(map(len, record.fields.values()))
                if num_bytes >= _GROUP_BYTES:
                    yield pa.RecordBatch.from_pylist(rows, schema)
                    rows, num_bytes = [], 0
        if rows:
            yield pa.RecordBatch.from_pylist(rows, schema)

    def _facts(self, part: ShardPart) -> bytes:
        """Return the identity of a file: a digest of the shard's bytes, the selected samples, and the columns."""
        sha = hashlib.sha256(part.pieces.crc32c.tobytes() + part.rows.astype("<i8").tobytes())
        for name, column in part.columns.items():
            sha.update(json.dumps([name, column.to_pylist()], default=str).encode())
        sha.update(self.columns.schema.to_string().encode())
        return json.dumps({"version": 1, "sha256": sha.hexdigest()}).encode()

    def _is_there(self, url: str, facts: bytes) -> bool:
        """Return whether the file exists and was made from the same samples and options.

        Raises:
            ConfigError: It exists, but was made from others.
        """
        try:
            size_bytes = self.job.storage.info(url).size_bytes
        except NotFoundError:
            return False
        try:
            with open_parquet(SourceFile(url=url, name=url, size_bytes=size_bytes), self.job.storage) as there:
                found = (there.schema_arrow.metadata or {}).get(FACTS)
        except DataError:
            found = None
        if found != facts and not self.job.options.overwrite:
            raise ConfigError(
                f"{redact(url)}: there is a file of this name, made from other samples or options; give another "
                "target, or --overwrite"
            )
        return found == facts


def _type_of(taken: Taken, name: str) -> pa.DataType:
    """Return the type of a column over all shards; text if none has a value."""
    kind = type_of_all([part.columns[name] for part in taken.parts if name in part.columns], name)
    return pa.string() if pa.types.is_null(kind) else kind


def part_namer(names: Sequence[str]) -> Callable[[int], str]:
    """Return a function that names the file of each shard after the shard."""
    return lambda position: names[position].removesuffix(".tar") + ".parquet"
