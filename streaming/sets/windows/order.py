"""Choose lanes and window of an order of windows, whose units take much memory: ``order_of_windows``."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from streaming.order.plan.order import OrderSettings
from streaming.order.plan.settings import ShuffleConfig
from streaming.types import Int64Array

_LEAST_LANES, _ROWS_OF_LANE = 8, 16
"""Lanes of a small batch, and rows of a large one per lane: half of the lanes of samples, since each holds decoded
units."""
_HELD_BYTES = 2 << 30
"""Memory for the units of the least lanes: of a ``memory_limit`` of 4 GiB three are for units, and one of these for
reading ahead."""
_UNITS_OF_WINDOW = (2.0, 1.0, 0.5, 0.25)
"""Sizes of windows in mean units; the first that fits is used. A lane draws from twice as many units and one more."""


def order_of_windows(
    found: OrderSettings, chosen: ShuffleConfig, chunk_samples: Int64Array, chunk_bytes: Int64Array,
    global_batch_size: int,
) -> OrderSettings:  # fmt: skip
    """Return an order with the defaults of windows, where the user chose nothing; the same on any ranks and machines.

    Args:
        found: The order with the defaults of samples.
        chosen: The user's choices.
        chunk_samples: int64 [C], windows of each unit.
        chunk_bytes: int64 [C], memory of each.
        global_batch_size: G.
    """
    if not found.shuffle:
        return found
    lanes, window = found.lanes, found.window
    if chosen.lanes is None:
        most = max(_LEAST_LANES, global_batch_size // _ROWS_OF_LANE)
        lanes = max(one for one in range(1, min(most, global_batch_size) + 1) if global_batch_size % one == 0)
    if chosen.window is None:
        mean_bytes, mean_rows = float(np.mean(chunk_bytes)), float(np.mean(chunk_samples))
        fitting = [one for one in _UNITS_OF_WINDOW if _LEAST_LANES * (2 * one + 1) * mean_bytes <= _HELD_BYTES]
        window = round(mean_rows * (fitting[0] if fitting else _UNITS_OF_WINDOW[-1]))
    return replace(found, lanes=lanes, window=window)
