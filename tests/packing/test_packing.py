"""Packs: every token once or counted, no pack too long, those of best-fit-decreasing, K from lengths alone."""

from __future__ import annotations

import hashlib
import json
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streaming.errors import ConfigError
from streaming.order.packing import several_budgets
from streaming.order.packing.fit import fit, other_company, pack
from streaming.order.packing.rules import PackRules, Packs
from streaming.order.plan.permutation import hash_range
from tests.support.code.folders import GOLDEN


@st.composite
def rules_of_all_kinds(draw: st.DrawFn) -> PackRules:
    multiple = draw(st.sampled_from([1, 1, 2, 8]))
    length = multiple * draw(st.integers(1, 24))
    overlong = draw(st.sampled_from(["split", "split", "truncate", "drop"]))
    return PackRules(
        length=length,
        overlong=overlong,
        stride=draw(st.none() | st.integers(1, length)) if overlong == "split" else None,
        multiple=multiple,
        max_docs=draw(st.sampled_from([None, None, 1, 2, 5])),
        padded=draw(st.booleans()),
    )


@st.composite
def groups(draw: st.DrawFn) -> tuple[np.ndarray, PackRules]:
    rules = draw(rules_of_all_kinds())
    most = rules.length
    marks = st.sampled_from([0, 1, most, most + 1, 10 * most])
    lengths = draw(st.lists(st.one_of(marks, st.integers(0, most), st.integers(0, 3 * most)), max_size=40))
    return np.array(lengths, np.int64), rules


def listed(packs: Packs) -> list[list[tuple[int, int, int]]]:
    pieces = list(zip(packs.documents.tolist(), packs.starts.tolist(), packs.stops.tolist(), strict=True))
    return [pieces[start:stop] for start, stop in zip(packs.splits, packs.splits[1:], strict=False)]


def best_fit_by_hand(lengths: np.ndarray, rules: PackRules) -> list[list[tuple[int, int, int]]]:
    """The definition, one piece after the other."""
    most = rules.length
    pieces = []
    for document, length in enumerate(lengths.tolist()):
        kept = length if rules.overlong == "split" else min(length, most) if rules.overlong == "truncate" else length
        if rules.overlong == "drop" and length > most:
            continue
        starts = range(0, max(1, kept - most + (rules.stride or most)), rules.stride or most) if kept else []
        pieces += [(document, start, min(start + most, kept)) for start in starts]

    def size(piece: tuple[int, int, int]) -> int:
        return -(-(piece[2] - piece[1]) // rules.multiple) * rules.multiple

    packs: list[list[tuple[int, int, int]]] = []
    for piece in sorted(pieces, key=size, reverse=True):
        if rules.padded:
            n = len(packs[-1]) + 1 if packs else 0
            if packs and n * size(packs[-1][0]) <= most and n <= (rules.max_docs or n):
                packs[-1].append(piece)
            else:
                packs.append([piece])
            continue
        rooms = [
            (most - sum(map(size, one)), (rules.max_docs or 0) - len(one) if rules.max_docs else 0, number)
            for number, one in enumerate(packs)
            if sum(map(size, one)) + size(piece) <= most and len(one) < (rules.max_docs or 10**9)
        ]
        if rooms:
            packs[min(rooms)[2]].append(piece)
        else:
            packs.append([piece])
    return packs


@settings(deadline=None)
@given(groups())
def test_packs_are_those_of_best_fit_decreasing(group: tuple[np.ndarray, PackRules]) -> None:
    lengths, rules = group
    packs = pack(lengths, rules)
    assert listed(packs) == best_fit_by_hand(lengths, rules)
    assert fit(lengths, rules).num_packs == len(packs)


def best_fit_of_several(lengths: np.ndarray, rules: PackRules) -> list[list[int]]:
    """The same with several budgets: room is the sum of the shares that are left of them."""
    budgets = [rules.length, *rules.budgets]
    rows = lengths.tolist()
    most = rules.max_docs or len(rows)

    def share(row: list[int]) -> int:
        return sum(one * (2**40 // max(budget, 1)) for one, budget in zip(row, budgets, strict=True))

    def fits(documents: list[int]) -> bool:
        columns = zip(*(rows[one] for one in documents), strict=True)
        taken = [max(one) * len(documents) if rules.padded else sum(one) for one in columns]
        return len(documents) <= most and all(one <= budget for one, budget in zip(taken, budgets, strict=True))

    packs: list[list[int]] = []
    there = [number for number, row in enumerate(rows) if row[0] and fits([number])]
    for document in sorted(there, key=lambda one: -rows[one][0] if rules.padded else -share(rows[one])):
        known = packs[-1:] if rules.padded else packs
        open_packs = [one for one in known if fits([*one, document])]
        if open_packs:
            max(open_packs, key=lambda one: sum(share(rows[other]) for other in one)).append(document)
        else:
            packs.append([document])
    return packs


@settings(deadline=None)
@given(groups(), st.integers(0, 2**64 - 1), st.integers(0, 9), st.integers(0, 9))
def test_every_token_is_in_one_pack_or_counted(
    group: tuple[np.ndarray, PackRules], seed: int, epoch: int, number: int
) -> None:
    lengths, rules = group
    first = pack(lengths, rules)
    for packs in (first, other_company(first, seed=seed, epoch=epoch, group=number)):
        tokens = [(d, t) for d, start, stop in zip(packs.documents, packs.fresh, packs.stops, strict=True)
                  for t in range(start, stop)]  # fmt: skip
        assert len(set(tokens)) == len(tokens) == packs.num_tokens - (packs.fresh - packs.starts).sum()
        if rules.stride is None:
            assert np.array_equal(packs.fresh, packs.starts)
        over = lengths > rules.length
        if rules.overlong == "split":
            kept = lengths
        elif rules.overlong == "truncate":
            kept = np.minimum(lengths, rules.length)
        else:
            kept = np.where(over, 0, lengths)
        assert set(tokens) == {(d, t) for d, length in enumerate(kept.tolist()) for t in range(length)}
        found = {"split": packs.num_split, "truncate": packs.num_truncated, "drop": packs.num_dropped}
        assert found == {**dict.fromkeys(found, 0), rules.overlong: int(over.sum())}
        assert packs.num_empty == int((lengths == 0).sum())
        assert np.all(np.diff(packs.splits) > 0)
        assert np.all(packs.sizes <= rules.length)
        tokens = np.add.reduceat(packs.lengths, packs.splits[:-1]) if len(packs) else np.zeros(0)
        assert np.all(tokens <= packs.sizes)
        assert rules.max_docs is None or np.diff(packs.splits).max(initial=0) <= rules.max_docs


@settings(deadline=None)
@given(groups(), st.integers(0, 2**64 - 1), st.integers(0, 9))
def test_another_epoch_has_the_same_packs_of_lengths(
    group: tuple[np.ndarray, PackRules], seed: int, epoch: int
) -> None:
    lengths, rules = group
    first = pack(lengths, rules)
    other = other_company(first, seed=seed, epoch=epoch, group=3)

    def shapes(packs: Packs) -> list[list[int]]:
        return [sorted(-(-(stop - start) // rules.multiple) for _, start, stop in one) for one in listed(packs)]

    assert shapes(other) == shapes(first)
    assert np.array_equal(other.splits, first.splits)
    assert listed(other) == listed(other_company(first, seed=seed, epoch=epoch, group=3))


def test_windows_overlap_by_length_less_stride() -> None:
    packs = pack(np.array([10, 4, 5]), PackRules(length=4, stride=3))
    pieces = sorted(zip(packs.documents.tolist(), packs.starts.tolist(), packs.stops.tolist(), packs.fresh.tolist()))  # noqa: B905
    assert pieces == [(0, 0, 4, 0), (0, 3, 7, 4), (0, 6, 10, 7), (1, 0, 4, 0), (2, 0, 4, 0), (2, 3, 5, 4)]
    assert (packs.num_split, packs.num_tokens) == (2, 22)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 2), st.integers(0, 1)), max_size=40),
    st.sampled_from([None, 1, 3]),
    st.integers(0, 5),
)
def test_packs_of_like_pieces_are_those_of_each_kind_alone(
    rows: list[tuple[int, ...]], max_docs: int | None, epoch: int
) -> None:
    lengths = np.array(rows, np.int64).reshape(-1, 3)
    options: dict[str, Any] = {"length": 10, "overlong": "drop", "max_docs": max_docs, "padded": True}
    rules = PackRules(**options, alike=2)
    packs = other_company(pack(lengths, rules), seed=1, epoch=epoch, group=0)
    assert fit(lengths, rules).num_packs == len(packs)
    kinds = {tuple(kind) for kind in lengths[:, 1:].tolist()}
    alone = [pack(lengths[(lengths[:, 1:] == kind).all(axis=1), 0], PackRules(**options)) for kind in kinds]
    assert len(packs) == sum(map(len, alone))
    assert sorted(packs.sizes.tolist()) == sorted(size for one in alone for size in one.sizes.tolist())
    for first, stop in pairwise(packs.splits.tolist()):
        assert len({tuple(kind) for kind in lengths[packs.documents[first:stop], 1:].tolist()}) == 1
    assert sorted(packs.documents.tolist()) == np.flatnonzero((lengths[:, 0] > 0) & (lengths[:, 0] <= 10)).tolist()


@settings(deadline=None)
@given(
    st.lists(st.tuples(*[st.integers(0, 12)] * 3), max_size=40),
    st.tuples(st.integers(0, 10), st.integers(0, 10)),
    st.sampled_from([None, 1, 3]),
    st.booleans(),
    st.sampled_from([1, 64]),
)
def test_packs_of_several_budgets_exceed_none(
    rows: list[tuple[int, ...]], budgets: tuple[int, int], max_docs: int | None, padded: bool, opened: int
) -> None:
    lengths = np.array(rows, np.int64).reshape(-1, 3)
    rules = PackRules(length=10, overlong="drop", budgets=budgets, max_docs=max_docs, padded=padded)
    with mock.patch.object(several_budgets, "_OPENED", opened):
        first = pack(lengths, rules)
    assert [[one for one, _, _ in pieces] for pieces in listed(first)] == best_fit_of_several(lengths, rules)
    assert fit(lengths, rules).num_packs == len(first)
    limits = np.array([10, *budgets])
    fits = (lengths <= limits).all(axis=1) & (lengths[:, 0] > 0)
    counted = {"empty": int((lengths[:, 0] == 0).sum()), "dropped": len(lengths) - int(fits.sum())}
    assert first.num_dropped == counted["dropped"] - counted["empty"]
    other = other_company(first, seed=1, epoch=2, group=3)
    assert np.array_equal(other.splits, first.splits)
    for packs in (first, other):
        assert sorted(packs.documents.tolist()) == np.flatnonzero(fits).tolist()
        assert np.array_equal(packs.amounts, lengths[packs.documents, 1:])
        for start, stop in zip(packs.splits, packs.splits[1:], strict=False):
            held = lengths[packs.documents[start:stop]]
            assert np.all((held.max(axis=0) * len(held) if padded else held.sum(axis=0)) <= limits)
            assert max_docs is None or len(held) <= max_docs
    if not padded and len(first) > 1:  # best fit opens a pack only where no other has room
        held = np.array([lengths[first.documents[a:b]].sum(axis=0) for a, b in zip(first.splits, first.splits[1:])])  # noqa: B905
        single = [k for k in range(len(first)) if first.splits[k + 1] - first.splits[k] == 1]
        if max_docs is None:
            assert not [(a, b) for a in single for b in single if a < b and (held[a] + held[b] <= limits).all()]


def test_several_budgets_are_filled_together() -> None:
    """Documents with many images beside documents with none: a pack is full of both."""
    draws = hash_range(3, 0, 4000) % np.uint64(1000)
    tokens = draws[::2].astype(np.int64) + 1
    images = np.where(draws[1::2] < 500, draws[1::2] // np.uint64(10), 0).astype(np.int64)
    budget = -(-int(images.sum()) * 16_384 // int(tokens.sum()))
    packs = pack(np.column_stack([tokens, images]), PackRules(length=16_384, overlong="drop", budgets=(budget,)))
    assert packs.fill > 0.96
    assert packs.amounts.sum() / (len(packs) * budget) > 0.96


def test_company_changes_with_seed_epoch_and_group() -> None:
    packs = pack(np.full(1000, 10), PackRules(length=40))
    seen = {
        tuple(other_company(packs, seed=seed, epoch=epoch, group=group).documents.tolist())
        for seed, epoch, group in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))
    }
    assert len(seen) == 4
    meet = [frozenset(one) for one in seen for one in np.array(one).reshape(-1, 4).tolist()]
    assert len(set(meet)) >= 0.99 * len(meet)  # whom a document meets, not only where


def test_order_within_a_pack_is_not_by_length() -> None:
    """Where labels cross documents, the longest must not always stand first."""
    packs = pack(np.tile([5, 3], 500), PackRules(length=8))
    first = other_company(packs, seed=0, epoch=0, group=0).lengths[packs.splits[:-1]]
    assert 200 < int((first == 5).sum()) < 300


def golden_cases() -> dict[str, tuple[np.ndarray, PackRules]]:
    draws = (hash_range(7, 0, 400) % np.uint64(700)).astype(np.int64)
    return {
        "split": (draws, PackRules(length=512)),
        "truncate, cp 4": (draws, PackRules(length=512, overlong="truncate", multiple=8)),
        "drop, few documents": (draws, PackRules(length=512, overlong="drop", max_docs=3)),
        "overlapping windows": (draws, PackRules(length=128, stride=96)),
        "several budgets": (
            np.column_stack([draws, draws[::-1] % 50]),
            PackRules(length=2048, overlong="drop", budgets=(120,)),
        ),
        "padded": (draws, PackRules(length=1024, padded=True, max_docs=64)),
    }


def test_the_packs_are_the_same_for_ever() -> None:
    """A change here invalidates every checkpoint: it needs a CHANGELOG entry under Iteration order."""
    found: dict[str, Any] = {}
    for name, (lengths, rules) in golden_cases().items():
        packs = pack(lengths, rules)
        other = other_company(packs, seed=5, epoch=2, group=9)
        found[name] = {
            "packs": len(packs),
            "last": listed(packs)[-1],
            "pieces": _digest(packs),
            "other_company": _digest(other),
        }
    assert json.loads(json.dumps(found)) == json.loads((GOLDEN / "packs.json").read_text())


def _digest(packs: Packs) -> str:
    rows = np.concatenate([packs.documents, packs.starts, packs.stops, packs.splits])
    return hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest()


@pytest.mark.parametrize("length", [2048, 8192])
@pytest.mark.parametrize(("num_packs", "least"), [(61, 0.984), (245, 0.99)])
def test_packs_are_full(length: int, num_packs: int, least: float) -> None:
    uniform = hash_range(1, 0, 10**5).astype(np.float64) / 2**64
    normal = np.sqrt(-2 * np.log(uniform + 1e-12)) * np.cos(2 * np.pi * np.roll(uniform, 1))
    lengths = np.exp(6.5 + 1.1 * normal).astype(np.int64) + 1
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), num_packs * length))]
    assert pack(lengths, PackRules(length=length)).fill >= least


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"length": 0}, "length"),
        ({"length": 2.5}, "length"),
        ({"length": 2**31}, "length"),
        ({"overlong": "cut"}, "expected one of split, truncate, drop"),
        ({"multiple": 0}, "multiple"),
        ({"multiple": 3}, "use 6 or 9"),
        ({"multiple": 16}, "use 16"),
        ({"max_docs": 0}, "max_docs"),
        ({"padded": 1}, "padded"),
        ({"stride": 9}, "stride"),
        ({"stride": 2, "overlong": "drop"}, 'stride=2 .* needs overlong="split"'),
        ({"budgets": (5,)}, 'needs overlong="drop"'),
        ({"budgets": (-1,), "overlong": "drop"}, "budgets"),
    ],
)
def test_rules_that_cannot_work(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PackRules(**{"length": 8, **change})


@pytest.mark.parametrize("lengths", [[[1]], [1.5], [3, -1], 3])
def test_lengths_that_cannot_be(lengths: Any) -> None:
    with pytest.raises(ConfigError, match="lengths"):
        pack(np.array(lengths), PackRules(length=8))


@pytest.mark.parametrize("lengths", [[1], [[1]], [[1, 2, 3]], [[1, -2]]])
def test_lengths_have_a_column_for_each_budget(lengths: Any) -> None:
    with pytest.raises(ConfigError, match="lengths"):
        pack(np.array(lengths), PackRules(length=8, overlong="drop", budgets=(4,)))


def test_padded_packs_take_rounded_widths() -> None:
    found = pack(np.array([3, 5, 9]), PackRules(length=16, multiple=4, padded=True))
    assert (found.sizes.tolist(), found.fill) == ([12, 16], 17 / 28)
