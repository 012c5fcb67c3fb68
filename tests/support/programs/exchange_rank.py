"""A rank that exchanges packs: its batches of an epoch, left in the middle and resumed, as JSON (test_balance.py)."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from infra import DeviceMesh
from streaming import DataLoader, Packed, Schedule, StreamingDataset
from streaming.errors import ReplicaError

LENGTH = 64
GLOBAL_BATCH = 16
RAMP = Schedule.steps({0: 4, 8: 16, 40: 8})


def loader_of(folder: str, mesh: DeviceMesh, **options: Any) -> DataLoader:
    packed = Packed(StreamingDataset(folder, seed=3), LENGTH)
    given = {"global_batch_size": GLOBAL_BATCH, "cost": 64, **options}
    return DataLoader(packed, device_mesh=mesh, last_batch="partial", **given)


def rows_of(batch: Any) -> list[Any]:
    """Each pack: its tokens, labels, positions, keys and where its documents begin."""
    names = ("input_ids", "labels", "position_ids", "document_ids")
    length = batch["input_ids"].shape[1]
    starts = batch["cu_seqlens"].tolist()
    return [
        [*(batch[name][row].tolist() for name in names), batch["__key__"][row], batch["__url__"][row],
         [start - row * length for start in starts if row * length <= start < (row + 1) * length]]
        for row in range(len(batch["__key__"]))
    ]  # fmt: skip


def main() -> None:
    folder, out, rank, world = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=world)
    mesh = DeviceMesh.from_sizes(dp_size=world, rank=rank)
    found: dict[str, Any] = {}
    with loader_of(folder, mesh, balance="exchange") as loader:
        batches, counts = [], []
        for batch in loader:
            batches.append(rows_of(batch))
            counts.append([batch["num_tokens"], batch["num_labels"], batch["max_seqlen"], sorted(batch)])
            if len(batches) == 3:
                break
            if rank == 1 and len(batches) == 1:  # a forked child leaves the connections to its parent
                if not (child := os.fork()):
                    os._exit(0)
                assert os.waitpid(child, 0)[1] == 0
        state = loader.state_dict()
    with loader_of(folder, mesh, balance="exchange", global_batch_size=RAMP) as loader:
        found["ramp"] = [rows_of(batch) for _, batch in zip(range(7), loader, strict=False)]
    with loader_of(folder, mesh, balance="exchange", cost="tokens * tokens") as loader:
        found["by columns"] = [rows_of(batch) for _, batch in zip(range(3), loader, strict=False)]
    with loader_of(folder, mesh, balance="exchange") as loader:
        loader.load_state_dict(state)
        for batch in loader:
            batches.append(rows_of(batch))
            counts.append([batch["num_tokens"], batch["num_labels"], batch["max_seqlen"], sorted(batch)])
        found |= {"batches": batches, "counts": counts, "state": state}
        # One rank leaves: the others hear of it. Here its process ends.
        it = iter(loader)
        next(it)
        if rank:
            try:
                next(it)
            except ReplicaError as error:
                found["left"] = str(error)
        (out / f"{rank}.json").write_text(json.dumps(found))


def dearness(row: list[Any]) -> int:
    """What ``cost=64`` says of a row of ``rows_of``: T * c and the squares of its pieces' lengths."""
    documents = np.array(row[3])
    counts = np.bincount(documents[documents >= 0])
    return LENGTH * 64 + int((counts**2).sum())


if __name__ == "__main__":
    main()
