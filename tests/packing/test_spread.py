"""``PackRules(spread=True)``: pieces spread over the fewest packs that could hold them, if that needs fewer packs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streaming.order.packing.fit import fit, pack
from streaming.order.packing.rules import PackRules, Packs, cut, rounded
from streaming.order.packing.several_budgets import _spread
from tests.support.code.folders import ROOT
from tests.support.code.script_modules import script_modules

amounts = st.lists(st.tuples(st.integers(0, 21), st.integers(0, 7), st.integers(0, 90)), max_size=60)
budgets = st.tuples(st.integers(0, 12), st.sampled_from([80, 2**30]))


@settings(deadline=None)
@given(amounts, budgets, st.none() | st.integers(1, 4), st.sampled_from([1, 4]))
def test_every_budget_holds_every_piece_has_a_pack_and_there_are_no_more_packs_than_by_best_fit(
    documents: list[tuple[int, int, int]], limits: tuple[int, int], max_docs: int | None, multiple: int
) -> None:
    taken = np.array(documents, np.int64).reshape(-1, 3)
    rules = PackRules(
        length=20, overlong="drop", budgets=limits, max_docs=max_docs, multiple=multiple, spread=True
    )  # fmt: skip
    check(taken, rules, limits, pack(taken, rules))
    assert fit(taken, rules).num_packs <= fit(taken, replace(rules, spread=False)).num_packs
    # The other way alone, which is seldom the better one of so few documents.
    pieces = cut(taken, rules)
    amounts = np.column_stack([rounded(pieces.lengths, multiple), pieces.amounts])
    alone = np.array(_spread(amounts, rules, 1), np.int64)
    for number in range(int(alone.max(initial=-1)) + 1):
        held = amounts[alone == number]
        assert (held.sum(axis=0) <= [20, *limits]).all()
        assert max_docs is None or len(held) <= max_docs


def check(taken: np.ndarray, rules: PackRules, limits: tuple[int, int], packs: Packs) -> None:
    kept = (taken[:, 0] > 0) & (taken <= [20, *limits]).all(axis=1)
    assert sorted(packs.documents.tolist()) == np.flatnonzero(kept).tolist()
    for low, high in zip(packs.splits, packs.splits[1:], strict=False):
        assert low < high
        held = taken[packs.documents[low:high]]
        assert (-(-held[:, 0] // rules.multiple) * rules.multiple).sum() <= 20
        assert (held[:, 1:].sum(axis=0) <= limits).all()
        assert rules.max_docs is None or high - low <= rules.max_docs


def test_two_budgets_that_both_bind_are_97_percent_full_and_more_than_by_a_greedy_knapsack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = script_modules(monkeypatch, str(ROOT / "benchmarks"), ("bench_budgets",))["bench_budgets"]
    limits = bench.limits_of(1.0)
    (taken,) = bench.groups(1, limits)
    rules = PackRules(length=limits[0], overlong="drop", budgets=(limits[1],), spread=True)
    ours, best_fit = (fit(taken, one).num_packs for one in (rules, replace(rules, spread=False)))
    fewest = (taken.sum(axis=0) / limits).max()
    assert fewest / ours >= 0.97
    assert ours < best_fit < len(bench.greedy(taken, limits))
