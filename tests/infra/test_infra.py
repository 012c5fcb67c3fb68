"""infra: which process this is, and which share of the data it needs (P5)."""

from __future__ import annotations

import ast
import itertools
import math
import re
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed

from infra import DEFAULT_AXIS_ORDER, DeviceMesh, MeshError, MeshFinder, agent_store, as_device_mesh, discover
from tests.support.processes.forked import Forked

AXES = ("dp", "fsdp", "tp", "pp", "cp", "ulysses", "ep")
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "6",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
}
INDEXED_JOB = {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "train-0.train", "MASTER_PORT": "29500"}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}


@dataclass(frozen=True)
class FakeTorchMesh:
    """The duck type of torch's DeviceMesh."""

    mesh: np.ndarray
    mesh_dim_names: tuple[str, ...] | None
    rank: int = 0

    def get_rank(self) -> int:
        return self.rank


@st.composite
def sized_orders(draw: st.DrawFn) -> tuple[tuple[str, ...], dict[str, int]]:
    order = tuple(draw(st.permutations(AXES)))
    sizes = dict.fromkeys(AXES, 1)
    for name in draw(st.lists(st.sampled_from(AXES), unique=True, max_size=4)):
        sizes[name] = draw(st.integers(1, 4))
    return order, sizes


def played(order: tuple[str, ...], sizes: dict[str, int], rank: int = 0) -> DeviceMesh:
    given = {f"{name}_size": size for name, size in sizes.items()}
    return DeviceMesh.from_sizes(**given, rank=rank, order=order, data_axes=("dp", "fsdp"))


# ---------------------------------------------------------------- the share of each rank


@given(sized_orders())
def test_replicas_share_and_data_ranks_partition_the_world(
    case: tuple[tuple[str, ...], dict[str, int]],
) -> None:
    order, sizes = case
    meshes = [played(order, sizes).with_rank(rank) for rank in range(math.prod(sizes.values()))]
    by_data_coordinates: dict[tuple[int, int], set[int]] = {}
    for mesh in meshes:
        at = mesh.coordinates
        by_data_coordinates.setdefault((at["dp"], at["fsdp"]), set()).add(mesh.data_rank)
    # Same data coordinates, same share; other data coordinates, another share; every share is taken.
    assert all(len(shares) == 1 for shares in by_data_coordinates.values())
    assert sorted(next(iter(s)) for s in by_data_coordinates.values()) == list(range(sizes["dp"] * sizes["fsdp"]))
    assert {mesh.data_world_size for mesh in meshes} == {sizes["dp"] * sizes["fsdp"]}
    # replicas_of partitions the world and agrees with each rank's own view.
    members = [meshes[0].replicas_of(share) for share in range(meshes[0].data_world_size)]
    assert sorted(itertools.chain(*members)) == list(range(len(meshes)))
    for share, ranks in enumerate(members):
        assert [meshes[rank].data_rank for rank in ranks] == [share] * meshes[0].replica_world_size
        assert [meshes[rank].replica_rank for rank in ranks] == list(range(len(ranks)))


@given(sized_orders(), st.data())
def test_from_torch_agrees_with_from_sizes_on_transposed_meshes(
    case: tuple[tuple[str, ...], dict[str, int]], data: st.DataObject
) -> None:
    order, sizes = case
    ours = played(order, sizes)
    axes = tuple(data.draw(st.permutations(range(len(order)))))
    grid = np.arange(ours.world_size).reshape(ours.shape).transpose(axes)
    torch_mesh = FakeTorchMesh(mesh=grid, mesh_dim_names=tuple(order[axis] for axis in axes))
    theirs = DeviceMesh.from_torch(torch_mesh, data_axes=("dp", "fsdp"), environ={})
    for rank in range(ours.world_size):
        mine, other = ours.with_rank(rank), theirs.with_rank(rank)
        assert mine.coordinates == {name: other.coordinates[name] for name in order}
        assert mine.data_rank == other.data_rank
    for share in range(ours.data_world_size):
        assert sorted(ours.replicas_of(share)) == sorted(theirs.replicas_of(share))


def test_the_example_of_the_api_page() -> None:
    mesh = DeviceMesh.from_sizes(
        dp_size=4, fsdp_size=None, tp_size=2, pp_size=None, cp_size=None, ulysses_size=None, rank=5
    )
    assert (mesh.data_rank, mesh.data_world_size) == (2, 4)
    assert (mesh.replica_rank, mesh.replica_world_size, mesh.world_size, mesh.rank) == (1, 2, 8, 5)
    assert mesh.replicas_of(2) == (4, 5)
    assert mesh.axis_sizes == {"pp": 1, "dp": 4, "fsdp": 1, "ep": 1, "cp": 1, "ulysses": 1, "tp": 2}
    with pytest.raises(FrozenInstanceError):
        mesh.rank = 1


def test_whether_expert_peers_read_different_data_must_be_said() -> None:
    """Both cures of the error work, for sizes and for torch's meshes; an axis of one rank is no question."""

    def of_sizes(**options: Any) -> DeviceMesh:
        return DeviceMesh.from_sizes(dp_size=2, ep_size=3, rank=4, **options)

    def of_torch(**options: Any) -> DeviceMesh:
        mesh = FakeTorchMesh(np.arange(6).reshape(2, 3), ("dp", "expert_parallel"), rank=4)
        return DeviceMesh.from_torch(mesh, environ={}, **options)

    for make in (of_sizes, of_torch):
        with pytest.raises(MeshError, match="read different data") as refused:
            make()
        cures = [ast.literal_eval(found) for found in re.findall(r"data_axes=(\(.*?\))", str(refused.value))]
        carved_out, alone = (make(data_axes=axes) for axes in cures)
        assert (carved_out.data_rank, carved_out.data_world_size) == (4, 6)
        assert (alone.data_rank, alone.data_world_size, alone.replica_rank) == (1, 2, 1)
    with pytest.raises(MeshError, match="read different data"):
        as_device_mesh(FakeTorchMesh(np.arange(4).reshape(2, 2), ("dp", "ep")))
    assert DeviceMesh.from_sizes(dp_size=2, ep_size=1, rank=1).data_rank == 1
    assert DeviceMesh.from_torch(FakeTorchMesh(np.arange(2).reshape(2, 1), ("dp", "ep")), environ={}).data_rank == 0


def test_pipeline_stages() -> None:
    mesh = DeviceMesh.from_sizes(pp_size=3, dp_size=2, rank=0)
    stages = [mesh.with_rank(rank) for rank in range(6)]
    assert [stage.is_first_pipeline_stage for stage in stages] == [True, True, False, False, False, False]
    assert [stage.is_last_pipeline_stage for stage in stages] == [False, False, False, False, True, True]
    flat = DeviceMesh.from_sizes(dp_size=2, rank=1)
    assert flat.is_first_pipeline_stage
    assert flat.is_last_pipeline_stage


# ---------------------------------------------------------------- from_sizes and the world


def test_without_sizes_dp_fills_the_world() -> None:
    mesh = DeviceMesh.from_sizes(environ=TORCHRUN)
    assert (mesh.rank, mesh.data_rank, mesh.data_world_size, mesh.replica_world_size) == (5, 5, 8, 1)
    alone = DeviceMesh.from_sizes(environ={})
    assert (alone.rank, alone.data_rank, alone.data_world_size) == (0, 0, 1)


def test_dp_takes_what_the_others_leave() -> None:
    mesh = DeviceMesh.from_sizes(tp_size=2, environ=TORCHRUN)
    assert mesh.axis_sizes["dp"] == 4
    assert mesh.data_rank == 2
    assert DeviceMesh.from_sizes(fsdp_size=8, environ=TORCHRUN).axis_sizes["dp"] == 1
    assert DeviceMesh.from_sizes(tp_size=2, rank=0, world_size=6).data_world_size == 3
    # A played rank without a launcher: the world is what the sizes say.
    assert DeviceMesh.from_sizes(fsdp_size=4, rank=3, environ={}).data_world_size == 4


@pytest.mark.parametrize(
    ("arguments", "environ", "words"),
    [
        ({"tp_size": 3}, TORCHRUN, ["3", "8 processes", "multiple of 3"]),
        ({"dp_size": 2, "tp_size": 2}, TORCHRUN, ["multiply to 4", "8 processes", "dp=2, tp=2"]),
        ({"dp_size": 4}, {}, ["multiply to 4", "1 processes", "rank="]),
        ({"dp_size": 4, "rank": 4}, {}, ["rank 4", "4 ranks"]),
        ({"dp_size": 4, "rank": -1}, {}, ["rank -1"]),
        ({"dp_size": 0, "rank": 0}, {}, ["dp_size", "0"]),
        ({"dp_size": 2.0, "rank": 0}, {}, ["dp_size", "2.0"]),
        ({"tp_size": 0}, TORCHRUN, ["tp_size", "at least 1"]),
        ({"dp_size": 2, "tp_size": 2, "rank": 0, "order": ("dp",)}, {}, ["lacks", "tp"]),
        ({"dp_size": 2, "rank": 0, "order": ("dp", "zz")}, {}, ["unknown", "zz"]),
        ({"dp_size": 2, "rank": 0, "order": "dp"}, {}, ["axis names", "'dp'"]),
        ({"dp_size": 2, "rank": 0, "order": ("dp", "dp")}, {}, ["twice"]),
        ({"dp_size": 2, "rank": 0, "data_axes": ("dp", "zz")}, {}, ["no axis 'zz'"]),
    ],
)
def test_wrong_sizes_say_what_and_the_cure(
    arguments: dict[str, object], environ: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(MeshError) as caught:
        DeviceMesh.from_sizes(**arguments, environ=environ)
    assert [word for word in words if word not in str(caught.value)] == []


def test_replicas_of_refuses_a_share_that_is_not() -> None:
    with pytest.raises(MeshError, match=r"data rank 4 is outside \[0, 4\)"):
        DeviceMesh.from_sizes(dp_size=4, rank=0).replicas_of(4)


# ---------------------------------------------------------------- from_torch and from_ranks


@pytest.mark.parametrize(
    ("names", "shares"),
    [
        (("dp_replicate", "dp_shard"), 6),
        (("pp", "dp"), 3),
        (("fsdp", "tp"), 2),
        (("DP", "Context"), 2),
        (("tp", "cp"), 1),
    ],
)
def test_from_torch_guesses_data_axes_by_name(names: tuple[str, str], shares: int) -> None:
    mesh = FakeTorchMesh(mesh=np.arange(6).reshape(2, 3), mesh_dim_names=names, rank=4)
    assert DeviceMesh.from_torch(mesh, environ={}).data_world_size == shares


@pytest.mark.parametrize(
    ("mesh", "arguments", "words"),
    [
        (
            FakeTorchMesh(np.arange(4).reshape(2, 2), ("dp", "tp")),
            {"data_axes": ("dp_shard",)},
            ["dp_shard", "tp"],
        ),
        (FakeTorchMesh(np.arange(4).reshape(2, 2), ("left", "tp")), {}, ["'left'", "data_axes="]),
        (FakeTorchMesh(np.arange(4), None), {}, ["no axis names", "from_ranks"]),
        (FakeTorchMesh(np.arange(4), ("dp", "tp")), {}, ["1 axes", "2 axis names"]),
        (FakeTorchMesh(np.arange(4).reshape(2, 2), ("dp",)), {}, ["more than 1 axes"]),
        (FakeTorchMesh(np.arange(4), ("dp",), rank=7), {}, ["rank 7", "dp=4"]),
        (FakeTorchMesh(np.zeros(2, int), ("dp",)), {}, ["twice"]),
        (FakeTorchMesh(np.arange(2) / 2, ("dp",)), {}, ["ints"]),
    ],
)
def test_from_torch_refuses(mesh: FakeTorchMesh, arguments: dict[str, object], words: list[str]) -> None:
    with pytest.raises(MeshError) as caught:
        DeviceMesh.from_torch(mesh, **arguments, environ={})
    assert [word for word in words if word not in str(caught.value)] == []


def test_a_submesh_is_refused_because_all_groups_would_read_the_same() -> None:
    submesh = FakeTorchMesh(mesh=np.array([4, 5]), mesh_dim_names=("tp",), rank=5)
    with pytest.raises(MeshError, match="has 2 ranks, but torchrun started 8"):
        DeviceMesh.from_torch(submesh, environ=TORCHRUN)
    assert DeviceMesh.from_torch(submesh, environ=TORCHRUN, allow_subset=True).data_world_size == 1


def test_from_ranks_takes_any_numbering() -> None:
    mesh = DeviceMesh.from_ranks([[3, 1], [0, 2]], ("tp", "dp"), rank=1)
    assert mesh.coordinates == {"tp": 0, "dp": 1}
    assert mesh.replicas_of(0) == (3, 0)
    with pytest.raises(MeshError, match="ragged"):
        DeviceMesh.from_ranks([[0, 1], [2]], ("dp", "tp"), rank=0)


def test_as_device_mesh() -> None:
    mesh = DeviceMesh.from_sizes(dp_size=2, rank=1)
    assert as_device_mesh(mesh) is mesh
    fake = FakeTorchMesh(mesh=np.arange(4).reshape(2, 2), mesh_dim_names=("tp", "dp"), rank=2)
    assert as_device_mesh(fake).data_axes == ("dp",)
    with pytest.raises(MeshError, match="got int"):
        as_device_mesh(3)


REAL_TORCH_MESH = """
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from infra import DeviceMesh

dist.init_process_group("fake", rank=5, world_size=12, store=FakeStore())
torch_mesh = init_device_mesh("cpu", (3, 2, 2), mesh_dim_names=("tp", "dp_shard", "dp_replicate"))
mesh = DeviceMesh.from_torch(torch_mesh, data_axes=("dp_replicate", "dp_shard"))
assert mesh.rank == 5 and tuple(mesh.coordinates.values()) == tuple(torch_mesh.get_coordinate()), mesh
for share in range(4):
    assert len(mesh.replicas_of(share)) == 3
at = mesh.coordinates
assert mesh.data_rank == at["dp_replicate"] * 2 + at["dp_shard"]
assert mesh.replicas_of(mesh.data_rank) == tuple(torch_mesh["tp"].mesh.tolist())
dist.destroy_process_group()
print("agrees")
"""


def test_from_torch_reads_a_real_torch_mesh(forked: Forked, tmp_path: Path) -> None:
    output = tmp_path / "output"
    assert forked.start(REAL_TORCH_MESH, output=output).wait() == 0, output.read_text()
    assert output.read_text().strip().endswith("agrees")


# ---------------------------------------------------------------- launchers


def test_torchrun() -> None:
    launch = discover(TORCHRUN)
    assert (launch.launcher, launch.rank, launch.world_size) == ("torchrun", 5, 8)
    assert (launch.local_rank, launch.local_world_size, launch.node_rank, launch.num_nodes) == (1, 4, 1, 2)
    assert (launch.master_addr, launch.master_port) == ("10.0.0.1", 29500)


def test_srun() -> None:
    launch = discover(SRUN)
    assert (launch.launcher, launch.rank, launch.world_size) == ("slurm", 6, 7)
    assert (launch.local_rank, launch.local_world_size, launch.node_rank, launch.num_nodes) == (2, 3, 1, 2)


@pytest.mark.parametrize(("node", "tasks"), [("0", 4), ("1", 4), ("2", 3), ("3", None)])
def test_slurm_task_lists_with_repeats(node: str, tasks: int | None) -> None:
    environ = SRUN | {
        "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
        "SLURM_NODEID": node,
        "SLURM_STEP_NUM_NODES": "4",
    }
    assert discover(environ | {"SLURM_LOCALID": "0"}).local_world_size == tasks


@pytest.mark.parametrize(
    "step",
    [{"SLURM_TASK_PID": "5150"}, {"SLURM_STEP_ID": "4294967291"}, {"SLURM_STEP_ID": "4294967290"}],
    ids=["sbatch without step", "batch step", "interactive step"],
)
def test_a_slurm_script_or_shell_is_one_process(step: dict[str, str]) -> None:
    shell = {name: value for name, value in SRUN.items() if "STEP" not in name} | {"SLURM_PROCID": "0"} | step
    assert (discover(shell).launcher, discover(shell).world_size) == ("single", 1)


def test_tasks_in_containers_that_are_given_the_usual_variables_are_no_single_processes() -> None:
    """Without the step's number: neither rank 0, which looks much like a batch script, nor the others."""
    for rank in range(8):
        launch = discover({"SLURM_PROCID": str(rank), "SLURM_NTASKS": "8"})
        assert (launch.launcher, launch.rank, launch.world_size) == ("slurm", rank, 8)
    usual = {name: value for name, value in SRUN.items() if "STEP" not in name}
    launch = discover(usual | {"SLURM_TASKS_PER_NODE": "4,3"})
    assert (launch.rank, launch.world_size, launch.local_rank, launch.local_world_size) == (6, 7, 2, 3)
    for alone in ({"SLURM_PROCID": "0"}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, {"SLURM_NTASKS": "8"}):
        assert discover(alone).world_size == 1


def test_open_mpi_and_hydra_win_over_the_step_that_started_their_daemons() -> None:
    daemon_step = SRUN | {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
    for environ, expected in ((MPIRUN, ("openmpi", 3, 4, 1, 2)), (HYDRA, ("mpich", 2, 4, 0, 2))):
        launch = discover(daemon_step | environ)
        found = (launch.launcher, launch.rank, launch.world_size, launch.local_rank, launch.local_world_size)
        assert found == expected


def test_indexed_job_of_kubernetes() -> None:
    launch = discover(INDEXED_JOB)
    assert (launch.launcher, launch.rank, launch.world_size) == ("kubernetes", 2, 4)
    assert (launch.local_rank, launch.local_world_size, launch.node_rank, launch.num_nodes) == (0, 1, 2, 4)
    assert (launch.master_addr, launch.master_port) == ("train-0.train", 29500)
    assert DeviceMesh.from_sizes(environ=INDEXED_JOB).data_rank == 2


def test_launchers_inside_the_pods_of_an_indexed_job_win() -> None:
    pod = {"JOB_COMPLETION_INDEX": "1"}
    assert discover(pod | TORCHRUN).rank == 5
    deepspeed = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    assert (discover(pod | deepspeed).launcher, discover(pod | deepspeed).rank) == ("torchrun", 5)
    assert discover(pod | MPIRUN).launcher == "openmpi"


def test_torchrun_inside_srun_wins() -> None:
    assert discover(SRUN | TORCHRUN).launcher == "torchrun"
    agents = SRUN | {"SLURM_PROCID": "1", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8"}
    assert discover(agents | TORCHRUN).rank == 5


def test_deepspeed_sets_less_than_torchrun() -> None:
    launch = discover({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"})
    assert (launch.rank, launch.local_rank, launch.local_world_size) == (1, 1, None)


def test_scripts_that_export_world_size_and_leave_the_rank_to_slurm() -> None:
    assert discover(SRUN | {"WORLD_SIZE": "7"}).rank == 6


def test_the_processes_own_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, *SRUN, *MPIRUN, *HYDRA, *INDEXED_JOB):
        monkeypatch.delenv(name, raising=False)
    assert discover().launcher == "single"
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert (discover().rank, discover().world_size) == (1, 3)
    assert DeviceMesh.from_sizes().data_world_size == 3


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "1"}, ["RANK=1", "WORLD_SIZE is not"]),
        ({"WORLD_SIZE": "4"}, ["WORLD_SIZE=4", "RANK is not"]),
        ({"RANK": "x", "WORLD_SIZE": "4"}, ["RANK", "'x'"]),
        ({"RANK": "4", "WORLD_SIZE": "4"}, ["RANK=4", "WORLD_SIZE=4"]),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, ["RANK=-1"]),
        ({"RANK": "0", "WORLD_SIZE": "0"}, ["WORLD_SIZE=0"]),
        (TORCHRUN | {"LOCAL_RANK": "4"}, ["LOCAL_RANK=4", "LOCAL_WORLD_SIZE=4"]),
        (SRUN | {"WORLD_SIZE": "8"}, ["WORLD_SIZE=8", "slurm says 7"]),
        (SRUN | {"RANK": "0", "WORLD_SIZE": "7"}, ["RANK=0", "slurm", "rank 6"]),
        (MPIRUN | {"RANK": "0"}, ["RANK=0", "openmpi says 3"]),
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}, ["SLURM_NTASKS", "srun"]),
        ({"SLURM_PROCID": "3"}, ["SLURM_PROCID=3", "SLURM_NTASKS", "srun"]),
        (SRUN | {"SLURM_STEP_ID": "4294967291"}, ["SLURM_PROCID=6", "batch script", "RANK and WORLD_SIZE"]),
        ({"JOB_COMPLETION_INDEX": "1"}, ["JOB_COMPLETION_INDEX=1", "WORLD_SIZE", "completions"]),
        ({"JOB_COMPLETION_INDEX": "1", "RANK": "1"}, ["RANK=1", "WORLD_SIZE is not"]),
        (INDEXED_JOB | {"JOB_COMPLETION_INDEX": "4"}, ["JOB_COMPLETION_INDEX=4", "WORLD_SIZE=4"]),
        (SRUN | {"SLURM_PROCID": "7"}, ["SLURM_PROCID=7", "SLURM_STEP_NUM_TASKS=7"]),
    ],
)
def test_contradictions_name_the_variables(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(MeshError) as caught:
        discover(environ)
    assert [word for word in words if word not in str(caught.value)] == []


def test_a_large_world_is_played_in_one_process() -> None:
    mesh = DeviceMesh.from_sizes(dp_size=512, tp_size=8, rank=0)
    assert [mesh.with_rank(rank).data_rank for rank in (0, 7, 8, 4095)] == [0, 0, 1, 511]
    assert DEFAULT_AXIS_ORDER[-1] == "tp"


# --- torch.distributed ---


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``environment(RANK="1")``: exactly these of the launchers' variables are set."""

    def put(**values: str) -> None:
        launchers = (TORCHRUN, SRUN, MPIRUN, HYDRA, INDEXED_JOB, ("NODE_RANK",))
        for name in {name for names in launchers for name in names}:
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    put()
    return put


def group(monkeypatch: pytest.MonkeyPatch, rank: int | None, world_size: int = 0) -> None:
    """torch.distributed as it is once initialized so; None: not."""
    monkeypatch.setattr(distributed, "is_initialized", lambda: rank is not None)
    monkeypatch.setattr(distributed, "get_rank", lambda: rank)
    monkeypatch.setattr(distributed, "get_world_size", lambda: world_size)


LIGHTNING = {"WORLD_SIZE": "4", "LOCAL_RANK": "1", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environ", "place", "launcher"),
    [
        ({}, (1, 2), "torch.distributed"),  # torch.multiprocessing.spawn
        (TORCHRUN, (5, 8), "torchrun"),
        (SRUN, (6, 7), "slurm"),
        (SRUN | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, (5, 8), "torch.distributed"),  # spawn in each task
        ({"RANK": "1", "WORLD_SIZE": "2"}, (5, 8), "torch.distributed"),  # a manifest that counts nodes
        (SRUN | TORCHRUN | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, (5, 8), "torchrun"),
        ({"WORLD_SIZE": "8", "LOCAL_RANK": "1", "NODE_RANK": "1"}, (5, 8), "torch.distributed"),
        (LIGHTNING, (1, 4), "lightning"),
    ],
)
def test_torch_distributed_says_rank_and_size(
    monkeypatch: pytest.MonkeyPatch,
    environment: Callable[..., None],
    environ: dict[str, str],
    place: tuple[int, int],
    launcher: str,
) -> None:
    environment(**environ)
    group(monkeypatch, *place)
    launch = discover()
    assert (launch.rank, launch.world_size, launch.launcher) == (*place, launcher)
    mesh = as_device_mesh(None)
    assert (mesh.data_rank, mesh.data_world_size) == place
    assert DeviceMesh.from_sizes(tp_size=place[1]).data_world_size == 1


@pytest.mark.parametrize(
    ("environ", "place", "words"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, (0, 2), ["rank 0 of 2", "rank 1 of 2", "RANK=1"]),
        ({"RANK": "0", "WORLD_SIZE": "4"}, (0, 2), ["rank 0 of 2", "rank 0 of 4", "WORLD_SIZE=4"]),
        ({"RANK": "0", "WORLD_SIZE": "2"}, (0, 3), ["rank 0 of 3", "rank 0 of 2"]),
        ({"RANK": "0", "WORLD_SIZE": "2"}, (2, 4), ["rank 2 of 4", "rank 0 of 2"]),
        (SRUN, (0, 1), ["rank 0 of 1", "slurm says rank 6 of 7", "SLURM_PROCID=6"]),
        (MPIRUN, (2, 4), ["rank 2 of 4", "openmpi says rank 3 of 4"]),
        ({"WORLD_SIZE": "4"}, (1, 2), ["rank 1 of 2", "of 4", "WORLD_SIZE=4"]),
    ],
)
def test_an_environment_that_contradicts_torch_distributed_is_an_error_that_names_both(
    monkeypatch: pytest.MonkeyPatch,
    environment: Callable[..., None],
    environ: dict[str, str],
    place: tuple[int, int],
    words: list[str],
) -> None:
    environment(**environ)
    group(monkeypatch, *place)
    with pytest.raises(MeshError) as caught:
        discover()
    assert [word for word in (*words, "device_mesh=") if word not in str(caught.value)] == []
    mesh = DeviceMesh.from_sizes(dp_size=place[1], rank=place[0])
    assert MeshFinder(mesh).mesh is mesh, "the cure that it names"


def test_processes_that_lightning_starts_know_their_rank_on_the_first_node() -> None:
    launch = discover(LIGHTNING)
    assert (launch.launcher, launch.rank, launch.world_size, launch.local_rank) == ("lightning", 1, 4, 1)
    task = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "1"}  # srun --pty bash
    assert discover(task | LIGHTNING).rank == 1
    assert discover(SRUN | {"WORLD_SIZE": "7", "LOCAL_RANK": "2", "NODE_RANK": "0"}).launcher == "slurm"
    with pytest.raises(MeshError, match="RANK is not"):
        discover(LIGHTNING | {"NODE_RANK": "1"})


def test_a_mesh_is_looked_up_again_until_it_is_read_from(
    monkeypatch: pytest.MonkeyPatch, environment: Callable[..., None]
) -> None:
    finder = MeshFinder()
    assert (finder.mesh.world_size, finder.found_by) == (1, "single")
    assert not finder.look_again()
    group(monkeypatch, 1, 2)
    assert finder.look_again()
    assert (finder.mesh.rank, finder.mesh.world_size, finder.found_by) == (1, 2, "torch.distributed")
    assert not finder.look_again(to_read=True)
    group(monkeypatch, None)
    assert not finder.look_again(to_read=True), "a process group that is gone says nothing"
    assert finder.mesh.world_size == 2


def test_a_process_group_that_changes_what_was_read_from_is_an_error(
    monkeypatch: pytest.MonkeyPatch, environment: Callable[..., None]
) -> None:
    finder = MeshFinder()
    finder.look_again(to_read=True)
    group(monkeypatch, 1, 2)
    assert not finder.look_again()
    assert finder.mesh.world_size == 1
    with pytest.raises(MeshError) as caught:
        finder.look_again(to_read=True)
    for words in ("rank 1 of 2", "rank 0 of 1", "found by: single", "make a new loader"):
        assert words in str(caught.value)
    given = MeshFinder(DeviceMesh.from_sizes(rank=0, world_size=1))
    assert not given.look_again(to_read=True), "a mesh that was given holds"


def test_lengths_are_known_before_the_rank_is(
    monkeypatch: pytest.MonkeyPatch, environment: Callable[..., None]
) -> None:
    environment(WORLD_SIZE="4", LOCAL_RANK="1", NODE_RANK="1")
    finder = MeshFinder()
    assert finder.mesh.world_size == 4
    with pytest.raises(MeshError, match="before the first iteration"):
        finder.look_again(to_read=True)
    group(monkeypatch, 3, 4)
    assert finder.look_again(to_read=True)
    assert finder.mesh.rank == 3


def test_the_store_of_torchruns_agent() -> None:
    started = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "node0", "MASTER_PORT": "29500", "RANK": "3",
               "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "0"}  # fmt: skip
    found = agent_store(started)
    assert found is not None
    assert (found.host, found.port, found.rank, found.world_size) == ("node0", 29500, 3, 4)
    for name in ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "WORLD_SIZE"):
        other = agent_store({**started, name: "5"})
        assert other is not None
        assert other.attempt != found.attempt
    assert agent_store({**started, "TORCHELASTIC_USE_AGENT_STORE": "False"}) is None  # rank 0 will keep one, later
    assert agent_store({**started, "RANK": "0", "WORLD_SIZE": "1"}) is None
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        assert agent_store({key: value for key, value in started.items() if key != name}) is None


def test_what_is_no_mesh_of_torchs_is_named() -> None:
    wrong: Any = 8
    with pytest.raises(MeshError, match="expected torch's DeviceMesh, got int; for sizes use from_sizes"):
        DeviceMesh.from_torch(wrong)
