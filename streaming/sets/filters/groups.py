"""Group samples by the values of columns: the group of each sample, found in one pass by all ranks together.

Each rank reads the columns of a range of shards, once. All ranks exchange the distinct values and their counts; the
groups are a pure function of these, which each rank evaluates for itself. Then they exchange the groups of their
samples: a byte or two per sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from streaming.common.job.shared_results import Peers, framed, part_of, shared_parts, unframed
from streaming.common.threads import on_threads
from streaming.errors import ConfigError, IndexMissingError
from streaming.order.plan.ledger import filter_fingerprint
from streaming.sets.filters.late_columns import LateColumn
from streaming.sets.filters.select import column_reader, late_columns_of, late_names, reading_threads
from streaming.shards.catalog.open import OpenShards, digest_of
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.columns import (
    Values,
    count_values,
    labels_of,
    no_values,
    numbers_of,
    pack_counts,
    plain_values,
    there_of,
    unpack_counts,
)  # fmt: skip
from streaming.shards.index.selection import Member, SampleGroups
from streaming.shards.index.where import unknown_column
from streaming.storage import Storage, redact
from streaming.types import Int64Array

__all__ = [
    "MAX_GROUPS",
    "Codes",
    "Counted",
    "Grouping",
    "SampleGroups",
    "Values",
    "group_samples",
    "labels_of",
    "numbers_of",
]

MAX_GROUPS = 2**16 - 1
Codes = npt.NDArray[np.uint16]
"""The group of each sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """The values of a column over all samples of a dataset.

    Attributes:
        values: Distinct values, sorted; int64, float64, text or booleans.
        counts: int64 [n], occurrences of each value.
        num_missing: Samples without a value; NaN counts as missing.
        lacking: A shard with samples that lack a value, or "".
    """

    values: Values
    counts: Int64Array
    num_missing: int
    lacking: str


class Coding(Protocol):
    """The mapping of values to groups: a pure function of the counts of all ranks."""

    @property
    def num_groups(self) -> int:
        """Upper bound on the number of groups."""

    def codes(self, columns: Mapping[str, Values], num_rows: int) -> Codes:
        """Return the group of each row; ``num_groups`` or more means no group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """The group of every sample.

    Attributes:
        groups: The group of each sample.
        versions: Versions of the late columns that the groups were made from.
    """

    groups: SampleGroups
    versions: Mapping[str, str]

    def selected(self, number: int, base: str, name: str) -> Member:
        """Return one group of a dataset whose fingerprint is ``base``.

        The group's own fingerprint is a digest of ``base``, the group and all groups: a checkpoint holds one per group.
        """
        said = {f"column {column}": version for column, version in sorted(self.versions.items())}
        whole = filter_fingerprint(base, {"group": name, **said, "kept": self.groups.digest})
        return self.groups.selected(number, blake2b(whole.encode(), digest_size=8).hexdigest())


def group_samples(
    storage: Storage, shards: OpenShards, names: Sequence[str], *, option: str, peers: Peers | None,
    keeps: Callable[[int], npt.NDArray[np.bool_]], coding: Callable[[Mapping[str, Counted]], Coding],
) -> Grouping:  # fmt: skip
    """Return the group of each sample by the columns ``names``; with peers, each rank reads a part of the shards.

    Args:
        storage: Store of the index.
        shards: The shards.
        names: Names of columns, in the sample tables or late.
        option: The option that needs these columns, for messages.
        peers: The other ranks, or None.
        keeps: Returns a mask of the samples of a shard that are grouped; the others are in no group.
        coding: Makes groups from the counts; the same on every rank.

    Raises:
        IndexMissingError: There is no index, or a shard has no sample table.
        ConfigError: No shard has a column, or a column holds values of different kinds.
        IndexMismatchError: A late column does not belong to these shards.
    """
    table = shards.table
    if table is None:
        raise IndexMissingError(f"{option} needs an index; {shards.missing_index}")
    late = late_columns_of(storage, shards, names, peers)
    once = _OnePass(storage, shards, table, tuple(names), late, keeps)
    place = digest_of([list(shards.urls), shards.index, option, list(names)])
    counted = once.joined(shared_parts(peers, f"values/{place}", once.values), option)
    chosen = coding(counted)
    if chosen.num_groups > MAX_GROUPS:
        raise ConfigError(f"{option}: {chosen.num_groups:,} groups, but at most {MAX_GROUPS:,} are allowed")
    parts = shared_parts(peers, f"codes/{place}", partial(once.codes, coding=chosen))
    codes = np.concatenate([np.frombuffer(part, "<u2") for part in parts]).astype(np.uint16)
    groups = SampleGroups(table, codes, chosen.num_groups)
    return Grouping(groups=groups, versions={name: column.version for name, column in late.items()})


@dataclass(frozen=True)
class _OnePass:
    """Read columns shard by shard, and keep those of this rank's shards until their groups are known."""

    storage: Storage
    shards: OpenShards
    table: ChunkTable
    names: tuple[str, ...]
    late: Mapping[str, LateColumn]
    keeps: Callable[[int], npt.NDArray[np.bool_]]

    def __post_init__(self) -> None:
        reader = column_reader(self.storage, self.shards, self.table, self.names, self.late)
        object.__setattr__(self, "_read", reader)
        object.__setattr__(self, "_known", {})

    def values(self, rank: int, world_size: int) -> bytes:
        """Return the distinct values and counts of each column in one rank's shards, for :meth:`joined`."""
        mine = part_of(len(self.table.shards), rank, world_size)
        found = on_threads(self._shard, mine, reading_threads(self.shards), name="shardstream-groups")
        head: dict[str, object] = {"there": sorted({name for _, there in found for name in there})}
        body = []
        for name in self.names:
            is_there = any(name in columns for columns, _ in found)
            kept, lacking, num_missing = [], "", 0
            for shard, (columns, _) in zip(mine, found, strict=True):
                mask = self.keeps(shard)
                values = there_of(columns.get(name, no_values(len(mask))), mask)
                missing = int(mask.sum()) - len(values)
                num_missing += missing
                lacking = lacking or (redact(self.shards.urls[shard]) if missing else "")
                kept.append(values)
            head[name] = {"found": is_there, "missing": num_missing, "lacking": lacking}
            body.append(pack_counts(*count_values([(one, None) for one in kept], name)))
        return framed({**head, "sizes": [len(one) for one in body]}, *body)

    def joined(self, parts: Sequence[bytes], option: str) -> dict[str, Counted]:
        """Combine the counts of all ranks.

        Raises:
            ConfigError: No shard has one of the columns.
        """
        heads, bodies = [], []
        for part in parts:
            head, at = unframed(part)
            ends = np.cumsum([at, *head["sizes"]]).tolist()
            heads.append(head)
            bodies.append([part[low:high] for low, high in pairwise(ends)])
        made = {}
        for number, name in enumerate(self.names):
            if not any(head[name]["found"] for head in heads):
                there = {column for head in heads for column in head["there"]}
                raise unknown_column(name, {*there, *late_names(self.storage, self.shards)}, option)
            values, counts = count_values([unpack_counts(body[number]) for body in bodies], name)
            made[name] = Counted(
                values=values,
                counts=counts,
                num_missing=sum(head[name]["missing"] for head in heads),
                lacking=next((head[name]["lacking"] for head in heads if head[name]["lacking"]), ""),
            )
        return made

    def codes(self, rank: int, world_size: int, coding: Coding) -> bytes:
        """Return the group of each sample in one rank's shards, as little-endian uint16."""
        found = []
        for shard in part_of(len(self.table.shards), rank, world_size):
            columns, _ = self._shard(shard)
            num_rows = self.table.shards[shard].num_samples
            given = {name: columns.get(name, no_values(num_rows)) for name in self.names}
            codes = np.where(self.keeps(shard), coding.codes(given, num_rows), coding.num_groups)
            found.append(np.minimum(codes, coding.num_groups).astype("<u2").tobytes())
        return b"".join(found)

    def _shard(self, shard: int) -> tuple[dict[str, Values], list[str]]:
        known: dict[int, tuple[dict[str, Values], list[str]]] = self._known  # type: ignore[attr-defined]
        if shard not in known:
            columns, there = self._read(shard)  # type: ignore[attr-defined]
            known[shard] = {name: plain_values(columns[name]) for name in self.names if name in columns}, there
        return known[shard]
