"""Train on a folder of pictures, as on ImageNet: a subfolder for each class, pictures of any size.

    python examples/train_images.py            # Ctrl-C at any time, and run it again: it goes on

1. ``shard_tools convert`` packs class folders into tar shards with an index. The files in them stay as they are.
2. In training ``decode=`` takes another random part of each picture in each epoch, in evaluation the middle. With real
   photos that is ``decode={"jpg": "rgb8:crop224x224"}``; here parts are larger, since a part of a digit is no digit.
3. The loader's state is saved with the model. Killed at any step, training goes on with the next sample.

The pictures are scikit-learn's 1,797 handwritten digits, drawn in colours on grounds of many sizes.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from infra import DeviceMesh
from shard_tools.cli import cli
from streaming import DataLoader, StreamingDataset
from streaming.decode import random_crop


def make_pictures(folder: Path) -> None:
    """Write ``train/0/0010.jpg`` and so on, every fifth below ``val``. A folder of your own will do, too."""
    draw = np.random.default_rng(0)
    digits = load_digits()
    for number, (strokes, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        digit = Image.fromarray(np.uint8(strokes * 15.9)).resize((40, 48))
        width, height = draw.integers(56, 91, size=2).tolist()
        picture = Image.new("RGB", (width, height), tuple(draw.integers(0, 100, 3).tolist()))
        ink = tuple(draw.integers(150, 256, 3).tolist())
        picture.paste(ink, ((width - 40) // 2, (height - 48) // 2), digit)
        path = folder / ("train" if number % 5 else "val") / f"{label}" / f"{number:04d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path)


def convert(source: Path, target: Path) -> None:
    """Do what this command does in a shell."""
    words = ["convert", str(source), str(target), "--max-samples", "200"]
    print("$ shard_tools", *words, flush=True)
    cli(words, standalone_mode=False)


def make_network() -> nn.Module:
    """Three convolutions and a linear layer, for 32 x 32 pixels."""
    layers: list[nn.Module] = []
    for num_in, num_out in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(num_in, num_out, 3, padding=1), nn.BatchNorm2d(num_out), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 4 * 4, 10))


def as_input(images: torch.Tensor) -> torch.Tensor:
    """Turn uint8 [B, H, W, C] into float [B, C, H, W] around 0."""
    return images.permute(0, 3, 1, 2).float() / 128 - 1


@torch.inference_mode()
def accuracy_on(model: nn.Module, folder: Path, mesh: DeviceMesh) -> float:
    """Return the share of right answers, each picture seen once."""
    dataset = StreamingDataset(folder, decode={"jpg": "rgb8:center32x32"}, shuffle=False)
    model.eval()
    right = 0
    with DataLoader(dataset, batch_size=100, last_batch="partial", device_mesh=mesh) as loader:
        for batch in loader:
            right += int((model(as_input(batch["jpg"])).argmax(dim=1) == batch["cls"]).sum())
    model.train()
    return right / len(dataset)


def main(folder: Path, epochs: int) -> None:
    """Make the set, and train to the last epoch, from the checkpoint if there is one."""
    if not (folder / "photos").exists():
        make_pictures(folder / "photos.part")
        os.replace(folder / "photos.part", folder / "photos")  # complete
    for name in ("train", "val"):
        convert(folder / "photos" / name, folder / name)

    torch.manual_seed(0)
    torch.set_num_threads(1)  # the network is too small for more
    model = make_network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    curve: list[float] = []
    checkpoint = folder / "checkpoint.pt"

    # What to read; this process's place among all (here: alone); the loop.
    dataset = StreamingDataset(folder / "train", decode={"jpg": random_crop("rgb8", (32, 32), scale=(0.5, 1))})
    mesh = DeviceMesh.from_sizes()
    with DataLoader(dataset, global_batch_size=32, device_mesh=mesh) as loader:
        if checkpoint.exists():
            saved = torch.load(checkpoint)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            loader.load_state_dict(saved["loader"])
            curve = saved["curve"]
            print(f"goes on in epoch {loader.epoch}")
        for epoch in range(loader.epoch, epochs):
            for step, batch in enumerate(loader):
                loss = cross_entropy(model(as_input(batch["jpg"])), batch["cls"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if step % 10 == 9:
                    save(checkpoint, model=model, optimizer=optimizer, loader=loader, curve=curve)
            curve.append(accuracy_on(model, folder / "val", mesh))
            save(checkpoint, model=model, optimizer=optimizer, loader=loader, curve=curve)
            print(f"epoch {epoch}: accuracy {curve[-1]:.1%}", flush=True)

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    figure.subplots().plot(range(1, len(curve) + 1), curve, "o-")
    figure.axes[0].set(xlabel="epochs", ylabel="accuracy on held-out digits", ylim=(0, 1))
    figure.savefig(folder / "accuracy.png")
    print(f"picture: {folder / 'accuracy.png'}")


def save(path: Path, *, curve: list[float], **parts: object) -> None:
    """Write a checkpoint, and only then give it its name: a kill in between leaves the one before."""
    torch.save({"curve": curve} | {name: part.state_dict() for name, part in parts.items()}, f"{path}.part")
    os.replace(f"{path}.part", path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/examples/train_images"), help="folder to work in")
    parser.add_argument("--epochs", type=int, default=8)
    given = parser.parse_args()
    main(given.out, given.epochs)
