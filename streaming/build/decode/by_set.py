"""Decode a field of several sets that are read as one, whose numbers differ in width or in meaning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streaming.types import Decoder, ReadBuffer


@dataclass(frozen=True, slots=True, kw_only=True, eq=True)
class BySet:
    """The decoders of a field, one for each set; :func:`of_shard` chooses.

    Attributes:
        decoders: Decoders by the directory of the set's shards, in the form shown in messages.
        otherwise: Decoder for all other shards.
    """

    decoders: Mapping[str, Decoder]
    otherwise: Decoder

    accepts_buffer = True

    def of_shard(self, url: str) -> Decoder:
        """Return the decoder for a sample of the shard with the shown URL ``url``."""
        return self.decoders.get(url.rpartition("/")[0], self.otherwise)

    def __call__(self, data: ReadBuffer) -> object:  # noqa: ARG002  as decoders have it
        """Raise an error, because the set is unknown here.

        Raises:
            TypeError: Always.
        """
        raise TypeError("a decoder by set needs the shard; ask of_shard() for that of its set")


def of_shard(decoder: Decoder, url: str) -> Decoder:
    """Return the decoder of a field for a sample of the shard with the shown URL ``url``."""
    return decoder.of_shard(url) if isinstance(decoder, BySet) else decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Renumbered:
    """Decode class numbers, and translate them.

    Attributes:
        below: Decodes the stored field.
        tables: New number of each class number, by the path of the numbers in the value; ``""``: the value itself is a
            number.
    """

    below: Decoder
    tables: Mapping[str, tuple[int, ...]]

    accepts_buffer = True

    def __call__(self, data: ReadBuffer) -> object:
        """Return the value with translated numbers; negative ones, which are no class, stay.

        Raises:
            ValueError: A number is beyond the classes of its set.
        """
        value: Any = self.below(data)
        for path, table in self.tables.items():
            value = renumbered(value, path.split(".") if path else [], table)
        return value


def renumbered(value: Any, path: list[str], table: tuple[int, ...]) -> Any:
    """Return a value in which the numbers at a path are translated; the path continues into each item of a list."""
    if isinstance(value, list):
        return [renumbered(one, path, table) for one in value]
    if path:
        if isinstance(value, dict) and path[0] in value:
            value[path[0]] = renumbered(value[path[0]], path[1:], table)
        return value
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        return value
    if value >= len(table):
        raise ValueError(f"class {value}, but its set has only {len(table)} classes")
    return table[value]
