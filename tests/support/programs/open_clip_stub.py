"""A program with the contract of open_clip's ``main.py`` and ``train.py`` (4.2.0.dev0, 89fb801), and none of its code.

- ``data["train"]`` holds a loader, a sampler or None, and an object with ``set_value``, which gets each epoch's number.
- The loop asks the loader for ``num_batches`` and ``num_samples``, which are set on it; it counts steps by the first.
- A batch is a dict of ``image``, float, and ``text``, int64 [B, length]: all of it goes to the model by name.
- A checkpoint is made after each epoch, with the number of epochs that are done; it is loaded before there is a loader.
  Training continues with the next epoch.
"""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data.distributed import DistributedSampler

from tests.support.programs.recipes import Rank, names_of

EPOCHS, SIDE, CROP = 6, 16, 8


class Pairs(torch.utils.data.Dataset[Any]):
    """The program's own: 36 images with texts."""

    def __len__(self) -> int:
        return 36

    def __getitem__(self, number: int) -> dict[str, Any]:
        pixels = np.random.default_rng(number).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        return {"image": preprocess_train(pixels), "text": tokenizer(f"number {number}")[0]}


@dataclass
class DataInfo:
    """A loader, and what gets the number of the epoch."""

    dataloader: Any
    sampler: Any = None
    shared_epoch: Any = None

    def set_epoch(self, epoch: int) -> None:
        if self.shared_epoch is not None:
            self.shared_epoch.set_value(epoch)
        if isinstance(self.sampler, DistributedSampler):
            self.sampler.set_epoch(epoch)


class Model(torch.nn.Module):
    """Takes a batch by its names."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.words = torch.nn.Linear(3 * CROP * CROP, 4), torch.nn.Embedding(256, 4)

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return (self.head(image.flatten(1)) * self.words(text).mean(1)).sum(1)


def preprocess_train(image: Any) -> torch.Tensor:
    """Return a part of an image, placed by torch's generator: float [3, CROP, CROP]."""
    top, left = torch.randint(0, SIDE - CROP, (2,)).tolist()
    pixels = np.asarray(image)[top : top + CROP, left : left + CROP].transpose(2, 0, 1)
    return torch.from_numpy(np.ascontiguousarray(pixels)).float() / 255


def tokenizer(text: str) -> torch.Tensor:
    """Return int64 [1, 16]."""
    return torch.tensor([[*text.encode().ljust(16)]])


def get_data(args: Any, rank: Rank) -> dict[str, DataInfo]:
    dataset = Pairs()
    sampler = DistributedSampler(dataset) if rank.world_size > 1 else None
    loader: Any = torch.utils.data.DataLoader(dataset, args.batch_size, shuffle=sampler is None, sampler=sampler)
    loader.num_batches, loader.num_samples = len(loader), len(dataset)
    return {"train": DataInfo(loader, sampler)}


def main() -> None:
    rank = Rank()
    args = Namespace(
        train_data="s3://bucket/pairs/{000000..000002}.tar", batch_size=12 // rank.world_size, train_num_samples=36,
        workers=int(os.environ.get("WORKERS", "0")),
    )  # fmt: skip
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-6)
    path, start_epoch = rank.folder / "epoch_latest.pt", 0
    if path.exists():
        held = torch.load(path, weights_only=True)
        start_epoch = held["epoch"]
        model.load_state_dict(held["state_dict"])
        optimizer.load_state_dict(held["optimizer"])
    data = get_data(args, rank)
    # <
    # >
    for epoch in range(start_epoch, EPOCHS):
        data["train"].set_epoch(epoch)
        dataloader = data["train"].dataloader
        assert dataloader.num_samples >= dataloader.num_batches * 12
        for i, batch in enumerate(dataloader):
            assert batch["image"].is_floating_point()
            assert batch["text"].dtype == torch.int64
            rank.received(dataloader.num_batches * epoch + i, names_of(batch["image"]), epoch)
            optimizer.zero_grad()
            model(**batch).square().mean().backward()
            rank.reduce()
            optimizer.step()
        if rank.rank == 0:
            held = {"epoch": epoch + 1, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(held, f"{path}.part")
            os.replace(f"{path}.part", path)


if __name__ == "__main__":
    main()
