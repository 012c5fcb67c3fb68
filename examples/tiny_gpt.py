"""Hold the model of the examples on text: a decoder of two blocks over packs, and one step of its training."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Attention and a feed-forward net, each after a norm and around a residual."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Map [B, T, width] to the same shape; ``mask`` is bool [B, 1, T, T]."""
        parts = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        heads = functional.scaled_dot_product_attention(*parts, attn_mask=mask)
        x = x + self.out(heads.transpose(1, 2).flatten(-2))
        return x + self.feed(self.norms[1](x))


class GPT(nn.Module):
    """A decoder of two blocks. Double precision: sums in another order give the same digits."""

    def __init__(self, vocab_size: int, length: int, width: int = 32) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab_size, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, 2), Block(width, 2)])
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocab_size))
        self.double()

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """Return the loss of each pack, summed over its labels: [B]. A token sees its own document alone."""
        ids, documents = batch["input_ids"], batch["document_ids"]
        causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        mask = (documents[:, :, None] == documents[:, None, :]) & causal
        x = self.tokens(ids) + self.places(batch["position_ids"])
        for block in self.blocks:
            x = block(x, mask[:, None])
        logits = self.head(x).transpose(1, 2)  # [B, vocabulary, T]
        return functional.cross_entropy(logits, batch["labels"], ignore_index=-100, reduction="none").sum(dim=1)


def train_step(model: GPT, optimizer: torch.optim.Optimizer, batch: dict[str, Any], num_sources: int = 1) -> Tensor:
    """Take a step by the mean over all labels of all ranks, whatever number of them each rank has.

    Returns:
        [2, num_sources]: what each source adds to that mean, and its share of the labels. Divided, its own mean loss.
    """
    losses = model(batch)
    num_labels = (batch["labels"] != -100).sum(dim=1)
    sources = batch.get("source_ids", torch.zeros_like(num_labels))
    totals = torch.zeros(2, num_sources, dtype=torch.float64)
    totals.index_add_(1, sources, torch.stack([losses.detach(), num_labels.double()]))
    if dist.is_initialized():
        dist.all_reduce(totals)
    optimizer.zero_grad()
    (losses.sum() / totals[1].sum()).backward()
    if dist.is_initialized():
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
    optimizer.step()
    return totals / totals[1].sum()
