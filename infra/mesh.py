"""Compute which share of the data a process needs, for any order of parallel axes.

A mesh is a grid of ranks with named axes. Ranks that differ along a *data axis* read different samples; ranks that
differ only along other axes are *replicas* and get identical batches. With dp=2 and tp=2 in that order:

====  ==========  =========  ============
rank  (dp, tp)    data_rank  replica_rank
====  ==========  =========  ============
0     (0, 0)      0          0
1     (0, 1)      0          1
2     (1, 0)      1          0
3     (1, 1)      1          1
====  ==========  =========  ============

Expert parallelism: Megatron, DeepSpeed and torchtitan also use data ranks as expert ranks, and these read different
data. For them, leave ``ep_size`` out. If the mesh names the part carved out of the data ranks, declare it:
``data_axes=("dp", "ep")``. If ``ep`` is an axis of its own whose ranks get the same batches, like tp, give
``data_axes=("dp",)``. A mesh with such an axis and without ``data_axes`` is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

from infra import axes
from infra.errors import MeshError
from infra.launch import discover

#: Axes of `DeviceMesh.from_sizes`, outermost (slowest) first, as Megatron-LM and torchtitan lay out ranks.
DEFAULT_AXIS_ORDER = ("pp", "dp", "fsdp", "ep", "cp", "ulysses", "tp")
_DATA_AXES = ("dp", "fsdp")


class TorchDeviceMesh(Protocol):
    """The part of ``torch.distributed.device_mesh.DeviceMesh`` that is used here."""

    @property
    def mesh(self) -> object:
        """A tensor of ranks, or anything with ``tolist()``."""

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """One name per axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMesh:
    """Describe a grid of ranks with named axes, as seen by one of them. Immutable, picklable, hashable and thread-safe.

    Make one with `from_sizes`, `from_torch` or `from_ranks`. ::

        mesh = DeviceMesh.from_sizes(dp_size=4, tp_size=2, rank=5)
        mesh.data_rank, mesh.data_world_size, mesh.replica_rank      # (2, 4, 1)

    Attributes:
        axis_names: One name per axis, outermost first.
        shape: One size per axis.
        ranks: The ranks in row-major order of the axes; each appears once.
        rank: The rank whose view this is.
        data_axes: The axes along which ranks read different data; the first varies slowest in `data_rank`.
    """

    axis_names: tuple[str, ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    rank: int
    data_axes: tuple[str, ...]

    def __post_init__(self) -> None:
        axes.check_axes(self.axis_names, self.shape, self.data_axes)
        shown, num_ranks = axes.show(self.axis_sizes), len(self.ranks)
        if num_ranks != self.world_size:
            raise MeshError(f"a mesh {shown} needs {self.world_size} ranks, got {num_ranks}")
        if len(set(self.ranks)) != num_ranks:
            raise MeshError(f"a rank appears twice in the mesh {shown}: {self.ranks[:32]}")
        if self.rank not in self.ranks:
            raise MeshError(
                f"rank {self.rank} is not in the mesh {shown} of {num_ranks} ranks, {min(self.ranks)} to "
                f"{max(self.ranks)}: correct rank= or the sizes"
            )

    @classmethod
    def from_sizes(
        cls,
        *,
        dp_size: int | None = None,
        fsdp_size: int | None = None,
        tp_size: int | None = None,
        pp_size: int | None = None,
        cp_size: int | None = None,
        ulysses_size: int | None = None,
        ep_size: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        order: Sequence[str] = DEFAULT_AXIS_ORDER,
        data_axes: Sequence[str] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Self:
        """Return the mesh with these sizes, with ranks numbered row-major over ``order``.

        A size of None is 1, except for ``dp_size=None``: the world size divided by the other sizes. Without any size,
        the mesh is plain data parallelism over all processes.

        Args:
            dp_size: Data parallelism (replicated weights).
            fsdp_size: Data parallelism with sharded weights; a data axis like dp.
            tp_size: Tensor parallelism.
            pp_size: Pipeline stages.
            cp_size: Context parallelism.
            ulysses_size: Sequence parallelism (Ulysses).
            ep_size: Expert parallelism; it needs ``data_axes``, see the module docstring.
            rank: Rank to use instead of this process's own, so that one process can simulate all ranks; None: the
                launcher's.
            world_size: World size to use instead of the launcher's. None: the launcher's; the product of the sizes if
                ``rank`` is given and there is no launcher.
            order: Axis names, outermost first; axes left out must have size 1.
            data_axes: Axes whose ranks read different data. None: dp and fsdp, if there is no ep.
            environ: Environment in which to look for the launcher; None: this process's own.

        Raises:
            MeshError: The product of the sizes is not the world size, the rank is outside it, or it is unknown whether
                ranks along ep read different data.
        """
        given: dict[str, int | None] = {"dp": dp_size, "fsdp": fsdp_size, "tp": tp_size, "pp": pp_size}
        given |= {"cp": cp_size, "ulysses": ulysses_size, "ep": ep_size}
        axes.check_sizes(given)
        axes.check_order(order, given)
        if world_size is None and (rank is None or dp_size is None):
            launch = discover(environ)
            played = rank is not None and launch.launcher in {"single", "torch.distributed"} and launch.world_size == 1
            world_size = None if played else launch.world_size
        if rank is None:
            rank = discover(environ).rank
        sizes = {name: 1 if size is None else size for name, size in given.items()}
        if dp_size is None and world_size is not None and "dp" in order:
            sizes["dp"] = axes.rest_of_world(world_size, given)
        if world_size is not None:
            axes.check_product(sizes, world_size)
        shape = tuple(sizes[name] for name in order)
        if data_axes is None:
            axes.check_experts([name for name in order if sizes[name] > 1], _DATA_AXES)
            data_axes = _DATA_AXES
        used = tuple(name for name in data_axes if name in order or name not in given)
        ranks = tuple(range(math.prod(shape)))
        return cls(axis_names=tuple(order), shape=shape, ranks=ranks, rank=rank, data_axes=used)

    @classmethod
    def from_torch(
        cls,
        torch_device_mesh: TorchDeviceMesh,
        data_axes: Sequence[str] | None = None,
        *,
        rank: int | None = None,
        allow_subset: bool = False,
        environ: Mapping[str, str] | None = None,
    ) -> Self:
        """Return the same grid as a ``torch.distributed.device_mesh.DeviceMesh``, for any names and order of axes.

        Args:
            torch_device_mesh: The mesh; it is not kept.
            data_axes: Axes whose ranks read different data; the first varies slowest. None: recognized by name (dp,
                fsdp, dp_replicate, dp_shard, data, batch, …), in the mesh's order.
            rank: Rank to use instead of this process's own; None: the mesh's ``get_rank()``.
            allow_subset: Accept a mesh with fewer ranks than the launcher started. By default this is refused, because
                a sub-mesh such as ``mesh["tp"]`` has lost its data axes, and all groups would read the same samples.
            environ: Environment in which to look for the launcher; None: this process's own.

        Raises:
            MeshError: The argument is not torch's mesh, a data axis does not exist, axis names are missing, not
                recognized or ambiguous (ep), or ranks are missing.
        """
        if not hasattr(torch_device_mesh, "mesh_dim_names"):
            given = type(torch_device_mesh).__name__
            raise MeshError(f"torch_device_mesh: expected torch's DeviceMesh, got {given}; for sizes use from_sizes")
        names = torch_device_mesh.mesh_dim_names
        if names is None:
            raise MeshError(
                "the torch mesh has no axis names: make it with init_device_mesh(…, mesh_dim_names=(…)), "
                "or use DeviceMesh.from_ranks with names"
            )
        if rank is None:
            rank = _torch_rank(torch_device_mesh)
        mesh = cls.from_ranks(torch_device_mesh.mesh, names, rank=rank, data_axes=data_axes)
        launch = None if allow_subset else discover(environ)
        if launch is not None and mesh.world_size < launch.world_size:
            raise MeshError(
                f"the mesh {axes.show(mesh.axis_sizes)} has {mesh.world_size} ranks, but {launch.launcher} "
                f"started {launch.world_size}: pass the whole mesh, not a sub-mesh, or allow_subset=True "
                "if the other ranks take no part"
            )
        return mesh

    @classmethod
    def from_ranks(
        cls, ranks: object, axis_names: Sequence[str], *, rank: int, data_axes: Sequence[str] | None = None
    ) -> Self:
        """Return the mesh of a nested list (or array) of ranks, with one level per axis name.

        Args:
            ranks: Rectangular nest of sequences of ints, or anything with ``tolist()``.
            axis_names: One name per level, outermost first.
            rank: The rank whose view the mesh is.
            data_axes: As for `from_torch`.

        Raises:
            MeshError: The nest is not rectangular, names do not fit or are not recognized, or ``rank`` is not in it.
        """
        names = tuple(axis_names)
        flat, shape = axes.flatten(axes.nested_list(ranks), len(names))
        used = axes.guess_data_axes(names, shape) if data_axes is None else tuple(data_axes)
        return cls(axis_names=names, shape=shape, ranks=flat, rank=rank, data_axes=used)

    def with_rank(self, rank: int) -> Self:
        """Return the same mesh as seen by another of its ranks."""
        return replace(self, rank=rank)

    def with_data_rank(self, data_rank: int, data_world_size: int) -> Self:
        """Return a mesh with another number of data ranks, as seen by this process with the given data rank.

        The first data axis grows or shrinks if the other data axes divide ``data_world_size``; otherwise the others
        become 1. The replica rank does not change. Ranks are renumbered row-major from 0.

        Raises:
            MeshError: ``data_rank`` is outside [0, data_world_size), or the mesh has no data axis.
        """
        if not self.data_axes or not 0 <= data_rank < data_world_size:
            shown = axes.show(self.axis_sizes)
            raise MeshError(f"data rank {data_rank} of {data_world_size}: there is none in {shown}")
        sizes, place, rest = self.axis_sizes, self.coordinates, data_rank
        inner = math.prod(sizes[name] for name in self.data_axes[1:])
        if data_world_size % inner:
            sizes |= dict.fromkeys(self.data_axes[1:], 1)
            inner = 1
        sizes[self.data_axes[0]] = data_world_size // inner
        for name in reversed(self.data_axes):
            rest, place[name] = divmod(rest, sizes[name])
        rank = axes.row_major(place, sizes, self.axis_names)
        return replace(self, shape=tuple(sizes.values()), ranks=tuple(range(math.prod(sizes.values()))), rank=rank)

    @property
    def world_size(self) -> int:
        """Number of ranks in the mesh."""
        return math.prod(self.shape)

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Size by axis name, outermost first."""
        return dict(zip(self.axis_names, self.shape, strict=True))

    @property
    def coordinates(self) -> dict[str, int]:
        """Coordinates of `rank`, by axis name."""
        return self._place(self.ranks.index(self.rank))

    @property
    def data_rank(self) -> int:
        """The share of the data that `rank` reads, in [0, data_world_size). Replicas have the same data rank."""
        return axes.row_major(self.coordinates, self.axis_sizes, self.data_axes)

    @property
    def data_world_size(self) -> int:
        """Number of shares into which the data is divided."""
        return math.prod(self.axis_sizes[name] for name in self.data_axes)

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The axes along which ranks get identical batches, outermost first."""
        return tuple(name for name in self.axis_names if name not in self.data_axes)

    @property
    def replica_rank(self) -> int:
        """Number of `rank` among the replicas with its data rank, in [0, replica_world_size)."""
        return axes.row_major(self.coordinates, self.axis_sizes, self.replica_axes)

    @property
    def replica_world_size(self) -> int:
        """Number of ranks that get the same batches."""
        return self.world_size // self.data_world_size

    @property
    def is_first_pipeline_stage(self) -> bool:
        """Whether `rank` is in the first pipeline stage; True if there is no pipeline axis."""
        return all(self.coordinates[name] == 0 for name in self._pipeline_axes)

    @property
    def is_last_pipeline_stage(self) -> bool:
        """Whether `rank` is in the last pipeline stage; True if there is no pipeline axis."""
        return all(self.coordinates[name] == self.axis_sizes[name] - 1 for name in self._pipeline_axes)

    def replicas_of(self, data_rank: int) -> tuple[int, ...]:
        """Return the ranks with the given data rank, ordered by replica rank.

        Raises:
            MeshError: ``data_rank`` is outside [0, data_world_size).
        """
        sizes = self.axis_sizes
        if not 0 <= data_rank < self.data_world_size:
            raise MeshError(f"data rank {data_rank} is outside [0, {self.data_world_size}) of {axes.show(sizes)}")
        # Positions ascend in row-major order and replica_axes keep the mesh's order, so this is sorted by replica rank.
        return tuple(
            rank
            for position, rank in enumerate(self.ranks)
            if axes.row_major(self._place(position), sizes, self.data_axes) == data_rank
        )

    @property
    def _pipeline_axes(self) -> tuple[str, ...]:
        return tuple(name for name in self.axis_names if name.lower() in axes.PIPELINE_NAMES)

    def _place(self, position: int) -> dict[str, int]:
        """Return the coordinates of the ``position``-th rank in row-major order."""
        place: dict[str, int] = {}
        for name, size in zip(reversed(self.axis_names), reversed(self.shape), strict=True):
            position, place[name] = divmod(position, size)
        return {name: place[name] for name in self.axis_names}


def as_device_mesh(mesh: DeviceMesh | TorchDeviceMesh | None) -> DeviceMesh:
    """Return ``mesh`` itself, the grid of a torch mesh, or, for None, data parallelism over all processes.

    Raises:
        MeshError: ``mesh`` is none of these.
    """
    if mesh is None:
        return DeviceMesh.from_sizes()
    if isinstance(mesh, DeviceMesh):
        return mesh
    if hasattr(mesh, "mesh_dim_names") and hasattr(mesh, "mesh"):
        return DeviceMesh.from_torch(mesh)
    kind = type(mesh).__name__
    raise MeshError(f"device_mesh: expected infra.DeviceMesh, torch's DeviceMesh or None, got {kind}")


def _torch_rank(mesh: object) -> int:
    get_rank = getattr(mesh, "get_rank", None)
    if not callable(get_rank):
        raise MeshError("the mesh does not know this process's rank: pass rank=")
    return int(get_rank())
