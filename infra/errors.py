"""Define the errors of this package."""

from __future__ import annotations


class MeshError(ValueError):
    """An inconsistent mesh or launcher environment; the message names the values and what to do."""


class RankUnknownError(MeshError):
    """The number of processes is known, but not this process's rank until torch.distributed is initialized.

    Attributes:
        world_size: The number of processes.
    """

    def __init__(self, message: str, world_size: int) -> None:
        super().__init__(message)
        self.world_size = world_size
