"""Packs under context parallelism: slices of rows and of documents, as ring attention expects them, with one loss."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from infra import DeviceMesh
from streaming import DataLoader, Packed, SequenceSlice, StreamingDataset
from streaming.errors import ConfigError
from tests.support.programs.small_gpt import LENGTH, VOCAB_SIZE, Gpt, dense
from tests.support.sets.packed_sets import write

ROWS, CP = 8, 2
CUT = ("input_ids", "labels", "position_ids", "document_ids")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("documents")
    write(target, num_docs=120)
    return target


def loader_of(
    folder: Path, *, packed: dict[str, Any] | None = None, cp: int = 1, rank: int = 0, size: int = ROWS, **options: Any
) -> Any:
    given = {"multiple": 2 * CP, "shift_labels": True} | (packed or {})
    mesh = DeviceMesh.from_sizes(dp_size=1, cp_size=cp, rank=rank, environ={})
    return DataLoader(Packed(StreamingDataset(folder), LENGTH, **given), size, device_mesh=mesh, **options)


def first_of(folder: Path, **options: Any) -> dict[str, Any]:
    with loader_of(folder, **options) as loader:
        batch: dict[str, Any] = next(iter(loader))
    return batch


def slices_of(folder: Path, **sliced: Any) -> list[dict[str, Any]]:
    """The first batch, as each peer gets it."""
    wanted = SequenceSlice(fields=CUT, **sliced)
    return [first_of(folder, cp=CP, rank=rank, sequence=wanted) for rank in range(CP)]


def known_to_kernels(borders: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """What a kernel knows of a peer's tokens by ``cu_seqlens`` alone: the document of each, and the place in it."""
    documents, places = [], []
    for number, size in enumerate(borders.diff().tolist()):
        part = size // (2 * CP)
        held = [*range(rank * part, (rank + 1) * part), *range((2 * CP - 1 - rank) * part, (2 * CP - rank) * part)]
        documents += [number] * len(held)
        places += held
    return torch.tensor(documents), torch.tensor(places)


def losses(model: Gpt, peers: list[dict[str, Any]]) -> Tensor:
    """The loss of each peer, by ring attention: queries of its own tokens, keys of all, masks by ``cu_seqlens``."""
    known = [known_to_kernels(peer["cu_seqlens"], rank) for rank, peer in enumerate(peers)]
    documents, places = (torch.cat(one) for one in zip(*known, strict=True))
    embedded = [
        model.tokens(peer["input_ids"].flatten() % VOCAB_SIZE) + model.places(peer["position_ids"].flatten())
        for peer in peers
    ]
    heads = [model.qkv(x).unflatten(-1, (3, 2, -1)).permute(1, 2, 0, 3) for x in embedded]
    keys, values = (torch.cat([one[kind] for one in heads], dim=1) for kind in (1, 2))
    found = []
    for peer, x, (queries, _, _), (document, place) in zip(peers, embedded, heads, known, strict=True):
        mask = (document[:, None] == documents) & (place[:, None] >= places)
        attended = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        logits = model.head(x + attended.transpose(0, 1).flatten(1))
        labels = peer["labels"].flatten()
        labels = labels.where(labels < 0, labels % VOCAB_SIZE)
        found.append(functional.cross_entropy(logits, labels, reduction="sum") / peer["num_labels"])
    return torch.stack(found)


def test_loss_and_gradients_of_two_peers_are_those_of_one(folder: Path) -> None:
    whole = first_of(folder)
    peers = slices_of(folder, layout="zigzag", borders="cu_seqlens")
    for rank, peer in enumerate(peers):
        assert all(peer[name].shape == (ROWS, LENGTH // CP) for name in CUT)
        for name in ("cu_seqlens", "max_seqlen", "num_tokens", "num_labels", "__key__"):
            assert torch.equal(peer[name], whole[name]) if name == "cu_seqlens" else peer[name] == whole[name]
        # Rotary embeddings go by position_ids, kernels by cu_seqlens: they say the same.
        real = peer["document_ids"].flatten() >= 0
        assert torch.equal(peer["position_ids"].flatten()[real], known_to_kernels(whole["cu_seqlens"], rank)[1][real])
    torch.manual_seed(0)
    one, two = Gpt(), Gpt()
    two.load_state_dict(one.state_dict())
    tokens, labels = whole["input_ids"] % VOCAB_SIZE, whole["labels"]
    logits = one(tokens, whole["position_ids"], dense(whole["document_ids"], whole["cu_seqlens"]))
    labels = labels.where(labels < 0, labels % VOCAB_SIZE)
    alone = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / whole["num_labels"]
    together = losses(two, peers).sum()
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=0)
    alone.backward()
    together.backward()
    for mine, other in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-9, atol=1e-12)


def places_of(peers: list[dict[str, Any]], whole: dict[str, Any]) -> Tensor:
    """Which places of its row each peer has, [rows, peers after each other]."""
    place_of = {int(token): place for row in whole["input_ids"] for place, token in enumerate(row) if token}
    held = torch.cat([peer["input_ids"] for peer in peers], dim=1)
    return torch.tensor([[place_of.get(int(token), -1) for token in row] for row in held])


def test_zigzag_of_rows_is_what_context_parallelism_of_torch_cuts(folder: Path) -> None:
    """Its load balancer says the order of all places of a row, those of the first peer first."""
    torchs = pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._load_balancer")
    whole = first_of(folder)
    order = torchs._HeadTailLoadBalancer(LENGTH, CP, "cpu")._generate_indices()
    theirs = order.expand(ROWS, LENGTH).unflatten(1, (CP, -1)).sort(dim=2).values
    ours = places_of(slices_of(folder, layout="zigzag"), whole).unflatten(1, (CP, -1))
    known = ours >= 0  # padding has no token that would tell its place
    assert torch.equal(ours[known], theirs[known])


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_places_in_the_row_are_added_where_asked_for(folder: Path, layout: Any) -> None:
    whole = first_of(folder)
    for peer in slices_of(folder, layout=layout, borders="cu_seqlens", position_ids="place"):
        assert all(torch.equal(peer[name], whole[name].gather(1, peer["place"])) for name in CUT)


def test_shapes_that_are_fixed_and_batches_without_rows(folder: Path) -> None:
    wanted = SequenceSlice(fields=CUT, layout="zigzag", borders="cu_seqlens")
    packed = Packed(StreamingDataset(folder), LENGTH, multiple=4, shift_labels=True, max_docs=9)
    mesh = DeviceMesh.from_sizes(dp_size=2, cp_size=CP, rank=0, environ={})
    size = len(packed) - 1  # the last batch has one row, which the other rank has
    options: dict[str, Any] = {"global_batch_size": size, "last_batch": "partial", "sequence": wanted}
    with DataLoader(packed, device_mesh=mesh, **options) as loader:
        whole, last = loader
    assert whole["input_ids"].shape == (size // 2, LENGTH // CP)
    assert whole["cu_seqlens"].shape == (size // 2 * 10 + 1,)
    assert last["labels"].shape == (0, LENGTH // CP)


def test_what_cannot_be_cut_is_refused_with_the_cure(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    by_document: dict[str, Any] = {"fields": CUT, "layout": "zigzag", "borders": "cu_seqlens"}
    with pytest.raises(ConfigError, match=r"multiple of 4, got multiple=2; write Packed\(…, multiple=4\)"):
        loader_of(folder, cp=CP, sequence=SequenceSlice(**by_document), packed={"multiple": 2})
    with pytest.raises(ConfigError, match=r"padded=True\): each row is one document.*leave borders out"):
        loader_of(folder, cp=CP, sequence=SequenceSlice(**by_document), packed={"padded": True}, size=1)
    with pytest.raises(ConfigError, match=r"position_ids='position_ids' names an entry to add.*name it in fields"):
        first_of(folder, cp=CP, sequence=SequenceSlice(fields=("input_ids",), position_ids="position_ids"))
    with pytest.raises(ConfigError, match=r"borders='tok': .*lie within its rows|batch entry 'tok' is missing"):
        first_of(folder, cp=CP, sequence=SequenceSlice(fields=CUT, borders="tok"))
    with pytest.raises(ConfigError, match="borders: expected the name of an entry"):
        SequenceSlice(fields=CUT, dim=2, borders="cu_seqlens")
    assert "labels are sliced unchanged" not in caplog.text
    with caplog.at_level(logging.WARNING):
        loader_of(folder, cp=CP, sequence=SequenceSlice(fields=CUT), packed={"shift_labels": False}).close()
    assert "labels are sliced unchanged" in caplog.text
    assert "write Packed(…, shift_labels=True)" in caplog.text
