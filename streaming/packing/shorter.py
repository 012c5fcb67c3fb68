"""Lay packs out in shorter rows: for rows that grow over a run, at the same number of tokens per step."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from streaming.arrays import sums
from streaming.packing.layout import PackRows


def shorter(packs: PackRows, length: int, num_parts: int, multiple: int = 1) -> PackRows:
    """Return the same pieces in ``num_parts`` rows per pack, each of ``length / num_parts`` tokens.

    Pieces stay whole where they fit, the longest first; what is left is cut to fill the room that remains. All rows of
    a pack follow each other; if a pack is not full, its last rows hold less, or nothing.

    Args:
        packs: B packs, without costs.
        length: Tokens of a pack.
        num_parts: Rows made of a pack; divides ``length``.
        multiple: The space of each piece is rounded up to a multiple of this, which divides the length of a row.
    """
    if num_parts == 1:
        return packs
    room = length // num_parts
    pieces: list[int] = []
    starts: list[int] = []
    stops: list[int] = []
    counts: list[int] = []
    begins, ends = packs.starts.tolist(), packs.stops.tolist()
    for low, high in pairwise(packs.splits.tolist()):
        sizes = [-(-(ends[piece] - begins[piece]) // multiple) * multiple for piece in range(low, high)]
        for row in _rows_of(sizes, room, num_parts):
            counts.append(len(row))
            for number, first, last in row:
                begin, end = begins[low + number], ends[low + number]
                pieces.append(low + number)
                starts.append(begin + first)
                stops.append(min(begin + last, end))
    chosen = np.array(pieces, np.int64)
    return PackRows(
        splits=sums(counts), samples=packs.samples[chosen], starts=np.array(starts, np.int64),
        stops=np.array(stops, np.int64), lengths=packs.lengths[chosen],
        sources=None if packs.sources is None else packs.sources.repeat(num_parts),
        parts=num_parts,
    )  # fmt: skip


def _rows_of(sizes: list[int], room: int, num_rows: int) -> list[list[tuple[int, int, int]]]:
    """Return for each row the pieces in it: number, and the first and the last token (exclusive) of the piece."""
    left = [room] * num_rows
    rows: list[list[tuple[int, int, int]]] = [[] for _ in range(num_rows)]
    cut: list[int] = []
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        size = sizes[number]
        row = next((row for row in range(num_rows) if size <= left[row]), None)
        if row is None:
            cut.append(number)
            continue
        rows[row].append((number, 0, size))
        left[row] -= size
    row = 0
    for number in cut:
        first = 0
        while first < sizes[number]:
            while not left[row]:
                row += 1
            taken = min(sizes[number] - first, left[row])
            rows[row].append((number, first, first + taken))
            left[row] -= taken
            first += taken
    for one in rows:
        one.sort()
    return rows
