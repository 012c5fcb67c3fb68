"""Query torch.distributed and Ray Train about this process. Neither is imported: if in use, it is already loaded."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultGroup:
    """This process's place in the default group of torch.distributed."""

    rank: int
    world_size: int


def process_group() -> DefaultGroup | None:
    """Return this process's place according to torch.distributed, or None if it is not initialized."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return DefaultGroup(rank=dist.get_rank(), world_size=dist.get_world_size())


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainWorker:
    """A worker of a Ray Train job, as described by ``ray.train.get_context``."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int


def train_worker() -> TrainWorker | None:
    """Return this process's place among Ray Train's workers, or None for a driver, an actor or a Tune trial."""
    train: Any = sys.modules.get("ray.train")
    if train is None or not hasattr(train, "get_context"):
        return None
    try:
        context = train.get_context()
        world_size = context.get_world_size()
    except (RuntimeError, DeprecationWarning):  # "cannot be used outside of …"; in a Ray Tune trial, the latter
        return None
    if world_size is None:  # the answer of Ray's older API
        return None
    return TrainWorker(
        rank=context.get_world_rank(),
        world_size=world_size,
        local_rank=context.get_local_rank(),
        local_world_size=context.get_local_world_size(),
        node_rank=context.get_node_rank(),
    )
