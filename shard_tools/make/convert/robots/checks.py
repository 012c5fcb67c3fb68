"""Compare the numbers of an episode with what its set states of them. Parquet without checksums shows no damage.

Pure functions: arrays and statistics in, an error out. Each message names the feature, and the values got and expected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shard_tools.make.convert.robots.layout import RENUMBERED
from streaming.errors import DataError

TOLERANCE_S: Final = 1e-4
"""How far the distance of two steps may be from ``1 / fps``: LeRobot's own bound."""
_SHARE: Final = 1e-5
"""How far a smallest or largest value may be from the stated one, as a share of the larger of the two bounds."""

Numbers = npt.NDArray[Any]


def check_order(arrays: Mapping[str, Numbers], fps: float) -> None:
    """Check that the rows of an episode are all its steps, in their order.

    Args:
        arrays: The features of numbers, by name; those that number the steps are checked if they are there.
        fps: Steps per second.

    Raises:
        DataError: A step is elsewhere, missing or there twice, or has another time.
    """
    for name, check in (("frame_index", _check_counted), ("index", _check_ascends)):
        if name in arrays and arrays[name].ndim == 1:
            check(name, arrays[name])
    if "timestamp" in arrays and arrays["timestamp"].ndim == 1:
        _check_times(arrays["timestamp"], fps)


def _check_counted(name: str, values: Numbers) -> None:
    wrong = np.flatnonzero(values != np.arange(len(values)))
    if wrong.size:
        row = int(wrong[0])
        raise DataError(f"feature {name!r}: row {row} has {values[row]}, expected {row}: rows are out of order or lost")


def _check_ascends(name: str, values: Numbers) -> None:
    wrong = np.flatnonzero(values[1:] <= values[:-1])
    if wrong.size:
        row = int(wrong[0]) + 1
        raise DataError(
            f"feature {name!r}: row {row} has {values[row]} after {values[row - 1]}, expected a larger number: "
            "rows are out of order"
        )


def _check_times(values: Numbers, fps: float) -> None:
    """Check times as LeRobot does: the first is 0, and each step takes ``1 / fps`` seconds.

    Times of long episodes are coarser than LeRobot's bound, as float32 is; they may be off by two of its units.
    """
    unit = np.spacing(np.abs(values)).astype(np.float64) if values.dtype.kind == "f" else np.zeros(len(values))
    times = values.astype(np.float64)
    wanted = np.concatenate([[0.0], times[:-1] + 1 / fps])
    with np.errstate(invalid="ignore"):
        wrong = np.flatnonzero(~(np.abs(times - wanted) <= TOLERANCE_S + 2 * unit))
    if wrong.size:
        row = int(wrong[0])
        raise DataError(
            f"feature 'timestamp': row {row} is at second {times[row]:.6g}, expected {wanted[row]:.6g} at {fps:g} "
            "steps per second"
        )


def check_statistics(arrays: Mapping[str, Numbers], statistics: Mapping[str, Any]) -> None:
    """Compare the smallest and the largest values of features, and their numbers, with an episode's statistics.

    Statistics that are missing, or not finite, are not compared; nor are the features that LeRobot's tools number anew
    when they join or split sets, for they leave the statistics as they were.

    Args:
        arrays: The features of numbers, by name: ``[steps, ...]``.
        statistics: The stated ``min``, ``max`` and ``count`` of each feature.

    Raises:
        DataError: They contradict each other, or a statistic is no number.
    """
    for name, values in arrays.items():
        stated = statistics.get(name)
        if not isinstance(stated, Mapping) or name in RENUMBERED or not values.size:
            continue
        count = _stated(name, "count", stated)
        if count is not None and count.size == 1 and not _is_count(float(count.reshape(-1)[0]), values):
            raise DataError(f"feature {name!r}: {len(values)} values, expected {count.reshape(-1)[0]:g} by {_SOURCE}")
        bounds = {kind: _stated(name, kind, stated) for kind in ("min", "max")}
        scale = max(
            (float(np.abs(_finite(one)).max(initial=0.0)) for one in bounds.values() if one is not None), default=0.0
        )
        for kind, one in bounds.items():
            if one is not None:
                _compare(name, kind, values, one, _share_of(values) * scale)


_SOURCE: Final = "the episode's statistics"


def _share_of(values: Numbers) -> float:
    return max(_SHARE, 2 * float(np.finfo(values.dtype).eps)) if values.dtype.kind == "f" else _SHARE


def _finite(values: Numbers) -> Numbers:
    return values[np.isfinite(values)]


def _is_count(count: float, values: Numbers) -> bool:
    """Return whether LeRobot's count of these values is ``count``: steps, or the rows of several axes."""
    return count in {len(values), values.size // (values.shape[-1] if values.ndim > 1 else 1)}


def _stated(name: str, kind: str, stated: Mapping[str, Any]) -> Numbers | None:
    if stated.get(kind) is None:
        return None
    try:
        return np.asarray(stated[kind], np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"feature {name!r}: {kind} in {_SOURCE} is {str(stated[kind])[:40]!r}, expected numbers"
        ) from error


def _compare(name: str, kind: str, values: Numbers, stated: Numbers, tolerance: float) -> None:
    """Compare the bounds of values: of each number of a step, of each number of its last axis, or of all."""
    shape = values.shape[1:] or (1,)
    if stated.shape == shape:
        rows = values.reshape(len(values), *shape)
    elif stated.size == shape[-1]:
        rows, stated = values.reshape(-1, shape[-1]), stated.reshape(-1)
    elif stated.size == 1:
        rows, stated = values.reshape(-1, 1), stated.reshape(-1)
    else:
        raise DataError(
            f"feature {name!r}: {kind} in {_SOURCE} has the shape {list(stated.shape)}, expected {list(shape)}"
        )
    got = (rows.min(0) if kind == "min" else rows.max(0)).astype(np.float64)
    with np.errstate(invalid="ignore"):
        wrong = np.argwhere(np.isfinite(stated) & ~(np.abs(got - stated) <= tolerance))
    if len(wrong):
        place = tuple(int(one) for one in wrong[0])
        at = f"[{', '.join(str(one) for one in place)}]" if stated.size > 1 else ""
        raise DataError(f"feature {name!r}: its {kind}{at} is {got[place]:g}, expected {stated[place]:g} by {_SOURCE}")
