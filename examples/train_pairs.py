"""Train two small towers on pictures and their captions, as CLIP does: each picture finds its caption.

    python examples/train_pairs.py             # Ctrl-C at any time, and run it again: it goes on

1. A sample is files of one name: ``00017.png`` and ``00017.txt``. `ShardWriter` packs them into tar shards.
2. ``transform=`` turns captions into numbers while batches are made, so that they arrive as one tensor.
3. The loss compares all pictures of a batch with all captions of it. The score is retrieval: of all captions there are,
   does a new picture find its own?

The pictures are made here: "a small red circle on blue" and the like, 144 captions.
"""

from __future__ import annotations

import argparse
import io
import itertools
import os
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image, ImageDraw
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from infra import DeviceMesh
from shard_tools import ShardWriter
from streaming import DataLoader, StreamingDataset

SHAPES, SIZES = ("circle", "square", "triangle", "ring"), ("small", "large")
INKS = {
    "red": "#e03030",
    "green": "#20a040",
    "yellow": "#e8d020",
    "white": "#f8f8f8",
    "pink": "#f090c0",
    "cyan": "#30d0d8",
}
GROUNDS = {"blue": "#1830a0", "black": "#101010", "brown": "#6a4020"}
CAPTIONS = [
    f"a {size} {ink} {shape} on {ground}"
    for size, ink, shape, ground in itertools.product(SIZES, INKS, SHAPES, GROUNDS)
]
WORDS = {word: number for number, word in enumerate(sorted({word for caption in CAPTIONS for word in caption.split()}))}


def drawn(caption: str, draw: np.random.Generator) -> bytes:
    """Draw what the caption says, somewhere in a picture of 32 x 32 pixels."""
    _, size, ink, shape, _, ground = caption.split()
    picture = Image.new("RGB", (32, 32), GROUNDS[ground])
    radius = int(draw.integers(4, 7)) if size == "small" else int(draw.integers(9, 13))
    x, y = draw.integers(radius, 32 - radius, size=2).tolist()
    box = (x - radius, y - radius, x + radius, y + radius)
    pen = ImageDraw.Draw(picture)
    if shape == "circle":
        pen.ellipse(box, fill=INKS[ink])
    elif shape == "ring":
        pen.ellipse(box, outline=INKS[ink], width=2)
    elif shape == "square":
        pen.rectangle(box, fill=INKS[ink])
    else:
        pen.polygon([(x, box[1]), (box[0], box[3]), (box[2], box[3])], fill=INKS[ink])
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return buffer.getvalue()


def write_set(folder: Path, *, repeats: int, seed: int) -> None:
    """Write each caption ``repeats`` times, each time with another picture."""
    draw = np.random.default_rng(seed)
    with ShardWriter(str(folder / "{:04d}.tar"), max_samples=500, overwrite=True) as writer:
        for number, caption in enumerate(CAPTIONS * repeats):
            writer.write({"__key__": f"{number:05d}", "png": drawn(caption, draw), "txt": caption})


def as_numbers(sample: dict) -> dict:
    """Replace the caption by the numbers of its words."""
    sample["words"] = np.array([WORDS[word] for word in sample["txt"].split()])
    return sample


class Towers(nn.Module):
    """One tower for pictures, one for words; both end in 32 numbers of length 1."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for num_in, num_out in ((3, 16), (16, 32), (32, 64)):
            layers += [nn.Conv2d(num_in, num_out, 3, stride=2, padding=1), nn.BatchNorm2d(num_out), nn.ReLU()]
        self.picture = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 4 * 4, 32))
        self.caption = nn.Sequential(nn.EmbeddingBag(len(WORDS), 64), nn.ReLU(), nn.Linear(64, 32))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, pictures: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        """Return how alike each picture and each caption are: [pictures, captions]."""
        seen = self.picture(pictures.permute(0, 3, 1, 2).float() / 128 - 1)
        return self.scale.exp() * normalize(seen, dim=1) @ normalize(self.caption(words), dim=1).T


@torch.inference_mode()
def retrieval(model: Towers, folder: Path) -> tuple[float, torch.Tensor, list[str]]:
    """Return how many new pictures find their caption among all, with some pictures and what they found."""
    every = torch.tensor([[WORDS[word] for word in caption.split()] for caption in CAPTIONS])
    dataset = StreamingDataset(folder, shuffle=False)
    model.eval()
    with DataLoader(dataset, batch_size=len(dataset)) as loader:
        (batch,) = loader
    found = [CAPTIONS[number] for number in model(batch["png"], every).argmax(dim=1)]
    model.train()
    right = sum(one == caption for one, caption in zip(found, batch["txt"], strict=True))
    return right / len(found), batch["png"], found


def main(folder: Path, epochs: int) -> None:
    """Write the sets, train from the checkpoint if there is one, and show what is found."""
    write_set(folder / "train", repeats=20, seed=0)
    write_set(folder / "val", repeats=2, seed=1)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the network is too small for more
    model = Towers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    dataset = StreamingDataset(folder / "train", transform=as_numbers)
    mesh = DeviceMesh.from_sizes()  # one process; with several, gather the captions of all ranks before comparing
    checkpoint, curve = folder / "checkpoint.pt", []
    with DataLoader(dataset, global_batch_size=48, device_mesh=mesh) as loader:
        if checkpoint.exists():
            saved = torch.load(checkpoint)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            loader.load_state_dict(saved["loader"])
            curve = saved["curve"]
        for epoch in range(loader.epoch, epochs):
            for batch in loader:
                alike = model(batch["png"], batch["words"])
                target = torch.arange(len(alike))
                loss = (cross_entropy(alike, target) + cross_entropy(alike.T, target)) / 2
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            curve.append(retrieval(model, folder / "val")[0])
            print(f"epoch {epoch}: loss {loss.item():.2f}, {curve[-1]:.1%} find their caption", flush=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "curve": curve}
            torch.save({**state, "loader": loader.state_dict()}, f"{checkpoint}.part")
            os.replace(f"{checkpoint}.part", checkpoint)
    show(curve, *retrieval(model, folder / "val")[1:], folder / "pairs.png")


def show(curve: list[float], pictures: torch.Tensor, found: list[str], path: Path) -> None:
    """Draw the score over the epochs, and some new pictures with the captions that they find."""
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplot_mosaic([["curve"] * 4, *[[f"{row}{column}" for column in range(4)] for row in range(2)]])
    axes["curve"].plot(range(1, len(curve) + 1), curve, "o-")
    axes["curve"].set(xlabel="epochs", ylabel="find their caption", ylim=(0, 1))
    for place, number in enumerate(range(0, 8 * 29, 29)):
        one = axes[f"{place // 4}{place % 4}"]
        one.imshow(pictures[number])
        one.set_title(found[number], fontsize=8)
        one.axis("off")
    figure.savefig(path)
    print(f"picture: {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/examples/train_pairs"), help="folder to work in")
    parser.add_argument("--epochs", type=int, default=10)
    given = parser.parse_args()
    main(given.out, given.epochs)
