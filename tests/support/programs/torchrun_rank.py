"""One rank under torchrun: runs the jobs of a JSON file and writes what it received, a file per job and rank.

Not a test itself; see test_distributed.py. Job: ``{"name", "loader": {…}, "state": null or a state, "epochs", "mesh":
null or {"shape", "names", "data_axes"}, "freeze_after": null or a number of batches}``.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from typing import Any

import torch

from infra import DeviceMesh
from streaming import DataLoader, StreamingDataset
from tests.support.processes.ready_server import have_a_server
from tests.support.sets.data_sets import check_batch


def device_mesh(wanted: dict[str, Any] | None) -> Any:
    """None: the loader finds out; else a real torch mesh over a real process group."""
    if wanted is None:
        return None
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415  costs every process time

    mesh = init_device_mesh("cpu", tuple(wanted["shape"]), mesh_dim_names=tuple(wanted["names"]))
    return DeviceMesh.from_torch(mesh, data_axes=tuple(wanted["data_axes"]))


def digest(batch: dict[str, Any]) -> str:
    """Of everything in the batch, tensors by their bytes."""
    found = hashlib.sha256()
    for name in sorted(batch):
        value = batch[name]
        if isinstance(value, torch.Tensor):
            value = (str(value.dtype), list(value.shape), value.numpy().tobytes())
        found.update(repr((name, value)).encode())
    return found.hexdigest()


def run(job: dict[str, Any], config: dict[str, Any], rank: int) -> None:
    dataset = StreamingDataset(config["url"], storage_options=config["storage_options"], **config["dataset"])
    mesh = device_mesh(job["mesh"])
    path = os.path.join(config["folder"], f"{job['name']}-{rank}.json")
    found: dict[str, Any] = {"pid": os.getpid(), "batches": [], "digests": [], "states": []}
    with DataLoader(dataset, device_mesh=mesh, **job["loader"]) as loader:
        found |= {"length": len(loader), "data_rank": loader.device_mesh.data_rank}
        found["data_world_size"] = loader.device_mesh.data_world_size
        if job["state"] is not None:
            loader.load_state_dict(job["state"])
        for _ in range(job["epochs"]):
            for batch in loader:
                keys = check_batch(batch)
                valid = batch["__valid__"].tolist() if "__valid__" in batch else [True] * len(keys)
                found["batches"].append([key for key, real in zip(keys, valid, strict=True) if real])
                found["digests"].append(digest(batch))
                found["states"].append(loader.state_dict())
                if len(found["batches"]) == job["freeze_after"]:
                    write(path, found)
                    signal.pause()  # until SIGKILL; the reader's threads go on
    write(path, found)


def write(path: str, found: dict[str, Any]) -> None:
    with open(f"{path}.part", "w") as file:
        json.dump(found, file)
    os.rename(f"{path}.part", path)


def main() -> None:
    with open(sys.argv[1]) as file:
        config = json.load(file)
    rank = int(os.environ["RANK"])
    if "READY_SERVER" in os.environ and any(job["loader"].get("num_workers") for job in config["jobs"]):
        have_a_server()
    for job in config["jobs"]:
        run(job, config, rank)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
