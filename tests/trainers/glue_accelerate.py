"""What ``prepare_loader`` promises beside positions; run by test_trainers.py in one process of its own."""

from __future__ import annotations

import accelerate
import pytest
from trainer_names import URL, model

from streaming import DataLoader, StreamingDataset
from streaming.errors import ConfigError
from streaming.integrations.accelerate import prepare_loader

accelerator = accelerate.Accelerator(gradient_accumulation_steps=4)
raw = DataLoader(StreamingDataset(URL), global_batch_size=12)
assert accelerator.prepare(raw) is raw, "Accelerate leaves it alone"
with pytest.raises(ConfigError, match="gives no indices"):
    next(iter(accelerate.skip_first_batches(raw, 1)))
with pytest.raises(ConfigError, match="gives no indices"):
    next(iter(accelerate.data_loader.prepare_data_loader(raw, num_processes=2, process_index=0)))

loader = prepare_loader(accelerator, raw)
assert (len(loader), loader.epoch, loader.global_batch_size) == (6, 0, 12)
prepared = accelerator.prepare(model)
synchronised = []
for _ in range(2):
    for batch in loader:
        with accelerator.accumulate(prepared):
            synchronised.append(accelerator.sync_gradients)
            assert len(accelerator.gather_for_metrics(batch["cls"])) == 12
assert synchronised == [False, False, False, True, False, True] * 2
