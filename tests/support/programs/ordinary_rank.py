"""One rank under torchrun with uneven iterable data; see test_ordinary.py. Not a test itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data import IterableDataset

from infra import DeviceMesh
from streaming.order.plan.settings import Shape
from streaming.order.plan.sizes import Sizes
from streaming.others.torch_datasets.map_style import open_ordinary
from streaming.others.torch_datasets.options import OrdinaryConfig
from streaming.run.engine.workers.fork_server import SHARED
from tests.support.processes.leftovers import leftovers
from tests.support.processes.ready_server import have_a_server


class Uneven(IterableDataset[dict[str, int]]):
    """The parts of rank 0 hold 60 samples, those of rank 1 hold 20."""

    num_shards = 1000

    def __init__(self, num_workers: int) -> None:
        self.num_workers = max(1, num_workers)
        self.samples: Any = None

    def shard(self, num_shards: int, index: int) -> Uneven:
        made = Uneven(self.num_workers)
        rank, worker = divmod(index, self.num_workers)
        made.samples = (range(60) if rank == 0 else range(100, 120))[worker :: self.num_workers]
        return made

    def __iter__(self) -> Iterator[dict[str, int]]:
        yield from ({"id": i} for i in self.samples)


def ids(batch: Any) -> list[int]:
    kept = batch["id"][batch["__valid__"]] if "__valid__" in batch else batch["id"]
    return list(map(int, kept))


def main() -> None:
    folder, num_workers = Path(sys.argv[1]), int(sys.argv[2])
    if num_workers:
        have_a_server()
        SHARED.linger_s = None  # both loops share it
    dist.init_process_group("gloo")
    mesh = DeviceMesh.from_sizes()
    found: dict[str, Any] = {}
    for last_batch in ("drop", "pad"):
        config = OrdinaryConfig(
            shape=Shape(sizes=Sizes.constant(8), num_ranks=mesh.data_world_size, last_batch=last_batch), mesh=mesh,
            num_workers=num_workers,
        )  # fmt: skip
        loop = open_ordinary(Uneven(num_workers), config)
        found[last_batch] = [[ids(batch) for batch in loop.run()] for _ in range(2)]
        if last_batch == "pad":  # rank 1 has 5 or 6 batches of its own
            begun = [ids(batch) for _, batch in zip(range(8), loop.run(), strict=False)]
            loop.load(loop.state())
            found["resumed"] = [*begun, *(ids(batch) for batch in loop.run())]
        found.setdefault("discarded", loop.metrics.get("discarded_batches"))
        loop.close()
        if last_batch == "drop":  # from here on there is the group that all loops share
            before = leftovers()
    found["leftovers"] = dict(leftovers() - before)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
