"""Save a loader's state as one value in checkpoints of torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streaming.errors import ConfigError, StateError
from streaming.loader import DataLoader

__all__ = ["WholeState"]


class WholeState:
    """Save the state of a loader as one value, as a ``Stateful`` for ``torch.distributed.checkpoint``.

    ``torch.distributed.checkpoint`` flattens dicts and lists, and restores only the parts that the new loader's state
    also has. So a state whose structure depends on the samples read would be restored incompletely: that of an iterable
    dataset, or of a ``Mixture`` whose sources differ from those of the new loader. A single value is restored whole. ::

        states = {"model": model.state_dict(), f"dataloader {rank}": WholeState(loader)}
        dcp.load(states, checkpoint_id=folder)

    Args:
        loader: The loader whose state to save and load.

    Raises:
        ConfigError: ``loader`` is not a loader but, for example, its state.
    """

    def __init__(self, loader: DataLoader) -> None:
        if not hasattr(loader, "load_state_dict"):
            raise ConfigError(f"WholeState: expected a loader, got a {type(loader).__name__}; write WholeState(loader)")
        self.loader = loader

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state inside a tuple, which is stored unchanged."""
        return {"state": (self.loader.state_dict(),)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`.

        Raises:
            StateError: ``state`` is not such a result, or ``DataLoader.load_state_dict`` refuses it.
        """
        if set(state) != {"state"}:
            raise StateError(
                f"WholeState: expected what its state_dict() returned, got the keys {sorted(map(str, state))}; load a "
                "loader's own state with loader.load_state_dict"
            )
        (whole,) = state["state"]
        self.loader.load_state_dict(whole)
