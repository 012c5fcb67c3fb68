"""Lay out padded packs: each is a matrix, with a row for each of its pieces, as wide as the longest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from streaming.packing.layout import PackRows, PackShape


def rows_of_padded(packs: PackRows, shape: PackShape) -> tuple[PackRows, PackShape]:
    """Take each piece for a pack of its own, and say what the batch of these looks like.

    The width follows from the plan alone, so that it stays what it is where documents cannot be read. A batch of no
    pieces has the least width there is.

    Args:
        packs: One padded pack, or what this function made of it.
        shape: Of padded packs.
    """
    num_rows = len(packs.samples)
    longest = int((packs.stops - packs.starts).max(initial=1))
    rows = replace(
        packs, splits=np.arange(num_rows + 1), sources=None if packs.sources is None else packs.sources[packs.packs]
    )
    width = -(-longest // shape.multiple) * shape.multiple
    return rows, replace(shape, length=width, multiple=1, max_docs=None, padded=False)
