"""Define the errors of this package: one, and a kind of it that may pass."""

from __future__ import annotations


class MeshError(ValueError):
    """A mesh or a launcher's environment that cannot be right; the message names the values and the cure."""


class RankUnknownError(MeshError):
    """The number of processes is known, but which of them this is will be known when torch.distributed is initialised.

    Attributes:
        world_size: The number of processes.
    """

    def __init__(self, message: str, world_size: int) -> None:
        super().__init__(message)
        self.world_size = world_size
