"""A forward pass of packs gives each document the loss that it has alone: with masks made of ``document_ids``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from streaming import DataLoader, Packed, StreamingDataset
from tests.support.programs.small_gpt import LENGTH, ROWS, VOCAB_SIZE, Attention, Gpt, dense
from tests.support.sets.packed_sets import write


def flex(documents: Tensor, _: Tensor) -> Attention:
    def same_document(row: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[row, query] == documents[row, key])

    mask = create_block_mask(same_document, len(documents), None, LENGTH, LENGTH, device="cpu")
    return lambda q, k, v: flex_attention(q, k, v, block_mask=mask)


def varlen(documents: Tensor, borders: Tensor) -> Attention:
    """As kernels for sequences of variable length read ``cu_seqlens``: slices of the batch laid flat."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [one.transpose(1, 2).flatten(0, 1).transpose(0, 1) for one in (q, k, v)]
        slices = zip(*(one.split(borders.diff().tolist(), dim=1) for one in parts), strict=True)
        found = [functional.scaled_dot_product_attention(*one, is_causal=True) for one in slices]
        return torch.cat(found, dim=1).unflatten(1, documents.shape).transpose(0, 1)

    return attend


@pytest.mark.thorough
@torch.no_grad()  # FlexAttention has no backward pass on CPUs
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("made", [dense, flex, varlen])
@pytest.mark.parametrize("shift", [False, True])
def test_each_document_has_the_loss_that_it_has_alone(
    tmp_path: Path, made: Callable[[Tensor, Tensor], Attention], shift: bool
) -> None:
    write(tmp_path, num_docs=40)
    torch.manual_seed(0)
    model = Gpt()
    with DataLoader(Packed(StreamingDataset(tmp_path), LENGTH, shift_labels=shift), batch_size=ROWS) as loader:
        batch = next(iter(loader))
    tokens, documents = batch["input_ids"] % VOCAB_SIZE, batch["document_ids"]
    labels = batch["labels"].where(batch["labels"] < 0, batch["labels"] % VOCAB_SIZE)
    logits = model(tokens, batch["position_ids"], made(documents, batch["cu_seqlens"]))
    if not shift:  # as models that shift inside: place t tells token t + 1
        logits, labels = logits[:, :-1], labels[:, 1:]
    losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    compared = 0
    pieces = [(row, number) for row in range(ROWS) for number in range(int(documents[row].max()) + 1)]
    for row, number in pieces:
        own = documents[row] == number
        alone = tokens[row, own][None]
        size = alone.shape[1]
        said = model(alone, torch.arange(size)[None], dense(torch.zeros(1, size), documents))
        expected = functional.cross_entropy(said[0, :-1], alone[0, 1:], reduction="sum")
        places = own[: losses.shape[1]] if shift else own[1:]  # with the shift inside, the loss of t + 1 lies at t
        torch.testing.assert_close(losses[row, places].sum(), expected, rtol=1e-9, atol=1e-12)
        compared += size - 1
    assert compared == batch["num_labels"] > 100
    assert documents.max() >= 3, "a pack of several documents"
