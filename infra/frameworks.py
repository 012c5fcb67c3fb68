"""Ask torch.distributed and Ray Train about this process. Imports neither: if one matters, it is loaded."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultGroup:
    """This process in the default group of torch.distributed."""

    rank: int
    world_size: int


def process_group() -> DefaultGroup | None:
    """Ask torch.distributed for this process's place; None where it is not initialised."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return DefaultGroup(rank=dist.get_rank(), world_size=dist.get_world_size())


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainWorker:
    """A worker of a Ray Train job, in its own words: see ``ray.train.get_context``."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int


def train_worker() -> TrainWorker | None:
    """Find this process among the workers of Ray Train; None where it is none: a driver, an actor, a Tune trial."""
    train: Any = sys.modules.get("ray.train")
    if train is None or not hasattr(train, "get_context"):
        return None
    try:
        context = train.get_context()
        world_size = context.get_world_size()
    except (RuntimeError, DeprecationWarning):  # "cannot be used outside of …"; in a trial of Ray Tune it raises that
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
