"""Report to programs the result of a verb, and the findings of a check: one value per broken promise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from streaming.errors import visible
from streaming.storage import redact, redact_text


def plain(text: str) -> str:
    """Put ``text`` from data on one line, and make control characters visible that could steer a terminal."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def plain_place(url: str) -> str:
    """Return a URL or path for a terminal: without secrets, on one line, control characters visible."""
    return plain(redact(url))


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The report of a verb. ``--json`` prints its fields."""

    def as_dict(self) -> dict[str, object]:
        """Return the JSON-able form: URLs without secrets, seconds in thousandths; with findings also ``ok``."""
        values = {item.name: _jsonable(getattr(self, item.name)) for item in fields(self)}
        if "findings" not in values:
            return values
        findings = values.pop("findings")  # last, because it is the longest
        return {"ok": not findings, **values, "findings": findings}


def _jsonable(value: object) -> object:
    if hasattr(value, "as_dict"):
        return value.as_dict()
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, (tuple, list)):
        return [_jsonable(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _jsonable(item) for key, item in value.items()}
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding(Report):
    """One broken promise; in JSON, inapplicable attributes are null.

    Attributes:
        kind: A short name of the kind of damage, stable for programs: ``missing``, ``size``, ``checksum``, ``tar``,
            ``samples``, ``keys``, ``duplicate``, ``fields``, ``decode``, ``tail``, ``index``, ``unindexed``,
            ``unfinished``, ``read``, ``schema``, ``late`` (of a late field).
        shard: URL of the shard.
        what: What is wrong.
        cure: What to do about it.
        byte_start: Where the damage begins in the shard, if it has a position.
        byte_end: Where it ends, exclusive.
        key: The sample, if it concerns one.
        expected: Value promised by the index.
        got: Actual value.
    """

    kind: str
    shard: str
    what: str
    cure: str
    byte_start: int | None = None
    byte_end: int | None = None
    key: str | None = None
    expected: str | None = None
    got: str | None = None

    def __str__(self) -> str:
        where = self.shard
        if self.byte_start is not None:
            where += f", bytes {self.byte_start}-{'' if self.byte_end is None else self.byte_end}"
        if self.key is not None:
            where += f", sample {self.key!r}"
        compared = "" if self.expected is None else f" (expected {self.expected}, got {self.got})"
        return redact_text(f"{where}: {self.what}{compared}; {self.cure}")
