"""Represent batches by handles in the driver's loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from infra import DeviceMesh
from streaming.others.remote import cluster
from streaming.others.remote.wire import unpack


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchHandle:
    """Refer to one data rank's batch in Ray's object store. A handle is small; pass it to the actor that trains on it.

    The batch lives as long as a handle to it, even if its reader dies.

    Attributes:
        epoch: Epoch of the batch.
        number: Number of the batch in the epoch.
        data_rank: Data rank for which the batch is.
        num_samples: Number of rows; None if unknown.
        num_bytes: Size of the payload.
        ref: Ray's object reference.
    """

    epoch: int
    number: int
    data_rank: int
    num_samples: int | None
    num_bytes: int
    ref: Any

    def get(self) -> Any:
        """Return a new copy of the batch in this process's memory."""
        return unpack(cluster.get(self.ref))


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteBatch:
    """Refer to one global batch, by one handle per data rank.

    ::

        for batch in loader:                                   # in the driver
            ray.get([actor.step.remote(batch.of(rank)) for rank, actor in enumerate(actors)])

    Attributes:
        mesh: The mesh, which maps ranks to data ranks.
        handles: The handles, by data rank.
    """

    mesh: DeviceMesh
    handles: tuple[BatchHandle, ...]

    @property
    def epoch(self) -> int:
        """Epoch of the batch."""
        return self.handles[0].epoch

    @property
    def number(self) -> int:
        """Number of the batch in the epoch."""
        return self.handles[0].number

    def of(self, rank: int) -> BatchHandle:
        """Return the handle for a rank of the mesh; replicas share one."""
        return self.handles[self.mesh.with_rank(rank).data_rank]

    def get(self) -> Any:
        """Return the batch itself, if the mesh has a single data rank.

        Raises:
            ValueError: The mesh has several data ranks: a global batch is never assembled in one place.
        """
        (handle,) = self.handles
        return handle.get()
