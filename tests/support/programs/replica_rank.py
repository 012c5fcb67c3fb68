"""One rank of a real process group; not a test itself, see test_replica_processes.py. Arguments: a JSON file."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from infra import DeviceMesh
from streaming import Broadcast, DataLoader, SequenceSlice, StageFields, StreamingDataset, Windows
from tests.support.sets.data_sets import check_batch

WINDOWS: dict[str, Any] = {
    "video": {"front.mp4": [-0.1, 0.0], "wrist.mp4": [0.0]}, "columns": {"action.npy": (0, 3)}, "edge": "pad",
}  # fmt: skip


def train(dataset: StreamingDataset, mesh: DeviceMesh, options: dict[str, Any]) -> dict[str, Any]:
    """Two epochs, left early once, with collectives of the training loop's own between the batches."""
    keys, states = [], []
    with DataLoader(dataset, device_mesh=mesh, **options) as loader:
        for stop in (3, 99, 99):
            for batch, _ in zip(loader, range(stop), strict=False):
                step = torch.tensor([len(keys) + 1])
                dist.all_reduce(step, dist.ReduceOp.MAX)
                keys.append(check_batch(batch))
                states.append(loader.state_dict())
                assert int(step) == len(keys)
    return {"keys": keys, "states": states}


def portions(dataset: StreamingDataset, mesh: DeviceMesh, options: dict[str, Any]) -> dict[str, Any]:
    """Entries and slices of one epoch."""
    with DataLoader(
        dataset, device_mesh=mesh, stage_fields=StageFields(first=("vec.npy",), last=("cls",)),
        sequence=SequenceSlice(fields=("vec.npy",)), **options,
    ) as loader:  # fmt: skip
        batches = list(loader)
    return {
        "entries": sorted({name for batch in batches for name in batch}),
        "rows": [batch["__num_samples__"] for batch in batches],
        "vectors": [batch["vec.npy"].tolist() for batch in batches if "vec.npy" in batch],
    }


def windows(dataset: Windows, mesh: DeviceMesh, options: dict[str, Any]) -> dict[str, Any]:
    """Digests of the batches of one epoch that is left after two of them and resumed."""
    digests: list[str] = []
    state: dict[str, Any] | None = None
    for stop in (2, 99):
        with DataLoader(dataset, device_mesh=mesh, **options) as loader:
            if state is not None:
                loader.load_state_dict(state)
            for batch, _ in zip(loader, range(stop), strict=False):
                digests.append(digest_of(batch))
                state = loader.state_dict()
    return {"digests": digests}


def digest_of(batch: dict[str, Any]) -> str:
    """Digest of all that a batch holds."""
    found = hashlib.sha256()
    for name, value in sorted(batch.items()):
        content = value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode()
        found.update(name.encode() + content)
    return found.hexdigest()


def differ(dataset: StreamingDataset, mesh: DeviceMesh, options: dict[str, Any]) -> dict[str, Any]:
    """Rank 2 has another batch size."""
    size = {"global_batch_size": options["global_batch_size"] + (mesh.rank == 2)}
    with DataLoader(dataset, device_mesh=mesh, **{**options, **size}) as loader:
        try:
            next(iter(loader))
        except Exception as error:
            return {"error": [type(error).__name__, str(error)]}
    return {}


def die(dataset: StreamingDataset, mesh: DeviceMesh, options: dict[str, Any]) -> dict[str, Any]:
    """The reading rank is gone after its second batch."""
    num_batches = 0
    with DataLoader(dataset, device_mesh=mesh, **options) as loader:
        try:
            for num_batches, _ in enumerate(loader, 1):
                if mesh.rank == 0 and num_batches == 2:
                    os._exit(17)
        except Exception as error:
            return {"error": [type(error).__name__, str(error)], "batches": num_batches}
    return {}


def main() -> None:
    with open(sys.argv[1]) as file:
        config = json.load(file)
    dist.init_process_group(
        "gloo", init_method=config["init"], rank=int(os.environ["RANK"]), world_size=config["world_size"]
    )
    rank = dist.get_rank()
    for name, sizes, broadcast in config["jobs"]:
        dataset: Any = StreamingDataset(config["url"], storage_options=config["storage_options"], seed=5)
        if name == "windows":
            dataset = Windows(StreamingDataset(config["recordings"], seed=5), **WINDOWS)
        mesh = DeviceMesh.from_sizes(**sizes, rank=rank, environ={})
        options = {"global_batch_size": 24, "last_batch": "pad"}
        if broadcast:
            options["replicate"] = Broadcast(timeout_s=60)
        jobs = {"train": train, "portions": portions, "windows": windows, "differ": differ, "die": die}
        found = jobs[name](dataset, mesh, options)
        path = os.path.join(config["folder"], f"{name}-{rank}.json")
        with open(path, "w") as out:
            json.dump(found, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
