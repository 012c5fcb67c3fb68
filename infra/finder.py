"""Find the mesh for a loader, a sampler or a view, and update it until the first read."""

from __future__ import annotations

from typing import Any

from infra.errors import MeshError, RankUnknownError
from infra.frameworks import process_group
from infra.launch import discover
from infra.mesh import DeviceMesh, as_device_mesh


class MeshFinder:
    """Find this process's place among the training processes.

    Everything that reads a share of the data follows this one rule:

    1. A given mesh is used unchanged.
    2. Otherwise torch.distributed gives rank and world size if it is initialized; if not, the launcher does: see
       `infra.launch`.
    3. The result is provisional until the first iteration, and is looked up again on each use before it. Loaders are
       often made before ``init_process_group`` is called (Lightning and Accelerate call it late, and under
       ``torch.multiprocessing.spawn`` no environment variable is set), so a process that seems to be alone may turn out
       to be one of many, and must not read all data.
    4. From the first iteration on, the mesh is fixed. If torch.distributed later disagrees, the next iteration raises
       an error, because earlier iterations read another share of the data. A destroyed process group does not count as
       disagreement.

    ::

        finder = MeshFinder()
        print(finder.mesh.data_rank, finder.mesh.data_world_size, finder.found_by)

    Args:
        device_mesh: An ``infra.DeviceMesh``, torch's ``DeviceMesh``, or None to detect it.

    Raises:
        MeshError: The mesh is of another type, or the environment contradicts itself or torch.distributed.
    """

    def __init__(self, device_mesh: Any = None) -> None:
        self._is_given = device_mesh is not None
        self._is_read = False
        self._found_by = "given"
        self._mesh = self._look() if device_mesh is None else as_device_mesh(device_mesh)

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh as of the last `look_again`."""
        return self._mesh

    @property
    def found_by(self) -> str:
        """``"given"``, or the source of the mesh, such as ``"torch.distributed"`` or ``"torchrun"``."""
        return self._found_by

    def look_again(self, *, to_read: bool = False) -> bool:
        """Look up the mesh again and return whether it has changed.

        Args:
            to_read: Whether an iteration begins; then the mesh must be certain, and is fixed from now on.

        Raises:
            MeshError: ``to_read`` is set, and the rank is unknown or the mesh differs from that of earlier iterations.
        """
        if self._is_given:
            return False
        if self._is_read:
            self._check_unchanged(to_read=to_read)
            return False
        before = self._mesh
        self._mesh = self._look(to_read=to_read)
        self._is_read = to_read
        return self._mesh != before

    def _look(self, *, to_read: bool = False) -> DeviceMesh:
        try:
            launch = discover()
        except RankUnknownError as error:
            if to_read:
                raise
            # Before an iteration, only lengths are needed, and they do not depend on the rank.
            self._found_by = "environment"
            return DeviceMesh.from_sizes(rank=0, world_size=error.world_size)
        self._found_by = launch.launcher
        return DeviceMesh.from_sizes(rank=launch.rank, world_size=launch.world_size)

    def _check_unchanged(self, *, to_read: bool) -> None:
        group = process_group()
        mesh = self._mesh
        if group is None or not to_read or (group.rank, group.world_size) == (mesh.rank, mesh.world_size):
            return
        raise MeshError(
            f"torch.distributed says rank {group.rank} of {group.world_size}, but batches were read as rank "
            f"{mesh.rank} of {mesh.world_size} (found by: {self._found_by}) before it was initialized: initialize "
            "it before the first iteration, or make a new loader and give it the state of this one"
        )
