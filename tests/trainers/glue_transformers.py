"""What ``use_loader`` promises beside positions; run by test_trainers.py in one process of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from trainer_names import FOLDER, QUIET, URL
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from streaming import DataLoader, StreamingDataset
from streaming.errors import ConfigError
from streaming.integrations.transformers import use_loader


class OfOneField(torch.nn.Module):
    """Its ``forward`` takes one field of the batch, as those of real models take few."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[list[int]] = []

    def forward(self, cls: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen.append(sorted(cls.tolist()))
        return {"loss": (self.weight * cls).mean()}


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == self.step


def train(stop_at: int, global_batch_size: int = 12) -> tuple[list[list[int]], int, DataLoader]:
    """Four batches a step, six an epoch: its second step takes the two that are left."""
    model = OfOneField()
    arguments = TrainingArguments(FOLDER, num_train_epochs=2, save_steps=1, gradient_accumulation_steps=4, **QUIET)
    trainer = Trainer(model, arguments, callbacks=[StopAt(stop_at)])
    loader = DataLoader(StreamingDataset(URL), global_batch_size=global_batch_size)
    use_loader(trainer, loader)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(FOLDER))
    return model.seen, trainer.state.global_step, loader


with DataLoader(StreamingDataset(URL), global_batch_size=12) as reference:
    expected = [sorted(batch["cls"].tolist()) for _ in range(2) for batch in reference]

seen, steps, _ = train(stop_at=3)
assert (seen, steps) == (expected[:10], 3)
with pytest.raises(ConfigError, match="batch 2 of epoch 1, but 3 steps of 4 batches"):
    train(stop_at=4, global_batch_size=24)
seen, steps, loader = train(stop_at=4)
assert (seen, steps) == (expected[10:], 4), "the epoch's last step is taken, though it is a short one"
assert loader.metrics()["batches"] == 2, "what is skipped is not read"
