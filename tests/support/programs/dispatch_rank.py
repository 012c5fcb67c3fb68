"""One rank of a real process group; not a test itself, see test_dispatch.py. Arguments: a folder."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from streaming import Broadcast, DataLoader, OrdinaryDataset


class Rows:
    """A cursor that gives its rows in an order drawn anew in every pass; it may break."""

    epoch = 0

    def __init__(self, size: int, rotten: int | None = None) -> None:
        self.size, self.rotten = size, rotten

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, int]]:
        assert dist.get_rank() == 0  # nobody else reads
        numbers = list(range(self.size))
        random.shuffle(numbers)
        for place, number in enumerate(numbers):
            if place == self.rotten:
                raise LookupError(f"row {place} is rotten")
            yield {"id": 1000 * self.epoch + number}


def main() -> None:
    folder = Path(sys.argv[1])
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    options: dict[str, Any] = {"global_batch_size": 8, "last_batch": "partial"}
    options["replicate"] = Broadcast(timeout_s=60)
    found: dict[str, Any] = {}
    with DataLoader(OrdinaryDataset(Rows(37), sharding="dispatch"), **options) as loader:
        found["epochs"] = [[batch["id"].tolist() for batch in loader] for _ in range(2)]
    with DataLoader(OrdinaryDataset(Rows(37, rotten=20), sharding="dispatch"), **options) as loader:
        try:
            list(loader)
        except LookupError as error:
            found["error"] = f"{type(error).__name__}: {error}"
    (folder / f"got-{rank}.json").write_text(json.dumps(found))
    with DataLoader(OrdinaryDataset(Rows(1000), sharding="dispatch"), **options) as loader:
        try:
            for number, _ in enumerate(loader):
                if rank == 0 and number == 3:
                    os._exit(17)
        except Exception as error:
            (folder / "killed.txt").write_text(f"{type(error).__name__}: {error}")
    os._exit(0)  # the group has lost a member: nothing is left to agree on


if __name__ == "__main__":
    main()
