"""Feed trainers from readers of their own, on any nodes of a Ray cluster: the driver only passes handles.

    python examples/ray_readers.py             # with RAY_ADDRESS=HOST:6379 on that cluster, else one on this machine

1. Two reader actors open the set, and read and decode for two trainers: ``remote_group=``.
2. The driver's loop gets a handle for each trainer in each step, some bytes long, and passes it on. The trainer's
   ``handle.get()`` takes the batch from the reader's node.
3. The driver averages the gradients. Its state of the loader is the same small dict as ever, and goes on anywhere.

Data that all nodes can reach, please: a bucket, or on one machine a folder.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from pathlib import Path

import ray
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from infra import DeviceMesh
from shard_tools import ShardWriter
from streaming import BatchHandle, DataLoader, RemoteGroup, StreamingDataset


def write_set(folder: Path) -> int:
    """Write scikit-learn's digits as arrays with labels."""
    digits = load_digits()
    with ShardWriter(str(folder / "{:04d}.tar"), max_samples=200, overwrite=True) as writer:
        for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
            writer.write({"__key__": f"{number:04d}", "npy": (image / 16).astype("float32"), "cls": int(label)})
    return len(digits.target)


@ray.remote(num_cpus=0)
class Trainer:
    """Hold a copy of the model. All copies take the same steps."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)

    def gradients(self, handle: BatchHandle) -> tuple[float, list[torch.Tensor], list[str]]:
        """Take the batch from its reader; return the loss, the gradients and the keys."""
        batch = handle.get()  # torch tensors, in this process
        loss = cross_entropy(self.model(batch["npy"]), batch["cls"])
        self.optimizer.zero_grad()
        loss.backward()
        return loss.item(), [parameter.grad for parameter in self.model.parameters()], batch["__key__"]

    def step(self, gradients: list[torch.Tensor]) -> None:
        """Take a step along the mean gradients."""
        for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()


def main(folder: Path, epochs: int) -> None:
    """Start actors, train, and count what the trainers got."""
    num_samples = write_set(folder / "train")
    url = str((folder / "train").absolute())
    ray.init(os.environ.get("RAY_ADDRESS", "local"), log_to_driver=False)
    trainers = [Trainer.remote() for _ in range(2)]
    num_nodes = sum(node["Alive"] for node in ray.nodes())
    print(f"two readers and two trainers on {num_nodes} node(s)", flush=True)

    mesh = DeviceMesh.from_sizes(dp_size=2, rank=0)  # of the trainers: the driver is none of them
    readers = RemoteGroup(name="readers", num_actors=2, num_cpus=0.5)  # spread over the nodes
    seen: Counter[str] = Counter()
    losses = []
    # The function is called in the readers: the driver opens nothing.
    with DataLoader(
        lambda: StreamingDataset(url), global_batch_size=64, device_mesh=mesh, remote_group=readers
    ) as loader:
        for epoch in range(epochs):
            for batch in loader:
                told = ray.get([trainer.gradients.remote(batch.of(rank)) for rank, trainer in enumerate(trainers)])
                mean = [torch.stack(alike).mean(dim=0) for alike in zip(*(grads for _, grads, _ in told), strict=True)]
                ray.get([trainer.step.remote(mean) for trainer in trainers])
                losses.append(sum(loss for loss, _, _ in told) / len(told))
                seen.update((epoch, key) for _, _, keys in told for key in keys)
            print(f"epoch {epoch}: loss {losses[-1]:.3f}", flush=True)
        state = loader.state_dict()
    print(f"state of the loader: epoch {state['epoch']}, {len(str(state))} bytes")
    doubled = sum(times > 1 for times in seen.values())
    print(f"{len(seen):,} samples in {epochs} epochs of {num_samples:,} (whole batches), doubled: {doubled}")
    ray.shutdown()

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    figure.subplots().plot(losses)
    figure.axes[0].set(xlabel="step", ylabel="loss")
    figure.savefig(folder / "loss.png")
    print(f"picture: {folder / 'loss.png'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/examples/ray_readers"), help="folder to work in")
    parser.add_argument("--epochs", type=int, default=4)
    given = parser.parse_args()
    main(given.out, given.epochs)
