"""Compare sets by their shards first: samples of equal shards need no comparison."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shard_tools.change.sets.open_set import READ_THREADS
from shard_tools.look.diff.match import differing
from shard_tools.look.diff.sides import IndexedSide, Side
from shard_tools.running.report import Report
from streaming.common.threads import map_threads
from streaming.shards.index.sample_table import columns_from_footer


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardChanges(Report):
    """The differences of the shards of two sets, by name and by the digests in the indexes.

    Attributes:
        only_a: Names of shards that only A has.
        only_b: Names of shards that only B has.
        replaced: Names of shards whose bytes differ; without an index, whose sizes differ.
        same: Number of shards with the same bytes, whatever their names; 0 if a set has no index.
        reordered: Whether shards of the same names come in another order.
    """

    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    replaced: tuple[str, ...]
    same: int
    reordered: bool

    @property
    def is_none(self) -> bool:
        """Whether there are no differences."""
        return not (self.only_a or self.only_b or self.replaced or self.reordered)


def shard_changes(a: Side, b: Side, num_same: int) -> ShardChanges:
    """Compare the names, bytes and order of the shards of two sets."""
    facts_a: dict[str, object] = dict(zip(a.names, a.sizes, strict=True))
    facts_b: dict[str, object] = dict(zip(b.names, b.sizes, strict=True))
    if isinstance(a, IndexedSide) and isinstance(b, IndexedSide):
        facts_a = dict(zip(a.names, a.digests, strict=True))
        facts_b = dict(zip(b.names, b.digests, strict=True))
    return ShardChanges(
        only_a=tuple(name for name in a.names if name not in facts_b),
        only_b=tuple(name for name in b.names if name not in facts_a),
        replaced=tuple(name for name in a.names if facts_b.get(name, facts_a[name]) != facts_a[name]),
        same=num_same,
        reordered=[name for name in a.names if name in facts_b] != [name for name in b.names if name in facts_a],
    )


def equal_shards(a: IndexedSide, b: IndexedSide) -> list[tuple[int, int]]:
    """Return pairs of shards with the same bytes, preferring equal names; each shard is in at most one pair."""
    taken: set[int] = set()
    pairs: dict[int, int] = {}
    for is_named in (True, False):
        there: dict[tuple[str, str], list[int]] = defaultdict(list)
        for position in reversed(range(len(b.urls))):
            if position not in taken:
                there[b.digests[position], b.names[position] if is_named else ""].append(position)
        for position in range(len(a.urls)):
            found = there[a.digests[position], a.names[position] if is_named else ""] if position not in pairs else []
            if found:
                pairs[position] = found.pop()
                taken.add(pairs[position])
    return sorted(pairs.items())


@dataclass(slots=True)
class ColumnTally:
    """The columns of two sets, and the number of samples whose values differ."""

    names: tuple[set[str], set[str]] = field(default_factory=lambda: (set(), set()))
    differing: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnChanges(Report):
    """Columns (late ones included) that only one set has, and the number of samples with changed values by column."""

    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    changed: dict[str, int]

    @property
    def is_none(self) -> bool:
        """Whether there are no differences."""
        return not (self.only_a or self.only_b or self.changed)

    @classmethod
    def of(cls, tally: ColumnTally) -> ColumnChanges:
        """Return the changes in a tally; a column that one set lacks does not count as changed."""
        a, b = tally.names
        return cls(
            only_a=tuple(sorted(a - b)),
            only_b=tuple(sorted(b - a)),
            changed={name: count for name, count in sorted(tally.differing.items()) if count and name in a & b},
        )


def late_to_read(a: Side, b: Side) -> tuple[list[str], list[str]]:
    """Return the late columns of each set to compare: all but those with the same version in both."""
    same = {name for name, column in a.late.items() if name in b.late and b.late[name].version == column.version}
    return sorted(a.late.keys() - same), sorted(b.late.keys() - same)


def tally_columns(
    sides: tuple[IndexedSide, IndexedSide], pairs: Sequence[tuple[int, int]], late: tuple[list[str], list[str]],
    tally: ColumnTally, done: Callable[[], None],
) -> None:  # fmt: skip
    """Compare the columns of equal shards, row by row; sample tables that are the same file are not read.

    Args:
        sides: The two sets.
        pairs: Their equal shards.
        late: The late columns of each set to compare.
        tally: Receives names and counts.
        done: Called for each pair.
    """

    def compare(pair: tuple[int, int]) -> tuple[list[set[str]], Counter[str]]:
        tails = [side.footer(position) for side, position in zip(sides, pair, strict=True)]
        if tails[0] == tails[1] and not any(late):
            names = set(columns_from_footer(tails[0], sides[0].names[pair[0]])) if tails[0] is not None else set()
            return [names, names], Counter()
        values = [
            side.values(position, None if tail is None else side.table(position), wanted)
            for side, position, tail, wanted in zip(sides, pair, tails, late, strict=True)
        ]
        counts = {name: int(differing(values[0][name], values[1][name]).sum()) for name in values[0].keys() & values[1]}
        return [{*values[0]}, {*values[1]}], Counter(counts)

    for names, counts in map_threads(compare, pairs, READ_THREADS):
        for known, found in zip(tally.names, names, strict=True):
            known.update(found)
        tally.differing.update(counts)
        done()
