"""Compute the contents of plots: bars in a box of 100 by 100, which templates draw. Nothing here knows markup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar, from the lower edge of the box up, with its title."""

    x: float
    y: float
    width: float
    height: float
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """A distribution of numbers: bars, and labels of both ends of the axis."""

    name: str
    bars: tuple[Bar, ...]
    least: str
    most: str
    middle: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A word, its count, and the length of its bar in percent of the longest."""

    word: str
    count: int
    share: float
    width: float


def histogram(
    name: str, bins: Sequence[tuple[float, float, float]], *, least: str, most: str, middle: str, unit: str = ""
) -> Histogram:
    """Return bars for (from, to, share): all have equal width, and their height is their share."""
    highest = max((share for _, _, share in bins), default=0) or 1
    width = 100 / max(len(bins), 1)
    bars = []
    for number, (low, high, share) in enumerate(bins):
        height = max(100 * share / highest, 1.5 if share else 0)
        title = f"{_number(low)} to {_number(high)}{unit}: {share:.1%}"
        bar = Bar(x=number * width, y=100 - height, width=width * 0.92, height=height, title=title)
        bars.append(bar)
    return Histogram(name=name, bars=tuple(bars), least=least, most=most, middle=middle)


def rows(counts: Sequence[tuple[object, int]], total: int) -> tuple[Row, ...]:
    """Return a row per word, with a length relative to the most frequent word."""
    most, total = max((count for _, count in counts), default=0) or 1, max(total, 1)
    return tuple(
        Row(word=str(word), count=count, share=count / total, width=100 * count / most) for word, count in counts
    )


def _number(number: float) -> str:
    return f"{number:,.0f}" if float(number).is_integer() else f"{number:,.4g}"
