"""Shares of a mixture: exact at every position, seekable, the same for ever, however sources are listed."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streaming.errors import ConfigError
from streaming.order.mixing.passes import Weights
from streaming.order.mixing.shares import MAX_POSITIONS, BatchShares, ShareTree, product
from tests.support.models.mixed_plans import oracle

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
weights_ = st.dictionaries(
    st.sampled_from("abcdefghij"),
    st.integers(0, 50) | st.floats(0, 10, allow_subnormal=False),
    min_size=1,
).filter(lambda weights: any(weights.values()))


@st.composite
def schedules(draw: st.DrawFn) -> list[Weights]:
    """Some segments; later ones may bring sources, leave some out, or give them nothing."""
    first = draw(weights_)
    later = st.dictionaries(st.sampled_from("abcdefghijkl"), st.integers(0, 9), min_size=1)
    others = draw(st.lists(st.tuples(st.integers(1, 200), later.filter(lambda w: any(w.values()))), max_size=4))
    return [
        Weights(start=0, weights=first),
        *(Weights(start=s, weights=w) for s, w in sorted(others, key=lambda o: o[0])),
    ]


def tree_of(schedule: list[Weights], *, lanes: int, seed: int) -> ShareTree:
    return ShareTree(sorted({name for entry in schedule for name in entry.weights}), schedule, lanes=lanes, seed=seed)


@unhurried
@given(schedules(), st.integers(1, 9), st.integers(0, 2**64 - 1), st.data())
def test_counts_are_those_of_the_definition(
    segments: list[Weights], lanes: int, seed: int, data: st.DataObject
) -> None:
    tree = tree_of(segments, lanes=lanes, seed=seed)
    lane = data.draw(st.integers(0, lanes - 1))
    position = data.draw(st.integers(0, 400) | st.integers(0, MAX_POSITIONS))
    counts = tree.counts(lane, position).tolist()
    assert counts == oracle(tree, lane, position)
    assert sum(counts) == position


@unhurried
@given(schedules(), st.integers(1, 9), st.integers(0, 10**12), st.integers(0, 300))
def test_draws_are_the_steps_of_the_counts(segments: list[Weights], lanes: int, start: int, length: int) -> None:
    tree = tree_of(segments, lanes=lanes, seed=5)
    lane = start % lanes
    sources, draws = tree.draws(lane, start, start + length)
    counts = tree.counts(lane, start)
    for source, draw in zip(sources.tolist(), draws.tolist(), strict=True):
        assert draw == counts[source]
        counts[source] += 1
    assert counts.tolist() == tree.counts(lane, start + length).tolist()
    for source in set(sources.tolist()):
        places = np.flatnonzero(sources == source)
        assert tree.positions(lane, source, draws[places]).tolist() == (places + start).tolist()


@unhurried
@given(schedules(), st.integers(0, MAX_POSITIONS - 1), st.integers(1, 9))
def test_a_draw_that_never_comes_has_no_position(segments: list[Weights], draw: int, lanes: int) -> None:
    tree = tree_of(segments, lanes=lanes, seed=5)
    for source in range(len(tree.names)):
        place = int(tree.positions(0, source, np.array([draw]))[0])
        ever = int(tree.counts(0, MAX_POSITIONS)[source])
        assert (place < MAX_POSITIONS) == (draw < ever)
        if place < MAX_POSITIONS:
            assert [int(tree.counts(0, place + more)[source]) for more in (0, 1)] == [draw, draw + 1]


@unhurried
@given(schedules(), st.integers(1, 300), st.integers(0, 200), st.data())
def test_what_comes_later_leaves_what_was_before(
    segments: list[Weights], change_at: int, start: int, data: st.DataObject
) -> None:
    """Other weights, and sources that nobody knew of: a run can be replayed from its ledger."""
    kept = [entry for entry in segments if entry.start < change_at]
    weights = data.draw(st.dictionaries(st.sampled_from("abcxyz"), st.integers(1, 9), min_size=1))
    before = tree_of(kept, lanes=3, seed=8)  # of a mixture that lacks what comes
    after = tree_of([*kept, Weights(start=change_at, weights=weights)], lanes=3, seed=8)
    start = min(start, change_at)
    for lane in range(3):
        sources, draws = before.draws(lane, start, change_at)
        others, expected = after.draws(lane, start, change_at)
        assert [before.names[source] for source in sources] == [after.names[source] for source in others]
        assert draws.tolist() == expected.tolist()
        drawn = {after.names[source] for source in after.draws(lane, change_at, change_at + 400)[0].tolist()}
        assert drawn <= set(weights)


@unhurried
@given(schedules(), st.integers(1, 7), st.integers(0, 400) | st.integers(0, 10**11), st.integers(0, 60))
def test_batches_are_dealt_as_a_lane_deals_samples(segments: list[Weights], rows: int, start: int, length: int) -> None:
    """Each batch of one source, and so many of each as the tree says."""
    names = sorted({name for entry in segments for name in entry.weights})
    shares = BatchShares(names, segments, batch_rows=rows, seed=4)
    by_batch = [Weights(start=-(-entry.start // rows), weights=entry.weights) for entry in segments]
    tree = ShareTree(names, by_batch, lanes=1, seed=4)
    sources, draws = shares.draws(3, start, start + length)
    expected = tree.draws(0, start // rows, (start + length) // rows + 1)
    counts = shares.counts(3, start)
    assert counts.sum() == start
    for place, (source, draw) in enumerate(zip(sources.tolist(), draws.tolist(), strict=True), start=start):
        batch, inside = place // rows - start // rows, place % rows
        assert (source, draw) == (expected[0][batch], expected[1][batch] * rows + inside)
        assert draw == counts[source]
        counts[source] += 1
        assert int(shares.positions(3, source, np.array([draw]))[0]) == place
    assert (shares.positions(3, 0, np.array([MAX_POSITIONS - 1])) <= MAX_POSITIONS).all()


@unhurried
@given(weights_, st.integers(1, 64), st.integers(0, 10**12))
def test_counts_over_all_lanes_stray_by_less_than_one_a_node(
    weights: dict[str, float], lanes: int, position: int
) -> None:
    """The root is exact over the lanes (Hermite); each node below adds what rounding its passages in a lane costs."""
    tree = tree_of([Weights(start=0, weights=weights)], lanes=lanes, seed=3)
    total = sum((Fraction(w) for w in weights.values()), Fraction())
    counts = np.sum([tree.counts(lane, position) for lane in range(lanes)], axis=0)
    per_lane = [tree.counts(lane, position) for lane in range(lanes)]
    rounding = Fraction(position * lanes, 2**33)  # a share is rounded to 2**-32
    for number, name in enumerate(tree.names):
        share = Fraction(weights[name]) / total
        depth = len(tree.path(number))
        assert all(abs(int(c[number]) - share * position) <= depth * (1 + rounding) for c in per_lane)
        if depth == 1 and len(tree.names) == 2:
            assert abs(int(counts[number]) - share * position * lanes) <= Fraction(1, 2) + rounding


def test_a_source_of_no_weight_is_never_drawn_and_one_of_all_weight_always() -> None:
    tree = tree_of([Weights(start=0, weights={"a": 0, "b": 1, "c": 0})], lanes=4, seed=1)
    assert [tree.counts(lane, 10**12).tolist() for lane in range(4)] == [[0, 10**12, 0]] * 4


def test_neither_the_order_of_the_sources_nor_the_scale_of_the_weights_matters() -> None:
    one = tree_of([Weights(start=0, weights={"a": 0.5, "b": 0.25, "c": 0.25})], lanes=6, seed=9)
    other = tree_of([Weights(start=0, weights={"c": 1, "b": 1, "a": 2})], lanes=6, seed=9)
    for lane in range(6):
        assert [x.tolist() for x in one.draws(lane, 0, 500)] == [x.tolist() for x in other.draws(lane, 0, 500)]


def test_lanes_and_seeds_deal_in_other_orders() -> None:
    segments = [Weights(start=0, weights={"a": 0.37, "b": 0.63})]
    dealt = {
        tuple(tree_of(segments, lanes=8, seed=seed).draws(lane, 0, 64)[0].tolist())
        for seed in range(2)
        for lane in range(8)
    }
    assert len(dealt) >= 8


def test_the_order_of_the_sources_is_the_same_for_ever() -> None:
    segments = [
        Weights(start=0, weights={"web": 0.6, "code": 0.3, "math": 0.1}),
        Weights(start=20, weights={"web": 0.2, "code": 0.3, "math": 0.5}),
    ]
    tree = tree_of(segments, lanes=2, seed=7)
    shown = ["".join(tree.names[source][0] for source in tree.draws(lane, 0, 40)[0]) for lane in range(2)]
    late = [  # what has no weight yet has its place in the tree from there on
        Weights(start=0, weights={"web": 0.6, "code": 0, "math": 0.4}),
        Weights(start=8, weights={"web": 0.4, "code": 0.3, "math": 0.3}),
    ]
    tree = tree_of(late, lanes=1, seed=7)
    shown.append("".join(tree.names[source][0] for source in tree.draws(0, 0, 40)[0]))
    assert shown == GOLDEN


GOLDEN = [
    "cwwmwcwwcwcwwmwcwwcwmcmwmcmmwcmcmwmcmmwc",
    "wcwwcwcwwmwcwwcwcwwmcwmmcmwcmmcwmmcmwcmm",
    "wmwmwwmwmwcmwcwmcwmwcmwcwmcwmwcmwcwmcwmw",
]


@pytest.mark.parametrize(
    ("segments", "words"),
    [
        ([], "the first must apply from 0 on"),
        ([Weights(start=1, weights={"a": 1})], "the first must apply from 0 on"),
        ([Weights(start=0, weights={"a": -1})], "'a': expected a number of at least 0, got -1"),
        ([Weights(start=0, weights={"a": float("nan")})], "'a': expected a number"),
        ([Weights(start=0, weights={"a": 0, "b": 0})], "at least one must be above 0"),
        ([Weights(start=0, weights={"a": 1}), Weights(start=-5, weights={"a": 1})], "got -5 after 0"),
    ],
)
def test_wrong_segments_are_refused(segments: list[Weights], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        tree_of(segments, lanes=1, seed=0)
    assert words in str(error.value)


@given(st.integers(0, 2**32), st.integers(0, MAX_POSITIONS))
def test_products_have_no_overflow(share: int, count: int) -> None:
    high, low = product(np.array([share]), np.array([count]))
    assert (int(high[0]) << 32) + int(low[0]) == share * count
