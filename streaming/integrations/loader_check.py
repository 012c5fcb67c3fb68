"""Check that an argument is a loader and fits the trainer, before a mismatch fails obscurely or silently."""

from __future__ import annotations

from math import prod
from typing import Any

from streaming.errors import ConfigError
from streaming.loader import DataLoader

__all__ = ["check_worlds", "expect_loader"]

_SAME_DATA = ("tp", "cp", "sp")
"""Axes of Accelerate's mesh along which ranks get the same batch."""


def expect_loader(what: str, given: Any, *others: type[Any]) -> None:
    """Check that ``given`` is a ``streaming.DataLoader``, or one of ``others``.

    Raises:
        ConfigError: It is not such a loader; the message begins with ``what``.
    """
    if not isinstance(given, (DataLoader, *others)):
        kind = type(given)
        raise ConfigError(
            f"{what}: expected a streaming.DataLoader, got a {kind.__module__}.{kind.__qualname__}; give torch's "
            "loaders, and the results of these functions, to the program unchanged"
        )


def check_worlds(what: str, loader: DataLoader, accelerator: Any) -> None:
    """Check that ``loader`` deals its batches to the ranks of an ``accelerate.Accelerator``.

    Otherwise several ranks would get the same rows, or some rows would reach no rank.

    Raises:
        ConfigError: It deals to another number of ranks; the message begins with ``what``.
    """
    mesh, torchs = loader.device_mesh, getattr(accelerator, "torch_device_mesh", None)
    same = [] if torchs is None else [torchs[name].size() for name in torchs.mesh_dim_names if name in _SAME_DATA]
    num_processes = accelerator.num_processes
    num_shares = num_processes // prod(same)
    if num_shares == mesh.data_world_size or num_processes == mesh.world_size:  # the latter with other axes
        return
    finder = loader._core.finder
    if num_processes == 1 and finder.found_by != "given":
        raise ConfigError(
            f"{what}: the trainer takes this process for the only one, but {finder.found_by} says that it is rank "
            f"{mesh.rank} of {mesh.world_size}. Each would train a model of its own, on its share of the data. Let the "
            "trainer join the others: start the script with `accelerate launch` or `torchrun`, and make the "
            "Accelerator, or TrainingArguments, before anything else. To train alone on purpose, give the loader "
            "device_mesh=DeviceMesh.from_sizes(dp_size=1, rank=0)"
        )
    raise ConfigError(
        f"{what}: the trainer has {num_shares} data-parallel ranks in {num_processes} processes, but this loader deals "
        f"its batches to {mesh.data_world_size} in {mesh.world_size}: {loader!r}. Leave device_mesh= out, or give the "
        f"loader device_mesh=DeviceMesh.from_sizes(dp_size={num_shares}, rank=…)"
    )
