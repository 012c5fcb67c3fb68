"""What ``use_loader`` promises beside positions; run by test_trainers.py in one process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_names import FOLDER, QUIET, URL
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from streaming import DataLoader, Mixture, Packed, StreamingDataset
from streaming.errors import ConfigError
from streaming.integrations.transformers import use_loader
from tests.support.sets.packed_sets import write


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
    use_loader(trainer, DataLoader(StreamingDataset(URL), batch_size=1))  # a notebook's cell that is run again
    use_loader(trainer, loader)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(FOLDER))
    return model.seen, trainer.state.global_step, loader


with DataLoader(StreamingDataset(URL), global_batch_size=12) as reference:
    expected = [sorted(batch["cls"].tolist()) for _ in range(2) for batch in reference]

seen, steps, _ = train(stop_at=3)
assert (seen, steps) == (expected[:10], 3)
with pytest.raises(ConfigError, match="batch 2 of epoch 1, but the trainer now counts 3 steps of 4 batches"):
    train(stop_at=4, global_batch_size=24)
seen, steps, loader = train(stop_at=4)
assert (seen, steps) == (expected[10:], 4), "the epoch's last step is taken, though it is a short one"
assert loader.metrics()["batches"] == 2, "what is skipped is not read"


# Packs, mixed without end: the loader has no length, the trainer counts max_steps.
LENGTH, VOCAB_SIZE, MAX_STEPS = 256, 97, 3
documents = Path(f"{FOLDER}-documents")
for first, name in enumerate(("web", "code")):
    write(documents / name, num_docs=80, seed=first)


class Llama(LlamaForCausalLM):
    """It is given all entries of the batch, as ``forward`` takes any names."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        super().__init__(LlamaConfig(vocab_size=VOCAB_SIZE, initializer_range=0.5, **sizes))
        self.seen: list[torch.Tensor] = []

    def forward(self, **batch: Any) -> Any:
        if "labels" in batch:
            self.seen.append(batch["input_ids"])
            batch["labels"] = batch["labels"].where(batch["labels"] < 0, batch["labels"] % VOCAB_SIZE)
        return super().forward(**batch | {"input_ids": batch["input_ids"] % VOCAB_SIZE})


def open_packs() -> DataLoader:
    packs = {name: Packed(StreamingDataset(documents / name), LENGTH) for name in ("web", "code")}
    return DataLoader(Mixture(packs, weights={"web": 1, "code": 2}, ends=None), global_batch_size=4)


def train_packs(stop_at: int) -> tuple[Llama, float]:
    """Two batches a step."""
    model, folder = Llama(), f"{FOLDER}-packs"
    arguments = TrainingArguments(folder, max_steps=MAX_STEPS, save_steps=1, gradient_accumulation_steps=2, **QUIET)
    trainer = Trainer(model, arguments, callbacks=[StopAt(stop_at)])
    use_loader(trainer, open_packs())
    return model, trainer.train(resume_from_checkpoint=get_last_checkpoint(folder)).training_loss


def loss_alone(batches: list[dict[str, Any]]) -> float:
    """The mean loss of all labels, of each document by itself."""
    model, total = Llama(), torch.tensor(0.0)
    for batch in batches:
        for row, numbers in zip(batch["input_ids"], batch["document_ids"], strict=True):
            for number in range(int(numbers.max()) + 1):
                alone = row[numbers == number][None]
                with torch.no_grad():
                    logits = model(input_ids=alone).logits
                total += torch.nn.functional.cross_entropy(logits[0, :-1], alone[0, 1:] % VOCAB_SIZE, reduction="sum")
    return float(total / sum(batch["num_labels"] for batch in batches))


Path(f"{FOLDER}-packs").mkdir()
with open_packs() as reference:
    packs = [batch for batch, _ in zip(reference, range(2 * MAX_STEPS), strict=False)]
assert all(batch["document_ids"].max() > 0 for batch in packs[:2]), "packs of several documents"
model, loss = train_packs(stop_at=1)
assert loss == pytest.approx(loss_alone(packs[:2]), rel=1e-5), "no document sees another, all labels weigh alike"
seen = model.seen + train_packs(stop_at=MAX_STEPS)[0].seen
assert [one.tolist() for one in seen] == [batch["input_ids"].tolist() for batch in packs]


# Jagged fields: the trainer copies a batch to the device, any tuple by one iterable of its fields.
class OfRows(OfOneField):
    def forward(self, **batch: Any) -> dict[str, torch.Tensor]:
        jagged, offsets, _ = batch["vec.npy"]
        self.seen.append(jagged.tolist())
        return {"loss": self.weight * torch.segment_reduce(jagged, "sum", offsets=offsets).mean()}


rows = OfRows()
trainer = Trainer(rows, TrainingArguments(f"{FOLDER}-rows", max_steps=2, save_strategy="no", **QUIET))
with DataLoader(StreamingDataset(URL), batch_size=6, jagged=("vec.npy",)) as loader:
    use_loader(trainer, loader)
    trainer.train()
with DataLoader(StreamingDataset(URL), batch_size=6, jagged=("vec.npy",)) as reference:
    expected = [batch["vec.npy"].values.tolist() for batch, _ in zip(reference, range(2), strict=False)]
assert rows.seen == expected

with pytest.raises(ConfigError, match=r"expected a streaming.DataLoader, got a torch.*DataLoader;"):
    use_loader(trainer, torch.utils.data.DataLoader([1, 2]))  # type: ignore[arg-type]
