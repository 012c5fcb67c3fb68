"""Schedules are values: sampled once, the same after JSON, checked by name."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streaming import Schedule
from streaming.errors import ConfigError, StateError

LOW, HIGH = {"web": 0.9, "code": 0.1}, {"web": 0.5, "code": 0.5}
SHAPES: Mapping[str, Callable[..., Schedule]] = {
    "linear": Schedule.linear, "root": Schedule.root, "cosine": Schedule.cosine,
}  # fmt: skip


def area(schedule: Schedule, over: int) -> float:
    """Rows times value, up to ``over``."""
    segments = schedule.segments()
    stops = [row for row, _ in segments[1:]] + [over]
    return sum((min(stop, over) - row) * value for (row, value), stop in zip(segments, stops, strict=True))  # type: ignore[operator]


@pytest.mark.parametrize(("shape", "mean"), [("linear", 1 / 2), ("root", 2 / 3), ("cosine", 1 / 2)])
def test_a_ramp_has_the_shares_of_the_smooth_curve(shape: str, mean: float) -> None:
    over = 10**6
    schedule = SHAPES[shape](0, 1, over=over)
    assert area(schedule, over) == pytest.approx(mean * over, rel=1e-3)
    values = [value for _, value in schedule.segments()]
    assert values == sorted(values)
    assert schedule.at(0) < 0.1 < 0.9 < schedule.at(over - 1) < schedule.at(over) == schedule.at(10**12) == 1  # type: ignore[operator]


@given(
    shape=st.sampled_from(sorted(SHAPES)),
    over=st.integers(1, 10**12),
    segments=st.integers(1, 50),
    weights=st.lists(st.floats(0, 1e6), min_size=2, max_size=4),
)
@settings(deadline=None)
def test_schedules_go_through_json_and_pickle(shape: str, over: int, segments: int, weights: list[float]) -> None:
    start = {str(i): weight for i, weight in enumerate(weights)} | {"more": 1.0}
    end = {str(i): weight for i, weight in enumerate(reversed(weights))} | {"more": 2}
    more = {"degree": 3} if shape == "root" else {}
    schedule = SHAPES[shape](start, end, over=over, segments=segments, **more)
    again = Schedule.from_dict(json.loads(json.dumps(schedule.to_dict())))
    assert again == schedule == pickle.loads(pickle.dumps(schedule))
    assert again.segments() == schedule.segments()
    rows = [row for row, _ in schedule.segments()]
    assert rows == sorted(set(rows))
    assert (rows[0], rows[-1] <= over) == (0, True)
    assert schedule.at(over) == schedule.end
    assert schedule.names == tuple(sorted(start))


def test_a_ramp_has_no_more_parts_than_rows() -> None:
    assert Schedule.linear(0, 1, over=2, segments=4).segments() == [(0, 0.25), (1, 0.75), (2, 1)]


def test_steps_and_functions() -> None:
    steps = Schedule.steps({10: HIGH, 0: LOW})
    assert (steps.at(9), steps.at(10)) == (LOW, HIGH)
    asked: list[int] = []

    def half(row: int) -> float:
        asked.append(row)
        return row / 2

    sampled = Schedule.custom(half, over=100, segments=4)
    assert asked == [12, 37, 62, 87, 100]
    assert sampled.segments() == [(0, 6.0), (25, 18.5), (50, 31.0), (75, 43.5), (100, 50.0)]
    assert Schedule.from_dict(json.loads(json.dumps(sampled.to_dict()))) == sampled  # without calling it again
    assert len(asked) == 5
    assert [row for row, _ in Schedule.linear(0, 1, over=10, segments=4).segments()] == [0, 2, 5, 7, 10]


def test_numbers_of_numpy_are_plain_in_a_state() -> None:
    schedule = Schedule.linear({"a": np.float32(0.5)}, {"a": np.int64(2)}, over=7)
    assert json.loads(json.dumps(schedule.to_dict()))["start"] == {"a": 0.5}
    counts = {"over": np.int64(7), "segments": np.int32(3), "degree": np.float32(2)}
    given = Schedule.root(np.float32(0.5), np.float64(1), **counts)  # type: ignore[arg-type]
    assert json.loads(json.dumps(given.to_dict())) == Schedule.root(0.5, 1.0, over=7, segments=3).to_dict()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Schedule.linear({"a": 1}, {"b": 1}, over=5), r"same sources, got \['a'\] and \['b'\]; give 0"),
        (lambda: Schedule.linear({"a": 1}, 0.5, over=5), "weights everywhere or a number everywhere"),
        (lambda: Schedule.linear({"a": -1}, {"a": 1}, over=5), "'a': expected a number of at least 0, got -1"),
        (lambda: Schedule.linear({"a": 0}, {"a": 1}, over=5), "at least one must be above 0"),
        (lambda: Schedule.linear({"a": 1}, {"a": 1}, over=0), "over"),
        (lambda: Schedule.linear({"a": 1}, {"a": 1}, over=5, segments=0), "segments"),
        (lambda: Schedule.root(0.1, 1.0, over=5, degree=0), "degree.*above 0, got 0"),
        (lambda: Schedule.linear("a", "b", over=5), "got 'a'"),  # type: ignore[arg-type]
        (lambda: Schedule.linear(math.nan, 1, over=5), "got nan"),
        (lambda: Schedule.steps({5: LOW}), r"first step must be at row 0, got \[5\]"),
        (lambda: Schedule.steps({0: LOW, 1.5: HIGH}), "row.*1.5"),  # type: ignore[dict-item]
        (lambda: Schedule.steps({}), "first step"),
        (lambda: Schedule.steps([LOW]), "expected a dict"),  # type: ignore[arg-type]
        (lambda: Schedule.custom({"a": 1}, over=5), "expected a function"),  # type: ignore[arg-type]
        (lambda: Schedule.steps({0: 1, 1e6: 2}), r"got 1000000.0 .float.; write 1000000"),  # type: ignore[dict-item]
        (lambda: Schedule.linear(0, 1, over=5).at(-1), "Schedule.at: row: expected an integer in"),
    ],
)
def test_wrong_arguments_name_the_cure(make: Callable[[], Schedule], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize(
    "data", [None, {}, {"shape": "spline"}, {"shape": "steps", "steps": [[0]]}, {"shape": "linear", "start": 1}]
)
def test_what_is_no_schedule_in_a_state_is_refused(data: Any) -> None:
    with pytest.raises(StateError, match="a schedule of the ledger"):
        Schedule.from_dict(data)


def test_what_a_users_function_raises_says_at_which_row() -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        Schedule.custom(lambda row: 1 / (row - 6), over=12, segments=1)
    assert "called with row 6" in raised.value.__notes__[0]
