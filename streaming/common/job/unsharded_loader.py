"""Detect torch's own ``DataLoader`` reading the same data on every rank."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import FrameType

from streaming.common.job.shared_results import Peers

_SAMPLERS = ("torch.utils.data.sampler", "torchdata.stateful_dataloader.sampler")
_LOADERS = ("torch.utils.data.dataloader", "torchdata.stateful_dataloader.stateful_dataloader")
_log = logging.getLogger(__name__)


class UnshardedWarning:
    """Warn once if torch's sequential or random sampler reads a whole dataset on each of several ranks.

    These samplers request the length when an iteration begins. Samplers that shard (torch's DistributedSampler,
    DeviceMeshSampler) request it earlier or elsewhere. Trainers that shard the batches of torch's samplers are between
    these samplers and the loader in the call stack.
    """

    def __init__(self) -> None:
        self._is_done = False

    def check(self, num_ranks: Callable[[], int]) -> None:
        """Check the caller that requests the length of a dataset; call this in its ``__len__``."""
        if self._is_done:
            return
        frame: FrameType | None = sys._getframe(2)
        if frame is None or frame.f_code.co_name != "__iter__" or _module(frame) not in _SAMPLERS:
            return
        while frame is not None and _module(frame) in _SAMPLERS:
            frame = frame.f_back
        if _module(frame) not in _LOADERS or (ranks := num_ranks()) == 1:
            return
        self._is_done = True
        _log.warning(
            "torch's DataLoader reads this StreamingDataset item by item with torch's own sampler, so each of %d ranks "
            "gets all samples, not its share. Use streaming.DataLoader(dataset, batch_size); or give torch's "
            "TorchIterable(dataset) instead of the data set, or batch_sampler=DeviceMeshSampler(dataset, batch_size)",
            ranks,
        )


def _module(frame: FrameType | None) -> str:
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))


def tell_of_opening_alone(peers: Peers | None, num_ranks: Callable[[], int]) -> None:
    """Log that each of several ranks, without peers, reads the index of a dataset, and how to avoid that."""
    # Skipped if the message would not be logged, because it takes half a millisecond.
    if peers is None and _log.isEnabledFor(logging.INFO) and (ranks := num_ranks()) > 1:
        _log.info(
            "each of %d ranks opens this data set for itself, because torch.distributed is not set up yet and torchrun "
            "did not start them. Open it after init_process_group: rank 0 then lists the shards and reads the index "
            "for all",
            ranks,
        )
