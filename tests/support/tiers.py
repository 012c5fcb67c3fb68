"""Deal parameters of a test to the tiers ``make test`` and ``make test-all``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first_here(values: Iterable[Any], number: int) -> list[Any]:
    """Return parameters: the first ones as they are, and those after ``number`` of them marked ``thorough``."""
    each = enumerate(values)
    return [one if at < number else pytest.param(one, marks=pytest.mark.thorough) for at, one in each]
