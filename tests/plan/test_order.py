"""The order of one pass: exact, bounded, seekable, and the same for ever."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streaming.errors import ConfigError, StateError
from streaming.order.plan.order import (
    EpochOrder,
    OrderSettings,
    _argsort_stable,
    deal_by_lane,
    default_lanes,
    default_window,
)
from tests.support.code.folders import GOLDEN
from tests.support.models.sample_numbers import samples_at

chunk_sizes = st.lists(st.integers(0, 12), min_size=1, max_size=16).filter(sum)
shuffled = st.builds(
    OrderSettings,
    seed=st.integers(0, 2**64 - 1),
    lanes=st.integers(1, 9),
    window=st.integers(0, 30),
    scope=st.sampled_from(["global", "lane"]),
)
settings_ = shuffled | st.just(OrderSettings.unshuffled())

# A busy machine is no failure.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@unhurried
@given(chunk_sizes, settings_, st.integers(0, 5))
def test_a_pass_holds_every_sample_once(sizes: list[int], settings: OrderSettings, epoch: int) -> None:
    order = EpochOrder(sizes, settings, epoch)
    assert order.num_samples == sum(sizes)
    assert sorted(samples_at(order).tolist()) == list(range(sum(sizes)))


@unhurried
@given(chunk_sizes, settings_, st.integers(0, 5), st.data())
def test_any_positions_are_those_of_the_whole_order(
    sizes: list[int], settings: OrderSettings, epoch: int, data: st.DataObject
) -> None:
    order = EpochOrder(sizes, settings, epoch)
    whole = samples_at(order)
    positions = data.draw(st.lists(st.integers(0, order.num_samples - 1), max_size=8))
    assert samples_at(order, positions).tolist() == whole[np.array(positions, dtype=np.int64)].tolist()


@unhurried
@given(chunk_sizes, shuffled, st.data())
def test_a_lane_slice_is_a_slice_of_the_lane(sizes: list[int], settings: OrderSettings, data: st.DataObject) -> None:
    order = EpochOrder(sizes, settings, 0)
    lane = data.draw(st.integers(0, settings.lanes - 1))
    lane_start, lane_stop = order.lane_bounds(lane)
    whole = order.lane_slice(lane, 0, lane_stop - lane_start)
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    assert order.lane_slice(lane, start, stop).tolist() == whole[start:stop].tolist()
    assert sorted(whole.tolist()) == list(range(lane_start, lane_stop))
    moved = np.abs(whole - np.arange(lane_start, lane_stop))
    assert moved.max(initial=0) <= max(settings.window - 1, 0)


@pytest.mark.parametrize("window", [1, 2, 6, 17, 40])
def test_each_single_position_is_found_without_its_neighbors(window: int) -> None:
    # Every place of a long lane: a slice that looked at fewer keys than it needs would err somewhere.
    order = EpochOrder([700], OrderSettings(seed=8, lanes=1, window=window), 0)
    whole = order.lane_slice(0, 0, 700)
    singles = [int(order.lane_slice(0, at, at + 1)[0]) for at in range(700)]
    assert singles == whole.tolist()


@pytest.mark.parametrize("window", [3, 500, 9_000, 70_000])
def test_slices_agree_at_sizes_that_take_different_sorts(window: int) -> None:
    order = EpochOrder([1000] * 200, OrderSettings(seed=5, lanes=1, window=window), 0)
    whole = order.lane_slice(0, 0, 200_000)
    for start, stop in [(0, 10), (99_990, 100_010), (100_000, 150_000), (199_999, 200_000)]:
        assert np.array_equal(order.lane_slice(0, start, stop), whole[start:stop])
    assert np.abs(whole - np.arange(200_000)).max() < window


def test_the_window_shuffle_is_the_sort_of_its_definition() -> None:
    # A second, naive implementation in Python integers: splitmix64 seeded with the stream's key.
    mask = 2**64 - 1

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    seed, epoch, lane, window, size = 12, 3, 1, 7, 40
    key = 0
    for word in (seed, epoch, 2, lane):
        key = mix((key ^ word) + 0x9E3779B97F4A7C15 & mask)
    keys = [(i << 32) + window * (mix(key + i * 0x9E3779B97F4A7C15 & mask) >> 32) for i in range(size)]
    expected = [size + i for i in sorted(range(size), key=keys.__getitem__)]
    order = EpochOrder([2 * size], OrderSettings(seed=seed, lanes=2, window=window), epoch)
    assert order.lane_slice(lane, 0, size).tolist() == expected


@unhurried
@given(st.lists(st.integers(0, 6), min_size=1, max_size=50), st.sampled_from([7, 2**40, 2**62]))
def test_every_sort_breaks_ties_by_place(values: list[int], limit: int) -> None:
    keys = np.array(values, dtype=np.uint64)
    assert _argsort_stable(keys, limit).tolist() == np.argsort(keys, kind="stable").tolist()


@unhurried
@given(chunk_sizes, settings_)
def test_positions_deal_out_the_lanes(sizes: list[int], settings: OrderSettings) -> None:
    order = EpochOrder(sizes, settings, 0)
    lanes = settings.lanes
    bounds = [order.lane_bounds(lane) for lane in range(lanes)]
    assert [start for start, _ in bounds] == [0, *(stop for _, stop in bounds[:-1])]
    assert bounds[-1][1] == order.num_samples
    dealt = [len(range(lane, order.num_samples, lanes)) for lane in range(lanes)]
    assert [stop - start for start, stop in bounds] == dealt
    assert order.lane_starts(np.arange(lanes + 1)).tolist() == [
        *(start for start, _ in bounds),
        bounds[-1][1],
    ]
    expected = [lane for lane in range(lanes) for _ in range(dealt[lane])]
    assert order.lanes_of(np.arange(order.num_samples)).tolist() == expected


@unhurried
@given(st.integers(0, 60), st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(1, 17))
def test_dealing_by_lane_is_a_stable_sort_by_lane(begin: int, sizes: list[int], lanes: int) -> None:
    ends = begin + np.cumsum(sizes, dtype=np.int64)
    begins = ends - sizes
    batch = np.repeat(np.arange(len(sizes)), sizes)
    slots = np.concatenate([np.arange(size) for size in sizes])
    got_lanes, places = deal_by_lane(begins, ends, batch, slots, lanes)
    expected = [p for i in range(len(sizes)) for p in sorted(range(begins[i], ends[i]), key=lambda p: p % lanes)]
    assert (places * lanes + got_lanes).tolist() == expected


@unhurried
@given(chunk_sizes, settings_)
def test_locate_agrees_with_the_chunk_table(sizes: list[int], settings: OrderSettings) -> None:
    order = EpochOrder(sizes, settings, 1)
    chunk_ids, offsets = order.locate(np.arange(order.num_samples))
    expected = [(chunk, offset) for chunk in order.chunk_order.tolist() for offset in range(sizes[chunk])]
    assert list(zip(chunk_ids.tolist(), offsets.tolist(), strict=True)) == expected
    assert order.chunk_order[order.chunk_ranks].tolist() == list(range(len(sizes)))


def test_seeds_and_epochs_and_lanes_have_orders_of_their_own() -> None:
    def samples(seed: int, epoch: int) -> tuple[int, ...]:
        order = EpochOrder([10] * 40, OrderSettings(seed=seed, lanes=2, window=10), epoch)
        return tuple(samples_at(order, np.arange(400)).tolist())

    orders = {samples(seed, epoch) for seed in (0, 1, 2, 2**63) for epoch in range(5)}
    assert len(orders) == 20
    order = EpochOrder([100], OrderSettings(seed=0, lanes=2, window=10), 0)
    assert (order.lane_slice(0, 0, 50) != order.lane_slice(1, 0, 50) - 50).any()


@unhurried
@given(chunk_sizes, shuffled, st.integers(0, 5), st.integers(0, 5))
def test_lanes_of_scope_lane_keep_their_samples(
    sizes: list[int], settings: OrderSettings, epoch: int, other: int
) -> None:
    settings = replace(settings, scope="lane")

    def lanes(epoch: int) -> list[list[int]]:
        order = EpochOrder(sizes, settings, epoch)
        samples = samples_at(order)
        return [sorted(samples[lane :: settings.lanes].tolist()) for lane in range(settings.lanes)]

    assert lanes(epoch) == lanes(other)


def test_scope_lane_shuffles_inside_each_lane_anew() -> None:
    settings = OrderSettings(seed=3, lanes=4, window=0, scope="lane")
    first, second = (EpochOrder([5] * 80, settings, epoch) for epoch in (0, 1))
    for lane in range(4):
        places = slice(20 * lane, 20 * lane + 20)
        assert first.chunk_order[places].tolist() != second.chunk_order[places].tolist()
        assert sorted(first.chunk_order[places]) == sorted(second.chunk_order[places])
    other = EpochOrder([5] * 80, replace(settings, seed=4), 0)
    assert sorted(other.chunk_order[:20]) != sorted(first.chunk_order[:20])


def test_the_chunk_permutation_is_uniform() -> None:
    # Chi-squared of where chunk 0 lands, 9 degrees of freedom: 27.9 is its 0.1 % quantile.
    settings = OrderSettings(seed=3, lanes=1, window=1)
    places = [int(EpochOrder([1] * 10, settings, epoch).chunk_ranks[0]) for epoch in range(2000)]
    counts = np.bincount(places, minlength=10)
    assert ((counts - 200) ** 2 / 200).sum() < 27.9


def test_unshuffled_is_the_data_sets_order() -> None:
    order = EpochOrder([3, 0, 4, 1], OrderSettings.unshuffled(), 7)
    assert samples_at(order, np.arange(8)).tolist() == list(range(8))


@pytest.mark.parametrize(
    ("global_batch_size", "lanes"),
    [
        (1, 1),
        (8, 8),
        (64, 16),
        (96, 16),
        (256, 32),
        (1024, 128),
        (2048, 256),
        (1000, 125),
        (768, 96),
        (512 * 256, 16_384),
        (4096 * 256, 16_384),
        (3000 * 256, 12_000),
    ],
)
def test_default_lanes(global_batch_size: int, lanes: int) -> None:
    assert default_lanes(global_batch_size) == lanes
    assert global_batch_size % lanes == 0


@pytest.mark.parametrize(("global_batch_size", "lanes"), [(17, 16), (67, 16), (254, 31), (257, 32), (1018, 127)])
def test_default_lanes_where_no_divisor_is_near(global_batch_size: int, lanes: int) -> None:
    assert default_lanes(global_batch_size) == lanes


@given(st.integers(1, 4096))
def test_lanes_that_divide_are_those_of_earlier_releases(global_batch_size: int) -> None:
    """The largest divisor up to max(16, an eighth), unless that is less than half of what it may be."""
    most = min(global_batch_size, max(16, global_batch_size // 8))
    divisor = max(lanes for lanes in range(1, most + 1) if global_batch_size % lanes == 0)
    assert default_lanes(global_batch_size) == (divisor if 2 * divisor >= most else most)


@functools.cache
def mean_classes(size: int) -> float:
    """Of 200 by which a set is sorted, those in a batch."""
    order = EpochOrder([50] * 4000, OrderSettings(seed=1, lanes=default_lanes(size), window=100), 0)
    batches = range(0, order.num_samples - size, 16 * size)
    return float(np.mean([len(np.unique(samples_at(order, np.arange(at, at + size)) // 1000)) for at in batches]))


@pytest.mark.parametrize("global_batch_size", [257, 254, 251, 258])
def test_every_batch_size_mixes_like_256(global_batch_size: int) -> None:
    """With one lane a batch of 257 held 7 classes, and one of 256 held 67."""
    assert mean_classes(global_batch_size) >= 0.95 * mean_classes(256)


def test_default_window_is_twice_the_mean_chunk() -> None:
    assert [default_window(10, 4), default_window(8, 4), default_window(0, 3)] == [5, 4, 1]


def test_golden_order() -> None:
    """A change here invalidates every checkpoint: it needs a CHANGELOG entry under Iteration order."""
    with open(GOLDEN / "order.json", encoding="utf-8") as file:
        cases: list[dict[str, Any]] = json.load(file)
    assert len(cases) >= 5
    for case in cases:
        order = EpochOrder(case["chunk_samples"], OrderSettings.from_dict(case["settings"]), case["epoch"])
        assert order.chunk_order.tolist() == case["chunk_order"]
        assert samples_at(order).tolist() == case["samples"]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"seed": -1}, "seed"),
        ({"seed": True}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"lanes": 0}, "lanes"),
        ({"lanes": 2.0}, "lanes"),
        ({"window": -1}, "window"),
        ({"window": 2**40}, "window"),
        ({"shuffle": 1}, "shuffle"),
        ({"shuffle": False}, "lanes=4"),
        ({"scope": "node"}, "scope"),
    ],
)
def test_settings_refuse_what_cannot_work(change: dict[str, Any], word: str) -> None:
    good: dict[str, Any] = {"seed": 1, "lanes": 4, "window": 9, "shuffle": True}
    with pytest.raises(ConfigError, match=word):
        OrderSettings(**{**good, **change})
    with pytest.raises(StateError, match=word):
        OrderSettings.from_dict({**good, **change})


def test_settings_go_through_json() -> None:
    settings = OrderSettings(seed=np.int64(4), lanes=np.int32(2), window=3)  # type: ignore[arg-type]
    assert OrderSettings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings
    for bad in ({}, {**settings.to_dict(), "more": 1}, [1]):
        with pytest.raises(StateError, match="expected the keys"):
            OrderSettings.from_dict(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [[], [0, 0], [-1, 3], [[1]], [1.5], [2**31]])
def test_chunk_tables_that_cannot_work(sizes: list[Any]) -> None:
    with pytest.raises(ConfigError):
        EpochOrder(sizes, OrderSettings.unshuffled(), 0)


def test_positions_outside_are_refused() -> None:
    order = EpochOrder([5, 5], OrderSettings(seed=0, lanes=2, window=2), 0)
    for call in (
        lambda: order.locate(np.array([10])),
        lambda: order.lane_bounds(2),
        lambda: order.lane_slice(0, 3, 6),
        lambda: order.lane_slice(0, 3, 2),
    ):
        with pytest.raises(ConfigError, match="expected"):
            call()


def test_nothing_is_kept_per_sample() -> None:
    order = EpochOrder(np.full(1000, 10**6), OrderSettings(seed=0, lanes=8, window=64), 0)
    assert len(samples_at(order, np.arange(7 * 10**8, 7 * 10**8 + 100))) == 100
    kept = sum(array.nbytes for array in vars(order).values() if isinstance(array, np.ndarray))
    assert kept < 1000 * 64
