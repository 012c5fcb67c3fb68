"""Compute how much a mixture draws from each source, given the user's options: a ``Blend``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Literal, TypeAlias

from streaming.common.arguments import MAX_COUNT, some_names
from streaming.errors import ConfigError
from streaming.order.plan.blend import Blend, EndlessBlend, PassBlend
from streaming.order.plan.schedule import Nested, Schedule, WeightSchedule, checked_weights, leaf_name

Ends: TypeAlias = Literal["first", "all"]
Units: TypeAlias = Callable[[], Mapping[str, float]]
"""Returns the average number of units in a sample of each source."""
_SHORT = 60


def blend_of(
    sources: Mapping[str, Blend], sizes: Mapping[str, int], *, weights: Mapping[str, float] | Schedule | None,
    repeats: Mapping[str, float] | None, ends: Ends | None, units: Units | None,
) -> Blend:  # fmt: skip
    """Return the blend of a mixture.

    Args:
        sources: The blend within each source; for a dataset, all its samples.
        sizes: Samples of each dataset in them.
        weights: See ``Mixture``.
        repeats: See ``Mixture``.
        ends: See ``Mixture``.
        units: The units that weights count; None: samples.

    Raises:
        ConfigError: The arguments contradict each other, or are not valid for these sources.
    """
    if weights is not None and repeats is not None:
        raise ConfigError("weights and repeats: give only one; weights are shares, repeats are passes per epoch")
    if weights is None:
        if ends is not None or units is not None:
            raise ConfigError(
                "ends and unit: they apply to weights; without weights an epoch ends after its passes. Give weights="
            )
        return _by_passes(sources, repeats)
    schedule = by_weight(sources, weights, units)
    if ends is None:
        return EndlessBlend(schedule)
    segments: list[Any] = schedule.segments()
    if len(segments) > 1:
        raise ConfigError(
            "ends: an epoch that ends has the same weights throughout; with a Schedule leave ends out, and set the "
            "length of an epoch: DataLoader(mixture, epoch_size=…)"
        )
    return PassBlend(_quotas_until(ends, segments[0][1], sizes))


def _by_passes(sources: Mapping[str, Blend], repeats: Mapping[str, float] | None) -> Blend:
    times: Mapping[str, float] = dict.fromkeys(sources, 1) if repeats is None else repeats
    check_names("repeats", times, sources)
    exact = checked_weights(times, "repeats")
    quotas: dict[str, int] = {}
    for name, within in sources.items():
        inside = within.quotas_of(name)
        quotas |= {leaf_name(name, leaf): _rounded(exact[name] * count) for leaf, count in inside.items()}
    if not sum(quotas.values()):
        raise ConfigError(f"repeats: got {dict(times)}, which makes an empty epoch; give a source a larger number")
    return PassBlend(_checked_quotas(dict(sorted(quotas.items())), f"repeats: got {dict(times)}"))


def by_weight(
    sources: Mapping[str, Blend], weights: Mapping[str, float] | Schedule, units: Units | None
) -> WeightSchedule:
    """Convert weights per unit of each source into weights per sample of each leaf.

    Raises:
        ConfigError: The weights are invalid, or do not name the sources.
    """
    given = _schedule_of(weights, sources)
    within = {name: one.as_weights for name, one in sources.items()}
    if units is None and not any(one is not None for one in within.values()):
        return given
    return Nested(outer=given, within=within, means=None if units is None else dict(units()))


def _quotas_until(ends: Ends, weights: Mapping[str, float], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the number of samples of each source until the first source, or every source, has been read once."""
    exact = {name: weight for name, weight in checked_weights(weights).items() if weight}
    unread = sorted(set(sizes) - set(exact))
    if unread and ends == "all":
        raise ConfigError(f'ends="all": {some_names(unread)} with the weight 0 would never end; leave them out')
    lengths = [sizes[name] / weight for name, weight in exact.items()]
    length = min(lengths) if ends == "first" else max(lengths)
    quotas = {name: _rounded(exact.get(name, Fraction()) * length) for name in sorted(sizes)}
    return _checked_quotas(quotas, f"weights: got {dict(weights)}, ends={ends!r}")


def _checked_quotas(quotas: dict[str, int], what: str) -> dict[str, int]:
    """Return the number of samples of each source in an epoch.

    Raises:
        ConfigError: Their sum is more than a state can count.
    """
    if sum(quotas.values()) > MAX_COUNT:
        raise ConfigError(
            f"{what}, which makes an epoch of more than {MAX_COUNT:,} samples. Give smaller numbers, or weights= with "
            "ends=None for a mixture without end"
        )
    return quotas


def _rounded(number: Fraction) -> int:
    return math.floor(number + Fraction(1, 2))


def _schedule_of(weights: Any, sources: Mapping[str, Any]) -> Schedule:
    """Return the weights of all sources as a schedule.

    Raises:
        ConfigError: They are not weights, or do not name the sources.
    """
    if isinstance(weights, Schedule):
        if not weights.names:
            raise ConfigError(f"weights: expected a Schedule of dicts of weights, got one of numbers: {weights}")
        check_names("weights", weights.names, sources)
        return weights
    check_names("weights", weights, sources)
    return Schedule.steps({0: weights})


def check_names(what: str, given: Any, sources: Mapping[str, Any]) -> None:
    """Check that ``given`` is a dict of numbers by the names of the sources.

    Raises:
        ConfigError: It is not; the message lists unknown and missing names.
    """
    if not isinstance(given, (Mapping, tuple)):
        example = ", ".join(f'"{name}": 1' for name in sorted(sources)[:2]) + (", …" if len(sources) > 2 else "")
        hint = "; what changes with the rows is a Schedule.custom(function, over=…)" if callable(given) else ""
        raise ConfigError(
            f"{what}: expected a dict by the names of the sources, such as {{{example}}}, got "
            f"{shown_value(given)}{hint}"
        )
    unknown, missing = sorted(set(given) - set(sources), key=str), sorted(set(sources) - set(given))
    if unknown or missing:
        hint = "" if not missing else f"; missing: {some_names(missing)} (give 0 to a source that should not be read)"
        if any(str(name).partition("/")[0] in sources for name in unknown):
            hint += "; give a mixture within a mixture its own weights="
        known = f"{what}: the sources are {some_names(sorted(sources))}"
        raise ConfigError(known + (f", got {some_names(list(map(repr, unknown)))}" if unknown else "") + hint)
    if isinstance(given, Mapping):
        checked_weights(given, what)


def shown_value(given: object) -> str:
    """Format a user's value for a message: a short value in full, any other by its type."""
    shown = repr(given)
    return shown if len(shown) < _SHORT and not callable(given) else f"a {type(given).__name__}"
