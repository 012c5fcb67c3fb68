"""A program with the contract of SpeechBrain's ``Brain`` (9c826ef of April 2026), and none of its code.

- ``fit`` asks whether the train set is one of torch's loaders; otherwise it makes one of it as a dataset. It asks for
  its length, and iterates over it once per epoch. It sets no epoch on a loader that was given to it.
- A batch has ``to(device)``, and attributes: ``sig`` is data, padded, and relative lengths. Its collate function takes
  a list of dicts.
- A checkpointer holds objects by name, with functions that save and load them: the first on all ranks, but it writes on
  the first; the second gets whether the checkpoint was made at the end of an epoch.
- The counter of epochs begins with 1. After a checkpoint within an epoch it gives that epoch once more.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from tests.support.programs.recipes import Rank

EPOCHS = 3


class Padded(NamedTuple):
    """Rows of different lengths."""

    data: torch.Tensor
    lengths: torch.Tensor


class Batch:
    """Dicts as one object: tensors padded, everything else in lists."""

    def __init__(self, examples: list[dict[str, Any]]) -> None:
        for name in examples[0]:
            values = [torch.as_tensor(one[name]) if hasattr(one[name], "shape") else one[name] for one in examples]
            setattr(self, name, padded(values) if isinstance(values[0], torch.Tensor) else values)

    def to(self, _: str) -> Batch:
        return self


def padded(values: list[torch.Tensor]) -> Padded:
    longest = max(map(len, values))
    rows = [torch.nn.functional.pad(one, (0, longest - len(one))) for one in values]
    return Padded(torch.stack(rows), torch.tensor([len(one) / longest for one in values]))


class Checkpointer:
    """Saves objects by name; the newest checkpoint is kept."""

    def __init__(self, rank: Rank) -> None:
        self._rank, self._folder = rank, rank.folder / "save"
        self._held: dict[str, tuple[Any, Callable[..., None], Callable[..., None]]] = {}

    def add_recoverable(self, name: str, obj: Any, custom_load_hook: Any = None, custom_save_hook: Any = None) -> None:
        self._held[name] = obj, custom_load_hook or self.load, custom_save_hook or self.save

    def save(self, obj: Any, path: Path) -> None:
        if self._rank.rank == 0:
            torch.save(obj.state_dict(), path)

    def load(self, obj: Any, path: Path, end_of_epoch: bool) -> None:
        assert isinstance(end_of_epoch, bool)
        state = torch.load(path)
        has_loaded = False
        for options in ({"strict": True}, {}):  # the first is for modules
            with suppress(TypeError):
                has_loaded = has_loaded or obj.load_state_dict(state, **options) is not False

    def save_and_keep_only(self, end_of_epoch: bool) -> None:
        part = self._folder.with_suffix(".part")
        if self._rank.rank == 0:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            (part / "meta").write_text(json.dumps(end_of_epoch))
        self._rank.reduce()
        for name, (obj, _, save) in self._held.items():
            save(obj, part / f"{name}.ckpt")
        self._rank.reduce()
        if self._rank.rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.rename(part, self._folder)

    def recover_if_possible(self) -> None:
        if self._folder.exists():
            end_of_epoch = json.loads((self._folder / "meta").read_text())
            for name, (obj, load, _) in self._held.items():
                load(obj, self._folder / f"{name}.ckpt", end_of_epoch)


class Counter:
    """Counts epochs from 1."""

    def __init__(self, limit: int) -> None:
        self.current, self.limit = 0, limit

    def __iter__(self) -> Iterator[int]:
        while self.current < self.limit:
            self.current += 1
            yield self.current

    def save(self, _: Any, path: Path) -> None:
        path.write_text(str(self.current))

    def load(self, _: Any, path: Path, end_of_epoch: bool) -> None:
        self.current = int(path.read_text()) - (not end_of_epoch)


class Brain:
    """Trains, and saves after each step and each epoch."""

    def __init__(self, rank: Rank, checkpointer: Checkpointer, hparams: SimpleNamespace) -> None:
        self._rank, self.checkpointer, self.hparams = rank, checkpointer, hparams
        self.model, self.step = torch.nn.Linear(1, 1), 0
        checkpointer.add_recoverable("model", self.model)
        checkpointer.add_recoverable("brain", self, self._recover, self._save)
        checkpointer.add_recoverable("counter", None, hparams.epoch_counter.load, hparams.epoch_counter.save)

    def _save(self, _: Any, path: Path) -> None:
        if self._rank.rank == 0:
            path.write_text(json.dumps(self.step))

    def _recover(self, _: Any, path: Path, end_of_epoch: bool) -> None:
        self.step = json.loads(path.read_text())

    def fit(self, epoch_counter: Counter, train_set: Any, train_loader_kwargs: dict[str, Any]) -> None:
        if not isinstance(train_set, torch.utils.data.DataLoader):
            train_set = self.make_dataloader(train_set, **train_loader_kwargs)
        self.checkpointer.recover_if_possible()
        for epoch in epoch_counter:
            length = len(train_set)
            for batch in train_set:
                self._fit_batch((epoch - 1) * length + self.step, batch.to("cpu"), epoch)
                self.step += 1
                self.checkpointer.save_and_keep_only(end_of_epoch=False)
            self.step = 0
            self.checkpointer.save_and_keep_only(end_of_epoch=True)

    def make_dataloader(self, dataset: Any, **options: Any) -> Any:
        sampler = torch.utils.data.DistributedSampler(dataset, self._rank.world_size, self._rank.rank)
        loader = torch.utils.data.DataLoader(dataset, sampler=sampler, collate_fn=Batch, **options)
        self.checkpointer.add_recoverable("loader", loader, lambda *_: None, lambda *_: None)
        return loader

    def _fit_batch(self, step: int, batch: Batch, epoch: int) -> None:
        wavs, lengths = batch.sig
        assert wavs.dtype == torch.float32
        assert wavs.shape[0] == len(lengths) == len(batch.id)
        self._rank.received(step, batch.id, epoch)
        self.model(wavs.mean(1, keepdim=True)).square().mean().backward()
        self._rank.reduce()


rank = Rank()
hparams = {
    "data_folder": "s3://bucket/speech/",
    "batch_size": 12 // rank.world_size,
    "num_workers": int(os.environ.get("WORKERS", "0")),
}
train_loader_kwargs = {"batch_size": hparams["batch_size"]}
checkpointer = Checkpointer(rank)
asr_brain = Brain(rank, checkpointer, SimpleNamespace(epoch_counter=Counter(EPOCHS)))
sb = SimpleNamespace(
    dataio=SimpleNamespace(batch=SimpleNamespace(PaddedBatch=Batch)),
    utils=SimpleNamespace(checkpoints=SimpleNamespace(torch_save=checkpointer.save, torch_recovery=checkpointer.load)),
)
# <
train_data = [{"id": f"{number:05d}", "sig": torch.rand(400 + number)} for number in range(72)]
# >
asr_brain.fit(asr_brain.hparams.epoch_counter, train_data, train_loader_kwargs=train_loader_kwargs)
