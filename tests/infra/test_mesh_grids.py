"""Meshes as HSDP, FSDP2, expert parallel and torchtitan make them, by torch's own ``init_device_mesh``.

torch's fake backend lets one process be each rank of a world in turn.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from infra import DeviceMesh, MeshError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

# Sizes by name, and which of them are data axes by their names.
GRIDS: list[tuple[dict[str, int], set[str]]] = [
    ({"dp_replicate": 2, "dp_shard": 2}, {"dp_replicate", "dp_shard"}),
    ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, {"dp_replicate", "dp_shard"}),
    ({"dp_shard": 2, "cp": 2, "tp": 2}, {"dp_shard"}),
    ({"pp": 2, "fsdp": 2, "ulysses": 2}, {"fsdp"}),
    ({"replicate": 2, "shard": 3}, {"replicate", "shard"}),
    ({"dp_replicate": 2, "etp": 2, "tp": 2}, {"dp_replicate"}),
    ({"pp": 2, "dp_shard_mod_ep": 2, "dp_shard_in_ep": 2}, {"dp_shard_mod_ep", "dp_shard_in_ep"}),
    ({"pp": 1, "batch": 3, "cp": 2, "tp": 1}, {"batch"}),
]


@contextmanager
def rank_of(rank: int, world_size: int) -> Iterator[None]:
    """This process is a rank of a world that is not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("sizes", "data_axes"), GRIDS)
def test_any_order_of_axes(sizes: dict[str, int], data_axes: set[str]) -> None:
    """For every order and rank: ranks with the same data coordinates, and no others, share a data rank."""
    for names in itertools.permutations(sizes):
        shape = tuple(sizes[name] for name in names)
        world_size = 1
        for size in shape:
            world_size *= size
        shares: dict[tuple[int, ...], set[int]] = defaultdict(set)
        replicas: dict[int, set[int]] = defaultdict(set)
        for rank in range(world_size):
            with rank_of(rank, world_size):
                torch_mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
                mesh = DeviceMesh.from_torch(torch_mesh, environ={})
                coordinates = dict(zip(names, torch_mesh.get_coordinate() or (), strict=True))
            assert mesh.coordinates == coordinates
            assert mesh.rank == rank
            shares[tuple(coordinates[name] for name in sorted(data_axes))].add(mesh.data_rank)
            replicas[mesh.data_rank].add(rank)
            assert rank in mesh.replicas_of(mesh.data_rank)
            assert mesh.replicas_of(mesh.data_rank)[mesh.replica_rank] == rank
        assert all(len(found) == 1 for found in shares.values())
        assert sorted(found for one in shares.values() for found in one) == list(range(mesh.data_world_size))
        assert {len(found) for found in replicas.values()} == {mesh.replica_world_size}


def titan_mesh() -> TorchMesh:
    """As torchtitan makes it for pp 2, HSDP 2 x 2 and cp 2, with the flattened meshes that it adds."""
    mesh = init_device_mesh("cpu", (2, 2, 2, 2), mesh_dim_names=("pp", "dp_replicate", "dp_shard", "cp"))
    mesh["dp_replicate", "dp_shard"]._flatten("dp")
    mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    mesh["dp_replicate", "dp_shard", "cp"]._flatten("dp_cp")
    return mesh


LAUNCHED = {"RANK": "0", "WORLD_SIZE": "16", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "16",
            "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "x", "MASTER_PORT": "1",
            "TORCHELASTIC_RUN_ID": "none"}  # fmt: skip


def test_torchtitans_world_mesh_with_flattened_submeshes() -> None:
    """The world mesh tells; flattening adds views of it and changes nothing."""
    with rank_of(5, 16):
        torch_mesh = titan_mesh()
        mesh = DeviceMesh.from_torch(torch_mesh, environ={})
        assert mesh.data_axes == ("dp_replicate", "dp_shard")
        assert (mesh.data_rank, mesh.data_world_size) == (torch_mesh["dp"].get_local_rank(), torch_mesh["dp"].size())
        assert (mesh.data_world_size, mesh.replica_world_size) == (4, 4)


@pytest.mark.parametrize("name", ["dp", "dp_shard_cp", "dp_cp"])
def test_submeshes_are_refused_where_other_ranks_would_read_the_same(name: str) -> None:
    """A flattened mesh of data and context ranks does not tell by name, and none of them is the whole job."""
    with rank_of(0, 16):
        submesh = titan_mesh()[name]
        with pytest.raises(MeshError, match="data_axes=" if name != "dp" else "not a sub-mesh"):
            DeviceMesh.from_torch(submesh, environ=LAUNCHED)
        if name == "dp":
            assert DeviceMesh.from_torch(submesh, environ=LAUNCHED, allow_subset=True).data_world_size == 4
