"""The order of a data set under a loader: what a user may choose, and the defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from streaming.arguments import checked_int, checks_names
from streaming.errors import ConfigError
from streaming.plan.order import (
    MAX_LANES,
    MAX_WINDOW,
    OrderSettings,
    Scope,
    default_lanes,
    default_window,
)  # fmt: skip

MAX_SEED = 2**64 - 1


@checks_names()
@dataclass(frozen=True, slots=True, kw_only=True)
class ShuffleConfig:
    """How an epoch is shuffled; all of it belongs to the order's identity and is saved with a checkpoint.

    Attributes:
        seed: Seed of the order; overrides the data set's ``seed`` if given.
        window: W, in samples: how far a sample may move within its lane. None: twice the mean number of samples per
            chunk, with which a lane draws from about five chunks at a time.
        lanes: L: into how many equal parts an epoch is cut, each going through its chunks on its own. None: the largest
            divisor of the global batch size up to max(16, an eighth of it).
        scope: ``"global"``: every epoch permutes all chunks. ``"lane"``: every epoch permutes the chunks within each
            lane, and a lane keeps its samples: while the number of ranks stays and divides the lanes, a rank reads the
            same samples in every epoch, so that its node's cache serves all but the first. It mixes less: samples of
            different lanes meet only in batches.

    Raises:
        ConfigError: One of them is no integer, or out of range.
    """

    seed: int | None = None
    window: int | None = None
    lanes: int | None = None
    scope: Scope = "global"

    def __post_init__(self) -> None:
        if self.scope not in get_args(Scope):
            raise ConfigError(f"ShuffleConfig: scope: expected one of {', '.join(get_args(Scope))}, got {self.scope!r}")
        for name, low, high in (("seed", 0, MAX_SEED), ("window", 0, MAX_WINDOW), ("lanes", 1, MAX_LANES)):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, checked_int(f"ShuffleConfig: {name}", value, low, high))


def order_settings(
    *,
    shuffle: bool,
    seed: int,
    lanes: int | None,
    window: int | None,
    global_batch_size: int,
    num_samples: int,
    num_chunks: int,
    scope: Scope = "global",
) -> OrderSettings:
    """The order of a data set under a loader: what the user chose, and defaults where he chose nothing.

    Args:
        shuffle: False: storage order, whatever ``lanes`` and ``window`` say.
        seed: Seed of the order.
        lanes: L, or None for the default of the global batch size.
        window: W in samples, or None for twice the mean number of samples per chunk.
        global_batch_size: G.
        num_samples: Samples of the data set.
        num_chunks: Its chunks.
        scope: What a pass permutes.
    """
    if not shuffle:
        return OrderSettings(seed=seed, lanes=1, window=0, shuffle=False)
    return OrderSettings(
        seed=seed,
        lanes=lanes or default_lanes(global_batch_size),
        window=default_window(num_samples, num_chunks) if window is None else window,
        scope=scope,
    )
