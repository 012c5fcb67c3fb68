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
    """A distribution of numbers: bars, and labels of the axis.

    Attributes:
        name: The name of the numbers.
        bars: The bars.
        least, most: Labels of both ends.
        middle: Labels between them; each stays on one line.
        scale: How the axis is divided, in words; "": into equal parts.
    """

    name: str
    bars: tuple[Bar, ...]
    least: str
    most: str
    middle: tuple[str, ...]
    scale: str

    @property
    def label(self) -> str:
        """The plot in words, for those who do not see it."""
        parts = (f"{self.name}: from {self.least} to {self.most}", *self.middle, self.scale)
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A word, its count, and the length of its bar in percent of the longest."""

    word: str
    count: int
    share: float
    width: float


def histogram(
    name: str, bins: Sequence[tuple[float, float, float]], *, is_wide: bool, least: str, most: str,
    middle: Sequence[str],
) -> Histogram:  # fmt: skip
    """Return bars for (from, to, share): all have equal width, and their height is their share.

    Args:
        name: The name of the numbers.
        bins: The bins; of a wide range, they have equal ratios.
        is_wide: Whether it is such a range.
        least: Label of its beginning.
        most: Label of its end.
        middle: Labels between them.
    """
    highest = max((share for _, _, share in bins), default=0) or 1
    width = 100 / max(len(bins), 1)
    bars = []
    for number, (low, high, share) in enumerate(bins):
        height = max(100 * share / highest, 1.5 if share else 0)
        title = f"{_number(low)} to {_number(high)}: {share:.1%}"
        bar = Bar(x=number * width, y=100 - height, width=width * 0.92, height=height, title=title)
        bars.append(bar)
    scale = f"logarithmic axis: a bar ends at {bins[-1][1] / bins[-1][0]:.2g} times its beginning" if is_wide else ""
    return Histogram(name=name, bars=tuple(bars), least=least, most=most, middle=tuple(middle), scale=scale)


def rows(counts: Sequence[tuple[object, int]], total: int) -> tuple[Row, ...]:
    """Return a row per word, with a length relative to the most frequent word."""
    most, total = max((count for _, count in counts), default=0) or 1, max(total, 1)
    return tuple(
        Row(word=label(word), count=count, share=count / total, width=100 * count / most) for word, count in counts
    )


def label(word: object) -> str:
    """Return a value of a column or field for people: of a number with a fraction, no more digits than can be read."""
    return f"{word:,.6g}" if isinstance(word, float) else str(word)


def _number(number: float) -> str:
    return f"{number:,.0f}" if float(number).is_integer() else f"{number:,.4g}"
