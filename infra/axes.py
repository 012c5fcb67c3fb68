"""Validate the names and sizes of mesh axes. Used only by `infra.mesh`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import cast

from infra.errors import MeshError

PIPELINE_NAMES = frozenset({"pp", "pipe", "pipeline", "stage", "pipeline_parallel"})
DATA_NAMES = frozenset(
    {"dp", "ddp", "fsdp", "hsdp", "zero", "data", "batch", "replicate", "shard", "data_parallel"}
    | {"dp_replicate", "dp_shard", "dp_replica", "data_replicate", "data_shard"}
    | {"dp_shard_in_ep", "dp_shard_mod_ep"}
)
EXPERT_NAMES = frozenset({"ep", "expert", "experts", "expert_parallel"})
"""Ranks along such an axis may read the same data or different data: only the user knows."""
REPLICA_NAMES = PIPELINE_NAMES | frozenset(
    {"tp", "mp", "cp", "sp", "etp", "ring", "ulysses"}
    | {"tensor", "model", "context", "seq", "sequence"}
    | {"tensor_parallel", "model_parallel", "context_parallel", "sequence_parallel"}
)


def row_major(place: Mapping[str, int], sizes: Mapping[str, int], axes: Sequence[str]) -> int:
    """Return the row-major number of a place within the grid of ``axes`` only; the first axis varies slowest."""
    number = 0
    for name in axes:
        number = number * sizes[name] + place[name]
    return number


def show(sizes: Mapping[str, int]) -> str:
    """Format sizes for an error message: ``(dp=2, tp=4)``."""
    return "(" + ", ".join(f"{name}={size}" for name, size in sizes.items()) + ")"


def check_axes(names: tuple[str, ...], shape: tuple[int, ...], data_axes: tuple[str, ...]) -> None:
    """Raise MeshError unless names are unique, sizes are positive and data axes exist."""
    if len(names) != len(shape):
        raise MeshError(f"{len(names)} axis names {names} for {len(shape)} axes of sizes {shape}")
    for kind, axes in (("axis name", names), ("data axis", data_axes)):
        if len(set(axes)) != len(axes):
            raise MeshError(f"{kind} given twice: {axes}")
    unknown = ", ".join(repr(name) for name in data_axes if name not in names)
    if unknown:
        raise MeshError(f"data_axes: the mesh has no axis {unknown}; its axes are {names}")
    check_sizes(dict(zip(names, shape, strict=True)))


def check_sizes(sizes: Mapping[str, int | None]) -> None:
    """Raise MeshError unless every size that is given is a positive int."""
    for name, size in sizes.items():
        if size is None:
            continue
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise MeshError(f"{name}_size: expected an int of at least 1, got {size!r}")


def check_order(order: Sequence[str], given: Mapping[str, int | None]) -> None:
    """Raise MeshError unless ``order`` names known axes and every axis that has a size."""
    if isinstance(order, str):
        raise MeshError(f'order: expected axis names such as ("dp", "tp"), got the string {order!r}')
    unknown = [name for name in order if name not in given]
    if unknown:
        raise MeshError(f"order={tuple(order)}: unknown axes {unknown}; known are {tuple(given)}")
    missing = [name for name, size in given.items() if size not in {None, 1} and name not in order]
    if missing:
        raise MeshError(f"order={tuple(order)} lacks {missing}, which have a size: name every axis in use")


def rest_of_world(world_size: int, given: Mapping[str, int | None]) -> int:
    """Return the world size divided by the product of the given sizes.

    Raises:
        MeshError: The product does not divide the world size.
    """
    sizes = {name: size for name, size in given.items() if size is not None}
    product = math.prod(sizes.values())
    if world_size % product:
        raise MeshError(
            f"dp_size=None takes the rest of the world, but {product} {show(sizes)} does not divide "
            f"{world_size} processes: start a multiple of {product} processes, or correct the sizes"
        )
    return world_size // product


def check_product(sizes: Mapping[str, int], world_size: int) -> None:
    """Raise MeshError unless the product of the sizes is the world size."""
    product = math.prod(sizes.values())
    if product != world_size:
        used = {name: size for name, size in sizes.items() if size != 1}
        raise MeshError(
            f"the sizes {show(used)} multiply to {product}, but there are {world_size} processes: correct "
            f"the sizes, start {product} processes, or pass rank= to play one of {product} in this process"
        )


def guess_data_axes(names: tuple[str, ...], shape: tuple[int, ...]) -> tuple[str, ...]:
    """Return the axes that are data axes according to their names, in the mesh's order.

    Raises:
        MeshError: The name of an axis longer than 1 is unknown or ambiguous (see `check_experts`).
    """
    known = DATA_NAMES | REPLICA_NAMES | EXPERT_NAMES
    used = [name for name, size in zip(names, shape, strict=False) if size > 1]
    unknown = ", ".join(repr(name) for name in used if name.lower() not in known)
    if unknown:
        raise MeshError(
            f"the names do not show whether ranks along {unknown} read different data: "
            f"pass data_axes=, a choice of {names}"
        )
    found = tuple(name for name in names if name.lower() in DATA_NAMES)
    check_experts(used, found)
    return found


def check_experts(used: Sequence[str], data_axes: tuple[str, ...]) -> None:
    """Refuse to guess whether ranks along an expert axis read different data.

    Raises:
        MeshError: One of the axes in use is an expert axis.
    """
    experts = tuple(name for name in used if name.lower() in EXPERT_NAMES)
    if experts:
        shown = ", ".join(map(repr, experts))
        raise MeshError(
            f"do ranks along {shown} read different data? Where experts are spread over data ranks (Megatron, "
            f"DeepSpeed, torchtitan) they do: pass data_axes={(*data_axes, *experts)} to DeviceMesh.from_torch, "
            f"from_sizes or from_ranks. If {shown} is an axis of its own, whose ranks get the same batches: "
            f"data_axes={data_axes}"
        )


def nested_list(ranks: object) -> object:
    """Return ``ranks.tolist()`` if it exists (tensors, arrays), otherwise ``ranks``."""
    tolist = getattr(ranks, "tolist", None)
    return tolist() if callable(tolist) else ranks


def flatten(nested: object, num_axes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks in row-major order, and the shape.

    Raises:
        MeshError: ``nested`` is not a rectangular nest of ints of depth ``num_axes``.
    """
    level: list[object] = [nested]
    shape: list[int] = []
    for axis in range(num_axes):
        if not all(isinstance(part, (list, tuple)) for part in level):
            raise MeshError(f"the mesh has {axis} axes, but {num_axes} axis names were given")
        parts = cast("list[Sequence[object]]", level)
        lengths = {len(part) for part in parts}
        if len(lengths) != 1 or 0 in lengths:
            raise MeshError(f"axis {axis} of the mesh is ragged or empty: lengths {sorted(lengths)}")
        shape.append(lengths.pop())
        level = [item for part in parts for item in part]
    for item in level:
        if isinstance(item, (list, tuple)):
            raise MeshError(f"the mesh has more than {num_axes} axes, but {num_axes} axis names were given")
        if isinstance(item, bool) or not isinstance(item, int):
            raise MeshError(f"expected ranks as ints in the mesh, got {item!r}")
    return tuple(cast("list[int]", level)), tuple(shape)
