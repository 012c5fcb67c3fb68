"""Describe a loader in words: the log line at the start of an epoch, and its ``repr``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from infra import DeviceMesh, MeshFinder
from streaming.common.arguments import format_bytes
from streaming.run.epochs.position import Place
from streaming.sets.datasets.dataset import StreamingDataset

_log = logging.getLogger("streaming")


class Announcer:
    """Write one INFO line at the start of each epoch, on the first rank.

    Args:
        dataset: The dataset.
        loop: The loop that reads it.
        finder: The finder of this process's mesh.
    """

    def __init__(self, dataset: Any, loop: Any, finder: MeshFinder) -> None:
        self._dataset = dataset
        self._config: Any = loop.config
        self._finder = finder

    def __call__(self, loop: Any, place: Place) -> None:
        """Write the line for an epoch that begins at ``place``."""
        if self._finder.mesh.rank == 0 and _log.isEnabledFor(logging.INFO):
            _log.info("%s", self.line(loop, place))

    def line(self, loop: Any, place: Place) -> str:
        """Return the line: what is read, in which order, within which limits, and by which rank."""
        at = f"epoch {place.epoch} begins"
        if place.samples_seen:  # from a checkpoint, or in an epoch without an end
            at = f"epoch {place.epoch} continues after {place.samples_seen} samples"
        if place.micro_batches:
            at = f"epoch {place.epoch} continues after {place.samples_seen} samples and {place.micro_batches} "
            at += "micro-batches of a step"
        parts = [
            what_is_read(loop.now_read(self._dataset)),
            *self._amount(loop),
            *self._order(loop),
            *self._builders(),
            self._where(),
        ]
        parts += filter(None, [loop.outlook(place)])
        return f"{at}: {'; '.join(parts)}"

    def _amount(self, loop: Any) -> list[str]:
        micro = loop.shape.micro_batch_size
        return self._batches(loop) + ([] if micro is None else [f"in micro-batches of up to {micro} a rank"])

    def _batches(self, loop: Any) -> list[str]:
        size = loop.shape.global_batch_size
        if not loop.shape.sizes.is_constant:
            steps = ", ".join(f"{size} from row {row:,} on" for row, size in loop.shape.sizes.steps)
            number = "without end" if loop.is_endless else f"{loop.num_batches} in this epoch"
            return [f"batches over all ranks of {steps}, {number}"]
        if not loop.is_counted:
            return [f"batches of {size} over all ranks, as many as there are"]
        if loop.is_endless:
            return [f"batches of {size} over all ranks, without end"]
        return [f"{loop.batches_left(0)} batches of {size} over all ranks"]

    def _order(self, loop: Any) -> list[str]:
        order = getattr(getattr(loop, "sampler", loop), "order", None)
        if order is None or not loop.is_counted:
            return []
        if not order.shuffle:
            return ["in storage order"]
        if not isinstance(self._dataset, StreamingDataset):
            return [f"shuffled with seed {order.seed}"]
        return [f"shuffled with seed {order.seed}, {order.lanes} lanes, a window of {order.window} samples"]

    def _builders(self) -> list[str]:
        workers, threads = getattr(self._config, "num_workers", None), getattr(self._config, "num_threads", None)
        memory = getattr(self._config, "memory", None)
        made = [] if memory is None else [f"memory_limit {format_bytes(memory.limit_bytes)} per rank"]
        if workers:
            made.append(f"{workers} worker processes per rank")
        elif threads is not None:
            made.append(f"{threads} threads per rank" if threads else "built by the thread that requests them")
        return made

    def _where(self) -> str:
        mesh = self._finder.mesh
        if mesh.world_size == 1:
            return f"one rank (found by: {self._finder.found_by})"
        said = f"{mesh.world_size} ranks, {mesh.data_world_size} data-parallel: different data along "
        said += _lengths(mesh, mesh.data_axes)
        if mesh.replica_world_size > 1:
            said += f", the same along {_lengths(mesh, mesh.replica_axes)}"
        return f"{said} (found by: {self._finder.found_by})"


def _lengths(mesh: DeviceMesh, names: Sequence[str]) -> str:
    """Format the lengths of axes, except those of one rank."""
    return " x ".join(f"{name}={mesh.axis_sizes[name]}" for name in names if mesh.axis_sizes[name] > 1) or "no axis"


def what_is_read(dataset: Any) -> str:
    """Describe a dataset, without parts that may be secret."""
    if isinstance(dataset, StreamingDataset) or type(dataset).__module__.startswith("streaming."):
        return repr(dataset)
    try:
        return f"{type(dataset).__name__} of {len(dataset)} samples"
    except TypeError:
        return getattr(dataset, "__qualname__", type(dataset).__name__)
