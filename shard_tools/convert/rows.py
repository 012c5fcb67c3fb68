"""Map rows of tables to samples: which column becomes which field, and how its value is encoded."""

from __future__ import annotations

import datetime as dt
import decimal
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shard_tools.convert.records import NUMBER_KEYS, Record, SourceOptions, number_key
from streaming.errors import ConfigError, DataError

DROP = "-"  # as the extension of a column: leave it out
_UNSAFE = re.compile(r"[^a-z0-9_-]+")
_MAGIC = (
    (b"\xff\xd8\xff", "jpg"), (b"\x89PNG\r\n\x1a\n", "png"), (b"GIF8", "gif"), (b"BM", "bmp"),
    (b"II*\0", "tif"), (b"MM\0*", "tif"), (b"fLaC", "flac"), (b"ID3", "mp3"), (b"\xff\xfb", "mp3"),
    (b"OggS", "ogg"), (b"%PDF", "pdf"), (b"\x93NUMPY", "npy"), (b"\x1aE\xdf\xa3", "webm"),
)  # fmt: skip
_BOXED = {b"WEBP": "webp", b"WAVE": "wav", b"AVI ": "avi"}  # RIFF containers, by the word at byte 8
_BRANDS = {b"avif": "avif", b"heic": "heic", b"M4A ": "m4a"}  # ISO media files, by the brand at byte 8


def sniff_extension(payload: bytes) -> str:
    """Return the extension of a file with these first bytes, or ``"bin"``."""
    if payload[:4] == b"RIFF":
        return _BOXED.get(bytes(payload[8:12]), "bin")
    if payload[4:8] == b"ftyp":
        return _BRANDS.get(bytes(payload[8:12]), "mp4")
    return next((extension for magic, extension in _MAGIC if payload.startswith(magic)), "bin")


def dump_json(value: object) -> bytes:
    """Encode compact JSON. Dates become ISO text, decimals text, and numbers that JSON does not support (NaN) null."""
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_plain)
    except ValueError:
        text = json.dumps(_without_nan(value), ensure_ascii=False, separators=(",", ":"), default=_plain)
    return text.encode()


def _plain(value: object) -> object:
    if isinstance(value, (dt.date, dt.time)):
        return value.isoformat()
    if isinstance(value, dt.timedelta):
        return value.total_seconds()
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, bytes):
        raise DataError(f"a binary value of {len(value)} bytes inside a list or struct; store its column with --field")
    raise DataError(f"a value of type {type(value).__name__} cannot be written as JSON")


def _without_nan(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    return [_without_nan(item) for item in value] if isinstance(value, (list, tuple)) else value


def dump_npy(value: Sequence[object], dtype: str | None = None) -> bytes:
    """Return a list of numbers as ``.npy``, as many dimensions as the nesting has.

    Args:
        value: The numbers.
        dtype: Their type, where a table tells it: an empty list has it, too. Else int64, float64 or bool, as they look;
            uint64 for whole numbers of which one needs it.

    Raises:
        DataError: They are no numbers, or make no rectangle.
    """
    try:
        array = np.asarray(value, None if None in value else dtype)
        if dtype is None and array.dtype.kind == "f" and array.size and _all_whole(value):
            array = np.asarray(value, np.uint64)  # NumPy's own choice would round them
    except ValueError as error:
        raise DataError(f"a ragged list of length {len(value)} cannot be stored as .npy; store it as json") from error
    except OverflowError as error:
        raise DataError(
            "whole numbers below 0 together with some of 2**63 and above cannot be stored as .npy; store them as json"
        ) from error
    if array.dtype.kind not in "biuf":
        raise DataError(f"a list of {array.dtype} cannot be stored as .npy, which takes numbers; store it as json")
    out = io.BytesIO()
    np.lib.format.write_array(out, array, allow_pickle=False)
    return out.getvalue()


def _all_whole(value: object) -> bool:
    return all(map(_all_whole, value)) if isinstance(value, list) else isinstance(value, int)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMapper:
    """Map rows of a table to samples.

    Columns named in ``fields`` become separate fields with the extension given there (``"-"`` drops them), and so do
    binary columns; all others together become the ``json`` field.

    Args:
        fields: (column, extension) pairs.
        key_field: The column that holds the key; None or ``"number"``: the row's number.
        num_binary: Number of binary columns in the table: if there are several, their fields are called ``column.ext``,
            otherwise ``ext``.
        arrays: Item types of columns that hold lists of numbers, which are stored as ``column.npy``.
        tolerant: A row that cannot be stored is a record with a ``problem``, not an error.
        named_only: Columns that ``fields`` does not name do not become fields.
    """

    fields: tuple[tuple[str, str], ...] = ()
    key_field: str | None = None
    num_binary: int = 1
    arrays: Mapping[str, str] = field(default_factory=dict)
    tolerant: bool = False
    named_only: bool = False

    @classmethod
    def of(cls, options: SourceOptions) -> RowMapper:
        """Map rows as the options of a source ask for."""
        return cls(
            fields=options.fields, key_field=options.key_field, tolerant=options.tolerant, named_only=options.named_only
        )

    def __post_init__(self) -> None:
        targets = [extension for _, extension in self.fields if extension != DROP]
        columns = [column for column, _ in self.fields]
        if len({*columns}) < len(columns) or len({*targets}) < len(targets):
            raise ConfigError("--field: a column or an extension is named twice; each may appear once")

    def record(self, row: Mapping[str, object], number: int, where: str, raw: bytes | None = None) -> Record:
        """Return the sample of ``row``.

        Args:
            row: The values by column.
            number: The row's number in the source.
            where: File and line or row, for messages.
            raw: The row as JSON, where the source holds it so: kept byte for byte unless a column is taken out.

        Raises:
            DataError: If a value cannot be stored as asked; the message begins with ``where``.
        """
        try:
            return Record(key=self._key(row, number), fields=self._fields(row, raw), metadata=row, where=where)
        except (DataError, UnicodeEncodeError) as error:
            told = (type(error) if isinstance(error, DataError) else DataError)(f"{where}: {error}")
            told.__cause__ = error
            if self.tolerant:
                return unreadable(number, where, told)
            raise told from error

    def _key(self, row: Mapping[str, object], number: int) -> str:
        if self.key_field is None or self.key_field == NUMBER_KEYS:
            return number_key(number)
        value = row.get(self.key_field)
        if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
            raise DataError(f"--key {self.key_field}: expected text or a whole number there, got {value!r}")
        return str(value).replace(".", "_")

    def _fields(self, row: Mapping[str, object], raw: bytes | None) -> dict[str, bytes]:
        extensions = dict(self.fields)
        found: list[tuple[str, str, bytes]] = []  # column, field, content
        rest: dict[str, object] = {}
        for column, value in row.items():
            if column in extensions:
                if (name := extensions[column]) != DROP and value is not None:
                    found.append((column, name, encode_value(value, name, column, self.arrays.get(column))))
            elif self.named_only:
                continue
            elif (payload := as_payload(value)) is not None:
                found.append((column, self._binary_name(column, payload), payload))
            elif column in self.arrays and isinstance(value, list):
                found.append((column, f"{safe_extension(column)}.npy", dump_npy(value, self.arrays[column])))
            else:
                rest[column] = value
        if rest:
            found.append(
                (next(iter(rest)), "json", raw if raw is not None and len(rest) == len(row) else dump_json(rest))
            )
        if not found and not self.named_only:
            raise DataError("nothing is left of this row; name fewer columns with --field COLUMN=-")
        fields = {name: content for _, name, content in found}
        if len(fields) < len(found):
            _refuse_twice(found)
        return fields

    def _binary_name(self, column: str, payload: bytes) -> str:
        extension = sniff_extension(payload)
        return extension if self.num_binary == 1 else f"{safe_extension(column)}.{extension}"


def _refuse_twice(found: Sequence[tuple[str, str, bytes]]) -> None:
    """Refuse two columns for one field, among (column, field, content) triples.

    Raises:
        DataError: There are; the message names the columns and the field.
    """
    first: dict[str, str] = {}
    for column, name, _ in found:
        if name in first:
            raise DataError(
                f"the columns {first[name]!r} and {column!r} would both become the field {name!r}; rename one of them "
                f"with --field {first[name]}=NAME.{name.rpartition('.')[2]}, or leave it out with --field "
                f"{first[name]}=-"
            )
        first[name] = column


def unreadable(number: int, where: str, problem: DataError) -> Record:
    """Return the record that represents an unreadable line or row."""
    return Record(key=number_key(number), fields={}, where=where, problem=problem)


def safe_extension(column: str) -> str:
    """Make ``column`` a part of a field name."""
    return _UNSAFE.sub("_", column.lower()).strip("_") or "column"


def as_payload(value: object) -> bytes | None:
    """Return the bytes of a binary value, or of Hugging Face's ``{"bytes", "path"}`` struct; None for anything else."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, dict) and value.keys() == {"bytes", "path"} and isinstance(value["bytes"], bytes):
        return value["bytes"]
    return None


def encode_value(value: object, extension: str, column: str, dtype: str | None = None) -> bytes:
    """Return ``value`` as the content of a field called ``extension``; ``dtype`` is that of a list's items.

    Raises:
        DataError: The value cannot be encoded so.
    """
    payload = as_payload(value)
    last = extension.lower().rpartition(".")[2]
    if payload is not None:
        return payload
    if last == "json":
        return dump_json(value)
    if last == "npy" and isinstance(value, list):
        return dump_npy(value, dtype)
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, (int, float, decimal.Decimal)):
        return str(int(value) if isinstance(value, bool) else value).encode()
    raise DataError(f"--field {column}={extension}: cannot store a {type(value).__name__} there; try {column}=json")
