"""Shares of a mixture: exact at every position, seekable, the same for ever, however sources are listed."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streaming.errors import ConfigError
from streaming.plan.shares import MAX_POSITIONS, Segment, ShareTree, _Node, _product

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
weights_ = st.dictionaries(
    st.sampled_from("abcdefghij"),
    st.integers(0, 50) | st.floats(0, 10, allow_subnormal=False),
    min_size=1,
).filter(lambda weights: any(weights.values()))


@st.composite
def schedules(draw: st.DrawFn) -> list[Segment]:
    """Some segments over the same sources."""
    first = draw(weights_)
    again = st.fixed_dictionaries(dict.fromkeys(first, st.integers(0, 9)))
    others = draw(st.lists(st.tuples(st.integers(1, 200), again.filter(lambda w: any(w.values()))), max_size=4))
    return [
        Segment(start=0, weights=first),
        *(Segment(start=s, weights=w) for s, w in sorted(others, key=lambda o: o[0])),
    ]


def oracle(node: _Node | str, tree: ShareTree, starts: list[int], lane: int, position: int) -> dict[str, int]:
    """Counts of the sources below a node by the definition, in Python's integers; ``starts`` count its passages."""
    if isinstance(node, str):
        return {node: position}

    def left(passed: int) -> int:
        total = int(node.phases[lane])
        for index, start in enumerate(starts):
            stop = starts[index + 1] if index + 1 < len(starts) else passed
            total += int(node.shares[index]) * max(min(stop, passed) - start, 0)
        return total >> 32

    lefts = [left(start) for start in starts]
    rights = [start - gone for start, gone in zip(starts, lefts, strict=True)]
    return {
        **oracle(node.left, tree, lefts, lane, left(position)),
        **oracle(node.right, tree, rights, lane, position - left(position)),
    }


@unhurried
@given(schedules(), st.integers(1, 9), st.integers(0, 2**64 - 1), st.data())
def test_counts_are_those_of_the_definition(
    segments: list[Segment], lanes: int, seed: int, data: st.DataObject
) -> None:
    tree = ShareTree(segments, lanes=lanes, seed=seed)
    lane = data.draw(st.integers(0, lanes - 1))
    position = data.draw(st.integers(0, 400) | st.integers(0, MAX_POSITIONS))
    counts = dict(zip(tree.names, tree.counts(lane, position).tolist(), strict=True))
    assert counts == oracle(tree._root, tree, [segment.start for segment in segments], lane, position)
    assert sum(counts.values()) == position


@unhurried
@given(schedules(), st.integers(1, 9), st.integers(0, 10**12), st.integers(0, 300))
def test_draws_are_the_steps_of_the_counts(segments: list[Segment], lanes: int, start: int, length: int) -> None:
    tree = ShareTree(segments, lanes=lanes, seed=5)
    lane = start % lanes
    sources, draws = tree.draws(lane, start, start + length)
    counts = tree.counts(lane, start)
    for source, draw in zip(sources.tolist(), draws.tolist(), strict=True):
        assert draw == counts[source]
        counts[source] += 1
    assert counts.tolist() == tree.counts(lane, start + length).tolist()


@unhurried
@given(weights_, st.integers(1, 64), st.integers(0, 10**12))
def test_counts_over_all_lanes_stray_by_less_than_one_a_node(
    weights: dict[str, float], lanes: int, position: int
) -> None:
    """The root is exact over the lanes (Hermite); each node below adds what rounding its passages in a lane costs."""
    tree = ShareTree([Segment(start=0, weights=weights)], lanes=lanes, seed=3)
    total = sum((Fraction(w) for w in weights.values()), Fraction())
    counts = np.sum([tree.counts(lane, position) for lane in range(lanes)], axis=0)
    per_lane = [tree.counts(lane, position) for lane in range(lanes)]
    rounding = Fraction(position * lanes, 2**33)  # a share is rounded to 2**-32
    for number, name in enumerate(tree.names):
        share = Fraction(weights[name]) / total
        depth = tree.depth(name)
        assert all(abs(int(c[number]) - share * position) <= depth * (1 + rounding) for c in per_lane)
        if depth == 1 and len(tree.names) == 2:
            assert abs(int(counts[number]) - share * position * lanes) <= Fraction(1, 2) + rounding


def test_a_source_of_no_weight_is_never_drawn_and_one_of_all_weight_always() -> None:
    tree = ShareTree([Segment(start=0, weights={"a": 0, "b": 1, "c": 0})], lanes=4, seed=1)
    assert [tree.counts(lane, 10**12).tolist() for lane in range(4)] == [[0, 10**12, 0]] * 4


def test_neither_the_order_of_the_sources_nor_the_scale_of_the_weights_matters() -> None:
    one = ShareTree([Segment(start=0, weights={"a": 0.5, "b": 0.25, "c": 0.25})], lanes=6, seed=9)
    other = ShareTree([Segment(start=0, weights={"c": 1, "b": 1, "a": 2})], lanes=6, seed=9)
    for lane in range(6):
        assert [x.tolist() for x in one.draws(lane, 0, 500)] == [x.tolist() for x in other.draws(lane, 0, 500)]


def test_lanes_and_seeds_deal_in_other_orders() -> None:
    segments = [Segment(start=0, weights={"a": 0.37, "b": 0.63})]
    dealt = {
        tuple(ShareTree(segments, lanes=8, seed=seed).draws(lane, 0, 64)[0].tolist())
        for seed in range(2)
        for lane in range(8)
    }
    assert len(dealt) >= 8


def test_the_order_of_the_sources_is_the_same_for_ever() -> None:
    segments = [
        Segment(start=0, weights={"web": 0.6, "code": 0.3, "math": 0.1}),
        Segment(start=20, weights={"web": 0.2, "code": 0.3, "math": 0.5}),
    ]
    tree = ShareTree(segments, lanes=2, seed=7)
    shown = ["".join(tree.names[source][0] for source in tree.draws(lane, 0, 40)[0]) for lane in range(2)]
    assert shown == GOLDEN


GOLDEN = [
    "cwwmwcwwcwcwwmwcwwcwmcmwmcmmwcmcmwmcmmwc",
    "wcwwcwcwwmwcwwcwcwwmcwmmcmwcmmcwmmcmwcmm",
]


@pytest.mark.parametrize(
    ("segments", "words"),
    [
        ([], "first segment"),
        ([Segment(start=1, weights={"a": 1})], "first segment"),
        ([Segment(start=0, weights={"a": -1})], "'a': expected a number from 0 on, got -1"),
        ([Segment(start=0, weights={"a": float("nan")})], "'a': expected a number"),
        ([Segment(start=0, weights={"a": 0, "b": 0})], "at least one must be above 0"),
        ([Segment(start=0, weights={"a": 1}), Segment(start=5, weights={"b": 1})], "got the sources ['b']"),
        ([Segment(start=0, weights={"a": 1}), Segment(start=-5, weights={"a": 1})], "expected one not before 0"),
    ],
)
def test_wrong_segments_are_refused(segments: list[Segment], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        ShareTree(segments, lanes=1, seed=0)
    assert words in str(error.value)


@given(st.integers(0, 2**32), st.integers(0, MAX_POSITIONS))
def test_products_have_no_overflow(share: int, count: int) -> None:
    high, low = _product(np.array([share]), np.array([count]))
    assert (int(high[0]) << 32) + int(low[0]) == share * count
