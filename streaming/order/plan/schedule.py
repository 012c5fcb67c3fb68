"""Describe how weights, or a number, change with the rows of a run: ``Schedule``, a pure value."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, TypeAlias, TypeVar, cast, get_args

from streaming.common.arguments import check_choice, checked_count, checked_int, is_number, is_whole
from streaming.errors import ConfigError, StateError

_T = TypeVar("_T")
Value: TypeAlias = Mapping[str, float] | float
"""The weights of sources by name, or one number."""
Shape: TypeAlias = Literal["linear", "root", "cosine", "steps"]
MAX_SEGMENTS = 2**16
_MODERATE = 500  # powers of two: products with counts, and quotients of two weights, still fit into floats
_UNIT = 2**32  # grid to which the fraction of the ramp is rounded, so that cosine gives the same value on every machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Change weights, or a number, over the rows of a run: samples counted over all ranks from the start of the run.

    A ramp is a staircase of ``segments`` steps. Each step has the ramp's value at its middle, so that shares over the
    whole ramp equal those of the smooth curve. After ``over`` rows, the end value holds. A schedule is a plain value:
    it compares by content and is stored in checkpoints. Make one with the class methods::

        Schedule.linear({"web": 0.9, "code": 0.1}, {"web": 0.5, "code": 0.5}, over=1_000_000)
        Schedule.steps({0: {"web": 1, "code": 0}, 10**6: {"web": 1, "code": 1}})
        Schedule.root(0.1, 1.0, over=100_000)          # one number, as a Curriculum takes it

    Attributes:
        shape: Curve from ``start`` to ``end``.
        start: Value at row 0.
        end: Value from row ``over`` on.
        over: Length of the ramp in rows.
        num_segments: Number of steps of the staircase.
        degree: Degree of the root.
        listed: For the shape "steps": rows, and the value from each row on.
    """

    shape: Shape
    start: Value = 0.0
    end: Value = 0.0
    over: int = 1
    num_segments: int = 256
    degree: float = 2.0
    listed: tuple[tuple[int, Value], ...] = ()

    def __str__(self) -> str:
        if self.shape == "steps":
            return f"Schedule.steps({dict(self.listed)})"
        return f"Schedule.{self.shape}({self.start}, {self.end}, over={self.over:_})"

    def __post_init__(self) -> None:
        check_choice("Schedule", self.shape, get_args(Shape))
        if self.shape == "steps":
            _check_steps(self.listed)
        else:
            object.__setattr__(self, "over", checked_count("Schedule: over", self.over, 1))
            segments = checked_int("Schedule: segments", self.num_segments, 1, MAX_SEGMENTS)
            object.__setattr__(self, "num_segments", segments)
            if not _is_number(self.degree) or not self.degree > 0:
                raise ConfigError(f"Schedule: degree: expected a number above 0, got {self.degree!r}")
            object.__setattr__(self, "degree", _plain(self.degree))  # no NumPy types: states are stored as JSON
        _check_alike([value for _, value in self.listed] if self.shape == "steps" else [self.start, self.end])

    @classmethod
    def linear(cls, start: Value, end: Value, *, over: int, segments: int = 256) -> Schedule:
        """Make a linear ramp from ``start`` to ``end`` over ``over`` rows.

        Args:
            start: Weights of sources by name, or a number, at row 0.
            end: The same from row ``over`` on.
            over: Length of the ramp in rows, which are samples over all ranks and epochs.
            segments: Number of steps of the staircase that approximates the ramp.

        Raises:
            ConfigError: The names of ``start`` and ``end`` differ, a value is not a number of at least 0, or
                ``over`` is not a positive integer.
        """
        return cls(shape="linear", start=_plain(start), end=_plain(end), over=over, num_segments=segments)

    @classmethod
    def root(cls, start: Value, end: Value, *, over: int, degree: float = 2.0, segments: int = 256) -> Schedule:
        """Make a ramp that changes fast at first. DeepSpeed calls it ``fixed_root``.

        After the fraction ``x`` of ``over``, the value has covered ``x ** (1 / degree)`` of the way.

        Args:
            start: Weights of sources by name, or a number, at row 0.
            end: The same from row ``over`` on.
            over: Length of the ramp in rows, which are samples over all ranks and epochs.
            degree: Degree of the root. Above 1, the ramp changes fast at the start; below 1, at the end.
            segments: Number of steps of the staircase that approximates the ramp.

        Raises:
            ConfigError: As for :meth:`linear`.
        """
        return cls(shape="root", start=_plain(start), end=_plain(end), over=over, num_segments=segments, degree=degree)

    @classmethod
    def cosine(cls, start: Value, end: Value, *, over: int, segments: int = 256) -> Schedule:
        """Make a ramp that begins and ends slowly.

        After the fraction ``x`` of ``over``, the value has covered ``(1 - cos(pi x)) / 2`` of the way.

        Args:
            start: Weights of sources by name, or a number, at row 0.
            end: The same from row ``over`` on.
            over: Length of the ramp in rows, which are samples over all ranks and epochs.
            segments: Number of steps of the staircase that approximates the ramp.

        Raises:
            ConfigError: As for :meth:`linear`.
        """
        return cls(shape="cosine", start=_plain(start), end=_plain(end), over=over, num_segments=segments)

    @classmethod
    def steps(cls, values: Mapping[int, Value]) -> Schedule:
        """Make a schedule of constant values, each from its row on: ``{0: …, 10**6: …}``; the first row must be 0.

        Args:
            values: Weights of sources by name, or a number, by the row from which each applies.

        Raises:
            ConfigError: A row is not an integer, 0 is missing, or names differ.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(f"Schedule.steps: expected a dict such as {{0: …, 10**6: …}}, got {values!r}")
        for row in values:
            checked_count("Schedule.steps: row", row)
        return cls(shape="steps", listed=tuple((int(row), _plain(values[row])) for row in sorted(values)))

    @classmethod
    def custom(cls, function: Callable[[int], Value], *, over: int, segments: int = 256) -> Schedule:
        """Make a schedule from a function of the row.

        The function is evaluated in the middle of each of ``segments`` parts and at ``over``. The value at ``over``
        applies to all later rows. The function is called only here; checkpoints hold its values.

        Raises:
            ConfigError: As for :meth:`linear`.
        """
        if not callable(function):
            raise ConfigError(f"Schedule.custom: expected a function of a row, got {function!r}")
        rows = _borders(
            checked_count("Schedule: over", over, 1),
            checked_int("Schedule: segments", segments, 1, MAX_SEGMENTS),
        )
        at = [(row, (row + stop) // 2) for row, stop in pairwise(rows)]
        return cls.steps({row: _called(function, middle) for row, middle in [*at, (over, over)]})

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the sources in the values, sorted; () if values are numbers."""
        value = self.segments()[0][1]
        return tuple(sorted(value)) if isinstance(value, Mapping) else ()

    def segments(self) -> list[tuple[int, Value]]:
        """Return the rows at which the value changes, beginning with 0, and the value from each row on."""
        found: list[tuple[int, Value]] = []
        for row, value in self._all_segments():
            if not found or found[-1][1] != value:
                found.append((row, value))
        return found

    def at(self, row: int) -> Value:
        """Return the value at a row.

        Raises:
            ConfigError: ``row`` is not a non-negative integer.
        """
        row = checked_count("Schedule.at: row", row)
        return value_at(self.segments(), row)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dict that :meth:`from_dict` reads."""
        if self.shape == "steps":
            return {"shape": self.shape, "steps": [[row, _plain(value)] for row, value in self.listed]}
        made = {"shape": self.shape, "start": _plain(self.start), "end": _plain(self.end), "over": self.over}
        return {**made, "segments": self.num_segments} | ({"degree": self.degree} if self.shape == "root" else {})

    @classmethod
    def from_dict(cls, data: Any) -> Schedule:
        """Rebuild a schedule from the dict of :meth:`to_dict`.

        Raises:
            StateError: The dict is malformed.
        """
        try:
            check_choice("Schedule", data["shape"], get_args(Shape))
            if data["shape"] == "steps":
                return cls.steps(dict(data["steps"]))
            more = {"degree": data["degree"]} if data["shape"] == "root" else {}
            return cls(
                shape=data["shape"], start=_plain(data["start"]), end=_plain(data["end"]), over=data["over"],
                num_segments=data["segments"], **more,
            )  # fmt: skip
        except (ConfigError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise StateError(f"state: a schedule of the ledger: {error}, in {data!r}") from error

    def _all_segments(self) -> list[tuple[int, Value]]:
        if self.shape == "steps":
            return list(self.listed)
        rows = _borders(self.over, self.num_segments)
        parts = len(rows) - 1
        made = [(row, self._between((number + 0.5) / parts)) for number, row in enumerate(rows[:-1])]
        return [*made, (self.over, self.end)]

    def _between(self, part: float) -> Value:
        """Return the value at a fraction of the ramp."""
        way = round(_way(self.shape, part, self.degree) * _UNIT) / _UNIT
        low: Any = self.start
        high: Any = self.end  # of the same type as low, checked by the constructor
        if isinstance(low, Mapping):
            return {name: low[name] + (high[name] - low[name]) * way for name in low}
        return float(low + (high - low) * way)


def leaf_name(source: str, within: str) -> str:
    """Return the name in a mixture of a leaf of one of its sources; a dataset is its own leaf, without a name."""
    return f"{source}/{within}" if within else source


@dataclass(frozen=True, kw_only=True)
class Nested:
    """Weights per sample of the leaves of a nested mixture, stored as a tree of schedules, one per level.

    A state holds this tree instead of the products of its weights, which change with every level: a curriculum within a
    linear ramp has as many steps as both together, and each step has a value per bucket.

    Attributes:
        outer: Weights of the sources, per unit.
        within: Weights within each source, by its own names; None: the source is a dataset.
        means: Average number of units in a sample of each leaf, by name; None: 1 each.
    """

    outer: Schedule
    within: Mapping[str, WeightSchedule | None]
    means: Mapping[str, float] | None = None

    shape = "nested"

    def __post_init__(self) -> None:
        if self.outer.names != tuple(sorted(self.within)):
            raise ConfigError(f"Nested: within: expected {list(self.outer.names)}, got {sorted(self.within)}")
        if any(one is not None and not one.names for one in self.within.values()):
            raise ConfigError("Nested: within: expected weights by name, got numbers")
        if self.means is not None and (set(self.means) != set(self.names) or not all(self.means.values())):
            raise ConfigError(f"Nested: means: expected what a sample of each of {list(self.names)} counts")

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The leaves, sorted."""
        return tuple(sorted(self._segments[0][1]))

    def segments(self) -> list[tuple[int, Value]]:
        """See ``Schedule``."""
        return list(self._segments)

    @cached_property
    def _segments(self) -> list[tuple[int, Mapping[str, float]]]:
        parts: dict[str, list[tuple[int, Any]]] = {}
        for name, one in self.within.items():
            steps: list[tuple[int, Any]] = [(0, {"": 1.0})] if one is None else one.segments()
            parts[name] = [(row, {leaf_name(name, leaf): share for leaf, share in found.items()})
                           for row, found in steps]  # fmt: skip
        rows = sorted({row for steps in (self.outer.segments(), *parts.values()) for row, _ in steps})
        found: list[tuple[int, Mapping[str, float]]] = []
        for row in rows:
            weights = self._weights_at(parts, row)
            if not found or found[-1][1] != weights:
                found.append((row, weights))
        return found

    def _weights_at(self, parts: Mapping[str, list[tuple[int, Any]]], row: int) -> dict[str, float]:
        wanted = moderate(cast("Mapping[str, float]", self.outer.at(row)))
        made: dict[str, float] = {}
        for name, steps in parts.items():
            within = value_at(steps, row)
            total = sum(within.values())
            inside = {leaf: weight / total for leaf, weight in within.items()}
            mean = sum(share * (1.0 if self.means is None else self.means[leaf]) for leaf, share in inside.items())
            made.update({leaf: wanted[name] / mean * share for leaf, share in inside.items()})
        whole = sum(made.values())
        return {leaf: weight / whole for leaf, weight in sorted(made.items())}

    def to_dict(self) -> dict[str, Any]:
        """See ``Schedule``."""
        within = {name: None if one is None else one.to_dict() for name, one in sorted(self.within.items())}
        means = None if self.means is None else dict(sorted(self.means.items()))
        return {"shape": self.shape, "outer": self.outer.to_dict(), "within": within, "means": means}


WeightSchedule: TypeAlias = Schedule | Nested
"""Weights by name and row."""


def weights_from_dict(data: Any) -> WeightSchedule:
    """Rebuild either type of weights from the dict of its ``to_dict``.

    Raises:
        StateError: The dict is malformed.
    """
    try:
        if data["shape"] != Nested.shape:
            return Schedule.from_dict(data)
        within = {name: None if one is None else weights_from_dict(one) for name, one in data["within"].items()}
        means = None if data["means"] is None else dict(data["means"])
        for mean in (means or {}).values():
            checked_weights({"mean": mean})
        return Nested(outer=Schedule.from_dict(data["outer"]), within=within, means=means)
    except (ConfigError, KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise StateError(f"state: a schedule of the ledger: {error}") from error


def value_at(steps: Sequence[tuple[int, _T]], row: int) -> _T:
    """Return the value that applies at ``row``, given ascending rows (from 0) and the value from each on."""
    return [value for start, value in steps if start <= row][-1]


def _called(function: Callable[[int], Value], row: int) -> Value:
    """Call a user's function with a row, and add a note to any error it raises."""
    try:
        return function(row)
    except Exception as error:
        error.add_note(
            f"Schedule.custom: the function was called with row {row}; it gets one row, and gives the value there"
        )
        raise


def _way(shape: Shape, part: float, degree: float) -> float:
    if shape == "root":
        return float(part ** (1 / degree))
    return (1 - math.cos(math.pi * part)) / 2 if shape == "cosine" else part


def _borders(over: int, segments: int) -> list[int]:
    """Return the rows at which the parts of a ramp begin, and its end; no part is empty."""
    parts = min(segments, over)
    return [over * number // parts for number in range(parts + 1)]


def moderate(weights: Mapping[str, float]) -> Mapping[str, float]:
    """Return weights of the same ratios that can be multiplied and divided: very large and small weights are scaled.

    They are scaled by a power of two, so that ratios stay exact. A weight below 2**-1074 of the largest becomes 0.
    """
    _, exponent = math.frexp(max(weights.values()))
    if abs(exponent) <= _MODERATE:
        return weights
    return {name: math.ldexp(weight, -exponent) for name, weight in weights.items()}


def _plain(value: Any) -> Value:
    """Return a value as plain Python numbers, validated.

    Raises:
        ConfigError: It is neither a number of at least 0 nor a dict of such numbers.
    """
    if isinstance(value, Mapping):
        checked_weights(value)
        return {name: _number(value[name]) for name in sorted(value)}
    if not _is_number(value):
        raise ConfigError(f"Schedule: expected a dict of weights or a number of at least 0, got {value!r}")
    return _number(value)


def _number(value: Any) -> float:
    """Convert a number to Python's int or float; integers of NumPy stay integers, for sizes and lengths."""
    return int(value) if is_whole(value) else float(value)


def _is_number(value: object) -> bool:
    is_real = is_number(value) or (hasattr(value, "dtype") and not getattr(value, "shape", ()))
    return is_real and 0 <= value < math.inf  # type: ignore[operator]


def _check_steps(listed: Sequence[tuple[int, Value]]) -> None:
    if not listed or listed[0][0] != 0:
        raise ConfigError(
            f"Schedule.steps: the first step must be at row 0, got {[row for row, _ in listed]}; write {{0: …, …}}"
        )


def _check_alike(values: Sequence[Value]) -> None:
    """Refuse values that are not all numbers, or that name different sources.

    Raises:
        ConfigError: They differ.
    """
    first = values[0]
    for value in values:
        if isinstance(first, Mapping) != isinstance(value, Mapping):
            raise ConfigError(f"Schedule: expected weights everywhere or a number everywhere, got {first} and {value}")
        if isinstance(value, Mapping) and isinstance(first, Mapping) and set(value) != set(first):
            raise ConfigError(
                f"Schedule: all values must name the same sources, got {sorted(first)} and {sorted(value)}; give 0 to "
                "a source that has no share yet, or none any longer"
            )


def checked_weights(weights: Mapping[str, float], what: str = "weights") -> dict[str, Fraction]:
    """Validate weights and return them as exact fractions; ``what`` names them in messages.

    Raises:
        ConfigError: A weight is negative or not a number, or none is above 0.
    """
    exact = {}
    for name, weight in weights.items():
        if not is_number(weight) or not 0 <= weight < math.inf:
            within = "; give a mixture within a mixture its own weights=" if isinstance(weight, Mapping) else ""
            raise ConfigError(f"{what}: {name!r}: expected a number of at least 0, got {weight!r}{within}")
        exact[name] = Fraction(weight if isinstance(weight, (int, Fraction)) else float(weight))
    if not any(exact.values()):
        raise ConfigError(f"{what}: at least one must be above 0, got {dict(weights)}")
    if sum(exact.values()) > sys.float_info.max:
        raise ConfigError(f"{what}: their sum is too large for a float, got {dict(weights)}; only their ratios count")
    return exact
