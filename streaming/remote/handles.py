"""Show the driver's loop handles in place of batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from infra import DeviceMesh
from streaming.remote import cluster
from streaming.remote.wire import unpack


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchHandle:
    """One data rank's batch, where it lies in Ray's object store. Small; pass it to the actor that trains.

    The batch lives as long as a handle to it does, the reader that made it may die meanwhile.

    Attributes:
        epoch: Its epoch.
        number: Its number in the epoch.
        data_rank: Whose share it is.
        num_samples: Rows in it; None where the batch does not tell.
        num_bytes: Its payload.
        ref: Ray's reference.
    """

    epoch: int
    number: int
    data_rank: int
    num_samples: int | None
    num_bytes: int
    ref: Any

    def get(self) -> Any:
        """Return the batch, in memory of this process; another call makes another copy."""
        return unpack(cluster.get(self.ref))


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteBatch:
    """One global batch: a handle for each data rank.

    Attributes:
        mesh: Who is which data rank.
        handles: By data rank.
    """

    mesh: DeviceMesh
    handles: tuple[BatchHandle, ...]

    @property
    def epoch(self) -> int:
        """Its epoch."""
        return self.handles[0].epoch

    @property
    def number(self) -> int:
        """Its number in the epoch."""
        return self.handles[0].number

    def of(self, rank: int) -> BatchHandle:
        """Return the handle for a rank of the mesh; replicas get the same one."""
        return self.handles[self.mesh.with_rank(rank).data_rank]

    def get(self) -> Any:
        """Return the batch itself, where the mesh has a single data rank.

        Raises:
            ValueError: It has several: a global batch is never in one place.
        """
        (handle,) = self.handles
        return handle.get()
