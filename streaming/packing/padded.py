"""Lay out padded packs: each is a matrix with one row per piece, as wide as the longest piece."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from streaming.packing.layout import PackRows, PackShape
from streaming.types import Int64Array


def rows_of_padded(packs: PackRows, shape: PackShape) -> tuple[PackRows, PackShape, Int64Array]:
    """Turn each piece into a pack of its own, and describe the resulting batch.

    The width follows from the plan alone, so that it does not change if documents cannot be read.

    Args:
        packs: Padded packs.
        shape: The shape of padded packs.

    Returns:
        The pieces as packs; their shape, in which ``length`` is the smallest width; int64 [n], positions of each.
    """
    rows = replace(
        packs, splits=np.arange(len(packs.samples) + 1),
        sources=None if packs.sources is None else packs.sources[packs.packs], costs=None,
    )  # fmt: skip
    lengths = packs.stops - packs.starts
    longest = np.maximum.reduceat(lengths, packs.splits[:-1]) if len(lengths) else lengths
    widths = -(-longest // shape.multiple) * shape.multiple
    return (
        rows,
        replace(shape, length=shape.multiple, multiple=1, max_docs=None, padded=False),
        widths.repeat(np.diff(packs.splits)),
    )
