"""Lay packs out in shorter rows, for rows that grow over a run at a constant number of tokens per step."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from streaming.common.arrays import sums
from streaming.order.packing.layout import PackRows
from streaming.order.packing.rules import rounded
from streaming.types import Int64Array


def shorter(packs: PackRows, length: int, num_parts: int, multiple: int = 1) -> PackRows:
    """Return the same pieces in ``num_parts`` rows per pack, each of ``length / num_parts`` tokens.

    Pieces stay whole where they fit, the longest first. The other pieces are cut to fill the remaining room. The rows
    of a pack are consecutive; if the pack is not full, its last rows hold less or nothing.

    Args:
        packs: B packs, without costs.
        length: Tokens of a pack.
        num_parts: Rows made of a pack; divides ``length``.
        multiple: The space of each piece is rounded up to a multiple of this, which divides the length of a row.
    """
    if num_parts == 1:
        return packs
    sizes = rounded(packs.stops - packs.starts, multiple)
    rows, cut = _rows_of(packs, sizes, length // num_parts, num_parts)
    # Pieces in rows, int64 [n] each: whole pieces, then parts of cut ones. A row has a piece at most once.
    whole = np.flatnonzero(rows >= 0)
    pieces, at = np.concatenate([whole, cut[:, 0]]), np.concatenate([rows[whole], cut[:, 1]])
    begins, ends = np.zeros_like(pieces), sizes[pieces]
    begins[len(whole) :], ends[len(whole) :] = cut[:, 2], cut[:, 3]
    order = np.lexsort((pieces, at))
    pieces, starts = pieces[order], packs.starts[pieces[order]]
    return PackRows(
        splits=sums(np.bincount(at, minlength=num_parts * packs.num_packs)), samples=packs.samples[pieces],
        starts=starts + begins[order], stops=np.minimum(starts + ends[order], packs.stops[pieces]),
        lengths=packs.lengths[pieces], parts=num_parts,
        sources=None if packs.sources is None else packs.sources.repeat(num_parts),
    )  # fmt: skip


def _rows_of(packs: PackRows, sizes: Int64Array, room: int, num_rows: int) -> tuple[Int64Array, Int64Array]:
    """Assign whole pieces to rows, and cut the others.

    Returns:
        int64 [n], the row of each whole piece, -1 for others; and int64 [m, 4], the parts of cut pieces: piece, row,
        first token in the piece, and end (exclusive).
    """
    order = np.lexsort((-sizes, packs.packs)).tolist()
    spaces, rows = sizes.tolist(), [-1] * len(sizes)
    places = range(num_rows)
    cut: list[tuple[int, int, int, int]] = []
    for pack, (low, high) in enumerate(pairwise(packs.splits.tolist())):
        left, row, first_row = [room] * num_rows, 0, pack * num_rows
        over: list[int] = []
        for piece in order[low:high]:
            size = spaces[piece]
            for place in places:
                if size <= left[place]:
                    left[place] -= size
                    rows[piece] = first_row + place
                    break
            else:
                over.append(piece)
        for piece in over:
            first = 0
            while first < spaces[piece]:
                while not left[row]:
                    row += 1
                taken = min(spaces[piece] - first, left[row])
                cut.append((piece, first_row + row, first, first + taken))
                left[row], first = left[row] - taken, first + taken
    return np.array(rows, np.int64), np.array(cut, np.int64).reshape(-1, 4)
