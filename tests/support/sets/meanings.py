"""Read and change what a set says that it means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from streaming.shards.schema.value import Schema

SCHEMA = Path("_shardstream/schema.json")


def schema_of(folder: Path | str) -> Schema:
    path = Path(folder) / SCHEMA
    return Schema.from_bytes(path.read_bytes(), str(path))


def say(folder: Path | str, schema: Schema) -> None:
    (Path(folder) / SCHEMA).write_bytes(schema.to_bytes())


def say_of(folder: Path | str, name: str, **facets: Any) -> None:
    """Change what a set says of one field."""
    schema = schema_of(folder)
    say(folder, replace(schema, fields={**schema.fields, name: replace(schema.fields[name], **facets)}))


def classes_of(folder: Path | str, name: str = "cls") -> list[str]:
    return [*schema_of(folder).classes[name]]


def say_classes(folder: Path | str, names: Mapping[str, Sequence[str]]) -> None:
    for name, listed in names.items():
        say_of(folder, name, classes=tuple(listed))
