"""Tell directions of motion apart: clips of eight frames from MP4 files, and a small network of three dimensions.

    python examples/video_clips.py

1. Each sample of the shards is an MP4 file (H.264) as it is, and a class.
2. ``Video(seconds=0.8, fps=10, size=(32, 32))`` decodes eight frames of each, a tenth of a second apart: in training
   from another place in each epoch, which depends on seed, epoch and position alone; in evaluation from the middle.
   Decoding begins at the key frame before. Stored are 40 to 80 frames of 96 x 128, at rates from 24 to 60 a second.
3. Batches are uint8 tensors [B, 8, 32, 32, 3].

The videos are made: a shape that moves left, right, up or down over a still ground. One frame does not tell where to.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import av
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import nn
from torch.nn.functional import cross_entropy

from infra import DeviceMesh
from shard_tools import ShardWriter
from streaming import DataLoader, StreamingDataset, Video

DIRECTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
HEIGHT, WIDTH = 96, 128


def moving(label: int, draw: np.random.Generator) -> bytes:
    """Return an MP4 of a shape that moves in one direction, and comes in again at the other side."""
    down, right = list(DIRECTIONS.values())[label]
    rate, speed, side = int(draw.choice([24, 30, 60])), draw.uniform(60, 110), draw.integers(16, 32)
    place, ink = draw.uniform(0, 1, 2) * (HEIGHT, WIDTH), draw.integers(150, 256, 3)
    ground = draw.integers(0, 110, (HEIGHT // 8, WIDTH // 8, 3)).repeat(8, 0).repeat(8, 1)
    rows, columns = np.ogrid[:HEIGHT, :WIDTH]
    is_round, out = draw.integers(2), io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        stream = file.add_stream("libx264", rate=rate, options={"g": "24", "preset": "veryfast"})
        stream.height, stream.width = HEIGHT, WIDTH
        for number in range(draw.integers(40, 81)):
            y, x = (place + speed * number / rate * np.array((down, right))) % (HEIGHT, WIDTH)
            far_y, far_x = np.abs(rows - y), np.abs(columns - x)
            far_y, far_x = np.minimum(far_y, HEIGHT - far_y), np.minimum(far_x, WIDTH - far_x)
            far = np.hypot(far_y, far_x) if is_round else np.maximum(far_y, far_x)
            frame = np.where((far < side / 2)[:, :, None], ink, ground).astype(np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame)))
        file.mux(stream.encode(None))
    return out.getvalue()


def make_set(folder: Path, count: int, seed: int) -> None:
    """Write ``count`` videos and their classes as shards with an index."""
    draw = np.random.default_rng(seed)
    with ShardWriter(f"{folder}/{{:06d}}.tar", max_samples=100) as writer:
        for number in range(count):
            writer.write({"__key__": f"{number:04d}", "mp4": moving(number % 4, draw), "cls": number % 4})


def make_network() -> nn.Module:
    """Three convolutions over time, height and width, then the mean over all three."""
    layers: list[nn.Module] = []
    for num_in, num_out in ((3, 12), (12, 24), (24, 48)):
        layers += [
            nn.Conv3d(num_in, num_out, 3, padding=1),
            nn.BatchNorm3d(num_out),
            nn.ReLU(),
            nn.MaxPool3d((1, 2, 2)),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(48, len(DIRECTIONS)))


def as_input(clips: torch.Tensor) -> torch.Tensor:
    """Turn uint8 [B, T, H, W, C] into float [B, C, T, H, W] around 0."""
    return clips.permute(0, 4, 1, 2, 3).float() / 128 - 1


def main(folder: Path, epochs: int, count: int) -> None:
    """Make the sets, train, and draw the curve and a clip."""
    for name, number, seed in (("train", count, 0), ("val", count // 4, 1)):
        if not (folder / name / "_shardstream").exists():
            make_set(folder / name, number, seed)

    torch.manual_seed(0)
    model, mesh = make_network(), DeviceMesh.from_sizes()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    train = StreamingDataset(folder / "train", decode={"mp4": Video(seconds=0.8, fps=10, size=(32, 32))})
    middle = {"mp4": Video(seconds=0.8, fps=10, size=(32, 32), start="center")}
    val = StreamingDataset(folder / "val", decode=middle, shuffle=False)
    losses, accuracies = [], []
    with DataLoader(train, 20, device_mesh=mesh) as loader:
        for epoch in range(epochs):
            for batch in loader:
                loss = cross_entropy(model(as_input(batch["mp4"])), batch["cls"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            model.eval()
            with torch.inference_mode(), DataLoader(val, 50, last_batch="partial", device_mesh=mesh) as held_out:
                right = sum(int((model(as_input(b["mp4"])).argmax(1) == b["cls"]).sum()) for b in held_out)
            model.train()
            accuracies.append(right / len(val))
            print(f"epoch {epoch}: loss {losses[-1]:.3f}, accuracy {accuracies[-1]:.1%}", flush=True)

    figure = Figure(figsize=(8, 4), layout="constrained")
    curve, strip = figure.subplots(2, 1, height_ratios=(3, 1))
    curve.plot(losses, label="loss")
    curve.plot(np.arange(1, epochs + 1) * len(losses) / epochs, accuracies, "o-", label="accuracy, held-out videos")
    curve.set(xlabel="steps")
    curve.legend()
    strip.imshow(np.hstack(batch["mp4"][0].numpy()))
    strip.set(title=f"a clip of the class {list(DIRECTIONS)[int(batch['cls'][0])]!r}", xticks=[], yticks=[])
    figure.savefig(folder / "video_clips.png")
    print(f"picture: {folder / 'video_clips.png'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/examples/video_clips"), help="folder to work in")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--count", type=int, default=400, help="videos to train on")
    given = parser.parse_args()
    main(given.out, given.epochs, given.count)
