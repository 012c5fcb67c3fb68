"""A program with the contract of LitGPT's pretrain.py (Lightning-AI/litgpt 0.5.13, June 2026), and none of its code.

What a loader meets there:

- A ``DataModule`` gets ``connect(tokenizer=, batch_size=, max_seq_length=)`` with the size of a micro-batch, then makes
  ``train_dataloader()`` and ``val_dataloader()``.
- Fabric takes loaders of torch's class only, wraps them, and saves and loads the state of those that have one.
- A batch is a tensor [micro_batch_size, T + 1] of token ids; the loss is that of all of them.
- Each rank has ``global_batch_size / ranks / micro_batch_size`` batches a step. After the last one more is fetched.
- The validation loader is read first, two batches of it, and left.
- An iterator begins the loader again at its end, and counts epochs from 0, in each process anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchLoader

from tests.support.programs.recipes import Rank, names_of

rank = Rank()
max_seq_length, micro_batch_size, global_batch_size = 64, 2, 24


class DataModule:
    """What ``litgpt.data`` has."""

    def prepare_data(self) -> None: ...
    def setup(self, stage: str = "") -> None: ...


litgpt = SimpleNamespace(data=SimpleNamespace(DataModule=DataModule))


class Prepared:
    """A loader as Fabric returns it."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for batch in self.loader:
            yield batch.to("cpu")


def setup_dataloaders(*loaders: Any) -> list[Prepared]:
    for loader in loaders:
        if not isinstance(loader, TorchLoader):
            raise TypeError(f"only a torch.utils.data.DataLoader can be set up, got {type(loader).__name__}")
    return [Prepared(loader) for loader in loaders]


class Cycle:
    """Iterates without end."""

    def __init__(self, loader: Prepared) -> None:
        self.epoch, self._loader = 0, loader

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield from self._loader
            self.epoch += 1


# <
class Shards(DataModule):
    def connect(self, tokenizer: Any = None, batch_size: int = 1, max_seq_length: int | None = None) -> None:
        assert max_seq_length is not None
        rows = torch.arange(100)[:, None].expand(100, max_seq_length + 1)
        self.train_dataloader = self.val_dataloader = lambda: TorchLoader(rows, batch_size)  # type: ignore[arg-type]


# >
data: Any = Shards()
data.connect(tokenizer=None, batch_size=micro_batch_size, max_seq_length=max_seq_length)
data.prepare_data()
data.setup()
train_dataloader, val_dataloader = setup_dataloaders(data.train_dataloader(), data.val_dataloader())

state: dict[str, Any] = {"train_dataloader": train_dataloader, "iter_num": 0, "step_count": 0}
path = rank.folder / "lit_model.pth"
if path.exists():
    loaded = torch.load(path)
    train_dataloader.loader.load_state_dict(loaded["train_dataloader"])
    state |= {name: loaded[name] for name in ("iter_num", "step_count")}
for number, batch in enumerate(val_dataloader):
    if number >= 2:
        break
    assert batch.shape == (micro_batch_size, max_seq_length + 1)

accumulation = global_batch_size // rank.world_size // micro_batch_size
max_iters = rank.steps * accumulation
state["iter_num"] = state["step_count"] * accumulation  # it expects as many ranks as before
cycle = Cycle(train_dataloader)
for batch in cycle:
    if state["iter_num"] >= max_iters:
        break
    rank.received(state["step_count"], names_of(batch))
    state["iter_num"] += 1
    assert batch.shape == (micro_batch_size, max_seq_length + 1)
    assert batch.dtype == torch.int64
    if state["iter_num"] % accumulation:
        continue
    rank.reduce()
    state["step_count"] += 1
    if rank.rank == 0:
        own = train_dataloader.loader
        saved = {**state, "train_dataloader": own.state_dict() if hasattr(own, "state_dict") else None}
        torch.save(saved, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
    rank.reduce()
