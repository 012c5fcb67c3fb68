"""A program with the contract of nanochat's base_train.py (karpathy/nanochat, 92d63d4, July 2026), none of its code.

What a loader meets there:

- The loader is an iterator without end. ``next`` gives inputs and targets on the device, int64 [device_batch_size,
  max_seq_len], and a state that is saved as JSON, by rank 0, with ``"epoch"`` in it, which the log shows.
- A step has as many batches as the ranks need for ``total_batch_size`` tokens. The next batch is fetched after the
  backward pass of the one in hand, with its state; both are held when the loop saves, at the top of a step.
- A resumed run gives the state to the new loader.
- The loss ignores -1. Epochs count from 1.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch

from tests.support.programs.recipes import Rank, names_of

rank = Rank()
args = Namespace(device_batch_size=2, max_seq_len=64)
device, num_iterations = torch.device("cpu"), rank.steps
total_batch_size = 24 * args.max_seq_len
meta_path = rank.folder / "meta.json"
resuming = meta_path.exists()
meta_data = json.loads(meta_path.read_text()) if resuming else None
step = meta_data["step"] if meta_data else 0


def own_loader(resume_state_dict: dict[str, Any] | None) -> Iterator[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]]:
    """Tokens in order, each rank every so many; it continues about where it was."""
    state = {"epoch": 1, "pq_idx": 0, "rg_idx": 0, **(resume_state_dict or {})}
    while True:
        rows = torch.arange(args.device_batch_size * (args.max_seq_len + 1)).view(args.device_batch_size, -1)
        state["rg_idx"] += rank.world_size
        yield rows[:, :-1].to(device), rows[:, 1:].to(device), dict(state)


dataloader_resume_state_dict = meta_data["dataloader_state_dict"] if meta_data else None
# <
train_loader = own_loader(dataloader_resume_state_dict)
# >
x, y, dataloader_state_dict = next(train_loader)

world_tokens_per_fwdbwd = args.device_batch_size * args.max_seq_len * rank.world_size
assert total_batch_size % world_tokens_per_fwdbwd == 0
grad_accum_steps = total_batch_size // world_tokens_per_fwdbwd
while True:
    if step > 0 and rank.rank == 0:
        saved = {"step": step, "dataloader_state_dict": dataloader_state_dict}
        meta_path.with_suffix(".part").write_text(json.dumps(saved))
        meta_path.with_suffix(".part").rename(meta_path)
    if step == num_iterations:
        break
    for _ in range(grad_accum_steps):
        assert x.shape == y.shape == (args.device_batch_size, args.max_seq_len)
        assert x.dtype == y.dtype == torch.int64
        is_label = y[:, :-1] >= 0
        assert torch.equal(y[:, :-1][is_label], x[:, 1:][is_label])
        assert y.min() >= -1
        rank.received(step, names_of(x), dataloader_state_dict["epoch"])
        x, y, dataloader_state_dict = next(train_loader)
    rank.reduce()
    # <
    epoch = "{epoch} pq: {pq_idx} rg: {rg_idx}".format(**dataloader_state_dict)
    # >
    print(f"step {step:05d}/{num_iterations:05d} | epoch: {epoch}")
    step += 1
