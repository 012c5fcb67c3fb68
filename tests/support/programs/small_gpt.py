"""A language model of one block, for packs."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

ROWS, LENGTH, HEADS, WIDTH, VOCAB_SIZE = 6, 64, 2, 16, 97
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Gpt(nn.Module):
    """One block; double precision, so that what leaks from another document is far above rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB_SIZE, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCAB_SIZE)
        self.double()

    def forward(self, tokens: Tensor, places: Tensor, attention: Attention) -> Tensor:
        x = self.tokens(tokens) + self.places(places)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.head(x + attention(q, k, v).transpose(1, 2).flatten(-2))


def dense(documents: Tensor, _: Tensor) -> Attention:
    mask = (documents[:, :, None] == documents[:, None, :]).tril()
    return lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
