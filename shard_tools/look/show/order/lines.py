"""Compute lines of a plot in a box of 1000 by 300. Nothing here knows markup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 1000.0, 300.0
_TOPS, _ROOM = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0), 1.08  # room for a label above the lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The actual and the target share of a source: the corners of two lines, in SVG notation."""

    name: str
    colour: int
    realised: str
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Shares over steps.

    Attributes:
        lines: The sources.
        top: The share at the upper edge.
        first: The first step.
        last: The last step.
        mark: Position of the saved state, from the left; None: nowhere.
    """

    lines: tuple[Line, ...]
    top: float
    first: int
    last: int
    mark: float | None


def plotted(
    steps: Sequence[int], names: Sequence[tuple[str, int]], realised: Sequence[Sequence[float]],
    targets: Sequence[Sequence[float]], *, mark: int | None,
) -> Plot:  # fmt: skip
    """Return the plot of shares over steps, with the actual and the target share of each source.

    Args:
        steps: The borders, one more than there are shares.
        names: Names of the sources, with the numbers of their colors.
        realised: Their actual shares.
        targets: Their target shares.
        mark: A step to mark.
    """
    highest = max((share for some in (*realised, *targets) for share in some), default=1) or 1
    top = next(top for top in _TOPS if highest * _ROOM <= top or top == _TOPS[-1])
    first, last = steps[0], max(steps[-1], steps[0] + 1)
    at = [(step - first) / (last - first) * WIDTH for step in steps]

    def corners(shares: Sequence[float]) -> str:
        found = []
        for left, right, share in zip(at, at[1:], shares, strict=False):
            y = HEIGHT * (1 - share / top)
            found += [f"{left:.1f},{y:.1f}", f"{right:.1f},{y:.1f}"]
        return " ".join(found)

    lines = tuple(
        Line(name=name, colour=colour, realised=corners(is_), target=corners(due))
        for (name, colour), is_, due in zip(names, realised, targets, strict=True)
    )
    where = None if mark is None or not first <= mark <= last else (mark - first) / (last - first) * WIDTH
    return Plot(lines=lines, top=top, first=first, last=last, mark=where)
