"""A program with the contract of MAE's ``main_pretrain.py`` (facebookresearch/mae, efb2a80): its loader, and its saves.

- A dataset gives images and class numbers; a ``DistributedSampler`` asks for its length.
- The loop asks for ``len(loader)`` before the first batch and within it, ``loader.sampler.set_epoch`` if there are
  several ranks, and pairs of float images [B, 3, H, W] and something that it leaves alone.
- The learning rate follows the number of the batch in its epoch.
- A checkpoint holds model, optimizer, scaler and epoch, after an epoch alone. Training continues with the next epoch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.support.programs.recipes import Rank, names_of

EPOCHS, SIDE, CROP = 3, 16, 8


class Images(torch.utils.data.Dataset[Any]):
    """The program's own: 72 images."""

    def __len__(self) -> int:
        return 72

    def __getitem__(self, number: int) -> tuple[Any, int]:
        pixels = np.random.default_rng(number).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        return transform_train(pixels), number


class Misc:
    """The module that saves, loads, and logs while it passes batches on."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def save_model(
        self, args: Any, epoch: int, model: Any, model_without_ddp: Any, optimizer: Any, loss_scaler: Any
    ) -> None:
        held = {"model": model_without_ddp.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        if self._rank.rank == 0:
            torch.save(held | {"scaler": loss_scaler.state_dict(), "args": args}, f"{args.resume}.part")
            os.replace(f"{args.resume}.part", args.resume)

    def load_model(self, args: Any, model_without_ddp: Any, optimizer: Any) -> None:
        if os.path.exists(args.resume):
            held = torch.load(args.resume, weights_only=False)
            model_without_ddp.load_state_dict(held["model"])
            optimizer.load_state_dict(held["optimizer"])
            args.start_epoch = held["epoch"] + 1

    def log_every(self, loader: Any, _: int, __: str) -> Iterator[Any]:
        assert len(f"{len(loader)}") > 0
        yield from loader


def transform_train(image: Any) -> torch.Tensor:
    """Return a part of an image, placed by torch's generator: float [3, CROP, CROP]."""
    top, left = torch.randint(0, SIDE - CROP, (2,)).tolist()
    pixels = np.asarray(image)[top : top + CROP, left : left + CROP].transpose(2, 0, 1)
    return torch.from_numpy(np.ascontiguousarray(pixels)).float() / 255


class Wrapped(torch.nn.Module):
    """The model as DDP has it."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, rows: torch.Tensor) -> Any:
        return self.module(rows)


def main() -> None:
    rank = Rank()
    misc = Misc(rank)
    args = SimpleNamespace(
        data_path="s3://bucket/imagenet/", batch_size=12 // rank.world_size, resume=f"{rank.folder}/checkpoint.pth",
        num_workers=int(os.environ.get("WORKERS", "0")), start_epoch=0,
    )  # fmt: skip
    # <
    dataset_train = Images()
    # >
    sampler_train = torch.utils.data.DistributedSampler(dataset_train, num_replicas=rank.world_size, rank=rank.rank)
    # <
    data_loader_train = torch.utils.data.DataLoader(
        dataset_train, sampler=sampler_train, batch_size=args.batch_size, num_workers=args.num_workers, drop_last=True
    )
    # >
    assert len(sampler_train) == 72 // rank.world_size
    model_without_ddp = torch.nn.Linear(3 * CROP * CROP, 4)
    model = Wrapped(model_without_ddp)
    optimizer = torch.optim.AdamW(model_without_ddp.parameters(), 1e-6)
    loss_scaler = torch.amp.GradScaler("cpu", enabled=False)
    # <
    # >
    misc.load_model(args, model_without_ddp, optimizer)
    # <
    # >
    for epoch in range(args.start_epoch, EPOCHS):
        if rank.world_size > 1:
            data_loader_train.sampler.set_epoch(epoch)
        train_one_epoch(rank, misc, model, data_loader_train, optimizer, epoch, loss_scaler, args)
        misc.save_model(args, epoch, model, model_without_ddp, optimizer, loss_scaler)


def train_one_epoch(
    rank: Rank, misc: Misc, model: Any, data_loader: Any, optimizer: Any, epoch: int, loss_scaler: Any, args: Any
) -> None:
    metric_logger, print_freq, header = misc, 20, f"Epoch: [{epoch}]"
    for data_iter_step, (samples, _) in enumerate(metric_logger.log_every(data_loader, print_freq, header)):
        # <
        # >
        assert 0 <= data_iter_step < len(data_loader)
        assert samples.dtype == torch.float32
        assert samples.shape[1:] == (3, CROP, CROP)
        rank.received(epoch * len(data_loader) + data_iter_step, names_of(samples), epoch)
        model(samples.flatten(1)).square().mean().backward()
        rank.reduce()
        optimizer.step()
        optimizer.zero_grad()
        # <
        # >


if __name__ == "__main__":
    main()
