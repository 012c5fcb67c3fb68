"""A program with the contract of nanoGPT's train.py (karpathy/nanoGPT, 3adf61e of November 2025), and none of its code.

What a loader meets there:

- ``get_batch(split)`` returns X and Y on the device: int64 [batch_size, block_size], Y one token further.
- A step has ``gradient_accumulation_steps`` batches, which the number of ranks divides. The next one is fetched before
  the backward pass of the one in hand, so the loop always holds a batch that it has not trained on.
- Rank 0 alone estimates losses, with batches of its own, and then saves: at the top of a step, into one file.
- Nothing counts epochs: ``iter_num`` ends the run.
"""

from __future__ import annotations

import numpy as np
import torch

from tests.support.programs.recipes import Rank, names_of

rank = Rank()
out_dir, device, eval_interval, max_iters = rank.folder, "cpu", 1, rank.steps - 1
batch_size, block_size, gradient_accumulation_steps = 2, 64, 12
assert gradient_accumulation_steps % rank.world_size == 0
gradient_accumulation_steps //= rank.world_size
tokens_per_iter = gradient_accumulation_steps * rank.world_size * batch_size * block_size
dice = np.random.default_rng(rank.rank)


def get_batch(split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Random windows of one long row of tokens."""
    tokens = np.arange(10_000 if split == "train" else 1_000)
    begins = dice.integers(0, len(tokens) - block_size, batch_size)
    x, y = (np.stack([tokens[at : at + block_size] for at in begins + shift]) for shift in (0, 1))
    return torch.from_numpy(x).to(device), torch.from_numpy(y).to(device)


# <
# >

iter_num, checkpoint_path = 0, out_dir / "ckpt.pt"
init_from = "resume" if checkpoint_path.exists() else "scratch"
if init_from == "resume":
    checkpoint = torch.load(checkpoint_path, map_location=device)
    iter_num = checkpoint["iter_num"]
    # <
    # >
checkpoint = None

# <
X, Y = get_batch("train")
# >
while iter_num <= max_iters:
    if iter_num % eval_interval == 0 and rank.rank == 0:
        for split in ("train", "val"):
            get_batch(split)
        if iter_num > 0:
            checkpoint = {"iter_num": iter_num}
            # <
            # >
            torch.save(checkpoint, checkpoint_path)
    for _ in range(gradient_accumulation_steps):
        assert X.shape == Y.shape == (batch_size, block_size)
        assert X.dtype == Y.dtype == torch.int64
        is_label = Y[:, :-1] >= 0
        assert torch.equal(Y[:, :-1][is_label], X[:, 1:][is_label])
        assert Y.min() >= -1, "what its loss ignores is -1"
        rank.received(iter_num, names_of(X))
        # <
        X, Y = get_batch("train")
        # >
    rank.reduce()
    iter_num += 1
