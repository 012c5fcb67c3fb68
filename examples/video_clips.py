"""Tell directions of motion apart: clips of eight frames from MP4 files, and a small network of three dimensions.

    python examples/video_clips.py

1. Each sample of the shards is an MP4 file (H.264) as it is, and a class.
2. ``Video(seconds=0.8, fps=10, size=(32, 32))`` decodes eight frames of each, a tenth of a second apart: in training
   from another place in each epoch, in evaluation from the middle. Decoding begins at the key frame before. Stored are
   40 to 80 frames of 96 x 128, at 24, 30 or 60 a second; batches are uint8 tensors [B, 8, 32, 32, 3].

The videos are made: a shape that moves left, right, up or down over a still ground. One frame does not tell where to.
"""

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
SIZE = HEIGHT, WIDTH = 96, 128


def moving(step: tuple[int, int], draw: np.random.Generator) -> bytes:
    """Return an MP4 of a shape that moves in one direction, and comes in again at the other side."""
    rate, speed, side = int(draw.choice([24, 30, 60])), draw.uniform(60, 110), draw.integers(16, 32)
    place, ink, is_round = draw.uniform(0, 1, 2) * SIZE, draw.integers(150, 256, 3), draw.integers(2)
    ground = draw.integers(0, 110, (HEIGHT // 8, WIDTH // 8, 3)).repeat(8, 0).repeat(8, 1)
    rows, columns, out = *np.ogrid[:HEIGHT, :WIDTH], io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        stream = file.add_stream("libx264", rate=rate, options={"g": "24", "preset": "veryfast"})
        stream.height, stream.width = SIZE
        for number in range(draw.integers(40, 81)):
            y, x = (place + speed * number / rate * np.array(step)) % SIZE
            down, right = (
                ((rows - y + HEIGHT / 2) % HEIGHT - HEIGHT / 2),
                ((columns - x + WIDTH / 2) % WIDTH - WIDTH / 2),
            )
            far = np.hypot(down, right) if is_round else np.maximum(np.abs(down), np.abs(right))
            frame = np.where((far < side / 2)[:, :, None], ink, ground).astype(np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame)))
        file.mux(stream.encode(None))
    return out.getvalue()


def make_set(folder: Path, count: int, seed: int) -> None:
    """Write ``count`` videos and their classes as shards with an index."""
    draw, steps = np.random.default_rng(seed), list(DIRECTIONS.values())
    with ShardWriter(f"{folder}/{{:06d}}.tar", max_samples=100) as writer:
        for number in range(count):
            writer.write({"__key__": f"{number:04d}", "mp4": moving(steps[number % 4], draw), "cls": number % 4})


def as_input(clips: torch.Tensor) -> torch.Tensor:
    """Turn uint8 [B, T, H, W, C] into float [B, C, T, H, W] around 0."""
    return clips.permute(0, 4, 1, 2, 3).float() / 128 - 1


def main(folder: Path, epochs: int, count: int) -> None:
    """Make the sets, train, and draw the curve and a clip."""
    for name, number, seed in (("train", count, 0), ("val", count // 4, 1)):
        make_set(folder / name, number, seed)
    torch.manual_seed(0)
    convolutions = [
        nn.Sequential(nn.Conv3d(a, b, 3, (1, 2, 2), padding=1), nn.BatchNorm3d(b), nn.ReLU())
        for a, b in ((3, 12), (12, 24), (24, 48))
    ]
    model = nn.Sequential(*convolutions, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(48, 4))
    optimizer, losses, accuracies = torch.optim.AdamW(model.parameters(), lr=4e-3), [], []

    # What to read, for training and for evaluation; this process's place among all (here: alone); the loop.
    train = StreamingDataset(folder / "train", decode={"mp4": Video(seconds=0.8, fps=10, size=(32, 32))})
    middle = {"mp4": Video(seconds=0.8, fps=10, size=(32, 32), start="center")}
    val, mesh = StreamingDataset(folder / "val", decode=middle, shuffle=False), DeviceMesh.from_sizes()
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
    curve.plot(losses)
    curve.plot(np.arange(1, epochs + 1) * len(losses) / epochs, accuracies, "o-")
    curve.legend(["loss", "accuracy, held-out videos"])
    strip.imshow(np.hstack(batch["mp4"][0].numpy()))
    strip.set(title=f"a clip of the class {list(DIRECTIONS)[int(batch['cls'][0])]!r}", xticks=[], yticks=[])
    figure.savefig(folder / "video_clips.png")
    print(f"picture: {folder / 'video_clips.png'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/examples/video_clips"), help="folder to work in")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--count", type=int, default=240, help="videos to train on")
    given = parser.parse_args()
    main(given.out, given.epochs, given.count)
