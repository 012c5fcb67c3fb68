"""Use loaders without a length in Lightning, whose ``Trainer`` takes all others directly; Fabric takes ``as_torch``."""

from __future__ import annotations

from streaming.integrations.loader_check import expect_loader
from streaming.loader import DataLoader
from streaming.run.device.prefetcher import DevicePrefetcher
from streaming.wrappers import OneBehind, one_behind

__all__ = ["prepare_loader"]


def prepare_loader(loader: DataLoader | DevicePrefetcher) -> DataLoader | DevicePrefetcher | OneBehind:
    """Make the position of a loader without a length exact under Lightning, which reads such loaders one batch ahead.

    Lightning saves their state while it holds a batch that the module has not seen yet, so without this a resumed run
    would miss that batch. The result is that of ``streaming.one_behind``. A loader with a length is returned unchanged.
    ::

        trainer.fit(module, prepare_loader(DataLoader(Mixture({…}, weights={…}), batch_size=8)))

    Raises:
        ConfigError: ``loader`` is not a ``streaming.DataLoader`` or ``DevicePrefetcher``, or is already prepared.
    """
    expect_loader("prepare_loader(loader)", loader, DevicePrefetcher)
    try:
        len(loader)
    except TypeError:
        return one_behind(loader)
    return loader
