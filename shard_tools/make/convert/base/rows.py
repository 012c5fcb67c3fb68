"""Map rows of tables to samples: the field of each column, and the encoding of its values."""

from __future__ import annotations

import contextlib
import decimal
import io
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from shard_tools.make.convert.base.identity import ChangedInputError
from shard_tools.make.convert.base.records import NUMBER_KEYS, Record, SourceOptions, number_key
from shard_tools.make.write.columns import plain_value
from shard_tools.make.write.filetypes import FILE_TYPES, ONE_FIELD, file_type, is_alike, is_read_as
from streaming.errors import ConfigError, DataError, shell_word

DROP = "-"  # as the extension of a column: leave it out
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_log = logging.getLogger(__name__)
_UNSAFE = re.compile(r"[^a-z0-9_-]+")


def dump_json(value: object) -> bytes:
    """Encode compact JSON of :func:`plain_value`; numbers that JSON does not support (NaN, infinity) become null."""
    return json_of(value)[0]


def json_of(value: object) -> tuple[bytes, str]:
    """Return JSON, and a remark if a number became null."""
    remark = ""
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_plain)
    except ValueError:
        text = json.dumps(_without_nan(value), ensure_ascii=False, separators=(",", ":"), default=_plain)
        remark = "NaN or infinity, which JSON does not have, is stored as null"
    return text.encode(), remark


def _plain(value: object) -> object:
    plain = plain_value(value)
    if plain is not value:
        return plain
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, bytes):
        raise DataError(f"a binary value of {len(value)} bytes inside a list or struct, which JSON does not have")
    raise DataError(f"a value of type {type(value).__name__} cannot be written as JSON")


def _without_nan(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return _without_nan(value.tolist())
    return [_without_nan(item) for item in value] if isinstance(value, (list, tuple)) else value


def dump_npy(value: Sequence[object], dtype: str | None = None) -> bytes:
    """Return a list of numbers as ``.npy``, with one dimension per level of nesting.

    Args:
        value: The numbers. None becomes NaN if ``dtype`` is a type of floats.
        dtype: Their type, if the table has one, also for an empty list. Otherwise int64, float64 or bool by the values,
        or uint64 if a whole number needs it.

    Raises:
        DataError: The values are not numbers, are not rectangular, or include None, which ``dtype`` cannot hold.
    """
    if _has_none(value) and (dtype is None or np.dtype(dtype).kind != "f"):
        raise DataError("a list with NULL among its items cannot be stored as .npy; store it as json")
    try:
        array = np.asarray(value, dtype)
        if dtype is None and array.dtype.kind == "f" and array.size and _all_whole(value):
            array = _unsigned(value, array)  # NumPy's own choice would round them
    except (TypeError, ValueError) as error:
        raise DataError(f"a ragged list of length {len(value)} cannot be stored as .npy; store it as json") from error
    except OverflowError as error:
        raise DataError(
            "whole numbers below 0 together with some of 2**63 and above cannot be stored as .npy; store them as json"
        ) from error
    if array.dtype.kind not in "biuf":
        raise DataError(f"a list of {array.dtype} cannot be stored as .npy, which takes numbers; store it as json")
    return dump_array(array)


def _unsigned(value: Sequence[object], rounded: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Return whole numbers as uint64; raise OverflowError for one below 0, which NumPy 1 would wrap."""
    if rounded.min() < 0:
        raise OverflowError
    return np.asarray(value, np.uint64)


def dump_array(array: npt.NDArray[Any]) -> bytes:
    """Return an array as ``.npy``, with its type and shape."""
    out = io.BytesIO()
    np.lib.format.write_array(out, array, allow_pickle=False)
    return out.getvalue()


def _has_none(value: object) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return None in value or (isinstance(value[0], list) and any(map(_has_none, value)))


def _all_whole(value: object) -> bool:
    return all(map(_all_whole, value)) if isinstance(value, list) else isinstance(value, int)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMapper:
    """Map rows of a table to samples.

    Columns named in ``fields`` become separate fields with the extension given there (``"-"`` drops them), and so do
    binary columns and lists of numbers; all others together become the ``json`` field. The field of a column is decided
    once, before the first row: a value that is not of its field's type is stored there with a remark.

    Args:
        fields: (column, extension) pairs.
        key_field: The column that holds the key; None or ``"number"``: the row's number.
        binary: Fields of binary columns.
        arrays: Fields of columns that hold lists of numbers.
        items: Types of the numbers in lists, by column.
        lists: Fields of columns that hold lists of files, whose items become fields of their own; see
            :func:`with_lists`.
        tolerant: A row that cannot be stored is a record with a ``problem``, not an error.
        named_only: Columns that ``fields`` does not name do not become fields.
    """

    fields: tuple[tuple[str, str], ...] = ()
    key_field: str | None = None
    binary: Mapping[str, str] = field(default_factory=dict)
    arrays: Mapping[str, str] = field(default_factory=dict)
    items: Mapping[str, str] = field(default_factory=dict)
    lists: Mapping[str, str] = field(default_factory=dict)
    tolerant: bool = False
    named_only: bool = False

    @classmethod
    def of(cls, options: SourceOptions) -> RowMapper:
        """Return a mapper with the options of a source."""
        return cls(
            fields=options.fields, key_field=options.key_field, tolerant=options.tolerant, named_only=options.named_only
        )

    def __post_init__(self) -> None:
        targets = [extension for _, extension in self.fields if extension != DROP]
        columns = [column for column, _ in self.fields]
        if len({*columns}) < len(columns) or len({*targets}) < len(targets):
            raise ConfigError("--field: a column or an extension is named twice; each may appear once")

    def identity(self) -> dict[str, object]:
        """Return the field of each column, as far as the content of a table decided it."""
        parts = {"binary": self.binary, "arrays": self.arrays, "items": self.items, "lists": self.lists}
        return {name: dict(some) for name, some in parts.items() if some}

    def fields_of(self, everywhere: Collection[str], always: Collection[str]) -> dict[str, bool]:
        """Return the fields of the samples of a table, True for those that every sample has.

        Args:
            everywhere: Columns that every row has, with a value or NULL.
            always: The columns among them with a value in every row.
        """
        named = dict(self.fields)
        own = {} if self.named_only else {**self.binary, **self.arrays}
        fields = {name: column in always for column, name in (own | named).items() if name != DROP}
        if not self.named_only:  # json also holds NULL of a column that has a separate field
            rest = {*everywhere} - {*own, *named}
            fields["json"] = bool(rest) or not fields or fields.get("json", False)
        return fields

    def record(
        self, row: Mapping[str, object], number: int, where: str, raw: bytes | None = None, *, origin: int = 0
    ) -> Record:
        """Return the sample of ``row``.

        Args:
            row: The values by column.
            number: The row's number in the source.
            where: File and line or row, for messages.
            raw: The row as JSON, if the source holds JSON: kept byte for byte unless a column is taken out.
            origin: Number of its input.

        Raises:
            DataError: A value cannot be stored as requested; the message begins with ``where``.
        """
        try:
            fields, remarks = self._fields(row, raw)
            key = self._key(row, number)
            return Record(key=key, fields=fields, metadata=row, where=where, remarks=remarks, origin=origin)
        except (DataError, UnicodeEncodeError) as error:
            told = (type(error) if isinstance(error, DataError) else DataError)(f"{where}: {error}")
            told.__cause__ = error
            if self.tolerant:
                return unreadable(number, where, told, origin)
            raise told from error

    def _key(self, row: Mapping[str, object], number: int) -> str:
        if self.key_field is None or self.key_field == NUMBER_KEYS:
            return number_key(number)
        value = row.get(self.key_field)
        if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
            got = "null" if value is None else repr(value)
            raise DataError(f"--key {self.key_field}: expected text or a whole number there, got {got}")
        return str(value).replace(".", "_")

    def _fields(self, row: Mapping[str, object], raw: bytes | None) -> tuple[dict[str, bytes], tuple[str, ...]]:
        found: list[tuple[str, str, bytes]] = []  # column, field, content
        rest: dict[str, object] = {}
        remarks: tuple[str, ...] = ()
        named = dict(self.fields)
        for column, value in (_spread(row, self.lists) if self.lists else row).items():
            name = named.get(column) or (None if self.named_only else self._own_field(column, value))
            if name is not None and name != DROP and value is not None:
                content, remark = self._content(value, name, column)
                found.append((column, name, content))
                remarks += (remark,) if remark else ()
            elif (column not in named or (column in self.lists and value in (None, []))) and not self.named_only:
                rest[column] = value
        if rest:
            content, remark = (raw, "") if raw is not None and len(rest) == len(row) else _json_of_columns(rest)
            found.append((next(iter(rest)), "json", content))
            remarks += (remark,) if remark else ()
        if not found and not self.named_only:
            raise DataError(self._nothing_left(row))
        fields = {name: content for _, name, content in found}
        if len(fields) < len(found):
            _refuse_twice(found)
        return fields, remarks

    def _nothing_left(self, row: Mapping[str, object]) -> str:
        """Return the reason why a row has no field, and the cure."""
        if not row:
            return "this row is empty, and a sample needs a field; delete the row from the source"
        if any(name == DROP and column in row for column, name in self.fields):
            return "nothing is left of this row; name fewer columns with --field COLUMN=-"
        return f"each value of this row is NULL ({', '.join(row)}); delete the row from the source"

    def _own_field(self, column: str, value: object) -> str | None:
        """Return the field of a column that no option names; None if the value belongs in ``json``."""
        if as_payload(value) is not None:
            return self.binary.get(column)
        return self.arrays.get(column) if isinstance(value, (list, np.ndarray)) else None

    def _content(self, value: object, name: str, column: str) -> tuple[bytes, str]:
        """Return the content of a field, and a remark if it does not fit the field's name."""
        payload = as_payload(value)
        if payload is None:
            return encode_value(value, name, column, self.items.get(column))
        extension = name.rpartition(".")[2]
        if is_read_as(payload, extension):
            return payload, ""
        return payload, f"column {column!r}: the content is not of the type {extension} that its field {name!r} names"


def _refuse_twice(found: Sequence[tuple[str, str, bytes]]) -> None:
    """Refuse two columns for one field, among (column, field, content) triples.

    Raises:
        DataError: Two columns have one field; the message names all three.
    """
    first: dict[str, str] = {}
    for column, name, _ in found:
        if name in first:
            raise DataError(
                f"the columns {first[name]!r} and {column!r} would both become the field {name!r}; rename one of them "
                f"with --field {shell_word(first[name])}=NAME.{shell_word(name.rpartition('.')[2])}, or leave it out "
                f"with --field {shell_word(first[name])}=-"
            )
        first[name] = column


def with_lists(mapper: RowMapper, lists: Mapping[str, str], columns: Collection[str]) -> RowMapper:
    """Return a mapper for rows in which each item of some columns becomes a separate, numbered field.

    Args:
        mapper: Maps everything else.
        lists: The field of each column of lists; of ``view.jpg`` item 3 becomes ``view.3.jpg``.
        columns: All columns.

    Raises:
        ConfigError: Another column has the name of an item.
    """
    for name in lists:
        if any(other.startswith(f"{name}[") for other in columns):
            raise ConfigError(f"column {name!r} is a list of files, and another is called {name}[…; rename one of them")
    kept = tuple(pair for pair in mapper.fields if pair[0] not in lists)
    dropped = tuple((name, DROP) for name in lists)
    return replace(mapper, fields=kept + dropped, binary=_NumberedFields(mapper.binary, lists), lists=lists)


def _spread(row: Mapping[str, object], lists: Collection[str]) -> dict[str, object]:
    """Return a row with a column ``COLUMN[NUMBER]`` for each item of the list columns."""
    found = dict(row)
    for name in lists:
        items = row.get(name)
        found |= {f"{name}[{number}]": item for number, item in enumerate(items if isinstance(items, list) else ())}
    return found


def _json_of_columns(values: Mapping[str, object]) -> tuple[bytes, str]:
    """Return columns as JSON, and a remark if a number became null.

    Raises:
        DataError: A value cannot be stored as JSON; the message names the column.
    """
    try:
        return json_of(values)
    except DataError:
        for column, value in values.items():
            _json_of_column(value, column)
        raise


def _json_of_column(value: object, column: str) -> tuple[bytes, str]:
    try:
        return json_of(value)
    except DataError as error:
        raise DataError(f"column {column!r}: {error}; leave it out with --field {shell_word(column)}=-") from error


class _NumberedFields(dict[str, str]):
    """Fields of binary columns; those of columns ``COLUMN[NUMBER]`` are made from the field of the list."""

    def __init__(self, fields: Mapping[str, str], lists: Mapping[str, str]) -> None:
        super().__init__(fields)
        self._lists = lists

    def __reduce__(self) -> tuple[type[_NumberedFields], tuple[dict[str, str], Mapping[str, str]]]:
        return _NumberedFields, (dict(self), self._lists)

    def get(self, column: str, default: Any = None) -> Any:
        """Return the field of a column."""
        name, is_item, number = column.rpartition("[")
        if not is_item or name not in self._lists:
            return super().get(column, default)
        stem, dot, extension = self._lists[name].rpartition(".")
        return f"{stem}{dot}{number[:-1]}.{extension}"


def unreadable(number: int, where: str, problem: DataError, origin: int) -> Record:
    """Return the record that represents an unreadable line or row of an input."""
    return Record(key=number_key(number), fields={}, where=where, problem=problem, origin=origin)


def unreadable_rest(number: int, where: str, problem: DataError, origin: int, *, tolerant: bool) -> Record:
    """Return the record that represents what cannot be read of an input, from record ``number`` to its end.

    Raises:
        DataError: The problem: it is not tolerated, or the input is being changed.
    """
    if not tolerant or isinstance(problem, ChangedInputError):
        raise problem
    return unreadable(number, f"{where}, from here to its end", problem, origin)


def safe_extension(column: str) -> str:
    """Make ``column`` a part of a field name."""
    return _UNSAFE.sub("_", column.lower()).strip("_") or "column"


def choose_type(column: str, types: Counter[str]) -> str:
    """Return the extension of a binary column: by its name if most values agree, else the type of all values.

    Args:
        column: Its name.
        types: Number of examined values by type; ``""``: unknown.

    Raises:
        ConfigError: Most values are of known types, but not all of one.
    """
    num_values, num_unknown = types.total(), types[""]
    known = [extension for extension, _ in types.most_common() if extension]
    named = column.lower().rpartition(".")[2]
    if named in FILE_TYPES and 2 * sum(types[one] for one in known if is_alike(one, named)) >= num_values:
        return named
    if 2 * num_unknown >= num_values:
        return "bin"
    told = ", ".join(f"{types[one]:,} are {one or 'of no known type'}" for one, _ in types.most_common())
    if num_unknown or not all(is_alike(one, known[0]) for one in known):
        word = shell_word(column)
        raise ConfigError(
            f"column {column!r}: of the first {num_values:,} values {told}; a column becomes one field: name it with "
            f"--field {word}={shell_word(known[0])}, or --field {word}=bin for bytes as they are"
        )
    if len(known) > 1:
        _log.warning(
            "column %r: of the first %s values %s: %s", column, f"{num_values:,}", told, ONE_FIELD % known[0],
        )  # fmt: skip
    return known[0]


def content_type(payload: bytes) -> str:
    """Return the extension of a value that may also be text: its file type's, ``json``, ``txt``, or ``""``."""
    found = file_type(payload)
    if found or not is_text(payload):
        return found
    with contextlib.suppress(ValueError, RecursionError):
        if payload[:1] in {b"{", b"["} and json.loads(payload) is not None:
            return "json"
    return "txt"


def is_text(payload: bytes) -> bool:
    """Return whether this is UTF-8 without control characters except white space."""
    try:
        payload.decode()
    except UnicodeDecodeError:
        return False
    return _CONTROL.search(payload) is None


def choose_content_type(column: str, types: Counter[str]) -> str:
    """Return the extension of a column, given the number of its values by :func:`content_type`.

    Raises:
        ConfigError: The values have several types.
    """
    if types and types.keys() <= {"json", "txt"}:
        return "txt" if types["txt"] else "json"
    return choose_type(column, types)


def as_payload(value: object) -> bytes | None:
    """Return the bytes of a binary value, or of Hugging Face's ``{"bytes", "path"}`` struct; None for anything else."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, dict) and value.keys() == {"bytes", "path"} and isinstance(value["bytes"], bytes):
        return value["bytes"]
    return None


def encode_value(value: object, extension: str, column: str, dtype: str | None = None) -> tuple[bytes, str]:
    """Return ``value`` as the content of a field called ``extension``, and a remark if it is changed.

    ``dtype`` is the type of a list's items.

    Raises:
        DataError: The value cannot be encoded in this field.
    """
    last = extension.lower().rpartition(".")[2]
    if last == "json":
        return _json_of_column(value, column)
    if last == "npy" and isinstance(value, np.ndarray):
        return dump_array(value), ""
    if last == "npy" and isinstance(value, list):
        try:
            remark = f"column {column!r}: NULL among the items of a list is stored as NaN" if _has_none(value) else ""
            return dump_npy(value, dtype), remark
        except DataError as error:
            raise DataError(
                f"column {column!r}: {error} with --field {shell_word(f'{column}={safe_extension(column)}.json')}"
            ) from error
    if isinstance(value, str):
        return value.encode(), ""
    if isinstance(value, (int, float, decimal.Decimal)):
        return str(int(value) if isinstance(value, bool) else value).encode(), ""
    _json_of_column(value, column)  # raises if json is no cure either
    raise DataError(f"--field {column}={extension}: cannot store a {type(value).__name__} there; try {column}=json")
