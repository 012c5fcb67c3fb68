"""A loader without a length in Lightning, which reads it one batch ahead, and Fabric; run by test_trainers.py."""

from __future__ import annotations

from itertools import chain, islice
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from trainer_names import FOLDER, QUIET

from streaming import DataLoader, DevicePrefetcher, as_torch
from streaming.errors import ConfigError
from streaming.integrations.lightning import prepare_loader


class Numbers(torch.utils.data.IterableDataset[dict[str, int]]):
    def __iter__(self) -> Any:
        return iter([{"number": number} for number in range(72)])


class Module(lightning.LightningModule):
    def __init__(self, loader: DataLoader) -> None:
        super().__init__()
        self.loader, self.weight = loader, torch.nn.Parameter(torch.zeros(()))
        self.received: list[int] = []
        self.positions: list[tuple[int, int]] = []

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        self.received.append(int(batch["number"][0]))
        state = self.loader.state_dict()
        self.positions.append((state["epoch"], state["samples_seen"]))
        return (self.weight * batch["number"]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-9)


def fit(max_steps: int, last: str | None) -> Module:
    loader = DataLoader(Numbers(), global_batch_size=12)
    module = Module(loader)
    saver = ModelCheckpoint(FOLDER, filename="last", every_n_train_steps=1, enable_version_counter=False)
    trainer = lightning.Trainer(max_steps=max_steps, accelerator="cpu", callbacks=[saver], **QUIET)
    trainer.fit(module, prepare_loader(loader), ckpt_path=last)
    return module


first = fit(4, None)
assert first.received == [0, 12, 24, 36]
assert first.positions == [(0, 12), (0, 24), (0, 36), (0, 48)]
second = fit(8, f"{FOLDER}/last.ckpt")
assert second.received == [48, 60, 0, 12], second.received
assert second.positions == [(0, 60), (1, 0), (1, 12), (1, 24)], second.positions

# A second trainer counts from 0 again; the loader, which Lightning asks for a batch first, goes on with its epochs.
for wrap in (prepare_loader, lambda loader: loader):
    loader = DataLoader(Numbers(), global_batch_size=12)
    module, wrapped = Module(loader), wrap(loader)
    for number in range(2):
        lightning.Trainer(max_epochs=2, accelerator="cpu", enable_checkpointing=False, **QUIET).fit(module, wrapped)
        assert (module.received, loader.epoch) == ([0, 12, 24, 36, 48, 60] * 2 * (number + 1), 2 * (number + 1))
    look = iter(wrapped)
    next(look)
    lightning.Trainer(max_epochs=1, accelerator="cpu", enable_checkpointing=False, **QUIET).fit(module, wrapped)
    assert module.received[24:] == [0, 12, 24, 36, 48, 60]

# Saved in the middle of a second fit, and continued by a third one.
loader = DataLoader(Numbers(), global_batch_size=12)
module = Module(loader)
lightning.Trainer(max_epochs=1, accelerator="cpu", enable_checkpointing=False, **QUIET).fit(
    module, prepare_loader(loader)
)
saver = ModelCheckpoint(f"{FOLDER}-second", filename="last", every_n_train_steps=1, enable_version_counter=False)
trainer = lightning.Trainer(max_steps=8, accelerator="cpu", callbacks=[saver], **QUIET)
trainer.fit(module, prepare_loader(loader))
assert (module.received[6:], module.positions[-1]) == ([0, 12, 24, 36, 48, 60, 0, 12], (2, 24))
loader = DataLoader(Numbers(), global_batch_size=12)
module = Module(loader)
trainer = lightning.Trainer(max_steps=14, accelerator="cpu", enable_checkpointing=False, **QUIET)
trainer.fit(module, prepare_loader(loader), ckpt_path=f"{FOLDER}-second/last.ckpt")
assert (module.received, module.positions[0]) == ([24, 36, 48, 60, 0, 12], (2, 36))

sized = DataLoader(list(range(24)), 4)
assert prepare_loader(sized) is sized
ahead = DevicePrefetcher(sized, "cpu")
assert prepare_loader(ahead) is ahead
with pytest.raises(ConfigError, match=r"prepare_loader\(loader\): expected a streaming.DataLoader, got a .*Trainer;"):
    prepare_loader(lightning.Trainer(**QUIET))  # type: ignore[arg-type]
endless = DevicePrefetcher(DataLoader(Numbers(), global_batch_size=12), "cpu")
for given in (endless, endless.loader):
    prepared = prepare_loader(given)
    with pytest.raises(
        ConfigError, match=r"prepare_loader\(loader\): expected a streaming.DataLoader, got .*OneBehind"
    ):
        prepare_loader(prepared)  # type: ignore[arg-type]


def under_fabric(num_batches: int, loaded: str | None) -> list[list[int]]:
    """Train as LitGPT does: over and over, with a checkpoint at the end."""
    fabric = lightning.Fabric(accelerator="cpu")
    loader = DataLoader(list(range(20)), 4)
    with pytest.raises(TypeError, match="Only PyTorch DataLoader"):
        fabric.setup_dataloaders(loader)
    train = fabric.setup_dataloaders(as_torch(loader))
    assert len(train) == 5
    state = {"train": train}
    if loaded:
        fabric.load(loaded, state)
    endless = (batch for _ in range(9) for batch in train)
    received = [batch.tolist() for batch in islice(endless, num_batches)]
    fabric.save(f"{FOLDER}/fabric.ckpt", state)
    return received


whole = under_fabric(12, None)
assert all(sorted(chain(*whole[at : at + 5])) == list(range(20)) for at in (0, 5))
assert under_fabric(7, None) + under_fabric(5, f"{FOLDER}/fabric.ckpt") == whole
with pytest.raises(
    ConfigError, match=r"as_torch\(loader\): expected a streaming.DataLoader.*got a .*_FabricDataLoader"
):
    as_torch(lightning.Fabric(accelerator="cpu").setup_dataloaders(as_torch(sized)))  # type: ignore[arg-type]
with pytest.raises(ConfigError, match="its batches are shares of the ranks already"):  # as Accelerate does
    next(iter(torch.utils.data.DataLoader(as_torch(sized).dataset, batch_size=None)))
