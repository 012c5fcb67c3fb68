"""Steps against what a LeRobot set states of them: sound ones pass however they are stated, damaged ones are named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shard_tools.make.convert.robots.checks import check_order, check_statistics
from streaming.errors import DataError

GRID = np.arange(24, dtype=np.float32).reshape(4, 3, 2)


def bounds(values: np.ndarray[Any, Any], axis: Any, count: int) -> dict[str, Any]:
    return {"min": values.min(axis).tolist(), "max": values.max(axis).tolist(), "count": [count]}


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "uint64", "bool"])
def test_sound_numbers_pass_in_each_form_of_statistics(dtype: str) -> None:
    grid = GRID.astype(dtype)
    forms = [bounds(grid, 0, 4), bounds(grid, (0, 1), 12), bounds(grid, None, 4), {"min": None}, {"mean": [9.0]}, {}]
    for stated in forms:
        check_statistics({"x": grid}, {"x": stated})
        check_statistics({"x": grid}, {"y": stated})
        check_statistics({"index": grid}, {"index": {"min": [77]}})  # numbered anew by other tools


def test_what_is_not_finite_in_the_statistics_is_not_compared() -> None:
    values = np.array([[1.0, np.nan], [2.0, 3.0]])
    check_statistics({"x": values}, {"x": {"min": [1.0, float("nan")], "max": [2.0, None]}})
    with pytest.raises(DataError, match=r"'x': its max\[1\] is nan, expected 3 "):
        check_statistics({"x": values}, {"x": {"max": [2.0, 3.0]}})


@pytest.mark.parametrize(
    "stated",
    [{"count": [float("nan")]}, {"count": [3]}, {"min": "x"}, {"max": [10**400]}, {"min": {}}, {"max": [[1], [2, 3]]},
     {"max": [1.0] * 5}, {"min": [0.0, 1.5]}],
)  # fmt: skip
def test_hostile_statistics_are_named(stated: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="feature 'x': "):
        check_statistics({"x": GRID}, {"x": stated})


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("fps", [1, 29.97, 30, 50, 240])
def test_times_of_long_episodes_pass_and_a_step_too_many_does_not(fps: float, dtype: str) -> None:
    times = (np.arange(200_000) / fps).astype(dtype)
    check_order({"timestamp": times, "frame_index": np.arange(200_000), "index": np.arange(200_000) + 9}, fps)
    with pytest.raises(DataError, match="'timestamp': row 1000 is at second"):
        check_order({"timestamp": np.delete(times, 1000)}, fps)
