"""Train a small network on digits streamed from a bucket. Kill it at any point; resume it on any number of ranks.

    torchrun --nproc-per-node 2 examples/train_digits.py --train s3://bucket/train/ --test s3://bucket/test/ --out run/
    python examples/train_digits.py …the same…          # resumes from the last checkpoint, in one process

Every rank records the keys of the samples that it received, so that ``demo.py`` can count them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, pad

from infra import DeviceMesh
from streaming import DataLoader, StreamingDataset

Batch = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    train: str
    test: str
    out: Path
    epochs: int
    global_batch_size: int
    learning_rate: float
    checkpoint_every: int


class KeyLog:
    """One line per step with the keys this rank received, written before the step is taken.

    A line counts once a checkpoint includes its step; `discard_after` cuts off the others, as `truncate` does.
    """

    def __init__(self, folder: Path, run: int, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"run{run:02d}-rank{rank}.jsonl").open("w")

    def add(self, *, epoch: int, step: int, keys: list[str]) -> None:
        self._file.write(json.dumps({"epoch": epoch, "step": step, "keys": keys}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    @staticmethod
    def discard_after(folder: Path, step: int) -> None:
        """Cuts off the steps after ``step``, and a line that was being written when the process died."""
        for path in sorted(folder.glob("run*.jsonl")):
            kept = 0
            for line in path.read_bytes().splitlines(keepends=True):
                if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                    break
                kept += len(line)
            os.truncate(path, kept)


class Training:
    """Model, optimizer, loader and position, as one thing that is saved and restored."""

    def __init__(self, options: Options, mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        self.options, self.mesh = options, mesh
        self.model = make_network()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.learning_rate)
        dataset = StreamingDataset(options.train, fields=("png", "cls"), decode={"png": "gray8"}, seed=1)
        # "pad": the last global batch is filled up and says so in __valid__, so that no sample is left out.
        self.loader = DataLoader(
            dataset, global_batch_size=options.global_batch_size, device_mesh=mesh, last_batch="pad"
        )
        self.step = 0
        self.run = 0
        self._path = options.out / "checkpoint.pt"

    def restore(self) -> bool:
        """Goes to where the last checkpoint was made; on whatever number of processes that was."""
        if not self._path.exists():
            return False
        saved = torch.load(self._path, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.loader.load_state_dict(json.loads(saved["loader"]))
        self.step, self.run = saved["step"], saved["run"] + 1
        return True

    def save(self) -> None:
        """Publishes by rename: a kill in here leaves the checkpoint before it."""
        saved = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        saved |= {"loader": json.dumps(self.loader.state_dict()), "step": self.step, "run": self.run}
        partial = self._path.with_suffix(".partial")
        torch.save(saved, partial)
        partial.replace(self._path)

    def take_step(self, batch: Batch) -> tuple[float, int]:
        """One optimizer step on the global batch, the same for any number of ranks: its mean loss and samples."""
        total = self.options.epochs * len(self.loader)
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.learning_rate * 0.5 * (1 + math.cos(math.pi * self.step / total))
        valid = batch["__valid__"]
        generator = torch.Generator().manual_seed(self.step * self.mesh.world_size + self.mesh.rank)
        images = shifted(as_images(batch), generator)
        losses = cross_entropy(self.model(images), batch["cls"], reduction="none")
        loss = (losses * valid).sum()
        self.optimizer.zero_grad()
        loss.backward()
        loss_sum, num_valid = self._sum_over_ranks(loss.detach(), valid.sum())
        self.optimizer.step()
        self.step += 1
        return float(loss_sum / num_valid), int(num_valid)

    def _sum_over_ranks(self, loss: torch.Tensor, num_valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Makes every gradient the mean over the global batch: sums over ranks, divided by the samples there."""
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        flat = torch.cat([loss.reshape(1), num_valid.reshape(1).float(), *(g.flatten() for g in gradients)])
        if self.mesh.world_size > 1:
            dist.all_reduce(flat)
        at = 2
        for gradient in gradients:
            gradient.copy_((flat[at : at + gradient.numel()] / flat[1]).view_as(gradient))
            at += gradient.numel()
        return flat[0], flat[1]


def make_network() -> nn.Module:
    """Two convolutions for 8 x 8 digits."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def as_images(batch: Batch) -> torch.Tensor:
    """uint8 ``[B, 8, 8]`` to float ``[B, 1, 8, 8]`` in 0..1."""
    images: torch.Tensor = batch["png"]
    return images.unsqueeze(1).float() / 255


def shifted(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Every image moved by up to one pixel each way."""
    padded = pad(images, (1, 1, 1, 1))
    # Rows and columns of each sample's crop: [B, 8, 1] and [B, 1, 8].
    offsets = torch.randint(0, 3, (2, len(images), 1, 1), generator=generator)
    rows = offsets[0] + torch.arange(8).view(1, 8, 1)
    columns = offsets[1] + torch.arange(8).view(1, 1, 8)
    return padded[torch.arange(len(images)).view(-1, 1, 1), 0, rows, columns].unsqueeze(1)


def train(options: Options, mesh: DeviceMesh) -> nn.Module:
    """Trains to the last epoch, from the last checkpoint if there is one."""
    training = Training(options, mesh)
    goes_on = training.restore()
    logs = options.out / "keys"
    if mesh.rank == 0:
        KeyLog.discard_after(logs, training.step)
        where = f"goes on at step {training.step}" if goes_on else "starts"
        say(f"{where} on {mesh.data_world_size} process(es), {len(training.loader)} steps an epoch")
    if mesh.world_size > 1:
        dist.barrier()
    log = KeyLog(logs, training.run, mesh.rank)
    for epoch in range(training.loader.epoch, options.epochs):
        train_epoch(training, epoch, log)
    if mesh.rank == 0:
        training.save()
    training.loader.close()
    log.close()
    return training.model


def train_epoch(training: Training, epoch: int, log: KeyLog) -> None:
    """The rest of one epoch. The keys are written down before the ranks meet in the step: see `KeyLog`."""
    num_steps, num_samples, started = len(training.loader), 0, time.perf_counter()
    for batch in training.loader:
        received = zip(batch["__key__"], batch["__valid__"].tolist(), strict=True)
        log.add(epoch=epoch, step=training.step + 1, keys=[key for key, valid in received if valid])
        loss, num_taken = training.take_step(batch)
        num_samples += num_taken
        if training.mesh.rank == 0:
            if training.step % training.options.checkpoint_every == 0:
                training.save()
            rate = num_samples / (time.perf_counter() - started)
            at = training.step - epoch * num_steps
            say(f"epoch {epoch} step {at}/{num_steps} loss {loss:.4f} {rate:.0f} samples/s")


@torch.inference_mode()
def accuracy(model: nn.Module, url: str) -> tuple[int, int]:
    """Right answers and samples of the test set, read by this process alone."""
    dataset = StreamingDataset(url, fields=("png", "cls"), decode={"png": "gray8"}, shuffle=False)
    alone = DeviceMesh.from_sizes(dp_size=1, rank=0, world_size=1)
    right = total = 0
    model.eval()
    with DataLoader(dataset, batch_size=120, device_mesh=alone, last_batch="partial") as loader:
        for batch in loader:
            right += int((model(as_images(batch)).argmax(dim=1) == batch["cls"]).sum())
            total += len(batch["cls"])
    return right, total


def say(text: str) -> None:
    """One line, at once: whoever reads along wants it live."""
    print(text, flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", required=True, help="URL of the training shards")
    parser.add_argument("--test", required=True, help="URL of the test shards")
    parser.add_argument("--out", required=True, type=Path, help="folder for checkpoint and key logs")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--global-batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--checkpoint-every", type=int, default=10, help="in steps")
    options = Options(**vars(parser.parse_args()))

    torch.set_num_threads(1)  # the network is too small for more
    mesh = DeviceMesh.from_sizes()
    if mesh.world_size > 1:
        dist.init_process_group("gloo")
    options.out.mkdir(parents=True, exist_ok=True)
    model = train(options, mesh)
    if mesh.rank == 0:
        right, total = accuracy(model, options.test)
        say(f"test accuracy {right / total:.4f} ({right} of {total})")
    if mesh.world_size > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
