"""Deal parameters of a test to the tiers ``make test`` and ``make test-all``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

_GIVEN = type(pytest.param())


def first_here(values: Iterable[Any], number: int) -> list[Any]:
    """Return parameters: the first ones as they are, and those after ``number`` of them marked ``thorough``."""
    each = [one if isinstance(one, _GIVEN) else pytest.param(one) for one in values]
    rest = [pytest.param(*one.values, marks=[*one.marks, pytest.mark.thorough], id=one.id) for one in each[number:]]
    return each[:number] + rest
