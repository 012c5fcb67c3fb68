"""Compute the pictures of a batch: cells of rows, bars of packs. Nothing here knows markup."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shard_tools.look.show.order.step import RowShown

WIDTH = 1000.0
"""Width of a bar, whatever it shows."""
_LEAST = 1.2  # smallest visible width of a document


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCell:
    """A row of the batch.

    Attributes:
        number: Its number.
        colour: Number of the color of its source, or of its chunk.
        begins: It is the first of its lane.
        title: Its description.
        is_bad: It is in a list of bad samples.
    """

    number: int
    colour: int
    begins: bool
    title: str
    is_bad: bool


def cells_of(rows: Sequence[RowShown], colour: Callable[[str], int]) -> list[RowCell]:
    """Return the rows as cells; in a single set, cells of one chunk have one color."""
    chunks = {chunk: at for at, chunk in enumerate(dict.fromkeys((row.leaf, row.chunk) for row in rows))}
    found, lane = [], -1
    for row in rows:
        found.append(
            RowCell(
                number=row.number,
                colour=colour(row.leaf) if row.leaf else chunks[row.leaf, row.chunk] % 8,
                begins=row.lane != lane,
                title=f"row {row.number}: {row.name}, {f'{row.leaf}, ' if row.leaf else ''}lane {row.lane}, "
                f"chunk {row.chunk}",
                is_bad=row.is_bad,
            )
        )
        lane = row.lane
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A document in the bar of a pack: its start, width, and label."""

    x: float
    width: float
    shade: int
    title: str
    is_bad: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PackBar:
    """The bar of a pack.

    Attributes:
        pieces: Its documents.
        cuts: Starts of rows within it, if it is laid out in several.
        tokens: Number of tokens in it.
        padding: Number of places without a token.
        label: Its description.
    """

    pieces: tuple[Piece, ...]
    cuts: tuple[float, ...]
    tokens: int
    padding: int
    label: str


def pack_bar(row: RowShown, rows_each: int) -> PackBar:
    """Return the bar of a pack."""
    scale = WIDTH / max(row.length, 1)
    pieces = tuple(
        Piece(
            x=one.start * scale,
            width=max(one.size * scale, _LEAST),
            shade=at % 2,
            title=one.words,
            is_bad=bool(one.bad),
        )
        for at, one in enumerate(row.documents)
    )
    tokens = sum(one.size for one in row.documents)
    padding = row.length - tokens
    return PackBar(
        pieces=pieces, cuts=tuple(WIDTH * at / rows_each for at in range(1, rows_each)), tokens=tokens, padding=padding,
        label=f"{len(row.documents)} documents, {tokens:,} tokens, {padding:,} padding",
    )  # fmt: skip
