"""Use a loader in a program that runs under Accelerate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.state import GradientState
from accelerate.utils import send_to_device

from streaming.device.prefetcher import DevicePrefetcher
from streaming.integrations.loader_check import expect_loader
from streaming.loader import DataLoader

__all__ = ["prepare_loader"]


def prepare_loader(accelerator: Accelerator, loader: DataLoader | DevicePrefetcher) -> PreparedLoader:
    """Prepare ``loader`` as ``accelerator.prepare`` does for torch's: device placement, gradient steps and checkpoints.

    ``accelerator.prepare`` itself leaves a ``streaming.DataLoader`` alone, so it is never sharded twice. ::

        loader = prepare_loader(accelerator, DataLoader(dataset, batch_size=32))
        for batch in loader:
            with accelerator.accumulate(model): ...

    Returns:
        The loader, with three changes. Batches are on the accelerator's device. In the last step of an epoch
        ``accelerator.accumulate`` synchronizes gradients even if fewer batches were accumulated.
        ``accelerator.save_state`` saves the position after the last batch handed out, and ``load_state`` continues from
        there on any number of ranks; do not call Accelerate's ``skip_first_batches`` then.

    Raises:
        ConfigError: ``loader`` is not a ``streaming.DataLoader`` or ``DevicePrefetcher``, or is already prepared.
    """
    expect_loader("prepare_loader(accelerator, loader)", loader, DevicePrefetcher)
    accelerator.register_for_checkpointing(loader)
    return PreparedLoader(loader, accelerator)


class PreparedLoader(DataLoaderStateMixin):  # type: ignore[misc]  # Accelerate has no types
    """The result of ``prepare_loader``. All other attributes are those of the loader."""

    _drop_last = True  # every row counts, so `gather_for_metrics` must not cut anything off

    def __init__(self, loader: DataLoader | DevicePrefetcher, accelerator: Accelerator) -> None:
        self._loader, self._accelerator = loader, accelerator
        self.gradient_state = GradientState()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Yield the loader's batches on the accelerator's device."""
        return self._moved(iter(self._loader))

    def with_state(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        """See ``DataLoader.with_state``; the batches are on the accelerator's device."""
        return self._moved(self._loader.with_state())

    def _moved(self, batches: Iterator[Any]) -> Iterator[Any]:
        self.begin()
        try:
            for batch in batches:
                self.end_of_dataloader = not self._loader._is_iterated()  # it knows that this batch is the last one
                yield send_to_device(batch, self._accelerator.device, non_blocking=True)
        finally:
            self.end()
