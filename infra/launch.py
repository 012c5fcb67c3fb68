"""Detect which launcher started this process, its rank and the world size, as a pure function of an environment.

Launchers are tried in this order, inner before outer, and the first that knows a rank wins. Two of them do not use
environment variables and are tried only if `discover` gets no ``environ``: torch.distributed, and Ray Train in a
process that has ``ray.train`` loaded, as its workers have.

====  =================  ==========================================================  =================================
 #    launcher           recognized by                                               before the next because it
====  =================  ==========================================================  =================================
 0    torch.distributed  ``torch.distributed.is_initialized()``                      numbers the ranks that train
 1    ray                a Ray Train worker (``ray.train.get_context``)              inherits its node's environment
 2    torchrun           ``RANK`` and ``WORLD_SIZE`` (deepspeed, PyTorchJob too)     often runs in srun or mpirun tasks
 3    lightning          ``WORLD_SIZE``, ``LOCAL_RANK``, ``NODE_RANK=0``, no RANK    may run in a task or a pod
 4    openmpi            ``OMPI_COMM_WORLD_RANK`` and ``OMPI_COMM_WORLD_SIZE``       starts its daemons by srun
 5    mpich              ``PMI_RANK`` and ``PMI_SIZE`` (Intel MPI too)               starts its proxies by srun
 6    slurm              ``SLURM_PROCID`` of a task, not of a batch script
 7    kubernetes         ``JOB_COMPLETION_INDEX`` and ``WORLD_SIZE``, no ``RANK``    runs the others in its pods
 8    single             nothing of the above
====  =================  ==========================================================  =================================

If torch.distributed is initialized, its numbers are used, regardless of their source: the environment often has none
(``torch.multiprocessing.spawn``), or counts nodes instead of processes. An environment that cannot be reconciled with
them raises an error that names both, since otherwise ranks might read each other's samples.

An indexed Job of Kubernetes gives each pod its index but not the number of pods: its manifest must set ``WORLD_SIZE``
to its ``completions`` (one process per pod). A pod that starts torchrun does not need this.

A SLURM batch script or interactive shell also has ``SLURM_PROCID=0`` and ``SLURM_NTASKS``, but it is not one of those
tasks: it counts as a single process. It is recognized by a reserved step number. Older versions of SLURM set no step
number for a batch script, but ``SLURM_TASK_PID``, as for all processes that SLURM itself starts. A process with
neither, such as one in a container that gets only some of the variables, is the task that its ``SLURM_PROCID`` names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass

from infra.errors import MeshError, RankUnknownError
from infra.frameworks import DefaultGroup, process_group, train_worker

Environ = Mapping[str, str]

# SLURM numbers its own steps (batch script, extern, interactive) from the top of uint32 downwards: slurm.h,
# SLURM_BATCH_SCRIPT 0xfffffffb, SLURM_EXTERN_CONT 0xfffffffc, SLURM_INTERACTIVE_STEP 0xfffffffa.
_FIRST_RESERVED_SLURM_STEP = 0xFFFFFFF0


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """This process's place according to its launcher; None for values that the launcher does not set.

    Attributes:
        launcher: ``"torch.distributed"``, ``"ray"``, ``"torchrun"``, ``"lightning"``, ``"openmpi"``, ``"mpich"``,
            ``"slurm"``, ``"kubernetes"`` or ``"single"``.
        rank: Rank of this process, in [0, world_size).
        world_size: Number of processes.
        local_rank: Rank of this process on its node.
        local_world_size: Number of processes on its node.
        node_rank: Rank of this node.
        num_nodes: Number of nodes.
        master_addr: Host of the rendezvous (``MASTER_ADDR``).
        master_port: Port of the rendezvous (``MASTER_PORT``).
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    num_nodes: int | None = None
    master_addr: str | None = None
    master_port: int | None = None

    def __post_init__(self) -> None:
        name = self.launcher
        _check_share(name, "rank", self.rank, "world size", self.world_size)
        _check_share(name, "local rank", self.local_rank, "local world size", self.local_world_size)
        _check_share(name, "node rank", self.node_rank, "number of nodes", self.num_nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStore:
    """The key-value store that torchrun's agent runs for its processes, usable before they have a process group.

    Attributes:
        host: Its host.
        port: Its port.
        rank: This process's rank in the job.
        world_size: Number of processes in the job.
        attempt: Identifier of the job's attempt, so that a restart does not see keys of earlier attempts.
    """

    host: str
    port: int
    rank: int
    world_size: int
    attempt: str


def agent_store(environ: Environ | None = None) -> AgentStore | None:
    """Return the store of torchrun's agent, or None if there is no such agent or it has started only one process.

    Args:
        environ: Environment variables; None: those of this process.

    Raises:
        MeshError: A variable is not an integer.
    """
    env = os.environ if environ is None else environ
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not _has(env, "MASTER_ADDR", "RANK", "WORLD_SIZE"):
        return None
    rank, world_size, port = (_integer(env, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if rank is None or world_size is None or port is None or world_size < 2:
        return None
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "WORLD_SIZE")
    attempt = "/".join(env.get(name, "") for name in names)
    return AgentStore(host=env["MASTER_ADDR"], port=port, rank=rank, world_size=world_size, attempt=attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class RayCluster:
    """The Ray cluster that this process should use, according to its environment.

    Attributes:
        address: The value of ``RAY_ADDRESS``; "" if it is not set.
        uses_tls: Whether its processes communicate over TLS.
    """

    address: str
    uses_tls: bool


def ray_cluster(environ: Environ | None = None) -> RayCluster:
    """Return the Ray cluster to use.

    Args:
        environ: Environment variables; None: those of this process.
    """
    env = os.environ if environ is None else environ
    uses_tls = env.get("RAY_USE_TLS", "0").lower() in {"1", "true"}  # as Ray reads it
    return RayCluster(address=env.get("RAY_ADDRESS", ""), uses_tls=uses_tls)


def discover(environ: Environ | None = None) -> Launch:
    """Detect where this process runs, in the order of the table above.

    ::

        launch = discover()
        print(launch.launcher, launch.rank, launch.world_size)

    Args:
        environ: Environment variables. None: those of this process, after torch.distributed and Ray Train.

    Raises:
        MeshError: Variables are not integers, contradict each other or torch.distributed, or are incomplete.
    """
    if environ is not None:
        return _by_environment(environ)
    worker = train_worker()
    launch = None if worker is None else Launch(launcher="ray", **asdict(worker))
    group = process_group()
    if group is not None:
        return _by_group(group, os.environ, launch)
    return launch or _by_environment(os.environ)


def is_first_process() -> bool:
    """Return whether this process logs on behalf of all ranks of its job: it is rank 0, or its rank is unknown."""
    try:
        return discover().rank == 0
    except MeshError:  # code that needs the rank reports the contradiction
        return True


def ranks_here() -> int:
    """Return the number of processes of this job on this machine; 1 if no launcher sets it."""
    with suppress(MeshError):  # code that needs the rank raises it
        return discover().local_world_size or 1
    return 1


def _by_environment(env: Environ) -> Launch:
    found = [launch for reader in READERS if (launch := reader(env)) is not None]
    if not found:
        return _single(env)
    if found[0].launcher not in {"torchrun", "lightning"}:
        _check_half_set(env, found[0])
    elif len(found) > 1:
        _check_exported_rank(env, found[0], found[1])
    return found[0]


def _by_group(group: DefaultGroup, env: Environ, launch: Launch | None) -> Launch:
    """Return this process's place according to torch.distributed, with further values of the launcher.

    Raises:
        MeshError: The innermost launcher disagrees, whether it counts processes or equal groups of them (nodes).
    """
    launch = launch or next((found for reader in READERS if (found := reader(env)) is not None), None)
    if launch is not None and (launch.rank, launch.world_size) == (group.rank, group.world_size):
        return launch
    said, rank, world_size = "the environment", _integer(env, "RANK"), _integer(env, "WORLD_SIZE")  # may be None
    if launch is not None:
        said, rank, world_size = launch.launcher, launch.rank, launch.world_size
    unit = group.world_size // max(1, world_size or 1)
    fits = world_size is None or unit * world_size == group.world_size
    if not fits or (rank is not None and world_size is not None and group.rank // unit != rank):
        shown = f"rank {'?' if rank is None else rank} of {world_size}"
        variables = ", ".join(f"{name}={env[name]}" for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID") if name in env)
        raise MeshError(
            f"torch.distributed was initialized as rank {group.rank} of {group.world_size}, but {said} says {shown}"
            f"{f' ({variables})' if variables else ''}: initialize it with the launcher's numbers, unset those that do "
            "not belong to this job, or pass device_mesh=DeviceMesh.from_sizes(dp_size=…, rank=…)"
        )
    return Launch(
        launcher="torch.distributed",
        rank=group.rank,
        world_size=group.world_size,
        master_addr=env.get("MASTER_ADDR"),
        master_port=_integer(env, "MASTER_PORT"),
    )


def _torchrun(env: Environ) -> Launch | None:
    if not _has(env, "RANK", "WORLD_SIZE"):
        return None
    return _launch(
        env,
        "torchrun",
        rank="RANK",
        world_size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_world_size="LOCAL_WORLD_SIZE",
        node_rank="GROUP_RANK",
        num_nodes="GROUP_WORLD_SIZE",
    )


def _lightning(env: Environ) -> Launch | None:
    """Read the variables that Lightning's own launcher sets for the processes it starts: everything but their rank.

    On the first node, the rank is ``LOCAL_RANK``. On other nodes, only torch.distributed knows it, because no variable
    gives the number of processes per node.
    """
    if not _has(env, "WORLD_SIZE", "LOCAL_RANK") or "RANK" in env or _integer(env, "NODE_RANK") != 0:
        return None
    outer = (_openmpi(env), _mpich(env), _slurm(env))
    if any(launch is not None and launch.world_size == _integer(env, "WORLD_SIZE") for launch in outer):
        return None  # a script that exports the numbers of MPI or SLURM
    return _launch(env, "lightning", rank="LOCAL_RANK", world_size="WORLD_SIZE", local_rank="LOCAL_RANK", node_rank=0)


def _openmpi(env: Environ) -> Launch | None:
    if not _has(env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
        return None
    # OMPI_COMM_WORLD_NODE_RANK is the process's rank on its node, not the node's rank, so it is not used.
    return _launch(
        env,
        "openmpi",
        rank="OMPI_COMM_WORLD_RANK",
        world_size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    )


def _mpich(env: Environ) -> Launch | None:
    if not _has(env, "PMI_RANK", "PMI_SIZE"):
        return None
    return _launch(
        env,
        "mpich",
        rank="PMI_RANK",
        world_size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_world_size="MPI_LOCALNRANKS",
    )


def _slurm(env: Environ) -> Launch | None:
    if not _has(env, "SLURM_PROCID"):
        return None
    step = next((env[name] for name in ("SLURM_STEP_ID", "SLURM_STEPID") if name in env), None)
    sizes = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    size = next((name for name in sizes if name in env), None)
    is_first, where = _integer(env, "SLURM_PROCID") == 0, "" if step is None else f" in step {step}"
    if step is None and is_first and ("SLURM_TASK_PID" in env or size is None):
        return None  # a batch script, or indistinguishable from one
    if step is not None and (not step.isdecimal() or int(step) >= _FIRST_RESERVED_SLURM_STEP):
        if is_first:
            return None
        raise MeshError(
            f"SLURM_PROCID={env['SLURM_PROCID']}{where}, which is that of a batch script or shell, a single process: "
            "start the tasks with srun, or set RANK and WORLD_SIZE"
        )
    if size is None:
        raise MeshError(
            f"SLURM_PROCID={env['SLURM_PROCID']}{where}, but none of {', '.join(sizes)} is set: "
            "start the tasks with srun, or set RANK and WORLD_SIZE"
        )
    return _launch(
        env,
        "slurm",
        rank="SLURM_PROCID",
        world_size=size,
        local_rank="SLURM_LOCALID",
        local_world_size=_slurm_tasks_on_node(env),
        node_rank="SLURM_NODEID",
        num_nodes="SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in env else "SLURM_NNODES",
    )


def _slurm_tasks_on_node(env: Environ) -> int | None:
    """Return the number of this step's tasks on this node, from a list such as ``"4(x2),3"``."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE", ""))
    node = _integer(env, "SLURM_NODEID")
    for tasks, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        if node is None:
            return None
        node -= int(repeats or 1)
        if node < 0:
            return int(tasks)
    return None


def _kubernetes(env: Environ) -> Launch | None:
    # If RANK is set too, something inside the pod numbers the processes: torchrun, deepspeed or the manifest.
    if not _has(env, "JOB_COMPLETION_INDEX", "WORLD_SIZE") or "RANK" in env:
        return None
    return _launch(
        env,
        "kubernetes",
        rank="JOB_COMPLETION_INDEX",
        world_size="WORLD_SIZE",
        local_rank=0,
        local_world_size=1,
        node_rank="JOB_COMPLETION_INDEX",
        num_nodes="WORLD_SIZE",
    )


READERS: tuple[Callable[[Environ], Launch | None], ...] = (
    _torchrun,
    _lightning,
    _openmpi,
    _mpich,
    _slurm,
    _kubernetes,
)


def _single(env: Environ) -> Launch:
    """Treat this as the only process; refuse an incomplete environment of torchrun or of an indexed Job.

    Otherwise, every pod of such a Job would consider itself the only process, and all would read the same samples.
    """
    rank, world_size = _integer(env, "RANK"), _integer(env, "WORLD_SIZE")
    if "JOB_COMPLETION_INDEX" in env and rank is None and world_size is None:
        raise MeshError(
            f"JOB_COMPLETION_INDEX={env['JOB_COMPLETION_INDEX']}: a pod of an indexed Job, but WORLD_SIZE is not set: "
            "set it in the manifest to the Job's completions, or unset JOB_COMPLETION_INDEX where pods work alone"
        )
    if rank not in {None, 0} or world_size not in {None, 1}:
        have, lack = ("RANK", "WORLD_SIZE") if rank is not None else ("WORLD_SIZE", "RANK")
        message = f"{have}={env[have]} is set but {lack} is not: set both, or unset {have} for a single process"
        if rank is not None or world_size is None or world_size < 1:
            raise MeshError(message)
        raise RankUnknownError(f"{message}, or initialize torch.distributed before the first iteration", world_size)
    return Launch(launcher="single", rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, num_nodes=1)


def _check_exported_rank(env: Environ, inner: Launch, outer: Launch) -> None:
    """Refuse a RANK that was exported before srun or mpirun started the processes, since all of them would share it."""
    same_world = outer.world_size == inner.world_size and "TORCHELASTIC_RUN_ID" not in env
    if same_world and outer.rank != inner.rank:
        raise MeshError(
            f"RANK={inner.rank}, but {outer.launcher} started this process as rank {outer.rank} of the "
            f"same {inner.world_size}: was RANK exported before the processes started? unset it"
        )


def _check_half_set(env: Environ, launch: Launch) -> None:
    """Check an exported WORLD_SIZE (or RANK) against the numbers of SLURM or MPI."""
    for name, value in (("RANK", launch.rank), ("WORLD_SIZE", launch.world_size)):
        if name in env and _integer(env, name) != value:
            raise MeshError(f"{name}={env[name]}, but {launch.launcher} says {value}: correct or unset {name}")


def _launch(env: Environ, launcher: str, **sources: str | int | None) -> Launch:
    """Make a Launch whose fields come from the named variables, or are given directly."""
    values = {field: _integer(env, src) if isinstance(src, str) else src for field, src in sources.items()}
    try:
        return Launch(
            launcher=launcher,
            rank=values["rank"] or 0,
            world_size=values["world_size"] or 0,
            local_rank=values.get("local_rank"),
            local_world_size=values.get("local_world_size"),
            node_rank=values.get("node_rank"),
            num_nodes=values.get("num_nodes"),
            master_addr=env.get("MASTER_ADDR"),
            master_port=_integer(env, "MASTER_PORT"),
        )
    except MeshError as error:
        shown = ", ".join(f"{src}={env[src]}" for src in sources.values() if isinstance(src, str) and src in env)
        raise MeshError(f"{error} (from {shown}): correct these variables or unset them") from None


def _has(env: Environ, *names: str) -> bool:
    return all(name in env for name in names)


def _integer(env: Environ, name: str) -> int | None:
    text = env.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise MeshError(f"environment variable {name}: expected an integer, got {text!r}") from None


def _check_share(launcher: str, what: str, index: int | None, of: str, count: int | None) -> None:
    if count is not None and count < 1:
        raise MeshError(f"{launcher}: {of} must be at least 1, got {count}")
    if index is not None and (index < 0 or (count is not None and index >= count)):
        raise MeshError(f"{launcher}: {what} {index} does not fit the {of}, {count}")
