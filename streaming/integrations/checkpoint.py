"""Keep a loader's state whole in checkpoints of torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streaming.errors import ConfigError, StateError
from streaming.loader import DataLoader

__all__ = ["WholeState"]


class WholeState:
    """Save the state of a loader as one value, a ``Stateful`` for ``torch.distributed.checkpoint``.

    That program takes dicts and lists apart, and restores of them what the state of the new loader has at the same
    places. A state whose parts depend on what was read is not found again so: that of an iterable data set, and that of
    a ``Mixture`` whose sources are others than in the new loader. As one value it is. ::

        states = {"model": model.state_dict(), f"dataloader {rank}": WholeState(loader)}
        dcp.load(states, checkpoint_id=folder)

    Args:
        loader: Whose state it is.

    Raises:
        ConfigError: It is no loader, as where its state is given.
    """

    def __init__(self, loader: DataLoader) -> None:
        if not hasattr(loader, "load_state_dict"):
            raise ConfigError(f"WholeState: expected a loader, got a {type(loader).__name__}; write WholeState(loader)")
        self.loader = loader

    def state_dict(self) -> dict[str, Any]:
        """Give the loader's state in a tuple, which is stored as it is."""
        return {"state": (self.loader.state_dict(),)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` gave.

        Raises:
            StateError: It is something else, or as of ``DataLoader.load_state_dict``.
        """
        if set(state) != {"state"}:
            raise StateError(
                f"WholeState: expected what its state_dict() gave, got the keys {sorted(map(str, state))}; a loader's "
                "own state goes to loader.load_state_dict"
            )
        (whole,) = state["state"]
        self.loader.load_state_dict(whole)
