"""Define the errors of this package."""

from __future__ import annotations


class MeshError(ValueError):
    """An inconsistent mesh or launcher environment; the message names the values and the cure."""


class RankUnknownError(MeshError):
    """The number of processes is known, but this process's rank is unknown until torch.distributed is initialized.

    Attributes:
        world_size: The number of processes.
    """

    def __init__(self, message: str, world_size: int) -> None:
        super().__init__(message)
        self.world_size = world_size
