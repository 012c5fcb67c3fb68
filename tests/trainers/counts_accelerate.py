"""What two ranks under Accelerate count, skip and read, of data sets of torch; run by test_trainers.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import accelerate
import pytest
import torch
import trainer_names
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments, get_scheduler

from infra import DeviceMesh
from streaming import DataLoader, OrdinaryDataset
from streaming.errors import ConfigError
from streaming.integrations.accelerate import count_all_ranks, prepare_loader, skip_first_batches
from streaming.integrations.transformers import use_loader

NUM_ROWS, EPOCHS, ACCUMULATED = 48, 2, 2
accelerator = accelerate.Accelerator(gradient_accumulation_steps=ACCUMULATED)
RANKS = accelerator.num_processes
assert RANKS == 2


class Numbers(IterableDataset[dict[str, int]]):
    """Counts what this rank reads of it."""

    num_read = 0

    def __iter__(self) -> Iterator[dict[str, int]]:
        for number in range(NUM_ROWS):
            self.num_read += 1
            yield {"x": number}


class Net(torch.nn.Module):
    """Of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.weight * x).mean()}


rows = [{"x": number} for number in range(NUM_ROWS)]
makers: dict[str, Callable[[], DataLoader]] = {
    "iterable": lambda: DataLoader(Numbers(), 4),
    "iterable, epoch_size": lambda: DataLoader(Numbers(), 4, epoch_size=NUM_ROWS),
    "dispatch": lambda: DataLoader(OrdinaryDataset(Numbers(), sharding="dispatch"), 4),
    "map-style": lambda: DataLoader(rows, 4),
}

# Both ranks together read each row once; nothing puts another loader in the place of ours.
for kind, make in makers.items():
    for rebuild in (lambda loader: accelerator.skip_first_batches(loader, 2), accelerator.prepare_data_loader):
        with make() as loader, pytest.raises(ConfigError, match="makes a loader of its own"):
            rebuild(loader)
    with make() as loader:
        prepared = prepare_loader(accelerator, loader)
        assert accelerator.prepare(prepared) is prepared
        batches = [batch["x"] for batch in prepared]
        found = accelerator.gather(torch.stack(batches)).flatten().tolist()
        assert sorted(found) == list(range(NUM_ROWS)), (kind, found)
    with make() as loader:
        rest = [batch["x"].tolist() for batch in skip_first_batches(prepare_loader(accelerator, loader), 2)]
        assert rest == [batch.tolist() for batch in batches[2:]], kind


def rates_of(count: Callable[[Any], int]) -> list[float]:
    """The learning rate at each step of the optimizer, of a script that counts before it prepares."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 1.0)
    loader = count_all_ranks(accelerator, DataLoader(rows, 4))
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=count(loader))
    net, optimizer, schedule = accelerator.prepare(net, optimizer, schedule)
    loader = prepare_loader(accelerator, loader)
    rates = []
    for _ in range(EPOCHS):
        for batch in loader:
            with accelerator.accumulate(net):
                accelerator.backward(net(batch["x"].float())["loss"])
                if accelerator.sync_gradients:
                    rates.append(schedule.get_last_lr()[0])
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    assert schedule.get_last_lr() == [0.0]
    return rates


def of_diffusers(loader: Any) -> int:
    after_sharding = math.ceil(len(loader) / accelerator.num_processes)
    return EPOCHS * math.ceil(after_sharding / ACCUMULATED) * accelerator.num_processes


def of_transformers(loader: Any) -> int:
    return EPOCHS * math.ceil(len(loader) / ACCUMULATED)


STEPS = EPOCHS * NUM_ROWS // (4 * RANKS * ACCUMULATED)
expected = [1 - step / STEPS for step in range(STEPS)]
for count in (of_diffusers, of_transformers):
    assert rates_of(count) == pytest.approx(expected), count.__name__

# transformers.Trainer counts the batches of a rank, and so does the loader.
noted: list[float] = []


class Noting(Trainer):
    """Notes the learning rate of each step."""

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        assert num_training_steps == STEPS
        made = super().create_scheduler(num_training_steps, optimizer)
        self.optimizer.optimizer.register_step_pre_hook(lambda *_: noted.append(made.get_last_lr()[0]))
        return made


arguments = TrainingArguments(
    trainer_names.FOLDER, num_train_epochs=EPOCHS, gradient_accumulation_steps=ACCUMULATED, learning_rate=1.0,
    save_strategy="no", **trainer_names.QUIET,
)  # fmt: skip
trainer = Noting(Net(), arguments)
for size in (1, 4):
    mesh = DeviceMesh.from_sizes(dp_size=size, rank=0, environ={})
    with pytest.raises(ConfigError, match=rf"2 data-parallel ranks in 2 processes.* to {size} in {size}"):
        use_loader(trainer, DataLoader(rows, 4, device_mesh=mesh))
use_loader(trainer, DataLoader([{"x": float(number)} for number in range(NUM_ROWS)], 4))
trainer.train()
assert noted == pytest.approx(expected)
