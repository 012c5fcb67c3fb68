"""Fit loaders into programs that Accelerate runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.state import GradientState
from accelerate.utils import send_to_device

from streaming.device.prefetcher import DevicePrefetcher
from streaming.integrations.expected import expect_loader
from streaming.loader import DataLoader

__all__ = ["prepare_loader"]


def prepare_loader(accelerator: Accelerator, loader: DataLoader | DevicePrefetcher) -> PreparedLoader:
    """Make ``loader`` what ``accelerator.prepare`` makes of torch's: on the device, in step, and in its checkpoints.

    ``accelerator.prepare`` itself leaves a ``streaming.DataLoader`` alone, so it is never cut into shares twice.

    Returns:
        The loader as it is, but for three things. Its batches are on the accelerator's device. In the epoch's last step
        ``accelerator.accumulate`` synchronises, however few batches were accumulated. ``accelerator.save_state`` saves
        the position after the batch handed out last, and ``load_state`` goes on from there, on any number of ranks:
        Accelerate's ``skip_first_batches`` must not be called then.

    Raises:
        ConfigError: ``loader`` is none of ours, or was prepared already.
    """
    expect_loader("prepare_loader(accelerator, loader)", loader, DevicePrefetcher)
    accelerator.register_for_checkpointing(loader)
    return PreparedLoader(loader, accelerator)


class PreparedLoader(DataLoaderStateMixin):  # type: ignore[misc]  # Accelerate has no types
    """What ``prepare_loader`` gives. It has all that the loader has."""

    _drop_last = True  # every row counts: nothing is cut off what `gather_for_metrics` gathers

    def __init__(self, loader: DataLoader | DevicePrefetcher, accelerator: Accelerator) -> None:
        self._loader, self._accelerator = loader, accelerator
        self.gradient_state = GradientState()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Yield the loader's batches, on the device."""
        self.begin()
        try:
            for batch in self._loader:
                self.end_of_dataloader = self._loader.state_dict()["samples_seen"] == 0
                yield send_to_device(batch, self._accelerator.device, non_blocking=True)
        finally:
            self.end()
