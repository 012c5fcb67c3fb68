"""What Ray Train says about the worker that runs in this process. Imports nothing: workers have it loaded."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainWorker:
    """A worker of a Ray Train job, in its own words: see ``ray.train.get_context``."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int


def train_worker() -> TrainWorker | None:
    """This process as a worker of Ray Train; None where it is none, a Ray driver or another Ray actor for example."""
    train: Any = sys.modules.get("ray.train")
    if train is None or not hasattr(train, "get_context"):
        return None
    try:
        context = train.get_context()
        world_size = context.get_world_size()
    except RuntimeError:  # "cannot be used outside of a Ray Train training function"
        return None
    if world_size is None:  # what Ray's older API says there
        return None
    return TrainWorker(
        rank=context.get_world_rank(),
        world_size=world_size,
        local_rank=context.get_local_rank(),
        local_world_size=context.get_local_world_size(),
        node_rank=context.get_node_rank(),
    )
