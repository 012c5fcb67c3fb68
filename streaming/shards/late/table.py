"""Hold where a late field is: the chunk table of its tars, and the shards that these go with (``docs/format.md``)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.files import FIELD_KIND, content_errors
from streaming.shards.index.layout import checked_name

ABSENT = "absent"
"""The field that a sample without a value has in such a tar, so that the tar has all keys of its shard."""


class OfShard(NamedTuple):
    """The shard that a tar of a late field goes with.

    Attributes:
        name: Its name.
        fingerprint: That of its chunk table alone.
        num_missing: How many of its samples have no value.
    """

    name: str
    fingerprint: str
    num_missing: int


@dataclass(frozen=True, kw_only=True, eq=False)
class LateTable:
    """One version of a late field of the set in one directory.

    Attributes:
        name: The field.
        work: Identifies how its values were made; part of the tars' paths.
        how: Identifies everything that determines them; the same after they were all made again.
        made_from: Where the values came from, for people.
        chunks: The chunks of its tars.
        shards: The shard that each tar goes with.
    """

    name: str
    work: str
    how: str
    made_from: str
    chunks: ChunkTable
    shards: tuple[OfShard, ...]

    @cached_property
    def version(self) -> str:
        """Distinguishes it from every other content that a field of this name ever had."""
        said = json.dumps([self._facts, self.chunks.fingerprint], sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()[:16]

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        """The number of the tar that goes with each shard, by the shard's name."""
        return {one.name: number for number, one in enumerate(self.shards)}

    @cached_property
    def fingerprints(self) -> Mapping[str, str]:
        """The fingerprint of each shard that it has values of, by the shard's name."""
        return {one.name: one.fingerprint for one in self.shards}

    @property
    def num_missing(self) -> int:
        """How many samples have no value."""
        return sum(one.num_missing for one in self.shards)

    @property
    def num_bytes(self) -> int:
        """Bytes of all its tars."""
        return sum(tar.size_bytes for tar in self.chunks.shards)

    def lacking(self, table: ChunkTable) -> list[str]:
        """Return the shards of a chunk table that it has no values of, or those of another content."""
        known = self.fingerprints
        return [name for name, rows in table.by_shard().items() if known.get(name) != rows.fingerprint]

    @property
    def _facts(self) -> dict[str, Any]:
        return {
            "field": self.name, "work": self.work, "how": self.how, "made_from": self.made_from,
            "of": [[*one] for one in self.shards],
        }  # fmt: skip

    def to_parquet(self) -> bytes:
        """Return the table as the bytes of a file."""
        return self.chunks.to_parquet(kind=FIELD_KIND, more=self._facts)

    @classmethod
    def from_parquet(cls, buffer: Any, source: str) -> LateTable:
        """Return the inverse of :meth:`to_parquet`.

        Raises:
            IndexFormatError: The bytes are damaged, not such a table, or of a newer major version.
        """
        chunks, facts = ChunkTable.with_facts(buffer, FIELD_KIND, source)
        with content_errors(source, "not the table of a late field"):
            shards = tuple(
                OfShard(str(name), str(fingerprint), int(num_missing)) for name, fingerprint, num_missing in facts["of"]
            )
            if len(shards) != len(chunks.shards):
                raise ValueError(f"{len(chunks.shards)} tars for {len(shards)} shards")
            return cls(
                name=checked_name(facts["field"], "field"), work=_checked_work(facts["work"]), how=str(facts["how"]),
                made_from=str(facts["made_from"]), chunks=chunks, shards=shards,
            )  # fmt: skip


def tar_name(shard: str, fingerprint: str) -> str:
    """Return the name of the tar that goes with a shard: another content of the shard has another one."""
    return f"{shard.removesuffix('.tar')}-{fingerprint[:8]}.tar"


def _checked_work(work: Any) -> str:
    """Return what identifies how values were made, which becomes a part of paths; ValueError if it is none."""
    if not isinstance(work, str) or not work.isalnum():
        raise ValueError(f"work {str(work)[:40]!r}")
    return work
