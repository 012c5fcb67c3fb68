"""Compare the rows of two sets by key: equal, changed, or undecided.

If a key occurs several times, samples with the same content are paired first, then the others in the order of their
sets; samples left without a partner are in one set only.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shard_tools.look.diff.rows import (
    AT,
    COLUMN,
    KEY,
    SIZE,
    SUM,
    Mask,
    columns_of,
    fields_of,
    is_exact,
    numbers_of,
)
from streaming.shards.index.where import compared_exactly
from streaming.types import Int64Array

_Content: TypeAlias = "tuple[tuple[str, int, int], ...]"
"""Field, size and sum of each field of a sample."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Changes:
    """Pairs of rows whose content differs, and per field a mask of the pairs that differ in it."""

    rows: Int64Array
    fields: Mapping[str, Mask]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Matched:
    """Result for the rows of one part; rows are numbers in the two tables.

    Attributes:
        only: Rows of each table without a partner.
        num_same: Pairs with the same content.
        changes: Pairs whose content differs.
        unknown: Rows of each table that only bytes can decide.
        pairs: The undecided rows whose key occurs once in each table, side by side: int64 ``[2, m]``.
        columns: By column, the number of pairs of keys that occur once in each table and have different values.
        num_repeated: Number of rows of each table whose key occurs more than once in it.
    """

    only: tuple[Int64Array, Int64Array]
    num_same: int
    changes: Changes
    unknown: tuple[Int64Array, Int64Array]
    pairs: Int64Array
    columns: Mapping[str, int]
    num_repeated: tuple[int, int]


def match(a: pa.Table, b: pa.Table) -> Matched:
    """Compare the rows of two tables, which together hold all rows of their keys."""
    codes_a, codes_b, num_keys = _codes(a, b)
    counts_a, counts_b = (np.bincount(codes, minlength=num_keys) for codes in (codes_a, codes_b))
    singles = (counts_a == 1) & (counts_b == 1)
    row_of = np.empty(num_keys, np.int64)
    row_of[codes_b] = np.arange(codes_b.size)
    rows_a = np.flatnonzero(singles[codes_a])
    pairs = np.stack([rows_a, row_of[codes_a[rows_a]]])
    differs, unknown = _compared(a, b, pairs)
    changed = np.logical_or.reduce([*differs.values(), np.zeros(rows_a.size, np.bool_)]) & ~unknown
    several = _Several()
    shared = (counts_a > 0) & (counts_b > 0) & ~singles
    if shared.any():
        several.match_all(_groups(a, codes_a, shared), _groups(b, codes_b, shared))
    only = [
        np.concatenate([np.flatnonzero(others[codes] == 0), left]).astype(np.int64)
        for codes, others, left in ((codes_a, counts_b, several.only_a), (codes_b, counts_a, several.only_b))
    ]
    return Matched(
        only=(only[0], only[1]),
        num_same=int((~changed & ~unknown).sum()) + several.num_same,
        changes=_joined_changes(pairs[0][changed], {name: mask[changed] for name, mask in differs.items()}, several),
        unknown=(
            np.concatenate([pairs[0][unknown], np.array(several.unknown_a, np.int64)]),
            np.concatenate([pairs[1][unknown], np.array(several.unknown_b, np.int64)]),
        ),
        pairs=pairs[:, unknown],
        columns=_columns(a, b, pairs),
        num_repeated=(int(counts_a[counts_a > 1].sum()), int(counts_b[counts_b > 1].sum())),
    )


def _codes(a: pa.Table, b: pa.Table) -> tuple[Int64Array, Int64Array, int]:
    """Return a number per row, equal for equal keys, and the number of distinct keys."""
    keys = pa.chunked_array([*a.column(KEY).chunks, *b.column(KEY).chunks], pa.large_binary()).combine_chunks()
    encoded = keys.dictionary_encode()
    codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    return codes[: a.num_rows], codes[a.num_rows :], len(encoded.dictionary)


def _compared(a: pa.Table, b: pa.Table, pairs: Int64Array) -> tuple[dict[str, Mask], Mask]:
    """Return a mask per field of the pairs that surely differ in it, and a mask of the undecided pairs."""
    differs: dict[str, Mask] = {}
    unknown = np.zeros(pairs.shape[1], np.bool_)
    for name in fields_of(a, b):
        size_a, size_b = numbers_of(a, SIZE + name, pairs[0]), numbers_of(b, SIZE + name, pairs[1])
        sum_a, sum_b = numbers_of(a, SUM + name, pairs[0]), numbers_of(b, SUM + name, pairs[1])
        different = (size_a != size_b) | (is_exact(sum_a) & is_exact(sum_b) & (sum_a != sum_b))
        differs[name] = different
        unknown |= ~different & (sum_a != sum_b)
    return differs, unknown


def _columns(a: pa.Table, b: pa.Table, pairs: Int64Array) -> dict[str, int]:
    """Count the pairs whose values differ, for each column of both tables."""
    found = {}
    for name in sorted({*columns_of(a)} & {*columns_of(b)}):
        values = (table.column(COLUMN + name).take(pa.array(rows)) for table, rows in zip((a, b), pairs, strict=True))
        found[name] = int(differing(*(one.combine_chunks() for one in values)).sum())
    return found


def differing(a: pa.Array, b: pa.Array) -> Mask:
    """Return a mask of differing values. Missing values equal each other, NaN equals NaN, and 1 equals 1.0."""
    missing = [one.is_null().to_numpy(zero_copy_only=False) for one in (a, b)]
    there = ~(missing[0] | missing[1])
    if there.any():
        there &= _unequal(a, b).fill_null(fill_value=False).to_numpy(zero_copy_only=False)
    if pa.types.is_floating(a.type) and pa.types.is_floating(b.type):
        nans = [pc.is_nan(one).fill_null(fill_value=False).to_numpy(zero_copy_only=False) for one in (a, b)]
        there &= ~(nans[0] & nans[1])
    return np.asarray(there | (missing[0] != missing[1]), np.bool_)


def _unequal(a: pa.Array, b: pa.Array) -> pa.Array:
    """Compare values; numbers of different types compare exactly, other values of different types as text."""
    floats = [pa.types.is_floating(one.type) for one in (a, b)]
    if a.type == b.type or all(floats):
        return pc.not_equal(a, b)
    if not all(pa.types.is_integer(one.type) or is_float for one, is_float in zip((a, b), floats, strict=True)):
        return pc.not_equal(a.cast(pa.large_string()), b.cast(pa.large_string()))
    if not any(floats):
        wide = pa.decimal128(20, 0)
        return pc.not_equal(a.cast(wide), b.cast(wide))
    whole, real = (b, a) if floats[0] else (a, b)
    kind = pa.uint64() if whole.type == pa.uint64() else pa.int64()
    return compared_exactly("!=", whole.cast(kind), real.cast(pa.float64()), kind)


@dataclass(frozen=True, slots=True)
class _Copy:
    """One of several rows with the same key: its number in its table and in its set, and its content."""

    row: int
    at: int
    content: _Content


def _groups(table: pa.Table, codes: Int64Array, wanted: Mask) -> dict[int, list[_Copy]]:
    """Return the rows of the wanted keys by key, each list in the order of its set."""
    rows = np.flatnonzero(wanted[codes])
    ats = numbers_of(table, AT, rows)
    names = fields_of(table)
    content = [
        list(zip(*(numbers_of(table, prefix + name, rows).tolist() for prefix in (SIZE, SUM)), strict=True))
        for name in names
    ]
    found: dict[int, list[_Copy]] = defaultdict(list)
    for place in np.argsort(ats, kind="stable").tolist():
        there = tuple((name, *one[place]) for name, one in zip(names, content, strict=True) if one[place][0] >= 0)
        found[int(codes[rows[place]])].append(_Copy(int(rows[place]), int(ats[place]), there))
    return found


@dataclass(slots=True)
class _Several:
    """Compare rows with repeated keys, key by key."""

    num_same: int = 0
    only_a: list[int] = field(default_factory=list)
    only_b: list[int] = field(default_factory=list)
    unknown_a: list[int] = field(default_factory=list)
    unknown_b: list[int] = field(default_factory=list)
    changed: list[tuple[int, frozenset[str]]] = field(default_factory=list)

    def match_all(self, a: Mapping[int, list[_Copy]], b: Mapping[int, list[_Copy]]) -> None:
        """Compare the copies of every key."""
        for code, copies_a in a.items():
            self._match_key(copies_a, b[code])

    def _match_key(self, a: list[_Copy], b: list[_Copy]) -> None:
        same = Counter(one.content for one in a) & Counter(one.content for one in b)
        self.num_same += same.total()
        a, b = _left(a, same), _left(b, same)
        if a and b and not all(_known(one) for one in (*a, *b)):
            self.unknown_a += [one.row for one in a]
            self.unknown_b += [one.row for one in b]
            return
        for one, other in zip(a, b, strict=False):
            self.changed.append((one.row, frozenset(name for name, *_ in {*one.content} ^ {*other.content})))
        self.only_a += [one.row for one in a[len(b) :]]
        self.only_b += [one.row for one in b[len(a) :]]


def _left(copies: list[_Copy], same: Counter[_Content]) -> list[_Copy]:
    """Return the unmatched copies, dropping the first ones of each matched content."""
    taken: Counter[_Content] = Counter()
    left = []
    for one in copies:
        if taken[one.content] < same[one.content]:
            taken[one.content] += 1
        else:
            left.append(one)
    return left


def _known(copy: _Copy) -> bool:
    """Return whether the checksums of all its fields are known."""
    return bool(is_exact(np.array([found for _, _, found in copy.content], np.int64)).all())


def _joined_changes(rows: Int64Array, fields: Mapping[str, Mask], several: _Several) -> Changes:
    """Return the changed pairs: those of unique keys, then those of repeated keys."""
    more = [names for _, names in several.changed]
    return Changes(
        rows=np.concatenate([rows, np.array([row for row, _ in several.changed], np.int64)]),
        fields={
            name: np.concatenate([mask, np.array([name in names for names in more], np.bool_)])
            for name, mask in fields.items()
        },
    )
