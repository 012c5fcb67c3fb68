"""The names that docs/trainers.md leaves to the reader. Every program of that page starts with these.

``model`` writes the keys of each batch that it is given to a file of its rank, and kills its process when told.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
from typing import Any

import torch
import torch.distributed as dist

_TOLD: dict[str, Any] = json.loads(os.environ["TRAINER_TEST"])
URL: str = _TOLD["url"]
FOLDER: str = _TOLD["folder"]
CHECKPOINT: str = f"{FOLDER}.pt"
RENDEZVOUS: str = _TOLD["rendezvous"]
EPOCHS: int = _TOLD["epochs"]
RANKS: int = _TOLD["ranks"]
QUIET: dict[str, Any] = _TOLD["quiet"]

faulthandler.dump_traceback_later(_TOLD["deadline_s"], exit=True)

__all__ = [
    "CHECKPOINT",
    "EPOCHS",
    "FOLDER",
    "QUIET",
    "RANKS",
    "RENDEZVOUS",
    "URL",
    "model",
    "module",  # noqa: F822  by __getattr__
    "report",
    "sample_losses",
    "train_step",
]


class Log:
    """What this rank received, a line for each batch, written before anything is done with it."""

    count = 0

    def note(self, keys: list[str]) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        with open(f"{_TOLD['log']}-{rank}", "a") as file:
            file.write(json.dumps(keys) + "\n")
        self.count += 1
        if rank == 0 and self.count == _TOLD["kill_at"]:
            os.kill(os.getpid(), signal.SIGKILL)


class Net(torch.nn.Module):
    """Four numbers in, one out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = torch.nn.Linear(4, 2)
        self.log = Log()

    def forward(self, **batch: Any) -> dict[str, torch.Tensor]:
        self.log.note(list(batch["__key__"]))
        logits = self.head(batch["vec.npy"])
        return {"loss": logits.square().mean(), "logits": logits}


model = Net()


def train_step(net: torch.nn.Module, batch: dict[str, Any]) -> None:
    net(**batch)["loss"].backward()
    torch.optim.SGD(net.parameters(), 1e-9).step()
    net.zero_grad()


def sample_losses(net: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    return net(**batch)["logits"].square().mean(-1)


def report(metric: float) -> None:
    """For tests of validation: what this rank came to."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    with open(f"{_TOLD['log']}-metric-{rank}", "w") as file:
        json.dump(float(metric), file)


def __getattr__(name: str) -> Any:
    """``module``, for Lightning alone: it takes seconds to import."""
    if name != "module":
        raise AttributeError(name)
    return _module() if _TOLD["program"] == "Lightning" else None


def _module() -> Any:
    import lightning  # noqa: PLC0415

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, **batch: Any) -> dict[str, torch.Tensor]:
            return self.net(**batch)

        def training_step(self, batch: dict[str, Any], _: int) -> torch.Tensor:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 1e-9)

    return Module()
