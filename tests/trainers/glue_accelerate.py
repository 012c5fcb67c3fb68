"""What ``prepare_loader`` promises beside positions; run by test_trainers.py in one process of its own."""

from __future__ import annotations

import accelerate
import pytest
import torch.utils.data
from trainer_names import URL, model

from streaming import DataLoader, StreamingDataset
from streaming.errors import ConfigError, IteratorSupersededError
from streaming.integrations.accelerate import prepare_loader

accelerator = accelerate.Accelerator(gradient_accumulation_steps=4)
raw = DataLoader(StreamingDataset(URL), global_batch_size=12)
assert accelerator.prepare(raw) is raw, "Accelerate leaves it alone"
with pytest.raises(ConfigError, match="makes a loader of its own"):
    accelerator.skip_first_batches(raw, 1)
with pytest.raises(ConfigError, match="makes a loader of its own"):
    accelerator.prepare_data_loader(raw)

loader = prepare_loader(accelerator, raw)
assert (len(loader), loader.epoch, loader.global_batch_size) == (6, 0, 12)
for wrong in (loader, torch.utils.data.DataLoader([1, 2])):  # type: ignore[var-annotated]
    with pytest.raises(ConfigError, match=rf"expected a streaming.DataLoader, got a .*\.{type(wrong).__name__};"):
        prepare_loader(accelerator, wrong)
prepared = accelerator.prepare(model)
synchronized = []
for _ in range(2):
    for batch in loader:
        with accelerator.accumulate(prepared):
            synchronized.append(accelerator.sync_gradients)
            assert len(accelerator.gather_for_metrics(batch["cls"])) == 12
assert synchronized == [False, False, False, True, False, True] * 2

# Each batch with its state: on the device too, and `accumulate` knows the last one.
raw.set_epoch(7)
ends = []
for batch, state in loader.with_state():
    with accelerator.accumulate(prepared):
        ends.append((state == raw.state_dict(), state["samples_seen"], accelerator.sync_gradients))
    assert batch["cls"].device.type == accelerator.device.type
assert [(seen, ends_step) for _, seen, ends_step in ends] == [*zip(range(12, 84, 12), [0, 0, 0, 1, 0, 1], strict=True)]
assert all(same for same, _, _ in ends)
raw.set_epoch(2)

# Another world: remesh is that of the loader, and what was prepared of the older one is refused.
whole = [sorted(batch["__key__"]) for batch in raw]
raw.load_state_dict({**raw.state_dict(), "epoch": 2, "samples_seen": 0})
batches = iter(loader)
first = [sorted(next(batches)["__key__"]) for _ in range(2)]
loader.remesh(0, 2, at={**raw.state_dict(), "samples_seen": 12})
with pytest.raises(IteratorSupersededError, match=r"remesh\(\) to data-parallel rank 0 of 2"):
    next(batches)
again = next(iter(loader))["__key__"]
assert (first, len(again), loader.generation) == (whole[:2], 6, 1)
assert set(again) < set(whole[1])
