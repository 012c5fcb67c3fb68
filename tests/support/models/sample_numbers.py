"""Samples of an order by their numbers in the data set, from what a plan asks of the order: chunks and offsets."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from streaming.order.plan.order import EpochOrder
from streaming.types import Int64Array


def sample_numbers(order: EpochOrder, chunk_ids: Int64Array, offsets: Int64Array) -> Int64Array:
    """Data-set numbers, int64[n], of samples at offsets of chunks."""
    sizes = np.diff(order.chunk_starts)[order.chunk_ranks]
    numbers: Int64Array = (np.cumsum(sizes) - sizes)[chunk_ids] + offsets
    return numbers


def samples_at(order: EpochOrder, positions: npt.ArrayLike | None = None) -> Int64Array:
    """Data-set numbers of the samples due at global positions, or at all: position p is place p // L of lane p % L."""
    wanted = np.arange(order.num_samples) if positions is None else np.asarray(positions, np.int64)
    places, lanes = np.divmod(wanted, order.settings.lanes)
    found = np.empty_like(wanted)
    for lane in np.unique(lanes).tolist():
        rows = np.flatnonzero(lanes == lane)
        low, high = int(places[rows].min()), int(places[rows].max()) + 1
        numbers = sample_numbers(order, *order.lane_samples(lane, low, high))
        found[rows] = numbers[places[rows] - low]
    return found
