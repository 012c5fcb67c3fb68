"""A program with the contract of timm's ``train.py`` (1.0.29.dev0): what it asks of its loader, and when it saves.

- ``create_loader`` gives the dataset its transform, and wraps torch's loader, which collates tuples of images (uint8
  [C, H, W]) and numbers. The wrapper reads one batch ahead, and makes floats of it on the device.
- The loop asks for ``len(loader)``, ``loader.dataset``, ``set_epoch`` of its batch sampler, or else of its sampler, and
  ``mixup_enabled``; the last batch of an epoch is the one of that number.
- A checkpoint holds model, optimizer and epoch, read with ``weights_only``. After one within an epoch, too, training
  continues with the next epoch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils.data.distributed import DistributedSampler

from tests.support.programs.recipes import Rank, names_of

EPOCHS, SIDE, CROP = 3, 16, 8
MIXES = bool(os.environ.get("MIXES"))


class Images(torch.utils.data.Dataset[Any]):
    """The program's own: 72 images."""

    transform: Any = None

    def __len__(self) -> int:
        return 72

    def __getitem__(self, number: int) -> tuple[Any, int]:
        pixels = np.random.default_rng(number).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        return self.transform(pixels), number


def random_crop(image: Any) -> np.ndarray[Any, Any]:
    """Return a part of an image, placed by torch's generator: uint8 [3, CROP, CROP]."""
    top, left = torch.randint(0, SIDE - CROP, (2,)).tolist()
    return np.ascontiguousarray(np.asarray(image)[top : top + CROP, left : left + CROP].transpose(2, 0, 1))


def stacked(rows: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    assert all(isinstance(row, tuple) and row[0].dtype == np.uint8 for row in rows)
    return torch.from_numpy(np.stack([image for image, _ in rows])), torch.tensor([number for _, number in rows])


class Mixing:
    """Mixes each image with its counterpart while it stacks them, by numbers that NumPy draws for the batch."""

    mixup_enabled = True

    def __call__(self, rows: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        images, numbers = stacked(rows)
        share = np.random.beta(0.8, 0.8) if self.mixup_enabled else 1.0  # noqa: NPY002  as timm draws
        targets = torch.nn.functional.one_hot(numbers, 100).double()
        targets = share * targets + (1 - share) * targets.flip(0)
        return (share * images + (1 - share) * images.flip(0)).round().to(torch.uint8), targets


class Ahead:
    """Holds one batch more than it has yielded; images become floats."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        kept = None
        for images, targets in self.loader:
            assert images.dtype == torch.uint8
            if kept is not None:
                yield kept
            kept = (images.to(torch.float32) - 127.5) / 58.0, targets
        assert kept is not None, "timm fails, too, if there is no batch"
        yield kept

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name in {"sampler", "batch_sampler", "dataset"}:
            return getattr(self.loader, name)
        raise AttributeError(name)

    @property
    def mixup_enabled(self) -> bool:
        return isinstance(self.loader.collate_fn, Mixing) and self.loader.collate_fn.mixup_enabled

    @mixup_enabled.setter
    def mixup_enabled(self, value: bool) -> None:
        self.loader.collate_fn.mixup_enabled = value


def create_loader(dataset: Any, batch_size: int, distributed: bool) -> Ahead:
    dataset.transform = random_crop
    sampler = DistributedSampler(dataset) if distributed else None
    collate = Mixing() if MIXES else stacked
    return Ahead(
        torch.utils.data.DataLoader(
            dataset, batch_size, shuffle=sampler is None, sampler=sampler, drop_last=True, collate_fn=collate
        )
    )


def main() -> None:
    rank = Rank()
    args = SimpleNamespace(
        data_dir="s3://bucket/imagenet/", batch_size=12 // rank.world_size, workers=int(os.environ.get("WORKERS", "0"))
    )
    # <
    dataset_train = Images()
    # >
    loader_train = create_loader(dataset_train, args.batch_size, rank.world_size > 1)
    # <
    # >
    model = torch.nn.Linear(3 * CROP * CROP, 4)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6, momentum=0.9)
    # <
    # >
    path, resume_epoch = rank.folder / "last.pth.tar", None
    if path.exists():
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        resume_epoch = checkpoint["epoch"] + 1
    start_epoch = 0
    if resume_epoch is not None:
        # <
        start_epoch = resume_epoch
        # >
    for epoch in range(start_epoch, EPOCHS):
        set_loader_epoch(loader_train, epoch)
        train_one_epoch(rank, epoch, model, loader_train, optimizer, path)
        save(rank, path, model, optimizer, epoch)


def set_loader_epoch(loader: Ahead, epoch: int) -> None:
    for one in (loader.dataset, loader.batch_sampler):
        if hasattr(one, "set_epoch"):
            one.set_epoch(epoch)
    if not hasattr(loader.batch_sampler, "set_epoch") and hasattr(loader.sampler, "set_epoch"):
        loader.sampler.set_epoch(epoch)


def train_one_epoch(rank: Rank, epoch: int, model: Any, loader: Ahead, optimizer: Any, path: Path) -> None:
    if MIXES and epoch == EPOCHS - 1:
        assert loader.mixup_enabled
        loader.mixup_enabled = False
    last_batch_idx, was_last = len(loader) - 1, False
    for batch_idx, (input, target) in enumerate(loader):  # noqa: A001  timm's names
        # <
        # >
        was_last = batch_idx == last_batch_idx
        rank.received(epoch * len(loader) + batch_idx, names_of(target if MIXES else input), epoch)
        model(input.flatten(1)).square().mean().backward()
        rank.reduce()
        optimizer.step()
        optimizer.zero_grad()
        save(rank, path, model, optimizer, epoch)
    assert was_last, "the optimizer's last step of the epoch depends on it"


def save(rank: Rank, path: Path, model: Any, optimizer: Any, epoch: int) -> None:
    if rank.rank == 0:
        held = {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(held, f"{path}.part")
        os.replace(f"{path}.part", path)


if __name__ == "__main__":
    main()
