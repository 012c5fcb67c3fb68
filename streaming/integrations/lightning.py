"""Use loaders in Fabric, and loaders without a length in Lightning, whose ``Trainer`` takes all others directly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch.utils.data

from streaming.errors import ConfigError
from streaming.integrations.loader_check import expect_loader, of_wrapped
from streaming.loader import DataLoader
from streaming.run.device.prefetcher import DevicePrefetcher
from streaming.types import override

__all__ = ["for_fabric", "prepare_loader"]


def for_fabric(loader: DataLoader | DevicePrefetcher) -> ForFabric:
    """Present ``loader`` as one of torch's, as required by ``Fabric.setup_dataloaders``, which LitGPT calls.

    The result yields the batches of the loader. It is a ``Stateful``: ``fabric.save`` and ``fabric.load`` keep its
    position, on any number of ranks. Programs that take torch's loaders apart to shard them, like Accelerate, get an
    error, because the loader has already dealt its samples to the ranks. ::

        train = fabric.setup_dataloaders(for_fabric(DataLoader(dataset, global_batch_size=512)))
        state = {"model": model, "train": train}

    Raises:
        ConfigError: ``loader`` is not a ``streaming.DataLoader`` or ``DevicePrefetcher``.
    """
    expect_loader("for_fabric(loader)", loader, DevicePrefetcher)
    return ForFabric(loader)


def prepare_loader(loader: DataLoader | DevicePrefetcher) -> DataLoader | DevicePrefetcher | OneBehind:
    """Make the position of a loader without a length exact under Lightning, which reads such loaders one batch ahead.

    Lightning saves their state while it holds a batch that the module has not seen yet, so without this a resumed run
    would miss that batch. A loader with a length is returned unchanged. ::

        trainer.fit(module, prepare_loader(DataLoader(Mixture({…}, weights={…}), batch_size=8)))

    Raises:
        ConfigError: ``loader`` is not a ``streaming.DataLoader``, is already prepared, or is a ``DevicePrefetcher``
            without a length, which holds batches back itself.
    """
    expect_loader("prepare_loader(loader)", loader, DevicePrefetcher)
    try:
        len(loader)
    except TypeError:
        if isinstance(loader, DevicePrefetcher):
            raise ConfigError(
                "prepare_loader(loader): got a DevicePrefetcher without a length; give its loader, prepare_loader("
                "prefetcher.loader), since Lightning copies batches to the device itself"
            ) from None
        return OneBehind(loader)
    return loader


class OneBehind:
    """A loader whose position excludes the last batch delivered until the next one is requested."""

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return of_wrapped(self, name)

    def state_dict(self) -> dict[str, Any]:
        """See ``DataLoader.state_dict``."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``DataLoader.load_state_dict``."""
        self._loader.load_state_dict(state)

    def __iter__(self) -> Iterator[Any]:
        """Yield the loader's batches."""
        batches = iter(self._loader)
        for number, batch in enumerate(batches):
            batches.hold_back(1)
            if number:
                batches.hold_back(-1)
            yield batch
        with suppress(ConfigError):  # if the iterator ended unexpectedly, nothing is held back any more
            batches.hold_back(-1)


class ForFabric(torch.utils.data.DataLoader[Any]):
    """A streaming loader as an instance of torch's class; see ``for_fabric``."""

    def __init__(self, loader: DataLoader | DevicePrefetcher) -> None:
        super().__init__(_NoSamples(loader), batch_size=None)
        self.loader = loader

    @override
    def __iter__(self) -> Any:
        return iter(self.loader)

    def state_dict(self) -> dict[str, Any]:
        """See ``DataLoader.state_dict``."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``DataLoader.load_state_dict``."""
        self.loader.load_state_dict(state)


class _NoSamples(torch.utils.data.IterableDataset[Any]):
    """The dataset of a ``ForFabric``, which cannot be sharded."""

    def __init__(self, loader: DataLoader | DevicePrefetcher) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        raise ConfigError(
            "for_fabric(loader): this program takes the loader apart to shard it, but its batches are shares of the "
            "ranks already, and some would be lost. It is for Fabric alone; Accelerate takes "
            "streaming.integrations.accelerate.prepare_loader(accelerator, loader), others take the loader itself"
        )

    def __len__(self) -> int:
        return len(self._loader)
