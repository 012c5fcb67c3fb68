"""``Packed(padded=True)``: batches by a token budget, each a matrix of documents of like lengths."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from infra import DeviceMesh
from streaming import DataLoader, DeviceMeshFetcher, Mixture, Packed, Schedule, SequenceSlice, StreamingDataset
from streaming.errors import ConfigError, OptionError
from tests.support.sets.data_sets import same_batch
from tests.support.sets.packed_sets import damaged, document_lengths, write

BUDGET = 256
NUM_DOCS = 300
NAMES = {"input_ids", "labels", "position_ids", "attention_mask"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("padded")
    write(target, num_docs=NUM_DOCS)
    return target


def packed_of(folder: Path, **options: Any) -> Packed:
    return Packed(StreamingDataset(folder, seed=3), BUDGET, padded=True, **options)


def loader_of(packed: Any, rank: int = 0, world: int = 1, size: int | None = None, **options: Any) -> DataLoader:
    mesh = DeviceMesh.from_sizes(dp_size=world, rank=rank)
    return DataLoader(packed, global_batch_size=size or world, device_mesh=mesh, last_batch="partial", **options)


def epoch_of(packed: Any, *where: int, **options: Any) -> list[Any]:
    with loader_of(packed, *where, **options) as loader:
        return list(loader)


def real_tokens(batch: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    return batch["input_ids"][batch["attention_mask"] == 1].numpy()


def all_tokens(batches: list[Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.sort(np.concatenate([real_tokens(batch) for batch in batches]))


def expected_rows(num_docs: int = NUM_DOCS) -> dict[str, list[list[int]]]:
    """Tokens of the pieces of each document, by key."""
    lengths = document_lengths(num_docs)
    begins = np.cumsum(lengths) - lengths + 1
    return {
        f"{number:06d}": [list(range(begin + at, begin + min(at + BUDGET, length))) for at in range(0, length, BUDGET)]
        for number, (begin, length) in enumerate(zip(begins.tolist(), lengths.tolist(), strict=True))
    }


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("mask", [None, "mask"])
@pytest.mark.parametrize("multiple", [1, 8])
def test_a_batch_is_a_matrix_of_whole_pieces_within_the_budget(
    folder: Path, *, shift: bool, mask: str | None, multiple: int
) -> None:
    packed = packed_of(folder, shift_labels=shift, mask_field=mask, multiple=multiple, pad_id=7)
    batches, expected, places = epoch_of(packed), expected_rows(), 0
    for batch in batches:
        shape = batch["input_ids"].shape
        places += shape.numel()
        assert shape.numel() <= BUDGET
        assert batch.keys() > NAMES
        assert all(batch[name].shape == shape and batch[name].dtype == torch.int64 for name in NAMES)
        assert (len(batch["__key__"]), len(batch["__url__"])) == (shape[0], shape[0])
        longest = 0
        for row, key in enumerate(batch["__key__"]):
            count = int(batch["attention_mask"][row].sum())
            tokens = batch["input_ids"][row].tolist()
            expected[key].remove(tokens[:count])
            assert set(tokens[count:]) <= {7}
            assert batch["attention_mask"][row].tolist() == [1] * count + [0] * (shape[1] - count)
            assert batch["position_ids"][row, :count].tolist() == list(range(count))
            labels = [-100] + [-100 if mask and token % 3 == 0 else token for token in tokens[1:count]]
            labels += [-100] * (shape[1] - count)
            assert batch["labels"][row].tolist() == ([*labels[1:], -100] if shift else labels)
            longest = max(longest, count)
        assert shape[1] == -(-longest // multiple) * multiple
        assert batch["num_tokens"] == batch["attention_mask"].sum()
        assert batch["num_labels"] == (batch["labels"] != -100).sum()
    assert not any(expected.values())  # each piece came, and once
    assert len(batches) == len(packed)
    assert packed.fill == packed.num_tokens / places
    assert packed.fill > 0.8


@pytest.mark.usefixtures("one_fork_server")
@pytest.mark.parametrize(("world", "workers"), [(1, 2), (2, 0), (4, 2)])
def test_global_batches_are_the_same_on_any_world(folder: Path, world: int, workers: int) -> None:
    packed = packed_of(folder)
    alone = epoch_of(packed, 0, 1, 4, collate_fn=list)
    ranks = [epoch_of(packed, rank, world, 4, collate_fn=list, num_workers=workers) for rank in range(world)]
    for number, packs in enumerate(alone):
        joined = [pack for rank in range(world) for pack in ranks[rank][number]]
        assert len(joined) == len(packs)
        assert all(same_batch(*both) for both in zip(joined, packs, strict=True))
    assert np.array_equal(all_tokens([pack for packs in alone for pack in packs]), np.arange(1, packed.num_tokens + 1))


def test_each_rank_gets_one_pack_of_a_global_batch(folder: Path) -> None:
    packed = packed_of(folder)
    listed = epoch_of(packed, 0, 1, 4, collate_fn=list)
    ranks = [epoch_of(packed, rank, 4) for rank in range(4)]
    for number, packs in enumerate(listed):
        got = [ranks[rank][number] for rank in range(4)]
        full = [batch for batch in got if len(batch["input_ids"])]
        assert all(same_batch(*both) for both in zip(full, packs, strict=True))
        for batch in got:  # of the last batch ranks may have none
            assert len(batch["__key__"]) == len(batch["input_ids"]) == len(batch["attention_mask"])


@pytest.mark.parametrize("world", [1, 2])
def test_a_resumed_run_goes_on_to_the_bit(folder: Path, world: int) -> None:
    packed = packed_of(folder)
    with loader_of(packed, 0, 1, 2, collate_fn=list) as loader:
        whole = [*loader, *loader]
    with loader_of(packed, 0, 1, 2, collate_fn=list) as loader:
        for _ in loader:
            pass
        for _, _batch in zip(range(5), loader, strict=False):
            pass
        state = loader.state_dict()
    done = len(whole) // 2 + 5
    options: dict[str, Any] = {"collate_fn": list} if world == 1 else {}
    found = []
    for rank in range(world):
        with loader_of(packed_of(folder), rank, world, 2, **options) as loader:
            loader.load_state_dict(state)
            found.append([batch if world == 1 else [batch] for batch in loader])
    for number, packs in enumerate(whole[done:]):
        joined = [pack for rank in range(world) for pack in found[rank][number] if len(pack["input_ids"])]
        assert all(same_batch(*both) for both in zip(joined, packs, strict=True))


def test_a_run_of_two_ranks_goes_on_with_one_pack_a_step(folder: Path) -> None:
    packed, before = packed_of(folder), []
    for rank in range(2):
        with loader_of(packed, rank, 2) as loader:
            before += [batch for _, batch in zip(range(7), loader, strict=False)]
            state = loader.state_dict()
    with loader_of(packed) as loader:
        loader.load_state_dict(state)
        tokens = all_tokens([*before, *loader])
    assert np.array_equal(tokens, np.arange(1, packed.num_tokens + 1))


@pytest.mark.parametrize("overlong", ["truncate", "drop"])
def test_longer_documents(folder: Path, overlong: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        packed = packed_of(folder, overlong=overlong)
    lengths = document_lengths(NUM_DOCS)
    kept = np.minimum(lengths, BUDGET) if overlong == "truncate" else np.where(lengths > BUDGET, 0, lengths)
    begins = np.cumsum(lengths) - lengths + 1
    wanted = np.concatenate([np.arange(begin, begin + count) for begin, count in zip(begins, kept, strict=True)])
    assert np.array_equal(all_tokens(epoch_of(packed)), wanted)
    assert f"packs of {BUDGET} tokens at most, padded, {packed.fill:.2%}".replace("%", " %") in caplog.text


def test_max_docs_bounds_the_rows(folder: Path) -> None:
    batches = epoch_of(packed_of(folder, max_docs=3))
    assert max(len(batch["input_ids"]) for batch in batches) == 3
    assert not {"cu_seqlens", "max_seqlen", "document_ids"} & batches[0].keys()


def test_a_mixture_of_padded_packs(folder: Path, tmp_path: Path) -> None:
    write(tmp_path, first=1_000_000, num_docs=100, seed=1)
    sets = {"web": packed_of(folder), "code": packed_of(tmp_path)}
    mix = Mixture(sets)
    batches = [batch for rank in range(2) for batch in epoch_of(mix, rank, 2)]
    web, code = sets["web"].num_tokens, sets["code"].num_tokens
    assert np.array_equal(all_tokens(batches), np.r_[1 : web + 1, 1_000_001 : 1_000_001 + code])
    for batch in batches:
        names = [("web", "code")[int(row[0] > 1_000_000)] for row in batch["input_ids"]]
        assert batch["__source__"] == names == [mix.names[number] for number in batch["source_ids"].tolist()]
    with pytest.raises(ConfigError, match="padded=True"):
        Mixture({"web": sets["web"], "code": Packed(StreamingDataset(tmp_path), BUDGET)})


@pytest.mark.usefixtures("one_fork_server")
@pytest.mark.parametrize("on_error", ["substitute", "skip"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_document_that_cannot_be_read_leaves_a_row_of_padding(
    folder: Path, tmp_path: Path, on_error: Any, workers: int
) -> None:
    key = f"{NUM_DOCS - 1:06d}"
    bad = StreamingDataset(damaged(folder, tmp_path / "bad", key), seed=3, on_error=on_error, max_bad_samples=0.5)
    whole = epoch_of(packed_of(folder))
    with loader_of(Packed(bad, BUDGET, padded=True, pad_id=7), num_workers=workers) as loader:
        batches = list(loader)
        lost = {one["key"] for one in loader.metrics()["bad"]}
    assert key in lost
    for batch, expected in zip(batches, whole, strict=True):
        gone = torch.tensor([name in lost for name in expected["__key__"]])
        assert batch["input_ids"].shape == expected["input_ids"].shape
        assert batch["__key__"] == ["" if name in lost else name for name in expected["__key__"]]
        assert torch.equal(batch["attention_mask"].any(1), ~gone)
        assert (batch["input_ids"][gone] == 7).all()
        assert (batch["labels"][gone] == -100).all()
        assert torch.equal(batch["labels"][~gone], expected["labels"][~gone])
        if on_error == "skip":
            assert torch.equal(batch["__valid__"], ~gone)


def test_padded_tails_and_ranks_without_a_pack(folder: Path) -> None:
    packed = packed_of(folder, multiple=4)
    world = len(packed) - 1  # the last batch has one pack, which the last rank gets
    mesh = DeviceMesh.from_sizes(dp_size=world, rank=0)
    with DataLoader(packed, batch_size=1, device_mesh=mesh, last_batch="partial") as loader:
        last = list(loader)[-1]
    assert all(last[name].shape == (0, 4) for name in NAMES)
    assert last["__key__"] == []
    with DataLoader(packed, batch_size=1, device_mesh=mesh, last_batch="partial", collate_fn=list) as loader:
        assert list(loader)[-1] == []
    with DataLoader(packed, batch_size=1, device_mesh=mesh, last_batch="pad") as loader:
        last = list(loader)[-1]
    assert last["__valid__"].tolist() == [False] * len(last["input_ids"])


def test_slices_of_the_sequence(folder: Path) -> None:
    packed = packed_of(folder, multiple=4)
    wanted = SequenceSlice(fields=("input_ids",), layout="zigzag", position_ids=None)
    parts = []
    for rank in range(2):
        mesh = DeviceMesh.from_sizes(dp_size=1, cp_size=2, rank=rank)
        with DataLoader(packed, 1, device_mesh=mesh, sequence=wanted, last_batch="partial") as loader:
            parts.append([batch["input_ids"] for batch in loader])
    for first, second, batch in zip(*parts, epoch_of(packed), strict=True):
        quarter = batch["input_ids"].shape[1] // 4
        assert torch.equal(torch.cat([first[:, :quarter], second, first[:, quarter:]], 1), batch["input_ids"])


def test_packs_by_number_and_of_a_fetcher(folder: Path) -> None:
    packed = packed_of(folder)
    delivered = {tuple(batch["__key__"]): batch for batch in epoch_of(packed)}
    shown = {tuple(pack["__key__"]): pack for pack in map(packed.__getitem__, range(len(packed)))}
    assert shown.keys() == delivered.keys()
    assert all(same_batch(shown[keys], batch) for keys, batch in delivered.items())
    with DeviceMeshFetcher(packed, 3, device_mesh=DeviceMesh.from_sizes(dp_size=1, rank=0)) as fetcher:
        packs = next(iter(fetcher))
    assert [tuple(pack["__key__"]) in delivered for pack in packs] == [True] * 3


def test_what_cannot_be_is_refused_with_the_cure(folder: Path) -> None:
    packed = packed_of(folder)
    with pytest.raises(ConfigError, match=r"batch_size: .* length=256.* expected batch_size=1.* collate_fn=list"):
        loader_of(packed, size=4)
    with pytest.raises(ConfigError, match="batch_size"):
        DataLoader(packed, global_batch_size=Schedule.steps({0: 1, 40: 2}))
    with pytest.raises(ConfigError, match=r"balance='local' .* leave out balance"):
        loader_of(packed, balance="local")
    with pytest.raises(ConfigError, match=r"labels_across=True .* leave one"):
        packed_of(folder, labels_across=True)
    with pytest.raises(ConfigError, match="padded: expected True or False"):
        Packed(StreamingDataset(folder), BUDGET, padded=1)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"write length=…; with padded=True"):
        Packed(StreamingDataset(folder), BUDGET, max_tokens=4096)  # type: ignore[call-arg]
    with loader_of(packed, 0, 2) as loader, pytest.raises(ConfigError, match="collate_fn=list"):
        loader.remesh(0, 1, at=0)
    with loader_of(packed, 0, 2, collate_fn=list) as loader:
        loader.remesh(0, 1, at=0)
        assert len(next(iter(loader))) == 2
