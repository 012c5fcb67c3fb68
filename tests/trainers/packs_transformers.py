"""``transformers.Trainer`` over packs on two ranks trains as a plain loop in one process; run by test_trainers.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from trainer_names import FOLDER, QUIET, RANKS
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from infra import DeviceMesh
from streaming import DataLoader, Packed, StreamingDataset
from streaming.integrations.transformers import use_loader
from tests.support.sets.packed_sets import LENGTH

GLOBAL_BATCH, ACCUMULATED, RATE, VOCAB_SIZE = 4, 2, 0.5, 97
documents = Path(f"{FOLDER}-documents")


class TinyForCausalLM(LlamaForCausalLM):
    """Takes any token for one of few, and notes those that it was given."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        super().__init__(LlamaConfig(vocab_size=VOCAB_SIZE, initializer_range=0.5, use_cache=False, **sizes))
        self.seen: list[int] = []

    def forward(self, **batch: Any) -> Any:
        tokens = batch["input_ids"]
        self.seen += tokens[tokens > 0].tolist()
        batch["labels"] = batch["labels"].where(batch["labels"] < 0, batch["labels"] % VOCAB_SIZE)
        return super().forward(**batch | {"input_ids": tokens % VOCAB_SIZE})


def open_packs(mesh: DeviceMesh | None = None, **options: Any) -> DataLoader:
    packed = Packed(StreamingDataset(documents, seed=7), LENGTH)
    return DataLoader(packed, global_batch_size=GLOBAL_BATCH, device_mesh=mesh, **options)


def plain_loop() -> tuple[TinyForCausalLM, list[float]]:
    """SGD over whole global batches, the loss summed over all labels of a step and divided by their number."""
    model, losses = TinyForCausalLM(), []
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    with open_packs(DeviceMesh.from_sizes(dp_size=1, rank=0, environ={})) as loader:
        batches = list(loader)
    for step in range(0, len(batches), ACCUMULATED):
        batches_of_step = batches[step : step + ACCUMULATED]
        total = sum(batch["num_labels"] for batch in batches_of_step)
        losses.append(0.0)
        for batch in batches_of_step:
            labels = batch["labels"]
            logits = model(**{name: batch[name] for name in ("input_ids", "position_ids", "labels")}).logits
            wanted = labels[:, 1:].where(labels[:, 1:] < 0, labels[:, 1:] % VOCAB_SIZE)
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), wanted.flatten(), reduction="sum")
            (loss / total).backward()
            losses[-1] += float(loss) / total
        optimizer.step()
        optimizer.zero_grad()
    return model, losses


model, losses = plain_loop()
assert len(losses) > 10
assert losses[-1] < losses[0]
options: list[dict[str, Any]] = [{}, {"balance": "exchange", "cost": 64}]
for balanced in options:
    arguments = TrainingArguments(
        f"{FOLDER}-ranks", num_train_epochs=1, gradient_accumulation_steps=ACCUMULATED, optim="sgd", learning_rate=RATE,
        lr_scheduler_type="constant", max_grad_norm=0, logging_steps=1, include_num_input_tokens_seen="all",
        save_strategy="no", **QUIET | {"logging_strategy": "steps"},
    )  # fmt: skip
    trained = TinyForCausalLM()
    trainer = Trainer(trained, arguments)
    loader = open_packs(**balanced)
    use_loader(trainer, loader)
    trainer.train()
    assert dist.get_world_size() == RANKS == 2
    logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert logged == pytest.approx(losses, rel=1e-4), "all labels of a step weigh alike, whichever rank has them"
    for mine, other in zip(trained.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)
    of_ranks: list[list[int]] = [[] for _ in range(RANKS)]
    dist.all_gather_object(of_ranks, trained.seen)
    assert all(of_ranks)
    assert sorted(token for seen in of_ranks for token in seen) == sorted(model.seen), "each token on one rank, once"
    assert len(set(model.seen)) == len(model.seen)
    assert trainer.state.num_input_tokens_seen == len(loader) * GLOBAL_BATCH * LENGTH, "packs of all ranks, once"
    loader.close()
