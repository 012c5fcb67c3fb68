"""Train a policy on the recordings of two robots with unlike cameras: windows of frames and of the actions that follow.

    python examples/train_policy.py

1. Each sample of the shards is an episode, as ``shard_tools convert --from lerobot`` writes them: an MP4 of each
   camera, and ``action.npy`` with a row for each frame. One robot has the cameras ``front`` and ``wrist`` at 10 frames
   a second; the other has ``top`` and ``hand`` at 15.
2. ``shard_tools index SET --video`` writes where the frames are.
3. ``Windows`` makes a row of each frame: two frames of the scene, one of the hand's camera, and the next six actions.
   ``names=`` and ``size=`` bring both robots to one form, so that ``Mixture`` can deal from both.

The recordings are made: a hand (blue) moves to a thing (red), and its camera sees what lies around it. An action is a
step of the hand.
"""

import argparse
import io
import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import nn

from shard_tools import ShardWriter
from streaming import DataLoader, Mixture, StreamingDataset, Windows

STEPS, STEP = 6, 0.025
ROBOTS = {  # its cameras of the scene and of the hand, (height, width) of both, frames per second
    "one": (("front", (64, 64)), ("wrist", (48, 48)), 10),
    "two": (("top", (72, 96)), ("hand", (32, 32)), 15),
}


def encoded(frames: list[np.ndarray], rate: int) -> bytes:
    """Return frames as an MP4, with a key frame every two seconds."""
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        stream = file.add_stream("libx264", rate=rate, options={"g": str(2 * rate), "preset": "veryfast", "crf": "20"})
        stream.height, stream.width = frames[0].shape[:2]
        for frame in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame)))
        file.mux(stream.encode(None))
    return out.getvalue()


def seen(size: tuple[int, int], hand: np.ndarray, thing: np.ndarray) -> np.ndarray:
    """Draw the scene, from (0, 0) to (1, 1): uint8 [H, W, 3]."""
    rows, columns = np.ogrid[: size[0], : size[1]]
    picture = np.full((*size, 3), 90, np.uint8)
    for (y, x), ink in ((thing, (230, 40, 40)), (hand, (40, 60, 230))):
        picture[np.hypot(rows - y * size[0], columns - x * size[1]) < size[0] / 9] = ink
    return picture


def episode(robot: str, draw: np.random.Generator) -> dict[str, object]:
    """Return a recording: the hand moves to the thing in steps of a length, not quite straight, until it is there."""
    (scene, scene_size), (near, near_size), rate = ROBOTS[robot]
    hand, thing = draw.uniform(0.1, 0.9, 2), draw.uniform(0.1, 0.9, 2)
    far, close, actions = [], [], []
    while np.hypot(*(way := thing - hand)) > STEP or len(actions) < STEPS:
        step = way * STEP / np.hypot(*way) + draw.normal(0, 0.1 * STEP, 2)
        far.append(seen(scene_size, hand, thing))
        close.append(seen(near_size, np.array([0.5, 0.5]), 0.5 + 1.5 * way))
        actions.append(step)
        hand = hand + step
    return {
        f"{scene}.mp4": encoded(far, rate), f"{near}.mp4": encoded(close, rate),
        "action.npy": np.array(actions, np.float32), "json": {"robot": robot, "fps": rate},
    }  # fmt: skip


def make_set(folder: Path, robot: str, count: int, seed: int) -> None:
    """Write recordings of a robot as shards with an index."""
    draw = np.random.default_rng(seed)
    with ShardWriter(f"{folder}/{{:06d}}.tar", max_samples=20) as writer:
        for number in range(count):
            writer.write({"__key__": f"{folder.name}_{number:06d}", **episode(robot, draw)})


def windows(folder: Path, robot: str) -> Windows:
    """Return the windows of a robot's recordings, under the names that both share."""
    (scene, _), (near, _), _ = ROBOTS[robot]
    return Windows(
        StreamingDataset(folder),
        video={f"{scene}.mp4": [-0.2, 0.0], f"{near}.mp4": [0.0]},
        columns={"action.npy": (0, STEPS)},
        size=(32, 32),
        names={f"{scene}.mp4": "scene", f"{near}.mp4": "near", "action.npy": "actions"},
    )


class Policy(nn.Module):
    """Two frames of the scene and one of the hand's camera in, the next actions out."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.ReLU()) for a, b in ((9, 24), (24, 48), (48, 48))]
        self.body = nn.Sequential(*layers, nn.Flatten(), nn.Linear(48 * 16, 96), nn.ReLU(), nn.Linear(96, 2 * STEPS))

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the actions: float [B, STEPS, 2]."""
        frames = torch.cat([batch["scene"], batch["near"]], 1).float() / 128 - 1  # [B, 3, H, W, 3]
        return self.body(frames.permute(0, 1, 4, 2, 3).flatten(1, 2)).unflatten(1, (STEPS, 2)) * STEP


def loss_of(policy: Policy, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean error of the actions that exist; 1 is as long as a step."""
    errors = (policy(batch) - batch["actions"]).norm(dim=-1) / STEP  # [B, STEPS]
    return errors[batch["__valid_steps__"]].mean()


def main(folder: Path, epochs: int, count: int) -> None:
    """Make the sets, train on both robots, and draw the curve and a window."""
    for number, robot in enumerate(ROBOTS):
        make_set(folder / robot, robot, count, 2 * number)
        make_set(folder / f"{robot}-held-out", robot, max(2, count // 6), 2 * number + 1)
    made = [f"{one}/" for one in sorted(folder.glob("*/"))]
    subprocess.run([sys.executable, "-m", "shard_tools", "index", *made, "--video"], check=True)
    torch.manual_seed(0)
    policy, losses, errors = Policy(), [], []
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3)
    both = Mixture({robot: windows(folder / robot, robot) for robot in ROBOTS})
    with DataLoader(both, 64) as loader:
        for epoch in range(epochs):
            for batch in loader:
                loss = loss_of(policy, batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            for robot in ROBOTS:
                val = windows(folder / f"{robot}-held-out", robot)
                with torch.inference_mode(), DataLoader(val, 64, last_batch="partial") as held_out:
                    errors.append(float(np.mean([loss_of(policy, one).item() for one in held_out])))
            print(f"epoch {epoch}: loss {losses[-1]:.3f}, error {errors[-2]:.3f} and {errors[-1]:.3f}", flush=True)

    figure = Figure(figsize=(8, 4), layout="constrained")
    curve, strip = figure.subplots(2, 1, height_ratios=(3, 1))
    curve.plot(losses)
    for number, robot in enumerate(ROBOTS):
        at = np.arange(1, epochs + 1) * len(losses) / epochs
        curve.plot(at, errors[number::2], "o-", label=f"robot {robot}, held out")
    curve.legend()
    strip.imshow(np.hstack([*batch["scene"][0].numpy(), *batch["near"][0].numpy()]))
    curve.set(xlabel="step", ylabel="error of an action, in its length")
    strip.set(title="a window: the scene 0.2 s ago and now, and the hand's camera", xticks=[], yticks=[])
    figure.savefig(folder / "train_policy.png")
    print(f"picture: {folder / 'train_policy.png'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/examples/train_policy"), help="folder to work in")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--count", type=int, default=16, help="recordings of each robot to train on")
    given = parser.parse_args()
    main(given.out, given.epochs, given.count)
