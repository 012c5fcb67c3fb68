"""Hold the meaning of a set: the classes behind numbers, the tokenizer behind ids, the types of fields and columns.

A :class:`Schema` is the content of ``_shardstream/schema.json``. It is a value without I/O. ``joined.py`` joins
schemas.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from streaming.shards.index.files import damaged, read_document, write_document
from streaming.shards.schema.kinds import KINDS, kind_by_name

FORMAT = "shardstream-schema"
LIVES = "lives"
"""The member that says that the chunk table says what the set means."""
SUPERVISED = "num_labels"
"""Column with the number of tokens of each document that carry loss; ``shard_tools convert`` writes it with a mask."""
VERSION = 1
WITHIN = ":"
"""Separator of a field and the path of a value in it, in the name of a part: ``"json:objects.label"``."""
LATE = "late"
"""Beginning of the origin of a column or field that was added after the shards were written."""
_LATE_VERSION = f"{LATE}, version "
_FROM = ", from "
TOKEN_TYPES = ("uint16", "uint32")
RESTORE = (
    "restore it from a copy of the data set, or convert that again with --overwrite; or delete it: the set then says "
    "nothing"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerKey:
    """Identity of the tokenizer that turned text into ids.

    Attributes:
        kind: Its library: ``"huggingface"``, ``"sentencepiece"``, ``"tiktoken"`` or ``"bytes"``.
        sha256: Digest of its file.
        pattern: Pattern by which tiktoken splits text; "": no pattern.
    """

    kind: str
    sha256: str
    pattern: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMeaning:
    """Meaning of the ids of a field of tokens.

    Attributes:
        tokenizer: The tokenizer that made them; None: unknown.
        vocab_size: The largest id plus one; 0: unknown.
        bos: Ids before each document; several where sets were joined, () if there are none.
        eos: Ids after each document, in the same form.
        mask: Field that marks the ids that count; "": none.
        column: Column with the number of ids; "": none.
        chat_templates: Templates by which conversations became text.
        image: Ids that stand for images, in the same form as ``bos``.
        audio: Ids that stand for sounds.
    """

    tokenizer: TokenizerKey | None = None
    vocab_size: int = 0
    bos: tuple[int, ...] = ()
    eos: tuple[int, ...] = ()
    mask: str = ""
    column: str = ""
    chat_templates: tuple[str, ...] = ()
    image: tuple[int, ...] = ()
    audio: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaField:
    """Meaning of the values of a field. Empty values are not stated.

    Attributes:
        kind: Kind of content, one of :data:`~streaming.shards.schema.kinds.KINDS`.
        dtype: Type of the numbers of an array or of tokens.
        classes: Names of classes; the place of a name is its number.
        tokens: Meaning of its ids.
        made_by: The functions that made it.
        origin: Of a field that was added later, :data:`LATE` with the version, then what it is from.
    """

    kind: str = ""
    dtype: str = ""
    classes: tuple[str, ...] = ()
    tokens: TokenMeaning | None = None
    made_by: tuple[str, ...] = ()
    origin: str = ""

    @property
    def late_version(self) -> str:
        """The version of a field that was added after the shards were written; "": it is in the shards."""
        known = self.origin.partition(_FROM)[0]
        return known.removeprefix(_LATE_VERSION) if known.startswith(_LATE_VERSION) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaColumn:
    """Meaning of the values of a column. Empty values are not stated.

    Attributes:
        type: Arrow's name of their type.
        origin: Origin of the values: their path in a sample, if the name differs from it; for a late column,
            :data:`LATE` with the version, then the path, function or file of the values.
        classes: Names of classes; the place of a name is its number.
    """

    type: str = ""
    origin: str = ""
    classes: tuple[str, ...] = ()

    @property
    def is_late(self) -> bool:
        """Whether the column was added after the shards were written."""
        return self.origin.startswith(LATE)

    @property
    def made_from(self) -> str:
        """Origin of its values, such as a path in a sample; "" if the name is the path."""
        return self.origin.partition(_FROM)[2] if self.is_late else self.origin


def late_origin(version: str, made_from: str) -> str:
    """Return the origin of a column or field that is added after the shards were written."""
    return f"{_LATE_VERSION}{version}{_FROM}{made_from}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """The meaning of a set.

    A column that was lifted from a field, or from a value within one, has the classes of that field or value.

    Attributes:
        fields: By name. A name with a colon is a value within a field: ``"json:objects.label"``.
        columns: By name.
    """

    fields: Mapping[str, SchemaField] = field(default_factory=dict)
    columns: Mapping[str, SchemaColumn] = field(default_factory=dict)

    def __post_init__(self) -> None:
        numbered = {name: self.classes[part] for name, part in self.lifted.items()}
        columns = {
            name: replace(one, classes=numbered[name])
            if name in numbered and {*one.classes} <= {*numbered[name]} else one
            for name, one in self.columns.items()
        }  # fmt: skip
        object.__setattr__(self, "columns", columns)

    def __bool__(self) -> bool:
        return bool(self.fields or self.columns)

    @property
    def lifted(self) -> dict[str, str]:
        """The field, or the part of one, whose class numbers each column holds, by column."""
        parts = {part.replace(WITHIN, "."): part for part in self.classes}
        paths = {name: one.made_from or name for name, one in self.columns.items()} if parts else {}
        return {name: parts[path] for name, path in paths.items() if path in parts}

    @property
    def classes(self) -> dict[str, tuple[str, ...]]:
        """The names of classes, by field."""
        return {name: one.classes for name, one in self.fields.items() if one.classes}

    @property
    def tokens(self) -> dict[str, SchemaField]:
        """The fields of tokens whose width is known."""
        return {name: one for name, one in self.fields.items() if one.tokens is not None and one.dtype in TOKEN_TYPES}

    @property
    def decoded_as(self) -> dict[str, str]:
        """Decoding of the fields of tokens and their masks, in the form of ``decode=``."""
        found = {name: f"array:{one.dtype}->int64" for name, one in self.tokens.items()}
        masks = {one.tokens.mask for one in self.tokens.values() if one.tokens is not None}
        return found | {mask: "array:uint8" for mask in sorted(masks) if mask}

    @property
    def stamp(self) -> str:
        """Distinguishes meanings of numbers and ids; "" if none is stated. See :func:`continues`."""
        return ", ".join(f"{name} {text}" for name, text in self._stamps.items())

    @property
    def _stamps(self) -> dict[str, str]:
        """The meaning of each field as text, except fields for which only the kind given by the name is stated."""
        said = {}
        for name, one in sorted(self.fields.items()):
            rest = replace(one, classes=(), origin="", kind="" if one.kind == kind_by_name(name) else one.kind)
            tokens = one.tokens and replace(TokenMeaning(), tokenizer=one.tokens.tokenizer)
            count = f"{len(one.classes)}.{_digest(list(one.classes))}" if one.classes else "0."
            more = _digest(_plain(replace(rest, tokens=tokens))) if rest != SchemaField() else ""
            if one.classes or more:
                said[name] = f"{count}.{more}"
        return said

    def continues(self, stamp: str) -> bool:
        """Return whether every number and id means the same as under an earlier stamp; classes may have been added."""
        now = self._stamps
        for part in stamp.split(", ") if stamp else ():
            name, _, text = part.rpartition(" ")
            count, digest, more = text.split(".")
            names = self.classes.get(name, ())[: int(count)]
            same = not int(count) or (len(names) == int(count) and _digest(list(names)) == digest)
            if name not in now or not same or now[name].split(".")[2] != more:
                return False
        return True

    def of_fields(self, names: Collection[str] | None) -> Self:
        """Return the schema of these fields, and of all columns; None: of all fields."""
        if names is None:
            return self
        kept = {name: one for name, one in self.fields.items() if name.partition(WITHIN)[0] in names}
        return replace(self, fields=kept)

    @property
    def late_fields(self) -> dict[str, str]:
        """The versions of the fields that were added after the shards were written, by name."""
        return {name: one.late_version for name, one in self.fields.items() if one.late_version}

    def without_late(self) -> Self:
        """Return the same schema without late columns and fields, which lie beside shards and stay there."""
        columns = {name: one for name, one in self.columns.items() if not one.is_late}
        return replace(self.without_late_fields(), columns=columns)

    def without_late_fields(self) -> Self:
        """Return the same schema without late fields."""
        return replace(self, fields={name: one for name, one in self.fields.items() if not one.late_version})

    def to_bytes(self, *, lives: bool = False) -> bytes:
        """Return ``schema.json``: sealed, the same bytes for the same schema.

        ``lives``: the set's chunk table says what it means; this file is a copy for people.
        """
        more = {LIVES: True} if lives else {}
        return write_document({"format": FORMAT, "version": VERSION, **self.as_dict(), **more})

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        return {
            "fields": {name: _plain(one) for name, one in self.fields.items()},
            "columns": {name: _plain(one) for name, one in self.columns.items()},
        }

    @classmethod
    def from_bytes(cls, data: Any, source: str) -> Schema:
        """Return the inverse of :meth:`to_bytes`. Members unknown to this release are ignored.

        Raises:
            IndexFormatError: It is damaged, was changed by hand, or is of another version.
        """
        try:
            return cls.from_dict(_of_this_version(read_document(data)))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise damaged(source, str(error), RESTORE) from error

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Schema:
        """Return the inverse of :meth:`as_dict`.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: ``content`` is not in this form.
        """
        return cls(
            fields={name: _field(one) for name, one in content["fields"].items()},
            columns={name: _column(one) for name, one in content["columns"].items()},
        )


def _of_this_version(content: dict[str, Any]) -> dict[str, Any]:
    if (content.get("format"), content.get("version")) != (FORMAT, VERSION):
        raise ValueError(f"format {content.get('format')!r}, version {content.get('version')!r}")
    return content


def is_copy(data: Any) -> bool:
    """Tell whether a ``schema.json`` that was read without complaint says that the chunk table counts."""
    return read_document(data).get(LIVES) is True


def class_schema(fields: Mapping[str, Any], columns: Mapping[str, Any] | None = None) -> Schema:
    """Return the schema of fields, and columns, of classes, given their names in the order of their numbers."""
    return Schema(
        fields={name: SchemaField(kind="integer", classes=tuple(names)) for name, names in fields.items()},
        columns={name: SchemaColumn(classes=tuple(names)) for name, names in (columns or {}).items()},
    )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def _plain(value: Any) -> Any:
    """Return the JSON-able form of a part of a schema, without empty values."""
    said = {one.name: getattr(value, one.name) for one in fields(value)}
    nested = {name: _plain(one) if isinstance(one, (TokenMeaning, TokenizerKey)) else one for name, one in said.items()}
    return {name: [*one] if isinstance(one, tuple) else one for name, one in nested.items() if one not in ("", (), 0)
            and one is not None}  # fmt: skip


def _field(said: Mapping[str, Any]) -> SchemaField:
    kind, dtype = _text(said, "kind"), _text(said, "dtype")
    if kind and kind not in KINDS:
        raise ValueError(f"kind {kind!r}")
    tokens = said.get("tokens")
    if tokens is not None and dtype not in TOKEN_TYPES:
        raise ValueError(f"tokens of type {dtype!r}")
    return SchemaField(
        kind=kind, dtype=dtype, classes=_names(said, "classes"), made_by=_texts(said, "made_by"),
        origin=_text(said, "origin"),
        tokens=None if tokens is None else _tokens(tokens),
    )  # fmt: skip


def _tokens(said: Mapping[str, Any]) -> TokenMeaning:
    made = said.get("tokenizer")
    tokenizer = made and TokenizerKey(**{name: _text(made, name) for name in ("kind", "sha256", "pattern")})
    size = said.get("vocab_size", 0)
    if not isinstance(size, int):
        raise TypeError(f"vocab_size {size!r}")
    return TokenMeaning(
        tokenizer=tokenizer, vocab_size=size, bos=_ids(said, "bos"), eos=_ids(said, "eos"),
        mask=_text(said, "mask"), column=_text(said, "column"), chat_templates=_texts(said, "chat_templates"),
        image=_ids(said, "image"), audio=_ids(said, "audio"),
    )  # fmt: skip


def _column(said: Mapping[str, Any]) -> SchemaColumn:
    return SchemaColumn(type=_text(said, "type"), origin=_text(said, "origin"), classes=_names(said, "classes"))


def _text(said: Mapping[str, Any], name: str) -> str:
    value = said.get(name, "")
    if not isinstance(value, str):
        raise TypeError(f"{name} {value!r}")
    return value


def _texts(said: Mapping[str, Any], name: str) -> tuple[str, ...]:
    values = said.get(name, [])
    if not isinstance(values, list) or not all(isinstance(one, str) for one in values):
        raise TypeError(f"{name} {values!r}")
    return tuple(values)


def _names(said: Mapping[str, Any], name: str) -> tuple[str, ...]:
    names = _texts(said, name)
    if len({*names}) < len(names):
        raise ValueError(f"{name}: one occurs twice")
    return names


def _ids(said: Mapping[str, Any], name: str) -> tuple[int, ...]:
    values = said.get(name, [])
    if not isinstance(values, list) or not all(isinstance(one, int) for one in values):
        raise TypeError(f"{name} {values!r}")
    return tuple(values)
