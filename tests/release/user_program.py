"""A user's program, for type checkers: what is wrong is marked, and nothing else may be found. It is never run."""

from pathlib import Path
from typing import Any, reveal_type

import numpy as np

import streaming
from infra import DeviceMesh
from shard_tools import ShardWriter, optimize
from streaming import Curriculum, DataLoader, DevicePrefetcher, Mixture, Packed, Schedule, StreamingDataset
from streaming.errors import ShardstreamError


def augment(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return sample | {"flip": rng.random() < 0.5}


def small(path: Path) -> dict[str, bytes]:
    return {"jpg": path.read_bytes()}


def main() -> None:
    with ShardWriter("train/{:06d}.tar", max_samples=400) as writer:
        writer.write({"__key__": "000", "jpg": b"...", "cls": 3, "json": {"width": 400}})
    report = optimize(small, sorted(Path("photos").glob("*.jpg")), "made/")
    images = StreamingDataset("train/", where="width > 256", decode={"jpg": "rgb8:224x224"}, transform=augment)
    texts = StreamingDataset(["a.tar", "b.tar"], storage_options={"anon": True}, seed=7)
    easy = Curriculum(texts, metric="tokens", schedule=Schedule.root(0.1, 1.0, over=100_000))
    packs = Packed(texts, length=1024)
    mix = Mixture({"one": packs, "two": Packed(texts, length=1024)}, weights={"one": 0.8, "two": 0.2})
    mesh = DeviceMesh.from_sizes(dp_size=2, tp_size=4, rank=0)
    loader = DataLoader(images, batch_size=32, num_workers=4, device_mesh=mesh)
    for epoch in range(loader.epoch, 10):
        loader.set_epoch(epoch)
        for batch in DevicePrefetcher(loader, device="cpu"):
            reveal_type(batch)
    try:
        loader.load_state_dict(loader.state_dict())
    except ShardstreamError as error:
        print(error, len(loader), len(easy), images[3]["jpg"])

    reveal_type(writer)
    reveal_type(report)
    reveal_type(images)
    reveal_type(mix)
    reveal_type(loader)
    reveal_type(loader.state_dict())
    reveal_type(loader.metrics())
    reveal_type(mesh.data_rank)
    reveal_type(len(mix))
    print(streaming.Dataloader)  # wrong: no such name
    DataLoader(images, batchsize=32)  # wrong: no such argument
    DataLoader(images, batch_size="32")  # wrong: not a number
    StreamingDataset(5)  # wrong: no URL
    loader.stat_dict()  # wrong: no such method
    DeviceMesh.from_sizes(dp_size="2")  # wrong: not a number
