"""Tell programs what a verb did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from streaming.storage import redact_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Tell what a verb did. The fields of a report are what ``--json`` prints."""

    def as_dict(self) -> dict[str, object]:
        """Give the JSON-able form: URLs without secrets, seconds in thousandths; with findings also ``ok``."""
        told = {item.name: _jsonable(getattr(self, item.name)) for item in fields(self)}
        if "findings" not in told:
            return told
        findings = told.pop("findings")  # the longest: last
        return {"ok": not findings, **told, "findings": findings}


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
