"""A program with the contract of OLMo-core's trainer (allenai/OLMo-core, fa6c501 of June 2026), and none of its code.

What a loader meets there:

- It is a ``TextDataLoaderBase``: that counts batches and tokens of the epoch as it yields, checks that a batch has the
  rank's share of the global batch in tokens, and forgets both counts in ``reset()``.
- Before anything else the trainer compares the loader's data-parallel rank and size with its own, and trains on
  ``get_mock_batch()``, of which nothing is kept.
- Each epoch: ``reshuffle(epoch)``, also after ``load_state_dict``; all batches; ``reset()``. Epochs count from 1.
- A batch has tensors and lists only, since it is split by rows. Without ``"labels"`` the trainer makes them.
- Each rank saves ``state_dict()`` in a file of its own; on another world a rank may find that of rank 0 alone.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.support.programs.recipes import Rank, names_of

rank = Rank()


class TextDataLoaderBase(ABC):
    """What the trainer knows of a loader."""

    def __init__(
        self, *, collator: Any, work_dir: str, global_batch_size: int, dp_world_size: int = 1, dp_rank: int = 0,
        fs_local_rank: int | None = None,
    ) -> None:  # fmt: skip
        self.collator, self.work_dir, self.fs_local_rank = collator, work_dir, fs_local_rank
        self._global_batch_size, self.dp_world_size, self.dp_rank = global_batch_size, dp_world_size, dp_rank
        self._epoch: int | None = None
        self.reset()

    @property
    def global_batch_size(self) -> int:
        return self._global_batch_size

    @property
    def rank_batch_size(self) -> int:
        return self.global_batch_size // self.dp_world_size

    def reset(self) -> None:
        self.batches_processed = self.tokens_processed = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self._iter_batches():
            self.batches_processed += 1
            if batch["input_ids"].numel() != self.rank_batch_size:
                raise RuntimeError(f"{tuple(batch['input_ids'].shape)}: expected {self.rank_batch_size} tokens")
            self.tokens_processed += self.global_batch_size
            yield batch

    @property
    @abstractmethod
    def total_batches(self) -> int | None: ...
    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...
    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...
    @abstractmethod
    def reshuffle(self, epoch: int | None = None, **kwargs: Any) -> None: ...
    @abstractmethod
    def _iter_batches(self) -> Iterator[dict[str, Any]]: ...
    @abstractmethod
    def get_mock_batch(self) -> dict[str, Any]: ...


data_module: Any = ModuleType("olmo_core.data")
data_module.TextDataLoaderBase, data_module.DataCollator = TextDataLoaderBase, SimpleNamespace
sys.modules |= {"olmo_core": ModuleType("olmo_core"), "olmo_core.data": data_module}


class OwnLoader(TextDataLoaderBase):
    """Rows of numbers, in order."""

    total_batches = 5

    def state_dict(self) -> dict[str, Any]:
        return {"batches_processed": self.batches_processed, "epoch": self._epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches_processed, self._epoch = state_dict["batches_processed"], state_dict["epoch"]

    def reshuffle(self, epoch: int | None = None, **_: Any) -> None:
        self._epoch = epoch

    def _iter_batches(self) -> Iterator[dict[str, Any]]:
        rows = self.rank_batch_size // sequence_length
        for number in range(self.batches_processed, self.total_batches):
            first = (number * self.dp_world_size + self.dp_rank) * rows
            yield {"input_ids": torch.arange(first, first + rows)[:, None].expand(rows, sequence_length)}

    def get_mock_batch(self) -> dict[str, Any]:
        return {"input_ids": torch.zeros((self.rank_batch_size // sequence_length, sequence_length), dtype=torch.int64)}


sequence_length, tokens_per_batch, work_dir = 64, 24 * 64, str(rank.folder)
# <
data_loader = OwnLoader(
    collator=None, work_dir=work_dir, global_batch_size=tokens_per_batch, dp_world_size=rank.world_size,
    dp_rank=rank.rank,
)  # fmt: skip
# >


def train_batch(batch: dict[str, Any]) -> None:
    assert all(isinstance(value, torch.Tensor | list) for value in batch.values()), "it splits them by rows"
    assert batch["input_ids"].shape == (24 // rank.world_size, sequence_length)
    labels = batch.get("labels")
    if labels is not None:
        is_label = labels[:, :-1] != -100
        assert torch.equal(labels[:, :-1][is_label], batch["input_ids"][:, 1:][is_label])


assert isinstance(data_loader, TextDataLoaderBase)
assert (data_loader.dp_rank, data_loader.dp_world_size) == (rank.rank, rank.world_size)
assert data_loader.global_batch_size == tokens_per_batch
global_step, epoch, latest = 0, 1, rank.folder / "latest"
if latest.exists():
    folder = rank.folder / latest.read_text()
    files = [folder / f"rank{number}.pt" for number in (rank.rank, 0)]
    state = torch.load(next(file for file in files if file.exists()))
    data_loader.load_state_dict(state["data_loader"])
    global_step, epoch = state["global_step"], state["epoch"]
train_batch(data_loader.get_mock_batch())


def save() -> None:
    """A folder for each checkpoint, with a file of each rank; it counts when all have written theirs."""
    folder = rank.folder / f"step{global_step}"
    folder.mkdir(exist_ok=True)
    state = {"data_loader": data_loader.state_dict(), "global_step": global_step, "epoch": epoch}
    torch.save(state, folder / f"rank{rank.rank}.pt")
    rank.reduce()
    if rank.rank == 0:
        latest.with_suffix(".part").write_text(folder.name)
        latest.with_suffix(".part").rename(latest)
    rank.reduce()


while global_step < rank.steps:
    data_loader.reshuffle(epoch)
    for batch in data_loader:
        rank.received(global_step, names_of(batch["input_ids"]), epoch)
        train_batch(batch)
        rank.reduce()
        global_step += 1
        save()
        if global_step == rank.steps:
            break
    else:
        assert data_loader.batches_processed == data_loader.total_batches
        epoch += 1
        data_loader.reset()
