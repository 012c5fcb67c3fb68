"""Find the mesh of a loader, a sampler or a view, and look again until it is read from."""

from __future__ import annotations

from typing import Any

from infra.errors import MeshError, RankUnknownError
from infra.frameworks import process_group
from infra.launch import discover
from infra.mesh import DeviceMesh, as_device_mesh


class MeshFinder:
    """Find where this process stands among those that train. One rule for everything that reads a share of the data.

    1. A mesh that was given holds.
    2. Else torch.distributed says rank and size where it is initialised; else the launcher does: see `infra.launch`.
    3. What was found is provisional until the first iteration, and looked up again on each use before it. Loaders are
       often made before ``init_process_group`` is called (Lightning and Accelerate call it late, and under
       ``torch.multiprocessing.spawn`` no variable says anything before), so a process that seems to be alone may turn
       out to be one of many: it must not read everything.
    4. From the first iteration on the mesh stands. If torch.distributed then says otherwise, the next iteration is an
       error: what was read so far was another share than the one that this process trains on from now on. A process
       group that is gone again says nothing.

    Args:
        device_mesh: An ``infra.DeviceMesh``, torch's ``DeviceMesh``, or None: find it.

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
        """The mesh as it was found last; `look_again` looks."""
        return self._mesh

    @property
    def found_by(self) -> str:
        """``"given"``, or the launcher that named the mesh, such as ``"torch.distributed"`` or ``"torchrun"``."""
        return self._found_by

    def look_again(self, *, to_read: bool = False) -> bool:
        """Look where this process stands now; whether that is another mesh than before.

        Args:
            to_read: An iteration begins: the mesh has to be known for sure, and stands from now on.

        Raises:
            MeshError: At an iteration: the rank is not known, or the mesh is not the one of earlier iterations.
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
            # Lengths can be told before the rank is known, and are all that is asked for before an iteration.
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
            f"{mesh.rank} of {mesh.world_size} (found by: {self._found_by}) before it was initialised: initialise "
            "it before the first iteration, or make a new loader and give it the state of this one"
        )
