"""A program with the contract of TorchTitan's trainer (pytorch/torchtitan, b5bcd76, August 2026), none of its code.

What a loader meets there:

- Its ``Config`` is a dataclass of the kind of all others, and ``build`` makes the loader with the rank and size of data
  parallelism, ``max_context_length`` and ``num_tokens_per_batch``: a micro-batch of one rank, in one row of tokens.
- It is iterated once, in the whole run. Its end is an error in a generator, and cancels the step.
- A batch is a dict with ``"input"``, whose other tensors go to the model, and labels. All micro-batches of a step are
  fetched before the first is trained on, to count their labels; what the loss ignores is ``IGNORE_INDEX``.
- ``torch.distributed.checkpoint`` saves its state under ``"dataloader"``, after a step, and loads what a new one has.
- Steps are counted, epochs are not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from tests.support.programs.recipes import Rank, names_of
from tests.support.programs.titan_like import IGNORED, home_of, modules

rank = Rank()
NO_DIST = {"no_dist": rank.world_size == 1}


sys.modules.update(modules("2026-08"))
BaseDataLoader: Any = import_module(home_of("2026-08")).BaseDataLoader


class OwnLoader(BaseDataLoader):
    """Numbers in order, each rank its own; it continues on as many ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Options."""

    def __init__(self, config: Any, *, dp_world_size: int, dp_rank: int, num_tokens_per_batch: int, **_: Any) -> None:
        self._at, self._step, self._size = dp_rank, dp_world_size, num_tokens_per_batch

    def __iter__(self) -> Iterator[Any]:
        while True:
            ids = torch.arange(self._at * self._size, (self._at + 1) * self._size)
            self._at += self._step
            yield {"input": ids, "positions": ids}, ids + 1

    def state_dict(self) -> dict[str, Any]:
        return {f"dp_rank_{self._at % self._step}": self._at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._at = state_dict.get(f"dp_rank_{self._at % self._step}", self._at)


class TrainState:
    """The trainer's own state: the step."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]


length, rows_of_micro_batch, rows_of_step = 64, 2, 24
config = SimpleNamespace(dataloader=OwnLoader.Config())
# <
# >
dataloader = config.dataloader.build(
    dp_world_size=rank.world_size, dp_rank=rank.rank, tokenizer=None, max_context_length=length,
    num_tokens_per_batch=rows_of_micro_batch * length,
)  # fmt: skip
assert isinstance(dataloader, BaseDataLoader)
train_state, latest = TrainState(), rank.folder / "latest"
states = {"dataloader": dataloader, "train_state": train_state}
if latest.exists():
    dcp.load(states, checkpoint_id=rank.folder / latest.read_text(), **NO_DIST)
accumulation = rows_of_step // (rows_of_micro_batch * rank.world_size)
batches = iter(dataloader)
while train_state.step < rank.steps:
    valid = 0
    for _ in range(accumulation):
        inputs, labels = next(batches)
        ids, positions = inputs["input"], inputs["positions"]
        assert ids.shape == positions.shape == labels.shape == (rows_of_micro_batch * length,)
        assert ids.dtype == labels.dtype == torch.int64
        is_label = labels != IGNORED
        valid += int(is_label.sum())
        assert torch.equal(labels[:-1][is_label[:-1]], ids[1:][is_label[:-1]])
        rank.received(train_state.step, names_of(ids.view(rows_of_micro_batch, length)))
    rank.reduce()
    train_state.step += 1
    folder = rank.folder / f"step-{train_state.step}"
    dcp.save(states, checkpoint_id=folder, **NO_DIST)
    if rank.rank == 0:
        latest.with_suffix(".part").write_text(folder.name)
        latest.with_suffix(".part").rename(latest)
    rank.reduce()
dataloader.close()
