"""A program with the contract of TRL's sft.py (huggingface/trl, f2cd577 of July 2026), and none of its code.

``SFTTrainer`` is a ``transformers.Trainer``, which is the real one here. What it adds for a loader:

- It insists on a data set, and looks at the first row of it: ``input_ids`` and ``labels``, unless it prepares the set
  itself, which ``dataset_kwargs`` turns off.
- ``compute_loss`` needs ``labels``, and ``attention_mask`` or ``position_ids``, of which it counts tokens.
"""

from __future__ import annotations

import os  # noqa: F401  for the patch
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint  # noqa: F401  for the patch

from tests.support.programs.recipes import Rank, names_of

rank = Rank()
ACCUMULATION = 2


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(to_json_string=lambda: "{}", to_dict=dict)
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None, use_cache: bool = True, num_items_in_batch: Any = None,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        assert not use_cache
        assert input_ids.shape == labels.shape
        assert bool((labels != -100).any())
        trainer.note(input_ids)
        return {"loss": self.weight * (labels != -100).sum() / input_ids.numel()}


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    batch = {name: torch.tensor([row[name] for row in rows]) for name in ("input_ids", "labels")}
    return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


class SFTTrainer(Trainer):  # type: ignore[misc]
    def __init__(self, model: Any, args: Any, train_dataset: Any) -> None:
        first = next(iter(train_dataset))
        if not args.dataset_kwargs.get("skip_prepare_dataset"):
            assert set(first) & {"text", "messages", "prompt", "input_ids"}
        elif "labels" not in first:
            raise ValueError("no labels")
        super().__init__(model=model, args=args, train_dataset=train_dataset, data_collator=collate)

    def note(self, rows: torch.Tensor) -> None:
        epoch = int(self.state.epoch or 0)
        rank.received(self.state.global_step, names_of(rows), epoch)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **named: Any) -> Any:
        inputs["use_cache"] = False
        if "attention_mask" not in inputs:
            assert inputs["position_ids"].shape == inputs["input_ids"].shape
        return super().compute_loss(model, inputs, *args, **named)


class Stop(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == rank.steps


training_args: Any = TrainingArguments(
    str(rank.folder / "out"), num_train_epochs=3, save_steps=1, save_total_limit=2, use_cpu=True, disable_tqdm=True,
    report_to="none", logging_strategy="no", gradient_accumulation_steps=ACCUMULATION, per_device_train_batch_size=4,
)  # fmt: skip
training_args.dataset_kwargs, training_args.max_length = {}, 64
dataset = {"train": Dataset.from_dict({"input_ids": [[1] * 64] * 40, "labels": [[1] * 64] * 40})}
model = Model()
# <
# >
trainer = SFTTrainer(model, training_args, train_dataset=dataset["train"])
trainer.add_callback(Stop())
# <
trainer.train()
# >
