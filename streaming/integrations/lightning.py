"""Fit loaders without a length into Lightning. It needs nothing for others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from streaming.device.prefetcher import DevicePrefetcher
from streaming.errors import ConfigError
from streaming.integrations.expected import expect_loader
from streaming.loader import DataLoader

__all__ = ["prepare_loader"]


def prepare_loader(loader: DataLoader | DevicePrefetcher) -> DataLoader | DevicePrefetcher | OneBehind:
    """Keep the position of ``loader`` right where Lightning reads one batch ahead: of loaders without a length.

    Lightning saves their state while it holds a batch that the module has not been given: without this, a resumed run
    would leave that batch out. A loader with a length is returned as it is.

    Raises:
        ConfigError: ``loader`` is none of ours, or was prepared already; or a ``DevicePrefetcher`` without a length,
            which holds batches back itself.
    """
    expect_loader("prepare_loader(loader)", loader, DevicePrefetcher)
    try:
        len(loader)
    except TypeError:
        if isinstance(loader, DevicePrefetcher):
            raise ConfigError(
                "prepare_loader(loader): a DevicePrefetcher without a length; give its loader, prepare_loader("
                "prefetcher.loader): Lightning copies batches to the device itself"
            ) from None
        return OneBehind(loader)
    return loader


class OneBehind:
    """A loader whose position leaves out the batch handed out last, until it is asked for the next one."""

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

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
        with suppress(ConfigError):  # where the end came as a surprise, nothing is held back any more
            batches.hold_back(-1)
